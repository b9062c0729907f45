"""One connection of the synchronous client: a blocking socket on which exchanges run, on either lane.

The socket blocks, with the kernel's own timeouts (SO_RCVTIMEO, SO_SNDTIMEO), so that a large bulk is one system call:
MSG_WAITALL straight into its memory, the interpreter lock released throughout. While a pipeline is being sent the
socket doesn't block, and the client receives whenever sending would. Whatever interrupts an exchange, KeyboardInterrupt
included, closes the connection: the position in the stream is lost.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from pion.client.errors import (
    ConnectFailedError,
    ConnectionLostError,
    PionClientError,
    ReplyTimeoutError,
)
from pion.client.exchange import Exchange
from pion.client.lanes import Address, Lane, RespLane
from pion.client.requests import Call
from pion.client.settings import Settings

# As plain numbers: combining the members of an enum costs more than the system call's own overhead.
_WAITALL: Final = int(socket.MSG_WAITALL)
_DONTWAIT: Final = int(socket.MSG_DONTWAIT)
_READABLE: Final = select.POLLIN | select.POLLHUP | select.POLLERR
_PEEK: Final = int(socket.MSG_PEEK) | _DONTWAIT


class Connection:
    """Connects and greets on construction. Not thread-safe: its owner sees to it that one exchange runs at a time.

    Raises `ConnectFailedError`, or the server's error if it refuses the greeting (a wrong password).
    """

    def __init__(self, settings: Settings, lane: Lane | None = None) -> None:
        self._settings = settings
        self.lane = RespLane(settings) if lane is None else lane
        self._reader = self.lane.reader
        self._timeout_s: float | None = None
        self._patience_s: float | None = None
        self._deadline: float | None = None
        self.open = True
        self._sock = self._connect()
        try:
            self._set_timeout(self.lane.patience_s)
            exchange = Exchange(self.lane.greeting(), self._reader)
            try:
                self.run(exchange)
            except ConnectionLostError:
                # A server that refuses at the door says why, once, and closes.
                self.lane.check_greeting(exchange.replies)
                raise
            self.lane.check_greeting(exchange.replies)
        except BaseException:
            self.close()
            raise

    @property
    def peer(self) -> Address:
        """Where the server is that answered."""
        return self._sock.family, self._sock.getpeername()

    def close(self) -> None:
        """Close the socket. A child process may call this without disturbing its parent."""
        self.open = False
        self._sock.close()

    def stale(self) -> bool:
        """The server closed the connection, or sent something unasked, since the last exchange: nothing can be sent."""
        try:
            self._sock.recv(1, _PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def exchange(
        self,
        requests: Sequence[Call[Any]],
        *,
        wait_s: float = 0.0,
        deadline_s: float | None = None,
        stop_at_error: bool = False,
    ) -> Exchange:
        """The next exchange for `run`, with time for a server that may wait `wait_s` before it answers.

        `deadline_s` from now (and `wait_s`) it must be complete, else `run` raises `ReplyTimeoutError`.
        """
        self._patience_s = self._settings.patience_s(wait_s)
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s + wait_s
        self._set_timeout(self._patience_s)
        return Exchange([*map(self.lane.form, requests)], self._reader, stop_at_error=stop_at_error)

    def run(self, exchange: Exchange) -> list[object]:
        """Send and receive until all replies are there; returns them. Closes the connection if it raises."""
        try:
            self._send(exchange)
            while not exchange.complete:
                self._receive(exchange, _WAITALL)
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

    def _connect(self) -> socket.socket:
        settings = self._settings
        addresses: list[tuple[int, int, int, Any]] = []
        failure: OSError | None = None
        try:
            if self.lane.address is not None:
                family, name = self.lane.address
                addresses.append((family, socket.SOCK_STREAM, 0, name))
            elif settings.unix is not None:
                addresses.append((socket.AF_UNIX, socket.SOCK_STREAM, 0, settings.unix))
            else:
                found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
                addresses += [(*entry[:3], entry[4]) for entry in found]
        except OSError as error:
            failure = error
        for family, kind, proto, address in addresses:
            try:
                return self._connected_socket(family, kind, proto, address)
            except OSError as error:
                failure = error
        raise ConnectFailedError(f"no Pion server at {self.lane.where}: {failure}") from failure

    def _connected_socket(self, family: int, kind: int, proto: int, address: Any) -> socket.socket:
        settings = self._settings
        sock = socket.socket(family, kind, proto)
        try:
            sock.settimeout(self.lane.patience_s)
            if settings.receive_buffer_bytes is not None:
                # Before connecting: the window that TCP announces depends on it.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, settings.receive_buffer_bytes)
            sock.connect(address)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        return sock

    def _set_timeout(self, timeout_s: float | None) -> None:
        if timeout_s == self._timeout_s:
            return
        # Zero means for ever to the kernel, so a timeout too small to express becomes one microsecond.
        micros = 0 if timeout_s is None else max(1, int(timeout_s * 1e6))
        value = struct.pack("@ll", *divmod(micros, 1_000_000))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        self._timeout_s = timeout_s

    def _hurry(self) -> None:
        """Never wait beyond the deadline. Raises `ReplyTimeoutError` once it has passed."""
        if self._deadline is None:
            return
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise self._late()
        self._set_timeout(left_s if self._patience_s is None else min(left_s, self._patience_s))

    def _send(self, exchange: Exchange) -> None:
        if not exchange.pipelined:
            # The server takes a single request in before it answers, so a blocking send can't lock up.
            self._send_all(exchange)
            return
        # Not MSG_DONTWAIT: not every system heeds it when sending.
        self._sock.setblocking(False)
        self._send_all(exchange)
        self._sock.setblocking(True)

    def _send_all(self, exchange: Exchange) -> None:
        while exchange.sending:
            self._hurry()
            try:
                exchange.sent(self._sock.sendmsg(exchange.outgoing()))
            except BlockingIOError as error:
                if not exchange.pipelined:
                    raise self._silent() from error
                exchange.sent(0)
                if self._wait() & _READABLE:
                    self._receive(exchange, _DONTWAIT)
            except OSError as error:
                self._hear_out(exchange)
                raise self._broken(error) from error
            else:
                if exchange.pipelined and exchange.sending:
                    # A server as fast as we are never makes us wait; what it says may be an error that stops us.
                    self._receive(exchange, _DONTWAIT)

    def _wait(self) -> int:
        """Wait until something can be sent or received; what."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | select.POLLOUT)
        ready = poll.poll(None if self._timeout_s is None else max(1, int(self._timeout_s * 1000)))
        if not ready:
            raise self._silent()
        return ready[0][1]

    def _receive(self, exchange: Exchange, flags: int) -> bool:
        """Receive once. False: nothing was there, which happens with MSG_DONTWAIT only."""
        reader = self._reader
        target = reader.target()
        data = b""
        self._hurry()
        # Only the calls of the socket are guarded: an OSError of the caller's functions is the caller's.
        try:
            if target is not None:
                n = self._sock.recv_into(target, 0, flags)
            else:
                data = self._sock.recv(reader.read_bytes, flags & ~_WAITALL)
                n = len(data)
        except BlockingIOError as error:
            if flags & _DONTWAIT:
                return False
            raise self._silent() from error
        except OSError as error:
            raise self._broken(error) from error
        if not n:
            raise ConnectionLostError(f"{self.lane.where} closed the connection before the reply was complete")
        if target is not None:
            reader.filled(n)
        else:
            reader.feed(data)
        exchange.collect()
        return True

    def _silent(self) -> ReplyTimeoutError:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return self._late()
        return ReplyTimeoutError(f"{self.lane.where} was silent for {self._timeout_s} s")

    def _late(self) -> ReplyTimeoutError:
        return ReplyTimeoutError(f"{self.lane.where} didn't complete its answer before the deadline")

    def _broken(self, error: OSError) -> ConnectionLostError:
        return ConnectionLostError(f"the connection to {self.lane.where} broke: {error}")

    def _hear_out(self, exchange: Exchange) -> None:
        """Take what came before a send failed: a server that refuses and closes has said why."""
        with suppress(PionClientError):
            while not exchange.complete and self._receive(exchange, _DONTWAIT):
                pass
