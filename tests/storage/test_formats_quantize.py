"""int8 and mlx4g32 against a float64 oracle and against MLX itself."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pion.errors import CommandError
from pion.storage import quantize

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def bits_of(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


# int8 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encode", [quantize.int8_encode, quantize.mlx4g32_encode])
@pytest.mark.parametrize("count", [1, 2, 3000])
def test_encoding_does_not_write_to_its_input(encode, count):
    rows = np.random.default_rng(3).standard_normal((count, 32)).astype(np.float32)
    before = rows.copy()
    encode(rows)
    np.testing.assert_array_equal(rows, before)


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


# mlx4g32 --------------------------------------------------------------------------------------------------------------


def mlx_parts(raw: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    packed, groups = dim // 2, dim // 32
    return (
        raw[:, :packed].copy().view(np.uint32),
        raw[:, packed : packed + 2 * groups].copy().view(np.float16),
        raw[:, packed + 2 * groups :].copy().view(np.float16),
    )


def mlx_dequantize(words: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> np.ndarray:
    """(n, D) fp16, from MLX."""
    return np.array(mx.dequantize(mx.array(words), mx.array(scales), mx.array(biases), group_size=32, bits=4))


def mlx_round_trip(rows: np.ndarray) -> np.ndarray:
    """`mx.quantize`, scales and biases rounded to fp16, `mx.dequantize`: (n, D) float64."""
    words, scales, biases = mx.quantize(mx.array(rows), group_size=32, bits=4)
    halves = [np.array(part.astype(mx.float16)) for part in (scales, biases)]
    return mlx_dequantize(np.array(words), *halves).astype(np.float64)


def check_mlx(rows: np.ndarray) -> np.ndarray:
    """Encode, compare our decoding with MLX's bit for bit, and return it as float64."""
    dim = rows.shape[1]
    raw = quantize.mlx4g32_encode(rows)
    assert raw.shape == (len(rows), dim // 2 + dim // 8)
    decoded = quantize.mlx4g32_decode(raw, dim)
    theirs = mlx_dequantize(*mlx_parts(raw, dim))
    assert theirs.dtype == np.float16
    np.testing.assert_array_equal(bits_of(decoded), bits_of(theirs.astype(np.float32)))
    assert np.isfinite(decoded).all()
    return decoded.astype(np.float64)


def _sparse(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(shape) * (rng.random(shape) < 0.05)


DISTRIBUTIONS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.random(shape),
    "laplace": lambda rng, shape: rng.laplace(size=shape),
    "heavy tails": lambda rng, shape: rng.standard_t(2, shape),
    "positive": lambda rng, shape: np.abs(rng.standard_normal(shape)),
    "offset 3": lambda rng, shape: 3 + rng.standard_normal(shape),
    "offset -30": lambda rng, shape: -30 + rng.standard_normal(shape),
    "offset 100, narrow": lambda rng, shape: 100 + 0.1 * rng.standard_normal(shape),
    "outlier channels": lambda rng, shape: rng.standard_normal(shape) * np.where(np.arange(shape[1]) % 37 == 0, 50, 1),
    "sparse": _sparse,
    "small": lambda rng, shape: 1e-4 * rng.standard_normal(shape),
    "subnormal": lambda rng, shape: 1e-6 * rng.standard_normal(shape),
    "large": lambda rng, shape: 3000 * rng.standard_normal(shape),
    "constant": lambda rng, shape: np.full(shape, 0.3),
    "two values": lambda rng, shape: np.sign(rng.standard_normal(shape)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("dim", [64, 1024])
def test_mlx4g32_is_no_worse_than_mlx(name, dim):
    rows = DISTRIBUTIONS[name](np.random.default_rng(4), (131072 // dim, dim)).astype(np.float32)
    ours = np.abs(check_mlx(rows) - rows).mean()
    theirs = np.abs(mlx_round_trip(rows) - rows).mean()
    assert ours <= theirs


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_mlx4g32_is_no_worse_than_mlx_on_narrow_input(dtype):
    rng = np.random.default_rng(5)
    narrow = mx.array(rng.standard_normal((128, 1024)).astype(np.float32)).astype(dtype)
    rows = np.array(narrow.astype(mx.float32))
    words, scales, biases = mx.quantize(narrow, group_size=32, bits=4)
    theirs = mlx_dequantize(np.array(words), *(np.array(part.astype(mx.float16)) for part in (scales, biases)))
    assert np.abs(check_mlx(rows) - rows).mean() <= np.abs(theirs.astype(np.float64) - rows).mean()


def test_mlx4g32_codes_are_nearest_for_the_stored_scale():
    """The scale is rounded first: no other code may be nearer in what the reader sees, up to fp16's own rounding."""
    rng = np.random.default_rng(6)
    rows = rng.standard_normal((64, 256)).astype(np.float32)
    raw = quantize.mlx4g32_encode(rows)
    _, scales, biases = (part.astype(np.float64) for part in mlx_parts(raw, 256))
    levels = np.arange(16.0)[:, None, None, None] * scales[:, :, None] + biases[:, :, None]
    best = np.abs(levels - rows.reshape(64, 8, 32)).min(axis=0)
    mine = np.abs(quantize.mlx4g32_decode(raw, 256).astype(np.float64) - rows).reshape(64, 8, 32)
    assert (mine <= best + 2**-10 * np.abs(rows.reshape(64, 8, 32)).max()).all()
    assert mine.mean() <= best.mean() * 1.001


def test_mlx4g32_layout():
    """Element j of a group sits at bits 4*(j%8) of word j//8; scales of all groups, then biases of all groups."""
    rows = np.tile(np.arange(16, dtype=np.float32), 4)[None, :].repeat(2, axis=0)
    rows[:, 32:] *= 2
    raw = quantize.mlx4g32_encode(rows)
    words, scales, biases = mlx_parts(raw, 64)
    # 15 is the end further from zero, so it is the bias and the codes count down from it.
    assert scales.tolist() == [[-1, -2]] * 2
    assert biases.tolist() == [[15, 30]] * 2
    for element in range(64):
        code = int(words[0, element // 8]) >> 4 * (element % 8) & 15
        assert code == 15 - element % 16
    np.testing.assert_array_equal(quantize.mlx4g32_decode(raw, 64), rows)


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.sampled_from([32, 64])), elements=finite),
)
def test_mlx4g32_any_finite_rows(rows):
    """Either it is refused, for a reason that holds, or it decodes as MLX does, within a step of what it was."""
    groups = rows.astype(np.float64).reshape(len(rows), -1, 32)
    span = groups.max(axis=2) - groups.min(axis=2)
    largest = max(np.abs(groups).max(), span.max())
    if largest > 65504 * (1 + 1e-6):
        with pytest.raises(CommandError, match="mlx4g32 can't hold"):
            quantize.mlx4g32_encode(rows)
    elif largest < 65504 * (1 - 1e-6):
        error = np.abs(check_mlx(rows) - rows).reshape(groups.shape).max(axis=2)
        rounding = 2**-10 * np.abs(groups).max(axis=2)
        assert (error <= span / 15 + rounding + 1e-6).all()


def test_mlx4g32_keeps_zeros_beside_the_smallest_values():
    """A value too small for a step of its own must not pull the zeros of its group with it."""
    rows = np.zeros((2, 32), np.float32)
    rows[0, 3], rows[1, 3] = 4e-8, -4e-8
    assert not check_mlx(rows).any()


def test_mlx4g32_at_the_edge_of_fp16():
    """15 times the scale must stay finite in fp16, or the reader would see infinities."""
    rng = np.random.default_rng(7)
    for low, high in [(-28504, 37000), (0, 65504), (-65504, 0), (-32752, 32752), (-30000, 35504), (1000, 65504)]:
        rows = rng.uniform(low, high, (50, 32)).astype(np.float32)
        rows[:, 0], rows[:, 1] = low, high
        error = np.abs(check_mlx(rows) - rows)
        assert error.max() <= 4500


def test_mlx4g32_refuses_what_fp16_cannot_hold():
    rows = np.zeros((3, 64), np.float32)
    rows[1, 40] = 65505
    with pytest.raises(CommandError, match="mlx4g32 can't hold 65505, at most 65504"):
        quantize.mlx4g32_encode(rows)
    rows[1, 40], rows[1, 41] = 40000, -40000
    with pytest.raises(CommandError, match="mlx4g32 can't hold in one group a span of 80000, at most 65504"):
        quantize.mlx4g32_encode(rows)
    rows[1, 41], rows[1, 10] = 0, -40000  # in another group
    check_mlx(rows)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 40, 6399])
def test_mlx4g32_refuses_what_is_not_finite(bad, at):
    rows = np.ones(6400, np.float32)
    rows[at] = bad
    with pytest.raises(CommandError, match="mlx4g32 can't hold NaN or infinity"):
        quantize.mlx4g32_encode(rows.reshape(100, 64))


def test_mlx4g32_decodes_what_mlx_quantized():
    rng = np.random.default_rng(9)
    rows = mx.array(rng.standard_normal((200, 512)).astype(np.float16))
    parts = [np.array(part) for part in mx.quantize(rows, group_size=32, bits=4)]
    raw = np.concatenate([part.view(np.uint8) for part in parts], axis=1)
    assert raw.shape == (200, 320)
    np.testing.assert_array_equal(
        bits_of(quantize.mlx4g32_decode(raw, 512)), bits_of(mlx_dequantize(*parts).astype(np.float32))
    )


def test_mlx4g32_decodes_any_bytes_as_mlx_does():
    """Native input isn't checked: any scale and bias can arrive, subnormal, overflowing, infinite or NaN."""
    rng = np.random.default_rng(10)
    dim = 256
    raw = rng.integers(0, 256, (400, dim // 2 + dim // 8), dtype=np.uint8)
    tame = raw[200:, dim // 2 :].view(np.uint16)
    tame &= 0xBBFF  # magnitudes below 1: the fast way
    theirs = mlx_dequantize(*mlx_parts(raw, dim)).astype(np.float32)
    ours = quantize.mlx4g32_decode(raw, dim)
    nan = np.isnan(theirs)
    assert 0 < nan[:200].sum() < nan[:200].size
    assert not nan[200:].any()
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(bits_of(ours)[~nan], bits_of(theirs)[~nan])
    np.testing.assert_array_equal(bits_of(quantize.mlx4g32_decode(raw[200:], dim)), bits_of(theirs)[200:])


def test_rounding_in_fp32_is_rounding_to_fp16():
    """Every mantissa of a scale times every code, at normal and subnormal exponents."""
    for exponent in (0, 1, 15, 26):
        scales = (np.arange(1024, dtype=np.uint16) | exponent << 10).view(np.float16)
        exact = np.arange(16, dtype=np.float64)[:, None] * scales.astype(np.float64)
        rounded = np.ascontiguousarray(exact, np.float32).reshape(-1)
        quantize._round_to_fp16(rounded)
        expected = exact.astype(np.float16).astype(np.float32).reshape(-1)
        np.testing.assert_array_equal(bits_of(rounded), bits_of(expected))
