"""What is known of a mapped file's pages, and comparing rows in steps that wait for no disk."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pion.storage import file_mapping, verifying
from pion.storage.disk import RealDisk
from pion.storage.file_mapping import MADV_POPULATE_READ, FileMapping, find_mincore
from pion.storage.ledger import Ledger
from pion.storage.region import MappedMemory, Region
from pion.storage.tiers.disk import RealTierDisk
from pion.storage.verifying import Comparing
from pion.testing import MemoryDisk

PAGE = mmap.PAGESIZE
DATA = os.urandom(20 * PAGE + 100)
LINUX = sys.platform.startswith("linux")


@pytest.fixture(params=[RealDisk, lambda path: RealTierDisk(str(path))], ids=["data", "tier"])
def mapping(request: pytest.FixtureRequest, tmp_path: Path) -> FileMapping:
    (tmp_path / "file").write_bytes(DATA)
    found = request.param(tmp_path).map("file")
    assert isinstance(found, FileMapping)
    return found


class Pages:
    """Stands for the system's call: says of each page what the test wants."""

    def __init__(self, mapping: FileMapping, present: Callable[[int], bool], result: int = 0) -> None:
        self.base = mapping._address
        self.present = present
        self.result = result
        self.asked: list[range] = []

    def __call__(self, address: int, length: int, vector: int) -> int:
        first, count = (address - self.base) // PAGE, -(-length // PAGE)
        assert (address - self.base) % PAGE == 0
        self.asked.append(range(first, first + count))
        flags = (ctypes.c_uint8 * count).from_address(vector)
        for index in range(count):
            flags[index] = 0xFE | self.present(first + index)  # the other bits mean nothing
        return self.result


def test_what_was_just_written_is_there_and_what_nobody_has_read_is_not(tmp_path: Path) -> None:
    """On a system that tells; elsewhere the answer is always no."""
    with (tmp_path / "file").open("wb") as file:
        file.truncate(4096 * PAGE)
        file.write(DATA)
    mapping = RealDisk(tmp_path).map("file")
    assert isinstance(mapping, FileMapping)
    assert mapping.is_resident(0, len(DATA)) == LINUX
    assert mapping.is_resident(PAGE + 3, 5) == LINUX
    assert not mapping.is_resident(0, 4096 * PAGE)
    assert not mapping.is_resident(2048 * PAGE, 1)


