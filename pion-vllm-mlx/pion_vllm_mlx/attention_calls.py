"""What the patched attention function and Pion's caches say to one another, and what a call may ask for.

mlx-lm's models call `scaled_dot_product_attention(queries, keys, values, cache=..., scale=..., mask=...)`. For a cache
of Pion's the patch hands the call to the cache. What the prefix's rows can't be attended to with is refused by name: an
answer computed without a mask, a bias or a sink would look right and be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx

from pion_vllm_mlx.merging import Mask

Original = Callable[..., mx.array]
"""mlx-lm's own function."""


class UnsupportedAttentionError(TypeError):
    """A model's attention asks for something that Pion can't compute over a stored prefix; the text names it."""


@attrs.frozen(eq=False)
class Call:
    """The arguments of one call, but for the cache."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    mask: Mask
    sinks: mx.array | None = None

    @classmethod
    def of(
        cls,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
    ) -> Call:
        """From arguments as mlx-lm's function takes them, by position or by name, the cache among them."""
        return cls(queries, keys, values, scale, mask, sinks)


class AttentionCache:
    """A cache that computes its own attention; the patched function asks it. Mixed into mlx-lm's cache classes."""

    def attend(self, original: Original, call: Call) -> mx.array:
        """The attention of the queries to everything this cache stands for."""
        raise NotImplementedError


def check_call(call: Call, prefix: int) -> None:
    """Raise UnsupportedAttentionError for a batch, sinks, or widths that the server's attention doesn't have."""
    if call.queries.shape[0] != 1:
        refuse(f"a batch of {call.queries.shape[0]} sequences; over a stored prefix it is one")
    if call.sinks is not None:
        refuse("attention sinks")
    if call.keys.shape[-1] != call.values.shape[-1] or call.queries.shape[-1] != call.keys.shape[-1]:
        refuse(f"keys of width {call.keys.shape[-1]} and values of width {call.values.shape[-1]}")
    if isinstance(call.mask, str) and call.mask != "causal":
        refuse(f"the mask {call.mask!r}")
    if isinstance(call.mask, mx.array) and call.mask.shape[-1] != prefix + call.keys.shape[2]:
        refuse(f"a mask over {call.mask.shape[-1]} rows, where prefix and suffix have {prefix} + {call.keys.shape[2]}")


class SuffixMasks:
    """The part of a mask that concerns the suffix, after making sure that the rest hides and favours no prefix row.

    A model passes the same array to each of its layers, so the last one is remembered: checking means evaluating.
    """

    def __init__(self) -> None:
        self._checked: mx.array | None = None

    def of(self, mask: Mask, prefix: int) -> Mask:
        """The mask over the suffix. Raises UnsupportedAttentionError."""
        if not isinstance(mask, mx.array):
            return mask
        if mask is not self._checked:
            head = mask[..., :prefix]
            if not mx.all(head if mask.dtype == mx.bool_ else head == 0).item():
                refuse("a mask that is not causal: it hides or weighs rows of the prefix (a sliding window, a bias)")
            self._checked = mask
        return mask[..., prefix:]


def refuse(what: str) -> Any:
    """Raise UnsupportedAttentionError about what the model asks for."""
    msg = f"the model's attention uses {what}: Pion can't compute that over a stored prefix"
    raise UnsupportedAttentionError(msg)
