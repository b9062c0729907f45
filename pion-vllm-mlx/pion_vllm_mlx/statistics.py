"""Counters of one prompt cache."""

from __future__ import annotations

import threading
from typing import Any

import attrs


@attrs.define
class Counters:
    """What has happened so far; `add` may be called from any thread."""

    hits: int = 0
    partial_hits: int = 0
    misses: int = 0
    fetch_ms_total: float = 0.0
    store_ms_total: float = 0.0
    prefill_ms_total: float = 0.0
    tokens_restored: int = 0
    tokens_prefilled: int = 0
    bytes_fetched: int = 0
    bytes_stored: int = 0
    stored: int = 0
    not_stored: int = 0
    waited: int = 0
    mismatches: int = 0
    _lock: threading.Lock = attrs.field(factory=threading.Lock, repr=False)

    def add(self, **amounts: float) -> None:
        """Add to several counters at once."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def as_dict(self) -> dict[str, Any]:
        """A consistent copy, with the hit rate: full and partial hits over all requests."""
        with self._lock:
            values = attrs.asdict(self, filter=lambda field, _value: not field.name.startswith("_"))
        found = values["hits"] + values["partial_hits"]
        asked = found + values["misses"]
        values["hit_rate"] = found / asked if asked else 0.0
        return values
