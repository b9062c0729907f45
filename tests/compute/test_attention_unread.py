"""Rows that a query doesn't read don't reach its answer, whatever they hold; those that it reads do."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pion.compute import mlx_parts
from pion.compute.attention import Blocks, Chosen, Query, Suffix
from tests.compute.attention_support import BACKENDS, Case, bound, cases, expected, is_decided, make_case, normal

EXACT = ("mlx", "mlx as on a gpu", "numpy")
HALF = ("mlx fp16", "mlx fp16 as on a gpu", "numpy fp16")
each_backend = pytest.mark.parametrize("name", BACKENDS)
each_bad = pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])


def agree(found: np.ndarray, wanted: np.ndarray, name: str) -> None:
    """Equal where they are no numbers, close where they are."""
    np.testing.assert_allclose(found, wanted, rtol=bound(BACKENDS[name]), atol=bound(BACKENDS[name]))


def spoil(draw: st.DrawFn, values: np.ndarray, numbers: list[float]) -> None:
    """Put one of the numbers into some places."""
    heads, rows, width = values.shape
    for _ in range(draw(st.integers(0, 4)) if rows else 0):
        place = draw(st.integers(0, heads - 1)), draw(st.integers(0, rows - 1)), draw(st.integers(0, width - 1))
        values[place] = draw(st.sampled_from(numbers))


@st.composite
def spoiled(draw: st.DrawFn, kinds: str, numbers: list[float]) -> Case:
    """A case with numbers that are none among its values."""
    case = draw(cases(kinds=kinds))
    spoil(draw, case.values, numbers)
    if case.query.suffix is not None:
        spoil(draw, case.query.suffix.values, numbers)
    return case


@pytest.mark.parametrize("name", EXACT)
@given(case=spoiled("dense top_k chosen blocks", [math.inf, -math.inf, math.nan]))
@settings(deadline=None, max_examples=150)
def test_any_form_with_values_that_are_no_numbers(name: str, case: Case) -> None:
    assume(is_decided(case))
    found = case.answer(BACKENDS[name])
    with np.errstate(invalid="ignore"):
        output, lse = expected(case)
    agree(found.output, output, name)
    if case.query.want_lse:
        agree(found.lse, lse, name)


@pytest.mark.parametrize("name", HALF)
@given(case=spoiled("dense chosen", [7e4, -7e4, 65504.0]))
@settings(deadline=None, max_examples=80)
def test_any_form_with_values_that_fp16_cannot_hold(name: str, case: Case) -> None:
    def rounded(values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)

    query = case.query
    suffix = None if query.suffix is None else Suffix(rounded(query.suffix.keys), rounded(query.suffix.values))
    query = attrs.evolve(query, want_lse=True, suffix=suffix, q=rounded(query.q))
    found = attrs.evolve(case, query=attrs.evolve(case.query, want_lse=True)).answer(BACKENDS[name])
    with np.errstate(invalid="ignore"):
        output, _ = expected(Case(rounded(case.keys), rounded(case.values), query))
    agree(found.output, output, name)


@each_backend
@each_bad
@pytest.mark.parametrize("piece_values", [64, 16 << 20])
def test_a_suffix_row_that_comes_later(
    name: str, bad: float, piece_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_parts, "PIECE_VALUES", piece_values)
    case = make_case(rows=9, group=2, count=4, suffix_rows=3)
    assert case.query.suffix is not None
    healthy = case.answer(BACKENDS[name])
    case.query.suffix.values[0, 1:, 5] = bad
    found = case.answer(BACKENDS[name])
    assert np.allclose(found.output[:, :2], healthy.output[:, :2], atol=1e-6)
    assert np.array_equal(found.lse, healthy.lse)
    np.testing.assert_array_equal(found.output[:2, 2:, 5], np.full((2, 2), bad, np.float32))
    others = np.delete(found.output, 5, axis=2), np.delete(healthy.output, 5, axis=2)
    assert np.allclose(*others, atol=1e-6)
    assert np.allclose(found.output[2:], healthy.output[2:], atol=1e-6)


@each_backend
@each_bad
@pytest.mark.parametrize("form", ["top_k", "blocks", "blocks and a suffix"])
def test_a_prefix_row_that_scores_low(name: str, bad: float, form: str) -> None:
    """Two of six rows score high; what the lowest one holds is nobody's business."""
    rng = np.random.default_rng(1)
    keys, values, q = normal(rng, 1, 6, 32), normal(rng, 1, 6, 32), normal(rng, 1, 1, 32)
    keys[0, :] = np.array([1, 5, 2, 0, 4, 3], np.float32)[:, None] * q[0] / 4
    suffix = Suffix(normal(rng, 1, 1, 32), normal(rng, 1, 1, 32)) if form == "blocks and a suffix" else None
    query = Query(q=q, suffix=suffix, **({"top_k": 2} if form == "top_k" else {"sparse": Blocks(1, 2)}))
    healthy = BACKENDS[name].attend_once(keys, values, query)
    values[0, 3] = bad
    found = BACKENDS[name].attend_once(keys, values, query)
    assert np.allclose(found.output, healthy.output, atol=1e-6)
    values[0, 4, 7] = bad
    found = BACKENDS[name].attend_once(keys, values, query)
    np.testing.assert_array_equal(found.output[0, 0, 7], np.float32(bad))
    assert np.isfinite(np.delete(found.output, 7, axis=2)).all()


