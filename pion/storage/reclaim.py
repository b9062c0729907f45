"""Giving memory back to the system, and keeping the garbage collector's pauses short."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Final

from pion.config import MIB

TRIM_AFTER_BYTES: Final = 64 * MIB
"""Payload freed before the allocator is asked to give pages back: it walks its free lists, a few ms a GiB."""

FREEZE_AFTER_UNITS: Final = 20_000
"""New units after which they leave the collector's sight; a full collection visits about 5 million objects a second."""


def find_trim() -> Callable[[], int] | None:
    """The C library's `malloc_trim` with no pad, or None where there is none."""
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if function is None:
        return None
    function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: int(function(0))


def trim_memory(trim: Callable[[], int] | None) -> bool:
    """Give free heap pages back; True if the system says that some went. Releases the interpreter lock meanwhile."""
    return trim is not None and trim() == 1


def freeze_garbage() -> None:
    """Move every object that exists now out of the collector's sight; reference counting still frees them."""
    gc.freeze()
