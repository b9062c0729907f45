"""Rows of one layer: immutable blocks in token order.

A block is rows [start, stop) over a buffer. Storing never edits a block: it puts a new one in and cuts the ones that it
overlaps, so whoever holds a block (a reply being sent, a snapshot) keeps a valid view.

Two things keep the memory held close to the memory counted and the number of blocks small:

- A cut block stays a view of its buffer while more than half of that buffer is in use; then what is left is copied out,
  at once if that is little work, else piece by piece by the reaper. The whole buffer stays charged until it is gone.
- Small neighbours are merged like the digits of a binary counter: a new block absorbs adjacent ones that are not larger
  than it has grown to. A row stored alone is copied O(log n) times until its block has `MERGE_BYTES`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final
from weakref import ref

import numpy as np

from pion.config import KIB, MIB
from pion.storage.ledger import BLOCK_COST, LAYER_COST, Ledger, Memory, Raw

MERGE_BYTES: Final = MIB
"""Merging stops here: the copy takes 0.1 ms, and a fetch of many MiB is still a few buffers per sendmsg call."""


GAP_BYTES: Final = 256 * KIB
"""A block that closes a gap also absorbs neighbours up to this size: rows that come in any order end as few blocks."""


class MissingRowError(LookupError):
    """A row that was asked for is not there; `row` is its id."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


class Block:
    """Rows [start, stop) at byte `offset` of a buffer. Never changed after it was made."""

    __slots__ = ("memory", "offset", "start", "stop")

    def __init__(self, start: int, stop: int, memory: Memory, offset: int) -> None:
        self.start = start
        self.stop = stop
        self.memory = memory
        self.offset = offset

    def view(self, start: int, stop: int, row_bytes: int) -> memoryview:
        """The bytes of rows [start, stop), which must lie inside the block."""
        first = self.offset + (start - self.start) * row_bytes
        whole = memoryview(self.memory.buffer)  # type: ignore[arg-type]  # NumPy's stubs hide the buffer protocol
        return whole[first : first + (stop - start) * row_bytes].toreadonly()

    def cut(self, start: int, stop: int, row_bytes: int) -> Block:
        """A smaller block over the same buffer."""
        return Block(start, stop, self.memory, self.offset + (start - self.start) * row_bytes)


