"""Every ATTEND form on both lanes and on both backends against attention in float64."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pion.commands import attend_parts
from tests.commands.attend_support import (
    AUTO,
    AUTO_FUSED,
    FORMS,
    FUSED,
    LANES,
    QUERY,
    SPARSE,
    Array,
    Oracle,
    blob,
    close,
    configured,
    floats,
    ids,
    normal,
    serving,
    split_lse,
)


@pytest.fixture(scope="module", params=["numpy", "mlx"])
def server(request):
    with serving(backend=request.param) as running:
        yield running


@pytest.fixture(scope="module", params=list(LANES))
def wire(request, server):
    with LANES[request.param](server) as client:
        yield client


@attrs.frozen
class Shape:
    """H_kv, query heads for each of them, N, D."""

    kv_heads: int
    group: int
    rows: int
    head_dim: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def layer(self, seed: int) -> tuple[Array, Array]:
        return (
            normal(seed, self.kv_heads, self.rows, self.head_dim),
            normal(seed + 1, self.kv_heads, self.rows, self.head_dim),
        )

    def head_map(self, seed: int) -> Array:
        return np.random.default_rng(seed).integers(0, self.kv_heads, self.heads).astype(np.uint32)


SHAPES = st.builds(
    Shape,
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 2, 3]),
    st.one_of(st.integers(1, 5), st.integers(6, 70)),
    st.sampled_from([8, 16, 24, 32, 64, 96, 120, 128, 160, 192, 256, 504, 512]),
)
SEEDS = st.integers(0, 10_000)
COUNTS = st.one_of(st.just(1), st.integers(2, 9))
WINDOWS = st.one_of(st.just(0), st.integers(1, 80))
PROPERTY = settings(max_examples=25, deadline=None)


@PROPERTY
@given(SHAPES, COUNTS, st.one_of(st.just(0), st.integers(1, 80)), WINDOWS, SEEDS)
def test_query(wire, shape: Shape, count: int, top_k: int, window: int, seed: int) -> None:
    keys, values = shape.layer(seed)
    q = normal(seed + 2, shape.kv_heads, count, shape.head_dim)
    assert wire.store(b"s", 0, keys, values) == "OK"
    answer = wire.ask(QUERY, b"s", 0, (shape.kv_heads, shape.head_dim, top_k), [blob(q)], window)
    oracle = Oracle(keys, values)
    output, lse = oracle.attend(q, oracle.top(q, top_k, window))
    if count == 1:
        close(floats(answer, shape.kv_heads, 1, shape.head_dim), output)
    else:
        found, sums = split_lse(answer, shape.kv_heads, count, shape.head_dim)
        close(found, output)
        close(sums, lse)


@PROPERTY
@given(SHAPES, COUNTS, st.integers(0, 12), WINDOWS, SEEDS)
def test_query_fused(wire, shape: Shape, count: int, length: int, window: int, seed: int) -> None:
    keys, values = shape.layer(seed)
    q = normal(seed + 2, shape.heads, count, shape.head_dim)
    suffix = (
        normal(seed + 3, shape.kv_heads, length, shape.head_dim),
        normal(seed + 4, shape.kv_heads, length, shape.head_dim),
    )
    head_map = shape.head_map(seed)
    assert wire.store(b"s", 0, keys, values) == "OK"
    numbers = shape.heads, shape.head_dim, length, shape.kv_heads
    answer = wire.ask(FUSED, b"s", 0, numbers, [blob(q), *map(blob, suffix), blob(head_map)], window)
    oracle = Oracle(keys, values, head_map)
    output, _ = oracle.attend(q, oracle.visible(q, window), suffix)
    close(floats(answer, shape.heads, count, shape.head_dim), output)


@PROPERTY
@given(SHAPES, st.integers(1, 20), WINDOWS, SEEDS)
def test_query_sparse(wire, shape: Shape, most: int, window: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    most = min(most, shape.rows)
    keys, values = shape.layer(seed)
    q = normal(seed + 2, shape.kv_heads, 1, shape.head_dim)
    indices = np.stack([rng.permutation(shape.rows)[:most] for _ in range(shape.kv_heads)]).astype(np.uint32)
    counts = rng.integers(1, most + 1, shape.kv_heads).astype(np.uint32)
    oracle = Oracle(keys, values)
    mask = np.zeros((shape.kv_heads, 1, shape.rows), bool)
    for head in range(shape.kv_heads):
        mask[head, 0, indices[head, : counts[head]]] = True
        indices[head, counts[head] :] = 2**32 - 1  # what doesn't count isn't looked at
    mask &= oracle.visible(q, window)
    assert wire.store(b"s", 0, keys, values) == "OK"
    numbers = shape.kv_heads, shape.head_dim, most
    answer = wire.ask(SPARSE, b"s", 0, numbers, [blob(q), blob(indices), blob(counts)], window)
    if not mask.any(axis=2).all():
        assert answer.startswith(f"-ERR indices must name a row that fa_window {window} shows")
        return
    close(floats(answer, shape.kv_heads, 1, shape.head_dim), oracle.attend(q, mask)[0])


@PROPERTY
@given(SHAPES, st.integers(1, 20), st.integers(1, 10), WINDOWS, st.none() | st.integers(0, 6), SEEDS)
def test_query_sparse_auto(wire, shape: Shape, size: int, top: int, window: int, length: int | None, seed: int) -> None:
    keys, values = shape.layer(seed)
    q = normal(seed + 2, shape.heads, 1, shape.head_dim)
    head_map = shape.head_map(seed)
    visible = min(shape.rows, window) if window else shape.rows
    top = min(top, -(-visible // size))
    oracle = Oracle(keys, values, head_map)
    mask, margin = oracle.blocks(q, size, top, window)
    assume(margin > 1e-4)  # else rounding may choose the other block, rightly
    suffix = None
    if length is not None:
        suffix = (
            normal(seed + 3, shape.kv_heads, length, shape.head_dim),
            normal(seed + 4, shape.kv_heads, length, shape.head_dim),
        )
    assert wire.store(b"s", 0, keys, values) == "OK"
    numbers = [shape.heads, shape.head_dim, size, top, shape.kv_heads]
    if suffix is None:
        answer = wire.ask(AUTO, b"s", 0, numbers, [blob(q), blob(head_map)], window)
    else:
        blobs = [blob(q), *map(blob, suffix), blob(head_map)]
        answer = wire.ask(AUTO_FUSED, b"s", 0, [*numbers, suffix[0].shape[1]], blobs, window)
    close(floats(answer, shape.heads, 1, shape.head_dim), oracle.attend(q, mask, suffix)[0])


@PROPERTY
@given(SHAPES, COUNTS, st.one_of(st.just(0), st.integers(1, 80)), SEEDS)
def test_query_batch(server, shape: Shape, count: int, top_k: int, seed: int) -> None:
    keys, values = shape.layer(seed)
    q = normal(seed + 2, shape.kv_heads, count, shape.head_dim)
    oracle = Oracle(keys, values)
    output, lse = oracle.attend(q, oracle.top(q, top_k))
    with LANES["resp"](server) as wire:
        before = server.figures()["warm"]
        sizes = shape.kv_heads, shape.rows, shape.head_dim
        answer = wire.call("ATTEND.QUERYBATCH", *sizes, top_k, blob(q), blob(keys), blob(values))
        assert server.figures()["warm"] == before
    if count == 1:
        close(floats(answer, shape.kv_heads, 1, shape.head_dim), output)
    else:
        found, sums = split_lse(answer, shape.kv_heads, count, shape.head_dim)
        close(found, output)
        close(sums, lse)


def test_merging_by_lse_gives_the_whole(wire) -> None:
    keys, values, q = normal(1, 4, 50, 32), normal(2, 4, 50, 32), normal(3, 4, 5, 32)
    assert wire.store(b"whole", 0, keys, values) == "OK"
    whole, sums = split_lse(wire.ask(QUERY, b"whole", 0, (4, 32, 0), [blob(q)]), 4, 5, 32)
    for cut in (1, 20, 49):
        parts = []
        for name, rows in ((b"left", slice(0, cut)), (b"right", slice(cut, 50))):
            assert wire.store(name, 0, keys[:, rows], values[:, rows]) == "OK"
            parts.append(split_lse(wire.ask(QUERY, name, 0, (4, 32, 0), [blob(q)]), 4, 5, 32))
        both = np.logaddexp(parts[0][1].astype(np.float64), parts[1][1])
        merged = sum(output * np.exp(lse - both)[:, :, None] for output, lse in parts)
        close(merged, whole)
        close(both, sums)


def test_suffix_rows_at_once_are_the_same_as_one_by_one(wire) -> None:
    keys, values = normal(1, 2, 9, 16), normal(2, 2, 9, 16)
    q, k, v = normal(3, 4, 3, 16), normal(4, 2, 3, 16), normal(5, 2, 3, 16)
    head_map = blob(ids(0, 0, 1, 1))
    assert wire.store(b"s", 0, keys, values) == "OK"
    together = wire.ask(FUSED, b"s", 0, (4, 16, 3, 2), [blob(q), blob(k), blob(v), head_map])
    for row in range(3):
        blobs = [blob(q[:, row : row + 1]), blob(k[:, : row + 1]), blob(v[:, : row + 1]), head_map]
        one = wire.ask(FUSED, b"s", 0, (4, 16, row + 1, 2), blobs)
        close(floats(one, 4, 1, 16), floats(together, 4, 3, 16)[:, row : row + 1], 1e-6)


@pytest.mark.parametrize("length", [0, 1, 5, 30])
def test_queries_computed_in_parts_are_the_same(server, wire, length: int, monkeypatch) -> None:
    """Even with more queries than suffix rows, of which the first then see none."""
    keys, values, q = normal(1, 2, 20, 8), normal(2, 2, 20, 8), normal(3, 2, 17, 8)
    suffix = normal(4, 2, length, 8), normal(5, 2, length, 8)
    assert wire.store(b"s", 0, keys, values) == "OK"
    fused = [blob(q), *map(blob, suffix), blob(ids(1, 0))]
    whole = wire.ask(QUERY, b"s", 0, (2, 8, 7), [blob(q)], 15), wire.ask(FUSED, b"s", 0, (2, 8, length, 2), fused)
    before = server.figures()["queries"]
    monkeypatch.setattr(attend_parts, "ATTEND_SCORE_BYTES", 4 * 2 * (20 + length) * 3)
    parts = wire.ask(QUERY, b"s", 0, (2, 8, 7), [blob(q)], 15), wire.ask(FUSED, b"s", 0, (2, 8, length, 2), fused)
    assert server.figures()["queries"] == before + -(-17 // (3 * (20 + length) // 15)) + 6
    output, lse = split_lse(whole[0], 2, 17, 8)
    found, sums = split_lse(parts[0], 2, 17, 8)
    close(found, output, 1e-6)
    close(sums, lse, 1e-6)
    close(floats(parts[1], 2, 17, 8), floats(whole[1], 2, 17, 8), 1e-6)
    oracle = Oracle(keys, values, ids(1, 0))
    close(floats(parts[1], 2, 17, 8), oracle.attend(q, oracle.visible(q), suffix)[0])


def test_a_large_answer_is_the_same(wire) -> None:
    """More than what is joined with other replies, so that output and LSE travel as the buffers they are."""
    keys, values, q = normal(1, 8, 6, 64), normal(2, 8, 6, 64), normal(3, 8, 40, 64)
    assert wire.store(b"s", 0, keys, values) == "OK"
    found, sums = split_lse(wire.ask(QUERY, b"s", 0, (8, 64, 0), [blob(q)]), 8, 40, 64)
    oracle = Oracle(keys, values)
    output, lse = oracle.attend(q, oracle.visible(q))
    close(found, output)
    close(sums, lse)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.0, 3e38])
def test_any_number_in_q_is_computed_with(wire, value: float) -> None:
    """One head has it, in one place; the other heads and the server don't notice."""
    keys, values, q = normal(1, 3, 10, 8), normal(2, 3, 10, 8), normal(3, 3, 1, 8)
    clean = q.copy()
    q[1, 0, 4] = value
    clean[1] = 0 if value == 0 else clean[1]
    q[1] = -0.0 if value == 0 else q[1]
    assert wire.store(b"s", 0, keys, values) == "OK"
    oracle = Oracle(keys, values)
    expected = oracle.attend(clean, oracle.visible(clean))[0]
    blobs = {
        QUERY: ((3, 8, 0), [blob(q)]),
        FUSED: ((3, 8, 0, 3), [blob(q), b"", b"", blob(ids(0, 1, 2))]),
        SPARSE: ((3, 8, 10), [blob(q), blob(ids(*[range(10)] * 3)), blob(ids(10, 10, 10))]),
        AUTO: ((3, 8, 10, 1, 3), [blob(q), blob(ids(0, 1, 2))]),
        AUTO_FUSED: ((3, 8, 10, 1, 3, 0), [blob(q), b"", b"", blob(ids(0, 1, 2))]),
    }
    for form in FORMS:
        found = floats(wire.ask(form, b"s", 0, *blobs[form]), 3, 1, 8)
        close(found[[0, 2]], expected[[0, 2]])
        if value == 0:
            close(found, expected)
        elif np.isnan(value):
            assert np.isnan(found[1]).all()
    assert wire.lookup(b"s") == "HIT"


