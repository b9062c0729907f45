"""Writing a snapshot beside running commands: captured on the event loop piece by piece, written in a thread.

The state is that of one moment, see `Durable.capture`. The file is written under another name, flushed, renamed, and
the directory flushed; only then the log that it covers is removed. Whatever fails before leaves the old snapshot and
the log as they were.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import attrs
import trio

from pion.args import show
from pion.config import MIB
from pion.errors import CommandError, MisconfError
from pion.replies import Buffer
from pion.storage.disk import Disk, DiskFile, Mapping
from pion.storage.durable import Captured, Durable
from pion.storage.records import digest_parts
from pion.storage.region import Region
from pion.storage.segments import snapshot_name
from pion.storage.snapshot_format import (
    Entry,
    Identity,
    TableWriter,
    entry_seed,
    header,
    most_tensors,
    own_tensor_bytes,
    room_for_header,
    shared_tensor_bytes,
)
from pion.storage.wal import Log

logger = logging.getLogger("pion.snapshot")

CAPTURE_S: Final = 0.001
"""Longest time that capturing holds the event loop."""

CHUNK_BYTES: Final = 16 * MIB
"""Data handed to the writing thread at once; also how much is hinted to be written to the medium."""

MOVES_AT_ONCE: Final = 200
"""Layers moved to the new file before the event loop is given to others."""

TEMPORARY: Final = ".tmp"

ABANDON_DEADLINE_S: Final = 10.0
"""Longest wait for the removal of an unfinished file to begin."""

ATTEMPTS: Final = 10
"""A snapshot is begun anew when rows turn out to be damaged, after they were dropped."""


class DamagedRowsError(Exception):
    """Rows that were to be copied are not what was stored."""

    def __init__(self, captured: Sequence[Captured]) -> None:
        super().__init__("damaged rows")
        self.captured = captured


class _File:
    """The file being written. Methods block; they are called in a thread, one at a time."""

    def __init__(self, disk: Disk, name: str, payload_bytes: int, identity: Identity) -> None:
        self._disk = disk
        self._name = name
        self._identity = identity
        self._salt = identity.salt
        self._own_bytes = own_tensor_bytes(payload_bytes)
        self._shared_bytes = shared_tensor_bytes(payload_bytes)
        self._most = most_tensors(payload_bytes)
        self._room = room_for_header(self._most)
        self._table = TableWriter(identity)
        self._sizes: list[int] = []
        self._shared = 0
        """Bytes of the shared tensor that is being filled."""
        self._position = self._room
        self._hinted = self._room
        self.followed: list[tuple[Captured, Entry]] = []
        """Those that want to know where their data lies."""
        self.damaged: list[Captured] = []
        """Those that are not what was stored."""
        if disk.exists(name):
            disk.unlink(name)
        self._file: DiskFile = disk.create(name)
        try:
            self._file.write([bytes(self._room)])
        except OSError:
            self.abandon()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes written so far."""
        return self._position

    def add(self, chunk: Sequence[tuple[str, Captured]]) -> None:
        """Write what was captured, up to what is damaged. Raises OSError."""
        for family, captured in chunk:
            if not captured.verify():
                self.damaged.append(captured)
            if self.damaged:
                continue  # nothing will come of this file: the rest is only looked at, so that one more try is enough
            start, nbytes = self._position, sum(len(part) for part in captured.parts)
            seed = entry_seed(self._salt, family, captured.meta, start)
            # What is lost gets a wrong checksum: nobody must take what stands for it for what it was.
            checksum = digest_parts(captured.parts, seed) ^ captured.lost
            entry = Entry(family, captured.meta, start, nbytes, seed, checksum)
            self._table.add(entry)
            if nbytes:
                self._write(captured.parts, nbytes)
                if captured.follows:
                    self.followed.append((captured, entry))
                captured.parts = ()  # what the store drops meanwhile need not stay in memory
        if self._position - self._hinted >= CHUNK_BYTES:
            self._file.start_writeback(self._hinted, self._position)
            # At most two chunks are on their way: a backlog would make the log's flushes wait for it, too.
            self._file.wait_writeback(self._room, self._hinted)
            self._hinted = self._position

    def _write(self, parts: Sequence[Buffer], nbytes: int) -> None:
        # The header has room for so many tensors; if there are more, one holds all the rest.
        own = nbytes >= self._own_bytes and len(self._sizes) < self._most - 3
        if own:
            self._end_shared()
            self._sizes.append(nbytes)
        else:
            self._shared += nbytes
        self._file.write(parts)
        self._position += nbytes
        if self._shared >= self._shared_bytes:
            self._end_shared()

    def _end_shared(self, *, last: bool = False) -> None:
        if self._shared and (last or len(self._sizes) < self._most - 3):
            self._sizes.append(self._shared)
            self._shared = 0

    def finish(self) -> None:
        """Table and header, then flush. Raises OSError."""
        self._end_shared(last=True)
        head = header(self._room, self._sizes, self._table.nbytes, self._identity)
        self._file.write([self._table.finish(head)])
        self._file.overwrite(0, head)
        self._file.sync()
        self._file.close()

    def abandon(self) -> None:
        """Remove the file, if the disk lets us."""
        self._file.close()
        _remove(self._disk, self._name)


