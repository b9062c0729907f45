"""What goes wrong beside the disk: families that raise, rows replaced while they are verified, ends in disorder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import trio

from pion.commands.vstore_common import verified
from pion.config import Config
from pion.errors import CommandError, MisconfError, StartupError
from pion.server import only, serve
from pion.storage import reading, vstore_log
from pion.storage.changes import CreateSession, StoreRows
from pion.storage.data_directory import open_disk
from pion.storage.durable import Captured, Record
from pion.storage.formats import get_format
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.schema import Schema
from pion.storage.vstore import VStore
from pion.storage.vstore_log import MAP_FROM_BYTES, VStoreLog
from pion.storage.wal import BATCH_BYTES
from pion.testing import FakeClock, MemoryDisk, running_server
from tests.storage.log_support import Notes

BYTES = Schema.uniform(get_format(b"fp32"), 1)
ROWS = MAP_FROM_BYTES // 4


class Naughty(Notes):
    """Fails where it is told to."""

    def __init__(self) -> None:
        super().__init__("naughty")
        self.error: Exception | None = None
        self.capture_error: Exception | None = None

    def encode(self, item: Any) -> Record:
        if self.error is not None and item.meta == b"bad":
            raise self.error
        return super().encode(item)

    def capture(self) -> Iterator[Captured]:
        if self.capture_error is not None:
            raise self.capture_error
        return super().capture()


class Kept:
    """A store and another family on one disk."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.store = VStore(Config(), FakeClock(), NullJournal(), Ledger())
        self.naughty = Naughty()
        self.data = open_disk(disk, Config(), [VStoreLog(self.store), self.naughty], lambda: 0)

    async def keep(self, *changes: Any) -> None:
        for change in changes:
            wait = self.store.commit(change)
            assert wait is not None
            await wait


@asynccontextmanager
async def kept(disk: MemoryDisk, *, save: bool = False) -> AsyncIterator[Kept]:
    opened = Kept(disk)
    async with trio.open_nursery() as nursery:
        await nursery.start(opened.data.run)
        yield opened
        nursery.cancel_scope.cancel()
    await opened.data.close(save=save, grace_s=5)


