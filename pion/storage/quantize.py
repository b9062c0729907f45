"""The quantizers: rows of fp32 to packed bytes and back. Pure NumPy, no loop over rows."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from pion.errors import CommandError
from pion.storage.floats import FP16_MAX, fp16_to_fp32

INT8_MAX_MAGNITUDE: Final = 127.5 * FP16_MAX
"""Beyond it the fp16 scale of int8 can't be large enough to keep the error within half a step."""

MLX_GROUP: Final = 32
MLX_MAX_SCALE: Final = np.float32(4364.0)
"""The largest fp16 scale whose 15-fold is finite in fp16, the type in which the reader multiplies."""
MLX_MIN_SCALE: Final = np.float32(1e-7)
"""As in MLX: keeps a constant group from dividing by zero; not zero as an fp16."""


def _refuse_non_finite(name: str, extremes: NDArray[np.float32]) -> None:
    if not np.isfinite(extremes).all():
        raise CommandError(f"{name} can't hold NaN or infinity")


def int8_encode(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(n, D) fp32 to (n, D + 2) bytes: D int8 codes, then the fp16 scale.

    The error is at most half of the stored scale. Raises CommandError on NaN, infinity or a magnitude over 8,351,760.
    """
    count, dim = rows.shape
    with np.errstate(all="ignore"):
        magnitude = np.maximum(rows.max(axis=1), -rows.min(axis=1))
        _refuse_non_finite("int8", magnitude)
        if magnitude.max(initial=0) > INT8_MAX_MAGNITUDE:
            raise CommandError(f"int8 can't hold {magnitude.max():g}: the largest magnitude is {INT8_MAX_MAGNITUDE:g}")
        scale = np.minimum(magnitude / np.float32(127), np.float32(FP16_MAX)).astype(np.float16)
        # Rounded down too far, the scale would clip the largest value by more than half a step.
        short = magnitude > np.float32(127.5) * scale.astype(np.float32)
        scale = np.where(short, np.nextafter(scale, np.float16(np.inf)), scale)
        step = scale.astype(np.float32)
        step[step == 0] = 1
        codes = rows / step[:, None]
        np.rint(codes, out=codes)
        np.clip(codes, -127, 127, out=codes)
    out = np.empty((count, dim + 2), np.uint8)
    out[:, :dim].view(np.int8)[...] = codes
    out[:, dim:].view(np.float16)[:, 0] = scale
    return out


def int8_decode(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(n, D + 2) bytes to (n, D) fp32; exact products of code and scale."""
    scale = fp16_to_fp32(np.ascontiguousarray(raw[:, -2:]).view(np.float16))
    result: NDArray[np.float32] = np.multiply(raw[:, :-2].view(np.int8), scale, dtype=np.float32)
    return result


def mlx4g32_encode(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(n, D) fp32 to (n, D/8*4 + D/32*4) bytes: u32 words of eight 4-bit codes, fp16 scales, fp16 biases.

    The scale is rounded to fp16 before the codes are chosen. Raises CommandError on NaN, infinity, a magnitude over
    65,504 or a group whose values span more than that: the reader computes in fp16.
    """
    count, dim = rows.shape
    groups = rows.reshape(count, dim // MLX_GROUP, MLX_GROUP)
    with np.errstate(all="ignore"):
        high, low = groups.max(axis=2), groups.min(axis=2)
        span = high - low
        _refuse_non_finite("mlx4g32", high)
        _refuse_non_finite("mlx4g32", low)
        largest = max(span.max(initial=0), high.max(initial=0), -low.min(initial=0))
        if largest > FP16_MAX:
            raise CommandError(
                f"mlx4g32 can't hold {largest:g}: values and the span of a group are at most {FP16_MAX:g}"
            )
        from_low = np.abs(low) > np.abs(high)
        edge = np.where(from_low, low, high)
        scale = np.maximum(span / np.float32(15), MLX_MIN_SCALE)
        scale = np.where(from_low, scale, -scale)
        steps = np.rint(edge / scale)
        scale = np.where(steps != 0, edge / steps, scale)
        bias = np.where(steps != 0, edge, np.float32(0)).astype(np.float16)
        scale = np.clip(scale, -MLX_MAX_SCALE, MLX_MAX_SCALE).astype(np.float16)
        codes = groups - bias.astype(np.float32)[:, :, None]
        codes /= scale.astype(np.float32)[:, :, None]
        np.rint(codes, out=codes)
        np.clip(codes, 0, 15, out=codes)
    nibbles = codes.astype(np.uint8).reshape(count, dim // 2, 2)
    words = dim // 2
    side = dim // MLX_GROUP * 2
    out = np.empty((count, words + 2 * side), np.uint8)
    out[:, :words] = nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)
    out[:, words : words + side].view(np.float16)[...] = scale
    out[:, words + side :].view(np.float16)[...] = bias
    return out


def mlx4g32_decode(raw: NDArray[np.uint8], dim: int) -> NDArray[np.float32]:
    """Rows of `mlx4g32_encode` (or of `mx.quantize`) to (n, D) fp32, the bits of `mx.dequantize` widened."""
    count = len(raw)
    words = dim // 2
    side = dim // MLX_GROUP * 2
    codes = np.empty((count, words, 2), np.uint8)
    np.bitwise_and(raw[:, :words], 15, out=codes[:, :, 0])
    np.right_shift(raw[:, :words], 4, out=codes[:, :, 1])
    scale = np.ascontiguousarray(raw[:, words : words + side]).view(np.float16)
    bias = np.ascontiguousarray(raw[:, words + side :]).view(np.float16)
    grouped = codes.reshape(count, dim // MLX_GROUP, MLX_GROUP)
    with np.errstate(all="ignore"):
        values = grouped * scale[:, :, None] + bias[:, :, None]
    return fp16_to_fp32(values).reshape(count, dim)
