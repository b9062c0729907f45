"""`pion check` and `pion repair` as tools: locks, dry runs, bad disks, other families, and being stopped half-way."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import trio

from pion.client.aio import PionClient
from pion.config import Config
from pion.errors import MisconfError, StartupError
from pion.storage import records
from pion.storage.changes import CreateSession
from pion.storage.disk import RealDisk, boot_id
from pion.storage.durable import Captured, Durable, Record
from pion.storage.examine import examine
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.recovery import load
from pion.storage.region import Region
from pion.storage.repair import repair, set_aside_names
from pion.storage.salvage import Key
from pion.storage.schema import Schema
from pion.storage.segments import Position
from pion.storage.snapshot import Snapshotter
from pion.storage.vstore import VStore
from pion.storage.vstore_log import VStoreLog
from pion.storage.wal import Log, Sync
from pion.testing import FakeClock, Fault, MemoryDisk, Operation, ProcessDied, ServerProcess, running_server
from tests.storage.damage_support import (
    SNAPSHOT,
    Contents,
    FrozenDisk,
    fill,
    flip,
    pion,
    segments,
    snapshot_regions,
    start,
    state,
    store,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Contents]:
    directory = tmp_path_factory.mktemp("made") / "data"
    return directory, trio.run(fill, directory, (2, 16))


@pytest.fixture
def directory(made: tuple[Path, Contents], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "data"))


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


async def test_a_good_directory_is_left_alone(directory: Path) -> None:
    before = files(directory)
    status, text = pion("check", directory)
    assert status == 0
    assert "all is well: prefixes 13, lone sessions 1" in text
    assert re.search(rf"^{SNAPSHOT} +snapshot +1 +33 +\d+ +up to 33 +good *$", text, re.MULTILINE)
    assert re.search(rf"^{SNAPSHOT}.log.0000000004 +log +1 +19 +\d+ +48 to 66 +good *$", text, re.MULTILINE)
    status, text = pion("repair", directory)
    assert (status, "There is nothing to repair." in text) == (0, True)
    assert files(directory) == before


def test_a_copy_without_a_lock_is_only_read(directory: Path) -> None:
    (directory / "pion.lock").unlink()
    before = files(directory)
    assert pion("check", directory)[0] == 0
    assert pion("repair", directory, "--dry-run")[0] == 0
    assert files(directory) == before


def test_an_empty_directory(tmp_path: Path) -> None:
    status, text = pion("check", tmp_path)
    assert status == 0
    assert "no server has stored anything here" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["missing", "file"])
@pytest.mark.parametrize("command", ["check", "repair"])
def test_what_is_no_directory(tmp_path: Path, command: str, what: str) -> None:
    path = tmp_path / what
    if what == "file":
        path.write_text("text")
    status, text = pion(command, path)
    assert status == 2
    assert text == f"pion: {path} is not a directory\n"
    assert path.exists() is (what == "file")


@pytest.mark.parametrize("command", ["check", "repair"])
def test_not_while_a_server_runs(directory: Path, command: str) -> None:
    flip(directory / SNAPSHOT, snapshot_regions((directory / SNAPSHOT).read_bytes())["data of 1, shared tensor"])
    with ServerProcess("--dir", str(directory)) as server:
        before = files(directory)
        status, text = pion(command, directory)
        assert status == 2
        assert text == f"pion: {directory} is in use by process {server.pid}; stop that server first\n"
        assert files(directory) == before
    assert pion("check", directory)[0] == 0, "the server dropped what was damaged, and wrote a snapshot at its end"


async def test_a_dry_run_says_what_would_be_done(directory: Path) -> None:
    path = segments(directory)[0]
    flip(path, records.SEGMENT_BYTES + 1)
    before = files(directory)
    status, dry = pion("repair", directory, "--dry-run")
    assert status == 1
    after = files(directory)
    assert before.pop("pion.lock")
    assert after.pop("pion.lock")
    assert after == before
    status, real = pion("repair", directory)
    assert status == 0
    stamp = re.compile(r"damaged-\d{8}T\d{6}-")
    said = stamp.sub("damaged-", real).split("\nDone:\n")
    assert stamp.sub("damaged-", dry).split("\nThis would be done:\n") == [
        said[0],
        "".join(line for line in said[1].splitlines(keepends=True) if "No server reads" not in line),
    ]
    assert f"{path.name} set aside as damaged-" in said[1]
    assert f"problem: {path.name}, byte {records.SEGMENT_BYTES}: record 34 can't be read" in real
    assert "it looks like Register of prefix 'small|f'" in real
    assert "prefix 'small|f': record 35 of" in real


async def test_twice_in_a_second(directory: Path) -> None:
    """The second repair has other damage to set aside: no name is given twice, no file replaced."""
    original = files(directory)
    for _ in range(2):
        data = (directory / SNAPSHOT).read_bytes()
        flip(directory / SNAPSHOT, snapshot_regions(data)["padding"])
        found = examine(RealDisk(directory))
        names = set_aside_names(found, 1e9)
        assert not set(names.values()) & set(files(directory))
        await repair(RealDisk(directory), found, names)
    kept = files(directory)
    assert sum(name.startswith("damaged-20010909T014640") for name in kept) == len(original) - 1 + 2, (
        "all but the lock, and then two"
    )
    assert set(original.values()) - set(kept.values()) == {original[SNAPSHOT]}, "but the one that was damaged here"
    assert (await start(directory)).refusal == ""


async def test_the_bytes_can_be_put_back(directory: Path, made: tuple[Path, Contents]) -> None:
    """A repair can be undone, and a better copy of a damaged file be used after all."""
    path = segments(directory)[0]
    good = path.read_bytes()
    flip(path, records.SEGMENT_BYTES + 1)
    assert pion("repair", directory)[0] == 0
    for name in files(directory):
        if name.startswith("pion.vstore."):
            (directory / name).unlink()
    for name in files(directory):
        if name.startswith("damaged-"):
            (directory / name).rename(directory / name.split("-", 2)[2])
    path.write_bytes(good)
    assert (await start(directory)).contents == made[1]


def test_progress(directory: Path) -> None:
    seen: list[tuple[int, int]] = []
    examine(RealDisk(directory), progress=lambda done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in directory.glob("pion.vstore.*"))
    assert {whole for _, whole in seen} == {total}
    assert sorted(seen) == seen
    assert seen[-1][0] == total
    assert len(seen) > 10


# A disk that can't read everywhere.


@pytest.mark.parametrize("where", ["header", "entry 0, meta", "data of 1, shared tensor", "table, its checksum"])
def test_a_bad_sector_in_the_snapshot(directory: Path, where: str) -> None:
    data = files(directory)
    offset = snapshot_regions(data[SNAPSHOT])[where]
    found = examine(FrozenDisk(data, (SNAPSHOT, offset)))
    kept = {name for _, name in state(found.salvage.store)}
    if where.startswith("data"):
        assert set(found.salvage.lost) == {(False, b"small|a")}
        assert kept >= {b"large|c", b"small|i", b"lone"}
    else:
        assert f"{SNAPSHOT}: it can't be read" in "".join(f"{each.file}: {each.what}" for each in found.problems)
        assert found.files[SNAPSHOT].state == "unreadable"
        assert b"small|i" in kept
        assert b"small|a" not in kept


def test_a_bad_sector_in_the_log(directory: Path) -> None:
    data = files(directory)
    first, second = [path.name for path in segments(directory)]
    found = examine(FrozenDisk(data, (first, 300)))
    assert found.files[first].state == "unreadable"
    assert (False, b"small|i") in state(found.salvage.store), "what the other segment makes"
    found = examine(FrozenDisk(data, (second, 300)))
    left_out = {"session 'lone'", "prefix 'open|u'"}
    assert left_out <= {name for problem in found.problems for name in problem.left_out}, "nobody knows what it changed"
    assert (False, b"small|h") in state(found.salvage.store)


# Other families.


class Notes(Durable):
    """Keeps texts."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.texts: list[bytes] = []

    def replay(self, meta: bytes, data: Region | None) -> None:
        self.texts.append(meta + (data.read() if data is not None else b""))

    def add(self, text: bytes) -> None:
        self.texts.append(text)
        self.keep(Record(text[:1], text[1:]), len(text))

    def capture(self) -> Iterator[Captured]:
        return iter([Captured(text[:1], (text[1:],)) for text in self.texts])


