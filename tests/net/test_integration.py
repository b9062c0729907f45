"""The real store behind real sockets: what slow readers get, and what they can hold."""

from __future__ import annotations

import socket

import trio
from trio.testing import wait_all_tasks_blocked

from pion.config import Config
from pion.net.table import ConnectionTable
from pion.testing import running_server
from tests.net.support import request

MIB = 1 << 20
ROWS, DIM = 2048, 1024
SIZE = ROWS * DIM * 4


async def connect(port: int, receive_buffer: int | None = None) -> trio.SocketStream:
    sock = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await sock.connect(("127.0.0.1", port))
    return trio.SocketStream(sock)


async def receive(stream: trio.SocketStream, nbytes: int) -> bytes:
    received = bytearray()
    with trio.fail_after(20):
        while len(received) < nbytes:
            data = await stream.receive_some(min(1 << 16, nbytes - len(received)))
            if not data:
                break
            received += data
    return bytes(received)


async def call(stream: trio.SocketStream, expected: bytes, *arguments: bytes) -> None:
    await stream.send_all(request(*arguments))
    assert await receive(stream, len(expected)) == expected


async def store(stream: trio.SocketStream, sid: bytes, version: int) -> None:
    blob = bytes([version]) * SIZE
    await call(stream, b"+OK\r\n", b"V.STOREBATCH", sid, b"0", b"0", b"%d" % ROWS, b"AS", b"native", blob)


def fetch(sid: bytes) -> bytes:
    return request(b"V.FETCH", sid, b"0", b"RANGE", b"0", b"%d" % ROWS, b"AS", b"native")


async def blocked_readers(table: ConnectionTable, count: int) -> None:
    with trio.fail_after(10):
        while sum(connection.sender.blocked for connection in table._connections) < count:
            await wait_all_tasks_blocked(0.005)


async def until_blocked(table: ConnectionTable, reader: trio.SocketStream) -> None:
    host, port = reader.socket.getsockname()
    with trio.fail_after(10):
        while not any(each.sender.blocked and each.session.addr == f"{host}:{port}" for each in table._connections):
            await wait_all_tasks_blocked(0.005)


async def test_a_slow_reader_gets_one_whole_version_while_rows_are_replaced_dropped_and_evicted():
    """Fault class 46. What only the reply still holds stays counted until it is sent."""
    async with running_server(Config(kvcache=True, max_sessions=4)) as server:
        writer = await connect(server.port)
        ledger = server.services.vstore.ledger
        await call(writer, b"+OK\r\n", b"V.CREATE", b"s", b"%d" % DIM, b"VQUANT", b"fp32")
        await store(writer, b"s", 1)
        slow = await connect(server.port, receive_buffer=4096)
        await slow.send_all(fetch(b"s"))
        await blocked_readers(server.services.net, 1)
        await store(writer, b"s", 2)
        assert ledger.sending_bytes == SIZE
        await call(writer, b":1\r\n", b"V.DROP", b"s")
        for turn in range(12):
            sid = b"t%d" % turn
            await call(writer, b"+OK\r\n", b"V.CREATE", sid, b"%d" % DIM, b"VQUANT", b"fp32")
            await store(writer, sid, turn)
        assert ledger.sending_bytes == SIZE
        header = b"$%d\r\n" % SIZE
        got = await receive(slow, len(header) + SIZE + 2)
        assert got == header + b"\x01" * SIZE + b"\r\n"
        await call(slow, b"+PONG\r\n", b"PING")
        assert ledger.sending_bytes == 0
        await writer.aclose()
        await slow.aclose()


async def test_slow_readers_of_dropped_rows_are_cut_when_they_hold_too_much():
    """Fault class 38 with churn: each reader holds a version of its own."""
    limit = 3 * SIZE
    async with running_server(Config(kvcache=True, max_sending_bytes=limit)) as server:
        writer = await connect(server.port)
        ledger = server.services.vstore.ledger
        await call(writer, b"+OK\r\n", b"V.CREATE", b"s", b"%d" % DIM, b"VQUANT", b"fp32")
        readers = []
        for version in range(10):
            await store(writer, b"s", version)
            reader = await connect(server.port, receive_buffer=4096)
            await reader.send_all(fetch(b"s"))
            readers.append(reader)
            await until_blocked(server.services.net, reader)
            assert ledger.sending_bytes <= limit + SIZE
        await call(writer, b"+PONG\r\n", b"PING")
        assert server.services.net.statistics().slow_readers_dropped >= 5
        for reader in (*readers, writer):
            await reader.aclose()
        with trio.fail_after(10):
            while ledger.sending_bytes:
                await wait_all_tasks_blocked(0.005)


async def test_a_client_that_leaves_while_it_waits_is_noticed():
    async with running_server(Config()) as server:
        owner = await trio.open_tcp_stream("127.0.0.1", server.port)
        await owner.send_all(b"KV.PREFIX.REGISTER a 1 fp32 LAYERS 1 TOKENS 2\r\n")
        assert await owner.receive_some(100) == b"+OK\r\n"
        waiter = await trio.open_tcp_stream("127.0.0.1", server.port)
        await waiter.send_all(b"KV.PREFIX.LOOKUP a WAIT 600000\r\n")
        await waiter.send_eof()
        with trio.fail_after(30):
            assert await waiter.receive_some(100) == b"+MISS\r\n"
            assert await waiter.receive_some(100) == b""
        await owner.aclose()
        await waiter.aclose()