@each_backend
@each_bad
def test_an_unread_row_and_others_of_the_batch(name: str, bad: float) -> None:
    """Each query of a batch has rows of its own that it doesn't read."""
    backend = BACKENDS[name]
    case = make_case(rows=12, count=2, suffix_rows=2)
    assert case.query.suffix is not None
    values = case.query.suffix.values.copy()
    values[:, 1] = bad
    broken = attrs.evolve(case.query, suffix=attrs.evolve(case.query.suffix, values=values))
    resident = backend.load(case.keys, case.values)
    healthy = backend.attend(resident, [case.query])[0].output
    first, second, third = (each.output for each in backend.attend(resident, [broken, case.query, broken]))
    assert np.allclose(second, healthy, atol=1e-6)
    for each in (first, third):
        assert np.allclose(each[:, 0], healthy[:, 0], atol=1e-6)
        assert not np.isfinite(each[:, 1]).any()


@each_backend
@each_bad
def test_places_that_hold_no_row(name: str, bad: float) -> None:
    """Behind the chosen rows, and behind a short last block: what stands in for a row there is any row."""
    case = make_case(kv_heads=1, rows=5, window=4)
    case.values[0, 0] = bad
    for indices, count, read in (([0, 3, 9], 2, 3), ([4, 0], 1, 4), ([2, 0, 0], 1, 2)):
        query = attrs.evolve(case.query, sparse=Chosen(np.array([indices], np.uint32), np.array([count], np.uint32)))
        found = BACKENDS[name].attend_once(case.keys, case.values, query)
        assert np.abs(found.output[0, 0] - case.values[0, read]).max() <= bound(BACKENDS[name])
    values = normal(np.random.default_rng(0), 1, 5, 32)
    values[0, 4] = bad  # the short last block's only row
    keys = case.keys.copy()
    keys[0, 4] = 3 * case.query.q[0, 0]
    query = attrs.evolve(case.query, window=0, sparse=Blocks(2, 1))
    np.testing.assert_array_equal(
        BACKENDS[name].attend_once(keys, values, query).output, np.full((1, 1, 32), bad, np.float32)
    )


