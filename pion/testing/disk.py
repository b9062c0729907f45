"""A data directory in memory that fails, tears and forgets on demand: the double of `pion.storage.disk.RealDisk`.

What it promises is what `pion.storage.disk` says that callers may rely on, and nothing more: the contents of a file are
durable up to its last `sync`, and a name is once `sync_directory` returned. What was done since is there for the
process, and for the next one on the same running machine; a power cut keeps only a part of it, which `crash` chooses.

Every operation that changes something is counted and numbered from 1. A plan looks at each before it takes effect and
may let it fail, let only a first part of a write happen, or let the process die there:

    disk = MemoryDisk()
    disk.plan = fault_at(7, Fault(error=errno.EIO))
    ...
    after = disk.crash(power=True, order=random.Random(1))
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from posixpath import dirname
from random import Random
from typing import TypeAlias

import attrs

from pion.replies import Buffer
from pion.storage.disk import DiskFile, Mapping
from pion.testing.inodes import Inode, NameChange, Names


class ProcessDied(BaseException):
    """The process is no more: the plan ended it at this operation, or it had ended before.

    Not an Exception, as no handler of the code under test goes on after its own death.
    """


@attrs.frozen
class Operation:
    """Something that changes a disk."""

    number: int
    """From 1, in the order of the calls."""
    kind: str
    """`create`, `write`, `overwrite`, `sync`, `rename`, `link`, `unlink`, `truncate` or `sync_directory`."""
    name: str
    """The file, under the name it was created with; of `rename` and `link` the new name."""
    nbytes: int = 0
    """Bytes to write."""


@attrs.frozen(kw_only=True)
class Fault:
    """What happens to an operation instead of success."""

    error: int | None = None
    """The `errno` of the OSError that it raises; None: the process dies there, with `ProcessDied`."""
    done: bool = False
    """All of it takes effect first."""
    done_bytes: int = 0
    """So many first bytes of a write take effect first."""


FaultPlan: TypeAlias = Callable[[Operation], Fault | None]
"""Called with each operation before it takes effect; None lets it succeed."""


def fault_at(number: int, fault: Fault, *, onwards: bool = False) -> FaultPlan:
    """A plan with one fault, at the operation of that number; `onwards`: also at all behind it."""

    def plan(operation: Operation) -> Fault | None:
        hit = operation.number == number or (onwards and operation.number > number)
        return fault if hit else None

    return plan


class MemoryDisk:
    """A `pion.storage.disk.Disk` in memory. May be used from several threads.

    `directories` are the folders that exist in it, beside the directory itself.
    """

    def __init__(self, *, where: str = "memory", directories: Iterable[str] = ()) -> None:
        self.where = where
        self.plan: FaultPlan | None = None
        """What goes wrong; None: nothing."""
        self.operations: list[Operation] = []
        """All that were tried, in order."""
        self.died = False
        """The process was ended by the plan: nothing can be done any more but `crash`."""
        self._directories = frozenset(("", *directories))
        self._names = Names()
        self._boot = 1
        self._lock = threading.RLock()

    # What `Disk` asks for.

    def names(self) -> list[str]:
        """See `Disk`."""
        with self._lock:
            return sorted(name for name in self._names.now if not dirname(name))

    def exists(self, name: str) -> bool:
        """See `Disk`."""
        with self._lock:
            return name in self._names.now or (bool(name) and name in self._directories)

    def create(self, name: str) -> DiskFile:
        """See `Disk`."""
        inode = Inode()

        def effect() -> None:
            self._check_free(name)
            self._rename(name, {name: inode})

        self._operate("create", name, effect)
        return _MemoryFile(self, name, inode)

    def map(self, name: str) -> Mapping:
        """See `Disk`."""
        with self._lock:
            return _MemoryMapping(self._find(name))

    def rename(self, old: str, new: str) -> None:
        """See `Disk`."""

        def effect() -> None:
            self._check_directory(new)
            inode = self._find(old)
            if self._names.now.get(new) is not inode:  # two names of one file both stay, as POSIX has it
                self._rename(new, {old: None, new: inode})

        self._operate("rename", new, effect)

    def link(self, old: str, new: str) -> None:
        """See `Disk`."""

        def effect() -> None:
            self._check_free(new)
            self._rename(new, {new: self._find(old)})

        self._operate("link", new, effect)

    def unlink(self, name: str) -> None:
        """See `Disk`."""

        def effect() -> None:
            self._find(name)
            self._rename(name, {name: None})

        self._operate("unlink", name, effect)

    def truncate(self, name: str, size: int) -> None:
        """See `Disk`. It is two operations: a `truncate` and a `sync`."""
        self._operate("truncate", name, lambda: self._find(name).truncate(self._count(), size))
        self._sync(name, self._find(name))

    def sync(self, name: str) -> None:
        """See `Disk`."""
        self._sync(name, self._find(name))

    def sync_directory(self, name: str) -> None:
        """See `Disk`."""
        self._check_directory(name)
        self._operate("sync_directory", name, lambda: self._names.flush(dirname(name)))

    def boot_id(self) -> str:
        """See `Disk`."""
        return f"boot-{self._boot}"

    # What a test asks for.

    @property
    def unflushed(self) -> int:
        """How many operations a power cut could undo now."""
        return len(self._unflushed())

    def flushed(self, name: str) -> bool:
        """Whether a power cut now would leave that name, with these contents."""
        with self._lock:
            return self._names.flushed(name)

    def contents(self, name: str) -> bytes:
        """What the process reads in a file. Raises FileNotFoundError."""
        with self._lock:
            return bytes(self._find(name).content)

    def damage(self, name: str, position: int, mask: int = 1) -> None:
        """Change a byte of a file behind everybody's back, on the medium and in memory: it is XORed with `mask`."""
        with self._lock:
            self._find(name).damage(position, mask)

    def crash(self, *, power: bool = False, kept: int = 0, order: Random | None = None) -> MemoryDisk:
        """The disk as the next process finds it; this one stays as it is.

        Without `power` the process died: everything it did is there. With `power` the machine lost its power, and has
        another boot id afterwards: what was flushed is there. Of the rest there are the first `kept` operations; or,
        with `order`, whatever a system that writes in its own order may have written: any part of the names (each
        operation all or not at all), of each file any sectors as they were at some moment since, and any length that
        the file has had since. What was not written is zero.
        """
        with self._lock:
            after = MemoryDisk(where=self.where, directories=self._directories)
            after._boot = self._boot + power
            if not power:
                after._names = self._names.copied()
            elif order is None:
                numbers = frozenset(self._unflushed()[:kept])
                after._names = self._names.survived(numbers, lambda inode: inode.survived(numbers))
            else:
                bias = order.choice((0.1, 0.5, 0.9))
                numbers = frozenset(number for number in self._unflushed() if order.random() < bias)
                after._names = self._names.survived(numbers, lambda inode: inode.reordered(order, bias))
            return after

    # The inside.

    def _write(self, name: str, inode: Inode, start: int, data: bytes, kind: str) -> None:
        def put(size: int) -> None:
            inode.write(self._count(), start, data[:size])

        self._operate(kind, name, lambda: put(len(data)), nbytes=len(data), part=put)

    def _sync(self, name: str, inode: Inode) -> None:
        try:
            self._operate("sync", name, inode.flush)
        except OSError:
            # Linux reports the error once and takes the pages for clean: a later flush passes over them.
            with self._lock:
                inode.forget()
            raise

    def _operate(
        self,
        kind: str,
        name: str,
        effect: Callable[[], None],
        *,
        nbytes: int = 0,
        part: Callable[[int], None] = lambda size: None,
    ) -> None:
        with self._lock:
            self._check_alive()
            operation = Operation(len(self.operations) + 1, kind, name, nbytes)
            self.operations.append(operation)
        # Without the lock: a plan may look at the disk, and may let a thread wait while others go on.
        fault = self.plan(operation) if self.plan is not None else None
        with self._lock:
            self._check_alive()
            if fault is None or fault.done:
                effect()
            elif fault.done_bytes:
                part(fault.done_bytes)
            if fault is None:
                return
            if fault.error is None:
                self.died = True
                raise ProcessDied(operation)
            raise OSError(fault.error, os.strerror(fault.error), name)

    def _check_alive(self) -> None:
        if self.died:
            raise ProcessDied

    def _count(self) -> int:
        """The number of the operation that is taking effect, across restarts of the process."""
        return self._names.count()

    def _rename(self, name: str, changes: dict[str, Inode | None]) -> None:
        self._names.change(NameChange(self._count(), dirname(name), changes))

    def _unflushed(self) -> list[int]:
        return self._names.unflushed()

    def _find(self, name: str) -> Inode:
        inode = self._names.now.get(name)
        if inode is None:
            raise FileNotFoundError(2, os.strerror(2), name)
        return inode

    def _check_directory(self, name: str) -> None:
        if dirname(name) not in self._directories:
            raise FileNotFoundError(2, os.strerror(2), name)

    def _check_free(self, name: str) -> None:
        self._check_directory(name)
        if name in self._names.now:
            raise FileExistsError(17, os.strerror(17), name)


