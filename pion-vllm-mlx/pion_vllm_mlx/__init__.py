"""Pion for mlx-lm: prompt caches computed once, used by every process.

On Linux this loads the BLAS that makes MLX fast (see `pion.compute.device`), best before `mlx` is imported.
"""

from __future__ import annotations

import logging

from pion.compute import device

_blas = device.prepare()  # before anything below imports mlx
if not _blas.fast:
    logging.getLogger("pion.mlx").warning("matrix products will be slow: %s", _blas.detail)

from pion_vllm_mlx.attention_calls import UnsupportedAttentionError  # noqa: E402
from pion_vllm_mlx.mlx_lm_patch import (  # noqa: E402
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)
from pion_vllm_mlx.prompt_cache import PionPromptCache  # noqa: E402
from pion_vllm_mlx.slots import UnsupportedCacheError  # noqa: E402
from pion_vllm_mlx.sparse import SparseAuto  # noqa: E402
from pion_vllm_mlx.threads import release_at_thread_end  # noqa: E402

__all__ = [
    "PionPromptCache",
    "SparseAuto",
    "UnsupportedAttentionError",
    "UnsupportedCacheError",
    "install_pion_attention_patch",
    "make_pion_prompt_cache",
    "release_at_thread_end",
    "uninstall_pion_attention_patch",
]
