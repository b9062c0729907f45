"""The ATTEND.PREFIX.QUERY commands on the RESP lane: five ways to ask about a layer that is ready."""

from __future__ import annotations

from typing import Final

from pion.args import integer, name
from pion.command import Arg, ArgType, Command, Flag
from pion.commands import attend_core as core
from pion.commands.attend_arguments import u32
from pion.commands.attend_common import KEYS, LAYER, SID
from pion.commands.vstore_common import wrong_arity
from pion.context import Context
from pion.replies import Buffer


def place(context: Context, argv: list[Buffer]) -> tuple[bytes, int]:
    """Session id and layer, which every form has first."""
    return name(argv[1], "sid"), integer(argv[2], "layer", 0, context.services.config.max_layers - 1)


def _split(argv: list[Buffer], names: tuple[str, ...], blobs: int) -> tuple[list[int], list[Buffer], int]:
    """The numbers behind session id and layer, the blobs behind them, and fa_window. Raises CommandError."""
    first = 3 + len(names)
    if len(argv) > first + blobs + 1:
        raise wrong_arity(bytes(argv[0]).decode())
    numbers = [u32(value, what) for value, what in zip(argv[3:first], names, strict=True)]
    window = u32(argv[-1], "fa_window") if len(argv) > first + blobs else 0
    return numbers, argv[first : first + blobs], window


async def query(context: Context, argv: list[Buffer]) -> core.Answer:
    """ATTEND.PREFIX.QUERY <sid> <layer> <H> <D> <top_k> <Q> [<fa_window>]."""
    (heads, head_dim, top_k), (q,), window = _split(argv, ("H", "D", "top_k"), 1)
    return await core.query(context, *place(context, argv), heads, head_dim, top_k, window, q)


async def query_fused(context: Context, argv: list[Buffer]) -> core.Answer:
    """ATTEND.PREFIX.QUERY_FUSED <sid> <layer> <H_q> <D> <S_suf> <H_kv> <Q> <K_suf> <V_suf> <head_map> [<fa_window>]."""
    (heads, head_dim, rows, kv_heads), blobs, window = _split(argv, ("H_q", "D", "S_suf", "H_kv"), 4)
    return await core.query_fused(context, *place(context, argv), heads, head_dim, rows, kv_heads, window, *blobs)


async def query_sparse(context: Context, argv: list[Buffer]) -> core.Answer:
    """ATTEND.PREFIX.QUERY_SPARSE <sid> <layer> <H> <D> <K_sparse_max> <Q> <indices> <counts> [<fa_window>]."""
    (heads, head_dim, most), blobs, window = _split(argv, ("H", "D", "K_sparse_max"), 3)
    return await core.query_sparse(context, *place(context, argv), heads, head_dim, most, window, *blobs)


async def query_sparse_auto(context: Context, argv: list[Buffer]) -> core.Answer:
    """ATTEND.PREFIX.QUERY_SPARSE_AUTO <sid> <layer> <H_q> <D> <B> <K_top> <H_kv> <Q> <head_map> [<fa_window>]."""
    numbers, (q, head_map), window = _split(argv, ("H_q", "D", "B", "K_top", "H_kv"), 2)
    heads, head_dim, block, top, kv_heads = numbers
    sid, layer = place(context, argv)
    return await core.query_sparse_auto(context, sid, layer, heads, head_dim, block, top, kv_heads, window, q, head_map)


async def query_sparse_auto_fused(context: Context, argv: list[Buffer]) -> core.Answer:
    """ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED <sid> <layer> <H_q> <D> <B> <K_top> <H_kv> <S_suf> <Q> <K_suf> <V_suf>
    <head_map> [<fa_window>].
    """
    numbers, blobs, window = _split(argv, ("H_q", "D", "B", "K_top", "H_kv", "S_suf"), 4)
    heads, head_dim, block, top, kv_heads, rows = numbers
    q, keys, values, head_map = blobs
    sid, layer = place(context, argv)
    return await core.query_sparse_auto(
        context, sid, layer, heads, head_dim, block, top, kv_heads, window, q, head_map, (rows, keys, values)
    )


def _number(what: str, summary: str) -> Arg:
    return Arg(name=what, type=ArgType.INTEGER, summary=summary)


H: Final = _number("H", "heads, those of the layer")
D: Final = _number("D", "width of a head: a multiple of 8 up to 512, that of the layer")
TOP_K: Final = _number("top_k", "rows that each query reads, those that score highest; 0: all")
_H_Q: Final = _number("H_q", "query heads")
_H_KV: Final = _number("H_kv", "heads of the layer")
_S_SUF: Final = _number("S_suf", "suffix rows; 0: none")
_B: Final = _number("B", "rows of a block; the last may be short")
_K_TOP: Final = _number("K_top", "blocks that each query head reads, those whose mean key scores highest")
Q: Final = Arg(name="Q", summary="fp32 [H, M, D], C order; M is told from the length")
_Q_HEADS: Final = Arg(name="Q", summary="fp32 [H_q, M, D], C order; M is told from the length")
_Q_ONE: Final = Arg(name="Q", summary="fp32, one query for each head: [H, D] or [H_q, D]")
_K_SUF: Final = Arg(name="K_suf", summary="fp32 [H_kv, S_suf, D]: keys of the rows behind the prefix")
_V_SUF: Final = Arg(name="V_suf", summary="fp32 [H_kv, S_suf, D]: values of the rows behind the prefix")
_MAP: Final = Arg(name="head_map", summary="uint32 [H_q]: the KV head of each query head")
_WINDOW: Final = Arg(
    name="fa_window",
    type=ArgType.INTEGER,
    optional=True,
    summary="only so many rows at the end of the prefix are visible; it comes before top_k and blocks; 0, the default: "
    "all",
)

