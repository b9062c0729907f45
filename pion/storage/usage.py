"""What one unit costs: its share of `Ledger.charged_bytes`, counted from what it holds.

Units share no buffers. So the shares of all units, and what only unfinished replies hold, make up the ledger's sum.
"""

from __future__ import annotations

from pion.storage.ledger import BLOCK_COST, CHAIN_COST, LAYER_COST, SIDE_COST, TABLE_COST, UNIT_COST
from pion.storage.unit import SIDES, Side, Unit


def unit_bytes(unit: Unit) -> int:
    """Bytes in memory charged for a prefix with its two sides, or for a lone session. O(blocks).

    Payload buffers, name, META, hash table, and the fixed cost of every object beside them.
    """
    total = UNIT_COST + len(unit.name)
    if unit.meta is not None:
        total += len(unit.meta)
    if unit.parent is not None:
        total += CHAIN_COST
    if unit.pending is not None:
        total += unit.pending.cost
    table = unit.table
    if table is not None:
        total += TABLE_COST + len(table.chain)
        if table.members is not None:
            total += table.members.nbytes
    for side in SIDES:
        total += side_bytes(unit, side)
    return total


def side_bytes(unit: Unit, side: Side) -> int:
    """Bytes in memory charged for the rows of one side, 0 before the first; a part of `unit_bytes`. O(blocks).

    A buffer counts whole as long as one of its rows is held, as it stays in memory whole. Of rows that lie in files
    only their blocks count.
    """
    rows = unit.rows(side)
    if rows is None:
        return 0
    total = SIDE_COST
    for layer in rows.layers.values():
        blocks = layer.blocks
        total += LAYER_COST + BLOCK_COST * len(blocks)
        memories = {block.memory for block in blocks}
        total += sum(memory.nbytes for memory in memories if not memory.mapped)
    return total
