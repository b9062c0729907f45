"""Entry point of `scripts/fuzz`: coverage-guided fuzzing of the request parser.

The first bytes of each input choose the split and the limits; the rest is the stream. The same stream given whole must
give the same requests and the same error.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["pion.protocol"]):
    import pion.protocol.resp  # noqa: F401

from pion.config import HEADER_LINE_BYTES
from pion.errors import ProtocolError
from tests.protocol.support import Receiver


def outcome(stream: bytes, step: int, limit: int, restricted: bool) -> tuple[list[list[bytes]], str]:
    """The requests in the stream and the error that ended it."""
    receiver = Receiver(budget=1 << 20, max_bulk_bytes=1 << 18)
    parser = receiver.parser
    parser.restricted = restricted
    found: list[list[bytes]] = []
    try:
        for start in range(0, len(stream), step):
            receiver.give(stream[start : start + step])
            while (batch := parser.requests(limit)) or not parser.need_data:
                found += [[bytes(argument) for argument in request] for request in batch]
            if parser.buffered_bytes > HEADER_LINE_BYTES + step:
                raise AssertionError("the parser keeps more than one line")
    except ProtocolError as error:
        return found, str(error)
    return found, ""


def test_one_input(data: bytes) -> None:
    """What atheris calls."""
    if len(data) < 3:
        return
    step, limit, restricted, stream = data[0] % 64 + 1, data[1] % 8 + 1, bool(data[2] & 1), data[3:]
    whole = outcome(stream, len(stream) or 1, 1000, restricted)
    if outcome(stream, step, limit, restricted) != whole:
        raise AssertionError("the split changes the result")


if __name__ == "__main__":
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()