async def two_families(directory: Path, saved: int) -> None:
    """Five records of each of two families and of the store, the first `saved` of them in a snapshot."""
    disk = RealDisk(directory)
    store = VStore(Config(), FakeClock(), NullJournal(), Ledger())
    families = [Notes("marks"), VStoreLog(store), Notes("notes")]
    log = Log(disk, 0, Position(1, 1, bytes(16)), Sync.NO, queue_bytes=1 << 20)
    for family in families:
        family.log = log
    await log.open()
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        for number in range(5):
            if number == saved:
                await Snapshotter(disk, 0, bytes(16), log, families).take()
            families[0].add(b"mark %d" % number)
            waiting = store.commit(CreateSession(b"session %d" % number, Schema.from_text("fp32@8")))
            assert waiting is not None
            families[2].add(b"note %d" % number)
            await waiting
        nursery.cancel_scope.cancel()
    await log.close()


@pytest.mark.parametrize("saved", [0, 5], ids=["log", "snapshot"])
async def test_damage_of_one_family_is_not_that_of_another(tmp_path: Path, saved: int) -> None:
    await two_families(tmp_path, saved)
    if saved:
        await two_families_saved(tmp_path)
    path = tmp_path / SNAPSHOT if saved else segments(tmp_path)[0]
    data = path.read_bytes()
    for damaged, kept in ((b"mark 2"[1:], "notes"), (b"note 2"[1:], "marks")):
        path.write_bytes(data)
        flip(path, data.index(damaged))
        found = examine(RealDisk(tmp_path))
        family = "marks" if kept == "notes" else "notes"
        assert found.salvage.lost_families.keys() == {family}
        assert list(found.salvage.dormant) == [kept]
        assert len(state(found.salvage.store)) == 5
        assert f"all of {family}" in str([problem.left_out for problem in found.problems])


