"""A bare RESP connection for comparing servers: every reply keeps its type byte, so +OK and $2 OK differ."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any


class RespSocket:
    """Sends requests as arrays or raw bytes and reads one reply at a time; a closed connection reads as `None`."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> RespSocket:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, request: bytes | Sequence[str | bytes]) -> None:
        if not isinstance(request, bytes):
            args = [arg.encode() if isinstance(arg, str) else arg for arg in request]
            request = b"*%d\r\n" % len(args) + b"".join(b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args)
        self._socket.sendall(request)

    def read(self) -> Any:
        try:
            line = self._file.readline()
        except ConnectionResetError:
            return None
        if not line:
            return None
        assert line.endswith(b"\r\n"), line
        kind, text = line[:1].decode(), line[1:-2]
        if kind in "+-:_,#(":
            return kind + text.decode("utf-8", "backslashreplace")
        if kind in "$=":
            if int(text) < 0:
                return None if kind == "=" else "_"  # RESP2's null is RESP3's null
            data = self._file.read(int(text) + 2)
            # A verbatim string is a bulk string with a hint for displays.
            return "$" + data[4 if kind == "=" else 0 : -2].decode("utf-8", "backslashreplace")
        if kind in "*~":  # a set is an array without order
            return "_" if int(text) < 0 else [self.read() for _ in range(int(text))]
        if kind == "%":
            return {"map": [self.read() for _ in range(2 * int(text))]}
        raise AssertionError(f"unexpected reply {line!r}")

    def call(self, request: bytes | Sequence[str | bytes]) -> Any:
        self.send(request)
        return self.read()
