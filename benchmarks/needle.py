"""A fact hidden in a long text: is it found with attention in process, over the wire, and to a few blocks only?"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import attrs

from benchmarks._lib import peers
from benchmarks._lib.report import Report, at_least
from benchmarks._lib.searching import PLAIN, Arm, Job

TIMEOUT_S = 7200
BLOCK = 64
IN_PROCESS, BINARY = "in process", "binary lane"
ARMS = [
    *(Arm(lane) for lane in (IN_PROCESS, BINARY)),
    *(Arm(IN_PROCESS, top) for top in (4, 8, 16)),
    Arm(BINARY, 8),
    *(Arm(IN_PROCESS, top, question_too=True) for top in (8, 16)),
]
QUICK_ARMS = [Arm(IN_PROCESS), Arm(BINARY), Arm(IN_PROCESS, 2), Arm(BINARY, 2)]

ALL = list(range(10))
LONGEST = 8064
"""The model's context is 8,192 tokens: question and answer need room."""

DEPTHS = {1024: ALL, 2048: ALL, 4096: [0, 3, 6, 9], LONGEST: [1, 5, 9]}
"""Length of a text -> the depths at which a fact is hidden in it. Evaluating 8 thousand tokens takes minutes."""

METHOD = (
    "SmolLM2-135M-Instruct, float32 (30 layers, 9 heads, 3 K/V heads of 64 values), its chat template. The text is "
    "documentation of Python's library, its docstrings. A sentence about a secret number is put between two of its "
    "lines at (i + 1/2) tenths of the text, i from 0 to 9, with another name and number for each i; the question "
    "behind the text asks for the number. An answer has at most 16 tokens, taken greedily out of mlx-lm's loop.",
    "The text with the fact is the prefix: computed once by plain mlx-lm, stored, asked in every arm, and dropped. "
    "Texts that begin alike share the rows of the beginning. plain mlx-lm asks the cache that was computed.",
    "in process: the process that computed the prefix holds it. binary lane: the same process, but its queries travel "
    "to the server, which loaded the stored rows. dense: each token attends to all rows.",
    f"blocks: each query head reads only so many blocks of {BLOCK} rows of the prefix, those whose mean key fits the "
    "query best, and all that follows the prefix. The tokens of the answer do so; the question's tokens, evaluated "
    "together, read all. 'question too': they are evaluated one at a time and read no more blocks either.",
    f"Not covered, for time: six depths at 4,096 tokens, seven at {LONGEST:,} (the model's context is 8,192: question "
    "and answer need room); other numbers of blocks over the binary lane; RESP, whose commands compute with the same "
    "functions as the binary lane's. A number of blocks that is all of a text is left out.",
    "found: answers that contain the number. equal: answers whose tokens are plain mlx-lm's.",
)


def run(quick: bool) -> Report:
    """Start a server, let a process with the model search, and count."""
    report = Report("needle", "a fact hidden in a long text", quick, METHOD)
    depths = {192: [4]} if quick else DEPTHS
    with peers.folder() as path, peers.pion("--metal-attention", unix=False) as pion:
        pion.unpin()
        job = Job(
            port=pion.port,
            depths={str(length): numbers for length, numbers in depths.items()},
            block=BLOCK,
            arms=QUICK_ARMS if quick else ARMS,
            tokens=2 if quick else 16,
        )
        job_file, result_file = path / "job.json", path / "result.json"
        job_file.write_text(json.dumps(attrs.asdict(job)), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks._lib.searching", str(job_file), str(result_file)]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        found: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    for length, answers in found.items():
        _report_length(report, int(length), answers)
    return report


def _report_length(report: Report, length: int, answers: dict[str, list[tuple[list[int], bool]]]) -> None:
    plain = answers[PLAIN]
    what = f"{length:,} tokens, {len(plain)} texts"
    for arm, asked in answers.items():
        found = 100 * sum(has for _, has in asked) / len(asked)
        report.figure(f"{what}: found", arm, "%", found)
        if arm == PLAIN:
            continue
        equal = 100 * sum(one[0] == other[0] for one, other in zip(plain, asked, strict=True)) / len(asked)
        kept = 100 * sum(has for (_, had), (_, has) in zip(plain, asked, strict=True) if had)
        exact = at_least(100) if arm.endswith("dense") else None
        report.find(f"{what}: equal: {arm}", equal, unit="%", against=PLAIN, target=exact)
        if had := sum(has for _, has in plain):
            report.find(f"{what}: found: {arm}", kept / had, unit="%", against=f"those {PLAIN} finds", target=exact)
