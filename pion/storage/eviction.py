"""Which unit makes room for another. The store asks a policy; here is the exact least-recently-used one.

Evictable units are in a doubly linked list from the least to the most recently used, so a touch is O(1). Pinned,
pending and parent units are not in it. A unit that becomes evictable again (unpinned, its last child gone) keeps its
old place in time: it waits in a small heap by its stamp until it is touched or chosen.

A touch is only noted at first. Moving a unit in the list reaches into its two neighbours, which among a million units
are not in the processor's cache; so that is done later, in the order of the notes: by the reaper, and before a victim
is chosen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, Protocol, TypeAlias

from pion.storage.unit import Unit

OUTSIDE: Final = 0
LISTED: Final = 1
GONE: Final = 2
"""What is more than this says in the heap of which policy a unit waits."""

MAX_NOTES: Final = 65_536
"""Touches noted before each further one settles `NOTES_AT_ONCE`; about what the reaper finds at full load."""

NOTES_AT_ONCE: Final = 64
STALE_SLACK: Final = 64
"""Outdated heap entries that are not worth a clean-up."""


Rank: TypeAlias = Callable[[Unit], tuple[float, ...]]


class EvictionPolicy(Protocol):
    """Decides the order in which units make room. All methods are called on the Trio thread."""

    def touch(self, unit: Unit) -> None:
        """The unit was created or used."""

    def update(self, unit: Unit) -> None:
        """The unit's `evictable` may have changed."""

    def remove(self, unit: Unit) -> None:
        """The unit is gone."""

    def settle(self, limit: int) -> bool:
        """Do up to `limit` pieces of work that were put off; True if some are left."""

    def victims(self) -> Iterator[Unit]:
        """Evictable units, the first to go first. Nothing may change while it is walked."""


class Ranked(EvictionPolicy, Protocol):
    """A policy whose order is not that of the stamps."""

    def rank(self, unit: Unit) -> tuple[float, ...]:
        """Where the unit stands in the order of `victims`, or would if it were evictable; the least goes first."""


