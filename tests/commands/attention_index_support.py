"""What the tests of attention indexes share: a server with nothing else in it, random rows, and the oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pion.commands.attention_index_common import Indexes, indexes_of
from pion.config import Config
from pion.testing import Harness, make_harness
from tests.commands.kv_support import plain

Floats = np.ndarray[Any, np.dtype[np.float32]]


def make(**options: Any) -> Harness:
    return make_harness(Config(plugins="vstore,kvprefix,attention_index", **options))


def state_of(harness: Harness) -> Indexes:
    return indexes_of(harness.services)


def random_rows(seed: int, count: int, dim: int) -> tuple[Floats, Floats]:
    numbers = np.random.default_rng(seed)
    return (
        numbers.standard_normal((count, dim), np.float32),
        numbers.standard_normal((count, dim), np.float32),
    )


async def store(harness: Harness, name: str | bytes, keys: Floats, values: Floats) -> Any:
    return plain(await harness.call("KV.STORE", name, *keys.shape, keys.tobytes(), values.tobytes()))


async def ask(harness: Harness, name: str, top_k: int, q: Floats) -> Floats:
    answer = plain(await harness.call("ATTEND.QUERY", name, top_k, q.tobytes()))
    assert isinstance(answer, bytes), answer
    return np.frombuffer(answer, np.float32).reshape(q.shape)


def oracle(q: Floats, keys: Floats, values: Floats, top_k: int = 0) -> np.ndarray[Any, Any]:
    """In float64, one vector after the other; of equal scores the row that comes first."""
    found = []
    for vector in q.astype(np.float64):
        scores = keys.astype(np.float64) @ vector / math.sqrt(keys.shape[1])
        rows = np.arange(len(keys))
        if 0 < top_k < len(keys):
            rows = np.sort(np.argsort(-scores, kind="stable")[:top_k])
        weights = np.exp(scores[rows] - scores[rows].max())
        found.append((weights / weights.sum()) @ values[rows].astype(np.float64))
    return np.array(found)
