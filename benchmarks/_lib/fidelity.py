"""The process of `quality` that has the model: it computes, stores, fetches and answers.

`python -m benchmarks._lib.fidelity JOB.json RESULT.json`. What it does is in `quality.py`'s METHOD.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from benchmarks._lib import prompts
from benchmarks._lib.agreement import MeanAbsolute

BEFORE, BEHIND = "<|im_start|>system\n", "\n<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""The model's chat template around the prefix and the question."""

QUESTIONS = (
    "What does this code do? Explain it step by step.",
    "Which functions and classes are in this code, and what is each for?",
    "Write a short example that uses this code.",
    "What can go wrong when this code is used?",
    "Describe this code to someone who is new to Python.",
)

Encode = Callable[[str], list[int]]


@attrs.frozen(kw_only=True)
class Job:
    """What the process is told. `formats` and `schemas` map an arm's name to (vquant, boundary_protect)."""

    pion_port: int
    formats: dict[str, tuple[str, int]]
    prompts: int
    longest: int
    """Tokens of the longest prefix of the first part."""

    schemas: dict[str, tuple[str, int]]
    schema_prompts: int
    questions: int
    prefix_tokens: int
    """Tokens of each prefix of the second part."""

    tokens: int


def formats(job: Job, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Every prompt once from what was computed, and from what was stored in each format."""
    from benchmarks._lib import restoring
    from pion.client import PionClient
    from pion_vllm_mlx.prefix_key import Layout
    from pion_vllm_mlx.slots import probe

    encode = _encoder(tokenizer)
    slots = probe(model)
    runs = {arm: Layout.of(slots, *choice).runs(slots) for arm, choice in job.formats.items()}
    keys, values = ({arm: MeanAbsolute() for arm in runs} for _ in "kv")
    nbytes = dict.fromkeys(runs, 0)
    tokens: dict[str, list[list[int]]] = {arm: [] for arm in ("computed", "fetched alone", *runs)}
    chosen: dict[str, list[list[int]]] = {arm: [] for arm in runs}
    total = 0
    lengths = prompts.lengths(job.prompts, job.longest)
    with PionClient(port=job.pion_port) as client:
        for number, length in enumerate(lengths):
            ids = _prefix(encode, prompts.MODULES[number], length)
            rest = _question(encode, number)
            computed = restoring.prefill(model, ids)
            wanted = [_rows(array) for array in restoring.arrays(computed)]
            found: dict[str, list[Any]] = {}
            for arm, sides in runs.items():
                found[arm], stored = _through(client, f"quality:{arm}", sides, wanted)
                nbytes[arm] += stored
                for index, (one, other) in enumerate(zip(wanted, found[arm], strict=True)):
                    (values if index % 2 else keys)[arm].add(one, other)
            total += length
            heads = slots[0].keys.heads
            tokens["computed"].append(restoring.greedy(model, rest, computed, job.tokens))
            alone = _caches([found["fp32"]], heads)
            tokens["fetched alone"].append(restoring.greedy(model, rest, alone, job.tokens))
            caches = _caches(list(found.values()), heads)
            batch = _greedy_batch(model, rest, caches, job.tokens)
            choices = _choices(model, tokens["computed"][-1], batch, caches)
            for arm, each, choice in zip(found, batch, choices, strict=True):
                tokens[arm].append(each)
                chosen[arm].append(choice)
    return {
        "tokens": tokens,
        "chosen": chosen,
        "texts": {arm: [tokenizer.decode(each) for each in answers] for arm, answers in tokens.items()},
        "errors": {arm: [keys[arm].error, values[arm].error] for arm in runs},
        "sizes": [keys["fp32"].size, values["fp32"].size],
        "bytes_per_token": {arm: nbytes[arm] / total for arm in runs},
    }


def schemas(job: Job, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Answers to questions about prefixes that another client stored, whole and with a schema, and without a store."""
    from benchmarks._lib import restoring
    from pion.client import PionClient

    encode = _encoder(tokenizer)
    arms = ("cold", *job.schemas)
    tokens: dict[str, list[list[int]]] = {arm: [] for arm in arms}
    first_s: dict[str, list[float]] = {arm: [] for arm in arms}
    decode_s: dict[str, list[float]] = {arm: [] for arm in arms}
    nbytes = dict.fromkeys(job.schemas, 0)
    readers = {arm: _prompt_cache(model, job.pion_port, choice) for arm, choice in job.schemas.items()}
    for number in range(job.schema_prompts):
        ids = _prefix(encode, prompts.MODULES[number], job.prefix_tokens)
        make: dict[str, Callable[[], Any]] = {"cold": lambda ids=ids: restoring.prefill(model, ids)}
        for arm, choice in job.schemas.items():
            name = f"quality:schema:{number}:{arm}"
            with _prompt_cache(model, job.pion_port, choice) as writer, PionClient(port=job.pion_port) as client:
                writer.get_or_prefill(ids, name)
                nbytes[arm] += sum(client.v_info(name + side).bytes for side in ("_pk", "_pv"))
            make[arm] = lambda arm=arm, name=name, ids=ids: readers[arm].get_or_prefill(ids, name)
            make[arm]()  # the first call also opens the connection
        for question in range(job.questions):
            rest = _question(encode, question)
            turn = (number + question) % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                answer, first, decode = _timed_answer(model, rest, make[arm], job.tokens)
                tokens[arm].append(answer)
                first_s[arm].append(first)
                decode_s[arm].append(decode)
    for arm, reader in readers.items():
        statistics = reader.stats()
        if statistics["hits"] != job.schema_prompts * (job.questions + 1):
            raise AssertionError(f"{arm}: not every call was a hit: {statistics}")
        reader.close()
    total = job.schema_prompts * job.prefix_tokens
    return {
        "tokens": tokens,
        "first_s": first_s,
        "decode_s": decode_s,
        "bytes_per_token": {arm: stored / total for arm, stored in nbytes.items()},
    }


def _encoder(tokenizer: Any) -> Encode:
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def _prefix(encode: Encode, module: str, tokens: int) -> list[int]:
    start = encode(BEFORE)
    return start + prompts.prefix(encode, module, tokens - len(start))


def _question(encode: Encode, number: int) -> list[int]:
    return encode(BEHIND.format(QUESTIONS[number % len(QUESTIONS)]))


def _prompt_cache(model: Any, port: int, choice: Sequence[Any]) -> Any:
    """A prompt cache that must ask the server: nothing is kept in this process, and a failure is an error."""
    from pion_vllm_mlx import PionPromptCache

    vquant, boundary_protect = choice
    return PionPromptCache(
        model, vquant=vquant, boundary_protect=boundary_protect, inproc=False, fallback=False, port=port
    )


def _rows(array: Any) -> Any:
    """[1, heads, tokens, head_dim] of MLX as rows, (tokens, heads * head_dim) fp32."""
    values = np.asarray(memoryview(array))[0].transpose(1, 0, 2)
    return np.ascontiguousarray(values).reshape(values.shape[0], -1)


def _through(client: Any, name: str, sides: tuple[str, str], rows: list[Any]) -> tuple[list[Any], int]:
    """(the rows after the store, the bytes it kept them in); K and V take turns. Nothing stays stored."""
    from pion.client.records import Layer, Stored

    layers = [Layer(keys, values) for keys, values in zip(rows[::2], rows[1::2], strict=True)]
    if client.store_prefix(name, *sides, layers, len(rows[0]), as_="fp32") is not Stored.STORED:
        raise AssertionError(f"{name} was not stored")
    found = [
        flat.reshape(wanted.shape) for flat, wanted in zip(client.prefix_fetch(name, as_="fp32"), rows, strict=True)
    ]
    stored = sum(client.v_info(name + side).bytes for side in ("_pk", "_pv"))
    client.prefix_drop(name)
    return found, stored


def _caches(batch: list[list[Any]], heads: int) -> list[Any]:
    """A fresh KVCache per layer, whose batch entries are these prefixes; all have the same number of tokens."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    caches = []
    for layer in range(0, len(batch[0]), 2):
        tokens = len(batch[0][layer])
        sides = [np.stack([prefix[layer + side] for prefix in batch]) for side in (0, 1)]
        keys, values = (
            mx.contiguous(mx.array(side.reshape(len(batch), tokens, heads, -1)).transpose(0, 2, 1, 3)) for side in sides
        )
        mx.eval(keys, values)
        cache = KVCache()
        cache.state = (keys, values, tokens)
        caches.append(cache)
    return caches


def _greedy_batch(model: Any, ids: list[int], caches: list[Any], count: int) -> list[list[int]]:
    """`count` greedy tokens behind each batch entry, with the same steps as mlx-lm's generate_step, which takes one."""
    import mlx.core as mx

    size = caches[0].keys.shape[0]
    model(mx.array([ids[:-1]] * size), cache=caches)
    mx.eval([(cache.keys, cache.values) for cache in caches])
    token = mx.array([ids[-1:]] * size)
    taken = []
    for _ in range(count):
        token = mx.argmax(model(token, cache=caches)[:, -1], axis=-1, keepdims=True)
        mx.eval(token)
        taken.append(token[:, 0].tolist())
    return [list(answer) for answer in zip(*taken, strict=True)]


def _choices(model: Any, wanted: list[int], batch: list[list[int]], caches: list[Any]) -> list[list[int]]:
    """The token that each entry finds most likely at each place behind the wanted ones; ends what `caches` hold."""
    import mlx.core as mx
    from mlx_lm.models.cache import trim_prompt_cache

    trim_prompt_cache(caches, len(wanted) - 1)  # the last token of an answer was never evaluated
    chosen = mx.argmax(model(mx.array([wanted[:-1]] * len(batch)), cache=caches), axis=-1)
    mx.eval(chosen)
    return [answer[:1] + choice for answer, choice in zip(batch, chosen.tolist(), strict=True)]


def _timed_answer(model: Any, ids: list[int], make: Callable[[], Any], count: int) -> tuple[list[int], float, float]:
    """(tokens, seconds to the first one, seconds from there to the last), from having the token ids on."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    start = time.perf_counter()
    steps = generate_step(mx.array(ids), model, prompt_cache=make(), max_tokens=count)
    answer = [int(next(steps)[0])]
    first = time.perf_counter()
    answer += [int(token) for token, _ in steps]
    return answer, first - start, time.perf_counter() - first


def main() -> None:
    """Run both parts."""
    from pion_vllm_mlx.demo_model import load_demo_model

    job_file, result_file = sys.argv[1:]
    job = Job(**json.loads(Path(job_file).read_text(encoding="utf-8")))
    model, tokenizer = load_demo_model()
    result = {"formats": formats(job, model, tokenizer), "schemas": schemas(job, model, tokenizer)}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
