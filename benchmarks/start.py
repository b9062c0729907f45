"""From process start to the first answer of a store-only server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._lib import peers
from benchmarks._lib.report import Report, at_most
from benchmarks._lib.stats import interleave

ROUNDS = 10

METHOD = (
    "pion-server --kvcache is started as a user starts it; the clock runs from the fork to the first +PONG, asked for "
    "by connecting every millisecond. Nothing is pinned; files are in the page cache (one run before is not counted). "
    "Python may write its bytecode files, as it does unless told otherwise.",
    "Python and imports: the interpreter imports trio, numpy, attrs and pluggy and ends: what any such server pays.",
)


def run(quick: bool) -> Report:
    """Start servers, one after the other."""
    report = Report("start", "start of a store-only server", quick, METHOD)
    executable = Path(sys.executable).parent / "pion-server"
    pion = [str(executable)] if executable.exists() else [sys.executable, "-m", "pion", "server"]
    imports = [sys.executable, "-c", "import attrs, numpy, pluggy, trio"]
    answers: dict[str, list[float]] = {"Pion": []}
    arms: dict[str, Callable[[], None]] = {
        "Pion": lambda: answers["Pion"].append(
            first_answer([*pion, "--kvcache", "--binary-port", "0", "--log-level", "warning"])
        ),
        "Python and imports": lambda: subprocess.run(imports, check=True) and None,
    }
    try:
        binary = peers.program("redis-server")
    except peers.MissingPeerError as missing:
        report.missing.append(str(missing))
    else:
        answers["Redis"] = []
        command = [binary, "--save", "", "--appendonly", "no"]
        arms["Redis"] = lambda: answers["Redis"].append(first_answer(command))
    times = interleave(arms, 2 if quick else ROUNDS)
    medians = {}
    for name in arms:
        seconds = answers[name][1:] if name in answers else times[name]
        medians[name] = report.samples("start", name, "s", seconds).p50
    report.find("process start to first answer", medians["Pion"], unit="s", target=at_most(0.6))
    report.find(
        "process start to first answer: Pion",
        medians["Pion"] / medians["Python and imports"],
        against="Python and imports",
    )
    return report


def first_answer(command: list[str]) -> float:
    """Seconds from the start of the process to its first answer; the process is stopped again."""
    with peers.folder() as path:
        port = peers.free_port()
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        start = time.perf_counter()
        process = subprocess.Popen(
            [*command, "--port", str(port)], cwd=path, env=environment, stdout=subprocess.DEVNULL, text=True
        )
        try:
            peers.wait_for_answer(process, port)
            return time.perf_counter() - start
        finally:
            process.terminate()
            process.wait(30)
