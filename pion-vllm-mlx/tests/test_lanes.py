"""A prefix is restored bit for bit over either lane of the server, and over RESP where there is only that."""

from __future__ import annotations

import pytest

from pion.client.errors import ConnectFailedError
from pion.testing import ServerProcess
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import token_ids
from pion_vllm_mlx.testing import random_tokens, same_bits


def binary_lines(pc: PionPromptCache) -> list[object]:
    """The connections on the binary lane of the clients that are kept."""
    return [client._lines._binary for client in pc._link._idle if client._lines._binary is not None]


@pytest.mark.parametrize("vquant", ["native", "fp16", "int8"])
@pytest.mark.parametrize("length", [40, 300])
def test_all_lanes_restore_the_same_bits(connect, model, vquant, length):
    ids = random_tokens(length, seed=8000 + length)
    connect(model, vquant=vquant).get_or_prefill(ids)
    restored = []
    for lane, used in (("binary", True), ("auto", True), ("resp", False)):
        pc = connect(model, vquant=vquant, lane=lane)
        restored.append(pc.get_or_prefill(ids))
        assert (pc.stats()["hits"], pc.stats()["tokens_restored"]) == (1, length)
        assert bool(binary_lines(pc)) is used
    assert same_bits(restored[0], restored[1])
    assert same_bits(restored[0], restored[2])
    if vquant == "native":
        assert same_bits(restored[0], prefill(model, token_ids(ids)))


def test_the_longest_match_comes_over_the_binary_lane(connect, model):
    ids = random_tokens(100, seed=8500)
    connect(model).get_or_prefill(ids[:70])
    pc = connect(model, lane="binary")
    caches, rest = pc.prepare_prompt(ids)
    assert caches[0].offset + len(rest) == 100
    assert pc.stats()["partial_hits"] == 1
    assert binary_lines(pc)


def test_a_server_without_the_lane(model):
    ids = random_tokens(40, seed=8600)
    with (
        ServerProcess("--kvcache", "--binary-port", "-1") as server,
        PionPromptCache(model, port=server.port, fallback=False) as pc,
        PionPromptCache(model, port=server.port, fallback=False, lane="binary") as strict,
    ):
        computed = pc.get_or_prefill(ids)
        assert same_bits(pc.get_or_prefill(ids), computed)
        assert (pc.stats()["hits"], pc.stats()["misses"]) == (1, 1)
        assert not binary_lines(pc)
        with pytest.raises(ConnectFailedError, match="no binary lane"):
            strict.get_or_prefill(ids)


def test_a_wrong_choice_is_refused_at_once(model):
    with pytest.raises(ValueError, match="lane"):
        PionPromptCache(model, lane="fast")
