"""The store behind the log: what a failed change leaves, what a start does about damage, what it refuses."""

from __future__ import annotations

import pytest

from pion.config import Config
from pion.errors import CommandError
from pion.storage import vstore_log
from pion.storage.changes import (
    Change,
    CreateSession,
    Declaration,
    DropPrefix,
    DropSession,
    EvictSession,
    Hashes,
    Reason,
    Register,
    SetExpiry,
    SetPin,
    StoreRows,
)
from pion.storage.durable import Captured, Record
from pion.storage.formats import get_format
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.recovery import DamagedFileError, load
from pion.storage.region import Region
from pion.storage.schema import Schema
from pion.storage.segments import snapshot_name
from pion.storage.snapshot import _File
from pion.storage.snapshot_format import Identity, parse
from pion.storage.vstore import VStore
from pion.storage.vstore_log import VStoreLog
from pion.storage.vstore_records import is_again, pack
from pion.testing import FakeClock, MemoryDisk
from tests.commands.kv_support import snapshot

SHAPE = Schema.uniform(get_format(b"fp32"), 1)
TWO_LAYERS = Schema.parse(b"fp32*2", 1, 10, 10)


def make() -> tuple[VStore, VStoreLog]:
    store = VStore(Config(max_sessions=20), FakeClock(), NullJournal(), Ledger())
    return store, VStoreLog(store)


def rows(sid: bytes, *values: int, layer: int = 0, start: int = 0) -> StoreRows:
    return StoreRows(sid, layer, start, len(values), b"".join(b"%04d" % value for value in values), 1)


def prefix(ns: bytes, tokens: int = 0, **options: object) -> Register:
    declared = Declaration(1, tokens) if tokens else None
    return Register(ns=ns, k_schema=SHAPE, v_schema=SHAPE, declaration=declared, owner=1, **options)  # type: ignore[arg-type]


def sides(ns: bytes, *values: int) -> list[StoreRows]:
    return [rows(ns + b"_pk", *values), rows(ns + b"_pv", *values)]


class Keeping:
    """A store whose items are kept, so that some of them can fail."""

    def __init__(self) -> None:
        self.store, self.log = make()
        self.items: list[tuple[Change, int]] = []
        self.log.keep = self._keep  # type: ignore[assignment,method-assign]

    def _keep(self, item: tuple[Change, int], nbytes: int = 0) -> None:
        self.items.append(item)

    def commit(self, *changes: Change) -> None:
        for change in changes:
            self.store.commit(change)

    def fail(self, count: int) -> None:
        """The last `count` items did not reach the disk, and nothing will from now on."""
        self.log.keep = lambda item, nbytes=0: None  # type: ignore[assignment,method-assign]
        lost = self.items[-count:]
        del self.items[-count:]
        self.log.undo(lost)

    def on_disk(self) -> VStore:
        """What a start would find."""
        store, log = make()
        for item in self.items:
            record = log.encode(item)
            store.replay(vstore_log.unpack(record.meta, b"" if record.data is None else record.data))
        log.finish_replay()
        return store


# What failed.


def test_a_session_that_could_not_be_logged_is_gone() -> None:
    kept = Keeping()
    kept.commit(CreateSession(b"s", SHAPE), rows(b"s", 1, 2))
    kept.fail(2)
    assert not kept.store.lone
    assert kept.store.ledger.charged_bytes == 0


def test_rows_of_an_open_session_stay() -> None:
    """The client was told that it can't be sure; the rows are what it sent."""
    kept = Keeping()
    kept.commit(CreateSession(b"s", SHAPE), rows(b"s", 1, 2), rows(b"s", 3))
    kept.fail(1)
    assert snapshot(kept.store)[True, b"s"]["rows0"] == {(0, 0): b"0003", (0, 1): b"0002"}


def test_one_session_of_two_is_gone() -> None:
    kept = Keeping()
    kept.commit(CreateSession(b"p_pk", SHAPE), rows(b"p_pk", 1), CreateSession(b"p_pv", SHAPE))
    kept.fail(1)
    unit = kept.store.prefixes[b"p"]
    assert (unit.k_schema, unit.v_schema) == (SHAPE, None)
    assert snapshot(kept.store) == snapshot(kept.on_disk())


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_declared_prefix_with_a_part_lost_is_gone(lost: int) -> None:
    kept = Keeping()
    kept.commit(prefix(b"p", 2, meta=b"m"), *sides(b"p", 1, 2))
    assert kept.store.visible(b"p") is not None
    kept.fail(lost)
    assert kept.store.prefixes == {}
    assert not kept.store.pending
    assert snapshot(kept.on_disk()) == {}


