"""The Trio client. Its methods are described in `pion.client.client`; a test keeps both in step."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import trio

from pion.client import commands
from pion.client.aio.attend import AttendMethods
from pion.client.aio.lines import Lines
from pion.client.limits import MAX_REPLY_BYTES
from pion.client.packing import Argument
from pion.client.records import (
    Blocks,
    Done,
    Hashes,
    LaneChoice,
    Layer,
    Match,
    Name,
    Receive,
    Registered,
    Rows,
    Segment,
    SessionInfo,
    Stored,
    Wire,
)
from pion.client.requests import Call
from pion.client.settings import Settings

T = TypeVar("T")


class PionClient(AttendMethods):
    """`pion.client.PionClient` for Trio, with the same arguments. Use it from one event loop; tasks may share it.

    Cancellation, for every method: a call that is cancelled while it waits for its turn has no effect. One that is
    cancelled later closes the connection, because a reply may be on its way, and the next call opens a new one; a write
    that was cancelled may or may not have been applied.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 1974,
        *,
        username: str | None = None,
        password: str | None = None,
        unix: str | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float | None = 30,
        retries: int = 3,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        receive_buffer_bytes: int | None = None,
        lane: LaneChoice = "auto",
    ) -> None:
        self._settings = Settings(
            host=host,
            port=port,
            username=username,
            password=password,
            unix=unix,
            tls=tls,
            timeout_s=timeout_s,
            retries=retries,
            max_reply_bytes=max_reply_bytes,
            receive_buffer_bytes=receive_buffer_bytes,
            lane=lane,
        )
        self._lines = Lines(self._settings)

    async def __aenter__(self) -> PionClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"aio.PionClient({self._settings.where})"

    def close(self) -> None:
        """Close the connections. A later call opens a new one."""
        self._lines.close()

    # Any command

    async def execute(self, *args: Argument) -> object:
        """Send one command and return its reply."""
        return await self._call(commands.generic(args))

    async def pipeline(self, requests: Sequence[Sequence[Argument]]) -> list[object]:
        """Send many commands in one go and return all replies in order; an error reply is a value in the list."""
        return await self._lines.pipeline([commands.generic(args) for args in requests])

    # Server

    async def ping(self) -> float:
        """Round trip time in seconds."""
        start = trio.current_time()
        await self._call(commands.ping())
        return trio.current_time() - start

    async def info(self, section: str = "") -> dict[str, str]:
        """INFO as field -> text."""
        return await self._call(commands.info(section))

    async def stats(self) -> dict[str, int | float]:
        """PION.STATS: the value receipt."""
        return await self._call(commands.stats())

    async def stats_reset(self) -> None:
        """Set the receipt's counters to zero."""
        await self._call(commands.stats_reset())

    # V-store

    async def v_create(
        self, sid: Name, dim: int | None = None, fmt: str | None = None, *, schema: str | None = None
    ) -> None:
        """Create a session of one format and width, or of a schema (`"fp16@512*2,int8@512*12"`)."""
        await self._call(commands.v_create(sid, dim, fmt, schema))

    async def v_store_batch(
        self, sid: Name, layer: int, start: int, count: int, rows: object, *, as_: Wire = "fp32"
    ) -> None:
        """Store `count` rows from token `start` on; `rows` is a C-contiguous buffer, sent without a copy."""
        await self._call(commands.v_store_batch(sid, layer, start, count, rows, as_))

    async def v_store(self, sid: Name, layer: int, token: int, row: object, *, as_: Wire = "fp32") -> None:
        """Store one row."""
        await self._call(commands.v_store(sid, layer, token, row, as_))

    async def v_fetch(self, sid: Name, layer: int, start: int, end: int, *, as_: Wire = "fp32") -> Rows:
        """Rows `start` to `end` (half-open), shape (end - start, values); for `native` (end - start, row bytes)."""
        return await self._call(commands.v_fetch(sid, layer, start, end, as_))

    async def v_fetch_ids(self, sid: Name, layer: int, ids: Sequence[int], *, as_: Wire = "fp32") -> Rows:
        """The named rows in that order, shape (len(ids), values)."""
        return await self._call(commands.v_fetch_ids(sid, layer, ids, as_))

    async def v_fetch_batch(
        self, sid: Name, ranges: Sequence[tuple[int, int, int]], *, as_: Wire = "fp32"
    ) -> list[Rows]:
        """Several (layer, start, end) of one session in one round trip and one atomic view."""
        return await self._call(commands.v_fetch_batch(sid, ranges, as_))

    async def v_fetch_batch_into(
        self,
        sid: Name,
        ranges: Sequence[tuple[int, int, int]],
        receive: Receive,
        done: Done | None = None,
        *,
        as_: Wire = "native",
    ) -> int:
        """As `v_fetch_batch`, into the caller's memory (see `prefix_fetch_into`); returns the number of bulks."""
        return await self._call(commands.v_fetch_batch_into(sid, ranges, receive, done, as_))

    async def v_drop(self, *sids: Name) -> int:
        """Drop sessions; how many there were."""
        return await self._call(commands.v_drop(sids))

    async def v_info(self, sid: Name) -> SessionInfo:
        """Shape and size of one session."""
        return await self._call(commands.v_info(sid))

    def v_list(self, *, match: Name | None = None, count: int | None = None) -> AsyncIterator[bytes]:
        """All session names, asked for page by page; one that is there throughout is named once at least."""
        return self._scan("V.LIST", match, count)

    # Prefixes

    async def prefix_register(
        self,
        ns: Name,
        kv_dim: int,
        fmt: str = "fp16",
        *,
        blocks: tuple[int, Hashes] | None = None,
        prefill_ms: float | None = None,
        layers: int | None = None,
        tokens: int | None = None,
        states: int | None = None,
        meta: object | None = None,
        parent: tuple[Name, int] | None = None,
        ex_s: int | None = None,
        pin: bool = False,
    ) -> Registered:
        """Register a namespace whose layers all have one format and width."""
        options = commands.register_options(blocks, prefill_ms, layers, tokens, states, meta, parent, ex_s, pin)
        return await self._call(commands.prefix_register(ns, kv_dim, fmt, options))

    async def prefix_register_schema(
        self,
        ns: Name,
        k_runs: str,
        v_runs: str,
        *,
        blocks: tuple[int, Hashes] | None = None,
        prefill_ms: float | None = None,
        layers: int | None = None,
        tokens: int | None = None,
        states: int | None = None,
        meta: object | None = None,
        parent: tuple[Name, int] | None = None,
        ex_s: int | None = None,
        pin: bool = False,
    ) -> Registered:
        """Register a namespace with formats and widths per layer and side; options as in `prefix_register`."""
        options = commands.register_options(blocks, prefill_ms, layers, tokens, states, meta, parent, ex_s, pin)
        return await self._call(commands.prefix_register_schema(ns, k_runs, v_runs, options))

    async def store_prefix(
        self,
        ns: Name,
        k_runs: str,
        v_runs: str,
        layers: Sequence[Layer],
        tokens: int,
        *,
        as_: Wire = "native",
        blocks: tuple[int, Hashes] | None = None,
        prefill_ms: float | None = None,
        meta: object | None = None,
        parent: tuple[Name, int] | None = None,
        ex_s: int | None = None,
        pin: bool = False,
    ) -> Stored:
        """Register a declared prefix and store all its rows: REGISTER, then every V.STOREBATCH in one pipeline."""
        options = commands.register_options(blocks, prefill_ms, len(layers), tokens, None, meta, parent, ex_s, pin)
        return await self._lines.store(
            commands.prefix_register_schema(ns, k_runs, v_runs, options),
            commands.prefix_stores(ns, layers, tokens, as_),
        )

    async def prefix_lookup(
        self, ns: Name, *, tokens: int | None = None, prefill_ms: float | None = None, wait_ms: int | None = None
    ) -> bool:
        """Is the prefix there? Counts a hit or a miss in the receipt."""
        request = commands.prefix_lookup(ns, tokens, prefill_ms, wait_ms)
        return await (self._lines.call_apart(request) if wait_ms else self._call(request))

    async def prefix_fetch(
        self, ns: Name, *, start: int | None = None, end: int | None = None, as_: Wire = "native"
    ) -> list[Rows]:
        """The whole prefix, ancestors included, in one round trip: `[k0, v0, k1, v1, ...]`."""
        return await self._call(commands.prefix_fetch(ns, start, end, as_))

    async def prefix_fetch_into(
        self,
        ns: Name,
        receive: Receive,
        done: Done | None = None,
        *,
        start: int | None = None,
        end: int | None = None,
        as_: Wire = "native",
    ) -> int:
        """The whole prefix in one round trip, received straight into the caller's memory."""
        return await self._call(commands.prefix_fetch_into(ns, receive, done, start, end, as_))

    async def prefix_match(
        self, hashes: Hashes, *, size: int | None = None, within: Name | None = None
    ) -> Match | None:
        """The longest stored prefix whose block hashes are the first of these, or None."""
        return await self._call(commands.prefix_match(hashes, size, within))

    async def prefix_meta(self, ns: Name) -> bytes | None:
        """The META blob, or None if there is none."""
        return await self._call(commands.prefix_meta(ns))

    async def prefix_chain(self, ns: Name) -> list[Segment] | None:
        """The segments of a chain, from the root to `ns`; None if it isn't there or isn't complete yet."""
        return await self._call(commands.prefix_chain(ns))

    async def prefix_ttl(self, ns: Name) -> int:
        """Seconds to live; -1: never expires; -2: not there."""
        return await self._call(commands.prefix_ttl(ns))

    async def prefix_persist(self, ns: Name) -> bool:
        """Take the expiry away; whether there was one."""
        return await self._call(commands.prefix_flag("PERSIST", ns))

    async def prefix_pin(self, ns: Name) -> bool:
        """Keep from eviction; whether that changed anything."""
        return await self._call(commands.prefix_flag("PIN", ns))

    async def prefix_unpin(self, ns: Name) -> bool:
        """Allow eviction again; whether that changed anything."""
        return await self._call(commands.prefix_flag("UNPIN", ns))

    def prefix_list(self, *, match: Name | None = None, count: int | None = None) -> AsyncIterator[bytes]:
        """All namespaces, asked for page by page; one that is there throughout is named once at least."""
        return self._scan("KV.PREFIX.LIST", match, count)

    async def prefix_drop(self, *namespaces: Name, cascade: bool = False) -> int:
        """Drop prefixes; how many there were. With `cascade` their children too."""
        return await self._call(commands.prefix_drop(namespaces, cascade))

    async def prefix_blocks(self, ns: Name) -> Blocks | None:
        """The registered block hashes, or None."""
        return await self._call(commands.prefix_blocks(ns))

    async def prefix_membership(self, ns: Name, hashes: Hashes) -> npt.NDArray[np.bool_] | None:
        """For each hash, whether it is in the namespace's table; None if it has none."""
        return await self._call(commands.prefix_membership(ns, hashes))

    async def prefix_info(self) -> dict[str, str]:
        """KV.PREFIX.INFO as field -> text."""
        return await self._call(commands.prefix_info())

    async def _call(self, request: Call[T]) -> T:
        return await self._lines.call(request)

    async def _scan(self, command: str, match: Name | None, count: int | None) -> AsyncIterator[bytes]:
        cursor: bytes | None = b"0"
        while cursor is not None:
            cursor, names = await self._call(commands.listing(command, cursor, match, count))
            for name in names:
                yield name
