"""The rows of an attention index as they lie in memory: blocks over buffers of keys and of values, never changed."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from pion.compute.attention import VALUE_BYTES, Floats
from pion.replies import Buffer
from pion.storage.ledger import Ledger, Memory, owned
from pion.storage.region import MappedMemory


@attrs.frozen(eq=False)
class IndexBlock:
    """Rows [start, stop): `keys` from byte `keys_at` on, `values` from `values_at` on; both may be one buffer."""

    start: int
    stop: int
    keys: Memory
    keys_at: int
    values: Memory
    values_at: int

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.stop - self.start

    @property
    def mapped(self) -> bool:
        """Whether its rows lie in a file."""
        return self.keys.mapped

    @property
    def doubtful(self) -> bool:
        """Whether its rows must be compared with their checksum, by `verify`, before anyone looks at them."""
        mapped = [each for each in (self.keys, self.values) if isinstance(each, MappedMemory)]
        for each in mapped:
            each.region.look()
        return not all(each.verified for each in mapped)

    def verify(self) -> bool:
        """Whether its rows are what was stored. Blocks, as they may lie in a file."""
        return all(each.verify() for each in (self.keys, self.values) if isinstance(each, MappedMemory))

    def view(self, start: int, stop: int, row_bytes: int) -> tuple[memoryview, memoryview]:
        """The keys and the values of rows [start, stop), which must lie inside the block, without a copy."""
        first, size = (start - self.start) * row_bytes, (stop - start) * row_bytes
        return _part(self.keys, self.keys_at + first, size), _part(self.values, self.values_at + first, size)

    def release(self, start: int, stop: int, row_bytes: int) -> None:
        """Rows [start, stop) of it are in the index no more."""
        size = (stop - start) * row_bytes
        self.keys.drop(size)
        self.values.drop(size)


def _part(memory: Memory, at: int, nbytes: int) -> memoryview:
    whole = memoryview(memory.buffer)  # type: ignore[arg-type]  # NumPy's stubs hide the buffer protocol
    return whole[at : at + nbytes].toreadonly()


def arrays(block: IndexBlock, dim: int) -> tuple[Floats, Floats]:
    """Keys and values of a block, float32 `[rows, dim]`, read-only, without a copy. They don't hold the block."""
    found = [np.frombuffer(view, np.float32) for view in block.view(block.start, block.stop, VALUE_BYTES * dim)]
    return found[0].reshape(-1, dim), found[1].reshape(-1, dim)


def empty_block(start: int, stop: int, row_bytes: int, ledger: Ledger) -> IndexBlock:
    """A block whose rows are to be written by `fill` before anyone sees it. It is charged from now on.

    Raises MemoryError.
    """
    keys, values = (Memory(np.empty((stop - start) * row_bytes, np.uint8), ledger) for _ in range(2))
    return IndexBlock(start, stop, keys, 0, values, 0)


def fill(target: IndexBlock, sources: Sequence[IndexBlock], row_bytes: int) -> None:
    """Copy the rows of adjacent blocks, which are those of `target`, into it. May be called in a thread."""
    keys, values = (np.frombuffer(each.buffer, np.uint8) for each in (target.keys, target.values))
    for block in sources:
        first = (block.start - target.start) * row_bytes
        parts = block.view(block.start, block.stop, row_bytes)
        for into, part in zip((keys, values), parts, strict=True):
            into[first : first + len(part)] = np.frombuffer(part, np.uint8)


def received_block(start: int, count: int, keys: Buffer, values: Buffer, ledger: Ledger) -> IndexBlock:
    """A block over received payloads, which are taken over."""
    return IndexBlock(start, start + count, Memory(owned(keys), ledger), 0, Memory(owned(values), ledger), 0)


def stored_block(start: int, count: int, row_bytes: int, memory: Memory, first: int = 0) -> IndexBlock:
    """A block over one buffer that has the keys and then the values of rows from `first` on, as records have them.

    `first` is what of the index is in front of the buffer.
    """
    rows = memory.nbytes // (2 * row_bytes)
    at = (start - first) * row_bytes
    return IndexBlock(start, start + count, memory, at, memory, rows * row_bytes + at)


def again(memory: Memory, ledger: Ledger) -> Memory:
    """Another owner of the same bytes: the first has told the ledger that they left the table."""
    if isinstance(memory, MappedMemory):
        other = MappedMemory(memory.region, ledger)
        other.verified = memory.verified
        return other
    return Memory(memory.buffer, ledger)
