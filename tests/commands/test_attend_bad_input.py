"""Bad arguments of the ATTEND commands on both lanes: refused by name, nothing changed, and the connection goes on."""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.commands import attend, attend_arguments, attend_binary
from pion.errors import CommandError, Status
from tests.commands.attend_support import (
    AUTO,
    AUTO_FUSED,
    FORMS,
    FUSED,
    LANES,
    QUERY,
    SPARSE,
    BinaryWire,
    Wire,
    blob,
    floats,
    ids,
    normal,
    place,
    serving,
)

HEADS, ROWS, WIDTH = 2, 6, 8
Q = blob(normal(3, HEADS, 1, WIDTH))
SUFFIX = blob(normal(4, HEADS, 2, WIDTH))
MAP = blob(ids(0, 1))

GOOD: dict[Any, tuple[list[int], list[bytes]]] = {
    QUERY: ([2, 8, 0], [Q]),
    FUSED: ([2, 8, 2, 2], [Q, SUFFIX, SUFFIX, MAP]),
    SPARSE: ([2, 8, 3], [Q, blob(ids([0, 1, 2], [5, 4, 3])), blob(ids(3, 1))]),
    AUTO: ([2, 8, 4, 2, 2], [Q, MAP]),
    AUTO_FUSED: ([2, 8, 4, 2, 2, 2], [Q, SUFFIX, SUFFIX, MAP]),
}


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        with Wire(running) as wire:
            keys = normal(1, HEADS, ROWS, WIDTH)
            assert wire.store(b"s", 0, keys, keys) == "OK"
        yield running


@pytest.fixture(scope="module", params=list(LANES))
def wire(request, server):
    with LANES[request.param](server) as client:
        yield client


def refused(server, wire, form, sid: bytes, layer: int, numbers, blobs, window: int = 0) -> str:
    """The error of a refused query, which changed nothing and was not computed."""
    before = server.figures()
    answer = wire.ask(form, sid, layer, numbers, blobs, window)
    assert isinstance(answer, str), form
    assert "internal error" not in answer
    assert len(answer) < 300
    assert server.figures() == before
    assert wire.lookup(b"s") == "HIT"
    return answer


def test_the_good_ones_are_good(wire) -> None:
    for form, (numbers, blobs) in GOOD.items():
        floats(wire.ask(form, b"s", 0, numbers, blobs), HEADS, 1, WIDTH)


@pytest.mark.parametrize("form", FORMS, ids=[form.command for form in FORMS])
@pytest.mark.parametrize("change", [-1, 1])
def test_each_blob_one_byte_short_and_long(server, form, change: int) -> None:
    numbers, blobs = GOOD[form]
    with Wire(server) as wire:
        for index, what in enumerate(form.blobs):
            bad = list(blobs)
            bad[index] = bad[index][:-1] if change < 0 else bad[index] + b"\0"
            answer = refused(server, wire, form, b"s", 0, numbers, bad)
            assert answer.startswith(f"-ERR {what} must be "), answer
            assert answer.endswith((f"got {len(bad[index])}", f"got {len(bad[index])} bytes"))


@pytest.mark.parametrize("form", FORMS, ids=[form.command for form in FORMS])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_body_one_byte_short_and_long(server, form, change: int) -> None:
    numbers, blobs = GOOD[form]
    body = b"".join(blobs)
    body = body[:-1] if change < 0 else body + b"\0"
    with BinaryWire(server) as wire:
        answer = refused(server, wire, form, b"s", 0, numbers, [body])
        assert answer.startswith(tuple(f"-ERR {what} must be " for what in form.blobs)), answer
        assert refused(server, wire, form, b"s", 0, numbers, [b""]).startswith("-ERR Q must be ")


@pytest.mark.parametrize("change", [-1, 1])
def test_store_one_byte_short_and_long(server, change: int) -> None:
    good = blob(normal(1, 2, 3, 8))
    bad = good[:-1] if change < 0 else good + b"\0"
    expected = f"-ERR {{}} must be H x N x D fp32 values, 2 x 3 x 8: 192 bytes, got {len(bad)}"
    with Wire(server) as wire, BinaryWire(server) as binary:
        assert wire.call("ATTEND.PREFIX.STORE", "new", 0, 2, 3, 8, bad, good) == expected.format("K")
        assert wire.call("ATTEND.PREFIX.STORE", "new", 0, 2, 3, 8, good, bad) == expected.format("V")
        status, text = binary.frame(0x20, place(b"new", 0, 2, 3, 8), good + bad)
        assert (status, text.decode()) == (Status.ERR, expected.format("V")[1:])
        batch = "ATTEND.QUERYBATCH", 2, 3, 8, 0
        assert wire.call(*batch, Q, bad, good) == expected.format("K")
        assert wire.call(*batch, Q, good, bad) == expected.format("V")
        bad_q = Q[:-1] if change < 0 else Q + b"\0"
        assert wire.call(*batch, bad_q, good, good).startswith("-ERR Q must be H x M x D fp32 values, 64 bytes for")
        assert wire.call(*batch, b"", good, good).endswith("got 0 bytes")
        assert wire.lookup(b"new") == "MISS"


