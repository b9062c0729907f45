"""The V-store: sessions and prefixes of one worker, in memory.

Everything here is synchronous and runs on the Trio thread, so each call is atomic. State changes in one place only:
`commit` checks a record of `changes.py`, applies it and hands it to the journal, with no checkpoint between. What one
kind of change means is in `session_changes.py` and `prefix_changes.py`; what is kept per unit in `unit.py`.

Invariants, which tests/commands/test_kv_machine.py checks after every step:

- `sessions` is the sum of `unit.sessions`, and at most `max_sessions` unless that was lowered.
- A unit is in the index exactly if it is visible and has a table that can be matched.
- `ledger.charged_bytes` is what a recount of all units gives, plus what unfinished replies hold.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, Final

import attrs

from pion.args import show
from pion.config import INLINE_ARG_BYTES, MIB, Config
from pion.errors import BusyError, CommandError, OutOfMemoryError
from pion.storage import prefix_changes, session_changes
from pion.storage.changes import (
    Change,
    CreateSession,
    DropPrefix,
    DropSession,
    EvictSession,
    PlaceRows,
    Reason,
    Register,
    SetExpiry,
    SetPin,
    StoreRows,
)
from pion.storage.clock import StoreClock
from pion.storage.eviction import EvictionPolicy, choose
from pion.storage.journal import Journal
from pion.storage.ledger import Ledger, Memory
from pion.storage.ordered import SortedMap
from pion.storage.orders import Orders
from pion.storage.placed import PromotedMemory, TierFiles
from pion.storage.prefix_index import PrefixIndex
from pion.storage.room import memory_bytes
from pion.storage.unit import SIDES, K, Side, Unit, split_sid
from pion.storage.value import policies

logger = logging.getLogger("pion.storage")

MOST_SESSIONS: Final = 2
"""Sessions that one change can need: both sides of a prefix."""

EXPIRE_BYTES: Final = MIB
"""With less of the byte budget left than this, what has expired is looked for before something is evicted."""

RELIEF_LOOKS: Final = 64
"""Units that are looked at for rows that the tier has, too, before something else makes room."""

SQUEEZES: Final = 4
"""Tries to make room: what was evicted may still be being sent, so others go for it, but not all of them."""

EXPIRED_FIRST: Final = 64
"""Expired prefixes dropped before one is evicted; the reaper finds the rest."""

EXPIRY_SLACK: Final = 1024
"""Outdated entries of the expiry heap that are not worth a clean-up."""


@attrs.frozen
class VStoreStatistics:
    """Counts now, and events since the start. Bytes are in `Ledger.statistics()`."""

    prefixes: int
    """Prefixes with both sides, pending ones not counted."""
    pending: int
    sessions: int
    max_sessions: int
    prefix_tokens: int
    """Rows in layer 0 of all K sides, pending prefixes not counted."""
    fetches: int
    evicted: int
    expired: int
    abandoned: int
    damaged: int


def no_session(sid: bytes) -> CommandError:
    """The error for a session that is not there."""
    return CommandError(f"no session {show(sid)}")


def no_prefix(ns: bytes) -> CommandError:
    """The error for a prefix that is not there or not complete."""
    return CommandError(f"no prefix {show(ns)}")


class VStore:
    """Sessions, prefixes, their order of use, expiry and index. Make one per worker."""

    def __init__(
        self,
        config: Config,
        clock: StoreClock,
        journal: Journal,
        ledger: Ledger,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.config = config
        """Limits; CONFIG SET puts a new one here."""
        self.clock = clock
        self.journal = journal
        self.ledger = ledger
        self.policy: EvictionPolicy = policy or Orders(policies(config.eviction, clock))
        self.tier_files = TierFiles(ledger)
        """Objects of the tier that hold rows, whether or not there is a tier."""
        self.on_growth: Callable[[], None] = lambda: None
        """Called before a change that may need memory, with a byte budget."""
        self.in_flight: Callable[[], int] = lambda: 0
        """Bytes of payloads that are being received."""
        self.index = PrefixIndex()
        self.prefixes: dict[bytes, Unit] = {}
        self.lone: dict[bytes, Unit] = {}
        self.prefix_names: SortedMap[Unit] = SortedMap()
        self.lone_names: SortedMap[Unit] = SortedMap()
        self.pending: dict[int, dict[Unit, None]] = {}
        """Incomplete registrations by the connection that owns them."""
        self.sessions = 0
        self.whole = 0
        """Units with both sides."""
        self.prefix_tokens = 0
        self.fetches = 0
        self.registrations = 0
        """Units made since the reaper last looked."""
        self.dropped: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self.checksum_failures = 0
        self._replaying = False
        self.before_change: Callable[[Change], None] | None = None
        """Told of each change before it is made, while a snapshot is taken."""
        self._expiries: list[tuple[float, int, Unit]] = []
        self._expiring = 0

    # Looking up. Each of these first drops what has expired.

    def visible(self, ns: bytes) -> Unit | None:
        """The prefix that LOOKUP answers +HIT for: both sides are there, it is not pending and has not expired."""
        unit = self.prefixes.get(ns)
        if unit is None or unit.partial:
            return None
        if unit.parent is None and not unit.expires_s:
            return unit
        return unit if self._alive(unit) else None

    def prefix(self, ns: bytes) -> Unit:
        """As `visible`, but a prefix that isn't raises CommandError."""
        unit = self.visible(ns)
        if unit is None:
            raise no_prefix(ns)
        return unit

    def any_prefix(self, ns: bytes) -> Unit | None:
        """The unit of that name with at least one side, pending or not."""
        unit = self.prefixes.get(ns)
        return unit if unit is not None and self._alive(unit) else None

    def whole_prefix(self, ns: bytes) -> Unit | None:
        """The prefix of that name with both sides, pending or not."""
        unit = self.any_prefix(ns)
        return unit if unit is not None and unit.sessions == len(SIDES) else None

    def find_session(self, sid: bytes) -> tuple[Unit, Side] | None:
        """The unit and side of a session, or None."""
        found = self.held_session(sid)
        return found if found is not None and self._alive(found[0]) else None

    def held_session(self, sid: bytes) -> tuple[Unit, Side] | None:
        """As `find_session`, expired or not: for applying changes, which must not depend on the time."""
        split = split_sid(sid)
        if split is None:
            lone = self.lone.get(sid)
            return None if lone is None else (lone, 0)
        unit = self.prefixes.get(split[0])
        return None if unit is None or unit.schema(split[1]) is None else (unit, split[1])

    def session(self, sid: bytes, reader: int = 0) -> tuple[Unit, Side]:
        """The unit and side of a session. Raises CommandError, or BusyError while another connection fills it."""
        found = self.find_session(sid)
        if found is None:
            raise no_session(sid)
        pending = found[0].pending
        if pending is not None and reader and pending.owner != reader:
            raise BusyError(f"another connection is filling {show(found[0].name)}")
        return found

    def match(self, hashes: bytes, block_size: int | None, within: bytes) -> tuple[Unit, int, int] | None:
        """See `PrefixIndex.match`. Touches nothing."""
        while True:
            found = self.index.match(hashes, block_size, within, self.prefix_names)
            if found is None or self._alive(found[0]):
                return found

    def touch(self, unit: Unit) -> None:
        """The unit was used, and with it the ancestors that it reads from."""
        self.policy.touch(unit)
        parent = unit.parent if not self._replaying else None
        while parent is not None:
            self.policy.touch(parent)
            parent = parent.parent

    # Changing.

    def check(self, change: Change) -> None:
        """Raise CommandError if `commit` would refuse the change now. Changes nothing."""
        _RULES[type(change)][0](self, change)

    def commit(self, change: Change) -> Awaitable[None] | None:
        """Check, make room, apply, journal: all or nothing, with no checkpoint.

        Returns what the handler must await before it replies, if anything. Raises CommandError, and then nothing
        changed.
        """
        check, apply, need = _RULES[type(change)]
        if type(change) is StoreRows and not self.config.max_bytes:
            need = None
        if not is_internal(change):
            self.journal.check()
        if need is not None and (
            self.sessions + MOST_SESSIONS > self.config.max_sessions or self.over(EXPIRE_BYTES) > 0
        ):
            # What is over goes before what is merely old; before the check, so that it sees what is left.
            self.drop_expired(EXPIRED_FIRST)
        check(self, change)
        if need is not None:
            sessions, nbytes, spared = need(self, change)
            others = self.in_flight() - _received_bytes(change) if self.config.max_bytes else 0
            self._make_room(sessions, nbytes + max(0, others), spared)
        if self.before_change is not None:
            self.before_change(change)
        sessions_before = self.sessions
        apply(self, change)
        return self.journal.append(change, created=max(0, self.sessions - sessions_before))

    def drop_unit(self, unit: Unit, reason: Reason) -> None:
        """Drop a prefix or a lone session with all that continues it, if it is still there."""
        if unit.lone:
            if self.lone.get(unit.name) is unit:
                self.commit(EvictSession(unit.name, reason))
        elif self.prefixes.get(unit.name) is unit:
            self.commit(DropPrefix(unit.name, reason))

    def drop_damaged(self, unit: Unit) -> None:
        """Drop a unit whose bytes on disk are not what was stored, if it is still there: a miss, never data."""
        if (self.lone if unit.lone else self.prefixes).get(unit.name) is not unit:
            return
        logger.error("%s: a checksum failed, dropped", show(unit.name))
        self.checksum_failures += 1
        self.drop_unit(unit, Reason.DAMAGED)

    def replay(self, change: Change) -> None:
        """Apply a change from the journal: no checks, no evictions, nothing is journalled."""
        # Nobody uses anything now: touching the ancestors of each segment of a long chain would take seconds.
        self._replaying = True
        try:
            _RULES[type(change)][1](self, change)
        finally:
            self._replaying = False

    def finish_replay(self) -> None:
        """Drop the registrations that were pending when the records ended; their owners are gone."""
        for units in list(self.pending.values()):
            for unit in list(units):
                self.commit(DropPrefix(unit.name, Reason.ABANDONED))
        if self.config.max_bytes:
            for unit in self.units():
                if not unit.cold and unit.in_files:
                    self.set_cold(unit, True)

    def _make_room(self, sessions: int, nbytes: int, spared: list[Unit]) -> None:
        """Evict, but neither what is `spared` nor what it continues. Raises OutOfMemoryError."""
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
        if self.over(nbytes) > 0 and not self.squeeze(nbytes, protected):
            raise OutOfMemoryError(
                f"{self.ledger.charged_bytes} of {self.config.max_bytes} bytes are in use (--max-bytes), "
                f"{nbytes} more are needed, and nothing may be evicted for them"
            )

    # The byte budget.

    @property
    def unplaced_bytes(self) -> int:
        """Payload that the tier hasn't: what a snapshot would write."""
        return self.ledger.payload_bytes - self.tier_files.row_bytes

    def over(self, nbytes: int) -> int:
        """How far `nbytes` more would exceed the budget; 0 or less if they fit, or without a budget."""
        limit = self.config.max_bytes
        return self.ledger.charged_bytes + nbytes - limit if limit else 0

    def squeeze(self, nbytes: int, protected: set[Unit] | frozenset[Unit] = frozenset()) -> bool:
        """Evict until `nbytes` more fit. False if that can't be, and then nothing was evicted; or if what was evicted
        is still being sent.
        """
        for _ in range(SQUEEZES):
            over = self.over(nbytes)
            if over <= 0:
                return True
            if not self._make_way(over, protected):
                return False
        return self.over(nbytes) <= 0

    def _make_way(self, over: int, protected: set[Unit] | frozenset[Unit]) -> bool:
        warm = self.policy.warm if isinstance(self.policy, Orders) else self.policy
        # What is being written is not free before the tier has let go of it.
        busy = self.tier_files.writing.values()
        for kept in (protected.union(busy), protected) if busy else (protected,):
            victims = choose(warm, 0, over, kept, _evicted_bytes)
            if victims is not None:
                for victim in victims:
                    self.evict(victim)
                return True
        # Rows may lie in files, but what is kept of their prefixes in memory may be what is missing.
        victims = choose(self.policy, 0, over, protected, memory_bytes)
        for victim in victims or ():
            self.drop_unit(victim, Reason.EVICTED)
        return victims is not None

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

    # Time: called by the reaper, and on access.

    def expires(self, unit: Unit, expires_s: float) -> None:
        """Note a new expiry time of a unit; part of applying a change."""
        self._expiring += bool(expires_s) - bool(unit.expires_s)
        unit.expires_s = expires_s
        if expires_s:
            heappush(self._expiries, (expires_s, id(unit), unit))
            if len(self._expiries) > 2 * self._expiring + EXPIRY_SLACK:
                self._expiries = [entry for entry in self._expiries if entry[0] == entry[2].expires_s]
                heapify(self._expiries)

    def drop_expired(self, limit: int) -> int:
        """Drop up to `limit` prefixes whose time is over; returns how many were found."""
        now, found = self.clock.wall_s(), 0
        while self._expiries and self._expiries[0][0] <= now and found < limit:
            expires_s, _, unit = heappop(self._expiries)
            if expires_s == unit.expires_s and self.prefixes.get(unit.name) is unit:
                self.commit(DropPrefix(unit.name, Reason.EXPIRED))
                found += 1
        return found

    def drop_stalled(self) -> int:
        """Drop registrations without progress for `pending_timeout_s`; returns how many."""
        limit = self.clock.monotonic_s() - self.config.pending_timeout_s
        stalled = [
            unit
            for units in self.pending.values()
            for unit in units
            if unit.pending is not None and unit.pending.progress_s <= limit
        ]
        for unit in stalled:
            self.commit(DropPrefix(unit.name, Reason.ABANDONED))
        return len(stalled)

    def trim_sessions(self, limit: int) -> None:
        """Evict up to `limit` units while there are more sessions than allowed (the limit was lowered)."""
        for _ in range(limit):
            if self.sessions <= self.config.max_sessions:
                return
            victim = next(self.policy.victims(), None)
            if victim is None:
                return
            self.drop_unit(victim, Reason.EVICTED)

    def payload_refused(self, owner: int, sid: bytes) -> None:
        """Rows that a connection sent for a session were refused for want of memory: what it was filling is dropped."""
        found = self.held_session(sid)
        pending = found[0].pending if found is not None else None
        if found is not None and pending is not None and pending.owner == owner:
            self.commit(DropPrefix(found[0].name, Reason.ABANDONED))

    def disconnect(self, owner: int) -> None:
        """A connection closed: its incomplete registrations are dropped."""
        for unit in list(self.pending.get(owner, ())):
            self.commit(DropPrefix(unit.name, Reason.ABANDONED))

    def expired(self, unit: Unit) -> Unit | None:
        """The unit itself or its topmost ancestor whose time is over, or None. Changes nothing."""
        if unit.parent is None and not unit.expires_s:
            return None
        now = self.clock.wall_s()
        found: Unit | None = None
        step: Unit | None = unit
        while step is not None:
            if step.expires_s and step.expires_s <= now:
                found = step
            step = step.parent
        return found

    def _alive(self, unit: Unit) -> bool:
        """Whether neither the unit nor an ancestor has expired; drops what has."""
        expired = self.expired(unit)
        if expired is not None:
            self.commit(DropPrefix(expired.name, Reason.EXPIRED))
        return expired is None

    # Listing.

    def units(self) -> Iterator[Unit]:
        """Every unit, lone sessions first. Nothing may change while it is walked."""
        yield from self.lone.values()
        yield from self.prefixes.values()

    def statistics(self) -> VStoreStatistics:
        """The counters now."""
        pending = incomplete_tokens = 0
        for unit in (unit for units in self.pending.values() for unit in units):
            rows = unit.layer(K, 0)
            pending, incomplete_tokens = pending + 1, incomplete_tokens + (rows.count if rows is not None else 0)
        return VStoreStatistics(
            prefixes=self.whole - pending,
            pending=pending,
            sessions=self.sessions,
            max_sessions=self.config.max_sessions,
            prefix_tokens=self.prefix_tokens - incomplete_tokens,
            fetches=self.fetches,
            evicted=self.dropped[Reason.EVICTED],
            expired=self.dropped[Reason.EXPIRED],
            abandoned=self.dropped[Reason.ABANDONED],
            damaged=self.checksum_failures,
        )


