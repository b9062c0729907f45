"""The store's housekeeping task, and the Memory section of INFO."""

from __future__ import annotations

import logging
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
import trio

from pion.config import MIB
from pion.context import Services
from pion.storage.block import MERGE_BYTES
from pion.storage.huge_pages import FRAME_BYTES, HugePages, find_system
from pion.storage.reclaim import FREEZE_AFTER_UNITS, TRIM_AFTER_BYTES, find_trim, freeze_garbage, trim_memory

logger = logging.getLogger("pion.storage")

REAPER_INTERVAL_S: Final = 0.2
"""How late an expired prefix is freed when nobody asks for it, and how long a million new units stay unfrozen."""

REAPER_BATCH: Final = 500
"""Units dropped before the loop is given to others: about a millisecond."""

REAPER_TOUCHES: Final = 2000
"""Noted uses brought into the eviction order before the loop is given to others: about a millisecond."""


@attrs.define(eq=False)
class Reaper:
    """Drops what has expired or stalled, evicts what is over a lowered limit, and gives memory back."""

    _services: Services

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled.

        Cancellation: takes effect between two rounds or batches; the store is consistent at each of them.
        """
        trim = find_trim()
        huge_pages = HugePages(find_system())
        task_status.started()
        while True:
            await trio.sleep(REAPER_INTERVAL_S)
            await self.once()
            ledger = self._services.vstore.ledger
            if ledger.freed_bytes >= TRIM_AFTER_BYTES:
                freed, ledger.freed_bytes = ledger.freed_bytes, 0
                await trio.to_thread.run_sync(trim_memory, trim)
                logger.debug("gave free memory back to the system after %d MiB were released", freed // MIB)
            if huge_pages.due(self._services.vstore.unit_count):
                steps = huge_pages.steps()
                while await trio.to_thread.run_sync(next, steps, True) is None:
                    await self.once()
                logger.debug("%d MiB are in huge pages", huge_pages.collapsed * FRAME_BYTES // MIB)

    async def once(self) -> None:
        """One round of dropping and freezing.

        Cancellation: takes effect between two batches.
        """
        store = self._services.vstore
        while store.drop_expired(REAPER_BATCH) == REAPER_BATCH:
            await trio.lowlevel.checkpoint()
        while store.policy.settle(REAPER_TOUCHES):
            await trio.lowlevel.checkpoint()
        budget = self._services.budget
        # A piece is copied before the buffer that it is in can go, so there must be room for it.
        while store.ledger.has_work and budget.take(MERGE_BYTES) and store.ledger.work_off():
            await trio.lowlevel.checkpoint()
        store.drop_stalled()
        store.trim_sessions(REAPER_BATCH)
        await self._keep_budget()
        if store.registrations >= FREEZE_AFTER_UNITS:
            store.registrations = 0
            freeze_garbage()

    async def _keep_budget(self) -> None:
        """Get below a byte budget that was lowered, or that is smaller than what was replayed."""
        store, budget = self._services.vstore, self._services.budget
        while store.over(0) > 0 and not budget.tier_helps() and store.shrink(REAPER_BATCH):
            await trio.lowlevel.checkpoint()
        if store.over(0) > 0:
            budget.take(0)


def anonymous_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """Resident memory of this process without pages of files; 0 where the system doesn't say it this way."""
    try:
        _, resident, of_files, *_ = statm.read_text(encoding="ascii").split()
    except FileNotFoundError:
        return 0
    return (int(resident) - int(of_files)) * _PAGE_BYTES


_PAGE_BYTES: Final = resource.getpagesize()


def memory_rows(services: Services) -> Sequence[tuple[str, object]]:
    """The Memory section: Redis's names where Redis has the notion, then Pion's."""
    config, store = services.config, services.vstore
    ledger, dropped = store.ledger.statistics(), store.dropped
    return [
        ("used_memory", ledger.charged_bytes),
        ("used_memory_rss", anonymous_bytes()),
        ("maxmemory", config.max_bytes),
        ("maxmemory_policy", config.eviction),
        ("memory_charged_bytes", ledger.charged_bytes),
        ("memory_sending_bytes", ledger.sending_bytes),
        ("memory_receiving_bytes", store.in_flight()),
        ("memory_waits", services.budget.waits),
        ("mapped_bytes", ledger.mapped_bytes),
        ("vstore_bytes", ledger.payload_bytes),
        *((f"dropped_{reason.value}", count) for reason, count in dropped.items()),
    ]
