"""An oracle for attention: float64, one row after the other, sharing nothing with what it judges."""

from __future__ import annotations

import math

import attrs
import numpy as np
from hypothesis import strategies as st

from pion.compute.attention import Attended, Backend, Blocks, Chosen, Query, Suffix
from pion.compute.mlx_attention import MlxBackend
from pion.compute.numpy_attention import NumpyBackend

BACKENDS = {
    "mlx": MlxBackend(),
    "mlx as on a gpu": MlxBackend(gpu=True),
    "mlx fp16": MlxBackend(fp16=True),
    "mlx fp16 as on a gpu": MlxBackend(fp16=True, gpu=True),
    "numpy": NumpyBackend(),
    "numpy fp16": NumpyBackend(fp16=True),
}
WIDTHS = [32, 64, 96, 128, 160, 192, 256, 512, 8, 24, 40, 72, 120, 200, 504]


def bound(backend: Backend) -> float:
    return 5e-3 if "fp16" in backend.device else 1e-4


@attrs.frozen(eq=False)
class Case:
    """K and V, and a query about them."""

    keys: np.ndarray
    values: np.ndarray
    query: Query

    def answer(self, backend: Backend) -> Attended:
        return backend.attend(backend.load(self.keys, self.values), [self.query])[0]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def make_case(
    *,
    seed: int = 0,
    kv_heads: int = 2,
    group: int = 1,
    rows: int = 20,
    count: int = 1,
    width: int = 32,
    suffix_rows: int | None = None,
    shuffle: bool = False,
    **options: object,
) -> Case:
    """N(0, 1); `group` query heads for each KV head, neighbours unless `shuffle`."""
    rng = np.random.default_rng(seed)
    keys, values = normal(rng, kv_heads, rows, width), normal(rng, kv_heads, rows, width)
    head_map = np.repeat(np.arange(kv_heads, dtype=np.uint32), group)
    if shuffle:
        rng.shuffle(head_map)
    suffix = None
    if suffix_rows is not None:
        suffix = Suffix(normal(rng, kv_heads, suffix_rows, width), normal(rng, kv_heads, suffix_rows, width))
    q = normal(rng, kv_heads * group, count, width)
    mapped = head_map if group > 1 or shuffle else None
    return Case(keys, values, Query(q=q, head_map=mapped, suffix=suffix, **options))


def choose(case: Case, most: int, seed: int = 0) -> Chosen:
    """Random rows for each query head; what is behind `counts` is no row at all."""
    rng = np.random.default_rng(seed)
    heads, rows = case.query.q.shape[0], case.keys.shape[1]
    counts = rng.integers(1, most + 1, heads).astype(np.uint32)
    indices = np.full((heads, most), 4_000_000_000, np.uint32)
    for head, number in enumerate(counts):
        indices[head, :number] = rng.permutation(rows)[:number]
    return Chosen(indices, counts)


