"""Answers of the binary lane: from a handler's reply to buffers. A stored buffer appears as it is, never copied."""

from __future__ import annotations

from typing import Final

from pion.errors import PionError, status_of
from pion.protocol.binary import HEADER, MAGIC, VERSION, BinaryRequest
from pion.protocol.encode import JOINED_BYTES, Part
from pion.replies import BinaryReply, Blob, ErrorReply, Stream

_pack_header: Final = HEADER.pack


def frame(code: int, request_id: int, status: int, meta: bytes, body_bytes: int) -> bytes:
    """The header of a frame with its meta behind it."""
    return _pack_header(MAGIC, VERSION, code, request_id, status, len(meta), body_bytes) + meta


class Answer:
    """What is to be sent for a request: a reply as the handler returned it, which may be no reply at all."""

    __slots__ = ("code", "id", "reply")

    def __init__(self, request: BinaryRequest, reply: object) -> None:
        self.code = request.code
        self.id = request.id
        self.reply = reply


class Short:
    """An answer without meta and body: 24 bytes, made once."""

    __slots__ = ("wire",)

    def __init__(self, request: BinaryRequest, status: int) -> None:
        self.wire: Final = _pack_header(MAGIC, VERSION, request.code, request.id, status, 0, 0)


def answer_to(request: BinaryRequest, reply: object) -> Answer | Short:
    """The answer that carries a reply to its request."""
    if type(reply) is BinaryReply and not reply.meta and type(reply.body) is bytes and not reply.body:
        return Short(request, reply.status)
    return Answer(request, reply)


def encode_answer(answer: Answer | Short, out: list[Part]) -> None:
    """Append an answer's buffers to `out`, stored ones as they are, never copied; a `Stream` as itself.

    Raises `TypeError` for a reply that the binary lane can't carry; `out` is then as it was.
    """
    if isinstance(answer, Short):
        out.append(answer.wire)
        return
    reply = answer.reply
    if isinstance(reply, ErrorReply):
        out.append(error_frame(answer.code, answer.id, reply))
        return
    if not isinstance(reply, BinaryReply):
        raise TypeError(f"{type(reply).__name__} is not a BinaryReply")
    if type(reply.body) is bytes and len(reply.body) <= JOINED_BYTES:
        out.append(frame(answer.code, answer.id, reply.status, reply.meta, len(reply.body)) + reply.body)
        return
    parts: list[Part] = []
    nbytes = 0
    for each in reply.body if isinstance(reply.body, list | tuple) else [reply.body]:
        if isinstance(each, bytes | memoryview):
            parts.append(each)
            nbytes += len(each) if isinstance(each, bytes) else each.nbytes
        elif isinstance(each, Blob):
            parts.extend(each.parts)
            nbytes += each.nbytes
        elif isinstance(each, Stream):
            parts.append(each)
            nbytes += each.nbytes
        else:
            raise TypeError(f"{type(each).__name__} is no part of a body")
    out.append(frame(answer.code, answer.id, reply.status, reply.meta, nbytes))
    out += parts


def error_frame(code: int, request_id: int, error: ErrorReply | PionError) -> bytes:
    """An error as an answer: the status of its code, and as body the code and the text, as in an error of RESP."""
    text = error.text if isinstance(error, ErrorReply) else str(error)
    body = f"{error.code} {text}".encode("utf-8", "backslashreplace")
    return frame(code, request_id, status_of(error.code), b"", len(body)) + body


def error_instead(encoded: Part, error: PionError) -> bytes:
    """An error in place of an answer that was encoded already: `encoded` is its first part."""
    assert isinstance(encoded, bytes)  # noqa: S101  an answer begins with its header
    _, _, code, request_id, *_ = HEADER.unpack_from(encoded)
    return error_frame(code, request_id, error)
