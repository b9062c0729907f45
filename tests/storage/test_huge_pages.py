"""Collapsing a full heap into huge pages: when, which memory, and that the bytes stay what they are."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import pytest
import trio

from pion.commands import vstore_reaper
from pion.commands.vstore_reaper import Reaper
from pion.storage import huge_pages
from pion.storage.huge_pages import (
    FRAME_BYTES,
    GROWTH,
    PAGE_BYTES,
    UNITS_BEFORE,
    HugePages,
    System,
    find_system,
    frames,
)
from pion.storage.unit import Looked, Unit
from tests.commands.kv_support import make_kv, now

FULL_FRAME = FRAME_BYTES // PAGE_BYTES
MAPS = b"""\
00400000-00c00000 rw-p 00000000 00:00 0 [heap]
01000000-01800000 rw-p 00000000 00:00 0\x20
7f0000000000-7f0000401000 rw-p 00000000 00:00 0
7f1000100000-7f1000500000 rw-p 00000000 00:00 0\x20
7f2000000000-7f2000400000 r--p 00000000 00:00 0
7f3000000000-7f3000400000 rw-p 00000000 fe:01 77 /usr/lib/some library.so
7f3100000000-7f3100400000 r--p 00000000 fe:01 78 /data/\xff\x0b\r\xe2\x80\xa8x
7f4000000000-7f4000400000 rw-s 00000000 00:01 9 /dev/zero (deleted)
7ffc00000000-7ffc00400000 rw-p 00000000 00:00 0 [stack]
"""


class Faked:
    """Two system calls that note what they were asked."""

    def __init__(self, resident: Callable[[int], int] = lambda _: FULL_FRAME, works: bool = True) -> None:
        self.collapsed: list[int] = []
        self.asked = 0
        self._resident = resident
        self._works = works

    def resident(self, address: int) -> int:
        self.asked += 1
        return self._resident(address)

    def collapse(self, address: int) -> bool:
        self.collapsed.append(address)
        return self._works

    @property
    def system(self) -> System:
        return System(self.resident, self.collapse)


def run(pages: HugePages, tmp_path, maps: bytes = MAPS) -> int:
    """Run one pass; how often it gave the loop a chance."""
    path = tmp_path / "maps"
    path.write_bytes(maps)
    return sum(1 for _ in pages.steps(path))


def test_only_whole_frames_of_private_anonymous_memory_without_a_name() -> None:
    assert list(frames(MAPS)) == [
        *range(0x1000000, 0x1800000, FRAME_BYTES),
        0x7F0000000000,
        0x7F0000200000,
        0x7F1000200000,
    ]
    assert list(frames(b"")) == []


def test_it_is_due_when_the_units_have_grown() -> None:
    pages = HugePages(Faked().system)
    assert not pages.due(UNITS_BEFORE - 1)
    assert pages.due(UNITS_BEFORE)
    assert not pages.due(int(UNITS_BEFORE * GROWTH) - 1)
    assert pages.due(int(UNITS_BEFORE * GROWTH) + 1)
    assert not pages.due(UNITS_BEFORE)
    assert not HugePages(None).due(10**9)


def test_after_most_have_gone_it_is_due_again() -> None:
    pages = HugePages(Faked().system)
    assert pages.due(1_000_000)
    assert not pages.due(500_000)
    assert not pages.due(UNITS_BEFORE - 1)
    assert pages.due(UNITS_BEFORE)


def test_only_full_frames_are_collapsed(tmp_path) -> None:
    faked = Faked(lambda address: FULL_FRAME if address < 0x7F0000000000 else FULL_FRAME * 9 // 10)
    pages = HugePages(faked.system)
    run(pages, tmp_path)
    assert faked.collapsed == list(range(0x1000000, 0x1800000, FRAME_BYTES))
    assert pages.collapsed == 4
    assert faked.asked == 7


def test_a_pass_comes_in_steps(tmp_path) -> None:
    pages = HugePages(Faked().system)
    large = b"7f0000000000-%x rw-p 00000000 00:00 0 \n" % (0x7F0000000000 + 100 * FRAME_BYTES)
    assert run(pages, tmp_path, large) == 100 // huge_pages.FRAMES_AT_ONCE
    assert pages.collapsed == 100


def test_a_pass_in_vain_is_the_last(tmp_path) -> None:
    faked = Faked(works=False)
    pages = HugePages(faked.system)
    run(pages, tmp_path)
    # A few failures say nothing about others.
    assert len(faked.collapsed) == 7
    assert pages.due(UNITS_BEFORE)
    run(pages, tmp_path, MAPS * 3)
    assert pages.collapsed == 0
    assert not pages.due(10**9)


def test_where_the_system_does_not_say_nothing_is_done(tmp_path) -> None:
    pages = HugePages(Faked().system)
    assert list(pages.steps(tmp_path / "nothing")) == []
    assert pages.collapsed == 0


def test_a_pass_that_found_nothing_full_is_not_the_last(tmp_path) -> None:
    pages = HugePages(Faked(lambda _: 0).system)
    run(pages, tmp_path)
    assert pages.due(10**9)


@pytest.mark.parametrize("setting", ["always madvise [never]\n", None])
def test_a_system_that_wants_none_is_left_alone(tmp_path, setting: str | None) -> None:
    path = tmp_path / "enabled"
    if setting is not None:
        path.write_text(setting)
    assert find_system("linux", path) is None


def test_other_systems_and_page_sizes_are_left_alone(tmp_path, monkeypatch) -> None:
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    assert find_system("linux", path) is not None
    assert find_system("darwin", path) is None
    monkeypatch.setattr(huge_pages.resource, "getpagesize", lambda: 16_384)
    assert find_system("linux", path) is None


def test_real_memory_keeps_its_bytes_and_nothing_is_added(tmp_path) -> None:
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    system = find_system("linux", path)
    assert system is not None
    with mmap.mmap(-1, 5 * FRAME_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        first = -(-start // FRAME_BYTES) * FRAME_BYTES
        written = bytes(range(256)) * (2 * FRAME_BYTES // 256)
        memory[first - start : first - start + len(written)] = written
        assert [system.resident(first + number * FRAME_BYTES) for number in range(3)] == [FULL_FRAME, FULL_FRAME, 0]
        pages = HugePages(system)
        # The third frame is not resident, so it is not filled with zeros either.
        run(pages, tmp_path, b"%x-%x rw-p 00000000 00:00 0 \n" % (first, first + 3 * FRAME_BYTES))
        assert pages.collapsed == 2 * kernel_collapses()
        assert memory[first - start : first - start + len(written)] == written
        assert system.resident(first + 2 * FRAME_BYTES) == 0
    assert system.resident(first) == 0


def kernel_collapses() -> bool:
    """Whether this kernel can, asked in another way."""
    with mmap.mmap(-1, 4 * FRAME_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = b"x" * len(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        try:
            memory.madvise(huge_pages.MADV_COLLAPSE, -start % FRAME_BYTES, FRAME_BYTES)
        except OSError:
            return False
        return True


def test_what_lookup_reads_of_a_unit_lies_in_one_line_of_the_cache() -> None:
    """Blocks of the allocator begin 48 bytes into a line; the collector's head and the object's fill the rest of it."""
    assert (16 + Unit.__basicsize__) % 64 == 0
    # An object's head is the reference count and the type; the slots of the base follow.
    assert 16 + 8 * len(Looked.__slots__) == Looked.__basicsize__ <= 64


async def test_the_reaper_collapses_in_a_thread_when_many_units_are_there(autojump_clock, monkeypatch) -> None:
    collapsed = trio.Event()

    def collapse(address: int) -> bool:
        # Raises where no thread was made for it.
        trio.from_thread.run_sync(collapsed.set)
        return True

    monkeypatch.setattr(vstore_reaper, "find_system", lambda: System(lambda _: FULL_FRAME, collapse))
    monkeypatch.setattr(huge_pages, "UNITS_BEFORE", 3)
    kv = make_kv()
    async with trio.open_nursery() as nursery:
        await nursery.start(Reaper(kv.services).run)
        for number in range(2):
            now(kv.call("V.CREATE", f"s{number}", 1))
        await trio.sleep(1)
        assert not collapsed.is_set()
        now(kv.call("V.CREATE", "s2", 1))
        await collapsed.wait()
        nursery.cancel_scope.cancel()
