"""Reading places of a mapped file before they are looked at.

A page that can't be read, or that a file no longer has, ends the process when it is touched through the mapping. A call
that reads it first reports the error instead, and puts the page into the system's cache.
"""

from __future__ import annotations

from typing import Final

from pion.config import KIB, MIB
from pion.storage.disk import Mapping
from pion.storage.region import PIECE_BYTES

PAGE_BYTES: Final = 4 * KIB
"""What is read around a place that doesn't continue another; also how exactly an error is located."""

MOST_AHEAD_BYTES: Final = MIB
"""Read at once where one place follows another: a call for each of a million small records would take seconds."""

SKIP_BYTES: Final = 64 * KIB
"""Who skips so much will skip more: it is data that a start leaves unread, so nothing is read ahead there."""


class UnreadableError(OSError):
    """A part of a file can't be read."""

    def __init__(self, name: str, position: int, error: OSError) -> None:
        self.name = name
        self.position = position
        self.reason = error.strerror or str(error)
        super().__init__(error.errno, f"{name}: it can't be read at byte {position}: {self.reason}")


class ReadAhead:
    """Call it with a range of the file before looking at that through the mapping."""

    __slots__ = ("_ahead", "_last", "_mapping", "_name", "_size", "_start", "_stop")

    def __init__(self, mapping: Mapping, name: str) -> None:
        self._mapping = mapping
        self._name = name
        self._size = len(mapping.view)
        self._start = self._stop = 0
        self._last = 0
        self._ahead = PAGE_BYTES

    def __call__(self, start: int, stop: int) -> None:
        """Have bytes `start` to `stop`, as far as the file has them, read. Blocks. Raises UnreadableError."""
        skipped, self._last = start - self._last, stop
        if not 0 <= skipped < SKIP_BYTES:
            self._ahead = PAGE_BYTES
        if start >= self._start and stop <= self._stop:
            return
        begin = self._stop if self._start <= start <= self._stop else start
        end = min(stop, self._size)
        if begin >= end:
            return
        # Windows double while nothing large is skipped, so no more is read in vain than was of use.
        window = min(max(end, begin + self._ahead), self._size)
        self._ahead = min(2 * self._ahead, MOST_AHEAD_BYTES)
        try:
            self._read(begin, window, PIECE_BYTES)
        except OSError:
            # What is needed may be readable all the same; else the error is located.
            self._ahead, window = PAGE_BYTES, end
            self._read_exactly(begin, end)
        self._start, self._stop = start, window

    def _read(self, start: int, stop: int, piece: int) -> None:
        scratch = memoryview(bytearray(min(piece, stop - start)))
        for at in range(start, stop, piece):
            self._mapping.read_into(at, scratch[: min(piece, stop - at)])

    def _read_exactly(self, start: int, stop: int) -> None:
        for piece in range(start, stop, PIECE_BYTES):
            piece_stop = min(piece + PIECE_BYTES, stop)
            try:
                self._read(piece, piece_stop, PIECE_BYTES)
            except OSError:
                at = piece
                while at < piece_stop:
                    page_stop = min(at - at % PAGE_BYTES + PAGE_BYTES, piece_stop)
                    try:
                        self._read(at, page_stop, PAGE_BYTES)
                    except OSError as error:
                        raise UnreadableError(self._name, at, error) from error
                    at = page_stop
