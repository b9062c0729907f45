"""Stage 2 against a real server: a prefix that changes while it is attended to, and what is refused before asking."""

from __future__ import annotations

import socket

import mlx.core as mx
import numpy as np
import pytest

from pion.client import Layer, PionClient
from pion.client.errors import ServerError
from pion_vllm_mlx import (
    UnsupportedAttentionError,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)
from pion_vllm_mlx.attending import NOT_FOUND, attention_session
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import token_ids
from pion_vllm_mlx.testing import attention64, greedy, make_tiny_model, random_tokens

REST = random_tokens(5, seed=9301)
LANES = ["resp", "binary", "auto"]


@pytest.fixture(autouse=True)
def patch():
    install_pion_attention_patch()
    yield
    uninstall_pion_attention_patch()


@pytest.fixture
def client(server):
    with PionClient(port=server.port) as connected:
        yield connected


@pytest.fixture
def hook(monkeypatch):
    """Makes a method of every client call `before(*args)` and, once it has its answer, `after(*args)`.

    Not for the calls that these two make.
    """

    def make(name, before=lambda *_: None, after=lambda *_: None):
        original, inside = getattr(PionClient, name), []

        def hooked(self, *args, **options):
            if inside:
                return original(self, *args, **options)
            inside.append(True)
            try:
                before(*args, *options.values())
                answer = original(self, *args, **options)
                after(*args, *options.values())
            finally:
                inside.pop()
            return answer

        monkeypatch.setattr(PionClient, name, hooked)

    return make


def once(action, condition=lambda *args: True):
    """The action, for the first call that meets the condition."""
    left = [action]

    def called(*args):
        if left and condition(*args):
            left.pop()()

    return called


def logits(model, caches, *passes):
    return [np.array(model(mx.array(ids)[None], cache=caches)) for ids in passes]


def agree(have, want):
    return all(np.abs(a - b).max() < 2e-5 for a, b in zip(have, want, strict=True))


@pytest.fixture
def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def text(connect, model, client, request):
    """A name of one's own that stands for `ids`, until another process makes it stand for `others`."""

    class Text:
        name = request.node.name
        ids, others = (random_tokens(70, seed=seed) for seed in (9310, 9311))

        def put(self, ids):
            client.prefix_drop(self.name)
            connect(model, stage2=True).get_or_prefill(ids, namespace=self.name)

        def replace(self):
            self.put(self.others)

        def restore(self):
            self.put(self.ids)

    made = Text()
    made.restore()
    return made


@pytest.mark.parametrize("lane", LANES)
def test_a_prefix_that_is_replaced_between_two_layers_is_not_mixed_with_the_new_one(connect, model, text, hook, lane):
    pc = connect(model, stage2=True, inproc=False, fallback=True, lane=lane)
    caches = make_pion_prompt_cache(model, text.name, pc, len(text.ids))
    want = logits(model, prefill(model, token_ids(text.ids)), REST, [7], [8])
    have = logits(model, caches, REST)
    layers = []
    hook("attend_query", after=lambda session, layer, *_: layers.append(layer))
    hook("attend_query", after=once(text.replace, lambda session, layer, *_: layer == 0))
    have += logits(model, caches, [7], [8])
    assert layers == [0]  # nothing answers under the old session any more
    assert agree(have, want)
    other = make_pion_prompt_cache(model, text.name, connect(model, stage2=True, inproc=False), len(text.others))
    assert agree(logits(model, other, REST), logits(model, prefill(model, token_ids(text.others)), REST))


@pytest.mark.parametrize("cold", [False, True], ids=["at the start", "in a pass"])
@pytest.mark.parametrize("when", ["before", "behind", "before, and back behind"])
def test_a_prefix_that_is_replaced_while_it_is_warmed_is_not_attended_to(
    connect, model, text, client, hook, cold, when
):
    pc = connect(model, stage2=True, inproc=False, fallback=True)
    sessions, armed = [], []
    before = text.replace if "before" in when else lambda: None
    after = text.replace if when == "behind" else text.restore if "back" in when else lambda: None
    hook("prefix_warm", once(before, lambda *_: armed), once(after, lambda *_: armed))
    hook("prefix_warm", lambda *args: sessions.append(args[-1]))
    if not cold:
        armed.append(True)
    caches = make_pion_prompt_cache(model, text.name, pc, len(text.ids))
    if cold:
        armed.append(True)
        (session,) = sessions
        hook("attend_query", after=once(lambda: client.attend_drop(session)))
    want = logits(model, prefill(model, token_ids(text.ids)), REST, [7])
    assert agree(logits(model, caches, REST, [7]), want)
    assert client.attend_lookup(sessions[cold], 0) == "missing"
    assert len(sessions) == 1 + cold + (not cold and "back" in when)  # then it could be warmed, with right rows


def test_names_of_ones_own_have_a_session_in_each_process_and_strict_names_share_one(connect, model, client, hook):
    ids = random_tokens(70, seed=9320)
    sessions = []
    hook("prefix_warm", before=lambda *args: sessions.append(args[-1]))
    for namespace in (None, "one's own, in two processes"):
        sessions.clear()
        for _ in range(2):
            pc = connect(model, stage2=True, inproc=False)
            pc.get_or_prefill(ids, namespace=namespace)
            name = namespace or pc.namespace(ids)
            assert pc.lookup(name)
            for _ in range(2):
                caches = make_pion_prompt_cache(model, name, pc, len(ids))
                assert greedy(model, caches, REST, 3) == greedy(model, prefill(model, token_ids(ids)), REST, 3)
            assert pc.cold_rehydrates_observed == 0
        assert len(set(sessions)) == len(sessions) == (1 if namespace is None else 2)
        assert (attention_session(name) in sessions) == (namespace is None)
        assert pc.drop(name) == 1
        assert {client.attend_lookup(session, 0) for session in sessions} == {"missing"}
        assert not pc.lookup(name)


