"""Block-hash tables, and the index that finds the longest stored prefix of a list of block hashes.

The index keeps the hash lists of all visible prefixes in the order of their bytes. In such an order the entry that
shares the longest beginning with a list lies next to the place where that list belongs, so a match is one binary search
and two comparisons, exact by construction, for 8 bytes an entry beside the hashes themselves.

A segment's entry is the list of the whole chain: its ancestors' blocks up to the fork, then its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from pion.errors import CommandError
from pion.storage.hashes import Membership
from pion.storage.ledger import TABLE_COST, Ledger
from pion.storage.ordered import SortedMap

if TYPE_CHECKING:
    from pion.storage.unit import Unit

HASH_BYTES: Final = 8

MAX_BLOCK_SIZES: Final = 64
"""Different block sizes among the stored tables; a MATCH without SIZE searches each, and clients use one or two."""


class BlockTable:
    """The hash table of one prefix. `chain` holds the hashes from the root on, of which `inherited` are ancestors'.

    A table that doesn't join its ancestors' without a gap can't be matched: `matchable` is false, and `chain` holds its
    own hashes only.
    """

    __slots__ = ("_ledger", "_members", "block_size", "chain", "inherited", "matchable")

    def __init__(self, block_size: int, own: bytes, parent: Unit | None, offset: int, ledger: Ledger) -> None:
        self.block_size = block_size
        self.inherited = 0
        self.matchable = True
        self.chain = own
        self._members: Membership | None = None
        if parent is not None:
            table = parent.table
            blocks = offset // block_size
            self.matchable = (
                table is not None
                and table.matchable
                and table.block_size == block_size
                and len(table.chain) >= blocks * HASH_BYTES
            )
            if self.matchable and blocks:
                assert table is not None  # noqa: S101  part of matchable
                self.inherited = blocks
                self.chain = table.chain[: blocks * HASH_BYTES] + own
        self._ledger = ledger
        ledger.charge(TABLE_COST + len(self.chain))

    @property
    def own(self) -> bytes:
        """The hashes of the blocks that end in this prefix, as they were registered."""
        return self.chain[self.inherited * HASH_BYTES :] if self.inherited else self.chain

    def members(self) -> Membership:
        """What answers MEMBERSHIP for its own hashes; built at the first call."""
        if self._members is None:
            self._members = Membership(np.frombuffer(self.own, np.uint64))
            self._ledger.charge(self._members.nbytes)
        return self._members

    def discharge(self) -> None:
        """Uncount it; the table must not be used afterwards."""
        members = 0 if self._members is None else self._members.nbytes
        self._ledger.charge(-TABLE_COST - len(self.chain) - members)


class PrefixIndex:
    """Finds the longest match. Holds visible prefixes with a table only."""

    __slots__ = ("_sizes",)

    def __init__(self) -> None:
        self._sizes: dict[int, SortedMap[dict[Unit, None] | Unit]] = {}

    def check_size(self, block_size: int) -> None:
        """Raise CommandError if that block size would be one too many."""
        if block_size not in self._sizes and len(self._sizes) >= MAX_BLOCK_SIZES:
            raise CommandError(f"BLOCKS size {block_size}: {MAX_BLOCK_SIZES} different block sizes are in use already")

    def add(self, unit: Unit) -> None:
        """A prefix became visible."""
        table = unit.table
        if table is None or not table.matchable or not table.chain:
            return
        order = self._sizes.setdefault(table.block_size, SortedMap())
        found = order.get(table.chain)
        if found is None:
            order.set(table.chain, unit)
        elif isinstance(found, dict):
            found[unit] = None
        elif found is not unit:
            order.set(table.chain, {found: None, unit: None})

    def remove(self, unit: Unit) -> None:
        """A prefix is no longer visible, or its table changes. Does nothing if it is not in the index."""
        table = unit.table
        order = self._sizes.get(table.block_size) if table is not None else None
        if table is None or order is None:
            return
        found = order.get(table.chain)
        if isinstance(found, dict):
            found.pop(unit, None)
            if len(found) == 1:
                order.set(table.chain, next(iter(found)))
        elif found is unit:
            order.remove(table.chain)
            if not order:
                del self._sizes[table.block_size]

    def match(self, hashes: bytes, block_size: int | None, within: bytes) -> tuple[Unit, int, int] | None:
        """The prefix that shares the most tokens with `hashes` from 0 on, with the shared blocks and the block size.

        `within` restricts it to namespaces that start so. The longest in tokens wins, then the smaller block size.
        """
        best: tuple[Unit, int, int] | None = None
        sizes = [block_size] if block_size is not None else sorted(self._sizes)
        for size in sizes:
            order = self._sizes.get(size)
            found = _nearest(order, hashes, within) if order is not None else None
            if found is not None and (best is None or found[1] * size > best[1] * best[2]):
                best = (found[0], found[1], size)
        return best


def _nearest(order: SortedMap[dict[Unit, None] | Unit], hashes: bytes, within: bytes) -> tuple[Unit, int] | None:
    best: tuple[Unit, int] | None = None
    # Shared beginnings only get shorter in both directions, so the first allowed entry on each side is the best there.
    for entries in (order.after(hashes, inclusive=True), order.before(hashes)):
        for chain, value in entries:
            if chain[:HASH_BYTES] != hashes[:HASH_BYTES]:
                break
            unit = _allowed(value, within)
            if unit is not None:
                shared = _shared_blocks(chain, hashes)
                if best is None or shared > best[1]:
                    best = (unit, shared)
                break
    return best


def _allowed(value: dict[Unit, None] | Unit, within: bytes) -> Unit | None:
    for unit in value if isinstance(value, dict) else (value,):
        if unit.name.startswith(within):
            return unit
    return None


def _shared_blocks(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size // HASH_BYTES
    left, right = np.frombuffer(one, np.uint64, size // 8), np.frombuffer(other, np.uint64, size // 8)
    return int((left != right).argmax())
