"""What can't be read is reported before anybody looks at it through the mapping, which would end the process."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from pion.config import MIB
from pion.storage.disk import Mapping, RealDisk
from pion.storage.durable import Durable
from pion.storage.read_ahead import MOST_AHEAD_BYTES, PAGE_BYTES, ReadAhead, UnreadableError
from pion.storage.records import RECORD_BYTES, SEGMENT_BYTES
from pion.storage.recovery import READ_AT_START_BYTES, load
from pion.storage.region import Region
from pion.storage.segments import segment_name, snapshot_name
from pion.testing import MemoryDisk
from tests.storage.log_support import Notes
from tests.storage.test_recovery import Log, disk_with, refused

LOG, SNAPSHOT = segment_name(0, 1), snapshot_name(0)


@attrs.define(eq=False)
class Watched:
    """A file that can't be read at some places; remembers what was."""

    inner: Mapping
    bad: frozenset[int] = frozenset()
    ranges: list[tuple[int, int]] = attrs.field(factory=list)

    @property
    def view(self) -> memoryview:
        return self.inner.view

    def read_into(self, start: int, buffer: memoryview) -> None:
        stop = start + len(buffer)
        if any(start <= each < stop for each in self.bad):
            raise OSError(errno.EIO, "Input/output error")
        self.inner.read_into(start, buffer)
        self.ranges.append((start, stop))

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def was_read(self, start: int, stop: int) -> bool:
        return all(any(low <= at < high for low, high in self.ranges) for at in range(start, stop))


def mapped(nbytes: int, *bad: int) -> Watched:
    disk = MemoryDisk()
    file = disk.create("file")
    file.write([bytes(nbytes)])
    return Watched(disk.map("file"), frozenset(bad))


def watch(disk: MemoryDisk, monkeypatch: pytest.MonkeyPatch, name: str, *bad: int) -> list[Watched]:
    """Give one file of a disk bad places. The mappings of it that were made."""
    made: list[Watched] = []
    plain = disk.map

    def map_it(asked: str) -> Any:
        if asked != name:
            return plain(asked)
        made.append(Watched(plain(asked), frozenset(bad)))
        return made[-1]

    monkeypatch.setattr(disk, "map", map_it)
    return made


def test_every_place_is_read_before_it_is_used() -> None:
    mapping = mapped(10 * MIB)
    ready = ReadAhead(mapping, "file")
    at = 0
    for size, skipped in [(48, 10), (48, 5000), (70_000, 0), (48, 100_000), (3 * MIB, 7), (10, 70_000), (48, 0)] * 2:
        ready(at, at + size)
        assert mapping.was_read(at, at + 1)
        assert mapping.was_read(at + size - 1, at + size)
        at += size + skipped
    ready(48, 100)  # back again
    ready(10 * MIB - 10, 11 * MIB)
    assert mapping.was_read(10 * MIB - 10, 10 * MIB)
    ready(10 * MIB, 10 * MIB + 48)


def test_a_million_small_records_take_few_calls() -> None:
    mapping = mapped(20 * MIB)
    ready = ReadAhead(mapping, "file")
    for at in range(0, 20 * MIB - 100, 100):
        ready(at, at + 48)
    assert len(mapping.ranges) < 20 * 4 + 16
    assert mapping.nbytes <= 20 * MIB, "nothing twice"
    assert max(stop - start for start, stop in mapping.ranges) <= MOST_AHEAD_BYTES


def test_data_behind_a_header_is_not_read() -> None:
    mapping = mapped(20 * MIB)
    ready = ReadAhead(mapping, "file")
    for at in range(0, 20 * MIB, MIB):
        ready(at, at + 48)
        ready(at + 48, at + 100)
    assert mapping.nbytes == 20 * PAGE_BYTES


def test_a_bad_place_that_nobody_needs_is_no_error() -> None:
    mapping = mapped(MIB, 3000, 200_000)
    ready = ReadAhead(mapping, "file")
    ready(0, 48)
    ready(48, 3000)
    assert mapping.was_read(0, 3000)
    ready(3001, 4000)
    assert mapping.was_read(3001, 4000)