def _evicted_bytes(unit: Unit) -> int:
    """What `VStore.evict` frees: of what the tier has, too, only the copies of rows."""
    if not unit.placed:
        return memory_bytes(unit)
    memories = {block.memory for layer in unit.all_layers() for block in layer.blocks}
    return sum(memory.nbytes for memory in memories if not memory.mapped)


def _in_tier_only(memory: Memory) -> Memory | None:
    """What stands for a copy in memory once the copy goes."""
    return memory.withdrawn() if isinstance(memory, PromotedMemory) else None


def _received_bytes(change: Change) -> int:
    """What of the payloads in flight becomes the change's own rows."""
    data = change.data if type(change) is StoreRows else b""
    return len(data) if not isinstance(data, Memory) and len(data) > INLINE_ARG_BYTES else 0


def is_internal(change: Change) -> bool:
    """Whether the store makes the change by itself: an eviction, an expiry, an end of what can't be completed.

    It is made even while the log can't be written, as after a restart it would be made again.
    """
    return type(change) in (EvictSession, PlaceRows) or (
        type(change) is DropPrefix and change.reason is not Reason.COMMAND
    )


_Rule = tuple[
    Callable[[VStore, Any], None],
    Callable[[VStore, Any], None],
    Callable[[VStore, Any], tuple[int, int, list[Unit]]] | None,
]

_RULES: Final[dict[type, _Rule]] = {
    CreateSession: (session_changes.check_create, session_changes.apply_create, session_changes.room_for_create),
    StoreRows: (session_changes.check_store, session_changes.apply_store, session_changes.room_for_store),
    PlaceRows: (session_changes.check_place, session_changes.apply_place, None),
    DropSession: (session_changes.check_drop, session_changes.apply_drop, None),
    EvictSession: (session_changes.check_evict, session_changes.apply_evict, None),
    Register: (prefix_changes.check_register, prefix_changes.apply_register, prefix_changes.room_for_register),
    DropPrefix: (prefix_changes.check_drop, prefix_changes.apply_drop, None),
    SetExpiry: (prefix_changes.check_known, prefix_changes.apply_expiry, None),
    SetPin: (prefix_changes.check_known, prefix_changes.apply_pin, None),
}
"""Kind of change -> check, apply, and how many sessions and bytes it needs, and the units that must not go for it."""
