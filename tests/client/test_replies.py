"""The reply reader, without sockets."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.client.errors import BadReplyError, OutOfMemoryError, ServerError, WrongPasswordError
from pion.client.limits import HEADER_LINE_BYTES, MAX_DEPTH, MAX_REPLY_VALUES, READ_BYTES
from pion.client.replies import NEED_DATA, ReplyReader
from pion.client.sinks import CallerMemory, FreshArrays

BIG = bytes(range(256)) * 300

VALUES = [
    (b"+OK\r\n", "OK"),
    (b"+\r\n", ""),
    (b":42\r\n", 42),
    (b":-9223372036854775808\r\n", -(2**63)),
    (b"(123456789012345678901234567890\r\n", 123456789012345678901234567890),
    (b"$0\r\n\r\n", b""),
    (b"$6\r\na\r\nb\r\n\r\n", b"a\r\nb\r\n"),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"_\r\n", None),
    (b"#t\r\n", True),
    (b"#f\r\n", False),
    (b",1.5\r\n", 1.5),
    (b",-inf\r\n", -math.inf),
    (b"=7\r\ntxt:abc\r\n", b"abc"),
    (b"*0\r\n", []),
    (b"*2\r\n*1\r\n:1\r\n*0\r\n", [[1], []]),
    (b"%1\r\n$1\r\na\r\n%0\r\n", {b"a": {}}),
    (b"~2\r\n:1\r\n:2\r\n", [1, 2]),
    (b"-OOM no room\r\n", OutOfMemoryError("no room", "OOM")),
    (b"-no code at all\r\n", ServerError("no code at all", "ERR")),
    (b"!15\r\nWRONGPASS wrong\r\n", WrongPasswordError("wrong", "WRONGPASS")),
    (b">2\r\n+message\r\n:1\r\n:7\r\n", 7),
    (b">0\r\n:7\r\n", 7),
    (b"|1\r\n+ttl\r\n:3\r\n*1\r\n:7\r\n", [7]),
    (b"$%d\r\n%s\r\n" % (len(BIG), BIG), BIG),
]


def read(reader: ReplyReader, data: bytes, step: int) -> object:
    """Give the reader `data` in pieces as a socket would: into its target, or fed."""
    rest = memoryview(data)
    while (reply := reader.next_reply()) is NEED_DATA:
        assert rest, "the reader wants more than the reply"
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


@pytest.mark.parametrize(("wire", "value"), VALUES)
@pytest.mark.parametrize("step", [1, 2, 3, 7, 1 << 20])
def test_values(wire: bytes, value: object, step: int) -> None:
    reader = ReplyReader()
    reply = read(reader, wire, step)
    assert reply == value
    assert type(reply) is type(value)
    assert reader.idle


def test_many_replies_in_one_piece() -> None:
    reader = ReplyReader()
    reader.feed(b"".join(wire for wire, _ in VALUES))
    assert [reader.next_reply() for _ in VALUES] == [value for _, value in VALUES]
    assert reader.next_reply() is NEED_DATA
    assert reader.idle


def test_a_whole_array_of_large_bulks_is_received_in_place() -> None:
    sizes = [70_000, 0, 1, 65_536, 5]
    parts = [bytes([i]) * size for i, size in enumerate(sizes)]
    wire = b"*5\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    for step in (13, 4096, 1 << 20):
        reader = ReplyReader()
        reader.expect(FreshArrays())
        reply = read(reader, wire, step)
        assert isinstance(reply, list)
        assert [item.tobytes() for item in reply] == parts


def test_the_caller_gets_each_bulk_in_order_and_may_reuse_its_memory() -> None:
    scratch = np.empty(100_000, np.uint8)
    parts = [bytes([i]) * (50_000 + i) for i in range(4)]
    seen = []
    events = []

    def receive(index: int, nbytes: int) -> memoryview:
        events.append(("receive", index, nbytes))
        return scratch.data

    def done(index: int) -> None:
        events.append(("done", index, None))
        seen.append(scratch[: len(parts[index])].tobytes())

    reader = ReplyReader()
    reader.expect(CallerMemory(receive, done))
    wire = b"*4\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    assert read(reader, wire, 999) == [0, 1, 2, 3]
    assert seen == parts
    assert events == [e for i in range(4) for e in (("receive", i, 50_000 + i), ("done", i, None))]


@pytest.mark.parametrize("step", [1, 6, 7, 64, 1 << 20])
def test_a_bulk_may_be_received_in_windows(step: int) -> None:
    window = bytearray(7)
    data = bytes(range(40))
    got = bytearray()
    asked = []

    def receive(index: int, nbytes: int) -> memoryview:
        asked.append(nbytes)
        return memoryview(window)

    reader = ReplyReader()
    reader.expect(CallerMemory(receive, lambda _: got.extend(window[: asked[-1]])))
    read(reader, b"*1\r\n$40\r\n" + data + b"\r\n", step)
    assert bytes(got) == data
    assert asked == [40, 33, 26, 19, 12, 5]


def test_done_waits_for_the_line_end() -> None:
    """Otherwise a caller would use a bulk whose length the server got wrong."""
    done = []
    reader = ReplyReader()
    reader.expect(CallerMemory(lambda _, n: memoryview(bytearray(n)), done.append))
    reader.feed(b"*1\r\n$3\r\nabcXY")
    with pytest.raises(BadReplyError, match="line end"):
        reader.next_reply()
    assert done == []


@pytest.mark.parametrize(
    "wire",
    [
        b"*1\r\n:1\r\n",
        b"*2\r\n$1\r\na\r\n_\r\n",
        b"*1\r\n*1\r\n$1\r\na\r\n",
        b"*1\r\n$-1\r\n",
    ],
)
def test_a_sink_takes_only_bulks(wire: bytes) -> None:
    reader = ReplyReader()
    reader.expect(FreshArrays())
    reader.feed(wire)
    with pytest.raises(BadReplyError, match="array of bulks"):
        reader.next_reply()


def test_errors_and_nulls_pass_by_a_sink() -> None:
    reader = ReplyReader()
    for wire, value in [(b"-ERR no\r\n", ServerError("no")), (b"_\r\n", None)]:
        reader.expect(CallerMemory(lambda _, n: pytest.fail("nothing to receive"), None))
        reader.feed(wire)
        assert reader.next_reply() == value


@pytest.mark.parametrize(
    "wire",
    [
        b"\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\x00\x01\x02\r\n",
        b"$-2\r\n",
        b"$abc\r\n",
        b"$\r\n",
        b"$ 3\r\n",
        b"$1_0\r\n",
        b"$99999999999999999999\r\n",
        b"*-5\r\n",
        b"*99999999999\r\n",
        b"%99999999999\r\n",
        b"$?\r\n",
        b"*?\r\n",
        b":\r\n",
        b":1.5\r\n",
        b":--1\r\n",
        b"#x\r\n",
        b"_x\r\n",
        b",one\r\n",
        b"(" + b"9" * 5000 + b"\r\n",
        b"$3\r\nabcd\r\n",
        b"%1\r\n*1\r\n:1\r\n:2\r\n",
        b"*1\r\n" * (MAX_DEPTH + 1),
        b"+" + b"x" * (HEADER_LINE_BYTES + 2),
        b"+" + b"x" * (HEADER_LINE_BYTES + 2) + b"\r\n",
    ],
)
def test_what_is_not_a_reply(wire: bytes) -> None:
    reader = ReplyReader()
    reader.feed(wire)
    with pytest.raises(BadReplyError):
        reader.next_reply()


def test_an_announced_length_over_the_limit_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "empty", lambda *_: pytest.fail("memory was taken"))
    reader = ReplyReader(max_bytes=1000)
    reader.feed(b"$1001\r\n")
    with pytest.raises(BadReplyError, match="max_reply_bytes is 1000"):
        reader.next_reply()


def test_the_limit_counts_all_bulks_of_one_reply_and_starts_anew_for_the_next() -> None:
    reader = ReplyReader(max_bytes=10)
    for _ in range(3):
        reader.feed(b"*2\r\n$5\r\naaaaa\r\n$5\r\nbbbbb\r\n")
        assert reader.next_reply() == [b"aaaaa", b"bbbbb"]
    reader.feed(b"*2\r\n$5\r\naaaaa\r\n$6\r\n")
    with pytest.raises(BadReplyError):
        reader.next_reply()


def test_the_number_of_values_is_bounded() -> None:
    reader = ReplyReader()
    reader.feed(b"*%d\r\n" % MAX_REPLY_VALUES)
    assert reader.next_reply() is NEED_DATA
    reader._values = MAX_REPLY_VALUES - 1
    reader.feed(b":1\r\n:2\r\n")
    with pytest.raises(BadReplyError, match="values in one reply"):
        reader.next_reply()


def test_memory_from_the_caller_must_be_fit_for_it() -> None:
    for memory, text in [
        (memoryview(b"abc"), "writable"),
        (memoryview(bytearray(8))[::2], "C-contiguous"),
        (memoryview(bytearray()), "no memory"),
    ]:
        reader = ReplyReader()
        reader.expect(CallerMemory(lambda _, __, memory=memory: memory, None))
        reader.feed(b"$3\r\nabc\r\n")
        with pytest.raises(ValueError, match=text):
            reader.next_reply()


def test_small_reads_follow_a_large_bulk() -> None:
    reader = ReplyReader()
    assert reader.read_bytes == READ_BYTES
    reader.feed(b"$100000\r\n")
    reader.next_reply()
    assert reader.read_bytes < READ_BYTES


def test_an_error_is_a_value_that_can_be_compared_and_sent_to_another_process() -> None:
    error = OutOfMemoryError("no room", "OOM")
    assert pickle.loads(pickle.dumps(error)) == error
    assert len({error, OutOfMemoryError("no room", "OOM"), ServerError("no room", "OOM")}) == 1
    assert error != ServerError("no room", "ERR")
    assert repr(NEED_DATA) == "NEED_DATA"


def test_more_than_was_asked_for_is_refused() -> None:
    reader = ReplyReader()
    with pytest.raises(ValueError, match="asked"):
        reader.filled(1)


@given(st.binary(max_size=200), st.integers(1, 50))
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_replies_a_wait_or_one_kind_of_error(data: bytes, step: int) -> None:
    reader = ReplyReader(max_bytes=10_000)
    try:
        for start in range(0, len(data), step):
            piece = memoryview(data)[start : start + step]
            while piece:
                while reader.next_reply() is not NEED_DATA:
                    pass
                target = reader.target()
                if target is None:
                    reader.feed(bytes(piece))
                    break
                n = min(len(target), len(piece))
                target[:n] = piece[:n]
                reader.filled(n)
                piece = piece[n:]
    except BadReplyError:
        pass


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.binary(max_size=100)),
        lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.binary(max_size=5), inner, max_size=4)),
        max_leaves=20,
    ),
    st.integers(1, 40),
)
@settings(max_examples=200, deadline=None)
def test_any_value_survives_any_split(value: object, step: int) -> None:
    reply = read(ReplyReader(), encode(value), step)
    assert reply == value


def encode(value: object) -> bytes:
    match value:
        case None:
            return b"_\r\n"
        case bool():
            return b"#t\r\n" if value else b"#f\r\n"
        case int():
            return b":%d\r\n" % value
        case bytes():
            return b"$%d\r\n%s\r\n" % (len(value), value)
        case list():
            return b"*%d\r\n" % len(value) + b"".join(map(encode, value))
        case dict():
            return b"%%%d\r\n" % len(value) + b"".join(encode(k) + encode(v) for k, v in value.items())
    raise TypeError(value)
