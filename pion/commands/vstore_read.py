"""The V commands that read: FETCH, INFO, LIST."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

from pion.args import integer, word
from pion.command import Arg, ArgType, Command, Flag
from pion.commands.vstore_common import (
    AS_ARG,
    LAYER,
    LIST_ARGS,
    LIST_REPLY,
    NO_SESSION,
    ONE_KEY,
    SID,
    check_range,
    list_page,
    row_range,
    sid_name,
    split_as,
    verified_to_send,
    within,
    wrong_arity,
)
from pion.context import Context
from pion.errors import CommandError
from pion.replies import Blob, Buffer, Map, Reply, Stream
from pion.storage import reading
from pion.storage.formats import Wire
from pion.storage.reading import FETCH_PARTS_MAX
from pion.storage.room import side_bytes
from pion.storage.unit import SIDES, SUFFIXES, Unit


async def fetch(context: Context, argv: list[Buffer]) -> Reply:
    """V.FETCH <sid> <layer> RANGE <start_id> <end_id> | <layer> <id>... | BATCH <n> (<layer> <start_id> <end_id>)*n."""
    sid = sid_name(argv[1])
    argv, wire = split_as(argv, 4)
    most = context.services.config.max_layers - 1
    kind = word(argv[2])
    if kind == b"BATCH":
        return await fetch_ranges(context, sid, _batch(argv, most), wire)
    layer = integer(argv[2], "layer", 0, most)
    if word(argv[3]) == b"RANGE":
        if len(argv) != 6:
            raise wrong_arity("V.FETCH")
        ranges = [(layer, *row_range(argv[4], argv[5]))]
    else:
        ranges = _ids(argv, layer)
    return (await fetch_ranges(context, sid, ranges, wire, joined=True))[0]


async def fetch_ranges(
    context: Context, sid: bytes, ranges: Sequence[tuple[int, int, int]], wire: Wire, *, joined: bool = False
) -> list[Blob | Stream]:
    """The rows of each (layer, start_id, end_id) of a session, all as of one moment, in the wire's type.

    `joined`: one part with the rows of all ranges, which must be at least one and of one layer. Raises CommandError for
    a range that is none, rows that aren't there or are damaged, and BusyError while another connection fills the
    prefix; nothing is counted then. Cancellation: nothing is counted.
    """
    most = context.services.config.max_layers - 1
    within(len(ranges), "n", 0, FETCH_PARTS_MAX)
    for layer, start, stop in ranges:
        within(layer, "layer", 0, most)
        check_range(start, stop)
    store = context.services.vstore
    while True:
        unit, side = store.session(sid, context.session.id)
        schema = unit.schema(side)
        assert schema is not None  # noqa: S101  session() found it
        gathered = [reading.gather(unit, side, layer, start, stop) for layer, start, stop in ranges]
        doubts = await verified_to_send(context, ((unit, spans) for spans in gathered))
        if doubts is not None:
            break
    answer = reading.Answer(doubts)
    answers: list[Blob | Stream] = []
    if joined:
        answers.append(answer.part([*chain.from_iterable(gathered)], schema.layer(ranges[0][0]), wire))
    else:
        for (layer, _, _), spans in zip(ranges, gathered, strict=True):
            answers.append(answer.part(spans, schema.layer(layer), wire))
    if not context.session.no_touch:
        store.touch(unit)
    store.fetches += 1
    context.services.receipt.kvprefix_bytes_served += sum(answer.nbytes for answer in answers)
    return answers


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
            ("rotation", schema.rotation),
            ("layers", sum(1 for layer in layers if layer.count)),
            ("rows", sum(layer.count for layer in layers)),
            ("bytes", sum(layer.count * layer.row_bytes for layer in layers)),
            ("memory", side_bytes(unit, side)),
            ("place", _place(unit)),
            ("prefix", None if unit.lone else unit.name),
            ("registered", int(unit.registered)),
            ("state", state),
            ("pinned", int(unit.pinned)),
        ]
    )


def _place(unit: Unit) -> str:
    """Where the rows of a unit are."""
    if unit.placed:
        return "tier" if unit.in_files else "memory and tier"
    return "files" if unit.in_files else "memory"


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


RANGE_ARGS: Final = (
    Arg(name="start_id", type=ArgType.INTEGER, summary="first row"),
    Arg(name="end_id", type=ArgType.INTEGER, summary="one past the last row"),
)
NO_ROW: Final = "-ERR no row <id> in layer <n>"


COMMANDS: Final = (
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
        name="V.INFO",
        arity=2,
        summary="Describe one session",
        since="0.1.0",
        handler=info,
        flags=Flag.READONLY | Flag.FAST,
        keys=ONE_KEY,
        args=(SID,),
        reply="map: sid, format and dim of layer 0, schema, rotation (its version, with turbo), layers, rows, bytes of "
        "the rows, memory charged for them, place (memory, files, tier, memory and tier), prefix, registered, state, "
        "pinned",
        complexity="O(blocks)",
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
