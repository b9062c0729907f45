"""Taking snapshots: beside changes, with what fails, with rows that lie in files."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pion.errors import CommandError, MisconfError
from pion.storage import recovery, snapshot, vstore_log
from pion.storage.changes import CreateSession, Declaration, DropPrefix, Register, StoreRows
from pion.storage.disk import DiskFile
from pion.storage.durable import Captured
from pion.storage.formats import get_format
from pion.storage.region import MappedMemory
from pion.storage.schema import Schema
from pion.storage.segments import segment_name, snapshot_name
from pion.storage.snapshot import Snapshotter
from pion.storage.snapshot_format import parse
from pion.storage.vstore import VStore
from pion.storage.wal import Sync
from pion.testing import Fault, MemoryDisk, Operation
from tests.storage.fault_support import open_server, rows
from tests.storage.log_support import LINEAGE, Opened, Threads, opened, read, threads

__all__ = ["threads"]

SNAPSHOT = snapshot_name(0)


@asynccontextmanager
async def running(disk: MemoryDisk, sync: Sync = Sync.ALWAYS) -> AsyncIterator[tuple[Opened, Snapshotter]]:
    """A log with one family, and its snapshots."""
    async with opened(disk, sync) as log:
        yield log, Snapshotter(disk, 0, LINEAGE, log.log, [log.notes])


def fail(disk: MemoryDisk, when: Callable[[Operation], bool], fault: Fault | None = None) -> None:
    """Let the first operation fail of which `when` is true."""
    hit: list[Operation] = []

    def plan(operation: Operation) -> Fault | None:
        if hit or not when(operation):
            return None
        hit.append(operation)
        return fault or Fault(error=errno.EIO)

    disk.plan = plan


async def test_a_snapshot_replaces_the_log_that_it_covers() -> None:
    disk = MemoryDisk()
    async with running(disk) as (log, snapshots):
        for text in (b"a", b"b"):
            await log.add(text)
        await snapshots.take()
        assert disk.names() == [SNAPSHOT, segment_name(0, 2)]
        await log.add(b"c")
        statistics = snapshots.statistics()
        assert (statistics.taken, statistics.running, statistics.last_error) == (1, False, "")
        assert statistics.last_bytes == len(disk.contents(SNAPSHOT))
        assert statistics.last_age_s >= 0
    for power in (False, True):
        found, notes = read(disk.crash(power=power))
        assert notes.notes == [b"a", b"b", b"c"]
        assert found.records == 1


async def test_one_of_nothing() -> None:
    disk = MemoryDisk()
    async with running(disk) as (_, snapshots):
        assert snapshots.statistics().last_age_s == -1
        await snapshots.take()
        await snapshots.take()
    assert read(disk)[1].notes == []
    assert parse(disk.map(SNAPSHOT).view).identity.covers == 0


async def test_changes_go_on_while_it_is_written(threads: Threads) -> None:
    """They are not in it, but in the log that stays."""
    disk = MemoryDisk()
    async with running(disk) as (log, snapshots), trio.open_nursery() as nursery:
        await log.add(b"a")
        threads.hold("finish")
        nursery.start_soon(snapshots.take)
        await wait_all_tasks_blocked()
        assert snapshots.statistics().running
        for text in (b"b", b"c"):
            await log.add(text)
        assert not disk.exists(SNAPSHOT)
        threads.release("finish")
        await wait_all_tasks_blocked()
        assert disk.names() == [SNAPSHOT, segment_name(0, 2)]
        snapshot_records = list(parse(disk.map(SNAPSHOT).view).entries())
        assert [entry.meta for entry in snapshot_records] == [b"a"]
    assert read(disk)[1].notes == [b"a", b"b", b"c"]


async def test_what_it_covers_is_in_the_log_before_it_gets_its_name(threads: Threads) -> None:
    """Otherwise the numbers of changes that it has would be given to others."""
    disk = MemoryDisk()
    async with running(disk) as (log, snapshots), trio.open_nursery() as nursery:
        await log.add(b"a")
        threads.hold("write")
        log.notes.add(b"b")
        nursery.start_soon(snapshots.take)
        await wait_all_tasks_blocked()
        assert disk.exists(SNAPSHOT + ".tmp")
        assert not disk.exists(SNAPSHOT)
        threads.release("write")
        await wait_all_tasks_blocked()
        assert disk.names() == [SNAPSHOT, segment_name(0, 2)]


async def refused(snapshots: Snapshotter, match: str = "Input/output") -> None:
    with pytest.raises(MisconfError, match=f"no snapshot could be written: {match}"):
        await snapshots.take()
    assert match in snapshots.statistics().last_error


async def test_if_the_log_fails_there_is_no_snapshot(threads: Threads) -> None:
    disk = MemoryDisk()
    async with running(disk) as (log, snapshots), trio.open_nursery() as nursery:
        await log.add(b"a")
        await snapshots.take()
        threads.hold("write")
        log.notes.add(b"b")
        nursery.start_soon(refused, snapshots)
        await wait_all_tasks_blocked()
        fail(disk, lambda operation: operation.kind == "write" and ".log." in operation.name)
        threads.release("write")
        await wait_all_tasks_blocked()
        assert not nursery.child_tasks
        # Nothing is left of it, and the one before is as it was.
        assert disk.names() == [SNAPSHOT, segment_name(0, 2)]
        assert read(disk)[1].notes == [b"a"]
        # The next one gets over it.
        await snapshots.take()
        assert snapshots.statistics().last_error == ""
        await log.add(b"c")
    assert read(disk)[1].notes == [b"a", b"c"]


async def test_a_snapshot_ends_the_refusal_of_changes(threads: Threads) -> None:
    disk = MemoryDisk()
    async with running(disk) as (log, snapshots):
        await log.add(b"a")
        fail(disk, lambda operation: operation.kind == "sync")
        with pytest.raises(MisconfError):
            await log.add(b"b")
        with pytest.raises(MisconfError):
            await log.add(b"c")
        await snapshots.take()
        await log.add(b"d")
        assert disk.names() == [SNAPSHOT, segment_name(0, 2)]
    assert read(disk.crash(power=True))[1].notes == [b"a", b"d"]


class Watched(MemoryDisk):
    """Remembers the files that were made."""

    def __init__(self) -> None:
        super().__init__(directories=["sub"])
        self.files: list[DiskFile] = []

    def create(self, name: str) -> DiskFile:
        file = super().create(name)
        self.files.append(file)
        return file

    def open_files(self) -> list[str]:
        """Those that are open, beside the log's."""
        return [file._name for file in self.files if not file._closed and ".log." not in file._name]  # type: ignore[attr-defined]


