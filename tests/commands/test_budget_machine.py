"""Random commands under a small byte budget: what is charged stays within it, and what goes for it is what should.

The order of use is kept in a list beside the store. After each command the ledger is recounted, and what was evicted is
compared with the rules: the least recently used first, leaf before parent, never what is pinned, pending or in use by
the command, never more than necessary, and -OOM only if all of that would not have been enough.
"""

from __future__ import annotations

import struct
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pion.config import Config
from pion.storage.changes import DropPrefix, EvictSession
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.room import memory_bytes
from pion.storage.unit import Unit, split_sid
from pion.storage.vstore import VStore
from pion.testing import FakeClock
from tests.commands.kv_support import make_kv, now, recount, snapshot

MAX_BYTES = 16_000
DIM = 16
NAMES = st.sampled_from(["a", "b", "c", "d", "e", "f"])
SIDS = st.sampled_from(["s", "t", "u", *(f"{ns}_p{side}" for ns in "abcdef" for side in "kv")])
CLIENTS = st.integers(0, 1)
SLACK = 2600
"""More than the fixed costs that a command may ask room for and not use."""


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
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
        gone = {
            self.named(before, change)
            for change in store.journal.changes[changes:]
            if isinstance(change, DropPrefix | EvictSession)
        }
        if text.startswith("-"):
            assert snapshot(store) == old, text
            assert store.ledger.charged_bytes == charged
        if text.startswith("-OOM"):
            possible = self.evictable(before, below, protected)
            assert charged - sum(before[unit][0] for unit in possible) + wanted + SLACK > MAX_BYTES
            return reply
        for unit in gone:
            assert before[unit][1:] == (False, False)
            assert unit not in protected
            assert below[unit] <= gone
        if gone:
            last = max(gone, key=self.used.index)
            for unit in self.used[: self.used.index(last)]:
                kept = unit in protected or before[unit][1] or before[unit][2] or not below[unit] <= gone
                assert unit in gone or kept, f"{unit.name!r} was used before {last.name!r}, which went"
            needed = charged - sum(before[unit][0] for unit in gone) + wanted
            assert needed + before[last][0] + SLACK > MAX_BYTES, "one less would have done"
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

    def evictable(self, units: Any, below: Any, protected: set[Unit]) -> set[Unit]:
        found: set[Unit] = set()
        for _ in units:
            found |= {
                unit
                for unit, kept in units.items()
                if not any(kept[1:]) and unit not in protected and below[unit] <= found
            }
        return found

    def use(self, name: str) -> None:
        for part in reversed(self.chain(name)):
            if part in self.used:
                self.used.remove(part)
            self.used.append(part)

    # Commands.

    @rule(sid=SIDS)
    def create(self, sid: str) -> None:
        if self.call(0, 0, sid, None, "V.CREATE", sid, DIM, "VQUANT", "fp32") == "OK":
            (unit,) = self.chain(sid)[-1:]
            self.used = [*(each for each in self.used if each is not unit), unit]

    @rule(
        sid=SIDS,
        layer=st.integers(0, 2),
        start=st.integers(0, 30),
        count=st.integers(0, 40),
        wire=st.sampled_from(["fp16", "native"]),
        client=CLIENTS,
    )
    def store_rows(self, sid: str, layer: int, start: int, count: int, wire: str, client: int) -> None:
        """With fp16 on the wire twice as much is kept as was received."""
        data = bytes(count * DIM * (2 if wire == "fp16" else 4))
        reply = self.call(
            client, 4 * DIM * count, sid, None, "V.STOREBATCH", sid, layer, start, count, data, "AS", wire
        )
        if reply == "OK" and count:
            (unit,) = self.chain(sid)[-1:]
            if unit.pending is None and unit.declaration is not None:
                self.use(sid)  # it has just become complete
            else:
                self.used = [*(each for each in self.used if each is not unit), unit]

    @rule(
        ns=NAMES,
        client=CLIENTS,
        tokens=st.none() | st.integers(0, 20),
        parent=st.none() | NAMES,
        meta=st.none() | st.sampled_from([0, 100, 3000, 20_000]),
        blocks=st.none() | st.integers(0, 60),
        pin=st.booleans(),
    )
    def register(self, ns: str, client: int, tokens: Any, parent: Any, meta: Any, blocks: Any, pin: bool) -> None:
        args: list[Any] = ["KV.PREFIX.REGISTER", ns, DIM, "fp32"]
        args += ["LAYERS", 1, "TOKENS", tokens] if tokens is not None else []
        args += ["PARENT", parent, 0] if parent is not None else []
        args += ["META", bytes(meta)] if meta is not None else []
        args += ["BLOCKS", 1, blocks, struct.pack(f"<{blocks}Q", *range(blocks))] if blocks is not None else []
        args += ["PIN"] if pin else []
        wanted = (meta or 0) + 8 * (blocks or 0)
        had = self.chain(ns)
        wanted -= len(had[-1].meta or b"") + 8 * (blocks or 0) if had else 0
        if self.call(client, wanted, ns, parent, *args) == "OK":
            self.use(ns)

    @rule(ns=NAMES)
    def lookup(self, ns: str) -> None:
        if self.call(0, 0, ns, None, "KV.PREFIX.LOOKUP", ns) == "HIT":
            self.use(ns)

    @rule(ns=NAMES, pin=st.booleans())
    def pin(self, ns: str, pin: bool) -> None:
        self.call(0, 0, ns, None, "KV.PREFIX.PIN" if pin else "KV.PREFIX.UNPIN", ns)

    @rule(ns=NAMES)
    def drop(self, ns: str) -> None:
        now(self.harness.call("KV.PREFIX.DROP", "CASCADE", ns))
        self.forget()

    @rule(client=CLIENTS)
    def disconnect(self, client: int) -> None:
        self.clients[client].disconnect()
        self.clients[client] = self.harness.client()
        self.forget()

    def forget(self) -> None:
        there = set(self.store.units())
        self.used = [unit for unit in self.used if unit in there]

    # What must hold after every step.

    @invariant()
    def the_budget_holds(self) -> None:
        ledger = self.store.ledger.statistics()
        assert ledger.charged_bytes <= MAX_BYTES
        assert (ledger.charged_bytes, ledger.payload_bytes) == recount(self.store)[:2]
        assert ledger.charged_bytes == sum(map(memory_bytes, self.store.units()))
        assert ledger.sending_bytes == 0
        assert set(self.used) == set(self.store.units())

    def teardown(self) -> None:
        again = VStore(Config(max_sessions=1000, max_bytes=MAX_BYTES), self.clock, NullJournal(), Ledger())
        for change in self.store.journal.changes:
            again.replay(change)
        assert snapshot(again) == snapshot(self.store)
        assert again.ledger.charged_bytes == self.store.ledger.charged_bytes


Machine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
TestBudgetMachine = Machine.TestCase
