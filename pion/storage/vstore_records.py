"""Changes of the V-store as bytes, and back: the meta part of its records.

`docs/reference/log-format.md` describes them for readers of the files.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from pion.errors import CommandError
from pion.storage.changes import (
    Change,
    CreateSession,
    Declaration,
    DropPrefix,
    DropSession,
    EvictSession,
    Hashes,
    PlaceRows,
    Reason,
    Register,
    SetExpiry,
    SetPin,
    StoreRows,
)
from pion.storage.ledger import Memory, Raw
from pion.storage.schema import Schema
from pion.storage.tiers.runs import PlacedRun

_U32: Final = struct.Struct("<I")
_STORE: Final = struct.Struct("<III")
_DECLARATION: Final = struct.Struct("<III")
_EXPIRY: Final = struct.Struct("<d")
_REASONS: Final = tuple(Reason)

AGAIN: Final = 128
"""Set in the kind of a `Register` or `CreateSession` that made no session, as they were there: a repair can tell then
whether it knows all that belongs to them.
"""

HAS_DECLARATION: Final = 1
HAS_HASHES: Final = 2
HAS_META: Final = 4
HAS_PARENT: Final = 8
HAS_EXPIRY: Final = 16
PINNED: Final = 32


def _text(value: bytes) -> bytes:
    return _U32.pack(len(value)) + value


class _Reader:
    """Reads what the packers below wrote. Raises ValueError or struct.error when it is something else."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return values

    def number(self) -> int:
        value: int = self.unpack(_U32)[0]
        return value

    def text(self) -> bytes:
        size = self.number()
        value = self._data[self._at : self._at + size]
        if len(value) != size:
            raise ValueError("a text is cut off")
        self._at += size
        return value

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes too many")


def _schema(reader: _Reader) -> Schema:
    return _parsed(reader.text())


@lru_cache(maxsize=64)  # a million prefixes have a handful of shapes
def _parsed(text: bytes) -> Schema:
    return Schema.from_text(text.decode("ascii"))


def _pack_register(change: Register) -> bytes:
    flags = 0
    parts = [
        _text(change.ns),
        _text(change.k_schema.durable_text.encode()),
        _text(change.v_schema.durable_text.encode()),
    ]
    if change.declaration is not None:
        flags |= HAS_DECLARATION
        parts.append(_DECLARATION.pack(change.declaration.layers, change.declaration.tokens, change.declaration.states))
    if change.hashes is not None:
        flags |= HAS_HASHES
        parts += (_U32.pack(change.hashes.block_size), _text(change.hashes.blob))
    if change.meta is not None:
        flags |= HAS_META
        parts.append(_text(change.meta))
    if change.parent is not None:
        flags |= HAS_PARENT
        parts += (_text(change.parent), _U32.pack(change.offset))
    if change.expires_s is not None:
        flags |= HAS_EXPIRY
        parts.append(_EXPIRY.pack(change.expires_s))
    if change.pin:
        flags |= PINNED
    return bytes((flags,)) + b"".join(parts)


def _read_register(reader: _Reader) -> Register:
    flags = reader.unpack(_FLAGS)[0]
    ns, k_schema, v_schema = reader.text(), _schema(reader), _schema(reader)
    declaration = Declaration(*reader.unpack(_DECLARATION)) if flags & HAS_DECLARATION else None
    hashes = Hashes(reader.number(), reader.text()) if flags & HAS_HASHES else None
    meta = reader.text() if flags & HAS_META else None
    parent, offset = (reader.text(), reader.number()) if flags & HAS_PARENT else (None, 0)
    expires_s = reader.unpack(_EXPIRY)[0] if flags & HAS_EXPIRY else None
    return Register(
        ns=ns,
        k_schema=k_schema,
        v_schema=v_schema,
        declaration=declaration,
        hashes=hashes,
        meta=meta,
        parent=parent,
        offset=offset,
        expires_s=expires_s,
        pin=bool(flags & PINNED),
    )


