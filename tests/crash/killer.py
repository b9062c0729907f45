"""SIGKILL at a moment that shows in a directory; a process of its own, since the clients' threads would delay it.

`killer.py PID DIRECTORY WHEN`, where WHEN is `growth` (the log is being written), `unfinished` (a snapshot is being
written), `named` (a snapshot has just got its name) or `removed` (the log that it covers has begun to go).
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

MUCH_BYTES = 1 << 17

HEADER_BYTES = 128
"""Of a segment; this process imports nothing of Pion, to be there at once."""


def main() -> None:
    """Wait for the moment, then kill. Whoever started it ends it if the moment doesn't come."""
    pid, directory, when = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if when == "growth":
        _await_growth(directory)
    elif when == "removed":
        oldest = min(_segments(directory))
        while _size(oldest) >= 0:
            pass
    else:
        unfinished = directory / UNFINISHED
        while (size := _size(unfinished)) < 0:
            pass
        while _size(unfinished) == size if when == "unfinished" else _size(unfinished) >= 0:
            pass
    os.kill(pid, signal.SIGKILL)


def _size(path: Path) -> int:
    """Bytes of a file, -1 if it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _segments(directory: Path) -> list[Path]:
    return [each for each in directory.iterdir() if each.name.startswith(LOG)]


def _newest(directory: Path) -> Path:
    """The segment that is being written: the next one is there already, with nothing but its header."""
    segments = _segments(directory)
    return max([each for each in segments if _size(each) > HEADER_BYTES] or segments)


def _await_growth(directory: Path) -> None:
    """Until the newest segment is in the middle of growing by much: then more of the same write is likely to follow."""
    looked_s = 0.0
    path, rest, before = directory, 0, 0
    while True:
        if time.monotonic() - looked_s > LOOK_S:
            path, looked_s = _newest(directory), time.monotonic()
            rest = before = _size(path)
        size = _size(path)
        if size == before:
            rest = size
        elif size >= rest + MUCH_BYTES:
            return
        before = size


if __name__ == "__main__":
    main()
