"""The Tier section of INFO: the disk budget, the tier, and what moves between it and memory."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from pion.context import Services


def tier_rows(services: Services) -> Sequence[tuple[str, object]]:
    """Without a tier only the disk budget, which the log and the snapshots share with it."""
    config, disk, store = services.config, services.budget.disk, services.vstore
    rows: list[tuple[str, object]] = [
        ("tier", ""),
        ("max_disk_bytes", config.max_disk_bytes),
        ("disk_used_bytes", disk.used_bytes),
        ("disk_evicted", disk.evicted),
    ]
    tiering = services.tiering
    if tiering is None:
        return rows
    tier = attrs.asdict(tiering.tier.statistics())
    rows[0] = ("tier", tier.pop("url"))
    paused_s = tier.pop("paused_s")
    return [
        *rows,
        ("tier_objects", len(store.tier_files.known)),
        ("tier_bytes", store.tier_files.nbytes),
        ("tier_garbage_objects", len(store.tier_files.garbage)),
        ("tier_open_objects", tiering.open_objects),
        *((f"tier_{name}", value) for name, value in attrs.asdict(tiering.statistics).items()),
        *((f"tier_call_{name}", value) for name, value in tier.items()),
        ("tier_call_paused_seconds", f"{paused_s:.3f}"),
    ]
