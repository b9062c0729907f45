"""Whatever the split, the requests are the same; and nothing that arrives breaks the parser."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pion.errors import ProtocolError
from pion.limits import HEADER_LINE_BYTES, INLINE_ARG_BYTES
from tests.protocol.support import Receiver, parse, request

awkward = st.sampled_from([b"", b"\r\n", b"\r", b"\n", b"$3\r\nabc\r\n", b"*1\r\n$1\r\n", b"x" * 300, b"\x00\xff"])
arguments = st.one_of(st.binary(max_size=40), awkward, st.builds(lambda a, b: a + b, awkward, st.binary(max_size=5)))
requests = st.lists(st.lists(arguments, min_size=1, max_size=6), min_size=1, max_size=8)


@given(requests, st.data())
def test_any_split_gives_the_same_requests(sent, data):
    stream = b"".join(request(*arguments) for arguments in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    limit = data.draw(st.integers(1, 5))
    assert parse(stream, cuts, limit) == sent


@given(st.lists(arguments, min_size=10, max_size=60), st.data())
def test_many_arguments_at_any_split(sent, data):
    sent = sent + sent
    stream = request(*sent) + request(b"NEXT")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    assert parse(stream, cuts) == [sent, [b"NEXT"]]


MIXED = (
    request(b"PING")
    + b"*0\r\n\r\nECHO 'a b'\r\nPING\n"
    + request(b"SET", b"k\r\n", b"*1\r\n$4\r\nPING\r\n")
    + request(b"STORE", b"sid", bytes(range(256)) * 160)
    + request(b"MGET", *[b"%d" % n for n in range(70)])
    + b"*-1\r\n"
    + request(b"END")
)
LONG = MIXED.index(b"$40960") + 8


def test_every_two_way_split_of_a_stream_with_everything_in_it():
    whole = parse(MIXED)
    assert [each[0] for each in whole] == [b"PING", b"ECHO", b"PING", b"SET", b"STORE", b"MGET", b"END"]
    # Inside the payload every split is alike: its two ends and a sample will do.
    splits = [*range(LONG + 40), *range(LONG + 40, LONG + 40_900, 997), *range(LONG + 40_900, len(MIXED))]
    for cut in splits:
        assert parse(MIXED, [cut]) == whole, cut


def test_memory_that_comes_later_changes_nothing():
    whole = parse(MIXED)
    for late in (1, 3):
        for cut in [
            *range(0, LONG + 40, 7),
            *range(LONG + 40, LONG + 40_900, 4999),
            *range(LONG + 40_900, len(MIXED), 7),
        ]:
            assert parse(MIXED, [cut], late=late) == whole, (late, cut)


def test_memory_that_comes_neither_now_nor_later_refuses_the_request():
    assert parse(MIXED, late=2, budget=1000) == parse(MIXED, budget=1000)


def test_byte_by_byte():
    stream = MIXED.replace(bytes(range(256)) * 160, b"z" * 33_000).replace(b"$40960", b"$33000")
    assert parse(stream, list(range(1, len(stream)))) == parse(stream)


headers = st.sampled_from(
    [b"*1\r\n", b"*3\r\n", b"$4\r\n", b"$0\r\n", b"*-1\r\n", b"$-1\r\n", b"*x\r\n", b"$70000\r\n"]
)


@given(
    st.lists(
        st.one_of(st.binary(max_size=30), headers, arguments, requests.map(lambda r: request(*r[0]))), max_size=20
    ),
    st.data(),
)
@example(sent=[b"*1\r\n$1\r\n", b"\r\n"], data=None)
@settings(max_examples=300)
def test_garbage_ends_in_requests_or_a_protocol_error_and_never_depends_on_the_split(sent, data):
    stream = b"".join(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4))) if data else [1]
    assert _outcome(stream, []) == _outcome(stream, cuts)


def _outcome(stream: bytes, cuts: list[int]) -> tuple[list[list[bytes]], str]:
    receiver = Receiver()
    found = []
    try:
        for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            receiver.give(stream[start:stop])
            while (batch := receiver.parser.requests(3)) or not receiver.parser.need_data:
                found += [[bytes(argument) for argument in each] for each in batch]
    except ProtocolError as error:
        return found, str(error)
    return found, ""


@pytest.mark.parametrize("seed", range(20))
def test_mutated_requests_neither_crash_nor_grow(seed):
    chance = random.Random(seed)
    stream = bytearray(MIXED)
    for _ in range(chance.randrange(1, 12)):
        position = chance.randrange(len(stream))
        kind = chance.randrange(3)
        if kind == 0:
            stream[position] = chance.randrange(256)
        elif kind == 1:
            del stream[position : position + chance.randrange(1, 50)]
        else:
            stream[position:position] = chance.randbytes(chance.randrange(1, 20))
    cuts = sorted(chance.randrange(len(stream)) for _ in range(30))
    assert _outcome(bytes(stream), []) == _outcome(bytes(stream), cuts)


def test_what_an_unfinished_request_keeps_is_bounded():
    """A header without an end, an argument without an end, and a flood of nothing: the tail stays small."""
    for start in (b"*", b"$", b"*1\r\n$", b"*2\r\n$1\r\na\r\n$%d\r\n" % INLINE_ARG_BYTES):
        with pytest.raises(ProtocolError):
            _feed_without_end(start)
    receiver = Receiver()
    tracemalloc.start()
    try:
        for _ in range(10):
            receiver.give(b"\r\n" * 5_000)
            assert receiver.take() == []
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 100_000


def _feed_without_end(start: bytes) -> None:
    receiver = Receiver()
    receiver.give(start)
    for _ in range(100):
        receiver.give(b"1" * 1000)
        receiver.parser.requests(10)
        assert receiver.parser.buffered_bytes <= HEADER_LINE_BYTES + 1000
