"""What a unit takes of the memory budget."""

from __future__ import annotations

from pion.storage.ledger import CHAIN_COST, LAYER_COST, SIDE_COST, UNIT_COST
from pion.storage.unit import SIDES, Unit


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
    for side in SIDES:
        rows = unit.rows(side)
        if rows is not None:
            total += SIDE_COST
            for layer in rows.layers.values():
                total += LAYER_COST + layer.memory_bytes
    return total
