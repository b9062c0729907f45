"""What may be kept when part of a data directory is lost: the rules of `pion check` and `pion repair`.

Records are replayed into an empty store, as at a start. While nothing was lost that is all. From the first loss on, the
store can't be sure of what it does not see, so each record is checked as if a client asked for it, and:

- *A record whose data is damaged* says itself what it belonged to: that prefix or session is left out.
- *Records that can't be read* may have stored, replaced or dropped anything. What could be changed then (lone sessions,
  prefixes that were not declared, pending ones) is left out. A complete prefix can't be changed, only dropped or made
  anew, so it stays as it was: what was dropped by a lost record is there again.
- *What follows a loss* is kept if it needs nothing from before it: a prefix or session that is made then, and changes
  of what is there. What can't follow what is left shows that something else is there in truth: rows for what isn't
  there or is complete, options of what isn't there, the making of what is there. That is left out, and kept again from
  where it is made. So is a prefix that continues one from before the loss, if enough was lost to make that one anew.
- *Other families* can't be looked into: one of which a record is damaged or may be lost is left out as a whole.

A prefix or session that is left out goes with all that continues it. So whatever is kept is one generation of it, with
every row as it was stored.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from pion.args import show
from pion.config import Config
from pion.errors import CommandError
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
)
from pion.storage.durable import Dormant, Durable
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger, Memory, Raw
from pion.storage.region import MappedMemory, Region
from pion.storage.unit import SUFFIXES, Unit, split_sid
from pion.storage.vstore import VStore
from pion.storage.vstore_log import MAP_FROM_BYTES, VStoreLog
from pion.storage.vstore_records import is_again, unpack

VSTORE: Final = VStoreLog.family

Key: TypeAlias = tuple[bool, bytes]
"""Whether it is a lone session, and the name of the session or prefix."""


MADE_ANEW_RECORDS: Final = 3
"""To make a prefix with rows anew takes a record that drops it, one that registers it, and one with rows."""


class _NoTime:
    """Nothing expires while a directory is looked at."""

    def wall_s(self) -> float:
        return 0.0

    def monotonic_s(self) -> float:
        return 0.0


class Salvage:
    """The state that the records replayed so far make, and what had to be left out."""

    def __init__(self) -> None:
        self.store = VStore(Config(), _NoTime(), NullJournal(), Ledger())
        self.log = VStoreLog(self.store)
        self.dormant: dict[str, Dormant] = {}
        """The other families."""
        self.lost: dict[Key, str] = {}
        """What is left out of the V-store, and why."""
        self.lost_families: dict[str, str] = {}
        """Other families that are left out, and why."""
        self._any_family = ""
        """Why every other family is left out, also one that comes only later."""
        self._whole = True
        self._older: set[Key] = set()
        """What is from before the last records that can't be read, and may have been made anew by them."""
        self._records_lost = 0
        self._in_table = True
        """The snapshot is being read: each unit is in it once."""
        self._last: Key | None = None
        """Of the entry before, in the snapshot."""
        self._gap_before = ""

    @property
    def families(self) -> list[Durable]:
        """All that is kept, for a new snapshot."""
        return [self.log, *self.dormant.values()]

    def replay(self, family: str, meta: bytes, data: Region | None, *, intact: bool, place: str) -> list[str]:
        """Make a change again, or leave out what it belongs to if its data is damaged. Returns what was left out.

        `place` is for the reasons. Raises ValueError for a record that makes no sense.
        """
        if family != VSTORE:
            return self._replay_other(family, meta, data, intact=intact, place=place)
        rows: Raw | Memory = b""
        if data is not None and intact:
            rows = data.read() if data.nbytes < MAP_FROM_BYTES else MappedMemory(data, self.store.ledger)
            if isinstance(rows, MappedMemory):
                rows.verified = True
        change = unpack(meta, rows)
        key = key_of(change)
        if self._in_table:
            gap, self._gap_before = self._gap_before, ""
            beside = gap and (key == self._last or isinstance(change, CreateSession))
            self._last = key
            if beside:
                return self._leave_out(key, f"it stands beside {gap}, which can't be read")
            if key in self.lost:
                return []
        if not intact:
            return self._leave_out(key, f"{place} is damaged")
        if not self._whole:
            return self._replay_checked(change, key, place, again=is_again(meta))
        try:
            self.store.replay(change)
        except (AssertionError, LookupError, CommandError) as error:
            raise ValueError(f"{type(change).__name__} of something that is not there") from error
        return []

    def nonsense(self, family: str, meta: bytes, place: str) -> list[str]:
        """A record could be read but not be replayed. Returns what was left out."""
        try:
            key = key_of(unpack(meta, b"")) if family == VSTORE else None
        except ValueError:
            key = None
        return self.gap(place, {family}) if key is None else self._leave_out(key, f"{place} makes no sense")

    def snapshot_ended(self) -> None:
        """What follows comes from the log."""
        self._in_table = False

    def table_gap(self, place: str, families: set[str] | None) -> list[str]:
        """Entries of the snapshot can't be read; `families` are those they may belong to, None any.

        A unit's entries stand together, so what is in doubt is the unit in front, the one behind, and any of which
        nothing is left. Returns what was left out.
        """
        left_out = self._leave_out_families(families, f"{place} can't be read")
        if families is None or VSTORE in families:
            self._whole = False
            self._gap_before = place
            unit = self._find(self._last) if self._last is not None else None
            if unit is not None and self._last is not None and _open(unit):
                left_out += self._leave_out(self._last, f"it stands beside {place}, which can't be read")
        return left_out

    def gap(self, place: str, families: set[str] | None, records: int = MADE_ANEW_RECORDS) -> list[str]:
        """Records of the log are lost; `families` are those they may belong to, None any. Returns what was left out."""
        left_out = self._leave_out_families(families, f"{place} can't be read")
        if families is None or VSTORE in families:
            self._whole = False
            for unit in list(self.store.units()):
                if _open(unit) and self._find(_key(unit)) is unit:
                    left_out += self._leave_out(_key(unit), f"it was open when {place}, which can't be read, was made")
            self._records_lost += records
            if self._records_lost >= MADE_ANEW_RECORDS:
                self._older = {_key(unit) for unit in self.store.units()}
        return left_out

    def finish(self) -> None:
        """All was read: drop what is pending, as a start does, and forget losses that were made good."""
        pending = [_key(unit) for units in self.store.pending.values() for unit in units]
        self.log.finish_replay()
        if not self._whole:
            for key in pending:
                self.lost.setdefault(key, "not all of its rows can be read")
        for key in [key for key in self.lost if self._find(key) is not None]:
            del self.lost[key]

    # The V-store.

    def _find(self, key: Key) -> Unit | None:
        lone, name = key
        return (self.store.lone if lone else self.store.prefixes).get(name)

    def _leave_out(self, key: Key, why: str) -> list[str]:
        """Drop a unit, if it is there, and what continues it. From now on the store knows that something is lost."""
        self._whole = False
        keys, unit = [key], self._find(key)
        if unit is not None:
            keys += [_key(below) for below in unit.descendants()]
            self.store.drop_unit(unit, Reason.DAMAGED)
        for each in keys:
            self.lost.setdefault(each, why if each == key else f"it continues {show(key[1])}")
            self._older.discard(each)
        return [describe(each) for each in keys]

    def _replay_checked(self, change: Change, key: Key, place: str, *, again: bool) -> list[str]:
        if isinstance(change, DropPrefix | DropSession | EvictSession):
            return self._replay_drop(change, key, place)
        if isinstance(change, SetExpiry | SetPin | PlaceRows):
            if self._find(key) is not None:
                self.store.replay(change)
            return []
        if isinstance(change, Register) and change.parent is not None and not self._continues_known(change):
            return self._leave_out(key, f"it continues {show(change.parent)}, which is not there or may be older")
        left_out: list[str] = []
        if isinstance(change, CreateSession | Register) and not again and self._has_all(change):
            left_out = self._leave_out(key, f"{place} makes it, so what was there before had been dropped")
        elif isinstance(change, CreateSession | Register) and again and not self._has_all(change):
            return self._leave_out(key, "the record that made it can't be read")
        refusal = self._refusal(change)
        if refusal:
            return left_out + self._leave_out(key, f"{place} can't follow what is left before it: {refusal}")
        self.store.replay(change)
        return left_out

    def _has_all(self, change: CreateSession | Register) -> bool:
        """Whether all sessions are there that the change makes if they aren't."""
        sids = [change.sid] if isinstance(change, CreateSession) else [change.ns + suffix for suffix in SUFFIXES]
        return all(self.store.held_session(sid) is not None for sid in sids)

    def _replay_drop(self, change: DropPrefix | DropSession | EvictSession, key: Key, place: str) -> list[str]:
        unit = self._find(key)
        if isinstance(change, DropSession) and unit is not None:
            if unit.registered or unit.children:
                return self._leave_out(key, f"{place} drops half of it")
            if self.store.held_session(change.sid) is None:
                return []
        if unit is not None:
            self.store.replay(change)
        if self._find(key) is None:
            self.lost.pop(key, None)
            self._older.discard(key)
        return []

    def _refusal(self, change: Change) -> str:
        try:
            self.store.check(change)
        except CommandError as error:
            return str(error)
        return ""

    def _continues_known(self, change: Register) -> bool:
        unit, parent = self.store.prefixes.get(change.ns), change.parent
        if unit is not None and unit.parent is not None and unit.parent.name == parent:
            return True
        return parent in self.store.prefixes and (False, parent) not in self._older

    # Other families.

    def _replay_other(self, family: str, meta: bytes, data: Region | None, *, intact: bool, place: str) -> list[str]:
        self._last, self._gap_before = None, ""
        if not intact:
            return self._leave_out_families({family}, f"{place} is damaged")
        if self._any_family:
            self.lost_families.setdefault(family, self._any_family)
        if family not in self.lost_families:
            self.dormant.setdefault(family, Dormant(family)).replay(meta, data)
        return []

    def _leave_out_families(self, families: set[str] | None, why: str) -> list[str]:
        if families is None:
            self._any_family = self._any_family or why
        names = set(self.dormant) if families is None else families - {VSTORE}
        for family in names:
            self.lost_families.setdefault(family, why)
            self.dormant.pop(family, None)
        return [f"all of {family}" for family in sorted(names)]


def key_of(change: Change) -> Key:
    """What a change is about."""
    if isinstance(change, Register | DropPrefix | SetExpiry | SetPin):
        return False, change.ns
    if isinstance(change, PlaceRows):
        return change.lone, change.name
    split = split_sid(change.sid)
    return (True, change.sid) if split is None else (False, split[0])


def describe(key: Key) -> str:
    """A prefix or lone session, for the operator."""
    return f"{'session' if key[0] else 'prefix'} {show(key[1], 200)}"


def _key(unit: Unit) -> Key:
    return unit.lone, unit.name


def _open(unit: Unit) -> bool:
    """Whether its rows could still be changed."""
    return not unit.complete