@attrs.frozen
class SnapshotStatistics:
    """Of one worker."""

    running: bool
    taken: int
    last_seconds: float
    last_bytes: int
    last_age_s: float
    """Since the last one ended; -1 if there was none."""
    last_error: str


class Snapshotter:
    """Takes snapshots of one worker, one at a time."""

    def __init__(self, disk: Disk, worker: int, lineage: bytes, log: Log, families: Sequence[Durable]) -> None:
        self._disk = disk
        self._worker = worker
        self._lineage = lineage
        self._log = log
        self._families = families
        self._lock = trio.Lock()
        self._limiter = trio.CapacityLimiter(1)
        self._taken = 0
        self._seconds = 0.0
        self._bytes = 0
        self._ended_s: float | None = None
        self._error = ""
        self.kept_bytes = 0
        """Of the snapshot that is there."""
        self._file: _File | None = None
        """What is being written."""
        self.payload_bytes: Callable[[], int] = lambda: 0
        """About how much data there is: sizes the header."""

    def statistics(self) -> SnapshotStatistics:
        """The counters now."""
        age_s = -1.0 if self._ended_s is None else time.monotonic() - self._ended_s
        return SnapshotStatistics(self._lock.locked(), self._taken, self._seconds, self._bytes, age_s, self._error)

    @property
    def disk_bytes(self) -> int:
        """What the snapshot takes on disk, and the one that is being written."""
        return self.kept_bytes + self.writing_bytes

    @property
    def writing_bytes(self) -> int:
        """Of the snapshot that is being written, so far."""
        return self._file.nbytes if self._file is not None else 0

    async def take(self, path: str | None = None) -> None:
        """Write a snapshot of now, also under the relative `path`, then remove the log it covers.

        Ends the refusal of changes after a failure. Raises MisconfError when the disk says no, CommandError for a bad
        path. Cancellation: the old snapshot and the log stay as they were, or the new one is complete.
        """
        if path is not None:
            check_path(path)
            await trio.to_thread.run_sync(self._check_folder, path, limiter=self._limiter)
        async with self._lock:
            began = time.monotonic()
            try:
                await self._take(path)
            except OSError as error:
                self._error = error.strerror or str(error)
                logger.error("snapshot in %s failed: %s", self._disk.where, self._error)
                raise MisconfError(f"no snapshot could be written: {self._error}") from error
            except CommandError:
                raise
            except Exception as error:  # a plugin's `capture`
                self._error = repr(error)
                logger.exception("snapshot in %s failed", self._disk.where)
                raise CommandError(f"no snapshot could be written: {error!r}") from error
            self._error = ""
            self._taken += 1
            self._ended_s = time.monotonic()
            self._seconds = self._ended_s - began

    def _check_folder(self, path: str) -> None:
        """Refuse what the system would refuse, before all is written. Blocks. Raises CommandError."""
        folder = path.rpartition("/")[0]
        try:
            there = not folder or self._disk.exists(folder)
        except OSError as error:
            raise CommandError(f"path {show(path.encode(), 200)}: {error.strerror}") from error
        if not there:
            raise CommandError(f"path {show(path.encode(), 200)}: No such file or directory")

    async def _take(self, path: str | None) -> None:
        for _ in range(ATTEMPTS):
            covers = await self._log.reopen() if self._log.broken else self._log.cut()
            try:
                file = await self._write(Identity(worker=self._worker, covers=covers, lineage=self._lineage))
            except DamagedRowsError as error:
                for captured in error.captured:
                    captured.damaged()
                continue
            # What it covers must be in the log, too: else its number would be given again, to another change.
            try:
                await self._log.wait_written(covers)
                mapping = await trio.to_thread.run_sync(self._publish, path, limiter=self._limiter)
            except BaseException:
                await self._abandon(file)
                raise
            self._bytes = self.kept_bytes = len(mapping.view)
            self._file = None
            self._log.accept()
            await self._move(file.followed, mapping)
            try:
                await self._log.remove_covered(covers)
            except OSError as error:
                logger.warning("%s: covered log can't be removed: %s", self._disk.where, error.strerror or error)
            return
        raise OSError("too many damaged rows")

    async def _write(self, identity: Identity) -> _File:
        # Everything up to the first checkpoint belongs to the moment that the snapshot shows.
        captures: list[tuple[str, Iterator[Captured]]] = []
        file: _File | None = None
        try:
            for each in self._families:
                captures.append((each.family, each.capture()))
            name, payload_bytes = snapshot_name(self._worker) + TEMPORARY, self.payload_bytes()
            file = await trio.to_thread.run_sync(
                partial(_File, self._disk, name, payload_bytes, identity), limiter=self._limiter
            )
            self._file = file
            for family, capture in captures:
                for chunk in _chunks(family, capture):
                    await trio.to_thread.run_sync(file.add, chunk, limiter=self._limiter)
            if file.damaged:
                raise DamagedRowsError(file.damaged)
            await trio.to_thread.run_sync(file.finish, limiter=self._limiter)
        except BaseException:
            if file is not None:
                await self._abandon(file)
            raise
        finally:
            for _, capture in captures:
                close: Callable[[], None] | None = getattr(capture, "close", None)
                if close is not None:
                    close()
        return file

    async def _abandon(self, file: _File) -> None:
        """Remove an unfinished file, which may be large. Cancellation: shielded, with a deadline."""
        self._file = None
        with trio.CancelScope(deadline=trio.current_time() + ABANDON_DEADLINE_S, shield=True):
            await trio.to_thread.run_sync(file.abandon, limiter=self._limiter)

    def _publish(self, path: str | None) -> Mapping:
        """Give the finished file its name, and `path` as a second one. Blocks. Raises OSError."""
        disk, name = self._disk, snapshot_name(self._worker)
        temporary = [name + TEMPORARY]
        try:
            if path is not None:
                other = f"{name}.copy{TEMPORARY}"  # a name of ours, which the next start would remove
                temporary.append(other)
                if disk.exists(other):
                    disk.unlink(other)
                disk.link(name + TEMPORARY, other)
                disk.rename(other, path)
                disk.sync_directory(path)
            disk.rename(name + TEMPORARY, name)
        except OSError:
            for each in temporary:
                _remove(disk, each)
            raise
        disk.sync_directory(name)
        return disk.map(name)

    async def _move(self, followed: Sequence[tuple[Captured, Entry]], mapping: Mapping) -> None:
        """Let what lay in older files lie in the new one, so that they can go."""
        for index, (captured, entry) in enumerate(followed):
            captured.moved(Region(mapping, entry.start, entry.nbytes, entry.checksum, entry.seed))
            if not index % MOVES_AT_ONCE:
                await trio.lowlevel.checkpoint()


