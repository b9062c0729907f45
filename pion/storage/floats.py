"""Conversions between fp32, fp16 and bf16 that keep every bit that can be kept.

bf16 travels as its uint16 bits, because NumPy has no such type. Widening is exact. Narrowing rounds to nearest, ties to
even. A NaN stays a NaN: with its payload where that fits, else with the upper bits of it. fp32 beyond the range of fp16
becomes +-65504, and an infinity stays an infinity. No function warns and none depends on NumPy's error state.

NumPy's own fp16 casts run in software on x86, where its builds must work without F16C; narrowing a value that is
subnormal in fp16 takes fifty times as long as another. Integer and float operations on whole blocks give the same bits
in a half to three quarters of the time, whatever the values. On Arm the casts are single instructions and are used.
"""

from __future__ import annotations

import platform
from typing import Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

FP16_MAX: Final = 65504.0
"""The largest finite fp16."""

BLOCK_VALUES: Final = 65_536
"""Values worked on at a time: the scratch of a block, a few times 256 KiB, stays in the second-level cache."""

_NARROW_VALUES: Final = 2 * BLOCK_VALUES
"""Values narrowed to bf16 at a time: without scratch a larger block fits, and is looked through for a NaN while it is
in the cache."""

_CASTS_IN_HARDWARE: Final = platform.machine().lower() in ("arm64", "aarch64")

_TWO_112: Final = np.float32(2.0**112)
_LEAST_FP32: Final = np.array([1], np.uint32).view(np.float32)[0]
_SIGN_AND_FP16_BITS: Final = np.int32(0x8FFFE000 - 2**32)
_MAGNITUDE: Final = np.int32(0x7FFFFFFF)
_EXPONENT: Final = np.int32(0x7F800000)
_LEAST_NORMAL_FP16: Final = np.int32(113 << 23)
_ROUNDER: Final = np.int32((13 << 23) + 0x800)
_FP16_MAX_BITS: Final = int(np.float32(FP16_MAX).view(np.int32))


def fp16_to_fp32(values: NDArray[np.float16]) -> NDArray[np.float32]:
    """Exact, NaN payloads included. Takes and returns a 1-D array."""
    # A process that flushes subnormals to zero (some libraries switch that on) would lose those of fp16 below.
    if _CASTS_IN_HARDWARE or not _LEAST_FP32 * _TWO_112:
        return values.astype(np.float32)
    return _widen_in_software(values)


def _widen_in_software(values: NDArray[np.float16]) -> NDArray[np.float32]:
    result = np.empty(values.size, np.float32)
    for start in range(0, values.size, BLOCK_VALUES):
        block = values[start : start + BLOCK_VALUES].view(np.int16)
        floats = result[start : start + BLOCK_VALUES]
        bits = floats.view(np.int32)
        # Sign extension brings the sign to bit 31. Exponent and mantissa land in the fields of fp32, with a bias that
        # is 112 too small; multiplying corrects it and makes the subnormals normal.
        np.left_shift(block, 13, out=bits, dtype=np.int32)
        np.bitwise_and(bits, _SIGN_AND_FP16_BITS, out=bits)
        np.multiply(floats, _TWO_112, out=floats)
        if block.max() >= 0x7C00 or block.view(np.uint16).max() >= 0xFC00:
            np.bitwise_or(bits, _EXPONENT, out=bits, where=(block & 0x7FFF) >= 0x7C00)
    return result


def fp32_to_fp16(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """Nearest even, saturating at +-65504. Takes and returns a 1-D array."""
    if _CASTS_IN_HARDWARE:
        with np.errstate(all="ignore"):
            result = values.astype(np.float16)
        special = ~(np.abs(values) <= np.float32(FP16_MAX))
        if special.any():
            result[special] = _narrow_special(values[special].view(np.uint32)).view(np.float16)
        return result
    return _narrow_in_software(values).view(np.float16)


def _narrow_in_software(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    result = np.empty(values.size, np.uint16)
    width = min(BLOCK_VALUES, values.size)
    first, second = np.empty(width, np.int32), np.empty(width, np.int32)
    for start in range(0, values.size, BLOCK_VALUES):
        bits = values[start : start + BLOCK_VALUES].view(np.int32)
        rounder, magnitude = first[: bits.size], second[: bits.size]
        # Adding 2**(e+13) to a magnitude with exponent e makes the sum's last bit the last bit of the fp16: the adder
        # rounds. For magnitudes that are subnormal in fp16, e is that of the least normal one. 0x800 is even, so ties
        # are right, and makes exponent plus mantissa the bits of the fp16 in the lower half of the last sum.
        np.bitwise_and(bits, _EXPONENT, out=rounder)
        np.maximum(rounder, _LEAST_NORMAL_FP16, out=rounder)
        np.add(rounder, _ROUNDER, out=rounder)
        np.bitwise_and(bits, _MAGNITUDE, out=magnitude)
        special = magnitude > _FP16_MAX_BITS if magnitude.max() > _FP16_MAX_BITS else None
        if special is not None:
            magnitude[special] = rounder[special] = 0
        np.add(magnitude.view(np.float32), rounder.view(np.float32), out=magnitude.view(np.float32))
        np.right_shift(magnitude, 13, out=rounder)
        np.add(magnitude, rounder, out=magnitude)
        np.right_shift(bits, 16, out=rounder)
        np.bitwise_and(rounder, 0x8000, out=rounder)
        np.bitwise_or(magnitude, rounder, out=magnitude)
        block = result[start : start + BLOCK_VALUES]
        np.copyto(block, magnitude, casting="unsafe")
        if special is not None:
            block[special] = _narrow_special(bits.view(np.uint32)[special])
    return result


def _narrow_special(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """NaN, infinities and magnitudes over 65504, given as fp32 bits, to fp16 bits."""
    sign = (bits >> 16) & 0x8000
    payload = (bits >> 13) & 0x3FF
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    payload |= np.where(nan & (payload == 0), np.uint32(0x200), np.uint32(0))
    finite = (bits & 0x7F800000) != 0x7F800000
    return (sign | np.where(finite, np.uint32(0x7BFF), 0x7C00 | payload)).astype(np.uint16)


def bf16_to_fp32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact, NaN payloads included: a bf16 is the upper half of an fp32. Any shape."""
    result: NDArray[np.float32] = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    return result


def fp32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Nearest even, as bf16 bits. Takes and returns a 1-D array."""
    result = np.empty(values.size, np.uint16)
    target = result.view(ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        for start in range(0, values.size, _NARROW_VALUES):
            source = values[start : start + _NARROW_VALUES]
            target[start : start + _NARROW_VALUES] = source
            largest = np.maximum.reduce(source)
            if largest != largest:  # there is a NaN; ml_dtypes forgets its payload
                nan = np.isnan(source)
                upper = (source[nan].view(np.uint32) >> 16).astype(np.uint16)
                result[start : start + _NARROW_VALUES][nan] = np.where(upper & 0x7F, upper, upper | 0x40)
    return result
