"""The log's files as they are written: one that grows, and those before it. All methods block, and run in threads.

One thread writes at a time; another may flush meanwhile.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from pion.config import GIB, KIB, MIB
from pion.replies import Buffer
from pion.storage.disk import Disk, DiskFile
from pion.storage.durable import Durable
from pion.storage.records import SEGMENT_BYTES, SegmentHeader, encode

SEGMENT_LIMIT: Final = GIB
"""A segment this long is closed and the next begun, so that damage and repair concern one file of a handy size."""

WRITE_BYTES: Final = 4 * MIB
"""Bytes written at once. After each the medium is told to begin, so no flush finds more than a fraction of a second."""

JOINED_BYTES: Final = 256 * KIB
"""A batch of records up to this size is one buffer: copying it costs less than handing over many."""

Items = Sequence[tuple[Durable, Any] | None]
"""What to write, in order; None lets the next segment begin."""


@attrs.define
class Segment:
    """A segment on disk."""

    first: int
    """Number of its first record."""
    nbytes: int


@attrs.frozen
class Position:
    """Where a log goes on: the number of its next segment and of the next record, and what it belongs to."""

    number: int
    sequence: int
    lineage: bytes


@attrs.frozen
class _Made:
    """A segment that is on disk and has no records."""

    number: int
    salt: int
    file: DiskFile


@attrs.frozen
class _Earlier:
    """A segment of an earlier process, which may have died before it was flushed."""

    disk: Disk
    name: str

    def sync(self) -> None:
        """See `DiskFile`."""
        self.disk.sync(self.name)

    def close(self) -> None:
        """There is nothing to close."""


class SegmentWriter:
    """Appends records to the newest segment of one worker."""

    def __init__(
        self,
        disk: Disk,
        worker: int,
        position: Position,
        *,
        flush_each: bool,
        limit: int = SEGMENT_LIMIT,
        segments: Mapping[int, Segment] | None = None,
    ) -> None:
        self._disk = disk
        self._worker = worker
        self._lineage = position.lineage
        self._next_number = position.number
        self._flush_each = flush_each
        self._limit = limit
        self.segments: dict[int, Segment] = dict(segments or {})
        """All that are on disk, by number."""
        self.written_bytes = 0
        """Bytes of records since the start."""
        self.flushes = 0
        self._spare: _Made | None = None
        self._file: DiskFile | None = None
        self._current = Segment(0, 0)
        self._salt = 0
        self._hinted = 0
        self._unflushed: list[DiskFile | _Earlier] = [
            _Earlier(disk, segment_name(worker, number)) for number in sorted(self.segments)
        ]
        """Segments that ended and are not flushed yet."""
        self._switching = threading.Lock()
        """Held while the next segment takes over: a flush must see both or neither."""
        self._making = threading.Lock()
        """Held while a segment is made: the next one to write to must be the next by number."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments on disk."""
        return sum([segment.nbytes for segment in list(self.segments.values())])

    @property
    def prepared(self) -> bool:
        """Whether the next segment is ready."""
        return self._spare is not None

    @property
    def behind(self) -> bool:
        """Whether a segment that ended is not flushed yet."""
        return bool(self._unflushed)

    def begin(self, first: int) -> None:
        """Let a new segment begin with record `first`. Raises OSError, and then the old one goes on."""
        self._switch(self._make(first), first)

    def prepare(self) -> None:
        """Have the next segment ready, if it is not.

        Making a file durable can wait for all that the file system has not written yet, for half a second and more;
        with a segment at hand, the writer never waits for it. Raises OSError.
        """
        with self._making:
            if self._spare is None:
                self._spare = self._make(0)

    def _make(self, first: int) -> _Made:
        """A durable segment without records; `first` is 0 if its first record will tell."""
        number, salt = self._next_number, secrets.randbits(64)
        header = SegmentHeader(
            worker=self._worker,
            number=number,
            first=first,
            salt=salt,
            lineage=self._lineage,
            boot=self._disk.boot_id(),
        )
        name = segment_name(self._worker, number)
        self._next_number += 1  # also if it fails: a half-made file may have taken the name
        file = self._disk.create(name)
        try:
            file.write([header.to_bytes()])
            file.sync()
            self._disk.sync_directory(name)
        except OSError:
            file.close()
            with contextlib.suppress(OSError):  # one without records does no harm
                self._disk.unlink(name)
            raise
        return _Made(number, salt, file)

    def _switch(self, made: _Made, first: int) -> None:
        with self._switching:
            if self._file is not None:
                self._unflushed.append(self._file)
            self._file, self._salt, self._hinted = made.file, made.salt, 0
            self._current = self.segments[made.number] = Segment(first, SEGMENT_BYTES)

    def write(self, items: Items, sequence: int, durable: int) -> None:
        """Append records numbered from `sequence` on, which say that all up to `durable` are flushed.

        Raises OSError; then an unknown first part of them may be in the files. If the disk lets it, it is cut off
        again: a restart would find it in the system's cache, after a failed flush too, where nothing says that the
        medium does not have it. (One that is written while another thread's flush fails stays.)
        """
        number, nbytes = max(self.segments), self._current.nbytes
        try:
            self._write(items, sequence, durable)
        except Exception:  # of a family's `encode`, too
            self._cut(number, nbytes)
            raise

    def _write(self, items: Items, sequence: int, durable: int) -> None:
        buffers: list[Buffer] = []
        waiting = 0
        for item in items:
            if item is not None:
                owner, change = item
                parts, size = encode(owner.family, owner.encode(change), sequence, durable, self._salt)
                buffers += parts
                waiting += size
                sequence += 1
            if item is None or waiting >= WRITE_BYTES:
                self._put(buffers, waiting)
                buffers, waiting = [], 0
            if item is None:
                self._rotate(sequence)
        self._put(buffers, waiting)
        if self._flush_each:
            self._open_file().sync()
            self.flushes += 1
        if self._current.nbytes >= self._limit:
            self._rotate(sequence)

    def _cut(self, number: int, nbytes: int) -> None:
        with contextlib.suppress(OSError):  # the failure before it is what is told
            # The newest first: records behind a hole would be damage.
            for each in sorted((each for each in list(self.segments) if each >= number), reverse=True):
                kept = nbytes if each == number else SEGMENT_BYTES
                self._disk.truncate(segment_name(self._worker, each), kept)
                self.segments[each].nbytes = kept

    def flush(self) -> None:
        """Flush everything that was written before the call. Raises OSError."""
        with self._switching:
            old, file = self._unflushed, self._file
            self._unflushed = []
        try:
            for each in old:
                each.sync()
            if file is not None:
                file.sync()
        finally:
            for each in old:
                each.close()
        self.flushes += 1

    def unlink_unused(self) -> None:
        """Remove the segments without records, the one that is written excepted. Raises OSError."""
        unused = [
            number
            for number, segment in self.segments.items()
            if segment.nbytes <= SEGMENT_BYTES and segment is not self._current
        ]
        if unused:
            self.unlink(unused)

    def unlink(self, numbers: Sequence[int]) -> None:
        """Remove segments. Raises OSError."""
        names = {segment_name(self._worker, number) for number in numbers}
        with self._switching:
            self._unflushed = [
                each for each in self._unflushed if not (isinstance(each, _Earlier) and each.name in names)
            ]
        for number in numbers:
            with contextlib.suppress(FileNotFoundError):  # somebody was quicker
                self._disk.unlink(segment_name(self._worker, number))
            del self.segments[number]
        self._disk.sync_directory(segment_name(self._worker, 0))

    def close(self) -> None:
        """Close the files; nothing is flushed by it."""
        for file in (*self._unflushed, self._file):
            if file is not None:
                file.close()
        self._file, self._unflushed = None, []
        if self._spare is not None:
            made, self._spare = self._spare, None
            made.file.close()
            with contextlib.suppress(OSError):  # it has no records, and does no harm
                self._disk.unlink(segment_name(self._worker, made.number))

    def _open_file(self) -> DiskFile:
        assert self._file is not None  # noqa: S101  begin() made it
        return self._file

    def _put(self, buffers: Sequence[Buffer], nbytes: int) -> None:
        if nbytes <= JOINED_BYTES:
            self._put_piece([b"".join(buffers)], nbytes)
        elif nbytes <= WRITE_BYTES:
            self._put_piece(buffers, nbytes)
        else:
            for buffer in buffers:
                view = memoryview(buffer)
                for start in range(0, len(view), WRITE_BYTES):
                    piece = view[start : start + WRITE_BYTES]
                    self._put_piece([piece], len(piece))

    def _put_piece(self, buffers: Sequence[Buffer], nbytes: int) -> None:
        if not nbytes:
            return
        file, segment = self._open_file(), self._current
        file.write(buffers)
        segment.nbytes += nbytes
        self.written_bytes += nbytes
        if segment.nbytes - self._hinted >= WRITE_BYTES:
            file.start_writeback(self._hinted, segment.nbytes)
            self._hinted = segment.nbytes

    def _rotate(self, first: int) -> None:
        if self._current.nbytes == SEGMENT_BYTES:
            return  # nothing in it: the new one would be the same
        if self._flush_each:
            self._open_file().sync()
        with self._making:
            made, self._spare = self._spare or self._make(first), None
        self._switch(made, first)


def snapshot_name(worker: int) -> str:
    """The snapshot's file."""
    return f"pion.vstore.{worker}"


def segment_name(worker: int, number: int) -> str:
    """A segment's file: names in order are in the order of writing."""
    return f"pion.vstore.{worker}.log.{number:010}"


def segment_number(worker: int, name: str) -> int | None:
    """The number in a segment's name; None if it is none of this worker."""
    head = f"pion.vstore.{worker}.log."
    rest = name.removeprefix(head)
    if not (name.startswith(head) and rest.isascii() and rest.isdigit()) or rest != f"{int(rest):010}":
        return None
    return int(rest)