STEPS = {
    "create": lambda operation: operation.kind == "create",
    "room for the header": lambda operation: operation.kind == "write" and operation.nbytes == 4096,
    "table": lambda operation: operation.kind == "write" and operation.nbytes < 4096,
    "header": lambda operation: operation.kind == "overwrite",
    "flush": lambda operation: operation.kind == "sync",
    "name": lambda operation: operation.kind == "rename",
}


@pytest.mark.parametrize("step", STEPS)
async def test_a_step_fails(threads: Threads, step: str) -> None:
    """The one before stays, the log goes on, no file is left over or open; the next one succeeds."""
    disk = Watched()
    async with running(disk) as (log, snapshots):
        await log.add(b"a")
        await snapshots.take()
        await log.add(b"b")
        before = disk.contents(SNAPSHOT)
        fail(
            disk,
            lambda operation: ".log." not in operation.name and STEPS[step](operation),
        )
        await refused(snapshots)
        assert disk.contents(SNAPSHOT) == before
        assert not [name for name in disk.names() if name.endswith(".tmp")]
        assert disk.open_files() == []
        await log.add(b"c")
        assert read(disk)[1].notes == [b"a", b"b", b"c"]
        await snapshots.take()
        assert len(disk.names()) == 2
    assert read(disk.crash(power=True))[1].notes == [b"a", b"b", b"c"]