@each_backend
@each_bad
def test_a_head_that_reads_nothing_of_the_prefix(name: str, bad: float) -> None:
    """Its chosen row is outside of the window, and what stands in for it is no part of the answer."""
    case = make_case(kv_heads=1, rows=5, window=2, suffix_rows=1)
    case.values[:] = bad
    assert case.query.suffix is not None
    chosen = Chosen(np.array([[1]], np.uint32), np.array([1], np.uint32))
    found = BACKENDS[name].attend_once(case.keys, case.values, attrs.evolve(case.query, sparse=chosen))
    assert np.abs(found.output - case.query.suffix.values).max() <= bound(BACKENDS[name])


@each_backend
@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_a_row_that_is_read_and_weighs_nothing(name: str, bad: float) -> None:
    """Its weight is rounded to 0, and 0 times infinity is NaN: for the rows that are read, IEEE arithmetic holds."""
    case = make_case(kv_heads=1, rows=4, top_k=2)
    direction = case.query.q[0, 0].copy()
    case.keys[0] = np.array([-30, 30, -400, -300], np.float32)[:, None] * direction
    case.values[0, 0, 3], case.values[0, 2] = bad, math.nan
    found = case.answer(BACKENDS[name]).output[0, 0]
    assert np.isnan(found[3])
    others = np.delete(found - case.values[0, 1], 3)
    assert np.abs(others).max() <= bound(BACKENDS[name])


@pytest.mark.parametrize("name", ["mlx", "mlx as on a gpu"])
def test_finite_values_cost_no_guard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError

    monkeypatch.setattr(mlx_parts, "guarded", never)
    for options in ({"top_k": 3, "count": 4}, {"suffix_rows": 4, "count": 4}, {"sparse": Blocks(4, 2)}):
        make_case(rows=30, **options).answer(BACKENDS[name])
    case = make_case(rows=30, count=2, top_k=3)
    case.values[0, 0] = math.inf
    case.keys[0, 0] = -case.query.q[0, 0]
    with pytest.raises(AssertionError):
        case.answer(BACKENDS[name])


@each_backend
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "sparse", [None, Blocks(2, 2), Chosen(np.array([[1, 2], [3, 4]], np.uint32), np.array([2, 1], np.uint32))]
)
def test_scores_of_one_side_are_infinitely_low(name: str, count: int, sparse: Blocks | Chosen | None) -> None:
    """From finite input: the other side is all of the answer."""
    case = make_case(rows=8, count=1 if sparse else count, suffix_rows=3, sparse=sparse)
    suffix, q = case.query.suffix, case.query.q
    assert suffix is not None
    q[:] = np.abs(q) + 0.5
    far = Case(np.full_like(case.keys, -3e38), case.values, case.query)
    none = Case(case.keys[:, :0], case.values[:, :0], attrs.evolve(case.query, sparse=None))
    only_suffix = far.answer(BACKENDS[name]), expected(none)
    far_suffix = attrs.evolve(suffix, keys=np.full_like(suffix.keys, -3e38))
    far = attrs.evolve(case, query=attrs.evolve(case.query, suffix=far_suffix))
    without = attrs.evolve(case, query=attrs.evolve(case.query, suffix=None))
    only_prefix = far.answer(BACKENDS[name]), expected(without)
    for found, (output, lse) in (only_suffix, only_prefix):
        assert np.abs(found.output - output).max() <= bound(BACKENDS[name])
        assert np.abs(found.lse - lse).max() <= bound(BACKENDS[name])


@each_backend
@pytest.mark.parametrize("options", [{}, {"suffix_rows": 2}, {"top_k": 2}, {"sparse": Blocks(2, 1)}, {"window": 3}])
def test_all_scores_are_infinitely_low(name: str, options: dict[str, object]) -> None:
    """The sum of exp(score) is 0: the LSE says so, and there is no answer."""
    case = make_case(rows=6, **options)
    case.query.q[:] = np.abs(case.query.q) + 0.5
    case.keys[:] = -3e38
    if case.query.suffix is not None:
        case.query.suffix.keys[:] = -3e38
    found = case.answer(BACKENDS[name])
    assert np.isnan(found.output).all()
    assert (found.lse == -math.inf).all()