def test_ties_go_to_the_lower_index(wire) -> None:
    keys = np.ones((1, 6, 8), np.float32)
    values = np.broadcast_to(np.arange(6, dtype=np.float32)[None, :, None], (1, 6, 8))
    q = np.ones((1, 2, 8), np.float32)
    assert wire.store(b"s", 0, keys, values) == "OK"
    found, _ = split_lse(wire.ask(QUERY, b"s", 0, (1, 8, 2), [blob(q)]), 1, 2, 8)
    assert (found == 0.5).all()
    found, _ = split_lse(wire.ask(QUERY, b"s", 0, (1, 8, 2), [blob(q)], 3), 1, 2, 8)
    assert (found == 3.5).all()
    one = wire.ask(AUTO, b"s", 0, (1, 8, 2, 1, 1), [blob(q[:, :1]), blob(ids(0))])
    assert (floats(one, 1, 1, 8) == 0.5).all()


def test_the_sessions_and_layers_are_apart(wire) -> None:
    layers = {(sid, layer): normal(layer + 10 * len(sid), 2, 5, 8) for sid in (b"x", b"xx") for layer in (0, 1, 65_535)}
    for (sid, layer), keys in layers.items():
        assert wire.store(sid, layer, keys, keys) == "OK"
    q = normal(9, 2, 1, 8)
    for (sid, layer), keys in layers.items():
        oracle = Oracle(keys, keys)
        found = floats(wire.ask(QUERY, sid, layer, (2, 8, 0), [blob(q)]), 2, 1, 8)
        close(found, oracle.attend(q, oracle.visible(q))[0])


@pytest.mark.parametrize("lane", list(LANES))
def test_half_precision(lane: str) -> None:
    with serving(configured(metal_attention_fp16=True), "mlx") as server, LANES[lane](server) as wire:
        assert server.figures()["precision"] == "fp16"
        assert server.figures()["device"] != "not used yet"  # prepared at the start
        keys, values, q = normal(1, 8, 100, 64), normal(2, 8, 100, 64), normal(3, 8, 3, 64)
        assert wire.store(b"s", 0, keys, values) == "OK"
        found, sums = split_lse(wire.ask(QUERY, b"s", 0, (8, 64, 0), [blob(q)]), 8, 3, 64)
        oracle = Oracle(keys, values)
        output, lse = oracle.attend(q, oracle.visible(q))
        close(found, output, 5e-3)
        close(sums, lse, 5e-3)
        assert server.figures()["bytes"] >= 2 * 2 * keys.size
