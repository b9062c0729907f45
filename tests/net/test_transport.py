"""The socket transport: errors in our own words, and options where the platform has them."""

from __future__ import annotations

import socket
import struct

import pytest
import trio
import trio.testing

from pion.errors import ConnectionLostError
from pion.net import transport as module
from pion.net.transport import NOTSENT_BULK_BYTES, NOTSENT_BYTES, SocketTransport

MIB = 1 << 20


async def tcp_pair() -> tuple[SocketTransport, trio.socket.SocketType]:
    """A transport and the socket at its other end."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        stream = await trio.open_tcp_stream(*listener.socket.getsockname())
        accepted, _ = await listener.socket.accept()
    return SocketTransport(accepted), stream.socket


async def test_reset_by_the_peer_is_a_lost_connection_on_every_call():
    for call in (
        lambda t: t.recv_nowait(10),
        lambda t: t.recv_into_nowait([memoryview(bytearray(4))]),
        lambda t: t.recv_into_nowait([memoryview(bytearray(4)), memoryview(bytearray(4))]),
    ):
        here, there = await tcp_pair()
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        there.close()
        await here.wait_readable()
        with pytest.raises(ConnectionLostError):
            call(here)
        here.close()


async def test_sending_to_a_peer_that_is_gone_is_a_lost_connection():
    for call in (lambda t: t.send_nowait(b"x"), lambda t: t.sendmsg_nowait([b"x", b"y"])):
        here, there = await tcp_pair()
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        there.close()
        await here.wait_readable()
        with pytest.raises(ConnectionLostError):
            call(here)
        here.close()


async def test_nothing_to_read_and_no_room_to_send_are_none():
    here, there = await tcp_pair()
    assert here.recv_nowait(10) is None
    assert here.recv_into_nowait([memoryview(bytearray(10))]) is None
    while here.send_nowait(bytes(MIB)) is not None:
        pass
    assert here.sendmsg_nowait([b"x"]) is None
    here.close()
    there.close()


async def test_the_end_of_the_stream():
    here, there = await tcp_pair()
    await there.send(b"abc")
    there.shutdown(socket.SHUT_WR)
    await here.wait_readable()
    buffers = [memoryview(bytearray(2)), memoryview(bytearray(8))]
    assert here.recv_into_nowait(buffers) == 3
    assert bytes(buffers[0]) + bytes(buffers[1][:1]) == b"abc"
    assert here.recv_nowait(10) == b""
    here.close()
    there.close()


async def test_closing_wakes_a_waiting_task():
    here, there = await tcp_pair()
    async with trio.open_nursery() as nursery:

        async def wait(which) -> None:
            with pytest.raises(ConnectionLostError):
                await which()

        nursery.start_soon(wait, here.wait_readable)
        await trio.testing.wait_all_tasks_blocked()
        here.close()
        here.close()
    with pytest.raises(ConnectionLostError):
        await here.wait_readable()
    with pytest.raises(ConnectionLostError):
        await here.wait_writable()
    with pytest.raises(ConnectionLostError):
        here.recv_nowait(1)
    there.close()


async def test_options_follow_what_is_under_way():
    here, there = await tcp_pair()
    option = here._socket.getsockopt
    assert option(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
    assert option(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == NOTSENT_BYTES
    here.sending_bulk(True)
    assert option(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == NOTSENT_BULK_BYTES
    here.sending_bulk(False)
    assert option(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == NOTSENT_BYTES
    here.receiving_bulk(300)
    assert option(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 300
    here.receiving_bulk(0)
    assert option(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    here.receiving_bulk(1 << 30)
    assert 1 < option(socket.SOL_SOCKET, socket.SO_RCVLOWAT) <= MIB
    here.close()
    there.close()


async def test_a_unix_socket_has_more_room_than_by_itself():
    left, right = trio.socket.socketpair()
    usual = left.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    here = SocketTransport(left)
    assert here._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > usual
    here.close()
    right.close()


@pytest.mark.parametrize("bulk", [True, False])
async def test_a_reader_on_the_same_core_goes_first_only_in_a_bulk_reply(monkeypatch, bulk):
    offers = []
    monkeypatch.setattr(module, "offer_core", lambda: offers.append(1))
    here, there = await tcp_pair()
    here.sending_bulk(bulk)
    await here.wait_writable()
    assert len(offers) == bulk
    here.close()
    there.close()


async def test_a_platform_without_the_tuning_options_works_without_them(monkeypatch):
    for name in ("TCP_NOTSENT_LOWAT", "SO_RCVLOWAT", "TCP_NODELAY", "TCP_KEEPIDLE"):
        monkeypatch.delattr(module.socket, name)
    here, there = await tcp_pair()
    here.sending_bulk(True)
    here.receiving_bulk(100)
    await there.send(b"abc")
    await here.wait_readable()
    assert here.recv_nowait(10) == b"abc"
    here.close()
    there.close()


async def test_a_platform_that_refuses_the_values_works_without_them(monkeypatch):
    """macOS has SO_RCVLOWAT and TCP_NOTSENT_LOWAT, with rules of its own."""
    here, there = await tcp_pair()

    class Refusing:
        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock
            self.refused = 0

        def setsockopt(self, *args: object) -> None:
            self.refused += 1
            raise OSError(22, "Invalid argument")

        def __getattr__(self, name: str) -> object:
            return getattr(self._sock, name)

    refusing = Refusing(here._socket)
    here._socket = refusing
    here.sending_bulk(True)
    here.receiving_bulk(100)
    assert refusing.refused == 2
    assert here.send_nowait(b"abc") == 3
    assert await there.recv(10) == b"abc"
    here.close()
    there.close()


async def test_a_client_that_left_before_it_was_looked_at():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        stream = await trio.open_tcp_stream(*listener.socket.getsockname())
        accepted, _ = await listener.socket.accept()
        await stream.aclose()
    accepted.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionLostError):
        SocketTransport(accepted)
    accepted.close()


async def test_the_peer_has_left_when_it_stops_sending_or_the_connection_closes():
    for leave in ("shutdown", "reset", "close"):
        here, there = await tcp_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.peer_left)
            await trio.testing.wait_all_tasks_blocked()
            if leave == "shutdown":
                there.shutdown(socket.SHUT_WR)
            elif leave == "reset":
                there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                there.close()
            else:
                here.close()
        here.close()
        there.close()


async def test_a_peer_that_sends_more_has_not_left_and_loses_nothing():
    here, there = await tcp_pair()
    left = False

    async def watch() -> None:
        nonlocal left
        await here.peer_left()
        left = True

    await there.send(b"more")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await trio.testing.wait_all_tasks_blocked()
        there.shutdown(socket.SHUT_WR)
        await trio.testing.wait_all_tasks_blocked()
        assert not left
        nursery.cancel_scope.cancel()
    assert here.recv_nowait(10) == b"more"
    here.close()
    there.close()


async def test_the_socket_is_taken_over_from_trio():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        stream = await trio.open_tcp_stream(*listener.socket.getsockname())
        accepted, _ = await listener.socket.accept()
    here = SocketTransport(accepted)
    assert accepted.fileno() == -1
    assert not here._socket.getblocking()
    assert here.recv_nowait(10) is None
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            with pytest.raises(ConnectionLostError):
                await here.wait_readable()

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        here.close()
    here.close()
    await stream.aclose()


async def test_keepalive_has_another_name_on_macos(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(SocketTransport, "_option", lambda self, level, name, value: asked.append(name))
    here, there = await tcp_pair()
    here.close()
    there.close()
    assert "TCP_KEEPIDLE" in asked
    monkeypatch.delattr(socket, "TCP_KEEPIDLE")
    asked.clear()
    here, there = await tcp_pair()
    here.close()
    there.close()
    assert "TCP_KEEPALIVE" in asked
    assert "TCP_KEEPIDLE" not in asked


async def test_an_interrupted_wait_returns_and_the_next_one_waits_again():
    here, there = await tcp_pair()
    steps: list[str] = []

    async def wait_twice() -> None:
        await here.wait_readable()
        steps.append("interrupted" if here.recv_nowait(10) is None else "data")
        await here.wait_readable()
        steps.append("interrupted" if here.recv_nowait(10) is None else "data")
        with pytest.raises(ConnectionLostError):
            await here.wait_readable()
        steps.append("closed")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_twice)
        await trio.testing.wait_all_tasks_blocked()
        here.interrupt()
        await trio.testing.wait_all_tasks_blocked()
        await there.send(b"abc")
        await trio.testing.wait_all_tasks_blocked(0.01)
        here.close()
    assert steps == ["interrupted", "data", "closed"]
    here.interrupt()
    there.close()
