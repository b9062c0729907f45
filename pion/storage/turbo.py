"""turbo4, turbo3, turbo2: rotated, then quantized by codebooks for the Gaussian.

A fixed rotation mixes the values of a row, so that whatever their distribution was, what is quantized is close to a
Gaussian, for which the best codebooks are known. A row is cut into blocks of B values, B the largest power of two that
divides D, at most 128. Each block becomes y = H S x / sqrt(B): S flips the signs in `SIGNS`, H is the Hadamard matrix
in natural order, H[i, j] = (-1)**popcount(i & j). Every 32 values of y share an fp16 scale; a code stands for its level
times the scale. Reading turns back, x = S H y / sqrt(B), in fp32.

The scale is the root mean square at first; after the codes are chosen it is the one with the least squared error, and
both are chosen once more. On N(0, 1) the error is 0.0078, 0.0291 and 0.1065 of the variance with 4, 3 and 2 bits.

`ROTATION` is the version of all that: signs, order, codebooks. It is written with every shape that uses it, and another
one is refused. Blocks are worked on as columns, so that each step is over long rows; the sums of a rotation are made in
one order, so rows converted in pieces give the bytes of the whole.
"""

from __future__ import annotations

import hashlib
from typing import Final

import attrs
import numpy as np
from numpy.typing import NDArray

from pion.errors import CommandError
from pion.replies import Buffer
from pion.storage import bitpack
from pion.storage.floats import FP16_MAX, fp16_to_fp32, fp32_to_fp16
from pion.storage.quantize import GROUP, block_values, blocks
from pion.storage.stored_format import Format

ROTATION: Final = 1
MAX_BLOCK: Final = 128

