"""The V commands that change sessions: CREATE, STOREBATCH, STORE, DROP."""

from __future__ import annotations

from typing import Final

from pion.args import MAX_ID, integer, word
from pion.command import Arg, ArgType, Command, Flag, KeySpec
from pion.commands.vstore_common import (
    AS_ARG,
    LAYER,
    MAX_ROW_END,
    NO_SESSION,
    ONE_KEY,
    SID,
    commit,
    sid_name,
    within,
    wrong_arity,
)
from pion.context import Context
from pion.errors import CommandError
from pion.limits import CONVERT_IN_THREAD_BYTES
from pion.replies import OK, Buffer, Reply
from pion.storage.changes import CreateSession, DropSession, StoreRows
from pion.storage.formats import Wire, get_format, parse_wire, to_native, wire_row_bytes
from pion.storage.ledger import owned
from pion.storage.schema import Schema


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
    return await store_batch(context, sid, layer, start, count, wire, blob)


async def store_one(context: Context, argv: list[Buffer]) -> Reply:
    """V.STORE <sid> <layer> <token_id> [AS ..] <blob>; AS also after the blob."""
    wire, blob = _blob(argv, 4, "V.STORE")
    sid = sid_name(argv[1])
    layer = integer(argv[2], "layer", 0, context.services.config.max_layers - 1)
    return await store_batch(context, sid, layer, integer(argv[3], "token_id"), 1, wire, blob)


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


async def store_batch(
    context: Context, sid: bytes, layer: int, start: int, count: int, wire: Wire, blob: Buffer
) -> Reply:
    """Store rows [start, start + count) of one layer, given in the wire's type; returns OK. The buffer may be kept.

    Raises CommandError for numbers that are no rows, a blob of another length, or rows that may not be stored; then
    nothing changed. Cancellation: before the rows are stored nothing changed; after it only the wait for the log ends.
    """
    within(layer, "layer", 0, context.services.config.max_layers - 1)
    within(start, "start_id", 0, MAX_ID)
    within(count, "count", 0, MAX_ROW_END)
    if start + count > MAX_ROW_END:
        raise CommandError(f"start_id + count must be at most {MAX_ROW_END}, got {start + count}")
    store = context.services.vstore
    unit, side = store.session(sid)
    schema = unit.schema(side)
    assert schema is not None  # noqa: S101  session() found it
    spec = schema.layer(layer)
    width = wire_row_bytes(wire, spec.format, spec.dim)
    if len(blob) != count * width:
        raise CommandError(f"blob must be {count * width} bytes ({count} rows of {width}), got {len(blob)}")
    convert = wire is not Wire.NATIVE and wire is not spec.format.wire
    in_thread = convert and len(blob) > CONVERT_IN_THREAD_BYTES
    if in_thread or not len(blob):  # else commit says it soon enough
        store.check(StoreRows(sid, layer, start, count, b"", context.session.id))
    if not len(blob):
        return OK
    if in_thread:
        # Others run meanwhile; commit checks everything that may have changed again, except the shape.
        data = await context.in_thread(to_native, blob, wire, spec.format, count, spec.dim)
        unit, side = store.session(sid)
        if unit.schema(side) is not schema:
            raise CommandError("the session was made anew with another shape while its rows were converted")
    else:
        data = to_native(blob, wire, spec.format, count, spec.dim)
    await commit(context, StoreRows(sid, layer, start, count, owned(data), context.session.id))
    return OK


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


BLOB: Final = Arg(name="blob", summary="the rows in token order, exactly count x bytes per row")

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
            Arg(
                name="format",
                token="VQUANT",
                optional=True,
                summary="stored format, as in KV.PREFIX.REGISTER; default fp16",
            ),
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
        errors=("-EXISTS the session exists with another shape", "-OOM no session slot, or no memory, can be freed"),
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
            "-OOM no memory can be freed; the rows that were there stay",
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
        errors=(
            NO_SESSION,
            "-ERR blob must be <n> bytes",
            "-BUSY as V.STOREBATCH",
            "-EXISTS as V.STOREBATCH",
            "-OOM as V.STOREBATCH",
        ),
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
)
