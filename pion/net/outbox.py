"""Replies of one connection on their way out: small ones together, and none before the log has what it promises.

A connection that has replies to send, which wait for the log, goes on reading: what comes meanwhile shares the next
write of the log. If nothing comes, it leaves the replies behind, and the log sends them when it has them. So a store
costs the connection's task one wake-up, for its request, and none for its reply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

from pion.errors import CommandError, ConnectionLostError, PionError
from pion.net.sending import Promise, Sender, settle
from pion.net.transport import Transport
from pion.protocol.encode import BUFFERS, Part

logger = logging.getLogger("pion.net")

FLUSH_BYTES: Final = 64 * 1024
"""Replies of a batch are sent together up to this size; one more bulk reply is then sent by itself."""


class Announced(Protocol):
    """A promise that tells when it is kept or broken: what the log hands out."""

    error: str
    """Why it can't be kept; empty while it is open, or when it was kept."""

    @property
    def is_over(self) -> bool:
        """Whether it is kept or broken."""

    def refusal(self) -> CommandError:
        """The error for a broken one."""

    def call_when_over(self, callback: Callable[[], None]) -> None:
        """Have it called on the event loop, once. A connection that was woken meanwhile may ask again."""


class Outbox:
    """Encoded replies, and what they promise. Used by the connection's task, and by the log while it is `left`."""

    __slots__ = (
        "_count_refused",
        "_error_instead",
        "_transport",
        "_when_sent",
        "left",
        "nbytes",
        "parts",
        "sender",
        "unlogged",
    )

    def __init__(
        self,
        transport: Transport,
        sender: Sender,
        error_instead: Callable[[Part, PionError], bytes],
        count_refused: Callable[[str], None],
        when_sent: Callable[[], None],
    ) -> None:
        self._transport = transport
        self.sender = sender
        self._error_instead = error_instead
        self._count_refused = count_refused
        self._when_sent = when_sent
        self.parts: list[Part] = []
        self.nbytes = 0
        """Of the parts whose size counts: all but those of the lane's smallest replies."""
        self.unlogged: list[Promise] = []
        """Which parts may only be sent once the log has what they promise."""
        self.left = False
        """The log sends them; the task waits for the next request, and takes them back when it comes."""

    async def flush(self) -> None:
        """Send everything, once what it promises is in the log. Cancellation: the connection must close."""
        if self.unlogged:
            unlogged, self.unlogged = self.unlogged, []
            for refusal in await settle(self.parts, unlogged, self._error_instead):
                self._count_refused(refusal.code)
        parts, nbytes = self.parts, self.nbytes
        if not parts:
            return
        # A batch of small replies holds buffers only unless its size was counted.
        if nbytes <= FLUSH_BYTES and not (nbytes and any(type(part) not in BUFFERS for part in parts)):
            data = b"".join(parts)  # type: ignore[arg-type]  # buffers only
            sent = self._transport.send_nowait(data)
            if sent == len(data):
                self.sender.progress += 1
            else:
                await self.sender.send(data, sent or 0)
        else:
            await self.sender.send_parts(parts, nbytes)
        parts.clear()
        self.nbytes = 0

    def leave(self) -> bool:
        """Leave the replies to the log, if it can send them; else they must be flushed."""
        if self.nbytes:
            return False
        last = self.unlogged[-1][2][-1]
        kind = type(last)
        if not hasattr(kind, "call_when_over") or last.is_over:  # type: ignore[attr-defined]
            return False
        if any(type(wait) is not kind for *_, waits in self.unlogged for wait in waits):
            return False
        self.left = True
        last.call_when_over(self._logged)  # type: ignore[attr-defined]
        return True

    def close(self) -> None:
        """The connection is over: nothing more is sent, and payloads are given up."""
        self.left = False
        self.parts.clear()
        self.unlogged.clear()

    def _logged(self) -> None:
        """Called by the log. The replies are small, so that the socket takes them almost always."""
        if not self.left or not all(wait.is_over for *_, each in self.unlogged for wait in each):  # type: ignore[attr-defined]
            return  # the task has taken over, or waits for a later write by now
        unlogged, self.unlogged = self.unlogged, []
        for first, last, waits in reversed(unlogged):
            broken: list[Announced] = [wait for wait in waits if wait.error]  # type: ignore[attr-defined, misc]
            if broken:
                refusal = broken[0].refusal()
                self._count_refused(refusal.code)
                if last > first:
                    self.parts[first:last] = [self._error_instead(self.parts[first], refusal)]
        data = b"".join(self.parts)  # type: ignore[arg-type]  # simple replies and errors
        try:
            sent = self._transport.send_nowait(data) or 0
        except ConnectionLostError as error:
            logger.debug("a reply can't be sent: %s", error)  # the task meets the same error where it waits
            return
        self.left = False
        self.parts.clear()
        if sent < len(data):
            self.parts.append(data[sent:])
            self._transport.interrupt()
            return
        self.sender.progress += 1
        self._when_sent()
