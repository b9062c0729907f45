"""A file that is mapped for reading, and what the system says of it: which pages it has, and when it was written to.

Rows in files are looked at in two ways. Through `read_into` whatever state the disk is in: it waits, and an error is an
error. Through the mapping once their pages are in the system's cache: nothing is copied, nothing waits.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from typing import Final

import numpy as np

MADV_POPULATE_READ: Final = 22
"""Linux's advice, since 5.14: map the pages now, and report what would end in SIGBUS as an error (madvise(2))."""

_RESIDENT: Final = 1


class FileMapping:
    """A whole file, from a descriptor that stays open for as long as this lives. See `pion.storage.disk.Mapping`."""

    __slots__ = ("__weakref__", "_address", "_mapped", "_written", "descriptor", "generation", "view")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.generation = 0
        """Grows when `look` finds that somebody has written to the file: what was verified before may be different."""
        self._written = _last_write(descriptor)
        _, size = self._written
        self._mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) if size else None
        self.view = memoryview(b"" if self._mapped is None else self._mapped)
        self._address = int(np.frombuffer(self.view, np.uint8).ctypes.data) if size else 0

    def look(self) -> None:
        """Ask the system when the file was written to last, which takes a microsecond."""
        written = _last_write(self.descriptor)
        if written != self._written:
            self.generation += 1
            self._written = written

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See `Mapping`."""
        while buffer:
            received = os.preadv(self.descriptor, [buffer], start)
            if not received:
                raise OSError(f"the file ends at byte {start}")
            start, buffer = start + received, buffer[received:]

    def is_resident(self, start: int, nbytes: int) -> bool:
        """Whether these bytes can be read through `view` at once: no wait for a disk, no page that can't be read.

        It takes some microseconds a MiB. What it says may be out of date a moment later, and False may also mean that
        the system can't tell; Linux says True of files that belong to somebody else.
        """
        if _mincore is None or self._mapped is None or not 0 < nbytes <= len(self.view) - start:
            return False
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        length = start + nbytes - first
        pages = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
        if _mincore(self._address + first, length, pages.ctypes.data) or not (pages & _RESIDENT).all():
            return False
        try:
            self._mapped.madvise(MADV_POPULATE_READ, first, length)
        except OSError:  # an older system, or a page that can't be read: `read_into` finds out
            return False
        return True


def _last_write(descriptor: int) -> tuple[int, int]:
    """The time of it in nanoseconds, and the bytes that the file has since."""
    found = os.fstat(descriptor)
    return found.st_mtime_ns, found.st_size


def find_mincore(platform: str = sys.platform) -> Callable[[int, int, int], int] | None:
    """The system's call, where what it says can be relied on: without the advice above a page may still be bad."""
    function = getattr(ctypes.CDLL(None), "mincore", None) if platform.startswith("linux") else None
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return function


_mincore: Final = find_mincore()
