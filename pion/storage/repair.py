"""Making a directory that a server starts with, from what is left of one: `pion repair`.

What can be kept is written as a new snapshot, and every file that was there gets a name beginning with `damaged-`,
which no server reads. The order makes any moment a safe one to be stopped in:

1. each file gets its new name beside the old one (a hard link, so no byte is copied);
2. the new snapshot is written, flushed, and takes the name of the old one, in one step;
3. the old names of the log's segments are removed.

Stopped before the second step, nothing has changed; behind it, the new snapshot covers all that is in the segments.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from pion.config import MIB
from pion.storage.disk import Disk
from pion.storage.examination import SET_ASIDE, Examination
from pion.storage.segments import Position, segment_name, snapshot_name
from pion.storage.snapshot import Snapshotter
from pion.storage.wal import Log, Sync


def set_aside_names(found: Examination, now_s: float) -> dict[str, str]:
    """The names that a repair gives to the files that are there."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_s))
    taken, names = set(found.files), dict[str, str]()
    for name, report in found.files.items():
        if report.kind != "set aside":
            count, new = 1, f"{SET_ASIDE}{stamp}-{name}"
            while new in taken:
                count, new = count + 1, f"{SET_ASIDE}{stamp}-{count}-{name}"
            names[name] = new
    return names


async def repair(disk: Disk, found: Examination, names: dict[str, str]) -> None:
    """Replace what was found by what can be kept of it. Nobody else may use the directory meanwhile.

    Raises OSError or MisconfError; then everything is as it was, or the next repair finishes it.
    Cancellation: the same.
    """
    position = found.position
    done = list[str]()
    try:
        for old, new in names.items():
            disk.link(old, new)
            done.append(new)
        disk.sync_directory(snapshot_name(found.worker))
        await _write_snapshot(disk, found, position)
    except BaseException:
        # Segments still have their old names. The snapshot and an unfinished one may have lost theirs to the new one.
        both = [new for old, new in names.items() if found.files[old].kind == "log" and new in done]
        _undo(disk, [*both, segment_name(found.worker, position.number)])
        raise
    for old in names:
        if old != snapshot_name(found.worker) and disk.exists(old):
            disk.unlink(old)
    disk.sync_directory(snapshot_name(found.worker))


async def _write_snapshot(disk: Disk, found: Examination, position: Position) -> None:
    log = Log(disk, found.worker, position, Sync.NO, queue_bytes=MIB)
    families = found.salvage.families
    ledger = found.salvage.store.ledger
    snapshots = Snapshotter(disk, found.worker, position.lineage, log, families)
    snapshots.payload_bytes = lambda: ledger.payload_bytes
    try:
        await snapshots.take()
    finally:
        await log.close()


def _undo(disk: Disk, names: Sequence[str]) -> None:
    """Take back second names, as far as the disk lets us: they do no harm."""
    for name in names:
        with contextlib.suppress(OSError):
            disk.unlink(name)
