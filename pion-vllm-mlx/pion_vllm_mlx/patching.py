"""The patch of mlx-lm's attention: putting another function in every place of the original, and taking it out again.

`mlx_lm.models.base.scaled_dot_product_attention` is imported by name into each model's module. The patch puts another
function in all of those places; modules imported later take it from `base`. For a cache of Pion's that function lets
the cache compute the attention; everything else goes to mlx-lm's own function, with the very same arguments.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models import base

from pion_vllm_mlx import observing
from pion_vllm_mlx.attention_calls import AttentionCache, Call, Original

CACHE_POSITION: Final = 3
"""Of the cache among mlx-lm's positional arguments."""


class _Installed:
    """The two functions while the patch is in; a record, so that no module holds the original under its own name."""

    def __init__(self, original: Original) -> None:
        self.original: Final = original
        self.patched: Final = _patched(original)


_lock = threading.Lock()
_installed: list[_Installed] = []


def install_pion_attention_patch() -> None:
    """Let Pion's caches compute the attention of mlx-lm's models. A second call does nothing. Thread-safe."""
    with _lock:
        if not _installed:
            entry = _Installed(base.scaled_dot_product_attention)
            _replace(entry.original, entry.patched)
            _installed.append(entry)


def uninstall_pion_attention_patch() -> None:
    """Put mlx-lm's own function back everywhere; does nothing if the patch isn't in. Thread-safe.

    Caches of `make_pion_prompt_cache` that attend on the server raise an error from then on. Those in this process go
    on without the patch, and read everything if they were made with `sparse`.
    """
    with _lock:
        if _installed:
            entry = _installed.pop()
            _replace(entry.patched, entry.original)


def patch_installed() -> bool:
    """Whether the patch is in."""
    return bool(_installed)


def _patched(original: Original) -> Callable[..., mx.array]:
    @functools.wraps(original)
    def pion_scaled_dot_product_attention(*args: Any, **kwargs: Any) -> mx.array:
        cache = kwargs["cache"] if "cache" in kwargs else args[CACHE_POSITION] if len(args) > CACHE_POSITION else None
        if isinstance(cache, AttentionCache):
            return cache.attend(original, Call.of(*args, **kwargs))
        observing.saw_another_call()
        return original(*args, **kwargs)

    return pion_scaled_dot_product_attention


def _replace(old: Any, new: Any) -> None:
    for module, name in _holders(old):
        setattr(module, name, new)


def _holders(function: Any) -> Iterator[tuple[Any, str]]:
    """Each module that has this very function, and under which name; looked for without importing or computing."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is function:
                yield module, name
