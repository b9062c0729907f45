"""Both clients with two lanes, against a scripted server: when which is used, and what a fault of one does."""

from __future__ import annotations

import os
import signal
import socket
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from pion.client import PionClient, aio, errors
from pion.client.connection import Connection
from pion.client.limits import BINARY_PATIENCE_S

from .binary_fakes import BothLanes, Got, both_lanes, frame, frames, greet, read_frame, reply_with, sides
from .fakes import FakeServer, Peer, Script, array, bulk, requests

PARTS = (b"k" * 70_000, b"v" * 4)
OVER_BINARY = sides(*PARTS)


def over_resp(request: list[bytes]) -> bytes:
    """Tells that it came over RESP."""
    return array(bulk(b"RESP"), bulk(b""))


def got(parts: list[Any]) -> list[bytes]:
    return [part.tobytes() for part in parts]


class Sync:
    """The synchronous client, its calls awaited in a thread of its own."""

    def __init__(self, **options: Any) -> None:
        self.client = PionClient(**options)
        self.client._lines._sleep = lambda _: None

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **options: Any) -> Any:
            return await trio.to_thread.run_sync(partial(getattr(self.client, name), *args, **options))

        return call


@pytest.fixture(params=["sync", "aio"])
async def connect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    monkeypatch.setattr("pion.client.settings.FIRST_PAUSE_S", 0.001)
    made: list[Any] = []

    def make(server: BothLanes | FakeServer, **options: Any) -> Any:
        options = {"port": server.port, "timeout_s": 10, **options}
        made.append(Sync(**options) if request.param == "sync" else aio.PionClient(**options))
        return made[-1]

    yield make
    for client in made:
        (client.client if isinstance(client, Sync) else client).close()


async def test_the_lane_is_looked_for_once_and_only_when_it_helps(connect: Callable[..., Any]) -> None:
    with both_lanes(reply_with(OVER_BINARY), resp=lambda request: b":1\r\n") as server:
        client = connect(server)
        assert await client.v_drop("s") == 1
        assert server.over_resp == [b"V.DROP"]
        for _ in range(3):
            assert got(await client.prefix_fetch("ns")) == list(PARTS)
        assert await client.v_drop("s") == 1
        assert server.over_resp == [b"V.DROP", b"INFO", b"V.DROP"]
        assert (server.resp.served, server.binary.served) == (1, 1)


async def test_what_is_sent(connect: Callable[..., Any]) -> None:
    seen: list[Got] = []

    def make(request: Got) -> bytes:
        seen.append(request)
        return OVER_BINARY(request) if request.code == 0x14 else frame(request.code, request.number, body=b"1234")

    with both_lanes(reply_with(make)) as server:
        client = connect(server)
        await client.prefix_fetch("ns")
        await client.prefix_fetch("ns", start=1, end=300, as_="bf16")
        assert (await client.v_fetch("s", 1, 2, 3)).shape == (1, 1)
        parts = await client.v_fetch_batch("s", [(1, 2, 4), (1, 7, 9)], as_="native")
        assert [part.tobytes() for part in parts] == [b"12", b"34"]
    name = b"\2\0ns"
    assert [(each.code, each.number) for each in seen] == [(0x14, 2), (0x14, 3), (0x10, 4), (0x12, 5)]
    assert seen[0].meta == name + bytes(8) + b"\3"
    assert seen[1].meta == name + b"\1\0\0\0\x2c\1\0\0\2"
    assert seen[3].meta[:8] == b"\1\0s\3\2\0\0\0"


async def test_a_store(connect: Callable[..., Any]) -> None:
    seen: list[bytes] = []

    def make(request: Got) -> bytes:
        seen.append(request.body)
        return frame(request.code, request.number)

    rows = np.arange(100_000, dtype=np.float32)
    with both_lanes(reply_with(make)) as server:
        client = connect(server)
        await client.v_store_batch("s", 0, 0, 10, rows)
        await client.v_store_batch("s", 0, 0, 1, b"1234")
    assert seen == [rows.tobytes(), b"1234"]


