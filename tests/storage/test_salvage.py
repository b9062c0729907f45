"""The rules of what is kept after a loss, by example, and on random histories of which random parts are lost."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from random import Random

import attrs
import pytest

from pion.config import Config
from pion.errors import CommandError
from pion.storage.changes import (
    Change,
    CreateSession,
    Declaration,
    DropPrefix,
    DropSession,
    EvictSession,
    Register,
    SetExpiry,
    SetPin,
    StoreRows,
)
from pion.storage.formats import get_format
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.region import Region
from pion.storage.salvage import VSTORE, Key, Salvage
from pion.storage.schema import Schema
from pion.storage.unit import SIDES, SUFFIXES, Unit
from pion.storage.vstore import VStore
from pion.storage.vstore_records import pack
from pion.testing import FakeClock

SHAPE = Schema.uniform(get_format(b"fp32"), 1)
WIDER = Schema.uniform(get_format(b"fp32"), 2)


def row(value: int) -> bytes:
    """A row of one number, so that each can be told from the others."""
    return struct.pack("<I", value)


def register(ns: bytes, tokens: int | None = 1, parent: bytes | None = None, shape: Schema = SHAPE) -> Register:
    declaration = Declaration(1, tokens) if tokens is not None else None
    return Register(ns=ns, k_schema=shape, v_schema=shape, declaration=declaration, parent=parent)


def complete(ns: bytes, value: int, tokens: int = 1, parent: bytes | None = None) -> Iterator[Change]:
    """All changes that make a prefix."""
    yield register(ns, tokens, parent)
    for suffix in SUFFIXES:
        for start in range(tokens):
            yield StoreRows(ns + suffix, 0, start, 1, row(value))


def region(data: bytes) -> Region | None:
    """Data that was read already."""
    if not data:
        return None
    found = Region(None, 0, len(data), 0, 0)  # type: ignore[arg-type]
    found.content = data
    return found


class Replay:
    """Feeds changes to a salvage, as the log's."""

    def __init__(self) -> None:
        self.salvage = Salvage()
        self.salvage.snapshot_ended()
        self.count = 0

    def __call__(self, *changes: Change, intact: bool = True, again: bool = False) -> list[str]:
        left_out: list[str] = []
        for change in changes:
            self.count += 1
            meta = pack(change, again=again)
            data = region(bytes(change.data)) if isinstance(change, StoreRows) else None  # type: ignore[arg-type]
            left_out += self.salvage.replay(VSTORE, meta, data, intact=intact, place=f"record {self.count}")
        return left_out

    def lose(self, records: int = 10, families: set[str] | None = None) -> list[str]:
        self.count += records
        return self.salvage.gap("a record", families, records)

    def end(self) -> dict[Key, list[bytes]]:
        """What is kept: of each unit the rows of its K side (or of itself), in order."""
        self.salvage.finish()
        return {(unit.lone, unit.name): list(rows_of(unit).values()) for unit in self.salvage.store.units()}


def rows_of(unit: Unit, side: int = 0) -> dict[int, bytes]:
    layer = unit.layer(SIDES[side], 0)
    return {
        index: bytes(block.view(index, index + 1, layer.row_bytes))
        for block in (layer.blocks if layer is not None else ())
        for index in range(block.start, block.stop)
    }


@pytest.fixture
def replay() -> Replay:
    return Replay()


def test_without_a_loss_it_is_a_start(replay: Replay) -> None:
    replay(*complete(b"a", 1), CreateSession(b"s", SHAPE), register(b"pending"), *complete(b"b", 2, parent=b"a"))
    assert replay.end() == {(False, b"a"): [row(1)], (False, b"b"): [row(2)], (True, b"s"): []}
    assert replay.salvage.lost == {}


def test_damaged_rows_take_their_prefix_and_what_continues_it(replay: Replay) -> None:
    first, *rest = complete(b"a", 1)
    replay(*complete(b"b", 2), first, rest[0])
    assert replay(rest[1], intact=False) == ["prefix 'a'"]
    replay(
        *complete(b"c", 3, parent=b"b"), *complete(b"child", 4, parent=b"a"), *complete(b"grandchild", 5, 1, b"child")
    )
    assert replay.end() == {(False, b"b"): [row(2)], (False, b"c"): [row(3)]}
    assert replay.salvage.lost.keys() == {(False, b"a"), (False, b"child"), (False, b"grandchild")}
    assert "record 6 is damaged" in replay.salvage.lost[False, b"a"]


def test_a_session_and_a_prefix_of_one_name_are_two_things(replay: Replay) -> None:
    replay(*complete(b"x", 1), CreateSession(b"x", SHAPE))
    assert replay(StoreRows(b"x", 0, 0, 1, row(2)), intact=False) == ["session 'x'"]
    assert replay.end() == {(False, b"x"): [row(1)]}


