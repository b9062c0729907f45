"""What layers may take on the device: how it is known before they are loaded, and block means, which give way."""

from __future__ import annotations

from typing import Any

import pytest

from tests.commands.attend_support import (
    AUTO,
    LANES,
    Gate,
    Wire,
    blob,
    configured,
    floats,
    ids,
    normal,
    serving,
)

MIB = 1 << 20
WIDTH = 64


def declare(wire: Wire, ns: str, layers: int, rows: int) -> None:
    """A prefix of one head."""
    assert wire.call("KV.PREFIX.REGISTER", ns, WIDTH, "fp16", "LAYERS", layers, "TOKENS", rows) == "OK"
    for layer in range(layers):
        for side in "kv":
            data = blob(normal(layer, rows, WIDTH))
            assert wire.call("V.STOREBATCH", f"{ns}_p{side}", layer, 0, rows, data) == "OK"


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_over_the_budget_nothing_changes(backend: str, half: bool) -> None:
    """Not even if the precision is fp16 on a device that keeps it in four bytes."""
    with serving(configured(attend_bytes=MIB, metal_attention_fp16=half), backend) as server, Wire(server) as wire:
        small = normal(1, 1, 256, WIDTH)
        assert wire.store(b"other", 0, small, small) == "OK"
        before = server.figures()
        value_bytes = before["bytes"] // (2 * small.size)
        rows = MIB // (2 * 2 * WIDTH * value_bytes)  # half of the budget for each layer
        declare(wire, "p", 3, rows)
        expected = f"bytes for attention are more than attend-bytes, {MIB}"
        assert wire.call("KV.PREFIX.WARM", "p", 1, WIDTH) == f"-OOM {3 * MIB // 2} {expected}"
        large = normal(2, 1, 2 * rows + 1, WIDTH)
        assert wire.store(b"other", 0, large, large) == f"-OOM {2 * value_bytes * large.size} {expected}"
        assert wire.lookup(b"other") == "HIT"
        assert [wire.lookup(b"p", layer) for layer in range(3)] == ["MISS"] * 3
        assert server.figures() == before


@pytest.mark.parametrize("what", ["STORE", "WARM"])
def test_the_device_says_how_large_a_value_is_even_at_its_first_use(what: str) -> None:
    class Halves(Gate):
        value_bytes = 2

    gate = Halves()
    with serving(configured(attend_bytes=MIB), gate) as server, Wire(server) as wire:
        rows = MIB // (2 * WIDTH)
        if what == "WARM":
            declare(wire, "p", 1, rows)
            answer = wire.call("KV.PREFIX.WARM", "p", 1, WIDTH)
        else:
            keys = normal(1, 1, rows, WIDTH)
            answer = wire.store(b"p", 0, keys, keys)
        assert answer == f"-OOM {2 * MIB} bytes for attention are more than attend-bytes, {MIB}"
        assert gate.loads == 0


@pytest.mark.parametrize("lane", list(LANES))
def test_block_means_that_do_not_fit_cool_no_layer(lane: str) -> None:
    """K and V take the whole budget. The layer can be asked all the same, again and again."""
    rows = MIB // (2 * 4 * WIDTH)
    with serving(configured(attend_bytes=MIB), "mlx") as server, LANES[lane](server) as wire:
        keys = normal(1, 1, rows, WIDTH)
        assert wire.store(b"s", 0, keys, keys) == "OK"
        assert server.figures()["bytes"] == MIB
        assert [sparse(wire, b"s", number) for number in range(3)] == ["HIT"] * 3
        assert server.figures()["bytes"] == MIB


def test_block_means_that_fit_are_kept_and_a_read_demotes_no_other_layer() -> None:
    rows = MIB // (2 * 4 * WIDTH) // 2 - 16
    with serving(configured(attend_bytes=MIB), "mlx") as server, Wire(server) as wire:
        keys = normal(1, 1, rows, WIDTH)
        for layer in range(2):
            assert wire.store(b"s", layer, keys, keys) == "OK"
        bare = server.figures()["bytes"]
        means = 4 * WIDTH * (rows // 16)
        assert bare + means <= MIB < bare + 2 * means
        for number in range(2):
            assert sparse(wire, b"s", number) == "HIT"
            assert server.figures()["bytes"] == bare + means
            assert sparse(wire, b"s", number, layer=1) == "HIT"
            assert server.figures()["bytes"] == bare + means
            assert wire.lookup(b"s") == "HIT"
        assert server.figures()["demotions"] == 0


def sparse(wire: Any, sid: bytes, seed: int, layer: int = 0) -> str:
    """Ask for the best blocks of 16, and then where the layer is."""
    q = blob(normal(seed, 1, 1, WIDTH))
    floats(wire.ask(AUTO, sid, layer, (1, WIDTH, 16, 2, 1), [q, blob(ids(0))]), 1, 1, WIDTH)
    return wire.lookup(sid, layer)
