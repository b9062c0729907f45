"""How many bytes a directory of objects holds, without remembering the size of each.

Threads that change files tell `Usage` right after. Whether a listing that goes on meanwhile saw a file before or after
such a change can't be known from the listing; so a `Count` remembers what it counted, until it is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from pion.storage.tiers.disk import FileInfo


class Count:
    """A listing under way."""

    def __init__(self) -> None:
        self.total = 0
        self.counted: dict[str, int] = {}
        self.changed: set[str] = set()
        """Changed since it began: what the listing shows of them is not counted any more."""

    def set(self, name: str, nbytes: int) -> None:
        """A file changed; 0: it is gone."""
        self.total += nbytes - self.counted.pop(name, 0)
        if nbytes:
            self.counted[name] = nbytes
        self.changed.add(name)


class Usage:
    """The sum, kept up to date from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stored = 0
        self._writing = 0
        self._since_start: Count | None = Count()
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
            return (self._stored if self._since_start is None else self._since_start.total) + self._writing

    def write(self, nbytes: int) -> None:
        """A file of so many bytes is about to be written; a negative number: it is finished or given up."""
        with self._lock:
            self._writing += nbytes

    def stored(self, name: str, nbytes: int, replaced: int = 0) -> None:
        """A file is there, in the place of one of `replaced` bytes."""
        self._change(name, nbytes, nbytes - replaced)

    def removed(self, name: str, nbytes: int) -> None:
        """A file of so many bytes is gone."""
        self._change(name, 0, -nbytes)

    def _change(self, name: str, nbytes: int, grown: int) -> None:
        with self._lock:
            self._stored += grown
            for count in self._counts:
                count.set(name, nbytes)

    def begin(self) -> Count:
        """A listing begins."""
        count = Count()
        with self._lock:
            self._counts.append(count)
        return count

    def add(self, count: Count, files: Iterable[FileInfo]) -> None:
        """A part of the listing."""
        with self._lock:
            for file in files:
                if file.name not in count.changed:
                    count.counted[file.name] = file.nbytes
                    count.total += file.nbytes

    def end(self, count: Count, *, complete: bool) -> None:
        """The listing is over."""
        with self._lock:
            self._counts.remove(count)
            if complete:
                self._stored = count.total
                if self._since_start is not None:
                    self._counts.remove(self._since_start)
                    self._since_start = None