def test_and_what_continues_it() -> None:
    kept = Keeping()
    kept.commit(prefix(b"p", 2), *sides(b"p", 1, 2), prefix(b"c", 1, parent=b"p", offset=2), *sides(b"c", 3))
    kept.fail(4)
    assert kept.store.prefixes == {}


def test_what_was_complete_before_stays() -> None:
    kept = Keeping()
    kept.commit(prefix(b"p", 2), *sides(b"p", 1, 2), SetPin(b"p", True), SetExpiry(b"p", 1e12), prefix(b"p", pin=True))
    kept.fail(3)
    assert kept.store.visible(b"p") is not None
    assert kept.store.prefixes[b"p"].complete


def test_registering_what_was_there_does_not_take_it_away() -> None:
    """The session had been stored and acknowledged; only its registration failed."""
    kept = Keeping()
    kept.commit(CreateSession(b"p_pk", SHAPE), rows(b"p_pk", 1, 2), prefix(b"p", meta=b"m"))
    kept.fail(1)
    assert snapshot(kept.store)[False, b"p"]["rows0"] == {(0, 0): b"0001", (0, 1): b"0002"}
    assert snapshot(kept.on_disk())[False, b"p"]["rows0"] == {(0, 0): b"0001", (0, 1): b"0002"}


def test_a_registration_of_two_sessions_that_were_there_stays() -> None:
    kept = Keeping()
    kept.commit(CreateSession(b"p_pk", SHAPE), CreateSession(b"p_pv", SHAPE), *sides(b"p", 1), prefix(b"p"))
    kept.fail(1)
    assert kept.store.visible(b"p") is not None


def test_a_drop_that_failed_is_not_undone() -> None:
    """It is there again after a restart: the value before."""
    kept = Keeping()
    kept.commit(prefix(b"p", 1), *sides(b"p", 1), DropPrefix(b"p"), prefix(b"p", 1), *sides(b"p", 2))
    kept.fail(4)
    assert kept.store.prefixes == {}
    assert snapshot(kept.on_disk())[False, b"p"]["rows0"] == {(0, 0): b"0001"}


def test_what_is_gone_already_is_no_problem() -> None:
    kept = Keeping()
    kept.commit(CreateSession(b"s", SHAPE), rows(b"s", 1), DropSession(b"s"))
    kept.commit(prefix(b"p", 1), *sides(b"p", 1), DropPrefix(b"p"))
    kept.commit(CreateSession(b"q_pk", SHAPE), prefix(b"q"))
    kept.fail(len(kept.items))
    assert not kept.store.lone


# What a snapshot takes.


def captured_names(change: Change | None) -> list[bytes]:
    """The prefixes of a chain and another one as they are captured, when a change comes first."""
    store, log = make()
    for each in (prefix(b"other", 1), *sides(b"other", 1), prefix(b"p", 1), *sides(b"p", 1)):
        store.commit(each)
    for ns, parent, offset in ((b"c", b"p", 1), (b"d", b"c", 2)):
        for each in (prefix(ns, 1, parent=parent, offset=offset), *sides(ns, 1)):
            store.commit(each)
    before = {name: unit for (_, name), unit in snapshot(store).items()}
    capture = log.capture()
    if change is not None:
        store.commit(change)
    changes = [vstore_log.unpack(captured.meta, b"".join(captured.parts)) for captured in capture]
    again, _ = make()
    for each in changes:
        again.replay(each)
    assert {name: unit for (_, name), unit in snapshot(again).items()} == before
    return [each.ns for each in changes if isinstance(each, Register)]


def test_what_changes_is_taken_before_with_what_it_continues() -> None:
    assert captured_names(None) == [b"other", b"p", b"c", b"d"]
    assert captured_names(SetPin(b"d", True)) == [b"p", b"c", b"d", b"other"]
    assert captured_names(SetPin(b"p", True)) == [b"p", b"other", b"c", b"d"]


