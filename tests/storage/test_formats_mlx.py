"""The mlx family against MLX itself and a float64 oracle."""

from __future__ import annotations

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pion.errors import CommandError
from pion.storage import mlx_format
from pion.storage.formats import get_format
from pion.storage.mlx_format import MLX4G32, MlxFormat

NAMES = [
    f"mlx{bits}g{group}{kind}" for bits in (2, 3, 4, 6, 8) for group in (32, 64, 128) for kind in ("", ":bf16", ":fp32")
]
FAMILY = [get_format(name.encode()) for name in NAMES]
#: One of each width of codes, group and type, together all pairs but a few.
SOME = [
    get_format(name)
    for name in (
        b"mlx4g32",
        b"mlx2g64",
        b"mlx8g128",
        b"mlx3g32:bf16",
        b"mlx4g64:bf16",
        b"mlx6g64:fp32",
        b"mlx8g32:fp32",
    )
]
TYPES = {"fp16": mx.float16, "bf16": mx.bfloat16, "fp32": mx.float32}
NUMPY = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
LARGEST = {
    "fp16": 65504.0,
    "bf16": float(ml_dtypes.finfo(ml_dtypes.bfloat16).max),
    "fp32": float(np.finfo(np.float32).max),
}
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def named(formats):
    return pytest.mark.parametrize("fmt", formats, ids=lambda fmt: fmt.name)


