"""Rows that lie in an object of the tier: the object, and the two kinds of memory that stand for its rows.

A `TierFile` is known from the log; it is opened when somebody needs its rows. Its rows are `TierMemory` while they are
only in the tier, and `PromotedMemory` while a copy is in memory, too: then they can leave memory again at no cost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pion.storage.ledger import PLACED_COST, Ledger, Memory
from pion.storage.region import MappedMemory
from pion.storage.tiers.base import OpenedObject, TierUnavailableError
from pion.storage.tiers.runs import PlacedRun

if TYPE_CHECKING:
    from pion.storage.unit import Unit


class TierFile:
    """One object: a mapping that can be read while it is open. `refs` counts the run memories in tables."""

    __slots__ = ("files", "key", "nbytes", "opened", "pins", "refs", "runs", "unit", "uses")

    def __init__(self, files: TierFiles, key: str, nbytes: int, runs: Sequence[PlacedRun], unit: Unit) -> None:
        self.files = files
        self.key = key
        self.nbytes = nbytes
        self.runs = tuple(runs)
        self.unit = unit
        self.opened: OpenedObject | None = None
        self.refs = 0
        self.pins = 0
        """Those who rely on it staying open."""
        self.uses = 0
        """Replies that it gave rows for, since it was placed or last promoted."""

    @property
    def view(self) -> memoryview:
        """See `Mapping`."""
        if self.opened is None:
            raise RuntimeError(f"tier object {self.key} is not open")
        return self.opened.mapping.view

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See `Mapping`."""
        opened = self.opened
        if opened is None:
            raise OSError(f"tier object {self.key} is not open")
        opened.mapping.read_into(start, buffer)

    def hold(self) -> None:
        """One more memory refers to it."""
        self.refs += 1

    def release(self) -> None:
        """One less; without any, nothing can need it again."""
        self.refs -= 1
        if not self.refs:
            self.files.forget(self)


class TierMemory(MappedMemory):
    """A run's rows, in the tier only. The object must be open before anyone looks; what was looked at stays readable
    as long as this exists, also when the object is closed or removed meanwhile.
    """

    __slots__ = ("_array", "file", "run")

    def __init__(self, file: TierFile, run: PlacedRun, ledger: Ledger) -> None:
        self.file = file
        self.run = run
        self.region = run.region(file)
        self._verified = -1
        self.nbytes = self.live = run.nbytes
        self.detached = self.queued = False
        self._ledger = ledger
        self._array: NDArray[np.uint8] | None = None
        file.hold()
        file.files.row_bytes += run.nbytes
        self._hold()

    @property
    def buffer(self) -> NDArray[np.uint8]:  # type: ignore[override]
        """The rows, through the object's mapping."""
        if not self.keep():
            raise RuntimeError(f"tier object {self.file.key} is not open")
        assert self._array is not None  # noqa: S101  kept
        return self._array

    def anew(self) -> TierMemory:
        """What stands for the same rows without holding the object open."""
        return TierMemory(self.file, self.run, self._ledger)

    def keep(self) -> bool:
        """See `MappedMemory`: from here on it doesn't matter whether the object stays open."""
        if self._array is None:
            opened = self.file.opened
            if opened is None:  # dropped a moment ago
                return False
            self.region = self.run.region(opened.mapping)
            self._array = np.frombuffer(opened.mapping.view, np.uint8, self.nbytes, self.region.start)
        return True

    def verify(self) -> bool:
        """See `MappedMemory`."""
        return self.keep() and super().verify()

    def change_live(self, by: int) -> None:
        """See `Memory`."""
        super().change_live(by)
        self.file.files.row_bytes += by

    def drop(self, nbytes: int) -> None:
        """See `Memory`."""
        self.change_live(-nbytes)
        if not self.live:
            self.file.release()


class PromotedMemory(Memory):
    """A copy in memory of a run's rows, which stay in the tier."""

    __slots__ = ("file", "run")

    def __init__(self, buffer: NDArray[np.uint8], file: TierFile, run: PlacedRun, ledger: Ledger) -> None:
        self.file = file
        self.run = run
        file.hold()
        file.files.promoted += 1
        file.files.row_bytes += run.nbytes
        super().__init__(buffer, ledger)

    def change_live(self, by: int) -> None:
        """See `Memory`."""
        super().change_live(by)
        self.file.files.row_bytes += by

    def withdrawn(self) -> TierMemory:
        """What stands for the rows once this copy goes."""
        return TierMemory(self.file, self.run, self._ledger)

    def drop(self, nbytes: int) -> None:
        """See `Memory`."""
        super().drop(nbytes)
        self.file.files.row_bytes -= nbytes
        if not self.live:
            self.file.files.promoted -= 1
            self.file.release()


async def _no_tier(file: TierFile) -> None:
    """What a server without a tier says of rows that an earlier start has placed in one."""
    raise TierUnavailableError("there is none: start the server with the --tier-dir that it had")


class TierFiles:
    """The objects that the store knows, by key, and those that it needs no more."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.known: dict[str, TierFile] = {}
        self.writing: dict[str, Unit] = {}
        """Units that are being written, by the key of their object."""
        self.garbage: dict[str, None] = {}
        """Keys of objects that nothing refers to, oldest first. Until the log has on stable storage why, a start may
        need them.
        """
        self.nbytes = 0
        """Of the known objects."""
        self.row_bytes = 0
        """Of rows in tables that lie in an object."""
        self.promoted = 0
        """Copies of rows in memory that the tier has, too."""
        self.on_withdraw: Callable[[], None] = lambda: None
        """Called when copies of rows have left memory that the tier has, too."""
        self.on_forget: Callable[[TierFile], None] = lambda file: None
        """Called when nothing refers to an object any more."""
        self.opener: Callable[[TierFile], Awaitable[None]] = _no_tier
        """Opens an object; raises TierError. Cancellation: no effect."""
        self.on_use: Callable[[TierFile], None] = lambda file: None
        """Called when rows that are only in the tier are asked for."""

    def add(self, key: str, nbytes: int, runs: Sequence[PlacedRun], unit: Unit) -> TierFile:
        """A new object that holds rows of `unit`."""
        file = self.known[key] = TierFile(self, key, nbytes, runs, unit)
        self.nbytes += nbytes
        self._ledger.charge(PLACED_COST * len(runs))
        return file

    def memories(self, file: TierFile) -> list[TierMemory]:
        """A memory for each run."""
        return [TierMemory(file, run, self._ledger) for run in file.runs]

    def used(self, file: TierFile) -> None:
        """A reply takes rows from it."""
        file.uses += 1
        self.on_use(file)

    @contextmanager
    def pinned(self, files: Iterable[TierFile]) -> Iterator[None]:
        """Keep objects open that are open, or get opened, meanwhile."""
        for file in files:
            file.pins += 1
        try:
            yield
        finally:
            for file in files:
                file.pins -= 1

    def forget(self, file: TierFile) -> None:
        """Nothing refers to it."""
        if self.known.pop(file.key, None) is not None:
            self.nbytes -= file.nbytes
            self._ledger.charge(-PLACED_COST * len(file.runs))
            self.garbage[file.key] = None
            self.on_forget(file)


def placed_file(memory: Any) -> TierFile | None:
    """The object that a block's memory has its rows in, if there is one."""
    return memory.file if isinstance(memory, TierMemory | PromotedMemory) else None
