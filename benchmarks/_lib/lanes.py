"""The ways in which a model's attention reaches a stored prefix, each with the caches to generate with.

Imported only in processes that compute; `pion.compute.device.prepare()` has run before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from pion_vllm_mlx import (
    PionPromptCache,
    SparseAuto,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)

Caches = list[Any]

IN_PROCESS, BINARY, RESP = "in process", "binary lane", "RESP"
LANES = IN_PROCESS, BINARY, RESP
WIRE = {BINARY: "binary", RESP: "resp"}

STEP = 512
"""Tokens of one forward pass: the scores of a long text against itself would take gigabytes at once."""


@contextmanager
def patched() -> Iterator[None]:
    """Run with mlx-lm's attention patched; before and after, mlx-lm is what it always is."""
    install_pion_attention_patch()
    try:
        yield
    finally:
        uninstall_pion_attention_patch()


class Lane:
    """A prompt cache of stage 2 that uses one lane only: a failure of the server is an error, not a fallback."""

    def __init__(self, model: Any, name: str, port: int) -> None:
        self._model = model
        wire = {"lane": WIRE[name]} if name in WIRE else {}
        self.client = PionPromptCache(model, stage2=True, inproc=name == IN_PROCESS, fallback=False, port=port, **wire)

    def caches(self, name: str, tokens: int, sparse: SparseAuto | None = None) -> Caches:
        """Caches that stand for a prefix that is stored under a name and, for the lane in process, held."""
        return make_pion_prompt_cache(self._model, name, self.client, tokens, sparse=sparse)

    def hold(self, ids: Sequence[int]) -> None:
        """Fetch a stored prefix: what the lane in process attends to."""
        self.client.get_or_prefill(ids, self.client.namespace(ids))

    def forget(self, ids: Sequence[int]) -> None:
        """Drop a prefix, here and on the server."""
        self.client.drop(self.client.namespace(ids))


def store(client: PionPromptCache, ids: Sequence[int], computed: Caches) -> None:
    """Store what was computed from these tokens just as `get_or_prefill` stores what it computes itself."""
    with mock.patch("pion_vllm_mlx.prompt_cache.prefill", return_value=beginning(computed, len(ids))):
        client.get_or_prefill(ids, client.namespace(ids))


def beginning(caches: Caches, tokens: int) -> Caches:
    """Fresh caches of the first `tokens` rows of others, which stay as they are."""
    found = []
    for each in caches:
        cache = KVCache()
        cache.state = (*(mx.contiguous(array[..., :tokens, :]) for array in (each.keys, each.values)), tokens)
        found.append(cache)
    mx.eval([each.state[:2] for each in found])
    return found


def extend(model: Any, ids: Sequence[int], caches: Caches) -> Caches:
    """Evaluate more tokens into caches, without asking which token comes next: rows are all that is wanted."""
    for first in range(0, len(ids), STEP):
        model.model(mx.array(ids[first : first + STEP])[None], cache=caches)
        mx.eval([each.state[:2] for each in caches])
        mx.clear_cache()
    return caches
