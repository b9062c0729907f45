"""Helpers of the tests of the binary lane's parser."""

from __future__ import annotations

from collections.abc import Sequence

from pion.errors import ProtocolError
from pion.limits import INLINE_ARG_BYTES
from pion.protocol.binary import BinaryParser, BinaryRefused
from pion.protocol.binary_answers import frame
from tests.protocol.support import Receiver

LONG = INLINE_ARG_BYTES + 1000
"""Bytes of a meta or a body that gets memory of its own."""


HEADS = {1: (b"NAMED", True), 2: (b"PLAIN", False)}

Seen = tuple[str, int, int, list[bytes], bytes, bytes]
"""What a test compares of a request: kind, code, id, as a list, meta, body."""


class BinaryReceiver(Receiver):
    """As `Receiver`, for the binary lane."""

    def __init__(self, *, budget: int = 1 << 26, max_body_bytes: int = 1 << 24, late: int = 0) -> None:
        super().__init__(budget=budget, late=late)
        self.parser: BinaryParser = BinaryParser(  # type: ignore[assignment]
            heads=HEADS, max_body_bytes=max_body_bytes, allocate=self._allocate, reserve=self._reserve
        )

    def seen(self, limit: int = 1000, found: list[Seen] | None = None) -> list[Seen]:
        """Every complete request, added to `found`."""
        found = [] if found is None else found
        while True:
            requests = self.parser.requests(limit)
            asked = self.parser.awaited > 0
            if asked:
                assert self.parser.need_data
                assert self.parser.target() is None
                assert not self.parser.payload_left
                self.parser.resume()
            for each in requests:
                kind = f"refused {each.nbytes}" if isinstance(each, BinaryRefused) else "request"
                found.append((kind, each.code, each.id, [bytes(part) for part in each], each.meta, bytes(each.body)))
            if not requests and self.parser.need_data and not asked:
                return found


def wire(code: int, number: int, meta: bytes = b"", body: bytes = b"") -> bytes:
    """A request as it is sent."""
    return frame(code, number, 0, meta, len(body)) + body


def named(name: bytes) -> bytes:
    """A name as it is packed."""
    return len(name).to_bytes(2, "little") + name


def outcome(
    stream: bytes,
    cuts: Sequence[int] = (),
    *,
    limit: int = 3,
    restricted: bool = False,
    **limits: int,
) -> tuple[list[Seen], str, tuple[int, int]]:
    """The requests in the stream, the error that ended it, and which request that error is about."""
    receiver = BinaryReceiver(**limits)
    receiver.parser.restricted = restricted
    found: list[Seen] = []
    try:
        for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            receiver.give(stream[start:stop])
            receiver.seen(limit, found)
    except ProtocolError as error:
        return found, str(error), receiver.parser.failed
    return found, "", (0, 0)