def test_what_was_damaged_and_then_dropped_or_made_anew_is_no_loss(replay: Replay) -> None:
    replay(register(b"dropped"), register(b"anew"))
    for ns in (b"dropped", b"anew"):
        replay(StoreRows(ns + b"_pk", 0, 0, 1, row(1)), intact=False)
        assert (False, ns) in replay.salvage.lost
        replay(DropPrefix(ns))
    replay(*complete(b"anew", 2))
    assert replay.end() == {(False, b"anew"): [row(2)]}
    assert replay.salvage.lost == {}


def test_what_is_open_is_left_out_when_records_are_lost(replay: Replay) -> None:
    replay(*complete(b"complete", 1), register(b"pending", 2), StoreRows(b"pending_pk", 0, 0, 1, row(2)))
    replay(register(b"undeclared", None), CreateSession(b"session", SHAPE), StoreRows(b"session", 0, 0, 1, row(3)))
    replay(register(b"below", None, b"undeclared"))
    left_out = replay.lose(1)
    assert set(left_out) == {"prefix 'pending'", "prefix 'undeclared'", "prefix 'below'", "session 'session'"}
    # Rows that follow have nothing to go to.
    assert replay(StoreRows(b"session", 0, 1, 1, row(4))) == ["session 'session'"]
    assert replay.end() == {(False, b"complete"): [row(1)]}
    assert len(replay.salvage.lost) == 4


def test_what_is_made_after_the_loss_is_kept(replay: Replay) -> None:
    replay(CreateSession(b"session", SHAPE), StoreRows(b"session", 0, 0, 1, row(1)))
    replay.lose()
    replay(CreateSession(b"session", SHAPE), StoreRows(b"session", 0, 1, 1, row(2)), *complete(b"a", 3))
    assert replay.end() == {(True, b"session"): [row(2)], (False, b"a"): [row(3)]}
    assert replay.salvage.lost == {}


def test_options_of_a_complete_prefix_go_on(replay: Replay) -> None:
    replay(*complete(b"a", 1))
    replay.lose()
    replay(register(b"a", 1), again=True)
    replay(SetExpiry(b"a", 5e9), SetPin(b"a", True), SetPin(b"unknown", True))
    replay.salvage.finish()
    unit = replay.salvage.store.prefixes[b"a"]
    assert (unit.expires_s, unit.pinned, unit.complete) == (5e9, True, True)


@pytest.mark.parametrize("later", [register(b"a", 1), register(b"a", 2), register(b"a", 1, shape=WIDER)])
def test_a_prefix_is_made_that_is_there_so_it_had_been_dropped(replay: Replay, later: Register) -> None:
    replay(*complete(b"a", 1))
    replay.lose()
    assert replay(later) == ["prefix 'a'"]
    width = later.k_schema.layer(0).row_bytes
    for suffix in SUFFIXES:
        for start in range(later.declaration.tokens if later.declaration else 0):
            replay(StoreRows(b"a" + suffix, 0, start, 1, b"2" * width))
    assert set(replay.end()[False, b"a"]) == {b"2" * width}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (register(b"a", 1, shape=WIDER), "prefix 'a'"),
        (register(b"b", 1), "prefix 'b'"),
        (CreateSession(b"s", SHAPE), "session 's'"),
    ],
)
def test_options_of_something_else_than_what_is_there(replay: Replay, change: Change, name: str) -> None:
    """The record that made it is lost, and with it what else it said: a parent, for one."""
    replay(*complete(b"a", 1))
    replay.lose()
    assert replay(change, again=True) == [name]
    assert replay(StoreRows(b"a_pk", 0, 0, 1, row(2)), StoreRows(b"s", 0, 0, 1, row(2)))
    assert {key for key in replay.end() if key in replay.salvage.lost} == set()


def test_rows_for_a_complete_prefix_show_that_it_was_made_anew(replay: Replay) -> None:
    """Its registration was lost, so it is not known how many rows it has now: none is kept, old or new."""
    replay(*complete(b"a", 1, tokens=2))
    replay.lose(2)
    assert replay(StoreRows(b"a_pk", 0, 0, 1, row(2))) == ["prefix 'a'"]
    assert replay(StoreRows(b"a_pv", 0, 0, 1, row(2))) == ["prefix 'a'"]
    assert replay.end() == {}


@pytest.mark.parametrize(("lost", "kept"), [(2, True), (3, False)])
def test_a_prefix_that_continues_an_older_one(replay: Replay, lost: int, kept: bool) -> None:
    """With three lost records that one may have been dropped and made anew, with other rows."""
    replay(*complete(b"a", 1), *complete(b"b", 2, parent=b"a"))
    replay.lose(lost)
    replay(*complete(b"c", 3, parent=b"b"), *complete(b"d", 4), *complete(b"e", 5, parent=b"d"))
    found = replay.end()
    assert ((False, b"c") in found) is kept
    assert found.keys() >= {(False, b"a"), (False, b"b"), (False, b"d"), (False, b"e")}


