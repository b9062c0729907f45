"""The tier in a directory: names, damage, disks that don't answer, and one process at a time."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from safetensors import safe_open

from pion.errors import StartupError
from pion.storage.disk import Mapping
from pion.storage.tiers import file as file_module
from pion.storage.tiers.base import LOCAL, Tier, TierMissError, TierUnavailableError
from pion.storage.tiers.disk import LOCK_NAME, FileInfo, RealTierDisk
from pion.storage.tiers.file import READERS, WRITERS, FileTier, file_name
from pion.storage.tiers.tier_format import Layout, lay_out
from pion.testing import Fault, Operation
from pion.testing.tier_conformance import make_key, make_layout, running
from pion.testing.tiers import MemoryTierDisk
from tests.storage.tiers.tier_support import listed

KEY = "00112233445566778899aabbccddeeff"
OTHER = "ff" * 16


async def put(tier: Tier, key: str = KEY, nbytes: int = 40_000, fill: int = 1) -> Layout:
    layout = make_layout(key, nbytes, fill=fill)
    await tier.put(key, layout.head, layout.parts)
    return layout


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def miss(tier: Tier, key: str = KEY) -> TierMissError:
    with pytest.raises(TierMissError) as caught:
        await tier.open(key)
    return caught.value


# The directory.


async def test_a_file_is_a_safetensors_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "tier"
    async with running(FileTier(RealTierDisk(str(folder)))) as tier:
        layout = await put(tier)
        path = folder / f"{KEY}.pion-tier-1.safetensors"
        assert names_in(folder) == sorted([path.name, LOCK_NAME])
        assert path.read_bytes() == layout.head + b"".join(layout.parts)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with safe_open(path, "np") as file:
            assert file.metadata()["key"] == KEY


async def test_one_process_holds_it(tmp_path: Path) -> None:
    """Another one would take the objects of the first for waste."""
    async with running(FileTier(RealTierDisk(str(tmp_path)))):
        with pytest.raises(StartupError, match=rf"--tier-dir {tmp_path}: in use by process {os.getpid()}"):
            await FileTier(RealTierDisk(str(tmp_path))).start()
    async with running(FileTier(RealTierDisk(str(tmp_path)))):
        pass


async def test_what_is_no_directory_refuses_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in ("file", "file/below"):
        with pytest.raises(StartupError, match=r"--tier-dir .*file"):
            await FileTier(RealTierDisk(str(tmp_path / path)), f"file://{tmp_path / path}").start()


async def test_a_new_directory_is_durable_before_anything_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    flush = os.fsync

    def note(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_ino)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    for expected in ([tmp_path / "a", tmp_path], []):
        async with running(FileTier(RealTierDisk(str(tmp_path / "a" / "tier")))):
            assert flushed == [path.stat().st_ino for path in expected]
        flushed.clear()


class NotListed(MemoryTierDisk):
    def entries(self) -> Iterator[FileInfo]:
        raise AssertionError("a start must not list what is there")


async def test_a_start_looks_at_no_file() -> None:
    async with running(FileTier(NotListed())) as tier:
        assert tier.used_bytes == 0
        await put(tier)


async def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """Also what looks a little like it, and a directory or a link of one of our names."""
    foreign = [
        "notes.txt",
        "pion.vstore.0",
        f"{KEY}.safetensors",
        f"{KEY}.pion-tier-1.safetensors.tmp",
        f"{KEY}.pion-tier-1.safetensors.copy",
        f"{KEY.upper()}.pion-tier-1.safetensors",
        f"{KEY}0.pion-tier-1.safetensors",
        f"{KEY}.pion-tier-x.safetensors",
        f"x{file_name(KEY)}",
    ]
    for name in foreign:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / file_name(OTHER)).symlink_to(tmp_path / "notes.txt")
    (tmp_path / file_name(make_key())).mkdir()
    before = names_in(tmp_path)
    async with running(FileTier(RealTierDisk(str(tmp_path)))) as tier:
        assert await listed(tier) == {}
        cleaned = await tier.clean(lambda key: False)
        assert (cleaned.files, cleaned.errors, tier.used_bytes) == (0, 0, 0)
    assert names_in(tmp_path) == sorted([*before, LOCK_NAME])


async def test_files_of_other_versions_and_unfinished_ones_are_cleaned(tmp_path: Path) -> None:
    waste = [f"{KEY}.pion-tier-{version}.safetensors" for version in (0, 2, 17)]
    waste += [f"{name}.0123456789abcdef.tmp" for name in (file_name(KEY), waste[1])]
    for name in waste:
        (tmp_path / name).write_bytes(b"1234")
    async with running(FileTier(RealTierDisk(str(tmp_path)))) as tier:
        layout = await put(tier)
        assert await listed(tier) == {KEY: layout.nbytes}
        cleaned = await tier.clean(lambda key: True)
        assert (cleaned.files, cleaned.nbytes, cleaned.errors) == (5, 20, 0)
        assert await listed(tier) == {KEY: layout.nbytes}
    assert names_in(tmp_path) == sorted([file_name(KEY), LOCK_NAME])


async def test_used_bytes_are_known_after_a_listing(tmp_path: Path) -> None:
    async with running(FileTier(RealTierDisk(str(tmp_path)))) as tier:
        first = await put(tier)
        assert tier.used_bytes == first.nbytes
    for look in (listed, lambda tier: tier.clean(lambda key: True)):
        async with running(FileTier(RealTierDisk(str(tmp_path)))) as tier:
            assert tier.used_bytes == 0
            await look(tier)
            assert tier.used_bytes == first.nbytes
            second = await put(tier, OTHER, 80_000)
            assert tier.used_bytes == first.nbytes + second.nbytes
            await tier.delete([OTHER])
            assert tier.used_bytes == first.nbytes


async def test_a_listing_tells_when_an_object_was_put(tmp_path: Path) -> None:
    async with running(FileTier(RealTierDisk(str(tmp_path)))) as tier:
        await put(tier)
        os.utime(tmp_path / file_name(KEY), (1_700_000_000, 1_700_000_000))
        assert [found.modified_s async for found in tier.scan()] == [1_700_000_000.0]


# Mappings.


@pytest.mark.parametrize("nbytes", [0, 10_000])
def test_a_mapping_is_read_as_long_as_anything_refers_to_it(nbytes: int, tmp_path: Path) -> None:
    data = os.urandom(nbytes)
    (tmp_path / "file").write_bytes(data)
    mapping = RealTierDisk(str(tmp_path)).map("file")
    view = mapping.view
    (tmp_path / "file").unlink()
    buffer = bytearray(nbytes)
    mapping.read_into(0, memoryview(buffer))
    with pytest.raises(OSError, match=f"the file ends at byte {nbytes}"):
        mapping.read_into(nbytes, memoryview(bytearray(1)))
    del mapping
    assert bytes(view) == bytes(buffer) == data


@pytest.mark.parametrize("removed", [False, True], ids=["kept", "removed"])
@pytest.mark.parametrize("nbytes", [0, 10_000])
def test_a_file_that_was_removed_is_closed_by_a_thread(
    removed: bool, nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last to close it frees its space, which takes its time. No descriptor is left."""
    (tmp_path / "file").write_bytes(bytes(nbytes))
    closed: dict[int, threading.Thread] = {}
    close = os.close

    def note(descriptor: int) -> None:
        closed[descriptor] = threading.current_thread()
        close(descriptor)

    monkeypatch.setattr(os, "close", note)
    mapping = RealTierDisk(str(tmp_path)).map("file")
    descriptor = mapping.descriptor
    if removed:
        (tmp_path / "file").unlink()
    view = mapping.view
    del mapping
    assert nbytes == 0 or not closed, "a view needs it"
    del view
    for thread in threading.enumerate():
        if thread.name == "pion-tier-close":
            thread.join()
    assert (closed[descriptor] is threading.main_thread()) == (not removed)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


