"""Which core runs what. A round trip across two cores costs three times one on a single core: leave nothing open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CAN_PIN = hasattr(os, "sched_setaffinity")


def cores() -> list[int]:
    """The cores this process may use, lowest first; empty where the system can't pin."""
    return sorted(os.sched_getaffinity(0)) if CAN_PIN else []


#: Taken when the package is imported, before anything is pinned.
AVAILABLE = cores()

CLIENT = set(AVAILABLE[:1])
"""Where the measuring client runs."""

OTHER = set(AVAILABLE[1:2]) or CLIENT
"""Where the server runs when client and server have a core each."""

HAS_TWO = len(AVAILABLE) > 1


def pin(pid: int, where: set[int]) -> None:
    """Move every thread of a process to these cores; does nothing where the system can't pin."""
    if not CAN_PIN or not where:
        return
    tasks = Path(f"/proc/{pid}/task")
    for thread in [int(entry.name) for entry in tasks.iterdir()] if tasks.is_dir() else [pid]:
        try:
            os.sched_setaffinity(thread, where)
        except ProcessLookupError:
            continue  # The thread ended in between.


def pin_self(where: set[int]) -> None:
    """Move the calling process."""
    pin(os.getpid(), where)


@contextmanager
def pinned(where: set[int]) -> Iterator[None]:
    """Run the calling process on these cores inside the block, and where it ran before after it."""
    before = set(cores())
    pin_self(where)
    try:
        yield
    finally:
        pin_self(before)
