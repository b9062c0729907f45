"""Block hashes: is one in a table.

Block hashes are 64 bits from a client, of any quality: some are digests, some are counters. Nothing here assumes that
they are spread evenly, and nothing grows without bound when they are chosen to collide.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
"""Odd, so that multiplying loses nothing, with bits all over: they spread hashes that are close or share bits."""

_ATTEMPTS: Final = tuple((0, 1, more) for more in range(3)) + tuple((2, 3, more) for more in range(3))
"""Multipliers of the two tables, and the doublings of their size, in the order they are tried."""

_MOST_ROUNDS: Final = 64
"""Rounds of moving hashes between the tables; ten are usual, and hashes chosen to collide never settle."""


class Membership:
    """Answers which of many hashes are in one table.

    Cuckoo hashing (Pagh and Rodler 2001) for whole arrays: each hash has one place in each of two tables and lies in
    one of them, so a search is two gathers and two comparisons. Empty places hold a hash that is in the table, which
    makes them harmless. Hashes that can't be placed (chosen to collide) are bisected instead.

    Takes 16 to 32 bytes a hash as a rule, and up to four times that. Building it is some ten passes over the hashes; a
    table of more than some ten thousand is worth a thread. Immutable once built.
    """

    __slots__ = ("_first", "_second", "_sorted")

    def __init__(self, table: NDArray[np.uint64]) -> None:
        unique = np.sort(table)
        unique = unique[np.diff(unique, prepend=~unique[:1]) != 0]
        bits = max(1, (unique.size - 1).bit_length())
        self._sorted: NDArray[np.uint64] | None = None
        if unique.size:
            for first, second, more in _ATTEMPTS:
                halves = (_Half(first, bits + more), _Half(second, bits + more))
                if _place(unique, halves):
                    self._first, self._second = halves
                    return
        self._sorted = unique

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        if self._sorted is not None:
            return int(self._sorted.nbytes)
        return int(self._first.keys.nbytes + self._second.keys.nbytes)

    def contains(self, probes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """For each probe (1-D) whether it is in the table."""
        ordered = self._sorted
        if ordered is None:
            first, second = self._first, self._second
            product = probes * first.multiplier
            product >>= first.shift
            found: NDArray[np.bool_] = first.keys.take(product.view(np.int64)) == probes
            np.multiply(probes, second.multiplier, out=product)
            product >>= second.shift
            found |= second.keys.take(product.view(np.int64)) == probes
            return found
        if ordered.size == 0:
            return np.zeros(probes.size, np.bool_)
        nearest = ordered.searchsorted(probes)
        np.minimum(nearest, ordered.size - 1, out=nearest)
        bisected: NDArray[np.bool_] = ordered.take(nearest) == probes
        return bisected

    def bitmap(self, probes: NDArray[np.uint64]) -> bytes:
        """`contains` as bits: probe i is bit i % 8, least significant first, of byte i // 8. Unused bits are 0."""
        return np.packbits(self.contains(probes), bitorder="little").tobytes()


class _Half:
    """One of the two tables: a place for each value of the upper bits of a product."""

    __slots__ = ("keys", "multiplier", "shift")

    def __init__(self, multiplier: int, bits: int) -> None:
        # Arrays without dimensions: a NumPy scalar would be converted to one in each operation.
        self.multiplier = np.array(_MULTIPLIERS[multiplier], np.uint64)
        self.shift = np.array(64 - bits, np.uint64)
        self.keys = np.empty(1 << bits, np.uint64)

    def places(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Where each hash lies if it lies in this table."""
        product = hashes * self.multiplier
        product >>= self.shift
        return product.view(np.int64)


def _place(unique: NDArray[np.uint64], halves: tuple[_Half, _Half]) -> bool:
    """Give each hash a place in one of the tables, all at once and by turns; False if some find none."""
    places = tuple(half.places(unique) for half in halves)
    owners = tuple(np.full(half.keys.size, -1, np.intp) for half in halves)
    homeless = np.arange(unique.size)
    for turn in range(_MOST_ROUNDS):
        where, owner = places[turn % 2][homeless], owners[turn % 2]
        before = owner[where]
        owner[where] = homeless  # of several that want a place, the last gets it
        settled = owner[where] == homeless
        evicted = before[settled]
        homeless = np.concatenate([homeless[~settled], evicted[evicted >= 0]])
        if homeless.size == 0:
            break
    for half, owner in zip(halves, owners, strict=True):
        half.keys[:] = unique[np.maximum(owner, 0)]
    return homeless.size == 0
