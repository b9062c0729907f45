"""Where the bulks of a reply go: into fresh arrays, or into memory that the caller names."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from pion.client.records import Done, Receive


@attrs.define
class FreshArrays:
    """Each bulk becomes a new uint8 array. Not zeroed first: every byte is received or the exchange fails."""

    _array: npt.NDArray[np.uint8] | None = None

    @property
    def reusable(self) -> bool:
        """An exchange may be repeated with this sink: nobody has seen what it took."""
        return True

    def receive(self, index: int, nbytes: int) -> memoryview:
        """A new array of that size."""
        self._array = np.empty(nbytes, np.uint8)
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

    def receive(self, index: int, nbytes: int) -> memoryview:
        """What the caller says."""
        self.touched = True
        return self._receive(index, nbytes)

    def done(self, index: int) -> object:
        """Tell the caller; the index stands for the bulk in the reply."""
        if self._done is not None:
            self._done(index)
        return index
