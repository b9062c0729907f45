"""A reply that another thread finishes, and may send as well.

Theory of operation. A handler hands its work to a thread and returns a `Later` at once. Whoever runs the handler either
waits for it, like for any reply (`wait`), or leaves it: then the thread that completes it also sends it, the moment it
is known, and the event loop has nothing to do with the answer. `take_back` ends that; it returns only when the thread
is not sending, so that a connection can be closed behind it.

One lock orders the two threads. It is held while a reply is encoded and given to the system, never while anything
waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import trio

logger = logging.getLogger("pion.later")


class Later:
    """One reply. Made on the event loop; `complete` may be called on any thread, the rest on the loop only."""

    __slots__ = (
        "_error",
        "_lock",
        "_reply",
        "_send",
        "_task",
        "_tell",
        "_token",
        "ended_ns",
        "entry",
        "make",
        "over",
        "start_ns",
        "withdraw",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token = trio.lowlevel.current_trio_token()
        self._reply: Any = None
        self._error: BaseException | None = None
        self._send: Callable[[Any], bool] | None = None
        self._tell: Callable[[], object] | None = None
        self._task: trio.lowlevel.Task | None = None
        self.withdraw: Callable[[], None] | None = None
        """Called when nobody wants the reply any more and it is not complete."""
        self.make: Callable[[Any], Any] | None = None
        """Makes the reply out of what it is completed with; called once, on the thread that sends or by who waits."""
        self.over = False
        """It is complete."""
        self.ended_ns = 0
        """When it was completed (`perf_counter_ns`)."""
        self.entry: Any = None
        self.start_ns = 0
        """Which command it is the reply to, and when that began: set by the dispatcher, for its accounts."""

    # On any thread.

    def complete(self, found: Any, error: BaseException | None = None) -> None:
        """Give the reply, or the error in its place. The first call counts, later ones do nothing."""
        with self._lock:
            if self.over:
                return
            self._reply, self._error = found, error
            self.ended_ns = perf_counter_ns()
            self.over = True
            send, tell = self._send, self._tell
            self._send = self._tell = None
            if send is not None and error is None:
                try:
                    if self.make is not None:
                        self._reply, self.make = self.make(found), None
                    if send(self._reply):
                        tell = self._reply = None
                except Exception:  # the task meets the same error, where it can be answered
                    logger.debug("a reply could not be sent from its own thread", exc_info=True)
        if tell is not None:
            try:
                self._token.run_sync_soon(tell)
            except trio.RunFinishedError:
                logger.debug("a reply was finished after the server's end")

    # On the event loop.

    def leave(self, send: Callable[[Any], bool], tell: Callable[[], object]) -> bool:
        """Have the completing thread call `send` with the reply; False if it is complete already.

        `tell` is called on the event loop unless `send` returns True; an error is never sent, only told.
        """
        with self._lock:
            if self.over:
                return False
            self._send, self._tell = send, tell
        return True

    def take_back(self) -> None:
        """Nothing is sent or told from now on."""
        with self._lock:
            self._send = self._tell = None

    def abandon(self) -> None:
        """Nobody wants the reply any more. It need not be computed, if that has not begun."""
        self.take_back()
        withdraw, self.withdraw = self.withdraw, None
        if not self.over and withdraw is not None:
            withdraw()

    async def wait(self) -> Any:
        """The reply, once: it is not kept. Raises the error it was completed with. Cancellation: as `abandon`."""
        with self._lock:
            if not self.over:
                self._task = trio.lowlevel.current_task()
                self._send, self._tell = None, self._resume
        if self._task is not None:
            await trio.lowlevel.wait_task_rescheduled(self._cancelled)
        reply, error = self._reply, self._error
        self._reply = self._error = None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and what was asked
        return reply if self.make is None else self.make(reply)

    def _resume(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def _cancelled(self, _raise_cancel: Callable[[], object]) -> trio.lowlevel.Abort:
        self._task = None
        self.abandon()
        return trio.lowlevel.Abort.SUCCEEDED
