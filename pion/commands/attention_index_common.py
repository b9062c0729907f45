"""What the commands of attention indexes do, with typed arguments: append, fetch, and attention over all rows.

A query or a fetch works on the blocks that the index had when it came. They never change, so the index may grow or be
dropped meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import attrs
import numpy as np
import trio

from pion.args import show
from pion.compute.attention import Attended, Backend, Floats, Query, Resident
from pion.context import Context, Services
from pion.errors import CommandError, OutOfMemoryError
from pion.limits import ATTEND_SCORE_BYTES, CONVERT_IN_THREAD_BYTES
from pion.replies import Blob, Buffer
from pion.storage.attention_index import AttentionIndex, IndexTable
from pion.storage.attention_index_blocks import IndexBlock, arrays, fill
from pion.storage.attention_index_log import AttentionIndexLog
from pion.storage.ledger import Memory

T = TypeVar("T")

PLUGIN: Final = "attention_index"

ATTEND: Final = "attend"
"""The plugin whose compute thread is used if it is loaded."""


@attrs.define(eq=False)
class Indexes:
    """The plugin's state: kept in `services.state`, used on the event loop only."""

    log: AttentionIndexLog
    gathering: dict[AttentionIndex, trio.Lock] = attrs.field(factory=dict)
    """Held while the rows of an index are copied into one piece, so that queries which come together copy them once."""
    backend: Backend | None = None
    """What computes when nobody else does: made at its first use."""

    @property
    def table(self) -> IndexTable:
        """The indexes."""
        return self.log.table


def indexes_of(services: Services) -> Indexes:
    """The state of one server."""
    found: Indexes = services.state[PLUGIN]
    return found


async def logged(context: Context, waiting: Awaitable[None] | None) -> None:
    """See to it that the reply is not sent before the log has a change that was made.

    Cancellation: the change is made; only the wait ends.
    """
    if waiting is None:
        return
    if context.session.unlogged is not None:
        context.session.unlogged.append(waiting)
    else:
        await waiting


async def append_rows(context: Context, name: bytes, dim: int, count: int, keys: Buffer, values: Buffer) -> int:
    """Append `count` rows: `keys` and `values` are fp32 `[count, dim]` and have that length. Makes the index.

    Returns how many rows it has now. Raises CommandError; then nothing has changed. Cancellation: as `logged`.
    """
    rows, waiting = indexes_of(context.services).log.append_rows(name, dim, count, keys, values)
    await logged(context, waiting)
    return rows


async def drop_index(context: Context, name: bytes) -> bool:
    """Drop an index; returns whether it was there. Raises MisconfError. Cancellation: as `logged`."""
    found, waiting = indexes_of(context.services).log.drop_index(name)
    await logged(context, waiting)
    return found


async def fetch_rows(context: Context, name: bytes, start: int, stop: int) -> tuple[Blob, Blob]:
    """Keys and values of rows [start, stop), fp32 `[stop - start, D]` each, without a copy.

    Raises CommandError for what is not there, or is damaged on disk. Cancellation: nothing happened.
    """
    state = indexes_of(context.services)
    index = state.table.index(name)
    if start >= stop:
        return Blob((), 0), Blob((), 0)
    if stop > index.rows:
        raise CommandError(f"no row {max(start, index.rows)} in index {show(name)}, it has {index.rows}")
    spans = list(index.cover(start, stop))
    width, nbytes = index.row_bytes, (stop - start) * index.row_bytes
    await _verified(context, state, index, [block for block, _, _ in spans])
    views = [block.view(first, last, width) for block, first, last in spans]
    owners = [block for block, _, _ in spans]
    return Blob([keys for keys, _ in views], nbytes, owners), Blob([values for _, values in views], nbytes, owners)


