"""Requests as lists of buffers: small arguments are joined with their headers, large ones are sent as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from pion.client.limits import JOIN_BYTES

#: `str` (sent as UTF-8), `bytes`, `int`, `float`, or any C-contiguous buffer: memoryview, a NumPy or MLX array, ...
Argument: TypeAlias = object

Buffer: TypeAlias = bytes | memoryview


def as_bytes(value: object) -> Buffer:
    """The bytes of a buffer, without a copy.

    Raises `TypeError` for what has no buffer and `ValueError` for one that isn't C-contiguous.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise ValueError("the array is not C-contiguous; use np.ascontiguousarray")
        # Through uint8, because types like bfloat16 have no buffer format of their own.
        return value.reshape(-1).view(np.uint8).data if value.size else b""
    try:
        view = memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{type(value).__name__} is neither text, number nor buffer") from None
    if not view.nbytes:
        return b""
    if not view.c_contiguous:
        raise ValueError("the buffer is not C-contiguous")
    return view.cast("B")


def argument(value: Argument) -> Buffer:
    """One argument as the bytes that are sent."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        raise TypeError("a bool is not an argument; send the word that the command expects")
    if isinstance(value, int | np.integer):
        return b"%d" % int(value)
    if isinstance(value, float | np.floating):
        return repr(float(value)).encode()
    return as_bytes(value)


def pack(args: Sequence[Argument]) -> list[Buffer]:
    """The request's bytes as buffers, in order."""
    if not args:
        raise ValueError("a command needs a name")
    out: list[Buffer] = []
    small: list[Buffer] = [b"*%d\r\n" % len(args)]
    for value in args:
        data = argument(value)
        size = len(data)
        small.append(b"$%d\r\n" % size)
        if size <= JOIN_BYTES:
            small.append(data)
        else:
            out.append(b"".join(small))
            out.append(data)
            small = []
        small.append(b"\r\n")
    out.append(b"".join(small))
    return out