BAD_NUMBERS: dict[Any, list[tuple[int, int, str]]] = {
    # position of the number, its value, the error
    QUERY: [
        (0, 1, "Q must be"),  # 64 bytes are then four queries of one head... of the wrong number of heads
        (1, 12, "D must be a multiple of 8 from 8 to 512, got 12"),
        (1, 0, "D must be "),
        (1, 520, "D must be a multiple of 8 from 8 to 512, got 520"),
        (0, 0, "H must be an integer from 1 to "),
    ],
    FUSED: [
        (0, 0, "H_q must be an integer from 1 to "),
        (2, 3, "K_suf must be H_kv x S_suf x D fp32 values, 2 x 3 x 8: 192 bytes, got 128"),
        (3, 0, "H_kv must be an integer from 1 to "),
        (3, 1, "K_suf must be"),
    ],
    SPARSE: [(2, 0, "K_sparse_max must be an integer from 1 to "), (2, 2, "indices must be H x K_sparse_max")],
    AUTO: [
        (2, 0, "B must be an integer from 1 to "),
        (3, 0, "K_top must be an integer from 1 to "),
        (3, 3, "K_top must be at most 2, the blocks of 4 in 6 rows, got 3"),
        (4, 1, "head_map must be KV heads below H_kv, 1, got 1 for query head 1"),
        (4, 3, "H_kv must be 2, the heads stored, got 3"),
    ],
    AUTO_FUSED: [(3, 7, "K_top must be at most 2"), (5, 3, "K_suf must be")],
}


def test_numbers_out_of_range(server, wire) -> None:
    for form, cases in BAD_NUMBERS.items():
        numbers, blobs = GOOD[form]
        for position, value, error in cases:
            if wire.lane == "binary" and error.startswith(("K_suf", "indices")):
                error = ""  # its body is cut elsewhere, so another blob may be the one that doesn't fit
            if (form, position, value) == (QUERY, 0, 1):
                error = "H must be 2, the heads stored, got 1"
            bad = [*numbers[:position], value, *numbers[position + 1 :]]
            answer = refused(server, wire, form, b"s", 0, bad, blobs)
            assert answer.startswith(f"-ERR {error}"), (form.command, position, value, answer)


@pytest.mark.parametrize("form", FORMS, ids=[form.command for form in FORMS])
@pytest.mark.parametrize("value", [0, 65_537, 2**31, 2**32 - 1])
def test_both_lanes_say_the_same_of_a_number(server, form, value: int) -> None:
    """The same error, or the same answer. But for S_suf: its blobs are cut out of the body."""
    numbers, blobs = GOOD[form]
    with Wire(server) as wire, BinaryWire(server) as binary:
        for position, what in enumerate(form.numbers):
            if what == "S_suf" or (what == "K_sparse_max" and value == 65_537):
                continue
            bad = [*numbers[:position], value, *numbers[position + 1 :]]
            answers = [client.ask(form, b"s", 0, bad, blobs) for client in (wire, binary)]
            assert answers[0] == answers[1], what
            if what == "top_k":
                assert answers[0] == wire.ask(form, b"s", 0, numbers, blobs)
            elif (what, value) != ("B", 65_537):  # rows of one block, and then two are too many
                assert answers[0].startswith(f"-ERR {what} must be "), answers[0]
        answers = [client.ask(form, b"s", 0, numbers, blobs, value) for client in (wire, binary)]
        assert answers[0] == answers[1] == wire.ask(form, b"s", 0, numbers, blobs)


def test_both_lanes_say_the_same_of_a_number_of_store(server) -> None:
    with Wire(server) as wire, BinaryWire(server) as binary:
        for position, what in enumerate(("H", "N", "D")):
            for value in (0, 2**31, 2**32 - 1):
                numbers = [2, 3, 8]
                numbers[position] = value
                answer = wire.call("ATTEND.PREFIX.STORE", "new", 0, *numbers, b"", b"")
                assert answer.startswith(f"-ERR {what} must be "), answer
                status, text = binary.frame(0x20, place(b"new", 0, *numbers), b"")
                assert (status, text.decode()) == (Status.ERR, answer[1:])


def test_the_limits_that_errors_name(server) -> None:
    with Wire(server) as wire:
        for args in (("ATTEND.QUERYBATCH", 65_537, 1, 8, 0, "", "", ""), ("KV.PREFIX.WARM", "p", 65_537, 8)):
            assert wire.call(*args) == "-ERR H must be an integer from 1 to 65536, got 65537"
        assert wire.call("ATTEND.QUERYBATCH", 1, 2**31, 8, 0, "x" * 32, "", "") == (
            "-ERR N must be an integer from 1 to 2147483647, got 2147483648"
        )


