"""The V-store behind the log: its journal, its replay, and its state for a snapshot."""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Awaitable, Iterator, Sequence
from typing import Final

from pion.config import KIB
from pion.errors import CommandError
from pion.replies import Buffer
from pion.storage.block import Block, Layer, adjacent
from pion.storage.changes import (
    Change,
    CreateSession,
    DropPrefix,
    DropSession,
    Hashes,
    PlaceRows,
    Reason,
    Register,
    SetExpiry,
    SetPin,
    StoreRows,
)
from pion.storage.durable import Captured, Durable, Record
from pion.storage.ledger import Memory, Raw
from pion.storage.placed import PromotedMemory, TierFile, TierMemory, placed_file
from pion.storage.region import DamagedError, MappedMemory, Region
from pion.storage.tiers.runs import PlacedRun
from pion.storage.unit import SIDES, SUFFIXES, Side, Unit, split_sid
from pion.storage.vstore import VStore
from pion.storage.vstore_records import pack, unpack

logger = logging.getLogger("pion.storage")

MAP_FROM_BYTES: Final = 64 * KIB
"""Rows of one record from here on stay in the file until they are used; shorter ones are read at the start."""

SORTED_UNITS: Final = 20_000
"""Up to so many units a snapshot has them in their order of use; sorting more would hold the loop."""

_U32: Final = struct.Struct("<I")

_Item = tuple[Change, int]


class VStoreLog(Durable):
    """The store's journal (`pion.storage.journal.Journal`), and what the log needs of the store."""

    family = "vstore"

    def __init__(self, store: VStore) -> None:
        self._store = store
        self._damaged: dict[Unit, None] = {}
        """What has rows that can't be read, while records are replayed."""
        store.journal = self

    # Journal.

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return self.log.size_bytes if self.log is not None else 0

    def append(self, change: Change, *, created: int) -> Awaitable[None] | None:
        """See `Journal`."""
        rows = change.data if type(change) is StoreRows else b""
        return self.keep((change, created), 0 if isinstance(rows, Memory) else len(rows))

    # Durable.

    def encode(self, item: _Item) -> Record:
        """See `Durable`."""
        change, created = item
        rows = change.data if type(change) is StoreRows and not isinstance(change.data, Memory) else None
        return Record(pack(change, again=not created and isinstance(change, CreateSession | Register)), rows)

    def replay(self, meta: bytes, data: Region | None) -> None:
        """See `Durable`. Raises ValueError."""
        rows: Raw | Memory = b""
        damaged = False
        if data is not None:
            if data.nbytes >= MAP_FROM_BYTES or self._store.over(data.nbytes) > 0:
                rows = MappedMemory(data, self._store.ledger)
            else:
                try:
                    rows = data.read()
                except DamagedError:
                    damaged = True
        change = unpack(meta, rows)
        if type(change) is StoreRows and damaged:
            found = self._store.held_session(change.sid)
            if found is not None:
                self._damaged[found[0]] = None
            return
        try:
            self._store.replay(change)
        except (AssertionError, LookupError, CommandError) as error:
            raise ValueError(f"{type(change).__name__} of something that is not there") from error

    def finish_replay(self) -> None:
        """See `Durable`."""
        damaged, self._damaged = self._damaged, {}
        for unit in damaged:
            if (self._store.lone if unit.lone else self._store.prefixes).get(unit.name) is unit:
                self._store.drop_damaged(unit)
        self._store.finish_replay()

    def undo(self, items: Sequence[_Item]) -> None:
        """See `Durable`. What was created goes; so does a declared prefix of which a row is missing in the log.

        What was there before stays, as it is now: with rows that were stored in an open session, with a second side.
        The client was told that it can't be sure.
        """
        store = self._store
        for change, created in items:
            unit: Unit | None = None
            if type(change) is Register and created == len(SIDES):
                unit = store.prefixes.get(change.ns)
            elif type(change) is CreateSession and created:
                found = store.held_session(change.sid)
                if found is not None and not found[0].registered:
                    store.replay(DropSession(change.sid))
            elif type(change) is StoreRows:
                found = store.held_session(change.sid)
                unit = found[0] if found is not None and found[0].declaration is not None else None
            if unit is not None:
                store.drop_unit(unit, Reason.ABANDONED)

    def capture(self) -> Iterator[Captured]:
        """See `Durable`. Each unit is taken before its first change, so all are as they were at the call."""
        return _Capture(self._store)


def _unit(store: VStore, change: Change) -> Unit | None:
    """What a change is about; a lone session and a prefix may have the same name."""
    if isinstance(change, Register | DropPrefix | SetExpiry | SetPin):
        return store.prefixes.get(change.ns)
    if isinstance(change, PlaceRows):
        return (store.lone if change.lone else store.prefixes).get(change.name)
    split = split_sid(change.sid)
    return store.lone.get(change.sid) if split is None else store.prefixes.get(split[0])


