"""The rows of a unit on their way to the tier and back: gathered on the event loop, read in a thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
            parts = [block.view(block.start, block.stop, width) for block in run]
            runs.append(RowRun(side, index, run[0].start, run[-1].stop - run[0].start, parts))
    return lay_out(key, register, runs)


def copies(memories: Sequence[TierMemory]) -> dict[TierMemory, NDArray[np.uint8]] | None:
    """Copies of rows in memory, made in a thread; None if some are damaged."""
    if not all(memory.verify() for memory in memories):
        return None
    return {memory: memory.buffer.copy() for memory in memories}