async def test_fetch_into_memory(connect: Callable[..., Any]) -> None:
    memory = np.zeros(70_004, np.uint8)
    places = [memory.data[:70_000], memory.data[70_000:]]
    done: list[int] = []
    with both_lanes(reply_with(OVER_BINARY)) as server:
        client = connect(server)
        assert await client.prefix_fetch_into("ns", lambda index, nbytes: places[index], done.append) == 2
        assert done == [0, 1]
        assert memory.tobytes() == b"".join(PARTS)


@pytest.mark.parametrize("port", ["", "0", "-1", "65536", "99999999999", "x", "²"])
async def test_a_server_without_the_lane(connect: Callable[..., Any], port: str) -> None:
    with both_lanes(reply_with(OVER_BINARY), resp=over_resp, port=lambda _: port) as server:
        client = connect(server)
        for _ in range(2):
            assert got(await client.prefix_fetch("ns")) == [b"RESP", b""]
        assert server.over_resp.count(b"INFO") == 1
        assert server.binary.served == 0
        strict = connect(server, lane="binary", retries=0)
        with pytest.raises(errors.ConnectFailedError, match="no binary lane"):
            await strict.prefix_fetch("ns")


async def test_behind_a_tunnel_the_port_may_be_anothers(connect: Callable[..., Any]) -> None:
    with both_lanes(reply_with(OVER_BINARY), resp=over_resp, listens=1974) as server:
        assert got(await connect(server).prefix_fetch("ns")) == [b"RESP", b""]
        assert server.binary.served == 0
        with pytest.raises(errors.ConnectFailedError, match="another port"):
            await connect(server, lane="binary", retries=0).prefix_fetch("ns")


@pytest.mark.parametrize("reply", [b"-NOPERM no\r\n", b":7\r\n", b"$-1\r\n", array(bulk(b"x"))])
async def test_a_server_that_does_not_tell(connect: Callable[..., Any], reply: bytes) -> None:
    def script(peer: Peer) -> None:
        for request in requests(peer):
            peer.send(reply if request[0] == b"INFO" else over_resp(request))

    with FakeServer(script) as server:
        client = connect(server)
        assert got(await client.prefix_fetch("ns")) == [b"RESP", b""]
        assert server.served == 1


