"""Stored formats by name, and the conversion between them and what travels on the wire.

A row is one token in one layer: D values. A format says how many bytes it takes and turns fp32 rows into those bytes
and back. The wire carries fp32, fp16, bf16 or `native`, the stored bytes. Every multi-byte value is little-endian.

All functions here are synchronous and touch no shared state, so they may run in any thread. To convert a large block in
pieces, call `to_native` or `from_native` on a sub-range of its rows.
"""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import attrs
import numpy as np
from numpy.typing import NDArray

from pion.args import show
from pion.errors import CommandError
from pion.replies import Buffer
from pion.storage import floats, quantize

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("Pion's stored formats are little-endian and are read in place; this machine is big-endian")


class Wire(enum.Enum):
    """What `AS` names: the type of the values in a request or a reply."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    NATIVE = "native"


_WIRES: Final = {wire.value.encode(): wire for wire in Wire}
_WIRE_BYTES: Final = {Wire.FP32: 4, Wire.FP16: 2, Wire.BF16: 2}


@attrs.frozen(eq=False)
class Format(ABC):
    """How the rows of one layer are stored. One object per name, compared by identity."""

    name: str
    wire: Wire | None = attrs.field(default=None, kw_only=True)
    """The wire type whose bytes are these bytes, if there is one."""

    multiple: int = attrs.field(default=1, kw_only=True)
    """D must be divisible by it."""

    def check_dim(self, dim: int) -> None:
        """Raise CommandError, naming format and D, unless rows of `dim` values can be stored."""
        if dim < 1:
            raise CommandError(f"{self.name} needs a dim of at least 1, got {dim}")
        if dim % self.multiple:
            raise CommandError(f"{self.name} needs a dim divisible by {self.multiple}, got {dim}")

    @abstractmethod
    def row_bytes(self, dim: int) -> int:
        """Bytes of one row of `dim` values; `dim` is 0 (a side without data) or has passed `check_dim`."""

    @abstractmethod
    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        """(n, D) fp32 rows as n * row_bytes(D) bytes, flat.

        Raises CommandError for values that the format can't hold.
        """

    @abstractmethod
    def decode(self, raw: Buffer, count: int, dim: int) -> NDArray[np.float32]:
        """`count` stored rows as (count, dim) fp32. The result may be a view of `raw`."""


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


class _Mlx4g32(Format):
    def row_bytes(self, dim: int) -> int:
        return dim // 2 + dim // quantize.GROUP * 4

    def encode(self, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
        return quantize.mlx4g32_encode(rows).reshape(-1)

    def decode(self, raw: Buffer, count: int, dim: int) -> NDArray[np.float32]:
        return quantize.mlx4g32_decode(np.frombuffer(raw, np.uint8).reshape(count, self.row_bytes(dim)), dim)


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

    `pattern` stands for the names in error texts. What `resolve` returns is kept, so it must take one spelling per
    format and only few names. Called at import time only.
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
MLX4G32: Final = _Mlx4g32("mlx4g32", multiple=quantize.GROUP)
for _fmt in (FP32, FP16, BF16, INT8, MLX4G32):
    add_format(_fmt)


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
