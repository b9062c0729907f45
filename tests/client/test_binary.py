"""Requests and answers of the binary lane, without sockets."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.client import binary, commands, errors
from pion.client.binary import BinaryReader, Packed, even, refusal, sized
from pion.client.exchange import Exchange
from pion.client.limits import DIRECT_BYTES, JOIN_BYTES, MAX_ANSWER_META_BYTES, MAX_ERROR_BYTES
from pion.client.replies import NEED_DATA
from pion.client.requests import Either, Request
from pion.client.sinks import CallerMemory, FreshArrays
from pion.errors import Status
from pion.limits import BINARY_META_BYTES
from pion.protocol import binary as server_side

from .binary_fakes import Got, frame, sides

FETCH = Packed(code=binary.PREFIX_FETCH, parts=sized)
WORD = Packed(code=binary.V_STOREBATCH, answers={Status.OK: "OK"})


def read(reader: BinaryReader, data: bytes, step: int) -> object:
    """Give the reader `data` in pieces as a socket would: into its target, or fed."""
    rest = memoryview(data)
    while (reply := reader.next_reply()) is NEED_DATA:
        assert rest, "the reader wants more than the answer"
        target = reader.target()
        n = min(step, len(rest)) if target is None else min(step, len(rest), len(target))
        if target is None:
            reader.feed(bytes(rest[:n]))
        else:
            target[:n] = rest[:n]
            reader.filled(n)
        rest = rest[n:]
    assert not rest
    return reply


def answered(data: bytes, packed: Packed = FETCH, *, step: int = 1 << 20) -> object:
    """What `data` means as the answer to request 1."""
    reader = BinaryReader(1 << 30)
    reader.expect(packed.numbered(reader.number(), None if packed.answers else FreshArrays()))
    return read(reader, data, step)


def answer(*parts: bytes) -> bytes:
    """The whole answer to request 1, a PREFIX_FETCH."""
    return sides(*parts)(Got(binary.PREFIX_FETCH, 1, b"", b""))


# Requests


def test_a_request_byte_by_byte() -> None:
    request = commands.v_fetch(b"sid", 1, 2, 258, "bf16")
    assert isinstance(request, Either)
    sent = b"".join(map(bytes, request.over_binary(0x01020304).buffers))
    assert sent == (
        b"\x5e\xca\x01\x10\x04\x03\x02\x01\x00\x00\x00\x00\x12\x00\x00\x00" + bytes(8)
        + b"\x03\x00sid\x01\x00\x00\x00\x02\x00\x00\x00\x02\x01\x00\x00\x02"
    )  # fmt: skip


@pytest.mark.parametrize("size", [0, 1, JOIN_BYTES, JOIN_BYTES + 1, 100_000])
def test_a_large_body_is_sent_as_it_lies(size: int) -> None:
    rows = np.arange(size, dtype=np.uint8)
    request = commands.v_store_batch("s", 0, 0, 1, rows, "native")
    buffers = request.over_binary(1).buffers
    assert sum(map(len, buffers)) == 24 + 3 + 12 + 1 + size
    if size > JOIN_BYTES:
        assert len(buffers) == 2
        assert np.shares_memory(np.frombuffer(buffers[1], np.uint8), rows)
    else:
        assert len(buffers) == 1
    assert b"".join(map(bytes, buffers))[40:] == rows.tobytes()


@given(
    st.binary(max_size=300),
    st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 3), min_size=1, max_size=5),
    st.sampled_from(["fp32", "fp16", "bf16", "native"]),
)
def test_the_server_reads_what_the_client_packs(sid: bytes, ranges: list[tuple[int, int, int]], as_: str) -> None:
    """The server's own unpacking is the other opinion; the two share no code."""
    from pion.commands.vstore_binary import BINARY as ROWS
    from pion.protocol.packed import unpack

    row = next(row for row in ROWS if row.code == binary.V_FETCH_BATCH)
    meta = binary.joined(binary.packed_name(sid), binary.packed_wire(as_), binary.packed_ranges(ranges))
    assert unpack(row.meta, meta) == (sid, as_, ranges)


def test_both_sides_agree_on_the_constants() -> None:
    assert (binary.MAGIC, binary.VERSION, binary.HEADER.size) == (
        server_side.MAGIC,
        server_side.VERSION,
        server_side.HEADER.size,
    )
    assert commands.MAX_BINARY_META_BYTES == BINARY_META_BYTES


