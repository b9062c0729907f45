"""Helpers for tests: a tiny model that needs no download, an exact comparison of caches, a server's attention."""

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


class NumpyRemote:
    """The rows of some caches, attended to in float64: what a server does, for tests of the other side.

    It is both the `wire_cache.Remote` and the client that questions are put to.
    """

    def __init__(self, caches: list[Any]) -> None:
        self._caches = caches
        self._rows = [
            [np.array(array.astype(mx.float32)[0], np.float64) for array in cache.keys_and_values()] for cache in caches
        ]
        self.tokens = caches[0].offset
        self.calls: list[str] = []
        self.away = False

    def attend(self, question: Any) -> Any:
        """See `wire_cache.Remote`."""
        return None if self.away else question(self, "session")

    def rows(self) -> list[Any]:
        """See `wire_cache.Remote`."""
        return self._caches

    def attend_query(self, _session: Any, layer: int, q: Any, *, lse: bool = False) -> Any:
        """As `PionClient`; q is `[H_kv, M, D]`."""
        self.calls.append("query")
        keys, values = self._rows[layer]
        output, total = attention64(q, keys, values)
        return (output, total) if lse else output

    def attend_query_sparse_auto_fused(
        self, _session: Any, layer: int, q: Any, keys: Any, values: Any, head_map: Any, *, block: int, top: int
    ) -> Any:
        """As `PionClient`."""
        self.calls.append("sparse")
        outputs = []
        for head, kv_head in enumerate(head_map):
            prefix = self._rows[layer][0][kv_head]
            parts = [range(i, min(i + block, len(prefix))) for i in range(0, len(prefix), block)]
            scores = [float(prefix[list(part)].mean(axis=0) @ q[head, 0]) for part in parts]
            best = [row for i in np.argsort(scores)[::-1][:top] for row in parts[i]]
            rows = [
                np.concatenate([side[kv_head][best], own[kv_head]])[None]
                for side, own in zip(self._rows[layer], (keys, values), strict=True)
            ]
            outputs.append(attention64(q[head : head + 1], *rows)[0])
        return np.concatenate(outputs)


def attention64(q: Any, keys: Any, values: Any) -> tuple[Any, Any]:
    """(output, LSE) of attention without a mask, computed in float64 and returned as float32."""
    scores = np.asarray(q, np.float64) @ np.swapaxes(np.asarray(keys, np.float64), -1, -2) / np.sqrt(q.shape[-1])
    highest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    lse = (highest + np.log(total))[..., 0]
    return (weights / total @ values).astype(np.float32), lse.astype(np.float32)
