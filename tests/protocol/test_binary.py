"""The binary lane's parser and encoder: what is a request, what is refused, where payloads go, how answers look."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from pion.errors import BusyError, CommandError, ProtocolError, Status, status_of
from pion.limits import BINARY_META_BYTES, INLINE_ARG_BYTES, UNAUTHENTICATED_BULK_BYTES
from pion.protocol.binary import BinaryRequest
from pion.protocol.binary_answers import Answer, Short, answer_to, encode_answer, error_frame, error_instead
from pion.protocol.encode import JOINED_BYTES
from pion.replies import BinaryReply, Blob, ErrorReply, Map, Simple, Stream
from tests.protocol.binary_support import LONG, BinaryReceiver, named, outcome, wire


def header(**changes: int) -> bytes:
    """The header of a request, byte by byte as the specification has it."""
    values = {"magic": 0xCA5E, "version": 1, "code": 2, "id": 7, "status": 0, "zero": 0, "meta": 0, "body": 0} | changes
    return (
        values["magic"].to_bytes(2, "little")
        + bytes([values["version"], values["code"]])
        + values["id"].to_bytes(4, "little")
        + bytes([values["status"]])
        + values["zero"].to_bytes(3, "little")
        + values["meta"].to_bytes(4, "little")
        + values["body"].to_bytes(8, "little")
    )


def test_a_request_is_what_the_specification_says():
    assert len(header()) == 24
    assert wire(2, 7, b"abcd") == header(meta=4) + b"abcd"
    ((kind, code, number, listed, meta, body),) = outcome(
        header(code=1, id=2**32 - 1, meta=5, body=3) + named(b"key") + b"xyz"
    )[0]
    assert (kind, code, number, meta, body) == ("request", 1, 2**32 - 1, named(b"key"), b"xyz")
    assert listed == [b"NAMED", b"key", b"xyz"], "for those who know RESP: command, name, payload"


def test_what_is_not_named_or_not_known_has_no_name():
    stream = wire(2, 1, bytes(4)) + wire(99, 2, named(b"key"), b"b") + wire(1, 3, b"\x09\x00short") + wire(1, 4)
    assert [each[3] for each in outcome(stream)[0]] == [
        [b"PLAIN", b""],
        [b"0x63", b"b"],
        [b"NAMED", b""],
        [b"NAMED", b""],
    ]


def test_the_limit_of_a_batch_and_what_is_left():
    receiver = BinaryReceiver()
    receiver.parser.feed(b"".join(wire(2, number) for number in range(3)) + header(id=3)[:10])
    assert [each.id for each in receiver.parser.requests(2)] == [0, 1]
    assert not receiver.parser.need_data
    assert [each.id for each in receiver.parser.requests(2)] == [2]
    assert receiver.parser.need_data
    assert not receiver.parser.between_requests
    assert not receiver.parser.in_request
    receiver.parser.feed(header(id=3)[10:])
    assert [each.id for each in receiver.parser.requests(2)] == [3]
    assert receiver.parser.between_requests
    assert receiver.parser.buffered_bytes == 0


@pytest.mark.parametrize("body_bytes", [0, 1, INLINE_ARG_BYTES - 1, INLINE_ARG_BYTES, INLINE_ARG_BYTES + 1, 200_000])
def test_bodies_at_the_edges(body_bytes):
    body = bytes(np.random.default_rng(1).integers(0, 256, body_bytes, np.uint8))
    receiver = BinaryReceiver()
    receiver.parser.feed(wire(1, 1, named(b"k"), body) + wire(2, 2))
    (first,) = receiver.parser.requests(1)
    assert first.body == body
    assert type(first.body) is (memoryview if body_bytes > INLINE_ARG_BYTES else bytes)
    assert receiver.allocations == ([body_bytes] if body_bytes > INLINE_ARG_BYTES else [])
    assert [each.id for each in receiver.parser.requests(5)] == [2]


def test_a_large_body_is_received_into_memory_that_was_asked_for_once_its_name_is_known():
    receiver = BinaryReceiver()
    parser = receiver.parser
    asked = []
    allocate = parser._allocate
    parser._allocate = lambda nbytes: asked.append([nbytes, *map(bytes, parser.unfinished)]) or allocate(nbytes)
    body = b"x" * LONG
    data = wire(1, 1, named(b"key"), body)
    parser.feed(data[: 24 + 5 + 10])
    assert parser.requests(1) == []
    assert asked == [[LONG, b"NAMED", b"key"]]
    assert parser.payload_left == LONG - 10
    target = parser.target()
    target[:] = data[24 + 5 + 10 :]
    parser.filled(len(target))
    assert parser.target() is None
    (request,) = parser.requests(1)
    assert bytes(request.body) == body
    assert request.body.readonly
    assert not parser.in_request
    assert parser.trailer_bytes == 0, "nothing follows it on the wire"


def test_a_request_that_reserved_memory_is_the_last_of_its_batch():
    receiver = BinaryReceiver()
    receiver.parser.feed(wire(2, 1) + wire(1, 2, named(b"k"), b"x" * LONG) + wire(2, 3))
    assert [each.id for each in receiver.parser.requests(10)] == [1, 2]
    assert [each.id for each in receiver.parser.requests(10)] == [3]


def test_more_is_not_filled_than_is_missing():
    receiver = BinaryReceiver()
    receiver.parser.feed(header(code=1, body=LONG))
    receiver.parser.requests(1)
    with pytest.raises(ValueError, match="do not fit"):
        receiver.parser.filled(LONG + 1)


def test_a_body_without_memory_is_read_away_and_the_stream_stays_in_step():
    stream = wire(1, 1, named(b"key"), b"x" * LONG) + wire(2, 2)
    found, error, _ = outcome(stream, [40, 1000], budget=1000)
    assert not error
    assert [each[:4] for each in found] == [
        (f"refused {LONG}", 1, 1, [b"NAMED", b"key"]),
        ("request", 2, 2, [b"PLAIN", b""]),
    ]


def test_long_meta_without_memory_is_read_away_with_its_body():
    stream = wire(1, 1, named(b"k" * LONG), b"x" * LONG) + wire(2, 2)
    found, error, _ = outcome(stream, [100], budget=1000)
    assert not error
    assert [each[:4] for each in found] == [
        (f"refused {LONG + 2}", 1, 1, [b"NAMED"]),
        ("request", 2, 2, [b"PLAIN", b""]),
    ]


def test_long_meta_is_charged_and_short_parts_that_are_long_together():
    receiver = BinaryReceiver()
    receiver.parser.feed(header(code=2, meta=LONG))
    receiver.parser.requests(1)
    assert (receiver.reserved, receiver.allocations) == (LONG, [])
    receiver = BinaryReceiver()
    receiver.parser.feed(header(code=2, meta=INLINE_ARG_BYTES, body=1))
    receiver.parser.requests(1)
    assert receiver.reserved == INLINE_ARG_BYTES + 1


def test_closing_gives_the_memory_up():
    receiver = BinaryReceiver()
    receiver.parser.feed(header(code=1, body=LONG))
    receiver.parser.requests(1)
    receiver.parser.close()
    assert receiver.parser.target() is None
    assert not receiver.parser.in_request


BAD = [
    (header(magic=0xCA5F), "bad magic number; this is the binary lane, RESP has a port of its own", (0, 0)),
    (b"*1\r\n$4\r\nPING\r\n", "bad magic number; this is the binary lane, RESP has a port of its own", (0, 0)),
    (b"P", "bad magic number; this is the binary lane, RESP has a port of its own", (0, 0)),
    (header()[:2] + b"\x02", "version 2 of the binary lane is not known, expected 1", (0, 0)),
    (header(version=0), "version 0 of the binary lane is not known, expected 1", (0, 0)),
    (header(status=1), "the status and the reserved bytes of a request must be 0", (2, 7)),
    (header(zero=1 << 16), "the status and the reserved bytes of a request must be 0", (2, 7)),
    (header(meta=BINARY_META_BYTES + 1), f"meta of {BINARY_META_BYTES + 1} bytes, at most {BINARY_META_BYTES}", (2, 7)),
    (header(meta=2**32 - 1), f"meta of {2**32 - 1} bytes, at most {BINARY_META_BYTES}", (2, 7)),
    (header(body=2**24 + 1), f"body of {2**24 + 1} bytes, at most {2**24}", (2, 7)),
    (header(body=2**64 - 1), f"body of {2**64 - 1} bytes, at most {2**24}", (2, 7)),
]


@pytest.mark.parametrize(("data", "message", "failed"), BAD, ids=range(len(BAD)))
def test_what_is_no_frame_ends_the_stream_after_the_requests_before_it(data, message, failed):
    found, error, about = outcome(wire(2, 1) + data)
    assert [each[2] for each in found] == [1]
    assert error == f"Protocol error: {message}"
    assert about == failed


def test_the_largest_lengths_are_taken_and_nothing_is_allocated_for_what_is_not():
    receiver = BinaryReceiver()
    receiver.parser.feed(header(code=1, body=2**24))
    assert receiver.parser.requests(1) == []
    assert receiver.parser.payload_left == 2**24
    receiver = BinaryReceiver()
    receiver.parser.feed(header(code=1, meta=BINARY_META_BYTES))
    assert receiver.parser.requests(1) == []
    assert receiver.parser.payload_left == BINARY_META_BYTES
    receiver = BinaryReceiver()
    receiver.parser.feed(header(code=1, body=2**24 + 1))
    with pytest.raises(ProtocolError):
        receiver.parser.requests(1)
    assert receiver.allocations == []
    assert receiver.reserved == 0


@pytest.mark.parametrize(
    ("meta", "body", "error"),
    [
        (UNAUTHENTICATED_BULK_BYTES, 0, ""),
        (0, UNAUTHENTICATED_BULK_BYTES, ""),
        (UNAUTHENTICATED_BULK_BYTES, 1, "Protocol error: unauthenticated request length"),
        (UNAUTHENTICATED_BULK_BYTES + 1, 0, "Protocol error: unauthenticated request length"),
        (0, 1 << 23, "Protocol error: unauthenticated request length"),
    ],
)
def test_before_authentication_the_small_limits_hold(meta, body, error):
    assert outcome(wire(2, 1, bytes(meta), bytes(body)), restricted=True)[1] == error


def test_the_small_limits_end_with_authentication_within_one_chunk():
    receiver = BinaryReceiver()
    parser = receiver.parser
    parser.restricted = True
    parser.feed(wire(2, 1) + wire(1, 2, named(b"k"), b"x" * LONG))
    assert [each.id for each in parser.requests(1)] == [1]
    parser.restricted = False
    assert [each.id for each in parser.requests(1)] == [2]


# Answers


def encoded(reply: object) -> list[object]:
    request = BinaryRequest.of(0x14, 9)
    out: list[object] = []
    encode_answer(answer_to(request, reply), out)
    return out


def test_an_answer_has_the_header_of_its_request():
    expected = struct.pack("<HBBIB3xIQ", 0xCA5E, 1, 0x14, 9, 12, 2, 3)
    assert encoded(BinaryReply(Status.PENDING, b"me", b"abc")) == [expected + b"me" + b"abc"]
    assert encoded(BinaryReply()) == [struct.pack("<HBBIB3xIQ", 0xCA5E, 1, 0x14, 9, 0, 0, 0)]


def test_the_smallest_answers_take_the_shortest_way():
    request = BinaryRequest.of(2, 1)
    assert type(answer_to(request, BinaryReply(Status.MISS))) is Short
    assert type(answer_to(request, BinaryReply(body=b"x"))) is Answer
    assert type(answer_to(request, BinaryReply(meta=b"x"))) is Answer
    assert type(answer_to(request, BinaryReply(body=[]))) is Answer


def test_stored_buffers_and_streams_are_sent_as_they_are():
    stored = [memoryview(np.arange(40, dtype=np.uint8)).toreadonly(), b"y" * (JOINED_BYTES + 1)]
    stream = Stream(10, iter(()))
    out = encoded(BinaryReply(meta=b"m", body=[Blob(stored, 40 + JOINED_BYTES + 1), stream, b"end"]))
    assert out[0] == struct.pack("<HBBIB3xIQ", 0xCA5E, 1, 0x14, 9, 0, 1, 40 + JOINED_BYTES + 1 + 10 + 3) + b"m"
    assert out[1] is stored[0]
    assert out[2] is stored[1]
    assert out[3] is stream
    assert out[4:] == [b"end"]
    assert encoded(BinaryReply(body=Blob([], 0)))[0][-8:] == bytes(8)


def test_a_view_counts_its_bytes_not_its_items():
    view = memoryview(np.zeros(5, np.float32))
    assert encoded(BinaryReply(body=[view]))[0][-8:] == (20).to_bytes(8, "little")


def test_errors_carry_the_status_of_their_code_and_the_words_of_resp():
    (data,) = encoded(ErrorReply("BUSY", "not now"))
    assert data == struct.pack("<HBBIB3xIQ", 0xCA5E, 1, 0x14, 9, 7, 0, 12) + b"BUSY not now"
    assert error_frame(1, 2, CommandError("nö\ud800"))[24:] == "ERR nö".encode() + b"\\ud800"
    assert error_instead(encoded(BinaryReply())[0], BusyError("not now")) == data


@pytest.mark.parametrize(
    "value", [object(), Simple("OK"), 1, None, [b"x"], Map([]), BinaryReply(body=["text"]), BinaryReply(body=3)]
)
def test_what_is_no_answer_is_a_type_error_and_leaves_nothing_behind(value):
    out = [b"before"]
    with pytest.raises(TypeError):
        encode_answer(Answer(BinaryRequest.of(1, 1), value), out)
    assert out == [b"before"]


def test_every_error_has_the_status_of_the_specification():
    known = {
        "NOAUTH": 4,
        "WRONGPASS": 4,
        "NOPERM": 5,
        "OOM": 6,
        "BUSY": 7,
        "EXISTS": 9,
        "LOADING": 10,
        "MISCONF": 11,
        "COLDMISS": 3,
    }
    assert {code: status_of(code) for code in known} == known
    assert status_of("ERR") == status_of("WRONGTYPE") == status_of("of a plugin") == 1
    names = "OK ERR MISS COLDMISS NOAUTH NOPERM OOM BUSY MOVED EXISTS LOADING MISCONF PENDING"
    assert [status.name for status in Status] == names.split()
