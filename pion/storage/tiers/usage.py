"""How many bytes a directory of objects holds, without remembering the size of each.

Threads change files and listings go on beside them, and whether a listing saw a file before or after its change can't
be known from it. So a change is announced: from then on the file counts for nothing, and what a listing shows of it is
ignored. Once it is made, its size is added, also to every listing that was under way.

Changes of one file must not overlap; should they ever, the sum is wrong until the next listing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import attrs

from pion.storage.tiers.disk import FileInfo


@attrs.define(eq=False)
class Count:
    """A listing under way; remembers what it has counted."""

    ignored: set[str]
    total: int = 0
    counted: dict[str, int] = attrs.field(factory=dict)

    def add(self, name: str, nbytes: int) -> None:
        """A file is there."""
        self.counted[name] = nbytes
        self.total += nbytes

    def ignore(self, name: str) -> None:
        """A file changes."""
        self.total -= self.counted.pop(name, 0)
        self.ignored.add(name)


@attrs.define
class Change:
    """A change of a file under way: set `nbytes` to its size once it is made."""

    nbytes: int


class Usage:
    """The sum, kept up to date from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stored = 0
        self._writing = 0
        self._changing: set[str] = set()
        self._since_start: Count | None = Count(set())
        """What this process did, while nothing else is known."""
        self._counts: list[Count] = [self._since_start]

    @property
    def known(self) -> bool:
        """Whether a listing has been complete: until then only what this process put is counted."""
        return self._since_start is None

    @property
    def nbytes(self) -> int:
        """What is there, and what is being written."""
        with self._lock:
            return (max(0, self._stored) if self._since_start is None else self._since_start.total) + self._writing

    def write(self, nbytes: int) -> None:
        """A file of so many bytes is about to be written; a negative number: it is finished or given up."""
        with self._lock:
            self._writing += nbytes

    @contextmanager
    def changing(self, name: str, nbytes: int) -> Iterator[Change]:
        """A file of `nbytes`, or 0 if there is none, gets another size in the block, which says which."""
        change = Change(nbytes)
        with self._lock:
            self._stored -= nbytes
            self._changing.add(name)
            for count in self._counts:
                count.ignore(name)
        try:
            yield change
        finally:
            with self._lock:
                self._stored += change.nbytes
                self._changing.discard(name)
                for count in self._counts:
                    # Before the first listing only what this process put is known: not what it failed to change.
                    if count is not self._since_start or change.nbytes != nbytes:
                        count.add(name, change.nbytes)

    def begin(self) -> Count:
        """A listing begins."""
        with self._lock:
            count = Count(set(self._changing))
            self._counts.append(count)
        return count

    def add(self, count: Count, files: Iterable[FileInfo]) -> None:
        """A part of the listing."""
        with self._lock:
            for file in files:
                if file.name not in count.ignored:
                    count.add(file.name, file.nbytes)

    def end(self, count: Count, *, complete: bool) -> None:
        """The listing is over."""
        with self._lock:
            self._counts.remove(count)
            if complete:
                self._stored = count.total
                if self._since_start is not None:
                    self._counts.remove(self._since_start)
                    self._since_start = None
