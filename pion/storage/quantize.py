"""The quantizers: rows of fp32 to packed bytes and back.

Pure NumPy without a loop over rows: blocks of rows small enough for the second-level cache are worked on as wholes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pion.errors import CommandError
from pion.storage.floats import BLOCK_VALUES, FP16_MAX, fp16_to_fp32, fp32_to_fp16

INT8_MAX: Final = 127 * FP16_MAX
"""The largest magnitude in int8: beyond it the scale is no longer a finite fp16."""

GROUP: Final = 32
"""Values that share a scale and a bias in mlx4g32."""

_LEVELS: Final = np.float32(15)
_LEAST_SCALE: Final = np.float32(1e-7)
"""As in MLX: keeps a constant group from dividing by zero; not zero as an fp16."""
_LARGEST_SCALE: Final = np.float32(4364)
"""The largest fp16 whose 15-fold is finite in fp16, the type in which the reader multiplies code and scale."""


def _blocks(count: int, dim: int) -> Iterator[slice]:
    step = max(1, BLOCK_VALUES // dim)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def int8_encode(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(n, D) fp32 to (n, D + 2) bytes: D int8 codes from -127 to 127, then the fp16 scale.

    The error is at most half of the stored scale. Raises CommandError on NaN, infinity and magnitudes over `INT8_MAX`.
    """
    count, dim = rows.shape
    out = np.empty((count, dim + 2), np.uint8)
    with np.errstate(all="ignore"):
        for block in _blocks(count, dim):
            _int8_encode_block(rows[block], out[block, :dim].view(np.int8), out[block, dim:].view(np.float16))
    return out


def _int8_encode_block(rows: NDArray[np.float32], codes: NDArray[np.int8], scales: NDArray[np.float16]) -> None:
    magnitude = np.abs(np.maximum(rows.max(axis=1), -rows.min(axis=1)))  # abs: a row of zeros must not give -0
    _check_range("int8", magnitude, INT8_MAX)
    scale = (magnitude / np.float32(127)).astype(np.float16)
    # Where rounding to fp16 took so much off the scale (in its subnormals it can) that the largest value would be cut
    # by half a step or more, the next larger scale is right. So no code leaves -127..127, and only a zero row has
    # scale 0.
    short = magnitude >= np.float32(127.5) * scale.astype(np.float32)
    scale = np.where(short & (magnitude > 0), np.nextafter(scale, np.float16(np.inf)), scale)
    scales[:, 0] = scale
    divisor = scale.astype(np.float32)
    divisor[divisor == 0] = 1
    # A true division: multiplying by the reciprocal would round some quotients to the wrong side of a half.
    quotient = rows / divisor[:, None]
    np.rint(quotient, out=quotient)
    np.copyto(codes, quotient, casting="unsafe")


