"""Attention indexes: rows of keys and values under a name, appended and then read whole by `ATTEND.QUERY`.

An index is *blocks* of adjacent rows, each a range of a buffer of keys and of a buffer of values. A block never
changes after it was made, so a reply in flight and a query that is being computed stay valid whatever happens to the
index. What changes is the tuple of blocks:

- An append adds a block over the received payloads, without a copy. Small neighbours are merged like the digits of a
  binary counter, so a million appends of one row are a few blocks.
- A query needs all rows in one piece. Whoever asks first copies them together, in a thread, and the copy takes the
  place of the blocks. So an index that is only queried is copied once.
- That copy needs room for a moment, and a query must not fail for want of it. So the room is *reserved*, that is
  charged, from the append on that left the index in several pieces. It is given back when the pieces are one.

An index is never evicted: nothing else has its rows. It is dropped by a command, or when its bytes on disk turn out to
be damaged. All functions are synchronous and atomic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from pion.args import show
from pion.compute.attention import VALUE_BYTES
from pion.config import MIB, Config
from pion.errors import CommandError, OutOfMemoryError
from pion.limits import INLINE_ARG_BYTES
from pion.replies import Buffer
from pion.storage.attention_index_blocks import IndexBlock, again, empty_block
from pion.storage.ledger import Ledger, Memory
from pion.storage.vstore import EXPIRE_BYTES, EXPIRED_FIRST, VStore

MERGE_BYTES: Final = MIB
"""Blocks are merged up to so many bytes of keys and values: the copy takes 0.1 ms."""

INDEX_COST: Final = 192
"""Bytes for one index beside its name: the object, its tuple of blocks, its dictionary entry."""

PIECE_COST: Final = 480
"""Bytes for one block beside its rows: block, the owners of two buffers, the headers of these."""


@attrs.define(eq=False)
class AttentionIndex:
    """One index: `dim` values in each key and in each value."""

    name: bytes
    dim: int
    blocks: tuple[IndexBlock, ...] = ()
    """In order and without a gap, from row 0 on."""
    reserved_bytes: int = 0
    """Charged for the copy that a query will make."""
    gathering: bool = False
    """That copy is being made, and is charged itself."""

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.blocks[-1].stop if self.blocks else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one key, and of one value."""
        return VALUE_BYTES * self.dim

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return 2 * self.rows * self.row_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes charged for it. O(blocks)."""
        buffers = {each for block in self.blocks for each in (block.keys, block.values) if not each.mapped}
        held = sum(memory.nbytes for memory in buffers)
        return INDEX_COST + len(self.name) + PIECE_COST * len(self.blocks) + held + self.reserved_bytes

    @property
    def whole(self) -> bool:
        """Whether all rows are one piece in memory."""
        return len(self.blocks) == 1 and not self.blocks[0].mapped

    def piece(self, rows: int) -> IndexBlock | None:
        """The block in memory that begins with the first `rows` rows, or with all if there are fewer; None: they are in
        several, or in a file. There must be rows.
        """
        first = self.blocks[0]
        return None if first.mapped or first.stop < min(rows, self.rows) else first

    def cover(self, start: int, stop: int) -> Iterator[tuple[IndexBlock, int, int]]:
        """The blocks of rows [start, stop), which must be there, each with the range to take from it."""
        for block in self.blocks:
            if block.start < stop and start < block.stop:
                yield block, max(start, block.start), min(stop, block.stop)


class IndexTable:
    """All indexes of one worker, within the byte budget of its store."""

    def __init__(self, store: VStore) -> None:
        self._store = store
        self._indexes: dict[bytes, AttentionIndex] = {}
        self.queries = 0
        """Vectors that were asked with."""
        self.checksum_failures = 0

    @property
    def config(self) -> Config:
        """The limits now."""
        return self._store.config

    @property
    def ledger(self) -> Ledger:
        """Where bytes are counted."""
        return self._store.ledger

    def __len__(self) -> int:
        return len(self._indexes)

    def __iter__(self) -> Iterator[AttentionIndex]:
        return iter(self._indexes.values())

    def find(self, name: bytes) -> AttentionIndex | None:
        """The index of that name, or None."""
        return self._indexes.get(name)

    def index(self, name: bytes) -> AttentionIndex:
        """The index of that name. Raises CommandError."""
        found = self._indexes.get(name)
        if found is None:
            raise CommandError(f"no index {show(name)}")
        return found

    def over(self, nbytes: int) -> int:
        """How far `nbytes` more would exceed the byte budget."""
        return self._store.over(nbytes)

    # Changing.

    def check_append(self, name: bytes, dim: int, count: int) -> None:
        """Raise CommandError if `count` rows of that width can't be appended, whatever room there is."""
        index = self._indexes.get(name)
        if index is not None and index.dim != dim:
            raise CommandError(f"D must be {index.dim} as in the rows that index {show(name)} has, got {dim}")
        rows = count + (index.rows if index is not None else 0)
        if rows > self.config.max_index_rows:
            raise CommandError(
                f"n must leave index {show(name)} with at most {self.config.max_index_rows} rows (--max-index-rows), "
                f"it would have {rows}"
            )
        if index is None and len(self._indexes) >= self.config.max_indexes:
            raise OutOfMemoryError(
                f"{self.config.max_indexes} attention indexes are in use (--max-indexes), and none of them is evictable"
            )

    def make_room(self, name: bytes, keys: Buffer, values: Buffer) -> None:
        """Evict prefixes until the rows fit the byte budget. Raises OutOfMemoryError; then nothing has changed here."""
        store, index = self._store, self._indexes.get(name)
        payload = len(keys) + len(values)
        nbytes = payload + PIECE_COST
        if index is None:
            nbytes += INDEX_COST + len(name)
        else:
            nbytes += index.nbytes + payload - index.reserved_bytes
            low = _merge_from(index, payload // (2 * index.row_bytes))
            if low < len(index.blocks):  # for a moment, and until the log has them, they are there twice
                nbytes += payload + 2 * (index.rows - index.blocks[low].start) * index.row_bytes
        others = 0
        if self.config.max_bytes:
            if store.over(EXPIRE_BYTES) > 0:
                store.drop_expired(EXPIRED_FIRST)
            received = sum(len(each) for each in (keys, values) if len(each) > INLINE_ARG_BYTES)
            others = max(0, store.in_flight() - received)
        store.make_room(name, 0, nbytes, others, [])

    def append(self, name: bytes, dim: int, block: IndexBlock) -> AttentionIndex:
        """Add a block behind the rows of an index, made if it is not there. Nothing is checked."""
        index = self._indexes.get(name)
        if index is None:
            index = self._indexes[name] = AttentionIndex(name, dim)
            self.ledger.charge(INDEX_COST + len(name))
        self.ledger.charge(PIECE_COST)
        self.ledger.payload_bytes += 2 * block.rows * index.row_bytes
        self._set(index, self._merged(index, block))
        return index

    def drop(self, index: AttentionIndex) -> None:
        """Take an index out. Its object still has the rows, for `restore`."""
        del self._indexes[index.name]
        for block in index.blocks:
            block.release(block.start, block.stop, index.row_bytes)
        self.ledger.charge(-INDEX_COST - len(index.name) - PIECE_COST * len(index.blocks) - index.reserved_bytes)
        self.ledger.payload_bytes -= index.nbytes
        index.reserved_bytes = 0

    def restore(self, index: AttentionIndex) -> None:
        """Put a dropped index back, with its rows; there must be none of its name."""
        self._indexes[index.name] = index
        made: dict[Memory, Memory] = {}
        for block in index.blocks:
            for old in (block.keys, block.values):
                if old not in made:
                    made[old] = again(old, self.ledger)
                    made[old].live = 0
                made[old].live += block.rows * index.row_bytes
        blocks = [attrs.evolve(block, keys=made[block.keys], values=made[block.values]) for block in index.blocks]
        self.ledger.charge(INDEX_COST + len(index.name) + PIECE_COST * len(blocks))
        self.ledger.payload_bytes += index.nbytes
        self._set(index, tuple(blocks))

    def truncate(self, index: AttentionIndex, rows: int) -> None:
        """Take the rows from number `rows` on out again, and the index if none is left."""
        if not rows:
            self.drop(index)
            return
        kept: list[IndexBlock] = []
        for block in index.blocks:
            if block.stop <= rows:
                kept.append(block)
                continue
            first = max(rows, block.start)
            block.release(first, block.stop, index.row_bytes)
            self.ledger.payload_bytes -= 2 * (block.stop - first) * index.row_bytes
            if block.start < rows:
                kept.append(attrs.evolve(block, stop=rows))
            else:
                self.ledger.charge(-PIECE_COST)
        self._set(index, tuple(kept))

    # One piece out of many.

    def begin_gather(self, index: AttentionIndex, sources: Sequence[IndexBlock]) -> IndexBlock:
        """A block to copy the index's first blocks into, on what was reserved for it; `end_gather` must follow.

        Raises MemoryError.
        """
        target = empty_block(0, sources[-1].stop, index.row_bytes, self.ledger)
        index.gathering = True
        self._reserve(index)
        return target

    def end_gather(self, index: AttentionIndex, sources: Sequence[IndexBlock], target: IndexBlock | None) -> None:
        """The copy was made, and takes the place of the blocks that it was made of if they are all still there.

        None: it was not.
        """
        index.gathering = False
        if self._indexes.get(index.name) is not index:
            return
        count = len(sources)
        if target is not None and index.blocks[:count] == tuple(sources):
            for block in sources:
                block.release(block.start, block.stop, index.row_bytes)
            self.ledger.charge(PIECE_COST * (1 - count))
            index.blocks = (target, *index.blocks[count:])
        self._reserve(index)

    def move(self, index: AttentionIndex, moved: dict[IndexBlock, IndexBlock]) -> None:
        """Other blocks with the same rows take the place of some, if these are still there."""
        if self._indexes.get(index.name) is not index:
            return
        for block in index.blocks:
            if block in moved:
                block.release(block.start, block.stop, index.row_bytes)
        self._set(index, tuple(moved.get(block, block) for block in index.blocks))

    def _merged(self, index: AttentionIndex, block: IndexBlock) -> tuple[IndexBlock, ...]:
        blocks = index.blocks
        low = len(blocks) if block.mapped else _merge_from(index, block.rows)
        if low == len(blocks):
            return (*blocks, block)
        parts = [*blocks[low:], block]
        views = [part.view(part.start, part.stop, index.row_bytes) for part in parts]
        # Short ones are many: bytes objects are smaller than arrays.
        keys, values = (Memory(b"".join(each), self.ledger) for each in zip(*views, strict=True))
        joined = IndexBlock(blocks[low].start, block.stop, keys, 0, values, 0)
        for part in parts:
            part.release(part.start, part.stop, index.row_bytes)
        self.ledger.charge(PIECE_COST * (1 - len(parts)))
        return (*blocks[:low], joined)

    def _set(self, index: AttentionIndex, blocks: tuple[IndexBlock, ...]) -> None:
        index.blocks = blocks
        self._reserve(index)

    def _reserve(self, index: AttentionIndex) -> None:
        wanted = 0 if index.gathering or index.whole else index.nbytes
        self.ledger.charge(wanted - index.reserved_bytes)
        index.reserved_bytes = wanted


def _merge_from(index: AttentionIndex, rows: int) -> int:
    """The first of the last blocks that a new one of so many rows absorbs: adjacent ones that are not larger than it
    has grown to.
    """
    blocks, low = index.blocks, len(index.blocks)
    most = MERGE_BYTES // (2 * index.row_bytes)
    while low and not blocks[low - 1].mapped and blocks[low - 1].rows <= rows and rows + blocks[low - 1].rows <= most:
        low -= 1
        rows += blocks[low].rows
    return low