COLD_MISS: Final = "-COLDMISS the layer is COLD: send KV.PREFIX.WARM and ask again"
MISSING: Final = "-ERR session not found"
_LENGTHS: Final = "-ERR a blob that has not the length its numbers say"
_STORED: Final = "-ERR H, H_kv or D other than what is stored"
_OOM: Final = "-OOM the compute device has no memory for it now"
_ERRORS: Final = (MISSING, COLD_MISS, _LENGTHS, _STORED, _OOM)
_MAP_ERROR: Final = "-ERR head_map must be KV heads below H_kv"
_TOP_ERROR: Final = "-ERR K_top must be at most the number of blocks"
_COST: Final = "O(H x M x N x D)"

COMMANDS: Final = (
    Command(
        name="ATTEND.PREFIX.QUERY",
        arity=-7,
        summary="Attention of M queries for each head over the rows of a layer that is ready. No mask: the prefix "
        "precedes every query",
        since="0.1.0",
        handler=query,
        flags=Flag.READONLY,
        keys=KEYS,
        args=(SID, LAYER, H, D, TOP_K, Q, _WINDOW),
        reply="bulk string, fp32: the output [H, M, D]; for M > 1 the LSE [H, M] behind it, natural logarithm, with "
        "which answers over different rows are merged",
        complexity=_COST,
        group="attend",
        examples=("ATTEND.PREFIX.QUERY app|llama|a 0 8 64 0 <2048 bytes>",),
        errors=_ERRORS,
    ),
    Command(
        name="ATTEND.PREFIX.QUERY_FUSED",
        arity=-11,
        summary="The same over the prefix and suffix rows that come with the call, with query heads that share KV "
        "heads. Causal in the suffix, aligned at its end: query i sees row j if j <= S_suf - M + i",
        since="0.1.0",
        handler=query_fused,
        flags=Flag.READONLY,
        keys=KEYS,
        args=(SID, LAYER, _H_Q, D, _S_SUF, _H_KV, _Q_HEADS, _K_SUF, _V_SUF, _MAP, _WINDOW),
        reply="bulk string, fp32: the output [H_q, M, D]",
        complexity="O(H_q x M x (N + S_suf) x D)",
        group="attend",
        examples=("ATTEND.PREFIX.QUERY_FUSED app|llama|a 0 8 64 1 2 <2048 bytes> <512 bytes> <512 bytes> <32 bytes>",),
        errors=(*_ERRORS, _MAP_ERROR),
    ),
    Command(
        name="ATTEND.PREFIX.QUERY_SPARSE",
        arity=-9,
        summary="Attention over the rows that the call names for each head; one query for each head",
        since="0.1.0",
        handler=query_sparse,
        flags=Flag.READONLY,
        keys=KEYS,
        args=(
            SID,
            LAYER,
            H,
            D,
            _number("K_sparse_max", "indices for each head"),
            _Q_ONE,
            Arg(name="indices", summary="uint32 [H, K_sparse_max]: rows, none of them twice for a head"),
            Arg(
                name="counts",
                summary="uint32 [H]: how many of a head's indices count, at least 1; the rest is not looked at",
            ),
            _WINDOW,
        ),
        reply="bulk string, fp32: the output [H, D]. Rows that fa_window hides are left out",
        complexity="O(H x (N + K_sparse_max x D))",
        group="attend",
        examples=("ATTEND.PREFIX.QUERY_SPARSE app|llama|a 0 8 64 16 <2048 bytes> <512 bytes> <32 bytes>",),
        errors=(
            *_ERRORS,
            "-ERR counts must be 1 to K_sparse_max",
            "-ERR indices must be rows of the layer, must not repeat one, and must name one that fa_window shows",
        ),
    ),
    Command(
        name="ATTEND.PREFIX.QUERY_SPARSE_AUTO",
        arity=-10,
        summary="Attention over the blocks of rows whose mean key scores highest; one query for each head",
        since="0.1.0",
        handler=query_sparse_auto,
        flags=Flag.READONLY,
        keys=KEYS,
        args=(SID, LAYER, _H_Q, D, _B, _K_TOP, _H_KV, _Q_ONE, _MAP, _WINDOW),
        reply="bulk string, fp32: the output [H_q, D]",
        complexity="O(H_q x (N / B + K_top x B) x D)",
        group="attend",
        examples=("ATTEND.PREFIX.QUERY_SPARSE_AUTO app|llama|a 0 8 64 64 8 2 <2048 bytes> <32 bytes>",),
        errors=(*_ERRORS, _MAP_ERROR, _TOP_ERROR),
    ),
    Command(
        name="ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED",
        arity=-13,
        summary="The same, merged with dense attention over suffix rows that come with the call",
        since="0.1.0",
        handler=query_sparse_auto_fused,
        flags=Flag.READONLY,
        keys=KEYS,
        args=(SID, LAYER, _H_Q, D, _B, _K_TOP, _H_KV, _S_SUF, _Q_ONE, _K_SUF, _V_SUF, _MAP, _WINDOW),
        reply="bulk string, fp32: the output [H_q, D]",
        complexity="O(H_q x (N / B + K_top x B + S_suf) x D)",
        group="attend",
        examples=(
            "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED app|llama|a 0 8 64 64 8 2 1 <2048 bytes> <512 bytes> <512 bytes> "
            "<32 bytes>",
        ),
        errors=(*_ERRORS, _MAP_ERROR, _TOP_ERROR),
    ),
)
