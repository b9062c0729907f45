"""turbo4, turbo3 and turbo2 against a float64 oracle written from the specification."""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pion.errors import CommandError
from pion.storage.formats import TURBO2, TURBO3, TURBO4, get_format
from pion.storage.turbo import CODEBOOKS, Turbo

ALL = [TURBO4, TURBO3, TURBO2]
BOUNDS = {4: 0.0085, 3: 0.0310, 2: 0.1090}
WIDTHS = [32, 64, 96, 128, 160, 512, 1024]
each = pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)


@functools.cache
def rotation(size: int) -> np.ndarray:
    """H S / sqrt(B) as a matrix, entry by entry."""
    digest = int.from_bytes(hashlib.sha256(b"pion turbo rotation 1").digest()[:16], "little")
    signs = [-1.0 if digest >> j & 1 else 1.0 for j in range(size)]
    return np.array([[(-1.0) ** (i & j).bit_count() * signs[j] for j in range(size)] for i in range(size)]) / size**0.5


def rotated(rows: np.ndarray, back: bool = False) -> np.ndarray:
    """Every block of (n, D) rows rotated, in float64."""
    dim = rows.shape[1]
    size = max(size for size in (32, 64, 128) if dim % size == 0)
    matrix = rotation(size)
    blocks = rows.astype(np.float64).reshape(-1, size)
    return (blocks @ (matrix if back else matrix.T)).reshape(rows.shape)


def parts_of(fmt: Turbo, raw: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The level of each value and its scale, (n, D) each, as float64."""
    rows = raw.reshape(-1, dim * fmt.bits // 8 + dim // 16)
    positive = list(CODEBOOKS[fmt.bits])
    book = np.array([-level for level in reversed(positive)] + positive)
    codes = np.empty((len(rows), dim), int)
    for row, packed in zip(codes, rows, strict=True):
        number = int.from_bytes(packed[: dim * fmt.bits // 8].tobytes(), "little")
        row[:] = [number >> fmt.bits * j & (1 << fmt.bits) - 1 for j in range(dim)]
    scales = rows[:, dim * fmt.bits // 8 :].copy().view(np.float16).astype(np.float64)
    return book[codes], np.repeat(scales, 32, axis=1)


def decode(fmt: Turbo, raw: np.ndarray, dim: int) -> np.ndarray:
    return fmt.decode(raw.data, raw.size // fmt.row_bytes(dim), dim)


def oracle_error(fmt: Turbo, rows: np.ndarray) -> float:
    """The squared error of one round in float64: root mean square, nearest level, least squares, fp16."""
    positive = np.array(CODEBOOKS[fmt.bits])
    book = np.concatenate([-positive[::-1], positive])
    groups = rotated(rows).reshape(-1, 32)
    scale = np.sqrt((groups**2).mean(axis=1, keepdims=True))
    levels = book[np.abs(groups[:, :, None] / scale[:, :, None] - book).argmin(axis=2)]
    scale = (groups * levels).sum(axis=1, keepdims=True) / (levels**2).sum(axis=1, keepdims=True)
    return ((levels * scale.astype(np.float16).astype(np.float64) - groups) ** 2).sum()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codebooks_are_lloyd_max_for_the_gaussian(bits):
    """Each level is the mean of a standard Gaussian over what is nearer to it than to any other."""
    levels = np.array(CODEBOOKS[bits])
    edges = [0.0, *((levels[1:] + levels[:-1]) / 2), math.inf]
    for level, low, high in zip(levels, edges[:-1], edges[1:], strict=True):
        density = (math.exp(-low * low / 2) - math.exp(-high * high / 2)) / math.sqrt(2 * math.pi)
        mass = (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2))) / 2
        assert level == pytest.approx(density / mass, abs=2e-8)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_rotation_is_one(size):
    np.testing.assert_allclose(rotation(size) @ rotation(size).T, np.eye(size), atol=1e-12)


@each
@pytest.mark.parametrize("dim", WIDTHS)
def test_decoding_any_bytes(fmt, dim):
    """Native rows: any codes, any finite scales, negative and subnormal ones too."""
    raw = np.random.default_rng(dim).integers(0, 256, (9, fmt.row_bytes(dim)), dtype=np.uint8)
    raw[:, dim * fmt.bits // 8 + 1 :: 2] &= 0xBF  # the upper byte of a scale: no exponent of NaN
    levels, scales = parts_of(fmt, raw, dim)
    expected = rotated(levels * scales, back=True)
    np.testing.assert_allclose(decode(fmt, raw, dim), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@each
@pytest.mark.parametrize("dim", WIDTHS)
def test_encoding_against_one_round_in_float64(fmt, dim):
    rng = np.random.default_rng(dim)
    for rows in (
        rng.standard_normal((40, dim)),
        rng.standard_t(2, (40, dim)),
        rng.standard_normal((40, dim)) * np.where(np.arange(dim) % 37 == 0, 50, 1) - 3,
    ):
        rows = rows.astype(np.float32)
        raw = fmt.encode(rows)
        assert raw.size == 40 * fmt.row_bytes(dim)
        error = decode(fmt, raw, dim).astype(np.float64) - rows
        assert (error**2).sum() <= oracle_error(fmt, rows)
        # The scale is the one with the least squared error for the codes that were chosen, as an fp16.
        levels, scales = (part.reshape(-1, 32) for part in parts_of(fmt, raw, dim))
        groups = rotated(rows).reshape(-1, 32)
        best = (groups * levels).sum(axis=1) / (levels**2).sum(axis=1)
        np.testing.assert_allclose(scales[:, 0], best, rtol=2**-11 + 1e-4)


@each
@pytest.mark.parametrize("dim", [32, 64, 128, 1024])
@pytest.mark.parametrize("seed", [1, 2])
def test_mean_squared_error_on_a_gaussian(fmt, dim, seed):
    rows = np.random.default_rng(seed).standard_normal(((1 << 19) // dim, dim)).astype(np.float32)
    error = decode(fmt, fmt.encode(rows), dim).astype(np.float64) - rows
    assert (error**2).mean() <= BOUNDS[fmt.bits]


@each
def test_outlier_channels_cost_little_of_the_others(fmt):
    """What the rotation is for: without it a channel 50 times as large takes all levels of its group for itself."""
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((512, 128)).astype(np.float32)
    rows[:, 5] *= 50
    error = decode(fmt, fmt.encode(rows), 128).astype(np.float64) - rows
    variance = (rows.astype(np.float64) ** 2).mean()
    assert (error**2).mean() <= 1.5 * BOUNDS[fmt.bits] * variance


@given(
    fmt=st.sampled_from(ALL),
    rows=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.sampled_from([32, 64, 96, 128])),
        elements=st.floats(-10000, 10000, width=32),
    ),
)
def test_any_rows_up_to_10000(fmt, rows):
    """None is refused; the error is no larger than that of storing zeros, but for the smallest scales."""
    raw = fmt.encode(rows)
    decoded = decode(fmt, raw, rows.shape[1]).astype(np.float64)
    assert np.isfinite(decoded).all()
    wide = rows.astype(np.float64)
    assert ((decoded - wide) ** 2).sum() <= 0.75 * (wide**2).sum() + rows.size * 1e-12
    assert (decoded[(rows == 0).all(axis=1)] == 0).all()


@each
@pytest.mark.parametrize("dim", [32, 128])
def test_the_worst_rows_up_to_10000(fmt, dim):
    """All of a block's energy in one value after the rotation: the largest scale there is."""
    rows = (10000 * np.sign(rotation(dim))[[0, 1, dim - 1]]).astype(np.float32)
    decoded = decode(fmt, fmt.encode(rows), dim)
    assert np.isfinite(decoded).all()
    assert ((decoded.astype(np.float64) - rows) ** 2).sum() <= 0.75 * (rows.astype(np.float64) ** 2).sum()


@each
def test_zero_rows_are_zero(fmt):
    rows = np.zeros((2, 64), np.float32)
    rows[1] = -0.0
    raw = fmt.encode(rows)
    assert not raw.reshape(2, -1)[:, -4:].any()
    assert decode(fmt, raw, 64).view(np.uint32).tolist() == [[0] * 64] * 2


@each
def test_the_smallest_values_are_zero_and_harm_no_others(fmt):
    rows = np.array([[1e-12] * 64, [1e-30] * 64, [0] * 40 + [1e-45] + [0] * 23, [1e-23] * 64], np.float32)
    assert np.abs(decode(fmt, fmt.encode(rows), 64)).max() <= 1e-7


@each
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 99, 6399])
def test_what_is_not_finite_is_refused(fmt, bad, at):
    rows = np.ones(6400, np.float32)
    rows[at] = bad
    with pytest.raises(CommandError, match=f"{fmt.name} can't hold NaN or infinity"):
        fmt.encode(rows.reshape(100, 64))


