"""Attention in NumPy float32: small and plain, one query and one head after the other.

It is what runs where MLX isn't installed, and what the MLX backend is compared with. In fp16, K, V and Q are rounded to
it and computed in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np

from pion.compute.attention import Attended, Blocks, Chosen, Floats, Query, Resident, Suffix


@attrs.frozen(eq=False)
class NumpyResident:
    """K and V of one layer, float32 `[H_kv, N, D]`."""

    keys: Floats
    values: Floats

    @property
    def heads(self) -> int:
        """H_kv."""
        return int(self.keys.shape[0])

    @property
    def rows(self) -> int:
        """N."""
        return int(self.keys.shape[1])

    @property
    def head_dim(self) -> int:
        """D."""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Memory of K and V."""
        return self.keys.nbytes + self.values.nbytes


@attrs.frozen
class NumpyBackend:
    """The CPU by way of NumPy, in fp32, or fp32 on values rounded to fp16."""

    fp16: bool = False
    name: str = attrs.field(default="numpy", init=False)

    @property
    def device(self) -> str:
        """For example `cpu, NumPy 2.4.6, fp32`."""
        precision = "fp16 (rounded to, computed in fp32)" if self.fp16 else "fp32"
        return f"cpu, NumPy {np.__version__}, {precision}"

    def load(self, keys: Floats, values: Floats) -> NumpyResident:
        """Copy K and V `[H, N, D]`. Raises MemoryError."""
        return NumpyResident(self._rounded(keys), self._rounded(values))

    def load_rows(self, keys: Floats, values: Floats, heads: int) -> NumpyResident:
        """Copy K and V from rows, `[N, H * D]` each. Raises MemoryError."""
        turned = (rows.reshape(rows.shape[0], heads, -1).swapaxes(0, 1) for rows in (keys, values))
        return NumpyResident(*(self._rounded(each) for each in turned))

    def attend_once(self, keys: Floats, values: Floats, query: Query) -> Attended:
        """Answer a query about K and V that are not kept. Raises MemoryError."""
        resident = self.load(keys, values) if self.fp16 else NumpyResident(keys, values)
        return self.attend(resident, [query])[0]

    def attend(self, resident: Resident, queries: Sequence[Query]) -> list[Attended]:
        """Answer one after the other. Raises MemoryError."""
        if not isinstance(resident, NumpyResident):
            msg = f"resident must be one of this backend's, got {type(resident).__name__}"
            raise TypeError(msg)
        with np.errstate(all="ignore"):  # NaN and infinity in Q are answered with what comes of them
            return [self._attend(resident, query) for query in queries]

    def _rounded(self, values: Floats) -> Floats:
        if not self.fp16:
            return np.array(values, np.float32, order="C")
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32, order="C")

    def _attend(self, resident: NumpyResident, query: Query) -> Attended:
        heads, count, width = query.q.shape
        first = max(0, resident.rows - query.window) if query.window else 0
        q = self._rounded(query.q) * np.float32(1 / math.sqrt(width))
        output = np.empty((heads, count, width), np.float32)
        lse = np.empty((heads, count), np.float32)
        for head in range(heads):
            kv_head = head if query.head_map is None else int(query.head_map[head])
            keys, values = resident.keys[kv_head, first:], resident.values[kv_head, first:]
            if isinstance(query.sparse, Chosen):
                wanted = query.sparse.indices[head, : query.sparse.counts[head]].astype(np.int64)
                wanted = wanted[wanted >= first] - first
                keys, values = keys[wanted], values[wanted]
            scores = _scores(q[head], keys, exact=bool(query.top_k))
            if isinstance(query.sparse, Blocks):
                scores[~_in_best_blocks(q[head], keys, query.sparse)] = -np.inf
            if 0 < query.top_k < scores.shape[1]:
                scores[~_highest(scores, query.top_k)] = -np.inf
            if query.suffix is not None:
                behind, more = self._suffix(q[head], query.suffix, kv_head)
                scores, values = np.concatenate([scores, behind], axis=1), np.concatenate([values, more])
            output[head], lse[head] = _softmax(scores, values)
        return Attended(output, lse if query.want_lse else np.empty((heads, 0), np.float32))

    def _suffix(self, q: Floats, suffix: Suffix, kv_head: int) -> tuple[Floats, Floats]:
        """Scores `[M, S]`, -inf where a query doesn't see the row, and the values."""
        scores = _scores(q, self._rounded(suffix.keys[kv_head]), exact=False)
        count, rows = scores.shape
        last_seen = np.arange(rows - count, rows)
        scores[np.arange(rows) > last_seen[:, None]] = -np.inf
        return scores, self._rounded(suffix.values[kv_head])


def _softmax(scores: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Output `[M, D]` and LSE `[M]`; NaN and -inf if there is no row."""
    if not scores.shape[1]:
        return np.full((len(scores), values.shape[1]), np.nan, np.float32), np.full(len(scores), -np.inf, np.float32)
    highest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=1, keepdims=True)
    return (weights @ values) / total, (highest + np.log(total))[:, 0]


def _scores(q: Floats, keys: Floats, *, exact: bool) -> Floats:
    """`[M, N]`. Exact: equal keys have equal scores, which a BLAS doesn't promise: it rounds them by their place."""
    return np.einsum("md,nd->mn", q, keys) if exact else q @ keys.T


def _highest(scores: Floats, count: int) -> np.ndarray:
    """Which `count` of each row are the highest; ties: those that come first. NaN counts as the lowest."""
    order = np.argsort(-np.where(np.isnan(scores), -np.inf, scores), axis=1, kind="stable")[:, :count]
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen


def _in_best_blocks(q: Floats, keys: Floats, blocks: Blocks) -> np.ndarray:
    """Which rows `[M, N]` are in the blocks whose mean key scores highest."""
    starts = np.arange(0, len(keys), blocks.rows)
    means = np.stack([keys[start : start + blocks.rows].mean(axis=0) for start in starts])
    best = _highest(_scores(q, means, exact=True), blocks.top)
    return np.repeat(best, blocks.rows, axis=1)[:, : len(keys)]
