"""Stage 2 against a real server: what is warmed, what is asked, and what a generation survives."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pion.client import PionClient
from pion.client.errors import ServerError, TransportError
from pion.testing import ServerProcess
from pion_vllm_mlx import (
    PionPromptCache,
    SparseAuto,
    UnsupportedAttentionError,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)
from pion_vllm_mlx.attending import attention_session
from pion_vllm_mlx.families import small_model
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import token_ids
from pion_vllm_mlx.testing import attention64, greedy, make_tiny_model, random_tokens, same_bits
from pion_vllm_mlx.threads import release_at_thread_end

REST = random_tokens(5, seed=9201)
NO_INPROC = "PION_PROMPT_CACHE_NO_INPROC"


@pytest.fixture(autouse=True)
def patch():
    install_pion_attention_patch()
    yield
    uninstall_pion_attention_patch()


@pytest.fixture
def client(server):
    with PionClient(port=server.port) as connected:
        yield connected


def expected(model, ids, count=12):
    return greedy(model, prefill(model, token_ids(ids)), REST, count)


def stored(connect, model, seed, name=None, tokens=70, **options):
    """(ids, namespace, a prompt cache without the in-process lane) of a prefix that another process stored."""
    ids = random_tokens(tokens, seed=seed)
    writer = connect(model, stage2=True, **options)
    writer.get_or_prefill(ids, namespace=name)
    return ids, name or writer.namespace(ids), connect(model, stage2=True, inproc=False, **options)


# Warming and looking up


def test_get_or_prefill_makes_the_prefix_warm(connect, model, client):
    _, ns, pc = stored(connect, model, 9210)
    session = attention_session(ns)
    assert session == ns + "_attn"
    assert [client.attend_lookup(session, layer) for layer in range(3)] == ["warm", "warm", "missing"]
    assert pc.lookup(ns)


def test_a_hit_makes_it_warm_too(connect, model, client):
    ids = random_tokens(70, seed=9211)
    plain = connect(model)
    plain.get_or_prefill(ids)
    ns = plain.namespace(ids)
    pc = connect(model, stage2=True)
    assert plain.lookup(ns)
    assert not pc.lookup(ns)
    pc.get_or_prefill(ids)
    assert pc.lookup(ns)
    assert pc.stats()["hits"] == 1


def test_lookup_wants_both(connect, model, client):
    _, ns, pc = stored(connect, model, 9212)
    client.attend_drop(attention_session(ns), 1)
    assert not pc.lookup(ns)
    assert not pc.lookup("nothing of this name")


def test_without_stage2_nothing_is_warmed(connect, model, client):
    ids = random_tokens(70, seed=9213)
    pc = connect(model)
    pc.get_or_prefill(ids)
    assert client.attend_lookup(attention_session(pc.namespace(ids)), 0) == "missing"
    assert pc.cold_rehydrates_observed == 0
    assert "attend_calls" not in pc.stats()
    for question in (
        lambda: pc.attend_query("x", 0, np.zeros((2, 1, 16), np.float32)),
        lambda: pc.attend_query_fused("x", 0, None, None, None, None),
    ):
        with pytest.raises(ValueError, match="stage2=True"):
            question()


# Both lanes


@pytest.mark.parametrize("lane", ["resp", "binary", "auto"])
def test_the_wire_lane_gives_the_tokens_of_plain_mlx_lm(connect, model, lane):
    ids, ns, pc = stored(connect, model, 9220, lane=lane)
    caches = make_pion_prompt_cache(model, ns, pc, len(ids))
    assert greedy(model, caches, REST, 12) == expected(model, ids)
    assert pc.stats()["attend_calls"] == 2 * 12
    assert pc.cold_rehydrates_observed == 0


def test_the_in_process_lane_asks_nobody(connect, model):
    ids = random_tokens(70, seed=9221)
    pc = connect(model, stage2=True)
    pc.get_or_prefill(ids)
    for _ in range(2):
        caches = make_pion_prompt_cache(model, pc.namespace(ids), pc, len(ids))
        assert greedy(model, caches, REST, 12) == expected(model, ids)
    assert pc.stats()["attend_calls"] == 0


def test_what_the_process_holds_is_not_fetched_again(connect, model, client):
    ids = random_tokens(70, seed=9228)
    pc = connect(model, stage2=True)
    pc.get_or_prefill(ids)
    client.attend_drop(attention_session(pc.namespace(ids)))
    caches = pc.get_or_prefill(ids)
    assert same_bits(caches, prefill(model, token_ids(ids)))
    stats = pc.stats()
    assert (stats["hits"], stats["misses"], stats["bytes_fetched"]) == (1, 1, 0)
    assert pc.lookup(pc.namespace(ids))
    want = expected(model, ids)
    assert greedy(model, caches, REST, 12) == want
    assert greedy(model, pc.get_or_prefill(ids), REST, 12) == want
    # A server that has lost it gets it again.
    client.prefix_drop(pc.namespace(ids))
    pc.get_or_prefill(ids)
    assert pc.stats()["stored"] == 2
    assert pc.lookup(pc.namespace(ids))
    pc.get_or_prefill(ids, namespace="one's own, held")
    pc.get_or_prefill(ids, namespace="one's own, held")
    assert pc.stats()["bytes_fetched"] > 0


def test_layers_of_several_shapes_are_stored_and_not_warmed(connect):
    model = small_model("openelm")
    ids = random_tokens(70, seed=9229)
    pc = connect(model, stage2=True)
    pc.get_or_prefill(ids)
    caches = make_pion_prompt_cache(model, pc.namespace(ids), pc, len(ids))
    assert greedy(model, caches, REST, 5) == expected(model, ids, 5)
    wire = connect(model, stage2=True, inproc=False)
    wire.get_or_prefill(ids)
    with pytest.raises(UnsupportedAttentionError, match="several shapes"):
        make_pion_prompt_cache(model, pc.namespace(ids), wire, len(ids))


def test_a_model_that_cannot_be_split_is_refused_on_the_wire_and_served_in_process(connect):
    model = small_model("gemma2")
    ids = random_tokens(70, seed=9239)
    pc, wire = connect(model, stage2=True), connect(model, stage2=True, inproc=False)
    pc.get_or_prefill(ids)
    caches = make_pion_prompt_cache(model, pc.namespace(ids), pc, len(ids))
    assert greedy(model, caches, REST, 5) == expected(model, ids, 5)
    for _ in range(2):
        with pytest.raises(UnsupportedAttentionError, match="gemma2"):
            make_pion_prompt_cache(model, pc.namespace(ids), wire, len(ids))
    # The patch wouldn't see its calls, so nothing would be sparse.
    with pytest.raises(UnsupportedAttentionError, match="gemma2"):
        make_pion_prompt_cache(model, pc.namespace(ids), pc, len(ids), sparse=SparseAuto(8, 3))


def test_the_environment_forces_the_wire(connect, model, monkeypatch):
    ids = random_tokens(70, seed=9222)
    pc = connect(model, stage2=True)
    pc.get_or_prefill(ids)
    monkeypatch.setenv(NO_INPROC, "1")
    caches = make_pion_prompt_cache(model, pc.namespace(ids), pc, len(ids))
    assert greedy(model, caches, REST, 12) == expected(model, ids)
    assert pc.stats()["attend_calls"] == 2 * 12


@pytest.mark.parametrize("heads", [4, 1])
def test_other_numbers_of_heads(connect, heads):
    model = make_tiny_model(num_key_value_heads=heads)
    ids, ns, pc = stored(connect, model, 9223)
    assert greedy(model, make_pion_prompt_cache(model, ns, pc, len(ids)), REST, 12) == expected(model, ids)


def test_a_prefix_that_continues_another_is_attended_to_as_a_whole(connect, model):
    first = random_tokens(96, seed=9224)
    writer = connect(model, stage2=True)
    writer.get_or_prefill(first)
    ids = first + random_tokens(40, seed=9225)
    writer.get_or_prefill(ids)
    assert writer.stats()["partial_hits"] == 1
    pc = connect(model, stage2=True, inproc=False)
    caches = make_pion_prompt_cache(model, writer.namespace(ids), pc, len(ids))
    assert greedy(model, caches, REST, 12) == expected(model, ids)


@pytest.mark.parametrize("sparse", [SparseAuto(8, 3), (8, 3)])
def test_sparse_on_both_lanes_gives_the_same_tokens(connect, model, sparse):
    ids = random_tokens(70, seed=9226)
    pc, wire = connect(model, stage2=True), connect(model, stage2=True, inproc=False)
    pc.get_or_prefill(ids)
    ns = pc.namespace(ids)
    answers = [
        greedy(model, make_pion_prompt_cache(model, ns, each, len(ids), sparse=sparse), REST, 12) for each in (pc, wire)
    ]
    assert answers[0] == answers[1]
    assert wire.stats()["attend_calls"] == 2 * 12


def test_a_model_that_was_changed_does_not_get_the_old_rows(connect):
    model = make_tiny_model()
    ids = random_tokens(70, seed=9227)
    pc = connect(model, stage2=True)
    pc.get_or_prefill(ids, namespace="of the old weights")
    model.update(make_tiny_model(1).parameters())
    caches = make_pion_prompt_cache(model, "of the old weights", pc, len(ids))
    assert greedy(model, caches, REST, 12) == expected(model, ids)
    assert pc.stats()["attend_calls"] == 0


# Questions of one's own


def test_each_question_is_answered_as_in_float64(connect, model):
    ids, ns, pc = stored(connect, model, 9230)
    caches = prefill(model, token_ids(ids))
    keys, values = (np.array(array[0]) for array in caches[1].keys_and_values())
    rng = np.random.default_rng(0)
    q, one = (rng.normal(size=(2, m, 16)).astype(np.float32) for m in (3, 1))
    own = [rng.normal(size=(2, 4, 16)).astype(np.float32) for _ in range(2)]
    head_map = np.arange(2, dtype=np.uint32)
    want, lse = attention64(q, keys, values)
    output, total = pc.attend_query(ns, 1, q, lse=True)
    assert np.allclose(output, want, atol=1e-4)
    assert np.allclose(total, lse, atol=1e-4)
    assert np.allclose(pc.attend_query(ns, 1, q, window=9), attention64(q, keys[:, -9:], values[:, -9:])[0], atol=1e-4)
    both = [np.concatenate(pair, axis=1) for pair in zip((keys, values), own, strict=True)]
    fused = pc.attend_query_fused(ns, 1, one, *own, head_map)
    assert np.allclose(fused, attention64(one, *both)[0], atol=1e-4)
    rows = np.array([[3, 5, 60], [0, 69, 2]], np.uint32)
    picked = [np.stack([side[head, rows[head]] for head in range(2)]) for side in (keys, values)]
    sparse = pc.attend_query_sparse(ns, 1, one, rows, np.array([3, 3], np.uint32))
    assert np.allclose(sparse, attention64(one, *picked)[0], atol=1e-4)
    whole = pc.attend_query_sparse_auto(ns, 1, one, head_map, block=10, top=7)
    assert np.allclose(whole, attention64(one, keys, values)[0], atol=1e-4)
    whole = pc.attend_query_sparse_auto_fused(ns, 1, one, *own, head_map, block=10, top=7)
    assert np.allclose(whole, attention64(one, *both)[0], atol=1e-4)
    assert pc.stats()["attend_calls"] == 6


def test_a_refused_question_is_an_error_without_fallback_and_none_with_it(connect, model):
    _, ns, pc = stored(connect, model, 9231)
    q = np.zeros((2, 1, 16), np.float32)
    with pytest.raises(ServerError):
        pc.attend_query(ns, 7, q)
    lenient = connect(model, stage2=True, fallback=True)
    assert lenient.attend_query(ns, 7, q) is None
    assert lenient.stats()["fallbacks"] == 1
    assert pc.cold_rehydrates_observed == 0


# Cold, restarted, away, replaced


def test_cold_rows_are_warmed_and_the_question_is_asked_again(model):
    with ServerProcess("--kvcache", "--attend-slots", "2") as server, PionClient(port=server.port) as client:
        pc = PionPromptCache(model, port=server.port, stage2=True, inproc=False, fallback=False)
        ids, others = random_tokens(70, seed=9240), random_tokens(70, seed=9241)
        pc.get_or_prefill(ids)
        caches = make_pion_prompt_cache(model, pc.namespace(ids), pc, len(ids))
        pc.get_or_prefill(others)
        assert client.attend_lookup(attention_session(pc.namespace(ids)), 0) == "cold"
        assert greedy(model, caches, REST, 12) == expected(model, ids)
        assert pc.cold_rehydrates_observed == pc.stats()["cold_rehydrates"] == 1
        pc.close()


def test_a_restarted_server_is_warmed_again(model, tmp_path):
    ids = random_tokens(70, seed=9242)
    # A path stays ours while the server is away; a port may be somebody else's by then.
    path = str(tmp_path / "pion.sock")
    arguments = ("--kvcache", "--dir", str(tmp_path / "data"), "--unix", path)
    pc = PionPromptCache(model, unix=path, lane="resp", stage2=True, inproc=False, fallback=False)
    with ServerProcess(*arguments) as first:
        pc.get_or_prefill(ids)
        caches = make_pion_prompt_cache(model, pc.namespace(ids), pc, len(ids))
        tokens = greedy(model, caches, REST, 4)
        first.stop()
    with ServerProcess(*arguments), pc:
        assert not pc.lookup(pc.namespace(ids))
        tokens += greedy(model, caches, tokens[-1:], 8)
        assert tokens == expected(model, ids)
        assert pc.cold_rehydrates_observed == 1


@pytest.mark.parametrize("known", [True, False], ids=["computed here", "computed elsewhere"])
def test_a_server_that_goes_away_costs_no_token(model, known, caplog):
    ids = random_tokens(70, seed=9243)
    with ServerProcess("--kvcache") as server:
        writer = PionPromptCache(model, port=server.port, stage2=True, inproc=False)
        writer.get_or_prefill(ids)
        pc = writer if known else PionPromptCache(model, port=server.port, stage2=True)
        caches = make_pion_prompt_cache(model, writer.namespace(ids), pc, len(ids))
        tokens = greedy(model, caches, REST, 4)
        server.kill()
    tokens += greedy(model, caches, tokens[-1:], 8)
    assert tokens == expected(model, ids)
    assert "going on without the server" in caplog.text
    calls = pc.stats()["attend_calls"]
    if known:
        caches = make_pion_prompt_cache(model, writer.namespace(ids), pc, len(ids))
        assert greedy(model, caches, REST, 12) == expected(model, ids)
    else:
        with pytest.raises(LookupError, match="get_or_prefill"):
            make_pion_prompt_cache(model, writer.namespace(ids), pc, len(ids))
    assert pc.stats()["attend_calls"] == calls
    for each in (writer, pc):
        each.close()


def test_without_fallback_a_server_that_goes_away_is_an_error(model):
    ids = random_tokens(70, seed=9244)
    with ServerProcess("--kvcache") as server:
        pc = PionPromptCache(model, port=server.port, stage2=True, inproc=False, fallback=False)
        pc.get_or_prefill(ids)
        caches = make_pion_prompt_cache(model, pc.namespace(ids), pc, len(ids))
        greedy(model, caches, REST, 2)
        server.kill()
    with pytest.raises(TransportError):
        greedy(model, caches, REST, 2)
    pc.close()


def test_rows_that_cannot_be_warmed_any_more_are_fetched_or_computed(connect, model, client, caplog):
    """Attention's state and the prefix itself are dropped in the middle of a generation."""
    for drop_prefix in (False, True):
        ids, ns, pc = stored(connect, model, 9245 + drop_prefix, fallback=True)
        caches = make_pion_prompt_cache(model, ns, pc, len(ids))
        tokens = greedy(model, caches, REST, 4)
        if drop_prefix:
            client.prefix_drop(ns)
        client.attend_drop(attention_session(ns))
        tokens += greedy(model, caches, tokens[-1:], 8)
        assert tokens == expected(model, ids)
        assert pc.stats()["cold_rehydrates"] == (0 if drop_prefix else 1)