@each
@pytest.mark.parametrize("size", [1e6, 1e20, 3.4e38])
def test_what_needs_too_large_a_scale_is_refused(fmt, size):
    rows = np.zeros((2, 64), np.float32)
    rows[1] = size
    with pytest.raises(CommandError, match=rf"{fmt.name} can't hold \d\S* here: a scale would be over 65504"):
        fmt.encode(rows)


@each
@pytest.mark.parametrize("dim", [1, 16, 31, 33, 72, 80, 100])
def test_widths_that_are_refused(fmt, dim):
    with pytest.raises(CommandError, match=f"{fmt.name} needs a dim divisible by 32, got {dim}"):
        fmt.check_dim(dim)


@each
@pytest.mark.parametrize("count", [1, 2, 3, 9, 600])
@pytest.mark.parametrize("dim", [32, 128, 160])
def test_each_row_alone_gives_the_same_bytes(fmt, dim, count):
    rows = np.random.default_rng(count).standard_normal((count, dim)).astype(np.float32)
    raw = fmt.encode(rows)
    alone = np.concatenate([fmt.encode(row[None]) for row in rows])
    np.testing.assert_array_equal(raw, alone)
    decoded = decode(fmt, raw, dim)
    for row, part in zip(decoded, raw.reshape(count, -1), strict=True):
        np.testing.assert_array_equal(decode(fmt, part, dim)[0].view(np.uint32), row.view(np.uint32))


def test_names():
    assert [get_format(name) for name in (b"turbo4", b"TURBO3", b"turbo2")] == ALL
    assert [fmt.durable_name for fmt in ALL] == ["turbo4/1", "turbo3/1", "turbo2/1"]
    for name in (b"turbo", b"turbo5", b"turbo4/1", b"turbo4/2"):
        with pytest.raises(CommandError, match="unknown format"):
            get_format(name)
