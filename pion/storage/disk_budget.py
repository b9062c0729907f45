"""The disk budget: what the tier, the log and the snapshots of one worker take together.

A snapshot is written beside the one that it replaces, so the room for the next one is kept free: a budget that is used
to the last byte by the tier could never shorten the log again. What gives way, in this order: the log, by a snapshot,
if that frees an eighth of the budget; prefixes that are in the tier only; prefixes in memory, since they are in the
log and in every snapshot. Then changes are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final

import trio

from pion.config import MIB
from pion.errors import CommandError
from pion.storage.changes import Reason
from pion.storage.data_directory import DataDirectory
from pion.storage.orders import Orders
from pion.storage.unit import Unit
from pion.storage.vstore import VStore

logger = logging.getLogger("pion.storage")

WAIT_S: Final = 10.0
"""Longest wait of a change for disk space: a snapshot of a few gigabytes."""

WORTH_BYTES: Final = MIB
"""A snapshot that frees less is not worth writing."""

WORTH_SHARE: Final = 0.125
"""Of the budget: nor is one that frees less than this; each is written whole."""

LOOKS_AT_ONCE: Final = 4096
"""Cold prefixes looked at for some that are in the tier."""

VAIN_DROPS: Final = 3
"""Steps without any gain before no more is dropped."""

DROPS_AT_ONCE: Final = 64
"""Prefixes dropped before the event loop is given to others."""


async def _nothing() -> bool:
    """Without a tier there is nothing to delete in it."""
    return True


class DiskBudget:
    """See the module. Without `--max-disk-bytes` it only counts."""

    def __init__(self, store: VStore, data: Callable[[], DataDirectory | None]) -> None:
        self._store = store
        self._data = data
        self._shedding = trio.Lock()
        self._in_vain = 0
        """Steps that brought nothing, one after the other."""
        self.tier_bytes: Callable[[], int] = lambda: 0
        self.delete_garbage = _nothing
        """Deletes the tier's objects that nothing refers to any more; False if some are left."""
        self._admitted = 0
        self.evicted = 0
        """Units dropped for want of disk space."""

    @property
    def used_bytes(self) -> int:
        """On disk now."""
        data = self._data()
        return self.tier_bytes() + (data.disk_bytes if data is not None else 0)

    @property
    def _coming_bytes(self) -> int:
        """What was let in and is not in the log yet."""
        data = self._data()
        return self._admitted + (data.log.queued_bytes if data is not None else 0)

    @property
    def _reserve_bytes(self) -> int:
        """What the next snapshot takes beyond what is written of it."""
        data = self._data()
        return max(0, self._store.unplaced_bytes - data.snapshots.writing_bytes) if data is not None else 0

    @contextmanager
    def admitted(self, nbytes: int) -> Iterator[None]:
        """So much may be written meanwhile: others must not count on the same space."""
        self._admitted += nbytes
        try:
            yield
        finally:
            self._admitted -= nbytes

    def over(self, nbytes: int) -> int:
        """How far `nbytes` more would exceed the budget; 0 or less if they fit, or without a budget."""
        limit = self._store.config.max_disk_bytes
        return self.used_bytes + self._reserve_bytes + self._coming_bytes + nbytes - limit if limit else 0

    async def fit(self, nbytes: int) -> bool:
        """Until `nbytes` more fit; False if they can't.

        Cancellation: what was dropped stays so.
        """
        if self.over(nbytes) <= 0:
            return True
        if nbytes > self._store.config.max_disk_bytes:
            return False
        with trio.move_on_after(WAIT_S):
            async with self._shedding:
                while self.over(nbytes) > 0:
                    if not await self._shed(nbytes):
                        return False
        return self.over(nbytes) <= 0

    async def keep(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Stay within the budget, also when it was lowered, or was smaller than what an earlier run left.

        Cancellation: what was dropped stays so.
        """
        task_status.started()
        while True:
            await trio.sleep(KEEP_S)
            if self.over(0) > 0:
                await self.fit(0)

    async def _shed(self, nbytes: int) -> bool:
        """One step towards the budget; False if there is none."""
        store, data = self._store, self._data()
        before = self.over(nbytes)
        # What was dropped already may only wait for its deletion.
        if not await self.delete_garbage():
            return False
        if self.over(nbytes) < before:
            return True
        worth_bytes = max(WORTH_BYTES, int(WORTH_SHARE * store.config.max_disk_bytes))
        waste = data is not None and data.disk_bytes - store.unplaced_bytes >= worth_bytes and not data.log.broken
        if waste and await self._shorten_log() and self.over(nbytes) < before:
            return True
        victims = self._in_tier_only(self.over(nbytes))
        if victims:
            for unit in victims:
                store.drop_unit(unit, Reason.EVICTED)
            self.evicted += len(victims)
            deleted = await self.delete_garbage()
            await trio.lowlevel.checkpoint()
            # A tier that deletes nothing now would lose all that it has, for nothing. Others may have written, too.
            self._in_vain = 0 if self.over(nbytes) < before else self._in_vain + 1
            return deleted and self._in_vain <= VAIN_DROPS
        victim = next(store.policy.victims(), None) if data is not None else None
        if victim is None:
            return False
        store.drop_unit(victim, Reason.EVICTED)
        self.evicted += 1
        return True

    async def _shorten_log(self) -> bool:
        data = self._data()
        try:
            if data is not None:
                await data.save()
        except CommandError as error:
            logger.warning("the disk budget is used up, and no snapshot could shorten the log: %s", error)
            return False
        return True

    def _in_tier_only(self, over: int) -> list[Unit]:
        """Prefixes whose end gives back `over` bytes of the tier, or some of them."""
        orders = self._store.policy
        victims: list[Unit] = []
        if isinstance(orders, Orders):
            for unit in islice(orders.cold.victims(), LOOKS_AT_ONCE):
                if over <= 0 or len(victims) == DROPS_AT_ONCE:
                    break
                if unit.placed:  # else its rows are in the log or in the snapshot, which do not shrink with it
                    victims.append(unit)
                    over -= unit.file_bytes
        return victims


KEEP_S: Final = 0.5
"""How often the budget is looked at without a change that needs disk space."""
