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

    def forget_means(self) -> None:
        """Nothing: none are kept."""


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

    @property
    def value_bytes(self) -> int:
        """4: values rounded to fp16 are held in fp32, too."""
        return 4

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
            seen = np.ones(scores.shape, bool)
            if isinstance(query.sparse, Blocks):
                seen = _in_best_blocks(q[head], keys, query.sparse)
            elif 0 < query.top_k < scores.shape[1]:
                seen = _highest(scores, query.top_k)
            if query.suffix is not None:
                behind, more, too = self._suffix(q[head], query.suffix, kv_head)
                scores, values = np.concatenate([scores, behind], axis=1), np.concatenate([values, more])
                seen = np.concatenate([seen, too], axis=1)
            output[head], lse[head] = _softmax(scores, values, seen)
        return Attended(output, lse if query.want_lse else np.empty((heads, 0), np.float32))

    def _suffix(self, q: Floats, suffix: Suffix, kv_head: int) -> tuple[Floats, Floats, np.ndarray]:
        """Scores `[M, S]`, the values, and which rows each query sees."""
        scores = _scores(q, self._rounded(suffix.keys[kv_head]), exact=False)
        count, rows = scores.shape
        seen = np.arange(rows) <= np.arange(rows - count, rows)[:, None]
        return scores, self._rounded(suffix.values[kv_head]), seen


def _softmax(scores: Floats, values: Floats, seen: np.ndarray) -> tuple[Floats, Floats]:
    """Output `[M, D]` and LSE `[M]` over the rows that each query sees; NaN and -inf if there is none."""
    scores = np.where(seen, scores, np.float32(-np.inf))
    highest = scores.max(axis=1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(highest), 0, highest))
    total = weights.sum(axis=1, keepdims=True)
    weighted = weights @ values
    # Zero times infinity is NaN: a row that isn't seen may have got in by that.
    for number in np.flatnonzero(~np.isfinite(weighted).all(axis=1) & ~seen.all(axis=1)):
        weighted[number] = weights[number, seen[number]] @ values[seen[number]]
    return weighted / total, (highest + np.log(total))[:, 0]


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
