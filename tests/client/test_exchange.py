"""Exchanges, without sockets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.client.commands import Request, generic
from pion.client.errors import BadReplyError, ServerError
from pion.client.exchange import Exchange
from pion.client.limits import MAX_SEND_BUFFERS, SEGMENT_BYTES
from pion.client.replies import ReplyReader


def wire(requests: list[Request[object]]) -> bytes:
    return b"".join(bytes(part) for request in requests for part in request.buffers)


def send_all(exchange: Exchange, step: int) -> bytes:
    sent = bytearray()
    while exchange.sending:
        data = b"".join(map(bytes, exchange.outgoing()))[:step]
        sent += data
        exchange.sent(len(data))
    return bytes(sent)


@given(st.lists(st.integers(0, 30_000), min_size=1, max_size=12), st.integers(1, 200_000))
@settings(max_examples=60, deadline=None)
def test_everything_is_sent_once_in_order_however_it_is_cut(sizes: list[int], step: int) -> None:
    requests = [generic(("X", bytes([i]) * size)) for i, size in enumerate(sizes)]
    step = max(step, sum(sizes) // 200)
    assert send_all(Exchange(requests, ReplyReader()), step) == wire(requests)


def test_small_requests_are_joined() -> None:
    requests = [generic(("PING",))] * 10_000
    exchange = Exchange(requests, ReplyReader())
    buffers = exchange.outgoing()
    assert len(buffers) <= len(wire(requests)) // SEGMENT_BYTES + 1


def test_the_system_takes_only_so_many_buffers() -> None:
    blob = bytes(20_000)
    requests = [generic(("X", blob))] * 600
    exchange = Exchange(requests, ReplyReader())
    assert len(exchange.outgoing()) <= MAX_SEND_BUFFERS
    assert send_all(exchange, 1 << 22) == wire(requests)
    assert send_all(Exchange([generic(("X", *[blob] * 600))], ReplyReader()), 1 << 22) == wire(
        [generic(("X", *[blob] * 600))]
    )


def test_the_first_error_stops_what_is_not_begun() -> None:
    blob = bytes(100_000)
    requests = [generic(("X", blob)) for _ in range(5)]
    exchange = Exchange(requests, ReplyReader(), stop_at_error=True)
    size = len(wire(requests[:1]))
    exchange.outgoing()
    exchange.sent(size + 10)
    exchange.reader.feed(b"-OOM full\r\n")
    exchange.collect()
    assert not exchange.complete
    rest = send_all(exchange, 1 << 20)
    assert len(rest) == size - 10, "the request that was begun goes out to its end, and no other"
    exchange.reader.feed(b"+OK\r\n")
    exchange.collect()
    assert exchange.complete
    assert exchange.replies == [ServerError("full", "OOM"), "OK"]


def test_what_is_being_sent_is_not_dropped() -> None:
    """Between `outgoing` and `sent` nobody knows how much the kernel took."""
    requests = [generic(("X", bytes(100_000))) for _ in range(3)]
    exchange = Exchange(requests, ReplyReader(), stop_at_error=True)
    offered = sum(map(len, exchange.outgoing()))
    exchange.reader.feed(b"-ERR no\r\n")
    exchange.collect()
    exchange.sent(offered)
    assert not exchange.sending
    assert not exchange.complete


def test_without_the_wish_to_stop_all_is_sent() -> None:
    requests = [generic(("X", bytes(100_000))) for _ in range(3)]
    exchange = Exchange(requests, ReplyReader())
    exchange.reader.feed(b"-ERR no\r\n")
    exchange.collect()
    assert send_all(exchange, 1 << 20) == wire(requests)


def test_a_reply_nobody_asked_for() -> None:
    exchange = Exchange([generic(("PING",))], ReplyReader())
    exchange.reader.feed(b"+PONG\r\n+PONG\r\n")
    with pytest.raises(BadReplyError, match="more replies"):
        exchange.collect()
