"""Inputs that are hard on rounding, and inputs that are no numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np
import pytest

from pion.compute.attention import Blocks, Query, Suffix
from tests.compute.attention_support import BACKENDS, Case, choose, expected, make_case, normal

Change = Callable[[np.random.Generator, np.ndarray, np.ndarray, np.ndarray], None]


def huge_logits(rng: np.random.Generator, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    q *= 8
    keys *= 8


def huge_and_close_logits(rng: np.random.Generator, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    """Thousands, and less than one apart: what rounding a score costs is largest here."""
    q *= 30
    keys[:] = 30 * keys[:, :1] + keys / 30


def all_equal(rng: np.random.Generator, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    keys[:] = keys[:, :1]


def all_zero(rng: np.random.Generator, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    keys[:] = 0


def one_dominates(rng: np.random.Generator, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    keys[:, keys.shape[1] // 2] = 12 / math.sqrt(q.shape[2]) * q[:, 0]


def only_one_counts(rng: np.random.Generator, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    keys[:, keys.shape[1] // 2] = 40 * q[:, 0]


def far_below_zero(rng: np.random.Generator, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    q[:] = np.abs(q) * 10
    keys[:] = -np.abs(keys) * 10


def negative_zero(rng: np.random.Generator, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    q[:, :, ::2] = -0.0
    keys[:, ::3] = -0.0
    values[:, 1::2] = -0.0


def denormals(rng: np.random.Generator, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    keys *= np.float32(1e-41)
    values[:, ::2] *= np.float32(1e-42)


def huge_values(rng: np.random.Generator, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    values *= 1e4


def cancelling_values(rng: np.random.Generator, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    keys[:] = keys[:, :1]
    values[:, 1::2] = -values[:, ::2][:, : values[:, 1::2].shape[1]] * 1e4
    values[:, ::2] *= 1e4


ADVERSARIAL = [
    huge_logits,
    huge_and_close_logits,
    all_equal,
    all_zero,
    one_dominates,
    only_one_counts,
    far_below_zero,
    negative_zero,
    denormals,
    huge_values,
    cancelling_values,
]


def plain(case: Case) -> np.ndarray:
    """The attention that anybody would write in NumPy float32, on the same inputs."""
    q, suffix = case.query.q, case.query.suffix
    keys, values = case.keys, case.values
    if suffix is not None:
        keys, values = np.concatenate([keys, suffix.keys], axis=1), np.concatenate([values, suffix.values], axis=1)
    scores = q @ keys.swapaxes(-1, -2) / np.float32(math.sqrt(q.shape[2]))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ values


def as_fp16(case: Case) -> Case:
    def rounded(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float16).astype(np.float32)

    suffix = case.query.suffix
    if suffix is not None:
        suffix = Suffix(rounded(suffix.keys), rounded(suffix.values))
    query = attrs.evolve(case.query, q=rounded(case.query.q), suffix=suffix)
    return Case(rounded(case.keys), rounded(case.values), query)


@pytest.mark.parametrize("name", ["mlx", "mlx as on a gpu", "mlx fp16", "numpy", "numpy fp16"])
@pytest.mark.parametrize("change", ADVERSARIAL, ids=lambda change: change.__name__)
def test_at_most_four_times_the_error_of_plain_numpy(name: str, change: Change) -> None:
    """On average over many cases: the largest error of a single one is luck. In fp16 the oracle gets rounded inputs."""
    mine, plains, ulps = 0.0, 0.0, 0.0
    for seed in range(40):
        case = make_case(
            seed=seed,
            rows=(1, 20, 64, 300)[seed % 4],
            count=(1, 1, 7)[seed % 3],
            width=(64, 128)[seed % 2],
            suffix_rows=1 if seed % 3 == 1 else None,
            want_lse=seed % 8 < 4,
        )
        change(np.random.default_rng(seed), case.query.q, case.keys, case.values)
        if "fp16" in name:
            case = as_fp16(case)
        truth = expected(case)[0]
        mine += float(np.abs(case.answer(BACKENDS[name]).output - truth).max())
        plains += float(np.abs(plain(case) - truth).max())
        ulps += float(np.spacing(np.abs(truth).max().astype(np.float32)))
    assert mine <= 4 * plains + ulps / 2


@pytest.mark.parametrize("name", ["mlx", "mlx as on a gpu", "numpy"])
def test_prefix_and_suffix_far_apart(name: str) -> None:
    """Either one may outweigh the other by more than a float can say."""
    for factor in (300.0, -300.0):
        case = make_case(rows=9, suffix_rows=4)
        assert case.query.suffix is not None
        for head in range(2):
            direction = case.query.q[head, 0] / np.linalg.norm(case.query.q[head, 0])
            case.keys[head] += factor * direction
            case.query.suffix.keys[head] -= factor * direction
        output, lse = expected(case)
        found = case.answer(BACKENDS[name])
        assert np.abs(found.output - output).max() < 1e-3
        assert np.allclose(found.lse, lse, rtol=1e-5)


FORMS = {
    "dense": {},
    "no lse": {"want_lse": False},
    "window": {"window": 11},
    "top_k": {"top_k": 5},
    "blocks": {"sparse": Blocks(4, 2)},
    "suffix": {"suffix_rows": 3},
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("form", [*FORMS, "chosen"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_with_its_query(name: str, form: str, bad: float) -> None:
    """Other heads, other queries of the same head, and the mates of a batch are answered as without it."""
    backend = BACKENDS[name]
    count = 1 if form in ("blocks", "chosen") else 3
    case = make_case(rows=30, group=2, count=count, **FORMS.get(form, {}))
    query = case.query
    if form == "chosen":
        query = attrs.evolve(query, sparse=choose(case, 6))
    broken = attrs.evolve(query, q=query.q.copy())
    broken.q[1, 0, 3] = bad
    broken.q[2, count - 1] = bad
    other = attrs.evolve(query, q=normal(np.random.default_rng(4), *query.q.shape))
    resident = backend.load(case.keys, case.values)
    healthy = [backend.attend(resident, [each])[0].output for each in (query, other)]
    for number, batch in enumerate(([broken], [broken, other], [other, broken])):
        found = backend.attend(resident, batch)
        mine = found[batch.index(broken)].output
        reached = np.zeros(mine.shape[:2], bool)
        reached[1, 0] = reached[2, count - 1] = True
        assert np.isnan(mine[reached]).any(axis=1).all()
        assert np.allclose(mine[~reached], healthy[0][~reached], atol=1e-2 if "fp16" in name else 1e-5)
        if number:
            assert np.allclose(found[batch.index(other)].output, healthy[1], atol=1e-2 if "fp16" in name else 1e-5)


@pytest.mark.parametrize("name", ["mlx fp16", "mlx fp16 as on a gpu", "numpy fp16"])
def test_fp16_beyond_its_range(name: str) -> None:
    """What fp16 can't hold is infinite in it: no error, no warning, and no number in that head's answer."""
    case = make_case(rows=3)
    case.query.q[0] = 1e6
    found = case.answer(BACKENDS[name])
    assert not np.isfinite(found.output[0]).any()
    assert np.isfinite(found.output[1]).all()
    values = np.full_like(case.values, 7e4)
    assert np.isinf(Case(case.keys, values, Query(q=case.query.q[:, :, :])).answer(BACKENDS[name]).output[1]).all()
