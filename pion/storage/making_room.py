"""Making room in the store: which units go, and how, so that a change fits its limits.

The part of `VStore` that evicts. Everything here is synchronous; what can wait for room waits in `budget.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from itertools import islice
from typing import Final

import attrs

from pion.config import KIB, Config
from pion.errors import OutOfMemoryError
from pion.storage.changes import Reason
from pion.storage.eviction import EvictionPolicy, choose
from pion.storage.ledger import Ledger, Memory
from pion.storage.orders import Orders
from pion.storage.placed import PromotedMemory, TierFiles
from pion.storage.quota import QuotaBook
from pion.storage.room import is_held, memory_bytes
from pion.storage.unit import Unit

RELIEF_LOOKS: Final = 64
"""Units that are looked at for rows that the tier has, too, before something else makes room."""

FEW_BYTES: Final = 64 * KIB
FIXED_SHARE: Final = 0.125
"""Prefixes whose rows lie in files are dropped for so many bytes, or for this share of what all cost beside rows."""

SQUEEZES: Final = 4
"""Tries to make room: what a unit frees is known only roughly where blocks share buffers."""


class MakesRoom:
    """The base of `VStore` that keeps it within `max_sessions`, `max_bytes` and quotas."""

    config: Config
    ledger: Ledger
    policy: EvictionPolicy
    tier_files: TierFiles
    quotas: QuotaBook | None
    """Budgets of owners within that of the server; a plugin that knows owners sets it."""
    sessions: int
    on_growth: Callable[[], None]
    held_up: bool = False
    """A change was refused for want of memory that only unfinished replies keep from being freed."""

    def drop_unit(self, unit: Unit, reason: Reason) -> None:
        """Drop a prefix or a lone session with all that continues it, if it is still there."""
        raise NotImplementedError

    def make_room(self, name: bytes, sessions: int, nbytes: int, others: int, spared: list[Unit]) -> None:
        """Evict until a change fits that needs so many sessions and bytes for the unit of that name, beside `others`
        that are on their way; but neither what is `spared` nor what it continues. Raises OutOfMemoryError.
        """
        if self.quotas is not None:
            self._make_quota_room(self.quotas, name, nbytes, spared)
        nbytes += others
        excess = self.sessions + sessions - self.config.max_sessions if sessions > 0 else 0
        if self.config.max_bytes:
            self.on_growth()
        if excess <= 0 and self.over(nbytes) <= 0:
            return
        protected = {part for unit in spared for part in unit.chain()}
        if excess > 0:
            victims = choose(self.policy, excess, 0, protected, memory_bytes)
            if victims is None:
                raise OutOfMemoryError(
                    f"{self.config.max_sessions} sessions are in use (--max-sessions) and none of them may be evicted"
                )
            for victim in victims:
                self.drop_unit(victim, Reason.EVICTED)
        if self.over(nbytes) <= 0:
            return
        if not self.squeeze(nbytes, protected, at_once=True):
            self.held_up = self.ledger.sending_bytes > 0 or self._choose(self.over(nbytes), protected) is not None
            why = (
                "what could be evicted for them is still being sent"
                if self.held_up
                else "nothing may be evicted for them"
            )
            raise OutOfMemoryError(
                f"{self.ledger.charged_bytes} of {self.config.max_bytes} bytes are in use (--max-bytes), "
                f"{nbytes} more are needed, and {why}"
            )
        self.held_up = False

    def _make_quota_room(self, quotas: QuotaBook, name: bytes, nbytes: int, spared: list[Unit]) -> None:
        over = quotas.over(name, nbytes)
        if over <= 0:
            return
        protected = quotas.others(name, {part for unit in spared for part in unit.chain()})
        victims = choose(self._warm, 0, over, protected, _evicted_bytes)
        if victims is None:
            raise quotas.refusal(name, nbytes)
        for victim in victims:
            self.evict(victim)

    @property
    def _warm(self) -> EvictionPolicy:
        return self.policy.warm if isinstance(self.policy, Orders) else self.policy

    @property
    def unplaced_bytes(self) -> int:
        """Payload that the tier hasn't: what a snapshot would write."""
        return self.ledger.payload_bytes - self.tier_files.row_bytes

    def over(self, nbytes: int) -> int:
        """How far `nbytes` more would exceed the budget; 0 or less if they fit, or without a budget."""
        limit = self.config.max_bytes
        return self.ledger.charged_bytes + nbytes - limit if limit else 0

    def squeeze(
        self,
        nbytes: int,
        protected: set[Unit] | frozenset[Unit] = frozenset(),
        *,
        warm_only: bool = False,
        at_once: bool = False,
    ) -> bool:
        """Evict until `nbytes` more fit. False if that can't be, and then nothing was evicted; or if what was evicted
        is still being sent. `warm_only`: nothing goes whose rows lie in files. `at_once`: nor does what is being sent,
        so False means that nothing was evicted.
        """
        for _ in range(SQUEEZES):
            over = self.over(nbytes)
            if over <= 0:
                return True
            if not self._make_way(over, protected, warm_only, at_once):
                break
        return self.over(nbytes) <= 0

    def _make_way(self, over: int, protected: set[Unit] | frozenset[Unit], warm_only: bool, at_once: bool) -> bool:
        # What is being written, or sent, is not free before whoever does it has let go of it.
        busy = self.tier_files.writing.values()
        kept = protected.union(busy) if busy else protected
        victims = self._choose(over, kept)
        if victims is None or any(map(is_held, victims)):
            victims = self._choose(over, _Held(kept))
        if victims is None and not at_once:
            # What went before comes back by itself.
            over -= self.ledger.sending_bytes
            victims = self._choose(over, protected) if over > 0 else None
            for victim in victims or ():
                self.evict(victim)
            if victims is not None or over <= 0:
                return False
        if victims is not None:
            for victim in victims:
                self.evict(victim)
            return True
        # Rows may lie in files, but what is kept of their prefixes in memory may be what is missing. It is little: a
        # large payload that has no room beside what is pinned must not make all of them go.
        ledger = self.ledger
        rows_bytes = max(0, ledger.payload_bytes - ledger.mapped_bytes)
        fixed_bytes = ledger.charged_bytes - ledger.sending_bytes - rows_bytes
        if warm_only or over > max(FEW_BYTES, FIXED_SHARE * fixed_bytes):
            return False
        victims = choose(self.policy, 0, over, _Held(protected), memory_bytes)
        for victim in victims or ():
            self.drop_unit(victim, Reason.EVICTED)
        return victims is not None

    def _choose(self, over: int, kept: Container[Unit]) -> list[Unit] | None:
        """Who would have to leave memory for `over` bytes."""
        return choose(self._warm, 0, over, kept, _evicted_bytes)

    def shrink(self, limit: int) -> bool:
        """Evict up to `limit` units while more is held than the budget allows (it was lowered, or a log was replayed
        that holds more); True if there is more to do.
        """
        for _ in range(limit):
            if self.over(0) <= 0 or not self.squeeze(1 - self.over(0)):
                return False
        return self.over(0) > 0

    def relieve(self, nbytes: int) -> bool:
        """Take rows out of memory that the tier has anyway, in the order of eviction, until `nbytes` more fit."""
        if self.over(nbytes) > 0 and isinstance(self.policy, Orders) and self.tier_files.promoted:
            for unit in [unit for unit in islice(self.policy.warm.victims(), RELIEF_LOOKS) if unit.placed]:
                self.withdraw(unit)
                if self.over(nbytes) <= 0:
                    break
        return self.over(nbytes) <= 0

    def evict(self, unit: Unit) -> None:
        """Let an evictable unit make room: out of memory, if the tier has its rows, else altogether."""
        if not self.withdraw(unit):
            self.drop_unit(unit, Reason.EVICTED)

    def withdraw(self, unit: Unit) -> bool:
        """Take a unit's rows out of memory if the tier has all of them; False if it hasn't."""
        if unit.cold or not unit.placed:
            return False
        for layer in unit.all_layers():
            layer.exchange(_in_tier_only)
        self.set_cold(unit, True)
        self.tier_files.on_withdraw()
        return True

    def set_cold(self, unit: Unit, cold: bool) -> None:
        """All of a unit's rows lie in files now, or no longer do."""
        if isinstance(self.policy, Orders):
            self.policy.move(unit, cold=cold)
        if self.quotas is not None:
            self.quotas.note(unit)

    def trim_sessions(self, limit: int) -> None:
        """Evict up to `limit` units while there are more sessions than allowed (the limit was lowered)."""
        for _ in range(limit):
            if self.sessions <= self.config.max_sessions:
                return
            victim = next(self.policy.victims(), None)
            if victim is None:
                return
            self.drop_unit(victim, Reason.EVICTED)


@attrs.frozen(eq=False)
class _Held:
    """A container that is never listed: what is protected, and what something that is being sent still holds."""

    protected: Container[Unit]

    def __contains__(self, unit: object) -> bool:
        return not isinstance(unit, Unit) or unit in self.protected or is_held(unit)


def _evicted_bytes(unit: Unit) -> int:
    """What `VStore.evict` frees: of what the tier has, too, only the copies of rows."""
    if not unit.placed:
        return memory_bytes(unit)
    memories = {block.memory for layer in unit.all_layers() for block in layer.blocks}
    return sum(memory.nbytes for memory in memories if not memory.mapped)


def _in_tier_only(memory: Memory) -> Memory | None:
    """What stands for a copy in memory once the copy goes."""
    return memory.withdrawn() if isinstance(memory, PromotedMemory) else None
