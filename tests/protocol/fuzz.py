"""Entry point of `scripts/fuzz`: coverage-guided fuzzing of the request parsers of both lanes.

The first bytes of each input choose the lane, the split and the limits; the rest is the stream. The same stream given
whole must give the same requests and the same error.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["pion.protocol"]):
    import pion.protocol.binary
    import pion.protocol.packed
    import pion.protocol.resp

from pion.command import Field, FieldKind
from pion.errors import CommandError, ProtocolError
from pion.limits import HEADER_LINE_BYTES
from tests.protocol import binary_support
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


FIELDS = [Field(kind.name, kind) for kind in FieldKind]


def binary_outcome(stream: bytes, step: int, limit: int, restricted: bool) -> object:
    """The requests in the stream, what their meta says, and the error that ended it."""
    cuts = list(range(step, len(stream), step))
    found, error, about = binary_support.outcome(
        stream, cuts, limit=limit, restricted=restricted, budget=1 << 18, max_body_bytes=1 << 18
    )
    for _, code, _, _, meta, _ in found:
        fields = FIELDS[code % len(FIELDS) :]
        try:
            values = pion.protocol.packed.unpack(fields, meta)
        except CommandError:
            continue
        if pion.protocol.packed.pack(fields, values) != meta:
            raise AssertionError("what is unpacked is not what was packed")
    return found, error, about


def test_one_input(data: bytes) -> None:
    """What atheris calls."""
    if len(data) < 3:
        return
    step, limit, restricted, stream = data[0] % 64 + 1, data[1] % 8 + 1, bool(data[2] & 1), data[3:]
    if data[2] & 2:
        limit = 1 if restricted else limit  # as the connection does
        if binary_outcome(stream, step, limit, restricted) != binary_outcome(
            stream, len(stream) or 1, limit if restricted else 1000, restricted
        ):
            raise AssertionError("the split changes the result")
        return
    whole = outcome(stream, len(stream) or 1, 1000, restricted)
    if outcome(stream, step, limit, restricted) != whole:
        raise AssertionError("the split changes the result")


if __name__ == "__main__":
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()