async def two_families_saved(directory: Path) -> None:
    """Put what is in the log into a snapshot."""
    disk = RealDisk(directory)
    store = VStore(Config(), FakeClock(), NullJournal(), Ledger())
    families: list[Durable] = [Notes("marks"), VStoreLog(store), Notes("notes")]
    found = load(disk, 0, families)
    log = Log(disk, 0, found.position, Sync.NO, queue_bytes=1 << 20, segments=found.sizes())
    await Snapshotter(disk, 0, found.position.lineage, log, families).take()
    await log.close()


async def test_a_damaged_record_of_a_family_whose_name_can_be_read(tmp_path: Path) -> None:
    await two_families(tmp_path, 0)
    path = segments(tmp_path)[0]
    view = memoryview(path.read_bytes())
    entries = list(records.scan(view, records.SegmentHeader.parse(view)))
    for entry in entries:
        if entry.sequence in (7, 8, 9):
            flip(path, entry.start + 40)
            found = examine(RealDisk(tmp_path))
            flip(path, entry.start + 40)
            lost = {"marks": 0, "vstore": 0, "notes": 0} | dict.fromkeys(found.salvage.lost_families, 1)
            lost["vstore"] = bool(found.salvage.lost)
            assert [name for name, is_lost in lost.items() if is_lost] == [entry.family]
    # Without its name, it may have been any.
    flip(path, entries[7].start + 49)
    found = examine(RealDisk(tmp_path))
    assert found.salvage.lost_families.keys() == {"marks", "notes"}
    assert (True, b"session 4") not in found.salvage.lost
    assert (True, b"session 0") in found.salvage.lost


async def test_a_repair_keeps_the_records_of_plugins_that_are_not_there(tmp_path: Path) -> None:
    await two_families(tmp_path, 2)
    path = segments(tmp_path)[0]
    flip(path, path.read_bytes().index(b"ote 3"))
    status, text = pion("repair", tmp_path)
    assert status == 0
    assert "all of notes: record" in text
    marks, notes = Notes("marks"), Notes("notes")
    store = VStore(Config(), FakeClock(), NullJournal(), Ledger())
    load(RealDisk(tmp_path), 0, [marks, VStoreLog(store), notes])
    assert marks.texts == [b"mark %d" % number for number in range(5)]
    assert notes.texts == []
    assert len(store.lone) == 5


async def test_a_record_that_makes_no_sense(tmp_path: Path) -> None:
    """Its checksum is right, so the disk is not at fault; the start is refused all the same."""
    await two_families(tmp_path, 0)
    path = segments(tmp_path)[0]
    data = path.read_bytes()
    header = records.SegmentHeader.parse(memoryview(data))
    parts, _ = records.encode("vstore", Record(b"\x63"), 16, 0, header.salt)
    path.write_bytes(data + b"".join(bytes(part) for part in parts))
    refusal = (await start(tmp_path)).refusal
    assert "record 16 at byte" in refusal
    assert "unknown kind of change, 99" in refusal
    status, text = pion("check", tmp_path)
    assert status == 1
    assert "unknown kind of change, 99" in text
    assert pion("repair", tmp_path)[0] == 0
    assert (await start(tmp_path)).refusal == ""


# A repair that fails, or is stopped.


def disk_of(directory: Path) -> MemoryDisk:
    disk = MemoryDisk()
    for name, data in files(directory).items():
        file = disk.create(name)
        file.write([data])
        file.sync()
        file.close()
    disk.sync_directory(SNAPSHOT)
    return disk


def kept_after_a_start(disk: MemoryDisk) -> dict[Key, dict[str, object]] | None:
    """What a start finds; None if it is refused."""
    store = VStore(Config(), FakeClock(), NullJournal(), Ledger())
    log = VStoreLog(store)
    try:
        load(disk, 0, [log])
    except StartupError:
        return None
    log.finish_replay()
    return state(store)


