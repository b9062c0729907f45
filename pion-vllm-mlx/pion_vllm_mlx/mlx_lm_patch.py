"""mlx-lm's models on prefixes that Pion stores: the caches to generate with. See `patching.py` for the patch itself."""

from __future__ import annotations

import functools
import os
from typing import Any, Final

from pion_vllm_mlx.claims import Namespace
from pion_vllm_mlx.inproc import PrefixKVCache
from pion_vllm_mlx.patching import install_pion_attention_patch, patch_installed, uninstall_pion_attention_patch
from pion_vllm_mlx.prompt_cache import PionPromptCache
from pion_vllm_mlx.sparse import SparseAuto, SparsePrefixKVCache
from pion_vllm_mlx.wire_cache import WireKVCache, WirePrefix

__all__ = ["install_pion_attention_patch", "make_pion_prompt_cache", "uninstall_pion_attention_patch"]

NO_INPROC: Final = "PION_PROMPT_CACHE_NO_INPROC"
"""Environment variable: set to 1 to attend on the server even to prefixes that this process holds."""


def make_pion_prompt_cache(
    model: Any,
    ns: Namespace,
    pc: PionPromptCache,
    n: int,
    *,
    sparse: SparseAuto | tuple[int, int] | None = None,
) -> list[Any]:
    """A prompt cache for mlx-lm that begins with the `n` tokens stored under `ns`: evaluate only what follows them.

    In-process, if `pc` holds the prefix (it does after `get_or_prefill`, unless `inproc=False` or the environment has
    PION_PROMPT_CACHE_NO_INPROC=1): mlx-lm's own caches, the prefix in their buffers. Else the prefix stays on the
    server: queries travel there, over the binary lane if there is one, and what comes back is merged with the
    attention to what follows.

    Args:
        model: the model that `pc` was made for.
        ns: the namespace.
        pc: made with `stage2=True`.
        n: tokens of the prefix; all that the namespace holds.
        sparse: `SparseAuto(block, top)`, or (block, top): while decoding, each query head reads only the `top` blocks
            of `block` prefix rows that fit it best. The answer then is an approximation.

    The server is asked now whether it is ready. If it is away and `pc` has `fallback`, the rows are fetched or computed
    as soon as they are needed. Raises RuntimeError if the patch isn't installed, UnsupportedAttentionError for a model
    whose attention can't be split that way (in-process that matters only with `sparse`), LookupError if nothing of this
    model is stored under `ns` and this process doesn't know its tokens, ValueError for another `n`, another model, or a
    `pc` without stage2.
    """
    if not pc.stage2:
        msg = "pc must be made with PionPromptCache(model, stage2=True)"
        raise ValueError(msg)
    if model is not pc.model:
        msg = "model must be the one that pc was made for"
        raise ValueError(msg)
    if isinstance(sparse, tuple):
        sparse = SparseAuto(*sparse)
    if not patch_installed():
        msg = "call install_pion_attention_patch() first"
        raise RuntimeError(msg)
    held = None if os.environ.get(NO_INPROC) == "1" else pc._held(ns)
    if held is not None:
        _check_count(ns, n, len(held.ids))
        if sparse is None:
            return held.caches(PrefixKVCache)
        pc._check_attention()
        return held.caches(functools.partial(SparsePrefixKVCache, sparse=sparse))
    pc._check_attention()
    remote = pc._remote_prefix(ns)
    _check_count(ns, n, remote.tokens)
    prefix = WirePrefix(remote, n, sparse)
    return [WireKVCache(prefix, layer) for layer in range(len(pc._slots))]


def _check_count(ns: Namespace, n: int, tokens: int) -> None:
    if n != tokens:
        msg = f"n is {n}, but the namespace {ns!r} holds {tokens} tokens; it must be all of them"
        raise ValueError(msg)