def _read_rows(reader: _Reader, data: Raw | Memory) -> StoreRows:
    sid = reader.text()
    layer, start, count = reader.unpack(_STORE)
    return StoreRows(sid, layer, start, count, data)


def _pack_place(change: PlaceRows) -> bytes:
    head = _text(change.name) + _FLAGS.pack(change.lone) + _text(change.key.encode("ascii"))
    runs = b"".join(
        _RUN.pack(run.side, run.layer, run.start, run.count, run.offset, run.nbytes, run.seed, run.checksum)
        for run in change.runs
    )
    return head + _PLACED.pack(change.nbytes, len(change.runs)) + runs


def _read_place(reader: _Reader) -> PlaceRows:
    name, lone, key = reader.text(), bool(reader.unpack(_FLAGS)[0]), reader.text().decode("ascii")
    nbytes, count = reader.unpack(_PLACED)
    return PlaceRows(name, lone, key, nbytes, tuple(PlacedRun(*reader.unpack(_RUN)) for _ in range(count)))


_FLAGS: Final = struct.Struct("<B")
_PLACED: Final = struct.Struct("<QI")
_RUN: Final = struct.Struct("<BIIIQQQQ")

_PACKERS: Final[dict[type, tuple[int, Callable[[Any], bytes]]]] = {
    CreateSession: (1, lambda change: _text(change.sid) + _text(change.schema.durable_text.encode())),
    StoreRows: (2, lambda change: _text(change.sid) + _STORE.pack(change.layer, change.start, change.count)),
    DropSession: (3, lambda change: _text(change.sid)),
    EvictSession: (4, lambda change: _text(change.sid) + _FLAGS.pack(_REASONS.index(change.reason))),
    Register: (5, _pack_register),
    DropPrefix: (6, lambda change: _text(change.ns) + _FLAGS.pack(_REASONS.index(change.reason))),
    SetExpiry: (7, lambda change: _text(change.ns) + _EXPIRY.pack(change.expires_s)),
    PlaceRows: (9, _pack_place),
    SetPin: (8, lambda change: _text(change.ns) + _FLAGS.pack(change.pinned)),
}
"""Kind of change -> its number in records, and what follows the number."""

_READERS: Final[dict[int, Callable[[_Reader, Raw | Memory], Change]]] = {
    1: lambda reader, data: CreateSession(reader.text(), _schema(reader)),
    2: _read_rows,
    3: lambda reader, data: DropSession(reader.text()),
    4: lambda reader, data: EvictSession(reader.text(), _REASONS[reader.unpack(_FLAGS)[0]]),
    5: lambda reader, data: _read_register(reader),
    6: lambda reader, data: DropPrefix(reader.text(), _REASONS[reader.unpack(_FLAGS)[0]]),
    7: lambda reader, data: SetExpiry(reader.text(), reader.unpack(_EXPIRY)[0]),
    8: lambda reader, data: SetPin(reader.text(), bool(reader.unpack(_FLAGS)[0])),
    9: lambda reader, data: _read_place(reader),
}


def pack(change: Change, *, again: bool = False) -> bytes:
    """The meta part of a change's record; rows of a `StoreRows` travel beside it. `again`: see `AGAIN`."""
    number, packer = _PACKERS[type(change)]
    return bytes((number | AGAIN * again,)) + packer(change)


def is_again(meta: bytes) -> bool:
    """Whether a record that `unpack` takes has the mark `AGAIN`."""
    return bool(meta[0] & AGAIN)


def unpack(meta: bytes, data: Raw | Memory) -> Change:
    """The change that `pack` packed, with its rows. Raises ValueError if it is none."""
    try:
        reader = _Reader(meta)
        number = reader.unpack(_FLAGS)[0] & ~AGAIN
        if number not in _READERS:
            raise ValueError(f"unknown kind of change, {number}")
        change = _READERS[number](reader, data)
        reader.end()
    except (struct.error, IndexError, UnicodeDecodeError, CommandError) as error:
        raise ValueError(str(error)) from error
    return change
