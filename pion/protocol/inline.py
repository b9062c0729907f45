"""Splitting an inline command into arguments, with Redis's quoting rules."""

from __future__ import annotations

import re
from typing import Final

from pion.errors import ProtocolError

_BLANK: Final = b" \t\n\v\f\r"
_PLAIN: Final = re.compile(rb"[^ \t\n\v\f\r\"']+")
_SINGLE: Final = re.compile(rb"'((?:[^'\\]|\\'|\\(?!'))*)'", re.DOTALL)
_DOUBLE: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPE: Final = re.compile(rb"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_NAMED: Final = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"a": b"\a"}


def split_inline(line: bytes) -> list[bytes]:
    r"""The arguments of one inline command, without its line end.

    Double quotes understand ``\n \r \t \b \a \xHH`` and a backslash before any other byte; single quotes only ``\'``. A
    closing quote must be followed by a blank. Raises `ProtocolError` for quotes that don't balance.
    """
    if b'"' not in line and b"'" not in line:
        return line.split()
    found: list[bytes] = []
    position, end = 0, len(line)
    while True:
        while position < end and line[position] in _BLANK:
            position += 1
        if position == end:
            return found
        argument, position = _argument(line, position, end)
        found.append(argument)


def _argument(line: bytes, position: int, end: int) -> tuple[bytes, int]:
    """One argument: plain bytes, then perhaps one quoted part, which ends it."""
    plain = _PLAIN.match(line, position)
    head = plain.group() if plain else b""
    position += len(head)
    if position == end or line[position] in _BLANK:
        return head, position
    quoted = (_DOUBLE if line[position] == 0x22 else _SINGLE).match(line, position)
    if quoted is None or (quoted.end() < end and line[quoted.end()] not in _BLANK):
        raise ProtocolError("unbalanced quotes in request")
    body = quoted.group(1)
    body = _ESCAPE.sub(_unescape, body) if line[position] == 0x22 else body.replace(b"\\'", b"'")
    return head + body, quoted.end()


def _unescape(match: re.Match[bytes]) -> bytes:
    escape = match.group(1)
    if len(escape) == 3:
        return bytes([int(escape[1:], 16)])
    return _NAMED.get(escape, escape)
