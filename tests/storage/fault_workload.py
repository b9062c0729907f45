"""The scripted workload of the tests with faults: three lives of a server on one directory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import attrs
import trio

from pion.errors import CommandError, MisconfError
from pion.storage.changes import (
    Change,
    CreateSession,
    Declaration,
    DropPrefix,
    DropSession,
    Hashes,
    Register,
    SetExpiry,
    SetPin,
    StoreRows,
)
from pion.storage.formats import get_format
from pion.storage.schema import Schema
from pion.testing import FakeClock, MemoryDisk
from tests.storage.fault_support import DIM, History, Injector, Server, open_server, rows, state_of

SHAPE = Schema.uniform(get_format(b"fp32"), DIM)
BACKUP = "backups/one"
LIVES = 3
ENDS_IN_ORDER = 1
"""The life whose end is a shutdown."""


def store(sid: bytes, layer: int, start: int, stop: int, version: int = 1) -> StoreRows:
    return StoreRows(sid, layer, start, stop - start, rows(sid, layer, start, stop, version), 1)


def register(ns: bytes, tokens: int = 0, *, parent: bytes | None = None, offset: int = 0, **options) -> Register:
    declared = Declaration(2, tokens) if tokens else None
    return Register(
        ns=ns, k_schema=SHAPE, v_schema=SHAPE, declaration=declared, parent=parent, offset=offset, owner=1, **options
    )


@attrs.frozen(eq=False)
class Start:
    """What a life finds."""

    life: int
    """From 0; -1: one in which nothing is done."""
    disk: MemoryDisk
    history: History
    clock: FakeClock


def starts(mode: str) -> Iterator[tuple[Start, Workload]]:
    """Each life's start, and the life as it goes when nothing fails; it is run before the next is asked for."""
    start = Start(0, MemoryDisk(directories=["backups"]), History(), FakeClock())
    for life in range(LIVES):
        workload = Workload(mode, start)
        yield start, workload
        start = Start(life + 1, workload.disk.crash(), workload.history.copy(), FakeClock(workload.clock.wall_s()))