# Damage: fault classes 40, 41 and 44. tests/storage/tiers/test_tier_format.py flips every bit of a file.


def damaged(layout: Layout) -> dict[str, bytes]:
    """What a file may be instead of itself, as far as its head tells; damaged rows are found when they are used."""
    whole = layout.head + b"".join(layout.parts)
    swapped = make_layout(OTHER, 40_000, fill=2)
    older = whole.replace(b'"version":"1"', b'"version":"0"')
    assert older != whole
    found = {
        "a byte short": whole[:-1],
        "a page short": whole[:-4096],
        "the head only": layout.head,
        "a byte more": whole + b"\0",
        "empty": b"",
        "zeros": bytes(len(whole)),
        "another key's": swapped.head + b"".join(swapped.parts),
        "an older version": older,
        "something else": b"x" * len(whole),
    }
    for position in range(0, len(layout.head), 37):
        flipped = bytearray(whole)
        flipped[position] ^= 4
        found[f"a bit flipped at {position}"] = bytes(flipped)
    return found


async def test_a_file_that_is_not_what_was_written_is_a_damaged_miss(tmp_path: Path) -> None:
    async with running(FileTier(RealTierDisk(str(tmp_path)))) as tier:
        layout = await put(tier)
        cases = damaged(layout)
        for what, data in cases.items():
            (tmp_path / file_name(KEY)).write_bytes(data)
            assert (await miss(tier)).damaged, what
        assert len(cases) >= 30
        await put(tier)
        (await tier.open(KEY)).close()


