"""Every command as a `Request`: its bytes, how its reply becomes a result, and whether it may be repeated.

Pure, and shared by the synchronous and the Trio client.
"""

# ruff: noqa: D103  The commands are described where they are called, in `pion.client.client`.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import attrs
import numpy as np

from pion.client import converters as to
from pion.client.limits import STORE_BYTES
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
from pion.client.sinks import CallerMemory, FreshArrays

T = TypeVar("T")

Sink = FreshArrays | CallerMemory


@attrs.frozen(eq=False)
class Request(Generic[T]):
    """One command, ready to send."""

    name: str
    buffers: list[Buffer] = attrs.field(repr=False)
    """The bytes, which may hold a password."""
    convert: Callable[[object], T]
    """Makes the result of the reply, or raises `BadReplyError`. Never sees an error reply."""
    reads: bool = False
    """Changes nothing, so it may be sent again when the connection was lost."""
    wait_s: float = 0.0
    """How long the server itself may wait before it answers."""
    sink: Sink | None = None

    @property
    def repeatable(self) -> bool:
        """May be sent again now."""
        return self.reads and (self.sink is None or self.sink.reusable)


def _read(convert: Callable[[object], T], *args: Argument, sink: Sink | None = None, wait_s: float = 0) -> Request[T]:
    return Request(str(args[0]), pack(args), convert, True, wait_s, sink)


def _write(convert: Callable[[object], T], *args: Argument) -> Request[T]:
    return Request(str(args[0]), pack(args), convert)


def generic(args: Sequence[Argument]) -> Request[object]:
    """Any command; nobody knows whether it only reads, so it is never repeated."""
    if not args:
        raise ValueError("a command needs a name")
    name = bytes(argument(args[0])[:64]).decode(errors="replace")
    return Request(name, pack(args), to.anything)


def ping() -> Request[None]:
    return _read(to.word("PONG"), "PING")


def info(section: str) -> Request[dict[str, str]]:
    return _read(to.info, "INFO", *([section] if section else []))


def stats() -> Request[dict[str, int | float]]:
    return _read(to.numbers, "PION.STATS")


def stats_reset() -> Request[None]:
    return _write(to.word("OK"), "PION.STATS", "RESET")


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
    return _write(to.word("OK"), *args)


def v_store_batch(sid: Name, layer: int, start: int, count: int, rows: object, as_: Wire) -> Request[None]:
    return _write(to.word("OK"), "V.STOREBATCH", sid, layer, start, count, "AS", as_, as_bytes(rows))


def v_store(sid: Name, layer: int, token: int, row: object, as_: Wire) -> Request[None]:
    return _write(to.word("OK"), "V.STORE", sid, layer, token, "AS", as_, as_bytes(row))


def v_fetch(sid: Name, layer: int, start: int, end: int, as_: Wire) -> Request[Rows]:
    convert = to.rows(as_, end - start)
    return _read(convert, "V.FETCH", sid, layer, "RANGE", start, end, "AS", as_, sink=FreshArrays())


def v_fetch_ids(sid: Name, layer: int, ids: Sequence[int], as_: Wire) -> Request[Rows]:
    if not len(ids):
        raise ValueError("name at least one row")
    return _read(to.rows(as_, len(ids)), "V.FETCH", sid, layer, *ids, "AS", as_, sink=FreshArrays())


def _batch(sid: Name, ranges: Sequence[tuple[int, int, int]], as_: Wire) -> list[Argument]:
    numbers = [number for entry in ranges for number in entry]
    return ["V.FETCH", sid, "BATCH", len(ranges), *numbers, "AS", as_]


def v_fetch_batch(sid: Name, ranges: Sequence[tuple[int, int, int]], as_: Wire) -> Request[list[Rows]]:
    counts = [end - start for _, start, end in ranges]
    return _read(to.row_list(as_, counts), *_batch(sid, ranges, as_), sink=FreshArrays())


def v_fetch_batch_into(
    sid: Name, ranges: Sequence[tuple[int, int, int]], receive: Receive, done: Done | None, as_: Wire
) -> Request[int]:
    return _read(to.bulk_count(len(ranges)), *_batch(sid, ranges, as_), sink=CallerMemory(receive, done))


def v_drop(sids: Sequence[Name]) -> Request[int]:
    return _write(to.integer, "V.DROP", *sids)


