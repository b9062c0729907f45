"""Redis's glob patterns for names: `*`, `?`, `[a-c]`, `[^a]`, and a backslash before a character meant as it is."""

from __future__ import annotations

import re
from typing import Final

_CLASS_SPECIAL: Final = re.compile(rb"([\\\]\[^&~|-])")


class Glob:
    """A compiled pattern. Matching takes time proportional to name x pattern, whatever the pattern is.

    A pattern is cut at its stars; the parts between match a fixed number of bytes each, and taking the leftmost place
    for each of them in turn is enough, so there is no backtracking.
    """

    __slots__ = ("_ends", "_parts", "literal")

    def __init__(self, pattern: bytes) -> None:
        parts, self.literal = _parts(pattern)
        self._parts = [(re.compile(text, re.DOTALL), width) for text, width in parts]
        self._ends = len(parts) > 1
        """Whether there is a star: then the first and last part are bound to the two ends only."""

    def matches(self, name: bytes) -> bool:
        """Whether the whole name fits."""
        first, width = self._parts[0]
        if not self._ends:
            return first.fullmatch(name) is not None
        last, last_width = self._parts[-1]
        stop = len(name) - last_width
        if stop < width or first.match(name) is None or last.fullmatch(name, stop) is None:
            return False
        position = width
        for part, _ in self._parts[1:-1]:
            found = part.search(name, position, stop)
            if found is None:
                return False
            position = found.end()
        return True


def _parts(pattern: bytes) -> tuple[list[tuple[bytes, int]], bytes]:
    """Regular expression and width of each part between stars, and the bytes every match starts with."""
    parts: list[tuple[bytes, int]] = []
    text, width, index = b"", 0, 0
    literal, plain = b"", True
    while index < len(pattern):
        char = pattern[index : index + 1]
        index += 1
        if char == b"*":
            plain = False
            if not parts or text:
                parts.append((text, width))
            text, width = b"", 0
            continue
        if char == b"?":
            text, plain = text + b".", False
        elif char == b"[":
            piece, index = _char_class(pattern, index)
            text, plain = text + piece, False
        else:
            if char == b"\\" and index < len(pattern):
                char = pattern[index : index + 1]
                index += 1
            text += re.escape(char)
            if plain:
                literal += char
        width += 1
    parts.append((text, width))
    return parts, literal


def _char_class(pattern: bytes, index: int) -> tuple[bytes, int]:
    negate = pattern[index : index + 1] == b"^"
    index += negate
    content = b""
    while index < len(pattern) and pattern[index : index + 1] != b"]":
        low = pattern[index : index + 1]
        if low == b"\\" and index + 1 < len(pattern):
            index += 1
            low = pattern[index : index + 1]
        index += 1
        if pattern[index : index + 1] == b"-" and pattern[index + 1 : index + 2] not in {b"", b"]"}:
            high = pattern[index + 1 : index + 2]
            index += 2
            low, high = min(low, high), max(low, high)
            content += _CLASS_SPECIAL.sub(rb"\\\1", low) + b"-" + _CLASS_SPECIAL.sub(rb"\\\1", high)
        else:
            content += _CLASS_SPECIAL.sub(rb"\\\1", low)
    if not content:
        return (b"." if negate else b"(?!)."), index + 1
    return b"[" + (b"^" if negate else b"") + content + b"]", index + 1
