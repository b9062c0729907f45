"""The fast walk: what it takes, and what it leaves to the parser's general way."""

from __future__ import annotations

import pytest

from pion.protocol.walk import whole_request


@pytest.mark.parametrize("size", [3000, 12_500, 32_768])
def test_a_request_with_one_long_argument_is_taken_whole(size: int) -> None:
    blob = b"\r\n".join([b"x" * (size // 2 - 1), b"y" * (size - size // 2 - 1)])
    wire = b"*3\r\n$3\r\nCMD\r\n$2\r\nns\r\n$%d\r\n%b\r\n" % (size, blob)
    assert whole_request(wire) == [b"CMD", b"ns", blob]


@pytest.mark.parametrize(
    "wire",
    [
        b"*2\r\n$3\r\nCMD\r\n$5\r\nab\r\n",
        b"*2\r\n$3\r\nCMD\r\n$2\r\nabc\r\n",
        b"*2\r\n$3\r\nCMD\r\n$2\r\nab",
        b"*2\r\n$3\r\nC\r\nD\r\n$2\r\nab\r\n",
        b"*1\r\n$2\r\nab\r\n*1\r\n$2\r\nab\r\n",
        b"*0\r\n",
        b"PING\r\n",
        b"no line end",
    ],
)
def test_what_is_not_one_whole_request_is_left_alone(wire: bytes) -> None:
    assert whole_request(wire) is None
