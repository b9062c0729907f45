"""The attention indexes behind the log: their changes as bytes and back, replay, undo, and their state for a snapshot.

`docs/reference/log-format.md` describes the records for readers of the files.
"""

from __future__ import annotations

import enum
import logging
import struct
from collections.abc import Awaitable, Iterator, Sequence
from typing import Final, TypeAlias

import attrs
import numpy as np

from pion.args import show
from pion.compute.attention import VALUE_BYTES
from pion.config import KIB
from pion.replies import Buffer
from pion.storage.attention_index import AttentionIndex, IndexTable
from pion.storage.attention_index_blocks import IndexBlock, received_block, stored_block
from pion.storage.durable import Captured, Durable, Record
from pion.storage.ledger import Memory
from pion.storage.region import DamagedError, MappedMemory, Region
from pion.storage.vstore import VStore

logger = logging.getLogger("pion.storage")

MAP_FROM_BYTES: Final = 64 * KIB
"""Rows of one record from here on stay in the file until they are used; shorter ones are read at the start."""

_TEXT: Final = struct.Struct("<I")
_APPEND: Final = struct.Struct("<III")

APPEND_ROWS: Final = 1
DROP_INDEX: Final = 2


class DropReason(enum.IntEnum):
    """Why an index went."""

    COMMAND = 0
    DAMAGED = 1


@attrs.frozen(eq=False)
class AppendRows:
    """Rows `block.start` to `block.stop - 1` were appended."""

    index: AttentionIndex
    block: IndexBlock


@attrs.frozen(eq=False)
class DropIndex:
    """An index was dropped; it still has its rows."""

    index: AttentionIndex
    reason: DropReason


IndexChange: TypeAlias = AppendRows | DropIndex


def pack_append(name: bytes, dim: int, start: int, count: int) -> bytes:
    """The meta part of an append's record; its data are the keys and then the values."""
    return bytes((APPEND_ROWS,)) + _TEXT.pack(len(name)) + name + _APPEND.pack(dim, start, count)


def pack_drop(name: bytes, reason: DropReason) -> bytes:
    """The meta part of a drop's record."""
    return bytes((DROP_INDEX,)) + _TEXT.pack(len(name)) + name + bytes((reason,))


def unpack(meta: bytes) -> tuple[int, bytes, tuple[int, ...]]:
    """Kind, name, and the numbers behind it: D, start and count, or the reason. Raises ValueError."""
    try:
        kind = meta[0]
        (size,) = _TEXT.unpack_from(meta, 1)
        name, rest = meta[5 : 5 + size], meta[5 + size :]
        if kind == APPEND_ROWS:
            dim, start, count = _APPEND.unpack(rest)
            if not (dim and count):
                raise ValueError("an append of nothing")
            return kind, name, (dim, start, count)
        if kind == DROP_INDEX and len(rest) == 1:
            return kind, name, (DropReason(rest[0]),)
    except (struct.error, IndexError) as error:
        raise ValueError(str(error)) from error
    raise ValueError(f"unknown kind of change, {kind}, or of a wrong length")


