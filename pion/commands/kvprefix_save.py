"""KV.PREFIX.SAVE, and the Persistence section of INFO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pion.args import show
from pion.command import Arg, Command, Flag
from pion.config import INLINE_ARG_BYTES
from pion.context import Context, Services
from pion.errors import CommandError
from pion.replies import OK, Buffer, Reply

MEMORY_ONLY: Final = 'this server keeps everything in memory: start it with --dir (not "") to have snapshots'


async def save(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.SAVE [path].

    Cancellation: the old snapshot and the log stay as they were, or the new one is complete.
    """
    data = context.services.data
    if len(argv) > 2:
        raise CommandError("wrong number of arguments for 'kv.prefix.save' command")
    path: str | None = None
    if len(argv) == 2:
        if len(argv[1]) > INLINE_ARG_BYTES:
            raise CommandError(f"path must be at most {INLINE_ARG_BYTES} bytes long, got {len(argv[1])}")
        try:
            path = bytes(argv[1]).decode()
        except UnicodeDecodeError:
            raise CommandError(f"path must be UTF-8, got {show(argv[1])}") from None
    if data is None:
        raise CommandError(MEMORY_ONLY)
    await data.save(path)
    return OK


def persistence_rows(services: Services) -> Sequence[tuple[str, object]]:
    """The Persistence section: Redis's names where Redis has the notion, then Pion's."""
    data = services.data
    if data is None:
        return [("loading", 0), ("aof_enabled", 0), ("data_directory", "")]
    counts = data.statistics()
    wal, snapshot = counts.wal, counts.snapshot
    return [
        ("loading", 0),
        ("rdb_bgsave_in_progress", int(snapshot.running)),
        ("rdb_last_bgsave_status", "err" if snapshot.last_error else "ok"),
        ("aof_enabled", 1),
        ("aof_last_write_status", "err" if wal.error else "ok"),
        ("data_directory", counts.directory),
        ("changes_refused", wal.error),
        ("wal_sync", services.config.wal_sync),
        ("wal_bytes", wal.size_bytes),
        ("wal_segments", wal.segments),
        ("wal_queued_bytes", wal.queued_bytes),
        ("wal_records", wal.records),
        ("wal_written_bytes", wal.written_bytes),
        ("wal_flushes", wal.syncs),
        ("wal_sequence", wal.sequence),
        ("wal_durable_sequence", wal.durable_sequence),
        ("wal_replayed_records", counts.replayed_records),
        ("wal_cut_bytes", counts.cut_bytes),
        ("load_seconds", f"{counts.load_seconds:.3f}"),
        ("snapshots_taken", snapshot.taken),
        ("snapshot_bytes", snapshot.last_bytes),
        ("snapshot_seconds", f"{snapshot.last_seconds:.3f}"),
        ("snapshot_age_seconds", f"{snapshot.last_age_s:.0f}"),
        ("snapshot_last_error", snapshot.last_error),
        ("mapped_bytes", services.vstore.ledger.mapped_bytes),
        ("checksum_failures", services.vstore.checksum_failures),
    ]


COMMANDS: Final = (
    Command(
        name="KV.PREFIX.SAVE",
        arity=-1,
        summary="Write a snapshot of all state, then remove the log that it covers",
        since="0.1.0",
        handler=save,
        flags=Flag.ADMIN,
        args=(
            Arg(
                name="path",
                optional=True,
                summary="a second name for the snapshot, relative to the data directory; for backups",
            ),
        ),
        reply="+OK once the snapshot is on the disk",
        complexity="O(bytes stored); other commands go on meanwhile",
        group="kvprefix",
        examples=("KV.PREFIX.SAVE", "KV.PREFIX.SAVE backup.safetensors"),
        errors=(
            "-ERR path must be relative and inside the data directory",
            "-MISCONF no snapshot could be written; the one before and the log stay as they were",
        ),
    ),
)
