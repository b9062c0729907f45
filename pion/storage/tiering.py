"""Moving rows between memory and a tier, while commands go on.

Four tasks:

- *Demoting* begins when the byte budget is nine tenths full: the rows of the prefix that would be evicted next are
  written to an object; once that is durable, `PlaceRows` lets them lie there, and their memory is free. A prefix that
  was changed, pinned or dropped meanwhile is left alone, and its object thrown away.
- *Promoting* copies rows back into memory when they were asked for twice. The object stays: to leave memory again then
  costs nothing.
- *Deleting* removes objects that nothing refers to. Before, the log must have on stable storage what made them useless:
  else a power cut could bring a prefix back whose object is gone.
- *Cleaning*, once, removes what an earlier run left unfinished and what the log doesn't know.

A tier that fails costs hits and time, never more: what can't be written is dropped when its memory is needed, and what
can't be read is an error that clients take for a miss.
"""

from __future__ import annotations

import logging
import math
import secrets
import traceback
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Final

import trio

from pion.args import show
from pion.config import MIB
from pion.errors import StartupError
from pion.limits import TIER_OPEN_OBJECTS
from pion.storage.budget import COMMAND_BYTES, HIGH_SHARE, LOOK_AGAIN_S, LOW_SHARE, Budget
from pion.storage.changes import PlaceRows
from pion.storage.data_directory import DataDirectory
from pion.storage.disk_budget import DiskBudget
from pion.storage.orders import Orders
from pion.storage.placed import PromotedMemory, TierFile, TierMemory
from pion.storage.tier_rows import copies as copies_of
from pion.storage.tier_rows import files_of, lay_out_rows, rows_of
from pion.storage.tier_waste import OWNER_KEY, TierStatistics, Waste
from pion.storage.tiers.base import OpenedObject, TierError, TierMissError, TierUnavailableError
from pion.storage.tiers.guard import GuardedTier
from pion.storage.tiers.tier_format import lay_out, read_head
from pion.storage.unit import Unit
from pion.storage.vstore import VStore
from pion.storage.vstore_log import registration

logger = logging.getLogger("pion.tier")

PROMOTE_AFTER: Final = 2
"""Replies from the tier before rows come back into memory: one use more than the scan of a backup makes."""

PROMOTE_LATER_S: Final = 0.2
"""After the use that asks for it: copying takes a core that the reply, and often the next one, needs more."""

PROMOTE_SHARE: Final = 0.97
"""Of the byte budget: what memory may hold after a promotion. Demoting makes room again."""

LARGEST_SHARE: Final = 0.5
"""Of the byte budget: a prefix larger than this is not brought back into memory."""

OPEN_OBJECTS: Final = TIER_OPEN_OBJECTS

ROOM_S: Final = 2.0
"""How long a prefix that should come back into memory waits for room that demoting makes."""

PAUSE_S: Final = 1.0
"""Without a demotion after the tier has failed or is full: meanwhile memory is made room in by dropping."""

MEMORY_ONLY: Final = b"memory only"
"""The owner of a tier for a server that keeps nothing: what an earlier run left is cleaned."""

WRITERS: Final = 2
"""Prefixes written at once: one is hashed while the other is flushed."""

REST_S: Final = 0.1
"""Before the order of eviction is looked at again, when nothing in it could be written."""

STALL_S: Final = 2.0
"""A write that takes longer, beside its time at `SLOW_BYTES_PER_S`, is not waited for: prefixes are dropped instead."""

SLOW_BYTES_PER_S: Final = 32 * MIB

LOOKS: Final = 512
"""Units in the order of eviction that are looked at for one with rows."""


