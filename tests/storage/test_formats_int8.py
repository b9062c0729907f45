"""int8 against a float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pion.errors import CommandError
from pion.storage import quantize


def bits_of(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


def int8_parts(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes (n, D) and scales (n,), as float64."""
    codes = raw[:, :-2].copy().view(np.int8).astype(np.float64)
    return codes, raw[:, -2:].copy().view(np.float16)[:, 0].astype(np.float64)


def check_int8(rows: np.ndarray) -> None:
    raw = quantize.int8_encode(rows)
    assert raw.shape == (len(rows), rows.shape[1] + 2)
    codes, scales = int8_parts(raw)
    exact = rows.astype(np.float64)
    assert (np.abs(codes) <= 127).all()
    # Strictly, with the scale as it is stored, not a rounding error more: float64 holds all of this exactly enough.
    assert (np.abs(exact - codes * scales[:, None]) <= scales[:, None] / 2).all()
    np.testing.assert_array_equal(scales == 0, (rows == 0).all(axis=1))
    decoded = quantize.int8_decode(raw)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded.astype(np.float64), codes * scales[:, None])


@pytest.mark.parametrize("dim", [1, 2, 31, 64, 72, 100, 1024])
@pytest.mark.parametrize("size", [1e-30, 1e-9, 6e-8, 1e-6, 1e-4, 0.01, 1.0, 300.0, 1e6])
def test_int8_error_is_at_most_half_the_stored_scale(dim, size):
    rng = np.random.default_rng(8)
    check_int8((rng.standard_normal((37, dim)) * size).astype(np.float32))


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 9)),
        elements=st.floats(-float(np.float32(8e6)), float(np.float32(8e6)), width=32),
    )
)
def test_int8_any_rows(rows):
    check_int8(rows)


def test_int8_scale_is_absmax_over_127_where_fp16_can_hold_it():
    rng = np.random.default_rng(1)
    rows = (rng.standard_normal((500, 64)) * 3).astype(np.float32)
    _, scales = int8_parts(quantize.int8_encode(rows))
    expected = (np.abs(rows).max(axis=1) / np.float32(127)).astype(np.float16).astype(np.float64)
    np.testing.assert_array_equal(scales, expected)


def test_int8_zero_row():
    raw = quantize.int8_encode(np.array([[0.0, -0.0, 0.0], [1.0, 0.0, -1.0]], np.float32))
    assert not raw[0].any()
    assert raw[1, :3].view(np.int8).tolist() == [127, 0, -127]
    assert bits_of(quantize.int8_decode(raw))[0].tolist() == [0, 0, 0]


def test_int8_ties_and_their_neighbours():
    """x just beside (k + 1/2) * scale: the quotient must not be rounded onto the tie and then to the wrong side."""
    scales = np.array([0x2E66, 0x3555, 0x3C01, 0x1234, 0x5BFF], np.uint16).view(np.float16).astype(np.float32)
    rows = []
    for scale in scales:
        ties = (np.arange(-127, 127, dtype=np.float32) + np.float32(0.5)) * scale
        near = np.concatenate([np.nextafter(ties, np.float32(-np.inf)), ties, np.nextafter(ties, np.float32(np.inf))])
        rows.append(np.concatenate([near, [127 * scale]]))
    check_int8(np.array(rows, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 99, 6399])
def test_int8_refuses_what_is_not_finite(bad, at):
    rows = np.ones(6400, np.float32)
    rows[at] = bad
    with pytest.raises(CommandError, match="int8 can't hold NaN or infinity"):
        quantize.int8_encode(rows.reshape(100, 64))


def test_int8_largest_magnitude():
    limit = np.float32(quantize.INT8_MAX)
    check_int8(np.array([[limit, -limit, 1.0]], np.float32))
    with pytest.raises(CommandError, match=r"int8 can't hold 8319008\.5, at most 8319008"):
        quantize.int8_encode(np.array([[np.nextafter(limit, np.float32(np.inf)), 0]], np.float32))
    with pytest.raises(CommandError, match="int8 can't hold"):
        quantize.int8_encode(np.array([[-1e30, 0]], np.float32))
