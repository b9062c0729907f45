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

WALK_ENTRIES: Final = 512
"""Neighbours on each side, and names, that one MATCH with IN looks at: a millisecond in all. Block sizes share them."""

MAX_BLOCK_SIZES: Final = 64
"""Different block sizes among the stored tables; a MATCH without SIZE searches each, and clients use one or two."""


class BlockTable:
    """The hash table of one prefix. `chain` holds the hashes from the root on, of which `inherited` are ancestors'.

    A table that doesn't join its ancestors' without a gap can't be matched: `matchable` is false, and `chain` holds its
    own hashes only.
    """

    __slots__ = ("_charged", "_ledger", "block_size", "chain", "inherited", "matchable", "members")

    def __init__(self, block_size: int, own: bytes, parent: Unit | None, offset: int, ledger: Ledger) -> None:
        self.block_size = block_size
        self.inherited = 0
        self.matchable = True
        self.chain = own
        self.members: Membership | None = None
        if parent is not None:
            table = parent.table
            blocks = offset // block_size
            self.matchable = not blocks or (
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
        self._charged = 0
        self._charge(TABLE_COST + len(self.chain))

    @property
    def cost(self) -> int:
        """Bytes charged for it."""
        return self._charged

    @property
    def own(self) -> bytes:
        """The hashes of the blocks that end in this prefix, as they were registered."""
        return self.chain[self.inherited * HASH_BYTES :] if self.inherited else self.chain

    def keep(self, members: Membership) -> None:
        """Keep what answers MEMBERSHIP for its own hashes; nothing happens if it has one, or was replaced meanwhile."""
        if self.members is None and self._charged:
            self.members = members
            self._charge(members.nbytes)

    def _charge(self, nbytes: int) -> None:
        self._charged += nbytes
        self._ledger.charge(nbytes)

    def discharge(self) -> None:
        """Uncount it: the table left the store."""
        self._charge(-self._charged)


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

    def match(
        self, hashes: bytes, block_size: int | None, within: bytes, names: SortedMap[Unit]
    ) -> tuple[Unit, int, int] | None:
        """The prefix that shares the most tokens with `hashes` from 0 on, with the shared blocks and the block size.

        `within` restricts it to namespaces that start so; `names` are all units by name. The longest in tokens wins,
        then the smaller block size. The answer always shares what it says; it is the longest unless more than
        `WALK_ENTRIES` names start with `within` and as many prefixes with other names lie between the longest and the
        place of `hashes`.
        """
        best: tuple[Unit, int, int] | None = None
        sizes = [block_size] if block_size is not None else sorted(self._sizes)
        limit = WALK_ENTRIES // max(1, len(sizes))
        for size in sizes:
            order = self._sizes.get(size)
            found = _nearest(order, hashes, size, within, names, limit) if order is not None else None
            if found is not None and (best is None or found[1] * size > best[1] * best[2]):
                best = (found[0], found[1], size)
        return best


def _nearest(
    order: SortedMap[dict[Unit, None] | Unit],
    hashes: bytes,
    size: int,
    within: bytes,
    names: SortedMap[Unit],
    limit: int,
) -> tuple[Unit, int] | None:
    best: tuple[Unit, int] | None = None
    # Shared beginnings only get shorter in both directions, so the first allowed entry on each side is the best there.
    for entries in (order.after(hashes, inclusive=True), order.before(hashes)):
        left = limit
        for chain, value in entries:
            if chain[:HASH_BYTES] != hashes[:HASH_BYTES]:
                break
            for unit in value if isinstance(value, dict) else (value,):
                left -= 1
                if unit.name.startswith(within):
                    shared = _shared_blocks(chain, hashes)
                    if best is None or shared > best[1]:
                        best = (unit, shared)
                    left = -1
                if left <= 0:
                    break
            if left <= 0:
                break
        if left == 0:
            # Other names crowd that place. There may be few with the right one, which are then all looked at.
            found = _among_names(hashes, size, within, names, limit)
            return found if found is not None and (best is None or found[1] > best[1]) else best
    return best


def _among_names(
    hashes: bytes, size: int, within: bytes, names: SortedMap[Unit], limit: int
) -> tuple[Unit, int] | None:
    """The best of the first `limit` units whose names start with `within`."""
    best: tuple[Unit, int] | None = None
    for _, (name, unit) in zip(range(limit), names.after(within, inclusive=True), strict=False):
        if not name.startswith(within):
            break
        table = unit.table
        if table is None or table.block_size != size or not table.matchable or unit.partial:
            continue
        if table.chain[:HASH_BYTES] == hashes[:HASH_BYTES]:
            shared = _shared_blocks(table.chain, hashes)
            if shared and (best is None or shared > best[1]):
                best = (unit, shared)
    return best


def _shared_blocks(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size // HASH_BYTES
    left, right = np.frombuffer(one, np.uint64, size // 8), np.frombuffer(other, np.uint64, size // 8)
    return int((left != right).argmax())
