"""The disk fails, tears, or the machine dies at every single operation of a tier's directory.

What is there afterwards under the name of an object is whole: one of those that were put, or none. What was put, and
not replaced or deleted since, is there, also after a power cut. Nothing unfinished outlives a cleaning. `-s` shows how
many faults there were.
"""

from __future__ import annotations

import errno
import sys
from collections import Counter
from random import Random

import attrs
import pytest

from pion.storage.tiers import file as file_module
from pion.storage.tiers.base import TierMissError, TierUnavailableError
from pion.storage.tiers.file import FileTier, file_name
from pion.storage.tiers.tier_format import Layout, RowRun, lay_out, read_head
from pion.testing import Fault, Operation, ProcessDied
from pion.testing.tiers import MemoryTierDisk
from tests.storage.tiers.tier_support import in_place, listed, run_trio

__all__ = ["in_place"]

A, B, C, OLD = (f"{number:032x}" for number in range(1, 5))
STALE = f"{file_name(OLD)}.0123456789abcdef.tmp"
OTHER_VERSION = file_name(OLD).replace("tier-1", "tier-0")
FOREIGN = "notes.safetensors"

pytestmark = pytest.mark.usefixtures("in_place")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred bytes are written in several pieces."""
    monkeypatch.setattr(file_module, "CHUNK_BYTES", 700)


def layout_of(key: str, fill: int, rows: int = 100) -> Layout:
    return lay_out(key, b"register", [RowRun(0, 0, 0, rows, [bytes((fill,)) * (16 * rows)])], salt=fill)


LAYOUTS = {(key, fill): layout_of(key, fill) for key in (A, B, C) for fill in (1, 2)}


@attrs.define(eq=False)
class Workload:
    """Everything that a tier does, once; what it must have kept is in `kept`."""

    disk: MemoryTierDisk
    may: dict[str, set[int]] = attrs.field(factory=lambda: {key: {0} for key in (A, B, C)})
    """Which of its versions an object may be found in now; 0: none."""
    failures: list[TierUnavailableError] = attrs.field(factory=list)
    steps: int = 0

    async def run(self) -> None:
        tier = FileTier(self.disk)
        await tier.start()
        await self.put(tier, A, 1)
        await self.put(tier, B, 1)
        await self.put(tier, A, 2)
        await self.delete(tier, B)
        await self.put(tier, C, 1)
        await self.clean(tier, {A, C})
        await self.delete(tier, A, B, C)
        await self.put(tier, B, 2)
        await self.clean(tier, set())
        await tier.aclose()

    async def put(self, tier: FileTier, key: str, fill: int) -> None:
        layout = LAYOUTS[key, fill]
        self.may[key] = self.may[key] | {fill}
        try:
            await tier.put(key, layout.head, layout.parts)
        except TierUnavailableError as error:
            self.failures.append(error)
            self.may[key] = self.may[key] | {0}
        else:
            self.may[key] = {fill}
        await self.check(tier)

    async def delete(self, tier: FileTier, *keys: str) -> None:
        before = {key: self.may[key] for key in keys}
        for key in keys:
            # A removal is not flushed, so a power cut may undo it.
            self.may[key] = before[key] | {0}
        try:
            await tier.delete(keys)
        except TierUnavailableError as error:
            self.failures.append(error)
        await self.check(tier)

    async def clean(self, tier: FileTier, keep: set[str]) -> None:
        for key in self.may:
            if key not in keep:
                self.may[key] = self.may[key] | {0}
        try:
            await tier.clean(lambda key: key in keep)
        except TierUnavailableError as error:
            self.failures.append(error)
        await self.check(tier)

    async def check(self, tier: FileTier) -> None:
        """What readers find right now."""
        self.steps += 1
        for key, may in self.may.items():
            assert await found_in(tier, key) in may


async def found_in(tier: FileTier, key: str) -> int:
    """Which version of an object is there; 0: none. It is whole, or this fails."""
    try:
        opened = await tier.open(key)
    except TierMissError as error:
        if error.damaged:
            raise AssertionError(f"{key} is damaged: {error}") from error
        return 0
    head = read_head(opened.mapping, key)
    assert all(run.region(opened.mapping).verify() for run in head.runs)
    fill = opened.mapping.view[-1]
    assert head.runs == LAYOUTS[key, fill].runs
    return fill


async def look_after(disk: MemoryTierDisk, may: dict[str, set[int]]) -> None:
    """Another process starts on what is left."""
    tier = FileTier(disk)
    await tier.start()
    found = {key: await found_in(tier, key) for key in may}
    for key, fill in found.items():
        assert fill in may[key], f"{key}: {fill}, and it may be {may[key]}"
    cleaned = await tier.clean(lambda key: True)
    assert cleaned.errors == 0
    objects = {key: LAYOUTS[key, fill].nbytes for key, fill in found.items() if fill}
    assert await listed(tier) == objects
    assert tier.used_bytes == sum(objects.values())
    assert set(disk.names()) == {FOREIGN, *map(file_name, objects)}
    await tier.aclose()


def fresh_disk() -> MemoryTierDisk:
    """A directory that an earlier run left in the middle of its work, and somebody's own file."""
    disk = MemoryTierDisk()
    for name in (STALE, OTHER_VERSION, FOREIGN):
        file = disk.create(name)
        file.write([b"something"])
        file.sync()
    disk.sync_directory(FOREIGN)
    return disk


