"""`mlx<bits>g<group>[:<type>]`: the layouts of MLX's affine quantization.

A row is what `mx.quantize` makes of it: D codes of `bits` bits, packed, then a scale for every `group` values, then a
bias for each, both of the type. A code c stands for c * scale + bias, which MLX computes in that type: the product is
rounded, then the sum. Here both are computed in fp32 and rounded to the type. That is the same, because fp32 has more
than twice the mantissa bits of fp16 and bf16 and two more: rounding twice then is rounding once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from pion.replies import Buffer
from pion.storage import bitpack, floats
from pion.storage.quantize import block_values, blocks, check_range, fold
from pion.storage.stored_format import Format

BITS: Final = (2, 3, 4, 6, 8)
GROUPS: Final = (32, 64, 128)

_ENCODE_VALUES: Final = 4 * floats.BLOCK_VALUES
"""Values whose scales and biases are chosen together. That is many short steps, and larger blocks make them count less;
their values, 1 MiB, still stay in the cache until the codes are chosen."""

_LEAST_SCALE: Final = np.float32(1e-7)
"""As in MLX: keeps a constant group from dividing by zero; not zero in any of the types."""


_SIGN: Final = np.int32(-(2**31))


@attrs.frozen(eq=False)
class ScaleType:
    """The type of scales and biases, and of what a reader computes with them."""

    name: str
    nbytes: int
    largest: float
    """The largest finite value."""

    overflow: float
    """From here on rounding to the type gives infinity."""

    narrow: Callable[[NDArray[np.float32]], NDArray[Any]]
    """(n,) fp32 to the type, nearest even; bf16 as its bits."""

    widen: Callable[[NDArray[np.uint8]], NDArray[np.float32]]
    """Contiguous bytes to (n,) fp32, exactly."""

    round: Callable[[NDArray[np.float32], NDArray[np.int32]], None]
    """Round fp32 to the nearest value of the type, ties to even, in place; what it takes is said at each.

    The second array is scratch of the same shape.
    """

    def largest_scale(self, levels: int) -> np.float32:
        """The largest value of the type whose product with `levels` is finite in it."""
        nearest = self.narrow(np.array([self.overflow / levels], np.float32))
        bits = nearest.view(np.uint32 if self.nbytes == 4 else np.uint16)
        while float(self.widen(bits.view(np.uint8))[0]) * levels >= self.overflow:
            np.subtract(bits, 1, out=bits)
        return np.float32(self.widen(bits.view(np.uint8))[0])


def _round_to_fp16(values: NDArray[np.float32], scratch: NDArray[np.int32]) -> None:
    """Only for values within the range of fp16 that are multiples of 2**-24 where they are subnormal in it.

    The sums and products here are. Then cutting the mantissa to 11 bits is all that rounding means.
    """
    _cut(values.view(np.int32), 13, scratch)


def _round_to_bf16(values: NDArray[np.float32], scratch: NDArray[np.int32]) -> None:
    """Any values, infinities too; a NaN stays one if its lower 16 bits are 0, as in one made of bf16 values."""
    _cut(values.view(np.int32), 16, scratch)


def _round_to_fp32(values: NDArray[np.float32], scratch: NDArray[np.int32]) -> None:
    """Nothing to do."""


def _mask(where: NDArray[np.bool_]) -> NDArray[np.int32]:
    """All bits where it holds. What is chosen with it takes a third of the time of `np.where`, which branches."""
    mask = where.astype(np.int32)
    return np.negative(mask, out=mask)


def _chosen(mask: NDArray[np.int32], one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float32]:
    """`one` where the mask is set, else `other`, bit for bit."""
    bits: NDArray[np.int32] = one.view(np.int32) ^ other.view(np.int32)
    np.bitwise_and(bits, mask, out=bits)
    np.bitwise_xor(bits, other.view(np.int32), out=bits)
    return bits.view(np.float32)


def _cut(bits: NDArray[np.int32], count: int, scratch: NDArray[np.int32]) -> None:
    """Round the mantissa to `count` bits less, ties to even; a carry goes into the exponent, which is right."""
    np.right_shift(bits, count, out=scratch)
    np.bitwise_and(scratch, 1, out=scratch)
    np.add(bits, scratch, out=bits)
    np.add(bits, (1 << count - 1) - 1, out=bits)
    np.bitwise_and(bits, -1 << count, out=bits)


FP16: Final = ScaleType(
    name="fp16",
    nbytes=2,
    largest=floats.FP16_MAX,
    overflow=65520.0,
    narrow=floats.fp32_to_fp16,
    widen=lambda raw: floats.fp16_to_fp32(raw.view(np.float16)),
    round=_round_to_fp16,
)
BF16: Final = ScaleType(
    name="bf16",
    nbytes=2,
    largest=(2 - 2.0**-7) * 2.0**127,
    overflow=(2 - 2.0**-8) * 2.0**127,
    narrow=floats.fp32_to_bf16,
    widen=lambda raw: floats.bf16_to_fp32(raw.view(np.uint16)),
    round=_round_to_bf16,
)
FP32: Final = ScaleType(
    name="fp32",
    nbytes=4,
    largest=(2 - 2.0**-23) * 2.0**127,
    overflow=(2 - 2.0**-24) * 2.0**127,
    narrow=lambda values: values,
    widen=lambda raw: raw.view(np.float32),
    round=_round_to_fp32,
)
SCALE_TYPES: Final = (FP16, BF16, FP32)


@attrs.frozen(eq=False)
class MlxFormat(Format):
    """One of the family. Its name leaves fp16 out: `mlx4g32`, `mlx4g64:bf16`."""

    bits: int = attrs.field(kw_only=True)
    group: int = attrs.field(kw_only=True)
    scales: ScaleType = attrs.field(kw_only=True)

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def row_bytes(self, dim: int) -> int:
        """See `Format`."""
        return dim * self.bits // 8 + dim // self.group * 2 * self.scales.nbytes

    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        """See `Format`. Scale and bias are those of MLX, rounded to the type before the codes are chosen.

        Raises CommandError on NaN, infinity, a magnitude over the largest of the type and a group whose largest and
        smallest value are further apart than that: the reader computes in the type, where such a group would overflow.
        """
        count, dim = rows.shape
        out = np.empty((count, self.row_bytes(dim)), np.uint8)
        largest_scale = self.scales.largest_scale(self.levels)
        work = np.empty(block_values(count, dim), np.float32)
        with np.errstate(all="ignore"):
            for block in blocks(count, dim, _ENCODE_VALUES):
                self._encode_block(rows[block], largest_scale, out[block], work)
        return out.reshape(-1)

    def _encode_block(
        self,
        rows: NDArray[np.float32],
        largest_scale: np.float32,
        out: NDArray[np.uint8],
        work: NDArray[np.float32],
    ) -> None:
        count, dim = rows.shape
        levels, kind = np.float32(self.levels), self.scales
        high, low = self._extremes(rows, work)
        below = -low
        check_range(self.name, np.maximum(high, below), kind.largest)
        span = high - low
        if not span.max(initial=0) < kind.largest:  # rounding may have brought it down to that
            check_range(self.name, high.astype(np.float64) - low, kind.largest, "in one group a span of ")

        # MLX's choice: the end further from zero is met exactly, and so is zero itself where it lies within.
        from_low = _mask(below > high)
        edge = _chosen(from_low, low, high)
        scale = np.maximum(np.divide(span, levels, out=span), _LEAST_SCALE, out=span)
        bits = scale.view(np.int32)
        np.bitwise_xor(bits, ~from_low & _SIGN, out=bits)
        steps = np.rint(edge / scale)
        off_zero = steps != 0
        # Infinite when all values of the group are one huge number: any scale will do then.
        scale = _chosen(_mask(off_zero & np.isfinite(steps)), edge / steps, scale)
        bias = (edge.view(np.int32) & _mask(off_zero)).view(np.float32)

        packed, width = dim * self.bits // 8, dim // self.group * kind.nbytes
        both = np.concatenate((np.clip(scale, -largest_scale, largest_scale), bias))
        narrow = kind.narrow(both).view(np.uint8)
        out[:, packed : packed + width] = narrow[: count * width].reshape(count, width)
        out[:, packed + width :] = narrow[count * width :].reshape(count, width)
        scale, bias = kind.widen(narrow).reshape(2, -1)

        # Rounded scales and biases can push codes out of the range, but those of most groups don't.
        ends = np.rint(((low - bias) / scale, (high - bias) / scale))
        within = bool(ends.min() >= 0 and ends.max() <= levels)
        in_row = dim // self.group
        for part in blocks(count, dim):
            groups = slice(part.start * in_row, part.stop * in_row)
            values = rows[part].reshape(-1, self.group)
            scaled = work[: values.size].reshape(values.shape)
            np.subtract(values, bias[groups, None], out=scaled)
            np.divide(scaled, scale[groups, None], out=scaled)
            np.rint(scaled, out=scaled)
            if not within:
                np.clip(scaled, 0, levels, out=scaled)
            codes = np.empty(values.size, np.uint8)
            np.copyto(codes, scaled.reshape(-1), casting="unsafe")
            out[part, :packed] = bitpack.pack(codes, self.bits).reshape(-1, packed)

    def _extremes(
        self, rows: NDArray[np.float32], work: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The largest and the smallest value of every group."""
        count, dim = rows.shape
        in_row = dim // self.group
        high, low = np.empty((2, count * in_row), np.float32)
        for part in blocks(count, dim):
            values, groups = rows[part].reshape(-1), slice(part.start * in_row, part.stop * in_row)
            high[groups] = fold(np.maximum, values, self.group, work)
            low[groups] = fold(np.minimum, values, self.group, work)
        return high, low

    def decode(self, raw: Buffer, count: int, dim: int) -> NDArray[np.float32]:
        """See `Format`. Any bytes will do, not only those of `encode`.

        The values are those of `mx.dequantize`, widened: the same bits, but for the payload of a NaN that scales or
        biases that aren't finite lead to.
        """
        rows = np.frombuffer(raw, np.uint8).reshape(count, self.row_bytes(dim))
        out = np.empty((count, dim), np.float32)
        packed, width = dim * self.bits // 8, dim // self.group * self.scales.nbytes
        scratch = np.empty(block_values(count, dim), np.int32)
        with np.errstate(all="ignore"):
            for block in blocks(count, dim):
                self._decode_block(
                    bitpack.unpack(rows[block, :packed].reshape(-1), self.bits),
                    rows[block, packed : packed + width].reshape(-1),
                    rows[block, packed + width :].reshape(-1),
                    out[block].reshape(-1, self.group),
                    scratch,
                )
        return out

    def _decode_block(
        self,
        codes: NDArray[np.uint8],
        scales: NDArray[np.uint8],
        biases: NDArray[np.uint8],
        out: NDArray[np.float32],
        scratch: NDArray[np.int32],
    ) -> None:
        kind = self.scales
        scale, bias = kind.widen(scales), kind.widen(biases)
        codes, scratch = codes.reshape(out.shape), scratch[: out.size].reshape(out.shape)
        np.multiply(codes, scale[:, None], out=out)
        kind.round(out, scratch)
        np.add(out, bias[:, None], out=out)
        kind.round(out, scratch)
        if kind is not FP16:
            return
        overflows = ~(np.abs(scale) * np.float32(self.levels) + np.abs(bias) <= np.float32(kind.largest))
        if overflows.any():
            # Something could overflow in fp16 or isn't finite. Rare, so the slow arithmetic of fp16 itself will do.
            exact = codes[overflows] * scales.view(np.float16)[overflows, None]
            exact += biases.view(np.float16)[overflows, None]
            out[overflows] = floats.fp16_to_fp32(exact.reshape(-1)).reshape(exact.shape)


def _all() -> dict[str, MlxFormat]:
    found: dict[str, MlxFormat] = {}
    for bits in BITS:
        for group in GROUPS:
            for kind in SCALE_TYPES:
                layout = f"mlx{bits}g{group}"
                name = layout if kind is FP16 else f"{layout}:{kind.name}"
                fmt = MlxFormat(name, multiple=group, bits=bits, group=group, scales=kind)
                found[name] = found[f"{layout}:{kind.name}"] = fmt
    return found


PATTERN: Final = "mlx<2|3|4|6|8>g<32|64|128>[:fp16|:bf16|:fp32]"
_NAMES: Final = _all()
MLX4G32: Final = _NAMES["mlx4g32"]


def resolve(name: str) -> MlxFormat | None:
    """The format of that name, or None. `mlx4g32:fp16` is `mlx4g32`."""
    return _NAMES.get(name)
