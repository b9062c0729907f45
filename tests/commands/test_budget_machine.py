"""Random commands under a small byte budget: what is charged stays within it, and what goes for it is what should.

The order of use is kept in a list beside the store. After each command the ledger is recounted, and what was evicted is
compared with the rules: the least recently used first, leaf before parent, never what is pinned, pending or in use by
the command, never more than necessary, and -OOM only if all of that would not have been enough.
"""

from __future__ import annotations

import struct
from random import Random, SystemRandom
from typing import Any

import pytest

from pion.config import Config
from pion.storage.changes import DropPrefix, EvictSession
from pion.storage.journal import NullJournal
from pion.storage.ledger import TABLE_COST, Ledger
from pion.storage.room import memory_bytes
from pion.storage.unit import Unit, split_sid
from pion.storage.vstore import VStore
from pion.testing import FakeClock
from tests.commands.kv_support import make_kv, now, recount, snapshot

MAX_BYTES = 12_000
DIM = 16
NAMES = ["a", "b", "c", "d", "e", "f"]
SIDS = ["s", "t", "u", *(f"{ns}_p{side}" for ns in NAMES for side in "kv")]
SLACK = 2000
"""More than the fixed costs that a command may ask room for and not use."""


class Machine:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.evicted = self.refused = 0
        self.clock = FakeClock()
        self.harness = make_kv(self.clock, max_sessions=1000, max_bytes=MAX_BYTES)
        self.clients = [self.harness, self.harness.client()]
        self.store = self.harness.services.vstore
        self.used: list[Unit] = []

    def call(self, client: int, wanted: int, target: str, parent: str | None, *args: Any) -> Any:
        """Run a command that takes at least `wanted` bytes, and see what went for it."""
        store = self.store
        protected = {part for name in (target, parent) if name for part in self.chain(name)}
        before = {unit: (memory_bytes(unit), unit.pinned, unit.pending is not None) for unit in store.units()}
        below = {unit: set(unit.children or ()) for unit in before}
        old, charged = snapshot(store), store.ledger.charged_bytes
        changes = len(store.journal.changes)
        reply = now(self.clients[client].call(*args))
        text = reply if isinstance(reply, str) else ""
        in_order = [
            self.named(before, change)
            for change in store.journal.changes[changes:]
            if isinstance(change, DropPrefix | EvictSession)
        ]
        gone = set(in_order)
        if text.startswith("-"):
            lost = gone if text.startswith("-OOM") and args[0] == "V.STOREBATCH" else set()
            assert all(unit in protected and before[unit][2] for unit in lost), "a prefix that can't be completed"
            for unit in lost:
                del old[False, unit.name]
                for other in old.values():
                    other["children"] = [name for name in other["children"] if name != unit.name]
            assert snapshot(store) == old
            assert store.ledger.charged_bytes == charged - sum(before[unit][0] for unit in lost)
        if text.startswith("-OOM"):
            possible = self.evictable(before, below, protected)
            self.refused += 1
            assert charged - sum(before[unit][0] for unit in possible) + wanted + 2 * SLACK > MAX_BYTES
            self.forget()
            return reply
        self.evicted += len(gone)
        for unit in gone:
            assert before[unit][1:] == (False, False)
            assert unit not in protected
            assert below[unit] <= gone
        if gone:
            last = max(gone, key=self.used.index)
            for at, unit in enumerate(self.used[: self.used.index(last)]):
                # What has been continued could go only behind all of that.
                behind = max((self.used.index(each) for each in self.below(unit, below)), default=at)
                free = self.below(unit, below) <= gone and behind < self.used.index(last)
                kept = unit in protected or any(before[unit][1:]) or not free
                assert unit in gone or kept, f"{unit.name!r} was used before {last.name!r}, which went"
            needed = charged - sum(before[unit][0] for unit in gone) + wanted
            tables = sum(8 * 60 + TABLE_COST for unit in before if unit in protected or unit.parent in protected)
            assert needed + before[in_order[-1]][0] + SLACK + tables > MAX_BYTES, "one less would have done"
        self.used = [unit for unit in self.used if unit not in gone]
        return reply

    def chain(self, name: str) -> list[Unit]:
        split = split_sid(name.encode())
        unit = self.store.lone.get(name.encode()) if name in "stu" else None
        if unit is None:
            unit = self.store.prefixes.get(split[0] if split else name.encode())
        return unit.chain() if unit is not None else []

    def named(self, units: Any, change: DropPrefix | EvictSession) -> Unit:
        lone = isinstance(change, EvictSession)
        name = change.sid if isinstance(change, EvictSession) else change.ns
        (found,) = [unit for unit in units if (unit.lone, unit.name) == (lone, name)]
        return found

    def below(self, unit: Unit, children: dict[Unit, set[Unit]]) -> set[Unit]:
        found = children[unit]
        return found.union(*(self.below(child, children) for child in found))

    def evictable(self, units: Any, below: Any, protected: set[Unit]) -> set[Unit]:
        found: set[Unit] = set()
        for _ in units:
            found |= {
                unit
                for unit, kept in units.items()
                if not any(kept[1:]) and unit not in protected and below[unit] <= found
            }
        return found

    # Commands.

    def create(self) -> None:
        sid = self.random.choice(SIDS)
        if self.call(0, 0, sid, None, "V.CREATE", sid, DIM, "VQUANT", "fp32") == "OK":
            self.use(sid, alone=True)

    def store_rows(self) -> None:
        """With fp16 on the wire twice as much is kept as was received."""
        sids = [sid for sid in SIDS if self.store.held_session(sid.encode()) is not None]
        if not sids:
            return
        sid, layer, wire = self.random.choice(sids), self.random.randint(0, 2), self.random.choice(["fp16", "native"])
        start, count = self.random.randint(0, 30), self.random.choice([0, 1, 5, 20, 40])
        (unit,) = self.chain(sid)[-1:]
        if unit.declaration is not None and self.random.random() < 0.8:
            layer, start, count = 0, 0, unit.declaration.tokens
        data = bytes(count * DIM * (2 if wire == "fp16" else 4))
        args = ("V.STOREBATCH", sid, layer, start, count, data, "AS", wire)
        was_pending = unit.pending is not None
        if self.call(self.random.randint(0, 1), 4 * DIM * count, sid, None, *args) == "OK" and count:
            self.use(sid, alone=not (was_pending and unit.complete))

    def register(self) -> None:
        some, whole = self.random.random, [ns for ns in NAMES if self.store.visible(ns.encode()) is not None]
        ns = self.random.choice(NAMES)
        parent = self.random.choice(whole) if whole and some() < 0.4 else None
        tokens = self.random.randint(0, 20) if some() < 0.5 else None
        meta = self.random.choice([0, 100, 1000, 3000, 20_000]) if some() < 0.3 else None
        blocks = self.random.randint(0, tokens or 60) if some() < 0.5 else None
        args: list[Any] = ["KV.PREFIX.REGISTER", ns, DIM, "fp32"]
        args += ["LAYERS", 1, "TOKENS", tokens] if tokens is not None else []
        args += ["PARENT", parent, 0] if parent is not None else []
        args += ["META", bytes(meta)] if meta is not None else []
        args += ["BLOCKS", 1, blocks, struct.pack(f"<{blocks}Q", *range(blocks))] if blocks is not None else []
        args += ["PIN"] if some() < 0.1 else []
        had = self.chain(ns)[-1:]
        wanted = max(0, (meta or 0) - len(had[0].meta or b"")) if had else (meta or 0) + 8 * (blocks or 0)
        if self.call(self.random.randint(0, 1), wanted, ns, parent, *args) == "OK":
            self.use(ns)

    def lookup(self) -> None:
        ns = self.random.choice(NAMES)
        if self.call(0, 0, ns, None, "KV.PREFIX.LOOKUP", ns) == "HIT":
            self.use(ns)

    def pin(self) -> None:
        ns = self.random.choice(NAMES)
        self.call(0, 0, ns, None, self.random.choice(["KV.PREFIX.PIN", *["KV.PREFIX.UNPIN"] * 3]), ns)

    def drop(self) -> None:
        now(self.harness.call("KV.PREFIX.DROP", "CASCADE", self.random.choice(NAMES)))
        self.forget()

    def disconnect(self) -> None:
        client = self.random.randint(0, 1)
        self.clients[client].disconnect()
        self.clients[client] = self.harness.client()
        self.forget()

    def use(self, name: str, *, alone: bool = False) -> None:
        for part in reversed(self.chain(name)[-1:] if alone else self.chain(name)):
            self.used = [*(each for each in self.used if each is not part), part]

    def forget(self) -> None:
        there = set(self.store.units())
        self.used = [unit for unit in self.used if unit in there]

    # What must hold after every step.

    def check(self) -> None:
        ledger = self.store.ledger.statistics()
        assert ledger.charged_bytes <= MAX_BYTES
        assert (ledger.charged_bytes, ledger.payload_bytes) == recount(self.store)[:2]
        assert ledger.charged_bytes == sum(map(memory_bytes, self.store.units()))
        assert ledger.sending_bytes == 0
        assert set(self.used) == set(self.store.units())


STEPS = (
    *[Machine.create] * 3,
    *[Machine.store_rows] * 10,
    *[Machine.register] * 8,
    *[Machine.lookup] * 4,
    *[Machine.pin] * 2,
    Machine.drop,
    Machine.disconnect,
)


@pytest.mark.parametrize("seed", [*range(4), None])
def test_the_budget_holds_whatever_is_done(seed: int | None) -> None:
    seed = SystemRandom().getrandbits(32) if seed is None else seed
    machine = Machine(Random(seed))
    for number in range(500):
        step = machine.random.choice(STEPS)
        try:
            step(machine)
            machine.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {number}, {step.__name__}") from error
    assert machine.evicted > 5
    assert machine.refused > 3
    again = VStore(Config(max_sessions=1000, max_bytes=MAX_BYTES), machine.clock, NullJournal(), Ledger())
    for change in machine.store.journal.changes:
        again.replay(change)
    assert snapshot(again) == snapshot(machine.store)
    assert again.ledger.charged_bytes == machine.store.ledger.charged_bytes