class Tiering:
    """The tier of one worker's store. `run` is its service."""

    def __init__(
        self,
        store: VStore,
        tier: GuardedTier,
        budget: Budget,
        disk: DiskBudget,
        data: Callable[[], DataDirectory | None],
    ) -> None:
        self.tier = tier
        self.statistics = TierStatistics()
        self._store = store
        self._budget = budget
        self._disk = disk
        self._data = data
        self._paused_until_s = 0.0
        self._writing = store.tier_files.writing
        self._late_s: dict[str, float] = {}
        """When who writes an object is no longer waited for."""
        self._grown = trio.Event()
        self._used: dict[TierFile, None] = {}
        self._promote = trio.Event()
        self._open: OrderedDict[TierFile, None] = OrderedDict()
        self._opening: dict[TierFile, trio.Lock] = {}
        self._threads = trio.CapacityLimiter(WRITERS)
        self._promoting = 0
        store.on_growth = self._on_growth
        store.tier_files.opener = self.open
        store.tier_files.on_use = self._on_use
        store.tier_files.on_forget = self._on_forget
        store.tier_files.on_withdraw = self._on_withdraw
        budget.tier_helps = self._helps
        # A tier that has not been listed yet doesn't know what earlier runs have put.
        disk.tier_bytes = lambda: max(tier.used_bytes, store.tier_files.nbytes)
        self._waste = Waste(store.tier_files, tier, data, self.statistics)
        disk.delete_garbage = self._waste.delete

    @property
    def open_objects(self) -> int:
        """Objects that are open now."""
        return len(self._open)

    # What the store asks and tells, on the event loop.

    def _orders(self) -> Orders:
        orders = self._store.policy
        assert isinstance(orders, Orders)  # noqa: S101  made so by the server
        return orders

    def _over(self, share: float) -> float:
        store, limit = self._store, self._store.config.max_bytes
        if not limit:
            return 0
        held = store.ledger.charged_bytes + store.in_flight() + self._promoting
        asked = self._budget.asked_bytes
        wanted = held + asked + COMMAND_BYTES - limit if asked else held - limit
        return max(held - share * limit, wanted)

    def _on_growth(self) -> None:
        if self._over(HIGH_SHARE) > 0:
            self._grown.set()

    def _helps(self) -> bool:
        """Whether waiting for a demotion is worth it."""
        if trio.current_time() < self._paused_until_s:
            return False
        self._grown.set()
        if len(self._writing) < WRITERS and self._next_victim() is not None:
            return True
        now_s = trio.current_time()
        return any(now_s < self._late_s.get(key, math.inf) for key in self._writing)

    def _on_use(self, file: TierFile) -> None:
        self.statistics.hits += 1
        if file in self._open:
            self._open.move_to_end(file)
        if file.uses >= PROMOTE_AFTER and file.unit.cold:
            self._used[file] = None
            self._promote.set()

    def _on_withdraw(self) -> None:
        self.statistics.withdrawn += 1

    def _on_forget(self, file: TierFile) -> None:
        self._used.pop(file, None)
        if self._open.pop(file, file) is None and file.opened is not None:
            file.opened.close()
            file.opened = None

    # The service.

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the tier and move rows. Raises StartupError.

        Cancellation: what is being written is thrown away by the next start; the tier is closed within a deadline.
        """
        await self._start()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._demote_all)
                nursery.start_soon(self._promote_all)
                nursery.start_soon(self._waste.run)
                task_status.started()
        finally:
            with trio.CancelScope(deadline=trio.current_time() + self.tier.policy.close_s, shield=True):
                await self.tier.aclose()

    async def _start(self) -> None:
        """Start the tier, and see to it that it is ours: what another data directory has in it would be cleaned."""
        data = self._data()
        owner = data.lineage if data is not None else MEMORY_ONLY
        try:
            await self.tier.start()
            try:
                found = read_head((await self.tier.open(OWNER_KEY)).mapping).register
            except TierMissError as error:
                if error.damaged:
                    raise StartupError(f"--tier-dir {self.tier.url}: its owner can't be told: {error}") from error
                layout = lay_out(OWNER_KEY, owner, ())
                await self.tier.put(OWNER_KEY, layout.head, layout.parts)
                return
        except TierUnavailableError as error:
            raise StartupError(f"--tier-dir {self.tier.url}: {error}") from error
        if found != owner:
            await self.tier.aclose()
            raise StartupError(
                f"--tier-dir {self.tier.url} belongs to a server with another --dir; give another directory, "
                "or remove this one if nobody needs what is in it"
            )

    # Demoting.

    async def _demote_all(self) -> None:
        while True:
            await self._grown.wait()
            self._grown = trio.Event()
            async with trio.open_nursery() as nursery:
                for _ in range(WRITERS):
                    nursery.start_soon(self._demote_some)
            if self._over(LOW_SHARE) > 0:
                await trio.sleep(REST_S)
                self._on_growth()  # it may have failed, and be back

    async def _demote_some(self) -> None:
        while self._over(LOW_SHARE) > 0 and trio.current_time() >= self._paused_until_s:
            unit = self._next_victim()
            if unit is None:
                return
            if self._store.withdraw(unit):
                await trio.lowlevel.checkpoint()
                continue
            key = secrets.token_hex(16)
            self._writing[key] = unit
            try:
                await self._place(unit, key)
            except TierMissError as error:  # a part of it was in the tier already
                logger.error("tier %s: %s: %s", self.tier.url, show(unit.name), error)
                self._store.drop_damaged(unit)
                _let_go(error)
            except TierUnavailableError as error:
                self._failed(f"{show(unit.name)} can't be written", error)
                self._store.tier_files.garbage[key] = None
                _let_go(error)
            except Exception:  # too many runs for a header, no memory: one prefix must not end the service
                logger.exception("tier %s: %s can't be written", self.tier.url, show(unit.name))
                self._store.tier_files.garbage[key] = None
                self._paused_until_s = trio.current_time() + PAUSE_S
            finally:
                del self._writing[key]
                self._late_s.pop(key, None)

    def _next_victim(self) -> Unit | None:
        busy = set(self._writing.values())
        # Without rows there is nothing to write: many such units at the front of the order are for eviction to drop.
        victims = islice(self._orders().warm.victims(), LOOKS)
        return next((unit for unit in victims if unit not in busy and next(unit.all_layers(), None) is not None), None)

    async def _place(self, unit: Unit, key: str) -> None:
        store = self._store
        rows = rows_of(unit)
        with store.tier_files.pinned(files_of(rows)):
            for file in files_of(rows):
                try:
                    await self.open(file)
                except TierMissError:
                    if file.refs and _is_there(store, unit):
                        raise
                    return  # its rows were replaced meanwhile
            layout = await trio.to_thread.run_sync(lay_out_rows, key, registration(unit), rows, limiter=self._threads)
        if layout is None:
            if rows_of(unit) == rows and _is_there(store, unit):
                store.drop_damaged(unit)
            return
        if not await self._disk.fit(layout.nbytes):
            self._paused_until_s = trio.current_time() + PAUSE_S  # what memory has no room for is dropped meanwhile
            return
        self._late_s[key] = trio.current_time() + STALL_S + layout.nbytes / SLOW_BYTES_PER_S
        await self.tier.put(key, layout.head, layout.parts)
        if not _is_there(store, unit) or not unit.evictable or unit.cold or rows_of(unit) != rows:
            store.tier_files.garbage[key] = None  # it was written for nothing
            return
        store.commit(PlaceRows(unit.name, unit.lone, key, layout.nbytes, layout.runs))
        self.statistics.demoted += 1
        self.statistics.demoted_bytes += layout.nbytes

    def _failed(self, what: str, error: TierError) -> None:
        self.statistics.failures += 1
        self._paused_until_s = trio.current_time() + PAUSE_S
        logger.warning("tier %s: %s: %s", self.tier.url, what, error)

    # Reading.

    async def open(self, file: TierFile) -> None:
        """Open an object, if it is not open. Raises TierError.

        Cancellation: no effect.
        """
        lock = self._opening.setdefault(file, trio.Lock())
        try:
            async with lock:
                if file.opened is not None:
                    return
                file.opened = await self._opened(file)
        finally:
            if not lock.statistics().tasks_waiting:
                self._opening.pop(file, None)
        self._open[file] = None
        for other in list(self._open):
            if len(self._open) <= OPEN_OBJECTS:
                break
            if not other.pins and other is not file:
                self._close(other)

    async def _opened(self, file: TierFile) -> OpenedObject:
        try:
            opened = await self.tier.open(file.key)
        except TierMissError:
            self.statistics.misses += 1
            raise
        except TierUnavailableError:
            self.statistics.failures += 1
            raise
        if opened.nbytes != file.nbytes:
            opened.close()
            self.statistics.misses += 1
            raise TierMissError(f"it has {opened.nbytes} bytes, not {file.nbytes}", damaged=True)
        if not file.refs:  # it was dropped meanwhile: its space must come back
            opened.close()
            raise TierMissError("it was dropped")
        return opened

    def _close(self, file: TierFile) -> None:
        """Let an object go that replies don't begin to use now. What is being sent from it stays readable."""
        del self._open[file]
        if file.refs:
            for layer in file.unit.all_layers():
                layer.exchange(
                    lambda memory: memory.anew() if isinstance(memory, TierMemory) and memory.file is file else None
                )
        if file.opened is not None:
            file.opened.close()
            file.opened = None

    # Promoting.

    async def _promote_all(self) -> None:
        while True:
            await self._promote.wait()
            self._promote = trio.Event()
            await trio.sleep(PROMOTE_LATER_S)
            while self._used:
                file = next(iter(self._used))
                del self._used[file]
                file.uses = 0
                try:
                    await self._bring_back(file)
                except TierError as error:  # the next reply will meet it, and say so
                    logger.info("tier %s: %s is not brought back: %s", self.tier.url, file.key, error)
                except Exception:  # no memory: one prefix must not end the service
                    logger.exception("tier %s: %s can't be brought back", self.tier.url, file.key)

    async def _bring_back(self, file: TierFile) -> None:
        store, unit = self._store, file.unit
        memories = {
            block.memory
            for layer in unit.all_layers()
            for block in layer.blocks
            if isinstance(block.memory, TierMemory) and block.memory.file is file
        }
        nbytes = sum(memory.nbytes for memory in memories)
        limit = store.config.max_bytes
        if not nbytes or nbytes > LARGEST_SHARE * limit:
            return
        self._promoting += nbytes
        try:
            with trio.move_on_after(ROOM_S):
                while self._over(PROMOTE_SHARE) > 0 and not self._store.relieve(nbytes):
                    self._grown.set()
                    await trio.sleep(LOOK_AGAIN_S)
            if self._over(PROMOTE_SHARE) > 0:
                return
            with store.tier_files.pinned([file]):
                await self.open(file)
                copies = await trio.to_thread.run_sync(copies_of, list(memories), limiter=self._threads)
            if copies is None or not _is_there(store, unit) or not unit.cold or self._over(1.0) > 0:
                return
            for layer in unit.all_layers():
                layer.exchange(
                    lambda memory: (
                        PromotedMemory(copies[memory], file, memory.run, store.ledger)
                        if isinstance(memory, TierMemory) and memory in copies
                        else None
                    )
                )
            if not unit.in_files:
                store.set_cold(unit, False)
                self.statistics.promoted += 1
                self.statistics.promoted_bytes += nbytes
        finally:
            self._promoting -= nbytes
            self._on_growth()


def _let_go(error: BaseException | None) -> None:
    """Take the rows out of the frames that an error came through: it may be in a cycle, and they must go now."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_there(store: VStore, unit: Unit) -> bool:
    return (store.lone if unit.lone else store.prefixes).get(unit.name) is unit
