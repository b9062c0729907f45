"""fp8 against a float64 oracle written from the specification."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pion.errors import CommandError
from pion.storage.formats import FP8
from pion.storage.fp8 import FP8_MAX


def e4m3_value(code: int) -> float:
    """Sign, four bits of exponent with bias 7, three of mantissa; no infinity, 1111.111 is NaN."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return np.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


VALUES = np.array([e4m3_value(code) for code in range(256)])
MAGNITUDES = VALUES[:127]


def parts_of(raw: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes (n, D) and the scale of each value (n, D), as float64."""
    rows = raw.reshape(-1, dim + dim // 16)
    scales = rows[:, dim:].copy().view(np.float16).astype(np.float64)
    return rows[:, :dim], np.repeat(scales, 32, axis=1)


def nearest_error(rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """For every value, the least error that any code could have with these scales."""
    scaled = np.divide(np.abs(rows), scales, out=np.zeros_like(rows), where=scales > 0)
    at = np.clip(np.searchsorted(MAGNITUDES, scaled), 1, len(MAGNITUDES) - 1)
    best = np.minimum(np.abs(MAGNITUDES[at] - scaled), np.abs(MAGNITUDES[at - 1] - scaled))
    return np.where(scales > 0, best * scales, np.abs(rows))


def decode(raw: np.ndarray, dim: int) -> np.ndarray:
    return FP8.decode(raw.data, raw.size // FP8.row_bytes(dim), dim)


def check(rows: np.ndarray) -> None:
    dim = rows.shape[1]
    raw = FP8.encode(rows)
    codes, scales = parts_of(raw, dim)
    assert not (codes & 127 == 127).any()
    assert np.isfinite(scales).all()
    exact = VALUES[codes] * scales
    decoded = decode(raw, dim)
    np.testing.assert_array_equal(decoded.astype(np.float64), exact)
    np.testing.assert_array_equal(np.signbit(decoded), np.signbit(rows))
    wide = rows.astype(np.float64)
    error = np.abs(exact - wide)
    # Nearest, but for a quotient that fp32 rounds onto the middle of two codes.
    assert (error <= nearest_error(wide, scales) * (1 + 1e-6) + np.abs(wide) * 1e-7).all()
    # Half a unit in the last of four bits, or half of the step of the smallest values.
    assert (error <= np.maximum(np.abs(wide) / 16, scales * 2.0**-10) * (1 + 1e-6)).all()
    zero = (rows.reshape(-1, 32) == 0).all(axis=1)
    np.testing.assert_array_equal(scales.reshape(-1, 32)[:, 0] == 0, zero)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 160, 512, 1024])
@pytest.mark.parametrize("size", [1e-30, 1e-9, 6e-8, 1e-6, 1e-4, 1.0, 300.0, 1e6])
def test_codes_are_nearest_and_the_error_is_bounded(dim, size):
    check((np.random.default_rng(8).standard_normal((37, dim)) * size).astype(np.float32))


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.sampled_from([32, 64])),
        elements=st.floats(-float(np.float32(2.9e7)), float(np.float32(2.9e7)), width=32),
    )
)
def test_any_rows(rows):
    check(rows)


@pytest.mark.parametrize("dim", [32, 128, 1024])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_relative_error_on_a_gaussian(dim, seed):
    rows = np.random.default_rng(seed).standard_normal(((1 << 18) // dim, dim)).astype(np.float32)
    error = decode(FP8.encode(rows), dim).astype(np.float64) - rows
    assert np.sqrt((error**2).mean() / (rows.astype(np.float64) ** 2).mean()) <= 0.025


def test_the_scale_is_the_better_of_two():
    rows = np.random.default_rng(4).standard_normal((500, 32)).astype(np.float32)
    _, scales = parts_of(FP8.encode(rows), 32)
    wide = rows.astype(np.float64)
    largest = np.abs(rows).max(axis=1, keepdims=True)
    errors = []
    for target in (256, 288):
        scale = (largest / np.float32(target)).astype(np.float16).astype(np.float64)
        errors.append((nearest_error(wide, np.repeat(scale, 32, axis=1)) ** 2).sum(axis=1))
    mine = (nearest_error(wide, scales) ** 2).sum(axis=1)
    assert (mine <= np.minimum(*errors) * (1 + 1e-4)).all()
    assert (errors[0] < errors[1]).any()
    assert (errors[0] > errors[1]).any()


def test_every_code_with_every_kind_of_scale():
    """Native rows: any byte, NaN codes and scales among them."""
    scales = np.array([0x3C00, 0x0001, 0x03FF, 0x7BFF, 0xC000, 0x0000, 0x7C00, 0x7E01], np.uint16)
    raw = np.zeros((len(scales), FP8.row_bytes(256)), np.uint8)
    raw[:, :256] = np.arange(256)
    raw[:, 256:] = np.repeat(scales, 8).view(np.uint8).reshape(len(scales), 16)
    with np.errstate(invalid="ignore"):
        expected = VALUES * scales.view(np.float16).astype(np.float64)[:, None]
    decoded = decode(raw, 256)
    np.testing.assert_array_equal(decoded, expected.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(decoded)[:6, :127], np.signbit(expected)[:6, :127])


def test_layout():
    """Codes of the whole row, then one fp16 scale for every 32 values."""
    rows = np.zeros((1, 64), np.float32)
    rows[0, 0], rows[0, 1], rows[0, 63] = 256, -1, 512
    raw = FP8.encode(rows)
    assert raw.size == 68
    assert raw[[0, 1, 2, 63]].tolist() == [0x78, 0xB8, 0, 0x78]
    assert raw[64:].view(np.float16).tolist() == [1, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 99, 6399])
def test_what_is_not_finite_is_refused(bad, at):
    rows = np.ones(6400, np.float32)
    rows[at] = bad
    with pytest.raises(CommandError, match="fp8 can't hold NaN or infinity"):
        FP8.encode(rows.reshape(100, 64))


def test_the_largest_magnitude():
    limit = np.float32(FP8_MAX)
    rows = np.zeros((1, 32), np.float32)
    rows[0, :3] = limit, -limit, 1e5
    check(rows)
    rows[0, 0] = np.nextafter(limit, np.float32(np.inf))
    with pytest.raises(CommandError, match=r"fp8 can't hold 29345794, at most 29345792"):
        FP8.encode(rows)


@pytest.mark.parametrize("dim", [1, 16, 31, 33, 72, 80, 100])
def test_widths_that_are_refused(dim):
    with pytest.raises(CommandError, match=f"fp8 needs a dim divisible by 32, got {dim}"):
        FP8.check_dim(dim)
