"""Replies on the wire, for both protocol versions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pion.protocol.encode import JOINED_BYTES, encode, error_line
from pion.replies import NO_REPLY, OK, Blob, ErrorReply, Map, Simple, Stream


def wire(reply: object, resp: int) -> bytes:
    out: list = []
    encode(reply, resp, out)
    return b"".join(out)


@pytest.mark.parametrize(
    ("reply", "resp2", "resp3"),
    [
        (OK, b"+OK\r\n", b"+OK\r\n"),
        (Simple("HIT"), b"+HIT\r\n", b"+HIT\r\n"),
        (ErrorReply("ERR", "no"), b"-ERR no\r\n", b"-ERR no\r\n"),
        (0, b":0\r\n", b":0\r\n"),
        (-1, b":-1\r\n", b":-1\r\n"),
        (1023, b":1023\r\n", b":1023\r\n"),
        (1024, b":1024\r\n", b":1024\r\n"),
        (2**63, b":9223372036854775808\r\n", b":9223372036854775808\r\n"),
        (True, b":1\r\n", b":1\r\n"),
        (1.5, b"$3\r\n1.5\r\n", b",1.5\r\n"),
        (2.0, b"$1\r\n2\r\n", b",2\r\n"),
        (1e300, b"$6\r\n1e+300\r\n", b",1e+300\r\n"),
        (math.inf, b"$3\r\ninf\r\n", b",inf\r\n"),
        (-math.inf, b"$4\r\n-inf\r\n", b",-inf\r\n"),
        (math.nan, b"$3\r\nnan\r\n", b",nan\r\n"),
        (b"", b"$0\r\n\r\n", b"$0\r\n\r\n"),
        (b"a\r\nb", b"$4\r\na\r\nb\r\n", b"$4\r\na\r\nb\r\n"),
        ("é", b"$2\r\n\xc3\xa9\r\n", b"$2\r\n\xc3\xa9\r\n"),
        ("\udcff", b"$6\r\n\\udcff\r\n", b"$6\r\n\\udcff\r\n"),
        (None, b"$-1\r\n", b"_\r\n"),
        ([], b"*0\r\n", b"*0\r\n"),
        ([1, [None, b"x"]], b"*2\r\n:1\r\n*2\r\n$-1\r\n$1\r\nx\r\n", b"*2\r\n:1\r\n*2\r\n_\r\n$1\r\nx\r\n"),
        ((1, 2), b"*2\r\n:1\r\n:2\r\n", b"*2\r\n:1\r\n:2\r\n"),
        (
            Map([("a", 1), (b"b", None)]),
            b"*4\r\n$1\r\na\r\n:1\r\n$1\r\nb\r\n$-1\r\n",
            b"%2\r\n$1\r\na\r\n:1\r\n$1\r\nb\r\n_\r\n",
        ),
        (NO_REPLY, b"", b""),
        (Blob([b"ab", b"", b"c"], 3), b"$3\r\nabc\r\n", b"$3\r\nabc\r\n"),
    ],
)
def test_wire_form(reply, resp2, resp3):
    assert wire(reply, 2) == resp2
    assert wire(reply, 3) == resp3


def test_stored_buffers_are_passed_on_not_copied():
    stored = np.arange(100_000, dtype=np.uint8)
    view = memoryview(stored).toreadonly()
    out: list = []
    encode([Blob([view, view], 200_000), b"x" * (JOINED_BYTES + 1)], 2, out)
    assert [part for part in out if isinstance(part, memoryview)] == [view, view]
    assert all(part is view for part in out if isinstance(part, memoryview))
    assert any(part == b"x" * (JOINED_BYTES + 1) for part in out)


def test_a_memoryview_is_a_bulk_of_its_bytes():
    assert wire(memoryview(np.array([1, 2], np.uint16)), 2) == b"$4\r\n\x01\x00\x02\x00\r\n"


def test_a_stream_stands_between_its_header_and_its_line_end():
    stream = Stream(10, [])
    out: list = []
    encode([stream], 3, out)
    assert out == [b"*1\r\n", b"$10\r\n", stream, b"\r\n"]


def test_line_breaks_can_not_get_into_an_error_line():
    assert error_line("ERR", "a\r\nb\udc80") == b"-ERR a  b\\udc80\r\n"
    assert wire(ErrorReply("ERR", "x\n+OK"), 2) == b"-ERR x +OK\r\n"


def test_subclasses_of_reply_types_are_replies():
    class Count(int):
        pass

    assert wire(Count(5), 2) == b":5\r\n"
    assert wire(np.float64(0.5), 3) == b",0.5\r\n"


def test_what_is_no_reply_is_refused_by_name():
    with pytest.raises(TypeError, match="object is not a reply"):
        wire([1, object()], 2)
