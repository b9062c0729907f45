"""Random changes while a snapshot is taken piece by piece: it has the state of the moment when it was begun.

The snapshot is written to a file and read by a start into another store, which is compared with what the first one was
at that moment, and with which the machine may go on: then rows lie in the file, and move to the next one.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pion.config import Config
from pion.errors import CommandError
from pion.storage import recovery, snapshot_format, vstore_log
from pion.storage.changes import (
    Change,
    CreateSession,
    Declaration,
    DropPrefix,
    DropSession,
    Hashes,
    Register,
    SetExpiry,
    SetPin,
    StoreRows,
)
from pion.storage.durable import Captured
from pion.storage.formats import get_format
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.region import Region
from pion.storage.schema import Schema
from pion.storage.segments import snapshot_name
from pion.storage.snapshot import _File
from pion.storage.snapshot_format import Identity
from pion.storage.unit import SUFFIXES, Unit
from pion.storage.vstore import VStore
from pion.storage.vstore_log import VStoreLog
from pion.testing import FakeClock, MemoryDisk
from tests.commands.kv_support import recount, snapshot

SHAPE = Schema.uniform(get_format(b"fp32"), 1)
OTHER = Schema.uniform(get_format(b"fp32"), 2)
NAMES = st.sampled_from([b"a", b"b", b"c", b"d"])
SIDS = st.sampled_from([b"s", b"t", *(name + suffix for name in (b"a", b"b", b"c", b"d") for suffix in SUFFIXES)])
SHAPES = st.sampled_from([SHAPE, SHAPE, SHAPE, OTHER])
MAX_SESSIONS = 9


def state(store: VStore) -> dict[Any, Any]:
    """All of the store, pending registrations included; who owns those is not kept."""
    found = snapshot(store)
    for unit in found.values():
        unit["pending"] = unit["pending"] and unit["pending"][1:]
        del unit["children"]
    return found


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(vstore_log, "MAP_FROM_BYTES", 8)
        self.patch.setattr(recovery, "READ_AT_START_BYTES", 8)
        self.patch.setattr(snapshot_format, "OWN_TENSOR_BYTES", 8)
        self.clock = FakeClock()
        self.disk = MemoryDisk()
        self.covers = self.counter = 0
        self.store, self.log = self.make()
        self.capture: Any = None
        self.file: _File | None = None
        self.begun: dict[Any, Any] = {}
        self.order: list[bytes] = []
        self.disturbed = False

    def make(self) -> tuple[VStore, VStoreLog]:
        store = VStore(Config(max_sessions=MAX_SESSIONS), self.clock, NullJournal(), Ledger())
        return store, VStoreLog(store)

    def teardown(self) -> None:
        self.patch.undo()

    def commit(self, change: Change) -> None:
        """As a command does it; what is refused changes nothing."""
        try:
            self.store.check(change)
            self.store.commit(change)
        except CommandError:
            pass

    # Changes.

    @rule(sid=SIDS, shape=SHAPES)
    def create(self, sid: bytes, shape: Schema) -> None:
        self.commit(CreateSession(sid, shape))

    @rule(sid=SIDS, layer=st.integers(0, 1), start=st.integers(0, 6), count=st.integers(1, 6))
    def store_rows(self, sid: bytes, layer: int, start: int, count: int) -> None:
        found = self.store.find_session(sid)
        if found is not None:
            schema = found[0].schema(found[1])
            assert schema is not None
            self.counter += 1
            data = bytes((self.counter + index) % 256 for index in range(count * schema.layer(layer).row_bytes))
            self.commit(StoreRows(sid, layer, start, count, data, 1))

    @rule(
        ns=NAMES,
        shape=SHAPES,
        declared=st.none() | st.tuples(st.integers(1, 2), st.integers(1, 4)),
        parent=st.none() | st.tuples(NAMES, st.integers(0, 4)),
        hashes=st.none() | st.binary(min_size=8, max_size=8),
        meta=st.none() | st.binary(max_size=3),
        expires=st.none() | st.integers(1, 20),
        pin=st.booleans(),
    )
    def register(self, ns, shape, declared, parent, hashes, meta, expires, pin) -> None:
        self.commit(
            Register(
                ns=ns,
                k_schema=shape,
                v_schema=shape,
                declaration=Declaration(*declared) if declared else None,
                hashes=Hashes(2, hashes) if hashes is not None else None,
                meta=meta,
                parent=parent[0] if parent else None,
                offset=parent[1] if parent else 0,
                expires_s=self.clock.wall_s() + expires if expires else None,
                pin=pin,
                owner=1,
            )
        )

    @rule(ns=NAMES, tokens=st.integers(1, 3))
    def whole_prefix(self, ns: bytes, tokens: int) -> None:
        """Declared and filled."""
        self.register(ns, SHAPE, (1, tokens), None, None, b"m", None, False)
        for suffix in SUFFIXES:
            self.store_rows(ns + suffix, 0, 0, tokens)

    @rule(ns=NAMES, parent=NAMES)
    def continued_prefix(self, ns: bytes, parent: bytes) -> None:
        """One that continues another, if both can be."""
        above = self.store.visible(parent)
        if above is not None and ns not in self.store.prefixes:
            self.register(ns, SHAPE, (1, 1), (parent, above.end), None, None, None, False)
            for suffix in SUFFIXES:
                self.store_rows(ns + suffix, 0, 0, 1)

    @rule(sid=st.sampled_from([b"s", b"t"]), start=st.integers(0, 7))
    def open_session(self, sid: bytes, start: int) -> None:
        """One with a run of rows, of which some are replaced in the middle once it is there."""
        if self.store.find_session(sid) is None:
            self.commit(CreateSession(sid, SHAPE))
            self.store_rows(sid, 0, 0, 9)
        else:
            self.store_rows(sid, 0, start, 1)

    @rule(ns=NAMES)
    def drop(self, ns: bytes) -> None:
        if ns in self.store.prefixes:
            self.commit(DropPrefix(ns))

    @rule(sid=SIDS)
    def drop_session(self, sid: bytes) -> None:
        if self.store.find_session(sid) is not None:
            self.commit(DropSession(sid))

    @rule(ns=NAMES, pinned=st.booleans())
    def pin(self, ns: bytes, pinned: bool) -> None:
        self.commit(SetPin(ns, pinned))

    @rule(ns=NAMES)
    def persist(self, ns: bytes) -> None:
        self.commit(SetExpiry(ns, 0.0))

    @rule(ns=NAMES)
    def use(self, ns: bytes) -> None:
        unit = self.store.visible(ns)
        if unit is not None:
            self.store.touch(unit)

    @rule(seconds=st.integers(1, 12))
    def advance(self, seconds: int) -> None:
        self.clock.advance(seconds)
        self.store.drop_expired(100)

    @rule()
    def disconnect(self) -> None:
        self.store.disconnect(1)

    @rule()
    def work_off(self) -> None:
        self.store.ledger.work_off()

    # The snapshot.

    @precondition(lambda self: self.file is None)
    @rule()
    def begin(self) -> None:
        self.begun = state(self.store)
        self.order = [unit.name for unit in self.store.policy.victims()]
        self.capture = self.log.capture()
        self.disturbed = False
        told = self.store.before_change
        assert told is not None

        def before_change(change: Change) -> None:
            self.disturbed = True
            told(change)

        self.store.before_change = before_change
        self.covers += 1
        identity = Identity(worker=0, covers=self.covers, lineage=bytes(16))
        self.file = _File(self.disk, "new", self.store.ledger.payload_bytes, identity)

    @precondition(lambda self: self.file is not None)
    @rule(count=st.integers(1, 6))
    def go_on(self, count: int) -> None:
        assert self.file is not None
        self.file.add([("vstore", captured) for captured in self.take(count)])

    def take(self, count: int) -> list[Captured]:
        return [captured for _, captured in zip(range(count), self.capture, strict=False)]

    @precondition(lambda self: self.file is not None)
    @rule(restart=st.booleans())
    def finish(self, restart: bool) -> None:
        assert self.file is not None
        self.file.add([("vstore", captured) for captured in self.capture])
        self.capture.close()
        assert self.store.before_change is None
        self.file.finish()
        self.disk.rename("new", snapshot_name(0))
        mapping = self.disk.map(snapshot_name(0))
        store, log = self.make()
        recovery.load(self.disk, 0, [log])
        assert state(store) == self.begun
        # What changes meanwhile is taken before its turn; but then the log behind the snapshot uses it again.
        assert self.disturbed or [unit.name for unit in store.policy.victims()] == self.order
        self.check(store)
        if restart:
            log.finish_replay()
            assert not store.pending
            self.store, self.log = store, log
        else:
            before = state(self.store)
            for captured, entry in self.file.followed:
                captured.moved(Region(mapping, entry.start, entry.nbytes, entry.checksum, entry.seed))
            assert state(self.store) == before
        self.file = self.capture = None

    @precondition(lambda self: self.file is not None)
    @rule()
    def give_up(self) -> None:
        assert self.file is not None
        self.file.abandon()
        self.capture.close()
        assert self.store.before_change is None
        self.file = self.capture = None

    # What must hold.

    @invariant()
    def books_balance(self) -> None:
        self.check(self.store)

    def check(self, store: VStore) -> None:
        _, payload, sessions = recount(store)
        assert (store.ledger.payload_bytes, store.sessions) == (payload, sessions)
        for unit in store.units():
            self.check_mapped(unit)

    def check_mapped(self, unit: Unit) -> None:
        for side in (0, 1):
            held = unit.rows(side)
            for layer in held.layers.values() if held is not None else ():
                for block in layer.blocks:
                    assert not block.memory.mapped or block.memory.verify()  # type: ignore[attr-defined]


Machine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
TestCaptureMachine = Machine.TestCase
