"""What each stored format changes of a real model's keys, values and tokens, and what it saves."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import attrs

from benchmarks._lib import agreement, peers
from benchmarks._lib.fidelity import Job
from benchmarks._lib.report import Report, at_least, at_most
from pion.errors import CommandError
from pion.storage.formats import get_format

TIMEOUT_S = 7200
FORMATS = (
    "fp32", "fp16", "bf16", "fp8", "int8", "turbo4", "turbo3", "turbo2",
    "mlx8g64", "mlx4g32", "mlx4g64", "mlx3g32", "mlx2g32",
)  # fmt: skip
PROTECTED = 2
"""Outer layers on each side that keep V in fp16, in the schemas."""

SCHEMAS = ("fp8", "turbo4", "turbo2")
"""Formats of V in the layers between, K being fp16 everywhere."""

ALONE, UNIFORM = "fetched alone", "fp16"

METHOD = (
    "SmolLM2-135M-Instruct, float32 (30 layers, 3 K/V heads of 64 values), its chat template; the system prompt is a "
    "source text of Python's library and is the stored prefix, the question stands behind it.",
    "Formats: prefixes of 64 to 512 tokens. Each is computed once, stored AS fp32 once in every format through a real "
    "server, and fetched AS fp32 into fresh caches. Errors are over all values of all layers and tokens; bytes are "
    "what V.INFO reports, both sides and all layers.",
    "The run that all are compared with is mlx-lm's generate_step on the computed cache. 'fp32, alone' is the same on "
    "what was fetched, and must be the same. The others continue together, as entries of one batch, because that "
    "takes a tenth of the time; fp32 is in it too and shows what computing in a batch changes by itself.",
    "A token agrees when it is the same at the same place; after the first difference two answers go their own ways. "
    "So there are also the choices that agree: the most likely next token at each place of the computed answer, that "
    "answer being the text so far for every format. BLEU is sacrebleu's corpus BLEU of the decoded answers.",
    "Schemas: one PionPromptCache stores, another one of the same settings fetches (get_or_prefill) and answers; "
    "nothing is kept in between. Cold computes the prefix each time. The order of the arms turns with each question. "
    "First token: from having the token ids, evaluating the question included. Decoding: the tokens behind it.",
)


def schema_name(fmt: str) -> str:
    """An arm with K in fp16, V in fp16 outside and in `fmt` inside."""
    return f"fp16, V {fmt} inside"


def run(quick: bool) -> Report:
    """Start a server, let a process with the model store, fetch and answer, and compare."""
    report = Report("quality", "what stored formats change of a real model's answers", quick, METHOD)
    names = [name for name in (FORMATS[:3] if quick else FORMATS) if _known(report, name)]
    inside = [name for name in (SCHEMAS[:1] if quick else SCHEMAS) if _known(report, name)]
    schemas = {schema_name(name): (name, PROTECTED) for name in inside}
    job = Job(
        pion_port=0,
        formats={name: (name, 0) for name in names} | schemas,
        prompts=2 if quick else 20,
        longest=64 if quick else 512,
        schemas={UNIFORM: (UNIFORM, 0)} | dict(list(schemas.items())[:1]),
        schema_prompts=1 if quick else 3,
        questions=2 if quick else 5,
        prefix_tokens=64 if quick else 1024,
        tokens=8 if quick else 50,
    )
    with peers.folder() as path, peers.pion() as pion:
        pion.unpin()
        job_file, result_file = path / "job.json", path / "result.json"
        job_file.write_text(json.dumps(attrs.asdict(attrs.evolve(job, pion_port=pion.port))), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks._lib.fidelity", str(job_file), str(result_file)]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        found = json.loads(result_file.read_text(encoding="utf-8"))
    _report_formats(report, job, found["formats"])
    _report_schemas(report, job, found["schemas"])
    return report


def _known(report: Report, name: str) -> bool:
    try:
        get_format(name.encode())
    except CommandError as error:
        if str(error) not in report.missing:
            report.missing.append(str(error))
        return False
    return True


def _report_formats(report: Report, job: Job, found: dict[str, Any]) -> None:
    tokens, texts = found["tokens"], found["texts"]
    wanted = tokens["computed"]
    for target, arm in ((at_least(100), ALONE), *((None, arm) for arm in job.formats)):
        label = "fp32, alone" if arm == ALONE else arm
        what = f"{label}: tokens that agree, {job.prompts} x {job.tokens}"
        report.find(what, agreement.same_percent(wanted, tokens[arm]), unit="%", against="computed", target=target)
    first = agreement.same_first_percent(wanted, tokens[ALONE])
    report.find("fp32, alone: first tokens that agree", first, unit="%", against="computed", target=at_least(100))
    exact = max(found["errors"]["fp32"])
    report.find("fp32: mean absolute error", exact, unit="", against="computed", target=at_most(0))

    for side, size in zip("KV", found["sizes"], strict=True):
        report.figure(f"mean magnitude of {side}", "computed", "", size)
    half = found["bytes_per_token"][UNIFORM]
    for arm in job.formats:
        for side, error in zip("KV", found["errors"][arm], strict=True):
            report.figure(f"mean absolute error of {side}", arm, "", error)
        report.figure("first tokens that agree", arm, "%", agreement.same_first_percent(wanted, tokens[arm]))
        report.figure("tokens that agree", arm, "%", agreement.same_percent(wanted, tokens[arm]))
        report.figure("choices that agree", arm, "%", agreement.same_percent(wanted, found["chosen"][arm]))
        report.samples(
            "tokens before the first difference", arm, "tokens", agreement.common_tokens(wanted, tokens[arm])
        )
        _report_bleu(report, arm, texts)
        nbytes = found["bytes_per_token"][arm]
        report.figure("stored", arm, "bytes/token", nbytes)
        report.figure("smaller than fp16", arm, "x", half / nbytes)


def _report_bleu(report: Report, arm: str, texts: dict[str, list[str]]) -> None:
    try:
        score, signature = agreement.bleu(texts["computed"], texts[arm])
    except agreement.MissingMetricError as missing:
        if str(missing) not in report.missing:
            report.missing.append(str(missing))
        return
    report.figure("BLEU", arm, "", score)
    line = f"sacrebleu: {signature}"
    if line not in report.method:
        report.method = (*report.method, line)


def _report_schemas(report: Report, job: Job, found: dict[str, Any]) -> None:
    prefix = f"{job.prefix_tokens:,} tokens"
    first = {
        arm: report.samples(f"first token after {prefix}", arm, "ms", [each * 1000 for each in seconds]).p50
        for arm, seconds in found["first_s"].items()
    }
    rates = {
        arm: report.samples("decoding", arm, "tokens/s", [(job.tokens - 1) / each for each in seconds]).p50
        for arm, seconds in found["decode_s"].items()
    }
    whole = {
        arm: report.samples(
            f"answer of {job.tokens} tokens after {prefix}", arm, "tokens/s",
            [job.tokens / (one + other) for one, other in zip(seconds, found["decode_s"][arm], strict=True)],
        ).p50
        for arm, seconds in found["first_s"].items()
    }  # fmt: skip
    wanted = found["tokens"]["cold"]
    for arm in job.schemas:
        report.figure(f"stored, {prefix}", arm, "bytes/token", found["bytes_per_token"][arm])
        for what, percent in (
            ("first tokens that agree", agreement.same_first_percent(wanted, found["tokens"][arm])),
            ("tokens that agree", agreement.same_percent(wanted, found["tokens"][arm])),
        ):
            report.figure(f"{what}, {len(wanted)} answers after {prefix}", arm, "%", percent)
        for other in ("cold", UNIFORM):
            if other != arm:
                report.find(f"first token after {prefix}: {arm}", first[arm] / first[other], against=other)
                report.find(f"decoding: {arm}", rates[arm] / rates[other], against=other)
                report.find(f"whole answer, tokens/s: {arm}", whole[arm] / whole[other], against=other)
