"""One connection of the Trio client. The same exchanges as `pion.client.connection`, moved by Trio."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import trio

from pion.client.errors import (
    ConnectFailedError,
    ConnectionLostError,
    PionClientError,
    ReplyTimeoutError,
)
from pion.client.exchange import Exchange
from pion.client.lanes import Address, Lane, RespLane
from pion.client.limits import READ_BYTES
from pion.client.requests import Call
from pion.client.settings import Settings


class Connection:
    """Made by `Connection.connect`. Its owner sees to it that one exchange runs at a time."""

    def __init__(self, settings: Settings, lane: Lane, sock: trio.socket.SocketType) -> None:
        self._settings = settings
        self.lane = lane
        self._sock = sock
        self._reader = lane.reader
        self._header = memoryview(bytearray(READ_BYTES))
        self._timeout_s: float | None = lane.patience_s
        self._total = 0
        """Bytes moved so far, both ways."""
        self.open = True

    @classmethod
    async def connect(cls, settings: Settings, lane: Lane | None = None) -> Connection:
        """Connect and greet. Cancellation: nothing stays open.

        Raises `ConnectFailedError`, or the server's error if it refuses the greeting (a wrong password).
        """
        lane = RespLane(settings) if lane is None else lane
        connection = cls(settings, lane, await _connected_socket(settings, lane))
        try:
            exchange = Exchange(lane.greeting(), lane.reader)
            try:
                await connection.run(exchange)
            except ConnectionLostError:
                # A server that refuses at the door says why, once, and closes.
                lane.check_greeting(exchange.replies)
                raise
            lane.check_greeting(exchange.replies)
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def peer(self) -> Address:
        """Where the server is that answered."""
        return int(self._sock.family), self._sock.getpeername()

    def close(self) -> None:
        """Close the socket at once."""
        self.open = False
        self._sock.close()

    def stale(self) -> bool:
        """The server closed the connection, or sent something unasked, since the last exchange: nothing can be sent."""
        return self._sock.is_readable()

    def exchange(self, requests: Sequence[Call[Any]], *, wait_s: float = 0.0, stop_at_error: bool = False) -> Exchange:
        """An exchange for `run`, with time for a server that may wait `wait_s` before it answers."""
        self._timeout_s = self._settings.patience_s(wait_s)
        return Exchange([*map(self.lane.form, requests)], self._reader, stop_at_error=stop_at_error)

    async def run(self, exchange: Exchange) -> list[object]:
        """Send and receive until all replies are there; returns them.

        Closes the connection if it raises, and so when it is cancelled: what was sent by then may have its effect.
        """
        try:
            if exchange.pipelined:
                await self._run_both_ways(exchange)
            else:
                # The server takes in a whole request before it answers, so sending first can't lock up.
                await self._send(exchange)
                await self._receive_all(exchange)
        except ConnectionLostError as error:
            self.close()
            reason = exchange.explained(error)
            if reason is None:
                raise
            raise reason from error
        except BaseException:
            self.close()
            raise
        return exchange.replies

    # Parts

    async def _run_both_ways(self, exchange: Exchange) -> None:
        failures: list[Exception] = []

        async def guarded(part: trio.CancelScope, receiving: bool) -> None:
            # Caught here, not outside: the nursery would wrap the caller's own exceptions in a group.
            try:
                await (self._receive_all if receiving else self._send)(exchange)
            except Exception as error:
                failures.append(error)
                # When sending broke, the receiver goes on to the end of the stream, which has the server's reason.
                if receiving or not isinstance(error, ConnectionLostError):
                    part.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(guarded, nursery.cancel_scope, False)
            await guarded(nursery.cancel_scope, True)
        if failures:
            raise failures[0]

    async def _send(self, exchange: Exchange) -> None:
        try:
            while exchange.sending:
                buffers = exchange.outgoing()
                exchange.sent(await self._moved(partial(self._sock.sendmsg, buffers)))
        except ConnectionLostError:
            await self._hear_out(exchange)
            raise

    async def _receive_all(self, exchange: Exchange) -> None:
        while not exchange.complete:
            await self._receive(exchange)

    async def _receive(self, exchange: Exchange) -> None:
        reader = self._reader
        target = reader.target()
        if target is not None:
            n = await self._moved(partial(self._sock.recv_into, target))
        else:
            n = await self._moved(partial(self._sock.recv_into, self._header[: reader.read_bytes]))
        if not n:
            raise ConnectionLostError(f"{self.lane.where} closed the connection before the reply was complete")
        if target is not None:
            reader.filled(n)
        else:
            reader.feed(self._header[:n])
        exchange.collect()

    async def _moved(self, call: Callable[[], Awaitable[int]]) -> int:
        """Bytes that one call of the socket moved. Gives up when nothing moved in either direction for too long."""
        while True:
            before = self._total
            try:
                with trio.fail_after(float("inf") if self._timeout_s is None else self._timeout_s):
                    n = await call()
            except trio.TooSlowError as error:
                if self._total != before:
                    # A pipeline sends and receives at once: the other direction was busy.
                    continue
                raise ReplyTimeoutError(f"{self.lane.where} was silent for {self._timeout_s} s") from error
            except trio.ClosedResourceError as error:
                raise ConnectionLostError("the client was closed by another task") from error
            except OSError as error:
                raise ConnectionLostError(f"the connection to {self.lane.where} broke: {error}") from error
            self._total += n
            return n

    async def _hear_out(self, exchange: Exchange) -> None:
        """Take what came before a send failed: a server that refuses and closes has said why."""
        with suppress(PionClientError):
            # In a pipeline another task receives.
            while not exchange.pipelined and not exchange.complete and self._sock.is_readable():
                await self._receive(exchange)


async def _connected_socket(settings: Settings, lane: Lane) -> trio.socket.SocketType:
    failure: BaseException | None = None
    addresses: list[tuple[int, int, int, object]] = []
    patience_s = float("inf") if lane.patience_s is None else lane.patience_s
    try:
        if lane.address is not None:
            addresses.append((lane.address[0], socket.SOCK_STREAM, 0, lane.address[1]))
        elif settings.unix is not None:
            addresses.append((socket.AF_UNIX, socket.SOCK_STREAM, 0, settings.unix))
        else:
            with trio.fail_after(patience_s):
                found = await trio.socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
            addresses += [(*entry[:3], entry[4]) for entry in found]
    except (OSError, trio.TooSlowError) as error:
        failure = error
    for family, kind, proto, address in addresses:
        sock = trio.socket.socket(family, kind, proto)
        try:
            if settings.receive_buffer_bytes is not None:
                # Before connecting: the window that TCP announces depends on it.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, settings.receive_buffer_bytes)
            with trio.fail_after(patience_s):
                await sock.connect(address)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, trio.TooSlowError) as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise ConnectFailedError(f"no Pion server at {lane.where}: {failure}") from failure
