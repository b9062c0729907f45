"""The two processes of `ttft`: one that computes and stores, one that starts later and reads.

`python -m benchmarks._lib.generation store|read JOB.json RESULT.json`. What they do is in `ttft.py`'s METHOD.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from benchmarks._lib import prompts
from benchmarks._lib.stats import interleave

LOOPED = ("in process, deep copy", "Pion TCP", "Redis, one value")
"""The arms whose first token is also taken out of mlx-lm's own loop."""


@attrs.frozen(kw_only=True)
class Job:
    """What both processes are told. `redis_port` is 0 without Redis."""

    pion_port: int
    pion_unix: str
    redis_port: int
    cache_file: str
    prefix_tokens: int
    rounds: int
    cold_rounds: int
    prompts: int
    tokens: int


def store(job: Job) -> dict[str, Any]:
    """Compute every prefix, store it, and say what a generation gives that used the computed one."""
    model, encode = _load()
    from mlx_lm.models.cache import save_prompt_cache

    from benchmarks._lib import restoring

    question = encode(prompts.QUESTION)
    client = _client(model, job.pion_port, "")
    first = prompts.prefix(encode, prompts.MODULES[0], job.prefix_tokens)
    caches = client.get_or_prefill(first)
    save_prompt_cache(job.cache_file, caches)
    if job.redis_port:
        restoring.to_redis(_redis(job.redis_port), caches)
    continued = []
    for ids in _equality_prompts(encode, job):
        continued.append(restoring.greedy(model, question, client.get_or_prefill(ids), job.tokens))
    statistics = client.stats()
    _expect(statistics["hits"] == 0, f"the storing process should find nothing, its statistics are {statistics}")
    return {"tokens": continued, "store_ms": statistics["store_ms_total"]}


def read(job: Job) -> dict[str, Any]:
    """Measure every arm's time to the first token, then continue every prompt from what the other process stored."""
    model, encode = _load()
    from mlx_lm.models.cache import load_prompt_cache

    from benchmarks._lib import restoring

    question = encode(prompts.QUESTION)
    ids = prompts.prefix(encode, prompts.MODULES[0], job.prefix_tokens)
    kept, reused = restoring.prefill(model, ids), restoring.prefill(model, ids)
    shape = len(kept), *kept[0].keys.shape[1::2]
    tcp, unix = _client(model, job.pion_port, ""), _client(model, job.pion_port, job.pion_unix)
    restore: dict[str, Callable[[], Any]] = {
        "cold": lambda: restoring.prefill(model, ids),
        "in process, deep copy": lambda: restoring.deep_copy(kept),
        "in process, trimmed": lambda: restoring.trimmed(reused, len(ids)),
        "mlx-lm cache file": lambda: load_prompt_cache(job.cache_file),
        "Pion TCP": lambda: tcp.get_or_prefill(ids),
        "Pion Unix socket": lambda: unix.get_or_prefill(ids),
    }
    if job.redis_port:
        redis = _redis(job.redis_port)
        restore["Redis, one value"] = lambda: restoring.from_redis_one(redis, *shape)
        restore["Redis, a value per array"] = lambda: restoring.from_redis_many(redis, *shape)
    _check_bits({name: restoring.arrays(make()) for name, make in restore.items()})

    firsts: dict[str, set[int]] = {}
    used: list[Any] = []

    def timed(name: str, first: Callable[..., int] = restoring.first_token) -> Callable[[], None]:
        def arm() -> None:
            caches = restore[name]()
            firsts.setdefault(name, set()).add(first(model, question[-1:], caches))
            used.append(caches)

        return arm

    def between() -> None:
        while used:
            restoring.settle(used.pop())

    seconds = interleave({"cold": timed("cold")}, job.cold_rounds, warmup=0, between=between)
    del restore["cold"]
    seconds |= interleave({name: timed(name) for name in restore}, job.rounds, warmup=1, between=between)
    loop = {name: timed(name, restoring.ahead) for name in LOOPED if name in restore}
    loop_seconds = interleave(loop, job.rounds, warmup=1, between=between)
    _expect(len(set().union(*firsts.values())) == 1, f"the arms' first tokens differ: {firsts}")

    before = tcp.stats()["hits"]
    continued = []
    for each in _equality_prompts(encode, job):
        continued.append(restoring.greedy(model, question, tcp.get_or_prefill(each), job.tokens))
    _expect(tcp.stats()["hits"] - before == job.prompts, f"not every prompt was a hit: {tcp.stats()}")
    nbytes = sum(array.nbytes for array in restoring.arrays(kept))
    return {
        "seconds": seconds,
        "loop_seconds": loop_seconds,
        "tokens": continued,
        "prefix_bytes": nbytes,
        "evaluated_tokens": 1,
    }


def _load() -> tuple[Any, Callable[[str], list[int]]]:
    from pion_vllm_mlx.demo_model import load_demo_model

    model, tokenizer = load_demo_model()
    return model, lambda text: tokenizer.encode(text, add_special_tokens=False)


def _client(model: Any, port: int, unix: str) -> Any:
    """A prompt cache that must ask the server: nothing is kept in this process, and a failure is an error."""
    from pion_vllm_mlx import PionPromptCache

    place = {"unix": unix} if unix else {"port": port}
    return PionPromptCache(model, inproc=False, fallback=False, **place)


def _redis(port: int) -> Any:
    import redis

    return redis.Redis(port=port)


def _equality_prompts(encode: Callable[[str], list[int]], job: Job) -> list[list[int]]:
    """Prompts with other texts and other lengths."""
    lengths = prompts.lengths(job.prompts, job.prefix_tokens)
    modules = prompts.MODULES[1 : job.prompts + 1]
    return [prompts.prefix(encode, module, length) for module, length in zip(modules, lengths, strict=True)]


def _check_bits(found: dict[str, list[Any]]) -> None:
    """Every arm must give the very bits that this process computes itself."""
    import numpy as np

    wanted = [np.asarray(array).view(np.uint32) for array in found["cold"]]
    for name, arrays in found.items():
        same = [
            np.array_equal(np.asarray(array).view(np.uint32), want) for array, want in zip(arrays, wanted, strict=True)
        ]
        _expect(all(same), f"{name}: {same.count(False)} of {len(same)} arrays differ from those computed here")


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
