"""Turning request arguments into values, with errors that name the argument and what was expected.

A request is a list of buffers: `bytes` up to the parser's inline limit, a `memoryview` for a large payload. Names and
numbers are always short, so a memoryview where a name belongs is refused as too long.
"""

from __future__ import annotations

import math
from typing import Final

from pion.errors import CommandError
from pion.replies import Buffer

MAX_NAME_BYTES: Final = 4096
"""Bytes in the name of a session, namespace or key: long enough for any path-like key, small enough to index."""

MAX_ID: Final = 2**31 - 1
"""Largest layer or token id: a signed 32-bit integer, which every client's integer type can hold."""


def show(value: Buffer, limit: int = 64) -> str:
    """A buffer as printable text for an error message: escaped, cut, never with a line break."""
    raw = bytes(value[:limit])
    text = raw.decode("utf-8", "backslashreplace")
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return f"'{text}'" + ("..." if len(value) > limit else "")


def name(value: Buffer, what: str) -> bytes:
    """A session, namespace or key name: 1 to 4,096 bytes of any value."""
    if not 1 <= len(value) <= MAX_NAME_BYTES:
        raise CommandError(f"{what} must be 1 to {MAX_NAME_BYTES} bytes long, got {len(value)}")
    return value if type(value) is bytes else bytes(value)


def word(value: Buffer) -> bytes:
    """An option word in upper case; anything too long to be one comes back as it is cut."""
    return bytes(value[:64]).upper()


def integer(value: Buffer, what: str, low: int = 0, high: int = MAX_ID) -> int:
    """A decimal integer in [low, high]. No sign but '-', no blanks, no underscores, no leading '+'."""
    text = bytes(value[:21])
    digits = text[1:] if text[:1] == b"-" else text
    if len(value) > 20 or not digits.isdigit():
        raise CommandError(f"{what} must be an integer from {low} to {high}, got {show(value)}")
    number = int(text)
    if not low <= number <= high:
        raise CommandError(f"{what} must be an integer from {low} to {high}, got {number}")
    return number


def number(value: Buffer, what: str, low: float = 0.0, high: float = 1e15) -> float:
    """A finite decimal number in [low, high]."""
    try:
        result = float(bytes(value[:64])) if len(value) <= 64 and b"_" not in bytes(value) else math.nan
    except ValueError:
        result = math.nan
    if not low <= result <= high:
        raise CommandError(f"{what} must be a number from {low:g} to {high:g}, got {show(value)}")
    return result


class Cursor:
    """Walks the option part of a request: option words in any order, each at most once, each with its values."""

    __slots__ = ("_argv", "_command", "_index", "_seen")

    def __init__(self, argv: list[Buffer], start: int, command: str) -> None:
        self._argv = argv
        self._index = start
        self._command = command
        self._seen: set[bytes] = set()

    def __bool__(self) -> bool:
        return self._index < len(self._argv)

    def option(self) -> bytes:
        """The next option word in upper case; an option given twice is refused."""
        found = word(self._argv[self._index])
        self._index += 1
        if found in self._seen:
            raise CommandError(f"{self._command}: option {show(found)} given twice")
        self._seen.add(found)
        return found

    def value(self, what: str) -> Buffer:
        """The next value; `what` names it if it is missing."""
        if self._index >= len(self._argv):
            raise CommandError(f"{self._command}: {what} is missing")
        found = self._argv[self._index]
        self._index += 1
        return found

    def unknown(self, option: bytes, expected: str) -> CommandError:
        """The error for an option that this command does not have."""
        return CommandError(f"{self._command}: unknown option {show(option)}, expected {expected}")
