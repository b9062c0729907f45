"""The pieces that attention over MLX is made of: partials, products, the highest of them, heads that share K and V.

A *partial* is attention over some rows, not yet divided: over these rows the highest product q . k, the sum of the
weights exp((product - highest) / sqrt(D)), and the values weighted by them. Partials over disjoint rows merge exactly.
All of it is fp32.

Two things about the weights. Products are scaled after the highest one is subtracted, which rounds a small difference
instead of a large product. And they are computed as powers of two, of an exponent times log2(e): on the CPU, MLX's
`power` is some three times as fast as its `exp`, which is most of the time of a batch, and rounds better.

Rows that a query doesn't read have the weight 0. Where such a row's value is infinite or NaN, that isn't enough: 0
times infinity is NaN. An answer that came out finite shows that there was none; else it is worked out again, `guarded`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import attrs
import mlx.core as mx
import numpy as np

from pion.compute.attention import Indices

PIECE_VALUES: Final = 16 << 20
"""Values of one intermediate array (64 MiB in fp32); more queries are answered in pieces. Bounds what a call needs."""

CACHED_VALUES: Final = 64 << 10
"""Values of K that stay in a cache of the CPU while all queries are multiplied with them: 256 KiB."""

NOTHING: Final = -math.inf
"""The product with a row that isn't read."""


@attrs.frozen(eq=False)
class Partial:
    """Attention over some rows, not yet divided: all fp32, `[H_q, M, 1]`, `[H_q, M, 1]`, `[H_q, M, D]`.

    A query that saw no row, or whose products are all -inf, has `highest` -inf and zeros.
    """

    highest: mx.array
    total: mx.array
    weighted: mx.array

    def merge(self, other: Partial) -> Partial:
        """Over the rows of both, which are disjoint."""
        highest = mx.maximum(self.highest, other.highest)
        base, width = _base(highest), self.weighted.shape[-1]
        mine, others = _exp(self.highest - base, width), _exp(other.highest - base, width)
        return Partial(
            highest, self.total * mine + other.total * others, self.weighted * mine + other.weighted * others
        )

    def output(self) -> mx.array:
        """`[H_q, M, D]`."""
        return self.weighted / self.total

    def lse(self) -> mx.array:
        """`[H_q, M]`, as a natural logarithm."""
        return (self.highest / math.sqrt(self.weighted.shape[-1]) + mx.log(self.total)).squeeze(-1)

    def queries(self, first: int, last: int) -> Partial:
        """Those of some queries."""
        return Partial(self.highest[:, first:last], self.total[:, first:last], self.weighted[:, first:last])


Compute: TypeAlias = Callable[[mx.array, int], Partial]
"""Some queries `[H_q, m, D]`, and the number of the first."""


