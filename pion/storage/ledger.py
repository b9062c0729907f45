"""What the store's memory costs: bytes charged for payload buffers and for every object beside them.

A payload buffer is charged when it is taken over and released when its last reference goes, so a block that only an
unfinished reply still holds stays charged. The fixed costs are measured (tests/storage/test_ledger.py repeats the
measurement), so that resident memory follows `charged_bytes`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, ClassVar, Final, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from pion.replies import Buffer

Raw: TypeAlias = bytes | memoryview | NDArray[np.uint8]
"""A payload as it is kept: whatever owns the memory, without a view object around it."""

UNIT_COST: Final = 520
"""Bytes for one prefix or session beside its name: the object, its dictionary entry, its place in the name order."""

SIDE_COST: Final = 280
"""Bytes for one session that holds rows: the table and its dictionary of layers."""

LAYER_COST: Final = 208
"""Bytes for one layer with rows: its dictionary entry and its two lists."""

BLOCK_COST: Final = 288
"""Bytes for one block beside its payload: block, owner of the buffer, the buffer's own header, two list entries."""

TABLE_COST: Final = 136
"""Bytes for one block-hash table beside its hashes."""

CHAIN_COST: Final = 96
"""Bytes for a link to a parent: the entry among the parent's children."""

PLACED_COST: Final = 312
"""Bytes for one run of rows that lies in the tier, beside its block: its place, its memory and its region."""

PENDING_COST: Final = 416
"""Bytes for a registration that is not complete."""


@attrs.frozen
class LedgerStatistics:
    """Bytes: `payload` of rows that can be fetched, `charged` in memory in all, `sending` held by unfinished replies
    only, `mapped` of rows that lie in files.
    """

    payload_bytes: int
    charged_bytes: int
    sending_bytes: int
    mapped_bytes: int


class Ledger:
    """Counts bytes for one worker.

    Everything is counted on the thread that made the ledger, except that the last reference to a buffer may go in a
    conversion thread; such a release is queued (a deque's append is atomic) and counted at the next reading.
    """

    __slots__ = (
        "_charged",
        "_elsewhere",
        "_later",
        "_mapped",
        "_sending",
        "_thread",
        "_unmapped",
        "freed_bytes",
        "payload_bytes",
    )

    def __init__(self) -> None:
        self._thread = get_ident()
        self._elsewhere: deque[tuple[int, bool]] = deque()
        self._later: deque[Callable[[], bool]] = deque()
        self._charged = 0
        self._sending = 0
        self._mapped = 0
        self._unmapped: deque[int] = deque()
        self.payload_bytes = 0
        self.freed_bytes = 0
        """Payload released since the reaper last gave memory back to the system."""

    def charge(self, nbytes: int) -> None:
        """Count a fixed cost, or (negative) its end."""
        self._charged += nbytes

    def hold(self, nbytes: int) -> None:
        """Count a payload buffer that the store took over."""
        self._charged += nbytes

    def put_off(self, work: Callable[[], bool], memory: Memory) -> None:
        """Have the reaper do work on a buffer, a piece at each call, which says whether there is more."""
        if not memory.queued:
            memory.queued = True
            self._later.append(work)

    @property
    def has_work(self) -> bool:
        """Whether something was put off."""
        return bool(self._later)

    def work_off(self) -> bool:
        """Do one piece of what was put off; True if there is more."""
        if self._later and not self._later[0]():
            self._later.popleft()
        return bool(self._later)

    def detach(self, nbytes: int) -> None:
        """Count a buffer that left the store: from now on only unfinished replies can hold it."""
        self._sending += nbytes

    def release(self, nbytes: int, *, detached: bool) -> None:
        """Count a buffer whose last reference is gone. May be called from any thread."""
        if get_ident() == self._thread:
            self._release(nbytes, detached)
        else:
            self._elsewhere.append((nbytes, detached))

    def map(self, nbytes: int) -> None:
        """Count a payload that lies in a mapped file: not charged, as the system can take its pages back."""
        self._mapped += nbytes

    def unmap(self, nbytes: int) -> None:
        """Count one less. May be called from any thread."""
        self._unmapped.append(nbytes)

    def _release(self, nbytes: int, detached: bool) -> None:
        self._charged -= nbytes
        self.freed_bytes += nbytes
        if detached:
            self._sending -= nbytes

    def _settle(self) -> None:
        while self._elsewhere:
            self._release(*self._elsewhere.popleft())

    @property
    def charged_bytes(self) -> int:
        """Payload buffers held, by the store or by a reply, and all fixed costs."""
        self._settle()
        return self._charged

    @property
    def sending_bytes(self) -> int:
        """Payload buffers that only unfinished replies still hold."""
        self._settle()
        return self._sending

    @property
    def mapped_bytes(self) -> int:
        """Payload that lies in mapped files, held by the store or by a reply."""
        while self._unmapped:
            self._mapped -= self._unmapped.popleft()
        return self._mapped

    def statistics(self) -> LedgerStatistics:
        """The counters now."""
        return LedgerStatistics(self.payload_bytes, self.charged_bytes, self.sending_bytes, self.mapped_bytes)


class Memory:
    """One payload buffer: charged while it exists. `live` counts the bytes that blocks in a table still refer to."""

    __slots__ = ("__weakref__", "_ledger", "buffer", "detached", "live", "nbytes", "queued")

    mapped: ClassVar[bool] = False
    """Lies in a file: it is neither merged nor copied to save memory."""

    def __init__(self, buffer: Raw, ledger: Ledger) -> None:
        self.buffer = buffer
        self.nbytes = self.live = len(buffer)
        self.detached = False
        self.queued = False
        self._ledger = ledger
        self._hold()

    def _hold(self) -> None:
        self._ledger.hold(self.nbytes)

    def change_live(self, by: int) -> None:
        """More or less of it is in a table, since it takes the place of other memory."""
        self.live += by

    def drop(self, nbytes: int) -> None:
        """`nbytes` of it are no longer in a table."""
        self.live -= nbytes
        if self.live == 0 and not self.detached:
            self.detached = True
            self._ledger.detach(self.nbytes)

    def __del__(self) -> None:
        self._ledger.release(self.nbytes, detached=self.detached)


def owned(buffer: Buffer) -> Raw:
    """The buffer as the store keeps it: not larger than it looks, and not changeable by anyone else.

    A request's payload was received into memory of its own and is kept as it is. A view of something larger is copied,
    because keeping it would keep all of that alive, uncounted.
    """
    if isinstance(buffer, bytes):
        return buffer
    exporter: Any = buffer.obj
    if isinstance(exporter, bytes) and len(exporter) == buffer.nbytes:
        return exporter
    root = exporter
    while isinstance(root, np.ndarray) and root.base is not None:
        root = root.base
    if isinstance(root, np.ndarray) and root.nbytes == buffer.nbytes:
        plain = exporter.base is None and root.dtype == np.uint8 and root.ndim == 1
        return root if plain else buffer
    copy = np.empty(buffer.nbytes, np.uint8)
    copy[:] = np.frombuffer(buffer, np.uint8)
    return copy
