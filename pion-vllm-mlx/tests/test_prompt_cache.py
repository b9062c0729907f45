"""PionPromptCache against a real server, with a tiny model."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion.client import PionClient
from pion.client.errors import ServerError
from pion_vllm_mlx import PionPromptCache, claims, transfer
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import BLOCK_TOKENS, token_ids
from pion_vllm_mlx.testing import greedy, make_tiny_model, random_tokens, same_bits


@pytest.fixture
def client(server):
    with PionClient(port=server.port) as connected:
        yield connected


def cold(model, ids):
    return prefill(model, token_ids(ids))


def test_the_first_call_stores_and_the_second_fetches(connect, model):
    ids = random_tokens(50, seed=100)
    writer, reader = connect(model), connect(model)
    computed, fetched = writer.get_or_prefill(ids), reader.get_or_prefill(ids)
    assert same_bits(computed, cold(model, ids))
    assert same_bits(computed, fetched)
    assert writer.stats() | {"fetch_ms_total": 0, "store_ms_total": 0, "prefill_ms_total": 0} == {
        "hits": 0, "partial_hits": 0, "misses": 1, "hit_rate": 0.0, "tokens_prefilled": 50, "tokens_restored": 0,
        "bytes_fetched": 0, "bytes_stored": 50 * 32 * 4 * 4, "stored": 1, "not_stored": 0, "waited": 0, "mismatches": 0,
        "fallbacks": 0, "fetch_ms_total": 0, "store_ms_total": 0, "prefill_ms_total": 0,
    }  # fmt: skip
    stats = reader.stats()
    assert (stats["hits"], stats["misses"], stats["hit_rate"]) == (1, 0, 1.0)
    assert (stats["tokens_restored"], stats["tokens_prefilled"], stats["stored"]) == (50, 0, 0)
    assert stats["bytes_fetched"] == 50 * 32 * 4 * 4


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 255, 256, 257])
def test_every_length_holds_exactly_its_tokens(connect, model, length):
    ids = random_tokens(length, seed=200 + length)
    for pc in (connect(model), connect(model)):
        caches = pc.get_or_prefill(ids)
        assert [cache.offset for cache in caches] == [length, length]
        assert same_bits(caches, cold(model, ids))
    assert pc.stats()["hits"] == 1


def test_no_tokens_are_refused(connect, model):
    pc = connect(model)
    for call in (pc.get_or_prefill, pc.prepare_prompt):
        with pytest.raises(ValueError, match="token id"):
            call([])


# prepare_prompt: fault classes 1 and 3


@pytest.mark.parametrize("ask", ["same", "longer", "beginning", "other"])
def test_what_was_matched_and_the_rest_are_the_prompt(connect, model, ask):
    stored = random_tokens(100, seed=300)
    connect(model).get_or_prefill(stored)
    prompt = {
        "same": stored,
        "longer": stored + random_tokens(3, seed=301),
        "beginning": stored[:40] + random_tokens(3, seed=302),
        "other": random_tokens(3, seed=303),
    }[ask]
    matched = {"same": 96, "longer": 96, "beginning": 32, "other": 0}[ask]
    pc = connect(model)
    caches, rest = pc.prepare_prompt(prompt)
    assert prompt[matched:] == rest
    assert [cache.offset for cache in caches] == [matched, matched]
    assert pc.stats()["tokens_restored"] == matched
    if matched:
        # Row i is the row of token i: the same as a prefill of the first tokens of what was stored.
        whole = cold(model, stored)
        for have, want in zip(caches, whole, strict=True):
            assert mx.array_equal(have.keys[..., :matched, :], want.keys[..., :matched, :])
            assert mx.array_equal(have.values[..., :matched, :], want.values[..., :matched, :])


@pytest.mark.parametrize("length", [1, 2, 16, 17, 32, 33, 80, 81, 200])
def test_the_identical_prompt_twice_leaves_a_token_to_evaluate(connect, model, length):
    ids = random_tokens(length, seed=400 + length)
    answers = []
    for _ in range(3):
        caches, rest = connect(model).prepare_prompt(ids)
        assert rest
        assert caches[0].offset + len(rest) == length
        answers.append(greedy(model, caches, rest, 8))
    assert answers[0] == answers[1] == answers[2] == greedy(model, make_prompt_cache(model), ids, 8)


def test_a_prompt_that_begins_a_stored_one(connect, model):
    stored = random_tokens(160, seed=500)
    connect(model).prepare_prompt(stored)
    for length in (159, 144, 17, 16, 1):
        caches, rest = connect(model).prepare_prompt(stored[:length])
        assert caches[0].offset == (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert caches[0].offset + len(rest) == length
        assert greedy(model, caches, rest, 5) == greedy(model, make_prompt_cache(model), stored[:length], 5)


def test_conversations_are_chains_of_segments(connect, model, client):
    first = random_tokens(101, seed=6000)
    second = first + random_tokens(100, seed=6010)
    third = second + random_tokens(100, seed=6020)
    writer = connect(model)
    for prompt in (first, second, third):
        writer.prepare_prompt(prompt)
    assert writer.stats()["tokens_prefilled"] == 288
    leaf = writer.namespace(third[:288])
    assert [(s.offset, s.tokens) for s in client.prefix_chain(leaf)] == [(0, 96), (96, 96), (192, 96)]
    caches, rest = connect(model).prepare_prompt(third)
    assert (caches[0].offset, len(rest)) == (288, 13)
    # A fork in the middle of a segment.
    fork = second[:150] + random_tokens(100, seed=6030)
    caches, rest = connect(model).prepare_prompt(fork)
    assert caches[0].offset == 240
    name = writer.namespace(fork[:240])
    assert [(s.offset, s.tokens) for s in client.prefix_chain(name)] == [(0, 96), (96, 96), (144, 96)]
    again, _ = connect(model).prepare_prompt(fork)
    assert same_bits(caches, again)
    assert greedy(model, caches, rest, 8) == greedy(model, make_prompt_cache(model), fork, 8)


def test_short_continuations_are_not_stored(connect, model):
    stored = random_tokens(96, seed=650)
    connect(model).get_or_prefill(stored)
    pc = connect(model)
    caches, rest = pc.prepare_prompt(stored + random_tokens(40, seed=651))
    assert (caches[0].offset, len(rest)) == (96, 40)
    assert pc.stats()["stored"] == pc.stats()["tokens_prefilled"] == 0


def test_without_an_exact_hit_only_the_rest_is_computed(connect, model, client):
    base = random_tokens(96, seed=700)
    connect(model).get_or_prefill(base)
    longer = base + random_tokens(50, seed=701)
    pc = connect(model)
    caches = pc.get_or_prefill(longer)
    assert pc.stats()["tokens_prefilled"] == 50
    assert pc.stats()["partial_hits"] == 1
    assert caches[0].offset == 146
    assert [(s.offset, s.tokens) for s in client.prefix_chain(pc.namespace(longer))] == [(0, 96), (96, 50)]
    assert same_bits(connect(model).get_or_prefill(longer), caches)


# Names of one's own


def test_a_name_of_ones_own_is_stored_whole(connect, model, client):
    ids = random_tokens(100, seed=800)
    pc = connect(model)
    pc.get_or_prefill(ids)
    ns = pc.make_namespace("tiny", "native", 800)
    pc.get_or_prefill(ids, namespace=ns)
    assert pc.lookup(ns)
    assert [(s.offset, s.tokens) for s in client.prefix_chain(ns)] == [(0, 100)]
    assert pc.drop(ns) == 1
    assert not pc.lookup(ns)
    assert pc.drop(ns) == 0


def test_names_are_bytes_or_text(connect, model):
    ids = random_tokens(20, seed=810)
    pc = connect(model)
    for name in ("a|b: c\n", b"\x00\xff\r\n name", "ü" * 100):
        pc.get_or_prefill(ids, namespace=name)
        assert pc.lookup(name)


@pytest.mark.parametrize("other", ["tokens", "longer", "model", "format"])
def test_something_else_under_the_name_is_neither_used_nor_overwritten(connect, model, other, caplog):
    ids = random_tokens(40, seed=820)
    ns = f"taken by {other}"
    connect(model).get_or_prefill(ids, namespace=ns)
    asked = {"tokens": random_tokens(40, seed=821), "longer": [*ids, 1]}.get(other, ids)
    second = make_tiny_model(1) if other == "model" else model
    pc = connect(second, vquant="fp16" if other == "format" else "native")
    assert same_bits(pc.get_or_prefill(asked, namespace=ns), cold(second, asked))
    assert pc.stats()["mismatches"] == pc.stats()["not_stored"] == 1
    assert "something else" in caplog.text
    first = connect(model)
    assert same_bits(first.get_or_prefill(ids, namespace=ns), cold(model, ids))
    assert first.stats()["hits"] == 1


def test_the_warning_names_causes_and_remedies(connect, model, caplog):
    connect(model).get_or_prefill(random_tokens(40, seed=822), namespace="warned")
    connect(model).get_or_prefill(random_tokens(40, seed=823), namespace="warned")
    for word in ("tokenizer", "adapter_path", "vquant", "media", "same arguments", "another name"):
        assert word in caplog.text


def replace_after_fetch(monkeypatch, replace):
    """Another client acts between META and FETCH, once."""
    fetch, todo = transfer.fetch, [replace]

    def hooked(*args):
        if todo:
            todo.pop()()
        return fetch(*args)

    monkeypatch.setattr(transfer, "fetch", hooked)


def test_a_name_that_is_replaced_while_it_is_fetched_is_not_used(connect, model, monkeypatch):
    ids, others = random_tokens(40, seed=826), random_tokens(40, seed=827)
    other = connect(model)
    other.get_or_prefill(ids, namespace="replaced")

    def replace():
        other.drop("replaced")
        other.get_or_prefill(others, namespace="replaced")

    replace_after_fetch(monkeypatch, replace)
    pc = connect(model)
    assert same_bits(pc.get_or_prefill(ids, namespace="replaced"), cold(model, ids))
    assert (pc.stats()["hits"], pc.stats()["tokens_restored"], pc.stats()["misses"]) == (0, 0, 1)
    assert same_bits(connect(model).get_or_prefill(others, namespace="replaced"), cold(model, others))


def test_a_matched_name_that_is_replaced_is_not_used_either(connect, model, monkeypatch):
    ids, others = random_tokens(100, seed=828), random_tokens(100, seed=829)
    other = connect(model)
    other.get_or_prefill(ids, namespace="replaced match")

    def replace():
        other.drop("replaced match")
        other.get_or_prefill(others, namespace="replaced match")

    replace_after_fetch(monkeypatch, replace)
    caches, rest = connect(model).prepare_prompt(ids)
    assert rest == ids[96:]
    assert same_bits(caches, cold(model, ids[:96]))


def test_a_hit_under_a_name_of_ones_own_is_counted_once(connect, model, client):
    ids = random_tokens(40, seed=8210)
    connect(model).get_or_prefill(ids, namespace="counted")
    client.stats_reset()
    connect(model).get_or_prefill(ids, namespace="counted")
    assert client.stats()["kvprefix_hits"] == 1
    assert client.stats()["kvprefix_tokens_served"] == 40


def test_what_continues_a_name_of_ones_own_is_stored_whole(connect, model, client):
    """That name may stand for something else tomorrow."""
    ids = random_tokens(96, seed=8211)
    longer = ids + random_tokens(100, seed=8212)
    pc = connect(model)
    exact = pc.get_or_prefill(ids, namespace="a beginning")
    caches = pc.get_or_prefill(longer)
    assert pc.stats()["tokens_prefilled"] == len(longer)
    assert [(s.offset, s.tokens) for s in client.prefix_chain(pc.namespace(longer))] == [(0, 196)]
    assert pc.drop("a beginning") == 1
    assert same_bits(connect(model).get_or_prefill(longer), caches)
    assert mx.array_equal(caches[0].keys[..., :96, :], exact[0].keys[..., :96, :])


def test_other_media_are_another_prefix(connect, model):
    ids = random_tokens(40, seed=8213)
    pc = connect(model)
    names = [pc.namespace(ids, media=media) for media in ((), [b"a"], [b"b"], [b"a", b"b"])]
    assert len(set(names)) == 4
    pc.get_or_prefill(ids, media=[b"a"])
    assert [pc.lookup(name) for name in names] == [False, True, False, False]
    assert pc.prepare_prompt(ids, media=[b"b"])[1] == ids
    assert pc.prepare_prompt(ids, media=[b"a"])[1] == ids[32:]


def test_the_beginning_of_what_is_under_the_name_is_used(connect, model):
    ids = random_tokens(40, seed=825)
    whole = connect(model).get_or_prefill(ids, namespace="longer than asked")
    pc = connect(model)
    caches = pc.get_or_prefill(ids[:33], namespace="longer than asked")
    assert [cache.offset for cache in caches] == [33, 33]
    assert pc.stats()["hits"] == 1
    for have, want in zip(caches, whole, strict=True):
        assert mx.array_equal(have.keys[..., :33, :], want.keys[..., :33, :])


def test_the_seeds_namespace():
    assert PionPromptCache.make_namespace("llama-3.2-1b-4bit", "fp16", "system") == "6e91e6fc7bf32a597f5ed66c4ea6fa59"
    named = PionPromptCache.make_namespace(model_id="m", tokenizer_hash="t", rope_theta=1e4, prompt_text="p")
    assert named == PionPromptCache.make_namespace("m", "t", 1e4, "p")
    assert len(named) == 32


# Formats


def test_fp16_halves_the_bytes_and_stays_close(connect, model):
    ids = random_tokens(64, seed=900)
    writer, reader = connect(model, vquant="fp16"), connect(model, vquant="fp16")
    exact, fetched = writer.get_or_prefill(ids), reader.get_or_prefill(ids)
    assert reader.stats()["hits"] == 1
    assert reader.stats()["bytes_fetched"] == 64 * 32 * 2 * 4
    for a, b in zip(exact, fetched, strict=True):
        assert b.keys.dtype == mx.float32
        rounded = a.keys[..., :64, :].astype(mx.float16).astype(mx.float32)
        assert mx.array_equal(b.keys[..., :64, :], rounded)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    "vquant",
    ["native", "fp32", "fp16", "bf16", "fp8", "int8", "turbo4", "turbo3", "turbo2", "mlx4g32", "mlx8g32:bf16"],
)
def test_every_format_for_every_element_type(connect, dtype, vquant):
    model = make_tiny_model(dtype=dtype)
    ids = random_tokens(33, seed=910)
    exact = connect(model, vquant=vquant).get_or_prefill(ids)
    reader = connect(model, vquant=vquant)
    fetched = reader.get_or_prefill(ids)
    assert reader.stats()["hits"] == 1
    tolerance = {"int8": 0.02, "mlx4g32": 0.2, "fp8": 0.07, "turbo4": 0.25, "turbo3": 0.5, "turbo2": 0.9}
    tolerance = tolerance.get(vquant, 0.01 if vquant != "mlx8g32:bf16" else 0.02)
    for a, b in zip(exact, fetched, strict=True):
        assert b.keys.dtype == b.values.dtype == dtype
        for x, y in ((a.keys, b.keys), (a.values, b.values)):
            x, y = (np.array(array[..., :33, :].astype(mx.float32)) for array in (x, y))
            assert np.abs(x - y).max() <= tolerance * np.abs(x).max()


def test_formats_do_not_share_names(connect):
    model = make_tiny_model(num_hidden_layers=4)
    ids = random_tokens(33, seed=920)
    names = {connect(model, vquant=vquant).namespace(ids) for vquant in ("native", "fp16", "int8")}
    names.add(connect(model, vquant="int8", boundary_protect=1).namespace(ids))
    assert len(names) == 4
    assert connect(model, vquant="fp32").namespace(ids) == connect(model).namespace(ids)


@pytest.mark.parametrize("vquant", ["int8", "fp8", "turbo4"])
def test_boundary_protection(connect, client, vquant):
    model = make_tiny_model(num_hidden_layers=6)
    ids = random_tokens(48, seed=930)
    options = {"vquant": vquant, "boundary_protect": 2}
    name = f"bp {vquant}"
    exact, fetched = (connect(model, **options).get_or_prefill(ids, name) for _ in range(2))
    schemas = [client.v_info(f"{name}{side}").schema for side in ("_pk", "_pv")]
    assert schemas == ["fp16@32*6", f"fp16@32*2,{vquant}@32*2,fp16@32*2"]
    for layer, (a, b) in enumerate(zip(exact, fetched, strict=True)):
        half = a.values[..., :48, :].astype(mx.float16).astype(mx.float32)
        assert mx.array_equal(b.values[..., :48, :], half) == (layer not in (2, 3))
        assert mx.array_equal(b.keys[..., :48, :], a.keys[..., :48, :].astype(mx.float16).astype(mx.float32))


@pytest.mark.parametrize("fallback", [True, False])
def test_a_format_that_cannot_work_is_refused_at_once(connect, model, fallback):
    with pytest.raises(ValueError, match="unknown format 'fp17'"):
        connect(model, vquant="fp17", fallback=fallback)
    narrow = make_tiny_model(hidden_size=48, num_attention_heads=4, num_key_value_heads=2)  # rows of 24
    with pytest.raises(ValueError, match="divisible by 32"):
        connect(narrow, vquant="mlx4g32", fallback=fallback)


@pytest.mark.parametrize("first", [mx.float16, mx.float32, mx.bfloat16])
@pytest.mark.parametrize("second", [mx.bfloat16, mx.float16])
def test_a_model_whose_type_changes_stores_its_own_bits(connect, first, second):
    """fp16 and bf16 have the same size, so a mix-up would go unnoticed."""
    model = make_tiny_model(dtype=first)
    pc = connect(model)
    model.set_dtype(second)
    ids = random_tokens(40, seed=950)
    stored = pc.get_or_prefill(ids)
    assert str(stored[0].keys.dtype) == str(second)
    reader = connect(model)
    assert same_bits(reader.get_or_prefill(ids), stored)
    assert same_bits(pc.get_or_prefill(ids), stored)
    pc.drop(pc.namespace(ids))


def test_caches_of_another_shape_than_announced_are_not_sent(connect, client):
    model = make_tiny_model(dtype=mx.float16)
    pc = connect(model)
    context = pc._context()
    ids = token_ids(random_tokens(40, seed=960))
    model.set_dtype(mx.bfloat16)
    with pytest.raises(transfer.ChangedModelError, match="bf16"):
        transfer.store(client, "not registered", context, cold(model, ids), 0)

    def progress(done, total):
        if done == 0:
            model.set_dtype(mx.float16)

    with pytest.raises(transfer.ChangedModelError):
        pc.get_or_prefill(ids, progress=progress)
    model.set_dtype(mx.bfloat16)
    assert not pc.lookup(pc.namespace(ids))


# Aliasing: fault class 11


def test_what_is_stored_does_not_follow_the_live_cache(connect, model):
    ids = random_tokens(40, seed=1000)
    live = connect(model).get_or_prefill(ids)
    for cache in live:
        np.asarray(memoryview(cache.keys))[...] = 7.0
    greedy(model, live, [5], 3)
    assert same_bits(connect(model).get_or_prefill(ids), cold(model, ids))


def test_two_fetches_share_nothing(connect, model):
    ids = random_tokens(40, seed=1010)
    pc = connect(model)
    pc.get_or_prefill(ids)
    first, second = pc.get_or_prefill(ids), pc.get_or_prefill(ids)
    for cache in first:
        np.asarray(memoryview(cache.keys))[...] = 7.0
        np.asarray(memoryview(cache.values))[...] = 7.0
    assert same_bits(second, cold(model, ids))
    assert same_bits(pc.get_or_prefill(ids), cold(model, ids))


# The rest


def test_the_prefill_time_becomes_the_receipt(connect, model, client):
    client.stats_reset()
    ids = random_tokens(64, seed=1100)
    writer = connect(model)
    writer.get_or_prefill(ids)
    connect(model).get_or_prefill(ids)
    stats = client.stats()
    assert stats["kvprefix_hits"] == stats["kvprefix_hits_measured"] == 1
    assert stats["kvprefix_misses"] == 1
    assert stats["kvprefix_tokens_served"] == 64
    measured_s = writer.stats()["prefill_ms_total"] / 1000
    assert stats["prefill_seconds_avoided_measured"] == pytest.approx(measured_s, rel=0.01)


def test_a_label_for_people(connect, model, client):
    class Words:
        def get_vocab(self):
            return {"a": 1}

        def decode(self, ids):
            return " ".join(f"w{i}" for i in ids)

    ids = random_tokens(30, seed=1110)
    pc = connect(model, tokenizer=Words())
    pc.get_or_prefill(ids)
    assert f'"w{ids[0]} w{ids[1]}'.encode() in client.prefix_meta(pc.namespace(ids))


@pytest.mark.parametrize("decode", [lambda ids: 1 / 0, lambda ids: "\ud83d"])
def test_a_tokenizer_that_cannot_decode_costs_nothing_but_the_label(connect, model, decode):
    tokenizer = type("Odd", (), {"get_vocab": lambda self: {"a": 2}, "decode": lambda self, ids: decode(ids)})()
    ids = random_tokens(30, seed=1111)
    pc = connect(model, tokenizer=tokenizer)
    pc.get_or_prefill(ids)
    assert pc.stats()["stored"] == 1
    assert same_bits(connect(model, tokenizer=tokenizer).get_or_prefill(ids), cold(model, ids))
    pc.drop(pc.namespace(ids))


def test_a_parent_that_went_away_is_no_error(connect, model, monkeypatch):
    base = random_tokens(96, seed=1130)
    longer = base + random_tokens(80, seed=1131)
    writer, pc = connect(model), connect(model)
    writer.get_or_prefill(base)
    register = claims.register

    def late(client, plan, **options):
        writer.drop(writer.namespace(base))
        return register(client, plan, **options)

    monkeypatch.setattr(claims, "register", late)
    assert pc.get_or_prefill(longer)[0].offset == len(longer)
    assert (pc.stats()["partial_hits"], pc.stats()["not_stored"], pc.stats()["fallbacks"]) == (1, 1, 0)


def test_dropping_what_others_continue_needs_cascade(connect, model):
    base = random_tokens(96, seed=1120)
    pc = connect(model)
    pc.get_or_prefill(base)
    pc.get_or_prefill(base + random_tokens(40, seed=1121))
    with pytest.raises(ServerError, match="CASCADE"):
        pc.drop(pc.namespace(base))
    assert pc.drop(pc.namespace(base), cascade=True) == 2
    assert pc.drop() == 0