@pytest.mark.parametrize("bad", [300, 5000, 700_000])
def test_a_bad_place_is_named(bad: int) -> None:
    ready = ReadAhead(mapped(MIB, bad), "file")
    ready(10, 20)
    for _ in range(2):
        with pytest.raises(UnreadableError, match="Input/output error") as caught:
            ready(100, MIB)
        assert (caught.value.name, caught.value.errno) == ("file", errno.EIO)
        assert bad - PAGE_BYTES < caught.value.position <= bad


# A start.


RECORDS = Log(1, 1, [b"a" * 100, (b"b" * 100, b"d" * READ_AT_START_BYTES), b"c" * 100, b"e" * 5000])


@pytest.mark.parametrize(
    "bad",
    [
        0,
        SEGMENT_BYTES - 1,
        *[RECORDS.start_of(number) + offset for number in (1, 2, 3) for offset in (0, RECORD_BYTES, RECORD_BYTES + 50)],
        RECORDS.start_of(4) + 5000,
    ],
)
@pytest.mark.parametrize("prepared", [False, True])
def test_a_log_that_can_not_be_read(bad: int, prepared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = disk_with(attrs.evolve(RECORDS, prepared=prepared))
    watch(disk, monkeypatch, LOG, bad)
    refused(disk, LOG, "can't be read at byte", "Input/output error", "pion check memory")


def test_a_place_behind_a_damaged_record_that_can_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whether valid records follow."""
    disk = disk_with(RECORDS)
    disk.damage(LOG, RECORDS.start_of(1))
    watch(disk, monkeypatch, LOG, RECORDS.start_of(3))
    refused(disk, LOG, "can't be read at byte")


@attrs.define(eq=False)
class Large(Durable):
    """Leaves its data where it is."""

    family: str = "notes"
    data: list[Region | None] = attrs.field(factory=list)

    def replay(self, meta: bytes, data: Region | None) -> None:
        self.data.append(data)


def test_large_data_is_not_read_at_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = disk_with(RECORDS)
    bad = RECORDS.start_of(3) - 10
    made = watch(disk, monkeypatch, LOG, bad)
    family = Large()
    load(disk, 0, [family])
    assert [region is not None for region in family.data] == [False, True, False, False]
    assert family.data[1] is not None
    assert not family.data[1].verify()
    (mapping,) = made
    assert mapping.nbytes < READ_AT_START_BYTES
    assert mapping.was_read(RECORDS.start_of(4), len(RECORDS.content))


@pytest.mark.parametrize("where", ["length", "header", "table", "end"])
def test_a_snapshot_that_can_not_be_read(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = disk_with(covers=3, notes=[b"note" * 100])
    nbytes = len(disk.contents(SNAPSHOT))
    bad = {"length": 0, "header": 100, "table": nbytes - 200, "end": nbytes - 1}[where]
    watch(disk, monkeypatch, SNAPSHOT, bad)
    refused(disk, SNAPSHOT, "can't be read at byte", "Input/output error")


SHORTENED = """
import os, sys
from pathlib import Path
from pion.storage.disk import RealDisk
from pion.storage.recovery import DamagedFileError, load
from tests.storage.log_support import Notes

directory, name, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
class Shortening(RealDisk):
    def map(self, asked):
        mapping = super().map(asked)
        if asked == name:
            os.truncate(directory / name, size)
        return mapping
try:
    load(Shortening(directory), 0, [Notes()])
except DamagedFileError as error:
    print(error)
"""


@pytest.mark.parametrize(("name", "size"), [(LOG, 0), (LOG, 4096), (SNAPSHOT, 0), (SNAPSHOT, 4096)])
def test_a_file_that_becomes_shorter_does_not_end_the_process(name: str, size: int, tmp_path: Path) -> None:
    disk = disk_with(Log(1, 1, [b"note" * 500] * 20), covers=1, notes=[b"note" * 5000])
    for each in disk.names():
        (tmp_path / each).write_bytes(disk.contents(each))
    load(RealDisk(tmp_path), 0, [Notes()])
    done = subprocess.run(
        [sys.executable, "-c", SHORTENED, str(tmp_path), name, str(size)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert f"{name}: it can't be read at byte" in done.stdout
