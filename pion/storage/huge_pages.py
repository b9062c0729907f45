"""Huge pages, once there are so many prefixes that finding one is mostly a matter of address translation.

A look-up among a million prefixes reaches into some four places of a heap of a gigabyte. With pages of 4 KiB each of
them costs a walk through page tables that are themselves not in the processor's cache, most of all in a virtual
machine. So when the number of units has grown, the memory that is full is collapsed into pages of 2 MiB, by `madvise`
with `MADV_COLLAPSE` (madvise(2), Linux 6.1 and later). Only frames that are nearly all resident are, so at most a
twentieth is added; a system where huge pages are set to "never" is left alone.

What is freed of such a page leaves the process at once, but goes back to the system only when that needs memory. So
none are made before there are many units, and none of the C library's own heap: small rows lie there, which come and go
and whose pages `reclaim` gives back. Larger blocks, payload among them, are mapped and unmapped whole.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import attrs

from pion.config import KIB, MIB

FRAME_BYTES: Final = 2 * MIB
"""A huge page, on x86-64 and on arm64 with pages of 4 KiB; others are left alone."""

PAGE_BYTES: Final = 4 * KIB

UNITS_BEFORE: Final = 50_000
"""Units that are worth it: their heap is ten times what a core's translation buffer covers."""

GROWTH: Final = 1.125
"""How many times more units than at the last pass make the next one worth it: over all passes a page is looked at nine
times on average, and one page in nine is not collapsed yet."""

FULL: Final = 0.95
"""Share of a frame's pages that must be resident."""

FRAMES_AT_ONCE: Final = 16
"""Frames of one stay in a thread: 10 to 100 milliseconds."""

MADV_COLLAPSE: Final = 25
"""linux/mman.h."""

SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MAPS: Final = Path("/proc/self/maps")


@attrs.frozen
class System:
    """The two calls. Both release the interpreter lock."""

    resident: Callable[[int], int]
    """address -> how many pages of that frame are resident."""
    collapse: Callable[[int], bool]
    """address -> whether that frame is a huge page now."""


def find_system(platform: str = sys.platform, setting: Path = SETTING) -> System | None:
    """The system's calls; None where it has none, or where its administrator wants no huge pages."""
    if not platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        if "[never]" in setting.read_text(encoding="ascii") or resource.getpagesize() != PAGE_BYTES:
            return None
    except OSError:
        return None
    library = ctypes.CDLL(None)
    mincore, madvise = library.mincore, library.madvise
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    pages = ctypes.create_string_buffer(FRAME_BYTES // PAGE_BYTES)

    def resident(address: int) -> int:
        # The lowest bit is the answer, the others are reserved. Memory unmapped meanwhile has none.
        return 0 if mincore(address, FRAME_BYTES, pages) else sum(byte & 1 for byte in pages.raw)

    def collapse(address: int) -> bool:
        return int(madvise(address, FRAME_BYTES, MADV_COLLAPSE)) == 0

    return System(resident, collapse)


def frames(maps: bytes) -> Iterator[int]:
    """The addresses of whole frames in private anonymous memory without a name, from /proc/self/maps (proc(5))."""
    for line in maps.split(b"\n")[:-1]:  # a path may hold what else ends a line of text
        place, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if permissions != b"rw-p" or inode != b"0" or name:
            continue
        start, end = (int(address, 16) for address in place.split(b"-"))
        yield from range(-(-start // FRAME_BYTES) * FRAME_BYTES, end - FRAME_BYTES + 1, FRAME_BYTES)


@attrs.define(eq=False)
class HugePages:
    """Decides when to collapse, and does it. Not thread-safe: one call at a time."""

    _system: System | None
    _units: int = 0
    """Units at the last pass."""
    collapsed: int = 0
    """Frames that became huge pages, or were some already, in the last pass."""

    def due(self, units: int) -> bool:
        """Whether so many units are worth a pass now; then it must follow."""
        if units < self._units / 2:
            self._units = 0  # what grows from here on is other memory
        if self._system is None or units < max(UNITS_BEFORE, self._units * GROWTH):
            return False
        self._units = units
        return True

    def steps(self, maps: Path = MAPS) -> Iterator[None]:
        """One pass, in steps that each block for 10 to 100 milliseconds: run each `next` in a thread."""
        self.collapsed = tried = 0
        try:
            text = maps.read_bytes()
        except OSError:  # no /proc here, or no descriptor left
            return
        enough = int(FULL * (FRAME_BYTES // PAGE_BYTES))
        for number, address in enumerate(frames(text), 1):
            if self._system is None:
                return
            if self._system.resident(address) >= enough:
                tried += 1
                self.collapsed += self._system.collapse(address)
            if not number % FRAMES_AT_ONCE:
                yield
        if tried >= FRAMES_AT_ONCE and not self.collapsed:
            # A kernel that doesn't know it, or no huge page to be had. A few failures say nothing about other frames.
            self._system = None
