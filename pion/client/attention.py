"""The ATTEND commands as requests for both lanes, with their arrays checked. Pure.

Shapes are checked here, against each other, because a blob on the wire has none; what the numbers in them may be is
checked by the server, which knows what it has stored. Arrays are sent as they lie, never copied.
"""

# ruff: noqa: D103  The commands are described where they are called, in `pion.client.attend`.

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np

from pion.client import binary
from pion.client import converters as to
from pion.client.commands import DONE, either, read, write
from pion.client.errors import BadReplyError
from pion.client.packing import Argument, Buffer, as_bytes
from pion.client.records import Floats, Integers, LayerState, Name
from pion.client.requests import Call, Request
from pion.client.sinks import FreshArrays
from pion.errors import Status

T = TypeVar("T")

_STATES: Final[dict[object, LayerState]] = {"HIT": "warm", "COLD": "cold", "MISS": "missing"}
_FP32: Final = np.dtype("<f4")
_STATE_WORDS: Final[Mapping[int, object]] = MappingProxyType(
    {Status.OK: "HIT", Status.COLDMISS: "COLD", Status.MISS: "MISS"}
)


def store(sid: Name, layer: int, keys: Floats, values: Floats) -> Call[None]:
    heads, rows, width = _floats(keys, "keys", "[H, N, D]")
    _same(values, "values", (heads, rows, width), "that of keys")
    numbers = heads, rows, width
    args = "ATTEND.PREFIX.STORE", sid, layer, *numbers, keys, values
    return either(
        to.word("OK"),
        args,
        binary.ATTEND_STORE,
        _meta(sid, layer, *numbers),
        body=[as_bytes(keys), as_bytes(values)],
        answers=DONE,
    )


def lookup(sid: Name, layer: int) -> Call[LayerState]:
    args = "ATTEND.PREFIX.LOOKUP", sid, layer
    return either(_state, args, binary.ATTEND_LOOKUP, _meta(sid, layer), answers=_STATE_WORDS, reads=True)


def query(sid: Name, layer: int, q: Floats, top_k: int, window: int) -> Call[Floats]:
    heads, count, width = _floats(q, "q", "[H, M, D]")
    return _query(
        "ATTEND.PREFIX.QUERY",
        binary.ATTEND_QUERY,
        sid,
        layer,
        (heads, width, top_k),
        [q],
        window,
        _output(heads, count, width, lse=count > 1),
    )


def query_with_lse(sid: Name, layer: int, q: Floats, top_k: int, window: int) -> Call[tuple[Floats, Floats]]:
    heads, count, width = _floats(q, "q", "[H, M, D]")
    # The answer to one query has no LSE on the wire. Asked twice in one call it is two queries, whose answer has.
    asked = q if count > 1 else np.ascontiguousarray(np.repeat(q, 2, axis=1))
    return _query(
        "ATTEND.PREFIX.QUERY",
        binary.ATTEND_QUERY,
        sid,
        layer,
        (heads, width, top_k),
        [asked],
        window,
        _output_and_lse(heads, asked.shape[1], width, count),
    )


def query_fused(
    sid: Name, layer: int, q: Floats, keys: Floats, values: Floats, head_map: Integers, window: int
) -> Call[Floats]:
    heads, count, width = _floats(q, "q", "[H_q, M, D]")
    kv_heads, rows = _suffix(keys, values, width)
    return _query(
        "ATTEND.PREFIX.QUERY_FUSED",
        binary.ATTEND_QUERY_FUSED,
        sid,
        layer,
        (heads, width, rows, kv_heads),
        [q, keys, values, _uint32(head_map, "head_map", (heads,))],
        window,
        _output(heads, count, width),
    )


def query_sparse(sid: Name, layer: int, q: Floats, indices: Integers, counts: Integers, window: int) -> Call[Floats]:
    heads, width = _single(q, "[H, 1, D]")
    shape = np.shape(indices)
    if len(shape) != 2 or shape[0] != heads or not shape[1]:
        raise ValueError(f"indices must have the shape [H, K], K at least 1, with H {heads} as in q, got {shape}")
    return _query(
        "ATTEND.PREFIX.QUERY_SPARSE",
        binary.ATTEND_SPARSE,
        sid,
        layer,
        (heads, width, shape[1]),
        [q, _uint32(indices, "indices", (heads, shape[1])), _uint32(counts, "counts", (heads,))],
        window,
        _output(heads, 1, width),
    )


def query_sparse_auto(
    sid: Name, layer: int, q: Floats, head_map: Integers, block: int, top: int, kv_heads: int, window: int
) -> Call[Floats]:
    heads, width = _single(q, "[H_q, 1, D]")
    return _query(
        "ATTEND.PREFIX.QUERY_SPARSE_AUTO",
        binary.ATTEND_SPARSE_AUTO,
        sid,
        layer,
        (heads, width, block, top, kv_heads),
        [q, _uint32(head_map, "head_map", (heads,))],
        window,
        _output(heads, 1, width),
    )


