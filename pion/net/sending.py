"""Sending replies: small ones in one buffer, bulk ones as the buffers they are, in slices that let others run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias

import trio

from pion.errors import CommandError, ConnectionLostError
from pion.limits import PAYLOAD_SLICE_BYTES, SENDMSG_MAX_BUFFERS
from pion.net.budget import Pieces
from pion.net.transport import Transport
from pion.protocol.encode import JOINED_BYTES, Part
from pion.replies import BrokenReplyError, Buffer, Check, Stream

CHECKS_AHEAD: Final = 1
"""Checks that have passed and wait for what stands in front of them; one more is being worked off."""

_Passed: TypeAlias = Exception | None

Promise: TypeAlias = tuple[int, int, list[Awaitable[None]]]
"""Parts of replies, from the first to one past the last, that may be sent once all of these were awaited."""


class StreamLengthError(Exception):
    """A `Stream` made another number of bytes than it declared: the reply on the wire can't be completed."""


class Sender:
    """The sending half of one connection. One task uses it at a time.

    After any exception, `Cancelled` included, an unknown part of the reply is on the wire: the connection must close.
    """

    __slots__ = (
        "_pieces",
        "_threads",
        "_transport",
        "blocked",
        "nbytes",
        "progress",
        "started_s",
        "unsent",
    )

    def __init__(
        self, transport: Transport, threads: trio.CapacityLimiter | None = None, pieces: Pieces | None = None
    ) -> None:
        self._transport = transport
        self._threads = threads
        self._pieces = pieces or Pieces()
        self.progress = 0
        """Grows whenever the peer took bytes."""
        self.blocked = False
        """Waits for the peer to take bytes."""
        self.nbytes = 0
        """Size of the bulk reply being sent; 0 between bulk replies."""
        self.unsent = 0
        """Bytes of it that the system has not taken yet."""
        self.started_s = 0.0
        """When it was begun, on Trio's clock."""

    def rate(self, now_s: float) -> float:
        """Bytes a second that the peer has taken of the current bulk reply."""
        return (self.nbytes - self.unsent) / max(now_s - self.started_s, 1e-3)

    async def send(self, data: bytes, sent: int = 0) -> None:
        """Send `data` from position `sent` on. Cancellation: a part may be sent, the connection must close."""
        if sent:
            self.progress += 1
        await self._send_buffers([memoryview(data)[sent:]])

    async def send_parts(self, parts: Sequence[Part], nbytes: int) -> None:
        """Send a bulk reply of `nbytes` bytes. Cancellation: a part may be sent, the connection must close.

        Raises `StreamLengthError`, ConnectionLostError for a reply that is broken, and whatever else a stream's piece
        or a check raises.
        """
        self._transport.sending_bulk(True)
        self.nbytes = self.unsent = nbytes
        self.started_s = trio.current_time()
        checks = [part for part in parts if isinstance(part, Check)]
        try:
            if checks:
                await self._send_with(checks, parts)
            else:
                await self._send_all(parts)
        except BrokenReplyError as broken:
            broken.tell()
            raise ConnectionLostError(f"a reply was broken off: {broken}") from None
        self.nbytes = self.unsent = 0
        self._transport.sending_bulk(False)

    async def _send_all(self, parts: Sequence[Part], passed: trio.MemoryReceiveChannel[_Passed] | None = None) -> None:
        """Send all parts; which checks have passed comes from `passed`."""
        waiting: list[Buffer] = []
        for part in parts:
            if isinstance(part, Check):
                assert passed is not None  # noqa: S101  see `send_parts`
                try:
                    error = passed.receive_nowait()
                except trio.WouldBlock:
                    await self._send_buffers(waiting)
                    waiting = []
                    error = await passed.receive()
                if error is not None:
                    raise error
            elif isinstance(part, Stream):
                await self._send_stream(part, waiting)
                waiting = []
            else:
                waiting.append(part)
        await self._send_buffers(waiting)

    async def _send_with(self, checks: Sequence[Check], parts: Sequence[Part]) -> None:
        """Send all parts, while checks that stand further back are worked off."""
        outgoing, passed = trio.open_memory_channel[_Passed](CHECKS_AHEAD)
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._work_off, checks, outgoing)
            try:
                await self._send_all(parts, passed)
            except Exception as error:  # outside of the nursery it would come in a group
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _work_off(self, checks: Sequence[Check], passed: trio.MemorySendChannel[_Passed]) -> None:
        """In their order: here what waits for nothing, as a thread takes longer to start, and the rest in a thread."""
        for check in checks:
            try:
                over = False
                while not over:
                    if check.ready():
                        over = check.step()
                        await trio.lowlevel.checkpoint()
                    else:
                        await trio.to_thread.run_sync(check.finish, limiter=self._threads)
                        over = True
            except Exception as error:  # for whoever sends: it is theirs once they come there
                await passed.send(error)
                return
            await passed.send(None)

    async def _send_stream(self, stream: Stream, before: Sequence[Buffer]) -> None:
        """Send `before`, then the pieces, each made only when the one before has been taken."""
        left = stream.nbytes
        for make in stream.pieces:
            piece = await trio.to_thread.run_sync(make, limiter=self._threads) if stream.in_thread else make()
            nbytes = memoryview(piece).nbytes
            left -= nbytes
            if left < 0:
                break
            with self._holding(nbytes):
                await self._send_buffers([*before, piece])
            before = ()
        if left:
            raise StreamLengthError(f"a stream of {stream.nbytes} bytes made {stream.nbytes - left}")
        await self._send_buffers(before)

    @contextmanager
    def _holding(self, nbytes: int) -> Iterator[None]:
        """A piece was made, and takes memory until it is sent."""
        self._pieces.nbytes += nbytes
        try:
            yield
        finally:
            self._pieces.nbytes -= nbytes

    async def _send_buffers(self, buffers: Sequence[Buffer]) -> None:
        views = _views(buffers)
        try:
            await self._send_views(views)
        finally:
            views.clear()  # the traceback of a cancelled send must not keep the payload alive

    async def _send_views(self, views: list[memoryview]) -> None:
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


def _views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """The buffers as plain bytes, with small neighbours (headers, line ends, short strings) joined."""
    views: list[memoryview] = []
    small: list[Buffer] = []
    small_bytes = 0
    for buffer in buffers:
        nbytes = buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
        if nbytes <= JOINED_BYTES and small_bytes < PAYLOAD_SLICE_BYTES:
            small.append(buffer)
            small_bytes += nbytes
            continue
        if small:
            views.append(memoryview(b"".join(small)))
            small, small_bytes = [], 0
        views.append(memoryview(buffer).cast("B"))
    if small_bytes:
        views.append(memoryview(b"".join(small)))
    return views


async def settle(
    out: list[Part], promises: Sequence[Promise], error_instead: Callable[[Part, CommandError], bytes]
) -> list[CommandError]:
    """Wait until `out` may be sent. Replies that promise what could not be kept become errors, which are returned.

    `error_instead` encodes an error in place of the reply whose first part it is given.

    Cancellation: nothing of `out` may be sent.
    """
    failed: list[tuple[int, int, CommandError]] = []
    for first, last, waits in promises:
        try:
            for wait in waits:
                await wait
        except CommandError as error:
            failed.append((first, last, error))
    for first, last, refusal in reversed(failed):
        if last > first:
            out[first:last] = [error_instead(out[first], refusal)]
    return [refusal for _, _, refusal in failed]


def size_of(out: list[Part], first: int) -> int:
    """Bytes of the parts from number `first` on."""
    return sum(len(part) if isinstance(part, bytes) else part.nbytes for part in out[first:])
