"""The bound for transfers: a bare blocking socket that answers a fixed-length request with a payload, or the reverse.

Runs in a process of its own (`python -m benchmarks._lib.bare UNIX_PATH`) and parses nothing. A client's first 17 bytes
say what to do: mode, length of the request without payload, length of the payload. Payloads are received by the very
code the client uses, into a fresh buffer each, and the newest is kept until the next is complete, as a store must.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading

import numpy as np

from benchmarks._lib.memory import fresh, keep_buffers_fresh
from benchmarks._lib.raw import RawClient

SETUP = struct.Struct("<cQQ")
SEND, KEEP = b"S", b"K"
IDLE_S = 3600
"""A connection waits so long for its next turn."""


def _serve(connection: RawClient) -> None:
    setup = bytearray(SETUP.size)
    connection.exactly(memoryview(setup))
    mode, request_bytes, payload_bytes = SETUP.unpack(setup)
    head = memoryview(bytearray(request_bytes))
    try:
        if mode == SEND:
            payload = np.ones(payload_bytes, np.uint8)
            buffers = [b"$%d\r\n" % payload_bytes, payload, b"\r\n"]
            while True:
                connection.exactly(head)
                connection.send_buffers(buffers)
        while True:
            connection.exactly(head)
            incoming = fresh(payload_bytes + 2)
            connection.payload(memoryview(incoming))
            kept = incoming  # noqa: F841  the one before goes here, with its pages
            connection.send(b"+OK\r\n")
    except ConnectionError:
        connection.close()


def _accept(listener: socket.socket) -> None:
    while True:
        accepted, _ = listener.accept()
        threading.Thread(target=_serve, args=(RawClient(accepted, IDLE_S),), daemon=True).start()


def main() -> None:
    """Listen, print the TCP port, serve until killed."""
    keep_buffers_fresh()
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(sys.argv[1])
    tcp = socket.socket(socket.AF_INET)
    tcp.bind(("127.0.0.1", 0))
    for listener in (unix, tcp):
        listener.listen()
    print(tcp.getsockname()[1], flush=True)
    threading.Thread(target=_accept, args=(unix,), daemon=True).start()
    _accept(tcp)


if __name__ == "__main__":
    main()