def test_losses_add_up(replay: Replay) -> None:
    replay(*complete(b"a", 1))
    for _ in range(3):
        replay.lose(1)
    replay(*complete(b"b", 2, parent=b"a"))
    assert replay.end() == {(False, b"a"): [row(1)]}


def test_drops_of_what_is_not_there(replay: Replay) -> None:
    replay.lose()
    assert replay(DropPrefix(b"a"), DropSession(b"b"), DropSession(b"c_pk"), EvictSession(b"d")) == []
    assert replay.end() == {}


def test_half_of_a_prefix_is_dropped(replay: Replay) -> None:
    """V.DROP is refused for a registered prefix, so the one that is here is not the one that it was for."""
    replay(*complete(b"a", 1))
    replay.lose()
    assert replay(DropSession(b"a_pk")) == ["prefix 'a'"]
    replay(CreateSession(b"b_pk", SHAPE), CreateSession(b"b_pv", SHAPE), DropSession(b"b_pk"))
    assert replay.end() == {(False, b"b"): []}


def test_other_families_go_as_a_whole(replay: Replay) -> None:
    salvage = replay.salvage
    replay(CreateSession(b"session", SHAPE))
    for family in ("notes", "marks", "words"):
        salvage.replay(family, b"1", region(b"data"), intact=True, place="record 1")
    assert salvage.replay("notes", b"2", region(b"data"), intact=False, place="record 2") == ["all of notes"]
    assert salvage.replay("notes", b"3", None, intact=True, place="record 3") == []
    assert replay.lose(1, {"marks"}) == ["all of marks"]
    assert list(salvage.dormant) == ["words"]
    assert replay.end() == {(True, b"session"): []}, "the store had no part in it"
    assert replay.lose(1) == ["all of words", "session 'session'"]
    salvage.replay("late", b"4", None, intact=True, place="record 4")
    assert not salvage.dormant, "any family may have lost a record"
    assert salvage.lost_families.keys() == {"notes", "marks", "words", "late"}


def test_a_record_that_makes_no_sense(replay: Replay) -> None:
    replay(*complete(b"a", 1), CreateSession(b"session", SHAPE))
    meta = pack(StoreRows(b"missing_pk", 0, 0, 1, b""))
    with pytest.raises(ValueError, match="of something that is not there"):
        replay.salvage.replay(VSTORE, meta, region(row(1)), intact=True, place="record 9")
    assert replay.salvage.nonsense(VSTORE, meta, "record 9") == ["prefix 'missing'"]
    with pytest.raises(ValueError, match="unknown kind of change, 99"):
        replay.salvage.replay(VSTORE, b"\x63", None, intact=True, place="record 10")
    assert replay.salvage.nonsense(VSTORE, b"\x63", "record 10") == ["session 'session'"], "it may have been for that"
    assert replay.end() == {(False, b"a"): [row(1)]}


class TestSnapshot:
    """Entries of a table, of which some can't be read."""

    @pytest.fixture
    def table(self) -> Replay:
        replay = Replay()
        replay.salvage = Salvage()
        return replay

    def test_an_open_unit_beside_the_gap_is_left_out(self, table: Replay) -> None:
        table(CreateSession(b"s", SHAPE), StoreRows(b"s", 0, 0, 1, row(1)), *complete(b"a", 2), register(b"u", None))
        assert table.salvage.table_gap("a part", {VSTORE}) == ["prefix 'u'"]
        assert table(CreateSession(b"t", SHAPE)) == ["session 't'"]
        assert table(StoreRows(b"t", 0, 0, 1, row(3)), CreateSession(b"v", SHAPE)) == []
        assert table.end().keys() == {(True, b"s"), (False, b"a"), (True, b"v")}

    def test_rows_whose_registration_is_lost(self, table: Replay) -> None:
        _, *rest = complete(b"a", 1)
        table.salvage.table_gap("a part", {VSTORE})
        table(*rest, *complete(b"b", 2), *complete(b"c", 3, parent=b"a"))
        assert table.end() == {(False, b"b"): [row(2)]}
        assert table.salvage.lost.keys() == {(False, b"a"), (False, b"c")}

    def test_a_complete_prefix_in_front_lacks_nothing(self, table: Replay) -> None:
        table(*complete(b"a", 1))
        assert table.salvage.table_gap("a part", {VSTORE}) == []
        assert table.end() == {(False, b"a"): [row(1)]}

    def test_a_prefix_of_which_rows_are_lost_is_not_complete(self, table: Replay) -> None:
        first, second, _ = complete(b"a", 1)
        table(first, second)
        assert table.salvage.table_gap("a part", {VSTORE}) == ["prefix 'a'"]
        assert table.end() == {}

    def test_a_gap_between_two_families(self, table: Replay) -> None:
        table(*complete(b"a", 1))
        table.salvage.table_gap("a part", {VSTORE, "notes"})
        table.salvage.replay("notes", b"", None, intact=True, place="entry 9")
        assert table.salvage.lost_families.keys() == {"notes"}


