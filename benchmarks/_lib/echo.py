"""The bound for small commands: bare Trio servers that take a request of known length and answer with known bytes.

Runs in a process of its own (`python -m benchmarks._lib.echo`) and parses nothing. Two servers:

- streams: `trio.serve_tcp`, `receive_some` and `send_all`, as Trio's own echo example is written;
- sockets: the same on bare sockets that try a non-blocking `recv` and `send` before they wait, the least Trio can cost.

A client's first 16 bytes are the lengths of the request and of the answer.
"""

from __future__ import annotations

import socket
import struct
from functools import partial

import trio

SETUP = struct.Struct("<QQ")
CHUNK_BYTES = 64 * 1024


async def stream_echo(stream: trio.SocketStream) -> None:
    """Serve one connection with Trio's stream classes."""
    setup = b""
    while len(setup) < SETUP.size:
        setup += await stream.receive_some(SETUP.size - len(setup))
    size, answer_bytes = SETUP.unpack(setup)
    answer = bytes(answer_bytes)
    received = 0
    try:
        while data := await stream.receive_some(CHUNK_BYTES):
            received += len(data)
            if received == size:
                received = 0
                await stream.send_all(answer)
    except trio.BrokenResourceError:
        return  # The client went away.


async def socket_echo(stream: trio.SocketStream) -> None:
    """Serve one connection on the socket itself."""
    raw = socket.socket(fileno=socket.dup(stream.socket.fileno()))
    raw.setblocking(False)
    with raw:
        setup = b""
        while len(setup) < SETUP.size:
            setup += await stream.receive_some(SETUP.size - len(setup))
        size, answer_bytes = SETUP.unpack(setup)
        answer = bytes(answer_bytes)
        received = 0
        while True:
            try:
                data = raw.recv(CHUNK_BYTES)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(raw)
                continue
            except ConnectionError:
                return
            if not data:
                return
            received += len(data)
            if received == size:
                received = 0
                raw.send(answer)


async def main() -> None:
    """Listen, print the ports of the two servers, serve until killed."""
    async with trio.open_nursery() as nursery:
        ports = []
        for handler in (stream_echo, socket_echo):
            listeners = await nursery.start(partial(trio.serve_tcp, handler, 0, host="127.0.0.1"))
            ports.append(listeners[0].socket.getsockname()[1])
        print(*ports, flush=True)


if __name__ == "__main__":
    trio.run(main)
