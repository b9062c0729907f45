"""Computing the rows of a prefix, in steps, as mlx-lm's own generator does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from pion_vllm_mlx.prefix_key import TokenIds

PREFILL_STEP: Final = 2048
"""Tokens of one forward pass, mlx-lm's own default: the same split gives the same bits."""

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all), first with what was restored, last with all of them."""


class Watched:
    """A progress callback, and the time spent in it."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self.spent_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        """As Progress."""
        if self._progress is not None:
            start = time.perf_counter()
            self._progress(done, total)
            self.spent_s += time.perf_counter() - start


def prefill(
    model: Any,
    ids: TokenIds,
    caches: list[Any] | None = None,
    *,
    done: int = 0,
    step: int = PREFILL_STEP,
    progress: Progress | None = None,
) -> list[Any]:
    """Evaluate tokens `done` and up into `caches` (fresh ones when None) and return them, evaluated.

    An exception of `progress` ends it; the caches then hold a part and should be thrown away.
    """
    caches = make_prompt_cache(model) if caches is None else caches
    tell = progress or (lambda _done, _total: None)
    tell(done, len(ids))
    while done < len(ids):
        end = min(done + step, len(ids))
        model(mx.array(ids[done:end])[None], cache=caches)
        mx.eval([cache.state for cache in caches])
        mx.clear_cache()
        done = end
        tell(done, len(ids))
    return caches
