"""The KV.PREFIX commands that read: LOOKUP, FETCH, MATCH, META, CHAIN, BLOCKS, MEMBERSHIP."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np
import trio

from pion.args import MAX_ID, MAX_NAME_BYTES, Cursor, integer, name, number
from pion.command import Arg, ArgType, Command, Flag, KeySpec
from pion.commands.kvprefix_register import NS, PREFILL_MS_MAX, admission, check_prefill_ms, hash_blob
from pion.commands.vstore_common import AS_ARG, check_range, row_range, verified_to_send, within
from pion.context import Context
from pion.errors import CommandError
from pion.replies import Blob, Buffer, Reply, Simple, Stream
from pion.storage import reading
from pion.storage.formats import Wire, parse_wire
from pion.storage.hashes import Membership
from pion.storage.schema import LayerSpec
from pion.storage.unit import SIDES, Unit

HIT: Final = Simple("HIT")
MISS: Final = Simple("MISS")
UNKNOWN: Final = Simple("UNKNOWN")

BUILD_IN_THREAD_HASHES: Final = 10_000
"""Arranging more hashes than this for MEMBERSHIP leaves the event loop: it takes about a millisecond."""


async def lookup(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.LOOKUP <ns> [TOKENS <n>] [PREFILL_MS <ms>] [WAIT <ms>]."""
    ns = argv[1] if type(argv[1]) is bytes else name(argv[1], "namespace")
    tokens: int | None = None
    prefill_ms: float | None = None
    wait_ms = 0
    if len(argv) > 2:
        tokens, prefill_ms, wait_ms = _lookup_options(argv, context.services.config.max_wait_ms)
    return HIT if await look_up(context, ns, tokens, prefill_ms, wait_ms) else MISS


async def look_up(
    context: Context, ns: bytes, tokens: int | None = None, prefill_ms: float | None = None, wait_ms: int = 0
) -> bool:
    """Whether a prefix is there and complete; credits the hit with `tokens` and `prefill_ms`, or counts the miss.

    Waits up to `wait_ms` for a prefix that another connection is filling. Raises CommandError for a value out of its
    limits. Cancellation: while waiting, nothing is recorded.
    """
    services = context.services
    store, receipt = services.vstore, services.receipt
    if tokens is not None:
        within(tokens, "TOKENS", 0, MAX_ID)
    if prefill_ms is not None:
        check_prefill_ms(prefill_ms)
    within(wait_ms, "WAIT", 0, services.config.max_wait_ms)
    unit = store.visible(ns)
    if unit is None:
        name(ns, "namespace")
        if wait_ms and not context.session.in_exec:
            await _wait_pending(context, ns, wait_ms)
            unit = store.visible(ns)
        if unit is None:
            receipt.kvprefix_misses += 1
            if services.config.admission:
                admission(services).miss(ns)
            return False
    if not context.session.no_touch:
        if unit.parent is None:
            store.policy.touch(unit)
        else:
            store.touch(unit)
    declared = unit.declaration
    own = declared.tokens if declared is not None else unit.tokens
    if prefill_ms is None and (tokens is None or tokens == own):
        prefill_ms = unit.prefill_ms
    receipt.hit(own if tokens is None else tokens, prefill_ms)
    return True


def _lookup_options(argv: list[Buffer], max_wait_ms: int) -> tuple[int | None, float | None, int]:
    tokens: int | None = None
    prefill_ms: float | None = None
    wait_ms = 0
    cursor = Cursor(argv, 2, "KV.PREFIX.LOOKUP")
    while cursor:
        option = cursor.option()
        if option == b"TOKENS":
            tokens = integer(cursor.value("TOKENS"), "TOKENS")
        elif option == b"PREFILL_MS":
            prefill_ms = number(cursor.value("PREFILL_MS"), "PREFILL_MS", 0.0, PREFILL_MS_MAX)
        elif option == b"WAIT":
            wait_ms = integer(cursor.value("WAIT"), "WAIT", 0, max_wait_ms)
        else:
            raise cursor.unknown(option, "TOKENS, PREFILL_MS or WAIT")
    return tokens, prefill_ms, wait_ms