def expected(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE in float64."""
    query = case.query
    heads, count, width = query.q.shape
    output, lse = np.empty((heads, count, width)), np.empty((heads, count))
    for head in range(heads):
        kv_head = head if query.head_map is None else int(query.head_map[head])
        for number in range(count):
            keys, values = _seen(case, head, kv_head, number)
            scores = keys @ query.q[head, number].astype(np.float64) / math.sqrt(width)
            lse[head, number] = _log_sum(scores)
            output[head, number] = np.exp(scores - lse[head, number]) @ values
    return output, lse


def _log_sum(scores: np.ndarray) -> float:
    highest = scores.max()
    return float(highest + np.log(np.exp(scores - highest).sum()))


def _seen(case: Case, head: int, kv_head: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values that one query of one head reads."""
    query = case.query
    total = case.keys.shape[1]
    visible = list(range(max(0, total - query.window) if query.window else 0, total))
    keys, q = case.keys[kv_head], query.q[head, number].astype(np.float64)
    if query.top_k or isinstance(query.sparse, Blocks):
        keys = keys.astype(np.float64)
    if isinstance(query.sparse, Chosen):
        chosen = set(query.sparse.indices[head, : query.sparse.counts[head]].tolist())
        visible = [row for row in visible if row in chosen]
    if isinstance(query.sparse, Blocks):
        size = query.sparse.rows
        blocks = [visible[start : start + size] for start in range(0, len(visible), size)]
        ranked = sorted(range(len(blocks)), key=lambda each: (-(keys[blocks[each]].mean(axis=0) @ q), each))
        visible = [row for each in sorted(ranked[: query.sparse.top]) for row in blocks[each]]
    if query.top_k:
        visible = sorted(visible, key=lambda row: (-(keys[row] @ q), row))[: query.top_k]
    keys, values = keys[visible].astype(np.float64), case.values[kv_head][visible].astype(np.float64)
    if query.suffix is not None:
        length = query.suffix.keys.shape[1]
        behind = [row for row in range(length) if row <= length - query.q.shape[1] + number]
        keys = np.concatenate([keys, query.suffix.keys[kv_head][behind]])
        values = np.concatenate([values, query.suffix.values[kv_head][behind]])
    return keys, values


def is_decided(case: Case, gap: float = 1e-3) -> bool:
    """Whether rounding can't change which rows or blocks are read: nothing scores nearly as high as the last one."""
    query = case.query
    rows = case.keys.shape[1]
    first = max(0, rows - query.window) if query.window else 0
    for head in range(query.q.shape[0]):
        kv_head = head if query.head_map is None else int(query.head_map[head])
        keys, taken = case.keys[kv_head, first:].astype(np.float64), query.top_k
        if isinstance(query.sparse, Blocks):
            size, taken = query.sparse.rows, query.sparse.top
            keys = np.stack([keys[start : start + size].mean(axis=0) for start in range(0, len(keys), size)])
        scores = np.sort(keys @ query.q[head].T.astype(np.float64), axis=0)[::-1]
        if 0 < taken < len(scores) and (scores[taken - 1] - scores[taken] < gap).any():
            return False
    return True


def check(case: Case, backend: Backend, *, answer: Attended | None = None) -> None:
    """The answer is within the bounds that the protocol promises for N(0, 1)."""
    found = case.answer(backend) if answer is None else answer
    output, lse = expected(case)
    assert found.output.dtype == np.float32
    assert found.output.shape == output.shape
    assert found.output.flags.owndata
    assert found.output.flags.c_contiguous
    assert np.abs(found.output - output).max() <= bound(backend)
    dots = (found.output.astype(np.float64) * output).sum(-1)
    norms = np.linalg.norm(found.output.astype(np.float64), axis=-1) * np.linalg.norm(output, axis=-1)
    assert (dots >= 0.99999 * norms).all()
    if case.query.want_lse:
        assert found.lse.dtype == np.float32
        assert found.lse.flags.owndata
        assert found.lse.shape == lse.shape
        assert np.abs(found.lse - lse).max() <= bound(backend)
    else:
        assert found.lse.shape == (output.shape[0], 0)


@st.composite
def cases(draw: st.DrawFn, *, kinds: str = "dense top_k chosen blocks", suffix: bool = True) -> Case:
    """Any shape and any form, at their edges too."""
    kind = draw(st.sampled_from(kinds.split()))
    rows = draw(st.one_of(st.sampled_from([1, 2, 3]), st.integers(1, 70)))
    options: dict[str, object] = {"want_lse": draw(st.booleans())}
    window = options["window"] = draw(st.one_of(st.just(0), st.integers(1, rows + 2)))
    visible = min(rows, window) if window else rows
    if suffix and kind != "top_k":
        options["suffix_rows"] = draw(st.one_of(st.none(), st.integers(0, 6)))
    if kind == "top_k":
        options["top_k"] = draw(st.integers(1, rows + 2))
    if kind == "blocks":
        size = draw(st.integers(1, rows + 2))
        options["sparse"] = Blocks(size, draw(st.integers(1, -(-visible // size))))
    case = make_case(
        seed=draw(st.integers(0, 1000)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        rows=rows,
        count=draw(st.one_of(st.just(1), st.integers(1, 9))) if kind in ("dense", "top_k") else 1,
        width=draw(st.sampled_from(WIDTHS)),
        shuffle=draw(st.booleans()),
        **options,
    )
    if kind != "chosen":
        return case
    chosen = choose(case, draw(st.integers(1, rows)), draw(st.integers(0, 1000)))
    chosen.indices[:, 0] = np.where((chosen.indices == rows - 1).any(axis=1), chosen.indices[:, 0], rows - 1)
    return attrs.evolve(case, query=attrs.evolve(case.query, sparse=chosen))
