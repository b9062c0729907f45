"""The ATTEND forms on the binary lane. Meta is numbers already, and the body is cut where they say: no text at all."""

from __future__ import annotations

from typing import Any, Final

from pion.command import BinaryCommand, Field, FieldKind
from pion.commands import attend_core as core
from pion.commands.attend_common import state_of
from pion.compute.attention import VALUE_BYTES
from pion.compute.slots import State
from pion.context import Context
from pion.errors import Status
from pion.later import Later
from pion.replies import BinaryReply, Buffer

_STATES: Final = {State.WARM: Status.OK, State.COLD: Status.COLDMISS, State.MISSING: Status.MISS}


def _cut(body: Buffer, *sizes: int) -> list[Buffer]:
    """The body cut into blobs of so many values, and what is left as the last one. A length that is wrong shows in the
    last blob that is too short or too long; whoever takes it names it.
    """
    view = memoryview(body)
    found: list[Buffer] = []
    start = 0
    for size in sizes:
        stop = min(len(view), start + VALUE_BYTES * size)
        found.append(view[start:stop])
        start = stop
    return [*found, view[start:]]


def _cut_queries(body: Buffer, *sizes: int) -> list[Buffer]:
    """The same with Q first, as long as the blobs behind it leave."""
    q_bytes = max(0, len(body) - VALUE_BYTES * sum(sizes))
    view = memoryview(body)
    return [view[:q_bytes], *_cut(view[q_bytes:], *sizes[:-1])]


def _reply(found: core.Answer) -> BinaryReply | Later:
    if isinstance(found, Later):
        found.make = _with_body
        return found
    return BinaryReply(body=found)


def _with_body(body: bytes) -> BinaryReply:
    return BinaryReply(body=body)


async def store(context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply:
    """0x20."""
    sid, layer, heads, rows, head_dim = values
    keys, vals = _cut(body, heads * rows * head_dim)
    await core.store(context, sid, layer, heads, rows, head_dim, keys, vals)
    return BinaryReply()


async def lookup(context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply:
    """0x21."""
    return BinaryReply(status=_STATES[state_of(context, *values)])


async def query(context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply | Later:
    """0x22."""
    sid, layer, heads, head_dim, top_k, window = values
    return _reply(await core.query(context, sid, layer, heads, head_dim, top_k, window, body))


async def query_fused(context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply | Later:
    """0x24."""
    sid, layer, heads, head_dim, rows, kv_heads, window = values
    suffix = kv_heads * rows * head_dim
    blobs = _cut_queries(body, suffix, suffix, heads)
    return _reply(await core.query_fused(context, sid, layer, heads, head_dim, rows, kv_heads, window, *blobs))


async def query_sparse(context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply | Later:
    """0x25."""
    sid, layer, heads, head_dim, most, window = values
    blobs = _cut(body, heads * head_dim, heads * most)
    return _reply(await core.query_sparse(context, sid, layer, heads, head_dim, most, window, *blobs))


async def query_sparse_auto(context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply | Later:
    """0x26."""
    sid, layer, heads, head_dim, block, top, kv_heads, window = values
    q, head_map = _cut(body, heads * head_dim)
    return _reply(
        await core.query_sparse_auto(context, sid, layer, heads, head_dim, block, top, kv_heads, window, q, head_map)
    )


async def query_sparse_auto_fused(context: Context, values: tuple[Any, ...], body: Buffer) -> BinaryReply | Later:
    """0x27."""
    sid, layer, heads, head_dim, block, top, kv_heads, rows, window = values
    suffix = kv_heads * rows * head_dim
    q, keys, vals, head_map = _cut(body, heads * head_dim, suffix, suffix)
    return _reply(
        await core.query_sparse_auto(
            context, sid, layer, heads, head_dim, block, top, kv_heads, window, q, head_map, (rows, keys, vals)
        )
    )


def _meta(*numbers: str) -> tuple[Field, ...]:
    return (Field("sid", FieldKind.NAME), *(Field(each, FieldKind.U32) for each in ("layer", *numbers)))


_OUTPUT: Final = "body: the output, and for M > 1 the LSE, as on the RESP lane"
_ONLY_OUTPUT: Final = "body: the output, as on the RESP lane"

ROWS: Final = (
    BinaryCommand(
        code=0x20,
        command="ATTEND.PREFIX.STORE",
        handler=store,
        meta=_meta("H", "N", "D"),
        body="K, V",
        reply="nothing",
    ),
    BinaryCommand(
        code=0x21,
        command="ATTEND.PREFIX.LOOKUP",
        handler=lookup,
        meta=_meta(),
        reply="nothing; status OK (WARM), COLDMISS (COLD) or MISS",
    ),
    BinaryCommand(
        code=0x22,
        command="ATTEND.PREFIX.QUERY",
        handler=query,
        meta=_meta("H", "D", "top_k", "fa_window"),
        body="Q",
        reply=_OUTPUT,
    ),
    BinaryCommand(
        code=0x24,
        command="ATTEND.PREFIX.QUERY_FUSED",
        handler=query_fused,
        meta=_meta("H_q", "D", "S_suf", "H_kv", "fa_window"),
        body="Q, K_suf, V_suf, head_map",
        reply=_ONLY_OUTPUT,
    ),
    BinaryCommand(
        code=0x25,
        command="ATTEND.PREFIX.QUERY_SPARSE",
        handler=query_sparse,
        meta=_meta("H", "D", "K_sparse_max", "fa_window"),
        body="Q, indices, counts",
        reply=_ONLY_OUTPUT,
    ),
    BinaryCommand(
        code=0x26,
        command="ATTEND.PREFIX.QUERY_SPARSE_AUTO",
        handler=query_sparse_auto,
        meta=_meta("H_q", "D", "B", "K_top", "H_kv", "fa_window"),
        body="Q, head_map",
        reply=_ONLY_OUTPUT,
    ),
    BinaryCommand(
        code=0x27,
        command="ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED",
        handler=query_sparse_auto_fused,
        meta=_meta("H_q", "D", "B", "K_top", "H_kv", "S_suf", "fa_window"),
        body="Q, K_suf, V_suf, head_map",
        reply=_ONLY_OUTPUT,
    ),
)
