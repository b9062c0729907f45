"""Two orders of use: of the units that are in memory, and of those whose rows lie in files.

What makes room in memory is a warm unit; dropping one whose rows lie in a file anyway would free next to nothing.
What makes room in the files is a cold one. So each kind has a policy of its own, and a unit changes sides when its rows
do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pion.storage.eviction import OUTSIDE, EvictionPolicy, rank_of
from pion.storage.unit import Unit


class Orders:
    """An `EvictionPolicy` over two others."""

    def __init__(self, make: Callable[[], EvictionPolicy]) -> None:
        self.warm = make()
        self.cold = make()

    def touch(self, unit: Unit) -> None:
        """See `EvictionPolicy`."""
        (self.cold if unit.cold else self.warm).touch(unit)

    def update(self, unit: Unit) -> None:
        """See `EvictionPolicy`."""
        (self.cold if unit.cold else self.warm).update(unit)

    def remove(self, unit: Unit) -> None:
        """See `EvictionPolicy`."""
        (self.cold if unit.cold else self.warm).remove(unit)

    def settle(self, limit: int) -> bool:
        """See `EvictionPolicy`."""
        some = self.warm.settle(limit)
        return self.cold.settle(limit) or some

    def victims(self) -> Iterator[Unit]:
        """Cold units first: to have them costs what warm ones cost in sessions, and using them takes longer."""
        yield from self.cold.victims()
        yield from self.warm.victims()

    def rank(self, unit: Unit) -> tuple[float, ...]:
        """See `Ranked`: cold units first."""
        return (float(not unit.cold), *rank_of(self.cold if unit.cold else self.warm)(unit))

    def move(self, unit: Unit, *, cold: bool) -> None:
        """The unit's rows have left memory, or have come back. It keeps its place in time when it leaves."""
        if unit.cold == cold:
            return
        here, there = (self.warm, self.cold) if cold else (self.cold, self.warm)
        while here.settle(2**31):
            pass  # a note of a use must not bring it back into the order that it leaves
        here.remove(unit)
        unit.standing = OUTSIDE
        held = unit.holds_parent
        unit.cold = cold
        unit.pass_on(held, self.update)
        there.update(unit)
        if not cold:
            there.touch(unit)
