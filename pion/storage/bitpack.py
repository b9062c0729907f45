"""Codes of a few bits, packed without gaps: element j of a run is bits b*j to b*j + b - 1, the lowest bit first.

Eight codes make b whole bytes, so words of eight codes are worked on at a time: each step joins neighbours, or parts
them. That is also how MLX packs, for every width there is.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

CODES: Final = 8
"""Codes in a word; their number must be divisible by it."""

_PARTS: Final[dict[int, tuple[type[np.unsignedinteger], int]]] = {
    3: (np.uint8, 3),
    6: (np.uint16, 3),
}
"""Bits of a code -> eight of them, packed, as so many units of a type."""


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Flat codes below 2**bits to flat bytes, `bits` for every eight codes; `bits` is 2, 3, 4, 6 or 8.

    Overwrites `codes`, and for 8 bits returns it.
    """
    if bits == 8:
        return codes
    if bits in (2, 4):  # in fewer steps: pairs of codes are codes of twice the bits, at last bytes
        codes = codes if bits == 4 else _joined(codes, 2)
        return _joined(codes, 4)
    words = codes.view(np.uint64)
    scratch = np.empty_like(words)
    for width in (bits, 2 * bits, 4 * bits):
        lane = 8 * width // bits
        np.right_shift(words, np.uint64(lane - width), out=scratch)
        if 2 * width > lane:  # the upper code would be in the way of the lower one
            np.bitwise_and(words, _mask(width, 2 * lane), out=words)
            np.bitwise_and(scratch, _mask(width, 2 * lane) << np.uint64(width), out=scratch)
            np.bitwise_or(words, scratch, out=words)
        else:
            np.bitwise_or(words, scratch, out=words)
            np.bitwise_and(words, _mask(2 * width, 2 * lane), out=words)
    unit, parts = _PARTS[bits]
    view = words.view(unit).reshape(len(words), -1)
    packed = np.empty((len(words), parts), unit)
    for part in range(parts):
        packed[:, part] = view[:, part]
    return packed.reshape(-1).view(np.uint8)


def unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """What `pack` made, contiguous and flat, to flat codes. `bits` 2, 3, 4, 6 or 8; for 8 it is `packed` itself."""
    if bits == 8:
        return packed
    if bits in (2, 4):
        codes = _parted(packed, 4)
        return codes if bits == 4 else _parted(codes, 2)
    unit, parts = _PARTS[bits]
    source = packed.view(unit).reshape(-1, parts)
    words = np.zeros(len(source), np.uint64)
    view = words.view(unit).reshape(len(words), -1)
    for part in range(parts):
        view[:, part] = source[:, part]
    scratch = np.empty_like(words)
    for width in (4 * bits, 2 * bits, bits):
        lane = 8 * width // bits
        np.left_shift(words, np.uint64(lane - width), out=scratch)
        if 2 * width > lane:
            np.bitwise_and(words, _mask(width, 2 * lane), out=words)
            np.bitwise_and(scratch, _mask(width, 2 * lane) << np.uint64(lane), out=scratch)
            np.bitwise_or(words, scratch, out=words)
        else:
            np.bitwise_or(words, scratch, out=words)
            np.bitwise_and(words, _mask(width, lane), out=words)
    return words.view(np.uint8)


def _joined(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pairs of codes of 2 or 4 bits as bytes; the lower code is the lower one."""
    pairs = codes.view(np.uint16)
    result = pairs >> 8 - bits
    result |= pairs
    return result.astype(np.uint8)


def _parted(pairs: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The inverse of `_joined`."""
    result = pairs.astype(np.uint16)
    result |= result << 8 - bits
    result &= ((1 << bits) - 1) * 0x0101
    return result.view(np.uint8)


def _mask(width: int, lane: int) -> np.uint64:
    """The lowest `width` bits of every `lane` bits."""
    ones = (1 << width) - 1
    return np.uint64(sum(ones << at for at in range(0, 64, lane)))
