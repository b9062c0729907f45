"""How the demo says what it is doing: bars on a terminal, plain lines in a file or in the log of a CI job.

A file shows nothing of a bar until the bar is done. So there each step says in a line that it begins, what it does
next and how it ended, and every few seconds how far it is, from a thread, because the process that works may be silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

EVERY_S: Final = 15.0
"""The longest silence, in seconds; a CI system takes minutes of it for a job that hangs."""

STARTING: Final = "starting"


class Step(Protocol):
    """One thing that the demo does, while it does it."""

    def state(self, text: str) -> None:
        """It goes on with something else."""

    def prefill(self, done: int, total: int) -> None:
        """`done` of `total` tokens are computed."""

    def finish(self, text: str) -> None:
        """It is done; `text` is what came of it."""


class Teller(Protocol):
    """Where the steps are shown, one after the other."""

    def step(self, title: str) -> Step:
        """Begin a step. The one before has finished, or failed."""


@contextmanager
def telling(console: Console, every_s: float = EVERY_S) -> Iterator[Teller]:
    """Bars if a person watches `console`, else lines, at most `every_s` seconds apart while a step is under way."""
    # Not `is_terminal` alone: that is true for a file, too, where FORCE_COLOR is set, as CI systems do.
    if console.is_interactive and console.file.isatty():
        with _progress(console) as progress:
            yield _Bars(progress)
        return
    lines = _Lines(console, every_s)
    try:
        yield lines
    finally:
        lines.close()


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def step(self, title: str) -> _Bar:
        return _Bar(self._progress, title)


class _Bar:
    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=None, state=STARTING)

    def state(self, text: str) -> None:
        self._progress.update(self._task, state=text)

    def prefill(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total, state="prefill")

    def finish(self, text: str) -> None:
        self._progress.update(self._task, completed=1, total=1, state=text)


class _Lines:
    """One thread for all steps repeats what was said last. `close` ends it; after that nothing is written."""

    def __init__(self, console: Console, every_s: float) -> None:
        self._console = console
        self._every_s = every_s
        self._begun_s = time.monotonic()
        self._lock = threading.Lock()  # so that nothing is said of a step after its last line
        self._now: str | None = None  # what the step does; None between two steps
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="demo lines", daemon=True)
        self._thread.start()

    def step(self, title: str) -> _Line:
        return _Line(self, title)

    def tell(self, text: str, then: str | None) -> None:
        """A line now, and `then` every so often until there is something new; None: nothing."""
        with self._lock:
            self._now = then
            self._print(text)

    def keep(self, then: str) -> None:
        """Only what to say every so often."""
        with self._lock:
            self._now = then

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _repeat(self) -> None:
        while not self._closed.wait(self._every_s):
            with self._lock:
                if self._now is not None:
                    self._print(self._now)

    def _print(self, text: str) -> None:
        """With the time since the demo began."""
        minutes, seconds = divmod(int(time.monotonic() - self._begun_s), 60)
        self._console.print(f"[{minutes}:{seconds:02}] {text}", markup=False, highlight=False, soft_wrap=True)


class _Line:
    def __init__(self, lines: _Lines, title: str) -> None:
        self._lines = lines
        self._title = title
        self.state(STARTING)

    def state(self, text: str) -> None:
        self._lines.tell(f"{self._title}: {text}", then=f"{self._title}: still {text}")

    def prefill(self, done: int, total: int) -> None:
        # Only kept: a step of a prefill may take a tenth of a second or half a minute.
        self._lines.keep(f"{self._title}: prefill, {done:,} of {total:,} tokens")

    def finish(self, text: str) -> None:
        self._lines.tell(f"{self._title}: {text}", then=None)


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="*"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=console,
    )
