"""The int8 quantizer, and what all quantizers share.

Pure NumPy without a loop over rows: blocks of rows small enough for the second-level cache are worked on as wholes.
Everything is element by element or adds in a fixed order, so rows converted in pieces give the bytes of the whole.
Scratch as large as a block is taken once for all blocks: the allocator may fetch such memory from the system each time,
and its first use costs more than what is done with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pion.errors import CommandError
from pion.storage.floats import BLOCK_VALUES, FP16_MAX, fp16_to_fp32

INT8_MAX: Final = 127 * FP16_MAX
"""The largest magnitude in int8: beyond it the scale is no longer a finite fp16."""

GROUP: Final = 32
"""Values that share a scale in fp8 and turbo, and those that share a scale and a bias in mlx4g32."""


def blocks(count: int, dim: int, size: int = BLOCK_VALUES) -> Iterator[slice]:
    """Slices of `count` rows of `dim` values, each of about `size` values."""
    step = max(1, size // dim)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def block_values(count: int, dim: int, size: int = BLOCK_VALUES) -> int:
    """Values in the largest of those blocks."""
    return min(count, max(1, size // dim)) * dim


def fold(
    function: np.ufunc, values: NDArray[np.float32], group: int, scratch: NDArray[np.float32]
) -> NDArray[np.float32]:
    """`function` over every `group` neighbours of flat values: (n,) to (n / group,). `group` is a power of two.

    Halves the array again and again, which is several times faster than reducing rows of 32, and adds in one order
    whatever surrounds the group. The result is a part of `scratch`, which has at least n values, and none of `values`.
    """
    at = 0
    while group > 1:
        half = scratch[at : at + values.size // 2]
        function(values[0::2], values[1::2], out=half)
        values, at, group = half, at + half.size, group // 2
    return values


def check_range(name: str, magnitudes: NDArray[np.floating[Any]], limit: float, what: str = "") -> None:
    """Raise CommandError, naming the format, if a magnitude is NaN, infinite or over `limit`."""
    largest = magnitudes.max(initial=0)
    if not largest <= limit:
        if not np.isfinite(largest):
            raise CommandError(f"{name} can't hold NaN or infinity")
        raise CommandError(f"{name} can't hold {what}{largest:.9g}, at most {limit:.9g}")


def int8_encode(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(n, D) fp32 to (n, D + 2) bytes: D int8 codes from -127 to 127, then the fp16 scale.

    The error is at most half of the stored scale. Raises CommandError on NaN, infinity and magnitudes over `INT8_MAX`.
    """
    count, dim = rows.shape
    out = np.empty((count, dim + 2), np.uint8)
    with np.errstate(all="ignore"):
        for block in blocks(count, dim):
            _int8_encode_block(rows[block], out[block, :dim].view(np.int8), out[block, dim:].view(np.float16))
    return out


def _int8_encode_block(rows: NDArray[np.float32], codes: NDArray[np.int8], scales: NDArray[np.float16]) -> None:
    magnitude = np.abs(np.maximum(rows.max(axis=1), -rows.min(axis=1)))  # abs: a row of zeros must not give -0
    check_range("int8", magnitude, INT8_MAX)
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
        for block in blocks(count, dim):
            scale = fp16_to_fp32(raw[block, dim:].copy().view(np.float16).reshape(-1))
            np.copyto(out[block], raw[block, :dim].view(np.int8))
            np.multiply(out[block], scale[:, None], out=out[block])
    return out
