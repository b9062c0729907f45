"""The process or the machine dies at every single operation on the disk: what is there afterwards is right.

`fault_workload` is what goes on meanwhile. After each death a server starts on what is left. It must find the state
after some number of the changes that were made: none that was acknowledged may be missing, except after a power cut
under `everysec` and `no`, where none that was flushed may be. `-s` shows how many deaths there were.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise
from random import Random

import attrs
import pytest
import trio

from pion.storage.changes import CreateSession
from pion.testing import Fault, MemoryDisk, Operation
from tests.storage.fault_support import (
    FakeClock,
    History,
    Injector,
    found_state,
    open_server,
    run_until_death,
    same_each_time,
    small,
)
from tests.storage.fault_workload import ENDS_IN_ORDER, SHAPE, Start, Workload, starts, store

__all__ = ["same_each_time", "small"]

MODES = ("always", "everysec", "no")
ORDERS = 3
"""Orders tried in which the system may have written what was not flushed."""

pytestmark = pytest.mark.usefixtures("small")


@attrs.frozen(eq=False)
class Death:
    """The process died before an operation, or (None) at the end of a life."""

    operation: Operation | None
    disk: MemoryDisk
    history: History

    def left(self) -> list[tuple[bool, MemoryDisk]]:
        """What there may be afterwards: whether the power was cut, and the disk."""
        numbers = Random(self.operation.number if self.operation else 0)
        disk, unflushed = self.disk, self.disk.unflushed
        cuts = [disk.crash(power=True, kept=kept) for kept in {0, unflushed, numbers.randint(0, unflushed)}]
        cuts += [disk.crash(power=True, order=Random(seed)) for seed in range(ORDERS)]
        return [(False, disk.crash()), *((True, cut) for cut in cuts)]


def check(disk: MemoryDisk, mode: str, history: History, *, power: bool, what: object) -> None:
    """A server starts, and finds a state that it may find."""
    first = history.first(power=power, mode=mode)
    found = found_state(disk, mode)
    assert found in history.states[first:], f"{what}: {lost(found, history, first)}"


def say(text: str) -> None:
    """Shown by `-s`."""
    sys.stdout.write(f"\n{text}\n")


def lost(found: object, history: History, first: int) -> str:
    if found in history.states:
        return f"state {history.states.index(found)} of {len(history.states)}, and {first} was promised"
    return f"a state that never was, {found}\nnot one of those from {first} on, {history.states[first:]}"


def deaths(mode: str) -> list[tuple[Start, list[Death]]]:
    """The state of everything before each operation of the workload, and at the end of each life."""
    found = []
    for start, workload in starts(mode):
        dead: list[Death] = []

        def look(workload: Workload = workload, dead: list[Death] = dead) -> None:
            workload.history.look(workload.disk)
            dead.append(Death(None, workload.disk.crash(), workload.history.copy()))

        workload.injector.look = look
        assert not run_until_death(workload.run)
        look()
        operations = [*workload.injector.seen, None]
        found.append((start, [attrs.evolve(each, operation=of) for each, of in zip(dead, operations, strict=True)]))
        assert workload.mapped_bytes > 0 or start.life == 0
    return found


@pytest.mark.usefixtures("same_each_time")
@pytest.mark.parametrize("mode", MODES)
def test_death_before_and_after_every_operation(mode: str) -> None:
    points = operations = 0
    kinds: Counter[str] = Counter()
    for start, dead in deaths(mode):
        operations += len(dead) - 1
        for death in dead:
            kinds[death.operation.kind if death.operation else ""] += 1
            for power, disk in death.left():
                check(disk, mode, death.history, power=power, what=(start.life, death.operation, power))
                points += 1
        last = dead[-1].history
        assert last.acknowledged > start.history.acknowledged
        assert last.flushed > start.history.flushed
    say(f"{mode}: {operations} operations, a death before and behind each, {points} restarts")
    assert points >= 5 * operations
    assert kinds.keys() == {"", "create", "write", "overwrite", "sync", "rename", "link", "unlink", "sync_directory"}


@pytest.mark.usefixtures("same_each_time")
def test_a_process_that_really_dies_leaves_the_same() -> None:
    """What was copied before an operation in a run without faults is what a death at that operation leaves."""
    mode, operations = "always", 0
    for start, dead in deaths(mode):
        for number, (before, after) in enumerate(pairwise(dead), start=1):
            for done, expected in ((False, before), (True, after)):
                workload = Workload(mode, start, Injector(number, Fault(done=done)))
                assert run_until_death(workload.run)
                assert workload.injector.hit == before.operation
                left, wanted = workload.disk.crash(), expected.disk.crash()
                assert left.names() == wanted.names()
                assert found_state(left, mode) == found_state(wanted, mode)
                check(left, mode, workload.history, power=False, what=before.operation)
            operations += 1
    assert operations >= 150


@pytest.mark.usefixtures("same_each_time")
@pytest.mark.parametrize("mode", MODES)
def test_torn_writes(mode: str) -> None:
    """A part of a write happens: one byte, half, all but one; and each part of the last record."""
    points = writes = 0
    for start, dead in deaths(mode):
        operations = [death.operation for death in dead if death.operation is not None]
        last = max(each.number for each in operations if each.kind == "write")
        for number, operation in enumerate(operations, start=1):
            if operation.kind not in ("write", "overwrite"):
                continue
            writes += 1
            size = operation.nbytes
            parts = range(1, size) if operation.number == last and start.life == 2 else {1, size // 2, size - 1}
            for done_bytes in parts:
                workload = Workload(mode, start, Injector(number, Fault(done_bytes=done_bytes)))
                assert run_until_death(workload.run)
                assert workload.disk.operations[-1] == operation
                history, disk = workload.history, workload.disk
                for power in (False, True):
                    left = disk.crash(power=power, order=Random(done_bytes))
                    check(left, mode, history, power=power, what=(start.life, operation, done_bytes, power))
                    points += 1
    say(f"{mode}: {writes} writes, {points} restarts behind a torn one")
    assert points >= 6 * writes


@pytest.mark.usefixtures("same_each_time")
@pytest.mark.parametrize("mode", MODES)
def test_two_deaths(mode: str) -> None:
    """A server starts behind every death, works, and dies with the machine: what it was told to be stored is there."""
    points = 0
    for start, dead in deaths(mode):
        for death in dead[:: 1 if mode == "always" else 2]:
            disk, history = death.disk.crash(), death.history.copy()
            history.states.append(found_state(disk, mode))
            history.acknowledge(len(history.states) - 1)
            disk.plan = Injector(look=lambda disk=disk, history=history: history.look(disk))
            run_until_death(go_on, disk, mode, history)
            history.look(disk)
            assert history.flushed == history.acknowledged or mode == "no"
            for left in (disk.crash(power=True), *(disk.crash(power=True, order=Random(seed)) for seed in range(2))):
                check(left, mode, history, power=True, what=(start.life, death.operation))
                points += 1
    say(f"{mode}: {points} restarts behind a second death")
    assert points >= 200


async def go_on(disk: MemoryDisk, mode: str, history: History) -> None:
    server = open_server(disk, mode, history, FakeClock())
    async with server.running():
        await server.change(CreateSession(b"again", SHAPE), store(b"again", 0, 0, 2, 20))
        await trio.sleep(1.1)


@pytest.mark.usefixtures("same_each_time")
def test_death_in_a_restart() -> None:
    """What a start does can be done again."""
    mode, points = "everysec", 0
    for start, dead in deaths(mode):
        for death in dead[::4]:
            for seed, (power, left) in enumerate(death.left()):
                number = 1
                while True:
                    disk, history = left.crash(), death.history.copy()
                    disk.plan = Injector(number, Fault())
                    if not run_until_death(only_start, disk, mode, history):
                        break
                    again = disk.crash(power=power, order=Random(seed))
                    check(again, mode, history, power=power, what=(start.life, death.operation, number))
                    number += 1
                    points += 1
                assert number > 4
    say(f"{mode}: {points} restarts behind a death in a restart")
    assert points >= 500


async def only_start(disk: MemoryDisk, mode: str, history: History) -> None:
    async with open_server(disk, mode, history).running():
        pass


@pytest.mark.usefixtures("same_each_time")
def test_the_second_life_ends_in_order() -> None:
    """The script has a shutdown: its snapshot has everything, so the next start replays nothing."""
    for start, workload in starts("no"):
        assert not run_until_death(workload.run)
        if start.life == ENDS_IN_ORDER:
            server = open_server(workload.disk.crash(), "no")
            assert server.data.loaded.records == 0
            assert server.data.loaded.snapshot


def test_death_with_real_threads() -> None:
    """As above, but what writes, flushes and takes snapshots does so at the same time as everything else."""
    mode, died = "everysec", 0
    tries = [(start, number) for start, dead in deaths(mode) for number in range(1, len(dead), 3)]
    for start, number in tries:
        workload = Workload(mode, start, Injector(number, Fault(done=bool(number % 2))))
        died += run_until_death(workload.run)
        history, disk = workload.history, workload.disk
        history.look(disk)
        for power, left in ((False, disk.crash()), (True, disk.crash(power=True, order=Random(number)))):
            check(left, mode, history, power=power, what=(start.life, workload.injector.hit))
    assert died >= 0.8 * len(tries) >= 40
