"""What the tests with faults share: a server on a `MemoryDisk`, and what may be there after a crash.

The log keeps changes in the order in which they were made, so a crash leaves the state after some number of them: none
that was acknowledged may be missing. `History` has the state after each change; a restart must find one of them.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from random import Random
from typing import Any, TypeVar

import attrs
import pytest
import trio
from trio.testing import MockClock

from pion.config import Config
from pion.storage import recovery, snapshot, snapshot_format, vstore_log
from pion.storage.changes import Change, DropPrefix, DropSession
from pion.storage.data_directory import DataDirectory, open_disk
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.region import MappedMemory
from pion.storage.unit import SIDES, Unit
from pion.storage.vstore import VStore
from pion.storage.vstore_log import VStoreLog
from pion.testing import FakeClock, Fault, MemoryDisk, Operation, ProcessDied

T = TypeVar("T")

DIM = 16
WIDTH = 4 * DIM
"""Bytes of one row."""
MAX_SESSIONS = 10
SEGMENT_LIMIT = 3000
MAPPED_FROM = 512
"""Rows of one record from here on stay in the file, in these tests."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are many: what is done with large data happens with a few hundred bytes."""
    monkeypatch.setattr(vstore_log, "MAP_FROM_BYTES", MAPPED_FROM)
    monkeypatch.setattr(recovery, "READ_AT_START_BYTES", MAPPED_FROM)
    monkeypatch.setattr(snapshot_format, "OWN_TENSOR_BYTES", MAPPED_FROM)
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", MAPPED_FROM)
    monkeypatch.setattr(snapshot, "CAPTURE_S", 1e9)


