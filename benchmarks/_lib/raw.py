"""A RESP client on a blocking socket: the same code, and so the same cost, for Pion, Redis and a bare socket.

The socket has time-outs in the kernel rather than in Python: a Python time-out would make it non-blocking, and every
call a poll and a call.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks._lib.memory import fresh

LOW_WATER_BYTES = 1 << 20
HEADER_BYTES = 4096
MAX_BUFFERS = 1024

Buffer = bytes | memoryview | NDArray[np.uint8]


class ReplyError(Exception):
    """The server answered with an error."""


def request(*args: bytes | str | int) -> bytes:
    """A command as an array of bulk strings."""
    parts = [b"*%d\r\n" % len(args)]
    for arg in args:
        data = arg if isinstance(arg, bytes) else str(arg).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def request_head(*args: bytes | str | int, payload: int) -> bytes:
    """A command whose last argument, of `payload` bytes, is sent apart so that it is never copied."""
    head = request(*args)
    return b"*%d\r\n" % (len(args) + 1) + head.partition(b"\r\n")[2] + b"$%d\r\n" % payload


class RawClient:
    """One connection. `address` is a port on 127.0.0.1, the path of a Unix socket, or a connected socket."""

    def __init__(self, address: int | str | socket.socket, timeout_s: int = 120) -> None:
        if isinstance(address, socket.socket):
            self.socket = address
        else:
            self.socket = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        if self.socket.family == socket.AF_INET:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit = struct.pack("ll", timeout_s, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if not isinstance(address, socket.socket):
            self.socket.connect(address if isinstance(address, str) else ("127.0.0.1", address))
        self._timeout_s = timeout_s
        self._poll = select.poll()
        self._poll.register(self.socket, select.POLLIN)
        self._pending = b""

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Sending

    def send(self, data: bytes) -> None:
        """Send one small buffer."""
        self.socket.sendall(data)

    def send_buffers(self, buffers: Sequence[Buffer]) -> None:
        """Send buffers as they are, without joining them."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        while views:
            sent = self.socket.sendmsg(views[:MAX_BUFFERS])
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    # Receiving

    def exactly(self, view: memoryview) -> None:
        """Fill `view`: a small reply of known length."""
        filled = self._take(view)
        while filled < len(view):
            filled += self._got(self.socket.recv_into(view[filled:]))

    def line(self) -> bytes:
        """The next line, without its end."""
        while (end := self._pending.find(b"\r\n")) < 0:
            data = self.socket.recv(HEADER_BYTES)
            self._got(len(data))
            self._pending += data
        found, self._pending = self._pending[:end], self._pending[end + 2 :]
        return found

    def payload(self, view: memoryview) -> None:
        """Fill a large `view` with few wake-ups: the kernel wakes us for a megabyte at a time.

        Never in a blocking recv: that copies what is there, then sleeps until a whole low-water mark more has come,
        which at the end of a payload is never.
        """
        filled, total, low = self._take(view), len(view), 0
        try:
            while filled < total:
                try:
                    filled += self._got(self.socket.recv_into(view[filled:], 0, socket.MSG_DONTWAIT))
                except BlockingIOError:
                    if (wanted := min(LOW_WATER_BYTES, total - filled)) != low:
                        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
                        low = wanted
                    if not self._poll.poll(self._timeout_s * 1000):
                        raise TimeoutError(f"{total - filled} of {total} bytes did not come") from None
        finally:
            if low:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def bulk(self, destination: memoryview | None = None) -> memoryview:
        """A bulk string, into `destination` or into a fresh buffer (its line end goes there too and is cut off)."""
        head = self.line()
        if not head.startswith(b"$") or head == b"$-1":
            raise ReplyError(head.decode("utf-8", "replace"))
        size = int(head[1:])
        if destination is None:
            whole = memoryview(fresh(size + 2))
            self.payload(whole)
            return whole[:size]
        self.payload(destination)
        self.exactly(memoryview(bytearray(2)))
        return destination

    def ok(self) -> None:
        """The reply `+OK`. Raises ReplyError on anything else."""
        if (line := self.line()) != b"+OK":
            raise ReplyError(line.decode("utf-8", "replace"))

    def reply(self) -> Any:
        """Any reply as Python data, for set-up and checks. Raises ReplyError on an error."""
        head = self.line()
        kind, rest = head[:1], head[1:]
        if kind == b"-":
            raise ReplyError(rest.decode("utf-8", "replace"))
        if kind == b":":
            return int(rest)
        if kind == b"$":
            if rest == b"-1":
                return None
            whole = bytearray(int(rest) + 2)
            self.payload(memoryview(whole))
            return bytes(whole[:-2])
        if kind == b"*":
            return None if rest == b"-1" else [self.reply() for _ in range(int(rest))]
        if kind == b"+":
            return rest.decode()
        raise ReplyError(f"not a RESP2 reply: {head[:60]!r}")

    def call(self, *args: bytes | str | int) -> Any:
        """One command and its reply, for set-up and checks."""
        self.send(request(*args))
        return self.reply()

    def _take(self, view: memoryview) -> int:
        taken = min(len(self._pending), len(view))
        if taken:
            view[:taken] = self._pending[:taken]
            self._pending = self._pending[taken:]
        return taken

    @staticmethod
    def _got(count: int) -> int:
        if count == 0:
            raise ConnectionError("the server closed the connection")
        return count
