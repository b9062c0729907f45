"""SIGKILL at a moment that shows in a directory; a process of its own, since the clients' threads would delay it.

`killer.py PID DIRECTORY WHEN`, where WHEN is `growth` (the log is being written), `unfinished` (a snapshot is being
written) or `named` (a snapshot has just got its name, and the log that it covers is about to go).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

UNFINISHED = "pion.vstore.0.tmp"
LOG = "pion.vstore.0.log."

LOOK_S = 0.05
"""How often is looked for a new segment."""

MUCH_BYTES = 1 << 16


def main() -> None:
    """Wait for the moment, then kill. Ends by itself when there is nothing to kill, or is killed by its parent."""
    pid, directory, when = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    unfinished = directory / UNFINISHED
    if when == "growth":
        _await_growth(directory)
    else:
        while not unfinished.exists():
            pass
        if when == "unfinished":
            size = unfinished.stat().st_size
            while unfinished.exists() and unfinished.stat().st_size == size:
                pass
        while when == "named" and unfinished.exists():
            pass
    os.kill(pid, signal.SIGKILL)


def _await_growth(directory: Path) -> None:
    """Until the newest segment is in the middle of growing by much: then more of the same write is likely to follow."""
    looked_s = 0.0
    path, rest, before = directory, 0, 0
    while True:
        if time.monotonic() - looked_s > LOOK_S:
            path, looked_s = max(each for each in directory.iterdir() if each.name.startswith(LOG)), time.monotonic()
            rest = before = path.stat().st_size
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            looked_s = 0.0
            continue
        if size == before:
            rest = size
        elif size >= rest + MUCH_BYTES:
            return
        before = size


if __name__ == "__main__":
    main()
