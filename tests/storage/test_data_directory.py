"""The data directory's own decisions: when a snapshot is taken by itself, and what happens at start and end."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pion.config import Config
from pion.errors import MisconfError, StartupError
from pion.storage import data_directory
from pion.storage.data_directory import DataDirectory, open_disk
from pion.storage.segments import segment_name, snapshot_name
from pion.testing import Fault, MemoryDisk, fault_at
from tests.storage.log_support import Notes, Threads, read, threads

__all__ = ["threads"]

SNAPSHOT = snapshot_name(0)


@asynccontextmanager
async def running(disk: MemoryDisk, live: int = 0, **options: object) -> AsyncIterator[tuple[DataDirectory, Notes]]:
    """A directory with one family. `live` is how much is said to be stored, in bytes and in records."""
    notes = Notes()
    data = open_disk(
        disk,
        Config(dir="memory", **options),
        [notes],
        lambda: live,
        live_records=lambda: live,  # type: ignore[arg-type]
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(data.run)
        yield data, notes
        nursery.cancel_scope.cancel()


async def add(data: DataDirectory, notes: Notes, text: bytes, size: int = 0) -> None:
    await data.admit()
    waiting = notes.add(text, bytes(size))
    assert waiting is not None
    await waiting


async def test_a_log_that_is_too_long_becomes_a_snapshot(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_directory, "LOG_FREE_BYTES", 5000)
    disk = MemoryDisk()
    async with running(disk) as (data, notes):
        for number in range(4):
            await add(data, notes, b"%d" % number, 1000)
            await wait_all_tasks_blocked()
            assert not disk.exists(SNAPSHOT)
        await add(data, notes, b"more", 1000)
        await wait_all_tasks_blocked()
        assert data.snapshots.statistics().taken == 1
        assert data.log.size_bytes < 1000
        await add(data, notes, b"after")
        await wait_all_tasks_blocked()
        assert data.snapshots.statistics().taken == 1
    assert len(read(disk)[1].notes) == 6


async def test_too_long_is_relative_to_what_is_stored(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_directory, "LOG_FREE_BYTES", 1000)
    for live, limit, taken in ((3000, 1.0, 1), (3000, 1.6, 0), (10_000, 1.0, 0), (10_000, 0.3, 1)):
        disk = MemoryDisk()
        async with running(disk, live, wal_limit=limit) as (data, notes):
            await add(data, notes, b"a", 4000)
            await wait_all_tasks_blocked()
            assert data.snapshots.statistics().taken == taken, (live, limit)


async def test_many_small_records_are_too_long_too(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take long to replay."""
    monkeypatch.setattr(data_directory, "LOG_FREE_RECORDS", 10)
    disk = MemoryDisk()
    async with running(disk) as (data, notes):
        for number in range(12):
            await add(data, notes, b"%d" % number)
            await wait_all_tasks_blocked()
            assert data.snapshots.statistics().taken == (number >= 10)
    async with running(disk.crash(), 100) as (data, notes):
        for number in range(50):
            await add(data, notes, b"%d" % number)
        await wait_all_tasks_blocked()
        assert data.snapshots.statistics().taken == 0


async def test_one_that_fails_by_itself_is_tried_again_later(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data_directory, "LOG_FREE_BYTES", 1000)
    disk = MemoryDisk()
    async with running(disk) as (data, notes):
        disk.plan = lambda operation: Fault(error=errno.ENOSPC) if operation.name == SNAPSHOT + ".tmp" else None
        await add(data, notes, b"a", 2000)
        await trio.sleep(1)
        assert "the log is 0 MiB long and stays: no snapshot could be written: No space left" in caplog.text
        tries = caplog.text.count("stays")
        await add(data, notes, b"b", 2000)  # nobody is refused for it
        await trio.sleep(1)
        assert caplog.text.count("stays") == tries == 1
        disk.plan = None
        await trio.sleep(data_directory.RETRY_S)
        assert data.snapshots.statistics().taken == 1
    assert len(read(disk)[1].notes) == 2


async def test_a_stop_takes_a_snapshot_of_what_is_new(threads: Threads) -> None:
    disk = MemoryDisk()
    for life, new in enumerate((True, False, True)):
        async with running(disk) as (data, notes):
            if new:
                await add(data, notes, b"%d" % life)
        since = len(disk.operations)
        await data.close(save=True, grace_s=10)
        assert bool([each for each in disk.operations[since:] if each.name == SNAPSHOT]) == new
    assert read(disk.crash(power=True))[1].notes == [b"0", b"2"]
    assert read(disk)[0].records == 0


async def test_a_stop_without_time_for_it_does_not(threads: Threads, autojump_clock: MockClock) -> None:
    disk = MemoryDisk()
    async with running(disk) as (data, notes):
        await add(data, notes, b"a")
    threads.hold("finish")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: data.close(save=True, grace_s=5))
        await trio.sleep(6)
        threads.release("finish")
    assert not disk.exists(SNAPSHOT)
    assert read(disk.crash(power=True))[1].notes == [b"a"]


async def test_a_stop_on_a_full_disk_keeps_the_log(threads: Threads, caplog: pytest.LogCaptureFixture) -> None:
    disk = MemoryDisk()
    async with running(disk) as (data, notes):
        await add(data, notes, b"a")
    disk.plan = lambda operation: Fault(error=errno.ENOSPC) if operation.kind == "create" else None
    await data.close(save=True, grace_s=5)
    assert "no snapshot at the end" in caplog.text
    assert read(disk.crash(power=True))[1].notes == [b"a"]


async def test_a_start_on_a_full_disk_serves_and_refuses(threads: Threads) -> None:
    disk = MemoryDisk()
    async with running(disk) as (data, notes):
        await add(data, notes, b"a")
    for code in (errno.ENOSPC, errno.EDQUOT):
        disk = disk.crash()
        disk.plan = fault_at(1, Fault(error=code), onwards=True)
        async with running(disk) as (data, notes):
            assert notes.notes == [b"a"]
            with pytest.raises(MisconfError):
                await data.admit()
            with pytest.raises(MisconfError, match="no snapshot"):
                await data.save()
            assert data.statistics().wal.error
            disk.plan = None
            await data.save()
            await add(data, notes, b"b")
        assert read(disk)[1].notes == [b"a", b"b"]
        disk = MemoryDisk()
        async with running(disk) as (data, notes):
            await add(data, notes, b"a")


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EMFILE])
async def test_a_start_that_can_not_write_is_refused(threads: Threads, code: int) -> None:
    disk = MemoryDisk()
    disk.plan = fault_at(1, Fault(error=code))
    with pytest.RaisesGroup(pytest.RaisesExc(StartupError, match="--dir memory: can't write the log")):
        async with running(disk):
            pass


async def test_counters(threads: Threads) -> None:
    disk = MemoryDisk()
    async with running(disk) as (data, notes):
        await add(data, notes, b"a")
    disk = disk.crash()
    async with running(disk) as (data, notes):
        await add(data, notes, b"b")
        found = data.statistics()
        assert (found.directory, found.replayed_records, found.cut_bytes) == ("memory", 1, 0)
        assert (found.wal.records, found.wal.sequence, found.wal.segments) == (1, 2, 2)
        assert found.wal.size_bytes == sum(len(disk.contents(segment_name(0, number))) for number in (1, 2))
        assert found.load_seconds >= 0
