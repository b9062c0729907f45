"""WARM, COLD and missing: random commands of clients on both lanes against a model, and what INFO says of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.commands.attend_support import (
    QUERY,
    BinaryWire,
    Server,
    Wire,
    blob,
    configured,
    floats,
    normal,
    serving,
)

SLOTS, COLD = 3, 2
ROWS, WIDTH = 2, 8
Q = blob(normal(1, 1, 1, WIDTH))
COLD_MISS = "-COLDMISS layer {} is cold, use KV.PREFIX.WARM and ask again"

Key = tuple[bytes, int]
SIDS = st.sampled_from([b"p", b"q", b"other"])
PREFIXES = st.sampled_from([b"p", b"q"])
LAYERS = st.integers(0, 1)


def constant(value: float, *shape: int) -> np.ndarray:
    return np.full(shape, value, np.float32)


class Machine(RuleBasedStateMachine):
    """All values of a layer are its version, so an answer says which version it was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.context = serving(configured(attend_slots=SLOTS, attend_cold=COLD))
        self.server: Server = self.context.__enter__()
        self.resp, self.binary = Wire(self.server), BinaryWire(self.server)
        self.warm: dict[Key, int] = {}
        """Version by layer, the least recently used first."""
        self.cold: list[Key] = []
        self.source: dict[Key, bytes] = {}
        self.rows: dict[bytes, list[int]] = {}
        """Versions of the layers of a stored prefix."""
        self.version = 0
        self.demotions = self.rehydrates = 0

    def teardown(self) -> None:
        self.resp.__exit__()
        self.binary.__exit__()
        self.context.__exit__(None, None, None)

    def client(self, binary: bool) -> Wire | BinaryWire:
        return self.binary if binary else self.resp

    # The model.

    def put(self, key: Key, version: int, source: bytes | None = None) -> None:
        if key in self.cold:
            self.cold.remove(key)
            self.rehydrates += 1
        self.warm.pop(key, None)
        self.warm[key] = version
        self.source.pop(key, None)
        if source is not None:
            self.source[key] = source
        while len(self.warm) > SLOTS:
            victim = next(iter(self.warm))
            del self.warm[victim]
            self.cold.append(victim)
            self.demotions += 1
        del self.cold[: max(0, len(self.cold) - COLD)]
        self.forget_sources()

    def forget_sources(self) -> None:
        known = {*self.warm, *self.cold}
        self.source = {key: source for key, source in self.source.items() if key in known}

    def take(self, doomed: list[Key]) -> int:
        for key in doomed:
            if self.warm.pop(key, None) is None:
                self.cold.remove(key)
        self.forget_sources()
        return len(doomed)

    # Commands.

    @rule(sid=SIDS, layer=LAYERS, binary=st.booleans())
    def store(self, sid: bytes, layer: int, binary: bool) -> None:
        self.version += 1
        values = constant(self.version, 1, ROWS, WIDTH)
        assert self.client(binary).store(sid, layer, values, values) == "OK"
        self.put((sid, layer), self.version)

    @rule(sid=SIDS, layer=LAYERS, binary=st.booleans())
    def query(self, sid: bytes, layer: int, binary: bool) -> None:
        answer = self.client(binary).ask(QUERY, sid, layer, (1, WIDTH, 0), [Q])
        key = sid, layer
        if key in self.warm:
            assert (floats(answer, 1, 1, WIDTH) == self.warm[key]).all()
            self.warm[key] = self.warm.pop(key)
        elif key in self.cold:
            assert answer == COLD_MISS.format(layer)
        else:
            assert answer == "-ERR session not found"

    @rule(sid=SIDS, layer=LAYERS | st.none())
    def drop(self, sid: bytes, layer: int | None) -> None:
        doomed = [key for key in [*self.warm, *self.cold] if key[0] == sid and layer in (None, key[1])]
        args = [sid] if layer is None else [sid, layer]
        assert self.resp.call("ATTEND.PREFIX.DROP", *args) == self.take(doomed)

    @rule(ns=PREFIXES, fewer=st.booleans())
    def store_prefix(self, ns: bytes, fewer: bool) -> None:
        if fewer and len(self.rows.get(ns, [])) == 2:
            return  # a layer that was stored stays
        self.version += 1
        assert self.resp.call("KV.PREFIX.REGISTER", ns, WIDTH, "fp32") == "OK"
        self.rows[ns] = [self.version, self.version + 1]
        if fewer:
            self.rows[ns].pop()
        for layer, version in enumerate(self.rows[ns]):
            for side in (b"_pk", b"_pv"):
                rows = blob(constant(version, ROWS, WIDTH))
                assert self.resp.call("V.STOREBATCH", ns + side, layer, 0, ROWS, rows) == "OK"
        self.version += 1

    @rule(ns=PREFIXES, sid=SIDS)
    def warm_prefix(self, ns: bytes, sid: bytes) -> None:
        args = [] if sid == ns else [sid]
        answer = self.resp.call("KV.PREFIX.WARM", ns, 1, WIDTH, *args)
        if ns not in self.rows:
            assert answer == f"-ERR no rows: there is no prefix '{ns.decode()}'"
            return
        assert answer == str(len(self.rows[ns]))
        self.take([key for key, source in self.source.items() if key[0] == sid and source != ns])
        for layer, version in enumerate(self.rows[ns]):
            self.put((sid, layer), version, ns)

    @rule(ns=PREFIXES)
    def drop_prefix(self, ns: bytes) -> None:
        known = self.rows.pop(ns, None)
        assert self.resp.call("KV.PREFIX.DROP", ns) == int(known is not None)
        if known is not None:
            self.take([key for key in [*self.warm, *self.cold] if self.source.get(key) == ns])

    # What can be seen.

    @invariant()
    def agrees(self) -> None:
        for sid in (b"p", b"q", b"other"):
            for layer in (0, 1):
                key = sid, layer
                expected = "HIT" if key in self.warm else "COLD" if key in self.cold else "MISS"
                assert self.resp.lookup(sid, layer) == self.binary.lookup(sid, layer) == expected
        info = prefix_info(self.resp)
        counts = len(self.warm), len(self.cold), self.demotions, self.rehydrates
        assert tuple(int(info[f"sdpa_{name}"]) for name in ("warm", "cold", "demotions", "rehydrates")) == counts


