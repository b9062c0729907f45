"""A real model's prefixes in a server that is killed and comes back."""

from __future__ import annotations

import itertools

import pytest

from pion.client import PionClient
from pion.testing import ServerProcess
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import token_ids
from pion_vllm_mlx.testing import greedy, same_bits

TEXT = (
    "The log has every change before it is answered, so the death of the process loses nothing. What a power cut may "
    "take depends on how often the log is flushed. A snapshot replaces the log when the log has become long. "
)
NEW_TOKENS = 8


@pytest.fixture
def evaluated(demo_model, monkeypatch):
    """How many tokens the model was given at once, call by call: what it really did, not what a counter says."""
    model, _ = demo_model
    seen: list[int] = []
    forward = type(model).__call__

    def counted(self, ids, *args, **kwargs):
        seen.append(ids.shape[1])
        return forward(self, ids, *args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", counted)
    return seen


def serve(directory, *, port=0):
    return ServerProcess("--kvcache", "--dir", str(directory), "--port", str(port))


def cut(ids, blocks):
    assert len(ids) > 16 * blocks
    return ids[: 16 * blocks], ids[16 * blocks]


@pytest.mark.parametrize("end", ["killed", "killed behind a snapshot", "stopped"])
def test_a_restarted_server_saves_the_prefill(demo_model, evaluated, tmp_path, end):
    """Fault class 9: save, restart, restore, prefix + 1 token; counted is what is evaluated."""
    model, tokenizer = demo_model
    prefix, one_more = cut(tokenizer.encode(TEXT * 3), 6)
    with (
        serve(tmp_path) as server,
        PionPromptCache(model, tokenizer=tokenizer, port=server.port, fallback=False) as pc,
    ):
        evaluated.clear()  # of what it tries the model with
        cold = pc.get_or_prefill(prefix)
        assert sum(evaluated) == len(prefix)
        if end == "killed behind a snapshot":
            with PionClient(port=server.port) as client:
                client.execute("KV.PREFIX.SAVE")
        if end == "stopped":
            assert server.stop() == 0
        else:
            server.kill()
    plain = greedy(model, prefill(model, token_ids(prefix)), [one_more], NEW_TOKENS)
    with (
        serve(tmp_path) as server,
        PionPromptCache(model, tokenizer=tokenizer, port=server.port, fallback=False) as pc,
    ):
        evaluated.clear()
        caches, rest = pc.prepare_prompt([*prefix, one_more])
        assert evaluated == []
        assert rest == [one_more]
        assert same_bits(caches, cold)
        warm = greedy(model, caches, rest, NEW_TOKENS)
        assert evaluated == [1] * NEW_TOKENS
        assert warm == plain
        stats = pc.stats()
        assert (stats["hits"], stats["misses"], stats["tokens_prefilled"]) == (1, 0, 0)
        with PionClient(port=server.port) as client:
            replayed = int(client.info()["wal_replayed_records"])
    assert (replayed == 0) == (end != "killed"), "each end is another way of coming back"


def test_a_conversation_goes_on_over_two_deaths(demo_model, evaluated, tmp_path):
    """Each turn continues the last one's segment, and the client goes on with the server that took its port."""
    model, tokenizer = demo_model
    ids = tokenizer.encode(TEXT * 6)
    turns = [ids[: 16 * blocks + 1] for blocks in (5, 10, 14)]
    with serve(tmp_path) as server:
        port = server.port
        pc = PionPromptCache(model, tokenizer=tokenizer, port=port, fallback=False)
        pc.prepare_prompt(turns[0])
        server.kill()
    with pc:
        for before, turn in itertools.pairwise(turns):
            with serve(tmp_path, port=port) as server:
                evaluated.clear()
                caches, rest = pc.prepare_prompt(turn)
                assert sum(evaluated) == len(turn) - len(before), "the turns before came from the server"
                assert greedy(model, caches, rest, 1) == greedy(model, in_pieces(model, turns, turn), rest, 1)
                server.kill()
        with serve(tmp_path, port=port), PionClient(port=port) as client:
            evaluated.clear()
            caches, rest = pc.prepare_prompt(turns[-1])
            assert evaluated == []
            assert same_bits(caches, in_pieces(model, turns, turns[-1]))
            segments = client.prefix_chain(pc.namespace(turns[-1][:-1]))
            assert len(segments) == len(turns)


def in_pieces(model, turns, turn):
    """Caches of a prompt computed turn by turn without a server: the same matrix shapes give the same bits."""
    caches, done = None, 0
    for each in turns[: turns.index(turn) + 1]:
        caches = prefill(model, token_ids(each[:-1]), caches, done=done)
        done = len(each) - 1
    return caches


def test_a_store_that_the_server_did_not_survive_is_found_by_nobody(demo_model, evaluated, tmp_path, monkeypatch):
    """It dies when it has half of the rows; the client answers all the same, and the next one computes again."""
    model, tokenizer = demo_model
    prefix, one_more = cut(tokenizer.encode(TEXT * 3), 6)
    pipeline = PionClient.pipeline
    with (
        serve(tmp_path) as server,
        PionPromptCache(model, tokenizer=tokenizer, port=server.port) as pc,
        monkeypatch.context() as patched,
    ):

        def cut_short(self, requests):
            half = len(requests) // 2
            replies = pipeline(self, requests[:half])
            server.kill()
            return replies + pipeline(self, requests[half:])

        patched.setattr(PionClient, "pipeline", cut_short)
        cold = pc.get_or_prefill(prefix)
        assert (pc.stats()["stored"], pc.stats()["not_stored"]) == (0, 1)
    with (
        serve(tmp_path) as server,
        PionPromptCache(model, tokenizer=tokenizer, port=server.port, fallback=False) as pc,
    ):
        with PionClient(port=server.port) as client:
            assert int(client.info()["wal_replayed_records"]) > len(cold), "half of the rows had reached the log"
            assert list(client.v_list()) == []
        evaluated.clear()
        caches, rest = pc.prepare_prompt([*prefix, one_more])
        assert (sum(evaluated), rest) == (len(prefix), [one_more])
        assert same_bits(caches, cold)
        assert pc.stats()["stored"] == 1
