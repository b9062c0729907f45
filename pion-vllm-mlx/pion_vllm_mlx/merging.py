"""Attention over two parts of a text, computed apart and merged by online softmax.

Each part gives its output and the natural log of its sum of exponentials (LSE). The weights of the parts in the whole
are the softmax of the two LSEs, so the merged output is the attention over both, whatever the parts are.

Arrays are MLX's: queries `[1, H_q, M, D]`, keys and values `[1, H_kv, S, D]`, outputs float32 `[1, H_q, M, D]`, LSEs
float32 `[1, H_q, M, 1]`.
"""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx

SCORE_BYTES: Final = 64 << 20
"""Scores computed at once: a long suffix takes its queries in pieces of this size."""

Mask = Any
"""As mlx-lm's models pass it: None, "causal", or an array of booleans or of numbers to be added."""


def suffix_attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask) -> tuple[Any, Any]:
    """(output, LSE) of plain attention, not evaluated.

    "causal" is aligned at the end: query i of M sees rows j <= S - M + i. An array is `[..., M, S]`.
    """
    heads, count, length = queries.shape[1], queries.shape[2], keys.shape[2]
    step = max(1, SCORE_BYTES // (4 * heads * length))
    parts = [
        _attend(queries[:, :, first : first + step], keys, values, scale, _part(mask, first, step, count, length))
        for first in range(0, count, step)
    ]
    if len(parts) == 1:
        return parts[0]
    return mx.concatenate([output for output, _ in parts], axis=2), mx.concatenate([lse for _, lse in parts], axis=2)


def merge(output: mx.array, lse: mx.array, other_output: mx.array, other_lse: mx.array) -> mx.array:
    """The attention over both parts, float32."""
    whole = mx.logaddexp(lse, other_lse)
    return output * mx.exp(lse - whole) + other_output * mx.exp(other_lse - whole)


def _part(mask: Mask, first: int, step: int, count: int, length: int) -> mx.array | None:
    """The rows of the mask for `step` queries from `first` on, as an array; None if they see everything."""
    if mask is None:
        return None
    if isinstance(mask, str):
        if count == 1:
            return None
        last = mx.arange(first, min(first + step, count))[:, None] + (length - count)
        return mx.arange(length)[None] <= last
    return mask[..., first : first + step, :] if mask.shape[-2] > 1 else mask


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None
) -> tuple[Any, Any]:
    batch, heads, count, dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = (queries.astype(mx.float32) * scale).reshape(batch, kv_heads, -1, count, dim)
    scores = grouped @ keys.astype(mx.float32)[:, :, None].swapaxes(-1, -2)
    if mask is not None:
        scores = scores.reshape(batch, heads, count, -1)
        # A finite lowest score: a query that sees no row gets a weight of zero in the whole, not NaN.
        lowest = mx.finfo(mx.float32).min
        scores = mx.where(mask, scores, lowest) if mask.dtype == mx.bool_ else mx.maximum(scores + mask, lowest)
        scores = scores.reshape(batch, kv_heads, -1, count, scores.shape[-1])
    lse = mx.logsumexp(scores, axis=-1, keepdims=True)
    output = mx.exp(scores - lse) @ values.astype(mx.float32)[:, :, None]
    return output.reshape(batch, heads, count, -1), lse.reshape(batch, heads, count, 1)
