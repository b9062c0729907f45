"""Conversions between fp32, fp16 and bf16 that keep every bit that can be kept.

bf16 travels as its uint16 bits, because NumPy has no such type. Widening is exact. Narrowing rounds to nearest, ties to
even; a NaN stays a NaN with the payload bits that fit; fp32 beyond the range of fp16 becomes +-65504 and an infinity
stays an infinity.
"""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

FP16_MAX: Final = 65504.0
"""The largest finite fp16."""


def fp16_to_fp32(values: NDArray[np.float16]) -> NDArray[np.float32]:
    """Exact, NaN payloads included. Any shape."""
    return values.astype(np.float32)


def bf16_to_fp32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact, NaN payloads included: a bf16 is the upper half of an fp32. Any shape."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp32_to_fp16(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """Nearest even, saturating at +-65504. Any shape."""
    with np.errstate(all="ignore"):
        result = values.astype(np.float16)
        low, high = values.min(initial=0), values.max(initial=0)
        if not (low >= -FP16_MAX and high <= FP16_MAX):
            beyond = np.isinf(result) & ~np.isinf(values)
            result[beyond] = np.copysign(np.float32(FP16_MAX), values[beyond]).astype(np.float16)
    return result


def fp32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Nearest even, as bf16 bits. Any shape."""
    with np.errstate(all="ignore"):
        result: NDArray[np.uint16] = values.astype(ml_dtypes.bfloat16).view(np.uint16)
        high = values.max(initial=0)
    if high != high:  # a NaN somewhere: ml_dtypes replaces its payload
        nan = np.isnan(values)
        bits = values[nan].view(np.uint32)
        upper = (bits >> 16).astype(np.uint16)
        result[nan] = np.where(upper & 0x7F, upper, upper | 0x40)
    return result