# Random histories.

Version = tuple[object, ...]


def version_of(unit: Unit) -> Version:
    """A complete prefix with all its rows, and the same of the one that it continues: neither can change any more."""
    parent = version_of(unit.parent) if unit.parent is not None else None
    return unit.name, unit.declaration, unit.offset, *(tuple(rows_of(unit, side).items()) for side in SIDES), parent


@attrs.define
class Truth:
    """A store that sees everything, and what each complete prefix has ever been."""

    random: Random
    store: VStore = attrs.field(factory=lambda: VStore(Config(), FakeClock(), NullJournal(), Ledger()))
    history: list[tuple[Change, bool]] = attrs.field(factory=list)
    """Each with whether it made nothing anew."""
    versions: set[Version] = attrs.field(factory=set)
    planned: list[Change] = attrs.field(factory=list)
    """The rest of a prefix that is being stored."""

    def make(self, changes: int) -> None:
        while len(self.history) < changes:
            change = self._any()
            if self._is_legal(change):
                before = self.store.sessions
                self.store.replay(change)
                made = self.store.sessions > before
                self.history.append((change, isinstance(change, CreateSession | Register) and not made))
                self.versions |= {version_of(unit) for unit in self.store.units() if unit.complete}

    def _is_legal(self, change: Change) -> bool:
        try:
            self.store.check(change)
        except CommandError:
            return False
        if isinstance(change, DropPrefix):
            return change.ns in self.store.prefixes
        if isinstance(change, EvictSession):
            return change.sid in self.store.lone
        return not isinstance(change, DropSession) or self.store.held_session(change.sid) is not None

    def _any(self) -> Change:
        random = self.random
        ns, other = random.sample((b"a", b"b", b"c", b"d"), 2)
        pick = random.random()
        if self.planned and pick < 0.85:
            return self.planned.pop(0)
        if pick < 0.2:
            declared = [unit.name for unit in self.store.units() if unit.complete and unit.name != ns]
            parent = random.choice([None, *declared])
            self.planned = list(complete(ns, len(self.history), random.choice((1, 1, 2)), parent))
            return self.planned.pop(0)
        if pick < 0.6:
            sid = random.choice((b"s", b"t", ns + b"_pk", ns + b"_pv"))
            return StoreRows(sid, 0, random.randrange(3), 1, row(len(self.history)))
        if pick < 0.75:
            return register(ns, random.choice((None, 1, 1, 2, 3)), random.choice((None, None, other)))
        if pick < 0.85:
            return CreateSession(random.choice((b"s", b"t")), SHAPE)
        if pick < 0.93:
            return DropPrefix(ns)
        return random.choice(
            (DropSession(random.choice((b"s", b"t"))), EvictSession(b"s"), SetPin(ns, True), SetExpiry(ns, 5e9))
        )


def check_kept(salvage: Salvage, truth: Truth) -> int:
    """Nothing that is kept is wrong; returns how many complete prefixes are."""
    kept = 0
    for unit in salvage.store.units():
        if unit.complete:
            assert version_of(unit) in truth.versions
            kept += 1
            continue
        real = (truth.store.lone if unit.lone else truth.store.prefixes)[unit.name]
        for side in SIDES[: 1 if unit.lone else 2]:
            now = rows_of(real, side)
            assert {index: value for index, value in rows_of(unit, side).items() if now.get(index) != value} == {}
    return kept


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_lost_nothing_kept_is_wrong(seed: int) -> None:
    kept = chained = 0
    for number in range(100):
        random = Random(seed * 1000 + number)
        truth = Truth(random)
        truth.make(60)
        replay, position = Replay(), 0
        while position < len(truth.history):
            pick = random.random()
            change, again = truth.history[position]
            records = 1
            if pick < 0.05:
                records = min(random.choice((1, 1, 2, 3, 8)), len(truth.history) - position)
                replay.lose(records)
            else:
                replay(change, intact=pick > 0.07 or not isinstance(change, StoreRows), again=again)
            position += records
        replay.end()
        kept += check_kept(replay.salvage, truth)
        chained += sum(unit.complete and unit.parent is not None for unit in replay.salvage.store.units())
    assert kept > 50
    assert chained > 3