def test_what_is_dropped_is_taken_before_with_what_continues_it() -> None:
    assert captured_names(DropPrefix(b"p")) == [b"p", b"c", b"d", b"other"]
    assert captured_names(DropPrefix(b"c")) == [b"p", b"c", b"d", b"other"]
    assert captured_names(DropPrefix(b"other")) == [b"other", b"p", b"c", b"d"]


# Records.


def test_rows_are_not_copied_into_records() -> None:
    _, log = make()
    change = rows(b"s", 1, 2)
    record = log.encode((change, 0))
    assert record == Record(pack(change), change.data)  # type: ignore[arg-type]
    assert record.data is change.data


def test_a_record_says_whether_it_made_a_session() -> None:
    kept = Keeping()
    kept.commit(CreateSession(b"s", SHAPE), CreateSession(b"s", SHAPE), prefix(b"p"), prefix(b"p", meta=b"m"))
    kept.commit(CreateSession(b"q_pk", SHAPE), prefix(b"q"), SetPin(b"q", True))
    marks = [is_again(kept.log.encode(item).meta) for item in kept.items]
    assert marks == [False, True, False, True, False, False, False]


def test_the_queue_is_told_how_much_data_there_is() -> None:
    store, log = make()
    sizes: list[int] = []
    log.keep = lambda item, nbytes=0: sizes.append(nbytes)  # type: ignore[assignment,method-assign]
    store.commit(CreateSession(b"s", SHAPE))
    store.commit(rows(b"s", 1, 2, 3))
    assert sizes == [0, 12]
    assert log.size_bytes == 0


# A start.


def disk_with(*records: tuple[Change, bytes]) -> MemoryDisk:
    """A snapshot of these records."""
    disk = MemoryDisk()
    file = _File(disk, snapshot_name(0), 0, Identity(worker=0, covers=9, lineage=bytes(16)))
    file.add([("vstore", Captured(pack(change), (data,) if data else ())) for change, data in records])
    file.finish()
    return disk


def record(change: Change) -> tuple[Change, bytes]:
    return change, bytes(change.data) if isinstance(change, StoreRows) else b""  # type: ignore[arg-type]


def damage(disk: MemoryDisk, index: int) -> None:
    """Flip a bit in the data of one entry."""
    entries = list(parse(disk.map(snapshot_name(0)).view).entries())
    assert entries[index].nbytes
    disk.damage(snapshot_name(0), entries[index].start)


def start(disk: MemoryDisk) -> VStore:
    store, log = make()
    load(disk, 0, [log])
    log.finish_replay()
    return store


@pytest.mark.parametrize("index", [4, 5])
def test_small_rows_that_are_damaged_take_their_prefix(index: int, caplog: pytest.LogCaptureFixture) -> None:
    changes = [CreateSession(b"s", SHAPE), rows(b"s", 1), prefix(b"a", 1, meta=b"m"), prefix(b"p", 2)]
    changes += [*sides(b"p", 1, 2), *sides(b"a", 1), prefix(b"c", 1, parent=b"p", offset=2), *sides(b"c", 1)]
    disk = disk_with(*map(record, changes))
    damage(disk, index)
    store = start(disk)
    assert store.checksum_failures == store.statistics().damaged == 1
    assert (set(store.prefixes), set(store.lone)) == ({b"a"}, {b"s"})
    assert "'p': a checksum failed, dropped" in caplog.messages[-1]


def test_a_session_with_damaged_rows_is_dropped() -> None:
    disk = disk_with(*map(record, [CreateSession(b"s", SHAPE), rows(b"s", 1), rows(b"s", 2, start=5)]))
    damage(disk, 2)
    store = start(disk)
    assert (store.checksum_failures, store.lone) == (1, {})


def test_damaged_rows_of_what_is_dropped_later_are_no_loss() -> None:
    """What has the name now is another."""
    changes = [CreateSession(b"s", SHAPE), rows(b"s", 1), DropSession(b"s"), CreateSession(b"s", SHAPE), rows(b"s", 2)]
    changes += [prefix(b"p", 1), *sides(b"p", 1), DropPrefix(b"p"), prefix(b"p", 1), *sides(b"p", 2)]
    disk = disk_with(*map(record, changes))
    damage(disk, 1)
    damage(disk, 6)
    store = start(disk)
    assert store.checksum_failures == 0
    assert (set(store.prefixes), set(store.lone)) == ({b"p"}, {b"s"})