SIGNS: Final[NDArray[np.float32]] = 1 - 2 * np.unpackbits(
    np.frombuffer(hashlib.sha256(b"pion turbo rotation %d" % ROTATION).digest()[: MAX_BLOCK // 8], np.uint8),
    bitorder="little",
).astype(np.float32)
"""The sign of each value of a block: -1 where the bit of the digest is set, the lowest bit of a byte first."""

CODEBOOKS: Final = {
    4: (0.12839503, 0.38804830, 0.65675912, 0.94234046, 1.25623120, 1.61804639, 2.06901723, 2.73258957),
    3: (0.24509418, 0.75600528, 1.34390928, 2.15194570),
    2: (0.45278003, 1.51041761),
}
"""Bits -> the positive levels; the negative ones mirror them, and codes count from the lowest level up."""

_CELLS: Final = 4096
_CELLS_PER_UNIT: Final = 512
"""Codes are looked up by cells of the normalized value. A boundary is off by half a cell at most, which adds less than
a millionth of the variance to the error."""

_ROUNDS: Final = 2


@attrs.frozen(eq=False)
class Turbo(Format):
    """One width of codes. See the module."""

    bits: int = attrs.field(kw_only=True)
    _levels: NDArray[np.float32] = attrs.field(init=False, repr=False)
    """Code -> level."""
    _cell_codes: NDArray[np.uint8] = attrs.field(init=False, repr=False)
    """Cell -> code."""

    def __attrs_post_init__(self) -> None:
        positive = np.array(CODEBOOKS[self.bits])
        levels = np.concatenate([-positive[::-1], positive])
        centers = (np.arange(_CELLS) - _CELLS // 2 + 0.5) / _CELLS_PER_UNIT
        codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, centers)
        object.__setattr__(self, "_levels", levels.astype(np.float32))
        object.__setattr__(self, "_cell_codes", codes.astype(np.uint8))

    def row_bytes(self, dim: int) -> int:
        """See `Format`."""
        return dim * self.bits // 8 + dim // GROUP * 2

    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        """See `Format`.

        Raises CommandError on NaN, infinity, and values so large that a scale would be over 65504; none up to 10000 is.
        """
        count, dim = rows.shape
        out = np.empty((count, self.row_bytes(dim)), np.uint8)
        packed, size = dim * self.bits // 8, block_size(dim)
        scratch = np.empty((3, block_values(count, dim)), np.float32)
        cells = np.empty(scratch.shape[1], np.intp)
        with np.errstate(all="ignore"):
            for block in blocks(count, dim):
                values = rows[block].reshape(-1, size)
                codes, scales = self._encode_block(values, scratch[:, : values.size], cells[: values.size])
                out[block, :packed] = bitpack.pack(codes, self.bits).reshape(-1, packed)
                out[block, packed:] = scales.view(np.uint8).reshape(-1, dim // GROUP * 2)
        return out.reshape(-1)

    def _encode_block(
        self, values: NDArray[np.float32], scratch: NDArray[np.float32], cells: NDArray[np.intp]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
        """(n, B) values to flat codes and scales. `scratch` is three rows of n * B, `cells` one."""
        count, size = values.shape
        columns, work, products = scratch.reshape(3, size, count)
        np.multiply(values.T, SIGNS[:size, None], out=columns)
        magnitude = np.maximum(columns.max(), -columns.min())
        if not np.isfinite(magnitude):
            raise CommandError(f"{self.name} can't hold NaN or infinity")
        columns, work = _hadamard(columns, work)
        columns *= np.float32(size**-0.5)

        groups, levels, products = (each.reshape(-1, GROUP, count) for each in (columns, work, products))
        cells = cells.reshape(groups.shape)
        np.multiply(groups, groups, out=products)
        scale = np.sqrt(_sum(products) / np.float32(GROUP))
        if not scale.max() <= 2 * FP16_MAX:  # then the one with the least error isn't below a half of it
            raise self._too_large(magnitude)
        codes = np.empty(groups.shape, np.uint8)
        for _ in range(_ROUNDS):
            per_cell = np.divide(_CELLS_PER_UNIT, scale, out=np.zeros_like(scale), where=scale > 0)
            np.multiply(groups, per_cell[:, None], out=levels)
            np.add(levels, np.float32(_CELLS // 2), out=levels)
            # Not clip, which keeps a NaN (0 times an infinite `per_cell`): as an index it is far below zero.
            np.fmax(levels, 0, out=levels)
            np.fmin(levels, _CELLS - 1, out=levels)
            np.copyto(cells, levels, casting="unsafe")
            np.take(self._cell_codes, cells, out=codes, mode="wrap")
            np.copyto(cells, codes)
            np.take(self._levels, cells, out=levels, mode="wrap")
            np.multiply(groups, levels, out=products)
            scale = _sum(products)
            np.multiply(levels, levels, out=levels)
            scale /= _sum(levels)
        if not scale.max() <= FP16_MAX:
            raise self._too_large(magnitude)
        return codes.reshape(size, count).T.reshape(-1), fp32_to_fp16(scale.T.reshape(-1))

    def _too_large(self, magnitude: np.float32) -> CommandError:
        return CommandError(f"{self.name} can't hold {magnitude:.9g} here: a scale would be over {FP16_MAX:.9g}")

    def decode(self, raw: Buffer, count: int, dim: int) -> NDArray[np.float32]:
        """See `Format`. Any bytes will do; a scale that isn't finite makes the values of its block so."""
        rows = np.frombuffer(raw, np.uint8).reshape(count, self.row_bytes(dim))
        out = np.empty((count, dim), np.float32)
        packed, size = dim * self.bits // 8, block_size(dim)
        back = SIGNS[:size, None] * np.float32(size**-0.5)
        scratch = np.empty((2, block_values(count, dim)), np.float32)
        indices = np.empty(scratch.shape[1], np.intp)
        with np.errstate(all="ignore"):
            for block in blocks(count, dim):
                codes = bitpack.unpack(rows[block, :packed].reshape(-1), self.bits)
                first, second = scratch[:, : codes.size]
                np.copyto(indices[: codes.size], codes)
                np.take(self._levels, indices[: codes.size], out=first, mode="wrap")
                groups = first.reshape(-1, GROUP)
                scales = fp16_to_fp32(rows[block, packed:].reshape(-1).view(np.float16))
                np.multiply(groups, scales[:, None], out=groups)
                columns, work = second.reshape(size, -1), first.reshape(size, -1)
                np.copyto(columns, first.reshape(-1, size).T)
                columns, _ = _hadamard(columns, work)
                np.multiply(columns, back, out=columns)
                columns += np.float32(0)  # so that a zero row has no -0.0
                out[block].reshape(-1, size)[...] = columns.T
        return out


def block_size(dim: int) -> int:
    """B: the largest power of two that divides `dim`, at most 128."""
    return min(dim & -dim, MAX_BLOCK)


def _hadamard(
    columns: NDArray[np.float32], work: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """H times (B, n) columns: (the product, the other array). Both arrays are overwritten."""
    size, count = columns.shape
    half = 1
    while half < size:
        source = columns.reshape(-1, 2, half, count)
        result = work.reshape(-1, 2, half, count)
        np.add(source[:, 0], source[:, 1], out=result[:, 0])
        np.subtract(source[:, 0], source[:, 1], out=result[:, 1])
        columns, work = work, columns
        half *= 2
    return columns, work


def _sum(groups: NDArray[np.float32]) -> NDArray[np.float32]:
    """(m, 32, n) to (m, n), in one order whatever n is. Overwrites the groups."""
    half = groups.shape[1] // 2
    while half:
        np.add(groups[:, :half], groups[:, half : 2 * half], out=groups[:, :half])
        half //= 2
    return groups[:, 0].copy()


TURBO4: Final = Turbo("turbo4", multiple=GROUP, rotation=ROTATION, bits=4)
TURBO3: Final = Turbo("turbo3", multiple=GROUP, rotation=ROTATION, bits=3)
TURBO2: Final = Turbo("turbo2", multiple=GROUP, rotation=ROTATION, bits=2)
