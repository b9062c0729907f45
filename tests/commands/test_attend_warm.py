"""KV.PREFIX.WARM: from stored rows to layers that can be asked, whatever else happens meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion.compute.attention import Resident
from pion.compute.slots import State
from pion.testing import FakeClock
from tests.commands.attend_support import (
    QUERY,
    Gate,
    Oracle,
    Server,
    Wire,
    blob,
    close,
    configured,
    floats,
    normal,
    serving,
)
from tests.commands.test_attend_states import info, prefix_info

HEADS, WIDTH = 2, 16
DIM = HEADS * WIDTH
WARM = "KV.PREFIX.WARM"


@pytest.fixture
def server():
    with serving() as running:
        yield running


@pytest.fixture
def wire(server):
    with Wire(server) as client:
        yield client


def store_rows(wire: Wire, ns: str, layers: Any, start: int, count: int, *, seed: int = 0, dim: int = DIM) -> None:
    """Normally distributed rows on both sides."""
    for layer in layers:
        for side in (0, 1):
            rows = blob(normal(seed + 10 * layer + side, count, dim))
            assert wire.call("V.STOREBATCH", f"{ns}_p{'kv'[side]}", layer, start, count, rows) == "OK"


def declare(wire: Wire, ns: str, tokens: int, fmt: str = "fp16", layers: int = 3, *options: Any, seed: int = 0) -> None:
    args = "LAYERS", layers, "TOKENS", tokens, *options
    assert wire.call("KV.PREFIX.REGISTER", ns, DIM, fmt, *args) == "OK"
    store_rows(wire, ns, range(layers), 0, tokens, seed=seed)


def stored(wire: Wire, ns: str, layer: int) -> Oracle:
    """The oracle for what FETCH answers: rows `[N, H * D]`, here turned by hand."""
    sides = wire.call("KV.PREFIX.FETCH", ns)[2 * layer : 2 * layer + 2]
    rows = [np.frombuffer(side, np.float32).reshape(-1, DIM) for side in sides]
    turned = [np.stack([each[:, head * WIDTH : (head + 1) * WIDTH] for head in range(HEADS)]) for each in rows]
    return Oracle(*turned)


def check(wire: Wire, ns: str, layer: int, sid: str | None = None, oracle: Oracle | None = None) -> None:
    """Asking the session gives attention over the prefix's rows."""
    q = normal(99, HEADS, 1, WIDTH)
    oracle = oracle or stored(wire, ns, layer)
    answer = wire.ask(QUERY, (sid or ns).encode(), layer, (HEADS, WIDTH, 0), [blob(q)])
    close(floats(answer, HEADS, 1, WIDTH), oracle.attend(q, oracle.visible(q))[0])


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16", "fp8", "int8", "turbo4", "mlx4g32"])
def test_every_format(wire, fmt: str) -> None:
    declare(wire, "p", 33, fmt)
    assert wire.call(WARM, "p", HEADS, WIDTH) == "3"
    for layer in range(3):
        check(wire, "p", layer)


def test_on_mlx() -> None:
    with serving(backend="mlx") as server, Wire(server) as wire:
        declare(wire, "p", 300)
        assert wire.call(WARM, "p", HEADS, WIDTH) == "3"
        check(wire, "p", 2)


def test_rows_of_many_blocks_and_pieces(wire) -> None:
    """A layer of several MiB that was stored in parts."""
    assert wire.call("KV.PREFIX.REGISTER", "p", DIM, "fp16") == "OK"
    for start in range(0, 20_000, 4_999):
        store_rows(wire, "p", [0], start, min(4_999, 20_000 - start), seed=start)
    assert wire.call(WARM, "p", HEADS, WIDTH) == "1"
    check(wire, "p", 0)


def test_another_session_id(wire) -> None:
    declare(wire, "p", 5)
    sid = "x" * 4096
    assert wire.call(WARM, "p", HEADS, WIDTH, sid) == "3"
    assert wire.lookup(b"p") == "MISS"
    check(wire, "p", 1, sid)


