"""The binary lane behind real sockets: ports, bits, clients that read slowly, a broken disk."""

from __future__ import annotations

import resource
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pion.client import PionClient
from pion.command import FieldKind
from pion.config import Config
from pion.errors import StartupError
from pion.net.endpoints import open_listeners
from pion.net.table import Phase
from pion.protocol.binary import HEADER
from pion.protocol.binary_answers import frame
from pion.server import Started, serve
from pion.testing import ServerProcess, running_server
from tests.net.support import request

MIB = 1 << 20
ROWS, DIM = 2048, 1024
CONFIG = Config(plugins="connection,server,stats,vstore,kvprefix")


def name(value: bytes) -> bytes:
    return struct.pack("<H", len(value)) + value


def store(number: int, sid: bytes, layer: int, start: int, count: int, body: bytes) -> bytes:
    meta = name(sid) + struct.pack("<IIIB", layer, start, count, 3)
    return frame(0x11, number, 0, meta, len(body)) + body


def fetch(number: int, sid: bytes, layer: int, start: int, end: int) -> bytes:
    return frame(0x10, number, 0, name(sid) + struct.pack("<IIIB", layer, start, end, 3), 0)


@attrs.define
class Client:
    """Sends frames and receives answers: (code, id, status, meta, body)."""

    stream: trio.SocketStream

    async def receive(self, nbytes: int) -> bytes:
        received = bytearray()
        with trio.fail_after(30):
            while len(received) < nbytes:
                data = await self.stream.receive_some(min(1 << 18, nbytes - len(received)))
                if not data:
                    raise EOFError(bytes(received[:200]))
                received += data
        return bytes(received)

    async def answer(self) -> tuple[int, int, int, bytes, bytes]:
        magic, version, code, number, status, meta, body = HEADER.unpack(await self.receive(HEADER.size))
        assert (magic, version) == (0xCA5E, 1)
        return code, number, status, await self.receive(meta), await self.receive(body)

    async def call(self, data: bytes) -> tuple[int, int, int, bytes, bytes]:
        await self.stream.send_all(data)
        return await self.answer()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[int], Awaitable[Client]]]:
    """Opens clients, and closes them after the test."""
    opened: list[Client] = []

    async def open_client(port: int) -> Client:
        client = Client(await trio.open_tcp_stream("127.0.0.1", port))
        opened.append(client)
        return client

    yield open_client
    for client in opened:
        await client.stream.aclose()


async def create(started: Started, sid: bytes) -> None:
    async with await trio.open_tcp_stream("127.0.0.1", started.port) as stream:
        await stream.send_all(request(b"V.CREATE", sid, b"%d" % DIM, b"VQUANT", b"fp32"))
        assert await stream.receive_some(100) == b"+OK\r\n"


async def test_the_port_is_in_info_and_clients_show_their_lane(connect) -> None:
    async with running_server(CONFIG) as started:
        assert started.binary_port > 0
        assert started.services.listening[1:] == [f"pion-binary://127.0.0.1:{started.binary_port}"]
        client = await connect(started.binary_port)
        assert await client.call(frame(2, 5, 0, b"", 0)) == (2, 5, 0, b"", b"")
        async with await trio.open_tcp_stream("127.0.0.1", started.port) as stream:
            await stream.send_all(request(b"INFO", b"server"))
            assert b"binary_port:%d\r\n" % started.binary_port in await stream.receive_some(10_000)
            await stream.send_all(request(b"CLIENT", b"LIST"))
            lines = (await stream.receive_some(10_000)).split(b"\n")[1:3]
            assert [b" lane=resp " in line for line in lines] == [False, True]
            assert b" cmd=ping " in lines[0]
            assert b" lane=binary " in lines[0]
            await stream.send_all(request(b"CLIENT", b"KILL", b"ID", b"1"))
            assert await stream.receive_some(100) == b":1\r\n"
        with pytest.raises(EOFError):
            await client.answer()


