"""The write-ahead log: one writer, group commit, and what happens when the disk says no.

`append` takes an item of a family right after the change was made, on the event loop and without waiting. The writer
task takes what has gathered, encodes, hashes and writes it in a thread, and wakes everyone who waits for it. While it
is away the next batch gathers: that is the group commit.

A failed write or flush can't be repaired by trying again (the kernel may have dropped the pages), so it ends the log's
work: the items of that batch and of all behind it are undone and answered with -MISCONF, and so is every later write,
until a snapshot has put the whole state on a disk that works again.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final

import attrs
import trio

from pion.config import GIB, MIB
from pion.errors import MisconfError
from pion.replies import Buffer
from pion.storage.disk import Disk, DiskFile
from pion.storage.durable import Durable, Record
from pion.storage.records import SEGMENT_BYTES, SegmentHeader, encode

logger = logging.getLogger("pion.wal")

SEGMENT_LIMIT: Final = GIB
"""A segment this long is closed and the next begun, so that damage and repair concern one file of a handy size."""

BATCH_BYTES: Final = 32 * MIB
"""Most that one trip of the writer takes, beyond its first item: how long the first of it may wait for the last."""

WRITE_BYTES: Final = 8 * MIB
"""Bytes between two hints to start writing to the medium, so that no flush finds more than a fraction of a second."""

ITEM_BYTES: Final = 256
"""What one queued item costs beside its data."""

CLOSE_DEADLINE_S: Final = 10.0
"""Longest time that the end of a worker waits for what is still queued."""


class Sync(enum.Enum):
    """When the log is flushed to stable storage."""

    ALWAYS = "always"
    EVERYSEC = "everysec"
    NO = "no"


@attrs.frozen
class WalStatistics:
    """Of one worker's log, since the start."""

    size_bytes: int
    segments: int
    queued_bytes: int
    records: int
    written_bytes: int
    syncs: int
    sequence: int
    durable_sequence: int
    error: str
    """Why writes are refused; empty while they are not."""


class Batch:
    """Items that reach the disk together. Awaiting it waits until they did; raises MisconfError if they can't.

    Cancellation: the items are written all the same.
    """

    __slots__ = ("_done", "error", "items", "nbytes")

    def __init__(self) -> None:
        self._done = trio.Event()
        self.items: list[tuple[Durable, Any] | None] = []
        """None closes the segment."""
        self.nbytes = 0
        self.error = ""

    def finish(self, error: str = "") -> None:
        """Wake everyone who waits."""
        self.error = error
        self.items = []
        self._done.set()

    def __await__(self) -> Generator[Any, Any, None]:
        return self._wait().__await__()

    async def wait(self) -> None:
        """Until it is written, or can't be."""
        await self._done.wait()

    async def _wait(self) -> None:
        await self._done.wait()
        if self.error:
            raise refusal(self.error)


def refusal(error: str) -> MisconfError:
    """The error that clients get while the log can't be written."""
    return MisconfError(
        f"the log can't be written ({error}), so nothing can be changed; when the disk is well again: KV.PREFIX.SAVE"
    )


@attrs.frozen
class Position:
    """Where a log goes on: the number of its next segment and of the next record, and what it belongs to."""

    number: int
    sequence: int
    lineage: bytes


@attrs.define
class Segment:
    """A segment on disk."""

    first: int
    """Number of its first record."""
    nbytes: int


