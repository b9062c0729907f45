"""The rows of a unit on their way to the tier and back: gathered on the event loop, read in a thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pion.limits import TIER_RUN_BYTES
from pion.storage.block import Block, adjacent
from pion.storage.placed import TierFile, TierMemory, placed_file
from pion.storage.region import MappedMemory
from pion.storage.tiers.tier_format import Layout, RowRun, lay_out
from pion.storage.unit import SIDES, Side, Unit

Rows = list[tuple[Side, int, int, tuple[Block, ...]]]
"""Side, layer, bytes of a row, and the layer's blocks. Two are equal only if nothing was stored in between."""


def rows_of(unit: Unit) -> Rows:
    """All rows of a unit, in memory or not."""
    return [
        (side, index, layer.row_bytes, layer.blocks)
        for side in SIDES
        if (rows := unit.rows(side)) is not None
        for index, layer in rows.layers.items()
    ]


def files_of(rows: Rows) -> list[TierFile]:
    """The objects that some of the rows lie in already."""
    files = dict.fromkeys(placed_file(block.memory) for *_, blocks in rows for block in blocks if block.memory.mapped)
    return [file for file in files if file is not None]


def lay_out_rows(key: str, register: bytes, rows: Rows) -> Layout | None:
    """Plan the object, in a thread; None if something that lies in a file is damaged."""
    runs: list[RowRun] = []
    for side, index, width, blocks in rows:
        for block in blocks:
            memory = block.memory
            if isinstance(memory, MappedMemory) and not memory.verify():
                return None
        for run in adjacent(blocks):
            runs += (RowRun(side, index, start, stop - start, parts) for start, stop, parts in _pieces(run, width))
    return lay_out(key, register, runs)


def _pieces(run: Sequence[Block], width: int) -> Iterator[tuple[int, int, list[memoryview]]]:
    """Adjacent blocks in pieces of at most `TIER_RUN_BYTES`, all about as large: first row, one past the last, rows."""
    first, last = run[0].start, run[-1].stop
    count = -(-(last - first) // max(1, TIER_RUN_BYTES // width))
    bounds = [first + (last - first) * number // count for number in range(count + 1)]
    for start, stop in pairwise(bounds):
        overlaps = ((block, max(start, block.start), min(stop, block.stop)) for block in run)
        yield start, stop, [block.view(low, high, width) for block, low, high in overlaps if low < high]


def copies(memories: Sequence[TierMemory]) -> dict[TierMemory, NDArray[np.uint8]] | None:
    """Copies of rows in memory, made in a thread; None if some are damaged."""
    if not all(memory.verify() for memory in memories):
        return None
    return {memory: memory.buffer.copy() for memory in memories}