@pytest.mark.parametrize("missing", range(21))
def test_each_page_counts_and_only_those_that_are_asked_for(
    mapping: FileMapping, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    pages = Pages(mapping, lambda page: page != missing)
    monkeypatch.setattr(file_mapping, "_mincore", pages)
    monkeypatch.setattr(file_mapping, "MADV_POPULATE_READ", mmap.MADV_NORMAL)
    for start, stop in ((0, len(DATA)), (0, 1), (PAGE - 1, PAGE + 1), (PAGE, 2 * PAGE), (7 * PAGE + 5, len(DATA))):
        touched = range(start // PAGE, (stop - 1) // PAGE + 1)
        assert mapping.is_resident(start, stop - start) == (missing not in touched)
        assert pages.asked.pop() == touched


def test_no_is_the_answer_where_the_system_can_not_tell(
    mapping: FileMapping, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert find_mincore("darwin") is None
    monkeypatch.setattr(file_mapping, "_mincore", Pages(mapping, lambda page: True, result=-1))
    assert not mapping.is_resident(0, 10)
    monkeypatch.setattr(file_mapping, "_mincore", None)
    assert not mapping.is_resident(0, 10)
    (tmp_path / "empty").write_bytes(b"")
    monkeypatch.undo()
    empty = RealDisk(tmp_path).map("empty")
    assert isinstance(empty, FileMapping)
    assert not empty.is_resident(0, 0)
    assert bytes(empty.view) == b""


def test_pages_that_can_not_be_read_are_not_looked_at(mapping: FileMapping, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault class 42: through the mapping a bad sector would end the process. An older system has no such advice."""
    assert MADV_POPULATE_READ == 22
    monkeypatch.setattr(file_mapping, "_mincore", Pages(mapping, lambda page: True))
    monkeypatch.setattr(file_mapping, "MADV_POPULATE_READ", 0x7FFF)  # refused, as by a system that doesn't know it
    assert not mapping.is_resident(0, len(DATA))


def test_a_file_that_became_shorter_is_damage_not_the_end_of_the_process(mapping: FileMapping, tmp_path: Path) -> None:
    found = Region(mapping, 0, len(DATA), xxhash.xxh3_64_intdigest(DATA, 1), 1)
    assert found.verify()
    os.truncate(tmp_path / "file", 3 * PAGE)
    assert not found.is_resident(0, len(DATA))
    assert not found.verify()


def test_a_write_is_noticed_and_makes_what_was_verified_doubtful(mapping: FileMapping, tmp_path: Path) -> None:
    memory = MappedMemory(Region(mapping, 0, len(DATA), xxhash.xxh3_64_intdigest(DATA, 1), 1), Ledger())
    assert memory.verify()
    mapping.look()
    assert memory.verified
    with (tmp_path / "file").open("r+b") as file:
        file.write(DATA[:1])
    os.utime(tmp_path / "file", ns=(0, 12345))  # whatever the clock's resolution
    assert memory.verified  # nobody has looked
    mapping.look()
    assert not memory.verified
    assert memory.verify()
    mapping.look()
    assert memory.verified
    with (tmp_path / "file").open("r+b") as file:
        file.write(bytes([DATA[0] ^ 1]))
    os.utime(tmp_path / "file", ns=(0, 12346))
    assert not memory.verify()  # it looks by itself
    assert not memory.verified


def test_a_write_in_the_middle_of_comparing_is_not_forgotten(
    mapping: FileMapping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first part may have been compared before."""
    monkeypatch.setattr(FileMapping, "is_resident", lambda *args: True)
    monkeypatch.setattr(verifying, "COMPARE_STEP_BYTES", PAGE)
    memory = MappedMemory(Region(mapping, 0, len(DATA), xxhash.xxh3_64_intdigest(DATA, 1), 1), Ledger())
    comparing = Comparing([memory])
    assert not comparing.step()
    os.utime(tmp_path / "file", ns=(0, 12345))
    mapping.look()
    while not comparing.step():
        pass
    assert not comparing.damaged
    assert not memory.verified


SIZES = st.lists(
    st.tuples(st.integers(1, 60), st.booleans(), st.sampled_from(["here", "away", "verified"])), max_size=8
)


@given(SIZES, st.integers(1, 70))
def test_comparing_in_steps_says_what_comparing_at_once_says(
    sizes: list[tuple[int, bool, str]], step_bytes: int
) -> None:
    """Whatever is in the cache, and however much a step compares."""
    disk, ledger = MemoryDisk(), Ledger()
    disk.create("file").write([bytes(range(100))])
    mapping = disk.map("file")
    memories, away = [], set()
    for index, (nbytes, damaged, state) in enumerate(sizes):
        checksum = xxhash.xxh3_64_intdigest(mapping.view[index : index + nbytes], index)
        region = Region(mapping, index, nbytes, checksum ^ damaged, index)
        memory = MappedMemory(region, ledger)
        memory.verified = state == "verified"
        memories.append(memory)
        if state == "away":
            away.add(region)
    right = [
        memory for memory, (_, damaged, state) in zip(memories, sizes, strict=True) if damaged and state != "verified"
    ]
    asked: list[Region] = []

    def is_resident(region: Region, first: int, nbytes: int) -> bool:
        assert 0 < nbytes <= min(step_bytes, region.nbytes - first)
        asked.append(region)
        return region not in away

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Region, "is_resident", is_resident)
        patch.setattr(verifying, "COMPARE_STEP_BYTES", step_bytes)
        comparing = Comparing(memories)
        steps = 0
        over = False
        while not over and comparing.ready():
            before = list(comparing.left)
            over = comparing.step()
            steps += 1
            assert len(before) - len(comparing.left) <= 1
        if over:
            assert not away
            assert steps == max(
                1,
                sum(
                    1 if each.verified and state == "verified" else -(-size // step_bytes)
                    for each, (size, _, state) in zip(memories, sizes, strict=True)
                ),
            )
        else:
            assert comparing.left[0].region in away
            patch.setattr(Region, "is_resident", lambda *args: False)
            comparing.finish()
        assert comparing.damaged == right
        assert not comparing.left
        assert [memory.verified for memory in memories] == [memory not in right for memory in memories]


def test_many_small_rows_are_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step for each would take ten times as long."""
    monkeypatch.setattr(Region, "is_resident", lambda *args: True)
    disk, ledger = MemoryDisk(), Ledger()
    disk.create("file").write([DATA])
    mapping = disk.map("file")

    def rows(count: int) -> list[MappedMemory]:
        return [
            MappedMemory(Region(mapping, each, 100, xxhash.xxh3_64_intdigest(DATA[each : each + 100]), 0), ledger)
            for each in range(count)
        ]

    assert Comparing(rows(verifying.FEW)).ready()
    many = Comparing(rows(verifying.FEW + 1))
    assert not many.ready()
    many.finish()
    assert not many.damaged
    monkeypatch.setattr(verifying, "SMALL_BYTES", 100)
    assert Comparing(rows(verifying.FEW + 1)).ready()


def test_places_that_are_not_in_the_file_are_not_resident(mapping: FileMapping, tmp_path: Path) -> None:
    (tmp_path / "pages").write_bytes(bytes(4 * PAGE))
    pages = RealDisk(tmp_path).map("pages")
    assert isinstance(pages, FileMapping)
    for found, size in ((mapping, len(DATA)), (pages, 4 * PAGE)):
        for start, nbytes in ((size, 1), (size, 0), (0, 0), (0, size + 1), (100 * PAGE, 5), (size - 1, 2)):
            assert not found.is_resident(start, nbytes)