@pytest.mark.parametrize("media", [[], [b"an image"]], ids=["text", "an image"])
def test_a_question_about_a_cold_strict_name_warms_what_is_shared(connect, model, client, hook, media):
    ids = random_tokens(70, seed=9321)
    pc = connect(model, stage2=True)
    pc.get_or_prefill(ids, media=media)
    session = attention_session(pc.namespace(ids, media=media))
    client.attend_drop(session)
    sessions = []
    hook("prefix_warm", before=lambda *args: sessions.append(args[-1]))
    assert pc.attend_query(pc.namespace(ids, media=media), 0, np.zeros((2, 1, 16), np.float32)) is not None
    assert sessions == [session]


@pytest.mark.parametrize("lane", LANES)
def test_questions_of_ones_own_are_about_what_the_name_stands_for(connect, model, text, lane):
    pc = connect(model, stage2=True, inproc=False, lane=lane)
    q = np.random.default_rng(3).normal(size=(2, 2, 16)).astype(np.float32)
    for put, ids in ((text.restore, text.ids), (text.replace, text.others)):
        put()
        keys, values = (np.array(side[0]) for side in prefill(model, token_ids(ids))[1].keys_and_values())
        for _ in range(2):
            assert np.allclose(pc.attend_query(text.name, 1, q), attention64(q, keys, values)[0], atol=1e-4)
    assert pc.cold_rehydrates_observed == 2


def test_a_prefix_without_meta_can_be_asked_about(connect, model, client):
    rows = np.random.default_rng(4).normal(size=(2, 2, 20, 32)).astype(np.float32)
    client.store_prefix("of another client", "fp32@32*2", "fp32@32*2", [Layer(*layer) for layer in rows], 20)
    keys, values = (side.reshape(20, 2, 16).swapaxes(0, 1) for side in rows[1])
    q = np.random.default_rng(5).normal(size=(2, 2, 16)).astype(np.float32)
    found = connect(model, stage2=True).attend_query("of another client", 1, q)
    assert np.allclose(found, attention64(q, keys, values)[0], atol=1e-4)


@pytest.mark.parametrize("lane", ["resp", "binary"])
def test_the_error_of_a_missing_session_is_the_one_that_is_compared(server, lane):
    with PionClient(port=server.port, lane=lane) as client:
        with pytest.raises(ServerError) as caught:
            client.attend_query("no session of this name", 0, np.zeros((2, 1, 16), np.float32))
        assert caught.value == NOT_FOUND
        with pytest.raises(ServerError) as caught:
            client.attend_query("no session of this name", 0, np.zeros((2, 1, 12), np.float32))
        assert caught.value != NOT_FOUND


# Refused before anything is asked


def test_heads_of_a_width_that_the_server_lacks_are_refused_by_name(connect, unused_port):
    model = make_tiny_model(head_dim=12)
    ids = random_tokens(70, seed=9330)
    pc = connect(model, stage2=True)
    pc.get_or_prefill(ids)
    assert pc.stats()["stored"] == 1
    caches = make_pion_prompt_cache(model, pc.namespace(ids), pc, len(ids))
    assert greedy(model, caches, REST, 4) == greedy(model, prefill(model, token_ids(ids)), REST, 4)
    away = connect(model, stage2=True, inproc=False, port=unused_port)  # it would raise an error of the connection
    with pytest.raises(UnsupportedAttentionError, match=r"12 wide \(head_dim\).*multiple of 8 up to 512"):
        make_pion_prompt_cache(model, pc.namespace(ids), away, len(ids))
    with pytest.raises(UnsupportedAttentionError, match="12 wide"):
        away.attend_query(pc.namespace(ids), 0, np.zeros((2, 1, 12), np.float32))


def test_queries_of_another_width_are_refused_by_name(connect, model, unused_port):
    pc = connect(model, stage2=True, port=unused_port)
    q, own, heads = np.zeros((2, 1, 8), np.float32), np.zeros((2, 1, 8), np.float32), np.arange(2, dtype=np.uint32)
    for question in (
        lambda: pc.attend_query("x", 0, q),
        lambda: pc.attend_query_fused("x", 0, q, own, own, heads),
        lambda: pc.attend_query_sparse("x", 0, q, heads[:, None], heads + 1),
        lambda: pc.attend_query_sparse_auto("x", 0, q, heads, block=8, top=1),
        lambda: pc.attend_query_sparse_auto_fused("x", 0, q, own, own, heads, block=8, top=1),
    ):
        with pytest.raises(ValueError, match="last axis of q must be the width of the model's heads, 16"):
            question()
    assert pc.stats()["attend_calls"] == 0


def test_what_is_not_sent_is_not_counted(connect, model, unused_port):
    pc = connect(model, stage2=True, port=unused_port, fallback=True)
    q = np.zeros((2, 1, 16), np.float32)
    for _ in range(3):  # refused, and then not tried for a while
        assert pc.attend_query("x", 0, q) is None
    stats = pc.stats()
    assert (stats["attend_calls"], stats["fallbacks"]) == (0, 3)
