"""The meta of a binary request: packed little-endian fields, as a `BinaryCommand` row lists them."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from pion.command import Field, FieldKind
from pion.errors import CommandError

WIRES: Final = ("fp32", "fp16", "bf16", "native")
"""The types of values on the wire; the place in this list is the number that travels."""

_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_F64: Final = struct.Struct("<d")
_U8: Final = struct.Struct("<B")
_PLAIN: Final = {FieldKind.WIRE: _U8, FieldKind.U32: _U32, FieldKind.U64: _U64, FieldKind.F64: _F64}
"""The fields that always have the same length."""
_RANGE: Final = struct.Struct("<III")


Unpack: TypeAlias = Callable[[bytes], tuple[Any, ...]]


def unpacker(fields: Sequence[Field]) -> Unpack:
    """`unpack` for these fields, prepared: a name with numbers behind it, as most are, is one call of `struct`."""
    named = bool(fields) and fields[0].kind is FieldKind.NAME
    rest = fields[1:] if named else fields
    if not all(field.kind in _PLAIN for field in rest):
        return functools.partial(unpack, fields)
    numbers = struct.Struct("<" + "".join(_PLAIN[field.kind].format[1:] for field in rest))

    def quick(meta: bytes) -> tuple[Any, ...]:
        start = 2 + int.from_bytes(meta[:2], "little") if named else 0
        if len(meta) != start + numbers.size:
            return unpack(fields, meta)  # which says what is wrong
        values = numbers.unpack_from(meta, start)
        return (meta[2:start], *values) if named else values

    if not any(field.kind is FieldKind.WIRE for field in rest):
        return quick
    places = [index for index, field in enumerate(fields) if field.kind is FieldKind.WIRE]

    def with_wires(meta: bytes) -> tuple[Any, ...]:
        values = quick(meta)
        found = list(values)
        for place in places:
            if found[place] >= len(WIRES):
                return unpack(fields, meta)
            found[place] = WIRES[found[place]]
        return tuple(found)

    return with_wires


def unpack(fields: Sequence[Field], meta: bytes) -> tuple[Any, ...]:
    """The values of the fields, in their order. Raises `CommandError` that names the field which doesn't fit."""
    values: list[Any] = []
    position = 0
    for field in fields:
        value, position = _READERS[field.kind](meta, position, field.name)
        values.append(value)
    if position != len(meta):
        behind = f"behind {fields[-1].name}" if fields else "though this command has no meta"
        raise CommandError(f"meta has {_count(len(meta) - position)} too many, {behind}")
    return tuple(values)


def pack(fields: Sequence[Field], values: Sequence[Any]) -> bytes:
    """What `unpack` reads. Raises `ValueError` or `struct.error` for values that don't fit their fields."""
    return b"".join(_WRITERS[field.kind](value) for field, value in zip(fields, values, strict=True))


def leading_name(meta: bytes) -> bytes | None:
    """The name that meta begins with; None if it ends before the name does."""
    if len(meta) < 2:
        return None
    end = 2 + _U16.unpack_from(meta)[0]
    return meta[2:end] if end <= len(meta) else None


_Reader: TypeAlias = Callable[[bytes, int, str], tuple[Any, int]]


def _read(meta: bytes, position: int, kind: struct.Struct, what: str) -> tuple[Any, ...]:
    left = len(meta) - position
    if left < kind.size:
        raise CommandError(f"meta ends within {what}: {kind.size} bytes expected, {left} left")
    return kind.unpack_from(meta, position)


def _count(nbytes: int) -> str:
    return "1 byte" if nbytes == 1 else f"{nbytes} bytes"


def _number(kind: struct.Struct) -> _Reader:
    def read(meta: bytes, position: int, what: str) -> tuple[Any, int]:
        return _read(meta, position, kind, what)[0], position + kind.size

    return read


def _name(meta: bytes, position: int, what: str) -> tuple[bytes, int]:
    (length,) = _read(meta, position, _U16, f"the length of {what}")
    start = position + 2
    if len(meta) - start < length:
        raise CommandError(f"meta ends within {what}: {_count(length)} expected, {len(meta) - start} left")
    return meta[start : start + length], start + length


def _wire(meta: bytes, position: int, what: str) -> tuple[str, int]:
    if position >= len(meta):
        raise CommandError(f"meta ends within {what}: 1 byte expected, 0 left")
    number = meta[position]
    if number >= len(WIRES):
        known = ", ".join(f"{index} ({wire})" for index, wire in enumerate(WIRES))
        raise CommandError(f"{what} must be one of {known}, got {number}")
    return WIRES[number], position + 1


def _ranges(meta: bytes, position: int, what: str) -> tuple[list[tuple[int, int, int]], int]:
    (count,) = _read(meta, position, _U32, f"the number of {what}")
    start = position + 4
    nbytes = count * _RANGE.size
    if len(meta) - start < nbytes:
        raise CommandError(
            f"meta ends within {what}: {nbytes} bytes expected ({count} of {_RANGE.size}), {len(meta) - start} left"
        )
    return list(_RANGE.iter_unpack(memoryview(meta)[start : start + nbytes])), start + nbytes


def _pack_name(value: bytes) -> bytes:
    return _U16.pack(len(value)) + value


def _pack_ranges(value: Sequence[tuple[int, int, int]]) -> bytes:
    return _U32.pack(len(value)) + b"".join(_RANGE.pack(*each) for each in value)


_READERS: Final[dict[FieldKind, _Reader]] = {
    FieldKind.NAME: _name,
    FieldKind.WIRE: _wire,
    FieldKind.U32: _number(_U32),
    FieldKind.U64: _number(_U64),
    FieldKind.F64: _number(_F64),
    FieldKind.RANGES: _ranges,
}

_WRITERS: Final[dict[FieldKind, Callable[[Any], bytes]]] = {
    FieldKind.NAME: _pack_name,
    FieldKind.WIRE: lambda value: bytes([WIRES.index(value)]),
    FieldKind.U32: _U32.pack,
    FieldKind.U64: _U64.pack,
    FieldKind.F64: _F64.pack,
    FieldKind.RANGES: _pack_ranges,
}
