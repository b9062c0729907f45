"""What `MemoryDisk` consists of: files and names, each with what is durable and what was done to it since."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from typing import Final

import attrs

SECTOR_BYTES: Final = 512
"""What a medium writes all or not at all."""


@attrs.frozen
class _Step:
    """A change of a file's contents: bytes at `start`, or (None) an end there."""

    number: int
    start: int
    data: bytes | None

    def apply(self, content: bytearray) -> None:
        """Make it; what lies between the old end and `start` is zero."""
        if self.data is None:
            del content[self.start :]
            return
        content.extend(bytes(max(0, self.start - len(content))))
        content[self.start : self.start + len(self.data)] = self.data

    def length(self, before: int) -> int:
        """The file's length after it."""
        return min(before, self.start) if self.data is None else max(before, self.start + len(self.data))

    def touches(self, sector: int) -> bool:
        """Whether it changes anything in the sector that begins at `sector`."""
        end = sector + SECTOR_BYTES
        return self.start < end and (self.data is None or self.start + len(self.data) > sector)

    def apply_to_sector(self, begin: int, sector: bytearray) -> None:
        """Make it in a sector that it touches, which begins at `begin` of the file."""
        first = max(self.start - begin, 0)
        if self.data is None:
            sector[first:] = bytes(SECTOR_BYTES - first)
            return
        last = min(self.start + len(self.data) - begin, SECTOR_BYTES)
        sector[first:last] = self.data[first + begin - self.start : last + begin - self.start]


class Inode:
    """One file, whatever its names are. `content` is what a process reads."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = bytearray(content)
        self._durable = bytes(content)
        self._steps: list[_Step] = []

    def write(self, number: int, start: int, data: bytes) -> None:
        """Put bytes in, as part of the operation of that number."""
        self._do(_Step(number, start, data))

    def truncate(self, number: int, size: int) -> None:
        """Cut the file off."""
        self._do(_Step(number, size, None))

    def _do(self, step: _Step) -> None:
        step.apply(self.content)
        self._steps.append(step)

    def flush(self) -> None:
        """Make the contents durable."""
        self._durable = self._after(self._steps)
        self._steps = []

    def flushed(self) -> bool:
        """Whether the contents are durable."""
        return self._durable == self.content

    def forget(self) -> None:
        """A flush failed: what it was for can still be read, but won't be durable."""
        self._steps = []

    def damage(self, position: int, mask: int) -> None:
        """Change one byte, wherever it is."""
        self.content[position] ^= mask
        durable = bytearray(self._durable)
        if position < len(durable):
            durable[position] ^= mask
        self._durable = bytes(durable)

    def numbers(self) -> Iterator[int]:
        """The operations that are not durable."""
        return (step.number for step in self._steps)

    def copied(self) -> Inode:
        """The same file, to be changed independently."""
        copy = Inode()
        copy.content, copy._durable, copy._steps = bytearray(self.content), self._durable, list(self._steps)
        return copy

    def survived(self, numbers: frozenset[int]) -> Inode:
        """What a power cut leaves if only these operations had reached the medium by themselves."""
        return Inode(self._after([step for step in self._steps if step.number in numbers]))

    def reordered(self, order: Random, bias: float) -> Inode:
        """What a power cut leaves if every sector, and the length, had reached the medium at a moment of its own."""
        lengths = [len(self._durable)]
        for step in self._steps:
            lengths.append(step.length(lengths[-1]))
        length = lengths[_moment(order, bias, len(self._steps))]
        found = bytearray()
        for start in range(0, length, SECTOR_BYTES):
            sector = bytearray(self._durable[start : start + SECTOR_BYTES].ljust(SECTOR_BYTES, b"\0"))
            steps = [step for step in self._steps if step.touches(start)]
            for step in steps[: _moment(order, bias, len(steps))]:
                step.apply_to_sector(start, sector)
            found += sector
        return Inode(bytes(found[:length]))

    def _after(self, steps: list[_Step]) -> bytes:
        content = bytearray(self._durable)
        for step in steps:
            step.apply(content)
        return bytes(content)


def _moment(order: Random, bias: float, steps: int) -> int:
    """How many of a number of steps had been made."""
    return steps if order.random() < bias else order.randint(0, steps)


@attrs.frozen
class NameChange:
    """An operation on names, which happens all or not at all: the files that have these names now."""

    number: int
    directory: str
    files: dict[str, Inode | None]

    def apply(self, names: dict[str, Inode]) -> None:
        """Make it."""
        for name, inode in self.files.items():
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode


class Names:
    """The names of all files. `now` is what a process sees."""

    def __init__(self) -> None:
        self.now: dict[str, Inode] = {}
        self._durable: dict[str, Inode] = {}
        self._changes: list[NameChange] = []
        self._numbers = count(1)

    def count(self) -> int:
        """A number for the next change of anything: in the order of the operations, across restarts."""
        return next(self._numbers)

    def change(self, change: NameChange) -> None:
        """Make an operation."""
        change.apply(self.now)
        self._changes.append(change)

    def flush(self, directory: str) -> None:
        """Make the names in a directory durable."""
        for change in self._changes:
            if change.directory == directory:
                change.apply(self._durable)
        self._changes = [change for change in self._changes if change.directory != directory]

    def flushed(self, name: str) -> bool:
        """Whether name and contents are durable as they are now."""
        inode = self.now.get(name)
        changing = any(name in change.files for change in self._changes)
        return inode is not None and not changing and self._durable.get(name) is inode and inode.flushed()

    def unflushed(self) -> list[int]:
        """The numbers of what a power cut could undo, in order."""
        numbers = {change.number for change in self._changes}
        for inode in self._inodes():
            numbers.update(inode.numbers())
        return sorted(numbers)

    def copied(self) -> Names:
        """The same names of copied files."""
        return self._mapped(Inode.copied)

    def survived(self, numbers: frozenset[int], survive: Callable[[Inode], Inode]) -> Names:
        """The durable names, these operations on names made, too, of what is left of their files."""
        after = Names()
        names = dict(self._durable)
        for change in self._changes:
            if change.number in numbers:
                change.apply(names)
        left = {id(inode): survive(inode) for inode in self._inodes()}
        after.now = {name: left[id(inode)] for name, inode in names.items()}
        after._durable = dict(after.now)
        return after

    def _mapped(self, function: Callable[[Inode], Inode]) -> Names:
        copies = {id(inode): function(inode) for inode in self._inodes()}
        after = Names()
        after.now = {name: copies[id(inode)] for name, inode in self.now.items()}
        after._durable = {name: copies[id(inode)] for name, inode in self._durable.items()}
        after._changes = [
            NameChange(
                change.number,
                change.directory,
                {name: None if inode is None else copies[id(inode)] for name, inode in change.files.items()},
            )
            for change in self._changes
        ]
        after._numbers = count(max(self.unflushed(), default=0) + 1)
        return after

    def _inodes(self) -> list[Inode]:
        """Every file that has a name, had one that is still durable, or may have one after a power cut; in order."""
        found: dict[int, Inode] = {}
        for inode in (*self._durable.values(), *self.now.values()):
            found[id(inode)] = inode
        for change in self._changes:
            for each in change.files.values():
                if each is not None:
                    found[id(each)] = each
        return list(found.values())
