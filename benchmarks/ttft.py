"""Time to the first token after a long prefix that another process has computed, and whether the tokens agree."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

from benchmarks._lib import peers
from benchmarks._lib.generation import Job
from benchmarks._lib.report import Report, at_least, at_most

TIMEOUT_S = 1800
BOUND, ALTERNATIVE = "in process, deep copy", "Redis, one value"

METHOD = (
    "SmolLM2-135M-Instruct, float32; prefixes are source texts of Python's library. One more token is evaluated behind "
    "the prefix, the least there can be: how fast a CPU evaluates a question is not what is compared. One process "
    "computes, stores and ends; then another loads the model and reads. Nothing is pinned.",
    "Timed: from having the token ids to the first greedy token, everything included: look-up, transfer, building the "
    "arrays, evaluating that token. The arms are interleaved in the reading process; connections are open, as in a "
    "program that serves. Before timing, all arms' arrays are compared bit for bit.",
    "Out of mlx-lm's loop: the same, until generate_step yields the token. It schedules the second token before that, "
    "and on a CPU MLX's async_eval returns when nearly all is computed, so that this is the time of two tokens.",
    "in process: the cache this process computed itself, either deep-copied first, so that it can be used again (what "
    "mlx-lm's server does; the bound), or used itself and what was appended cut off afterwards (trim; one at a time).",
    "Redis: redis-py with hiredis if installed; the same arrays, either as one value (GET) or as one value per layer "
    "and side (MGET); np.frombuffer, mx.array, KVCache.state. The one value is what Pion is judged by: it is how "
    "a cache file is put into Redis.",
    "Pion: PionPromptCache.get_or_prefill(ids), native format, no cache in the process.",
    "tokens: both processes continue the same prompts greedily, one from what it computed, one from what it fetched.",
)


def run(quick: bool) -> Report:
    """Start the servers, let one process store, then another read."""
    report = Report("ttft", "time to first token after a shared prefix", quick, METHOD)
    with ExitStack() as stack:
        path = stack.enter_context(peers.folder())
        pion = stack.enter_context(peers.pion())
        pion.unpin()
        redis_port = 0
        try:
            redis = stack.enter_context(peers.redis())
        except peers.MissingPeerError as missing:
            report.missing.append(str(missing))
        else:
            redis.unpin()
            redis_port = redis.port
        job = Job(
            pion_port=pion.port,
            pion_unix=pion.unix,
            redis_port=redis_port,
            cache_file=str(path / "cache.safetensors"),
            prefix_tokens=64 if quick else 1024,
            rounds=1 if quick else 21,
            cold_rounds=1 if quick else 3,
            prompts=2 if quick else 20,
            tokens=4 if quick else 50,
        )
        stored = _process("store", job, path)
        found = _process("read", job, path)
    _report(report, job, stored, found)
    return report


def _process(part: str, job: Job, path: Path) -> dict[str, Any]:
    job_file, result_file = path / "job.json", path / f"{part}.json"
    job_file.write_text(json.dumps(attrs.asdict(job)), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks._lib.generation", part, str(job_file), str(result_file)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    found: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    return found


def _report(report: Report, job: Job, stored: dict[str, Any], found: dict[str, Any]) -> None:
    what = f"first token after {job.prefix_tokens:,} tokens"
    medians = {
        name: report.samples(what, name, "ms", [each * 1000 for each in seconds]).p50
        for name, seconds in found["seconds"].items()
    }
    loop = f"out of mlx-lm's loop after {job.prefix_tokens:,} tokens"
    loop_medians = {
        name: report.samples(loop, name, "ms", [each * 1000 for each in seconds]).p50
        for name, seconds in found["loop_seconds"].items()
    }
    report.figure("size of the prefix", "fp32", "MB", found["prefix_bytes"] / 1e6)
    report.figure("evaluated behind the prefix", "", "tokens", found["evaluated_tokens"])
    report.figure("storing all prefixes", "Pion TCP", "ms", stored["store_ms"])
    targets = {BOUND: at_most(1.20), ALTERNATIVE: at_most(0.70)}
    for lane in ("Pion TCP", "Pion Unix socket"):
        for name, median in medians.items():
            if name != lane:
                report.find(f"{what}: {lane}", medians[lane] / median, against=name, target=targets.get(name))
    for name, median in loop_medians.items():
        if name != "Pion TCP":
            report.find(f"{loop}: Pion TCP", loop_medians["Pion TCP"] / median, against=name)
    same = [one == other for one, other in zip(stored["tokens"], found["tokens"], strict=True)]
    report.find(
        f"{job.tokens} greedy tokens identical, {job.prompts} prompts",
        100 * sum(same) / len(same),
        unit="%",
        against="the process that computed them",
        target=at_least(100),
    )
