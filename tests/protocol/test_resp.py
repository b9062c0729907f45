"""The request parser: what is a request, what is refused, and where payloads go."""

from __future__ import annotations

import pytest

from pion.errors import ProtocolError
from pion.limits import HEADER_LINE_BYTES, INLINE_ARG_BYTES
from pion.protocol.resp import Refused, RespParser
from tests.protocol.support import MIB, Receiver, parse, request


def test_pipelined_requests_come_out_in_order_and_as_bytes():
    data = request(b"PING") + request(b"GET", b"a") + request(b"ECHO", b"")
    assert parse(data) == [[b"PING"], [b"GET", b"a"], [b"ECHO", b""]]


def test_batches_end_at_the_limit_and_go_on():
    receiver = Receiver()
    receiver.give(request(b"A") + request(b"B") + request(b"C\r\n") + request(b"D"))
    parser = receiver.parser
    assert parser.requests(2) == [[b"A"], [b"B"]]
    assert not parser.need_data
    assert parser.requests(2) == [[b"C\r\n"], [b"D"]]
    assert parser.requests(2) == []
    assert parser.need_data
    assert parser.between_requests


@pytest.mark.parametrize("payload", [b"\r\n", b"a\r\n", b"\r\nb", b"\r", b"\n", b"\r\n\r\n", b"$1\r\nx\r\n", b"*1\r\n"])
def test_an_argument_may_hold_line_ends_and_things_that_look_like_headers(payload):
    data = request(b"SET", payload, payload) + request(b"PING")
    assert parse(data) == [[b"SET", payload, payload], [b"PING"]]


@pytest.mark.parametrize("nothing", [b"*0\r\n", b"*-1\r\n", b"\r\n", b"\n", b"   \r\n"])
def test_empty_requests_are_skipped(nothing):
    assert parse(nothing * 3 + request(b"PING") + nothing) == [[b"PING"]]


def test_empty_requests_count_for_the_limit_so_that_a_flood_of_them_yields():
    receiver = Receiver()
    receiver.give(b"*0\r\n" * 100 + request(b"PING"))
    assert receiver.parser.requests(50) == []
    assert not receiver.parser.need_data
    assert receiver.parser.next_request() == [b"PING"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"PING\r\n", [b"PING"]),
        (b"PING\n", [b"PING"]),
        (b"  set\tk   v \r\n", [b"set", b"k", b"v"]),
        (b'ECHO "a b\\r\\n\\x00\\"\\\\"\r\n', [b"ECHO", b'a b\r\n\x00"\\']),
        (b"ECHO 'it\\'s \\n'\r\n", [b"ECHO", b"it's \\n"]),
        (b"ECHO ''\r\n", [b"ECHO", b""]),
        (b'a"b c" d\r\n', [b"ab c", b"d"]),
    ],
)
def test_inline_commands_follow_redis_quoting(line, expected):
    assert parse(line + request(b"X")) == [expected, [b"X"]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"*x\r\n", "invalid multibulk length"),
        (b"*\r\n", "invalid multibulk length"),
        (b"*-5\r\n", "invalid multibulk length"),
        (b"*+1\r\n", "invalid multibulk length"),
        (b"*01\r\n", "invalid multibulk length"),
        (b"*1 \r\n", "invalid multibulk length"),
        (b"*1_0\r\n", "invalid multibulk length"),
        (b"*1001\r\n", "invalid multibulk length"),
        (b"*99999999999999999999\r\n", "invalid multibulk length"),
        (b"*1\r\nx", "expected '$', got 'x'"),
        (b"*1\r\n\x00", r"expected '$', got '\x00'"),
        (b"*2\r\n$1\r\na\r\n:1\r\n", "expected '$', got ':'"),
        (b"*1\r\n$x\r\n", "invalid bulk length"),
        (b"*1\r\n$-1\r\n", "invalid bulk length"),
        (b"*1\r\n$-2\r\n", "invalid bulk length"),
        (b"*1\r\n$99999999999\r\n", "invalid bulk length"),
        (b"*1\r\n$513\r\n", "invalid bulk length"),
        (b"*1\r\n$3\r\nabcd\r\n", "bulk string is not followed by CRLF"),
        (b"*1\r\n$3\r\nab\r\n\r\n", "bulk string is not followed by CRLF"),
        (b'ECHO "a\r\n', "unbalanced quotes in request"),
        (b'ECHO "a"b\r\n', "unbalanced quotes in request"),
        (b"ECHO 'a\r\n", "unbalanced quotes in request"),
        (b"*" + b"1" * HEADER_LINE_BYTES, "too big mbulk count string"),
        (b"*1\r\n$" + b"1" * HEADER_LINE_BYTES, "too big bulk count string"),
        (b"a" * HEADER_LINE_BYTES, "too big inline request"),
    ],
)
def test_what_is_not_the_protocol_is_refused_before_any_allocation(data, message):
    receiver = Receiver(max_bulk_bytes=512)
    receiver.give(request(b"PING") + data)
    assert receiver.parser.requests(10) == [[b"PING"]]
    with pytest.raises(ProtocolError) as caught:
        receiver.parser.requests(10)
    assert str(caught.value) == f"Protocol error: {message}"
    assert receiver.allocations == []