def _remove(disk: Disk, name: str) -> None:
    """Remove a file that nobody needs, if the disk lets us."""
    try:
        if disk.exists(name):
            disk.unlink(name)
    except OSError as error:
        logger.warning("%s: can't be removed: %s", name, error)


def _chunks(family: str, capture: Iterator[Captured]) -> Iterator[list[tuple[str, Captured]]]:
    """What is captured, in pieces to write; each takes no longer than `CAPTURE_S`."""
    chunk: list[tuple[str, Captured]] = []
    nbytes, until = 0, time.monotonic() + CAPTURE_S
    for captured in capture:
        chunk.append((family, captured))
        nbytes += sum(len(part) for part in captured.parts)
        if nbytes >= CHUNK_BYTES or time.monotonic() > until:
            yield chunk
            chunk, nbytes, until = [], 0, time.monotonic() + CAPTURE_S
    if chunk:
        yield chunk


def check_path(path: str) -> None:
    """A snapshot's second name: relative, inside the data directory, none that the server uses.

    Raises CommandError.
    """
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts or "." in parts or "" in parts or "\0" in path:
        raise CommandError(f"path must be relative and inside the data directory, got {show(path.encode())}")
    folded = path.casefold()  # on some file systems these are the same names
    if folded.startswith(("pion.", "damaged-")):
        raise CommandError(
            f"path must not begin with 'pion.' or 'damaged-', the server's own names, got {show(path.encode())}"
        )
    if folded.endswith(TEMPORARY):
        raise CommandError(f"path must not end with {TEMPORARY}, got {show(path.encode())}")
