"""From a reply's value to a method's result. Whatever is not what the command answers is a `BadReplyError`."""

# ruff: noqa: D103  Each name says what the reply must be.

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from pion.client.errors import BadReplyError
from pion.client.records import Blocks, Hashes, Match, Registered, Rows, Segment, SessionInfo, Wire

T = TypeVar("T")

_TYPES: Final[dict[Wire, np.dtype[Any]]] = {
    "fp32": np.dtype("<f4"),
    "fp16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
    "native": np.dtype(np.uint8),
}


def _unexpected(value: object, wanted: str) -> NoReturn:
    raise BadReplyError(f"expected {wanted}, got {value!r:.120}")


def wire_type(as_: Wire) -> np.dtype[Any]:
    """The array type of one wire form. Raises `ValueError` for an unknown one, before anything is sent."""
    try:
        return _TYPES[as_]
    except KeyError:
        raise ValueError(f"rows travel as {', '.join(_TYPES)}, not {as_!r}") from None


def hash_blob(hashes: Hashes) -> bytes:
    """Block hashes as they are sent: little-endian uint64. Raises `ValueError` for anything else."""
    if isinstance(hashes, np.ndarray):
        table = hashes
        if table.ndim != 1 or table.dtype.kind not in "ui" or (table.dtype.kind == "i" and (table < 0).any()):
            raise ValueError("hashes are one axis of unsigned 64-bit integers")
    else:
        try:
            # Not np.asarray(hashes): it makes floats of a list that holds both large and small numbers.
            table = np.array([operator.index(value) for value in hashes], np.uint64)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"hashes are one axis of unsigned 64-bit integers: {error}") from None
    return table.astype("<u8").tobytes()


def anything(value: object) -> object:
    return value


def word(expected: str) -> Callable[[object], None]:
    def convert(value: object) -> None:
        if value != expected:
            _unexpected(value, f"+{expected}")

    return convert


def integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        _unexpected(value, "a number")
    return value


def flag(value: object) -> bool:
    if value not in (0, 1):
        _unexpected(value, "0 or 1")
    return bool(value)


def hit(value: object) -> bool:
    if value not in ("HIT", "MISS"):
        _unexpected(value, "+HIT or +MISS")
    return value == "HIT"


def registered(value: object) -> Registered:
    try:
        return Registered(value)
    except ValueError:
        _unexpected(value, "+OK, +PENDING or +DEFERRED")


def bulk(value: object) -> bytes:
    if not isinstance(value, bytes):
        _unexpected(value, "a bulk string")
    return value


def bulk_or_none(value: object) -> bytes | None:
    return None if value is None else bulk(value)


def array(value: object) -> list[object]:
    if not isinstance(value, list):
        _unexpected(value, "an array")
    return value


def text(value: object) -> str:
    return value if isinstance(value, str) else bulk(value).decode(errors="replace")


def info(value: object) -> dict[str, str]:
    """Lines of `field:value`; blank lines and `# Section` lines are left out."""
    lines = text(value).splitlines()
    pairs = (line.partition(":") for line in lines if line and not line.startswith("#"))
    return {field: rest for field, _, rest in pairs}


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        _unexpected(value, "a map")
    return {text(key): item for key, item in value.items()}


def numbers(value: object) -> dict[str, int | float]:
    result: dict[str, int | float] = {}
    for key, item in _mapping(value).items():
        if not isinstance(item, int | float):
            _unexpected(item, f"a number for {key}")
        result[key] = item
    return result


def facts(value: object) -> dict[str, int | str]:
    """A map of numbers and texts."""
    return {key: item if isinstance(item, int) else text(item) for key, item in _mapping(value).items()}


def warmed(value: object) -> tuple[int, int]:
    """`N` or `N skipped_dim=K`."""
    first, _, rest = (value if isinstance(value, str) else "").partition(" ")
    name, _, skipped = rest.partition("=")
    if not first.isdecimal() or (rest and not (name == "skipped_dim" and skipped.isdecimal())):
        _unexpected(value, "+N or +N skipped_dim=K")
    return int(first), int(skipped or 0)


