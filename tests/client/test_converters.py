"""From replies to results: what is not what the command answers is an error, never a guess."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pion.client import converters as to
from pion.client.errors import BadReplyError

BYTES = np.zeros(10, np.uint8)


@pytest.mark.parametrize(
    ("convert", "value"),
    [
        (to.word("OK"), "PONG"),
        (to.word("OK"), b"OK"),
        (to.integer, b"1"),
        (to.integer, True),
        (to.flag, 2),
        (to.hit, "OK"),
        (to.hit, None),
        (to.registered, "HIT"),
        (to.bulk, "text"),
        (to.bulk_or_none, 1),
        (to.info, []),
        (to.numbers, [b"a", 1]),
        (to.numbers, {b"a": b"1"}),
        (to.session_info, {b"sid": b"s"}),
        (to.page, [b"0"]),
        (to.page, [b"0", [1]]),
        (to.match, [b"ns", 1]),
        (to.match, b"ns"),
        (to.chain, [[b"ns", 0]]),
        (to.chain, [[b"ns", 0, b"1"]]),
        (to.blocks, b"short"),
        (to.blocks, b"\x10\0\0\0\x02\0\0\0" + bytes(8)),
        (to.blocks, None),
        (to.bitmap(9), b"\0"),
        (to.bitmap(9), b"\0\0\0"),
        (to.bitmap(1), "OTHER"),
        (to.rows("fp32", 2), BYTES),
        (to.rows("fp16", 2), BYTES),
        (to.rows("native", 3), BYTES),
        (to.rows("native", 0), BYTES),
        (to.rows("native", 1), b"bytes"),
        (to.row_list("native", [1]), []),
        (to.row_list("native", [1, 3]), [BYTES, BYTES]),
        (to.flat_list("fp32"), [BYTES]),
        (to.flat_list("fp32"), None),
        (to.bulk_count(2), [0]),
        (to.bulk_count(None), b""),
    ],
)
def test_unexpected_replies(convert: Callable[[object], object], value: object) -> None:
    with pytest.raises(BadReplyError):
        convert(value)


def test_info_keeps_what_follows_the_first_colon() -> None:
    assert to.info(b"# Server\r\nos:a:b\r\n\r\nempty:\r\n") == {"os": "a:b", "empty": ""}


def test_the_last_page_has_no_cursor() -> None:
    assert to.page([b"17", [b"a"]]) == (b"17", [b"a"])
    assert to.page([b"0", []]) == (None, [])


def test_a_bitmap_counts_from_the_least_significant_bit() -> None:
    assert np.flatnonzero(to.bitmap(10)(b"\x05\x02")).tolist() == [0, 2, 9]


@pytest.mark.parametrize(
    "hashes",
    [[2**64 - 1, 7], (2**64 - 1, 7), np.array([2**64 - 1, 7], np.uint64), np.array([2**64 - 1, 7], ">u8")],
)
def test_hashes_keep_all_their_bits(hashes: to.Hashes) -> None:
    assert to.hash_blob(hashes) == b"\xff" * 8 + b"\x07" + bytes(7)


def test_no_hashes() -> None:
    assert to.hash_blob([]) == b""


@pytest.mark.parametrize(
    "hashes", [[-1], [2**64], [1.0], ["1"], np.array([-1]), np.array([1.0]), np.zeros((2, 2), np.uint64)]
)
def test_what_is_no_hash(hashes: to.Hashes) -> None:
    with pytest.raises(ValueError, match="64-bit"):
        to.hash_blob(hashes)


def test_an_unknown_wire_form_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="fp8"):
        to.wire_type("fp8")  # type: ignore[arg-type]
