"""What the commands of attention indexes do, with typed arguments: append, fetch, and attention over all rows.

A query or a fetch is answered for the rows that the index had when it came. Rows never change, so the index may grow or
be dropped meanwhile. One thing a drop may take from a query: if nobody has begun to copy the rows into one piece, there
is no memory reserved for that any more, and the query is refused.

Queries are computed by NumPy over the rows where they lie: nothing is copied, to a device or elsewhere. A query reads
the index whole, and for few vectors that is most of its time, so a copy would cost more than a faster device saves.
They have a thread of their own, one for all indexes, for which other commands don't wait. On it each query is computed
in parts, and others get their turn between.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Final

import attrs
import numpy as np
import trio

from pion.args import show
from pion.commands.wanted import unless_left
from pion.compute.attention import Backend, Query
from pion.compute.numpy_attention import NumpyBackend
from pion.compute.numpy_threads import one_numpy_thread
from pion.context import Context, Services
from pion.errors import CommandError, OutOfMemoryError
from pion.limits import ATTEND_CROWD, ATTEND_EXACT_PRODUCTS, ATTEND_PRODUCTS, CONVERT_IN_THREAD_BYTES
from pion.replies import Blob, Buffer
from pion.storage.attention_index import AttentionIndex, IndexTable
from pion.storage.attention_index_blocks import IndexBlock, arrays, fill
from pion.storage.attention_index_log import AttentionIndexLog
from pion.storage.ledger import Memory

PLUGIN: Final = "attention_index"

BACKEND: Final[Backend] = NumpyBackend()
"""What computes: without a copy, in fp32 whatever the ATTEND family computes in."""

NO_MEMORY: Final = "there is no memory to compute this query now"

SCORE_PRODUCTS: Final = 200
"""What is done with a score once it is there, its exponential or its place in the order, takes as long as so many
products in the same query: 10 ns with a BLAS, 150 ns without."""


@attrs.define(eq=False)
class Gathering:
    """The rows of one index are being copied into one piece, or are about to be."""

    lock: trio.Lock = attrs.field(factory=trio.Lock)
    """Held by who copies, so that queries which come together copy once."""
    copy: IndexBlock | None = None
    """The last copy. Who has waited takes it, even if it is not in the index: that was changed or dropped meanwhile."""


@attrs.define(eq=False)
class Indexes:
    """The plugin's state: kept in `services.state`, used on the event loop only."""

    log: AttentionIndexLog
    gathering: dict[AttentionIndex, Gathering] = attrs.field(factory=dict)
    """The indexes whose rows somebody copies."""
    computing: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1))
    """The thread that computes: one, so that what is computed with takes bounded memory. First come, first served."""

    @property
    def table(self) -> IndexTable:
        """The indexes."""
        return self.log.table

    @property
    def waiting(self) -> int:
        """Queries that wait for the thread."""
        return self.computing.statistics().tasks_waiting


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

    `vectors` is fp32 `[M, D]`, M at least 1; the answer too, charged until it is sent. Raises CommandError for a bad
    argument, an index that is not there, damaged rows, or a client that left; OutOfMemoryError if there is no memory to
    compute with. Cancellation: at once; the part that is being computed is finished and thrown away.
    """
    state = indexes_of(context.services)
    index = state.table.index(name)
    dim, rows = index.dim, index.rows
    if not len(vectors) or len(vectors) % index.row_bytes:
        raise CommandError(
            f"Q must be one or more vectors of D = {dim} fp32 values ({index.row_bytes} bytes each), "
            f"got {len(vectors)} bytes"
        )
    q = np.frombuffer(vectors, np.float32).reshape(1, -1, dim)
    count = q.shape[1]
    state.table.queries += count
    block = await _one_piece(context, state, index, rows)
    del index  # if it was dropped, its pieces may go
    if top_k >= rows:
        top_k = 0
    most = vectors_at_once(rows, dim, top_k)
    parts = range(0, count, most)

    async def compute() -> Memory:
        answer = _answer(len(vectors), state.table)
        for first in parts:
            query = Query(q=q[:, first : first + most], top_k=top_k, want_lse=False)
            part = partial(_attend, block, dim, rows, query, answer, first)
            if not await trio.to_thread.run_sync(part, abandon_on_cancel=True, limiter=state.computing):
                raise OutOfMemoryError(NO_MEMORY)
        return answer

    crowded = state.waiting + len(parts) > ATTEND_CROWD
    answer = await (unless_left(context, compute) if crowded else compute())
    return Blob((memoryview(answer.buffer),), answer.nbytes, answer)  # type: ignore[arg-type]  # NumPy's stubs


def vectors_at_once(rows: int, dim: int, top_k: int) -> int:
    """How many vectors are computed in one part, at least one: 100 to 200 ms of work, and a few times 20 MiB of scores.

    `top_k` 0 multiplies matrices with a BLAS. Else equal keys must tie, which a BLAS doesn't promise; without it the
    same takes ten times as long.
    """
    products = rows * (dim + SCORE_PRODUCTS)
    return max(1, (ATTEND_EXACT_PRODUCTS if top_k else ATTEND_PRODUCTS) // products)


def _attend(block: IndexBlock, dim: int, rows: int, query: Query, answer: Memory, first: int) -> bool:
    """On the thread. Whoever asked may have gone: block and answer are held here, with their charge.

    Returns whether there was memory: an exception from a thread would hold them until the next garbage collection.
    """
    keys, values = arrays(block, dim)
    try:
        with one_numpy_thread():
            found = BACKEND.attend_once(keys[None, :rows], values[None, :rows], query).output[0]
    except MemoryError:
        return False
    np.frombuffer(answer.buffer, np.float32).reshape(-1, dim)[first : first + len(found)] = found
    return True


def _answer(nbytes: int, table: IndexTable) -> Memory:
    """Memory for an answer, charged until the last reference to it is gone. Raises OutOfMemoryError."""
    try:
        memory = Memory(np.empty(nbytes, np.uint8), table.ledger)
    except MemoryError as error:
        raise OutOfMemoryError(NO_MEMORY) from error
    memory.drop(memory.nbytes)
    return memory


async def _one_piece(context: Context, state: Indexes, index: AttentionIndex, rows: int) -> IndexBlock:
    """A block in memory that begins with the first `rows` rows of an index; copied together, once, if they are several.
    Fewer are left if the disk refused the last ones meanwhile.

    Raises CommandError if rows are damaged on disk, or the index was dropped before the copy was begun;
    OutOfMemoryError. Cancellation: the index stays as it was.
    """
    found = index.piece(rows)
    if found is not None:
        return found
    gathering = state.gathering.setdefault(index, Gathering())
    try:
        async with gathering.lock:
            found = index.piece(rows)
            if found is None:
                found = gathering.copy
                if found is None or found.rows < min(rows, index.rows):
                    found = gathering.copy = await _gather(context, state, index)
            return found
    finally:
        if not gathering.lock.locked():  # nobody waits for it either
            state.gathering.pop(index, None)


async def _gather(context: Context, state: Indexes, index: AttentionIndex) -> IndexBlock:
    sources = index.blocks
    await _verified(context, state, index, sources)
    table = state.table
    if table.find(index.name) is not index:  # nothing is reserved for it any more
        raise CommandError(f"no index {show(index.name)}: it was dropped before the query could read it")
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
