"""`python -m benchmarks [name ...]`: run benchmarks, print each one's table, write each one's JSON."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks._lib.memory import keep_buffers_fresh
from benchmarks._lib.report import Report

NAMES = (
    *("ttft", "bulk", "small", "memory", "scale", "start", "wal", "restart", "pause"),
    *("tier", "formats", "eviction", "quality", "attention", "stage2", "querybatch", "needle"),
)

EXIT_MISSED, EXIT_USAGE, EXIT_MISSING = 1, 2, 3

EPILOG = """\
ttft    time to the first token after a 1,024-token prefix: cold, warm from Pion, Redis, a file, the same process
bulk    transfers of 1, 8 and 32 MiB against a bare socket and Redis
small   round trips and pipelining of small commands against a bare Trio echo and Redis
memory  resident against charged memory while 2 GiB are stored, fetched and dropped
scale   LOOKUP and MATCH at a thousand, a hundred thousand and a million namespaces
start   from process start to the first answer
wal     stores in the three modes of the log against Redis and the disk itself
restart from process start to the first answer, and until all is verified, at 0.1, 1 and 4 GiB
pause   PING while a snapshot of 2 GiB is written under a load of stores
tier    fetches from the SSD tier against reading the same files
formats converting to and from each stored format against MLX and NumPy
eviction prefill seconds avoided on a real trace: lru, value, and an order that knows the future
quality what each stored format changes of a real model's keys, values and tokens
attention a layer's attention on the server: computing, the two lanes, many queries and clients at once
stage2  first token and decoding over a stored prefix: plain mlx-lm, rows fetched, in process, both lanes
querybatch keys and values sent once against sent with every question
needle  a fact hidden in a text of up to 8 thousand tokens, all of it attended to or a few blocks

Nothing else should run meanwhile. exit status: 0 all ran, 1 a target was missed (with --strict), 3 something that an
arm is compared with is not installed.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named benchmarks, all without a name."""
    parser = argparse.ArgumentParser(
        prog="benchmarks", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"one or more of {', '.join(NAMES)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds: it judges nothing")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a figure that must hold does not")
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks/results"), metavar="DIR", help="where the JSON goes"
    )
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.name if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(NAMES)}")

    keep_buffers_fresh()
    console = Console(width=None if sys.stdout.isatty() else 160)
    reports: list[Report] = []
    for name in arguments.name or NAMES:
        console.print(f"running {name} ...", style="dim")
        report: Report = importlib.import_module(f"benchmarks.{name}").run(arguments.quick)
        report.write(arguments.json)
        report.show(console)
        reports.append(report)
    if any(report.missing for report in reports):
        return EXIT_MISSING
    return EXIT_MISSED if arguments.strict and any(report.missed() for report in reports) else 0


if __name__ == "__main__":
    # Peers are started with `python -m benchmarks...` and must find the package from anywhere.
    root = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    sys.exit(main())
