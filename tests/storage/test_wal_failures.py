"""The log when the disk says no: who is told, what is undone, and how it goes on."""

from __future__ import annotations

import errno
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pion.errors import MisconfError
from pion.storage import wal
from pion.storage.segments import segment_name
from pion.storage.wal import ITEM_BYTES, Sync
from pion.testing import Fault, MemoryDisk, Operation
from tests.storage.log_support import Opened, Threads, kinds, opened, prepared, read, reopened, threads

__all__ = ["threads"]

EIO = Fault(error=errno.EIO)


def fail(disk: MemoryDisk, kind: str, fault: Fault = EIO, *, times: int = 1) -> None:
    """Let the next operations of a kind fail."""
    left = [None] * times

    def plan(operation: Operation) -> Fault | None:
        if operation.kind == kind and left:
            left.pop()
            return fault
        return None

    disk.plan = plan


class Clients:
    """Adds notes, each by a client of its own, and remembers what they were told."""

    def __init__(self, log: Opened, nursery: trio.Nursery) -> None:
        self._log = log
        self._nursery = nursery
        self.told: dict[bytes, str] = {}

    async def add(self, *texts: bytes) -> None:
        for text in texts:
            self._nursery.start_soon(self._add, text)
            await wait_all_tasks_blocked()

    async def _add(self, text: bytes) -> None:
        try:
            await self._log.add(text)
        except MisconfError as error:
            self.told[text] = str(error)
        else:
            self.told[text] = "OK"


@pytest.mark.parametrize("sync", Sync)
@pytest.mark.parametrize("fault", [EIO, Fault(error=errno.ENOSPC), Fault(error=errno.ENOSPC, done_bytes=30)])
async def test_a_failed_write_is_told_to_all_who_wait(threads: Threads, sync: Sync, fault: Fault) -> None:
    disk = MemoryDisk()
    async with opened(disk, sync) as log, trio.open_nursery() as nursery:
        clients = Clients(log, nursery)
        await clients.add(b"stored")
        threads.hold("write")
        await clients.add(b"a", b"b", b"c")
        fail(disk, "write", fault)
        threads.release("write")
        await wait_all_tasks_blocked()
        assert clients.told.pop(b"stored") == "OK"
        assert clients.told.keys() == {b"a", b"b", b"c"}
        assert len(set(clients.told.values())) == 1
        assert "KV.PREFIX.SAVE" in clients.told[b"a"]
        # What they had made is undone, in order, and nothing is taken any more.
        assert log.notes.notes == [b"stored"]
        assert sorted(log.notes.undone) == [b"a", b"b", b"c"]
        assert log.log.broken
        with pytest.raises(MisconfError):
            log.log.check()
        statistics = log.log.statistics()
        assert (statistics.sequence, statistics.queued_bytes) == (1, 0)
        assert statistics.error
        since = len(disk.operations)
        assert log.notes.add(b"later") is None
        await wait_all_tasks_blocked()
        assert len(disk.operations) == since
    # A restart finds what was acknowledged; what came before the failure in the same write may be there.
    assert read(disk)[1].notes[0] == b"stored"


async def test_a_failed_flush_under_always_is_a_failed_write(threads: Threads) -> None:
    disk = MemoryDisk()
    async with opened(disk, Sync.ALWAYS) as log, trio.open_nursery() as nursery:
        clients = Clients(log, nursery)
        await clients.add(b"stored")
        fail(disk, "sync")
        await clients.add(b"a")
        assert "Input/output" in clients.told[b"a"]
        assert log.notes.notes == [b"stored"]
        assert log.log.statistics().durable_sequence == 1


async def test_a_failed_flush_refuses_what_comes(threads: Threads, mock_clock: trio.testing.MockClock) -> None:
    disk = MemoryDisk()
    async with opened(disk, Sync.EVERYSEC) as log, trio.open_nursery() as nursery:
        clients = Clients(log, nursery)
        await clients.add(b"stored")
        await prepared(mock_clock)
        fail(disk, "sync")
        mock_clock.jump(1.1)
        await wait_all_tasks_blocked()
        await clients.add(b"a")
        assert clients.told[b"stored"] == "OK"
        assert "Input/output" in clients.told[b"a"]
        assert log.notes.notes == [b"stored"]
        assert log.notes.undone == []


