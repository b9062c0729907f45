"""Buffers that are really fresh, and what a process holds."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

M_MMAP_THRESHOLD = -3
FRESH_FROM_BYTES = 128 * 1024


def keep_buffers_fresh() -> None:
    """Make glibc take every buffer of 128 KiB or more from the system and give it back when freed.

    Otherwise it starts to hand out warm pages after the first few, and an arm's figure depends on what ran before it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, FRESH_FROM_BYTES)


def fresh(nbytes: int) -> NDArray[np.uint8]:
    """A buffer whose pages nobody has touched."""
    return np.empty(nbytes, np.uint8)


def filled(nbytes: int, seed: int = 1) -> NDArray[np.uint8]:
    """A buffer with random content."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process: resident pages that belong to no file. Raises OSError where /proc isn't there."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not report RssAnon")
