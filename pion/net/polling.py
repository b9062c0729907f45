"""Asking for the next request instead of sleeping, while one client is in a dialogue with the server.

Going to sleep in `epoll_wait` and being woken costs both ends more than a small command does, and a core that was idle
runs the first instructions with cold caches. So after a reply the worker looks for the next request for some
microseconds, but only when that is likely to pay and costs nobody anything:

- only for the connection that also sent the request before: with several talking, the loop has better things to do;
- not again for a while after it was in vain, twice as long each time: a client that pauses between requests, or one
  that is idle, costs one look;
- the core is offered to other processes between two looks, so on a single core the client runs meanwhile.

The same idea as adaptive spinning in mutexes and as the Linux guest halt polling (`haltpoll`).
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Final

import attrs

from pion.net.transport import Transport, offer_core

_MOST_SKIPPED: Final = 1024
"""Waits without a look after many looks in vain: then the cost is lost in the noise."""


@attrs.define(eq=False)
class Dialogue:
    """Who talks with this worker. One for each worker."""

    busy_poll_ns: int
    """How long to look; 0 never looks."""
    partner: object = None
    """The connection that sent the last request."""


@attrs.define(eq=False)
class BusyPoll:
    """One connection's part in it."""

    _dialogue: Dialogue
    _skipped: int = 0
    """Waits to let pass before the next look."""
    _penalty: int = 0

    def look(self, transport: Transport, max_bytes: int) -> bytes | None:
        """Bytes that arrive within the time, b"" at the end of the stream; None if it did not pay or did not look.

        Holds the event loop meanwhile. Raises `ConnectionLostError`.
        """
        dialogue = self._dialogue
        if dialogue.partner is not self:
            dialogue.partner = self
            return None
        if self._skipped:
            self._skipped -= 1
            return None
        if not dialogue.busy_poll_ns:
            return None
        end_ns = perf_counter_ns() + dialogue.busy_poll_ns
        looking = True
        while looking:
            offer_core()
            data = transport.recv_nowait(max_bytes)
            if data is not None:
                self._penalty = 0
                return data
            looking = perf_counter_ns() < end_ns
        self._skipped = self._penalty = min(2 * self._penalty + 1, _MOST_SKIPPED)
        return None
