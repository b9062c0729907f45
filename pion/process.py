"""What a server process sets for itself before it serves: allocator, garbage collector, file descriptors.

None of this happens on import or in an embedded server: these are choices for a process that is nothing but a server.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import resource
import sys
from typing import Final

logger = logging.getLogger("pion.process")

M_MMAP_THRESHOLD: Final = -3
"""glibc's number for the mallopt parameter (malloc.h)."""

MMAP_THRESHOLD_BYTES: Final = 128 * 1024
"""Blocks from here on are mapped and unmapped one by one. It is glibc's start value, but glibc raises it at the first
large free, and from then on freed blocks stay with the process: twice the stored bytes after churn."""

GC_THRESHOLDS: Final = (50_000, 20, 100)
"""Young collections after 50,000 net allocations instead of 700: stored prefixes are long-lived and free of cycles, so
looking at them often is only a pause."""

SPARE_DESCRIPTORS: Final = 64
"""File descriptors beside those of the clients: listeners, epoll, wake-up pipes, logs, files."""

OPEN_MAX: Final = 10_240
"""macOS refuses a soft limit over this, even where the hard limit is "unlimited" (sys/syslimits.h)."""


def tune_allocator(platform: str = sys.platform) -> bool:
    """Keep freed blocks from staying resident; True if the C library took the setting (glibc on Linux)."""
    if not platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) == 1


def tune_gc() -> None:
    """Raise the collector's thresholds and move what start-up made out of its sight."""
    gc.set_threshold(*GC_THRESHOLDS)
    gc.collect()
    gc.freeze()


def raise_descriptor_limit(max_clients: int) -> int:
    """Ask for enough file descriptors for `max_clients`; returns how many clients fit into what was granted."""
    wanted = max_clients + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        goal = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        for attempt in (goal, OPEN_MAX):
            if attempt > goal or attempt <= soft:
                continue
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (attempt, hard))
                break
            except (ValueError, OSError) as error:
                logger.warning("can't raise the file descriptor limit from %d to %d: %s", soft, attempt, error)
    return fitting_clients(max_clients)


def fitting_clients(max_clients: int) -> int:
    """How many of `max_clients` the process has file descriptors for, as it is."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return max_clients
    return max(1, min(max_clients, soft - SPARE_DESCRIPTORS))