async def test_a_port_that_is_refused(connect: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        unused = listener.getsockname()[1]
    with both_lanes(resp=over_resp, port=lambda _: unused) as server:
        client = connect(server)
        for _ in range(2):
            assert got(await client.prefix_fetch("ns")) == [b"RESP", b""]
        assert server.over_resp.count(b"INFO") == 1
        with pytest.raises(errors.ConnectFailedError, match=str(unused)):
            await connect(server, lane="binary", retries=0).prefix_fetch("ns")


def resp_answers(peer: Peer) -> None:
    peer.sock.recv(1000)
    peer.send(b"-ERR Protocol error: expected '*'\r\n")


def refuses(peer: Peer) -> None:
    peer.send(frame(0, 0, 1, body=b"ERR max number of clients reached"))
    read_frame(peer)


def wrong_password(peer: Peer) -> None:
    got = read_frame(peer)
    peer.send(frame(got.code, got.number, 4, body=b"WRONGPASS no"))
    read_frame(peer)


@pytest.mark.parametrize("script", [resp_answers, refuses, wrong_password, lambda peer: None])
async def test_a_door_that_leads_elsewhere(connect: Callable[..., Any], script: Script) -> None:
    with both_lanes(script, resp=over_resp) as server:
        client = connect(server, password="p")
        for _ in range(2):
            assert got(await client.prefix_fetch("ns")) == [b"RESP", b""]
        assert server.binary.served == 1


async def test_a_firewall_that_swallows_everything(connect: Callable[..., Any], monkeypatch: Any) -> None:
    assert BINARY_PATIENCE_S < 5
    monkeypatch.setattr("pion.client.lanes.BINARY_PATIENCE_S", 0.05)
    release = threading.Event()
    with both_lanes(lambda peer: release.wait(20), resp=over_resp) as server:
        client = connect(server, timeout_s=None)
        assert got(await client.prefix_fetch("ns")) == [b"RESP", b""]
        release.set()


def test_looking_for_the_lane_heeds_the_deadline() -> None:
    release = threading.Event()
    with both_lanes(lambda peer: release.wait(20)) as server, PionClient(port=server.port, lane="binary") as client:
        client.deadline_s = 0.1
        with pytest.raises(errors.ReplyTimeoutError, match=r"silent for 0\.1 s"):
            client.prefix_fetch("ns")
        release.set()


async def test_credentials(connect: Callable[..., Any]) -> None:
    seen: list[Got] = []

    def script(peer: Peer) -> None:
        for _ in range(2):
            seen.append(read_frame(peer))
            peer.send(frame(seen[-1].code, seen[-1].number))
        request = read_frame(peer)
        peer.send(OVER_BINARY(request))
        read_frame(peer)

    with both_lanes(script) as server:
        assert got(await connect(server, username="me", password="secret").prefix_fetch("ns")) == list(PARTS)
        assert got(await connect(server, password="x").prefix_fetch("ns")) == list(PARTS)
    assert [each.meta for each in seen] == [b"\2\0me\6\0secret", b"", b"\7\0default\1\0x", b""]
    assert [each.code for each in seen] == [1, 2, 1, 2]


async def test_a_password_that_the_lane_has_no_room_for(connect: Callable[..., Any]) -> None:
    with both_lanes(reply_with(OVER_BINARY), resp=over_resp) as server:
        assert got(await connect(server, password="x" * 70_000).prefix_fetch("ns")) == [b"RESP", b""]


async def test_resp_only(connect: Callable[..., Any]) -> None:
    with both_lanes(reply_with(OVER_BINARY), resp=over_resp) as server:
        assert got(await connect(server, lane="resp").prefix_fetch("ns")) == [b"RESP", b""]
        assert server.over_resp == [b"KV.PREFIX.FETCH"]


async def test_a_unix_socket_stays_resp(connect: Callable[..., Any], tmp_path: Any) -> None:
    path = str(tmp_path / "pion.sock")
    with FakeServer(lambda peer: [peer.send(over_resp(each)) for each in requests(peer)], unix=path) as server:
        assert got(await connect(server, unix=path).prefix_fetch("ns")) == [b"RESP", b""]
    with pytest.raises(ValueError, match="Unix"):
        connect(server, unix=path, lane="binary")


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="lane"):
        PionClient(lane="fast")


# Faults


def cut_off(after: bytes) -> Script:
    """Greet, take one request, send this much, and close."""

    def script(peer: Peer) -> None:
        greet(peer)
        read_frame(peer)
        peer.send(after)

    return script


WHOLE = OVER_BINARY(Got(0x14, 2, b"", b""))


@pytest.mark.parametrize("n", [0, 1, 23, 24, 30, 44, 45, 50_000, len(WHOLE) - 1])
async def test_a_connection_that_ends_inside_an_answer(connect: Callable[..., Any], n: int) -> None:
    """It is asked again, on a new connection to whatever port the server names now, and never gives part of it."""
    with both_lanes(cut_off(WHOLE[:n]), reply_with(OVER_BINARY)) as server:
        client = connect(server)
        assert got(await client.prefix_fetch("ns")) == list(PARTS)
        assert server.binary.served == 2
        assert server.over_resp == [b"INFO", b"INFO"]
    with both_lanes(cut_off(WHOLE[:n])) as server:
        with pytest.raises(errors.ConnectionLostError):
            await connect(server, retries=1).prefix_fetch("ns")
        assert server.binary.served == 2


