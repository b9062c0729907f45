"""Memory for requests that are being received, counted over all connections of a worker."""

from __future__ import annotations

import attrs


@attrs.define(eq=False)
class Pieces:
    """Converted pieces of replies that are being sent, over all connections of a worker."""

    nbytes: int = 0


@attrs.define(eq=False)
class ReceiveBudget:
    """`used` bytes are reserved of a limit that is given at each reservation, since CONFIG SET can change it."""

    used: int = attrs.field(default=0, init=False)
    refused: int = attrs.field(default=0, init=False)

    def reserve(self, nbytes: int, limit: int) -> bool:
        """Reserve `nbytes` if they fit."""
        if self.used + nbytes > limit:
            self.refused += 1
            return False
        self.used += nbytes
        return True

    def release(self, nbytes: int) -> None:
        """Give back what was reserved."""
        self.used -= nbytes