def int8_decode(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(n, D + 2) bytes to (n, D) fp32: the exact products of code and scale."""
    count, dim = len(raw), raw.shape[1] - 2
    out = np.empty((count, dim), np.float32)
    with np.errstate(all="ignore"):
        for block in _blocks(count, dim):
            scale = fp16_to_fp32(raw[block, dim:].copy().view(np.float16).reshape(-1))
            np.copyto(out[block], raw[block, :dim].view(np.int8))
            np.multiply(out[block], scale[:, None], out=out[block])
    return out


def mlx4g32_encode(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(n, D) fp32 to (n, D/2 + D/8) bytes: words of eight 4-bit codes, D/32 fp16 scales, D/32 fp16 biases.

    Scale and bias are those of MLX, rounded to fp16 before the codes are chosen. Raises CommandError on NaN, infinity,
    a magnitude over 65504 and a group whose largest and smallest value are further apart than that: the reader computes
    in fp16, where such a group would overflow.
    """
    count, dim = rows.shape
    packed, groups = dim // 2, dim // GROUP
    out = np.empty((count, packed + 4 * groups), np.uint8)
    with np.errstate(all="ignore"):
        for block in _blocks(count, dim):
            _mlx_encode_block(
                rows[block].reshape(-1, groups, GROUP),
                out[block, :packed],
                out[block, packed : packed + 2 * groups].view(np.float16),
                out[block, packed + 2 * groups :].view(np.float16),
            )
    return out


def _mlx_encode_block(
    rows: NDArray[np.float32], packed: NDArray[np.uint8], scales: NDArray[np.float16], biases: NDArray[np.float16]
) -> None:
    # One column per group: reductions and broadcasts along long rows are several times faster than over 32 values.
    # Always a copy, since what follows works in place: a single group's column would be the caller's own row.
    values = rows.reshape(-1, GROUP).T.copy()
    high, low = values.max(axis=0), values.min(axis=0)
    _check_range("mlx4g32", np.maximum(high, -low), FP16_MAX)
    _check_range("mlx4g32", high - low, FP16_MAX, "in one group a span of ")

    # MLX's choice: the end further from zero is met exactly, and so is zero itself where it lies within.
    from_low = -low > high
    edge = np.where(from_low, low, high)
    scale = np.maximum((high - low) / _LEVELS, _LEAST_SCALE)
    scale = np.where(from_low, scale, -scale)
    steps = np.rint(edge / scale)
    off_zero = steps != 0
    scale = np.divide(edge, steps, out=scale, where=off_zero)
    bias = np.where(off_zero, edge, np.float32(0))

    scale = np.clip(scale, -_LARGEST_SCALE, _LARGEST_SCALE)
    scales[...] = (rounded := fp32_to_fp16(scale)).reshape(scales.shape)
    values_scale = fp16_to_fp32(rounded)
    biases[...] = (rounded := fp32_to_fp16(bias)).reshape(biases.shape)
    values -= fp16_to_fp32(rounded)
    values /= values_scale
    np.rint(values, out=values)
    np.clip(values, 0, _LEVELS, out=values)
    codes = values.astype(np.uint8)
    pairs = codes[0::2] | (codes[1::2] << 4)
    packed.reshape(len(packed), -1, GROUP // 2)[...] = pairs.T.reshape(len(packed), -1, GROUP // 2)


def mlx4g32_decode(raw: NDArray[np.uint8], dim: int) -> NDArray[np.float32]:
    """Rows of `mlx4g32_encode`, or any other codes, scales and biases in its layout, to (n, D) fp32.

    The values are those of `mx.dequantize`, which multiplies and adds in fp16, widened: the same bits, but for the
    payload of a NaN that scales or biases that aren't finite lead to.
    """
    count = len(raw)
    packed, groups = dim // 2, dim // GROUP
    out = np.empty((count, dim), np.float32)
    with np.errstate(all="ignore"):
        for block in _blocks(count, dim):
            _mlx_decode_block(
                raw[block, :packed],
                raw[block, packed : packed + 2 * groups].copy().view(np.float16).reshape(-1),
                raw[block, packed + 2 * groups :].copy().view(np.float16).reshape(-1),
                out[block],
            )
    return out


def _mlx_decode_block(
    packed: NDArray[np.uint8], scales: NDArray[np.float16], biases: NDArray[np.float16], out: NDArray[np.float32]
) -> None:
    pairs = packed.astype("<u2")
    pairs |= pairs << 4
    pairs &= 0x0F0F
    codes = pairs.view(np.uint8)
    scale, bias = fp16_to_fp32(scales), fp16_to_fp32(biases)
    reach = np.abs(scale) * _LEVELS + np.abs(bias)
    if not reach.max() <= FP16_MAX:
        # Something could overflow in fp16 or isn't finite. Rare, so the slow arithmetic of fp16 itself will do.
        exact = codes.reshape(-1, GROUP) * scales[:, None] + biases[:, None]
        out[...] = fp16_to_fp32(exact.reshape(-1)).reshape(out.shape)
        return
    # fp32 holds the product of an fp16 and 4 bits exactly, and has so many more bits than fp16 that rounding a sum in
    # fp32 and then to fp16 is rounding it once.
    np.copyto(out, codes)
    flat = out.reshape(-1)
    flat *= np.repeat(scale, GROUP)
    _round_to_fp16(flat)
    flat += np.repeat(bias, GROUP)
    _round_to_fp16(flat)


def _round_to_fp16(values: NDArray[np.float32]) -> None:
    """Round to the nearest fp16, ties to even, in place.

    Only for values within the range of fp16 that are multiples of 2**-24 where they are subnormal in it, as the sums
    and products here are: then cutting the mantissa to 11 bits is all that rounding means.
    """
    bits = values.view(np.int32)
    odd = bits >> 13
    odd &= 1
    bits += odd
    bits += 0xFFF
    bits &= ~0x1FFF


def _check_range(name: str, magnitudes: NDArray[np.float32], limit: float, what: str = "") -> None:
    largest = magnitudes.max(initial=0)
    if not largest <= limit:
        if not np.isfinite(largest):
            raise CommandError(f"{name} can't hold NaN or infinity")
        raise CommandError(f"{name} can't hold {what}{largest:.9g}, at most {limit:.9g}")
