"""A transport without sockets, for tests: two byte queues of bounded size.

Every wait of a connection can be reached with it, without the kernel's buffers and timing: `capacity` plays the
kernel's send buffer, and the sizes a test writes are the sizes that the other side receives.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence

import trio

from pion.errors import ConnectionLostError
from pion.limits import PAYLOAD_SLICE_BYTES
from pion.replies import Buffer


class _Pipe:
    """One direction. Chunks keep their borders; `broken` means that the reading side is gone."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.chunks: deque[bytes] = deque()
        self.size = 0
        self.low_water = 1
        self.ended = False
        self.broken = False
        self.readable = trio.lowlevel.ParkingLot()
        self.writable = trio.lowlevel.ParkingLot()

    def put(self, data: Buffer) -> int:
        taken = bytes(data[: self.capacity - self.size])
        if taken:
            self.chunks.append(taken)
            self.size += len(taken)
            if self.size >= self.low_water:
                self.readable.unpark_all()
        return len(taken)

    def get(self, max_bytes: int) -> bytes:
        chunk = self.chunks.popleft()
        if len(chunk) > max_bytes:
            self.chunks.appendleft(chunk[max_bytes:])
            chunk = chunk[:max_bytes]
        self.size -= len(chunk)
        self.writable.unpark_all()
        return chunk

    def end(self) -> None:
        self.ended = True
        self.readable.unpark_all()
        self.writable.unpark_all()

    def break_(self) -> None:
        self.broken = True
        self.chunks.clear()
        self.size = 0
        self.writable.unpark_all()


class MemoryTransport:
    """One end of a pair made by `memory_pair`. See `pion.net.transport.Transport` for the methods."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, peer: str, local: str) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = self._interrupted = False
        self.peer = peer
        self.local = local

    def recv_nowait(self, max_bytes: int) -> bytes | None:
        """See `Transport`."""
        self._check()
        if self._incoming.size:
            return self._incoming.get(max_bytes)
        return b"" if self._incoming.ended else None

    def recv_into_nowait(self, buffers: Sequence[memoryview]) -> int | None:
        """See `Transport`."""
        received = 0
        for buffer in buffers:
            position = 0
            while position < len(buffer):
                data = self.recv_nowait(len(buffer) - position)
                if not data:
                    return received if received or data is not None else None
                buffer[position : position + len(data)] = data
                position += len(data)
                received += len(data)
        return received

    def send_nowait(self, data: Buffer) -> int | None:
        """See `Transport`."""
        self._check()
        if self._outgoing.broken or self._outgoing.ended:
            raise ConnectionLostError("the peer closed the connection")
        return self._outgoing.put(data) or (None if len(data) else 0)

    def sendmsg_nowait(self, buffers: Sequence[Buffer]) -> int | None:
        """See `Transport`."""
        sent = 0
        for buffer in buffers:
            taken = self.send_nowait(buffer) or 0
            sent += taken
            if taken < len(buffer):
                break
        return sent or None

    async def wait_readable(self) -> None:
        """See `Transport`."""
        await trio.lowlevel.checkpoint()
        pipe = self._incoming
        while not self._closed and pipe.size < pipe.low_water and not pipe.ended and not self._interrupted:
            await pipe.readable.park()
        self._interrupted = False
        self._check()

    async def wait_writable(self) -> None:
        """See `Transport`."""
        await trio.lowlevel.checkpoint()
        pipe = self._outgoing
        while not self._closed and pipe.size >= pipe.capacity and not pipe.broken:
            await pipe.writable.park()
        self._check()

    async def peer_left(self) -> None:
        """See `Transport`."""
        with contextlib.suppress(ConnectionLostError):
            await self.wait_readable()
            if self._incoming.size:
                await trio.sleep_forever()

    def interrupt(self) -> None:
        """See `Transport`."""
        self._interrupted = True
        self._incoming.readable.unpark_all()

    def receiving_bulk(self, nbytes: int) -> None:
        """See `Transport`. As with a socket, lowering it wakes who can go on."""
        pipe = self._incoming
        pipe.low_water = max(1, min(nbytes, pipe.capacity))
        if pipe.size >= pipe.low_water:
            pipe.readable.unpark_all()

    def sending_bulk(self, bulk: bool) -> None:
        """See `Transport`; the memory transport has one capacity."""

    def finish_sending(self) -> None:
        """See `Transport`."""
        self._outgoing.end()

    def close(self) -> None:
        """See `Transport`."""
        if not self._closed:
            self._closed = True
            self._outgoing.end()
            self._incoming.break_()
            self._incoming.readable.unpark_all()

    def _check(self) -> None:
        if self._closed:
            raise ConnectionLostError("closed by this side")

    # What a test does at its end of the pair.

    async def send_all(self, data: Buffer) -> None:
        """Send everything, waiting for room. Cancellation: a part may be sent."""
        view = memoryview(data)
        while view:
            view = view[self.send_nowait(view) or 0 :]
            if view:
                await self.wait_writable()

    async def receive_some(self, max_bytes: int = PAYLOAD_SLICE_BYTES) -> bytes:
        """The next bytes, b"" at the end. Cancellation: nothing is lost."""
        while True:
            data = self.recv_nowait(max_bytes)
            if data is not None:
                return data
            await self.wait_readable()


def memory_pair(capacity: int = PAYLOAD_SLICE_BYTES) -> tuple[MemoryTransport, MemoryTransport]:
    """The client's and the server's end of a connection that holds at most `capacity` unread bytes each way."""
    there, back = _Pipe(capacity), _Pipe(capacity)
    return (
        MemoryTransport(incoming=back, outgoing=there, peer="memory:server", local="memory:client"),
        MemoryTransport(incoming=there, outgoing=back, peer="memory:client", local="memory:server"),
    )