@pytest.mark.parametrize("write_fails", [False, True])
async def test_a_flush_fails_while_a_write_is_under_way(
    threads: Threads, mock_clock: trio.testing.MockClock, write_fails: bool
) -> None:
    """Those of the write are told, too, whatever becomes of it; and those who wait behind it."""
    disk = MemoryDisk()
    async with opened(disk, Sync.EVERYSEC) as log, trio.open_nursery() as nursery:
        clients = Clients(log, nursery)
        await clients.add(b"stored")
        threads.hold("write")
        await clients.add(b"under way", b"behind")
        await prepared(mock_clock)
        fail(disk, "sync")
        mock_clock.jump(1.1)
        await wait_all_tasks_blocked()
        assert "Input/output" in clients.told[b"behind"]
        assert b"under way" not in clients.told
        if write_fails:
            fail(disk, "write", Fault(error=errno.ENOSPC))
        threads.release("write")
        await wait_all_tasks_blocked()
        assert "Input/output" in clients.told[b"under way"]
        assert log.notes.notes == [b"stored"]
        assert not nursery.child_tasks
        # What did reach the file of the lost batch is superseded by the next segment.
        assert await log.log.reopen() == 1
        log.log.accept()
        await clients.add(b"after")
        assert clients.told[b"after"] == "OK"
    assert read(disk)[1].notes == [b"stored", b"after"]


async def test_a_failure_lets_those_go_on_who_wait_for_room(threads: Threads) -> None:
    disk = MemoryDisk()
    async with opened(disk, Sync.NO, queue_bytes=ITEM_BYTES) as log, trio.open_nursery() as nursery:
        threads.hold("write")
        clients = Clients(log, nursery)
        await clients.add(b"a", b"b", b"c", b"d")
        assert log.notes.notes == [b"a", b"b"]
        fail(disk, "write")
        threads.release("write")
        await wait_all_tasks_blocked()
        # As a command does it: `room` returned, and the next check refuses.
        assert not nursery.child_tasks
        assert "Input/output" in clients.told[b"a"]
        assert "Input/output" in clients.told[b"b"]


async def test_a_failed_rotation_is_a_failed_write(threads: Threads) -> None:
    for kind in ("create", "write", "sync", "sync_directory"):
        disk = MemoryDisk()
        async with opened(disk, Sync.NO) as log, trio.open_nursery() as nursery:
            clients = Clients(log, nursery)
            await clients.add(b"a")
            fail(disk, kind)
            log.log.cut()
            with pytest.raises(OSError, match="Input/output"):
                await log.log.wait_written(1)
            assert log.log.broken
            disk.plan = None
            assert disk.names() == [segment_name(0, 1)]
            assert await log.log.reopen() == 1
            log.log.accept()
            await clients.add(b"b")
            assert clients.told[b"b"] == "OK"
        assert read(disk)[1].notes == [b"a", b"b"]


async def test_a_segment_that_can_not_be_made_in_advance_is_made_when_it_is_needed(
    threads: Threads, mock_clock: trio.testing.MockClock
) -> None:
    disk = MemoryDisk()
    async with opened(disk, Sync.NO) as log:
        await log.add(b"a")
        fail(disk, "create")
        mock_clock.jump(1.1)
        await wait_all_tasks_blocked()
        assert log.log.error == ""
        log.log.cut()
        await log.add(b"b")
        assert len(disk.names()) == 2
    assert read(disk)[1].notes == [b"a", b"b"]


async def test_waiting_for_a_record_ends_with_the_log(threads: Threads) -> None:
    disk = MemoryDisk()
    async with opened(disk) as log, trio.open_nursery() as nursery:
        threads.hold("write")
        log.notes.add(b"a")
        failures = []

        async def wait() -> None:
            try:
                await log.log.wait_written(1)
            except OSError as error:
                failures.append(str(error))

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        fail(disk, "write")
        threads.release("write")
        await wait_all_tasks_blocked()
        assert failures == ["Input/output error"]
        with pytest.raises(OSError, match="Input/output"):
            await log.log.wait_written(1)