def prefix_info(wire: Wire) -> dict[str, str]:
    return dict(line.split(":", 1) for line in wire.call("KV.PREFIX.INFO").decode().split("\r\n") if line)


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestTheStates = Machine.TestCase


def test_the_figures_of_info() -> None:
    with serving(configured(attend_slots=2, attend_bytes=1 << 20)) as server, Wire(server) as wire:
        before = info(wire)
        assert before["device"] == b"not used yet"
        assert (before["precision"], before["slots"], before["cold_slots"]) == (b"fp32", 2, 1024)
        keys = normal(1, 1, ROWS, WIDTH)
        for layer in range(3):
            assert wire.store(b"s", layer, keys, keys) == "OK"
        for _ in range(4):
            floats(wire.ask(QUERY, b"s", 2, (1, WIDTH, 0), [Q]), 1, 1, WIDTH)
        after = info(wire)
        assert (after["warm"], after["cold"], after["demotions"], after["rehydrates"]) == (2, 1, 1, 0)
        assert after["bytes"] >= 2 * 2 * keys.nbytes
        assert after["max_bytes"] == 1 << 20
        assert (after["queries"], after["waiting"]) == (4, 0)
        assert 1 <= after["batches"] <= 4
        assert after["device"] not in (b"", b"not used yet")
        section = wire.call("INFO", "attend").decode().split("\r\n")
        assert section[0] == "# Attend"
        found = dict(line.split(":", 1) for line in section[1:] if line)
        assert found.keys() == {f"attend_{field}" for field in after}
        assert found["attend_warm"] == "2"
        memory = wire.call("MEMORY", "STATS")
        assert memory[memory.index(b"attention.bytes") + 1] == after["bytes"]


def info(wire: Wire) -> dict[str, Any]:
    reply = wire.call("ATTEND.INFO")
    return {field.decode(): value for field, value in zip(reply[::2], reply[1::2], strict=True)}


@pytest.mark.parametrize("option", ["attend-slots", "attend-bytes"])
def test_a_limit_lowered_while_it_runs(option: str) -> None:
    keys = normal(1, 1, 1 << 12, WIDTH)
    with serving() as server, Wire(server) as wire:
        for layer in range(8):
            assert wire.store(b"s", layer, keys, keys) == "OK"
        one = info(wire)["bytes"] // 8
        limit = 3 if option == "attend-slots" else max(1 << 20, 3 * one)
        kept = 3 if option == "attend-slots" else (1 << 20) // one
        assert wire.call("CONFIG", "SET", option, limit) == "OK"
        assert wire.lookup(b"s", 7 - kept) == "COLD"
        assert wire.lookup(b"s", 8 - kept) == "HIT"
        assert info(wire)["warm"] == kept


def test_a_layer_larger_than_the_budget_changes_nothing() -> None:
    keys, large = normal(1, 1, 8, WIDTH), normal(1, 1, 1 << 15, WIDTH)
    with serving(configured(attend_bytes=1 << 20)) as server, Wire(server) as wire, BinaryWire(server) as binary:
        assert wire.store(b"s", 0, keys, keys) == "OK"
        before = info(wire)
        for client in (wire, binary):
            answer = client.store(b"s", 0, large, large)
            assert answer == f"-OOM {2 << 20} bytes for attention are more than attend-bytes, {1 << 20}"
        assert info(wire) == before
        assert wire.lookup(b"s") == "HIT"


def test_asked_with_no_touch_it_is_not_used() -> None:
    keys = normal(1, 1, ROWS, WIDTH)
    with serving(configured(attend_slots=2)) as server, Wire(server) as wire, Wire(server) as quiet:
        for sid in (b"a", b"b"):
            assert wire.store(sid, 0, keys, keys) == "OK"
        assert quiet.call("CLIENT", "NO-TOUCH", "ON") == "OK"
        floats(quiet.ask(QUERY, b"a", 0, (1, WIDTH, 0), [Q]), 1, 1, WIDTH)
        assert wire.store(b"c", 0, keys, keys) == "OK"
        assert wire.lookup(b"a") == "COLD"


def test_inside_a_transaction() -> None:
    keys = constant(3, 1, ROWS, WIDTH)
    with serving() as server, Wire(server) as wire:
        assert wire.call("MULTI") == "OK"
        assert wire.store(b"s", 0, keys, keys) == "QUEUED"
        assert wire.ask(QUERY, b"s", 0, (1, WIDTH, 0), [Q]) == "QUEUED"
        assert wire.lookup(b"s") == "QUEUED"
        stored, answer, state = wire.call("EXEC")
        assert (stored, state) == ("OK", "HIT")
        assert (floats(answer, 1, 1, WIDTH) == 3).all()


def test_nothing_survives_a_restart(tmp_path) -> None:
    keys = constant(3, 1, ROWS, WIDTH)
    with serving(directory=tmp_path) as server, Wire(server) as wire:
        assert wire.store(b"s", 0, keys, keys) == "OK"
    with serving(directory=tmp_path) as server, Wire(server) as wire:
        assert wire.lookup(b"s") == "MISS"
