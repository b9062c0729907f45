"""Eviction that knows the value: the unit goes first whose end costs the least prefill time for the bytes it frees.

What keeping a unit is worth is

    V = density x e^min(uses, 3) x e^(-age / R)

- `density` is the prefill time that a hit avoids, for each byte: the registered PREFILL_MS, else an estimate that grows
  with the position, over the bytes of the unit's own rows.
- `uses` counts how often it came back: a touch more than `APART_S` after the last one, or a registration of what had
  been evicted. So what a scan leaves, used once, goes before what was used again.
- `age` is the time since the last touch, and `R` the mean time between two uses, learned while serving. So a workload
  that is twice as slow is treated in the same way.

R x ln V orders the same, and is `last touch + R (ln density + min(uses, 3))` but for the time of day, so what changes
with time is the same for all.
`ln density + min(uses, 3)` is rounded to quarters, the *level*. Within a level the order is that of use, so each level
is one exact LRU, and the least of their first units is the victim: O(levels) for a victim, O(1) for a touch, no matter
how many units there are.

A unit that was evicted is remembered for a while, in a table of fixed size in which newer names overwrite older ones.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import count
from math import log
from typing import Final

from pion.storage.clock import StoreClock
from pion.storage.eviction import GONE, LISTED, MAX_NOTES, NOTES_AT_ONCE, EvictionPolicy, LeastRecentlyUsed
from pion.storage.schema import Schema
from pion.storage.unit import SIDES, Unit

APART_S: Final = 10.0
"""Seconds without a touch that separate two uses: LOOKUP, FETCH and the REGISTER of what continues it are one."""

RESOLUTION_S: Final = 0.1
"""Touches closer together have one time: they are one touch, and units share one float, which is 24 bytes."""

MAX_USES: Final = 3
"""Uses that count; hardly anything that came back three times differs from what came back more often."""

STEPS: Final = 4
"""Levels for each factor e of density or each use."""

MAX_WORTH: Final = 127
"""The highest level of density alone: 31 factors of e above a microsecond for each MiB."""

US_PER_TOKEN: Final = 555.0
"""Estimated prefill time, as the receipt credits it (`pion.receipt`)."""

DOUBLING_TOKENS: Final = 25_600
"""Position at which a token costs twice as much as the first: attention reads all before it. Of a model of 1.2 billion
parameters (16 layers of width 2,048) it takes 4 x 16 x 2,048 operations for each position, and the rest 2.5 x 10^9: the
same at 19,000. Longer-context designs are a little cheaper.
"""

UNIT_BYTES: Final = 1024
"""What a unit takes beside its rows, roughly: keeps the density of tiny ones finite."""

FIRST_R_S: Final = 120.0
"""R before anything came back: people answer in a minute or two."""

MAX_R_S: Final = 86_400.0
LEARNT_FIRST, LEARNT_AT_MOST = 16, 1024
"""R is a mean over about so many returns: at first, and at most."""

LONGEST: Final = 8
"""A return after more than so many R counts as after so many: one after a day must not make R hours."""

GHOSTS: Final = 65_536
"""Names remembered, 8 bytes each: half a MiB."""

MAX_SHAPES: Final = 256
"""Shapes whose row bytes are kept; more are computed again."""


def policies(eviction: str, clock: StoreClock) -> Callable[[], EvictionPolicy]:
    """Makes policies of one kind, `lru` or `value`, between which units can move."""
    ticks = count(1)
    if eviction == "lru":
        return lambda: LeastRecentlyUsed(ticks)
    reuse = Reuse()
    return lambda: ValueAware(clock, reuse, ticks)


class Reuse:
    """What was seen about coming back: R, and the ghosts of what went. Orders between which units move share it."""

    __slots__ = ("_ghosts", "_returns", "r_s")

    def __init__(self) -> None:
        self.r_s = FIRST_R_S
        """Mean seconds between two uses of a unit."""
        self._returns = LEARNT_FIRST
        # In each: 32 bits of the name's hash, 4 of uses, 28 of the second of the last touch. 0 is empty.
        self._ghosts = array("Q", bytes(8 * GHOSTS))

    def returned(self, after_s: float) -> None:
        """A unit was used again after that time."""
        self._returns = min(self._returns + 1, LEARNT_AT_MOST)
        self.r_s = min(MAX_R_S, self.r_s + (min(after_s, LONGEST * self.r_s) - self.r_s) / self._returns)

    def bury(self, unit: Unit) -> None:
        """Remember a unit that goes."""
        number = hash(unit.name)
        second = int(unit.used_s) & 0xFFF_FFFF
        self._ghosts[number % GHOSTS] = (number >> 17 & 0xFFFF_FFFF) << 32 | min(unit.uses, 15) << 28 | second

    def recall(self, name: bytes, now_s: float) -> tuple[int, float] | None:
        """Uses, and seconds since the last touch, of a unit of that name that went; None if nobody remembers it."""
        number = hash(name)
        ghost = self._ghosts[number % GHOSTS]
        if not ghost or ghost >> 32 != number >> 17 & 0xFFFF_FFFF:
            return None
        return ghost >> 28 & 15, float((int(now_s) - ghost) & 0xFFF_FFFF)


class ValueAware:
    """An `EvictionPolicy`, see above. It writes `used_s`, `uses`, `worth` and `level` of units, and what LRU writes."""

    __slots__ = ("_clock", "_levels", "_notes", "_now_s", "_shapes", "_ticks", "reuse")

    def __init__(self, clock: StoreClock, reuse: Reuse | None = None, ticks: Iterator[int] | None = None) -> None:
        """Orders between which units move need the same `reuse` and the same `ticks`, which number uses."""
        self.reuse = Reuse() if reuse is None else reuse
        self._clock = clock
        self._now_s = clock.monotonic_s()
        self._ticks = count(1) if ticks is None else ticks
        self._levels: dict[int, LeastRecentlyUsed] = {}
        self._notes: deque[Unit] = deque()
        self._shapes: dict[tuple[Schema | None, Schema | None, int], int] = {}

    def touch(self, unit: Unit) -> None:
        """Count a use if it is one, and make the unit the most recently used of its level.

        Nothing happens within `RESOLUTION_S` of the last touch: storing a chain touches its first units once for each.
        """
        now_s = self._clock.monotonic_s()
        if now_s - self._now_s < RESOLUTION_S:
            now_s = self._now_s
        else:
            self._now_s = now_s
        if unit.used_s == now_s:
            return
        if unit.used_s < 0:
            ghost = self.reuse.recall(unit.name, now_s)
            if ghost is not None:
                unit.uses = ghost[0]
                self._count(unit, ghost[1])
        elif unit.pending is None:
            self._count(unit, now_s - unit.used_s)
        unit.used_s = now_s
        self._notes.append(unit)
        if len(self._notes) > MAX_NOTES:
            self.settle(NOTES_AT_ONCE)

    def _count(self, unit: Unit, after_s: float) -> None:
        if after_s >= APART_S:
            unit.uses = min(unit.uses + 1, MAX_USES)
            self.reuse.returned(after_s)

    def settle(self, limit: int) -> bool:
        """Bring up to `limit` noted touches into the order; True if some are left."""
        notes = self._notes
        for _ in range(min(limit, len(notes))):
            unit = notes.popleft()
            if unit.standing == GONE:
                continue
            level = self.level(unit)
            if level != unit.level:
                self._leave(unit)
                unit.level = level
            self._at(level).place(unit)
        return bool(notes)

    def update(self, unit: Unit) -> None:
        """Take a unit out, or put it back at its own place."""
        unit.worth = -1
        if not unit.evictable:
            self._leave(unit)
            return
        level = self.level(unit)
        if level != unit.level:
            self._leave(unit)
            unit.level = level
        self._at(level).update(unit)

    def remove(self, unit: Unit) -> None:
        """Remember the unit's name only."""
        self._leave(unit)
        unit.standing = GONE
        if unit.used_s >= 0:
            self.reuse.bury(unit)

    def rank(self, unit: Unit) -> tuple[float, ...]:
        """R x ln V but for what all share, then the order of use."""
        return unit.used_s + self.reuse.r_s * self.level(unit) / STEPS, unit.stamp

    def victims(self) -> Iterator[Unit]:
        """From the least V on, O(levels) before the first."""
        self.settle(len(self._notes))
        step = self.reuse.r_s / STEPS
        heads: list[tuple[float, int, int, Unit, LeastRecentlyUsed, Iterator[Unit] | None]] = []
        for level, order in list(self._levels.items()):
            unit = order.oldest()
            if unit is None:
                del self._levels[level]
            else:
                heads.append((unit.used_s + step * level, unit.stamp, id(unit), unit, order, None))
        heapify(heads)
        while heads:
            _, _, _, unit, order, walk = heads[0]
            yield unit
            if walk is None:
                walk = order.victims()
                next(walk)
            following = next(walk, None)
            if following is None:
                heappop(heads)
            else:
                key = following.used_s + step * following.level
                heapreplace(heads, (key, following.stamp, id(following), following, order, walk))

    def level(self, unit: Unit) -> int:
        """Quarters of `ln density + min(uses, 3)`."""
        worth = unit.worth
        if worth < 0:
            worth = min(MAX_WORTH, max(0, round(STEPS * log(max(self.density(unit), 1e-9)))))
            if unit.complete:
                unit.worth = worth
        return worth + STEPS * min(unit.uses, MAX_USES)

    def density(self, unit: Unit) -> float:
        """Microseconds of prefill that a hit avoids, for each MiB of the unit's own rows."""
        tokens = unit.tokens
        if unit.prefill_ms is not None:
            avoided_us = unit.prefill_ms * 1000
        else:
            avoided_us = tokens * US_PER_TOKEN * (1 + (unit.offset + tokens / 2) / DOUBLING_TOKENS)
        return avoided_us / (tokens * self._row_bytes(unit) + UNIT_BYTES) * (1 << 20)

    def _row_bytes(self, unit: Unit) -> int:
        """Bytes of one token in all layers of both sides."""
        shape = unit.k_schema, unit.v_schema, unit.layer_count
        found = self._shapes.get(shape)
        if found is None:
            found = 0
            for side in SIDES:
                schema = unit.schema(side)
                if schema is not None:
                    layers = shape[2] if schema.layers is None else min(shape[2], schema.layers)
                    found += sum(schema.layer(index).row_bytes for index in range(layers))
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = found
        return found

    def _at(self, level: int) -> LeastRecentlyUsed:
        found = self._levels.get(level)
        if found is None:
            found = self._levels[level] = LeastRecentlyUsed(self._ticks)
        return found

    def _leave(self, unit: Unit) -> None:
        if unit.standing == LISTED or unit.standing > GONE:
            self._levels[unit.level].take_out(unit)
