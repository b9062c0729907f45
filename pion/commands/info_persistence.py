"""The Persistence section of INFO: the data directory, its log and its snapshots."""

from __future__ import annotations

from collections.abc import Sequence

from pion.context import Services


def persistence_rows(services: Services) -> Sequence[tuple[str, object]]:
    """The Persistence section: Redis's names where Redis has the notion, then Pion's."""
    data = services.data
    if data is None:
        return [("loading", 0), ("rdb_bgsave_in_progress", 0), ("aof_enabled", 0), ("data_directory", "")]
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
        ("wal_flushes", wal.flushes),
        ("wal_sequence", wal.sequence),
        ("wal_durable_sequence", wal.durable_sequence),
        ("wal_replayed_records", counts.replayed_records),
        ("wal_cut_bytes", counts.cut_bytes),
        ("load_seconds", f"{counts.load_seconds:.6f}"),
        ("snapshots_taken", snapshot.taken),
        ("snapshot_bytes", snapshot.last_bytes),
        ("snapshot_seconds", f"{snapshot.last_seconds:.3f}"),
        ("snapshot_age_seconds", f"{snapshot.last_age_s:.0f}"),
        ("snapshot_last_error", snapshot.last_error),
        ("mapped_bytes", services.vstore.ledger.mapped_bytes),
        ("checksum_failures", services.vstore.checksum_failures),
    ]