async def attend(context: Context, name: bytes, top_k: int, vectors: Buffer) -> Blob:
    """Attention of each vector over all rows of an index, or over the `top_k` that score highest.

    `vectors` is fp32 `[M, D]`, M at least 1; the answer too. Raises CommandError for a bad argument, an index that is
    not there, or damaged rows; OutOfMemoryError if there is no memory to compute with.
    Cancellation: what is being computed is finished and thrown away.
    """
    state = indexes_of(context.services)
    index = state.table.index(name)
    width = index.row_bytes
    if not len(vectors) or len(vectors) % width:
        raise CommandError(
            f"Q must be one or more vectors of D = {index.dim} fp32 values ({width} bytes each), "
            f"got {len(vectors)} bytes"
        )
    q = np.frombuffer(vectors, np.float32).reshape(-1, index.dim)
    if not q.flags.aligned:
        q = q.copy()
    state.table.queries += len(q)
    block = await _one_piece(context, state, index)
    query = Query(q=q[None], top_k=top_k if top_k < block.rows else 0, want_lse=False)
    most = max(1, ATTEND_SCORE_BYTES // (4 * block.rows))
    if len(q) <= most:
        answer = await _compute(context, state, partial(_attend_once, block, index.dim, query))
        return _sent(answer.output, state.table)
    # In parts, so that the scores take bounded memory and others get their turn between.
    resident = await _compute(context, state, partial(_load, block, index.dim))
    output = np.empty(q.shape, np.float32)
    for first in range(0, len(q), most):
        part = attrs.evolve(query, q=q[None, first : first + most])
        answer = await _compute(context, state, partial(_attend, resident, part))
        output[first : first + most] = answer.output[0]
    return _sent(output, state.table)


# On the compute thread. Whoever asked may have gone: what is needed is held here, the block and its charge included.


def _attend_once(block: IndexBlock, dim: int, query: Query, backend: Backend) -> Attended:
    keys, values = arrays(block, dim)
    return backend.attend_once(keys[None], values[None], query)


def _load(block: IndexBlock, dim: int, backend: Backend) -> Resident:
    keys, values = arrays(block, dim)
    return backend.load(keys[None], values[None])


def _attend(resident: Resident, query: Query, backend: Backend) -> Attended:
    return backend.attend(resident, [query])[0]


def _sent(output: Floats, table: IndexTable) -> Blob:
    """An answer, charged until it is sent."""
    memory = Memory(output.reshape(-1).view(np.uint8), table.ledger)
    memory.drop(memory.nbytes)
    return Blob((memoryview(memory.buffer),), memory.nbytes, memory)  # type: ignore[arg-type]  # NumPy's stubs


async def _compute(context: Context, state: Indexes, function: Callable[[Backend], T]) -> T:
    """Run something on the compute thread of the ATTEND family, or with NumPy in a thread if that is not loaded."""
    attention = context.services.state.get(ATTEND)
    try:
        if attention is not None:
            call: Callable[[Callable[[Backend], T]], Awaitable[T]] = attention.worker.call
            return await call(function)
        if state.backend is None:
            from pion.compute.backends import make_backend  # only now: most servers never compute here

            state.backend = make_backend("numpy")
        return await context.in_thread(function, state.backend)
    except MemoryError as error:
        raise OutOfMemoryError("there is no memory to compute this query now") from error


async def _one_piece(context: Context, state: Indexes, index: AttentionIndex) -> IndexBlock:
    """All rows of an index as one block in memory; copied together, once, if they are several.

    Raises CommandError if rows are damaged on disk, OutOfMemoryError. Cancellation: the index stays as it was.
    """
    while not index.whole:
        lock = state.gathering.setdefault(index, trio.Lock())
        try:
            async with lock:
                if not index.whole:
                    return await _gather(context, state, index)
        finally:
            if not lock.locked():
                state.gathering.pop(index, None)
    return index.blocks[0]


async def _gather(context: Context, state: Indexes, index: AttentionIndex) -> IndexBlock:
    sources = index.blocks
    await _verified(context, state, index, sources)
    table = state.table
    table.index(index.name)  # what was dropped meanwhile has no room reserved
    target = filled = None
    try:
        try:
            target = table.begin_gather(index, sources)
        except MemoryError as error:
            raise OutOfMemoryError(f"there is no memory to read index {show(index.name)} now") from error
        if target.rows * index.row_bytes > CONVERT_IN_THREAD_BYTES:
            await context.in_thread(fill, target, sources, index.row_bytes)
        else:
            fill(target, sources, index.row_bytes)
        filled = target
    finally:
        table.end_gather(index, sources, filled)
    return target


async def _verified(context: Context, state: Indexes, index: AttentionIndex, blocks: Sequence[IndexBlock]) -> None:
    """Compare rows that lie in files with their checksums, in a thread. Raises CommandError if some are damaged."""
    doubtful = [block for block in blocks if block.doubtful]
    if doubtful and not await context.in_thread(_all_good, doubtful):
        state.log.drop_damaged(index)
        raise CommandError(f"no index {show(index.name)}: its bytes on disk are not what was stored, so it was dropped")


def _all_good(blocks: Sequence[IndexBlock]) -> bool:
    return all(block.verify() for block in blocks)