def v_info(sid: Name) -> Request[SessionInfo]:
    return _read(to.session_info, "V.INFO", sid)


def listing(
    command: str, cursor: bytes, match: Name | None, count: int | None
) -> Request[tuple[bytes | None, list[bytes]]]:
    """One page of V.LIST or KV.PREFIX.LIST: the next cursor (None after the last page) and names."""
    args: list[Argument] = [command, "CURSOR", cursor]
    if match is not None:
        args += ["MATCH", match]
    if count is not None:
        args += ["COUNT", count]
    return _read(to.page, *args)


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
    return _write(to.registered, "KV.PREFIX.REGISTER", ns, kv_dim, fmt, *options)


def prefix_register_schema(ns: Name, k_runs: str, v_runs: str, options: Sequence[Argument]) -> Request[Registered]:
    return _write(to.registered, "KV.PREFIX.REGISTER.SCHEMA", ns, "K", k_runs, "V", v_runs, *options)


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
                requests.append(v_store_batch(name + suffix, number, start, end - start, part, as_))
    return requests


def prefix_lookup(ns: Name, tokens: int | None, prefill_ms: float | None, wait_ms: int | None) -> Request[bool]:
    args: list[Argument] = ["KV.PREFIX.LOOKUP", ns]
    if tokens is not None:
        args += ["TOKENS", tokens]
    if prefill_ms is not None:
        args += ["PREFILL_MS", prefill_ms]
    if wait_ms:
        args += ["WAIT", wait_ms]
    return _read(to.hit, *args, wait_s=(wait_ms or 0) / 1000)


def _fetch(ns: Name, start: int | None, end: int | None, as_: Wire) -> list[Argument]:
    args: list[Argument] = ["KV.PREFIX.FETCH", ns]
    if (start is None) != (end is None):
        raise ValueError("a range needs both start and end")
    if start is not None:
        args += ["RANGE", start, end]
    return [*args, "AS", as_]


def prefix_fetch(ns: Name, start: int | None, end: int | None, as_: Wire) -> Request[list[Rows]]:
    return _read(to.flat_list(as_), *_fetch(ns, start, end, as_), sink=FreshArrays())


def prefix_fetch_into(
    ns: Name, receive: Receive, done: Done | None, start: int | None, end: int | None, as_: Wire
) -> Request[int]:
    return _read(to.bulk_count(None), *_fetch(ns, start, end, as_), sink=CallerMemory(receive, done))


def prefix_match(hashes: Hashes, size: int | None, within: Name | None) -> Request[Match | None]:
    table = to.hash_blob(hashes)
    args: list[Argument] = ["KV.PREFIX.MATCH", len(table) // 8, table]
    if size is not None:
        args += ["SIZE", size]
    if within is not None:
        args += ["IN", within]
    return _read(to.match, *args)


def prefix_meta(ns: Name) -> Request[bytes | None]:
    return _read(to.bulk_or_none, "KV.PREFIX.META", ns)


def prefix_chain(ns: Name) -> Request[list[Segment] | None]:
    return _read(to.chain, "KV.PREFIX.CHAIN", ns)


def prefix_ttl(ns: Name) -> Request[int]:
    return _read(to.integer, "KV.PREFIX.TTL", ns)


def prefix_flag(word: str, ns: Name) -> Request[bool]:
    """PERSIST, PIN or UNPIN."""
    return _write(to.flag, f"KV.PREFIX.{word}", ns)


def prefix_drop(namespaces: Sequence[Name], cascade: bool) -> Request[int]:
    return _write(to.integer, "KV.PREFIX.DROP", *(["CASCADE"] if cascade else []), *namespaces)


def prefix_blocks(ns: Name) -> Request[Blocks | None]:
    return _read(to.blocks, "KV.PREFIX.BLOCKS", ns)


def prefix_membership(ns: Name, hashes: Hashes) -> Request[np.ndarray[tuple[int], np.dtype[np.bool_]] | None]:
    table = to.hash_blob(hashes)
    count = len(table) // 8
    return _read(to.bitmap(count), "KV.PREFIX.MEMBERSHIP", ns, count, table)


def prefix_info() -> Request[dict[str, str]]:
    return _read(to.info, "KV.PREFIX.INFO")
