"""Families and their log: the default behaviour, and records of a plugin that is not loaded."""

from __future__ import annotations

import errno

import attrs
import pytest
import trio

from pion.errors import MisconfError, StartupError
from pion.storage import snapshot
from pion.storage.data_directory import check_families
from pion.storage.durable import Captured, Dormant, Durable, Record
from pion.storage.recovery import DamagedFileError, load
from pion.storage.region import DamagedError, Region
from pion.storage.segments import segment_name, snapshot_name
from pion.storage.snapshot import Snapshotter
from pion.storage.wal import Log, Sync
from pion.testing import MemoryDisk
from tests.storage.log_support import FOREVER, Notes, Threads, opened, read, threads

__all__ = ["threads"]


async def test_without_a_log_nothing_is_kept_and_nothing_fails() -> None:
    notes = Notes()
    notes.check()
    await notes.room()
    assert notes.add(b"a") is None
    assert notes.notes == [b"a"]


async def test_with_a_broken_log_changes_are_refused(threads: Threads) -> None:
    async with opened(MemoryDisk()) as log:
        log.notes.check()
        log.log.refuse(OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(MisconfError, match="No space left"):
            log.notes.check()


def test_what_a_family_must_bring() -> None:
    family = Durable()
    record = Record(b"meta", b"data")
    assert family.encode(record) is record
    family.finish_replay()
    for call in (lambda: family.replay(b"", None), family.capture):
        with pytest.raises(NotImplementedError):
            call()


def test_a_captured_record_of_its_own_is_always_right() -> None:
    captured = Captured(b"meta", (b"a", b"b"))
    assert (captured.verify(), captured.follows, captured.lost) == (True, False, False)
    assert Captured(b"meta").parts == ()


def test_names_of_families() -> None:
    check_families([Notes("a"), Notes("b" * 32), Notes("%")])
    for name in ("", "b" * 33, "\u00e9"):
        with pytest.raises(StartupError, match="1 to 32 ASCII"):
            check_families([Notes(name)])
    with pytest.raises(StartupError, match="two plugins keep state as 'a'"):
        check_families([Notes("a"), Notes("a")])


# Dormant families.


@attrs.define(eq=False)
class Shelf(Durable):
    """A plugin's family: texts, with data that it reads when it is asked."""

    family: str = "shelf"
    items: dict[bytes, Region | None] = attrs.field(factory=dict)

    def replay(self, meta: bytes, data: Region | None) -> None:
        self.items[meta] = data

    def data(self, meta: bytes) -> bytes:
        region = self.items[meta]
        return b"" if region is None else region.read()


async def fill(disk: MemoryDisk) -> None:
    """The plugin is loaded, and keeps three things."""
    found, _ = read(disk)
    shelf = Shelf()
    log = Log(disk, 0, found.position, Sync.ALWAYS, queue_bytes=FOREVER)
    await log.open()
    shelf.log = log
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        for meta, data in ((b"plain", None), (b"small", b"1" * 10), (b"large", b"2" * 100_000)):
            waiting = shelf.keep(Record(meta, data), len(data or b""))
            assert waiting is not None
            await waiting
        nursery.cancel_scope.cancel()
    await log.close()


async def save_without_the_plugin(disk: MemoryDisk, times: int = 1) -> Dormant:
    """A server without the plugin starts, and takes snapshots."""
    notes = Notes()
    found = load(disk, 0, [notes])
    (dormant,) = found.dormant.values()
    log = Log(disk, 0, found.position, Sync.ALWAYS, queue_bytes=FOREVER, segments=found.sizes())
    await log.open()
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        snapshots = Snapshotter(disk, 0, found.position.lineage, log, [notes, dormant])
        for _ in range(times):
            await snapshots.take()
        nursery.cancel_scope.cancel()
    await log.close()
    return dormant


def shelf_of(disk: MemoryDisk) -> Shelf:
    shelf = Shelf()
    load(disk, 0, [Notes(), shelf])
    return shelf


async def test_what_a_plugin_kept_outlives_snapshots_without_it(threads: Threads) -> None:
    disk = MemoryDisk()
    await fill(disk)
    for times in (1, 3):
        await save_without_the_plugin(disk, times)
        # The log is gone; all of it is in the snapshot.
        assert snapshot_name(0) in disk.names()
        assert segment_name(0, 1) not in disk.names()
        shelf = shelf_of(disk)
        assert list(shelf.items) == [b"plain", b"small", b"large"]
        assert shelf.items[b"plain"] is None
        assert (shelf.data(b"small"), shelf.data(b"large")) == (b"1" * 10, b"2" * 100_000)


async def test_its_data_moves_to_the_newest_file(threads: Threads) -> None:
    disk = MemoryDisk()
    await fill(disk)
    dormant = await save_without_the_plugin(disk, 2)
    disk.damage(snapshot_name(0), len(disk.contents(snapshot_name(0))) - 100_000)
    data = [captured.verify() for captured in dormant.capture()]
    assert data == [True, True, False]


async def test_damaged_data_stays_damaged(threads: Threads, caplog: pytest.LogCaptureFixture) -> None:
    """The others are kept. The plugin must not take anything else for the lost data, nor the record for one without."""
    disk = MemoryDisk()
    await fill(disk)
    disk.damage(segment_name(0, 1), len(disk.contents(segment_name(0, 1))) - 5)
    for times in (1, 2):
        await save_without_the_plugin(disk, times)
        shelf = shelf_of(disk)
        assert list(shelf.items) == [b"plain", b"small", b"large"]
        assert shelf.data(b"small") == b"1" * 10
        with pytest.raises(DamagedError):
            shelf.data(b"large")


async def test_a_family_that_refuses_damaged_data_refuses_the_start(threads: Threads) -> None:
    disk = MemoryDisk()
    await fill(disk)
    disk.damage(segment_name(0, 1), len(disk.contents(segment_name(0, 1))) - 5)
    with pytest.raises(DamagedFileError, match="of shelf, makes no sense: its data is not what was written"):
        load(disk, 0, [Notes("shelf")])


async def test_too_much_damage_for_one_snapshot(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "ATTEMPTS", 1)
    disk = MemoryDisk()
    await fill(disk)
    disk.damage(segment_name(0, 1), len(disk.contents(segment_name(0, 1))) - 5)
    with pytest.RaisesGroup(pytest.RaisesExc(MisconfError, match="too many damaged rows")):
        await save_without_the_plugin(disk)
    assert shelf_of(disk).data(b"small") == b"1" * 10
