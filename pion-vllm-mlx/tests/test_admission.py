"""A server that stores only what was asked for often enough (--admission)."""

from __future__ import annotations

import pytest

from pion.client import PionClient
from pion.testing import ServerProcess
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import token_ids
from pion_vllm_mlx.testing import random_tokens, same_bits

ADMISSION = 3


@pytest.fixture(scope="module")
def choosy():
    """Admits what has missed three times."""
    with ServerProcess("--kvcache", "--max-sessions", "4096", "--admission", str(ADMISSION)) as running:
        yield running


@pytest.fixture
def visit(choosy, model):
    """Makes a prompt cache for one request, as a client that comes for the first time does."""
    made = []

    def make():
        made.append(PionPromptCache(model, port=choosy.port, fallback=False))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


@pytest.fixture
def client(choosy):
    with PionClient(port=choosy.port) as connected:
        connected.stats_reset()
        yield connected


def counts(pc):
    stats = pc.stats()
    return stats["stored"], stats["not_stored"], stats["hits"], stats["misses"], stats["fallbacks"]


def test_get_or_prefill_stores_at_the_third_miss(visit, model, client):
    ids = random_tokens(70, seed=4000)
    cold = prefill(model, token_ids(ids))
    for number in range(1, ADMISSION + 1):
        pc = visit()
        assert same_bits(pc.get_or_prefill(ids), cold)
        assert counts(pc) == ((0, 1, 0, 1, 0) if number < ADMISSION else (1, 0, 0, 1, 0))
        assert client.stats()["kvprefix_misses"] == number, "each visit is one miss"
    pc = visit()
    assert same_bits(pc.get_or_prefill(ids), cold)
    assert counts(pc) == (0, 0, 1, 0, 0)


def test_prepare_prompt_stores_at_the_third_miss(visit, model, client):
    """It asks with MATCH, which counts nothing on the server, so the miss is reported when the server defers."""
    ids = random_tokens(100, seed=4010)
    cold = prefill(model, token_ids(ids[:96]))
    for number in range(1, ADMISSION + 1):
        pc = visit()
        caches, rest = pc.prepare_prompt(ids)
        assert same_bits(caches, cold)
        assert rest == ids[96:]
        assert counts(pc) == ((0, 1, 0, 1, 0) if number < ADMISSION else (1, 0, 0, 1, 0))
        assert client.stats()["kvprefix_misses"] == number
    pc = visit()
    assert same_bits(pc.prepare_prompt(ids)[0], cold)
    assert counts(pc) == (0, 0, 1, 0, 0)


def test_both_ways_of_asking_count_together(visit):
    ids = random_tokens(96, seed=4020)
    assert visit().get_or_prefill(ids)[0].offset == 96
    assert visit().prepare_prompt([*ids, 1])[1] == [1]
    pc = visit()
    pc.get_or_prefill(ids)
    assert counts(pc) == (1, 0, 0, 1, 0)


def test_a_continuation_is_deferred_and_its_parent_used(visit, model):
    ids = random_tokens(200, seed=4030)
    for _ in range(ADMISSION):
        visit().get_or_prefill(ids[:96])
    partial = []
    for _ in range(ADMISSION):
        pc = visit()
        pc.prepare_prompt(ids)
        partial.append((pc.stats()["partial_hits"], pc.stats()["tokens_restored"], pc.stats()["stored"]))
    assert partial == [(1, 96, 0)] * (ADMISSION - 1) + [(1, 96, 1)]
    pc = visit()
    assert pc.prepare_prompt(ids)[1] == ids[192:]
    assert counts(pc) == (0, 0, 1, 0, 0)


def test_what_was_dropped_during_the_prefill_is_stored_all_the_same(visit, client):
    """Registering again is not deferred, since the misses are still remembered."""
    ids = random_tokens(64, seed=4040)
    for _ in range(ADMISSION - 1):
        visit().get_or_prefill(ids)
    pc = visit()
    name = pc.namespace(ids)
    dropped = []

    def progress(done, total):
        if done == total:
            dropped.append(client.prefix_drop(name))

    pc.get_or_prefill(ids, progress=progress)
    assert dropped == [1]
    assert counts(pc) == (1, 0, 0, 1, 0)
    assert client.prefix_lookup(name)