@attrs.define(eq=False)
class Workload:
    """Runs one life of the script, on copies of its start. With `tolerant` errors are noted, and the script goes on."""

    mode: str
    start: Start
    injector: Injector = attrs.field(factory=Injector)
    tolerant: bool = False
    told: list[str] = attrs.field(factory=list)
    """Errors that somebody was told."""
    mapped_bytes: int = 0
    """What lay in files when the server had started."""
    history: History = attrs.field(init=False)
    disk: MemoryDisk = attrs.field(init=False)
    clock: FakeClock = attrs.field(init=False)
    server: Server = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.history = self.start.history.copy()
        self.disk = self.start.disk.crash()
        self.disk.plan = self.injector
        self.clock = FakeClock(self.start.clock.wall_s())
        self.injector.look = lambda: self.history.look(self.disk)

    async def run(self, afterwards: Callable[[], Awaitable[None]] | None = None) -> None:
        """The life, and something behind it while the server still runs. Raises StartupError, in a group."""
        self.server = open_server(self.disk, self.mode, self.history, self.clock)
        self.mapped_bytes = self.server.store.ledger.mapped_bytes
        assert state_of(self.server.store) in self.history.states[self.history.acknowledged :]
        async with self.server.running():
            if self.start.life >= 0:
                await (self.first_life, self.second_life, self.third_life)[self.start.life]()
            if afterwards is not None:
                await afterwards()
        if self.start.life == ENDS_IN_ORDER:
            await self.server.data.close(save=True, grace_s=5)

    # One step each.

    async def do(self, *changes: Change) -> None:
        """One command."""
        refused, before = self.server.data.log.error, len(self.history.states)
        code = ""
        try:
            await self.server.change(*changes)
        except CommandError as error:
            self._note(error)
            code = error.code
        assert not refused or (code, len(self.history.states)) == (MisconfError.code, before)
        if refused:
            self.history.check_undone(self.server.store)

    async def together(self, *changes: Change) -> None:
        """Each by a client of its own, at once."""
        async with trio.open_nursery() as nursery:
            for change in changes:
                nursery.start_soon(self.do, change)

    async def one_by_one(self, *changes: Change) -> None:
        """By one client."""
        for change in changes:
            await self.do(change)

    async def save(self, path: str | None = None) -> None:
        try:
            await self.server.save(path)
        except MisconfError as error:
            self._note(error)
            assert self.server.data.snapshots.statistics().last_error

    def _note(self, error: CommandError) -> None:
        if not self.tolerant:
            raise error
        self.told.append(str(error))

    # The script.

    async def first_life(self) -> None:
        """Everything once; killed at the end."""
        await self.do(CreateSession(b"s", SHAPE))
        await self.do(store(b"s", 0, 0, 3))
        await self.do(store(b"s", 0, 1, 2, 2), store(b"s", 0, 5, 6, 2))
        await self.do(register(b"u", meta=b"about u", hashes=Hashes(2, b"u" * 16)))
        await self.together(store(b"u_pk", 0, 0, 4), store(b"u_pv", 0, 0, 4))
        await self.do(register(b"p", 8, meta=b"about p", hashes=Hashes(4, b"p" * 16), pin=True))
        await self.together(*(store(b"p_p%c" % side, layer, 0, 8) for side in b"kv" for layer in (0, 1)))
        await self.do(register(b"c", 2, parent=b"p", offset=8, expires_s=self.clock.wall_s() + 60))
        await self.together(*(store(b"c_p%c" % side, layer, 0, 2) for side in b"kv" for layer in (0, 1)))
        await trio.sleep(1.1)  # the log is flushed every second
        await self.do(store(b"s", 1, 0, 12))
        await self.do(SetExpiry(b"c", self.clock.wall_s() + 30), SetPin(b"p", False))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.save)
            nursery.start_soon(self.do, store(b"s", 1, 4, 6, 3))
            nursery.start_soon(self.one_by_one, store(b"u_pk", 0, 2, 5, 3), DropSession(b"s"), SetPin(b"p", True))
        await self.do(SetPin(b"p", False))
        await self.do(CreateSession(b"s", SHAPE), store(b"s", 0, 0, 10, 4))
        await self.do(register(b"q", 4))
        await self.do(store(b"q_pk", 0, 0, 4))
        await self.do(CreateSession(b"e1", SHAPE))
        await self.do(CreateSession(b"e2", SHAPE))  # evicts

    async def second_life(self) -> None:
        """From a log, with rows in it; stopped in order at the end."""
        await self.do(store(b"s", 0, 2, 4, 5))
        await self.do(DropPrefix(b"p"))  # and what continues it
        await self.do(register(b"p", 8, meta=b"another p"))
        await self.together(*(store(b"p_p%c" % side, layer, 0, 8, 6) for side in b"kv" for layer in (0, 1)))
        await self.save(BACKUP)
        await self.do(register(b"x", 2, parent=b"p", offset=4, expires_s=self.clock.wall_s() + 5))
        await self.together(*(store(b"x_p%c" % side, layer, 0, 2, 7) for side in b"kv" for layer in (0, 1)))
        await trio.sleep(1.1)
        self.clock.advance(6)
        self.server.store.drop_expired(10)
        await self.do(SetPin(b"p", True))

    async def third_life(self) -> None:
        """From a snapshot, with rows in it that are replaced while they move to the next; killed, too."""
        await self.do(CreateSession(b"n", SHAPE))
        await self.do(CreateSession(b"h_pk", SHAPE), store(b"h_pk", 0, 0, 2, 8))
        await self.do(register(b"h", meta=b"both sides of h"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.save)
            nursery.start_soon(self.do, store(b"s", 0, 6, 8, 8))
        await self.do(store(b"n", 0, 0, 9, 8))
        await self.save(BACKUP)
        await self.do(store(b"n", 0, 3, 5, 9))
