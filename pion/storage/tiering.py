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
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

import attrs
import numpy as np
import trio
from numpy.typing import NDArray

from pion.args import show
from pion.config import MIB, TIER_OPEN_OBJECTS
from pion.errors import StartupError
from pion.storage.block import Block, adjacent
from pion.storage.budget import COMMAND_BYTES, HIGH_SHARE, LOOK_AGAIN_S, LOW_SHARE, Budget
from pion.storage.changes import PlaceRows
from pion.storage.data_directory import DataDirectory
from pion.storage.disk_budget import DiskBudget
from pion.storage.orders import Orders
from pion.storage.placed import PromotedMemory, TierFile, TierMemory, placed_file
from pion.storage.region import MappedMemory
from pion.storage.tiers.base import OpenedObject, TierError, TierMissError, TierUnavailableError
from pion.storage.tiers.guard import GuardedTier
from pion.storage.tiers.tier_format import Layout, RowRun, lay_out, read_head
from pion.storage.unit import SIDES, Side, Unit
from pion.storage.vstore import VStore
from pion.storage.vstore_log import registration

logger = logging.getLogger("pion.tier")

PROMOTE_AFTER: Final = 2
"""Replies from the tier before rows come back into memory: one use more than the scan of a backup makes."""

PROMOTE_SHARE: Final = 0.97
"""Of the byte budget: what memory may hold after a promotion. Demoting makes room again."""

LARGEST_SHARE: Final = 0.5
"""Of the byte budget: a prefix larger than this is not brought back into memory."""

OPEN_OBJECTS: Final = TIER_OPEN_OBJECTS

ROOM_S: Final = 2.0
"""How long a prefix that should come back into memory waits for room that demoting makes."""

PAUSE_S: Final = 1.0
"""Without a demotion after the tier has failed or is full: meanwhile memory is made room in by dropping."""

OWNER_KEY: Final = "0" * 32
"""The object that says which data directory a tier belongs to."""

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

CLEAN_AGAIN_S: Final = 60.0
"""Before a tier that could not be cleaned is tried again."""

COMPLAIN_S: Final = 60.0
"""Between two warnings that objects can't be deleted, which is tried twice a second."""

DELETED_AT_ONCE: Final = 64
"""Objects: a call that has too many for its deadline would never succeed."""

TIDY_S: Final = 0.5
"""How long useless objects are gathered before they are deleted together."""


