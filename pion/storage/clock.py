"""What the store needs of a clock."""

from __future__ import annotations

from typing import Protocol


class StoreClock(Protocol):
    """`pion.context.Clock`, as seen from below it."""

    def wall_s(self) -> float:
        """Seconds since the epoch."""

    def monotonic_s(self) -> float:
        """Seconds that never jump."""