async def test_large_bodies_in_a_pipeline_come_back_bit_for_bit(connect, tmp_path: Path) -> None:
    """With a log, so that each store waits for it, and after a restart."""
    blobs = [np.random.default_rng(n).integers(0, 256, ROWS * DIM * 4, np.uint8).tobytes() for n in range(3)]
    async with running_server(CONFIG, directory=tmp_path) as started:
        await create(started, b"s")
        client = await connect(started.binary_port)
        requests = [store(n, b"s", n, 0, ROWS, blob) for n, blob in enumerate(blobs)]
        requests += [fetch(10 + n, b"s", n, 0, ROWS) for n in range(3)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.stream.send_all, b"".join(requests))
            for n in range(3):
                assert await client.answer() == (0x11, n, 0, b"", b"")
            for n, blob in enumerate(blobs):
                assert await client.answer() == (0x10, 10 + n, 0, b"", blob)
        assert started.services.net.statistics().receiving_bytes == 0
    async with running_server(CONFIG, directory=tmp_path) as started:
        client = await connect(started.binary_port)
        assert (await client.call(fetch(1, b"s", 2, 5, 9)))[4] == blobs[2][5 * DIM * 4 : 9 * DIM * 4]


async def test_fifty_slow_readers_and_one_that_is_quick(connect) -> None:
    async with running_server(CONFIG) as started:
        await create(started, b"s")
        client = await connect(started.binary_port)
        blob = bytes(ROWS * DIM * 4)
        assert (await client.call(store(1, b"s", 0, 0, ROWS, blob)))[2] == 0
        slow = []
        for _ in range(50):
            sock = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await sock.connect(("127.0.0.1", started.binary_port))
            await sock.send(fetch(7, b"s", 0, 0, ROWS))
            slow.append(Client(trio.SocketStream(sock)))
        table = started.services.net
        with trio.fail_after(30):
            while sum(connection.phase is Phase.SENDING for connection in table._connections) < 50:
                await wait_all_tasks_blocked(0.005)
        for number in range(50):
            assert (await client.call(frame(2, number, 0, b"", 0)))[1] == number
        assert (await client.call(fetch(1, b"s", 0, 0, ROWS)))[4] == blob
        # Each of them gets its answer whole, when it reads at last.
        assert (await slow[0].answer()) == (0x10, 7, 0, b"", blob)
        for each in slow:
            await each.stream.aclose()
        with trio.fail_after(30):
            while table.statistics().connections > 1:
                await wait_all_tasks_blocked(0.005)
        assert table.statistics().unsent_bytes == 0


async def test_one_client_too_many_is_told_so_on_its_lane(connect) -> None:
    async with running_server(attrs.evolve(CONFIG, max_clients=1)) as started:
        client = await connect(started.binary_port)
        assert (await client.call(frame(2, 1, 0, b"", 0)))[2] == 0
        refused = await connect(started.binary_port)
        assert await refused.answer() == (0, 0, 1, b"", b"ERR max number of clients reached")
        with pytest.raises(EOFError):
            await refused.answer()


async def test_a_client_of_the_other_lane_hears_that_it_is_wrong_here(connect) -> None:
    async with running_server(CONFIG) as started:
        client = await connect(started.binary_port)
        code, number, status, _, body = await client.call(request(b"PING"))
        assert (code, number, status) == (0, 0, 1)
        assert body.startswith(b"ERR Protocol error: bad magic number; this is the binary lane")
        with pytest.raises(EOFError):
            await client.answer()


async def test_a_password_guards_this_lane_too(connect) -> None:
    async with running_server(attrs.evolve(CONFIG, requirepass="secret")) as started:
        client = await connect(started.binary_port)
        assert (await client.call(fetch(1, b"s", 0, 0, 1)))[2:] == (4, b"", b"NOAUTH Authentication required.")
        wrong = await client.call(frame(1, 2, 0, name(b"default") + name(b"wrong"), 0))
        assert wrong[2:] == (4, b"", b"WRONGPASS invalid username-password pair or user is disabled.")
        assert (await client.call(frame(1, 3, 0, name(b"default") + name(b"secret"), 0)))[2] == 0
        assert (await client.call(frame(2, 4, 0, b"", 0)))[2] == 0