def adjacent(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Runs of blocks without a gap, in order."""
    run: list[Block] = []
    for block in blocks:
        if run and block.start != run[-1].stop:
            yield run
            run = []
        run.append(block)
    if run:
        yield run


class Layer:
    """The rows of one layer of one session. `count` is the number of rows held."""

    __slots__ = ("_blocks", "_ledger", "_starts", "count", "row_bytes")

    def __init__(self, row_bytes: int, ledger: Ledger) -> None:
        self.row_bytes = row_bytes
        self.count = 0
        self._starts: list[int] = []
        self._blocks: list[Block] = []
        self._ledger = ledger
        ledger.charge(LAYER_COST)

    def store(self, start: int, count: int, payload: Raw | Memory) -> int:
        """Replace rows [start, start + count); returns by how many rows `count` grew. `payload` is taken over."""
        memory = payload if isinstance(payload, Memory) else Memory(payload, self._ledger)
        stop, width = start + count, self.row_bytes
        low, high = self._overlapped(start, stop)
        kept: list[Block] = []
        gone = 0
        cut: list[Memory] = []
        for block in self._blocks[low:high]:
            overlap = min(stop, block.stop) - max(start, block.start)
            gone += overlap
            if block.start < start:
                kept.append(block.cut(block.start, start, width))
            if block.stop > stop:
                kept.append(block.cut(stop, block.stop, width))
            block.memory.drop(overlap * width)
            if block.memory.live:
                cut.append(block.memory)
        position = 1 if kept and kept[0].start < start else 0
        kept.insert(position, Block(start, stop, memory, 0))
        self._splice(low, high, kept)
        grown = count - gone
        self.count += grown
        self._ledger.payload_bytes += grown * width
        if not memory.mapped:
            self._merge_around(low + position)
        for left in cut:
            if 0 < left.live * 2 <= left.nbytes and not left.mapped:
                if left.live <= MERGE_BYTES:
                    self._compact(left, start, stop)
                else:
                    self._ledger.put_off(partial(self._compact_piece, ref(left)), left)
        return grown

    def gather(self, start: int, stop: int) -> list[tuple[Block, int, int]]:
        """The blocks of rows [start, stop) in order, each with the range to take from it.

        Raises `MissingRowError` naming the first row that is not there.
        """
        index = bisect_right(self._starts, start) - 1
        if index >= 0 and stop <= self._blocks[index].stop:
            return [(self._blocks[index], start, stop)]
        found: list[tuple[Block, int, int]] = []
        position = start
        while position < stop:
            block = self._blocks[index] if 0 <= index < len(self._blocks) else None
            if block is None or not block.start <= position < block.stop:
                raise MissingRowError(position)
            end = min(stop, block.stop)
            found.append((block, position, end))
            position = end
            index += 1
        return found

    def held(self, limit: int) -> int:
        """How many of the rows [0, limit) are held."""
        if not self._blocks or self._blocks[-1].stop <= limit:
            return self.count
        low, high = self._overlapped(0, limit)
        return sum(min(limit, block.stop) - block.start for block in self._blocks[low:high])

    def clear(self) -> None:
        """Take every block out; the layer must not be used afterwards."""
        for block in self._blocks:
            block.memory.drop((block.stop - block.start) * self.row_bytes)
        self._ledger.charge(-LAYER_COST - BLOCK_COST * len(self._blocks))
        self._ledger.payload_bytes -= self.count * self.row_bytes
        self._starts, self._blocks, self.count = [], [], 0

    def move(self, old: Memory, new: Memory, first: int) -> None:
        """Blocks over `old` become blocks over `new`, which holds the same rows from row `first` on."""
        width = self.row_bytes
        for index, block in enumerate(self._blocks):
            if block.memory is old:
                size = (block.stop - block.start) * width
                self._blocks[index] = Block(block.start, block.stop, new, (block.start - first) * width)
                old.drop(size)

    def exchange(self, stand_in: Callable[[Memory], Memory | None]) -> None:
        """Let other memory with the same bytes take the place of what `stand_in` gives one for.

        Called once for each memory. What it returns has no live bytes yet, and must not be in a table.
        """
        width = self.row_bytes
        made: dict[Memory, Memory | None] = {}
        for index, block in enumerate(self._blocks):
            old = block.memory
            if old not in made:
                found = made[old] = stand_in(old)
                if found is not None:
                    found.change_live(-found.live)
            new = made[old]
            if new is not None:
                size = (block.stop - block.start) * width
                self._blocks[index] = Block(block.start, block.stop, new, block.offset)
                new.change_live(size)
                old.drop(size)

    @property
    def memory_bytes(self) -> int:
        """Bytes charged for its blocks and their buffers; rows that lie in files cost their blocks only."""
        buffers = {block.memory: block.memory.nbytes for block in self._blocks if not block.memory.mapped}
        return BLOCK_COST * len(self._blocks) + sum(buffers.values())

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks in token order."""
        return tuple(self._blocks)

    def _overlapped(self, start: int, stop: int) -> tuple[int, int]:
        low = bisect_right(self._starts, start) - 1
        if low < 0 or self._blocks[low].stop <= start:
            low += 1
        return low, bisect_left(self._starts, stop, low)

    def _splice(self, low: int, high: int, blocks: list[Block]) -> None:
        self._blocks[low:high] = blocks
        self._starts[low:high] = [block.start for block in blocks]
        self._ledger.charge(BLOCK_COST * (len(blocks) - (high - low)))

    def _merge_around(self, index: int) -> None:
        blocks, width = self._blocks, self.row_bytes
        low = high = index
        size = (blocks[index].stop - blocks[index].start) * width
        before, behind = self._touches(low - 1), self._touches(high)
        # Closing a gap is rare, so it may copy more.
        limit = GAP_BYTES if before and behind else 0
        while before or behind:
            if before:
                other = (blocks[low - 1].stop - blocks[low - 1].start) * width
                if before := other <= max(size, limit) and size + other <= MERGE_BYTES:
                    low, size = low - 1, size + other
                    before = self._touches(low - 1)
            if behind:
                other = (blocks[high + 1].stop - blocks[high + 1].start) * width
                if behind := other <= max(size, limit) and size + other <= MERGE_BYTES:
                    high, size = high + 1, size + other
                    behind = self._touches(high)
        if high > low:
            self._join(low, high + 1)

    def _touches(self, index: int) -> bool:
        """Whether the blocks at `index` and behind it are adjacent and may be merged."""
        if not 0 <= index < len(self._blocks) - 1:
            return False
        one, two = self._blocks[index], self._blocks[index + 1]
        return one.stop == two.start and not one.memory.mapped and not two.memory.mapped

    def _join(self, low: int, high: int) -> None:
        """Copy the adjacent blocks [low, high) into one block over a buffer of its own."""
        old, width = self._blocks[low:high], self.row_bytes
        first, last = old[0].start, old[-1].stop
        joined = np.empty((last - first) * width, np.uint8)
        position = 0
        for block in old:
            size = (block.stop - block.start) * width
            joined[position : position + size] = np.frombuffer(block.view(block.start, block.stop, width), np.uint8)
            block.memory.drop(size)
            position += size
        self._splice(low, high, [Block(first, last, Memory(joined, self._ledger), 0)])

    def _compact(self, memory: Memory, start: int, stop: int) -> None:
        """Copy what is left of a buffer out of it, with the small blocks between, so that the buffer can go.

        Rows [start, stop) were just replaced, at least one of which was in the buffer.
        """
        rows = memory.nbytes // self.row_bytes
        first, last = self._overlapped(max(0, start - rows), stop + rows)
        indices = [index for index in range(first, last) if self._blocks[index].memory is memory]
        if not indices:
            return
        low, high = indices[0], indices[-1] + 1
        # Runs are joined from the back, so that the positions in front of them stay what they were.
        while high > low:
            start = high - 1
            while start > low and self._joinable(start - 1, memory) and self._joinable(start, memory):
                if self._blocks[start - 1].stop != self._blocks[start].start:
                    break
                start -= 1
            if any(block.memory is memory for block in self._blocks[start:high]):
                self._join(start, high)
            high = start

    def _compact_piece(self, reference: ref[Memory]) -> bool:
        """Copy up to `MERGE_BYTES` of what is left of a buffer out of it; True if there is more."""
        memory = reference()
        if memory is None:
            return False
        width = self.row_bytes
        for index, block in enumerate(self._blocks):
            if block.memory is memory:
                rows = max(1, MERGE_BYTES // width)
                if block.stop - block.start > rows:
                    middle = block.start + rows
                    parts = [block.cut(block.start, middle, width), block.cut(middle, block.stop, width)]
                    self._splice(index, index + 1, parts)
                self._join(index, index + 1)
                return memory.live > 0
        return False

    def _joinable(self, index: int, memory: Memory) -> bool:
        block = self._blocks[index]
        if block.memory.mapped:
            return False
        return block.memory is memory or (block.stop - block.start) * self.row_bytes * 2 <= MERGE_BYTES