class _Capture:
    """The state of one moment, taken unit by unit while the store goes on."""

    def __init__(self, store: VStore) -> None:
        self._store = store
        units = list(store.units())
        if len(units) <= SORTED_UNITS:
            store.policy.settle(2**31)
            units.sort(key=lambda unit: unit.stamp)
        self._left = set(units)
        self._order = iter(units)
        self._taken: deque[Captured] = deque()
        store.before_change = self._before

    def __iter__(self) -> Iterator[Captured]:
        return self

    def __next__(self) -> Captured:
        while not self._taken:
            self._take(next(self._order))  # its end is ours
        return self._taken.popleft()

    def close(self) -> None:
        """Nothing more is taken."""
        self._store.before_change = None
        self._left, self._order, self._taken = set(), iter(()), deque()

    def _before(self, change: Change) -> None:
        unit = _unit(self._store, change)
        if unit is not None:
            self._take(unit)
            if type(change) is DropPrefix:
                for below in unit.descendants():
                    self._take(below)

    def _take(self, unit: Unit) -> None:
        for part in unit.chain():
            if part in self._left:
                self._left.discard(part)
                self._taken.extend(_records(self._store, part))


def registration(unit: Unit) -> bytes:
    """The changes that make a unit without its rows, each behind its length: what a tier's object tells of it."""
    return b"".join(_U32.pack(len(each)) + each for each in map(pack, _made_by(unit)))


def _made_by(unit: Unit) -> Iterator[Change]:
    """What makes one unit without its rows, its ancestors being there."""
    if unit.registered:
        assert unit.k_schema is not None and unit.v_schema is not None  # noqa: PT018, S101  a registered one has both
        table, parent = unit.table, unit.parent
        yield Register(
            ns=unit.name,
            k_schema=unit.k_schema,
            v_schema=unit.v_schema,
            declaration=unit.declaration,
            hashes=Hashes(table.block_size, table.own) if table is not None else None,
            meta=unit.meta,
            parent=parent.name if parent is not None else None,
            offset=unit.offset,
            expires_s=unit.expires_s or None,
            pin=unit.pinned,
        )
        return
    for side in SIDES:
        schema = unit.schema(side)
        if schema is not None:
            yield CreateSession(_sid(unit, side), schema)
    if unit.pinned:
        yield SetPin(unit.name, True)


def _records(store: VStore, unit: Unit) -> Iterator[Captured]:
    """What makes one unit again, its ancestors being there."""
    yield from map(_captured, _made_by(unit))
    for file, runs in _placed_runs(unit).items():  # what was stored since then follows, and takes the place of it again
        yield _captured(PlaceRows(unit.name, unit.lone, file.key, file.nbytes, tuple(runs)))
    for side in SIDES:
        rows = unit.rows(side)
        for index, layer in rows.layers.items() if rows is not None else ():
            yield from _layer_records(store, unit, _sid(unit, side), index, layer)


def _placed_runs(unit: Unit) -> dict[TierFile, dict[PlacedRun, None]]:
    """The runs of each object that something still refers to: the others may be of a side that was dropped since."""
    found: dict[TierFile, dict[PlacedRun, None]] = {}
    for layer in unit.all_layers():
        for block in layer.blocks:
            memory = block.memory
            if isinstance(memory, TierMemory | PromotedMemory):
                found.setdefault(memory.file, {})[memory.run] = None
    return found


def _sid(unit: Unit, side: Side) -> bytes:
    return unit.name if unit.lone else unit.name + SUFFIXES[side]


def _captured(change: Change) -> Captured:
    return Captured(pack(change))


def _layer_records(store: VStore, unit: Unit, sid: bytes, index: int, layer: Layer) -> Iterator[Captured]:
    for run in adjacent(block for block in layer.blocks if placed_file(block.memory) is None):
        start, stop = run[0].start, run[-1].stop
        meta = pack(StoreRows(sid, index, start, stop - start, b""))
        yield _CapturedRows(store, unit, layer, meta, run)


class _CapturedRows(Captured):
    """Adjacent blocks of one layer."""

    __slots__ = ("_first", "_layer", "_mapped", "_store", "_unit")

    def __init__(self, store: VStore, unit: Unit, layer: Layer, meta: bytes, blocks: Sequence[Block]) -> None:
        width = layer.row_bytes
        parts: list[Buffer] = [block.view(block.start, block.stop, width) for block in blocks]
        super().__init__(meta, parts)
        self._store = store
        self._unit = unit
        self._layer = layer
        self._first = blocks[0].start
        self._mapped = [block.memory for block in blocks if isinstance(block.memory, MappedMemory)]

    @property
    def follows(self) -> bool:
        return bool(self._mapped)

    def verify(self) -> bool:
        return all(memory.verify() for memory in self._mapped)

    def damaged(self) -> None:
        # Rows that were replaced meanwhile are nobody's any more.
        if any(memory.live and not memory.verified for memory in self._mapped):
            self._store.drop_damaged(self._unit)

    def moved(self, region: Region) -> None:
        if self._mapped:
            memory = MappedMemory(region, self._store.ledger)
            for old in self._mapped:
                self._layer.move(old, memory, self._first)
