"""Attention indexes behind the log: records, replay, damage, undo, snapshots, death at each operation of the disk."""

from __future__ import annotations

import errno
import struct
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import attrs
import pytest
import trio

from pion.errors import MisconfError
from pion.storage import attention_index_log, recovery
from pion.storage.attention_index_log import DropReason, pack_append, pack_drop, unpack
from pion.storage.durable import Record
from pion.storage.examine import examine
from pion.storage.recovery import DamagedFileError
from pion.storage.repair import repair, set_aside_names
from pion.storage.segments import segment_name, snapshot_name
from pion.testing import Fault, MemoryDisk
from tests.storage.fault_support import Injector, run_until_death, same_each_time, small
from tests.storage.index_support import (
    IndexServer,
    State,
    append,
    check_counts,
    contents,
    expected,
    gather,
    make_log,
    mapped_blocks,
    open_indexes,
    refused,
)
from tests.storage.log_support import Notes, Threads, threads
from tests.storage.test_durable import save_without_the_plugin
from tests.test_file_formats import LOG, NUMBERS, table

__all__ = ["same_each_time", "small", "threads"]

MAPPED_FROM = 512
"""Rows of one record from here on stay in the file, in these tests."""


@pytest.fixture(autouse=True)
def few_rows_are_many(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_index_log, "MAP_FROM_BYTES", MAPPED_FROM)


async def fill(disk: MemoryDisk, *steps: tuple[str, bytes, int], save: bool = False) -> State:
    """A server does something, and dies. Returns its state."""
    server = open_indexes(disk)
    async with server.running():
        for what, name, count in steps:
            await (server.append(name, 2, count) if what == "append" else server.drop(name))
        if save:
            await server.data.save()
    check_counts(server.log.table)
    return server.state


def found(disk: MemoryDisk) -> IndexServer:
    """What the next start finds."""
    server = open_indexes(disk)
    server.log.finish_replay()
    check_counts(server.log.table)
    return server


# Records.


@pytest.mark.parametrize("name", [b"x", b"a\0b\xff", b"n" * 4096])
def test_records_say_what_was_changed(name: bytes) -> None:
    assert unpack(pack_append(name, 64, 7, 9)) == (1, name, (64, 7, 9))
    for reason in DropReason:
        assert unpack(pack_drop(name, reason)) == (2, name, (reason,))


@pytest.mark.parametrize("meta", [pack_append(b"xy", 64, 7, 9), pack_drop(b"xy", DropReason.DAMAGED)])
def test_records_that_make_no_sense(meta: bytes) -> None:
    wrong = [meta[:size] for size in range(len(meta))] + [meta + b"\0", b"\3" + meta[1:], b"\0" + meta[1:]]
    for each in wrong:
        with pytest.raises(ValueError, match=r"\w"):
            unpack(each)
    for wrong_append in (pack_append(b"x", 0, 0, 1), pack_append(b"x", 1, 0, 0)):
        with pytest.raises(ValueError, match="of nothing"):
            unpack(wrong_append)
    with pytest.raises(ValueError, match="DropReason"):
        unpack(meta[:-1] + b"\7") if meta[0] == 2 else unpack(b"\2" + struct.pack("<I", 1) + b"x\7")


async def test_the_record_of_an_append_has_keys_and_then_values(threads: Threads) -> None:
    log = make_log()
    items: list[Any] = []
    log.keep = lambda item, nbytes=0: items.append((item, nbytes))  # type: ignore[assignment,method-assign]
    append(log, b"x", 2, 3)
    append(log, b"x", 2, 4)
    (_, keys, values) = expected(x=(2, 7))[b"x"]
    records = [log.encode(item) for item, _ in items]
    assert [nbytes for _, nbytes in items] == [2 * 3 * 8, 2 * 4 * 8]
    assert [record.meta for record in records] == [pack_append(b"x", 2, 0, 3), pack_append(b"x", 2, 3, 4)]
    assert [bytes(record.data or b"") for record in records] == [
        keys[: 3 * 8] + values[: 3 * 8],
        keys[3 * 8 :] + values[3 * 8 :],
    ]


@pytest.mark.parametrize(
    ("meta", "data"),
    [
        (pack_append(b"x", 2, 1, 1), bytes(16)),
        (pack_append(b"y", 2, 1, 1), bytes(16)),
        (pack_append(b"x", 4, 3, 1), bytes(32)),
        (pack_append(b"x", 2, 3, 1), bytes(15)),
        (pack_append(b"x", 2, 3, 1), bytes(17)),
        (pack_append(b"x", 2, 3, 1), None),
        (pack_drop(b"y", DropReason.COMMAND), None),
        (b"\7", None),
    ],
)
async def test_records_that_do_not_follow_refuse_the_start(threads: Threads, meta: bytes, data: bytes | None) -> None:
    disk = MemoryDisk()
    await fill(disk, ("append", b"x", 3))
    server = open_indexes(disk)
    async with server.running():
        server.log.encode = lambda item: item  # type: ignore[method-assign]
        waiting = server.log.keep(Record(meta, data))
        assert waiting is not None
        await waiting
    with pytest.raises(DamagedFileError, match="of attention_index, makes no sense"):
        open_indexes(disk)


