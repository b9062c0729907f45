"""The process or the machine dies at every single operation on the log's and the tier's disk.

Rows are stored, leave memory, come back, are replaced and dropped meanwhile. After each death a server starts on what
is left of both disks: each prefix that was promised has its bytes, each that was dropped is gone, and nothing is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import attrs
import pytest
import trio
from trio.testing import MockClock

from pion.config import Config
from pion.storage import vstore_log
from pion.storage.budget import Budget
from pion.storage.changes import CreateSession, Declaration, DropPrefix, Reason, Register, StoreRows
from pion.storage.data_directory import DataDirectory, open_disk
from pion.storage.disk_budget import DiskBudget
from pion.storage.formats import get_format
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.placed import TierMemory
from pion.storage.region import MappedMemory
from pion.storage.schema import Schema
from pion.storage.tiering import Tiering
from pion.storage.tiers.file import FileTier
from pion.storage.tiers.guard import GuardedTier
from pion.storage.unit import SIDES, Unit
from pion.storage.vstore import VStore
from pion.storage.vstore_log import VStoreLog
from pion.testing import FakeClock, MemoryDisk, Operation
from pion.testing.tiers import MemoryTierDisk
from tests.storage.fault_support import same_each_time, small

__all__ = ["same_each_time", "small"]

pytestmark = pytest.mark.usefixtures("same_each_time")

DIM = 16
WIDTH = 4 * DIM
ROWS = 64
SHAPE = Schema.uniform(get_format(b"fp32"), DIM)
MAX_BYTES = 70_000
"""Six prefixes."""
ORDERS = 2
"""Orders tried in which the system may have written what was not flushed."""


def rows(name: bytes, side: int, version: int = 0) -> bytes:
    return b"".join((b"%b|%d|%d|%d|" % (name, side, version, row)).ljust(WIDTH, b".") for row in range(ROWS))


@attrs.define(eq=False)
class Server:
    """What `pion.server` makes of two disks, without sockets."""

    disk: MemoryDisk
    tier_disk: MemoryTierDisk
    mode: str = "always"
    store: VStore = attrs.field(init=False)
    data: DataDirectory = attrs.field(init=False)
    tiering: Tiering = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        config = Config(max_bytes=MAX_BYTES, max_sessions=1000, wal_sync=self.mode)
        self.store = store = VStore(config, FakeClock(), NullJournal(), Ledger())
        self.data = open_disk(self.disk, config, [VStoreLog(store)], lambda: store.unplaced_bytes, segment_limit=60_000)
        budget = DiskBudget(store, lambda: self.data)
        tier = GuardedTier(FileTier(self.tier_disk))
        self.tiering = Tiering(store, tier, Budget(store, budget), budget, lambda: self.data)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.data.run)
            await nursery.start(self.tiering.run)
            yield
            nursery.cancel_scope.cancel()

    async def settle(self) -> None:
        """Memory is as empty as it gets."""
        for _ in range(500):
            if self.tiering._over(0.85) <= 0 and not self.tiering._writing:
                return
            self.tiering._grown.set()  # as the next change would
            await trio.sleep(0.01)
        raise AssertionError(f"nothing leaves memory: {self.store.ledger.charged_bytes}, {self.tiering.statistics}")

    async def change(self, *changes: object) -> None:
        """Made, and in the log."""
        for waiting in [self.store.commit(change) for change in changes]:  # type: ignore[arg-type]
            if waiting is not None:
                await waiting

    async def read(self, unit: Unit) -> dict[int, bytes]:
        """The rows of each side. Raises TierError."""
        found: dict[int, bytes] = {}
        for side in SIDES:
            held = unit.rows(side)
            for layer in held.layers.values() if held is not None else ():
                for block in layer.blocks:
                    if isinstance(block.memory, TierMemory):
                        self.store.tier_files.used(block.memory.file)
                        await self.tiering.open(block.memory.file)
                    if isinstance(block.memory, MappedMemory):
                        assert block.memory.verify()
                    found[side] = found.get(side, b"") + bytes(block.view(block.start, block.stop, WIDTH))
        return found


@attrs.define(eq=False)
class Promises:
    """What was told: for each name the versions that a restart may find, and whether it may find none."""

    versions: dict[bytes, set[int]] = attrs.field(factory=dict)
    optional: set[bytes] = attrs.field(factory=set)

    def copy(self) -> Promises:
        return Promises({name: set(found) for name, found in self.versions.items()}, set(self.optional))


@attrs.define(eq=False)
class Workload:
    """One life, in which everything happens."""

    server: Server
    now: Promises = attrs.field(factory=Promises)
    flushed: Promises = attrs.field(factory=Promises)
    """What a power cut may not take: what was promised when the whole log was flushed, or is possible since then."""

    async def put(self, name: bytes) -> None:
        """A declared prefix."""
        self.now.optional.add(name)
        self.now.versions[name] = {0}
        shape = {"k_schema": SHAPE, "v_schema": SHAPE, "declaration": Declaration(1, ROWS)}
        await self.server.change(Register(ns=name, owner=1, **shape))  # type: ignore[arg-type]
        sides = [
            StoreRows(name + suffix, 0, 0, ROWS, rows(name, side), 1) for side, suffix in enumerate((b"_pk", b"_pv"))
        ]
        await self.server.change(*sides)
        self.now.optional.discard(name)
        await self.server.settle()

    async def put_lone(self, name: bytes, version: int) -> None:
        """A session whose rows are all stored anew."""
        there = name in self.now.versions
        self.now.versions.setdefault(name, set()).add(version)
        if not there:
            self.now.optional.add(name)
            await self.server.change(CreateSession(name, SHAPE))
        await self.server.change(StoreRows(name, 0, 0, ROWS, rows(name, 0, version), 1))
        self.now.versions[name] = {version}
        self.now.optional.discard(name)
        await self.server.settle()

    async def drop(self, name: bytes) -> None:
        self.now.optional.add(name)
        await self.server.change(DropPrefix(name))
        del self.now.versions[name]
        self.now.optional.discard(name)

    async def use(self, name: bytes) -> None:
        """Twice, which brings it back; and other prefixes push it out again, without writing."""
        for _ in range(2):
            await self.server.read(self.server.store.prefixes[name])
        for _ in range(20):
            await trio.sleep(0.01)

    async def run(self) -> None:
        server = self.server
        async with server.running():
            for name in (b"a", b"b", b"c", b"d", b"e", b"m", b"n", b"o"):
                await self.put(name)
            await self.put_lone(b"s", 1)
            assert server.store.prefixes[b"a"].cold
            assert server.store.prefixes[b"b"].cold
            await self.drop(b"b")
            await self.drop(b"e")
            await trio.sleep(1)
            await self.use(b"a")
            assert not server.store.prefixes[b"a"].cold
            for name in (b"f", b"g", b"h"):
                await self.put(name)
            assert server.store.lone[b"s"].cold
            await self.put_lone(b"s", 2)
            for name in (b"i", b"j", b"k"):
                await self.put(name)
            assert server.store.lone[b"s"].cold
            await trio.sleep(1)
            await server.data.save()
            await self.drop(b"c")
            await self.drop(b"d")
            await self.put_lone(b"s", 3)
            await self.put(b"l")
            await trio.sleep(1)
            statistics = server.tiering.statistics
            assert statistics.demoted >= 9
            assert statistics.promoted >= 1
            assert server.store.dropped[Reason.EVICTED] == 0
            assert not server.store.tier_files.garbage


@attrs.frozen(eq=False)
class Death:
    """Both disks and what was promised, before an operation."""

    operation: Operation
    disk: MemoryDisk
    tier_disk: MemoryTierDisk
    now: Promises
    flushed: Promises


@functools.cache
def deaths(mode: str) -> list[Death]:
    disk, tier_disk = MemoryDisk(), MemoryTierDisk()
    found: list[Death] = []
    workload = Workload(Server(disk, tier_disk, mode))

    def look(operation: Operation) -> None:
        names = [name for name in disk.names() if not name.endswith(".tmp")]
        if all(disk.flushed(name) for name in names):
            workload.flushed = workload.now.copy()
        else:  # what has changed since may be found, too
            for name, versions in workload.now.versions.items():
                if name not in workload.flushed.versions:
                    workload.flushed.optional.add(name)
                workload.flushed.versions.setdefault(name, set()).update(versions)
            gone = workload.flushed.versions.keys() - workload.now.versions.keys()
            workload.flushed.optional |= gone | workload.now.optional
        found.append(Death(operation, disk.crash(), tier_disk.crash(), workload.now.copy(), workload.flushed.copy()))

    disk.plan = tier_disk.plan = look  # type: ignore[assignment]
    trio.run(workload.run, clock=MockClock(autojump_threshold=0))
    return found


async def check(disk: MemoryDisk, tier_disk: MemoryTierDisk, mode: str, promises: Promises, what: object) -> None:
    server = Server(disk, tier_disk, mode)
    async with server.running():
        store = server.store
        there = {**store.prefixes, **store.lone}
        for name, unit in there.items():
            assert name in promises.versions or name in promises.optional, f"{what}: {name!r} was dropped"
            if unit.lone and unit.rows(0) is None:
                assert name in promises.optional
                continue
            found = await server.read(unit)
            sides = (0,) if unit.lone else SIDES
            possible = [{side: rows(name, side, version) for side in sides} for version in promises.versions[name]]
            assert found in possible, f"{what}: {name!r}"
        missing = promises.versions.keys() - there.keys() - promises.optional
        assert not missing, f"{what}: {missing} are lost"
        assert store.checksum_failures == 0
        for _ in range(3):
            await trio.sleep(1)  # the tier is cleaned
        keys = {name.partition(".")[0] for name in tier_disk.names() if name.endswith(".safetensors")}
        assert store.tier_files.known.keys() <= keys


def restart(disk: MemoryDisk, tier_disk: MemoryTierDisk, mode: str, promises: Promises, what: object) -> None:
    trio.run(check, disk, tier_disk, mode, promises, what, clock=MockClock(autojump_threshold=0))


def test_the_process_dies_at_every_operation() -> None:
    found = deaths("always")
    kinds = {death.operation.kind for death in found}
    assert {"create", "write", "sync", "rename", "sync_directory", "unlink"} <= kinds
    assert len(found) > 100
    for number, death in enumerate(found):
        restart(death.disk, death.tier_disk, "always", death.now, (number, death.operation))


@pytest.mark.parametrize("mode", ["always", "no"])
def test_the_power_is_cut_at_every_operation(mode: str) -> None:
    for number, death in enumerate(deaths(mode)):
        promises = death.now if mode == "always" else death.flushed
        cuts = [(death.disk.crash(power=True), death.tier_disk.crash(power=True))]
        for seed in range(ORDERS):
            order = Random(f"{number}:{seed}")
            cuts.append((death.disk.crash(power=True, order=order), death.tier_disk.crash(power=True, order=order)))
        for cut, (disk, tier_disk) in enumerate(cuts):
            restart(disk, tier_disk, mode, promises, (number, cut, death.operation))


def test_the_log_is_what_maps() -> None:
    """Rows of these tests are long enough to stay in the log's file after a start."""
    assert vstore_log.MAP_FROM_BYTES <= ROWS * WIDTH