@pytest.mark.parametrize(
    "make",
    [
        lambda: commands.v_fetch("s", -1, 0, 1, "fp32"),
        lambda: commands.v_fetch("s", 0, 0, 2**32, "fp32"),
        lambda: commands.v_fetch("s" * 65_536, 0, 0, 1, "fp32"),
        lambda: commands.v_fetch_batch("s", [], "fp32"),
        lambda: commands.v_fetch_batch("s", [(0, 0, 1), (1, 0, 1)], "fp32"),
        lambda: commands.prefix_fetch("s", 0, 0, "native"),
        lambda: commands.v_fetch_batch("s", [(0, 0, 1)] * 30_000, "fp32"),
    ],
)
def test_what_the_binary_lane_cannot_say_goes_over_resp(make: object) -> None:
    assert isinstance(make(), Request)


def test_numbers_are_numbers() -> None:
    assert binary.packed_numbers(np.int64(7), 2**32 - 1) == b"\7\0\0\0\xff\xff\xff\xff"
    assert binary.packed_numbers(True) is None
    assert binary.packed_numbers(1.5) is None
    assert binary.packed_name(5) is None


def test_request_numbers_are_never_zero() -> None:
    reader = BinaryReader()
    reader._requests = 2**32 - 2
    assert [reader.number() for _ in range(3)] == [2**32 - 2 + 1, 1, 2]


# Answers