@pytest.mark.parametrize("size", [0, 3 << 20])
async def test_a_read_goes_on_over_resp_when_the_lane_goes_away(connect: Callable[..., Any], size: int) -> None:
    """Even in the middle of an answer whose memory was taken in one piece."""
    told: list[int] = []

    def port(lane: FakeServer) -> int:
        told.append(lane.port if not told else -1)
        return told[-1]

    half = sides(bytes(size), bytes(size))(Got(0x14, 2, b"", b""))[:-1]
    longer = bytes(range(256)) * (size // 256 + 1)
    with both_lanes(cut_off(half), resp=lambda request: array(bulk(longer), bulk(b"")), port=port) as server:
        assert got(await connect(server).prefix_fetch("ns")) == [longer, b""]
        assert server.over_resp == [b"INFO", b"INFO", b"KV.PREFIX.FETCH"]


async def test_a_large_answer_is_one_piece_of_memory_and_every_part_is_aligned(connect: Callable[..., Any]) -> None:
    parts = [bytes([i + 1]) * size for i, size in enumerate([3_000_001, 7, 2_000_003, 0])]
    with both_lanes(reply_with(sides(*parts))) as server:
        fetched = await connect(server).prefix_fetch("ns")
    assert got(fetched) == parts
    assert all(part.ctypes.data % 16 == 0 for part in fetched if part.size)
    assert fetched[0].base is fetched[2].base
    fetched[1][:] = 0
    assert got([fetched[0], fetched[2]]) == [parts[0], parts[2]]


async def test_a_write_is_never_sent_twice(connect: Callable[..., Any]) -> None:
    seen: list[Got] = []

    def script(peer: Peer) -> None:
        greet(peer)
        seen.append(read_frame(peer))

    with both_lanes(script, resp=lambda request: b"+OK\r\n") as server:
        with pytest.raises(errors.OutcomeUnknownError, match=r"V\.STOREBATCH.*may or may not"):
            await connect(server).v_store_batch("s", 0, 0, 1, b"1234")
        assert len(seen) == 1
        assert server.over_resp == [b"INFO"]


async def test_a_connection_that_died_while_idle_is_replaced_before_a_write(connect: Callable[..., Any]) -> None:
    gone = threading.Event()

    def once(peer: Peer) -> None:
        greet(peer)
        peer.send(OVER_BINARY(read_frame(peer)))
        peer.close()
        gone.set()

    with both_lanes(once, reply_with(lambda request: frame(request.code, request.number))) as server:
        client = connect(server)
        await client.prefix_fetch("ns")
        await trio.to_thread.run_sync(gone.wait, 10)
        await client.v_store_batch("s", 0, 0, 1, b"1234")
        assert server.binary.served == 2


@pytest.mark.parametrize("number", [0, 1, 3, 2**32 - 1])
async def test_an_answer_to_another_request(connect: Callable[..., Any], number: int) -> None:
    wrong = frame(0x14, number, meta=WHOLE[24:44], body=WHOLE[44:])
    with both_lanes(cut_off(wrong), reply_with(OVER_BINARY)) as server:
        client = connect(server)
        with pytest.raises(errors.BadReplyError, match="expected the answer to request 2"):
            await client.prefix_fetch("ns")
        assert server.binary.served == 1, "it is not asked again"
        assert got(await client.prefix_fetch("ns")) == list(PARTS)
        assert server.binary.served == 2


async def test_a_second_answer_is_not_taken_for_the_next_one(connect: Callable[..., Any]) -> None:
    def script(peer: Peer) -> None:
        for request in frames(peer):
            peer.send(OVER_BINARY(request) + frame(0x14, request.number + 1, meta=bytes(4)))

    with both_lanes(script, reply_with(OVER_BINARY)) as server:
        client = connect(server)
        try:
            first = got(await client.prefix_fetch("ns"))
        except errors.BadReplyError:
            first = list(PARTS)  # both came in one piece
        assert first == list(PARTS)
        assert got(await client.prefix_fetch("ns")) == list(PARTS)
        assert server.binary.served == 2


async def test_an_error_is_the_servers_and_leaves_the_connection_usable(connect: Callable[..., Any]) -> None:
    def make(request: Got) -> bytes:
        if request.number == 2:
            return frame(request.code, request.number, 2, body=b"ERR no prefix 'ns'")
        return OVER_BINARY(request)

    with both_lanes(reply_with(make)) as server:
        client = connect(server)
        with pytest.raises(errors.ServerError, match="no prefix 'ns'") as caught:
            await client.prefix_fetch("ns")
        assert caught.value.code == "ERR"
        assert got(await client.prefix_fetch("ns")) == list(PARTS)
        assert server.binary.served == 1


async def test_a_server_that_refuses_a_body_and_closes_is_heard(connect: Callable[..., Any]) -> None:
    def script(peer: Peer) -> None:
        greet(peer)
        peer.sock.recv(24)
        peer.send(frame(0x11, 2, 1, body=b"ERR Protocol error: body of 33554432 bytes"))

    with both_lanes(script) as server, pytest.raises(errors.ServerError, match="body of 33554432 bytes"):
        await connect(server).v_store_batch("s", 0, 0, 1, np.zeros(1 << 25, np.uint8))


async def test_silence(connect: Callable[..., Any]) -> None:
    release = threading.Event()

    def script(peer: Peer) -> None:
        greet(peer)
        read_frame(peer)
        peer.send(WHOLE[:30])
        release.wait(20)

    with both_lanes(script) as server:
        client = connect(server, timeout_s=0.1)
        with pytest.raises(errors.ReplyTimeoutError, match="silent"):
            await client.prefix_fetch("ns")
        with pytest.raises(errors.OutcomeUnknownError):
            await client.v_store_batch("s", 0, 0, 1, b"1234")
        release.set()


async def test_a_callback_that_raises_ends_the_exchange(connect: Callable[..., Any]) -> None:
    def fail(index: int, nbytes: int) -> memoryview:
        raise LookupError(index)

    with both_lanes(reply_with(OVER_BINARY)) as server:
        client = connect(server)
        with pytest.raises(LookupError):
            await client.prefix_fetch_into("ns", fail)
        assert got(await client.prefix_fetch("ns")) == list(PARTS)
        assert server.binary.served == 2


async def test_a_fetch_into_memory_is_repeated_only_before_the_caller_saw_any_of_it(
    connect: Callable[..., Any],
) -> None:
    memory = np.zeros(70_000, np.uint8)
    with both_lanes(cut_off(WHOLE[:44]), reply_with(OVER_BINARY)) as server:
        with pytest.raises(errors.ConnectionLostError):
            await connect(server).prefix_fetch_into("ns", lambda index, nbytes: memory.data)
        assert server.binary.served == 1


# Prefixes that are being filled


async def test_stores_into_a_prefix_that_the_client_claimed_go_where_it_was_claimed(
    connect: Callable[..., Any],
) -> None:
    """The server lets only the connection that registered a declared prefix fill it."""
    with both_lanes(reply_with(lambda got: frame(got.code, got.number)), resp=lambda request: b"+OK\r\n") as server:
        client = connect(server)
        await client.prefix_register("ns", 64, "fp32")
        await client.v_store_batch("ns_pk", 0, 0, 1, bytes(256))
        assert server.over_resp == [b"KV.PREFIX.REGISTER", b"INFO"], "nobody owns a prefix that isn't declared"
        await client.prefix_register("ns", 64, "fp32", layers=1, tokens=1)
        await client.v_store_batch("ns_pk", 0, 0, 1, bytes(256))
        assert server.over_resp[2:] == [b"KV.PREFIX.REGISTER", b"V.STOREBATCH"]


async def test_busy_on_the_binary_lane_is_asked_again_where_the_prefix_may_be_ours(
    connect: Callable[..., Any],
) -> None:
    """Somebody may have claimed it with `execute`."""
    busy = reply_with(lambda got: frame(got.code, got.number, 7, body=b"BUSY filled by another"))
    with both_lanes(busy, resp=lambda request: b"+OK\r\n") as server:
        await connect(server).v_store_batch("ns_pk", 0, 0, 1, b"1234")
        assert server.over_resp == [b"INFO", b"V.STOREBATCH"]
    with both_lanes(busy, resp=lambda request: b"-BUSY filled by another\r\n") as server:
        with pytest.raises(errors.BusyError):
            await connect(server).v_store_batch("ns_pk", 0, 0, 1, b"1234")
        with pytest.raises(errors.BusyError):
            await connect(server).prefix_fetch("ns")
        assert b"KV.PREFIX.FETCH" not in server.over_resp


# Closing, threads, forks


async def test_close_closes_both(connect: Callable[..., Any]) -> None:
    left = [threading.Event(), threading.Event()]

    def script(peer: Peer) -> None:
        try:
            reply_with(OVER_BINARY)(peer)
        finally:
            left[server.binary.served - 1].set()

    with both_lanes(script) as server:
        client = connect(server)
        for number in range(2):
            assert got(await client.prefix_fetch("ns")) == list(PARTS)
            (client.client if isinstance(client, Sync) else client).close()
            assert await trio.to_thread.run_sync(left[number].wait, 10)
        assert (server.resp.served, server.binary.served) == (2, 2)


def test_threads_get_their_own_answers() -> None:
    wrong: list[object] = []

    def make(request: Got) -> bytes:
        return frame(request.code, request.number, body=request.meta[3:7])

    with both_lanes(reply_with(make)) as server, PionClient(port=server.port) as client:

        def work(number: int) -> None:
            for turn in range(50):
                found = client.v_fetch("s", 100 * number + turn, 0, 1, as_="native")
                if int.from_bytes(found.tobytes(), "little") != 100 * number + turn:
                    wrong.append((number, turn))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not wrong
        assert server.binary.served == 1


def test_a_child_process_opens_its_own() -> None:
    with both_lanes(reply_with(OVER_BINARY)) as server, PionClient(port=server.port, timeout_s=10) as client:
        assert got(client.prefix_fetch("ns")) == list(PARTS)
        with client._lines._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
            if not pid:
                code = 1
                signal.alarm(10)
                try:
                    code = 0 if got(client.prefix_fetch("ns")) == list(PARTS) else 2
                finally:
                    os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert got(client.prefix_fetch("ns")) == list(PARTS)
        assert server.binary.served == 2


def test_the_deadline_holds_on_the_binary_lane() -> None:
    release = threading.Event()

    def trickle(peer: Peer) -> None:
        greet(peer)
        read_frame(peer)
        for byte in WHOLE[:44]:
            peer.send(bytes((byte,)))
            if release.wait(0.05):
                return

    with both_lanes(trickle) as server, PionClient(port=server.port, retries=0) as client:
        client.deadline_s = 0.3
        with pytest.raises(errors.ReplyTimeoutError, match="deadline"):
            client.prefix_fetch("ns")
        release.set()


async def test_a_cancelled_call_closes_the_connection() -> None:
    asked = threading.Event()
    release = threading.Event()

    def hang(peer: Peer) -> None:
        greet(peer)
        read_frame(peer)
        asked.set()
        release.wait(20)

    with both_lanes(hang, reply_with(OVER_BINARY)) as server:
        async with aio.PionClient(port=server.port) as client, trio.open_nursery() as nursery:
            nursery.start_soon(client.prefix_fetch, "ns")
            assert await trio.to_thread.run_sync(asked.wait, 10)
            nursery.cancel_scope.cancel()
        async with aio.PionClient(port=server.port) as client:
            assert got(await client.prefix_fetch("ns")) == list(PARTS)
        release.set()


def test_a_command_of_resp_has_no_place_there() -> None:
    from pion.client import commands

    with both_lanes(reply_with(OVER_BINARY)) as server, PionClient(port=server.port) as client:
        client.prefix_fetch("ns")
        line = client._lines._binary
        assert isinstance(line, Connection)
        with pytest.raises(TypeError, match="PING"):
            line.exchange([commands.ping()])
