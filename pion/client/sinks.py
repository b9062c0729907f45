"""Where the bulks of a reply go: into fresh arrays, or into memory that the caller names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import attrs
import numpy as np
import numpy.typing as npt

from pion.client.limits import POOL_ALIGN_BYTES, POOLED_BYTES
from pion.client.records import Done, Receive


@attrs.define
class FreshArrays:
    """Each bulk becomes a new uint8 array. Not zeroed first: every byte is received or the exchange fails."""

    _array: npt.NDArray[np.uint8] | None = None
    _pool: npt.NDArray[np.uint8] | None = None
    _starts: Sequence[int] = ()
    """Where each bulk lies in the pool."""

    @property
    def reusable(self) -> bool:
        """An exchange may be repeated with this sink: nobody has seen what it took."""
        return True

    def reserve(self, sizes: Sequence[int]) -> None:
        """All bulks will have these sizes. Large ones get their memory in one piece, which the system hands out in
        large pages: with a piece for each, half of the time of a fetch goes into page faults.
        """
        self._pool = None
        if sum(sizes) >= POOLED_BYTES and len(sizes) > 1:
            rooms = [-(-size // POOL_ALIGN_BYTES) * POOL_ALIGN_BYTES for size in sizes]
            *self._starts, end = accumulate(rooms, initial=0)
            self._pool = np.empty(end, np.uint8)

    def receive(self, index: int, nbytes: int) -> memoryview:
        """A new array of that size."""
        if self._pool is None:
            self._array = np.empty(nbytes, np.uint8)
        else:
            start = self._starts[index]
            self._array = self._pool[start : start + nbytes]
        return self._array.data

    def done(self, index: int) -> object:
        """The array."""
        return self._array


@attrs.define
class CallerMemory:
    """Bulks go where the caller's functions say."""

    _receive: Receive
    _done: Done | None
    touched: bool = False

    @property
    def reusable(self) -> bool:
        """Once the caller has been called, repeating would call it out of order."""
        return not self.touched

    def reserve(self, sizes: Sequence[int]) -> None:
        """The memory is the caller's business."""

    def receive(self, index: int, nbytes: int) -> memoryview:
        """What the caller says."""
        self.touched = True
        return self._receive(index, nbytes)

    def done(self, index: int) -> object:
        """Tell the caller; the index stands for the bulk in the reply."""
        if self._done is not None:
            self._done(index)
        return index
