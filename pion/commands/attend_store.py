"""ATTEND.PREFIX.STORE, LOOKUP and DROP, ATTEND.QUERYBATCH and ATTEND.INFO on the RESP lane."""

from __future__ import annotations

from typing import Final

from pion.args import name
from pion.command import Arg, ArgType, Command, Flag
from pion.commands import attend_core as core
from pion.commands.attend_arguments import u32
from pion.commands.attend_common import KEYS, LAYER, SID, attention, rows_of_info, state_of
from pion.commands.attend_query import TOP_K, H, Q, place
from pion.commands.vstore_common import wrong_arity
from pion.compute.slots import State
from pion.context import Context
from pion.replies import OK, Buffer, Map, Reply, Simple

_ANSWERS: Final = {State.WARM: Simple("HIT"), State.COLD: Simple("COLD"), State.MISSING: Simple("MISS")}


async def store(context: Context, argv: list[Buffer]) -> Reply:
    """ATTEND.PREFIX.STORE <sid> <layer> <H> <N> <D> <K> <V>."""
    heads, rows, head_dim = (u32(value, what) for value, what in zip(argv[3:6], ("H", "N", "D"), strict=True))
    await core.store(context, *place(context, argv), heads, rows, head_dim, argv[6], argv[7])
    return OK


async def lookup(context: Context, argv: list[Buffer]) -> Reply:
    """ATTEND.PREFIX.LOOKUP <sid> <layer>."""
    return _ANSWERS[state_of(context, *place(context, argv))]


async def drop(context: Context, argv: list[Buffer]) -> Reply:
    """ATTEND.PREFIX.DROP <sid> [<layer>]."""
    if len(argv) > 3:
        raise wrong_arity("ATTEND.PREFIX.DROP")
    if len(argv) == 3:
        return attention(context).drop(*place(context, argv))
    return attention(context).drop(name(argv[1], "sid"))


async def query_batch(context: Context, argv: list[Buffer]) -> core.Answer:
    """ATTEND.QUERYBATCH <H> <N> <D> <top_k> <Q> <K> <V>."""
    names = "H", "N", "D", "top_k"
    heads, rows, head_dim, top_k = (u32(value, what) for value, what in zip(argv[1:5], names, strict=True))
    return await core.query_batch(context, heads, rows, head_dim, top_k, *argv[5:])


async def info(context: Context, argv: list[Buffer]) -> Reply:
    """ATTEND.INFO."""
    return Map(rows_of_info(attention(context)))


_N: Final = Arg(name="N", type=ArgType.INTEGER, summary="rows, at least 1")
_D: Final = Arg(name="D", type=ArgType.INTEGER, summary="width of a head: a multiple of 8 up to 512")
_HEADS: Final = Arg(name="H", type=ArgType.INTEGER, summary="KV heads")
_K: Final = Arg(name="K", summary="fp32 [H, N, D], C order")
_V: Final = Arg(name="V", summary="fp32 [H, N, D], C order")
_LENGTHS: Final = "-ERR K must be H x N x D fp32 values; the same for V"

COMMANDS: Final = (
    Command(
        name="ATTEND.PREFIX.STORE",
        arity=8,
        summary="Make K and V of one layer ready for attention, in place of what it had. They are in memory only, and "
        "have nothing to do with the rows of the V-store",
        since="0.1.0",
        handler=store,
        # Not WRITE: nothing of it is in the log or in --max-bytes, so it waits for neither.
        flags=Flag.DENYOOM,
        keys=KEYS,
        args=(SID, LAYER, _HEADS, _N, _D, _K, _V),
        reply="+OK",
        complexity="O(H x N x D), and O(1) for each layer that becomes COLD for it",
        group="attend",
        examples=("ATTEND.PREFIX.STORE app|llama|a 0 2 16 64 <8192 bytes> <8192 bytes>",),
        errors=(_LENGTHS, "-OOM larger than --attend-bytes, or more than the compute device has"),
    ),
    Command(
        name="ATTEND.PREFIX.LOOKUP",
        arity=3,
        summary="Say whether a layer is ready. That is no use of it",
        since="0.1.0",
        handler=lookup,
        flags=Flag.READONLY | Flag.FAST,
        keys=KEYS,
        args=(SID, LAYER),
        reply="+HIT (WARM: ready), +COLD (it was; KV.PREFIX.WARM brings it back from the V-store) or +MISS",
        group="attend",
        examples=("ATTEND.PREFIX.LOOKUP app|llama|a 0",),
    ),
    Command(
        name="ATTEND.PREFIX.DROP",
        arity=-2,
        summary="Forget a session's layers, or one of them. Queries that are being computed are answered. A "
        "KV.PREFIX.WARM of the session that is under way fails, or loads all but the one layer",
        since="0.1.0",
        handler=drop,
        flags=Flag.FAST,
        keys=KEYS,
        args=(SID, Arg(name="layer", type=ArgType.INTEGER, optional=True, summary="only this one")),
        reply="integer: layers that were WARM or COLD",
        complexity="O(layers)",
        group="attend",
        examples=("ATTEND.PREFIX.DROP app|llama|a", "ATTEND.PREFIX.DROP app|llama|a 3"),
    ),
    Command(
        name="ATTEND.QUERYBATCH",
        arity=8,
        summary="Attention over K and V that come with the call and are not kept. For more than one call on the same "
        "rows ATTEND.PREFIX.STORE is many times quicker",
        since="0.1.0",
        handler=query_batch,
        flags=Flag.READONLY,
        args=(H, _N, _D, TOP_K, Q, _K, _V),
        reply="bulk string, as for ATTEND.PREFIX.QUERY",
        complexity="O(H x M x N x D)",
        group="attend",
        examples=("ATTEND.QUERYBATCH 2 16 64 0 <512 bytes> <8192 bytes> <8192 bytes>",),
        errors=(_LENGTHS, "-ERR Q must be H x M x D fp32 values", "-OOM the compute device has no memory for it now"),
    ),
    Command(
        name="ATTEND.INFO",
        arity=1,
        summary="What is ready for attention, and what was computed on it",
        since="0.1.0",
        handler=info,
        flags=Flag.READONLY | Flag.FAST,
        reply="map: device, precision, warm and cold (layers), bytes of the WARM ones and their limit max_bytes, slots "
        "and cold_slots (limits), demotions (WARM to COLD) and rehydrates (COLD to WARM) since the start; of the "
        "queries on layers: queries (a large one is computed in parts, and each is counted), batches (those on one "
        "layer that came together are one) and compute_us (time that these took on the compute thread); waiting "
        "(whatever waits for the compute thread: queries, layers to be loaded, ATTEND.QUERYBATCH)",
        group="attend",
        examples=("ATTEND.INFO",),
    ),
)
