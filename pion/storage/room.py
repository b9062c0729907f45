"""What a unit takes of the memory budget."""

from __future__ import annotations

from collections import Counter
from sys import getrefcount
from typing import Final

from pion.storage.block import Layer
from pion.storage.ledger import CHAIN_COST, LAYER_COST, PLACED_COST, SIDE_COST, UNIT_COST
from pion.storage.unit import SIDES, Side, Unit

BLOCK_REFERENCES: Final = 4
"""Those that a block has while `is_held` looks at it: of the table, the list, the loop and the call."""

MEMORY_REFERENCES: Final = 3
"""Those that a buffer has then beside those of its blocks: of the counter, the loop and the call."""


def memory_bytes(unit: Unit) -> int:
    """Bytes charged for a unit: what its end gives back, unless a reply still holds some of it.

    Rows that lie in files count with their fixed costs only.
    """
    total = UNIT_COST + len(unit.name) + len(unit.meta or b"")
    if unit.table is not None:
        total += unit.table.cost
    if unit.parent is not None:
        total += CHAIN_COST
    if unit.pending is not None:
        total += unit.pending.cost
    for file in unit.tier_files():
        total += PLACED_COST * len(file.runs)
    return total + sum(side_bytes(unit, side) for side in SIDES)


def side_bytes(unit: Unit, side: Side) -> int:
    """Bytes charged for the rows of one side, 0 before the first; a part of `memory_bytes`. O(blocks).

    A buffer counts whole as long as one of its rows is held, as it stays in memory whole.
    """
    rows = unit.rows(side)
    if rows is None:
        return 0
    return SIDE_COST + sum(LAYER_COST + layer.memory_bytes for layer in rows.layers.values())


def is_held(unit: Unit) -> bool:
    """Whether something else has rows of the unit, a reply that is not sent yet as a rule: its end would not free them.

    O(blocks). References are counted, as CPython counts them, since a block has no list of those who hold it. With a
    count that is too low units go in vain; with one too high a small write is refused once before others go.
    """
    return any(_blocks_are_held(layer) for layer in unit.all_layers())


def _blocks_are_held(layer: Layer) -> bool:
    blocks = [block for block in layer.blocks if not block.memory.mapped]
    if any(getrefcount(block) > BLOCK_REFERENCES for block in blocks):
        return True
    # A block that was cut since, and is in no table, holds its whole buffer.
    shared = Counter([block.memory for block in blocks])
    return any(getrefcount(memory) > shared[memory] + MEMORY_REFERENCES for memory in shared)
