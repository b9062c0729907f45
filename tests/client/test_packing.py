"""Requests as buffers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from pion.client.limits import JOIN_BYTES
from pion.client.packing import as_bytes, pack


def test_small_arguments_become_one_buffer() -> None:
    request = pack(["SET", b"k\r\n", 7, np.int64(-2), 1.5, np.float32(0.5), memoryview(b"ab"), "é", b""])
    assert request == [
        b"*9\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$1\r\n7\r\n$2\r\n-2\r\n$3\r\n1.5\r\n$3\r\n0.5\r\n$2\r\nab\r\n$2\r\n\xc3\xa9\r\n$0\r\n\r\n"
    ]


def test_a_large_argument_is_sent_from_its_own_memory() -> None:
    array = np.arange(JOIN_BYTES, dtype=np.uint16)
    head, body, tail = pack(["X", array, "end"])
    assert (head, tail) == (b"*3\r\n$1\r\nX\r\n$%d\r\n" % array.nbytes, b"\r\n$3\r\nend\r\n")
    array[0] = 0xFFFF
    assert bytes(body[:2]) == b"\xff\xff"


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16),
        np.array(3.0),
        np.zeros((0, 5), np.float32),
        bytearray(b"abc"),
        memoryview(b""),
        memoryview(bytearray(12)).cast("f"),
    ],
)
def test_any_contiguous_buffer(value: object) -> None:
    assert bytes(as_bytes(value)) == (value.tobytes() if hasattr(value, "tobytes") else bytes(value))


@pytest.mark.parametrize(
    "value", [np.zeros((4, 4), np.float32)[:, :2], memoryview(bytearray(8))[::2], np.zeros((2, 3)).T]
)
def test_a_buffer_with_gaps_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        pack(["X", value])


@pytest.mark.parametrize("value", [None, True, [1], object()])
def test_what_is_not_an_argument(value: object) -> None:
    with pytest.raises(TypeError):
        pack(["X", value])


def test_a_command_needs_a_name() -> None:
    with pytest.raises(ValueError, match="name"):
        pack([])
