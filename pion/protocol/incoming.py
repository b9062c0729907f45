"""What the request parsers of both lanes have in common: the chunk being parsed, and the payload being received."""

from __future__ import annotations

from typing import Final

LATER: Final = memoryview(b"")
"""What `allocate` returns for a payload that there may be memory for a little later."""


class Incoming:
    """The bytes of one connection: a chunk with a position in it, and the part of a payload that is still to come."""

    __slots__ = ("_data", "_position", "_target", "awaited", "need_data", "payload_left", "restricted")

    def __init__(self) -> None:
        self._data = b""
        self._position = 0
        self._target: memoryview | None = None
        """What is missing of the payload; None if there is none, or it is thrown away."""
        self.restricted = False
        """The client must still authenticate: the small limits apply."""
        self.payload_left = 0
        """Bytes of the current payload still to come, without what the protocol puts behind it."""
        self.awaited = 0
        """Bytes of a payload that there may be memory for a little later: nothing is parsed until `resume`."""
        self.need_data = True
        """The last `requests` call stopped because the data ended, not because of its limit."""

    def target(self) -> memoryview | None:
        """Where the driver must put the next bytes of the stream; None if they go to `feed` or are discarded."""
        return self._target

    @property
    def discarding(self) -> bool:
        """The payload was refused: receive `payload_left` bytes anywhere and report them with `filled`."""
        return self.payload_left > 0 and self._target is None

    def filled(self, nbytes: int) -> None:
        """The driver put `nbytes` into the target (or dropped them, while discarding)."""
        if not 0 <= nbytes <= self.payload_left:
            raise ValueError(f"{nbytes} bytes do not fit the {self.payload_left} that are missing")
        self.payload_left -= nbytes
        if self._target is not None:
            self._target = self._target[nbytes:] if self.payload_left else None

    @property
    def buffered_bytes(self) -> int:
        """Bytes that were fed but not yet taken out."""
        return len(self._data) - self._position

    def _append(self, data: bytes) -> None:
        """Go on with `data` behind what is left of the chunk, which is copied."""
        rest = len(self._data) - self._position
        self._data = self._data[self._position :] + data if rest else data
        self._position = 0

    def _fill_from_chunk(self) -> int:
        """Move what the chunk has of the payload to its place; how many bytes that was."""
        taken = min(self.payload_left, len(self._data) - self._position)
        if taken:
            if self._target is not None:
                self._target[:taken] = self._data[self._position : self._position + taken]
            self.filled(taken)
            self._position += taken
        return taken