class _MemoryFile:
    def __init__(self, disk: MemoryDisk, name: str, inode: Inode) -> None:
        self._disk = disk
        self._name = name
        self._inode = inode
        self._closed = False

    def write(self, buffers: Sequence[Buffer]) -> None:
        """See `DiskFile`."""
        data = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
        if not data:
            return
        self._check_open()
        self._disk._write(self._name, self._inode, len(self._inode.content), data, "write")

    def overwrite(self, start: int, data: Buffer) -> None:
        """See `DiskFile`."""
        self._check_open()
        self._disk._write(self._name, self._inode, start, bytes(data), "overwrite")

    def sync(self) -> None:
        """See `DiskFile`."""
        self._check_open()
        self._disk._sync(self._name, self._inode)

    def start_writeback(self, start: int, stop: int) -> None:
        """See `DiskFile`. It promises nothing, so nothing happens."""

    def wait_writeback(self, start: int, stop: int) -> None:
        """See `DiskFile`. It promises nothing, so nothing happens."""

    def close(self) -> None:
        """See `DiskFile`."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(9, os.strerror(9), self._name)


class _MemoryMapping:
    def __init__(self, inode: Inode) -> None:
        self._inode = inode
        self.view = memoryview(bytes(inode.content))

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See `Mapping`."""
        piece = self._inode.content[start : start + len(buffer)]
        if len(piece) != len(buffer):
            raise OSError(f"the file ends at byte {len(self._inode.content)}")
        buffer[:] = piece
