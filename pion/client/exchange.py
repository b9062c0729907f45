"""One exchange: requests out, as many replies in. Pure, and the same on both lanes; clients only move its bytes.

Goal: pipelines of any size without a lock-up, large payloads without a copy, and a stop at the first error.
Requests are cut into segments that end where a request ends: small ones are joined, a large payload is a buffer of its
own. A driver sends `outgoing()` and reports with `sent(n)`, receives as the reader says, and calls `collect()` after
each receive. While there is more to send it must also receive whenever sending would block, because the server stops
reading when nobody takes its replies. With `stop_at_error` the segments not begun are dropped at the first error reply;
what was begun is sent to its end, so that the connection stays in step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

import attrs

from pion.client.errors import BadReplyError, ConnectionLostError, PionClientError, ServerError
from pion.client.limits import JOIN_BYTES, MAX_SEND_BUFFERS, SEGMENT_BYTES, SEND_BYTES
from pion.client.packing import Buffer
from pion.client.replies import NEED_DATA


class Outgoing(Protocol):
    """A request in the form that one lane sends."""

    @property
    def buffers(self) -> list[Buffer]:
        """Its bytes."""

    @property
    def expected(self) -> Any:
        """What the lane's reader is told of it."""


class Reader(Protocol):
    """What takes the replies of one lane apart: see `replies.ReplyReader` and `binary.BinaryReader`."""

    @property
    def read_bytes(self) -> int:
        """How much to receive at once for the next `feed`."""

    @property
    def idle(self) -> bool:
        """Nothing of a reply has been seen yet."""

    def expect(self, expected: Any, /) -> None:
        """The next reply answers this."""

    def feed(self, data: bytes | memoryview, /) -> None:
        """Take what the socket gave."""

    def target(self) -> memoryview | None:
        """Where the next bytes must be received; None: anywhere, for `feed`."""

    def filled(self, n: int, /) -> None:
        """The first `n` bytes of `target()` hold data."""

    def next_reply(self) -> object:
        """The next reply, or NEED_DATA."""


@attrs.define
class _Segment:
    """Whole requests that are sent together: `requests` of them are out when the last buffer is."""

    buffers: deque[Buffer]
    requests: int


def _segments(requests: Sequence[Outgoing]) -> deque[_Segment]:
    if len(requests) == 1:
        return deque([_Segment(deque(requests[0].buffers), 1)])
    result: deque[_Segment] = deque()
    small: list[Buffer] = []
    small_bytes = count = 0

    def flush() -> None:
        nonlocal small, small_bytes, count
        if small:
            result.append(_Segment(deque([small[0] if len(small) == 1 else b"".join(small)]), count))
        small, small_bytes, count = [], 0, 0

    for request in requests:
        if len(request.buffers) > 1 and any(len(part) > JOIN_BYTES for part in request.buffers):
            flush()
            result.append(_Segment(deque(request.buffers), 1))
            continue
        small += request.buffers
        small_bytes += sum(map(len, request.buffers))
        count += 1
        if small_bytes >= SEGMENT_BYTES:
            flush()
    flush()
    return result


class Exchange:
    """See the module. `replies` holds what came so far, errors as `ServerError` values."""

    __slots__ = (
        "_expected",
        "_offered",
        "_partial",
        "_requests",
        "_segments",
        "_stop_at_error",
        "pipelined",
        "reader",
        "replies",
    )

    def __init__(self, requests: Sequence[Outgoing], reader: Reader, *, stop_at_error: bool = False) -> None:
        self.reader = reader
        self.replies: list[object] = []
        self.pipelined = len(requests) > 1
        self._segments = _segments(requests)
        self._offered = 0
        """Segments at the front that are being sent, in part perhaps."""
        self._partial = False
        """A part of the first segment is out."""
        self._requests = requests
        self._expected = len(requests)
        self._stop_at_error = stop_at_error
        self._expect()

    @property
    def sending(self) -> bool:
        """There is more to send."""
        return bool(self._segments)

    @property
    def complete(self) -> bool:
        """All replies are there."""
        return len(self.replies) == self._expected

    def outgoing(self) -> list[Buffer]:
        """The next buffers to send, in order. Some of their bytes, all or none may be sent; tell `sent`."""
        if not self.pipelined:
            return list(islice(self._segments[0].buffers, MAX_SEND_BUFFERS))
        result: list[Buffer] = []
        self._offered = nbytes = 0
        for segment in self._segments:
            # Of a pipeline only so much at once: what is being sent can't be dropped any more.
            if result and (nbytes >= SEND_BYTES or len(result) + len(segment.buffers) > MAX_SEND_BUFFERS):
                break
            nbytes += sum(map(len, segment.buffers))
            self._offered += 1
            result += segment.buffers
        return result[:MAX_SEND_BUFFERS]

    def sent(self, n: int) -> None:
        """`n` bytes of `outgoing()` are on their way, and no more are being sent."""
        while n:
            buffers = self._segments[0].buffers
            size = len(buffers[0])
            self._partial = True
            if n < size:
                buffers[0] = memoryview(buffers[0])[n:]
                break
            n -= size
            buffers.popleft()
            if not buffers:
                self._segments.popleft()
                self._partial = False
        self._offered = int(self._partial)

    def collect(self) -> None:
        """Take the replies the reader has. Raises `BadReplyError` for one that nobody asked for."""
        while not self.complete:
            reply = self.reader.next_reply()
            if reply is NEED_DATA:
                return
            self.replies.append(reply)
            self._expect()
            if self._stop_at_error and isinstance(reply, ServerError):
                self._stop()
        if not self.reader.idle:
            raise BadReplyError("the server sent more replies than there were requests")

    def explained(self, error: ConnectionLostError) -> PionClientError | None:
        """A better error, if the server said something before it closed: that may be the reason.

        To a single request it is the answer. In a pipeline it may be the answer to one request or to all.
        """
        word = self.replies[-1] if self.replies else None
        if not isinstance(word, ServerError):
            return None
        return ConnectionLostError(f"{error}; the server's last word was: {word}") if self.pipelined else word

    def _stop(self) -> None:
        while len(self._segments) > self._offered:
            self._expected -= self._segments.pop().requests

    def _expect(self) -> None:
        if len(self.replies) < len(self._requests):
            self.reader.expect(self._requests[len(self.replies)].expected)