@pytest.mark.parametrize("damage", ["snapshot", "log"])
async def test_stopped_at_every_step(directory: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was done by then, no byte is lost, and the next repair comes to the same end."""
    monkeypatch.setattr(MemoryDisk, "boot_id", lambda disk: boot_id())  # where the files were made
    if damage == "snapshot":
        flip(directory / SNAPSHOT, snapshot_regions((directory / SNAPSHOT).read_bytes())["entry 0, meta"])
    else:
        flip(segments(directory)[0], records.SEGMENT_BYTES + 1)
    (directory / f"{SNAPSHOT}.tmp").write_bytes(b"half a snapshot")
    bytes_before = set(files(directory).values())

    async def repaired(disk: MemoryDisk) -> dict[Key, dict[str, object]] | None:
        found = examine(disk)
        if not found.good:
            await repair(disk, found, set_aside_names(found, 1e9))
            assert examine(disk).good
        return kept_after_a_start(disk)

    whole = disk_of(directory)
    whole.operations.clear()
    expected = await repaired(whole)
    assert expected is not None
    assert len(expected) > 8
    steps = len(whole.operations)
    assert steps > 15
    refused = started = 0
    for step in range(1, steps + 1):
        for fault in (Fault(error=errno.EIO, done_bytes=3), Fault(done=True)):
            disk = disk_of(directory)
            disk.operations.clear()

            def plan(operation: Operation, at: int = step, what: Fault = fault) -> Fault | None:
                return what if operation.number == at else None

            disk.plan = plan
            try:
                await repaired(disk)
            except (OSError, MisconfError):
                assert fault.error is not None
            except ProcessDied:
                assert fault.error is None
            with_power_cut = [disk.crash(power=True), disk.crash(power=True, order=Random(step))]
            for after in (disk.crash(), *(with_power_cut if fault.done else ())):
                contents = {after.contents(name) for name in after.names()}
                assert bytes_before <= contents, (step, fault)
                found = kept_after_a_start(after.crash())
                assert found in (None, expected), (step, fault)
                refused, started = refused + (found is None), started + (found is not None)
                assert await repaired(after) == expected, (step, fault)
    assert refused > 10
    assert started > 10


async def test_no_room_for_the_new_snapshot(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is as it was, damage and all, without names or files that the repair had begun to make."""
    flip(segments(directory)[0], records.SEGMENT_BYTES + 1)
    before = files(directory)

    def full(descriptor: int, buffers: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        status, text = pion("repair", directory)
    assert status == 2
    assert "the repair failed" in text
    assert "No space left on device" in text
    after = files(directory)
    assert before.pop("pion.lock")
    assert after.pop("pion.lock")
    extra = after.keys() - before.keys()
    assert {name.split("-", 2)[2] for name in extra} == {SNAPSHOT}, "the second name of a file, which costs nothing"
    assert {name: after[name] for name in before} == before
    assert pion("repair", directory)[0] == 0


# The page.

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "check-and-repair.md").read_text(encoding="utf-8")


def shown(title: str) -> str:
    """An output that the page shows; the time of the repair is another one here."""
    (text,) = re.findall(rf'^```text title="{title}"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
    return normal(text)


def normal(text: str) -> str:
    text = re.sub(r"damaged-\d{8}T\d{6}-", "damaged-TIME-", text)
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


async def test_the_how_to_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = Path("pion-data")
    async with running_server(directory=directory) as started, PionClient(port=started.port) as client:
        await store(client, "chat|system", 100)
        await store(client, "docs|manual", 200, 64, 512)
        await client.execute("V.CREATE", "scratch", 8)
        await client.execute("KV.PREFIX.SAVE")
        await store(client, "docs|notes", 300)
        await store(client, "docs|letters", 400)
    path = segments(directory)[0]
    view = memoryview(path.read_bytes())
    second = list(records.scan(view, records.SegmentHeader.parse(view)))[1]
    flip(path, second.start + 20)
    flip(directory / SNAPSHOT, snapshot_regions((directory / SNAPSHOT).read_bytes())["data of 6, own tensor"])
    assert f"pion-server: {(await start(directory)).refusal}" == shown("pion-server --kvcache")
    status, text = pion("check", "pion-data")
    assert status == 1
    assert normal(text) == shown("pion check pion-data")
    status, text = pion("repair", "pion-data")
    assert status == 0
    assert normal(text).endswith("\n" + shown("pion repair pion-data"))
    assert (await start(directory)).contents.keys() == {"chat|system", "docs|letters"}
