"""`scripts/crash`: kill servers under load and check what they left; see the package."""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.crash.cycles import COUNTS, DECK, BrokenError, Cycle, Run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cycles; 1 if one of them found a violation."""
    parser = argparse.ArgumentParser(
        prog="scripts/crash",
        description="Real servers, killed under load in all three modes of --wal-sync: nothing acknowledged may be "
        "lost, nothing may be wrong.",
    )
    parser.add_argument("cycles", nargs="?", type=int, default=20, help="servers to kill (default: 20)")
    parser.add_argument("--seed", type=int, help="makes the same choice of operations again (default: a new one)")
    parser.add_argument(
        "--folder", type=Path, help="where the data directory is made: chooses the disk (default: the system's)"
    )
    parser.add_argument("--no-tier", action="store_true", help="without --tier-dir and --max-bytes")
    options = parser.parse_args(arguments)
    if options.cycles < 1:
        parser.error("cycles must be at least 1")
    seed = secrets.randbits(32) if options.seed is None else options.seed
    console = Console(width=None if sys.stdout.isatty() else 140)
    folder = Path(tempfile.mkdtemp(prefix="pion-crash-", dir=options.folder))
    console.print(f"seed {seed}, {options.cycles} cycles in {folder}", highlight=False)
    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    with bars:
        bar = bars.add_task("starting", total=options.cycles)

        def note(cycle: Cycle) -> None:
            bars.update(bar, completed=cycle.number, description=str(cycle))

        run = Run(folder, seed, note, tier=not options.no_tier)
        began_s = time.monotonic()
        try:
            run.run(options.cycles)
        except BrokenError as error:
            bars.stop()
            console.print(f"VIOLATION in {error}", markup=False, highlight=False, soft_wrap=True)
            return 1
        except BaseException:
            shutil.rmtree(folder)
            raise
        bars.update(bar, completed=options.cycles, description="done")
    shutil.rmtree(folder)
    show(console, run, time.monotonic() - began_s)
    return 0


def show(console: Console, run: Run, seconds: float) -> None:
    """The summary."""
    console.print(f"seed {run.seed}: nothing acknowledged was lost, nothing was wrong", highlight=False)
    table = Table()
    table.add_column("count")
    table.add_column("value", justify="right")
    for name in COUNTS:
        table.add_row(name, f"{run.counts[name]:,}")
    table.add_section()
    for end in dict.fromkeys(DECK):
        table.add_row(f"ended by: {end}", f"{run.counts[f'ended by: {end}']:,}")
    table.add_section()
    table.add_row("seconds", f"{seconds:,.0f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