@attrs.frozen
class Heads:
    """How query heads share KV heads: `size` neighbours each, or `chosen` for each query head."""

    size: int
    chosen: mx.array | None = None

    @classmethod
    def of(cls, head_map: Indices | None, kv_heads: int) -> Heads:
        """Sharing by a head map; None: each KV head has one query head."""
        if head_map is None:
            return cls(1)
        size = len(head_map) // kv_heads
        if size * kv_heads == len(head_map) and np.array_equal(head_map, np.arange(len(head_map)) // size):
            return cls(size)
        return cls(1, mx.array(head_map))

    def expand(self, rows: mx.array) -> mx.array:
        """K or V as `group` needs it; a copy for each query head if there is no regular way."""
        return rows if self.chosen is None else rows[self.chosen]

    def group(self, q: mx.array) -> mx.array:
        """`[H_q, M, D]` to `[H_q / size, size * M, D]`."""
        return q if self.size == 1 else q.reshape(q.shape[0] // self.size, self.size * q.shape[1], q.shape[2])

    @staticmethod
    def ungroup(found: mx.array, q: mx.array) -> mx.array:
        """Back to `[H_q, M, ...]`."""
        return found.reshape(q.shape[0], q.shape[1], found.shape[-1])


def pieces(count: int, values_each: int) -> Iterator[tuple[int, int]]:
    """So many queries at a time that an intermediate array stays small, or one."""
    step = max(1, PIECE_VALUES // max(1, values_each))
    for first in range(0, count, step):
        yield first, min(count, first + step)


def in_pieces(q: mx.array, compute: Compute, values_each: int) -> Partial:
    """`compute` for all queries, where one needs an intermediate array of `values_each`."""
    spans = list(pieces(int(q.shape[1]), values_each))
    if len(spans) == 1:
        return compute(q, 0)
    found = []
    for first, last in spans:
        part = compute(q[:, first:last], first)
        mx.eval(part.highest, part.total, part.weighted)
        found.append(part)
    return Partial(
        joined([each.highest for each in found], axis=1),
        joined([each.total for each in found], axis=1),
        joined([each.weighted for each in found], axis=1),
    )


def _exp(differences: mx.array, width: int) -> mx.array:
    """exp(differences of products / sqrt(D))."""
    return mx.power(2.0, differences * (math.log2(math.e) / math.sqrt(width)))


def products(q: mx.array, keys: mx.array) -> mx.array:
    """Products `[..., M, N]`. One query is multiplied from the right, which a CPU does without rearranging the keys."""
    if q.shape[-2] == 1:
        return (keys @ q.swapaxes(-1, -2)).swapaxes(-1, -2)
    return q @ keys.swapaxes(-1, -2)


def exact_products(q: mx.array, keys: mx.array, *, gpu: bool) -> mx.array:
    """Products `[H, M, N]` that are equal for equal keys, wherever they stand."""
    if not gpu:
        return _einsum(q, keys)
    heads, count, width = q.shape
    rows = int(keys.shape[1])
    step = max(1, PIECE_VALUES // (heads * width))
    # Summed in up to eight parts: a sum of all D, one by one, rounds worse than a matrix product does.
    parts = math.gcd(width, 8)
    split = keys.reshape(heads, 1, rows, parts, width // parts)
    found = []
    for first, last in pieces(count, heads * rows * width):
        some = q[:, first:last].reshape(heads, last - first, 1, parts, width // parts)
        spans = range(0, rows, step)
        found.append(joined([(some * split[:, :, at : at + step]).sum(-1).sum(-1) for at in spans], axis=2))
        if last < count or rows > step:
            mx.eval(found[-1])  # or the products of all would be in memory at once
    return joined(found, axis=1)


def _einsum(q: mx.array, keys: mx.array) -> mx.array:
    """The same on the CPU, by NumPy: ten to forty times as fast as the operations of MLX, which write every product."""
    heads, count, width = q.shape
    rows = int(keys.shape[1])
    found = mx.zeros((heads, count, rows))
    mx.eval(q, keys, found)
    left, right, out = (np.asarray(memoryview(each)) for each in (q, keys, found))  # type: ignore[arg-type]
    step = max(1, CACHED_VALUES // width)
    for head in range(heads):
        for at in range(0, rows, step):
            some = right[head, at : at + step]
            np.einsum("md,nd->mn", left[head], some, out=out[head, :, at : at + step])
    return found


def joined(parts: list[mx.array], axis: int) -> mx.array:
    """Concatenated, if there are several."""
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def are_highest(found: mx.array, count: int) -> mx.array:
    """Which `count` of the last axis are the highest; ties: those that come first. NaN counts as the lowest."""
    ordered = mx.where(mx.isnan(found), NOTHING, found)
    least = mx.topk(ordered, count, axis=-1).min(axis=-1, keepdims=True)
    above, level = ordered > least, ordered == least
    room = count - above.sum(axis=-1, keepdims=True)
    return above | (level & (mx.cumsum(level.astype(mx.int32), axis=-1) <= room))


def _base(highest: mx.array) -> mx.array:
    """What is subtracted from products: -inf from -inf would be NaN."""
    return mx.where(highest == NOTHING, 0.0, highest)


def weigh(found: mx.array, width: int) -> tuple[mx.array, mx.array]:
    """The highest product of the last axis, and the weights."""
    highest = mx.max(found, axis=-1, keepdims=True)
    return highest, _exp(found - _base(highest), width)


def partial(
    heads: Heads, found: mx.array, values: mx.array, seen: mx.array | None = None, *, guard: bool = False
) -> Partial:
    """From products `[H_q, M, N]`, values `[H_q / size, N, D]`, and which rows are read, which goes to `[H_q, M, N]`.

    `guard`: values of other rows may be infinite or NaN.
    """
    if seen is not None:
        found = mx.where(seen, found, NOTHING)
    highest, weights = weigh(found, values.shape[-1])
    if seen is None or not guard:
        weighted = heads.ungroup(heads.group(weights) @ values, found)
    else:
        weighted = guarded(heads, weights, mx.broadcast_to(seen, found.shape), values)
    return Partial(highest, weights.sum(axis=-1, keepdims=True), weighted)


def guarded(heads: Heads, weights: mx.array, seen: mx.array, values: mx.array) -> mx.array:
    """Values weighted `[H_q, M, D]`, by IEEE arithmetic over the rows that are seen alone: for values that aren't all
    finite. Infinite ones and NaN are left out of the product, and put in where a row that is seen has them.
    """

    def met(which: mx.array, marked: mx.array) -> mx.array:
        product = heads.group(which.astype(mx.float32)) @ marked.astype(mx.float32)
        return heads.ungroup(product, weights) > 0

    finite = mx.isfinite(values)
    weighted = heads.ungroup(heads.group(weights) @ mx.where(finite, values, 0.0), weights)
    rows = np.flatnonzero(~np.array(finite.all(axis=2).all(axis=0)))
    for first, last in pieces(len(rows), int(max(values.size, weights.size)) // int(values.shape[1])):
        at = mx.array(rows[first:last])
        some, read = values[:, at], seen[:, :, at]
        counts = read & (weights[:, :, at] > 0)
        bad = met(read, mx.isnan(some)) | met(read & ~counts, mx.isinf(some))
        for reached, what in ((bad, math.nan), (met(counts, some == math.inf), math.inf)):
            weighted = weighted + mx.where(reached, what, 0.0)
        weighted = weighted + mx.where(met(counts, some == NOTHING), -math.inf, 0.0)
        mx.eval(weighted)
    return weighted


def block_means(keys: mx.array, rows: int) -> mx.array:
    """fp32 `[H, blocks, D]`; the last block may be short."""
    heads, count, width = keys.shape
    keys = keys.astype(mx.float32)
    whole = count // rows
    means = []
    if whole:
        means.append(keys[:, : whole * rows].reshape(heads, whole, rows, width).mean(axis=2))
    if whole * rows < count:
        means.append(keys[:, whole * rows :].mean(axis=1, keepdims=True))
    return joined(means, axis=1)