class Log:
    """One worker's log. `open` makes the first segment, `run` is the writer, `close` the end."""

    def __init__(
        self,
        disk: Disk,
        worker: int,
        position: Position,
        sync: Sync,
        *,
        queue_bytes: int,
        segments: Mapping[int, Segment] | None = None,
        segment_limit: int = SEGMENT_LIMIT,
    ) -> None:
        self._disk = disk
        self._worker = worker
        self._lineage = position.lineage
        self._sync = sync
        self._queue_bytes = queue_bytes
        self._segment_limit = segment_limit
        self.sequence = position.sequence - 1
        """Number of the record appended last."""
        self.error = ""
        """Why changes are refused; empty while they are not."""
        self.broken = True
        """Nothing is written: the log is not open, or has failed."""
        self.on_growth: Callable[[], None] = lambda: None
        """Called on the event loop when the log has grown."""
        self._written = self._durable = self.sequence
        self._next_number = position.number
        self._segments: dict[int, Segment] = dict(segments or {})
        self._current = Segment(0, 0)
        self._file: DiskFile | None = None
        self._salt = 0
        self._hinted = 0
        self._retired: list[DiskFile] = []
        """Closed segments that are not flushed yet."""
        self._switching = threading.Lock()
        """Held while the writer's thread goes to the next segment: a flush must see both or neither."""
        self._queue: deque[Batch] = deque()
        self._writing: Batch | None = None
        self._queued = 0
        self._wake = trio.Event()
        self._room = trio.lowlevel.ParkingLot()
        self._closing = False
        self._writer_limiter = trio.CapacityLimiter(1)
        self._flush_limiter = trio.CapacityLimiter(1)
        self._records = self._bytes = self._syncs = 0

    # On the event loop.

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments on disk."""
        return sum([segment.nbytes for segment in list(self._segments.values())])

    def statistics(self) -> WalStatistics:
        """The counters now."""
        return WalStatistics(
            size_bytes=self.size_bytes,
            segments=len(self._segments),
            queued_bytes=self._queued,
            records=self._records,
            written_bytes=self._bytes,
            syncs=self._syncs,
            sequence=self.sequence,
            durable_sequence=self._durable,
            error=self.error,
        )

    @property
    def crowded(self) -> bool:
        """Whether `room` would wait."""
        return self._queued > self._queue_bytes

    def check(self) -> None:
        """Raises MisconfError while changes are refused."""
        if self.error:
            raise refusal(self.error)

    def refuse(self, error: OSError) -> None:
        """The log could not even be opened: serve what is there, and accept no change."""
        self._fail_text(error.strerror or str(error))

    async def wait_written(self, sequence: int) -> None:
        """Until all records up to that number are written. Raises OSError if the log fails before.

        Cancellation: nothing happened.
        """
        while self._written < sequence:
            if self.broken:
                raise OSError(self.error)
            batch = self._queue[-1] if self._queue else self._writing
            if batch is not None:
                await batch.wait()

    async def room(self) -> None:
        """Until the queue has room: await it before a change, with no checkpoint between it and the change.

        Cancellation: nothing happened.
        """
        while self.crowded and not self.broken:
            await self._room.park()
        self._room.unpark()  # each wakes the next, so that they pass one by one

    def append(self, owner: Durable, item: Any, nbytes: int = 0) -> Batch | None:
        """Queue an item, with `nbytes` of data, after its change was made. Returns what to await before the reply.

        None while the log is broken: then only what needs no record may change.
        """
        if self.broken:
            return None
        batch = self._queue[-1] if self._queue else None
        if batch is None or batch.nbytes > BATCH_BYTES:
            batch = Batch()
            self._queue.append(batch)
            self._wake.set()
        batch.items.append((owner, item))
        cost = nbytes + ITEM_BYTES
        batch.nbytes += cost
        self._queued += cost
        self.sequence += 1
        return batch

    def cut(self) -> int:
        """Let a new segment begin behind what was appended so far; returns the last number before it."""
        if not self._queue:
            self._queue.append(Batch())
            self._wake.set()
        self._queue[-1].items.append(None)
        return self.sequence

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write batches until `close`.

        Cancellation: what is being written is finished; the rest stays queued for `close`.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._flush_regularly)
            task_status.started()
            while not self._closing:
                await self._wake.wait()
                self._wake = trio.Event()
                while self._queue:
                    await self._write_next()
            nursery.cancel_scope.cancel()

    async def close(self) -> None:
        """Write and flush what is queued, then close the files; call it when `run` has ended.

        Cancellation: shielded, with a deadline.
        """
        self._closing = True
        with trio.CancelScope(deadline=trio.current_time() + CLOSE_DEADLINE_S, shield=True):
            while self._queue and not self.broken:
                await self._write_next()
            if not self.broken:
                await self._flush()
        for file in [*self._retired, *([self._file] if self._file else [])]:
            file.close()
        self._file, self._retired, self.broken = None, [], True

    def stop(self) -> None:
        """Let `run` end once the queue is empty."""
        self._closing = True
        self._wake.set()

    async def _write_next(self) -> None:
        batch = self._writing = self._queue.popleft()  # what comes from now on gathers in the next one
        try:
            written = await trio.to_thread.run_sync(
                self._write, batch.items, self._written + 1, limiter=self._writer_limiter
            )
        except OSError as error:
            self._fail(error, batch)
            return
        if self.broken:  # a flush failed meanwhile
            self._lose([batch])
            return
        records = sum(item is not None for item in batch.items)
        self._written += records
        self._records += records
        self._bytes += written
        if self._sync is Sync.ALWAYS:
            self._durable = self._written
        self._taken(batch)
        batch.finish()
        self.on_growth()

    def _taken(self, batch: Batch) -> None:
        self._queued -= batch.nbytes
        self._room.unpark()

    def _fail_text(self, text: str) -> None:
        logger.error("log in %s failed: %s; changes are refused until KV.PREFIX.SAVE succeeds", self._disk.where, text)
        self.error, self.broken = text, True

    def _fail(self, error: OSError, batch: Batch | None = None) -> None:
        if self.broken:
            return
        self._fail_text(error.strerror or str(error))
        self.sequence = self._written
        lost = [batch] if batch is not None else []
        lost += self._queue
        self._queue.clear()
        self._lose(lost)
        self._room.unpark_all()

    def _lose(self, lost: Sequence[Batch]) -> None:
        """Undo what can't be written, and tell those who wait."""
        by_owner: dict[Durable, list[Any]] = {}
        for each in lost:
            for item in each.items:
                if item is not None:
                    by_owner.setdefault(item[0], []).append(item[1])
        for owner, items in by_owner.items():
            owner.undo(items)
        for each in lost:
            self._taken(each)
            each.finish(self.error)

    # Flushing.

    async def _flush_regularly(self) -> None:
        while True:
            await trio.sleep(1)
            if not self.broken and (self._retired or (self._sync is Sync.EVERYSEC and self._durable < self._written)):
                await self._flush()

    async def _flush(self) -> None:
        """Flush what is written by now. A failure ends the log's work."""
        with self._switching:
            written, retired, file = self._written, self._retired, self._file
            self._retired = []
        files = [*retired, *([file] if file is not None else [])]
        try:
            await trio.to_thread.run_sync(_sync_all, files, limiter=self._flush_limiter)
        except OSError as error:
            self._fail(error)
            return
        finally:
            for old in retired:
                old.close()
        self._syncs += 1
        self._durable = max(self._durable, written)

    # Opening, and going on after a failure.

    async def open(self) -> None:
        """Begin a segment, on a directory that was just read. Raises OSError.

        Cancellation: takes effect before or after.
        """
        await trio.to_thread.run_sync(self._begin, self.sequence + 1, limiter=self._writer_limiter)
        self.broken = False

    async def reopen(self) -> int:
        """After a failure: begin a segment behind what was written; changes stay refused. Returns the last number.

        Raises OSError. Cancellation: takes effect before or after.
        """
        if self._file is not None:
            # Behind a flush that may still be under way: closing the descriptor under it could hit another file.
            await trio.to_thread.run_sync(self._file.close, limiter=self._flush_limiter)
            self._file = None
        await self.open()
        self._written = self.sequence
        return self.sequence

    def accept(self) -> None:
        """The state is on disk: changes are accepted again. Raises OSError if the log has failed again."""
        if self.broken:
            raise OSError(self.error)
        self.error = ""

    async def remove_covered(self, sequence: int) -> None:
        """Remove the segments whose records a snapshot covers, all numbers up to `sequence`. Raises OSError.

        Cancellation: takes effect before or after.
        """
        numbers = sorted(self._segments)
        covered = [
            old for old, following in itertools.pairwise(numbers) if self._segments[following].first <= sequence + 1
        ]
        await trio.to_thread.run_sync(self._unlink, covered, limiter=self._flush_limiter)
        for old in covered:
            del self._segments[old]

    def _unlink(self, numbers: Sequence[int]) -> None:
        for old in numbers:
            self._disk.unlink(segment_name(self._worker, old))
        self._disk.sync_directory(segment_name(self._worker, 0))

    # In the writer's thread.

    def _begin(self, first: int) -> None:
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
        with self._switching:
            if self._file is not None:
                self._retired.append(self._file)
            self._file, self._salt, self._hinted = file, salt, 0
            self._current = self._segments[number] = Segment(first, SEGMENT_BYTES)

    def _write(self, items: Sequence[tuple[Durable, Any] | None], sequence: int) -> int:
        written = waiting = 0
        buffers: list[Buffer] = []
        for item in items:
            if item is None:
                self._put(buffers, waiting)
                written, waiting, buffers = written + waiting, 0, []
                self._rotate(sequence)
                continue
            owner, change = item
            record: Record = owner.encode(change)
            parts, size = encode(owner.family, record, sequence, self._durable, self._salt)
            buffers += parts
            waiting += size
            sequence += 1
            if waiting >= WRITE_BYTES:
                self._put(buffers, waiting)
                written, waiting, buffers = written + waiting, 0, []
        self._put(buffers, waiting)
        if self._sync is Sync.ALWAYS:
            self._open_file().sync()
            self._syncs += 1
        if self._current.nbytes >= self._segment_limit:
            self._rotate(sequence)
        return written + waiting

    def _open_file(self) -> DiskFile:
        assert self._file is not None  # noqa: S101  open() made it
        return self._file

    def _put(self, buffers: Sequence[Buffer], nbytes: int) -> None:
        if not nbytes:
            return
        file = self._open_file()
        file.write(buffers)
        self._current.nbytes += nbytes
        if self._current.nbytes - self._hinted >= WRITE_BYTES and self._sync is not Sync.ALWAYS:
            file.start_writeback(self._hinted, self._current.nbytes)
            self._hinted = self._current.nbytes

    def _rotate(self, first: int) -> None:
        """Begin the next segment. Under `always` the old one is on disk before; else the flushing task sees to it."""
        old = self._open_file()
        if self._current.nbytes == SEGMENT_BYTES:
            return  # nothing in it: the new one would be the same
        if self._sync is Sync.ALWAYS:
            old.sync()
        self._begin(first)


def _sync_all(files: Sequence[DiskFile]) -> None:
    for file in files:
        file.sync()


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
    return int(rest) if name.startswith(head) and rest.isdigit() else None