@given(st.lists(st.binary(max_size=40), max_size=8).map(lambda parts: parts[: len(parts) // 2 * 2]), st.data())
@settings(deadline=None)
def test_an_answer_cut_anywhere_is_the_same(parts: list[bytes], data: st.DataObject) -> None:
    wire = answer(*parts)
    cuts = sorted({0, *data.draw(st.lists(st.integers(1, len(wire) - 1), max_size=6)), len(wire)})
    reader = BinaryReader()
    reader.expect(FETCH.numbered(reader.number(), FreshArrays()))
    for start, end in pairwise(cuts):
        assert reader.next_reply() is NEED_DATA
        reader.feed(wire[start:end])
    assert [item.tobytes() for item in reader.next_reply()] == parts
    assert reader.idle


@pytest.mark.parametrize("step", [1, 7, 1000, DIRECT_BYTES, 1 << 20])
def test_large_parts_are_received_in_place(step: int) -> None:
    sizes = [100_000, 0, 1, 70_000, 5, DIRECT_BYTES]
    parts = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    reply = answered(answer(*parts), step=step)
    assert [item.tobytes() for item in reply] == parts


@pytest.mark.parametrize("window", [1, 100, DIRECT_BYTES, 50_000, 1 << 20])
def test_parts_may_be_received_in_windows(window: int) -> None:
    parts = [bytes([i + 1]) * (60_000 + i) for i in range(4)]
    scratch = np.empty(window, np.uint8)
    got = [bytearray() for _ in parts]
    taken = 0

    def receive(index: int, nbytes: int) -> memoryview:
        nonlocal taken
        assert nbytes == len(parts[index]) - len(got[index])
        taken = min(nbytes, window)
        return scratch.data

    reader = BinaryReader()
    sink = CallerMemory(receive, lambda index: got[index].extend(scratch[:taken].tobytes()))
    reader.expect(FETCH.numbered(reader.number(), sink))
    assert read(reader, answer(*parts), 4096 * 3) == [0, 1, 2, 3]
    assert got == parts


def test_the_target_is_the_callers_memory() -> None:
    """A large part is not copied: what is offered for receiving is the caller's own buffer, all of it."""
    memory = np.zeros(200_000, np.uint8)
    reader = BinaryReader()
    reader.expect(FETCH.numbered(reader.number(), CallerMemory(lambda index, nbytes: memory.data, None)))
    wire = answer(b"k" * 200_000, b"")
    head = len(wire) - 200_000
    reader.feed(wire[:head])
    assert reader.next_reply() is NEED_DATA
    target = reader.target()
    assert len(target) == 200_000
    assert np.shares_memory(np.frombuffer(target, np.uint8), memory)


def test_many_answers_in_one_piece() -> None:
    packed = [FETCH, WORD, FETCH]
    reader = BinaryReader()
    requests = [each.numbered(reader.number(), FreshArrays() if each is FETCH else None) for each in packed]
    exchange = Exchange(requests, reader)
    wires = [frame(each.packed.code, each.number, meta=struct.pack("<IQQ", 1, 1, 2), body=b"abc") for each in requests]
    wires[1] = frame(WORD.code, 2)
    reader.feed(b"".join(wires))
    exchange.collect()
    assert exchange.complete
    assert [item.tobytes() for item in exchange.replies[2]] == [b"a", b"bc"]
    assert exchange.replies[1] == "OK"


def test_an_answer_without_layers() -> None:
    assert answered(answer()) == []


def test_a_value_that_is_no_list() -> None:
    one = answered(frame(binary.V_FETCH_RANGE, 1, body=b"abcd"), Packed(code=binary.V_FETCH_RANGE))
    assert one.tobytes() == b"abcd"
    assert answered(frame(binary.V_FETCH_RANGE, 1), Packed(code=binary.V_FETCH_RANGE)).tobytes() == b""


def test_rows_of_one_length_are_divided_by_their_number() -> None:
    assert even([2, 0, 1])(b"", 12) == [8, 0, 4]
    assert even([0, 0])(b"", 0) == [0, 0]
    for counts, nbytes in (([2, 1], 10), ([0], 4)):
        with pytest.raises(errors.BadReplyError, match="rows"):
            even(counts)(b"", nbytes)


BAD = [
    ("magic", b"\0" + frame(0x14, 1)[1:]),
    ("version", frame(0x14, 1)[:2] + b"\2" + frame(0x14, 1)[3:]),
    ("RESP", b"-ERR Protocol error: expected '*'\r\n"),
    ("another request", frame(0x14, 2)),
    ("another command", frame(0x10, 1)),
    ("number 0 with OK", frame(0x14, 0)),
    ("unknown status", frame(0x14, 1, 13)),
    ("huge meta", frame(0x14, 1, meta_bytes=MAX_ANSWER_META_BYTES + 1)),
    ("huge body", frame(0x14, 1, body_bytes=2**63)),
    ("body over max_reply_bytes", frame(0x14, 1, body_bytes=(1 << 30) + 1)),
    ("huge error", frame(0x14, 1, 1, body_bytes=MAX_ERROR_BYTES + 1)),
    ("no meta", frame(0x14, 1, body=b"abc")),
    ("meta too short", frame(0x14, 1, meta=struct.pack("<IQ", 1, 3), body=b"abc")),
    ("meta too long", frame(0x14, 1, meta=struct.pack("<IQQQ", 1, 3, 0, 0), body=b"abc")),
    ("more layers than sizes", frame(0x14, 1, meta=struct.pack("<IQQ", 2**32 - 1, 3, 0), body=b"abc")),
    ("parts beyond the body", frame(0x14, 1, meta=struct.pack("<IQQ", 1, 3, 1), body=b"abc")),
    ("parts short of the body", frame(0x14, 1, meta=struct.pack("<IQQ", 1, 1, 1), body=b"abc")),
    ("one absurd part", frame(0x14, 1, meta=struct.pack("<IQQ", 1, 2**64 - 1, 4), body=b"abc")),
]


@pytest.mark.parametrize("wire", [wire for _, wire in BAD], ids=[name for name, _ in BAD])
def test_what_is_no_answer_is_refused(wire: bytes) -> None:
    with pytest.raises(errors.BadReplyError):
        answered(wire)


def test_a_word_may_not_be_large() -> None:
    with pytest.raises(errors.BadReplyError, match=str(MAX_ERROR_BYTES)):
        answered(frame(WORD.code, 1, body_bytes=MAX_ERROR_BYTES + 1), WORD)


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_do_more_than_raise(data: bytes, begins_well: bool) -> None:
    """Whatever comes: an answer, a wish for more, or BadReplyError; and no more memory than was announced."""
    reader = BinaryReader(1000)
    reader.expect(FETCH.numbered(reader.number(), FreshArrays()))
    reader.feed(frame(0x14, 1)[:8] * begins_well + data)
    try:
        reply = reader.next_reply()
    except errors.BadReplyError:
        return
    assert reply is NEED_DATA or reply == [] or isinstance(reply, errors.ServerError)


@pytest.mark.parametrize("change", [1, 0x80, 0xFF])
@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 7, 8, 12, 15, 16, 23])
def test_one_wrong_byte_in_the_header_is_never_taken_for_the_answer(place: int, change: int) -> None:
    wire = bytearray(answer(b"abc", b"de"))
    wire[place] ^= change
    reader = BinaryReader()
    reader.expect(FETCH.numbered(reader.number(), FreshArrays()))
    reader.feed(bytes(wire))
    try:
        reply = reader.next_reply()
    except errors.BadReplyError:
        return
    assert reply is NEED_DATA or (place == 8 and isinstance(reply, errors.ServerError))


def test_an_answer_that_nobody_asked_for() -> None:
    reader = BinaryReader()
    reader.feed(frame(0x14, 1))
    with pytest.raises(errors.BadReplyError, match="none is open"):
        reader.next_reply()
    reader = BinaryReader()
    exchange = Exchange([WORD.numbered(reader.number())], reader)
    reader.feed(frame(WORD.code, 1) + frame(WORD.code, 2))
    with pytest.raises(errors.BadReplyError, match="more replies"):
        exchange.collect()


def test_answers_out_of_order() -> None:
    reader = BinaryReader()
    exchange = Exchange([WORD.numbered(reader.number()) for _ in range(2)], reader)
    reader.feed(frame(WORD.code, 2) + frame(WORD.code, 1))
    with pytest.raises(errors.BadReplyError, match="expected the answer to request 1"):
        exchange.collect()


def test_filling_more_than_was_asked_for() -> None:
    reader = BinaryReader()
    with pytest.raises(ValueError, match="more was filled"):
        reader.filled(1)


# Errors

KINDS = {
    Status.ERR: errors.ServerError,
    Status.MISS: errors.ServerError,
    Status.COLDMISS: errors.ColdMissError,
    Status.NOAUTH: errors.NotAuthenticatedError,
    Status.NOPERM: errors.PermissionDeniedError,
    Status.OOM: errors.OutOfMemoryError,
    Status.BUSY: errors.BusyError,
    Status.MOVED: errors.MovedError,
    Status.EXISTS: errors.ExistsError,
    Status.LOADING: errors.LoadingError,
    Status.MISCONF: errors.NotPersistedError,
    Status.PENDING: errors.ServerError,
}


@pytest.mark.parametrize("status", [status for status in Status if status != Status.OK])
@pytest.mark.parametrize("with_code", [True, False])
def test_each_status_is_the_error_of_its_code(status: Status, with_code: bool) -> None:
    code = "ERR" if status in (Status.ERR, Status.MISS) else status.name
    body = (f"{code} " if with_code and status != Status.PENDING else "") + "B of the blocks is what it is"
    error = answered(frame(0x14, 1, status, body=body.encode()), step=5)
    assert type(error) is KINDS[status]
    assert (error.code, str(error)) == (code, "B of the blocks is what it is")


def test_the_code_in_the_text_says_more_than_the_status() -> None:
    assert type(refusal(Status.NOAUTH, b"", "WRONGPASS no")) is errors.WrongPasswordError
    assert type(refusal(Status.ERR, b"", "WRONGTYPE no")) is errors.WrongTypeError


def test_an_error_without_a_text_says_what_it_can() -> None:
    assert "worker 3" in str(refusal(Status.MOVED, b"\3\0\0\0", ""))
    assert "status 6" in str(refusal(Status.OOM, b"", ""))


def test_a_server_that_refuses_at_the_door_answers_no_request_in_particular() -> None:
    error = answered(frame(0, 0, 1, body=b"ERR max number of clients reached"))
    assert str(error) == "max number of clients reached"


def test_statuses_that_are_answers() -> None:
    packed = Packed(code=0x21, answers={Status.OK: "HIT", Status.MISS: "MISS"})
    assert answered(frame(0x21, 1), packed) == "HIT"
    assert answered(frame(0x21, 1, Status.MISS, body=b"whatever"), packed) == "MISS"
    assert isinstance(answered(frame(0x21, 1, Status.BUSY), packed), errors.BusyError)


def test_an_error_does_not_touch_the_callers_memory() -> None:
    def receive(index: int, nbytes: int) -> memoryview:
        raise AssertionError

    sink = CallerMemory(receive, None)
    reader = BinaryReader()
    reader.expect(FETCH.numbered(reader.number(), sink))
    assert isinstance(read(reader, frame(0x14, 1, 1, body=b"ERR no prefix"), 3), errors.ServerError)
    assert sink.reusable