@pytest.mark.parametrize("warm", [True, False])
def test_a_name_of_ones_own_that_is_replaced_in_the_middle_gives_no_wrong_token(connect, model, client, warm):
    name = f"one's own, {warm}"
    ids, ns, pc = stored(connect, model, 9250, name=name, fallback=True)
    caches = make_pion_prompt_cache(model, ns, pc, len(ids))
    tokens = greedy(model, caches, REST, 4)
    client.prefix_drop(ns)
    connect(model, stage2=warm).get_or_prefill(random_tokens(70, seed=9251), namespace=name)
    tokens += greedy(model, caches, tokens[-1:], 8)
    assert tokens == expected(model, ids)


def test_what_somebody_else_stored_under_the_name_is_not_attended_to(connect, model):
    ids, ns, _ = stored(connect, make_tiny_model(1), 9252, name="of another model")
    pc = connect(model, stage2=True)
    with pytest.raises(LookupError, match="this model"):
        make_pion_prompt_cache(model, ns, pc, len(ids))
    pc.get_or_prefill(ids, namespace=ns)  # a mismatch: computed, and left alone
    for held in (True, False):
        if not held:
            pc._stage2.held.drop(ns)
        caches = make_pion_prompt_cache(model, ns, pc, len(ids))
        assert greedy(model, caches, REST, 12) == expected(model, ids)
    assert pc.stats()["attend_calls"] == 0


