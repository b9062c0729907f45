"""Rows whose bytes say what they are, so that one that is shifted, torn, old or someone else's shows itself.

A row begins with its unit's name, side, layer, row number and version; all other bytes follow from these.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Versions = NDArray[np.uint32]
"""The version of each row of a layer, by row number; 0 is no row."""

HEAD: Final = np.dtype(
    [("name", "S16"), ("side", "<u2"), ("layer", "<u2"), ("row", "<u4"), ("version", "<u4"), ("check", "<u4")]
)
ROW_BYTES_LEAST: Final = HEAD.itemsize
NAME_BYTES_MOST: Final = 16

_FACTORS: Final = tuple(np.uint32(value) for value in (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1))


def make(name: bytes, side: int, layer: int, start: int, versions: Versions, row_bytes: int) -> memoryview:
    """The bytes of rows `start` on, one for each version."""
    count = len(versions)
    heads = np.zeros(count, HEAD)
    heads["name"], heads["side"], heads["layer"] = name, side, layer
    heads["row"] = np.arange(start, start + count, dtype=np.uint32)
    heads["version"] = versions
    return memoryview(_filled(heads, row_bytes)).cast("B")


def read(blob: bytes | memoryview, row_bytes: int) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
    """What each row says it is, and whether the rest of its bytes agrees. Raises ValueError for a part of a row."""
    if len(blob) % row_bytes:
        raise ValueError(f"{len(blob)} bytes are no whole number of rows of {row_bytes}")
    bodies = np.frombuffer(blob, np.uint8).reshape(-1, row_bytes)
    heads = np.ascontiguousarray(bodies[:, :ROW_BYTES_LEAST]).view(HEAD)[:, 0]
    return heads, (_filled(heads.copy(), row_bytes) == bodies).all(axis=1)


def describe(blob: bytes | memoryview, expected: bytes | memoryview, row_bytes: int) -> str:
    """Where two blobs of rows differ first, in words."""
    if len(blob) != len(expected):
        return f"{len(blob)} bytes instead of {len(expected)} (rows of {row_bytes})"
    found, wanted = (np.frombuffer(each, np.uint8).reshape(-1, row_bytes) for each in (blob, expected))
    wrong = np.flatnonzero((found != wanted).any(axis=1))
    at = int(wrong[0])
    heads, sound = read(found[at].tobytes(), row_bytes)
    offset = int(np.flatnonzero(found[at] != wanted[at])[0])
    return (
        f"{len(wrong)} of {len(found)} rows differ, the first at position {at}, byte {offset} of the row: expected "
        f"{show(read(wanted[at].tobytes(), row_bytes)[0][0])}, got {show(heads[0])}{'' if sound[0] else ' (damaged)'}"
    )


def show(head: np.void) -> str:
    """What a row says of itself."""
    name = bytes(head["name"]).decode("ascii", "backslashreplace")
    return f"{name} {'KV'[head['side'] % 2]} layer {head['layer']} row {head['row']} version {head['version']}"


def _filled(heads: NDArray[np.void], row_bytes: int) -> NDArray[np.uint8]:
    """Rows with these heads; their check fields are set."""
    names: Sequence[bytes] = np.unique(heads["name"]).tolist()
    sums = np.zeros(len(heads), np.uint32)
    for name in names:
        sums[heads["name"] == name] = zlib.crc32(name)
    for field, factor in zip(("side", "layer", "row", "version"), _FACTORS, strict=False):
        sums += heads[field].astype(np.uint32) * factor
    sums ^= sums >> np.uint32(15)
    heads["check"] = sums
    words = -(-(row_bytes - ROW_BYTES_LEAST) // 4)
    body = sums[:, None] + np.arange(1, words + 1, dtype=np.uint32)[None] * _FACTORS[4]
    body ^= body >> np.uint32(13)
    out = np.empty((len(heads), row_bytes), np.uint8)
    out[:, :ROW_BYTES_LEAST] = heads.view(np.uint8).reshape(-1, ROW_BYTES_LEAST)
    out[:, ROW_BYTES_LEAST:] = body.view(np.uint8).reshape(len(heads), -1)[:, : row_bytes - ROW_BYTES_LEAST]
    return out
