"""Stored formats by name, and the conversion between them and what travels on the wire.

A row is one token in one layer: D values. A format says how many bytes it takes and turns fp32 rows into those bytes
and back. The wire carries fp32, fp16, bf16 or `native`, the stored bytes. Every multi-byte value is little-endian.

All functions here are synchronous and touch no shared state, so they may run in any thread. To convert a large block in
pieces, call `to_native` or `from_native` on a sub-range of its rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pion.args import show
from pion.errors import CommandError
from pion.replies import Buffer
from pion.storage import floats, mlx_format, quantize
from pion.storage.fp8 import FP8
from pion.storage.mlx_format import MLX4G32
from pion.storage.stored_format import Format, Wire
from pion.storage.turbo import TURBO2, TURBO3, TURBO4

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "FP32",
    "INT8",
    "MLX4G32",
    "TURBO2",
    "TURBO3",
    "TURBO4",
    "Format",
    "Wire",
    "add_family",
    "add_format",
    "from_native",
    "get_durable_format",
    "get_format",
    "known_formats",
    "parse_wire",
    "to_native",
    "wire_row_bytes",
]  # fmt: skip

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("Pion's stored formats are little-endian and are read in place; this machine is big-endian")


_WIRES: Final = {wire.value.encode(): wire for wire in Wire}
_WIRE_BYTES: Final = {Wire.FP32: 4, Wire.FP16: 2, Wire.BF16: 2}


class _Float32(Format):
    def row_bytes(self, dim: int) -> int:
        return 4 * dim

    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        return rows.reshape(-1).view(np.uint8)

    def decode(self, raw: Buffer, count: int, dim: int) -> NDArray[np.float32]:
        return np.frombuffer(raw, np.float32).reshape(count, dim)


class _Float16(Format):
    def row_bytes(self, dim: int) -> int:
        return 2 * dim

    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        return floats.fp32_to_fp16(rows.reshape(-1)).view(np.uint8)

    def decode(self, raw: Buffer, count: int, dim: int) -> NDArray[np.float32]:
        return floats.fp16_to_fp32(np.frombuffer(raw, np.float16)).reshape(count, dim)


class _BFloat16(Format):
    def row_bytes(self, dim: int) -> int:
        return 2 * dim

    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        return floats.fp32_to_bf16(rows.reshape(-1)).view(np.uint8)

    def decode(self, raw: Buffer, count: int, dim: int) -> NDArray[np.float32]:
        return floats.bf16_to_fp32(np.frombuffer(raw, np.uint16)).reshape(count, dim)


class _Int8(Format):
    def row_bytes(self, dim: int) -> int:
        return dim + 2 if dim else 0

    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        return quantize.int8_encode(rows).reshape(-1)

    def decode(self, raw: Buffer, count: int, dim: int) -> NDArray[np.float32]:
        return quantize.int8_decode(np.frombuffer(raw, np.uint8).reshape(count, dim + 2))


_FORMATS: Final[dict[str, Format]] = {}
_FAMILIES: Final[list[tuple[str, Callable[[str], Format | None]]]] = []
_BUILT: Final[dict[str, Format]] = {}
"""What the families made, so that a name is always the same object. Bounded, since a family has few valid names."""


def add_format(fmt: Format) -> None:
    """Make a format known under its name. Called at import time only; a name taken twice is a ValueError."""
    if fmt.name in _FORMATS:
        raise ValueError(f"format {fmt.name} is already known")
    _FORMATS[fmt.name] = fmt


def add_family(pattern: str, resolve: Callable[[str], Format | None]) -> None:
    """Make a family of names known: `resolve` builds the format for a name or returns None.

    `pattern` stands for the names in error texts. What `resolve` returns is kept, so it must take only few names, and
    give the same object for two spellings of one format. Called at import time only.
    """
    _FAMILIES.append((pattern, resolve))


def known_formats() -> list[str]:
    """The names and name patterns that `get_format` takes, in the order they were added."""
    return [*_FORMATS, *(pattern for pattern, _ in _FAMILIES)]


def get_format(name: Buffer) -> Format:
    """The format of that name, in any case. Raises CommandError that lists the known ones."""
    text = bytes(name[:64]).lower().decode("latin-1")
    found = _FORMATS.get(text) or _BUILT.get(text) or _from_family(text)
    if found is None:
        raise CommandError(f"unknown format {show(name)}, expected one of {' '.join(known_formats())}")
    return found


def get_durable_format(name: Buffer) -> Format:
    """The format of that `Format.durable_name`. Raises CommandError, also for another version of the rotation."""
    plain, _, _ = bytes(name[:64]).partition(b"/")
    found = get_format(plain)
    if found.rotation is not None and bytes(name[:64]).lower() != found.durable_name.encode():
        raise CommandError(f"format {show(name)} has another rotation, and this program knows {found.durable_name}")
    if found.rotation is None and len(plain) != len(name):
        raise CommandError(f"format {show(name)}: {found.name} has no rotation")
    return found


def _from_family(text: str) -> Format | None:
    for _, resolve in _FAMILIES:
        found = resolve(text)
        if found is not None:
            return _BUILT.setdefault(text, found)
    return None


FP32: Final = _Float32("fp32", wire=Wire.FP32)
FP16: Final = _Float16("fp16", wire=Wire.FP16)
BF16: Final = _BFloat16("bf16", wire=Wire.BF16)
INT8: Final = _Int8("int8")
for _fmt in (FP32, FP16, BF16, FP8, INT8, TURBO4, TURBO3, TURBO2, MLX4G32):
    add_format(_fmt)
add_family(mlx_format.PATTERN, mlx_format.resolve)


def parse_wire(value: Buffer) -> Wire:
    """The value of `AS`, in any case. Raises CommandError."""
    wire = _WIRES.get(bytes(value[:16]).lower())
    if wire is None:
        raise CommandError(f"AS must be fp32, fp16, bf16 or native, got {show(value)}")
    return wire


def wire_row_bytes(wire: Wire, fmt: Format, dim: int) -> int:
    """Bytes of one row of `dim` values on the wire."""
    return fmt.row_bytes(dim) if wire is Wire.NATIVE else _WIRE_BYTES[wire] * dim


def to_native(raw: Buffer, wire: Wire, fmt: Format, count: int, dim: int) -> Buffer:
    """`count` rows as they came over the wire, as the bytes to store; `raw` itself when nothing has to be converted.

    Raises CommandError when `raw` isn't `count` rows long or holds a value that the format can't.
    """
    _check_length(raw, count, wire_row_bytes(wire, fmt, dim))
    if wire is Wire.NATIVE or wire is fmt.wire or len(raw) == 0:
        return raw
    return fmt.encode(_wire_to_fp32(raw, wire).reshape(count, dim)).data.toreadonly()


def from_native(raw: Buffer, wire: Wire, fmt: Format, count: int, dim: int) -> Buffer:
    """`count` stored rows as the bytes to send; `raw` itself when nothing has to be converted.

    Raises CommandError when `raw` isn't `count` rows long.
    """
    _check_length(raw, count, fmt.row_bytes(dim))
    if wire is Wire.NATIVE or wire is fmt.wire or len(raw) == 0:
        return raw
    return _fp32_to_wire(fmt.decode(raw, count, dim).reshape(-1), wire).view(np.uint8).data.toreadonly()


def _check_length(raw: Buffer, count: int, row_bytes: int) -> None:
    if len(raw) != count * row_bytes:
        raise CommandError(f"blob must be {count * row_bytes} bytes ({count} rows of {row_bytes}), got {len(raw)}")


def _wire_to_fp32(raw: Buffer, wire: Wire) -> NDArray[np.float32]:
    if wire is Wire.FP16:
        return floats.fp16_to_fp32(np.frombuffer(raw, np.float16))
    if wire is Wire.BF16:
        return floats.bf16_to_fp32(np.frombuffer(raw, np.uint16))
    return np.frombuffer(raw, np.float32)


def _fp32_to_wire(
    values: NDArray[np.float32], wire: Wire
) -> NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]:
    if wire is Wire.FP16:
        return floats.fp32_to_fp16(values)
    if wire is Wire.BF16:
        return floats.fp32_to_bf16(values)
    return values