def test_ancestors_are_part_of_it(wire) -> None:
    declare(wire, "root", 10)
    declare(wire, "leaf", 7, "fp16", 3, "PARENT", "root", 8, seed=500)
    assert wire.call(WARM, "leaf", HEADS, WIDTH) == "3"
    for layer in range(3):
        oracle = stored(wire, "leaf", layer)
        assert oracle.keys.shape[1] == 15
        check(wire, "leaf", layer, oracle=oracle)


def test_layers_of_another_width_are_skipped_and_said(wire) -> None:
    runs = f"fp16@{DIM}*1,fp16@{2 * DIM}*2,fp16@{DIM}*1", f"fp16@{DIM}*2,fp16@{2 * DIM}*1,fp16@{DIM}*1"
    assert wire.call("KV.PREFIX.REGISTER.SCHEMA", "p", "K", runs[0], "V", runs[1]) == "OK"
    widths = [[DIM, 2 * DIM, 2 * DIM, DIM], [DIM, DIM, 2 * DIM, DIM]]
    for layer in range(4):
        for side in (0, 1):
            rows = blob(normal(layer, 6, widths[side][layer]))
            assert wire.call("V.STOREBATCH", f"p_p{'kv'[side]}", layer, 0, 6, rows) == "OK"
    assert wire.call(WARM, "p", HEADS, WIDTH) == "2 skipped_dim=2"
    assert [wire.lookup(b"p", layer) for layer in range(4)] == ["HIT", "MISS", "MISS", "HIT"]
    assert wire.call(WARM, "p", 2 * HEADS, WIDTH, "wide") == "1 skipped_dim=3"
    assert wire.lookup(b"wide", 2) == "HIT"
    assert wire.call(WARM, "p", 1, 8) == "0 skipped_dim=4"


def test_sides_made_by_hand_and_layers_without_rows(wire) -> None:
    """As `boundary_protect` stores: V.CREATE for each side. Layer 1 has no rows, as a recurrent one."""
    for side in "kv":
        assert wire.call("V.CREATE", f"p_p{side}", DIM, "VQUANT", "fp16") == "OK"
    store_rows(wire, "p", [0, 2], 0, 9)
    assert wire.call(WARM, "p", HEADS, WIDTH) == "2"
    assert [wire.lookup(b"p", layer) for layer in range(3)] == ["HIT", "MISS", "HIT"]


def test_no_rows(wire) -> None:
    assert wire.call(WARM, "nosuch", HEADS, WIDTH) == "-ERR no rows: there is no prefix 'nosuch'"
    assert wire.call("KV.PREFIX.REGISTER", "empty", DIM, "fp16") == "OK"
    assert wire.call(WARM, "empty", HEADS, WIDTH) == "-ERR no rows in prefix 'empty'"
    assert wire.call("KV.PREFIX.REGISTER", "pending", DIM, "fp16", "LAYERS", 2, "TOKENS", 4) == "OK"
    store_rows(wire, "pending", [0], 0, 4)
    assert wire.call(WARM, "pending", HEADS, WIDTH) == "-ERR no rows: there is no prefix 'pending'"
    assert wire.call("KV.PREFIX.REGISTER", "half", DIM, "fp16") == "OK"
    store_rows(wire, "half", [0], 0, 4)
    assert wire.call("V.STOREBATCH", "half_pk", 1, 0, 4, blob(normal(1, 4, DIM))) == "OK"
    assert wire.call(WARM, "half", HEADS, WIDTH) == "-ERR no row 0 in layer 1"
    store_rows(wire, "half", [1], 0, 3)
    assert wire.call(WARM, "half", HEADS, WIDTH) == "-ERR no row 3 in layer 1"
    assert info(wire)["warm"] == 0


