"""The value receipt: what the caches of one worker saved their users.

Measured and estimated prefill time are kept apart: a hit is measured when a client reported the prefill's duration,
otherwise it is credited tokens x `ESTIMATE_US_PER_TOKEN` and counted as an estimate.
"""

from __future__ import annotations

from typing import Final

import attrs

ESTIMATE_US_PER_TOKEN: Final = 555.0
"""us per prefix token, from the user's specification: a 1B model on a small accelerator, low for larger models."""


@attrs.define(eq=False)
class Receipt:
    """Counters of one worker; families increment them, PION.STATS and INFO read them."""

    kvprefix_hits: int = 0
    kvprefix_misses: int = 0
    kvprefix_tokens_served: int = 0
    kvprefix_bytes_served: int = 0
    measured_ms: float = 0.0
    estimated_ms: float = 0.0
    kvprefix_hits_measured: int = 0
    kvprefix_hits_estimated: int = 0
    semantic_hits: int = 0
    semantic_misses: int = 0
    moe_hits: int = 0
    moe_misses: int = 0
    vector_queries: int = 0

    def hit(self, tokens: int, measured_ms: float | None) -> None:
        """Credit one prefix hit of `tokens` tokens, measured if a duration in milliseconds is known."""
        self.kvprefix_hits += 1
        self.kvprefix_tokens_served += tokens
        if measured_ms is None:
            self.kvprefix_hits_estimated += 1
            self.estimated_ms += tokens * ESTIMATE_US_PER_TOKEN / 1000
        else:
            self.kvprefix_hits_measured += 1
            self.measured_ms += measured_ms

    def reset(self) -> None:
        """Zero every counter."""
        for field in attrs.fields(Receipt):
            setattr(self, field.name, field.default)

    def rows(self, *, worker: int, uptime_s: float) -> list[tuple[str, int | float]]:
        """The sixteen fields of PION.STATS in order; seconds are rounded to microseconds."""
        measured, estimated = self.measured_ms / 1000, self.estimated_ms / 1000
        return [
            ("kvprefix_hits", self.kvprefix_hits),
            ("kvprefix_misses", self.kvprefix_misses),
            ("kvprefix_tokens_served", self.kvprefix_tokens_served),
            ("kvprefix_bytes_served", self.kvprefix_bytes_served),
            ("prefill_seconds_avoided", round(measured + estimated, 6)),
            ("prefill_seconds_avoided_measured", round(measured, 6)),
            ("prefill_seconds_avoided_estimated", round(estimated, 6)),
            ("kvprefix_hits_measured", self.kvprefix_hits_measured),
            ("kvprefix_hits_estimated", self.kvprefix_hits_estimated),
            ("semantic_hits", self.semantic_hits),
            ("semantic_misses", self.semantic_misses),
            ("moe_hits", self.moe_hits),
            ("moe_misses", self.moe_misses),
            ("vector_queries", self.vector_queries),
            ("worker", worker),
            ("uptime_seconds", int(uptime_s)),
        ]
