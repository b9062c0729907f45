"""Queries in parts: the same answers as in one, and never more scores or copied rows at once than is allowed."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.commands import attend_parts
from pion.commands.attend_arguments import chosen
from pion.commands.attend_parts import parts_of
from pion.compute.attention import Blocks, Query, Suffix
from pion.compute.backends import make_backend
from tests.commands.attend_support import AUTO, LANES, QUERY, Oracle, blob, floats, ids, normal, serving, split_lse

SCORE_BYTES = 1024
COPY_BYTES = 4096
EXACT_PRODUCTS = 1000


@st.composite
def head_maps(draw: st.DrawFn) -> tuple[int, np.ndarray | None]:
    kv_heads = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["none", "even", "any"]))
    if kind == "none":
        return kv_heads, None
    if kind == "even":
        return kv_heads, np.repeat(np.arange(kv_heads), draw(st.integers(1, 9))).astype(np.uint32)
    chosen_heads = draw(st.lists(st.integers(0, kv_heads - 1), min_size=1, max_size=17))
    return kv_heads, np.array(chosen_heads, np.uint32)


@settings(deadline=None)
@given(
    heads=head_maps(),
    rows=st.integers(1, 40),
    count=st.integers(1, 9),
    suffix=st.none() | st.integers(0, 12),
    window=st.sampled_from([0, 1, 7, 100]),
    block=st.none() | st.integers(1, 20),
    top_k=st.sampled_from([0, 3]),
    seed=st.integers(0, 99),
)
def test_parts_make_the_whole(heads, rows, count, suffix, window, block, top_k, seed) -> None:
    kv_heads, head_map = heads
    width = 8
    q_heads = kv_heads if head_map is None else len(head_map)
    behind = None
    if suffix is not None:
        behind = Suffix(normal(seed + 1, kv_heads, suffix, width), normal(seed + 2, kv_heads, suffix, width))
    if block is not None:
        count = 1
    query = Query(
        q=normal(seed, q_heads, count, width),
        head_map=head_map,
        window=window,
        suffix=behind,
        sparse=None if block is None else Blocks(block, 1),
        top_k=top_k if behind is None and block is None else 0,
    )
    backend = make_backend("numpy")
    resident = backend.load(normal(seed + 3, kv_heads, rows, width), normal(seed + 4, kv_heads, rows, width))
    (whole,) = backend.attend(resident, [query])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend_parts, "ATTEND_SCORE_BYTES", SCORE_BYTES)
        patch.setattr(attend_parts, "ATTEND_COPY_BYTES", COPY_BYTES)
        patch.setattr(attend_parts, "ATTEND_EXACT_PRODUCTS", EXACT_PRODUCTS)
        parts = parts_of(query, kv_heads, rows)
    output, lse = np.full_like(whole.output, np.nan), np.full_like(whole.lse, np.nan)
    for part in parts:
        asked = part.query(query)
        assert asked.q.flags.c_contiguous
        # One query of as many heads as are stored is always allowed, or of one if they share K and V irregularly.
        least = kv_heads if head_map is None or (np.diff(head_map.astype(int)) >= 0).all() else 1
        visible = min(rows, window or rows) + (suffix or 0)
        part_heads, part_count, _ = asked.q.shape
        smallest = part_count == 1 and part_heads <= least
        assert 4 * part_heads * part_count * visible <= SCORE_BYTES or smallest
        ordered = min(rows, window or rows) if query.top_k else 0
        if block is not None:
            ordered = -(-min(rows, window or rows) // block)
        assert part_heads * part_count * ordered * width <= EXACT_PRODUCTS or smallest
        part.put(backend.attend(resident, [asked])[0], output, lse)
    np.testing.assert_allclose(output, whole.output, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, whole.lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("irregular", [False, True])
def test_copies_of_many_query_heads_are_bounded(irregular: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_parts, "ATTEND_COPY_BYTES", COPY_BYTES)
    head_map = np.arange(64) % 2 if irregular else np.arange(64) // 32
    query = Query(q=normal(3, 64, 1, 8), head_map=head_map.astype(np.uint32))
    whole_rows = 2 * 4 * 8 * 32  # of K and V, for one query head
    sizes = [part.query(query).q.shape[0] for part in parts_of(query, 2, 32)]
    assert sizes == ([COPY_BYTES // whole_rows] * (64 // (COPY_BYTES // whole_rows)) if irregular else [64])
    blocks = attrs.evolve(query, sparse=Blocks(8, 2))
    sizes = [part.query(blocks).q.shape[0] for part in parts_of(blocks, 2, 32)]
    assert sum(sizes) == 64
    assert max(sizes) * whole_rows // 2 <= COPY_BYTES


def test_products_are_bounded_and_those_without_a_blas_sooner() -> None:
    """At the real limits: the scores are small, but each takes 512 products. With a BLAS ten times as many are made."""
    heads, rows, width = 2, 8192, 512
    q = np.zeros((heads, 200, width), np.float32)
    spans = [(part.first, part.last) for part in parts_of(Query(q=q), heads, rows)]
    assert spans == [(0, 119), (119, 200)]
    assert 119 * heads * rows * width <= 1_000_000_000 < 120 * heads * rows * width
    shared = Query(q=q[:, :1].repeat(400, axis=0), head_map=ids(*[0] * 400, *[1] * 400))
    assert len(parts_of(shared, heads, rows)) == 1
    q = q[:, :100]
    assert len(parts_of(Query(q=q), heads, rows)) == 1
    best = Query(q=q, top_k=5)
    parts = parts_of(best, heads, rows)
    sizes = [part.last - part.first for part in parts]
    assert sum(sizes) == 100
    assert max(sizes) * heads * rows * width <= 100_000_000 < (max(sizes) + 1) * heads * rows * width
    assert len(parts_of(attrs.evolve(best, window=10), heads, rows)) == 1
    many = Query(q=q[:, :1].repeat(500, axis=0), head_map=ids(*[0, 1] * 500), sparse=Blocks(16, 1))
    sizes = [part.query(many).q.shape[0] for part in parts_of(many, heads, rows)]
    assert sum(sizes) == 1000
    assert max(sizes) * rows // 16 * width <= 100_000_000 < (max(sizes) + 1) * rows // 16 * width


@pytest.mark.parametrize("lane", list(LANES))
def test_the_best_rows_in_parts_over_the_wire(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_parts, "ATTEND_EXACT_PRODUCTS", 2 * 33 * 8 * 4)
    keys, values, q = normal(1, 2, 33, 8), normal(2, 2, 33, 8), normal(3, 2, 10, 8)
    oracle = Oracle(keys, values)
    with serving() as server, LANES[lane](server) as wire:
        assert wire.store(b"s", 0, keys, values) == "OK"
        found, lse = split_lse(wire.ask(QUERY, b"s", 0, [2, 8, 5], [blob(q)]), 2, 10, 8)
        assert server.figures()["queries"] == 3
    expected, sums = oracle.attend(q, oracle.top(q, 5))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(lse, sums, atol=1e-5)


@pytest.mark.parametrize("lane", list(LANES))
def test_a_query_in_parts_over_the_wire(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_parts, "ATTEND_COPY_BYTES", COPY_BYTES)
    keys, values, q = normal(1, 2, 33, 8), normal(2, 2, 33, 8), normal(3, 50, 1, 8)
    head_map = ids(*(number * 7 % 2 for number in range(50)))
    with serving() as server, LANES[lane](server) as wire:
        assert wire.store(b"s", 0, keys, values) == "OK"
        found = floats(wire.ask(AUTO, b"s", 0, [50, 8, 4, 3, 2], [blob(q), blob(head_map)]), 50, 1, 8)
        assert server.figures()["batches"] > 1
    oracle = Oracle(keys, values, head_map)
    mask, _ = oracle.blocks(q, 4, 3)
    np.testing.assert_allclose(found, oracle.attend(q, mask)[0], atol=1e-5)


def test_indices_that_count_for_no_head_are_let_go() -> None:
    indices = np.full((2, 5000), 7, np.uint32)
    indices[:, :3] = [[0, 5, 2], [1, 9, 9]]
    kept = chosen(indices, ids(3, 1), 10, 0)
    assert kept.indices.tolist() == [[0, 5, 2], [1, 9, 9]]
    assert kept.counts.tolist() == [3, 1]
    assert chosen(indices, ids(3, 1), 10, 9).indices.tolist() == [[5, 2], [1, 9]]
