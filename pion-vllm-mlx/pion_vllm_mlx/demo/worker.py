"""One process of the demo: reads a job as JSON from standard input, writes events as JSON lines to standard output.

A job: `mode` is "prefix" (get_or_prefill), "longest" (prepare_prompt) or "reference" (no server); `model`, `system`,
`question`, `new_tokens`, `port`; for a reference `splits`, the token counts at which the prompt is cut. The same cut
gives the same matrix shapes and so, in float32, the same bits.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from pion.compute import device
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.demo.conversation import prefix_length, prompt_ids
from pion_vllm_mlx.prefill import PREFILL_STEP, prefill
from pion_vllm_mlx.prefix_key import token_ids

WARM_UP_TOKENS = 8
DEMO_PREFILL_STEP = 256
"""Small steps, so that the progress bar moves on a CPU. Every process of the demo uses the same."""


def emit(**event: Any) -> None:
    """One line for the parent."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def progress(done: int, total: int) -> None:
    """Tell the parent how far a prefill is."""
    emit(event="progress", done=done, total=total)


def load(path: str) -> tuple[Any, Any]:
    """Model and tokenizer; on a CPU in float32, because MLX is slow there with anything smaller."""
    import mlx.core as mx
    from mlx_lm import load as load_model
    from mlx_lm.utils import dequantize_model

    model, tokenizer = load_model(path)[:2]
    if mx.default_device() == mx.Device(mx.cpu):
        model = dequantize_model(model)
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    return model, tokenizer


def answer(job: dict[str, Any], model: Any, tokenizer: Any) -> dict[str, Any]:
    """Run the job; what happened and how long it took to the first token."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    ids = prompt_ids(tokenizer, job["system"], job["question"])
    prefix = prefix_length(tokenizer, job["system"])
    prefill(model, token_ids(ids[:WARM_UP_TOKENS]))
    restored = 0
    cache = None
    if job["mode"] != "reference":
        cache = PionPromptCache(
            model, tokenizer=tokenizer, port=job["port"], prefill_step=DEMO_PREFILL_STEP, fallback=False
        )
    emit(event="state", text="answering")
    start = time.perf_counter()
    if cache is None:
        splits = job["splits"]
        caches, done = None, 0
        for split in splits:
            caches = prefill(
                model, token_ids(ids)[:split], caches, done=done, step=DEMO_PREFILL_STEP, progress=progress
            )
            done = split
        rest = ids[done:]
    elif job["mode"] == "prefix":
        caches = cache.get_or_prefill(ids[:prefix], progress=progress)
        rest, splits = ids[prefix:], [prefix]
        restored = cache.stats()["tokens_restored"]
    else:
        caches, rest = cache.prepare_prompt(ids, progress=progress)
        restored = cache.stats()["tokens_restored"]
        splits = [n for n in sorted({restored, len(ids) - len(rest)}) if n]
    tokens: list[int] = []
    first_s = 0.0
    steps = generate_step(
        mx.array(rest), model, max_tokens=job["new_tokens"], prompt_cache=caches, prefill_step_size=PREFILL_STEP
    )
    for token, _ in steps:
        if not tokens:
            first_s = time.perf_counter() - start
            emit(event="state", text="generating")
        tokens.append(int(token))
    if cache is not None:
        cache.close()
    ends = set(tokenizer.eos_token_ids)
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return {
        "prompt_tokens": len(ids),
        "restored": restored,
        "evaluated": len(ids) - restored,
        "ttft_s": first_s,
        "tokens": tokens,
        "splits": splits,
        "text": tokenizer.decode(tokens[:stop]).strip(),
    }


def main() -> None:
    """Do the job."""
    job = json.load(sys.stdin)
    device.keep_freed_memory()
    emit(event="state", text="loading the model")
    model, tokenizer = load(job["model"])
    emit(event="result", **answer(job, model, tokenizer))


if __name__ == "__main__":
    main()