@pytest.mark.parametrize("error", [ValueError("no text"), MemoryError()])
@pytest.mark.parametrize("before", [0, BATCH_BYTES // 2])
async def test_a_record_that_can_not_be_made_is_a_failed_write(error: Exception, before: int) -> None:
    """Nothing is written behind the hole, and the next start finds what was acknowledged."""
    disk = MemoryDisk()
    async with kept(disk) as opened:
        await opened.keep(CreateSession(b"s", BYTES))
        opened.naughty.error = error
        if before:  # so much that a first part of the batch is on the disk by then
            opened.naughty.add(b"large", bytes(before))
        waits = [opened.naughty.add(b"bad"), opened.naughty.add(b"behind")]
        for wait in waits:
            assert wait is not None
            with pytest.raises(MisconfError, match="a record could not be made"):
                await wait
        with pytest.raises(MisconfError):
            opened.store.commit(CreateSession(b"t", BYTES))
        assert opened.naughty.notes == []
        opened.naughty.error = None
        await opened.data.save()
        await opened.keep(CreateSession(b"u", BYTES))
    async with kept(disk) as again:
        assert set(again.store.lone) == {b"s", b"u"}
        assert again.naughty.notes == []


async def test_a_family_that_can_not_be_captured_fails_the_snapshot_only() -> None:
    disk = MemoryDisk()
    async with kept(disk, save=True) as opened:
        await opened.keep(CreateSession(b"s", BYTES))
        opened.naughty.capture_error = RuntimeError("not now")
        with pytest.raises(CommandError, match="not now"):
            await opened.data.save()
        assert opened.store.before_change is None, "the other family's capture is over"
        await opened.keep(CreateSession(b"t", BYTES))
    async with kept(disk) as again:
        assert set(again.store.lone) == {b"s", b"t"}


async def test_a_change_at_the_very_end_gets_into_the_last_snapshot() -> None:
    """Appended in the same step in which the writer was told to stop."""
    disk = MemoryDisk()
    opened = Kept(disk)
    async with trio.open_nursery() as nursery:
        await nursery.start(opened.data.run)
        await opened.keep(CreateSession(b"s", BYTES))
        opened.store.commit(CreateSession(b"t", BYTES))
        nursery.cancel_scope.cancel()
    with trio.fail_after(5):
        await opened.data.close(save=True, grace_s=60)
    async with kept(disk) as again:
        assert set(again.store.lone) == {b"s", b"t"}
        assert again.data.loaded.snapshot
        assert again.data.loaded.records == 0


def context(opened: Kept) -> Any:
    async def in_thread(function: Any, *args: Any) -> Any:
        await trio.lowlevel.checkpoint()
        result = function(*args)
        await trio.lowlevel.checkpoint()
        return result

    return SimpleNamespace(
        session=SimpleNamespace(no_touch=False), services=SimpleNamespace(vstore=opened.store), in_thread=in_thread
    )


async def mapped(disk: MemoryDisk) -> None:
    """Leave rows on the disk that the next start maps, and damage them."""
    async with kept(disk) as opened:
        await opened.keep(CreateSession(b"s", BYTES), StoreRows(b"s", 0, 0, ROWS, bytes(range(256)) * (ROWS // 64)))


def damage(opened: Kept) -> None:
    layer = opened.store.lone[b"s"].layer(0, 0)
    assert layer is not None
    for block in layer.blocks:
        cast("Any", block.memory).region.checksum ^= 1


async def test_rows_replaced_while_damage_is_found_stay() -> None:
    disk = MemoryDisk()
    await mapped(disk)
    async with kept(disk) as opened:
        damage(opened)
        unit, _ = opened.store.session(b"s")
        spans = reading.gather(unit, 0, 0, 0, ROWS)
        outcome: list[bool] = []

        async def read() -> None:
            outcome.append(await verified(context(opened), [(unit, spans)]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.lowlevel.checkpoint()
            await opened.keep(StoreRows(b"s", 0, 0, ROWS, b"new!" * ROWS))
        assert outcome == [False], "gather again"
        assert opened.store.checksum_failures == 0
        again = reading.gather(unit, 0, 0, 0, ROWS)
        assert await verified(context(opened), [(unit, again)])
        assert b"".join(bytes(span.view()) for span in again) == b"new!" * ROWS


async def test_damage_found_by_many_counts_once() -> None:
    disk = MemoryDisk()
    await mapped(disk)
    async with kept(disk) as opened:
        damage(opened)
        unit, _ = opened.store.session(b"s")
        outcomes: list[object] = []

        async def read() -> None:
            try:
                outcomes.append(await verified(context(opened), [(unit, spans)]))
            except CommandError as error:
                outcomes.append(str(error)[:6])

        spans = reading.gather(unit, 0, 0, 0, ROWS)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read)
        assert sorted(map(str, outcomes)) == ["False", "False", "no row"], "the others gather again, and find nothing"
        assert opened.store.checksum_failures == 1
        assert b"s" not in opened.store.lone


async def test_many_damaged_rows_cost_one_more_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryDisk()
    async with kept(disk) as opened:
        for number in range(12):
            sid = b"s%d" % number
            await opened.keep(CreateSession(sid, BYTES), StoreRows(sid, 0, 0, ROWS, bytes(4 * ROWS)))
    async with kept(disk) as opened:
        attempts = 0
        capture = vstore_log.VStoreLog.capture

        def counted(self: VStoreLog) -> Iterator[Captured]:
            nonlocal attempts
            attempts += 1
            return capture(self)

        monkeypatch.setattr(VStoreLog, "capture", counted)
        for number in range(11):
            layer = opened.store.lone[b"s%d" % number].layer(0, 0)
            assert layer is not None
            cast("Any", layer.blocks[0].memory).region.checksum ^= 1
        await opened.data.save()
        assert attempts == 2
        assert set(opened.store.lone) == {b"s11"}


def test_a_capture_looks_at_each_unit_once() -> None:
    """A million sessions must not be walked a million times."""

    class Counted(set[Any]):
        looks = 0

        def __contains__(self, item: object) -> bool:
            Counted.looks += 1
            return super().__contains__(item)

        def __iter__(self) -> Iterator[Any]:
            Counted.looks += len(self)
            return super().__iter__()

    store = VStore(Config(max_sessions=5000), FakeClock(), NullJournal(), Ledger())
    log = VStoreLog(store)
    for number in range(2000):
        store.commit(CreateSession(b"%d" % number, BYTES))
    capture = cast("Any", log.capture())
    capture._left = Counted(capture._left)
    assert len(list(capture)) == 2000
    assert Counted.looks <= 2 * 2000


async def test_a_port_in_use_is_one_plain_error(tmp_path: Path) -> None:
    async with running_server(directory=tmp_path / "one") as started:
        with pytest.raises(StartupError, match="in use"):
            await serve(Config(port=started.port, dir=str(tmp_path / "two")))


def test_only_unwraps_what_is_alone() -> None:
    error = ValueError()
    assert only(BaseExceptionGroup("", [BaseExceptionGroup("", [error])])) is error
    two = BaseExceptionGroup("", [error, KeyError()])
    assert only(BaseExceptionGroup("", [two])) is two


@pytest.mark.parametrize("data", [[1.0, 2.0], "text"])
def test_a_record_takes_buffers_only(data: Any) -> None:
    with pytest.raises(TypeError):
        Record(b"meta", data)


def test_a_record_measures_bytes() -> None:
    record = Record(b"meta", cast("Any", np.zeros(3, np.float64)))
    assert record.data is not None
    assert len(cast("memoryview", record.data)) == 24