# Starting again.

STEPS = (
    ("append", b"x", 3),
    ("append", b"y", 100),
    ("append", b"x", 50),
    ("append", b"z", 5),
    ("drop", b"z", 0),
    ("append", b"x", 1),
    ("append", b"z", 2),
)
AFTER_STEPS = expected(x=(2, 54), y=(2, 100), z=(2, 2))


@pytest.mark.parametrize("save", [False, True])
async def test_a_start_finds_everything(threads: Threads, save: bool) -> None:
    disk = MemoryDisk()
    assert await fill(disk, *STEPS, save=save) == AFTER_STEPS
    for _ in range(2):
        server = found(disk)
        assert server.state == AFTER_STEPS
        assert mapped_blocks(server.log.table) == 2
        for name in (b"x", b"y", b"z"):
            gather(server.log, name)
        check_counts(server.log.table)
        assert server.state == AFTER_STEPS
        assert server.log.table.ledger.mapped_bytes == 0
    assert examine(disk).good


async def test_it_goes_on_where_it_was(threads: Threads) -> None:
    disk = MemoryDisk()
    await fill(disk, ("append", b"x", 100), save=True)
    await fill(disk, ("append", b"x", 3), ("append", b"x", 200))
    await fill(disk, ("append", b"x", 1), save=True)
    await fill(disk, ("append", b"x", 1))
    assert found(disk).state == expected(x=(2, 305))
    assert refused(append, found(disk).log, b"x", 3, 1).startswith("ERR D must be 2")


async def test_rows_in_files_move_to_the_newest_snapshot(threads: Threads) -> None:
    disk = MemoryDisk()
    await fill(disk, ("append", b"x", 100), ("append", b"y", 100))
    server = open_indexes(disk)
    async with server.running():
        before = [block.keys for index in server.log.table for block in index.blocks]
        await server.append(b"x", 2, 5)
        await server.data.save()
        after = [block.keys for index in server.log.table for block in index.blocks if block.mapped]
        assert len(after) == len(before) == 2
        assert not set(before) & set(after)
        del before, after
        check_counts(server.log.table)
        assert mapped_blocks(server.log.table) == 2
        assert segment_name(0, 1) not in disk.names()
        await server.data.save()
        gather(server.log, b"x")
        await server.data.save()
        assert server.state == expected(x=(2, 105), y=(2, 100))
    assert found(disk).state == expected(x=(2, 105), y=(2, 100))


async def test_with_little_memory_rows_stay_in_the_files(threads: Threads) -> None:
    disk = MemoryDisk()
    await fill(disk, ("append", b"x", 10), ("append", b"y", 10))
    server = open_indexes(disk, log=make_log(max_bytes=900))
    assert mapped_blocks(server.log.table) == 1
    assert server.state == expected(x=(2, 10), y=(2, 10))


async def test_a_snapshot_shows_the_moment_of_its_beginning(threads: Threads) -> None:
    disk = MemoryDisk()
    server = open_indexes(disk)
    async with server.running(), trio.open_nursery() as nursery:
        for name in (b"a", b"b", b"c"):
            await server.append(name, 2, 90)
        threads.hold("add")
        nursery.start_soon(server.data.save)
        while "add" not in threads.running:
            await trio.lowlevel.checkpoint()
        await server.append(b"a", 2, 10)
        await server.drop(b"b")
        await server.append(b"b", 2, 5)
        await server.append(b"d", 2, 1)
        gather(server.log, b"c")
        log_only = disk.crash()
        threads.release("add")
    assert found(log_only).state == found(disk).state == expected(a=(2, 100), b=(2, 5), c=(2, 90), d=(2, 1))
    server_with_snapshot_only = disk.crash()
    for name in disk.names():
        if name != snapshot_name(0):
            server_with_snapshot_only.unlink(name)
    assert found(server_with_snapshot_only).state == expected(a=(2, 90), b=(2, 90), c=(2, 90))


# Damage.


def damage(disk: MemoryDisk, name: bytes, rows: int, part: int = 0, *, saved: bool = False) -> None:
    """Change a byte of an index's keys or values."""
    file = snapshot_name(0) if saved else segment_name(0, 1)
    disk.damage(file, disk.contents(file).index(expected(**{name.decode(): (2, rows)})[name][1 + part]) + 5)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize(("rows", "save"), [(3, True), (100, True), (100, False)])
