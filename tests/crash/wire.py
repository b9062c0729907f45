"""The client's end of a connection, written for this program alone so that no code is shared with what is tested."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Final

from pion.replies import Buffer

PATIENCE_S: Final = 60.0
"""A reply that takes longer is a violation: nothing that is asked for here takes a second."""

COPIED_BYTES: Final = 4096
"""Shorter arguments are joined, longer ones sent as they are."""

BUFFERS_AT_ONCE: Final = 512

CONNECTION_ERRORS: Final = (ConnectionError, EOFError)
"""What a killed server does to its clients."""


class ViolationError(Exception):
    """The server broke its word; the text says where."""


class Refused(str):
    """An error reply, as data."""

    __slots__ = ()


class Wire:
    """One connection.

    Methods raise one of `CONNECTION_ERRORS` when the server has gone, TimeoutError when it hangs, and ViolationError
    when what it sends is no reply.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:  # of a server that died meanwhile
            self._socket.close()
            raise ConnectionResetError(str(error)) from error
        self._file = self._socket.makefile("rb", 1 << 18)

    def close(self) -> None:
        """Close it; what was asked for and not read is lost."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def send(self, requests: Sequence[Sequence[Buffer]]) -> None:
        """Send requests behind one another."""
        buffers: list[Buffer] = []
        small = bytearray()
        for request in requests:
            small += b"*%d\r\n" % len(request)
            for argument in request:
                small += b"$%d\r\n" % len(argument)
                if len(argument) <= COPIED_BYTES:
                    small += argument
                else:
                    buffers += (bytes(small), argument)
                    small = bytearray()
                small += b"\r\n"
        buffers.append(bytes(small))
        rest = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while rest:
            sent = self._socket.sendmsg(rest[:BUFFERS_AT_ONCE])
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = rest[0][sent:]

    def reply(self) -> Any:
        """The next reply: bytes, str for a status, int, None, a list, or `Refused`."""
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise EOFError
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest.decode()
        if kind == b"-":
            return Refused(rest.decode("utf-8", "replace"))
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self._bulk(int(rest))
        if kind == b"*":
            return None if rest == b"-1" else [self.reply() for _ in range(int(rest))]
        raise ViolationError(f"not a reply: {line[:80]!r}")

    def _bulk(self, size: int) -> bytes:
        data = self._file.read(size + 2)
        if len(data) != size + 2:
            raise EOFError
        return data[:size]

    def call(self, *request: Buffer) -> Any:
        """One request and its reply."""
        self.send([request])
        return self.reply()

    def info(self) -> dict[str, str]:
        """INFO as a dictionary."""
        text: bytes = self.call(b"INFO", b"everything")
        return dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)
