"""Every command as a `Request`, or an `Either` if the binary lane has it too.

Pure, and shared by the synchronous and the Trio client. What the binary lane can't express, such as a negative number,
is a `Request`: the server then says in words what is wrong with it.
"""

# ruff: noqa: D103  The commands are described where they are called, in `pion.client.client`.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np

from pion.client import binary
from pion.client import converters as to
from pion.client.limits import MAX_BINARY_BODY_BYTES, MAX_BINARY_META_BYTES, STORE_BYTES
from pion.client.packing import Argument, Buffer, argument, as_bytes, pack
from pion.client.records import (
    Blocks,
    Done,
    Hashes,
    Layer,
    Match,
    Name,
    Receive,
    Registered,
    Rows,
    Segment,
    SessionInfo,
    Wire,
)
from pion.client.requests import Call, Either, Request, Sink
from pion.client.sinks import CallerMemory, FreshArrays
from pion.errors import Status

T = TypeVar("T")


def read(convert: Callable[[object], T], *args: Argument, sink: Sink | None = None, wait_s: float = 0) -> Request[T]:
    """A command that changes nothing."""
    return Request(str(args[0]), pack(args), convert, True, wait_s, sink)


def write(convert: Callable[[object], T], *args: Argument, claims: bool = False) -> Request[T]:
    return Request(str(args[0]), pack(args), convert, claims=claims)


def either(
    convert: Callable[[object], T],
    args: tuple[Argument, ...],
    code: int,
    meta: bytes | None,
    *,
    body: Sequence[Buffer] = (),
    answers: Mapping[int, object] = MappingProxyType({}),
    parts: binary.Parts | None = None,
    reads: bool = False,
    owned: bool = False,
    sink: Sink | None = None,
) -> Call[T]:
    """One command for both lanes; for RESP alone when it has no meta, or is larger than the other lane takes."""
    if meta is None or len(meta) > MAX_BINARY_META_BYTES or sum(map(len, body)) > MAX_BINARY_BODY_BYTES:
        return Request(str(args[0]), pack(args), convert, reads, sink=sink)
    packed = binary.Packed(code=code, meta=meta, body=body, answers=answers, parts=parts)
    return Either(args=args, packed=packed, convert=convert, reads=reads, owned=owned, sink=sink)


DONE: Final[Mapping[int, object]] = MappingProxyType({Status.OK: "OK"})
"""What answers a write."""


def generic(args: Sequence[Argument]) -> Request[object]:
    """Any command; nobody knows whether it only reads, so it is never repeated."""
    if not args:
        raise ValueError("a command needs a name")
    name = bytes(argument(args[0])[:64]).decode(errors="replace")
    return Request(name, pack(args), to.anything)


def ping() -> Request[None]:
    return read(to.word("PONG"), "PING")


def info(section: str) -> Request[dict[str, str]]:
    return read(to.info, "INFO", *([section] if section else []))


def stats() -> Request[dict[str, int | float]]:
    return read(to.numbers, "PION.STATS")


def stats_reset() -> Request[None]:
    return write(to.word("OK"), "PION.STATS", "RESET")


# V-store


def v_create(sid: Name, dim: int | None, fmt: str | None, schema: str | None) -> Request[None]:
    args: list[Argument] = ["V.CREATE", sid]
    if dim is not None:
        args.append(dim)
    if schema is not None:
        if fmt is not None:
            raise ValueError("give a format or a schema, not both")
        args += ["SCHEMA", schema]
    elif dim is None:
        raise ValueError("give a width or a schema")
    elif fmt is not None:
        args += ["VQUANT", fmt]
    return write(to.word("OK"), *args)


def _store_args(sid: Name, layer: int, start: int, count: int, rows: Buffer, as_: Wire) -> tuple[Argument, ...]:
    return "V.STOREBATCH", sid, layer, start, count, "AS", as_, rows


def v_store_batch(sid: Name, layer: int, start: int, count: int, rows: object, as_: Wire) -> Call[None]:
    to.wire_type(as_)
    data = as_bytes(rows)
    meta = binary.joined(binary.packed_name(sid), binary.packed_numbers(layer, start, count), binary.packed_wire(as_))
    args = _store_args(sid, layer, start, count, data, as_)
    return either(to.word("OK"), args, binary.V_STOREBATCH, meta, body=[data], answers=DONE, owned=True)


def v_store(sid: Name, layer: int, token: int, row: object, as_: Wire) -> Request[None]:
    return write(to.word("OK"), "V.STORE", sid, layer, token, "AS", as_, as_bytes(row))


