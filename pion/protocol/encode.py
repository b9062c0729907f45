"""Turning replies into buffers, for RESP2 or RESP3. A stored buffer appears in the output as it is, never copied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from pion.replies import NO_REPLY, Blob, Buffer, Check, ErrorReply, Map, Simple, Static, Stream

Part: TypeAlias = Buffer | Stream | Check
BUFFERS: Final = frozenset({bytes, memoryview})
"""The types of parts that are sent as they are. What the others stand for only a `Sender` knows."""

JOINED_BYTES: Final = 4096
"""A bulk string up to here is cheaper to copy into one buffer with its header than to send as three."""

_INTEGERS: Final = tuple(b":%d\r\n" % n for n in range(1024))
_CRLF: Final = b"\r\n"


def encode(reply: object, resp: int, out: list[Part]) -> None:
    """Append one reply's buffers to `out`. `resp` is 2 or 3.

    A `Stream` is appended as itself between its header and its CRLF, as are parts of a Blob that are no buffers: the
    driver makes, sends or works off what they stand for. Raises `TypeError` for a value that is no reply; `out` may
    then hold a part of it and must be thrown away.
    """
    encoder = _ENCODERS.get(type(reply))
    if encoder is None:
        encoder = _encoder_of_subclass(reply)
    encoder(reply, resp, out)


def error_line(code: str, text: str) -> bytes:
    """An error reply on the wire. Line breaks in the text would break the framing, so they become blanks."""
    line = f"-{code} {text}".replace("\r", " ").replace("\n", " ")
    return line.encode("utf-8", "backslashreplace") + _CRLF


def array_header(count: int) -> bytes:
    """What comes before the items of an array."""
    return b"*%d\r\n" % count


def map_header(count: int, resp: int) -> bytes:
    """What comes before `count` fields with their values."""
    return b"%%%d\r\n" % count if resp == 3 else b"*%d\r\n" % (2 * count)


def _simple(reply: Simple, resp: int, out: list[Part]) -> None:
    out.append(reply.wire)


def _error(reply: ErrorReply, resp: int, out: list[Part]) -> None:
    out.append(error_line(reply.code, reply.text))


def _integer(reply: int, resp: int, out: list[Part]) -> None:
    out.append(_INTEGERS[reply] if 0 <= reply < 1024 else b":%d\r\n" % reply)


def _float(reply: float, resp: int, out: list[Part]) -> None:
    if math.isnan(reply):
        text = b"nan"
    elif math.isinf(reply):
        text = b"inf" if reply > 0 else b"-inf"
    else:
        text = repr(float(reply)).removesuffix(".0").encode()  # a NumPy float's own repr names its type
    out.append(b",%b\r\n" % text if resp == 3 else b"$%d\r\n%b\r\n" % (len(text), text))


def _bytes(reply: bytes, resp: int, out: list[Part]) -> None:
    if len(reply) <= JOINED_BYTES:
        out.append(b"$%d\r\n%b\r\n" % (len(reply), reply))
    else:
        out += (b"$%d\r\n" % len(reply), reply, _CRLF)


def _memoryview(reply: memoryview, resp: int, out: list[Part]) -> None:
    out.append(b"$%d\r\n" % reply.nbytes)
    out.append(reply)
    out.append(_CRLF)


def _text(reply: str, resp: int, out: list[Part]) -> None:
    _bytes(reply.encode("utf-8", "backslashreplace"), resp, out)


def _null(reply: None, resp: int, out: list[Part]) -> None:
    out.append(b"_\r\n" if resp == 3 else b"$-1\r\n")


def _blob(reply: Blob, resp: int, out: list[Part]) -> None:
    out.append(b"$%d\r\n" % reply.nbytes)
    out.extend(reply.parts)
    out.append(_CRLF)


def _stream(reply: Stream, resp: int, out: list[Part]) -> None:
    out.append(b"$%d\r\n" % reply.nbytes)
    out.append(reply)
    out.append(_CRLF)


def _array(reply: Sequence[object], resp: int, out: list[Part]) -> None:
    out.append(array_header(len(reply)))
    for item in reply:
        encode(item, resp, out)


def _map(reply: Map, resp: int, out: list[Part]) -> None:
    out.append(map_header(len(reply.pairs), resp))
    for field, value in reply.pairs:
        encode(field, resp, out)
        encode(value, resp, out)


def _static(reply: Static, resp: int, out: list[Part]) -> None:
    wire = reply.wire.get(resp)
    if wire is None:
        parts: list[Any] = []
        encode(reply.value, resp, parts)
        wire = reply.wire[resp] = b"".join(parts)
    out.append(wire)


def _nothing(reply: object, resp: int, out: list[Part]) -> None:
    return


_ENCODERS: Final[dict[type, Callable[[Any, int, list[Part]], None]]] = {
    Simple: _simple,
    ErrorReply: _error,
    int: _integer,
    bool: _integer,
    float: _float,
    bytes: _bytes,
    memoryview: _memoryview,
    str: _text,
    type(None): _null,
    Blob: _blob,
    Stream: _stream,
    list: _array,
    tuple: _array,
    Map: _map,
    Static: _static,
    type(NO_REPLY): _nothing,
}


def _encoder_of_subclass(reply: object) -> Callable[[Any, int, list[Part]], None]:
    for base, encoder in _ENCODERS.items():
        if isinstance(reply, base):
            return encoder
    raise TypeError(f"{type(reply).__name__} is not a reply")
