"""Block hashes: is one in a table, and what stands for a whole list of them.

Block hashes are 64 bits from a client, of any quality: some are digests, some are counters. Nothing here assumes that
they are spread evenly, and nothing grows without bound when they are chosen to collide.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
"""Odd, so that multiplying loses nothing, with bits all over: they spread hashes that are close or share bits."""

_GOOD_WAYS: Final = 3
_MOST_WAYS: Final = 12
"""Hashes in the fullest bucket; a search looks at as many. Beyond the second a binary search is faster."""

_GOLDEN: Final = np.uint64(_MULTIPLIERS[0])
_MIX_1: Final = np.uint64(_MULTIPLIERS[1])
_MIX_2: Final = np.uint64(_MULTIPLIERS[2])
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


class Membership:
    """Answers which of many hashes are in one table.

    A hash table for whole arrays: the hashes lie in the order of their buckets, so that a bucket is its start in that
    order. A search compares a probe with the `ways` hashes from there on, as many as the fullest bucket holds. Looking
    past the end of a bucket is harmless, since whatever equals the probe is in the table.

    Takes 8 bytes a hash and 8 to 16 more, 16 to 32 more beyond 65,535 hashes. Building it takes about as long as one
    bisection of each hash; a table of more than some ten thousand is worth a thread. Immutable once built.
    """

    __slots__ = ("_keys", "_multiplier", "_shift", "_starts", "_ways")

    def __init__(self, table: NDArray[np.uint64]) -> None:
        unique = np.sort(table)
        unique = unique[np.diff(unique, prepend=~unique[:1]) != 0]
        bits = max(1, (4 * unique.size - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        self._multiplier, self._ways = np.uint64(0), _MOST_WAYS + 1
        for candidate in map(np.uint64, _MULTIPLIERS):
            ways = int(np.bincount(self._buckets(unique, candidate)).max(initial=0))
            if ways < self._ways:
                self._multiplier, self._ways = candidate, ways
            if ways <= _GOOD_WAYS:
                break
        self._starts: NDArray[np.uint16] | NDArray[np.uint32] | None = None
        if self._ways > _MOST_WAYS or unique.size == 0:
            self._keys = unique
            return
        buckets = self._buckets(unique, self._multiplier)
        order = np.argsort(buckets)
        self._keys = np.concatenate([unique[order], np.repeat(unique[-1:], self._ways)])
        ends = np.cumsum(np.bincount(buckets, minlength=1 << bits))
        starts = np.concatenate([[0], ends[:-1]])
        self._starts = starts.astype(np.uint16) if unique.size < 1 << 16 else starts.astype(np.uint32)

    def _buckets(self, hashes: NDArray[np.uint64], multiplier: np.uint64) -> NDArray[np.int64]:
        product = hashes * multiplier
        product >>= self._shift
        return product.view(np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return int(self._keys.nbytes + (0 if self._starts is None else self._starts.nbytes))

    def contains(self, probes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """For each probe (1-D) whether it is in the table."""
        keys = self._keys
        if self._starts is None:
            if keys.size == 0:
                return np.zeros(probes.size, np.bool_)
            at = keys.searchsorted(probes)
            np.minimum(at, keys.size - 1, out=at)
            bisected: NDArray[np.bool_] = keys.take(at) == probes
            return bisected
        at = self._starts.take(self._buckets(probes, self._multiplier)).astype(np.intp)
        found: NDArray[np.bool_] = keys.take(at) == probes
        for way in range(1, self._ways):
            found |= keys[way:].take(at) == probes
        return found

    def bitmap(self, probes: NDArray[np.uint64]) -> bytes:
        """`contains` as bits: probe i is bit i % 8, least significant first, of byte i // 8. Unused bits are 0."""
        return np.packbits(self.contains(probes), bitorder="little").tobytes()


def prefix_digests(hashes: NDArray[np.uint64], block_size: int, seed: int = 0, start: int = 0) -> NDArray[np.uint64]:
    """(n,) digests: number i stands for hashes 0 to i in their order, and for the block size.

    A list that continues another, whose first `start` hashes have the last digest `seed`, gets the digests it would
    have as one list. Equal lists have equal digests. Different ones have equal digests with a probability of 2**-64 a
    pair, unless the hashes were chosen for it, which is easy: whoever acts on a digest must compare the lists too.
    """
    # Each term mixes hash, place and block size (the finalizer of splitmix64); the sum carries from block to block.
    terms = np.arange(start + 1, start + 1 + hashes.size, dtype=np.uint64)
    terms *= _GOLDEN
    terms += np.uint64(block_size * _MULTIPLIERS[3] % 2**64)
    terms ^= hashes
    terms ^= terms >> _S30
    terms *= _MIX_1
    terms ^= terms >> _S27
    terms *= _MIX_2
    terms ^= terms >> _S31
    np.cumsum(terms, out=terms)
    terms += np.uint64(seed)
    return terms
