"""Admission: a new prefix is stored only once its namespace was asked for in vain often enough.

Most prompts are seen once. Storing them costs memory, log and disk, and evicts what would have been used again. So with
`--admission N` a namespace that is not there is registered once N lookups of it have missed. What has missed is counted
in a sketch whose size is fixed, however many names there are.

It is a count-min sketch (Cormode and Muthukrishnan 2005) with conservative update: a name has one counter in each of
`ROWS` rows, its count is the smallest of them, and a miss raises only those that are the smallest. Each is at least the
name's own count, since other names only add. So a name is never deferred for longer than it should be, and it is
admitted early only when others share all its counters. After `WINDOW` misses all counters are halved (the reset of
TinyLFU, Einziger, Friedman and Manes 2017): what was asked for long ago is forgotten, and the sketch never fills up.
"""

from __future__ import annotations

import secrets
from struct import Struct
from typing import Final

import attrs
import numpy as np
from xxhash import xxh3_128_digest

ROWS: Final = 4
"""Counters of one name. One 128-bit hash gives the places of all, 32 bits each."""

COLUMNS: Final = 262_144
"""Counters in one row, a power of two. With one byte for each the sketch takes 1 MiB."""

WINDOW: Final = COLUMNS // 2
"""Misses between two halvings. With names that are asked for once and N = 2, 0.6 % are admitted early (measured)."""

COUNT_MAX: Final = 30
"""Where a counter stops: twice the largest --admission, so that a busy name survives one halving, and not many."""

_SPLIT: Final = Struct(f"<{ROWS}I").unpack


@attrs.frozen
class AdmissionStatistics:
    """Events since the start, and the sketch's size."""

    threshold: int
    deferred: int
    """Registrations that were answered +DEFERRED."""
    admitted: int
    """Registrations of new namespaces that had missed often enough."""
    misses: int
    """Lookup misses counted."""
    halvings: int
    sketch_bytes: int


class Admission:
    """Says which new namespaces are worth storing. Make one per worker; all methods are called on the Trio thread.

    `threshold` lookup misses admit a name. `seed` makes the places of the counters; without one it is random, so that
    names which share counters on one server don't on another. `columns` (a power of two) and `window` are for tests.
    """

    __slots__ = (
        "_columns",
        "_counts",
        "_halvings",
        "_mask",
        "_misses",
        "_rows",
        "_seed",
        "_until_halving",
        "_window",
        "admitted",
        "deferred",
        "threshold",
    )

    def __init__(
        self, threshold: int, *, seed: int | None = None, columns: int = COLUMNS, window: int = WINDOW
    ) -> None:
        self.threshold = threshold
        self.deferred = 0
        self.admitted = 0
        self._seed = secrets.randbits(64) if seed is None else seed
        self._columns = columns
        self._mask = columns - 1
        self._counts = bytearray(ROWS * columns)
        # While an array looks at the counters Python refuses to resize them.
        self._rows = np.frombuffer(self._counts, np.uint8)
        self._window = self._until_halving = window
        self._misses = 0
        self._halvings = 0

    def miss(self, name: bytes) -> None:
        """A lookup of the namespace was a miss. Takes about a microsecond, and 0.1 ms once in a window."""
        one, two, three, four = places = self._places(name)
        counts = self._counts
        least = min(counts[one], counts[two], counts[three], counts[four])
        if least < COUNT_MAX:
            for place in places:
                if counts[place] == least:
                    counts[place] = least + 1
        self._misses += 1
        self._until_halving -= 1
        if not self._until_halving:
            self._halve()

    def misses(self, name: bytes) -> int:
        """How often the namespace has missed, aged, at most `COUNT_MAX`. Never too few; too many if names collide."""
        one, two, three, four = self._places(name)
        counts = self._counts
        return min(counts[one], counts[two], counts[three], counts[four])

    def admits(self, name: bytes) -> bool:
        """Whether a new namespace may be registered now; the answer is counted.

        Nothing is used up: a name stays admitted while its misses are remembered, so one that was dropped or evicted
        meanwhile comes back without waiting again.
        """
        if self.misses(name) < self.threshold:
            self.deferred += 1
            return False
        self.admitted += 1
        return True

    def statistics(self) -> AdmissionStatistics:
        """The counters now."""
        return AdmissionStatistics(
            threshold=self.threshold,
            deferred=self.deferred,
            admitted=self.admitted,
            misses=self._misses,
            halvings=self._halvings,
            sketch_bytes=len(self._counts),
        )

    def _places(self, name: bytes) -> tuple[int, int, int, int]:
        one, two, three, four = _SPLIT(xxh3_128_digest(name, self._seed))
        mask, columns = self._mask, self._columns
        return one & mask, columns + (two & mask), 2 * columns + (three & mask), 3 * columns + (four & mask)

    def _halve(self) -> None:
        np.right_shift(self._rows, 1, out=self._rows)
        self._until_halving = self._window
        self._halvings += 1
