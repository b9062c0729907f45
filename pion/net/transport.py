"""The seam between a connection and the operating system: non-blocking calls, two waits, errors in our own words.

Calls that end in `_nowait` return None where the system says "would block"; the caller then awaits `wait_readable` or
`wait_writable`. Trying first saves the event loop's round for data that is already there. Each call either has its
whole effect or none, so a cancelled wait loses nothing; what a half-sent reply means is the connection's business.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import trio

from pion.config import MIB
from pion.errors import ConnectionLostError
from pion.limits import PAYLOAD_SLICE_BYTES
from pion.replies import Buffer

NOTSENT_BYTES: Final = 16 * 1024
"""Kernel memory for bytes of small replies that the network has not taken yet."""

NOTSENT_BULK_BYTES: Final = PAYLOAD_SLICE_BYTES
"""The same while a bulk reply is sent: one slice more in the kernel keeps the sender from waking for every 16 KiB."""

UNIX_SEND_BYTES: Final = 2 * MIB
"""Room asked for in a Unix socket, which doesn't grow by itself as TCP's does. With the usual 208 KiB a reader that
does something with what it got finds nothing more, and the two take turns instead of working side by side. Linux counts
twice as much, and gives no more than net.core.wmem_max."""

KEEPALIVE_S: Final = 300
"""As in Redis: a peer that vanished without a word is noticed after ten minutes, even if it has nothing to say."""

LINGER_S: Final = 1.0
LINGER_BYTES: Final = MIB
"""After a protocol error the rest of what the client sent is read away for so long: closing a socket that holds unread
bytes would reset the connection, and the client might never see the error."""


def _yield_by_sleeping() -> None:
    time.sleep(0)


offer_core: Callable[[], None] = getattr(os, "sched_yield", _yield_by_sleeping)
"""Let another process that waits for this core have it; returns at once when none does."""


class Transport(Protocol):
    """A connected byte stream. Implemented by `SocketTransport` and, for tests, `pion.net.memory.MemoryTransport`."""

    peer: str
    local: str

    def recv_nowait(self, max_bytes: int) -> bytes | None:
        """Bytes that have arrived, b"" at the end of the stream. Raises `ConnectionLostError`."""

    def recv_into_nowait(self, buffers: Sequence[memoryview]) -> int | None:
        """Fill the buffers in order; the bytes received, 0 at the end of the stream. Raises `ConnectionLostError`."""

    def send_nowait(self, data: Buffer) -> int | None:
        """Send a first part of `data`; the bytes sent. Raises `ConnectionLostError`."""

    def sendmsg_nowait(self, buffers: Sequence[Buffer]) -> int | None:
        """Send a first part of the buffers, at most 1,024 of them. Raises `ConnectionLostError`."""

    async def wait_readable(self) -> None:
        """Until a receive may succeed. Cancellation: no effect. Raises `ConnectionLostError` after `close`."""

    async def wait_writable(self) -> None:
        """Until a send may succeed. Cancellation: no effect. Raises `ConnectionLostError` after `close`."""

    async def peer_left(self) -> None:
        """Until the peer has stopped sending or the connection is closed; for ever if more has come first.

        Cancellation: no effect.
        """

    def interrupt(self) -> None:
        """Let a task that waits go on as if what it waits for had come."""

    def receiving_bulk(self, nbytes: int) -> None:
        """Hint: `nbytes` are expected (0: unknown), so waking up for fewer is not worth it."""

    def sending_bulk(self, bulk: bool) -> None:
        """Hint: a bulk reply is being sent, or no longer."""

    def finish_sending(self) -> None:
        """Tell the peer that nothing more will come; receiving goes on."""

    def close(self) -> None:
        """Close at once; a task that waits gets `ConnectionLostError`. Closing twice is fine."""


class SocketTransport:
    """A TCP or Unix stream socket. Takes over the socket of `trio.socket`."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        # A socket of the standard library: its calls don't go through the event loop when data is there.
        self._socket = socket.socket(fileno=sock.detach())
        self._socket.setblocking(False)
        self._fd = self._socket.fileno()
        self._low_water = 1
        self._bulk = False
        self._interrupted = False
        self._tcp = self._socket.family != socket.AF_UNIX
        try:
            peer = self._socket.getpeername()
            self.local = _name(self._socket.getsockname())
        except OSError as error:  # the peer closed before we looked
            self.close()
            raise ConnectionLostError(str(error)) from error
        self.peer = _name(peer) if self._tcp else self.local  # a Unix client has no name of its own
        if self._tcp:
            self._option(socket.IPPROTO_TCP, "TCP_NODELAY", 1)
            self._option(socket.SOL_SOCKET, "SO_KEEPALIVE", 1)
            idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"  # its name on macOS
            self._option(socket.IPPROTO_TCP, idle, KEEPALIVE_S)
            self._option(socket.IPPROTO_TCP, "TCP_KEEPINTVL", KEEPALIVE_S // 3)
            self._option(socket.IPPROTO_TCP, "TCP_KEEPCNT", 3)
        else:
            self._option(socket.SOL_SOCKET, "SO_SNDBUF", UNIX_SEND_BYTES)
        self._notsent(NOTSENT_BYTES)

    def recv_nowait(self, max_bytes: int) -> bytes | None:
        """See `Transport`."""
        try:
            return self._socket.recv(max_bytes)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLostError(str(error)) from error

    def recv_into_nowait(self, buffers: Sequence[memoryview]) -> int | None:
        """See `Transport`."""
        try:
            if len(buffers) == 1:
                return self._socket.recv_into(buffers[0])
            return self._socket.recvmsg_into(buffers)[0]
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLostError(str(error)) from error

    def send_nowait(self, data: Buffer) -> int | None:
        """See `Transport`."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLostError(str(error)) from error

    def sendmsg_nowait(self, buffers: Sequence[Buffer]) -> int | None:
        """See `Transport`."""
        try:
            return self._socket.sendmsg(buffers)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ConnectionLostError(str(error)) from error

    def interrupt(self) -> None:
        """See `Transport`."""
        if self._fd >= 0:
            self._interrupted = True
            trio.lowlevel.notify_closing(self._fd)  # closes nothing: it only wakes, with an error

    async def wait_readable(self) -> None:
        """See `Transport`."""
        try:
            await trio.lowlevel.wait_readable(self._fd)
        except (trio.ClosedResourceError, OSError, ValueError) as error:  # ValueError: closed before the wait
            if self._interrupted and self._fd >= 0:
                self._interrupted = False
                return
            raise ConnectionLostError("closed by this side") from error

    async def wait_writable(self) -> None:
        """See `Transport`."""
        if self._bulk:
            # A reader on the same core empties the socket now. Else each time it makes room it would wake this side,
            # which then takes the core from it in the middle of its work.
            offer_core()
        try:
            await trio.lowlevel.wait_writable(self._fd)
        except (trio.ClosedResourceError, OSError, ValueError) as error:  # ValueError: closed before the wait
            raise ConnectionLostError("closed by this side") from error

    async def peer_left(self) -> None:
        """See `Transport`."""
        with contextlib.suppress(ConnectionLostError, OSError):  # a broken connection is one that the peer has left
            while True:
                await self.wait_readable()
                try:
                    arrived = self._socket.recv(1, socket.MSG_PEEK)
                except BlockingIOError:
                    continue
                if not arrived:
                    return
                await trio.sleep_forever()

    def receiving_bulk(self, nbytes: int) -> None:
        """See `Transport`. Set only when it changes: it is a system call."""
        low_water = max(1, min(nbytes, PAYLOAD_SLICE_BYTES))
        if low_water != self._low_water:
            self._low_water = low_water
            self._option(socket.SOL_SOCKET, "SO_RCVLOWAT", low_water)

    def sending_bulk(self, bulk: bool) -> None:
        """See `Transport`."""
        if bulk != self._bulk:
            self._bulk = bulk
            self._notsent(NOTSENT_BULK_BYTES if bulk else NOTSENT_BYTES)

    def finish_sending(self) -> None:
        """See `Transport`."""
        with contextlib.suppress(OSError):  # the peer may be gone already, and then there is no one to tell
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """See `Transport`."""
        if self._fd >= 0:
            trio.lowlevel.notify_closing(self._fd)  # wakes waiting tasks
            self._fd = -1
            self._socket.close()

    def _notsent(self, nbytes: int) -> None:
        if self._tcp:
            self._option(socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", nbytes)

    def _option(self, level: int, name: str, value: int) -> None:
        """Set a socket option that only tunes: a platform without it, or that refuses the value, works without."""
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(level, option, value)


async def linger(transport: Transport, scratch: memoryview) -> None:
    """Send nothing more, and read away what the peer still sends, for a while. Raises `ConnectionLostError`.

    Cancellation: the transport can only be closed.
    """
    transport.finish_sending()
    dropped = 0
    with trio.move_on_after(LINGER_S):
        while dropped < LINGER_BYTES:
            received = transport.recv_into_nowait([scratch])
            if received is None:
                await transport.wait_readable()
            elif received == 0:
                return
            else:
                dropped += received


def _name(address: object) -> str:
    """As CLIENT LIST shows it: host:port, [host]:port or the path of a Unix socket."""
    if isinstance(address, tuple):
        host, port = address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    path = address.decode(errors="backslashreplace") if isinstance(address, bytes) else str(address)
    return f"{path}:0"
