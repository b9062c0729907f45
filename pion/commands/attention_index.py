"""The attention index: keys and values under a name of your own, appended row by row and asked with `ATTEND.QUERY`.

It is for whoever keeps keys and values beside a model's cache: a memory, a table of facts, a gateway's documents. It
has nothing to do with `KV.PREFIX` and `ATTEND.PREFIX`: names are of a space of their own, there are no layers or heads,
and rows are fp32 and come back bit by bit. Rows can be appended, and dropped with the whole index, but not changed.

An index is in the log and in snapshots, and its bytes count for `--max-bytes`. It is never evicted: prefixes make room
for it, and when they can't, `KV.STORE` is refused. A query needs all rows in one piece of memory. As long as an index
is in several pieces, as after an append, the room for one more copy of it is charged with it, so that a query never
fails for want of that memory; the first query makes them one piece and gives it back. Queries are computed on the CPU
in fp32, with or without the ATTEND family and MLX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pion.args import MAX_ID, integer, name
from pion.command import Arg, ArgType, Command, Flag, KeySpec
from pion.commands.attention_index_common import (
    PLUGIN,
    Indexes,
    append_rows,
    attend,
    drop_index,
    fetch_rows,
    indexes_of,
)
from pion.compute.attention import VALUE_BYTES
from pion.config import Config
from pion.context import Context, InfoSection, Services
from pion.errors import CommandError
from pion.hookspecs import hookimpl
from pion.replies import Buffer, Map, Reply
from pion.storage.attention_index_log import AttentionIndexLog
from pion.storage.durable import Durable

MAX_ROW: Final = 2**31
"""One past the largest row number."""


async def store(context: Context, argv: list[Buffer]) -> Reply:
    """KV.STORE <index> <n> <D> <K> <V>."""
    index = name(argv[1], "index")
    count = integer(argv[2], "n", 1)
    dim = integer(argv[3], "D", 1, context.services.config.max_index_dim)
    nbytes = VALUE_BYTES * count * dim
    for what, blob in (("K", argv[4]), ("V", argv[5])):
        if len(blob) != nbytes:
            raise CommandError(f"{what} must be {nbytes} bytes ({count} rows of {dim} fp32 values), got {len(blob)}")
    return await append_rows(context, index, dim, count, argv[4], argv[5])


async def fetch(context: Context, argv: list[Buffer]) -> Reply:
    """KV.FETCH <index> <start> <end>."""
    index = name(argv[1], "index")
    start = integer(argv[2], "start", 0, MAX_ROW)
    stop = integer(argv[3], "end", 0, MAX_ROW)
    if start > stop:
        raise CommandError(f"end must be at least start, {start}, got {stop}")
    return list(await fetch_rows(context, index, start, stop))


async def info(context: Context, argv: list[Buffer]) -> Reply:
    """KV.INFO <index>."""
    index = indexes_of(context.services).table.index(name(argv[1], "index"))
    return Map(
        [
            ("index", index.name),
            ("rows", index.rows),
            ("dim", index.dim),
            ("bytes", index.nbytes),
            ("memory", index.memory_bytes),
            ("pieces", len(index.blocks)),
        ]
    )


async def drop(context: Context, argv: list[Buffer]) -> Reply:
    """KV.DROP <index>."""
    return int(await drop_index(context, name(argv[1], "index")))


async def query(context: Context, argv: list[Buffer]) -> Reply:
    """ATTEND.QUERY <index> <top_k> <Q>."""
    index = name(argv[1], "index")
    return await attend(context, index, integer(argv[2], "top_k", 0, MAX_ID), argv[3])


INDEX: Final = Arg(name="index", type=ArgType.KEY, summary="name of the index, 1 B to 4 KiB of any bytes")
KEYS: Final = KeySpec(1, 1, 1, "index")
NO_INDEX: Final = "-ERR no index '<index>'"

COMMANDS: Final = (
    Command(
        name="KV.STORE",
        arity=6,
        summary="Append rows to an attention index, which is made if it is not there",
        since="0.1.0",
        handler=store,
        flags=Flag.WRITE | Flag.DENYOOM,
        keys=KEYS,
        args=(
            INDEX,
            Arg(name="n", type=ArgType.INTEGER, summary="rows to append, at least 1"),
            Arg(name="D", type=ArgType.INTEGER, summary="values in one key and in one value, the same for all rows"),
            Arg(name="K", summary="the keys, fp32 [n, D], little-endian"),
            Arg(name="V", summary="the values, fp32 [n, D]"),
        ),
        reply="integer: how many rows the index has now; the new ones are the last n",
        complexity="O(n) for short rows, which are merged; large payloads are kept without a copy",
        group="attention_index",
        examples=("KV.STORE facts 2 64 <512 bytes> <512 bytes>",),
        errors=(
            "-ERR D must be <D> as in the rows that index '<index>' has",
            "-ERR n must leave index '<index>' with at most <rows> rows (--max-index-rows)",
            "-OOM the byte budget is full, or there are --max-indexes indexes, and nothing may be evicted for more",
            "-MISCONF the disk failed",
        ),
    ),
    Command(
        name="KV.FETCH",
        arity=4,
        summary="Fetch rows of an attention index",
        since="0.1.0",
        handler=fetch,
        flags=Flag.READONLY,
        keys=KEYS,
        args=(
            INDEX,
            Arg(name="start", type=ArgType.INTEGER, summary="first row, from 0"),
            Arg(name="end", type=ArgType.INTEGER, summary="one past the last row"),
        ),
        reply="array of two bulk strings: keys and values, fp32 [end - start, D], as they were stored",
        complexity="O(blocks) to find the rows; the bytes are sent without a copy",
        group="attention_index",
        examples=("KV.FETCH facts 0 100",),
        errors=(NO_INDEX, "-ERR no row <row> in index '<index>'"),
    ),
    Command(
        name="KV.INFO",
        arity=2,
        summary="Describe one attention index",
        since="0.1.0",
        handler=info,
        flags=Flag.READONLY | Flag.FAST,
        keys=KEYS,
        args=(INDEX,),
        reply="map: index, rows, dim, bytes of the rows, memory charged for it (rows that lie in files only count once "
        "they were used), pieces; a query makes one piece of several",
        complexity="O(pieces)",
        group="attention_index",
        examples=("KV.INFO facts",),
        errors=(NO_INDEX,),
    ),
    Command(
        name="KV.DROP",
        arity=2,
        summary="Drop an attention index with all its rows",
        since="0.1.0",
        handler=drop,
        flags=Flag.WRITE,
        keys=KEYS,
        args=(INDEX,),
        reply="integer: 1, or 0 if there was no such index",
        complexity="O(pieces)",
        group="attention_index",
        examples=("KV.DROP facts",),
        errors=("-MISCONF the disk failed",),
    ),
    Command(
        name="ATTEND.QUERY",
        arity=4,
        summary="Attention over an attention index: the values, weighted by the softmax of how their keys score",
        since="0.1.0",
        handler=query,
        flags=Flag.READONLY,
        keys=KEYS,
        args=(
            INDEX,
            Arg(
                name="top_k",
                type=ArgType.INTEGER,
                summary="each vector reads only so many rows, those that score highest; of equal scores the row that "
                "comes first; 0, or as many as there are: all rows",
            ),
            Arg(name="Q", summary="one or more vectors, fp32 [M, D]; M follows from the length"),
        ),
        reply="bulk string: fp32 [M, D], sum over the rows of softmax(q . k / sqrt(D)) x v",
        complexity="O(M x rows x D), on the CPU, in a thread that the indexes share: in parts, and others get their "
        "turn between. After an append all rows are copied once",
        group="attention_index",
        examples=("ATTEND.QUERY facts 0 <256 bytes>",),
        errors=(
            NO_INDEX,
            "-ERR Q must be one or more vectors of D = <D> fp32 values",
            "-ERR the client stopped sending while its query waited, behind many others or with many parts of its own",
            "-OOM there is no memory to compute with",
        ),
    ),
)


@hookimpl
def register_commands(config: Config) -> Sequence[Command]:
    """The rows above."""
    return COMMANDS


@hookimpl
def startup(services: Services) -> None:
    """Make the state: no index."""
    services.state[PLUGIN] = Indexes(AttentionIndexLog(services.vstore))


@hookimpl
def register_durable(services: Services) -> Sequence[Durable]:
    """The indexes."""
    return (indexes_of(services).log,)


@hookimpl
def register_info(services: Services) -> Sequence[InfoSection]:
    """The AttentionIndex section."""
    state = indexes_of(services)
    table = state.table

    def rows() -> Sequence[tuple[str, object]]:
        return (
            ("attention_indexes", len(table)),
            ("attention_index_rows", sum(index.rows for index in table)),
            ("attention_index_bytes", sum(index.nbytes for index in table)),
            ("attention_index_reserved_bytes", sum(index.reserved_bytes for index in table)),
            ("attention_index_queries", table.queries),
            ("attention_index_waiting", state.waiting),
            ("attention_index_checksum_failures", table.checksum_failures),
        )

    return (InfoSection("AttentionIndex", rows),)
