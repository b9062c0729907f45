"""`pion check` and `pion repair`: a data directory while no server runs on it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pion.config import KIB
from pion.errors import MisconfError, StartupError

if TYPE_CHECKING:
    from pion.storage.disk import RealDisk
    from pion.storage.examination import Examination

EXIT_PROBLEMS: Final = 1

TABLE_WIDTH: Final = 140
"""Columns for the table of files, so that no name is cut where a program reads it."""

SHOWN: Final = 5
"""Prefixes named with one problem; the list at the end has all."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the two subcommands."""
    checking = commands.add_parser(
        "check",
        help="verify a data directory",
        description="Read all files of a data directory and verify every checksum. Changes nothing. Exit status: 0 if "
        "all is well, 1 if there are problems, 2 if it can't be read or a server runs on it.",
    )
    checking.set_defaults(run=check)
    repairing = commands.add_parser(
        "repair",
        help="make a damaged data directory usable",
        description="Write what can be kept of a data directory as a new snapshot, and set the files that were there "
        "aside, under names beginning with 'damaged-'. Exit status: 0 if the directory is well now, 2 if it can't be "
        "repaired; with --dry-run 1 if there is something to repair.",
    )
    repairing.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    repairing.set_defaults(run=repair)
    for parser in (checking, repairing):
        parser.add_argument("directory", metavar="DIR", help="what --dir is for the server")


def check(arguments: argparse.Namespace) -> int:
    """`pion check DIR`. Raises StartupError."""
    with _opened(arguments.directory, changes=False) as disk:
        found = _examine(disk)
    _show(found)
    _say("" if found.good else f"\nA repair makes it usable: pion repair {arguments.directory}")
    return 0 if found.good else EXIT_PROBLEMS


def repair(arguments: argparse.Namespace) -> int:
    """`pion repair DIR`. Raises StartupError."""
    import trio

    from pion.storage.repair import repair as repair_files
    from pion.storage.repair import set_aside_names

    with _opened(arguments.directory, changes=not arguments.dry_run) as disk:
        found = _examine(disk)
        _show(found)
        if found.good:
            _say("\nThere is nothing to repair.")
            return 0
        if found.unknown_version:
            raise StartupError(f"{disk.where}: nothing was changed, as a file is of another format version")
        names = set_aside_names(found, time.time())
        if not arguments.dry_run:
            try:
                trio.run(repair_files, disk, found, names)
            except (OSError, MisconfError) as error:
                raise StartupError(f"{disk.where}: the repair failed: {error}") from error
        _say("\n" + ("This would be done:" if arguments.dry_run else "Done:"))
        _say(f"  a new snapshot of what can be kept: {_kept(found)}")
        for old, new in names.items():
            _say(f"  {old} set aside as {new}")
        if not arguments.dry_run:
            _say("No server reads the files that were set aside. Remove them when nobody needs them any more.")
        return EXIT_PROBLEMS if arguments.dry_run else 0


@contextmanager
def _opened(directory: str, *, changes: bool) -> Iterator[RealDisk]:
    """The directory, locked so that no server starts on it meanwhile. Raises StartupError, also for errors inside."""
    from pion.storage.data_directory import LOCK_NAME
    from pion.storage.disk import DirectoryLock, RealDisk

    path = Path(directory)
    lock: DirectoryLock | None = None
    try:
        if not path.is_dir():
            raise StartupError(f"{path} is not a directory")
        # Where no server has ever run there is no lock, and looking leaves nothing behind. The same on a file system
        # that can't be written, where none can run.
        if changes or ((path / LOCK_NAME).exists() and os.access(path / LOCK_NAME, os.W_OK)):
            lock = DirectoryLock(path / LOCK_NAME)
        yield RealDisk(path)
    except BlockingIOError as error:
        raise StartupError(f"{path} is {error}; stop that server first") from error
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror or error}") from error
    finally:
        if lock is not None:
            lock.release()


def _examine(disk: RealDisk) -> Examination:
    """Read everything, with a progress bar if a person watches."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from pion.storage.examine import examine

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        return examine(disk, progress=update)


def _show(found: Examination) -> None:
    """Print the files, then each problem, then all that a repair would leave out."""
    from rich.console import Console
    from rich.table import Table

    from pion.storage.salvage import describe

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("file", "kind", "version", "records", "bytes", "sequence", "state"):
        table.add_column(title, justify="right" if title in ("records", "bytes") else "left", no_wrap=True)
    for report in found.files.values():
        sequence = ""
        if report.kind == "log" and report.last is not None:
            sequence = f"{report.first} to {report.last}"
        if report.kind == "snapshot" and report.last is not None:
            sequence = f"up to {report.last}"
        table.add_row(
            report.name, report.kind, report.version, str(report.records), str(report.nbytes), sequence, report.state
        )
    Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else TABLE_WIDTH).print(table)
    for note in found.notes:
        _say(f"note: {note}")
    for problem in found.problems:
        where = problem.file if problem.offset is None else f"{problem.file}, byte {problem.offset}"
        _say(f"problem: {where}: {problem.what}")
        _list("  left out: ", list(problem.left_out))
    lost = [f"{describe(key)}: {why}" for key, why in found.salvage.lost.items()]
    lost += [f"all of {family}: {why}" for family, why in found.salvage.lost_families.items()]
    if lost:
        _say(f"\nleft out, {len(lost)} in all:")
        for line in lost:
            _say(f"  {line}")
    if not found.files:
        _say("no server has stored anything here. Is this the directory that --dir named?")
    elif not found.unknown_version:
        _say(f"{'all is well' if found.good else 'what can be kept'}: {_kept(found)}")


def _kept(found: Examination) -> str:
    store = found.salvage.store
    size = store.ledger.payload_bytes // KIB
    return f"prefixes {store.statistics().prefixes}, lone sessions {len(store.lone)}, rows {size} KiB"


def _list(title: str, items: list[str]) -> None:
    if items:
        more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
        _say(title + ", ".join(items[:SHOWN]) + more)


def _say(text: str) -> None:
    if text:
        sys.stdout.write(text + "\n")