def bits_of(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


def parts_of(fmt: MlxFormat, raw: np.ndarray, dim: int) -> tuple[mx.array, mx.array, mx.array]:
    """Words, scales and biases as MLX takes them, cut by the table of the specification."""
    rows = raw.reshape(-1, fmt.row_bytes(dim))
    packed = dim * fmt.bits // 8
    width = dim // fmt.group * (4 if fmt.scales.name == "fp32" else 2)
    kind = TYPES[fmt.scales.name]
    words = mx.array(rows[:, :packed].copy().view(np.uint32))
    scales, biases = (mx.array(rows[:, at : at + width].copy()).view(kind) for at in (packed, packed + width))
    return words, scales, biases


def mlx_decoded(fmt: MlxFormat, words: mx.array, scales: mx.array, biases: mx.array) -> np.ndarray:
    """What `mx.dequantize` gives, widened."""
    values = mx.dequantize(words, scales, biases, group_size=fmt.group, bits=fmt.bits)
    assert values.dtype == TYPES[fmt.scales.name]
    return np.array(values.astype(mx.float32))


def mlx_bytes(parts: tuple[mx.array, ...]) -> np.ndarray:
    return np.concatenate([np.array(part.view(mx.uint8)) for part in parts], axis=1)


def decode(fmt: MlxFormat, raw: np.ndarray, dim: int) -> np.ndarray:
    raw = np.ascontiguousarray(raw).reshape(-1)
    return fmt.decode(raw.data, raw.size // fmt.row_bytes(dim), dim)


def checked(fmt: MlxFormat, rows: np.ndarray) -> np.ndarray:
    """Encode, compare our decoding with MLX's bit for bit, and return it as float64."""
    dim = rows.shape[1]
    raw = fmt.encode(rows)
    assert raw.size == len(rows) * fmt.row_bytes(dim)
    decoded = decode(fmt, raw, dim)
    np.testing.assert_array_equal(bits_of(decoded), bits_of(mlx_decoded(fmt, *parts_of(fmt, raw, dim))))
    assert np.isfinite(decoded).all()
    return decoded.astype(np.float64)


# Names ----------------------------------------------------------------------------------------------------------------


def test_every_name_is_one_object():
    assert len(set(FAMILY)) == 45
    assert [fmt.name for fmt in FAMILY] == NAMES
    assert get_format(b"mlx4g32") is get_format(b"mlx4g32:fp16") is get_format(b"MLX4G32:FP16") is MLX4G32
    assert get_format(b"mlx8g128:fp16").name == "mlx8g128"


@pytest.mark.parametrize(
    "name",
    [b"mlx5g32", b"mlx4g16", b"mlx4", b"mlx4g32:", b"mlx4g32:fp8", b"mlx04g32", b"mlx4g32:bf16:bf16", b"mlx4g032"],
)
def test_no_other_name_is_of_the_family(name):
    with pytest.raises(
        CommandError, match=r"unknown format .* mlx<2\|3\|4\|6\|8>g<32\|64\|128>\[:fp16\|:bf16\|:fp32\]"
    ):
        get_format(name)


@named(FAMILY)
@pytest.mark.parametrize("dim", [1, 32, 64, 72, 80, 96, 100, 128, 160, 512, 1024])
def test_widths(fmt, dim):
    """Fault class 22."""
    if dim % fmt.group:
        with pytest.raises(CommandError, match=f"{fmt.name} needs a dim divisible by {fmt.group}, got {dim}"):
            fmt.check_dim(dim)
        return
    fmt.check_dim(dim)
    scales = 2 * dim // fmt.group * (4 if fmt.name.endswith("fp32") else 2)
    assert fmt.row_bytes(dim) == dim * fmt.bits / 8 + scales
    rows = np.random.default_rng(dim).standard_normal((3, dim)).astype(np.float32)
    error = np.abs(checked(fmt, rows) - rows).reshape(3, -1, fmt.group)
    groups = rows.reshape(error.shape)
    step = (groups.max(axis=2, keepdims=True) - groups.min(axis=2, keepdims=True)) / fmt.levels
    # Half a step, or more at the end that MLX's choice doesn't meet; and what the type rounds.
    assert (error <= step + np.abs(groups).max() * (2**-6 if fmt.name.endswith("bf16") else 2**-9)).all()


# Bits -----------------------------------------------------------------------------------------------------------------


@named(FAMILY)
def test_native_rows_are_what_mlx_quantized(fmt):
    """Layout and decoding: its own codes, scales and biases come back as `mx.dequantize` gives them."""
    rows = np.random.default_rng(9).standard_normal((33, 256)).astype(np.float32)
    parts = mx.quantize(mx.array(rows).astype(TYPES[fmt.scales.name]), group_size=fmt.group, bits=fmt.bits)
    raw = mlx_bytes(parts)
    assert raw.shape == (33, fmt.row_bytes(256))
    np.testing.assert_array_equal(bits_of(decode(fmt, raw, 256)), bits_of(mlx_decoded(fmt, *parts)))


@named([fmt for fmt in FAMILY if fmt.name.endswith("fp32")])
def test_with_fp32_scales_encoding_is_that_of_mlx(fmt):
    """There is nothing to round before the codes are chosen, so the bytes are the same, all of them."""
    rows = np.random.default_rng(10).standard_normal((200, 256)).astype(np.float32)
    rows[:20] *= 1e-6
    rows[20:40] = np.abs(rows[20:40]) + 3
    raw = mlx_bytes(mx.quantize(mx.array(rows), group_size=fmt.group, bits=fmt.bits))
    np.testing.assert_array_equal(fmt.encode(rows).reshape(200, -1), raw)


@named(SOME)
def test_decoding_against_float64(fmt):
    """Bit by bit from the specification: code j at bit `bits * j`, product rounded to the type, then the sum."""
    dim, kind = 128, NUMPY[fmt.scales.name]
    raw = np.random.default_rng(11).integers(0, 256, (20, fmt.row_bytes(dim)), dtype=np.uint8)
    packed, width = dim * fmt.bits // 8, np.dtype(kind).itemsize * dim // fmt.group
    tame = np.random.default_rng(12).standard_normal((20, 2 * dim // fmt.group)).astype(np.float32).astype(kind)
    raw[:, packed:] = tame.view(np.uint8)
    decoded = decode(fmt, raw, dim)
    for row in range(20):
        number = int.from_bytes(raw[row, :packed].tobytes(), "little")
        scales = raw[row, packed : packed + width].copy().view(kind).astype(np.float64)
        biases = raw[row, packed + width :].copy().view(kind).astype(np.float64)
        for j in range(dim):
            code = number >> fmt.bits * j & fmt.levels
            product = np.float64(np.array(code * scales[j // fmt.group]).astype(kind))
            value = np.float64(np.array(product + biases[j // fmt.group]).astype(kind))
            assert decoded[row, j] == value


@named(FAMILY)
def test_any_bytes_decode_as_in_mlx(fmt):
    """Native input isn't checked: any scale and bias can arrive, subnormal, overflowing, infinite or NaN."""
    dim = 256
    raw = np.random.default_rng(10).integers(0, 256, (400, fmt.row_bytes(dim)), dtype=np.uint8)
    # Half of the rows without extreme exponents: those that decode fast.
    tops = raw[200:, dim * fmt.bits // 8 :].reshape(200, -1, 4 if fmt.name.endswith("fp32") else 2)[:, :, -1]
    tops &= 0xBB
    raw[0, dim * fmt.bits // 8 :] = 0xFF  # NaN in every type
    theirs = mlx_decoded(fmt, *parts_of(fmt, raw, dim))
    ours = decode(fmt, raw, dim)
    nan = np.isnan(theirs)
    assert 0 < nan[:200].sum() < nan[:200].size
    assert not nan[200:].any()
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(bits_of(ours)[~nan], bits_of(theirs)[~nan])
    np.testing.assert_array_equal(bits_of(decode(fmt, raw[200:], dim)), bits_of(theirs)[200:])


@pytest.mark.parametrize(("kind", "numpy"), [(mlx_format.FP16, np.float16), (mlx_format.BF16, ml_dtypes.bfloat16)])
@pytest.mark.parametrize("levels", [15, 255])
def test_rounding_in_fp32_is_rounding_to_the_type(kind, numpy, levels):
    """Every mantissa of a scale times every code, at normal and subnormal exponents."""
    mantissa = 10 if numpy is np.float16 else 7
    for exponent in (0, 1, 15, 22):
        scales = (np.arange(1 << mantissa, dtype=np.uint16) | np.uint16(exponent << mantissa)).view(numpy)
        exact = np.arange(levels + 1, dtype=np.float64)[:, None] * scales.astype(np.float64)
        rounded = np.ascontiguousarray(exact, np.float32).reshape(-1)
        kind.round(rounded, np.empty(rounded.shape, np.int32))
        expected = exact.astype(numpy).astype(np.float32).reshape(-1)
        np.testing.assert_array_equal(bits_of(rounded), bits_of(expected))


@pytest.mark.parametrize("kind", mlx_format.SCALE_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("levels", [3, 7, 15, 63, 255])
def test_the_largest_scale_is_the_last_whose_product_is_finite(kind, levels):
    numpy = NUMPY[kind.name]
    scale = np.array([kind.largest_scale(levels)]).astype(numpy)
    above = (scale.view(np.uint32 if numpy is np.float32 else np.uint16) + 1).view(numpy)
    with np.errstate(over="ignore"):
        products = [np.float64(np.array(np.float64(s[0]) * levels).astype(numpy)) for s in (scale, above)]
    assert np.isfinite(products).tolist() == [True, False]


# Error ----------------------------------------------------------------------------------------------------------------


def mlx_error(fmt: MlxFormat, rows: np.ndarray) -> float:
    """`mx.quantize`, scales and biases rounded to the type, `mx.dequantize`: the mean absolute error."""
    words, scales, biases = mx.quantize(mx.array(rows), group_size=fmt.group, bits=fmt.bits)
    kind = TYPES[fmt.scales.name]
    return np.abs(mlx_decoded(fmt, words, scales.astype(kind), biases.astype(kind)).astype(np.float64) - rows).mean()


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
@named(SOME)
def test_no_worse_than_mlx(name, fmt):
    rows = DISTRIBUTIONS[name](np.random.default_rng(4), (64, 1024)).astype(np.float32)
    assert np.abs(checked(fmt, rows) - rows).mean() <= mlx_error(fmt, rows)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_no_worse_than_mlx_on_narrow_input(dtype):
    rng = np.random.default_rng(5)
    narrow = mx.array(rng.standard_normal((128, 1024)).astype(np.float32)).astype(dtype)
    rows = np.array(narrow.astype(mx.float32))
    words, scales, biases = mx.quantize(narrow, group_size=32, bits=4)
    theirs = mlx_decoded(MLX4G32, words, scales.astype(mx.float16), biases.astype(mx.float16))
    assert np.abs(checked(MLX4G32, rows) - rows).mean() <= np.abs(theirs.astype(np.float64) - rows).mean()


@named(SOME)
def test_codes_are_nearest_for_the_stored_scale(fmt):
    """The scale is rounded first: no other code may be nearer in what the reader sees, but for the type's rounding."""
    rows = np.random.default_rng(6).standard_normal((32, 256)).astype(np.float32)
    raw = fmt.encode(rows)
    _, scales, biases = (np.array(part.astype(mx.float32)).astype(np.float64) for part in parts_of(fmt, raw, 256))
    levels = np.arange(fmt.levels + 1.0)[:, None, None, None] * scales[:, :, None] + biases[:, :, None]
    grouped = rows.reshape(32, -1, fmt.group)
    best = np.abs(levels - grouped).min(axis=0)
    mine = np.abs(decode(fmt, raw, 256).astype(np.float64) - rows).reshape(grouped.shape)
    rounding = {"fp16": 2**-10, "bf16": 2**-7, "fp32": 2**-22}[fmt.scales.name]
    assert (mine <= best + rounding * np.abs(grouped).max()).all()


def test_mlx4g32_layout():
    """Element j of a group sits at bits 4*(j%8) of word j//8; scales of all groups, then biases of all groups."""
    rows = np.tile(np.arange(16, dtype=np.float32), 4)[None, :].repeat(2, axis=0)
    rows[:, 32:] *= 2
    raw = MLX4G32.encode(rows).reshape(2, -1)
    words, scales, biases = raw[:, :32].copy().view(np.uint32), raw[:, 32:36].copy(), raw[:, 36:].copy()
    # 15 is the end further from zero, so it is the bias and the codes count down from it.
    assert scales.view(np.float16).tolist() == [[-1, -2]] * 2
    assert biases.view(np.float16).tolist() == [[15, 30]] * 2
    for element in range(64):
        code = int(words[0, element // 8]) >> 4 * (element % 8) & 15
        assert code == 15 - element % 16
    np.testing.assert_array_equal(decode(MLX4G32, raw, 64), rows)


# Edges ----------------------------------------------------------------------------------------------------------------


@given(fmt=st.sampled_from(FAMILY), data=st.data())
def test_any_finite_rows(fmt, data):
    """Either it is refused, for a reason that holds, or it decodes as MLX does, within a step of what it was."""
    shape = st.tuples(st.integers(1, 3), st.sampled_from([128, 256]))
    rows = data.draw(hnp.arrays(np.float32, shape, elements=finite))
    groups = rows.astype(np.float64).reshape(len(rows), -1, fmt.group)
    span = groups.max(axis=2) - groups.min(axis=2)
    limit = LARGEST[fmt.scales.name]
    largest = max(np.abs(groups).max(), span.max())
    if largest > limit * (1 + 1e-6):
        with pytest.raises(CommandError, match=f"{fmt.name} can't hold"):
            fmt.encode(rows)
    elif largest < limit * (1 - 1e-6):
        error = np.abs(checked(fmt, rows) - rows).reshape(groups.shape).max(axis=2)
        rounding = {"fp16": 2**-10, "bf16": 2**-7, "fp32": 2**-22}[fmt.scales.name] * np.abs(groups).max(axis=2)
        assert (error <= span / fmt.levels + 2 * rounding + 1e-6).all()


@named(SOME)
def test_zeros_beside_the_smallest_values_stay(fmt):
    """A value too small for a step of its own must not pull the zeros of its group with it."""
    rows = np.zeros((2, 128), np.float32)
    rows[0, 3], rows[1, 3] = 4e-8, -4e-8
    assert not checked(fmt, rows).any()


@named(FAMILY)
def test_zero_rows_and_negative_zero(fmt):
    rows = np.zeros((3, 128), np.float32)
    rows[1] = -0.0
    assert bits_of(checked(fmt, rows).astype(np.float32)).tolist() == [[0] * 128] * 3


@named(FAMILY)
def test_constant_groups_are_met_exactly(fmt):
    """A value of the type is the bias itself, which is also the step's end."""
    values = np.array([0.5, -3.0, 1024.0, -0.0625], np.float32)
    rows = np.repeat(values, 128).reshape(4, 128)
    np.testing.assert_array_equal(checked(fmt, rows), rows)
    if ":" in fmt.name:  # beyond fp16
        rows[:2], rows[2:] = np.float32(2.0**120), np.float32(-(2.0**127))
        np.testing.assert_array_equal(checked(fmt, rows), rows)


@named(FAMILY)
def test_at_the_edge_of_the_type(fmt):
    """The largest code times the scale must stay finite, or the reader would see infinities."""
    rng = np.random.default_rng(7)
    for low, high in [(-0.435, 0.565), (0, 1), (-1, 0), (-0.5, 0.5), (-0.458, 0.542), (0.015, 1)]:
        # Multiples of an eighth of the type's step, so that the ends are in the type.
        ends = (np.array([low, high]) * LARGEST[fmt.scales.name]).astype(np.float32).view(np.uint32) & 0xFFFF0000
        low, high = (float(end) for end in ends.view(np.float32))
        rows = np.clip(rng.uniform(0, 1, (50, 128)) * high + (1 - rng.uniform(0, 1, (50, 128))) * low, low, high)
        rows = rows.astype(np.float32)
        rows[:, :2], rows[:, fmt.group - 1] = (low, high), high
        error = np.abs(checked(fmt, rows) - rows)
        assert error.max() <= (high - low) / fmt.levels * 1.1 + LARGEST[fmt.scales.name] * 2**-7


def test_what_fp16_cannot_hold_is_refused():
    rows = np.zeros((3, 64), np.float32)
    rows[1, 40] = 65505
    with pytest.raises(CommandError, match="mlx4g32 can't hold 65505, at most 65504"):
        MLX4G32.encode(rows)
    rows[1, 40], rows[1, 41] = 40000, -40000
    with pytest.raises(CommandError, match="mlx4g32 can't hold in one group a span of 80000, at most 65504"):
        MLX4G32.encode(rows)
    rows[1, 41], rows[1, 10] = 0, -40000  # in another group
    checked(MLX4G32, rows)


@named([get_format(b"mlx4g64:bf16"), get_format(b"mlx8g64:fp32")])
def test_a_span_beyond_fp32_is_refused(fmt):
    rows = np.zeros((1, 64), np.float32)
    rows[0, :2] = 3e38, -3e38
    with pytest.raises(CommandError, match=rf"{fmt.name} can't hold in one group a span of 6\.00000001e\+38"):
        fmt.encode(rows)


@named(FAMILY)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 40, 6399])
def test_what_is_not_finite_is_refused(fmt, bad, at):
    rows = np.ones(6400, np.float32)
    rows[at] = bad
    with pytest.raises(CommandError, match=f"{fmt.name} can't hold NaN or infinity"):
        fmt.encode(rows.reshape(50, 128))


@named(SOME)
@pytest.mark.parametrize("count", [1, 2, 3000])
def test_encoding_does_not_write_to_its_input(fmt, count):
    rows = np.random.default_rng(3).standard_normal((count, 128)).astype(np.float32)
    rows.setflags(write=False)
    raw = fmt.encode(rows)
    raw.setflags(write=False)
    decode(fmt, raw, 128)