async def test_a_damaged_index_is_dropped_and_the_others_stay(
    threads: Threads, rows: int, save: bool, part: int
) -> None:
    """Short rows of a snapshot are found out at the start, long ones at their first use."""
    disk = MemoryDisk()
    await fill(disk, ("append", b"x", rows), ("append", b"y", 4), save=save)
    await fill(disk, ("append", b"x", 2))
    damage(disk, b"x", rows, part, saved=save)
    server = open_indexes(disk)
    async with server.running():
        log = server.log
        index = log.table.find(b"x")
        if rows == 100:
            assert index is not None
            assert [block.verify() for block in index.blocks if block.mapped] == [False]
            log.drop_damaged(index)
            log.drop_damaged(index)
        assert log.table.checksum_failures == 1
        assert server.state == expected(y=(2, 4))
        await server.append(b"x", 2, 7)
    del index
    check_counts(server.log.table)
    assert found(disk).state == expected(x=(2, 7), y=(2, 4))
    assert not examine(disk).good
    await fill(disk, ("drop", b"x", 0), ("append", b"x", 3), save=True)
    assert examine(disk).good
    assert found(disk).state == expected(x=(2, 3), y=(2, 4))


async def test_a_drop_ends_the_damage(threads: Threads) -> None:
    disk = MemoryDisk()
    await fill(disk, ("append", b"x", 3), save=True)
    await fill(disk, ("append", b"x", 2), ("drop", b"x", 0), ("append", b"x", 4))
    damage(disk, b"x", 3, saved=True)
    server = found(disk)
    assert server.state == expected(x=(2, 4))
    assert server.log.table.checksum_failures == 0


async def test_a_snapshot_drops_what_is_damaged(threads: Threads) -> None:
    disk = MemoryDisk()
    await fill(disk, ("append", b"x", 100), ("append", b"y", 100))
    server = open_indexes(disk)
    async with server.running():
        damage(disk, b"x", 100, 1)
        await server.data.save()
        assert server.state == expected(y=(2, 100))
        assert server.log.table.checksum_failures == 1
    check_counts(server.log.table)
    assert found(disk).state == expected(y=(2, 100))


async def test_what_a_snapshot_without_the_plugin_has_lost_is_damaged(threads: Threads) -> None:
    """A server whose plugin is not loaded keeps the records; data that it found damaged stays damaged."""
    disk = MemoryDisk()
    await fill(disk, ("append", b"x", 100), ("append", b"y", 100), ("append", b"y", 1))
    damage(disk, b"x", 100)
    await save_without_the_plugin(disk)
    log = make_log()
    recovery.load(disk, 0, [Notes(), log])
    log.finish_replay()
    assert contents(log.table) == expected(y=(2, 101))
    assert log.table.checksum_failures == 1


async def test_a_repair_leaves_all_indexes_out(threads: Threads) -> None:
    """It can't look into them; a server starts, and goes on from nothing."""
    disk = MemoryDisk()
    await fill(disk, ("append", b"x", 100), ("append", b"y", 100), ("append", b"y", 1))
    damage(disk, b"x", 100)
    looked = examine(disk)
    assert [each for problem in looked.problems for each in problem.left_out] == ["all of attention_index"]
    await repair(disk, looked, set_aside_names(looked, 0.0))
    assert examine(disk).good
    assert found(disk).state == {}
    await fill(disk, ("append", b"x", 3))
    assert found(disk).state == expected(x=(2, 3))


# What the disk refuses.


@pytest.mark.parametrize(
    ("before", "lost", "merged"),
    [
        ([("append", b"x", 3)], [("append", b"x", 50)], False),
        ([("append", b"x", 3)], [("append", b"x", 5)], True),
        ([], [("append", b"x", 3), ("append", b"y", 2), ("append", b"x", 5)], True),
        ([("append", b"x", 3)], [("drop", b"x", 0)], False),
        ([("append", b"x", 100), ("append", b"x", 4)], [("drop", b"x", 0), ("append", b"x", 8)], False),
        ([("append", b"x", 3)], [("append", b"x", 2), ("drop", b"x", 0), ("append", b"x", 9), ("drop", b"x", 0)], True),
    ],
)
async def test_what_did_not_reach_the_disk_is_undone(
    threads: Threads, before: list[Any], lost: list[Any], merged: bool
) -> None:
    disk = MemoryDisk()
    state = await fill(disk, *before)
    server = open_indexes(disk)
    async with server.running():
        disk.plan = lambda operation: Fault(error=errno.EIO) if operation.kind == "write" else None
        waits: list[Awaitable[None] | None] = []
        for what, name, count in lost:
            if what == "append":
                waits.append(append(server.log, name, 2, count))
            else:
                waits.append(server.log.drop_index(name)[1])
        for waiting in waits:
            assert waiting is not None
            with pytest.raises(MisconfError):
                await waiting
        del waiting, waits
        assert server.state == state
        check_counts(server.log.table)
        with pytest.raises(MisconfError):
            await server.append(b"x", 2, 1)
        for name in state:
            gather(server.log, name)
        assert server.state == state
        disk.plan = None
        await server.data.save()
        await server.append(b"x", 2, 1)
        after = server.state
    assert found(disk).state == after


