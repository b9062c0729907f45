"""The write-ahead log: one writer, group commit, and what happens when the disk says no.

`append` takes an item of a family right after the change was made, on the event loop and without waiting. The writer
task takes what has gathered, has it encoded, hashed and written in a thread, and wakes everyone who waits for it. While
it is away the next batch gathers: that is the group commit.

A failed write or flush can't be repaired by trying again (the kernel may have dropped the pages), so it ends the log's
work: the items of that batch and of all behind it are undone and answered with -MISCONF, and so is every later write,
until a snapshot has put the whole state on a disk that works again.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs
import trio

from pion.config import MIB
from pion.storage.batch import Batch, refusal
from pion.storage.disk import Disk
from pion.storage.durable import Durable
from pion.storage.segments import SEGMENT_LIMIT, Position, Segment, SegmentWriter

logger = logging.getLogger("pion.wal")

BATCH_BYTES: Final = 32 * MIB
"""Most that one trip of the writer takes, beyond its last item: how long the first of it may wait for the last."""

ITEM_BYTES: Final = 256
"""What one queued item costs beside its data."""

FLUSH_INTERVAL_S: Final = 1.0
"""What `everysec` may lose when the machine dies, and the time of a flush."""

PREPARE_AFTER_S: Final = 0.25
"""When the first segment in advance is made: a start has other things to do with the disk."""

PREPARE_AGAIN_S: Final = 60.0
"""Pause after a segment could not be prepared: on a full disk each try would only be noise."""

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
    flushes: int
    sequence: int
    durable_sequence: int
    error: str
    """Why writes are refused; empty while they are not."""


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
        self._where = disk.where
        self._writer = SegmentWriter(
            disk, worker, position, flush_each=sync is Sync.ALWAYS, limit=segment_limit, segments=segments
        )
        self._sync = sync
        self._queue_bytes = queue_bytes
        self.sequence = position.sequence - 1
        """Number of the record appended last."""
        self.error = ""
        """Why changes are refused; empty while they are not."""
        self.broken = True
        """Nothing is written: the log is not open, or has failed."""
        self.on_growth: Callable[[], None] = lambda: None
        """Called on the event loop when the log has grown."""
        self._written = self.sequence
        # Whoever wrote what was read may have died before it was flushed; what is in no segment is in the snapshot.
        firsts = [segment.first for segment in (segments or {}).values() if segment.first]
        self._durable = min(self.sequence, *(first - 1 for first in firsts)) if firsts else self.sequence
        self._cutting: Batch | None = None
        """The last batch that lets a new segment begin."""
        self._queue: deque[Batch] = deque()
        self._writing: Batch | None = None
        self._queued = self._records = 0
        self._taken = trio.Event()
        """The prepared segment is in use."""
        self._wake = trio.Event()
        self._waiting = trio.lowlevel.ParkingLot()
        self._write_limiter = trio.CapacityLimiter(1)
        self._flush_limiter = trio.CapacityLimiter(1)

    # Appending, on the event loop.

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments on disk."""
        return self._writer.size_bytes

    @property
    def queued_bytes(self) -> int:
        """Bytes of changes that are not written yet, with what their queue costs."""
        return self._queued

    def statistics(self) -> WalStatistics:
        """The counters now."""
        return WalStatistics(
            size_bytes=self.size_bytes,
            segments=len(self._writer.segments),
            queued_bytes=self._queued,
            records=self._records,
            written_bytes=self._writer.written_bytes,
            flushes=self._writer.flushes,
            sequence=self.sequence,
            durable_sequence=self._durable,
            error=self.error,
        )

    def check(self) -> None:
        """Raises MisconfError while changes are refused."""
        if self.error:
            raise refusal(self.error)

    @property
    def crowded(self) -> bool:
        """Whether `room` would wait."""
        return self._queued > self._queue_bytes

    async def room(self) -> None:
        """Until the queue has room: await it before a change, with no checkpoint between it and the change.

        Cancellation: nothing happened.
        """
        while self.crowded and not self.broken:
            await self._waiting.park()
        self._waiting.unpark()  # each wakes the next, so that they pass one by one

    def append(self, owner: Durable, item: Any, nbytes: int = 0) -> Batch | None:
        """Queue an item, with `nbytes` of data, after its change was made. Returns what to await before the reply.

        None while the log is broken: then only what needs no record may change.
        """
        if self.broken:
            return None
        batch = self._queue[-1] if self._queue else None
        if batch is None or batch.nbytes > BATCH_BYTES:
            batch = self._add_batch()
        batch.items.append((owner, item))
        batch.records += 1
        batch.nbytes += nbytes + ITEM_BYTES
        self._queued += nbytes + ITEM_BYTES
        self.sequence += 1
        return batch

    def cut(self) -> int:
        """Let a new segment begin behind what was appended so far; returns the last number before it."""
        batch = self._cutting = self._queue[-1] if self._queue else self._add_batch()
        batch.items.append(None)
        return self.sequence

    def _add_batch(self) -> Batch:
        batch = Batch()
        self._queue.append(batch)
        self._wake.set()
        return batch

    async def wait_written(self, sequence: int) -> None:
        """Until all records up to that number are written, and the segment has begun for which `cut` was called last.

        Raises OSError if the log fails before. Cancellation: no effect.
        """
        if self._cutting is not None:
            await self._cutting.over()
            if self._cutting.error:
                raise OSError(self._cutting.error)
        while self._written < sequence:
            if self.broken:
                raise OSError(self.error)
            batch = self._queue[-1] if self._queue else self._writing
            if batch is not None:
                await batch.over()

    async def wait_durable(self, sequence: int) -> None:
        """Until all records up to that number are on stable storage, whatever `--wal-sync` says.

        Raises OSError if the log has failed. Cancellation: no effect.
        """
        if self.error:
            raise OSError(self.error)  # what is in the log no more may still be needed, after a restart
        await self.wait_written(sequence)
        if self._durable < sequence:
            await self._flush()
        if self._durable < sequence:
            raise OSError(self.error)

    # Writing and flushing.

    async def open(self) -> None:
        """Begin a segment, on a directory that was just read. Raises OSError.

        Cancellation: takes effect before or after.
        """
        await trio.to_thread.run_sync(self._begin, limiter=self._write_limiter)
        self.broken = False
        if self._sync is Sync.ALWAYS and not self.error:
            self._durable = self._written

    def _begin(self) -> None:
        self._writer.begin(self.sequence + 1)
        if self._sync is Sync.ALWAYS and self._writer.behind:
            self._writer.flush()  # what is acknowledged from now on stands on it

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write batches, and flush at the interval.

        Cancellation: what is being written is finished; the rest stays queued for `close`.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._flush_regularly)
            nursery.start_soon(self._keep_prepared)
            task_status.started()
            while True:
                while self._queue:
                    await self._write_next()
                self._wake = trio.Event()
                await self._wake.wait()

    async def close(self) -> None:
        """Write and flush what is queued, then close the files; call it when `run` has ended.

        Cancellation: shielded, with a deadline.
        """
        with trio.CancelScope(deadline=trio.current_time() + CLOSE_DEADLINE_S, shield=True):
            while self._queue and not self.broken:
                await self._write_next()
            await self._flush()
        self.broken = True
        self._writer.close()

    async def _write_next(self) -> None:
        batch = self._writing = self._queue.popleft()  # what comes from now on gathers in the next one
        write = partial(self._writer.write, batch.items, self._written + 1, self._durable)
        try:
            await trio.to_thread.run_sync(write, limiter=self._write_limiter)
        except trio.Cancelled:
            self._queue.appendleft(batch)  # it was not begun
            raise
        except OSError as error:
            self._fail(error)
        except Exception as error:  # a family's `encode`, or no memory: what follows must not be written behind a hole
            logger.exception("log in %s: a record could not be made", self._where)
            self._fail(OSError(f"a record could not be made: {error!r}"))
        if self.broken:  # by this write, or by a flush meanwhile
            self._lose([batch])
            if self._sync is Sync.EVERYSEC:
                await self._flush()  # what was acknowledged before must not wait for a snapshot
            return
        self._written += batch.records
        self._records += batch.records
        if self._sync is Sync.ALWAYS and not self.error:
            self._durable = self._written
        self._release(batch)
        batch.finish()
        if not self._writer.prepared:
            self._taken.set()
        self.on_growth()

    async def _flush_regularly(self) -> None:
        while True:
            await trio.sleep(FLUSH_INTERVAL_S)
            late = self._sync is Sync.EVERYSEC and self._durable < self._written
            if not self.broken and (late or self._writer.behind):
                await self._flush()

    async def _keep_prepared(self) -> None:
        """Have the next segment made as soon as the last one was taken: a fast client fills one in a second."""
        await trio.sleep(PREPARE_AFTER_S)
        while True:
            while not self.broken and not self._writer.prepared:
                await self._prepare()
            self._taken = trio.Event()
            await self._taken.wait()

    async def _flush(self) -> None:
        """Flush what is written by now, broken or not. A failure ends the log's work."""
        written = self._written
        try:
            await trio.to_thread.run_sync(self._writer.flush, limiter=self._flush_limiter)
        except OSError as error:
            self._fail(error)
            return
        if not self.error:  # else it says nothing of what was written before the failure
            self._durable = max(self._durable, written)

    async def _prepare(self) -> None:
        try:
            await trio.to_thread.run_sync(self._writer.prepare, limiter=self._flush_limiter)
        except OSError as error:  # the writer will meet it, when it needs the segment
            logger.warning("log in %s: no next segment could be made: %s", self._where, error.strerror or error)
            await trio.sleep(PREPARE_AGAIN_S)

    # Failing, and going on.

    def refuse(self, error: OSError) -> None:
        """The log could not even be opened: serve what is there, and accept no change."""
        self.error, self.broken = error.strerror or str(error), True
        logger.error("log in %s failed: %s; changes are refused until KV.PREFIX.SAVE succeeds", self._where, self.error)

    def _fail(self, error: OSError) -> None:
        if self.broken:
            return
        self.refuse(error)
        self.sequence = self._written
        lost = list(self._queue)
        self._queue.clear()
        self._lose(lost)
        self._waiting.unpark_all()

    def _lose(self, lost: Sequence[Batch]) -> None:
        """Undo what can't be written, and tell those who wait."""
        by_owner: dict[Durable, list[Any]] = {}
        for batch in lost:
            for item in batch.items:
                if item is not None:
                    by_owner.setdefault(item[0], []).append(item[1])
        for owner, items in by_owner.items():
            owner.undo(items)
        for batch in lost:
            self._release(batch)
            batch.finish(self.error)

    def _release(self, batch: Batch) -> None:
        self._queued -= batch.nbytes
        self._waiting.unpark()

    async def reopen(self) -> int:
        """After a failure: begin a segment behind what was written; changes stay refused. Returns the last number.

        Raises OSError. Cancellation: takes effect before or after.
        """
        # Behind what may still be under way: closing the descriptor under it could hit another file.
        async with self._write_limiter:
            await trio.to_thread.run_sync(self._writer.close, limiter=self._flush_limiter)
        self._cutting = None
        await self.open()
        return self.sequence

    def accept(self) -> None:
        """The state is on disk: changes are accepted again. Raises OSError if the log has failed again."""
        if self.broken:
            raise OSError(self.error)
        self.error = ""

    async def remove_unused(self) -> None:
        """Remove segments without records that earlier starts left behind.

        Call it after `open`: the new segment says what they said. Cancellation: takes effect before or after.
        """
        try:
            await trio.to_thread.run_sync(self._writer.unlink_unused, limiter=self._flush_limiter)
        except OSError as error:
            logger.warning("log in %s: unused segments can't be removed: %s", self._where, error.strerror or error)

    async def remove_covered(self, sequence: int) -> None:
        """Remove the segments whose records a snapshot covers, all numbers up to `sequence`. Raises OSError.

        Cancellation: takes effect before or after.
        """
        segments = self._writer.segments
        covered = [
            old for old, following in itertools.pairwise(sorted(segments)) if segments[following].first <= sequence + 1
        ]
        await trio.to_thread.run_sync(self._writer.unlink, covered, limiter=self._flush_limiter)
