"""An eviction order that knows when each block is used again: what no policy can reach."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import inf

from benchmarks._lib.replay import Model, Request, TraceClock, uses
from pion.storage.unit import Unit


class Clairvoyant:
    """What is used again latest goes first; of several models, what costs least for each second until then.

    An `EvictionPolicy` (and `Ranked`) of a replay with one block in each prefix.
    """

    def __init__(self, trace: list[Request], clock: TraceClock) -> None:
        self._clock = clock
        self._weights = {each.model.name: _weight(each.model) for each in trace}
        self._future: dict[bytes, list[float]] = {}
        for name, time_s in uses(trace):
            self._future.setdefault(name, []).append(time_s)
        for times in self._future.values():
            times.reverse()
        self._heaps: dict[float, list[tuple[float, int, Unit]]] = {}
        self._queued: dict[Unit, float] = {}

    def touch(self, unit: Unit) -> None:
        self.update(unit)

    def update(self, unit: Unit) -> None:
        if not unit.evictable:
            self._queued.pop(unit, None)
            return
        next_s = self._next_s(unit)
        if self._queued.get(unit) != next_s:
            self._queued[unit] = next_s
            heappush(self._heaps.setdefault(self._weight(unit), []), (-next_s, id(unit), unit))

    def remove(self, unit: Unit) -> None:
        self._queued.pop(unit, None)

    def settle(self, limit: int) -> bool:
        return False

    def rank(self, unit: Unit) -> tuple[float, ...]:
        until_s = self._next_s(unit) - self._clock.time_s
        return self._weight(unit) / max(until_s, 1e-3), id(unit)

    def victims(self) -> Iterator[Unit]:
        heads = []
        for weight, heap in self._heaps.items():
            while heap and not self._current(heap[0]):
                heappop(heap)
            if heap:
                heads.append((self.rank(heap[0][2]), weight, heap[0][2]))
        # One is enough almost always; the rest is put into order only for who asks for it.
        if heads:
            first = min(heads, key=lambda head: head[0])[2]
            yield first
            rest = [(self.rank(unit), unit) for unit in self._queued if unit is not first]
            heapify(rest)
            while rest:
                yield heappop(rest)[1]

    def _current(self, entry: tuple[float, int, Unit]) -> bool:
        return self._queued.get(entry[2]) == -entry[0]

    def _next_s(self, unit: Unit) -> float:
        times = self._future[unit.name]
        while times and times[-1] <= self._clock.time_s:
            times.pop()
        return times[-1] if times else inf

    def _weight(self, unit: Unit) -> float:
        return self._weights[unit.name[: unit.name.index(b"|") + 1]]


def _weight(model: Model) -> float:
    return model.cost / model.block_bytes