def run(plan: dict[int, Fault], *, onwards: bool = False) -> tuple[Workload, list[Operation], bool]:
    """The workload with faults at these of its operations; its operations, and whether it died."""
    disk = fresh_disk()
    before = len(disk.operations)

    def look(operation: Operation) -> Fault | None:
        number = operation.number - before
        return next((fault for at, fault in plan.items() if number == at or (onwards and number > at)), None)

    disk.plan = look
    workload, died = Workload(disk), False
    try:
        run_trio(workload.run)
    except ProcessDied:
        died = True
    return workload, disk.operations[before:], died


def left_of(disk: MemoryTierDisk) -> list[MemoryTierDisk]:
    """What there may be afterwards: the process died, or the machine, with any part of what was not flushed."""
    unflushed = disk.unflushed
    cuts = [disk.crash(power=True, kept=kept) for kept in {0, unflushed // 2, unflushed}]
    return [disk.crash(), *cuts, *(disk.crash(power=True, order=Random(seed)) for seed in range(4))]


def say(text: str) -> None:
    """Shown by `-s`."""
    sys.stdout.write(f"\n{text}\n")


def workload_operations() -> list[Operation]:
    workload, operations, died = run({})
    assert not died
    assert not workload.failures
    assert workload.steps == 9
    assert Counter(operation.kind for operation in operations) == {
        "create": 5,
        "write": 15,
        "sync": 5,
        "rename": 5,
        "sync_directory": 5,
        "unlink": 6,
    }
    run_trio(look_after, workload.disk.crash(), workload.may)
    return operations


def test_death_before_and_behind_every_operation() -> None:
    operations = workload_operations()
    points = 0
    for number in range(1, len(operations) + 1):
        for done in (False, True):
            workload, seen, died = run({number: Fault(done=done)})
            assert died
            assert [each.kind for each in seen] == [each.kind for each in operations[:number]]
            for left in left_of(workload.disk):
                run_trio(look_after, left, workload.may)
                points += 1
    say(f"{len(operations)} operations, a death before and behind each, {points} restarts")
    assert points >= 2 * 6 * len(operations)


def test_torn_writes() -> None:
    operations = workload_operations()
    points = writes = 0
    for number, operation in enumerate(operations, start=1):
        if operation.kind != "write":
            continue
        writes += 1
        for done_bytes in (1, operation.nbytes // 2, operation.nbytes - 1):
            workload, _, died = run({number: Fault(done_bytes=done_bytes)})
            assert died
            for left in left_of(workload.disk):
                run_trio(look_after, left, workload.may)
                points += 1
    say(f"{writes} writes, {points} restarts behind a torn one")
    assert writes == 15
    assert points >= 3 * 6 * writes


@pytest.mark.parametrize("onwards", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("part", [0, 300], ids=["nothing", "a part"])
def test_the_disk_fails_at_every_operation(error: int, part: int, onwards: bool) -> None:
    """Whoever asked is told so, the process goes on, and nothing that is not whole can be opened."""
    operations = workload_operations()
    points = 0
    for number, operation in enumerate(operations, start=1):
        workload, _, died = run({number: Fault(error=error, done_bytes=part)}, onwards=onwards)
        assert not died
        in_a_clean = operation.name in (STALE, OTHER_VERSION) or number == len(operations)
        assert workload.failures or in_a_clean, operation  # a cleaning says so in its result
        assert all(
            failure.full == (error == errno.ENOSPC) for failure in workload.failures if "removed" not in str(failure)
        )
        if not onwards:
            assert not [name for name in workload.disk.names() if name.endswith(".tmp") and name != STALE]
        workload.disk.plan = None
        for left in left_of(workload.disk):
            run_trio(look_after, left, workload.may)
            points += 1
    say(f"{len(operations)} operations that fail, {points} restarts")
    assert points >= 6 * len(operations)


def test_an_operation_that_fails_and_has_an_effect_all_the_same() -> None:
    """As a rename over a network may: the object may be there, and is whole."""
    operations = workload_operations()
    for number in range(1, len(operations) + 1):
        workload, _, died = run({number: Fault(error=errno.EIO, done=True)})
        assert not died
        workload.disk.plan = None
        for left in left_of(workload.disk):
            run_trio(look_after, left, workload.may)


def test_a_full_disk_is_told_and_leaves_no_file() -> None:
    """Fault class 42: a store that failed in the middle is not visible, and takes no room."""
    operations = workload_operations()
    first = next(number for number, each in enumerate(operations, start=1) if each.kind == "write")
    for number in (first + 1, first + 2):
        workload, _, _ = run({number: Fault(error=errno.ENOSPC, done_bytes=10)})
        assert [failure.full for failure in workload.failures] == [True]
        assert "No space left on device" in str(workload.failures[0])
        assert 1 not in workload.may[A] or 2 in workload.may[A]
