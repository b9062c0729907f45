"""Joining fields to one text that no other fields give, for names and digests.

`"|".join(parts)` gives ("a", "b|c") and ("a|b", "c") the same name. Here each field is written with its type and its
length, so that two lists give the same bytes only when they are equal.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

Field = bytes | str | int | float | bool | None


def encode_fields(fields: Iterable[Field]) -> bytes:
    """The fields as bytes that determine them. An absent field (None) differs from an empty one."""
    return b"".join(_encode(field) for field in fields)


def digest_fields(*fields: Field) -> bytes:
    """SHA-256 of the encoded fields; the same in every process and on every machine."""
    return hashlib.sha256(encode_fields(fields)).digest()


def _encode(field: Field) -> bytes:
    match field:
        case None:
            tag, data = b"N", b""
        case bool():
            tag, data = b"B", b"\1" if field else b"\0"
        case int():
            tag, data = b"I", str(field).encode()
        case float():
            tag, data = b"F", struct.pack("<d", field)
        case str():
            tag, data = b"S", field.encode()
        case bytes():
            tag, data = b"Y", field
        case _:
            msg = f"a field must be text, bytes, a number or None, not {type(field).__name__}"
            raise TypeError(msg)
    return tag + struct.pack("<Q", len(data)) + data