def v_fetch(sid: Name, layer: int, start: int, end: int, as_: Wire) -> Call[Rows]:
    convert = to.rows(as_, end - start)
    meta = binary.joined(binary.packed_name(sid), binary.packed_numbers(layer, start, end), binary.packed_wire(as_))
    args = "V.FETCH", sid, layer, "RANGE", start, end, "AS", as_
    return either(convert, args, binary.V_FETCH_RANGE, meta, reads=True, owned=True, sink=FreshArrays())


def v_fetch_ids(sid: Name, layer: int, ids: Sequence[int], as_: Wire) -> Request[Rows]:
    if not len(ids):
        raise ValueError("name at least one row")
    return read(to.rows(as_, len(ids)), "V.FETCH", sid, layer, *ids, "AS", as_, sink=FreshArrays())


def _batch(
    convert: Callable[[object], T], sid: Name, ranges: Sequence[tuple[int, int, int]], as_: Wire, sink: Sink
) -> Call[T]:
    numbers = [number for entry in ranges for number in entry]
    args = "V.FETCH", sid, "BATCH", len(ranges), *numbers, "AS", as_
    meta = binary.joined(binary.packed_name(sid), binary.packed_wire(as_), binary.packed_ranges(ranges))
    if len({layer for layer, _, _ in ranges}) != 1:
        # The binary answer is rows without their sizes, and each layer may have a width of its own.
        meta = None
    parts = binary.even([end - start for _, start, end in ranges])
    return either(convert, args, binary.V_FETCH_BATCH, meta, parts=parts, reads=True, owned=True, sink=sink)


def v_fetch_batch(sid: Name, ranges: Sequence[tuple[int, int, int]], as_: Wire) -> Call[list[Rows]]:
    convert = to.row_list(as_, [end - start for _, start, end in ranges])
    return _batch(convert, sid, ranges, as_, FreshArrays())


def v_fetch_batch_into(
    sid: Name, ranges: Sequence[tuple[int, int, int]], receive: Receive, done: Done | None, as_: Wire
) -> Call[int]:
    to.wire_type(as_)
    return _batch(to.bulk_count(len(ranges)), sid, ranges, as_, CallerMemory(receive, done))


def v_drop(sids: Sequence[Name]) -> Request[int]:
    return write(to.integer, "V.DROP", *sids)


def v_info(sid: Name) -> Request[SessionInfo]:
    return read(to.session_info, "V.INFO", sid)


def listing(
    command: str, cursor: bytes, match: Name | None, count: int | None
) -> Request[tuple[bytes | None, list[bytes]]]:
    """One page of V.LIST or KV.PREFIX.LIST: the next cursor (None after the last page) and names."""
    args: list[Argument] = [command, "CURSOR", cursor]
    if match is not None:
        args += ["MATCH", match]
    if count is not None:
        args += ["COUNT", count]
    return read(to.page, *args)


# Prefixes


