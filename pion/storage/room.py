"""What a unit takes of the memory budget."""

from __future__ import annotations

from pion.storage.ledger import CHAIN_COST, LAYER_COST, PLACED_COST, SIDE_COST, UNIT_COST
from pion.storage.unit import SIDES, Side, Unit


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
