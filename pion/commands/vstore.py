"""The V family: sessions of rows by layer and token id. Also starts the store's reaper and drops what a client left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from pion.args import integer, word
from pion.command import Arg, ArgType, Command, Flag, KeySpec
from pion.commands.vstore_common import (
    AS_ARG,
    LIST_ARGS,
    LIST_REPLY,
    MAX_ROW_END,
    commit,
    list_page,
    row_range,
    sid_name,
    split_as,
    wrong_arity,
)
from pion.commands.vstore_reaper import Reaper, memory_rows
from pion.config import CONVERT_IN_THREAD_BYTES, Config
from pion.context import Context, InfoSection, Services, Session
from pion.errors import CommandError
from pion.hookspecs import hookimpl
from pion.replies import OK, Blob, Buffer, Map, Reply, Stream
from pion.storage import reading
from pion.storage.changes import CreateSession, DropSession, StoreRows
from pion.storage.formats import Wire, get_format, parse_wire, to_native, wire_row_bytes
from pion.storage.ledger import owned
from pion.storage.schema import Schema
from pion.storage.unit import SIDES, SUFFIXES, Unit

FETCH_PARTS_MAX: Final = 16_384
"""Row ids or ranges in one V.FETCH: gathering them holds the loop for about 30 ms; RANGE has no such limit."""


async def create(context: Context, argv: list[Buffer]) -> Reply:
    """V.CREATE <sid> <dim> [VQUANT <format> | SCHEMA <runs>] | V.CREATE <sid> SCHEMA <runs>."""
    config = context.services.config
    sid = sid_name(argv[1])
    if word(argv[2]) == b"SCHEMA":
        dim, rest = None, argv[2:]
    else:
        dim, rest = integer(argv[2], "dim", 1, config.max_dim), argv[3:]
    if len(rest) not in (0, 2):
        raise wrong_arity("V.CREATE")
    option = word(rest[0]) if rest else b"VQUANT"
    if option == b"SCHEMA":
        schema = Schema.parse(rest[1], dim, config.max_layers, config.max_dim)
    elif option == b"VQUANT" and dim is not None:
        schema = Schema.uniform(get_format(rest[1] if rest else b"fp16"), dim)
    else:
        raise CommandError("V.CREATE: unknown option, expected VQUANT or SCHEMA")
    await commit(context, CreateSession(sid, schema))
    return OK


async def storebatch(context: Context, argv: list[Buffer]) -> Reply:
    """V.STOREBATCH <sid> <layer> <start_id> <count> [AS ..] <blob>; AS also after the blob."""
    wire, blob = _blob(argv, 5, "V.STOREBATCH")
    sid = sid_name(argv[1])
    layer = integer(argv[2], "layer", 0, context.services.config.max_layers - 1)
    start = integer(argv[3], "start_id")
    count = integer(argv[4], "count", 0, MAX_ROW_END)
    if start + count > MAX_ROW_END:
        raise CommandError(f"start_id + count must be at most {MAX_ROW_END}, got {start + count}")
    return await _store(context, sid, layer, start, count, wire, blob)


async def store_one(context: Context, argv: list[Buffer]) -> Reply:
    """V.STORE <sid> <layer> <token_id> [AS ..] <blob>; AS also after the blob."""
    wire, blob = _blob(argv, 4, "V.STORE")
    sid = sid_name(argv[1])
    layer = integer(argv[2], "layer", 0, context.services.config.max_layers - 1)
    return await _store(context, sid, layer, integer(argv[3], "token_id"), 1, wire, blob)


def _blob(argv: list[Buffer], position: int, command: str) -> tuple[Wire, Buffer]:
    """The payload and its type; `AS <type>` may stand on either side of it."""
    if len(argv) == position + 1:
        return Wire.FP32, argv[position]
    if len(argv) != position + 3:
        raise wrong_arity(command)
    before, middle, last = argv[position:]
    if word(before) == b"AS" and bytes(middle[:16]).lower() in _WIRE_NAMES:
        return parse_wire(middle), last
    if word(middle) == b"AS":
        return parse_wire(last), before
    if word(before) == b"AS":
        return parse_wire(middle), last
    raise CommandError(f"{command}: expected AS <type> before or after the blob")


_WIRE_NAMES: Final = frozenset(wire.value.encode() for wire in Wire)


async def _store(context: Context, sid: bytes, layer: int, start: int, count: int, wire: Wire, blob: Buffer) -> Reply:
    store = context.services.vstore
    unit, side = store.session(sid)
    schema = unit.schema(side)
    assert schema is not None  # noqa: S101  session() found it
    spec = schema.layer(layer)
    width = wire_row_bytes(wire, spec.format, spec.dim)
    if len(blob) != count * width:
        raise CommandError(f"blob must be {count * width} bytes ({count} rows of {width}), got {len(blob)}")
    store.check(StoreRows(sid, layer, start, count, b"", context.session.id))
    if not len(blob):
        return OK
    convert = wire is not Wire.NATIVE and wire is not spec.format.wire
    if convert and len(blob) > CONVERT_IN_THREAD_BYTES:
        # Others run meanwhile; commit checks everything that may have changed again, except the shape.
        data = await context.in_thread(to_native, blob, wire, spec.format, count, spec.dim)
        unit, side = store.session(sid)
        if unit.schema(side) is not schema:
            raise CommandError("the session was made anew with another shape while its rows were converted")
    else:
        data = to_native(blob, wire, spec.format, count, spec.dim)
    await commit(context, StoreRows(sid, layer, start, count, owned(data), context.session.id))
    return OK


async def fetch(context: Context, argv: list[Buffer]) -> Reply:
    """V.FETCH <sid> <layer> RANGE <start_id> <end_id> | <layer> <id>... | BATCH <n> (<layer> <start_id> <end_id>)*n."""
    sid = sid_name(argv[1])
    argv, wire = split_as(argv, 4)
    most = context.services.config.max_layers - 1
    kind = word(argv[2])
    if kind == b"BATCH":
        ranges = _batch(argv, most)
    else:
        layer = integer(argv[2], "layer", 0, most)
        if word(argv[3]) == b"RANGE":
            if len(argv) != 6:
                raise wrong_arity("V.FETCH")
            ranges = [(layer, *row_range(argv[4], argv[5]))]
        else:
            ranges = _ids(argv, layer)
    store = context.services.vstore
    unit, side = store.session(sid, context.session.id)
    schema = unit.schema(side)
    assert schema is not None  # noqa: S101  session() found it
    answers: list[Blob | Stream] = []
    if kind == b"BATCH":
        for layer, start, stop in ranges:
            spans = reading.gather(unit, side, layer, start, stop)
            answers.append(reading.reply(spans, schema.layer(layer), wire))
    else:
        parts = [span for layer, start, stop in ranges for span in reading.gather(unit, side, layer, start, stop)]
        answers.append(reading.reply(parts, schema.layer(ranges[0][0]), wire))
    if not context.session.no_touch:
        store.touch(unit)
    store.fetches += 1
    context.services.receipt.kvprefix_bytes_served += sum(answer.nbytes for answer in answers)
    return answers if kind == b"BATCH" else answers[0]


def _batch(argv: list[Buffer], most: int) -> list[tuple[int, int, int]]:
    count = integer(argv[3], "n", 0, FETCH_PARTS_MAX)
    if len(argv) != 4 + 3 * count:
        raise CommandError(
            f"BATCH {count} takes {3 * count} numbers (layer, start_id, end_id each), got {len(argv) - 4}"
        )
    return [
        (integer(argv[at], "layer", 0, most), *row_range(argv[at + 1], argv[at + 2])) for at in range(4, len(argv), 3)
    ]


def _ids(argv: list[Buffer], layer: int) -> list[tuple[int, int, int]]:
    """The ids as ranges: neighbours in ascending order are one."""
    if len(argv) - 3 > FETCH_PARTS_MAX:
        raise CommandError(f"at most {FETCH_PARTS_MAX} ids, got {len(argv) - 3}; use RANGE")
    ranges: list[tuple[int, int, int]] = []
    for value in argv[3:]:
        row = integer(value, "id")
        if ranges and ranges[-1][2] == row:
            ranges[-1] = (layer, ranges[-1][1], row + 1)
        else:
            ranges.append((layer, row, row + 1))
    return ranges


async def drop(context: Context, argv: list[Buffer]) -> Reply:
    """V.DROP <sid> [<sid> ...]."""
    sids = list(dict.fromkeys(sid_name(value) for value in argv[1:]))
    store = context.services.vstore
    changes = [DropSession(sid) for sid in sids]
    for change in changes:
        store.check(change)
    held = [change for change in changes if store.find_session(change.sid) is not None]
    await commit(context, *held)
    return len(held)


async def info(context: Context, argv: list[Buffer]) -> Reply:
    """V.INFO <sid>."""
    sid = sid_name(argv[1])
    unit, side = context.services.vstore.session(sid)
    schema = unit.schema(side)
    assert schema is not None  # noqa: S101  session() found it
    rows = unit.rows(side)
    layers = rows.layers.values() if rows is not None else ()
    state = "pending" if unit.pending is not None else "complete" if unit.complete else "open"
    spec = schema.layer(0)
    return Map(
        [
            ("sid", sid),
            ("format", spec.format.name),
            ("dim", spec.dim),
            ("schema", str(schema)),
            ("layers", sum(1 for layer in layers if layer.count)),
            ("rows", sum(layer.count for layer in layers)),
            ("bytes", sum(layer.count * layer.row_bytes for layer in layers)),
            ("prefix", None if unit.lone else unit.name),
            ("registered", int(unit.registered)),
            ("state", state),
            ("pinned", int(unit.pinned)),
        ]
    )


async def list_sessions(context: Context, argv: list[Buffer]) -> Reply:
    """V.LIST [CURSOR <c>] [MATCH <glob>] [COUNT <n>]."""
    store = context.services.vstore
    groups = [(b"l", store.lone_names), (b"p", store.prefix_names)]
    return list_page(
        argv, "V.LIST", groups, lambda unit: [] if store.expired(unit) else _sids(unit), keys_are_names=False
    )


def _sids(unit: Unit) -> list[bytes]:
    if unit.lone:
        return [unit.name]
    return [unit.name + SUFFIXES[side] for side in SIDES if unit.schema(side) is not None]


SID: Final = Arg(name="sid", type=ArgType.KEY, summary="session id, 1 B to 4 KiB of any bytes")
LAYER: Final = Arg(name="layer", type=ArgType.INTEGER, summary="layer id, from 0")
BLOB: Final = Arg(name="blob", summary="the rows in token order, exactly count x bytes per row")
RANGE_ARGS: Final = (
    Arg(name="start_id", type=ArgType.INTEGER, summary="first row"),
    Arg(name="end_id", type=ArgType.INTEGER, summary="one past the last row"),
)
ONE_KEY: Final = KeySpec(1, 1, 1, "session")
NO_SESSION: Final = "-ERR no session '<sid>'"
NO_ROW: Final = "-ERR no row <id> in layer <n>"

COMMANDS: Final = (
    Command(
        name="V.CREATE",
        arity=-3,
        summary="Create a session: the format and width of its rows, for all layers or run by run",
        since="0.1.0",
        handler=create,
        flags=Flag.WRITE | Flag.DENYOOM | Flag.FAST,
        keys=ONE_KEY,
        args=(
            SID,
            Arg(name="dim", type=ArgType.INTEGER, optional=True, summary="values in a row, for all layers"),
            Arg(name="format", token="VQUANT", optional=True, summary="stored format; default fp16"),
            Arg(
                name="runs",
                token="SCHEMA",
                optional=True,
                summary="format[@dim]*layers, comma-separated, instead of VQUANT; @dim may be left out after a dim",
            ),
        ),
        reply="+OK, also when the session exists with the same shape",
        group="vstore",
        examples=("V.CREATE notes 128 VQUANT fp16", "V.CREATE notes_v SCHEMA fp16@512*2,int8@512*12,fp16@512*2"),
        errors=("-EXISTS the session exists with another shape", "-OOM no session slot can be freed"),
    ),
    Command(
        name="V.STOREBATCH",
        arity=-6,
        summary="Store consecutive rows of one layer; rows that were there are replaced, all at once",
        since="0.1.0",
        handler=storebatch,
        flags=Flag.WRITE | Flag.DENYOOM,
        keys=ONE_KEY,
        args=(
            SID,
            LAYER,
            Arg(name="start_id", type=ArgType.INTEGER, summary="token id of the first row"),
            Arg(name="count", type=ArgType.INTEGER, summary="number of rows"),
            AS_ARG,
            BLOB,
        ),
        reply="+OK",
        complexity="O(bytes converted); O(1) when the type on the wire is the stored one",
        group="vstore",
        examples=("V.STOREBATCH notes 0 0 2 AS native <512 bytes>",),
        errors=(
            NO_SESSION,
            "-ERR blob must be <n> bytes",
            "-BUSY another connection is filling the prefix",
            "-EXISTS the prefix is complete",
        ),
    ),
    Command(
        name="V.STORE",
        arity=-5,
        summary="Store one row of one layer",
        since="0.1.0",
        handler=store_one,
        flags=Flag.WRITE | Flag.DENYOOM,
        keys=ONE_KEY,
        args=(SID, LAYER, Arg(name="token_id", type=ArgType.INTEGER), AS_ARG, BLOB),
        reply="+OK",
        group="vstore",
        examples=("V.STORE notes 0 7 <512 bytes of fp32>",),
        errors=(NO_SESSION, "-ERR blob must be <n> bytes", "-BUSY as V.STOREBATCH", "-EXISTS as V.STOREBATCH"),
    ),
    Command(
        name="V.FETCH",
        arity=-4,
        summary="Fetch rows: a range of one layer, single rows in any order, or several ranges as one atomic view",
        since="0.1.0",
        handler=fetch,
        flags=Flag.READONLY,
        keys=ONE_KEY,
        args=(
            SID,
            Arg(
                name="what",
                type=ArgType.ONEOF,
                args=(
                    Arg(
                        name="range",
                        type=ArgType.BLOCK,
                        args=(LAYER, Arg(name="range", type=ArgType.BLOCK, token="RANGE", args=RANGE_ARGS)),
                    ),
                    Arg(
                        name="ids",
                        type=ArgType.BLOCK,
                        args=(LAYER, Arg(name="id", type=ArgType.INTEGER, multiple=True)),
                    ),
                    Arg(
                        name="batch",
                        type=ArgType.BLOCK,
                        token="BATCH",
                        args=(
                            Arg(name="n", type=ArgType.INTEGER),
                            Arg(name="part", type=ArgType.BLOCK, multiple=True, args=(LAYER, *RANGE_ARGS)),
                        ),
                    ),
                ),
            ),
            AS_ARG,
        ),
        reply="bulk string with the rows one after the other; BATCH: array of n bulk strings",
        complexity="O(blocks) to find the rows; the bytes are sent without a copy when no conversion is needed",
        group="vstore",
        examples=(
            "V.FETCH notes 0 RANGE 0 1024 AS native",
            "V.FETCH notes 0 5 3 5",
            "V.FETCH notes BATCH 2 0 0 8 1 0 8",
        ),
        errors=(NO_SESSION, NO_ROW, "-BUSY another connection is filling the prefix"),
    ),
    Command(
        name="V.DROP",
        arity=-2,
        summary="Drop sessions that belong to no registered prefix",
        since="0.1.0",
        handler=drop,
        flags=Flag.WRITE,
        keys=KeySpec(1, -1, 1, "session"),
        args=(Arg(name="sid", type=ArgType.KEY, multiple=True, summary="session ids"),),
        reply="integer: sessions dropped; one that isn't there counts 0",
        complexity="O(blocks dropped)",
        group="vstore",
        examples=("V.DROP notes",),
        errors=("-ERR a session belongs to a registered prefix; nothing is dropped then",),
    ),
    Command(
        name="V.INFO",
        arity=2,
        summary="Describe one session",
        since="0.1.0",
        handler=info,
        flags=Flag.READONLY | Flag.FAST,
        keys=ONE_KEY,
        args=(SID,),
        reply="map: sid, format and dim of layer 0, schema, layers, rows, bytes, prefix, registered, state, pinned",
        complexity="O(layers)",
        group="vstore",
        examples=("V.INFO notes",),
        errors=(NO_SESSION,),
    ),
    Command(
        name="V.LIST",
        arity=-1,
        summary="List session ids, page by page; stable while sessions come and go",
        since="0.1.0",
        handler=list_sessions,
        flags=Flag.READONLY,
        args=LIST_ARGS,
        reply=LIST_REPLY,
        complexity="O(COUNT)",
        group="vstore",
        examples=("V.LIST MATCH notes* COUNT 100",),
        errors=("-ERR CURSOR must be 0 or a cursor that this command gave",),
    ),
)


@hookimpl
def register_commands(config: Config) -> Sequence[Command]:
    """The V commands."""
    return COMMANDS


@hookimpl
def register_services(services: Services) -> Sequence[Callable[..., Awaitable[None]]]:
    """The reaper."""
    return [Reaper(services).run]


@hookimpl
def register_info(services: Services) -> Sequence[InfoSection]:
    """The Memory section."""
    return [InfoSection("Memory", lambda: memory_rows(services))]


@hookimpl
def register_disconnect(services: Services) -> Callable[[Session], None]:
    """Drops what the closed connection had registered and not completed."""
    return lambda session: services.vstore.disconnect(session.id)
