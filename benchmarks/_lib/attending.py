"""The two processes of `stage2`: one that computes and stores, one that starts later and attends.

`python -m benchmarks._lib.attending store|read JOB.json RESULT.json`. What they do is in `stage2.py`'s METHOD.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs

from benchmarks._lib import prompts
from benchmarks._lib.raw import RawClient
from benchmarks._lib.stats import interleave

KEPT, COPIED, STAGE_1 = "mlx-lm, cache kept", "mlx-lm, deep copy", "stage 1"

NAMINGS = 5
"""How often the name of a namespace is derived, to say how long that takes."""


@attrs.frozen(kw_only=True)
class Job:
    """What both processes are told."""

    port: int
    rounds: dict[str, tuple[int, int]]
    """Length of a prefix, as text -> (rounds of a first token only, rounds of `decoded` tokens)."""

    decoded: int
    counted: int
    """Tokens behind the first over which the commands of one token are counted."""

    prompts: int
    longest: int
    """Tokens of the longest prefix of the prompts whose tokens are compared."""

    tokens: int


@attrs.frozen
class Run:
    """One answer: its tokens, the seconds until the first one, the seconds from there to the last."""

    tokens: list[int]
    first_s: float
    decode_s: float


def store(job: Job) -> dict[str, Any]:
    """Compute every prefix once and store it; continue the prompts with plain mlx-lm from what was computed."""
    model, encode = _load()
    from mlx_lm.models.cache import make_prompt_cache

    from benchmarks._lib import lanes, restoring
    from pion_vllm_mlx import PionPromptCache

    client = PionPromptCache(model, inproc=False, fallback=False, port=job.port)
    question = encode(prompts.QUESTION)
    for length in job.rounds:
        ids = prompts.prefix(encode, prompts.MODULES[0], int(length))
        lanes.store(client, ids, lanes.extend(model, ids, make_prompt_cache(model)))
    continued = []
    for ids in _equality_prompts(encode, job):
        computed = lanes.extend(model, ids, make_prompt_cache(model))
        lanes.store(client, ids, computed)
        continued.append(restoring.greedy(model, question, computed, job.tokens))
    _expect(client.stats()["stored"] == len(job.rounds) + job.prompts, f"not all was stored: {client.stats()}")
    return {"tokens": continued}


def read(job: Job) -> dict[str, Any]:
    """Time the arms behind every prefix, then continue every prompt over every lane."""
    model, encode = _load()
    reader = _Reader(job, model, encode)
    return {"timed": {length: reader.time(int(length)) for length in job.rounds}, "tokens": reader.continue_prompts()}


class _Reader:
    """A model that has computed nothing, its clients, and a connection that asks for the server's counters."""

    def __init__(self, job: Job, model: Any, encode: Callable[[str], list[int]]) -> None:
        from benchmarks._lib import lanes
        from pion_vllm_mlx import PionPromptCache

        self._job, self._model, self._encode = job, model, encode
        self._question = encode(prompts.QUESTION)
        self._client = PionPromptCache(model, inproc=False, fallback=False, port=job.port)
        self._lanes = {name: lanes.Lane(model, name, job.port) for name in lanes.LANES}
        self._control = RawClient(job.port)

    def time(self, length: int) -> dict[str, Any]:
        """All runs of every arm behind one prefix, and how many commands they took."""
        from benchmarks._lib import lanes, restoring

        ids = prompts.prefix(self._encode, prompts.MODULES[0], length)
        naming = interleave({"": lambda: self._client.namespace(ids)}, NAMINGS)[""]
        space = self._client.namespace(ids)
        fetched = self._client.get_or_prefill(ids, space)
        kept, copied = (lanes.beginning(fetched, length) for _ in range(2))
        makes: dict[str, Callable[[], Any]] = {
            KEPT: lambda: restoring.trimmed(kept, length),
            COPIED: lambda: restoring.deep_copy(copied),
            STAGE_1: lambda: self._client.get_or_prefill(ids, space),
        }
        makes |= {name: lambda lane=lane: lane.caches(space, length) for name, lane in self._lanes.items()}
        # Nobody has attended to this prefix: the server loads its rows for attention now.
        loading_s = self._run(lanes.BINARY, makes[lanes.BINARY], 1).first_s
        self._lanes[lanes.IN_PROCESS].hold(ids)

        runs: dict[str, list[Run]] = {name: [] for name in makes}

        def arm(name: str, count: int) -> Callable[[], None]:
            return lambda: runs[name].append(self._run(name, makes[name], count))

        first_rounds, rounds = self._job.rounds[str(length)]
        interleave({name: arm(name, 1) for name in makes}, first_rounds)
        runs = {name: found[1:] for name, found in runs.items()}  # the first round is interleave's warm-up
        decoding = [name for name in makes if name != COPIED]  # a copy decodes as what it was copied from
        interleave({name: arm(name, self._job.decoded) for name in decoding}, rounds, warmup=0)
        calls = {name: self._calls(name, make) for name, make in makes.items() if name not in (KEPT, COPIED)}
        statistics = self._client.stats()
        _expect(statistics["misses"] == 0, f"stage 1 should find all, its statistics are {statistics}")
        return {
            "runs": {name: [attrs.asdict(each) for each in found] for name, found in runs.items()},
            "calls": calls,
            "loading_s": loading_s,
            "naming_s": naming,
        }

    def continue_prompts(self) -> dict[str, list[list[int]]]:
        """Lane -> the greedy tokens of every prompt, out of mlx-lm's own loop."""
        from benchmarks._lib import lanes, restoring

        found: dict[str, list[list[int]]] = {name: [] for name in self._lanes}
        for ids in _equality_prompts(self._encode, self._job):
            self._lanes[lanes.IN_PROCESS].hold(ids)
            space = self._client.namespace(ids)
            for name, lane in self._lanes.items():
                with lanes.patched():
                    caches = lane.caches(space, len(ids))
                    answer = restoring.greedy(self._model, self._question, caches, self._job.tokens)
                found[name].append(answer)
        return found

    def _run(self, name: str, make: Callable[[], Any], count: int) -> Run:
        """One answer of `count` tokens, each one step of the model, from having the token ids and the name on."""
        from benchmarks._lib import lanes, restoring

        with lanes.patched() if name in self._lanes else nullcontext():
            start = time.perf_counter()
            caches = make()
            tokens = [restoring.first_token(self._model, self._question[-1:], caches)]
            first = time.perf_counter()
            while len(tokens) < count:
                tokens.append(restoring.first_token(self._model, tokens[-1:], caches))
            return Run(tokens, first - start, time.perf_counter() - first)

    def _calls(self, name: str, make: Callable[[], Any]) -> tuple[float, float]:
        """(commands up to the first token, commands for each token behind it), as the server counts them."""
        asking = -self._commands() + self._commands()
        first, more = (
            -self._commands() + (self._run(name, make, count), self._commands())[1] - asking
            for count in (1, 1 + self._job.counted)
        )
        return first, (more - first) / self._job.counted

    def _commands(self) -> int:
        info = self._control.call("INFO", "stats")
        return int(info.partition(b"total_commands_processed:")[2].split()[0])


def _load() -> tuple[Any, Callable[[str], list[int]]]:
    from pion_vllm_mlx.demo_model import load_demo_model

    model, tokenizer = load_demo_model()
    return model, lambda text: tokenizer.encode(text, add_special_tokens=False)


def _equality_prompts(encode: Callable[[str], list[int]], job: Job) -> list[list[int]]:
    """Prompts with other texts and other lengths."""
    lengths = prompts.lengths(job.prompts, job.longest)
    modules = prompts.MODULES[1 : job.prompts + 1]
    return [prompts.prefix(encode, module, length) for module, length in zip(modules, lengths, strict=True)]


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def main() -> None:
    """Run one of the two parts."""
    part, job_file, result_file = sys.argv[1:]
    job = Job(**json.loads(Path(job_file).read_text(encoding="utf-8")))
    result = {"store": store, "read": read}[part](job)
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