def register_options(
    blocks: tuple[int, Hashes] | None,
    prefill_ms: float | None,
    layers: int | None,
    tokens: int | None,
    states: int | None,
    meta: object | None,
    parent: tuple[Name, int] | None,
    ex_s: int | None,
    pin: bool,
) -> list[Argument]:
    """The options that both REGISTER commands take."""
    if (layers is None) != (tokens is None):
        raise ValueError("a declared prefix needs both layers and tokens")
    if states is not None and layers is None:
        raise ValueError("states belong to a declared prefix: give layers and tokens")
    args: list[Argument] = []
    if blocks is not None:
        size, values = blocks
        table = to.hash_blob(values)
        args += ["BLOCKS", size, len(table) // 8, table]
    if prefill_ms is not None:
        args += ["PREFILL_MS", prefill_ms]
    if layers is not None:
        args += ["LAYERS", layers, "TOKENS", tokens]
    if states is not None:
        args += ["STATES", states]
    if meta is not None:
        args += ["META", meta]
    if parent is not None:
        args += ["PARENT", *parent]
    if ex_s is not None:
        args += ["EX", ex_s]
    if pin:
        args.append("PIN")
    return args


def prefix_register(ns: Name, kv_dim: int, fmt: str, options: Sequence[Argument]) -> Request[Registered]:
    args = "KV.PREFIX.REGISTER", ns, kv_dim, fmt, *options
    return write(to.registered, *args, claims="LAYERS" in options)


def prefix_register_schema(ns: Name, k_runs: str, v_runs: str, options: Sequence[Argument]) -> Request[Registered]:
    args = "KV.PREFIX.REGISTER.SCHEMA", ns, "K", k_runs, "V", v_runs, *options
    return write(to.registered, *args, claims="LAYERS" in options)


def prefix_stores(ns: Name, layers: Sequence[Layer], tokens: int, as_: Wire) -> list[Request[None]]:
    """The V.STOREBATCH commands that fill a prefix, layer by layer, K before V."""
    name = ns.encode() if isinstance(ns, str) else ns
    requests = []
    for number, layer in enumerate(layers):
        for side, suffix, rows in (("keys", b"_pk", layer.keys), ("values", b"_pv", layer.values)):
            if rows is None:
                continue
            data = as_bytes(rows)
            if not tokens or len(data) % tokens or not len(data):
                raise ValueError(f"layer {number}: {len(data)} bytes of {side} are not {tokens} rows")
            row_bytes = len(data) // tokens
            step = max(1, STORE_BYTES // row_bytes)
            for start in range(0, tokens, step):
                end = min(start + step, tokens)
                part = data[start * row_bytes : end * row_bytes]
                args = _store_args(name + suffix, number, start, end - start, part, as_)
                requests.append(write(to.word("OK"), *args))
    return requests


def prefix_lookup(ns: Name, tokens: int | None, prefill_ms: float | None, wait_ms: int | None) -> Request[bool]:
    args: list[Argument] = ["KV.PREFIX.LOOKUP", ns]
    if tokens is not None:
        args += ["TOKENS", tokens]
    if prefill_ms is not None:
        args += ["PREFILL_MS", prefill_ms]
    if wait_ms:
        args += ["WAIT", wait_ms]
    return read(to.hit, *args, wait_s=(wait_ms or 0) / 1000)


def _fetch(
    convert: Callable[[object], T], ns: Name, start: int | None, end: int | None, as_: Wire, sink: Sink
) -> Call[T]:
    args: tuple[Argument, ...] = "KV.PREFIX.FETCH", ns
    if (start is None) != (end is None):
        raise ValueError("a range needs both start and end")
    span: bytes | None = binary.WHOLE_PREFIX
    if start is not None and end is not None:
        args = *args, "RANGE", start, end
        # Both 0 mean the whole prefix on the binary lane, and no rows here.
        span = binary.packed_numbers(start, end) if start or end else None
    meta = binary.joined(binary.packed_name(ns), span, binary.packed_wire(as_))
    args = *args, "AS", as_
    return either(convert, args, binary.PREFIX_FETCH, meta, parts=binary.sized, reads=True, sink=sink)


def prefix_fetch(ns: Name, start: int | None, end: int | None, as_: Wire) -> Call[list[Rows]]:
    return _fetch(to.flat_list(as_), ns, start, end, as_, FreshArrays())


def prefix_fetch_into(
    ns: Name, receive: Receive, done: Done | None, start: int | None, end: int | None, as_: Wire
) -> Call[int]:
    to.wire_type(as_)
    return _fetch(to.bulk_count(None), ns, start, end, as_, CallerMemory(receive, done))


def prefix_match(hashes: Hashes, size: int | None, within: Name | None) -> Request[Match | None]:
    table = to.hash_blob(hashes)
    args: list[Argument] = ["KV.PREFIX.MATCH", len(table) // 8, table]
    if size is not None:
        args += ["SIZE", size]
    if within is not None:
        args += ["IN", within]
    return read(to.match, *args)


def prefix_meta(ns: Name) -> Request[bytes | None]:
    return read(to.bulk_or_none, "KV.PREFIX.META", ns)


def prefix_chain(ns: Name) -> Request[list[Segment] | None]:
    return read(to.chain, "KV.PREFIX.CHAIN", ns)


def prefix_ttl(ns: Name) -> Request[int]:
    return read(to.integer, "KV.PREFIX.TTL", ns)


def prefix_flag(word: str, ns: Name) -> Request[bool]:
    """PERSIST, PIN or UNPIN."""
    return write(to.flag, f"KV.PREFIX.{word}", ns)


def prefix_drop(namespaces: Sequence[Name], cascade: bool) -> Request[int]:
    return write(to.integer, "KV.PREFIX.DROP", *(["CASCADE"] if cascade else []), *namespaces)


def prefix_blocks(ns: Name) -> Request[Blocks | None]:
    return read(to.blocks, "KV.PREFIX.BLOCKS", ns)


def prefix_membership(ns: Name, hashes: Hashes) -> Request[np.ndarray[tuple[int], np.dtype[np.bool_]] | None]:
    table = to.hash_blob(hashes)
    count = len(table) // 8
    return read(to.bitmap(count), "KV.PREFIX.MEMBERSHIP", ns, count, table)


def prefix_info() -> Request[dict[str, str]]:
    return read(to.info, "KV.PREFIX.INFO")
