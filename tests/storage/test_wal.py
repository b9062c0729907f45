"""The log: group commit, order, back-pressure, segments, and when what is flushed."""

from __future__ import annotations

import errno
import threading
from itertools import chain

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pion.storage import records, segments, wal
from pion.storage.durable import Record
from pion.storage.records import SEGMENT_BYTES, SegmentHeader
from pion.storage.segments import SegmentWriter, segment_name, segment_number
from pion.storage.wal import ITEM_BYTES, Position, Sync
from pion.testing import Fault, MemoryDisk, Operation
from tests.storage.log_support import LINEAGE, Notes, Threads, kinds, opened, read, reopened, threads

__all__ = ["threads"]


def texts(count: int, start: int = 0) -> list[bytes]:
    return [b"note %d" % number for number in range(start, start + count)]


def first_numbers(disk: MemoryDisk) -> list[tuple[int, list[int]]]:
    """Each segment's number, and the sequence numbers of its records."""
    found = []
    for name in disk.names():
        view = memoryview(disk.contents(name))
        header = SegmentHeader.parse(view)
        found.append((header.number, [entry.sequence for entry in records.scan(view, header)]))
    return found


def claims(disk: MemoryDisk, name: str) -> list[int]:
    """Up to which number the records of a segment say that all were flushed."""
    view = memoryview(disk.contents(name))
    return [entry.durable for entry in records.scan(view, SegmentHeader.parse(view))]


# Group commit.


@pytest.mark.parametrize("sync", Sync)
async def test_what_gathers_while_the_writer_is_away_is_one_write(threads: Threads, sync: Sync) -> None:
    disk = MemoryDisk()
    async with opened(disk, sync) as log:
        threads.hold("write")
        since = len(disk.operations)
        async with trio.open_nursery() as nursery:
            for text in texts(100):
                nursery.start_soon(log.add, text)
                await wait_all_tasks_blocked()
            assert log.log.statistics().queued_bytes >= 100 * ITEM_BYTES
            threads.release("write")
        # The first went alone, the other 99 together.
        assert kinds(disk, since) == (["write", "sync"] * 2 if sync is Sync.ALWAYS else ["write"] * 2)
        statistics = log.log.statistics()
        assert (statistics.records, statistics.sequence, statistics.queued_bytes) == (100, 100, 0)
        assert statistics.size_bytes == len(disk.contents(segment_name(0, 1)))
    assert read(disk)[1].notes == texts(100)


async def test_nobody_is_answered_before_the_write(threads: Threads) -> None:
    disk = MemoryDisk()
    async with opened(disk, Sync.NO) as log, trio.open_nursery() as nursery:
        threads.hold("write")
        nursery.start_soon(log.add, b"a")
        await wait_all_tasks_blocked()
        assert log.notes.notes == [b"a"]
        assert read(disk)[1].notes == []
        assert nursery.child_tasks
        threads.release("write")
        await wait_all_tasks_blocked()
        assert not nursery.child_tasks
        assert read(disk)[1].notes == [b"a"]


async def test_always_answers_after_the_flush(threads: Threads) -> None:
    disk = MemoryDisk()
    async with opened(disk, Sync.ALWAYS) as log:
        for text in texts(3):
            await log.add(text)
            assert read(disk.crash(power=True))[1].notes == log.notes.notes
        assert log.log.statistics().durable_sequence == 3


async def test_cancelling_the_wait_undoes_nothing(threads: Threads) -> None:
    disk = MemoryDisk()
    async with opened(disk) as log:
        threads.hold("write")
        with trio.move_on_after(0) as scope:
            await log.add(b"a")
        assert scope.cancelled_caught
        threads.release("write")
        await wait_all_tasks_blocked()
    assert read(disk)[1].notes == [b"a"]


async def test_a_large_batch_is_cut(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wal, "BATCH_BYTES", 10 * ITEM_BYTES)
    disk = MemoryDisk()
    async with opened(disk, Sync.NO) as log:
        since = len(disk.operations)
        waits = [log.notes.add(text) for text in texts(50)]
        for waiting in waits:
            assert waiting is not None
            await waiting
        assert kinds(disk, since) == ["write"] * 5
    assert read(disk)[1].notes == texts(50)


async def test_large_data_is_written_in_pieces(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "WRITE_BYTES", 100)
    monkeypatch.setattr(segments, "JOINED_BYTES", 50)
    disk = MemoryDisk()
    async with opened(disk, Sync.NO) as log:
        await log.add(b"large", bytes(range(250)))
        await log.add(b"small", b"data")
    assert max(operation.nbytes for operation in disk.operations[4:]) <= 150
    assert read(disk)[1].notes == [b"large" + bytes(range(250)), b"smalldata"]


# Back-pressure.