def test_cold_and_missing_layers_come_back() -> None:
    with serving(configured(attend_slots=3, attend_cold=1)) as server, Wire(server) as wire:
        declare(wire, "p", 5)
        declare(wire, "q", 5)
        assert wire.call(WARM, "p", HEADS, WIDTH) == "3"
        assert wire.call(WARM, "q", HEADS, WIDTH) == "3"
        assert [wire.lookup(b"p", layer) for layer in range(3)] == ["MISS", "MISS", "COLD"]
        asked = wire.ask(QUERY, b"p", 2, (HEADS, WIDTH, 0), [blob(normal(1, HEADS, 1, WIDTH))])
        assert asked.startswith("-COLDMISS ")
        assert wire.call(WARM, "p", HEADS, WIDTH) == "3"
        for layer in range(3):
            check(wire, "p", layer)
        found = prefix_info(wire)
        assert {name: found[f"sdpa_{name}"] for name in ("warm", "cold", "demotions")} == {
            "warm": "3",
            "cold": "1",
            "demotions": "6",
        }
        # Layer 2 of p was forgotten when q's first was demoted for p's first: then it was missing.
        assert found["sdpa_rehydrates"] == "0"


def test_a_cold_layer_that_is_warmed_is_counted() -> None:
    with serving(configured(attend_slots=3)) as server, Wire(server) as wire:
        declare(wire, "p", 5)
        declare(wire, "q", 5)
        for ns in ("p", "q", "p", "p"):
            assert wire.call(WARM, ns, HEADS, WIDTH) == "3"
        found = prefix_info(wire)
        assert (found["sdpa_demotions"], found["sdpa_rehydrates"]) == ("6", "3")


def test_what_can_never_fit_is_refused_before_it_is_loaded() -> None:
    with serving(configured(attend_slots=2)) as server, Wire(server) as wire:
        declare(wire, "p", 5)
        assert wire.call(WARM, "p", HEADS, WIDTH) == "-OOM 3 layers for attention are more than attend-slots, 2"
        assert info(wire)["warm"] == info(wire)["cold"] == 0
    with serving(configured(attend_bytes=1 << 20)) as server, Wire(server) as wire:
        declare(wire, "p", 2000)
        expected = 3 * 2 * 4 * 2000 * DIM
        answer = wire.call(WARM, "p", HEADS, WIDTH)
        assert answer == f"-OOM {expected} bytes for attention are more than attend-bytes, {1 << 20}"
        assert info(wire)["warm"] == info(wire)["cold"] == 0


def test_dropping_the_prefix_drops_what_was_made_of_it(wire) -> None:
    declare(wire, "p", 5)
    declare(wire, "child", 5, "fp16", 3, "PARENT", "p", 5)
    for ns, sid in (("p", "one"), ("p", "two"), ("child", "three")):
        assert wire.call(WARM, ns, HEADS, WIDTH, sid) == "3"
    keys = normal(1, HEADS, 3, WIDTH)
    assert wire.store(b"p", 0, keys, keys) == "OK"
    assert wire.call("KV.PREFIX.DROP", "CASCADE", "p") == 2
    assert [wire.lookup(sid) for sid in (b"one", b"two", b"three", b"p")] == ["MISS", "MISS", "MISS", "HIT"]


def test_expiry_drops_it_and_eviction_does_not() -> None:
    clock = FakeClock()
    with serving(configured(max_sessions=4), clock=clock) as server, Wire(server) as wire:
        declare(wire, "short", 5, "fp16", 3, "EX", 10)
        declare(wire, "long", 5)
        for ns in ("short", "long"):
            assert wire.call(WARM, ns, HEADS, WIDTH) == "3"
        oracle = stored(wire, "long", 1)
        server.run(lambda: clock.advance(11))
        assert wire.call("KV.PREFIX.LOOKUP", "short") == "MISS"
        assert (wire.lookup(b"short"), wire.lookup(b"long")) == ("MISS", "HIT")
        for ns in ("a", "b"):
            declare(wire, ns, 5)
        assert wire.call("KV.PREFIX.LOOKUP", "long") == "MISS"
        check(wire, "long", 1, oracle=oracle)
        assert wire.call("KV.PREFIX.DROP", "long") == 0
        assert wire.lookup(b"long") == "MISS"