async def test_damaged_rows_are_found_before_they_are_served(tmp_path: Path) -> None:
    """One bit in every run: only that run is damaged, and opening reads no row."""
    async with running(FileTier(RealTierDisk(str(tmp_path)))) as tier:
        layout = await put(tier)
        path = tmp_path / file_name(KEY)
        whole = path.read_bytes()
        for damaged_run in layout.runs:
            for position in (0, damaged_run.nbytes // 2, damaged_run.nbytes - 1):
                flipped = bytearray(whole)
                flipped[damaged_run.offset + position] ^= 0x80
                path.write_bytes(flipped)
                opened = await tier.open(KEY)
                intact = [run.region(opened.mapping).verify() for run in layout.runs]
                assert intact == [run is not damaged_run for run in layout.runs]


async def test_a_missing_file_is_a_miss_and_no_damage(tmp_path: Path) -> None:
    async with running(FileTier(RealTierDisk(str(tmp_path)))) as tier:
        assert not (await miss(tier)).damaged
        await put(tier)
        (tmp_path / file_name(KEY)).unlink()
        assert not (await miss(tier)).damaged


# Disks that fail: test_file_faults.py does it at every operation that changes something.


class Unopenable(MemoryTierDisk):
    error = errno.EMFILE

    def map(self, name: str) -> Mapping:
        raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO, errno.EACCES, errno.ENOMEM])
async def test_what_can_not_be_opened_may_be_there(error: int) -> None:
    """No miss: the prefix must not be dropped because there are no file descriptors left."""
    disk = Unopenable()
    disk.error = error
    async with running(FileTier(disk)) as tier:
        with pytest.raises(TierUnavailableError, match=os.strerror(error)) as caught:
            await tier.open(KEY)
        assert not caught.value.full


class Unlistable(MemoryTierDisk):
    def entries(self) -> Iterator[FileInfo]:
        yield from list(super().entries())[:1]
        raise OSError(errno.EIO, os.strerror(errno.EIO))


async def test_a_listing_that_fails_says_so() -> None:
    async with running(FileTier(Unlistable())) as tier:
        layout = await put(tier)
        with pytest.raises(TierUnavailableError, match="Input/output error"):
            await listed(tier)
        with pytest.raises(TierUnavailableError, match="Input/output error"):
            await tier.clean(lambda key: True)
        assert tier.used_bytes == layout.nbytes


async def test_what_can_not_be_removed_is_counted_and_the_rest_is_removed() -> None:
    disk = MemoryTierDisk()
    async with running(FileTier(disk)) as tier:
        keys = [make_key() for _ in range(3)]
        for key in keys:
            await put(tier, key)
        left = min(keys)

        def plan(operation: Operation) -> Fault | None:
            return Fault(error=errno.EIO) if operation.name == file_name(left) else None

        disk.plan = plan
        cleaned = await tier.clean(lambda key: False)
        assert (cleaned.files, cleaned.errors) == (2, 1)
        assert list(await listed(tier)) == [left]
        with pytest.raises(TierUnavailableError, match="1 files can't be removed"):
            await tier.delete([left, OTHER])
        disk.plan = None
        await tier.delete([left])
        assert tier.used_bytes == 0


# Disks that don't answer.