@pytest.fixture
def same_each_time(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in threads runs at its place instead, and tasks always in the same order.

    So operation 17 is the same in every run.
    """
    monkeypatch.setattr(trio.to_thread, "run_sync", _run_here)
    monkeypatch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    numbers = Random(1)
    monkeypatch.setattr(secrets, "randbits", numbers.getrandbits)
    monkeypatch.setattr(secrets, "token_bytes", numbers.randbytes)


async def _run_here(
    function: Callable[..., T], *args: Any, limiter: trio.CapacityLimiter | None = None, **options: Any
) -> T:
    """As `trio.to_thread.run_sync`: others run before and after it, and it can't be cancelled once it has begun."""
    await trio.lowlevel.checkpoint_if_cancelled()
    async with limiter or nullcontext():
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
        result = function(*args)
    with trio.CancelScope(shield=True):
        await trio.lowlevel.checkpoint()
    return result


@functools.cache
def row(sid: bytes, layer: int, index: int, version: int) -> bytes:
    """A row that says where it belongs and which one of those stored there it is."""
    name = b"%b|%d|%d|%d|" % (sid, layer, index, version)
    return name + bytes((17 * version + index + byte) % 251 for byte in range(WIDTH - len(name)))


def rows(sid: bytes, layer: int, start: int, stop: int, version: int) -> bytes:
    """Adjacent rows."""
    return b"".join(row(sid, layer, index, version) for index in range(start, stop))


# What a store holds.

State = tuple[tuple[Any, ...], ...]


def state_of(store: VStore) -> State:
    """Everything that a restart keeps, in a form that can be compared. What is pending is dropped by a restart."""
    return tuple(
        sorted(
            (_unit(unit) for unit in store.units() if not any(part.pending is not None for part in unit.chain())),
            key=lambda unit: unit[:2],
        )
    )


def _unit(unit: Unit) -> tuple[Any, ...]:
    return (
        unit.lone,
        unit.name,
        unit.registered,
        str(unit.k_schema),
        str(unit.v_schema),
        unit.declaration,
        unit.parent and unit.parent.name,
        unit.offset,
        unit.table and (unit.table.block_size, unit.table.own),
        unit.meta,
        unit.expires_s,
        unit.pinned,
        tuple(run for side in SIDES for run in _runs(unit, side)),
    )


def _runs(unit: Unit, side: Any) -> Iterator[tuple[Any, ...]]:
    held = unit.rows(side)
    for index, layer in sorted(held.layers.items()) if held is not None else ():
        run: list[Any] = []
        for block in layer.blocks:
            view = block.view(block.start, block.stop, layer.row_bytes)
            if run and run[3] == block.start:
                run[3:] = [block.stop, run[4] + bytes(view)]
            else:
                if run:
                    yield tuple(run)
                run = [side, index, block.start, block.stop, bytes(view)]
        if run:
            yield tuple(run)


def check_rows(store: VStore) -> int:
    """Each row is one that was stored there; declared prefixes are whole. Returns how many payloads lie in files."""
    mapped: dict[int, MappedMemory] = {}
    for unit in store.units():
        versions = set()
        for side in SIDES:
            sid = unit.name if unit.lone else unit.name + (b"_pk", b"_pv")[side]
            held = unit.rows(side)
            for index, layer in held.layers.items() if held is not None else ():
                for block in layer.blocks:
                    if isinstance(block.memory, MappedMemory):
                        assert block.memory.verify(), f"{sid!r}: layer {index} is damaged"
                        mapped[id(block.memory)] = block.memory
                    data = bytes(block.view(block.start, block.stop, layer.row_bytes))
                    for at in range(block.start, block.stop):
                        found = data[(at - block.start) * WIDTH :][:WIDTH]
                        version = int(found.split(b"|")[3])
                        assert found == row(sid, index, at, version)
                        versions.add(version)
        declared = unit.declaration
        if declared is not None and unit.pending is None:
            assert len(versions) == 1, f"{unit.name!r} mixes versions {versions}"
            for side in SIDES:
                for index in range(declared.layers):
                    layer = unit.layer(side, index)
                    assert layer is not None
                    assert layer.count == layer.held(declared.tokens) == declared.tokens
    return len(mapped)


@attrs.define
class History:
    """The states that a server went through, and which of them must survive what."""

    states: list[State] = attrs.field(factory=lambda: [()])
    acknowledged: int = 0
    """The first state that may be found after the death of the process: all before it were told to be surpassed."""
    flushed: int = 0
    """The first that may be found after a power cut, if nothing was promised about it."""

    def note(self, store: VStore) -> int:
        """The store changed; returns the number of its state."""
        self.states.append(state_of(store))
        return len(self.states) - 1

    def acknowledge(self, number: int) -> None:
        """A client was told that a state was reached."""
        self.acknowledged = max(self.acknowledged, number)

    def copy(self) -> History:
        """Another one that goes on from here."""
        return History(list(self.states), self.acknowledged, self.flushed)

    def look(self, disk: MemoryDisk) -> None:
        """If nothing on the disk could be lost now, then nothing that was acknowledged may be."""
        names = [name for name in disk.names() if name.startswith("pion.vstore.") and not name.endswith(".tmp")]
        if all(disk.flushed(name) for name in names):
            self.flushed = self.acknowledged

    def check_undone(self, store: VStore) -> None:
        """Changes are refused: nothing is visible that was made by one that failed, nor a part of a prefix."""
        acknowledged = {unit[:2]: unit for unit in self.states[self.acknowledged]}
        for unit in state_of(store):
            before = acknowledged[unit[:2]]
            assert before[5] == unit[5]
            assert unit[5] is None or before[-1] == unit[-1]

    def first(self, *, power: bool, mode: str) -> int:
        """The first state that a restart may find."""
        return self.flushed if power and mode != "always" else self.acknowledged


class Journal(VStoreLog):
    """The store's log; notes every state."""

    def __init__(self, store: VStore, history: History) -> None:
        super().__init__(store)
        self._history = history

    def append(self, change: Change, *, created: bool) -> Awaitable[None] | None:
        waiting = super().append(change, created=created)
        self._history.note(self._store)
        return waiting

    def undo(self, items: Any) -> None:
        super().undo(items)
        self._history.note(self._store)


def _drops_nothing(store: VStore, change: Change) -> bool:
    if isinstance(change, DropSession):
        return store.held_session(change.sid) is None
    return isinstance(change, DropPrefix) and change.ns not in store.prefixes


@attrs.define(eq=False)
class Server:
    """What `pion.server` makes of a data directory, without sockets."""

    store: VStore
    data: DataDirectory
    history: History
    clock: FakeClock
    reported: list[str] = attrs.field(factory=list)
    """The errors that clients were told."""

    async def change(self, *changes: Change) -> None:
        """As a command does it. Raises CommandError."""
        await self.data.admit()
        store = self.store
        waits = [store.commit(each) for each in changes if not _drops_nothing(store, each)]
        number = len(self.history.states) - 1
        for waiting in waits:
            if waiting is not None:
                await waiting
        self.history.acknowledge(number)

    async def save(self, path: str | None = None) -> None:
        """KV.PREFIX.SAVE. Raises MisconfError."""
        broken, number = self.data.log.error, len(self.history.states) - 1
        await self.data.save(path)
        if broken:  # otherwise the log has everything
            self.history.acknowledge(number)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        """Its tasks run in the block; they end as with the process at its end."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.data.run)
            yield self
            nursery.cancel_scope.cancel()


def open_server(disk: MemoryDisk, mode: str, history: History | None = None, clock: FakeClock | None = None) -> Server:
    """Read a disk. Raises StartupError."""
    clock, history = clock or FakeClock(), history or History()
    config = Config(dir="memory", wal_sync=mode, max_sessions=MAX_SESSIONS)
    store = VStore(config, clock, NullJournal(), Ledger())
    journal = Journal(store, history)
    data = open_disk(disk, config, [journal], lambda: store.ledger.payload_bytes, segment_limit=SEGMENT_LIMIT)
    return Server(store, data, history, clock)


def found_state(disk: MemoryDisk, mode: str) -> State:
    """What a restart finds; its rows are checked. Raises StartupError."""
    logging.disable(logging.CRITICAL)  # there are thousands of these, and each would be kept by the test runner
    try:
        server = open_server(disk, mode)
        server.data._families[0].finish_replay()
    finally:
        logging.disable(logging.NOTSET)
    check_rows(server.store)
    return state_of(server.store)


@attrs.define
class Injector:
    """A plan with one fault, that remembers what it has seen."""

    target: int = 0
    """Which operation to hit; 0: none."""
    fault: Fault = attrs.field(factory=Fault)
    onwards: bool = False
    seen: list[Operation] = attrs.field(factory=list)
    hit: Operation | None = None
    look: Callable[[], None] = lambda: None
    """Called before each operation."""

    def __call__(self, operation: Operation) -> Fault | None:
        self.look()
        self.seen.append(operation)
        number = len(self.seen)
        if number == self.target:
            self.hit = operation
        return self.fault if number == self.target or (self.onwards and number > self.target > 0) else None


def run_until_death(main: Callable[..., Awaitable[None]], *args: Any) -> bool:
    """Run on a clock that jumps; whether the process died by plan. Tasks run in the same order each time."""
    trio._core._run._r.seed(1)
    died = False
    try:
        trio.run(functools.partial(main, *args), clock=MockClock(autojump_threshold=0))
    except* ProcessDied:
        died = True
    return died