def test_what_was_made_ready_goes_when_the_name_is_registered_anew() -> None:
    with serving(configured(max_sessions=4)) as server, Wire(server) as wire:
        declare(wire, "p", 5)
        assert wire.call(WARM, "p", HEADS, WIDTH, "sid") == "3"
        for ns in ("a", "b"):  # no room for all three
            declare(wire, ns, 5)
        assert wire.call("KV.PREFIX.LOOKUP", "p") == "MISS"
        assert wire.lookup(b"sid") == "HIT"
        declare(wire, "p", 5)
        assert wire.lookup(b"sid") == "MISS"


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def gated(gate):
    with serving(backend=gate) as running, Wire(running) as client:
        yield running, client


def half_way(server: Server, gate: Gate, wire: Wire, *args: Any) -> None:
    """Send a WARM and return while its first layer is being loaded."""
    gate.shut()
    wire.send(WARM, *args)
    assert gate.entered.wait(60)


def test_one_view_of_the_prefix_although_stores_go_on(gated, gate) -> None:
    server, wire = gated
    assert wire.call("KV.PREFIX.REGISTER", "p", DIM, "fp32") == "OK"
    store_rows(wire, "p", range(3), 0, 8)
    before = [stored(wire, "p", layer) for layer in range(3)]
    with Wire(server) as other:
        half_way(server, gate, wire, "p", HEADS, WIDTH)
        store_rows(other, "p", range(3), 0, 8, seed=1000)
        store_rows(other, "p", range(3), 8, 5, seed=2000)
        gate.open.set()
        assert wire.read() == "3"
        for layer in range(3):
            check(other, "p", layer, oracle=before[layer])
        assert other.call(WARM, "p", HEADS, WIDTH) == "3"
        for layer in range(3):
            check(other, "p", layer)


@pytest.mark.parametrize("what", [("ATTEND.PREFIX.DROP", "sid"), ("KV.PREFIX.DROP", "p")])
def test_dropped_meanwhile(gated, gate, what: tuple[str, str]) -> None:
    server, wire = gated
    declare(wire, "p", 8)
    with Wire(server) as other:
        half_way(server, gate, wire, "p", HEADS, WIDTH, "sid")
        assert other.call(*what) == (1 if what[0].startswith("KV") else 0)
        gate.open.set()
        assert wire.read() == "-ERR 'sid', or the prefix it is made of, was dropped meanwhile"
        assert [other.lookup(b"sid", layer) for layer in range(3)] == ["MISS"] * 3
        assert gate.loads == 1


def test_a_session_is_made_of_one_prefix(wire) -> None:
    """Of the last one; what was stored by hand stays, whichever prefix comes or goes."""
    declare(wire, "p", 5)
    declare(wire, "q", 6, "fp16", 1, seed=500)
    keys = normal(1, HEADS, 3, WIDTH)
    assert wire.call(WARM, "p", HEADS, WIDTH, "sid") == "3"
    for layer in (1, 7):
        assert wire.store(b"sid", layer, keys, keys) == "OK"
    assert wire.call(WARM, "q", HEADS, WIDTH, "sid") == "1"
    assert lookups(wire, "sid") == [(0, "HIT"), (1, "HIT"), (7, "HIT")]
    check(wire, "q", 0, "sid")
    assert wire.call("KV.PREFIX.DROP", "p") == 1
    assert lookups(wire, "sid") == [(0, "HIT"), (1, "HIT"), (7, "HIT")]
    assert wire.call("KV.PREFIX.DROP", "q") == 1
    assert lookups(wire, "sid") == [(1, "HIT"), (7, "HIT")]
    check(wire, "q", 1, "sid", Oracle(keys, keys))


def lookups(wire: Wire, sid: str) -> list[tuple[int, str]]:
    """Layers of a session that are not missing."""
    states = [(layer, wire.lookup(sid.encode(), layer)) for layer in range(10)]
    return [each for each in states if each[1] != "MISS"]


def test_two_prefixes_at_once_are_not_mixed_in_a_session(gated, gate) -> None:
    server, wire = gated
    declare(wire, "p", 8)
    declare(wire, "q", 6, "fp16", 2, seed=500)
    with Wire(server) as other:
        half_way(server, gate, wire, "p", HEADS, WIDTH, "sid")
        other.send(WARM, "q", HEADS, WIDTH, "sid")
        server.wait_for(lambda: [each.loading for each in server.attention.warming] == [True, True])
        gate.open.set()
        assert wire.read() == "-ERR 'sid' was made of another prefix meanwhile"
        assert other.read() == "2"
        assert lookups(wire, "sid") == [(0, "HIT"), (1, "HIT")]
        for layer in range(2):
            check(wire, "q", layer, "sid")


