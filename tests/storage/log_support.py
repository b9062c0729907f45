"""What the tests of log, snapshot and recovery share: a family of the shortest kind, and threads that can be held."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pion.storage import recovery
from pion.storage.durable import Captured, Durable, Record
from pion.storage.recovery import Found
from pion.storage.region import Region
from pion.storage.wal import PREPARE_AFTER_S, Log, Position, Sync
from pion.testing import MemoryDisk

T = TypeVar("T")

LINEAGE = bytes(range(16))
FOREVER = 10**9
HELD_S = 20.0
"""Real time, after which what is held goes on."""


class Notes(Durable):
    """Keeps texts in order; their data, if any, behind them."""

    family = "notes"

    def __init__(self, family: str = "notes") -> None:
        self.family = family
        self.notes: list[bytes] = []
        self.undone: list[bytes] = []

    def add(self, text: bytes, data: bytes | None = None) -> Awaitable[None] | None:
        """Add a note; returns what a client waits for."""
        self.notes.append(text + (data or b""))
        return self.keep(Record(text, data), len(data or b""))

    def replay(self, meta: bytes, data: Region | None) -> None:
        if meta.startswith(b"bad"):
            raise ValueError("a bad note")
        self.notes.append(meta + (data.read() if data is not None else b""))

    def undo(self, items: Sequence[Any]) -> None:
        for item in items:
            self.undone.append(item.meta)
            self.notes.remove(item.meta + bytes(item.data or b""))

    def capture(self) -> Iterator[Captured]:
        return iter([Captured(note) for note in self.notes])


class Threads:
    """Stands for `trio.to_thread`: what should run in a thread runs at its place, when the test lets it.

    As there, it can't be cancelled once it has begun, and its limiter says how many run at once.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[trio.Event, threading.Timer]] = {}
        self.running: list[str] = []
        """Names of the functions that are under way."""

    def hold(self, name: str) -> None:
        """Functions of this name wait in the middle from now on."""
        event, token = trio.Event(), trio.lowlevel.current_trio_token()
        # So that a test that fails in between ends: it can't be cancelled while something is held.
        timer = threading.Timer(HELD_S, token.run_sync_soon, (event.set,))
        timer.daemon = True
        timer.start()
        self._held[name] = event, timer

    def release(self, name: str) -> None:
        """They go on."""
        event, timer = self._held.pop(name)
        timer.cancel()
        event.set()

    def stop(self) -> None:
        """The test is over."""
        for _, timer in self._held.values():
            timer.cancel()

    async def run_sync(
        self, function: Callable[..., T], *args: Any, limiter: trio.CapacityLimiter | None = None, **options: Any
    ) -> T:
        """See `trio.to_thread.run_sync`."""
        name = (function.func if isinstance(function, partial) else function).__name__
        await trio.lowlevel.checkpoint_if_cancelled()
        async with limiter or nullcontext():
            with trio.CancelScope(shield=True):
                self.running.append(name)
                await trio.lowlevel.checkpoint()
                if name in self._held:
                    await self._held[name][0].wait()
                self.running.remove(name)
                return function(*args)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    threads = Threads()
    monkeypatch.setattr(trio.to_thread, "run_sync", threads.run_sync)
    yield threads
    threads.stop()


@attrs.define(eq=False)
class Opened:
    """A log that runs, with one family."""

    disk: MemoryDisk
    log: Log
    notes: Notes
    nursery: trio.Nursery

    async def add(self, text: bytes, data: bytes | None = None) -> None:
        """As a command does it. Raises MisconfError."""
        self.notes.check()
        await self.notes.room()
        waiting = self.notes.add(text, data)
        if waiting is not None:
            await waiting

    async def stop(self) -> None:
        """As at the end of a server."""
        self.nursery.cancel_scope.cancel()
        await self.log.close()


def read(disk: MemoryDisk) -> tuple[Found, Notes]:
    """What a start finds. Raises StartupError."""
    notes = Notes()
    found = recovery.load(disk, 0, [notes])
    return found, notes


def reopened(disk: MemoryDisk, sync: Sync = Sync.ALWAYS, **options: Any) -> tuple[Log, Notes]:
    """A log behind what is on the disk, not open yet."""
    found, notes = read(disk)
    position = found.position if found.segments else Position(1, 1, LINEAGE)
    options = {"queue_bytes": FOREVER, "segments": found.sizes(), **options}
    log = Log(disk, 0, position, sync, **options)
    notes.log = log
    return log, notes


@asynccontextmanager
async def opened(disk: MemoryDisk, sync: Sync = Sync.ALWAYS, **options: Any) -> AsyncIterator[Opened]:
    """A log behind what is on the disk, that runs. The block's end is the death of the process."""
    log, notes = reopened(disk, sync, **options)
    await log.open()
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        yield Opened(disk, log, notes, nursery)
        nursery.cancel_scope.cancel()


async def prepared(clock: trio.testing.MockClock) -> None:
    """The next segment has been made, so that it is not what meets a test's fault."""
    clock.jump(PREPARE_AFTER_S)
    await wait_all_tasks_blocked()


def kinds(disk: MemoryDisk, since: int = 0) -> list[str]:
    """The operations on a disk."""
    return [operation.kind for operation in disk.operations[since:]]
