"""Records that reach the disk together, and what those wait for who made them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import trio

from pion.errors import MisconfError
from pion.storage.durable import Durable


class Batch:
    """Items that reach the disk together. Awaiting it waits until they did; raises MisconfError if they can't.

    Cancellation: the items are written all the same.
    """

    __slots__ = ("_callbacks", "_done", "error", "items", "nbytes", "records")

    def __init__(self) -> None:
        self._done = trio.Event()
        self.items: list[tuple[Durable, Any] | None] = []
        """None lets the next segment begin."""
        self.nbytes = self.records = 0
        self.error = ""
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_over(self) -> bool:
        """Whether it is written, or can't be: then `error` says why."""
        return self._done.is_set()

    def refusal(self) -> MisconfError:
        """The error for those whose items could not be written."""
        return refusal(self.error)

    def call_when_over(self, callback: Callable[[], None]) -> None:
        """Have it called on the event loop, once, when it is written or can't be. It must not raise."""
        self._callbacks.append(callback)

    def finish(self, error: str = "") -> None:
        """Wake everyone who waits."""
        self.error = error
        self.items = []
        self._done.set()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    async def over(self) -> None:
        """Until it is written, or can't be.

        Cancellation: no effect.
        """
        await self._done.wait()

    def __await__(self) -> Generator[Any, Any, None]:
        if not self._done.is_set():
            yield from self._done.wait().__await__()
        if self.error:
            raise refusal(self.error)


def refusal(error: str) -> MisconfError:
    """The error that clients get while the log can't be written."""
    return MisconfError(
        f"the log can't be written ({error}), so nothing can be changed; when the disk is well again: KV.PREFIX.SAVE"
    )