def test_a_layer_dropped_meanwhile_is_the_only_one_not_loaded(gated, gate) -> None:
    server, wire = gated
    declare(wire, "p", 8, "fp16", 4)
    keys = normal(1, HEADS, 3, WIDTH)
    assert wire.store(b"p", 9, keys, keys) == "OK"
    with Wire(server) as other, Wire(server) as third:
        half_way(server, gate, wire, "p", HEADS, WIDTH)
        assert [other.call("ATTEND.PREFIX.DROP", "p", layer) for layer in (0, 2, 9, 8)] == [0, 0, 1, 0]
        gate.open.set()
        assert wire.read() == "2"
        assert lookups(wire, "p") == [(1, "HIT"), (3, "HIT")]
        assert gate.loads == 1 + 3  # the one stored by hand; layer 0 was being loaded
        # Who asks after such a drop wants that layer, too.
        half_way(server, gate, wire, "p", HEADS, WIDTH)
        assert other.call("ATTEND.PREFIX.DROP", "p", 3) == 1
        third.send(WARM, "p", HEADS, WIDTH)
        server.wait_for(lambda: len(server.attention.warming) == 2)
        gate.open.set()
        assert (wire.read(), third.read()) == ("3", "4")
        assert lookups(wire, "p") == [(layer, "HIT") for layer in range(4)]


def test_a_layer_dropped_when_it_is_loaded_is_gone() -> None:
    class Steps(Gate):
        """Loads one layer for each permit."""

        permits = threading.Semaphore(0)

        def load_rows(self, keys: Any, values: Any, heads: int) -> Resident:
            assert self.permits.acquire(timeout=60)
            return super().load_rows(keys, values, heads)

    gate = Steps()
    with serving(backend=gate) as server, Wire(server) as wire, Wire(server) as other:
        declare(wire, "p", 8)
        wire.send(WARM, "p", HEADS, WIDTH)
        gate.permits.release()
        server.wait_for(lambda: server.attention.slots.state(b"p", 0) is State.WARM)
        assert other.call("ATTEND.PREFIX.DROP", "p", 0) == 1
        gate.permits.release(2)
        assert wire.read() == "3"
        assert lookups(wire, "p") == [(1, "HIT"), (2, "HIT")]


def test_evicted_meanwhile(gate) -> None:
    with serving(configured(max_sessions=2), gate) as server, Wire(server) as wire, Wire(server) as other:
        declare(wire, "p", 8)
        before = [stored(wire, "p", layer) for layer in range(3)]
        half_way(server, gate, wire, "p", HEADS, WIDTH)
        declare(other, "q", 8)
        assert other.call("KV.PREFIX.LOOKUP", "p") == "MISS"
        gate.open.set()
        assert wire.read() == "3"
        for layer in range(3):
            check(wire, "p", layer, oracle=before[layer])


def test_many_who_want_the_same_wait_for_one(gated, gate) -> None:
    server, wire = gated
    declare(wire, "p", 8)
    half_way(server, gate, wire, "p", HEADS, WIDTH)
    clients = [Wire(server) for _ in range(8)]
    try:
        for client in clients:
            client.send(WARM, "p", HEADS, WIDTH)
        server.wait_for(lambda: waiting(server) == len(clients))
        gate.open.set()
        assert [client.read() for client in [wire, *clients]] == ["3"] * 9
        assert gate.loads == 3
    finally:
        for client in clients:
            client.__exit__()


def test_inside_exec_nobody_waits_for_another(gated, gate) -> None:
    server, wire = gated
    declare(wire, "p", 8)
    half_way(server, gate, wire, "p", HEADS, WIDTH)
    with Wire(server) as other:
        assert other.call("MULTI") == "OK"
        assert other.call(WARM, "p", HEADS, WIDTH) == "QUEUED"
        other.send("EXEC")
        server.wait_for(lambda: len(server.attention.warming) == 2)
        assert waiting(server) == 0
        gate.open.set()
        assert (wire.read(), other.read()) == ("3", ["3"])
        assert gate.loads == 6