@pytest.mark.parametrize("step", ["the directory is flushed", "the log is removed"])
async def test_a_step_fails_when_the_snapshot_has_its_name(threads: Threads, step: str) -> None:
    """A flush that fails is a failure; log that stays is only untidy, as the state is on the disk."""
    disk = Watched()
    async with running(disk) as (log, snapshots):
        await log.add(b"a")
        flushing = step == "the directory is flushed"
        kind = "sync_directory" if flushing else "unlink"
        fail(disk, lambda operation: operation.kind == kind and operation.name in (SNAPSHOT, segment_name(0, 1)))
        await (refused(snapshots) if flushing else snapshots.take())
        assert disk.exists(SNAPSHOT)
        assert disk.exists(segment_name(0, 1))
        await log.add(b"b")
        assert read(disk)[1].notes == [b"a", b"b"]
        await snapshots.take()
        assert disk.names() == [SNAPSHOT, segment_name(0, 3)]
    assert read(disk)[1].notes == [b"a", b"b"]


async def test_removing_the_log_fails_in_the_middle(threads: Threads) -> None:
    """What is gone already is not removed again."""
    disk = MemoryDisk()
    async with running(disk) as (log, snapshots):
        for text in (b"a", b"b", b"c"):
            await log.add(text)
            log.log.cut()
            await log.log.wait_written(0)
        assert len(disk.names()) == 4
        fail(disk, lambda operation: operation.kind == "unlink" and operation.name == segment_name(0, 2))
        await snapshots.take()
        assert disk.names() == [SNAPSHOT, *(segment_name(0, number) for number in (2, 3, 4))]
        await snapshots.take()
        assert disk.names() == [SNAPSHOT, segment_name(0, 4)]


# Cancellation, and several at once.


@pytest.mark.parametrize("where", ["_File", "add", "finish", "_publish"])
async def test_a_cancelled_one_leaves_the_one_before_or_is_complete(threads: Threads, where: str) -> None:
    disk = Watched()
    async with running(disk) as (log, snapshots), trio.open_nursery() as nursery:
        await log.add(b"a")
        await snapshots.take()
        await log.add(b"b")
        threads.hold(where)
        nursery.start_soon(snapshots.take)
        await wait_all_tasks_blocked()
        assert threads.running == [where]
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            threads.release(where)
            await wait_all_tasks_blocked()
            assert read(disk.crash())[1].notes == [b"a", b"b"]
            assert not [name for name in disk.names() if name.endswith(".tmp")]
            assert disk.open_files() == []
            assert not snapshots.statistics().running
            await snapshots.take()
            await log.add(b"c")
            assert len(disk.names()) == 2
    assert read(disk)[1].notes == [b"a", b"b", b"c"]


async def test_they_are_taken_one_at_a_time(threads: Threads) -> None:
    disk = MemoryDisk()
    async with running(disk) as (log, snapshots), trio.open_nursery() as nursery:
        await log.add(b"a")
        threads.hold("finish")
        for _ in range(3):
            nursery.start_soon(snapshots.take)
        await wait_all_tasks_blocked()
        assert threads.running == ["finish"]
        await log.add(b"b")
        threads.release("finish")
        await wait_all_tasks_blocked()
        assert snapshots.statistics().taken == 3
        assert [entry.meta for entry in parse(disk.map(SNAPSHOT).view).entries()] == [b"a", b"b"]


# A second name.


async def test_a_second_name_is_the_same_file() -> None:
    disk = Watched()
    async with running(disk) as (log, snapshots):
        await log.add(b"a")
        for path in ("backup", "sub/backup", "backup"):
            await snapshots.take(path)
            assert disk.contents(path) == disk.contents(SNAPSHOT)
        await log.add(b"b")
        await snapshots.take()
        assert disk.contents("backup") != disk.contents(SNAPSHOT)
        power = disk.crash(power=True)
        assert [entry.meta for entry in parse(power.map("sub/backup").view).entries()] == [b"a"]
        assert not [name for name in disk.names() if name.endswith(".tmp")]


@pytest.mark.parametrize("kind", ["link", "rename", "sync_directory"])
async def test_a_second_name_that_can_not_be_given(threads: Threads, kind: str) -> None:
    disk = Watched()
    async with running(disk) as (log, snapshots):
        await log.add(b"a")
        await snapshots.take("sub/backup")
        await log.add(b"b")
        fail(disk, lambda operation: operation.kind == kind and "log" not in operation.name)
        with pytest.raises(MisconfError, match="Input/output"):
            await snapshots.take("sub/backup")
        assert read(disk)[1].notes == [b"a", b"b"]
        assert not [name for name in disk.names() if name.endswith(".tmp")]
        with pytest.raises(CommandError, match="No such file"):
            await snapshots.take("none/backup")
        await snapshots.take("sub/backup")
        assert disk.contents("sub/backup") == disk.contents(SNAPSHOT)


