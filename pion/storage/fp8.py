"""fp8: e4m3fn codes and an fp16 scale for every 32 values.

e4m3fn has a sign, four bits of exponent with bias 7 and three of mantissa. It has no infinity, reaches 448, and keeps
steps of 2**-9 below 2**-6. A code stands for its value times the scale, exactly, in fp32.

Where in a binade the largest value of a group lands decides how its values round, by up to a fifth of the error. So the
scale is the better of two: largest value at 256, or at 288. On N(0, 1) that makes the relative error 2.15 %; one scale
alone gives 2.33 %, the usual one (largest value at 448) 2.40 %.
"""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pion.replies import Buffer
from pion.storage.floats import FP16_MAX, fp16_to_fp32, fp32_to_fp16
from pion.storage.quantize import GROUP, block_values, blocks, check_range, fold
from pion.storage.stored_format import Format

E4M3_MAX: Final = 448.0
FP8_MAX: Final = E4M3_MAX * FP16_MAX
"""The largest magnitude: beyond it the scale is no longer a finite fp16."""

_TARGETS: Final = (np.float32(256), np.float32(288))
"""What the largest magnitude of a group is made, before the scale is rounded."""

_LEAST_NORMAL: Final = np.float32(2.0**-6)
_LEAST_SCALE: Final = np.float16(2.0**-24)
_EXPONENT: Final = np.int32(0x7F800000)
_STEP_OF_2_20: Final = np.int32(20 << 23)
_CODE_OFFSET: Final = np.int32(24)

_VALUES: Final[NDArray[np.float32]] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""Every code's value; 0x7F and 0xFF are NaN."""


class Fp8(Format):
    """See the module."""

    def row_bytes(self, dim: int) -> int:
        """See `Format`."""
        return dim + dim // GROUP * 2

    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        """See `Format`. Raises CommandError on NaN, infinity and magnitudes over `FP8_MAX`.

        A group of zeros has scale 0. -0.0 stays -0.0.
        """
        count, dim = rows.shape
        out = np.empty((count, self.row_bytes(dim)), np.uint8)
        scratch = np.empty((4, block_values(count, dim)), np.float32)
        with np.errstate(all="ignore"):
            for block in blocks(count, dim):
                values = rows[block].reshape(-1)
                codes, scales = _encode_block(self.name, values, scratch[:, : values.size])
                out[block, :dim] = codes.reshape(-1, dim)
                out[block, dim:] = scales.view(np.uint8).reshape(-1, dim // GROUP * 2)
        return out.reshape(-1)

    def decode(self, raw: Buffer, count: int, dim: int) -> NDArray[np.float32]:
        """See `Format`. Any bytes will do; a code or a scale that is NaN gives NaN."""
        rows = np.frombuffer(raw, np.uint8).reshape(count, self.row_bytes(dim))
        out = np.empty((count, dim), np.float32)
        indices = np.empty(block_values(count, dim), np.intp)
        with np.errstate(all="ignore"):
            for block in blocks(count, dim):
                values = out[block]
                codes = indices[: values.size].reshape(values.shape)
                np.copyto(codes, rows[block, :dim])
                np.take(_VALUES, codes, out=values, mode="wrap")
                scales = fp16_to_fp32(rows[block, dim:].reshape(-1).view(np.float16))
                groups = values.reshape(-1, GROUP)
                np.multiply(groups, scales[:, None], out=groups)
        return out


def _encode_block(
    name: str, values: NDArray[np.float32], scratch: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Flat values to codes and scales. `scratch` is four rows as long."""
    magnitudes, work, rounder, halves = scratch
    np.abs(values, out=magnitudes)
    largest = fold(np.maximum, magnitudes, GROUP, halves).copy()
    check_range(name, largest, FP8_MAX)
    scales = _scale(largest, _TARGETS[0])
    least_error = _error(magnitudes, scales, work, rounder, halves)
    for target in _TARGETS[1:]:
        other = _scale(largest, target)
        error = _error(magnitudes, other, work, rounder, halves)
        scales = np.where(error < least_error, other, scales)
        least_error = np.minimum(error, least_error)

    _scaled(magnitudes, scales, work)
    _exponents(work, rounder)
    # Adding 2**(e+20) to a magnitude with exponent e makes the sum's last bit the last bit of the code: the adder
    # rounds. 24 is even, so ties are right, and makes exponent plus mantissa the code in the lower 7 bits of the last
    # sum.
    bits, sums = rounder.view(np.int32), work.view(np.int32)
    np.add(bits, _CODE_OFFSET, out=bits)
    np.add(work, rounder, out=work)
    np.right_shift(sums, 20, out=bits)
    np.add(sums, bits, out=sums)
    np.bitwise_and(sums, 0x7F, out=sums)
    codes = np.empty(values.size, np.uint8)
    np.copyto(codes, sums, casting="unsafe")
    sign = np.signbit(values).view(np.uint8)
    sign *= 128
    codes |= sign
    return codes, scales


def _scale(largest: NDArray[np.float32], target: np.float32) -> NDArray[np.float16]:
    """The fp16 scale that brings `largest` to about `target`, and never beyond what e4m3 holds; 0 for a zero group."""
    scale = np.maximum(fp32_to_fp16(largest / target), _LEAST_SCALE)
    # Beyond the range of fp16 the scale was cut; among its subnormals rounding can take a third off it.
    short = largest > np.float32(E4M3_MAX) * fp16_to_fp32(scale)
    scale = np.where(short, np.nextafter(scale, np.float16(np.inf)), scale)
    result: NDArray[np.float16] = np.where(largest > 0, scale, np.float16(0))
    return result


def _scaled(magnitudes: NDArray[np.float32], scales: NDArray[np.float16], out: NDArray[np.float32]) -> None:
    """Magnitudes over their scales; scale 0 stands for 1, since only a zero group has it."""
    divisor = fp16_to_fp32(scales)
    divisor[divisor == 0] = 1
    np.divide(magnitudes.reshape(-1, GROUP), divisor[:, None], out=out.reshape(-1, GROUP))


def _exponents(values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """2**(e+20) for values with exponent e, of at least -6."""
    np.maximum(values, _LEAST_NORMAL, out=out)
    bits = out.view(np.int32)
    np.bitwise_and(bits, _EXPONENT, out=bits)
    np.add(bits, _STEP_OF_2_20, out=bits)


def _error(
    magnitudes: NDArray[np.float32],
    scales: NDArray[np.float16],
    work: NDArray[np.float32],
    rounder: NDArray[np.float32],
    halves: NDArray[np.float32],
) -> NDArray[np.float32]:
    """The squared error of every group with these scales. The last three are scratch."""
    _scaled(magnitudes, scales, work)
    _exponents(work, rounder)
    # (x + r) - r - x, where r rounds: the error in units of the scale.
    np.add(work, rounder, out=halves)
    np.subtract(halves, rounder, out=halves)
    np.subtract(halves, work, out=halves)
    np.multiply(halves, halves, out=work)
    return fold(np.add, work, GROUP, halves) * np.square(fp16_to_fp32(scales))


FP8: Final = Fp8("fp8", multiple=GROUP)
