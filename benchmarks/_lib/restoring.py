"""The ways a cache that someone computed becomes a cache to generate with, and the first token from it.

Imported only in the processes that compute; `pion.compute.device.prepare()` has run before.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache

Caches = list[Any]

KEY = "bench:ttft"
"""Redis key of the whole prefix; with `:<layer>:k` or `:v` behind it, of one array."""


def first_token(model: Any, ids: Sequence[int], caches: Caches) -> int:
    """The first greedy token: one step of the model.

    mlx-lm's loop hands its first token out behind a call that schedules the second one. On a CPU that call returns when
    the second one is nearly computed too (`ahead` measures it), which would count a step twice in every arm.
    """
    return int(mx.argmax(model(mx.array(ids)[None], cache=caches)[0, -1]))


def ahead(model: Any, ids: Sequence[int], caches: Caches) -> int:
    """The first greedy token as mlx-lm's `generate_step` yields it; the second one has begun, see `settle`."""
    steps = generate_step(mx.array(ids), model, prompt_cache=caches, max_tokens=1)
    token, _ = next(steps)
    return int(token)


def settle(caches: Caches) -> None:
    """Wait for a step that was computed ahead, so that it does not run into the next measurement."""
    mx.eval([each.state[:2] for each in caches])


def greedy(model: Any, ids: Sequence[int], caches: Caches, count: int) -> list[int]:
    """`count` greedy tokens."""
    return [int(token) for token, _ in generate_step(mx.array(ids), model, prompt_cache=caches, max_tokens=count)]


def prefill(model: Any, ids: Sequence[int]) -> Caches:
    """A cache of exactly these tokens, computed here."""
    caches = make_prompt_cache(model)
    model(mx.array(ids)[None], cache=caches)
    mx.eval([each.state[:2] for each in caches])
    return caches


def arrays(caches: Caches) -> list[Any]:
    """K and V of every layer, cut to the tokens they hold: [1, heads, tokens, head_dim] each."""
    return [mx.contiguous(array[..., : each.offset, :]) for each in caches for array in (each.keys, each.values)]


def deep_copy(kept: Caches) -> Caches:
    """The kept cache stays as it was, as mlx-lm's server does it."""
    return copy.deepcopy(kept)


def trimmed(kept: Caches, tokens: int) -> Caches:
    """The kept cache itself, what the last request appended cut off: one user at a time."""
    trim_prompt_cache(kept, kept[0].offset - tokens)
    return kept


def _cache(keys: Any, values: Any) -> Any:
    cache = KVCache()
    cache.state = (keys, values, keys.shape[2])
    return cache


def to_redis(client: Any, caches: Caches) -> None:
    """Both layouts: every array under a key of its own, and all in one value."""
    found = [np.asarray(memoryview(array)) for array in arrays(caches)]
    for number, array in enumerate(found):
        client.set(f"{KEY}:{number // 2}:{'kv'[number % 2]}", array.tobytes())
    client.set(KEY, np.stack(found).tobytes())


def from_redis_one(client: Any, layers: int, heads: int, head_dim: int) -> Caches:
    """GET of one value, split."""
    flat = np.frombuffer(client.get(KEY), np.float32).reshape(layers, 2, 1, heads, -1, head_dim)
    return [_cache(mx.array(keys), mx.array(values)) for keys, values in flat]


def from_redis_many(client: Any, layers: int, heads: int, head_dim: int) -> Caches:
    """MGET of a value per layer and side: one round trip."""
    names = [f"{KEY}:{layer}:{side}" for layer in range(layers) for side in "kv"]
    found = [mx.array(np.frombuffer(value, np.float32).reshape(1, heads, -1, head_dim)) for value in client.mget(names)]
    return [_cache(keys, values) for keys, values in zip(found[::2], found[1::2], strict=True)]