def session_info(value: object) -> SessionInfo:
    fields = _mapping(value)
    try:
        return SessionInfo(
            sid=bulk(fields["sid"]),
            format=text(fields["format"]),
            dim=integer(fields["dim"]),
            schema=text(fields["schema"]),
            layers=integer(fields["layers"]),
            rows=integer(fields["rows"]),
            bytes=integer(fields["bytes"]),
            prefix=bulk_or_none(fields["prefix"]),
            registered=flag(fields["registered"]),
            state=text(fields["state"]),
            pinned=flag(fields["pinned"]),
        )
    except KeyError as error:
        raise BadReplyError(f"V.INFO without {error.args[0]!r}") from None


def page(value: object) -> tuple[bytes | None, list[bytes]]:
    parts = array(value)
    if len(parts) != 2:
        _unexpected(value, "a cursor and names")
    cursor = b"%d" % parts[0] if isinstance(parts[0], int) else bulk(parts[0])
    return None if cursor == b"0" else cursor, [bulk(name) for name in array(parts[1])]


def match(value: object) -> Match | None:
    if value is None:
        return None
    parts = array(value)
    if len(parts) != 3:
        _unexpected(value, "namespace, blocks and tokens")
    return Match(bulk(parts[0]), integer(parts[1]), integer(parts[2]))


def chain(value: object) -> list[Segment] | None:
    if value is None:
        return None
    result = []
    for entry in array(value):
        parts = array(entry)
        if len(parts) != 3:
            _unexpected(entry, "namespace, offset and tokens")
        result.append(Segment(bulk(parts[0]), integer(parts[1]), integer(parts[2])))
    return result


def blocks(value: object) -> Blocks | None:
    if value == "UNKNOWN":
        return None
    data = bulk(value)
    if len(data) < 8:
        _unexpected(value, "a block table")
    size, count = (int(number) for number in np.frombuffer(data, "<u4", 2))
    if len(data) != 8 + 8 * count:
        raise BadReplyError(f"a block table of {count} hashes in {len(data)} bytes")
    return Blocks(size, np.frombuffer(data, "<u8", offset=8).astype(np.uint64))


def bitmap(count: int) -> Callable[[object], npt.NDArray[np.bool_] | None]:
    def convert(value: object) -> npt.NDArray[np.bool_] | None:
        if value == "UNKNOWN":
            return None
        data = bulk(value)
        if len(data) != (count + 7) // 8:
            raise BadReplyError(f"a bitmap of {len(data)} bytes for {count} hashes")
        return np.unpackbits(np.frombuffer(data, np.uint8), count=count, bitorder="little").astype(np.bool_)

    return convert


def _typed(value: object, dtype: np.dtype[Any]) -> Rows:
    if not isinstance(value, np.ndarray):
        _unexpected(value, "rows")
    if value.nbytes % dtype.itemsize:
        raise BadReplyError(f"{value.nbytes} bytes are not whole values of {dtype.itemsize}")
    result: Rows = value.view(dtype)
    return result


def _shaped(value: object, dtype: np.dtype[Any], count: int) -> Rows:
    flat = _typed(value, dtype)
    if count <= 0 or flat.size % count:
        if count or flat.size:
            raise BadReplyError(f"{flat.nbytes} bytes are not {count} rows")
        return flat.reshape(0, 0)
    return flat.reshape(count, -1)


def floats(value: object, size: int) -> npt.NDArray[np.float32]:
    """That many values of 32 bits on one axis."""
    if not isinstance(value, np.ndarray) or value.nbytes != 4 * size:
        _unexpected(value, f"{4 * size} bytes")
    result: npt.NDArray[np.float32] = value.view("<f4")
    return result


def rows(as_: Wire, count: int) -> Callable[[object], Rows]:
    dtype = wire_type(as_)
    return lambda value: _shaped(value, dtype, count)


def row_list(as_: Wire, counts: Sequence[int]) -> Callable[[object], list[Rows]]:
    dtype = wire_type(as_)

    def convert(value: object) -> list[Rows]:
        values = array(value)
        if len(values) != len(counts):
            raise BadReplyError(f"{len(values)} bulks for {len(counts)} ranges")
        return [_shaped(item, dtype, count) for item, count in zip(values, counts, strict=True)]

    return convert


def flat_list(as_: Wire) -> Callable[[object], list[Rows]]:
    dtype = wire_type(as_)
    return lambda value: [_typed(item, dtype) for item in array(value)]


def bulk_count(expected: int | None) -> Callable[[object], int]:
    def convert(value: object) -> int:
        count = len(array(value))
        if expected is not None and count != expected:
            raise BadReplyError(f"{count} bulks for {expected} ranges")
        return count

    return convert