async def test_every_length_of_meta_but_the_right_one_is_an_error_and_the_connection_goes_on(connect) -> None:
    """Over all commands that there are; the answer of the right length is whatever the command says."""
    async with running_server(CONFIG) as started:
        client = await connect(started.binary_port)
        sizes = {
            FieldKind.NAME: 3,
            FieldKind.WIRE: 1,
            FieldKind.U32: 4,
            FieldKind.U64: 8,
            FieldKind.F64: 8,
            FieldKind.RANGES: 16,
        }
        for code, row in sorted(started.services.registry.binary.items()):
            meta = b"".join(
                {FieldKind.NAME: b"\x01\0x", FieldKind.RANGES: b"\x01\0\0\0" + bytes(12)}.get(
                    field.kind, bytes(sizes[field.kind])
                )
                for field in row.meta
            )
            for wrong in (meta[:-1], meta + b"\0") if meta else (b"\0",):
                _, _, status, _, body = await client.call(frame(code, 9, 0, wrong, 0))
                assert (status, body[:8]) == (1, b"ERR meta"), hex(code)
            _, number, *_ = await client.call(frame(code, 10, 0, meta, 0))
            assert number == 10
        assert (await client.call(frame(2, 11, 0, b"", 0)))[1:3] == (11, 0)


# Ports


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def test_the_binary_port_follows_the_port_unless_it_is_given() -> None:
    port = 0
    while not 1024 < port < 65_535:
        port = free_port()
    opened = await open_listeners(Config(port=port, binary_port=0))
    assert (opened.tcp_port, opened.binary_port > 0) == (port, True)
    for each in opened.all:
        await each.aclose()
    for config, expected in ((Config(port=0), True), (Config(port=0, binary_port=-1), False)):
        opened = await open_listeners(config)
        assert (opened.binary_port > 0) is expected
        assert len(opened.describe()) == 1 + expected
        for each in opened.all:
            await each.aclose()


async def test_the_port_after_a_taken_one_names_the_lane_and_what_to_do() -> None:
    taken = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = taken[0].socket.getsockname()[1]
    message = rf"can't listen on 127.0.0.1:{port} for the binary lane: .*--binary-port 0 picks"
    with pytest.raises(StartupError, match=message):
        await serve(attrs.evolve(CONFIG, port=0, binary_port=port, dir=""))
    await taken[0].aclose()
    with pytest.raises(StartupError, match="there is no port after --port 65535 for the binary lane"):
        await serve(attrs.evolve(CONFIG, port=65_535, dir=""))


async def test_without_the_lane_there_is_no_port() -> None:
    async with running_server(attrs.evolve(CONFIG, binary_port=-1)) as started:
        assert started.binary_port == started.services.binary_port == 0
        assert len(started.services.listening) == 1


# A real process


class Blocking:
    """A blocking client of the binary lane."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=30)

    def call(self, data: bytes) -> Any:
        self.sock.sendall(data)
        head = self._receive(24)
        *_, status, meta, body = HEADER.unpack(head)
        return status, self._receive(meta) + self._receive(body)

    def _receive(self, nbytes: int) -> bytes:
        received = b""
        while len(received) < nbytes:
            received += self.sock.recv(nbytes - len(received)) or pytest.fail("the server closed the connection")
        return received


def test_a_disk_that_fails_is_misconf_on_this_lane_too(tmp_path: Path) -> None:
    """What could not be written is answered with that status; then stores are refused, fetches are not."""
    with ServerProcess("--kvcache", "--dir", str(tmp_path)) as server, PionClient(port=server.port) as client:
        assert server.binary_port > 0
        client.execute("V.CREATE", "s", 4)
        binary = Blocking(server.binary_port)
        assert binary.call(store(1, b"s", 0, 0, 1, bytes(8))) == (0, b"")
        unlimited = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        longest = max(path.stat().st_size for path in tmp_path.iterdir())
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (longest, unlimited[1]))
        for start in (1, 2):
            status, text = binary.call(store(2, b"s", 0, start, 1, bytes(8)))
            assert status == 11
            assert text.startswith(b"MISCONF ")
        assert binary.call(fetch(3, b"s", 0, 0, 1)) == (0, bytes(8))
        binary.sock.close()