@pytest.mark.parametrize("kind", ["create", "write", "sync", "sync_directory"])
async def test_a_failure_to_open(kind: str) -> None:
    disk = MemoryDisk()
    log, notes = reopened(disk)
    fail(disk, kind)
    with pytest.raises(OSError, match="Input/output"):
        await log.open()
    assert log.broken
    assert notes.add(b"a") is None
    # As with a full disk: it goes on without, until there is room.
    log.refuse(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(MisconfError, match="No space left"):
        log.check()
    assert await log.reopen() == 0
    assert not log.broken
    log.accept()
    log.check()
    await log.close()


# Going on.


async def broken_log(log: Opened, clients: Clients, threads: Threads) -> None:
    """One note is stored; two more are in a write of which the first one reaches the file."""
    await clients.add(b"stored")
    threads.hold("write")
    await clients.add(b"lost", b"lost, too")
    fail(log.disk, "write", Fault(error=errno.EIO, done_bytes=70))
    threads.release("write")
    await wait_all_tasks_blocked()
    assert log.log.broken
    log.disk.plan = None


async def test_a_new_segment_supersedes_what_was_lost(threads: Threads) -> None:
    disk = MemoryDisk()
    async with opened(disk) as log, trio.open_nursery() as nursery:
        clients = Clients(log, nursery)
        await broken_log(log, clients, threads)
        # What the failed flush left behind is cut off: the next start would find it, whether the medium has it or not.
        assert read(disk)[1].notes == [b"stored"]
        assert await log.log.reopen() == 1
        with pytest.raises(MisconfError):
            log.log.check()  # until the state is on the disk
        assert read(disk)[1].notes == [b"stored"]
        log.log.accept()
        log.log.check()
        await clients.add(b"new", b"newer")
        assert clients.told[b"newer"] == "OK"
    assert read(disk)[1].notes == [b"stored", b"new", b"newer"]


@pytest.mark.parametrize("kinds_failing", [("write",), ("sync",), ("write", "truncate"), ("sync", "truncate")])
@pytest.mark.parametrize("rotates", [False, True])
async def test_a_batch_that_can_not_be_written_is_cut_off(
    threads: Threads, kinds_failing: tuple[str, ...], rotates: bool
) -> None:
    disk = MemoryDisk()
    async with opened(disk) as log, trio.open_nursery() as nursery:
        clients = Clients(log, nursery)
        await clients.add(b"stored")
        if rotates:
            log.log.cut()
            await clients.add(b"rotated")
        kept = log.log.size_bytes
        hit: list[Operation] = []

        def plan(operation: Operation) -> Fault | None:
            if operation.kind == kinds_failing[0] and not hit:
                hit.append(operation)
                return Fault(error=errno.EIO, done_bytes=20 if operation.kind == "write" else 0)
            return Fault(error=errno.EROFS) if operation.kind in kinds_failing[1:] else None

        disk.plan = plan
        await clients.add(b"lost")
        # Whether or not that works, it is the first failure that is told.
        assert "Input/output" in clients.told[b"lost"]
        on_disk = sum(len(disk.contents(name)) for name in disk.names())
        assert (on_disk == kept) == (len(kinds_failing) == 1)
        assert log.log.size_bytes - kept == (0 if kinds_failing[0] == "write" else on_disk - kept)


@pytest.mark.parametrize("sync", Sync)
@pytest.mark.parametrize("spare", [False, True], ids=["no segment in advance", "one in advance"])
async def test_a_restart_finds_what_was_acknowledged_and_nothing_that_was_refused(
    threads: Threads, mock_clock: trio.testing.MockClock, sync: Sync, spare: bool
) -> None:
    """Also of a batch in which new segments begin, whichever of its operations fails."""
    hits = 0
    for nth in range(1, 20):
        disk = MemoryDisk()
        async with opened(disk, sync) as log, trio.open_nursery() as nursery:
            clients = Clients(log, nursery)
            await clients.add(b"a")
            if spare:
                await prepared(mock_clock)
            threads.hold("write")
            await clients.add(b"b", b"c")
            log.log.cut()
            await clients.add(b"d")
            log.log.cut()
            await clients.add(b"e")
            disk.plan = partial(_nth, len(disk.operations) + nth)
            threads.release("write")
            await wait_all_tasks_blocked()
            hits += log.log.broken
            acknowledged = sorted(text for text, told in clients.told.items() if told == "OK")
        for left in (disk.crash(), *([disk.crash(power=True)] if sync is Sync.ALWAYS else [])):
            assert read(left)[1].notes == acknowledged, nth
            async with opened(left, sync) as log:
                await log.add(b"f")
            assert read(left.crash())[1].notes == [*acknowledged, b"f"], nth
    assert hits >= 3


def _nth(number: int, operation: Operation) -> Fault | None:
    return EIO if operation.number == number else None


async def test_what_changes_by_itself_is_logged_before_the_log_is_accepted(threads: Threads) -> None:
    disk = MemoryDisk()
    async with opened(disk) as log, trio.open_nursery() as nursery:
        clients = Clients(log, nursery)
        await broken_log(log, clients, threads)
        assert log.notes.add(b"expiry while broken") is None
        await log.log.reopen()
        waiting = log.notes.add(b"expiry")
        assert waiting is not None
        await waiting
    assert read(disk)[1].notes == [b"stored", b"expiry"]


async def test_nothing_is_said_to_be_flushed_that_was_written_before_the_failure(
    threads: Threads, mock_clock: trio.testing.MockClock
) -> None:
    """A flush failed, so what is in the old segment may be lost; a snapshot has yet to replace it."""
    disk = MemoryDisk()
    async with opened(disk, Sync.EVERYSEC) as log, trio.open_nursery() as nursery:
        clients = Clients(log, nursery)
        await clients.add(b"stored")
        await prepared(mock_clock)
        fail(disk, "sync")
        mock_clock.jump(1.1)
        await wait_all_tasks_blocked()
        assert log.log.broken
        disk.plan = None
        await log.log.reopen()
        for _ in range(3):
            waiting = log.notes.add(b"expiry")
            assert waiting is not None
            await waiting
            mock_clock.jump(1.1)
            await wait_all_tasks_blocked()
        assert log.log.statistics().durable_sequence == 0
        # So a power cut is no damage.
        assert read(disk.crash(power=True))[1].notes == []
        log.log.accept()
        mock_clock.jump(1.1)
        await clients.add(b"b")
        mock_clock.jump(1.1)
        await wait_all_tasks_blocked()
        assert log.log.statistics().durable_sequence == 5


async def test_a_log_that_fails_again_is_not_accepted(threads: Threads) -> None:
    disk = MemoryDisk()
    async with opened(disk) as log, trio.open_nursery() as nursery:
        await broken_log(log, Clients(log, nursery), threads)
        await log.log.reopen()
        fail(disk, "write")
        waiting = log.notes.add(b"expiry")
        assert waiting is not None
        with pytest.raises(MisconfError):
            await waiting
        with pytest.raises(OSError, match="Input/output"):
            log.log.accept()
        with pytest.raises(MisconfError):
            log.log.check()


@pytest.mark.parametrize("kind", ["create", "write", "sync", "sync_directory"])
async def test_a_log_that_can_not_be_reopened(threads: Threads, kind: str) -> None:
    disk = MemoryDisk()
    async with opened(disk) as log, trio.open_nursery() as nursery:
        clients = Clients(log, nursery)
        await broken_log(log, clients, threads)
        for _ in range(2):
            fail(disk, kind)
            with pytest.raises(OSError, match="Input/output"):
                await log.log.reopen()
            assert log.log.broken
        disk.plan = None
        await log.log.reopen()
        log.log.accept()
        await clients.add(b"new")
        assert clients.told[b"new"] == "OK"
    assert read(disk)[1].notes == [b"stored", b"new"]


async def test_reopening_waits_for_a_write_that_is_under_way(
    threads: Threads, mock_clock: trio.testing.MockClock
) -> None:
    """Closing the file under it could make it write into whatever is opened next."""
    disk = MemoryDisk()
    async with opened(disk, Sync.EVERYSEC) as log, trio.open_nursery() as nursery:
        clients = Clients(log, nursery)
        await clients.add(b"stored")
        threads.hold("write")
        await clients.add(b"under way")
        await prepared(mock_clock)
        fail(disk, "sync")
        mock_clock.jump(1.1)
        await wait_all_tasks_blocked()
        assert log.log.broken
        disk.plan = None
        nursery.start_soon(log.log.reopen)
        await wait_all_tasks_blocked()
        assert log.log.broken
        since = len(disk.operations)
        threads.release("write")
        await wait_all_tasks_blocked()
        assert kinds(disk, since)[0] == "write"
        assert "create" in kinds(disk, since)
        assert not log.log.broken
        assert "Input/output" in clients.told[b"under way"]
    assert read(disk)[1].notes == [b"stored"]


async def test_the_end_of_a_broken_log_writes_nothing(threads: Threads) -> None:
    disk = MemoryDisk()
    async with opened(disk) as log, trio.open_nursery() as nursery:
        await broken_log(log, Clients(log, nursery), threads)
        since = len(disk.operations)
        log.nursery.cancel_scope.cancel()
        await log.log.close()
        assert set(kinds(disk, since)) <= {"sync"}


@pytest.mark.parametrize("sync", Sync)
async def test_a_failed_write_does_not_keep_what_was_written_from_the_medium(threads: Threads, sync: Sync) -> None:
    """Nobody may come to save it for hours; under `no` it is flushed at the end at the latest."""
    disk = MemoryDisk()
    async with opened(disk, sync) as log, trio.open_nursery() as nursery:
        await broken_log(log, Clients(log, nursery), threads)
        if sync is not Sync.NO:
            assert read(disk.crash(power=True))[1].notes[:1] == [b"stored"]
        await log.stop()
    assert read(disk.crash(power=True))[1].notes[:1] == [b"stored"]


async def test_the_end_does_not_wait_for_ever(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """What is queued behind a write that hangs is given up; the write itself can't be."""
    monkeypatch.setattr(wal, "BATCH_BYTES", ITEM_BYTES)
    disk = MemoryDisk()
    async with opened(disk) as log:
        log.nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.sleep(1)
            threads.hold("write")
            for number in range(5):
                log.notes.add(b"%d" % number)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(log.log.close)
                await trio.sleep(wal.CLOSE_DEADLINE_S + 1)
                assert threads.running == ["write"]
                threads.release("write")
    assert read(disk)[1].notes == [b"0", b"1"]  # the batch that was being written
