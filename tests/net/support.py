"""A worker with a handful of commands, and clients that are connected to it through memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import attrs
import trio

from pion.clients import ClientTable
from pion.command import BinaryCommand, Command, Field, FieldKind, Flag
from pion.config import Config
from pion.context import Clock, Context, Services, Transaction
from pion.dispatch import Dispatcher
from pion.errors import CommandError
from pion.monitor import Monitor
from pion.net.connection import Connection
from pion.net.lanes import MakeLane, RespLane
from pion.net.memory import MemoryTransport, memory_pair
from pion.net.table import ConnectionTable
from pion.receipt import Receipt
from pion.registry import Registry
from pion.replies import NO_REPLY, OK, BinaryReply, Blob, Buffer, Map, Reply, Simple, Stream
from tests.protocol.support import request

__all__ = ["Client", "Rig", "request"]

PONG = Simple("PONG")

FREE_MEMORY = SimpleNamespace(take=lambda *wanted: True, take_now=lambda *wanted: True, holds_back=False)
"""A byte budget without a limit."""


class Store:
    """What the commands below keep: values by key, and the events that tests and commands meet at."""

    def __init__(self) -> None:
        self.values: dict[bytes, Buffer] = {}
        self.gate = trio.Event()
        self.waiting = trio.Event()
        self.pieces_made = 0
        self.seen: list[bytes] = []

    async def ping(self, context: Context, argv: list[Buffer]) -> Reply:
        self.seen.append(bytes(argv[1]) if len(argv) > 1 else b"")
        return PONG if len(argv) == 1 else argv[1]  # type: ignore[return-value]

    async def set(self, context: Context, argv: list[Buffer]) -> Reply:
        self.values[bytes(argv[1])] = argv[2]
        return OK

    async def get(self, context: Context, argv: list[Buffer]) -> Reply:
        value = self.values.get(bytes(argv[1]))
        return None if value is None else Blob([value], len(value), owners=value)

    async def delete(self, context: Context, argv: list[Buffer]) -> Reply:
        return int(self.values.pop(bytes(argv[1]), None) is not None)

    async def stream(self, context: Context, argv: list[Buffer]) -> Reply:
        """STREAM declared made piece [thread]."""
        declared, made, piece = map(int, argv[1:4])

        def make(size: int) -> bytes:
            self.pieces_made += 1
            return b"s" * size

        def pieces() -> Iterator[Callable[[], Buffer]]:
            for start in range(0, made, piece):
                size = min(piece, made - start)
                yield lambda size=size: make(size)

        return Stream(declared, pieces(), in_thread=len(argv) > 4)

    async def block(self, context: Context, argv: list[Buffer]) -> Reply:
        self.waiting.set()
        await self.gate.wait()
        return OK

    async def fail(self, context: Context, argv: list[Buffer]) -> Reply:
        raise CommandError("refused")

    async def nonsense(self, context: Context, argv: list[Buffer]) -> Reply:
        return object()  # type: ignore[return-value]

    async def many(self, context: Context, argv: list[Buffer]) -> Reply:
        """MANY list|map count."""
        count = int(argv[2])
        return [7] * count if argv[1] == b"list" else Map([(7, 8)] * count)

    async def quit(self, context: Context, argv: list[Buffer]) -> Reply:
        context.session.closing = True
        return OK

    async def auth(self, context: Context, argv: list[Buffer]) -> Reply:
        context.session.authenticated = True
        return OK

    async def hello(self, context: Context, argv: list[Buffer]) -> Reply:
        context.session.resp = int(argv[1])
        return None

    async def reply(self, context: Context, argv: list[Buffer]) -> Reply:
        mode = bytes(argv[1]).upper()
        context.session.reply_off = mode == b"OFF"
        context.session.reply_skip = 2 if mode == b"SKIP" else 0
        return OK

    async def multi(self, context: Context, argv: list[Buffer]) -> Reply:
        context.session.transaction = Transaction()
        return OK

    async def execute(self, context: Context, argv: list[Buffer]) -> Reply:
        return await context.dispatch.execute_queued(context)

    async def none(self, context: Context, argv: list[Buffer]) -> Reply:
        return NO_REPLY

    # The same on the binary lane.

    async def packed_ping(self, context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply:
        self.seen.append(b"")
        return BinaryReply()

    async def packed_set(self, context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply:
        await self.set(context, [b"SET", values[0], body])
        return BinaryReply()

    async def packed_get(self, context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply:
        found = await self.get(context, [b"GET", values[0]])
        return BinaryReply(2) if found is None else BinaryReply(meta=b"m", body=found)  # type: ignore[arg-type]

    async def packed_stream(self, context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply:
        argv = [b"STREAM", *(b"%d" % value for value in values[:3])]
        return BinaryReply(body=await self.stream(context, argv))  # type: ignore[arg-type]

    async def packed_block(self, context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply:
        await self.block(context, [])
        return BinaryReply()

    async def packed_fail(self, context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply:
        raise CommandError("refused")

    async def packed_nonsense(self, context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply:
        return OK  # type: ignore[return-value]

    async def packed_auth(self, context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply:
        context.session.authenticated = True
        return BinaryReply()


def _rows(store: Store) -> list[Command]:
    def row(name: str, arity: int, handler: Any, flags: Flag = Flag.NONE) -> Command:
        return Command(name=name, arity=arity, summary="", since="0", handler=handler, flags=flags)

    return [
        row("PING", -1, store.ping),
        row("SET", 3, store.set),
        row("GET", 2, store.get),
        row("DEL", 2, store.delete),
        row("STREAM", -4, store.stream),
        row("BLOCK", -1, store.block, Flag.BLOCKING),
        row("FAIL", 1, store.fail),
        row("NONSENSE", 1, store.nonsense),
        row("MANY", 3, store.many),
        row("QUIT", 1, store.quit, Flag.NO_AUTH),
        row("AUTH", 2, store.auth, Flag.NO_AUTH),
        row("HELLO", 2, store.hello),
        row("REPLY", 2, store.reply),
        row("MULTI", 1, store.multi, Flag.NO_MULTI),
        row("EXEC", 1, store.execute, Flag.NO_MULTI),
        row("NONE", 1, store.none),
    ]


KEY = Field("key", FieldKind.NAME)
CODES = {"AUTH": 1, "PING": 2, "SET": 3, "GET": 4, "STREAM": 5, "BLOCK": 6, "FAIL": 7, "NONSENSE": 8}


def _packed_rows(store: Store) -> list[BinaryCommand]:
    numbers = tuple(Field(name, FieldKind.U32) for name in ("declared", "made", "piece"))

    def row(name: str, handler: Any, *meta: Field, body: str = "") -> BinaryCommand:
        return BinaryCommand(code=CODES[name], command=name, handler=handler, meta=meta, body=body)

    return [
        row("AUTH", store.packed_auth),
        row("PING", store.packed_ping),
        row("SET", store.packed_set, KEY, body="the value"),
        row("GET", store.packed_get, KEY),
        row("STREAM", store.packed_stream, *numbers),
        row("BLOCK", store.packed_block, KEY),
        row("FAIL", store.packed_fail),
        row("NONSENSE", store.packed_nonsense),
    ]


@attrs.define(eq=False)
class Client:
    """The test's end of a connection."""

    transport: MemoryTransport
    connection: Connection

    async def send(self, *data: bytes) -> None:
        """Send raw bytes."""
        with trio.fail_after(5):
            await self.transport.send_all(b"".join(data))

    async def call(self, *arguments: bytes) -> None:
        """Send one request."""
        await self.send(request(*arguments))

    async def receive(self, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes, or what comes before the end of the stream."""
        received = bytearray()
        with trio.fail_after(5):
            while len(received) < nbytes:
                data = await self.transport.receive_some(nbytes - len(received))
                if not data:
                    break
                received += data
        return bytes(received)

    async def expect(self, reply: bytes) -> None:
        """The next bytes are `reply`."""
        assert await self.receive(len(reply)) == reply

    async def expect_end(self) -> None:
        """Nothing more comes."""
        assert await self.receive(1) == b""


class Rig:
    """A worker whose clients connect through memory. `closed` is a list of the sessions whose connection ended."""

    def __init__(self, **options: Any) -> None:
        self.store = Store()
        self.registry = Registry()
        self.registry.add("test", _rows(self.store))
        self.registry.add_binary("test", _packed_rows(self.store))
        self.monitor = Monitor(slower_than_us=10_000_000, max_len=10)
        self.ledger = SimpleNamespace(sending_bytes=0)
        self.services = Services(
            config=Config(**options),
            clock=Clock(),
            registry=self.registry,
            vstore=cast("Any", SimpleNamespace(ledger=self.ledger)),
            budget=cast("Any", FREE_MEMORY),
            receipt=Receipt(),
            clients=ClientTable(),
            monitor=self.monitor,
            started_s=0.0,
        )
        self.closed: list[int] = []
        self.services.disconnect = [lambda session: self.closed.append(session.id)]
        self.dispatcher = Dispatcher(self.registry, self.monitor)
        self.table = ConnectionTable(self.services)
        self.nursery: trio.Nursery

    @classmethod
    @asynccontextmanager
    async def running(cls, **options: Any) -> AsyncIterator[Rig]:
        """A rig whose connections live in a nursery; at the end they are cancelled."""
        rig = cls(**options)
        async with trio.open_nursery() as nursery:
            rig.nursery = nursery
            yield rig
            nursery.cancel_scope.cancel()

    def connect(self, capacity: int = 1 << 20, make_lane: MakeLane = RespLane) -> Client:
        """A new client; the server's replies wait in a pipe of `capacity` bytes."""
        there, here = memory_pair(capacity)
        connection = Connection(here, self.services, self.dispatcher, self.table, make_lane)
        self.nursery.start_soon(connection.run)
        return Client(there, connection)
