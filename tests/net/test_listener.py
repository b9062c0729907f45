"""Accepting over real sockets, refusing, draining."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pion.net.listener import accept_forever, serve
from pion.net.table import ConnectionTable, Phase
from tests.net.support import Rig, request

MIB = 1 << 20


class Server:
    """A rig that listens on a TCP port and a Unix socket."""

    def __init__(self, rig: Rig, listeners: list[trio.SocketListener], table: ConnectionTable, path: Path) -> None:
        self.rig = rig
        self.port = listeners[0].socket.getsockname()[1]
        self.path = path
        self.table = table
        self.stopped = trio.Event()

    async def connect(self, kind: str = "tcp") -> trio.SocketStream:
        if kind == "tcp":
            return await trio.open_tcp_stream("127.0.0.1", self.port)
        return await trio.open_unix_socket(self.path)

    def drain(self) -> None:
        self.rig.services.draining.set()


@asynccontextmanager
async def serving(tmp_path: Path, **options: Any) -> AsyncIterator[Server]:
    rig = Rig(**options)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    await sock.bind(str(tmp_path / "s"))
    sock.listen(10)
    listeners.append(trio.SocketListener(sock))
    async with trio.open_nursery() as nursery:
        table = await nursery.start(serve, listeners, rig.services, rig.dispatcher)
        server = Server(rig, listeners, table, tmp_path / "s")

        yield server
        nursery.cancel_scope.cancel()
    for listener in listeners:
        await listener.aclose()


async def receive(stream: trio.SocketStream, nbytes: int) -> bytes:
    received = bytearray()
    with trio.fail_after(10):
        while len(received) < nbytes:
            data = await stream.receive_some(nbytes - len(received))
            if not data:
                break
            received += data
    return bytes(received)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_small_and_bulk_over_sockets(tmp_path, kind):
    async with serving(tmp_path) as server:
        stream = await server.connect(kind)
        async with stream:
            await stream.send_all(request(b"PING") * 300)
            assert await receive(stream, 7 * 300) == b"+PONG\r\n" * 300
            value = bytes(range(256)) * 4096 * 5 + b"tail"
            await stream.send_all(request(b"SET", b"k", value) + request(b"PING"))
            assert await receive(stream, 12) == b"+OK\r\n+PONG\r\n"
            header = b"$%d\r\n" % len(value)
            for _ in range(3):
                await stream.send_all(request(b"GET", b"k") + request(b"PING"))
                got = await receive(stream, len(header) + len(value) + 9)
                assert got == header + value + b"\r\n+PONG\r\n"
        session = server.rig.services.clients
        await wait_all_tasks_blocked(0.01)
        assert len(session) == 0


async def test_clients_are_named_by_their_address(tmp_path):
    async with serving(tmp_path) as server:
        tcp, unix = await server.connect(), await server.connect("unix")
        for stream in (tcp, unix):
            await stream.send_all(request(b"PING"))
            await receive(stream, 7)
        host, port = tcp.socket.getsockname()
        sessions = list(server.rig.services.clients)
        assert sessions[0].addr == f"{host}:{port}"
        assert sessions[0].laddr == f"127.0.0.1:{server.port}"
        assert sessions[1].laddr == sessions[1].addr == f"{tmp_path / 's'}:0"
        for stream in (tcp, unix):
            await stream.aclose()


async def test_one_client_too_many_is_told_and_closed(tmp_path):
    async with serving(tmp_path, max_clients=2) as server:
        streams = [await server.connect() for _ in range(2)]
        for stream in streams:
            await stream.send_all(request(b"PING"))
            assert await receive(stream, 7) == b"+PONG\r\n"
        third = await server.connect()
        assert await receive(third, 100) == b"-ERR max number of clients reached\r\n"
        assert server.rig.services.clients.statistics().rejected == 1
        await streams[0].aclose()
        with trio.fail_after(5):
            while len(server.rig.services.clients) == 2:
                await wait_all_tasks_blocked(0.01)
        fourth = await server.connect()
        await fourth.send_all(request(b"PING"))
        assert await receive(fourth, 7) == b"+PONG\r\n"
        for stream in (streams[1], third, fourth):
            await stream.aclose()


async def test_a_protocol_error_reaches_a_client_that_has_sent_more(tmp_path):
    """Closing a socket with unread bytes resets the connection: the error must get there first."""
    async with serving(tmp_path) as server:
        stream = await server.connect()
        await stream.send_all(b"*1\r\n$99999999999\r\n" + b"x" * 300_000)
        message = b"-ERR Protocol error: invalid bulk length\r\n"
        assert await receive(stream, len(message) + 1) == message
        await stream.aclose()


async def test_draining_closes_idle_connections_and_lets_the_others_finish(tmp_path):
    async with serving(tmp_path) as server:
        rig = server.rig
        idle, running, receiving = [await server.connect() for _ in range(3)]
        await idle.send_all(request(b"PING"))
        await receive(idle, 7)
        await running.send_all(request(b"BLOCK"))
        data = request(b"SET", b"k", b"x" * 100_000)
        await receiving.send_all(data[:50_000])
        with trio.fail_after(5):
            while (
                sum(c.phase is Phase.RECEIVING for c in server.table._connections) != 1
                or not rig.store.waiting.is_set()
            ):
                await wait_all_tasks_blocked(0.01)
        server.drain()
        assert await receive(idle, 1) == b""
        await receiving.send_all(data[50_000:])
        assert await receive(receiving, 6) == b"+OK\r\n"
        rig.store.gate.set()
        assert await receive(running, 6) == b"+OK\r\n"
        with trio.fail_after(5):
            while rig.services.clients:
                await wait_all_tasks_blocked(0.01)
        with pytest.raises(OSError, match="all attempts to connect"):
            await server.connect()
        for stream in (idle, running, receiving):
            await stream.aclose()


async def test_serve_returns_when_it_has_drained():
    rig = Rig()
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            await nursery.start(serve, listeners, rig.services, rig.dispatcher)
            rig.services.draining.set()
    assert listeners[0].socket.fileno() == -1


async def test_cancelling_serve_cuts_every_connection():
    rig = Rig()
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, listeners, rig.services, rig.dispatcher)
        stream = await trio.open_tcp_stream("127.0.0.1", listeners[0].socket.getsockname()[1])
        await stream.send_all(request(b"PING"))
        await receive(stream, 7)
        nursery.cancel_scope.cancel()
    assert await receive(stream, 1) == b""
    assert len(rig.closed) == 1
    await stream.aclose()
    await listeners[0].aclose()


class FailingListener:
    """accept() fails as told, then gives one socket, then waits."""

    def __init__(self, errors: list[int]) -> None:
        self.errors = errors
        self.times: list[float] = []

    async def accept(self):
        self.times.append(trio.current_time())
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, errno.errorcode[number])
        if not self.errors:
            self.errors = []
        if len(self.times) > 4:
            await trio.sleep_forever()
        return "socket", None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED])
async def test_accept_errors_do_not_stop_the_listener(number, autojump_clock, caplog):
    listener = FailingListener([number, number])
    accepted: list[object] = []
    with caplog.at_level(logging.WARNING, "pion.net"), trio.move_on_after(10):
        await accept_forever(listener, accepted.append)
    assert accepted == ["socket", "socket"]
    assert caplog.text.count("accept failed") == 2
    assert listener.times[1] - listener.times[0] == (0 if number == errno.ECONNABORTED else pytest.approx(0.1))


async def test_fifty_slow_readers_and_two_hundred_idle_clients_leave_memory_bounded(tmp_path):
    """Fault class 38, over real sockets: resident memory grows by far less than one reply."""
    async with serving(tmp_path) as server:
        size = 64 * MIB
        server.rig.store.values[b"k"] = memoryview(bytes(size))
        before = psutil.Process().memory_info().rss
        streams = [await server.connect() for _ in range(250)]
        for stream in streams[:50]:
            await stream.send_all(request(b"GET", b"k"))
        with trio.fail_after(20):
            while sum(c.phase is Phase.SENDING for c in server.table._connections) < 50:
                await wait_all_tasks_blocked(0.01)
        assert psutil.Process().memory_info().rss - before < 32 * MIB
        other = await server.connect()
        await other.send_all(request(b"PING"))
        assert await receive(other, 7) == b"+PONG\r\n"
        for stream in [*streams, other]:
            await stream.aclose()
