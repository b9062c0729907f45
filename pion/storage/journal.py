"""Where the store's changes go after they were applied: the place behind which the log is."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from pion.storage.changes import Change


class Journal(Protocol):
    """Takes every change in the order in which it was applied."""

    def check(self) -> None:
        """Raises MisconfError while changes that a client asks for are refused."""

    def append(self, change: Change, *, created: int) -> Awaitable[None] | None:
        """Queue one change; can't block and can't fail. `created` says how many sessions it made.

        What it returns is awaited by the handler before it replies; cancelling that wait does not undo the change. It
        may also be thrown away (an eviction waits with the change that needed it, an expiry is awaited by nobody), so
        it can't be a coroutine.
        """

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""


class NullJournal:
    """Keeps nothing: the store lives in memory only."""

    size_bytes = 0

    def check(self) -> None:
        """Nothing can fail."""

    def append(self, change: Change, *, created: int) -> None:
        """Forget the change."""