class Stuck:
    """A plan that holds operations of a kind until it is told to let go."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def __call__(self, operation: Operation) -> Fault | None:
        if operation.kind == self.kind:
            self.reached.set()
            assert self.let_go.wait(60)
        return None


async def cancel_when(stuck: Stuck, call: Callable[[], object]) -> None:
    """Make a call, and cancel it once the disk is stuck in it. It ends although the disk doesn't."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await trio.to_thread.run_sync(stuck.reached.wait)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["create", "write", "sync", "rename", "sync_directory"])
async def test_a_cancelled_put_ends_at_once_and_leaves_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the disk is stuck; what was done is taken back when it goes on."""
    monkeypatch.setattr(file_module, "CHUNK_BYTES", 5000)
    disk = MemoryTierDisk()
    async with running(FileTier(disk)) as tier:
        stuck = disk.plan = Stuck(kind)
        await cancel_when(stuck, lambda: put(tier))
        assert tier.used_bytes >= 40_000
        cleaned = await tier.clean(lambda key: True)  # doesn't take it for waste
        assert cleaned.files == 0
        stuck.let_go.set()
    assert disk.names() == []
    assert tier.used_bytes == 0
    # What was not begun is not done.
    writes = [each for each in disk.operations if each.kind == "write"]
    assert len(writes) == {"create": 0, "write": 1}.get(kind, 9)


async def test_a_dead_disk_keeps_a_handful_of_threads_and_not_its_callers() -> None:
    disk = MemoryTierDisk()
    async with running(FileTier(disk)) as tier:
        stuck = disk.plan = Stuck("create")
        before = threading.active_count()
        for _ in range(20):
            with trio.move_on_after(0.01):
                await put(tier, make_key())
        assert threading.active_count() <= before + WRITERS
        assert (await miss(tier)).damaged is False  # readers have threads of their own
        stuck.let_go.set()
    assert disk.names() == []


class StuckMap(MemoryTierDisk):
    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def map(self, name: str) -> Mapping:
        assert self.let_go.wait(60)
        return super().map(name)


async def test_a_dead_disk_holds_no_reader() -> None:
    disk = StuckMap()
    async with running(FileTier(disk)) as tier:
        await put(tier)
        for _ in range(READERS + 2):
            with trio.move_on_after(0.01) as scope:
                await tier.open(KEY)
            assert scope.cancelled_caught
        disk.let_go.set()
        (await tier.open(KEY)).close()


async def test_closing_waits_for_what_is_under_way() -> None:
    disk = MemoryTierDisk()
    tier = FileTier(disk)
    await tier.start()
    stuck = disk.plan = Stuck("sync")
    await cancel_when(stuck, lambda: put(tier))
    with trio.move_on_after(0.01) as scope:
        await tier.aclose()
    assert scope.cancelled_caught
    stuck.let_go.set()


async def test_parts_are_written_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are cut, so that a cancelled put is noticed soon."""
    monkeypatch.setattr(file_module, "CHUNK_BYTES", 100)
    disk = MemoryTierDisk()
    async with running(FileTier(disk)) as tier:
        layout = make_layout(KEY, 1000)
        data = memoryview(b"".join(layout.parts))
        for cuts in ([0, len(data)], [0, 1, 100, 101, 300, len(data)], [0, 50, 150, 150, len(data)]):
            disk.operations.clear()
            parts = [data[start:stop] for start, stop in pairwise(cuts)]
            await tier.put(KEY, layout.head, parts)
            written = [each.nbytes for each in disk.operations if each.kind == "write"]
            assert written[:-1] == [100] * (len(written) - 1)
            assert 0 < written[-1] <= 100
            assert disk.contents(file_name(KEY)) == layout.head + bytes(data)


async def test_an_object_without_rows(tmp_path: Path) -> None:
    async with running(FileTier(RealTierDisk(str(tmp_path)))) as tier:
        layout = lay_out(KEY, b"only registered", [])
        await tier.put(KEY, layout.head, layout.parts)
        opened = await tier.open(KEY)
        assert opened.nbytes == len(layout.head) == layout.nbytes


def test_a_disk_of_this_machine_gets_more_time_and_no_second_try() -> None:
    assert FileTier.policy is LOCAL
    assert LOCAL.attempts == 1