@attrs.define(eq=False)
class TierStatistics:
    """Since the start."""

    demoted: int = 0
    demoted_bytes: int = 0
    withdrawn: int = 0
    """Demotions for which nothing had to be written."""
    promoted: int = 0
    promoted_bytes: int = 0
    hits: int = 0
    """Replies with rows that were only in the tier."""
    misses: int = 0
    """Objects that were gone or damaged."""
    failures: int = 0
    """Times that the tier did not do what it was asked."""


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
        self._deleting = trio.Lock()
        self._promoting = 0
        self._complain_at_s = -math.inf
        store.on_growth = self._on_growth
        store.tier_files.opener = self.open
        store.tier_files.on_use = self._on_use
        store.tier_files.on_forget = self._on_forget
        store.tier_files.on_withdraw = self._on_withdraw
        budget.tier_helps = self._helps
        # A tier that has not been listed yet doesn't know what earlier runs have put.
        disk.tier_bytes = lambda: max(tier.used_bytes, store.tier_files.nbytes)
        disk.delete_garbage = self._delete_garbage

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
                nursery.start_soon(self._tidy)
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
        with store.tier_files.pinned(_files_of(rows)):
            for file in _files_of(rows):
                try:
                    await self.open(file)
                except TierMissError:
                    if file.refs and _is_there(store, unit):
                        raise
                    return  # its rows were replaced meanwhile
            layout = await trio.to_thread.run_sync(_lay_out, key, registration(unit), rows, limiter=self._threads)
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
                copies = await trio.to_thread.run_sync(_copies, list(memories), limiter=self._threads)
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

    # Deleting.

    async def _tidy(self) -> None:
        clean_at_s = trio.current_time()
        while True:
            if trio.current_time() >= clean_at_s:
                clean_at_s = math.inf if await self._clean() else trio.current_time() + CLEAN_AGAIN_S
            await trio.sleep(TIDY_S)
            await self._delete_garbage()

    async def _clean(self) -> bool:
        """Remove what earlier runs have left, and count what is there; False if it must be tried again."""
        files, data = self._store.tier_files, self._data()
        try:
            if data is not None:
                # What was replayed may not be flushed: a power cut now could bring back what refers to other objects.
                await data.log.wait_durable(data.log.sequence)
            cleaned = await self.tier.clean(
                lambda key: key in files.known or key in files.garbage or key in self._writing or key == OWNER_KEY
            )
        except OSError:
            return False
        except TierUnavailableError as error:
            self.statistics.failures += 1
            logger.warning("tier %s: it can't be cleaned: %s", self.tier.url, error)
            return False
        if cleaned.files:
            logger.info(
                "tier %s: removed %d files of earlier runs, %d bytes", self.tier.url, cleaned.files, cleaned.nbytes
            )
        return True

    async def _delete_garbage(self) -> bool:
        """Delete what nothing refers to; False if the tier or the log doesn't let us."""
        garbage, data = self._store.tier_files.garbage, self._data()
        async with self._deleting:
            while keys := list(islice(garbage, DELETED_AT_ONCE)):
                try:
                    if data is not None:
                        await data.log.wait_durable(data.log.sequence)
                    await self.tier.delete(keys)
                except OSError:
                    return False  # the log has failed, and says so; they may be needed after a restart
                except TierUnavailableError as error:
                    self.statistics.failures += 1
                    if trio.current_time() >= self._complain_at_s:
                        self._complain_at_s = trio.current_time() + COMPLAIN_S
                        logger.warning("tier %s: %d objects can't be deleted: %s", self.tier.url, len(garbage), error)
                    return False
                for key in keys:
                    del garbage[key]
        return True


Rows = list[tuple[Side, int, int, tuple[Block, ...]]]
"""Side, layer, bytes of a row, and the layer's blocks. Two are equal only if nothing was stored in between."""


def rows_of(unit: Unit) -> Rows:
    """All rows of a unit, in memory or not."""
    return [
        (side, index, layer.row_bytes, layer.blocks)
        for side in SIDES
        if (rows := unit.rows(side)) is not None
        for index, layer in rows.layers.items()
    ]


def _files_of(rows: Rows) -> list[TierFile]:
    files = dict.fromkeys(placed_file(block.memory) for *_, blocks in rows for block in blocks if block.memory.mapped)
    return [file for file in files if file is not None]


def _lay_out(key: str, register: bytes, rows: Rows) -> Layout | None:
    """Plan the object, in a thread; None if something that lies in a file is damaged."""
    runs: list[RowRun] = []
    for side, index, width, blocks in rows:
        for block in blocks:
            memory = block.memory
            if isinstance(memory, MappedMemory) and not memory.verify():
                return None
        for run in adjacent(blocks):
            parts = [block.view(block.start, block.stop, width) for block in run]
            runs.append(RowRun(side, index, run[0].start, run[-1].stop - run[0].start, parts))
    return lay_out(key, register, runs)


def _copies(memories: Sequence[TierMemory]) -> dict[TierMemory, NDArray[np.uint8]] | None:
    """Copies of rows in memory, made in a thread; None if some are damaged."""
    if not all(memory.verify() for memory in memories):
        return None
    return {memory: memory.buffer.copy() for memory in memories}


def _let_go(error: BaseException | None) -> None:
    """Take the rows out of the frames that an error came through: it may be in a cycle, and they must go now."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_there(store: VStore, unit: Unit) -> bool:
    return (store.lone if unit.lone else store.prefixes).get(unit.name) is unit
