"""The synchronous client."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pion.client import commands
from pion.client.attend import AttendMethods
from pion.client.limits import MAX_REPLY_BYTES
from pion.client.lines import Lines
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
    """A connection to a Pion server, opened at the first call and opened again when it was lost.

    Thread-safe: calls from several threads take turns on one connection. A `prefix_lookup` that waits uses a connection
    of its own, so that it doesn't hold up the thread that fills the prefix. Fork-safe: a child opens its own.

    Args:
        host, port: where the server listens.
        username, password: sent with HELLO; the user is "default" when only a password is given.
        unix: path of a Unix socket, used instead of host and port.
        tls: reserved; anything but None raises `NotImplementedError`.
        timeout_s: longest silence (no byte sent or received) in one call, seconds; None waits for ever. A `wait_ms` is
            added to it.
        retries: how many more times a call that only reads is tried when the connection was lost, with growing pauses
            between. A write is never sent twice; it waits in the same way for a connection that can't be made.
        max_reply_bytes: a longer reply is refused before memory is taken for it.
        receive_buffer_bytes: SO_RCVBUF; None leaves it to the kernel, which adapts it.
        lane: "auto" sends rows and queries over a second connection, on the server's binary lane: it asks for its port
            when the first such call is made, and uses RESP where there is none. "resp" never asks; "binary" raises
            `ConnectFailedError` for such a call when there is none. A Unix socket carries RESP only. What `execute`
            says about the connection (CLIENT NO-TOUCH, MULTI) holds for the RESP one.

    Every method raises the errors of `pion.client.errors`: a `ServerError` when the server refuses (the connection
    stays usable), a `TransportError` when the exchange did not complete (the connection is closed, the next call opens
    a new one). No method ever returns part of a reply.
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

    @property
    def deadline_s(self) -> float | None:
        """Longest time for one whole exchange, in seconds; None, the default, for no limit.

        `timeout_s` ends a silence only: a server that sends a byte now and then is never silent. What comes after the
        deadline raises `ReplyTimeoutError`. A `wait_ms` is added to it. It may be set between calls, and holds for
        those that begin afterwards. (With Trio use `trio.fail_after`.)
        """
        return self._lines.deadline_s

    @deadline_s.setter
    def deadline_s(self, value: float | None) -> None:
        if value is not None and not value > 0:
            raise ValueError(f"deadline_s must be over 0, not {value!r}")
        self._lines.deadline_s = value

    def __enter__(self) -> PionClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PionClient({self._settings.where})"

    def close(self) -> None:
        """Close the connections. A later call opens a new one."""
        self._lines.close()

    # Any command

    def execute(self, *args: Argument) -> object:
        """Send one command and return its reply.

        Simple strings come as `str`, bulk strings as `bytes`, arrays as `list`, maps as `dict`, null as None. An error
        is raised; one inside an array is a value. It counts as a write, so it is never repeated.
        """
        return self._call(commands.generic(args))

    def pipeline(self, requests: Sequence[Sequence[Argument]]) -> list[object]:
        """Send many commands in one go and return all replies in order; an error reply is a value in the list.

        Replies are read while the rest is being sent, so a pipeline of any size can't lock up. Never repeated.
        """
        return self._lines.pipeline([commands.generic(args) for args in requests])

    # Server

    def ping(self) -> float:
        """Round trip time in seconds."""
        start = time.perf_counter()
        self._call(commands.ping())
        return time.perf_counter() - start

    def info(self, section: str = "") -> dict[str, str]:
        """INFO as field -> text."""
        return self._call(commands.info(section))

    def stats(self) -> dict[str, int | float]:
        """PION.STATS: the value receipt."""
        return self._call(commands.stats())

    def stats_reset(self) -> None:
        """Set the receipt's counters to zero."""
        self._call(commands.stats_reset())

    # V-store

    def v_create(self, sid: Name, dim: int | None = None, fmt: str | None = None, *, schema: str | None = None) -> None:
        """Create a session of one format and width, or of a schema (`"fp16@512*2,int8@512*12"`)."""
        self._call(commands.v_create(sid, dim, fmt, schema))

    def v_store_batch(self, sid: Name, layer: int, start: int, count: int, rows: object, *, as_: Wire = "fp32") -> None:
        """Store `count` rows from token `start` on; `rows` is a C-contiguous buffer, sent without a copy."""
        self._call(commands.v_store_batch(sid, layer, start, count, rows, as_))

    def v_store(self, sid: Name, layer: int, token: int, row: object, *, as_: Wire = "fp32") -> None:
        """Store one row."""
        self._call(commands.v_store(sid, layer, token, row, as_))

    def v_fetch(self, sid: Name, layer: int, start: int, end: int, *, as_: Wire = "fp32") -> Rows:
        """Rows `start` to `end` (half-open), shape (end - start, values); for `native` (end - start, row bytes)."""
        return self._call(commands.v_fetch(sid, layer, start, end, as_))

    def v_fetch_ids(self, sid: Name, layer: int, ids: Sequence[int], *, as_: Wire = "fp32") -> Rows:
        """The named rows in that order, shape (len(ids), values)."""
        return self._call(commands.v_fetch_ids(sid, layer, ids, as_))

    def v_fetch_batch(self, sid: Name, ranges: Sequence[tuple[int, int, int]], *, as_: Wire = "fp32") -> list[Rows]:
        """Several (layer, start, end) of one session in one round trip and one atomic view."""
        return self._call(commands.v_fetch_batch(sid, ranges, as_))

    def v_fetch_batch_into(
        self,
        sid: Name,
        ranges: Sequence[tuple[int, int, int]],
        receive: Receive,
        done: Done | None = None,
        *,
        as_: Wire = "native",
    ) -> int:
        """As `v_fetch_batch`, into the caller's memory (see `prefix_fetch_into`); returns the number of bulks."""
        return self._call(commands.v_fetch_batch_into(sid, ranges, receive, done, as_))

    def v_drop(self, *sids: Name) -> int:
        """Drop sessions; how many there were."""
        return self._call(commands.v_drop(sids))

    def v_info(self, sid: Name) -> SessionInfo:
        """Shape and size of one session."""
        return self._call(commands.v_info(sid))

    def v_list(self, *, match: Name | None = None, count: int | None = None) -> Iterator[bytes]:
        """All session names, asked for page by page; one that is there throughout is named once at least."""
        return self._scan("V.LIST", match, count)

    # Prefixes

    def prefix_register(
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
        """Register a namespace whose layers all have one format and width.

        Args:
            ns: the namespace.
            kv_dim: values in one row of one side.
            fmt: the stored format.
            blocks: (tokens per block, hashes).
            prefill_ms: measured cold prefill time, credited at each hit.
            layers, tokens, states: declare the prefix: it becomes visible when all of it is stored, and until then
                belongs to this connection.
            meta: a blob that `prefix_meta` gives back.
            parent: (namespace, offset) of the segment this one continues.
            ex_s: expiry in seconds.
            pin: never evict.
        """
        options = commands.register_options(blocks, prefill_ms, layers, tokens, states, meta, parent, ex_s, pin)
        return self._call(commands.prefix_register(ns, kv_dim, fmt, options))

    def prefix_register_schema(
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
        return self._call(commands.prefix_register_schema(ns, k_runs, v_runs, options))

    def store_prefix(
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
        """Register a declared prefix and store all its rows: REGISTER, then every V.STOREBATCH in one pipeline.

        Args:
            ns: the namespace.
            k_runs, v_runs: formats and widths per side, `"fp32@192*30"`.
            layers: per layer the K and V rows, `tokens` each, in the form `as_` names; sent without a copy, so they
                must not change until the call returns. A side of width 0 is None.
            tokens: rows per layer and side.
            as_: the form the rows are in.
            blocks, prefill_ms, meta, parent, ex_s, pin: as in `prefix_register`.

        Raises the first error the server gives; what was not sent by then is not sent, and the half-filled prefix,
        which nobody could see, is dropped by closing the connection.
        """
        options = commands.register_options(blocks, prefill_ms, len(layers), tokens, None, meta, parent, ex_s, pin)
        return self._lines.store(
            commands.prefix_register_schema(ns, k_runs, v_runs, options),
            commands.prefix_stores(ns, layers, tokens, as_),
        )

    def prefix_lookup(
        self, ns: Name, *, tokens: int | None = None, prefill_ms: float | None = None, wait_ms: int | None = None
    ) -> bool:
        """Is the prefix there? Counts a hit or a miss in the receipt.

        Args:
            ns: the namespace.
            tokens: tokens really restored, credited instead of the namespace's own count.
            prefill_ms: the measured cold prefill of that restore.
            wait_ms: wait this long for a prefix that another connection is filling. Uses a connection of its own.

        It only reads, and is repeated when the connection was lost; the lost try may have been counted.
        """
        request = commands.prefix_lookup(ns, tokens, prefill_ms, wait_ms)
        return self._lines.call_apart(request) if wait_ms else self._call(request)

    def prefix_fetch(
        self, ns: Name, *, start: int | None = None, end: int | None = None, as_: Wire = "native"
    ) -> list[Rows]:
        """The whole prefix, ancestors included, in one round trip: `[k0, v0, k1, v1, ...]`.

        Each is one axis in fresh memory: uint8 for `native`, float32, float16, or uint16 for `bf16`. Parts of a large
        prefix may lie in one piece of memory, which goes with the last of them.
        """
        return self._call(commands.prefix_fetch(ns, start, end, as_))

    def prefix_fetch_into(
        self,
        ns: Name,
        receive: Receive,
        done: Done | None = None,
        *,
        start: int | None = None,
        end: int | None = None,
        as_: Wire = "native",
    ) -> int:
        """The whole prefix in one round trip, received straight into the caller's memory.

        Bulk `2 * layer` is K, `2 * layer + 1` is V. For each bulk in order `receive(index, nbytes)` says where it goes
        and `done(index)` is told when it is there, while the kernel goes on receiving. One buffer may serve for all:

            scratch = np.empty(largest, np.uint8)
            client.prefix_fetch_into(ns, lambda i, n: scratch.data[:n], lambda i: copy_out(i, scratch))

        Returns the number of bulks. If it raises, whatever was received must be thrown away. An exception of a callback
        ends the exchange, closes the connection and is raised as it is. It is repeated after a lost connection only
        while no callback has run.
        """
        return self._call(commands.prefix_fetch_into(ns, receive, done, start, end, as_))

    def prefix_match(self, hashes: Hashes, *, size: int | None = None, within: Name | None = None) -> Match | None:
        """The longest stored prefix whose block hashes are the first of these, or None.

        `size`: tokens per block; `within`: only namespaces that start with this.
        """
        return self._call(commands.prefix_match(hashes, size, within))

    def prefix_meta(self, ns: Name) -> bytes | None:
        """The META blob, or None if there is none."""
        return self._call(commands.prefix_meta(ns))

    def prefix_chain(self, ns: Name) -> list[Segment] | None:
        """The segments of a chain, from the root to `ns`; None if it isn't there or isn't complete yet."""
        return self._call(commands.prefix_chain(ns))

    def prefix_ttl(self, ns: Name) -> int:
        """Seconds to live; -1: never expires; -2: not there."""
        return self._call(commands.prefix_ttl(ns))

    def prefix_persist(self, ns: Name) -> bool:
        """Take the expiry away; whether there was one."""
        return self._call(commands.prefix_flag("PERSIST", ns))

    def prefix_pin(self, ns: Name) -> bool:
        """Keep from eviction; whether that changed anything."""
        return self._call(commands.prefix_flag("PIN", ns))

    def prefix_unpin(self, ns: Name) -> bool:
        """Allow eviction again; whether that changed anything."""
        return self._call(commands.prefix_flag("UNPIN", ns))

    def prefix_list(self, *, match: Name | None = None, count: int | None = None) -> Iterator[bytes]:
        """All namespaces, asked for page by page; one that is there throughout is named once at least."""
        return self._scan("KV.PREFIX.LIST", match, count)

    def prefix_drop(self, *namespaces: Name, cascade: bool = False) -> int:
        """Drop prefixes; how many there were. With `cascade` their children too."""
        return self._call(commands.prefix_drop(namespaces, cascade))

    def prefix_blocks(self, ns: Name) -> Blocks | None:
        """The registered block hashes, or None."""
        return self._call(commands.prefix_blocks(ns))

    def prefix_membership(self, ns: Name, hashes: Hashes) -> npt.NDArray[np.bool_] | None:
        """For each hash, whether it is in the namespace's table; None if it has none."""
        return self._call(commands.prefix_membership(ns, hashes))

    def prefix_info(self) -> dict[str, str]:
        """KV.PREFIX.INFO as field -> text."""
        return self._call(commands.prefix_info())

    def _call(self, request: Call[T]) -> T:
        return self._lines.call(request)

    def _scan(self, command: str, match: Name | None, count: int | None) -> Iterator[bytes]:
        cursor: bytes | None = b"0"
        while cursor is not None:
            cursor, names = self._call(commands.listing(command, cursor, match, count))
            yield from names
