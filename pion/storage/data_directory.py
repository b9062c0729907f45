"""One worker's durable state: its directory, its log and its snapshots, from start to end."""

from __future__ import annotations

import errno
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs
import trio

from pion.config import MIB, Config
from pion.errors import CommandError, StartupError
from pion.storage.disk import DirectoryLock, Disk, RealDisk
from pion.storage.durable import MAX_FAMILY_BYTES, Durable
from pion.storage.recovery import Found, load
from pion.storage.segments import SEGMENT_LIMIT
from pion.storage.snapshot import SnapshotStatistics, Snapshotter
from pion.storage.wal import Log, Sync, WalStatistics

logger = logging.getLogger("pion.wal")

LOCK_NAME: Final = "pion.lock"

LOG_FREE_BYTES: Final = 512 * MIB
"""A log up to this size is no reason for a snapshot."""

LOG_FREE_RECORDS: Final = 100_000
"""Nor is one with up to so many records, which take two or three seconds to replay."""

LOG_SHARE: Final = 0.25
"""Of the disk budget: a log that is longer is replaced by a snapshot, so that the tier has the space."""

QUEUE_SHARE: Final = 0.05
"""Of the byte budget: what may wait to be written to the log."""

RETRY_S: Final = 60.0
"""Pause after a snapshot that failed by itself, before the next one."""

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The disk is full: what is stored can still be served."""


@attrs.frozen
class DataStatistics:
    """What INFO shows of the directory."""

    directory: str
    wal: WalStatistics
    snapshot: SnapshotStatistics
    replayed_records: int
    cut_bytes: int
    load_seconds: float


@attrs.frozen
class Loaded:
    """How the directory was read at the start. Holds no file: their space must come back when they are removed."""

    snapshot: bool
    """Whether there was one."""
    records: int
    """Records of the log that were replayed."""
    cut_bytes: int
    cut_at: str
    seconds: float


class DataDirectory:
    """Opened by `open_directory`; then `run`, then `close`."""

    def __init__(
        self,
        disk: Disk,
        families: Sequence[Durable],
        found: Found,
        log: Log,
        *,
        limit_bytes: Callable[[], int],
        limit_records: Callable[[], int],
        payload_bytes: Callable[[], int],
        lock: DirectoryLock | None = None,
        load_seconds: float = 0.0,
    ) -> None:
        self.log = log
        self.loaded = Loaded(found.snapshot is not None, found.records, found.cut_bytes, found.cut_at, load_seconds)
        self.lineage = found.position.lineage
        """Names this directory, in all of its files."""
        self._disk = disk
        self._lock = lock
        self._limit_bytes = limit_bytes
        self._limit_records = limit_records
        self._grown = trio.Event()
        self._families = [*families, *found.dormant.values()]
        self.snapshots = Snapshotter(disk, 0, found.position.lineage, log, self._families)
        self.snapshots.payload_bytes = payload_bytes
        if found.snapshot_mapping is not None:
            self.snapshots.kept_bytes = len(found.snapshot_mapping.view)
        self._saved_sequence = found.snapshot.identity.covers if found.snapshot else 0

    def statistics(self) -> DataStatistics:
        """The counters now."""
        return DataStatistics(
            self._disk.where,
            self.log.statistics(),
            self.snapshots.statistics(),
            self.loaded.records,
            self.loaded.cut_bytes,
            self.loaded.seconds,
        )

    @property
    def disk_bytes(self) -> int:
        """What the log and the snapshots take, one that is being written included."""
        return self.log.size_bytes + self.snapshots.disk_bytes

    @property
    def holds_back(self) -> bool:
        """Whether `admit` would wait or refuse."""
        return self.log.crowded or bool(self.log.error)

    async def admit(self) -> None:
        """Before a command that changes state: waits while the log's queue is full. Raises MisconfError.

        Cancellation: nothing happened.
        """
        self.log.check()
        if self.log.crowded:
            await self.log.room()

    async def save(self, path: str | None = None) -> None:
        """Take a snapshot now. Raises as `Snapshotter.take`, and takes cancellation like it."""
        sequence = self.log.sequence
        await self.snapshots.take(path)
        self._saved_sequence = max(self._saved_sequence, sequence)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Begin a segment, write the log, and take a snapshot whenever the log has outgrown its limit.

        Raises StartupError, before it has started, when the directory can't be written.
        Cancellation: what is being written is finished; `close` does the rest.
        """
        try:
            await self.log.open()
        except OSError as error:
            if error.errno not in FULL:
                raise StartupError(f"--dir {self._disk.where}: can't write the log: {error}") from error
            self.log.refuse(error)
        else:
            await self.log.remove_unused()
        for family in self._families:
            family.log = self.log
            family.finish_replay()
        async with trio.open_nursery() as nursery:
            await nursery.start(self.log.run)
            self.log.on_growth = self._note_growth
            task_status.started()
            await self._save_when_grown()

    def _outgrown(self) -> bool:
        records = self.log.sequence - self._saved_sequence
        return self.log.size_bytes > self._limit_bytes() or records > self._limit_records()

    def _note_growth(self) -> None:
        if self._outgrown():
            self._grown.set()

    async def _save_when_grown(self) -> None:
        while True:
            await self._grown.wait()
            self._grown = trio.Event()
            if not self._outgrown() or self.log.broken:
                continue
            try:
                await self.save()
            except CommandError as error:
                logger.error("the log is %d MiB long and stays: %s", self.log.size_bytes // MIB, error)
                await trio.sleep(RETRY_S)

    async def close(self, *, save: bool, grace_s: float) -> None:
        """Write what is queued; take a snapshot if there is something new in the log and `save`; release the directory.

        Cancellation: shielded, with `grace_s` for the snapshot and a deadline for the rest.
        """
        try:
            if save and self.log.sequence > self._saved_sequence and not self.log.broken:
                await self._save_at_end(grace_s)
        finally:
            try:
                await self.log.close()
            finally:
                if self._lock is not None:
                    self._lock.release()

    async def _save_at_end(self, grace_s: float) -> None:
        with trio.CancelScope(deadline=trio.current_time() + grace_s, shield=True) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.log.run)
                try:
                    await self.save()
                except CommandError as error:
                    logger.warning("no snapshot at the end: %s; the log has everything", error)
                nursery.cancel_scope.cancel()
        if scope.cancelled_caught:
            logger.warning("the time for a last snapshot is over; the log has everything")