def test_damaged_rows_of_one_that_goes_with_its_parent_are_no_loss() -> None:
    changes = [prefix(b"p", 1), *sides(b"p", 1), prefix(b"c", 1, parent=b"p", offset=1), *sides(b"c", 1)]
    changes += [DropPrefix(b"p"), prefix(b"c", 1), *sides(b"c", 2)]
    disk = disk_with(*map(record, changes))
    damage(disk, 4)
    store = start(disk)
    assert store.checksum_failures == 0
    assert set(store.prefixes) == {b"c"}


def test_one_side_is_dropped_and_the_other_is_damaged() -> None:
    changes = [CreateSession(b"p_pk", SHAPE), CreateSession(b"p_pv", SHAPE), *sides(b"p", 1), DropSession(b"p_pk")]
    disk = disk_with(*map(record, changes))
    damage(disk, 3)
    store = start(disk)
    assert (store.checksum_failures, store.prefixes) == (1, {})


def test_rows_from_a_size_on_stay_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vstore_log, "MAP_FROM_BYTES", 8)
    changes = [CreateSession(b"s", SHAPE), rows(b"s", 1), rows(b"s", 2, 3, start=5)]
    disk = disk_with(*map(record, changes))
    damage(disk, 2)
    store = start(disk)
    # Nobody has looked at them yet.
    assert (store.checksum_failures, store.ledger.mapped_bytes) == (0, 8)
    (layer,) = store.lone[b"s"].k_rows.layers.values()  # type: ignore[union-attr]
    assert [block.memory.mapped for block in layer.blocks] == [False, True]


def test_pending_registrations_end_with_the_process() -> None:
    disk = disk_with(*map(record, [prefix(b"p", 2), rows(b"p_pk", 1, 2), prefix(b"q", 1), *sides(b"q", 1)]))
    store = start(disk)
    assert set(store.prefixes) == {b"q"}
    assert (store.statistics().pending, store.statistics().abandoned) == (0, 1)


NONSENSE: list[Change] = [
    rows(b"none", 1),
    DropSession(b"none"),
    EvictSession(b"none"),
    DropPrefix(b"none", Reason.EVICTED),
    SetExpiry(b"none", 5.0),
    SetPin(b"none", True),
    prefix(b"c", parent=b"none"),
    rows(b"two_pk", 1, layer=2),
]


@pytest.mark.parametrize("change", NONSENSE, ids=lambda change: type(change).__name__)
def test_what_makes_no_sense_is_refused(change: Change) -> None:
    """Whole records of something that isn't there: the file can't be ours, or the program is wrong."""
    before = Register(ns=b"two", k_schema=TWO_LAYERS, v_schema=TWO_LAYERS)
    disk = disk_with(record(before), record(change))
    with pytest.raises(DamagedFileError, match="record 1 of its table, of vstore, makes no sense"):
        start(disk)


def test_a_record_that_can_not_be_read_is_refused() -> None:
    _, log = make()
    for meta in (b"", b"\x63", b"\x01\xff\xff\xff\xff"):
        with pytest.raises(ValueError, match=r".+"):
            log.replay(meta, None)


def test_what_is_replayed_is_not_checked_again() -> None:
    """Limits may have been lowered since."""
    _, log = make()
    for number in range(50):
        log.replay(pack(CreateSession(b"s%d" % number, SHAPE)), None)
    assert log._store.sessions == 50
    with pytest.raises(CommandError):
        log._store.session(b"s50")


def test_everything_of_a_registration_comes_back() -> None:
    change = prefix(b"p", 4, meta=b"m", hashes=Hashes(2, bytes(16)), expires_s=1e12, pin=True)
    store, log = make()
    mapping = disk_with((rows(b"x", 1), b"0001")).map(snapshot_name(0))
    log.replay(pack(change), None)
    for side in sides(b"p", 1, 2, 3, 4):
        data = bytes(side.data)  # type: ignore[arg-type]
        region = Region(mapping, 0, len(data), 0, 0)
        region.content = data
        log.replay(pack(side), region)
    unit = store.prefixes[b"p"]
    assert (unit.complete, unit.pinned, unit.meta, unit.expires_s) == (True, True, b"m", 1e12)
    assert store.match(bytes(16), 2, b"") == (unit, 2, 2)
