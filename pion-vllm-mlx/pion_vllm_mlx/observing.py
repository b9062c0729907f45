"""Whether a model's attention can be split into a prefix elsewhere and a suffix here: found by watching it.

The model is run, without evaluating anything, on caches that only watch. Each must be updated once a pass, and exactly
what came out of it must reach the shared attention function, together with that cache. A model that has an attention
of its own, changes keys after taking them (a compressed cache), lets layers share rows, or asks for a window, sinks or
a bias does something else in that pass, and is refused with a text that says what.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from pion_vllm_mlx.attention_calls import (
    AttentionCache,
    Call,
    Original,
    SuffixMasks,
    UnsupportedAttentionError,
    check_call,
    refuse,
)

PREFIX_ROWS: Final = 4
PASSES: Final = (3, 1)
"""Tokens of the passes that are watched: some models do something else for a single one."""

_watch = threading.local()


def saw_another_call() -> None:
    """The patched function passed on a call that had no cache of ours."""
    if getattr(_watch, "on", False):
        _watch.others += 1


def watch(model: Any, layers: int) -> None:
    """Raise UnsupportedAttentionError, naming the model, if its attention can't be split.

    `layers` is the number of its caches. The patch must be installed.
    """
    name = type(model).__module__.rpartition(".")[2]
    try:
        for count in PASSES:
            _pass(model, [_WatchingCache() for _ in range(layers)], count)
    except UnsupportedAttentionError as error:
        msg = f"{name}: {error}"
        raise UnsupportedAttentionError(msg) from None
    except Exception as error:  # a model may do anything with a cache it doesn't know
        msg = f"{name}: its attention does more with the rows of a cache than pass them on"
        raise UnsupportedAttentionError(msg) from error


def _pass(model: Any, caches: Sequence[_WatchingCache], count: int) -> None:
    with _watching():
        model(mx.array([[1] * count]), cache=list(caches))
        others = _watch.others
    if others:
        refuse(f"{others} calls without the cache that the rows came from (rows shared between layers, for example)")
    for cache in caches:
        if cache.calls != 1:
            refuse(
                f"a function of its own: of the rows of one layer, {cache.calls} calls of scaled_dot_product_attention "
                "were seen instead of one"
            )


@contextmanager
def _watching() -> Iterator[None]:
    _watch.on, _watch.others = True, 0
    try:
        yield
    finally:
        _watch.on = False


class _WatchingCache(AttentionCache, KVCache):
    """Pretends to hold a prefix; knows what it gave out and what of that came back."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = PREFIX_ROWS
        self.calls = 0
        self._fetched: tuple[Any, Any] | None = None
        self._masks = SuffixMasks()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._fetched is not None:
            refuse("the cache of one layer twice in a pass")
        # Other objects than came in: a model that goes on with its own arrays is noticed.
        self._fetched = keys[:], values[:]
        self.offset += keys.shape[2]
        return self._fetched

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        window = kwargs.get("window_size")
        if window is not None:
            refuse(f"a sliding window of {window} tokens")
        return super().make_mask(*args, **kwargs)

    def attend(self, original: Original, call: Call) -> mx.array:
        fetched = self._fetched
        if fetched is None or fetched[0] is not call.keys or fetched[1] is not call.values:
            refuse("keys or values that it changed after taking them from the cache (a compressed form, say)")
        check_call(call, PREFIX_ROWS)
        self._masks.of(call.mask, PREFIX_ROWS)
        self.calls += 1
        return mx.zeros((*call.queries.shape[:-1], call.values.shape[-1]), call.queries.dtype)
