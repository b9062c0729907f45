"""The disk refuses a single operation, or all from one on: the server says so, refuses changes, reads on, recovers.

What was acknowledged before is there after a restart, from the disk as it was left; `save` on a disk that works again
makes the server accept changes, and a restart after that finds everything, too. `-s` shows how many errors there were.
"""

from __future__ import annotations

import errno
import logging
import os
from random import Random

import attrs
import pytest

from pion.errors import StartupError
from pion.storage.changes import CreateSession
from pion.testing import Fault, MemoryDisk, Operation
from tests.storage.fault_support import History, Injector, check_rows, run_until_death, same_each_time, small, state_of
from tests.storage.fault_workload import ENDS_IN_ORDER, SHAPE, Start, Workload, starts, store
from tests.storage.test_fault_injection import MODES, check, say

__all__ = ["same_each_time", "small"]

pytestmark = pytest.mark.usefixtures("same_each_time")


@attrs.define(eq=False)
class Trial:
    """One life with an error in it, and what is left at several moments."""

    workload: Workload
    left: list[tuple[str, MemoryDisk, History]] = attrs.field(factory=list)
    refused_start: str = ""
    reported: bool = False
    logged: Logged = attrs.field(factory=lambda: Logged())

    def run(self) -> None:
        logger = logging.getLogger("pion")
        logger.addHandler(self.logged)
        try:
            assert not run_until_death(self._run)
        finally:
            logger.removeHandler(self.logged)
        for number, (what, disk, history) in enumerate(self.left, start=self.workload.injector.target):
            cuts = [(True, disk.crash(power=True, order=order)) for order in (None, Random(number), Random(-number))]
            for power, found in ((False, disk.crash()), *cuts):
                check(found, self.workload.mode, history, power=power, what=(self, what, power))

    def keep(self, what: str) -> None:
        workload = self.workload
        workload.history.look(workload.disk)
        self.left.append((what, workload.disk.crash(), workload.history.copy()))

    async def _run(self) -> None:
        workload = self.workload
        ends_in_order = workload.start.life == ENDS_IN_ORDER
        try:
            await workload.run(None if ends_in_order else self.recover)
        except* StartupError as errors:
            self.refused_start = str(errors.exceptions[0])
        self.heal()
        if ends_in_order or self.refused_start:
            self.assert_reported()
            self.keep("at the end")
            workload.start = attrs.evolve(workload.start, life=-1)
            await workload.run(self.recover)

    def heal(self) -> None:
        self.workload.injector.target = 0

    async def recover(self) -> None:
        """The server runs, after the error; the disk works again."""
        workload, server = self.workload, self.workload.server
        self.assert_reported()
        self.heal()
        check_rows(server.store)
        self.keep("behind the error")
        before, refused = state_of(server.store), server.data.log.error
        await server.save()
        assert state_of(server.store) == before
        assert server.data.log.error == ""
        self.keep("behind the save")
        await server.change(CreateSession(b"after", SHAPE), store(b"after", 0, 0, 9, 30))
        self.keep("behind the change")
        assert any(unit[1] == b"after" for unit in workload.history.states[workload.history.acknowledged])
        if refused:
            names = [name for name in workload.disk.names() if ".log." in name]
            assert len(names) <= 2, "a snapshot removes the log that it covers"

    def assert_reported(self) -> None:
        """Somebody was told, once the server of the error has ended or is asked."""
        if self.reported:
            return
        self.reported = True
        hit, workload = self.workload.injector.hit, self.workload
        assert hit is not None
        data = workload.server.data
        told = [*workload.told, data.log.error, data.snapshots.statistics().last_error, self.refused_start]
        if not any(told):
            # Without consequences: a file that nobody reads could not be removed, a segment not be made early.
            code = workload.injector.fault.error
            assert code is not None
            assert hit.kind == "unlink" or [text for text in self.logged.texts if os.strerror(code) in text], hit


class Logged(logging.Handler):
    """The warnings and errors of the server, for its operator."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def operations(mode: str) -> list[tuple[Start, int, Operation]]:
    """All of the workload: the life in which they happen, and their number in it."""
    found = []
    for start, workload in starts(mode):
        assert not run_until_death(workload.run)
        found += [(start, number, operation) for number, operation in enumerate(workload.injector.seen, start=1)]
    return found


def refuse(mode: str, start: Start, number: int, fault: Fault, *, onwards: bool = False) -> Trial:
    injector = Injector(number, fault, onwards)
    trial = Trial(Workload(mode, start, injector, tolerant=True))
    trial.run()
    return trial


# `test_a_disk_that_fails_from_an_operation_on` has the full disk under `everysec`.
@pytest.mark.parametrize(("mode", "code"), [*((mode, errno.EIO) for mode in MODES), ("always", errno.ENOSPC)])
def test_an_error_at_every_operation(mode: str, code: int) -> None:
    points = restarts = 0
    every = operations(mode)
    for start, number, operation in every:
        trial = refuse(mode, start, number, Fault(error=code))
        assert trial.workload.injector.hit == operation
        if trial.refused_start:
            assert code == errno.EIO
            assert os.strerror(code) in trial.refused_start
        points += 1
        restarts += len(trial.left) * 2
    say(f"{mode}: {points} times {errno.errorcode[code]}, {restarts} restarts")
    assert points >= len(every) >= 150


@pytest.mark.parametrize("mode", MODES)
def test_a_short_write_at_every_write(mode: str) -> None:
    points = 0
    every = operations(mode)
    for start, number, operation in every:
        if operation.kind in ("write", "overwrite"):
            trial = refuse(
                mode, start, number, Fault(error=errno.ENOSPC, done_bytes=operation.nbytes * number % 7 // 7 + 1)
            )
            assert trial.workload.injector.hit == operation
            points += 1
    say(f"{mode}: {points} short writes")
    assert points >= sum(each.kind in ("write", "overwrite") for _, _, each in every) >= 80


def test_a_disk_that_fails_from_an_operation_on() -> None:
    """Nothing works any more, so no snapshot helps; until somebody frees space."""
    mode = "everysec"
    every = operations(mode)
    for start, number, operation in every:
        trial = refuse(mode, start, number, Fault(error=errno.ENOSPC), onwards=True)
        assert trial.workload.injector.hit == operation
        assert not trial.refused_start
    say(f"{mode}: {len(every)} times a disk full from an operation on")