class LeastRecentlyUsed:
    """Exact LRU."""

    __slots__ = ("_heap", "_in_heap", "_newest", "_notes", "_oldest", "_ticks", "_waiting")

    def __init__(self, ticks: Iterator[int] | None = None) -> None:
        """`ticks` numbers uses; orders between which units move need the same."""
        self._ticks = count(1) if ticks is None else ticks
        self._in_heap = GONE + next(self._ticks)
        # Two ends that are not units: linking then has no special cases.
        self._oldest = Unit(b"", lone=True)
        self._newest = Unit(b"", lone=True)
        self._oldest.newer, self._newest.older = self._newest, self._oldest
        self._notes: deque[Unit] = deque()
        self._heap: list[tuple[int, int, Unit]] = []
        self._waiting = 0

    def touch(self, unit: Unit) -> None:
        """Make the unit the most recently used."""
        self._notes.append(unit)
        if len(self._notes) > MAX_NOTES:
            self.settle(NOTES_AT_ONCE)

    def settle(self, limit: int) -> bool:
        """Bring up to `limit` noted touches into the order; True if some are left."""
        notes = self._notes
        for _ in range(min(limit, len(notes))):
            self.place(notes.popleft())
        return bool(notes)

    def place(self, unit: Unit) -> None:
        """Make the unit the most recently used now; nothing happens if it is gone, and one that can't be evicted only
        gets its place in time.
        """
        unit.stamp = next(self._ticks)
        newest = self._newest
        if unit.standing == LISTED:
            newer = unit.newer
            if newer is newest:
                return
            older = unit.older
            older.newer, newer.older = newer, older  # type: ignore[union-attr]
        elif unit.standing == GONE or not unit.evictable:
            return
        elif unit.standing == self._in_heap:
            self._waiting -= 1
        last = newest.older
        last.newer = newest.older = unit  # type: ignore[union-attr]
        unit.older, unit.newer = last, newest
        unit.standing = LISTED

    def update(self, unit: Unit) -> None:
        """Take a unit out, or put it back at its own place in time."""
        if unit.evictable:
            if unit.standing == OUTSIDE:
                unit.standing = self._in_heap
                self._waiting += 1
                heappush(self._heap, (unit.stamp, id(unit), unit))
        elif unit.standing != OUTSIDE:
            self.take_out(unit)

    def remove(self, unit: Unit) -> None:
        """Forget the unit."""
        self.take_out(unit)
        unit.standing = GONE

    def take_out(self, unit: Unit) -> None:
        """Take the unit out of the order. It is evictable and may come back, here or in another."""
        if unit.standing == LISTED:
            older, newer = unit.older, unit.newer
            older.newer, newer.older = newer, older  # type: ignore[union-attr]
            unit.older = unit.newer = None
        elif unit.standing == self._in_heap:
            self._waiting -= 1
        unit.standing = OUTSIDE
        if len(self._heap) > 2 * self._waiting + STALE_SLACK:
            self._heap = [entry for entry in self._heap if self._current(entry)]
            heapify(self._heap)

    def oldest(self) -> Unit | None:
        """What `victims` begins with, None if there is nothing."""
        unit = self._oldest.newer
        first = None if unit is self._newest else unit
        waiting = self._first_waiting()
        return waiting if waiting is not None and (first is None or waiting.stamp < first.stamp) else first

    def victims(self) -> Iterator[Unit]:
        """From the least recently used on."""
        self.settle(len(self._notes))
        unit = self._oldest.newer
        seen: set[Unit] = set()
        for stamp, waiting in self._by_stamp():
            while unit is not self._newest and unit is not None and unit.stamp < stamp:
                yield unit
                unit = unit.newer
            if waiting not in seen:
                seen.add(waiting)
                yield waiting
        while unit is not self._newest and unit is not None:
            yield unit
            unit = unit.newer

    def _by_stamp(self) -> Iterator[tuple[int, Unit]]:
        # The walk ends after one or two units almost always, so a copy in order is made only behind the first.
        if self._first_waiting() is not None:
            yield self._heap[0][0], self._heap[0][2]
            for entry in sorted(self._heap)[1:]:
                if self._current(entry):
                    yield entry[0], entry[2]

    def _first_waiting(self) -> Unit | None:
        while self._heap and not self._current(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def _current(self, entry: tuple[int, int, Unit]) -> bool:
        return entry[2].standing == self._in_heap and entry[2].stamp == entry[0]


def choose(
    policy: EvictionPolicy, sessions: int, nbytes: int, protected: Container[Unit], size: Callable[[Unit], int]
) -> list[Unit] | None:
    """The units to evict in this order so that `sessions` V sessions and `nbytes` bytes become free; None when that is
    impossible. `size` gives the bytes that a unit's end frees.

    A parent is among them once all that continues it is, at its own place in time.
    """
    chosen: dict[Unit, None] = {}
    if sessions <= 0 and nbytes <= 0:
        return []
    for unit in _with_parents(policy.victims(), chosen, rank_of(policy)):
        if unit in protected:
            continue
        chosen[unit] = None
        sessions -= unit.sessions
        if nbytes > 0:
            nbytes -= size(unit)
        if sessions <= 0 and nbytes <= 0:
            return list(chosen)
    return None


def rank_of(policy: EvictionPolicy) -> Rank:
    """What says where a unit stands in the policy's order: its own `rank` if it is `Ranked`, else the stamps."""
    # Not isinstance: of a protocol that takes 50 us.
    found: Rank = getattr(policy, "rank", _by_stamp)
    return found


def _by_stamp(unit: Unit) -> tuple[float, ...]:
    return (unit.stamp,)


def _with_parents(victims: Iterator[Unit], chosen: dict[Unit, None], rank: Rank) -> Iterator[Unit]:
    """The victims, and among them by their rank the parents of which nothing is left but what is chosen."""
    free: list[tuple[tuple[float, ...], int, Unit]] = []
    left: dict[Unit, int] = {}
    following = next(victims, None)
    while True:
        if free and (following is None or free[0][0] < rank(following)):
            unit = heappop(free)[2]
        elif following is not None:
            unit, following = following, next(victims, None)
        else:
            return
        yield unit
        parent = unit.parent
        if unit not in chosen or parent is None:
            continue
        if parent not in left:
            # Counted once: looking at all children again for each of them would be quadratic.
            left[parent] = len(parent.children or ()) if parent.cold else parent.warm_children
        left[parent] -= parent.cold or unit.holds_parent
        if not left[parent] and not parent.evictable and not parent.pinned and parent.pending is None:
            heappush(free, (rank(parent), id(parent), parent))
