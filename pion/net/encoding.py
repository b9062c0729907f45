"""From what a handler returned to the buffers of its reply, in the protocol of the connection's lane."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pion.context import Context
from pion.later import Later
from pion.limits import LONG_REPLY_ITEMS
from pion.net.lanes import Lane
from pion.net.outbox import Outbox
from pion.net.sending import size_of
from pion.protocol.encode import Part
from pion.replies import Map


class Encoding:
    """Encodes the replies of one connection."""

    __slots__ = ("_breathe", "_context", "_lane")

    def __init__(self, lane: Lane, context: Context, breathe: Callable[[], Awaitable[None]]) -> None:
        self._lane = lane
        self._context = context
        self._breathe = breathe
        """Lets others run, if it is time: a long array, such as EXEC's, may take more than a turn."""

    @property
    def promised(self) -> bool:
        """The log must have something before the reply to the last command is sent."""
        return bool(self._context.session.unlogged)

    async def append(self, request: Any, reply: Any, outbox: Outbox) -> None:
        """Append a reply; in place of a value that is none, the error that says so.

        Cancellation: the connection must close.
        """
        out = outbox.parts
        first, resp = len(out), self._context.session.resp
        encode = self._lane.encode
        try:
            if (type(reply) is list and len(reply) > LONG_REPLY_ITEMS) or (
                type(reply) is Map and len(reply.pairs) > LONG_REPLY_ITEMS
            ):
                for index, item in enumerate(self._lane.begin_long(reply, resp, out)):
                    encode(item, resp, out)
                    if not index % 16:
                        await self._breathe()
            else:
                encode(reply, resp, out)
        except TypeError as error:
            del out[first:]
            encode(self._lane.unsendable(self._context, request, error), resp, out)
        # A single part is bytes; a memoryview or a stream comes between a header and a line end.
        outbox.nbytes += len(out[first]) if len(out) == first + 1 else size_of(out, first)  # type: ignore[arg-type]

    async def finish(self, request: Any, later: Later) -> Any:
        """The reply to a request as the lane's `execute` returns it: waited for, and accounted for.

        Cancellation: the connection must close.
        """
        context = self._context
        return self._lane.answer(request, await context.dispatch.run(context, later.entry, request, later))

    def sent(self, request: Any, later: Later) -> None:
        """Account for a reply that another thread has sent."""
        self._context.dispatch.answered(self._context, request, later)

    def whole(self, request: Any, reply: Any) -> bytes:
        """The buffers of a handler's reply as one. Raises `TypeError` for what is none, or is made piece by piece."""
        parts: list[Part] = []
        self._lane.encode(self._lane.answer(request, reply), self._context.session.resp, parts)
        return b"".join(parts)  # type: ignore[arg-type]  # a Stream is a TypeError
