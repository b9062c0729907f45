"""Whatever the split, the requests are the same; and nothing that arrives breaks the binary lane's parser."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pion.limits import INLINE_ARG_BYTES
from pion.protocol.binary import HEADER
from tests.protocol.binary_support import LONG, BinaryReceiver, named, outcome, wire

requests = st.builds(
    wire, st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=60), st.binary(max_size=60)
)


@given(st.lists(requests, min_size=1, max_size=8), st.data())
def test_any_split_gives_the_same_requests(sent, data):
    stream = b"".join(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    found, error, _ = outcome(stream, cuts, limit=data.draw(st.integers(1, 5)))
    assert not error
    assert b"".join(wire(code, number, meta, body) for _, code, number, _, meta, body in found) == stream


MIXED = b"".join(
    [
        wire(2, 1),
        wire(1, 2, named(b"key"), b"short"),
        wire(1, 3, named(b"big"), bytes(range(256)) * 160),
        wire(77, 4, b"meta", b"body"),
        wire(1, 5, named(b"n" * LONG), b"z" * LONG),
        wire(1, 6, named(b"m" * 20_000), b"z" * INLINE_ARG_BYTES),
        wire(2, 7, bytes(4)),
    ]
)
CUTS = sorted(
    {
        *range(200),
        *range(200, len(MIXED), 3989),
        *(
            edge + near
            for edge in (41_050, 41_100, 41_150, 75_000, 108_800, 128_000, len(MIXED) - 60)
            for near in range(60)
        ),
    }
)


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("budget", [1 << 26, 50_000, 1000])
def test_every_two_way_split_of_a_stream_with_everything_in_it(late, budget):
    whole = outcome(MIXED, budget=budget)
    assert [each[2] for each in whole[0]] == list(range(1, 8))
    refused = [each[2] for each in whole[0] if each[0] != "request"]
    assert refused == {1 << 26: [], 50_000: [5, 6], 1000: [3, 5, 6]}[budget]
    for cut in CUTS:
        assert outcome(MIXED, [cut], late=late, budget=budget) == whole, cut


def test_byte_by_byte():
    stream = (
        wire(2, 1) + wire(1, 2, named(b"key"), b"short") + wire(1, 9, named(b"k" * 100), b"z" * (INLINE_ARG_BYTES + 1))
    )
    assert outcome(stream, list(range(1, len(stream)))) == outcome(stream)


def test_an_unfinished_stream_gives_what_is_complete_and_waits():
    for length in range(200):
        found, error, _ = outcome(MIXED[:length])
        assert not error
        assert len(found) == (length >= 24) + (length >= 24 + 24 + 10)


headers = st.builds(
    lambda magic, version, code, number, status, zero, meta, body: struct.pack(
        "<HBBIB3sIQ", magic, version, code, number, status, zero, meta, body
    ),
    st.sampled_from([0xCA5E, 0xCA5E, 0xCA5E, 0x5ECA]),
    st.sampled_from([1, 1, 1, 0, 2]),
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([b"\0\0\0", b"\0\0\0", b"\0\0\1"]),
    st.sampled_from([0, 1, 5, 100, 40_000, 2**32 - 1]),
    st.sampled_from([0, 1, 5, 100, 40_000, 2**24, 2**64 - 1]),
)


@given(st.lists(st.one_of(st.binary(max_size=60), headers, requests), max_size=12), st.booleans(), st.data())
@example(sent=[b"\x5e"], restricted=False, data=None)
@settings(max_examples=300)
def test_garbage_ends_in_requests_or_an_error_and_never_depends_on_the_split(sent, restricted, data):
    stream = b"".join(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4))) if data else [1]
    budget = data.draw(st.sampled_from([1000, 60_000, 1 << 26])) if data else 1000
    # While a client must authenticate, the connection takes one request at a time.
    limit = 1 if restricted else 3
    whole = outcome(stream, limit=limit, restricted=restricted, budget=budget)
    assert outcome(stream, cuts, limit=limit, restricted=restricted, budget=budget) == whole


@pytest.mark.parametrize("seed", range(20))
def test_mutated_requests_neither_crash_nor_depend_on_the_split(seed):
    chance = random.Random(seed)
    stream = bytearray(MIXED)
    for _ in range(chance.randrange(1, 12)):
        position = chance.choice([chance.randrange(len(stream)), chance.randrange(150)])
        kind = chance.randrange(3)
        if kind == 0:
            stream[position] = chance.randrange(256)
        elif kind == 1:
            del stream[position : position + chance.randrange(1, 50)]
        else:
            stream[position:position] = chance.randbytes(chance.randrange(1, 20))
    cuts = sorted(chance.randrange(len(stream)) for _ in range(30))
    assert outcome(bytes(stream)) == outcome(bytes(stream), cuts)


@pytest.mark.parametrize("off", [-1, 1])
def test_a_length_that_is_off_by_one_shifts_the_frame_and_is_noticed_at_the_next_header(off):
    for meta, body in ((named(b"key"), b"payload"), (named(b"key"), b"x" * LONG)):
        head = HEADER.pack(0xCA5E, 1, 1, 5, 0, len(meta), len(body) + off)
        found, error, _ = outcome(head + meta + body + wire(2, 6))
        assert len(found) == 1
        assert error.startswith("Protocol error: bad magic number")


def test_what_an_unfinished_request_keeps_is_bounded():
    """Meta and body up to the inline limit, with a header; what is longer has memory that was asked for."""
    receiver = BinaryReceiver()
    receiver.give(wire(1, 1, bytes(INLINE_ARG_BYTES), bytes(INLINE_ARG_BYTES))[:-1])
    assert receiver.seen() == []
    assert receiver.parser.buffered_bytes < INLINE_ARG_BYTES
    receiver.give(b"\0")
    assert len(receiver.seen()) == 1
    assert receiver.parser.buffered_bytes == 0
