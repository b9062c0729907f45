"""One connection's reply that the thread which computes it also sends.

Waking the event loop, and through it the connection's task, costs more than encoding and sending a small answer, and
after a computation that went through all of the processor's caches it costs several times as much. So the task of a
connection whose last request is computed elsewhere waits for the next request meanwhile, and finds the answer sent. It
takes the reply back as soon as it is woken for anything else: replies never overtake one another. What was sent is
accounted for on the event loop, when the connection next has something to do or is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pion.errors import ConnectionLostError
from pion.later import Later
from pion.net.encoding import Encoding
from pion.net.lanes import Parser
from pion.net.outbox import Outbox
from pion.net.transport import Transport
from pion.replies import ErrorReply


class Leaving:
    """The replies of one connection that are left to threads: at most one at a time."""

    __slots__ = ("_draining", "_encoding", "_later", "_outbox", "_parser", "_request", "_rest", "_transport")

    def __init__(
        self,
        transport: Transport,
        outbox: Outbox,
        parser: Parser,
        encoding: Encoding,
        draining: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._outbox = outbox
        self._parser = parser
        self._encoding = encoding
        self._draining = draining
        self._later: Later | None = None
        self._request: Any = None
        self._rest: bytes | None = None
        """What the system did not take of the reply; None while nothing of it was sent."""

    @property
    def some(self) -> bool:
        """A reply is left, and not taken back."""
        return self._later is not None

    @property
    def over(self) -> bool:
        """There is one, and it is complete: sent, or to be taken back."""
        return self._later is not None and self._later.over

    @property
    def unsent(self) -> bool:
        """There is one, and not all of it is sent."""
        return self._later is not None and self._rest != b""

    def leave(self, request: Any, later: Later) -> bool:
        """Leave a reply. False if it can't be: it or others must be sent by the task, more was received, or it is
        complete already.
        """
        if self._outbox.parts or self._encoding.promised:
            return False
        if not self._parser.need_data or not self._parser.between_requests:
            return False
        self._later, self._request, self._rest = later, request, None
        if later.leave(self._send, self._wake):
            return True
        self._later = self._request = None
        return False

    def collect(self) -> bool:
        """Account for the reply and let go of it if it is sent; False if there is none, or something is left to do."""
        later = self._later
        if later is None or not later.over:
            return False
        later.take_back()  # behind this the thread is done with it
        if self._rest != b"":
            return False
        self._encoding.sent(self._request, later)
        self._later = self._request = None
        return True

    async def settle(self) -> None:
        """Take the reply back, if there is one: wait until it is complete, and send what is unsent of it.

        Cancellation: the connection must close.
        """
        later, request = self._later, self._request
        if later is None or self.collect():
            return
        later.take_back()
        reply = await self._encoding.finish(request, later)
        rest, self._rest, self._later, self._request = self._rest, None, None, None
        if rest is None:
            await self._encoding.append(request, reply, self._outbox)
        elif rest:
            self._outbox.parts.append(rest)
        await self._outbox.flush()

    def withdraw(self) -> None:
        """The connection ends. Behind this no thread uses its transport."""
        later = self._later
        if later is not None:
            later.take_back()  # it may have been sent until now
            if not self.collect():
                later.abandon()
        self._later = self._request = self._rest = None

    def _wake(self) -> None:
        """Wake the task, to which the rest is left. Not once it is at it: it may wait for the peer to read."""
        if self._later is not None:
            self._transport.interrupt()

    def _send(self, reply: Any) -> bool:
        """Called on the computing thread, with the reply's lock held. Raises `TypeError` for what is no reply."""
        if type(reply) is ErrorReply:
            return False  # the task counts it
        data = self._encoding.whole(self._request, reply)
        try:
            sent = self._transport.send_nowait(data) or 0
        except ConnectionLostError:
            return False  # the task meets the same error
        self._rest = data[sent:]
        self._outbox.sender.progress += 1
        return not self._rest and not self._draining()