async def test_a_bad_path_is_no_failure_of_the_disk() -> None:
    disk = MemoryDisk()
    async with running(disk) as (_, snapshots):
        since = len(disk.operations)
        for path in ("", "/etc/x", "../x", "a/../b", "a//b", "./a", "pion.vstore.0", "pion.lock", "a.tmp", "a\0b"):
            with pytest.raises(CommandError, match="path must"):
                await snapshots.take(path)
        assert len(disk.operations) == since
        assert snapshots.statistics().last_error == ""


# Rows that lie in files.

SHAPE = Schema.uniform(get_format(b"fp32"), 16)
MODE = "always"


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few hundred bytes stay in the file."""
    monkeypatch.setattr(vstore_log, "MAP_FROM_BYTES", 256)
    monkeypatch.setattr(recovery, "READ_AT_START_BYTES", 256)


def declare(ns: bytes, tokens: int) -> list[Register | StoreRows]:
    register = Register(ns=ns, k_schema=SHAPE, v_schema=SHAPE, declaration=Declaration(1, tokens), owner=1)
    stores = [StoreRows(ns + side, 0, 0, tokens, rows(ns + side, 0, 0, tokens, 1), 1) for side in (b"_pk", b"_pv")]
    return [register, *stores]


async def full_disk() -> MemoryDisk:
    """Two prefixes and a session whose rows will lie in the log, one prefix with small rows."""
    disk = MemoryDisk()
    async with open_server(disk, MODE).running() as server:
        await server.change(*declare(b"one", 8))
        await server.change(*declare(b"two", 8))
        await server.change(*declare(b"small", 1))
        await server.change(CreateSession(b"lone", SHAPE), StoreRows(b"lone", 0, 0, 9, rows(b"lone", 0, 0, 9, 1), 1))
        await server.change(StoreRows(b"lone", 0, 20, 9, rows(b"lone", 0, 20, 29, 1), 1))
    return disk.crash()


def memories(store: VStore) -> dict[bytes, list[MappedMemory]]:
    found: dict[bytes, list[MappedMemory]] = {}
    for unit in store.units():
        for side in (0, 1):
            held = unit.rows(side)
            for layer in held.layers.values() if held is not None else ():
                for block in layer.blocks:
                    if isinstance(block.memory, MappedMemory):
                        found.setdefault(unit.name, []).append(block.memory)
    return found


@pytest.mark.usefixtures("mapped", "threads")
async def test_rows_move_to_the_newest_snapshot() -> None:
    disk = await full_disk()
    async with open_server(disk, MODE).running() as server:
        before = memories(server.store)
        assert {name: len(found) for name, found in before.items()} == {b"one": 2, b"two": 2, b"lone": 2}
        mapped_bytes = server.store.ledger.mapped_bytes
        for _ in range(2):
            await server.save()
            after = memories(server.store)
            assert after.keys() == before.keys()
            assert all(
                memory.region.mapping.view == disk.contents(SNAPSHOT) for each in after.values() for memory in each
            )
            assert all(memory.verify() for each in after.values() for memory in each)
            before = after
        del before, after
        assert server.store.ledger.mapped_bytes == mapped_bytes
    assert b"one" in open_server(disk.crash(), MODE).store.prefixes


@pytest.mark.usefixtures("mapped")
async def test_rows_are_replaced_while_they_move(threads: Threads) -> None:
    disk = await full_disk()
    async with open_server(disk, MODE).running() as server, trio.open_nursery() as nursery:
        threads.hold("finish")
        nursery.start_soon(server.save)
        await wait_all_tasks_blocked()
        # A part of the first run, all of the second.
        await server.change(StoreRows(b"lone", 0, 3, 2, rows(b"lone", 0, 3, 5, 2), 1))
        await server.change(StoreRows(b"lone", 0, 20, 9, rows(b"lone", 0, 20, 29, 2), 1))
        await server.change(DropPrefix(b"one"))
        threads.release("finish")
        await wait_all_tasks_blocked()
        (layer,) = server.store.lone[b"lone"].k_rows.layers.values()  # type: ignore[union-attr]
        expected = rows(b"lone", 0, 0, 3, 1) + rows(b"lone", 0, 3, 5, 2) + rows(b"lone", 0, 5, 9, 1)
        assert b"".join(bytes(block.view(a, b, 64)) for block, a, b in layer.gather(0, 9)) == expected
        assert b"".join(bytes(block.view(a, b, 64)) for block, a, b in layer.gather(20, 29)) == rows(
            b"lone", 0, 20, 29, 2
        )
        assert {name: len(found) for name, found in memories(server.store).items()} == {b"two": 2, b"lone": 2}
        assert b"one" not in server.store.prefixes
        # And once more: what was split moves as one run.
        await server.save()
        assert b"".join(bytes(block.view(a, b, 64)) for block, a, b in layer.gather(0, 9)) == expected
    again = open_server(disk.crash(), MODE).store
    (layer,) = again.lone[b"lone"].k_rows.layers.values()  # type: ignore[union-attr]
    assert b"".join(bytes(block.view(a, b, 64)) for block, a, b in layer.gather(0, 9)) == expected


@pytest.mark.usefixtures("mapped", "threads")
async def test_damaged_rows_are_not_copied(caplog: pytest.LogCaptureFixture) -> None:
    """Their prefix is dropped and counted; the snapshot is begun anew, and has everything else."""
    disk = await full_disk()
    async with open_server(disk, MODE).running() as server:
        for ns in (b"one", b"lone"):
            region = memories(server.store)[ns][-1].region
            name = next(name for name in disk.names() if disk.contents(name) == region.mapping.view)
            disk.damage(name, region.start + region.nbytes - 1)
        await server.save()
        assert server.store.checksum_failures == 2
        assert server.data.snapshots.statistics().taken == 1
        assert set(server.store.prefixes) == {b"two", b"small"}
        assert not server.store.lone
        assert len([text for text in caplog.messages if "a checksum failed, dropped" in text]) == 2
    again = open_server(disk.crash(power=True), MODE)
    assert set(again.store.prefixes) == {b"two", b"small"}
    assert again.data.loaded.records == 0


@pytest.mark.usefixtures("mapped", "threads")
async def test_damaged_rows_of_what_was_dropped_meanwhile(threads: Threads) -> None:
    disk = await full_disk()
    async with open_server(disk, MODE).running() as server, trio.open_nursery() as nursery:
        region = memories(server.store)[b"one"][0].region
        disk.damage(segment_name(0, 1), region.start)
        threads.hold("add")
        nursery.start_soon(server.save)
        await wait_all_tasks_blocked()
        await server.change(DropPrefix(b"one"))
        await server.change(*declare(b"one", 2))
        threads.release("add")
        await wait_all_tasks_blocked()
        assert server.data.snapshots.statistics().taken == 1
        # The one that was made since is another.
        assert set(server.store.prefixes) == {b"one", b"two", b"small"}
    assert set(open_server(disk.crash(), MODE).store.prefixes) == {b"one", b"two", b"small"}


async def test_nothing_is_told_of_changes_when_no_snapshot_is_taken(threads: Threads) -> None:
    for step in (None, *STEPS):
        disk = MemoryDisk()
        async with open_server(disk, MODE).running() as server:
            await server.change(CreateSession(b"s", SHAPE))
            if step is not None:
                fail(disk, lambda each, step=step: ".log." not in each.name and STEPS[step](each))  # type: ignore[misc]
                with pytest.raises(MisconfError):
                    await server.save()
            else:
                await server.save()
            assert server.store.before_change is None


def test_capturing_is_done_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is given to others between them, whether they are many bytes or take long."""
    items = [Captured(b"%d" % number, (b"x" * 6, b"y" * 4)) for number in range(7)]

    def sizes() -> list[int]:
        chunks = list(snapshot._chunks("notes", iter(items)))
        assert [pair for chunk in chunks for pair in chunk] == [("notes", item) for item in items]
        return [len(chunk) for chunk in chunks]

    monkeypatch.setattr(snapshot, "CAPTURE_S", 1e9)
    assert sizes() == [7]
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 30)
    assert sizes() == [3, 3, 1]
    monkeypatch.setattr(snapshot, "CAPTURE_S", -1.0)
    assert sizes() == [1] * 7
    assert list(snapshot._chunks("notes", iter([]))) == []