def test_a_name_of_ones_own_keeps_the_tokens_that_this_process_gave_it(connect, model):
    """The server has as many other tokens under it, computed by the same model."""
    _, ns, _ = stored(connect, model, 9253, name="one name, two texts")
    ids = random_tokens(70, seed=9254)
    pc = connect(model, stage2=True, inproc=False)
    pc.get_or_prefill(ids, namespace=ns)
    assert pc.stats()["mismatches"] == 1
    caches = make_pion_prompt_cache(model, ns, pc, len(ids))
    assert greedy(model, caches, REST, 12) == expected(model, ids)
    assert pc.stats()["attend_calls"] == 0
    pc.drop(ns)
    with pytest.raises(LookupError, match="get_or_prefill"):
        make_pion_prompt_cache(model, ns, pc, len(ids))


def test_rows_that_are_warm_since_the_name_stood_for_something_else_are_not_attended_to(connect, model, client):
    """As after an eviction: what was warm stays so, and the name is free for another prefix."""
    _, other, _ = stored(connect, model, 9255)
    ids, ns, pc = stored(connect, model, 9256, name="one's own, evicted")
    client.prefix_warm(other, 2, 16, sid=attention_session(ns))
    assert pc.lookup(ns)
    assert greedy(model, make_pion_prompt_cache(model, ns, pc, len(ids)), REST, 12) == expected(model, ids)