async def _wait_pending(context: Context, ns: bytes, wait_ms: int) -> None:
    """Until the pending prefix completes or is dropped, or the time is over; not for the connection that fills it.

    A server that stops and a client that sends no more end the wait, too: the answer is then what is known by now.
    """
    unit = context.services.vstore.any_prefix(ns)
    pending = unit.pending if unit is not None else None
    if pending is None or pending.owner == context.session.id:
        return
    woken = trio.Event()
    pending.waiters.append(woken.set)
    try:
        with trio.move_on_after(wait_ms / 1000):
            async with trio.open_nursery() as others:
                others.start_soon(_wake_after, context.services.draining.wait, woken)
                if context.session.peer_left is not None:
                    others.start_soon(_wake_after, context.session.peer_left, woken)
                await woken.wait()
                others.cancel_scope.cancel()
    finally:
        pending.forget(woken.set)


async def _wake_after(event: Callable[[], Awaitable[None]], woken: trio.Event) -> None:
    await event()
    woken.set()


async def fetch(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.FETCH <ns> [RANGE <s> <e>] [AS ..]."""
    ns = name(argv[1], "namespace")
    span, wire = _fetch_options(argv)
    return await fetch_prefix(context, ns, span, wire)


async def fetch_prefix(context: Context, ns: bytes, span: tuple[int, int] | None, wire: Wire) -> list[Blob | Stream]:
    """K and V of each layer in turn, [k0, v0, k1, v1, ...], for positions [span) of the whole text, None for all of it.

    All is as of one moment and in the wire's type. Raises CommandError if there is no such prefix, or it lacks rows or
    is damaged; nothing is counted then. Cancellation: nothing is counted.
    """
    if span is not None:
        check_range(*span)
    store = context.services.vstore
    while True:
        unit = store.prefix(ns)
        gathered, owned = _gather(unit, span)
        doubts = await verified_to_send(context, owned)
        if doubts is not None:
            break
    answer = reading.Answer(doubts)
    answers = [answer.part(spans, spec, wire) for spec, spans in gathered]
    if not context.session.no_touch:
        store.touch(unit)
    store.fetches += 1
    context.services.receipt.kvprefix_bytes_served += sum(answer.nbytes for answer in answers)
    return answers


_Owned = list[tuple[Unit, list[reading.Span]]]


def _gather(unit: Unit, span: tuple[int, int] | None) -> tuple[list[tuple[LayerSpec, list[reading.Span]]], _Owned]:
    """What a FETCH answers, layer by layer and side by side; and the same rows by the unit that holds them."""
    start, stop = span or (0, unit.end)
    layers = unit.layer_count if unit.declaration is not None else max(part.layer_count for part in unit.chain())
    if unit.declaration is not None and start < stop and stop > unit.end:
        raise CommandError(f"no row {unit.tokens} in layer 0")
    segments = reading.segments(unit, start, stop)
    parts = 2 * layers * max(1, len(segments))
    if parts > reading.FETCH_PARTS_MAX:
        raise CommandError(
            f"{layers} layers on two sides in {len(segments)} segments are {parts} parts, at most "
            f"{reading.FETCH_PARTS_MAX} in one reply; use a RANGE in fewer segments, or V.FETCH"
        )
    gathered: list[tuple[LayerSpec, list[reading.Span]]] = []
    owned: _Owned = []
    schemas = unit.k_schema, unit.v_schema
    for layer in range(layers):
        for side in SIDES:
            schema = schemas[side]
            assert schema is not None  # noqa: S101  a visible prefix has both sides
            spans: list[reading.Span] = []
            for owner, first, last in segments:
                own = reading.gather(owner, side, layer, first, last)
                owned.append((owner, own))
                spans += own
            gathered.append((schema.layer(layer), spans))
    return gathered, owned


def _fetch_options(argv: list[Buffer]) -> tuple[tuple[int, int] | None, Wire]:
    span: tuple[int, int] | None = None
    wire = Wire.FP32
    cursor = Cursor(argv, 2, "KV.PREFIX.FETCH")
    while cursor:
        option = cursor.option()
        if option == b"RANGE":
            span = row_range(cursor.value("RANGE start"), cursor.value("RANGE end"))
        elif option == b"AS":
            wire = parse_wire(cursor.value("AS type"))
        else:
            raise cursor.unknown(option, "RANGE or AS")
    return span, wire


async def match(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.MATCH <n> <hashes> [SIZE <s>] [IN <ns-prefix>]."""
    hashes = hash_blob(argv[1], argv[2])
    size: int | None = None
    within = b""
    cursor = Cursor(argv, 3, "KV.PREFIX.MATCH")
    while cursor:
        option = cursor.option()
        if option == b"SIZE":
            size = integer(cursor.value("SIZE"), "SIZE", 1, 2**32 - 1)
        elif option == b"IN":
            value = cursor.value("IN")
            if len(value) > MAX_NAME_BYTES:
                raise CommandError(f"IN must be at most {MAX_NAME_BYTES} bytes long, got {len(value)}")
            within = bytes(value)
        else:
            raise cursor.unknown(option, "SIZE or IN")
    found = context.services.vstore.match(hashes, size, within)
    if found is None:
        return None
    unit, blocks, block_size = found
    return [unit.name, blocks, blocks * block_size]


def _visible(context: Context, value: Buffer) -> Unit | None:
    return context.services.vstore.visible(name(value, "namespace"))


async def meta(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.META <ns>."""
    unit = _visible(context, argv[1])
    return None if unit is None else unit.meta


async def chain(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.CHAIN <ns>."""
    unit = _visible(context, argv[1])
    return None if unit is None else [[part.name, part.offset, part.tokens] for part in unit.chain()]


async def blocks(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.BLOCKS <ns>."""
    unit = _visible(context, argv[1])
    if unit is None or unit.table is None:
        return UNKNOWN
    own = unit.table.own
    head = struct.pack("<II", unit.table.block_size, len(own) // 8)
    return Blob((head, own), len(head) + len(own))


async def is_member(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.MEMBERSHIP <ns> <n> <hashes>."""
    ns = name(argv[1], "namespace")
    probes = np.frombuffer(hash_blob(argv[2], argv[3]), np.uint64)
    unit = context.services.vstore.visible(ns)
    table = unit.table if unit is not None else None
    if table is None:
        return UNKNOWN
    members = table.members
    if members is None:
        own = np.frombuffer(table.own, np.uint64)
        if own.size > BUILD_IN_THREAD_HASHES:
            members = await context.in_thread(Membership, own)
        else:
            members = Membership(own)
        if context.services.vstore.over(members.nbytes) <= 0:
            table.keep(members)
    return members.bitmap(probes)


_HASHES: Final = (
    Arg(name="count", type=ArgType.INTEGER, summary="number of hashes"),
    Arg(name="hashes", summary="count little-endian u64"),
)

COMMANDS: Final = (
    Command(
        name="KV.PREFIX.LOOKUP",
        arity=-2,
        summary="Say whether a prefix is there and complete; credit a hit in PION.STATS, count a miss for --admission",
        since="0.1.0",
        handler=lookup,
        flags=Flag.READONLY | Flag.FAST | Flag.BLOCKING,
        keys=KeySpec(1, 1),
        args=(
            NS,
            Arg(
                name="tokens",
                type=ArgType.INTEGER,
                token="TOKENS",
                optional=True,
                summary="tokens to credit instead of the prefix's own",
            ),
            Arg(
                name="prefill-ms",
                type=ArgType.DOUBLE,
                token="PREFILL_MS",
                optional=True,
                summary="measured prefill time to credit instead of the registered one",
            ),
            Arg(
                name="wait-ms",
                type=ArgType.INTEGER,
                token="WAIT",
                optional=True,
                summary="wait so long for a prefix that another connection is filling; not inside EXEC",
            ),
        ),
        reply="+HIT or +MISS",
        group="kvprefix",
        examples=("KV.PREFIX.LOOKUP app|llama|a", "KV.PREFIX.LOOKUP app|llama|b WAIT 5000"),
        errors=("-ERR unknown option; nothing is recorded then",),
    ),
    Command(
        name="KV.PREFIX.FETCH",
        arity=-2,
        summary="Fetch a whole prefix, ancestors included, as one atomic view",
        since="0.1.0",
        handler=fetch,
        flags=Flag.READONLY,
        keys=KeySpec(1, 1),
        args=(
            NS,
            Arg(
                name="range",
                type=ArgType.BLOCK,
                token="RANGE",
                optional=True,
                summary="positions in the whole text; all of it without",
                args=(Arg(name="start", type=ArgType.INTEGER), Arg(name="end", type=ArgType.INTEGER)),
            ),
            AS_ARG,
        ),
        reply="array [k0, v0, k1, v1, ...] of bulk strings",
        complexity="O(layers x segments), at most 16,384 parts; the bytes are sent without a copy unless converted",
        group="kvprefix",
        examples=("KV.PREFIX.FETCH app|llama|a AS native", "KV.PREFIX.FETCH app|llama|a RANGE 0 512 AS native"),
        errors=("-ERR no prefix '<ns>'", "-ERR no row <id> in layer <n>"),
    ),
    Command(
        name="KV.PREFIX.MATCH",
        arity=-3,
        summary="Find the stored prefix that shares the longest beginning with a list of block hashes",
        since="0.1.0",
        handler=match,
        flags=Flag.READONLY,
        args=(
            *_HASHES,
            Arg(
                name="size",
                type=ArgType.INTEGER,
                token="SIZE",
                optional=True,
                summary="tokens per block; without it every size is searched",
            ),
            Arg(name="ns-prefix", token="IN", optional=True, summary="only namespaces that start so"),
        ),
        reply="array: namespace, blocks shared, tokens shared; null if nothing is shared. Counts and touches nothing",
        complexity="O(log namespaces + hashes); with IN also up to 512 neighbours on each side and 512 names. If other "
        "names crowd the place beyond that, the answer may be a shorter match, or null",
        group="kvprefix",
        examples=("KV.PREFIX.MATCH 2 <16 bytes> SIZE 64 IN app|",),
        errors=("-ERR hashes must be <n> bytes",),
    ),
    Command(
        name="KV.PREFIX.META",
        arity=2,
        summary="The META blob of a prefix",
        since="0.1.0",
        handler=meta,
        flags=Flag.READONLY | Flag.FAST,
        keys=KeySpec(1, 1),
        args=(NS,),
        reply="bulk string; null if the prefix isn't there, isn't complete or has none",
        group="kvprefix",
        examples=("KV.PREFIX.META app|llama|a",),
    ),
    Command(
        name="KV.PREFIX.CHAIN",
        arity=2,
        summary="The segments that a prefix is made of",
        since="0.1.0",
        handler=chain,
        flags=Flag.READONLY,
        keys=KeySpec(1, 1),
        args=(NS,),
        reply="array of [namespace, offset, tokens] from the root to the prefix itself; null if it isn't there",
        complexity="O(segments)",
        group="kvprefix",
        examples=("KV.PREFIX.CHAIN app|llama|turn3",),
    ),
    Command(
        name="KV.PREFIX.BLOCKS",
        arity=2,
        summary="The block-hash table of a prefix",
        since="0.1.0",
        handler=blocks,
        flags=Flag.READONLY | Flag.FAST,
        keys=KeySpec(1, 1),
        args=(NS,),
        reply="bulk string: block size (u32 LE), count (u32 LE), count hashes (u64 LE); +UNKNOWN without a table",
        group="kvprefix",
        examples=("KV.PREFIX.BLOCKS app|llama|a",),
    ),
    Command(
        name="KV.PREFIX.MEMBERSHIP",
        arity=4,
        summary="Say which of some hashes are in the table of a prefix",
        since="0.1.0",
        handler=is_member,
        flags=Flag.READONLY,
        keys=KeySpec(1, 1),
        args=(NS, *_HASHES),
        reply="bulk string, a bitmap: bit i (least significant first) for probe hash i; +UNKNOWN without a table",
        complexity="O(count x log blocks)",
        group="kvprefix",
        examples=("KV.PREFIX.MEMBERSHIP app|llama|a 2 <16 bytes>",),
        errors=("-ERR hashes must be <n> bytes",),
    ),
)
