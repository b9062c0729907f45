"""Helpers for tests: a tiny model that needs no download, and an exact comparison of caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama

TINY_VOCABULARY = 512


def make_tiny_model(seed: int = 0, dtype: Any = mx.float32, **changes: Any) -> Any:
    """A llama of two layers with random weights; the same seed gives the same model in every process.

    `changes` are fields of mlx-lm's llama ModelArgs, `num_hidden_layers=4` say.
    """
    settings = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": TINY_VOCABULARY,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict({**settings, **changes}))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def random_tokens(count: int, seed: int = 1) -> list[int]:
    """Token ids of the tiny model."""
    return [int(token) for token in np.random.default_rng(seed).integers(1, TINY_VOCABULARY, count)]


def greedy(model: Any, caches: list[Any], rest: list[int], count: int) -> list[int]:
    """The next `count` tokens after `rest`, each the most likely one; the caches are used up."""
    tokens = []
    ids = mx.array(rest)
    for _ in range(count):
        logits = model(ids[None], cache=caches)
        tokens.append(int(mx.argmax(logits[0, -1]).item()))
        ids = mx.array(tokens[-1:])
    return tokens


def same_bits(left: list[Any], right: list[Any]) -> bool:
    """Whether two lists of KVCache hold the same classes, offsets, element types and bits, NaN payloads included."""
    if [type(cache) for cache in left] != [type(cache) for cache in right]:
        return False
    return all(_bits(a) == _bits(b) for a, b in zip(left, right, strict=True))


def _bits(cache: Any) -> list[Any]:
    held = [mx.contiguous(array[..., : cache.offset, :]) for array in (cache.keys, cache.values)]
    mx.eval(held)
    return [cache.offset, *((str(array.dtype), array.shape, bytes(memoryview(array).cast("B"))) for array in held)]