async def test_a_full_queue_makes_the_next_wait(threads: Threads) -> None:
    disk = MemoryDisk()
    async with opened(disk, Sync.NO, queue_bytes=3 * ITEM_BYTES) as log, trio.open_nursery() as nursery:
        threads.hold("write")
        for text in texts(10):
            nursery.start_soon(log.add, text)
            await wait_all_tasks_blocked()
        # One more than fits: who comes when there is room does not ask whether there is enough.
        assert log.notes.notes == texts(4)
        assert log.log.crowded
        assert log.log.statistics().queued_bytes <= 4 * ITEM_BYTES
        threads.release("write")
        await wait_all_tasks_blocked()
        assert not nursery.child_tasks
        assert log.log.statistics().queued_bytes == 0
    assert sorted(read(disk)[1].notes) == texts(10)


async def test_who_gives_up_waiting_for_room_lets_the_next_pass(threads: Threads) -> None:
    disk = MemoryDisk()
    async with opened(disk, Sync.NO, queue_bytes=ITEM_BYTES) as log, trio.open_nursery() as nursery:
        threads.hold("write")
        waiting = []
        for text in texts(6):
            scope = trio.CancelScope()
            waiting.append(scope)

            async def client(text: bytes = text, scope: trio.CancelScope = scope) -> None:
                with scope:
                    await log.add(text)

            nursery.start_soon(client)
            await wait_all_tasks_blocked()
        assert log.notes.notes == texts(2)
        for scope in waiting[2:5]:
            scope.cancel()
        await wait_all_tasks_blocked()
        threads.release("write")
        await wait_all_tasks_blocked()
        assert not nursery.child_tasks
        assert log.notes.notes == [*texts(2), *texts(1, 5)]


# Segments.


async def test_each_start_begins_a_segment() -> None:
    disk = MemoryDisk()
    for life in range(3):
        async with opened(disk) as log:
            assert log.notes.notes == texts(2 * life)
            for text in texts(2, 2 * life):
                await log.add(text)
        disk = disk.crash()
    assert first_numbers(disk) == [(1, [1, 2]), (2, [3, 4]), (3, [5, 6])]
    lineages = {SegmentHeader.parse(memoryview(disk.contents(name))).lineage for name in disk.names()}
    salts = {SegmentHeader.parse(memoryview(disk.contents(name))).salt for name in disk.names()}
    assert (lineages, len(salts)) == ({LINEAGE}, 3)


@pytest.mark.parametrize("sync", Sync)
async def test_a_long_segment_is_closed(sync: Sync) -> None:
    disk = MemoryDisk()
    async with opened(disk, sync, segment_limit=SEGMENT_BYTES + 200) as log:
        for text in texts(12):
            await log.add(text)
        assert log.log.statistics().segments == len(disk.names())
        assert log.log.size_bytes == sum(len(disk.contents(name)) for name in disk.names())
    found = first_numbers(disk)
    assert len(found) >= 3
    assert [*chain.from_iterable(numbers for _, numbers in found)] == list(range(1, 13))
    assert [number for number, _ in found] == list(range(1, len(found) + 1))
    assert read(disk)[1].notes == texts(12)
    if sync is Sync.ALWAYS:
        assert read(disk.crash(power=True))[1].notes == texts(12)


async def test_a_cut_lets_a_segment_begin(threads: Threads) -> None:
    disk = MemoryDisk()
    async with opened(disk) as log:
        await log.add(b"a")
        threads.hold("write")
        for text in (b"b", b"c"):
            log.notes.add(text)
        assert log.log.cut() == 3
        log.notes.add(b"d")
        threads.release("write")
        await log.log.wait_written(3)
        assert len(disk.names()) == 2
        # With nothing in it the next would be the same.
        await log.add(b"e")
        assert log.log.cut() == 5
        assert log.log.cut() == 5
        await log.log.wait_written(5)
        await wait_all_tasks_blocked()
    assert first_numbers(disk) == [(1, [1, 2, 3]), (2, [4, 5]), (3, [])]


async def test_waiting_for_a_cut_waits_for_its_segment(threads: Threads) -> None:
    """Also when all records before it were written long ago."""
    disk = MemoryDisk()
    async with opened(disk) as log, trio.open_nursery() as nursery:
        await log.add(b"a")
        threads.hold("write")
        assert log.log.cut() == 1
        nursery.start_soon(log.log.wait_written, 1)
        await wait_all_tasks_blocked()
        assert nursery.child_tasks
        assert len(disk.names()) == 1
        threads.release("write")
        await wait_all_tasks_blocked()
        assert not nursery.child_tasks
        assert len(disk.names()) == 2


