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
from typing import Any, Final

import attrs

from pion.args import show
from pion.config import MIB, Config
from pion.errors import BusyError, CommandError
from pion.limits import INLINE_ARG_BYTES
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
from pion.storage.eviction import EvictionPolicy
from pion.storage.journal import Journal
from pion.storage.ledger import Ledger, Memory
from pion.storage.making_room import MakesRoom
from pion.storage.ordered import SortedMap
from pion.storage.orders import Orders
from pion.storage.placed import TierFiles
from pion.storage.prefix_index import PrefixIndex
from pion.storage.quota import QuotaBook
from pion.storage.unit import SIDES, K, Side, Unit, split_sid
from pion.storage.value import policies

logger = logging.getLogger("pion.storage")

MOST_SESSIONS: Final = 2
"""Sessions that one change can need: both sides of a prefix."""

EXPIRE_BYTES: Final = MIB
"""With less of the byte budget left than this, what has expired is looked for before something is evicted."""

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


class VStore(MakesRoom):
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
        self.quotas: QuotaBook | None = None
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
        self.on_drop: list[Callable[[bytes, Reason], None]] = []
        """Each is told the name of every prefix that was dropped, and why; it may not change the store."""
        self.on_new: list[Callable[[bytes], None]] = []
        """Each is told the name of every prefix that is made, before it has rows; it may not change the store."""
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
        if type(change) is StoreRows and not self.config.max_bytes and self.quotas is None:
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
            others = max(0, self.in_flight() - _received_bytes(change)) if self.config.max_bytes else 0
            self.make_room(name_of(change), sessions, nbytes, others, spared)
        if self.before_change is not None:
            self.before_change(change)
        sessions_before = self.sessions
        apply(self, change)
        if self.quotas is not None:
            self._note_use(self.quotas, name_of(change))
        return self.journal.append(change, created=max(0, self.sessions - sessions_before))

    def drop_unit(self, unit: Unit, reason: Reason) -> None:
        """Drop a prefix or a lone session with all that continues it, if it is still there."""
        if unit.lone:
            if self.lone.get(unit.name) is unit:
                self.commit(EvictSession(unit.name, reason))
        elif self.prefixes.get(unit.name) is unit:
            self.commit(DropPrefix(unit.name, reason))

    def _note_use(self, quotas: QuotaBook, name: bytes) -> None:
        for units in (self.prefixes, self.lone):
            if name in units:
                quotas.note(units[name])

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

    @property
    def unit_count(self) -> int:
        """How many units there are."""
        return len(self.lone) + len(self.prefixes)

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


def _received_bytes(change: Change) -> int:
    """What of the payloads in flight becomes the change's own rows."""
    data = change.data if type(change) is StoreRows else b""
    return len(data) if not isinstance(data, Memory) and len(data) > INLINE_ARG_BYTES else 0


def name_of(change: Change) -> bytes:
    """The namespace, or the id of the session that belongs to none, that a change is about."""
    if isinstance(change, Register | DropPrefix | SetExpiry | SetPin):
        return change.ns
    if isinstance(change, PlaceRows):
        return change.name
    split = split_sid(change.sid)
    return change.sid if split is None else split[0]


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
