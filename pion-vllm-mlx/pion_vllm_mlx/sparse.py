"""Sparse attention over a prefix that this process holds: the rows of the blocks whose mean key fits the query best.

The same choice as the server's `QUERY_SPARSE_AUTO`: blocks of `block` rows, scored by query times mean key, the `top`
best per query head, and every row of the suffix. It is for decoding, one query at a time; several queries at once (a
prompt's rest) attend to everything.
"""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx
from mlx_lm.models.cache import KVCache

from pion_vllm_mlx.attention_calls import AttentionCache, Call, Original, check_call
from pion_vllm_mlx.inproc import Cell, PrefixKVCache


@attrs.frozen
class SparseAuto:
    """How much of a prefix each query head reads: `top` blocks of `block` rows. Raises ValueError below 1."""

    block: int
    top: int

    def __attrs_post_init__(self) -> None:
        if self.block < 1 or self.top < 1:
            msg = f"sparse needs block and top of 1 or more, not {self.block} and {self.top}"
            raise ValueError(msg)

    def leaves_out(self, prefix: int) -> bool:
        """Whether a prefix of this many rows has more blocks than are read."""
        return -(-prefix // self.block) > self.top


class SparsePrefixKVCache(AttentionCache, PrefixKVCache):
    """A PrefixKVCache whose single queries read the best blocks of the prefix; the patched function asks it."""

    def __init__(self, cell: Cell, prefix: int, sparse: SparseAuto) -> None:
        super().__init__(cell, prefix)
        self._sparse = sparse
        self._means: tuple[int, mx.array] | None = None

    def attend(self, original: Original, call: Call) -> mx.array:
        """See AttentionCache."""
        several = call.queries.shape[2] > 1 or isinstance(call.mask, mx.array)
        if several or self.offset <= self.prefix or not self._sparse.leaves_out(self.prefix):
            return original(call.queries, call.keys, call.values, None, call.scale, call.mask, sinks=call.sinks)
        check_call(call, 0)
        return original(*self._chosen(call))

    def _chosen(self, call: Call) -> tuple[Any, ...]:
        """Arguments for mlx-lm's function: the chosen rows of the prefix, then the suffix, per query head."""
        _, heads, _, dim = call.queries.shape
        kv_heads, block, prefix = call.keys.shape[1], self._sparse.block, self.prefix
        if self._means is None or self._means[0] != prefix:
            self._means = prefix, _block_means(call.keys[0, :, :prefix], block)
        grouped = call.queries.astype(mx.float32).reshape(kv_heads, -1, dim)
        scores = grouped @ self._means[1].swapaxes(-1, -2)
        blocks = mx.argpartition(-scores, self._sparse.top - 1, axis=-1)[..., : self._sparse.top]
        rows = (blocks[..., None] * block + mx.arange(block)).reshape(kv_heads, -1)
        there = (rows < prefix).reshape(1, heads, 1, -1)  # the last block may be short
        rows = mx.minimum(rows, prefix - 1)
        head = mx.arange(kv_heads)[:, None]
        repeats = heads // kv_heads

        def whole(array: mx.array) -> mx.array:
            chosen = array[0][head, rows].reshape(1, heads, -1, array.shape[-1])
            return mx.concatenate([chosen, mx.repeat(array[:, :, prefix:], repeats, axis=1)], axis=2)

        length = call.keys.shape[2] - prefix
        behind = mx.ones((1, heads, 1, length), mx.bool_)
        visible = mx.concatenate([there, behind], axis=-1)
        return call.queries, whole(call.keys), whole(call.values), None, call.scale, visible


SparsePrefixKVCache.__name__ = KVCache.__name__  # as PrefixKVCache; what was saved is loaded as a dense one


def _block_means(keys: mx.array, block: int) -> mx.array:
    """float32 `[heads, blocks, dim]` of keys `[heads, rows, dim]`; the last block may be short."""
    heads, rows, dim = keys.shape
    whole = rows // block * block
    wide = keys.astype(mx.float32)
    parts = [wide[:, :whole].reshape(heads, -1, block, dim).mean(axis=2)]
    if whole < rows:
        parts.append(wide[:, whole:].mean(axis=1, keepdims=True))
    return mx.concatenate(parts, axis=1)