async def test_covered_segments_are_removed() -> None:
    disk = MemoryDisk()
    async with opened(disk, segment_limit=SEGMENT_BYTES + 200) as log:
        for text in texts(12):
            await log.add(text)
        found = first_numbers(disk)
        covered = found[1][1][-1]
        await log.log.remove_covered(covered - 1)  # the last of the second is not covered
        assert [number for number, _ in first_numbers(disk)] == [number for number, _ in found[1:]]
        await log.log.remove_covered(covered)
        assert [number for number, _ in first_numbers(disk)] == [number for number, _ in found[2:]]
        await log.log.remove_covered(10**6)
        assert [number for number, _ in first_numbers(disk)] == [number for number, _ in found[-1:]]
        assert log.log.size_bytes == len(disk.contents(disk.names()[0]))


async def test_the_next_segment_is_made_in_advance(threads: Threads, mock_clock: trio.testing.MockClock) -> None:
    disk = MemoryDisk()
    async with opened(disk, Sync.NO) as log:
        await log.add(b"a")
        mock_clock.jump(1.1)
        await wait_all_tasks_blocked()
        assert [len(disk.contents(name)) for name in disk.names()][1:] == [SEGMENT_BYTES]
        since = len(disk.operations)
        log.log.cut()
        await log.add(b"b")
        # The one after it is made at once, as the next cut may come as soon; what is written does not wait for it.
        await wait_all_tasks_blocked()
        assert kinds(disk, since) == ["write", "create", "write", "sync", "sync_directory"]
        # A crash may leave one that was not used.
        assert first_numbers(disk) == [(1, [1]), (2, [2]), (3, [])]
    disk = disk.crash()
    async with opened(disk) as log:
        assert log.notes.notes == [b"a", b"b"]
        await log.add(b"c")
    assert first_numbers(disk) == [(1, [1]), (2, [2]), (3, []), (4, [3])]
    assert read(disk)[1].notes == [b"a", b"b", b"c"]


