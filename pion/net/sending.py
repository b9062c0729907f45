"""Sending replies: small ones in one buffer, bulk ones as the buffers they are, in slices that let others run."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from pion.config import PAYLOAD_SLICE_BYTES, SENDMSG_MAX_BUFFERS
from pion.net.transport import Transport
from pion.protocol.encode import Part
from pion.replies import Buffer, Stream


class StreamLengthError(Exception):
    """A `Stream` made another number of bytes than it declared: the reply on the wire can't be completed."""


class Sender:
    """The sending half of one connection. One task uses it at a time.

    After any exception, `Cancelled` included, an unknown part of the reply is on the wire: the connection must close.
    """

    __slots__ = ("_transport", "blocked", "progress", "unsent")

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.progress = 0
        """Grows whenever the peer took bytes."""
        self.blocked = False
        """Waits for the peer to take bytes."""
        self.unsent = 0
        """Bytes of the current bulk reply that the system has not taken yet."""

    async def send(self, data: bytes) -> None:
        """Send all of `data`. Cancellation: a part may be sent, the connection must close."""
        sent = self._transport.send_nowait(data)
        if sent != len(data):
            await self._send_buffers([memoryview(data)[sent or 0 :]])

    async def send_parts(self, parts: Sequence[Part], nbytes: int) -> None:
        """Send a bulk reply of `nbytes` bytes. Cancellation: a part may be sent, the connection must close.

        Raises `StreamLengthError`, and whatever a stream's piece raises.
        """
        self._transport.sending_bulk(True)
        self.unsent = nbytes
        waiting: list[Buffer] = []
        for part in parts:
            if isinstance(part, Stream):
                await self._send_stream(part, waiting)
                waiting = []
            else:
                waiting.append(part)
        await self._send_buffers(waiting)
        self._transport.sending_bulk(False)

    async def _send_stream(self, stream: Stream, before: list[Buffer]) -> None:
        """Send `before`, then the pieces, each made only when the one before has been taken."""
        left = stream.nbytes
        for make in stream.pieces:
            piece = await trio.to_thread.run_sync(make) if stream.in_thread else make()
            left -= memoryview(piece).nbytes
            if left < 0:
                break
            await self._send_buffers([*before, piece])
            before = []
        if left:
            raise StreamLengthError(f"a stream of {stream.nbytes} bytes made {stream.nbytes - left}")
        await self._send_buffers(before)

    async def _send_buffers(self, buffers: Sequence[Buffer]) -> None:
        views = [view.cast("B") for view in [memoryview(buffer) for buffer in buffers] if view.nbytes]
        index = 0
        count = len(views)
        while index < count:
            end, size = index, 0
            batch: list[Buffer] = []
            while end < count and size < PAYLOAD_SLICE_BYTES and len(batch) < SENDMSG_MAX_BUFFERS:
                view = views[end]
                if size + len(view) > PAYLOAD_SLICE_BYTES:
                    view = view[: PAYLOAD_SLICE_BYTES - size]
                batch.append(view)
                size += len(view)
                end += 1
            sent = self._transport.sendmsg_nowait(batch) or 0
            if sent:
                self.progress += 1
                self.unsent = max(0, self.unsent - sent)
            full = sent == size
            while sent:
                view = views[index]
                if sent < len(view):
                    views[index] = view[sent:]
                    break
                sent -= len(view)
                index += 1
            if index < count:
                if full:
                    await trio.lowlevel.checkpoint()
                else:
                    self.blocked = True
                    await self._transport.wait_writable()
                    self.blocked = False