class AttentionIndexLog(Durable):
    """The indexes of one worker, every change of them in the log."""

    family = "attention_index"

    def __init__(self, store: VStore) -> None:
        self.table = IndexTable(store)
        self._damaged: dict[bytes, int] = {}
        """Indexes of which a record can't be read, while records are replayed, and how many rows they should have."""

    # Changes.

    def append_rows(
        self, name: bytes, dim: int, count: int, keys: Buffer, values: Buffer
    ) -> tuple[int, Awaitable[None] | None]:
        """Append `count` rows of `dim` fp32 values each; `keys` and `values` are taken over and have the right lengths.

        Returns how many rows the index has now, and what must be awaited before the client is answered, if anything.
        Raises CommandError, OutOfMemoryError or MisconfError; then nothing has changed.
        """
        self.check()
        table = self.table
        table.check_append(name, dim, count)
        table.make_room(name, keys, values)
        found = table.find(name)
        start = found.rows if found is not None else 0
        block = received_block(start, count, keys, values, table.ledger)
        index = table.append(name, dim, block)
        return index.rows, self.keep(AppendRows(index, block), len(keys) + len(values))

    def drop_index(self, name: bytes) -> tuple[bool, Awaitable[None] | None]:
        """Drop an index. Returns whether it was there, and what must be awaited before the client is answered.

        Raises MisconfError; then nothing has changed.
        """
        self.check()
        index = self.table.find(name)
        return (False, None) if index is None else (True, self._drop(index, DropReason.COMMAND))

    def drop_damaged(self, index: AttentionIndex) -> None:
        """Drop an index whose bytes on disk are not what was stored, if it is still there: an error, never data."""
        if self.table.find(index.name) is index:
            self._note_damage(index.name)
            self._drop(index, DropReason.DAMAGED)

    def _drop(self, index: AttentionIndex, reason: DropReason) -> Awaitable[None] | None:
        self.table.drop(index)
        return self.keep(DropIndex(index, reason))

    def _note_damage(self, name: bytes) -> None:
        logger.error("attention index %s: a checksum failed, dropped", show(name))
        self.table.checksum_failures += 1

    # Durable.

    def encode(self, item: IndexChange) -> Record:
        """See `Durable`. Copies the rows of an append together."""
        name, dim = item.index.name, item.index.dim
        if isinstance(item, DropIndex):
            return Record(pack_drop(name, item.reason))
        block = item.block
        parts = block.view(block.start, block.stop, item.index.row_bytes)
        data = np.concatenate([np.frombuffer(part, np.uint8) for part in parts])
        return Record(pack_append(name, dim, block.start, block.rows), data)

    def replay(self, meta: bytes, data: Region | None) -> None:
        """See `Durable`. Raises ValueError."""
        kind, name, numbers = unpack(meta)
        index = self.table.find(name)
        if kind == DROP_INDEX:
            if index is None and name not in self._damaged:
                raise ValueError("a drop of an index that is not there")
            self._damaged.pop(name, None)
            if index is not None:
                self.table.drop(index)
            return
        dim, start, count = numbers
        rows = self._damaged.get(name, index.rows if index is not None else 0)
        if start != rows or (index is not None and index.dim != dim):
            raise ValueError("an append that does not fit the rows before it")
        block = None if name in self._damaged else self._stored(index, dim, start, count, data)
        if block is None:
            self._damaged[name] = start + count
        else:
            self.table.append(name, dim, block)

    def _stored(
        self, index: AttentionIndex | None, dim: int, start: int, count: int, data: Region | None
    ) -> IndexBlock | None:
        """The rows of a record, or None if they can't be read. Raises ValueError."""
        row_bytes = VALUE_BYTES * dim
        if data is None or data.nbytes != 2 * count * row_bytes:
            if data is not None and not data.verify():
                return None
            raise ValueError(f"an append of {count} rows of {2 * row_bytes} bytes with other data")
        memory: Memory
        if data.nbytes >= MAP_FROM_BYTES or self.table.over(data.nbytes) > 0:
            memory = MappedMemory(data, self.table.ledger)
        else:
            try:
                memory = Memory(data.read(), self.table.ledger)
            except DamagedError:
                return None
        return stored_block(start, count, row_bytes, memory, start)

    def finish_replay(self) -> None:
        """See `Durable`. What can't be read whole is dropped, also from the log."""
        damaged, self._damaged = self._damaged, {}
        for name in damaged:
            self._note_damage(name)
            index = self.table.find(name)
            if index is not None:
                self._drop(index, DropReason.DAMAGED)
            else:
                self.keep(DropIndex(AttentionIndex(name, 1), DropReason.DAMAGED))

    def undo(self, items: Sequence[IndexChange]) -> None:
        """See `Durable`. Every index is again as its last record says."""
        for item in reversed(items):
            index = item.index
            found = self.table.find(index.name)
            if isinstance(item, AppendRows):
                if found is index:
                    self.table.truncate(index, item.block.start)
            elif found is None and index.rows and item.reason is DropReason.COMMAND:
                self.table.restore(index)

    def capture(self) -> Iterator[Captured]:
        """See `Durable`. Blocks are immutable, so the tuples of them are the state of this moment."""
        return _capture(self, [(index, index.blocks) for index in self.table])


def _capture(log: AttentionIndexLog, state: list[tuple[AttentionIndex, tuple[IndexBlock, ...]]]) -> Iterator[Captured]:
    state.reverse()
    while state:
        yield _CapturedIndex(log, *state.pop())  # what was written is not held any longer


class _CapturedIndex(Captured):
    """All rows of one index, as one append."""

    __slots__ = ("_index", "_log", "_mapped", "_rows")

    def __init__(self, log: AttentionIndexLog, index: AttentionIndex, blocks: Sequence[IndexBlock]) -> None:
        views = [block.view(block.start, block.stop, index.row_bytes) for block in blocks]
        self._rows = blocks[-1].stop
        parts: list[Buffer] = [keys for keys, _ in views]
        super().__init__(pack_append(index.name, index.dim, 0, self._rows), parts + [values for _, values in views])
        self._log = log
        self._index = index
        self._mapped = [block for block in blocks if block.mapped]

    @property
    def follows(self) -> bool:
        return bool(self._mapped)

    def verify(self) -> bool:
        return all(block.verify() for block in self._mapped)

    def damaged(self) -> None:
        self._log.drop_damaged(self._index)

    def moved(self, region: Region) -> None:
        memory = MappedMemory(region, self._log.table.ledger)
        memory.live = 0
        width = self._index.row_bytes
        moved: dict[IndexBlock, IndexBlock] = {}
        for block in self._mapped:
            moved[block] = stored_block(block.start, block.rows, width, memory)
            memory.live += 2 * block.rows * width
        self._log.table.move(self._index, moved)