def test_many_heads_are_checked_in_a_thread(server, wire, monkeypatch) -> None:
    """Each may name one row only: then their number is what takes the time."""
    heads = 20_000
    threads = []
    check = attend_arguments.chosen

    def chosen(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return check(*args)

    monkeypatch.setattr(attend_arguments, "chosen", chosen)
    keys, q = normal(1, heads, 1, 8), normal(2, heads, 1, 8)
    assert wire.store(b"wide", 0, keys, keys) == "OK"
    one = blob(ids(*[0] * heads)), blob(ids(*[1] * heads))
    assert (floats(wire.ask(SPARSE, b"wide", 0, [heads, 8, 1], [blob(q), *one]), heads, 1, 8) == keys).all()
    loop = server.run(threading.get_ident)
    assert len(threads) == 1
    assert threads[0] != loop
    floats(wire.ask(SPARSE, b"s", 0, *GOOD[SPARSE]), HEADS, 1, WIDTH)
    assert threads[1:] == [loop]


def test_another_shape_than_stored(server, wire) -> None:
    wide = blob(normal(1, 2, 1, 16))
    answer = refused(server, wire, QUERY, b"s", 0, [2, 16, 0], [wide])
    assert answer == "-ERR D must be 8, the width stored, got 16"
    suffix = blob(normal(1, 4, 1, 8))
    answer = refused(server, wire, FUSED, b"s", 0, [2, 8, 1, 4], [Q, suffix, suffix, MAP])
    assert answer == "-ERR H_kv must be 2, the heads stored, got 4"


def test_head_map_out_of_range(server, wire) -> None:
    for form in (FUSED, AUTO, AUTO_FUSED):
        numbers, blobs = GOOD[form]
        for bad, value, head in ((ids(0, 2), 2, 1), (ids(2**32 - 1, 0), 2**32 - 1, 0)):
            answer = refused(server, wire, form, b"s", 0, numbers, [*blobs[:-1], blob(bad)])
            assert answer == f"-ERR head_map must be KV heads below H_kv, 2, got {value} for query head {head}"


def test_indices_and_counts(server, wire) -> None:
    numbers, (q, _, _) = GOOD[SPARSE]
    good = [0, 1, 2]
    cases = [
        (ids(good, [3, 6, 4]), ids(3, 3), "indices must be rows below 6, got 6 for head 1"),
        (ids(good, [2**32 - 1, 0, 0]), ids(3, 1), f"indices must be rows below 6, got {2**32 - 1} for head 1"),
        (ids(good, [3, 4, 3]), ids(3, 3), "indices must not repeat a row, got 3 twice for head 1"),
        (ids(good, good), ids(0, 3), "counts must be 1 to K_sparse_max, 3, got 0 for head 0"),
        (ids(good, good), ids(3, 4), "counts must be 1 to K_sparse_max, 3, got 4 for head 1"),
    ]
    for indices, counts, error in cases:
        answer = refused(server, wire, SPARSE, b"s", 0, numbers, [q, blob(indices), blob(counts)])
        assert answer == f"-ERR {error}"
    answer = refused(server, wire, SPARSE, b"s", 0, numbers, [q, blob(ids([0, 1, 2], [3, 4, 5])), blob(ids(3, 3))], 3)
    assert answer == "-ERR indices must name a row that fa_window 3 shows, from 3 on, got none for head 0"


def test_many_indices_are_checked_in_a_thread(server, wire) -> None:
    rows = 40_000
    keys = normal(1, 1, rows, 8)
    assert wire.store(b"long", 0, keys, keys) == "OK"
    q = blob(normal(2, 1, 1, 8))
    named = list(range(rows))
    floats(wire.ask(SPARSE, b"long", 0, [1, 8, rows], [q, blob(ids(named)), blob(ids(rows))]), 1, 1, 8)
    named[-1] = 0
    answer = refused(server, wire, SPARSE, b"long", 0, [1, 8, rows], [q, blob(ids(named)), blob(ids(rows))])
    assert answer == "-ERR indices must not repeat a row, got 0 twice for head 0"


def test_names_and_layers(server, wire) -> None:
    for form in FORMS:
        for sid in (b"", b"x" * 4097):
            assert "sid must be 1 to 4096 bytes long" in refused(server, wire, form, sid, 0, *GOOD[form])
        answer = refused(server, wire, form, b"s", 65_536, *GOOD[form])
        assert answer.startswith("-ERR layer must be an integer from 0 to 65535")
        assert refused(server, wire, form, b"other", 0, *GOOD[form]) == "-ERR session not found"
        assert refused(server, wire, form, b"s", 1, *GOOD[form]) == "-ERR session not found"


RESP_ONLY = [
    ("ATTEND.PREFIX.STORE", "s", 0, "x", 1, 8, "", ""),
    ("ATTEND.PREFIX.STORE", "s", 0, 1, 0, 8, "", ""),
    ("ATTEND.PREFIX.STORE", "s", 0, 1, -1, 8, "", ""),
    ("ATTEND.PREFIX.STORE", "s", 0, 1, 2**31, 8, "", ""),
    ("ATTEND.PREFIX.STORE", "s", 0, 1, 1, 7, "x" * 28, "x" * 28),
    ("ATTEND.PREFIX.STORE", "s", "-1", 1, 1, 8, "x" * 32, "x" * 32),
    ("ATTEND.PREFIX.LOOKUP", "", 0),
    ("ATTEND.PREFIX.LOOKUP", "s", "x"),
    ("ATTEND.PREFIX.DROP", "s", "x"),
    ("ATTEND.PREFIX.DROP", "", 0),
    ("ATTEND.PREFIX.QUERY", "s", 0, 2, 8, -1, Q),
    ("ATTEND.PREFIX.QUERY", "s", 0, 2, 8, 0, Q, "x"),
    ("ATTEND.PREFIX.QUERY", "s", 0, 2, 8, 0, Q, -1),
    ("ATTEND.PREFIX.QUERY", "s", 0, 2, 8, 0, b""),
    ("ATTEND.QUERYBATCH", 0, 1, 8, 0, "", "", ""),
    ("ATTEND.QUERYBATCH", 1, 1, 8, "x", "x" * 32, "x" * 32, "x" * 32),
    ("KV.PREFIX.WARM", "p", 0, 8),
    ("KV.PREFIX.WARM", "p", 1, 9),
    ("KV.PREFIX.WARM", "", 1, 8),
    ("KV.PREFIX.WARM", "p", 1, 8, ""),
    ("KV.PREFIX.WARM", "p", 1, 8, "x" * 4097),
]


@pytest.mark.parametrize("args", RESP_ONLY, ids=[" ".join(map(str, args))[:40] for args in RESP_ONLY])
def test_other_bad_arguments(server, args) -> None:
    before = server.figures()
    with Wire(server) as wire:
        assert wire.call(*args).startswith("-ERR ")
        assert server.figures() == before
        assert wire.call("PING") == "PONG"


@pytest.mark.parametrize("row", attend.COMMANDS, ids=[row.name for row in attend.COMMANDS])
def test_too_few_and_too_many_arguments(server, row) -> None:
    wrong = f"-ERR wrong number of arguments for '{row.name.lower()}' command"
    optional = sum(arg.optional for arg in row.args)
    with Wire(server) as wire:
        for count in range(abs(row.arity) - 1):
            assert wire.call(row.name, *["1"] * count) == wrong
        assert wire.call(row.name, *["1"] * (abs(row.arity) + optional)) == wrong


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([0x20, 0x21, 0x22, 0x24, 0x25, 0x26, 0x27]),
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**32 - 1)), min_size=9, max_size=9),
    st.binary(max_size=200),
)
def test_any_numbers_and_any_body_are_answered(server, code: int, numbers: list[int], body: bytes) -> None:
    fields = len(server.services.registry.binary[code].meta) - 1
    with BinaryWire(server) as wire:
        status, text = wire.frame(code, place(b"s", *numbers[:fields]), b"" if code == 0x21 else body)
        assert status in (Status.OK, Status.ERR, Status.MISS)
        assert b"internal error" not in text
        assert wire.lookup(b"s") in ("HIT", "MISS")


@given(body=st.binary(max_size=300), sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3), queries=st.booleans())
def test_what_is_cut_out_of_a_body_is_aligned(body: bytes, sizes: list[int], queries: bool) -> None:
    """Or refused: MLX and a BLAS read by whole values."""
    pieces = (attend_binary._cut_queries if queries else attend_binary._cut)(body, *sizes)
    assert b"".join(pieces) == body
    if queries and len(pieces[0]) % 4:
        with pytest.raises(CommandError, match="Q must be H x M x D fp32 values"):
            attend_arguments.queries(pieces[0], 1, 8)
        return
    for piece in pieces:
        assert np.frombuffer(piece[: len(piece) // 4 * 4], np.uint32).flags.aligned


def test_meta_that_ends_too_early_or_late(server) -> None:
    with BinaryWire(server) as wire:
        whole = place(b"s", 0, 2, 8, 0, 0)
        for meta in (whole[:-1], whole + b"\0", b"", struct.pack("<H", 9) + b"s"):
            status, _ = wire.frame(0x22, meta, Q)
            assert status is Status.ERR
        assert wire.frame(0x22, whole, Q)[0] is Status.OK
