"""Attention over a stored prefix without fetching it: the first token, the tokens behind it, and whether they agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs

from benchmarks._lib import peers
from benchmarks._lib.attending import COPIED, KEPT, STAGE_1, Job
from benchmarks._lib.report import Report, Target, at_least, at_most

TIMEOUT_S = 3600
IN_PROCESS, BINARY, RESP = "in process", "binary lane", "RESP"
JUDGED_TOKENS = 1024

ROUNDS = {"256": (5, 1), "1024": (15, 3), "2048": (5, 1)}
"""Length of a prefix -> (rounds of a first token only, rounds of a whole answer)."""

METHOD = (
    "SmolLM2-135M-Instruct, float32 (30 layers, 9 heads, 3 K/V heads of 64 values); prefixes are source texts of "
    "Python's library. One process computes every prefix once, stores it and ends; then another loads the model and "
    "runs all arms. Nothing is pinned. The server computes with MLX on the same cores (--metal-attention).",
    "First token: from having the token ids and the name of their namespace, one more token is evaluated behind the "
    "prefix and the most likely next one taken: look-up, transfer and building the caches included. Decoding: the "
    "tokens behind it, each one step of the model, with the same loop in every arm. The arms are interleaved; medians. "
    "Deriving the name from the ids is given apart: it is the same for every arm of Pion.",
    "mlx-lm: its KVCache, kept in the process and used itself, what was appended cut off afterwards (one user at a "
    "time; the bound), or deep-copied first. mlx-lm is not patched in these runs and in those of stage 1.",
    "stage 1: PionPromptCache.get_or_prefill(ids), rows in their native format fetched, nothing kept in the process. "
    "stage 2: make_pion_prompt_cache with the patch, one lane for each arm; in process: the process holds the prefix, "
    "and several users may have it at a time.",
    "commands: what the server counts for a request up to its first token, and for each token behind it. rows not "
    "loaded: a first token over the binary lane when the server has the prefix stored but not loaded for attention.",
    "Tokens of timed runs: shares of the answers that are the bound's. Prompts: generate_step over every lane, "
    "compared with plain mlx-lm in the process that computed the prefixes, which are of 32 to 256 tokens.",
)


def run(quick: bool) -> Report:
    """Start a server, let one process store, then another attend."""
    report = Report("stage2", "attention over a stored prefix, in process and over the wire", quick, METHOD)
    with peers.folder() as path, peers.pion("--metal-attention", unix=False) as pion:
        pion.unpin()
        job = Job(
            port=pion.port,
            rounds={"64": (1, 1)} if quick else ROUNDS,
            decoded=2 if quick else 32,
            counted=1 if quick else 4,
            prompts=1 if quick else 20,
            longest=64 if quick else 256,
            tokens=2 if quick else 50,
        )
        stored = _process("store", job, path)
        found = _process("read", job, path)
    for length, timed in found["timed"].items():
        _report_times(report, job, int(length), timed)
    for lane, tokens in found["tokens"].items():
        same = [one == other for one, other in zip(stored["tokens"], tokens, strict=True)]
        report.find(
            f"{job.tokens} greedy tokens identical, {job.prompts} prompts: {lane}",
            100 * sum(same) / len(same),
            unit="%",
            against="plain mlx-lm",
            target=at_least(100),
        )
    return report


def _process(part: str, job: Job, path: Path) -> dict[str, Any]:
    job_file, result_file = path / "job.json", path / f"{part}.json"
    job_file.write_text(json.dumps(attrs.asdict(job)), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks._lib.attending", part, str(job_file), str(result_file)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    found: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    return found


def _report_times(report: Report, job: Job, length: int, timed: dict[str, Any]) -> None:
    what = f"first token after {length:,} tokens"
    decoding = f"decoding after {length:,} tokens"
    first: dict[str, float] = {}
    rate: dict[str, float] = {}
    wanted = next(run["tokens"] for run in timed["runs"][KEPT] if len(run["tokens"]) > 1)
    for name, runs in timed["runs"].items():
        first[name] = report.samples(what, name, "ms", [1000 * each["first_s"] for each in runs]).p50
        rates = [(len(each["tokens"]) - 1) / each["decode_s"] for each in runs if len(each["tokens"]) > 1]
        if rates:
            rate[name] = report.samples(decoding, name, "tokens/s", rates).p50
        same = [each["tokens"] == wanted[: len(each["tokens"])] for each in runs]
        if name != KEPT:
            report.find(
                f"tokens after {length:,} tokens, timed runs: {name}",
                100 * sum(same) / len(same),
                unit="%",
                against=KEPT,
                target=at_least(100),
            )
    for name, (before, each) in timed["calls"].items():
        report.figure(f"commands until the first token after {length:,} tokens", name, "commands", before)
        report.figure(f"commands for each token behind it, {length:,} tokens", name, "commands", each)
    report.figure(what, f"{BINARY}, rows not loaded", "ms", 1000 * timed["loading_s"])
    report.samples(f"deriving the name, {length:,} tokens", "", "ms", [1000 * each for each in timed["naming_s"]])
    judged = length == JUDGED_TOKENS
    for lane, others in (
        (IN_PROCESS, (KEPT, COPIED, STAGE_1)),
        (BINARY, (KEPT, STAGE_1, RESP)),
        (RESP, (KEPT, STAGE_1)),
    ):
        for other in others:
            bound = judged and (lane, other) == (IN_PROCESS, KEPT)
            targets: tuple[Target | None, Target | None] = (at_most(1.05), at_least(0.9)) if bound else (None, None)
            report.find(f"{what}: {lane}", first[lane] / first[other], against=other, target=targets[0])
            if other in rate:
                report.find(f"{decoding}: {lane}", rate[lane] / rate[other], against=other, target=targets[1])