def test_a_payload_is_received_into_memory_that_the_request_keeps():
    receiver = Receiver()
    payload = bytes(range(256)) * 1024
    receiver.parser.feed(b"*2\r\n$5\r\nSTORE\r\n$%d\r\n" % len(payload) + payload[:10])
    assert receiver.parser.requests(1) == []
    target = receiver.parser.target()
    assert target is not None
    assert (len(target), receiver.parser.payload_left) == (len(payload) - 10, len(payload) - 10)
    target[:100] = payload[10:110]
    receiver.parser.filled(100)
    rest = receiver.parser.target()
    assert rest is not None
    rest[:] = payload[110:]
    receiver.parser.filled(len(rest))
    assert receiver.parser.target() is None
    assert receiver.parser.requests(1) == []
    receiver.parser.feed(b"\r\n" + request(b"PING"))
    ((name, kept),) = receiver.parser.requests(5)
    assert name == b"STORE"
    assert isinstance(kept, memoryview)
    assert kept.readonly
    assert (kept.format, kept.contiguous) == ("B", True)
    assert kept == payload
    assert receiver.allocations == [len(payload)]
    assert receiver.parser.requests(5) == [[b"PING"]]


def test_a_request_with_a_payload_ends_its_batch():
    receiver = Receiver()
    receiver.give(request(b"A") + request(b"B", b"x" * 40_000) + request(b"C"))
    assert [request[0] for request in receiver.parser.requests(10)] == [b"A", b"B"]
    assert not receiver.parser.in_request
    assert receiver.parser.requests(10) == [[b"C"]]


def test_more_than_the_payload_can_not_be_filled():
    receiver = Receiver()
    receiver.parser.feed(b"*1\r\n$40000\r\n")
    receiver.parser.requests(1)
    with pytest.raises(ValueError, match="40001"):
        receiver.parser.filled(40_001)


def test_a_payload_over_the_budget_is_dropped_and_the_stream_stays_in_step():
    receiver = Receiver(budget=100_000)
    big = b"y" * 200_000
    data = request(b"SET", b"k", big, b"tail") + request(b"PING")
    receiver.parser.feed(data[:1000])
    assert receiver.parser.requests(1) == []
    assert receiver.parser.discarding
    assert receiver.parser.target() is None
    receiver.give(data[1000:])
    (refused,) = receiver.parser.requests(1)
    assert isinstance(refused, Refused)
    assert (refused[0], refused.nbytes) == (b"SET", len(big))
    assert receiver.parser.requests(1) == [[b"PING"]]
    assert receiver.reserved == 0


def test_later_payloads_of_a_refused_request_ask_for_nothing():
    receiver = Receiver(budget=100_000)
    receiver.give(request(b"SET", b"y" * 200_000, b"z" * 50_000) + request(b"PING"))
    assert receiver.take() == [[b"REFUSED", b"SET"], [b"PING"]]
    assert receiver.allocations == [200_000]


def test_many_short_arguments_of_an_unfinished_request_are_charged_too():
    arguments = [b"x" * 1000] * 900
    data = request(*arguments)
    receiver = Receiver(budget=10 * MIB)
    for start in range(0, len(data), 10_000):
        receiver.give(data[start : start + 10_000])
        receiver.parser.requests(10)
    assert 0.8 * len(data) < receiver.reserved < 2 * len(data)
    assert parse(data + request(b"PING"), list(range(10_000, len(data), 10_000)), budget=200_000) == [
        [b"REFUSED", b"x" * 1000],
        [b"PING"],
    ]


class TestBeforeAuthentication:
    @pytest.fixture
    def parser(self) -> RespParser:
        receiver = Receiver()
        receiver.parser.restricted = True
        return receiver.parser

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (request(*[b"a"] * 11), "unauthenticated multibulk length"),
            (request(b"AUTH", b"a" * 16_385), "unauthenticated bulk length"),
            (b"*2\r\n$4\r\nAUTH\r\n$1000000000\r\n", "unauthenticated bulk length"),
            (b"a " * 11 + b"\r\n", "unauthenticated multibulk length"),
            (b"a" * 16_384, "too big inline request"),
        ],
    )
    def test_the_small_limits_hold(self, parser, data, message):
        parser.feed(data)
        with pytest.raises(ProtocolError, match=message):
            parser.requests(1)

    def test_what_auth_needs_passes(self, parser):
        parser.feed(request(b"HELLO", b"3", b"AUTH", b"u", b"p" * 16_384, b"SETNAME", b"n"))
        assert len(parser.requests(1)) == 1

    def test_the_limits_end_with_authentication_within_one_chunk(self, parser):
        parser.feed(request(b"AUTH", b"p") + request(*[b"a"] * 20))
        assert parser.requests(1) == [[b"AUTH", b"p"]]
        parser.restricted = False
        assert parser.requests(1) == [[b"a"] * 20]


def test_the_longest_short_argument_is_bytes_and_one_more_is_a_payload():
    receiver = Receiver()
    receiver.give(request(b"A", b"x" * INLINE_ARG_BYTES) + request(b"B", b"x" * (INLINE_ARG_BYTES + 1)))
    first, second = receiver.parser.requests(1) + receiver.parser.requests(1)
    assert (type(first[1]), type(second[1])) == (bytes, memoryview)


def test_a_chunk_is_not_kept_once_it_is_parsed():
    receiver = Receiver()
    receiver.give(request(b"PING") * 1000)
    assert len(receiver.take()) == 1000
    assert receiver.parser.buffered_bytes == 0