async def test_where_none_can_be_made_in_advance_it_is_tried_again_later(
    threads: Threads, mock_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk = MemoryDisk()

    def plan(operation: Operation) -> Fault | None:
        return Fault(error=errno.ENOSPC) if operation.kind == "create" else None

    async with opened(disk, Sync.NO) as log:
        disk.plan = plan
        await log.add(b"a")
        for seconds in (0.3, 30.0, 20.0):
            mock_clock.jump(seconds)
            await wait_all_tasks_blocked()
        assert kinds(disk, 0).count("create") == 2
        assert caplog.messages == ["log in memory: no next segment could be made: No space left on device"]
        # The log itself goes on, until it needs the segment.
        await log.add(b"b")
        disk.plan = None
        mock_clock.jump(60)
        await wait_all_tasks_blocked()
        assert first_numbers(disk) == [(1, [1, 2]), (3, [])]


async def test_one_that_is_made_in_advance_is_removed_at_the_end(
    threads: Threads, mock_clock: trio.testing.MockClock
) -> None:
    disk = MemoryDisk()
    async with opened(disk) as log:
        await log.add(b"a")
        mock_clock.jump(1.1)
        await wait_all_tasks_blocked()
        assert len(disk.names()) == 2
        await log.stop()
    assert first_numbers(disk) == [(1, [1])]


def test_a_segment_is_made_by_two_threads_at_once() -> None:
    """The one that makes it in advance is slow; the writer needs it now. Numbers still follow the records."""
    disk = MemoryDisk()
    writer = SegmentWriter(disk, 0, Position(1, 1, LINEAGE), flush_each=False, limit=10**9)
    writer.begin(1)
    notes = Notes()
    writer.write([(notes, Record(b"a"))], 1, 0)
    slow, go_on = threading.Event(), threading.Event()

    def plan(operation: Operation) -> Fault | None:
        if operation.kind == "sync" and operation.name == segment_name(0, 2):
            slow.set()
            go_on.wait(0.2)
        elif operation.name == segment_name(0, 3):
            go_on.set()
        return None

    disk.plan = plan
    prepare = threading.Thread(target=writer.prepare)
    prepare.start()
    assert slow.wait(10)
    writer.write([None, (notes, Record(b"b"))], 2, 0)
    prepare.join()
    writer.prepare()
    writer.write([None, (notes, Record(b"c"))], 3, 0)
    disk.plan = None
    assert [numbers for _, numbers in first_numbers(disk)] == [[1], [2], [3]]
    assert read(disk)[1].notes == [b"a", b"b", b"c"]


def test_names_of_segments() -> None:
    assert segment_name(3, 12) == "pion.vstore.3.log.0000000012"
    assert segment_number(3, segment_name(3, 12)) == 12
    for name in (segment_name(2, 12), "pion.vstore.3.log.12", "pion.vstore.3.log.", "pion.vstore.3", "pion.lock"):
        assert segment_number(3, name) is None


# Flushing.


async def test_everysec_flushes_every_second(threads: Threads, mock_clock: trio.testing.MockClock) -> None:
    disk = MemoryDisk()
    async with opened(disk, Sync.EVERYSEC) as log:
        await log.add(b"a")
        assert read(disk.crash(power=True))[1].notes == []
        mock_clock.jump(1.1)
        await wait_all_tasks_blocked()
        assert read(disk.crash(power=True))[1].notes == [b"a"]
        assert log.log.statistics().durable_sequence == 1
        flushes = log.log.statistics().flushes
        mock_clock.jump(5)
        await wait_all_tasks_blocked()
        assert log.log.statistics().flushes == flushes  # nothing new


async def test_no_flushes_what_is_closed_only(threads: Threads, mock_clock: trio.testing.MockClock) -> None:
    disk = MemoryDisk()
    async with opened(disk, Sync.NO) as log:
        await log.add(b"a")
        mock_clock.jump(5)
        await wait_all_tasks_blocked()
        assert read(disk.crash(power=True))[1].notes == []
        log.log.cut()
        await log.add(b"b")
        mock_clock.jump(1.1)
        await wait_all_tasks_blocked()
        assert read(disk.crash(power=True))[1].notes == [b"a", b"b"]


@pytest.mark.parametrize("sync", Sync)
async def test_the_end_flushes(sync: Sync) -> None:
    disk = MemoryDisk()
    async with opened(disk, sync, segment_limit=SEGMENT_BYTES + 200) as log:
        for text in texts(9):
            await log.add(text)
        await log.stop()
    assert read(disk.crash(power=True))[1].notes == texts(9)


async def test_records_say_what_was_flushed(threads: Threads, mock_clock: trio.testing.MockClock) -> None:
    disk = MemoryDisk()
    async with opened(disk, Sync.EVERYSEC) as log:
        for text in texts(2):
            await log.add(text)
        mock_clock.jump(1.1)
        await wait_all_tasks_blocked()
        for text in texts(2):
            await log.add(text)
    assert claims(disk, segment_name(0, 1)) == [0, 0, 2, 2]


@pytest.mark.parametrize("sync", Sync)
async def test_a_start_does_not_take_what_it_reads_for_flushed(
    threads: Threads, mock_clock: trio.testing.MockClock, sync: Sync
) -> None:
    """The process that wrote it may have died before it flushed it."""
    disk = MemoryDisk()
    async with opened(disk, Sync.NO) as log:
        for text in texts(3):
            await log.add(text)
    disk = disk.crash()
    async with opened(disk, sync) as log:
        await log.add(b"more")
        if sync is Sync.ALWAYS:
            # What is acknowledged now stands on it, so it was flushed before.
            assert read(disk.crash(power=True))[1].notes == [*texts(3), b"more"]
        else:
            assert claims(disk, segment_name(0, 2)) == [0]
            assert read(disk.crash(power=True, kept=0))[1].notes == []
        mock_clock.jump(1.1)
        await wait_all_tasks_blocked()
        assert disk.flushed(segment_name(0, 1))
        await log.add(b"still more")
        assert claims(disk, segment_name(0, 2)) == [3 if sync is Sync.ALWAYS else 0, 4]


async def test_a_segment_that_is_gone_is_not_flushed(threads: Threads, mock_clock: trio.testing.MockClock) -> None:
    disk = MemoryDisk()
    async with opened(disk, Sync.EVERYSEC) as log:
        await log.add(b"a")
    disk = disk.crash()
    async with opened(disk, Sync.EVERYSEC) as log:
        await log.add(b"b")
        await log.log.remove_covered(1)
        mock_clock.jump(1.1)
        await wait_all_tasks_blocked()
        assert log.log.error == ""
        assert disk.flushed(segment_name(0, 2))


# The end.


async def test_what_is_queued_when_the_writer_is_cancelled_is_written_at_the_end(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything, in order: a record that is missing in the middle would make those behind it senseless."""
    monkeypatch.setattr(wal, "BATCH_BYTES", ITEM_BYTES)
    disk = MemoryDisk()
    async with opened(disk) as log:
        threads.hold("write")
        for text in texts(9):
            log.notes.add(text)
        await wait_all_tasks_blocked()
        assert threads.running == ["write"]
        log.nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
            threads.release("write")
            await wait_all_tasks_blocked()
            assert read(disk)[1].notes != texts(9)
            await log.log.close()
    assert read(disk)[1].notes == texts(9)


async def test_nothing_is_taken_after_the_end() -> None:
    disk = MemoryDisk()
    async with opened(disk) as log:
        await log.stop()
        assert log.notes.add(b"late") is None
    assert read(disk)[1].notes == []


async def test_a_log_that_is_not_open_takes_nothing() -> None:
    log, notes = reopened(MemoryDisk())
    assert notes.add(b"early") is None
    assert log.broken
    await log.close()
