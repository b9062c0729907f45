"""The ATTEND forms with typed arguments: what the handlers of the RESP lane and of the binary lane both call.

Numbers come checked as integers, blobs as they were received. Each form checks what it was given, then what is stored,
then computes. All raise CommandError naming the argument; ColdMissError if the layer is COLD. Cancellation, of all of
them: a table that was to be changed is not changed, and what is being computed is finished and thrown away.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from pion.args import MAX_ID
from pion.commands import attend_arguments as arguments
from pion.commands.attend_common import (
    answer,
    attention,
    check_fits,
    check_place,
    check_shape,
    find,
    in_parts,
    load,
    reply_of,
    used,
    while_wanted,
)
from pion.commands.attend_parts import parts_of
from pion.commands.vstore_common import within
from pion.compute.attention import Blocks, Floats, Indices, Query
from pion.context import Context
from pion.later import Later
from pion.limits import ATTEND_HEADS_MAX, CONVERT_IN_THREAD_BYTES
from pion.replies import Blob, Buffer

_HEAD_BYTES: Final = 64
"""Checking the chosen rows of one head costs at least what checking so many bytes of indices does."""

Answer = bytes | Blob | Later
"""Output fp32, and the LSE behind it where the form has one. A `Later` is completed with these bytes."""


async def store(
    context: Context, sid: bytes, layer: int, heads: int, rows: int, head_dim: int, keys: Buffer, values: Buffer
) -> None:
    """ATTEND.PREFIX.STORE: make K and V `[H, N, D]` ready, in place of what the layer had.

    Raises OutOfMemoryError if they are larger than `--attend-bytes`; nothing changed then.
    """
    check_place(context, sid, layer)
    check_shape(heads, head_dim)
    within(rows, "N", 1, MAX_ID)
    sizes = heads, rows, head_dim
    k, v = (arguments.floats(keys, "K", "H x N x D", *sizes), arguments.floats(values, "V", "H x N x D", *sizes))
    state = attention(context)
    # Before it is copied to the device, which says how large it will be.
    state.slots.check_room(2 * k.size * (await state.worker.prepare()).value_bytes)
    resident = await load(context, lambda backend: backend.load(k, v))
    state.slots.put(sid, layer, resident, context.services.clock.monotonic_s())


async def query(
    context: Context, sid: bytes, layer: int, heads: int, head_dim: int, top_k: int, window: int, q: Buffer
) -> Answer:
    """ATTEND.PREFIX.QUERY."""
    check_place(context, sid, layer)
    check_shape(heads, head_dim)
    asked = arguments.queries(q, heads, head_dim)
    resident = find(context, sid, layer)
    check_fits(resident, heads, head_dim)
    used(context, sid, layer)
    window = _window(window, resident.rows)
    return await answer(context, resident, _query(asked, top_k, window, resident.rows))


async def query_fused(
    context: Context,
    sid: bytes,
    layer: int,
    heads: int,
    head_dim: int,
    suffix_rows: int,
    kv_heads: int,
    window: int,
    q: Buffer,
    keys: Buffer,
    values: Buffer,
    head_map: Buffer,
) -> Answer:
    """ATTEND.PREFIX.QUERY_FUSED."""
    check_place(context, sid, layer)
    check_shape(heads, head_dim, "H_q")
    within(kv_heads, "H_kv", 1, ATTEND_HEADS_MAX)
    asked = arguments.queries(q, heads, head_dim, "H_q")
    suffix = arguments.suffix(keys, values, kv_heads, suffix_rows, head_dim)
    mapped = _head_map(head_map, heads, kv_heads)
    resident = find(context, sid, layer)
    check_fits(resident, kv_heads, head_dim, "H_kv")
    used(context, sid, layer)
    window = _window(window, resident.rows)
    return await answer(
        context, resident, Query(q=asked, head_map=mapped, window=window, suffix=suffix, want_lse=False)
    )


async def query_sparse(
    context: Context,
    sid: bytes,
    layer: int,
    heads: int,
    head_dim: int,
    most: int,
    window: int,
    q: Buffer,
    indices: Buffer,
    counts: Buffer,
) -> Answer:
    """ATTEND.PREFIX.QUERY_SPARSE."""
    check_place(context, sid, layer)
    check_shape(heads, head_dim)
    within(most, "K_sparse_max", 1, MAX_ID)
    asked = arguments.floats(q, "Q", "H x D", heads, head_dim).reshape(heads, 1, head_dim)
    named = arguments.indices(indices, heads, most)
    counted = arguments.counts(counts, heads, most)
    resident = find(context, sid, layer)
    check_fits(resident, heads, head_dim)
    if named.nbytes + heads * (resident.rows + _HEAD_BYTES) > CONVERT_IN_THREAD_BYTES:
        chosen = await context.in_thread(arguments.chosen, named, counted, resident.rows, window)
    else:
        chosen = arguments.chosen(named, counted, resident.rows, window)
    used(context, sid, layer)
    # Rows outside the window are left out already.
    return await answer(context, resident, Query(q=asked, sparse=chosen, want_lse=False))


async def query_sparse_auto(
    context: Context,
    sid: bytes,
    layer: int,
    heads: int,
    head_dim: int,
    block: int,
    top: int,
    kv_heads: int,
    window: int,
    q: Buffer,
    head_map: Buffer,
    suffix: tuple[int, Buffer, Buffer] | None = None,
) -> Answer:
    """ATTEND.PREFIX.QUERY_SPARSE_AUTO; with `suffix`, its rows and blobs, ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED."""
    check_place(context, sid, layer)
    check_shape(heads, head_dim, "H_q")
    within(block, "B", 1, MAX_ID)
    within(top, "K_top", 1, MAX_ID)
    within(kv_heads, "H_kv", 1, ATTEND_HEADS_MAX)
    asked = arguments.floats(q, "Q", "H_q x D", heads, head_dim).reshape(heads, 1, head_dim)
    behind = None
    if suffix is not None:
        rows, keys, values = suffix
        behind = arguments.suffix(keys, values, kv_heads, rows, head_dim)
    mapped = _head_map(head_map, heads, kv_heads)
    resident = find(context, sid, layer)
    check_fits(resident, kv_heads, head_dim, "H_kv")
    arguments.check_blocks(resident.rows, window, block, top)
    used(context, sid, layer)
    window = _window(window, resident.rows)
    blocks = Blocks(rows=block, top=top)
    asked_whole = Query(q=asked, head_map=mapped, window=window, suffix=behind, sparse=blocks, want_lse=False)
    found = await answer(context, resident, asked_whole, may_leave=False)
    attention(context).slots.recount(sid, layer)  # block means may be kept now
    return found


async def query_batch(
    context: Context, heads: int, rows: int, head_dim: int, top_k: int, q: Buffer, keys: Buffer, values: Buffer
) -> Answer:
    """ATTEND.QUERYBATCH: K and V are used once and not kept."""
    check_shape(heads, head_dim)
    within(rows, "N", 1, MAX_ID)
    asked = arguments.queries(q, heads, head_dim)
    sizes = heads, rows, head_dim
    k, v = (arguments.floats(keys, "K", "H x N x D", *sizes), arguments.floats(values, "V", "H x N x D", *sizes))
    whole = _query(asked, top_k, 0, rows)
    parts = parts_of(whole, heads, rows)
    state = attention(context)
    worker = state.worker
    if len(parts) == 1:
        # Loaded and computed in one go, so that what waits holds no copy of K and V.
        once = partial(worker.call, lambda backend: backend.attend_once(k, v, whole))
        return reply_of(await while_wanted(context, once), whole)

    async def compute() -> bytes | Blob:
        async with state.batching:
            resident = await worker.call(lambda backend: backend.load(k, v))
            return await in_parts(
                context, whole, parts, lambda part: worker.call(lambda backend: backend.attend(resident, [part])[0])
            )

    return await while_wanted(context, compute, len(parts))


def _query(asked: Floats, top_k: int, window: int, rows: int) -> Query:
    """Queries that mean the same are written the same, so that they are answered together."""
    visible = window or rows
    return Query(q=asked, top_k=0 if top_k >= visible else top_k, window=window, want_lse=asked.shape[1] > 1)


def _head_map(blob: Buffer, heads: int, kv_heads: int) -> Indices | None:
    found = arguments.head_map(blob, heads, kv_heads)
    return None if heads == kv_heads and bool((found == np.arange(heads)).all()) else found


def _window(window: int, rows: int) -> int:
    return 0 if window >= rows else window