# Threads


def test_threads_generate_over_one_prefix(connect, model):
    ids, ns, pc = stored(connect, model, 9260)
    want = expected(model, ids)
    answers = []

    def work():
        release_at_thread_end()
        for _ in range(2):
            answers.append(greedy(model, make_pion_prompt_cache(model, ns, pc, len(ids)), REST, 12))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [want] * 8


# Arguments


def test_arguments_that_cannot_work_are_refused(connect, model):
    ids, ns, pc = stored(connect, model, 9270)
    with pytest.raises(ValueError, match="stage2=True"):
        make_pion_prompt_cache(model, ns, connect(model), len(ids))
    with pytest.raises(ValueError, match="made for"):
        make_pion_prompt_cache(make_tiny_model(), ns, pc, len(ids))
    for n in (len(ids) - 1, len(ids) + 1, 0):
        with pytest.raises(ValueError, match="holds 70 tokens"):
            make_pion_prompt_cache(model, ns, pc, n)
    with pytest.raises(LookupError, match="get_or_prefill"):
        make_pion_prompt_cache(model, "nothing of this name", pc, 3)
    uninstall_pion_attention_patch()
    with pytest.raises(RuntimeError, match="install_pion_attention_patch"):
        make_pion_prompt_cache(model, ns, pc, len(ids))


def test_caches_that_outlive_the_patch_are_an_error(connect, model):
    ids, ns, pc = stored(connect, model, 9271)
    caches = make_pion_prompt_cache(model, ns, pc, len(ids))
    uninstall_pion_attention_patch()
    with pytest.raises(RuntimeError, match="patch"):
        greedy(model, caches, REST, 1)
