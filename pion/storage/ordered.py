"""A sorted collection of byte strings with a value each, in chunks: insertion and removal move at most one chunk.

There is no large array to move or to resize, so a million entries come in without a pause.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

CHUNK_ENTRIES: Final = 1024
"""A chunk is split at twice this; moving it is then a microsecond's work."""


class SortedMap(Generic[T]):
    """Byte strings in order. `before` and `after` walk from any position, present or not."""

    __slots__ = ("_keys", "_last", "_length", "_values")

    def __init__(self) -> None:
        self._keys: list[list[bytes]] = [[]]
        self._values: list[list[T]] = [[]]
        self._last: list[bytes] = []
        """The last key of every chunk but the final one."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def get(self, key: bytes) -> T | None:
        """The value of a key."""
        chunk, index = self._find(key)
        keys = self._keys[chunk]
        return self._values[chunk][index] if index < len(keys) and keys[index] == key else None

    def set(self, key: bytes, value: T) -> None:
        """Put a key in, or replace its value."""
        chunk, index = self._find(key)
        keys, values = self._keys[chunk], self._values[chunk]
        if index < len(keys) and keys[index] == key:
            values[index] = value
            return
        keys.insert(index, key)
        values.insert(index, value)
        self._length += 1
        if len(keys) >= 2 * CHUNK_ENTRIES:
            self._split(chunk)

    def remove(self, key: bytes) -> None:
        """Take a key out. Raises KeyError."""
        chunk, index = self._find(key)
        keys = self._keys[chunk]
        if index >= len(keys) or keys[index] != key:
            raise KeyError(key)
        del keys[index], self._values[chunk][index]
        self._length -= 1
        if not keys and len(self._keys) > 1:
            del self._keys[chunk], self._values[chunk]
            del self._last[min(chunk, len(self._last) - 1)]
        elif chunk < len(self._last) and index == len(keys):
            self._last[chunk] = keys[-1]

    def after(self, key: bytes, *, inclusive: bool = False) -> Iterator[tuple[bytes, T]]:
        """Entries behind `key` in ascending order. The collection must not change meanwhile."""
        chunk, index = self._find(key)
        keys = self._keys[chunk]
        if not inclusive and index < len(keys) and keys[index] == key:
            index += 1
        while chunk < len(self._keys):
            for position in range(index, len(self._keys[chunk])):
                yield self._keys[chunk][position], self._values[chunk][position]
            chunk, index = chunk + 1, 0

    def before(self, key: bytes) -> Iterator[tuple[bytes, T]]:
        """Entries in front of `key` in descending order. The collection must not change meanwhile."""
        chunk, index = self._find(key)
        while True:
            for position in range(index - 1, -1, -1):
                yield self._keys[chunk][position], self._values[chunk][position]
            chunk -= 1
            if chunk < 0:
                return
            index = len(self._keys[chunk])

    def _find(self, key: bytes) -> tuple[int, int]:
        chunk = bisect_left(self._last, key)
        return chunk, bisect_left(self._keys[chunk], key)

    def _split(self, chunk: int) -> None:
        keys, values = self._keys[chunk], self._values[chunk]
        self._keys[chunk : chunk + 1] = [keys[:CHUNK_ENTRIES], keys[CHUNK_ENTRIES:]]
        self._values[chunk : chunk + 1] = [values[:CHUNK_ENTRIES], values[CHUNK_ENTRIES:]]
        self._last.insert(chunk, keys[CHUNK_ENTRIES - 1])