def query_sparse_auto_fused(
    sid: Name,
    layer: int,
    q: Floats,
    keys: Floats,
    values: Floats,
    head_map: Integers,
    block: int,
    top: int,
    window: int,
) -> Call[Floats]:
    heads, width = _single(q, "[H_q, 1, D]")
    kv_heads, rows = _suffix(keys, values, width)
    return _query(
        "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED",
        binary.ATTEND_SPARSE_AUTO_FUSED,
        sid,
        layer,
        (heads, width, block, top, kv_heads, rows),
        [q, keys, values, _uint32(head_map, "head_map", (heads,))],
        window,
        _output(heads, 1, width),
    )


def drop(sid: Name, layer: int | None) -> Request[int]:
    return write(to.integer, "ATTEND.PREFIX.DROP", sid, *(() if layer is None else (layer,)))


def info() -> Request[dict[str, int | str]]:
    return read(to.facts, "ATTEND.INFO")


def warm(ns: Name, heads: int, head_dim: int, sid: Name | None) -> Request[tuple[int, int]]:
    return write(to.warmed, "KV.PREFIX.WARM", ns, heads, head_dim, *(() if sid is None else (sid,)))


# Parts


def _query(
    command: str,
    code: int,
    sid: Name,
    layer: int,
    numbers: tuple[int, ...],
    arrays: list[Floats | Integers],
    window: int,
    convert: Callable[[object], T],
) -> Call[T]:
    body: list[Buffer] = [as_bytes(array) for array in arrays]
    args: tuple[Argument, ...] = (command, sid, layer, *numbers, *body)
    if window:
        args = *args, window
    return either(convert, args, code, _meta(sid, layer, *numbers, window), body=body, reads=True, sink=FreshArrays())


def _meta(sid: Name, *numbers: int) -> bytes | None:
    return binary.joined(binary.packed_name(sid), binary.packed_numbers(*numbers))


def _state(value: object) -> LayerState:
    if not isinstance(value, str) or value not in _STATES:
        raise BadReplyError(f"expected +HIT, +COLD or +MISS, got {value!r:.80}")
    return _STATES[value]


def _output(heads: int, count: int, width: int, *, lse: bool = False) -> Callable[[object], Floats]:
    """The output alone; `lse`: there is an LSE behind it, which nobody asked for."""

    def convert(value: object) -> Floats:
        return to.floats(value, heads * count * (width + lse))[: heads * count * width].reshape(heads, count, width)

    return convert


def _output_and_lse(heads: int, sent: int, width: int, wanted: int) -> Callable[[object], tuple[Floats, Floats]]:
    """Both, of the first `wanted` of the queries that were sent."""

    def convert(value: object) -> tuple[Floats, Floats]:
        flat = to.floats(value, heads * sent * (width + 1))
        size = heads * sent * width
        output, lse = flat[:size].reshape(heads, sent, width), flat[size:].reshape(heads, sent)
        if sent == wanted:
            return output, lse
        return np.ascontiguousarray(output[:, :wanted]), np.ascontiguousarray(lse[:, :wanted])

    return convert


def _floats(value: Floats, name: str, shape: str, *, least: tuple[int, int, int] = (1, 1, 1)) -> tuple[int, int, int]:
    """The sizes of an array of three axes. Raises `ValueError` that names the argument."""
    if isinstance(value, np.ndarray) and value.dtype == _FP32 and value.ndim == 3 and value.flags.c_contiguous:
        first, second, third = value.shape
        if first >= least[0] and second >= least[1] and third >= least[2]:
            return first, second, third
    raise ValueError(f"{name} must be a C-contiguous float32 array {shape}, got {_described(value)}")


def _same(value: Floats, name: str, shape: tuple[int, int, int], whose: str) -> None:
    if _floats(value, name, "of three axes", least=(1, 0, 1)) != shape:
        raise ValueError(f"{name} must have the shape {shape}, {whose}, got {value.shape}")


def _suffix(keys: Floats, values: Floats, width: int) -> tuple[int, int]:
    """(KV heads, rows) of a suffix."""
    kv_heads, rows, keys_width = _floats(keys, "keys", "[H_kv, S, D]", least=(1, 0, 1))
    if keys_width != width:
        raise ValueError(f"keys must have the shape [H_kv, S, D] with D {width} as in q, got {keys.shape}")
    _same(values, "values", (kv_heads, rows, width), "that of keys")
    return kv_heads, rows


def _single(q: Floats, shape: str) -> tuple[int, int]:
    """(heads, D) of one query for each head."""
    heads, count, width = _floats(q, "q", shape)
    if count != 1:
        raise ValueError(f"q must have the shape {shape}, one query for each head, got {q.shape}")
    return heads, width


def _uint32(value: Integers, name: str, shape: tuple[int, ...]) -> Integers:
    """Integers as they are sent. Raises `ValueError` that names the argument."""
    array = np.asarray(value)
    if array.shape != shape or array.dtype.kind not in "ui":
        raise ValueError(f"{name} must be integers of shape {shape}, got {_described(array)}")
    if array.dtype != np.uint32 and (array.min() < 0 or array.max() >= 1 << 32):
        raise ValueError(f"{name} must be from 0 to {(1 << 32) - 1}, got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, "<u4")


def _described(value: object) -> str:
    if not isinstance(value, np.ndarray):
        return type(value).__name__
    order = "" if value.flags.c_contiguous else ", not C-contiguous"
    return f"{value.dtype} {value.shape}{order}"