def open_directory(
    config: Config,
    families: Sequence[Durable],
    payload_bytes: Callable[[], int],
    live_records: Callable[[], int],
) -> DataDirectory:
    """Lock the directory of `--dir`, made if need be, and read it into the families. Blocks.

    Raises StartupError.
    """
    path = Path(config.dir)
    check_families(families)
    try:
        _make_directory(path)
        lock = DirectoryLock(path / LOCK_NAME)
    except BlockingIOError as error:
        raise StartupError(
            f"--dir {path} is {error}; one server per directory: stop that one, or give this one another --dir"
        ) from error
    except OSError as error:
        what = "" if error.errno in FULL else "; it must be a directory that this user may write"
        raise StartupError(f"--dir {path}: {error.strerror}{what}") from error
    try:
        return open_disk(RealDisk(path), config, families, payload_bytes, lock, live_records)
    except OSError as error:
        lock.release()
        raise StartupError(f"--dir {path}: can't be read: {error.strerror}") from error
    except BaseException:
        lock.release()
        raise


def _make_directory(path: Path) -> None:
    """Make a directory whose name, and its parents' names, survive a power cut. Raises OSError."""
    missing: list[Path] = []
    step = path.absolute()
    while not step.exists():
        missing.append(step)
        step = step.parent
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        RealDisk(made.parent).sync_directory(made.name)


def open_disk(
    disk: Disk,
    config: Config,
    families: Sequence[Durable],
    payload_bytes: Callable[[], int],
    lock: DirectoryLock | None = None,
    live_records: Callable[[], int] = lambda: 0,
    *,
    segment_limit: int = SEGMENT_LIMIT,
) -> DataDirectory:
    """Read a disk into the families. Blocks. Raises StartupError, OSError.

    `payload_bytes` and `live_records` say how much is stored: a log that is much longer is replaced by a snapshot.
    """
    began = time.monotonic()
    with _collector_paused():
        found = load(disk, 0, families)
    log = Log(
        disk,
        0,
        found.position,
        Sync(config.wal_sync),
        queue_bytes=_queue_bytes(config),
        segments=found.sizes(),
        segment_limit=segment_limit,
    )
    seconds = time.monotonic() - began
    if found.snapshot is not None or found.records:
        logger.info(
            "%s: snapshot %s, %d records of the log replayed, in %.2f s",
            disk.where,
            "read" if found.snapshot is not None else "not there",
            found.records,
            seconds,
        )

    def limit_bytes() -> int:
        usual = max(LOG_FREE_BYTES, int(config.wal_limit * payload_bytes()))
        return min(usual, int(LOG_SHARE * config.max_disk_bytes)) if config.max_disk_bytes else usual

    def limit_records() -> int:
        return max(LOG_FREE_RECORDS, int(config.wal_limit * live_records()))

    return DataDirectory(
        disk,
        families,
        found,
        log,
        limit_bytes=limit_bytes,
        limit_records=limit_records,
        payload_bytes=payload_bytes,
        lock=lock,
        load_seconds=seconds,
    )


def _queue_bytes(config: Config) -> int:
    """What waits to be written may have been evicted meanwhile, and is in memory all the same."""
    if not config.max_bytes:
        return config.wal_queue_bytes
    return min(config.wal_queue_bytes, max(MIB, int(QUEUE_SHARE * config.max_bytes)))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Replaying makes a million objects and no cycles: the garbage collector would look at all of them many times."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def check_families(families: Sequence[Durable]) -> None:
    """Names must be short, plain and different. Raises StartupError."""
    seen: set[str] = set()
    for family in families:
        name = family.family
        if not (name.isascii() and 0 < len(name) <= MAX_FAMILY_BYTES):
            raise StartupError(
                f"a durable family's name must be 1 to {MAX_FAMILY_BYTES} ASCII characters, got {name!r}"
            )
        if name in seen:
            raise StartupError(f"two plugins keep state as {name!r}; each needs a name of its own")
        seen.add(name)