# Death.

Script = Callable[["Watched"], Awaitable[None]]


@attrs.define(eq=False)
class Watched:
    """A server whose states are noted, and which of them a client was told of."""

    disk: MemoryDisk
    mode: str
    states: list[State] = attrs.field(factory=lambda: [{}])
    acknowledged: int = 0
    flushed: int = 0
    """The first state that a power cut may leave, if nothing was promised about it."""
    server: IndexServer = attrs.field(init=False)

    def look(self) -> None:
        """Called before each operation: if nothing on the disk could be lost now, nothing acknowledged may be."""
        names = [name for name in self.disk.names() if name.startswith("pion.vstore.") and not name.endswith(".tmp")]
        if all(self.disk.flushed(name) for name in names):
            self.flushed = self.acknowledged

    async def do(self, what: str, name: bytes, count: int = 0) -> None:
        server = self.server
        await server.data.admit()
        waiting = append(server.log, name, 2, count) if what == "append" else server.log.drop_index(name)[1]
        self.states.append(server.state)
        number = len(self.states) - 1
        if waiting is not None:
            await waiting
        self.acknowledged = max(self.acknowledged, number)

    async def life(self) -> None:
        """Appends short and long, a drop, a snapshot while others append, and a restart's rows moved by another."""
        self.server = open_indexes(self.disk, self.mode)
        async with self.server.running(), trio.open_nursery() as nursery:
            await self.do("append", b"x", 3)
            await self.do("append", b"y", 80)
            nursery.start_soon(self.do, "append", b"x", 70)
            await self.do("append", b"y", 2)
            nursery.start_soon(self.server.data.save)
            await self.do("append", b"x", 4)
            await self.do("drop", b"y")
            await self.do("append", b"y", 1)
            await trio.sleep(1.1)  # the log is flushed every second
            await self.do("append", b"x", 1)

    async def again(self) -> None:
        await self.life()
        self.server = open_indexes(self.disk, self.mode)
        async with self.server.running():
            await self.do("append", b"x", 2)
            await self.server.data.save()
            await self.do("append", b"z", 90)
            gather(self.server.log, b"x")
            await self.server.data.save()
            await self.do("drop", b"x")


@pytest.mark.usefixtures("same_each_time")
@pytest.mark.parametrize("mode", ["always", "everysec"])
def test_death_at_every_operation(mode: str) -> None:
    """The process or the machine dies: the state is one that was, and none that was acknowledged is missing."""
    number, deaths = 0, 0
    while True:
        number += 1
        injector = Injector(number, Fault(done=bool(number % 2)))
        watched = Watched(MemoryDisk(), mode)
        injector.look = watched.look
        watched.disk.plan = injector
        died = run_until_death(watched.again)
        for power in (False, True):
            for seed in range(1 + 2 * power):
                left = watched.disk.crash(power=power, order=Random(seed) if power else None)
                state = found(left).state
                first = watched.acknowledged if mode == "always" or not power else watched.flushed
                assert state in watched.states[first:], (injector.hit, power, first)
                assert examine(left).good
                deaths += 1
        if not died:
            break
    assert watched.flushed > 0
    assert number > 40
    assert deaths == 4 * number


# The page.


@pytest.mark.parametrize(
    ("title", "raw", "fields"),
    [
        (
            "Appended rows",
            pack_append(b"facts", 64, 7, 9),
            {"kind": 1, "name": b"facts", "dim": 64, "start": 7, "count": 9},
        ),
        ("A dropped index", pack_drop(b"x", DropReason.COMMAND), {"kind": 2, "name": b"x", "reason": 0}),
        ("A dropped index", pack_drop(b"x", DropReason.DAMAGED), {"kind": 2, "name": b"x", "reason": 1}),
    ],
)
def test_the_records_are_as_the_page_says(title: str, raw: bytes, fields: dict[str, Any]) -> None:
    """Read with nothing but the page's table."""
    position, read = 0, dict[str, Any]()
    for kind, field, meaning in table(LOG, title):
        if kind == "text":
            (size,) = struct.unpack_from("<I", raw, position)
            read[field] = raw[position + 4 : position + 4 + size]
            position += 4 + size
        else:
            (read[field],) = struct.unpack_from(NUMBERS[kind], raw, position)
            position += struct.calcsize(NUMBERS[kind])
        if field == "kind":
            assert int(meaning) == read[field]
    assert position == len(raw)
    assert read == fields
    assert f"The family is `{make_log().family}`." in LOG