def waiting(server: Server) -> int:
    """Who waits for the WARM of another client."""
    return sum(each.done.statistics().tasks_waiting for each in server.attention.warming)


def test_the_next_one_goes_on_when_the_first_is_gone(gated, gate) -> None:
    """The client that loads is killed: who waited for it loads itself."""
    server, wire = gated
    declare(wire, "p", 8)
    number = wire.call("CLIENT", "ID")
    half_way(server, gate, wire, "p", HEADS, WIDTH)
    with Wire(server) as second, Wire(server) as operator:
        second.send(WARM, "p", HEADS, WIDTH)
        server.wait_for(lambda: waiting(server) == 1)
        assert operator.call("CLIENT", "KILL", "ID", number) == 1
        gate.open.set()
        assert second.read() == "3"
        for layer in range(3):
            check(second, "p", layer)


def test_different_prefixes_at_once(server) -> None:
    names = [f"p{index}" for index in range(6)]

    def one(ns: str) -> None:
        with Wire(server) as wire:
            declare(wire, ns, 50, seed=100 * names.index(ns))
            for _ in range(3):
                assert wire.call(WARM, ns, HEADS, WIDTH) == "3"
                check(wire, ns, 1)

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(one, names))


def test_rows_in_files_are_verified_first(tmp_path: Path) -> None:
    """After a restart rows lie in the mapped snapshot: whole ones are loaded, damaged ones never."""
    with serving(directory=tmp_path) as server, Wire(server) as wire:
        declare(wire, "good", 2000, "fp32")
        declare(wire, "bad", 2000, "fp32", seed=7)
        oracle = stored(wire, "good", 2)
        assert wire.call("KV.PREFIX.SAVE") == "OK"
    mark = blob(normal(7 + 20 + 1, 2000, DIM))[-64:]  # the end of the V side of the last layer
    snapshot = tmp_path / "pion.vstore.0"
    data = bytearray(snapshot.read_bytes())
    assert data.count(mark) == 1
    data[data.index(mark)] ^= 1
    snapshot.write_bytes(data)
    with serving(directory=tmp_path) as server, Wire(server) as wire:
        assert int(prefix_info(wire)["mapped_bytes"]) > 0
        assert wire.call(WARM, "good", HEADS, WIDTH) == "3"
        check(wire, "good", 2, oracle=oracle)
        assert wire.call(WARM, "bad", HEADS, WIDTH).startswith("-ERR no row: its bytes on disk are not what was stored")
        assert wire.lookup(b"bad") == "MISS"
        assert prefix_info(wire)["checksum_failures"] == "1"
        assert wire.call(WARM, "bad", HEADS, WIDTH) == "-ERR no rows: there is no prefix 'bad'"


def test_rows_in_the_tier(tmp_path: Path) -> None:
    config = configured(tier_dir=str(tmp_path / "tier"), max_bytes=16 << 20)
    with serving(config, directory=tmp_path / "data") as server, Wire(server) as wire:
        declare(wire, "p", 8000, "fp32")
        oracle = stored(wire, "p", 2)
        for number in range(3):
            declare(wire, f"other{number}", 8000, "fp32", seed=1000 * number)
        server.wait_for(lambda: server.services.vstore.prefixes[b"p"].in_files)
        assert wire.call(WARM, "p", HEADS, WIDTH) == "3"
        check(wire, "p", 2, oracle=oracle)


def test_it_counts_as_a_use_of_the_prefix() -> None:
    with serving(configured(max_sessions=4)) as server, Wire(server) as wire:
        for ns in ("a", "b"):
            declare(wire, ns, 2)
        assert wire.call(WARM, "a", HEADS, WIDTH) == "3"
        declare(wire, "c", 2)
        assert [wire.call("KV.PREFIX.LOOKUP", ns) for ns in ("a", "b")] == ["HIT", "MISS"]
