"""Attention over MLX, on whatever its default device is. Only operations that every device of MLX has.

How it works. On a GPU, a query that reads all visible rows and wants no LSE is one
`mx.fast.scaled_dot_product_attention`, which on the CPU is slower than its parts. Everything else is made of partials
(see `mlx_parts`), which merge exactly: prefix and suffix are never copied together, and queries with different suffixes
still read the prefix in one call. Query heads that share a KV head are more queries of that head,
`[H_kv, group * M, D]`; K and V are copied for them only if `head_map` is irregular.

Where the highest scores decide what is read (`top_k`, blocks), q . k is multiplied and summed rather than a matrix
product: the kernels of a BLAS round a row differently according to its place, and then equal keys would not tie. The
CPU has that done by NumPy.

In fp16, K, V and Q are rounded to it. A GPU keeps K and V that way. The CPU has no half-precision arithmetic in MLX
(thirteen times slower), so there the rounded values are kept in fp32. Arithmetic other than the fast call's is in fp32.

Used on the compute thread, where arrays are made and evaluated; letting go of an evaluated one is safe on any thread.
Nothing may import this before `device.prepare()`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Final

import attrs
import mlx.core as mx
import numpy as np

from pion.compute import device
from pion.compute.attention import Attended, Blocks, Chosen, Floats, Indices, Query, Resident, Suffix
from pion.compute.mlx_parts import (
    NOTHING,
    Compute,
    Heads,
    Partial,
    are_highest,
    block_means,
    exact_products,
    in_pieces,
    partial,
    pieces,
    products,
    weigh,
)
from pion.compute.threads import one_blas_thread

CACHED_BLOCK_ROWS: Final = 16
"""Means of smaller blocks aren't kept: they would take more than a 32nd of the memory of K and V, or more than a 16th
where those are held in fp16. The means are always fp32.
"""

COPY_VALUES: Final = 1 << 20
"""Values that one call of `mx.array` copies, a few milliseconds, where it has to."""

SMALL_VALUES: Final = 1 << 16
"""Arrays of up to so many values are copied by `mx.array` anyway: that is the quickest way, and well below 1 ms."""

SINGLE_THREAD_QUERIES: Final = 32
"""Calls of so many queries stay on one thread of the CPU; with more, the products are worth sharing."""


@attrs.define(eq=False)
class MlxResident:
    """K and V of one layer, `[H_kv, N, D]` on the device."""

    keys: mx.array
    values: mx.array
    _kept: tuple[int, mx.array] | None = None
    """Block means and the rows of a block: one reference, as another thread may let go of it."""

    @property
    def heads(self) -> int:
        """H_kv."""
        return int(self.keys.shape[0])

    @property
    def rows(self) -> int:
        """N."""
        return int(self.keys.shape[1])

    @property
    def head_dim(self) -> int:
        """D."""
        return int(self.keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Memory of K, V and the block means that are kept: those of the block size asked for last."""
        kept = self._kept
        return int(self.keys.nbytes + self.values.nbytes + (kept[1].nbytes if kept is not None else 0))

    def means(self, rows: int, first: int) -> mx.array:
        """Mean keys of blocks of `rows` rows from row `first` on, fp32 `[H_kv, blocks, D]`; those from 0 are kept."""
        kept = self._kept
        if first == 0 and kept is not None and rows == kept[0]:
            return kept[1]
        means = block_means(self.keys[:, first:], rows)
        if first == 0 and rows >= CACHED_BLOCK_ROWS:
            mx.eval(means)
            self._kept = rows, means
        return means

    def forget_means(self) -> None:
        """Let go of block means that are kept, on any thread."""
        self._kept = None


@attrs.frozen
class MlxBackend:
    """The device that MLX computes on by default, in fp32 or fp16. `gpu`: compute the way that suits one."""

    fp16: bool = False
    gpu: bool = attrs.field(factory=lambda: mx.default_device().type == mx.gpu)
    name: str = attrs.field(default="mlx", init=False)

    @property
    def device(self) -> str:
        """For example `cpu, OpenBLAS, MLX 0.32.4, fp32`."""
        if self.gpu:
            place = "gpu, Metal" if mx.metal.is_available() else "gpu, CUDA"
        else:
            blas = {"openblas": "OpenBLAS", "system": "Accelerate"}
            place = f"cpu, {blas.get(device.prepare().state, 'reference BLAS')}"
        precision = "fp32" if not self.fp16 else "fp16" if self.gpu else "fp16 (rounded to, computed in fp32)"
        return f"{place}, MLX {device.version('mlx')}, {precision}"

    @property
    def value_bytes(self) -> int:
        """4, or 2 for fp16 on a GPU."""
        return 2 if self.fp16 and self.gpu else 4

    def load(self, keys: Floats, values: Floats) -> MlxResident:
        """Copy K and V `[H, N, D]`. Raises MemoryError."""
        with _memory_errors():
            return self._resident(self._copied(keys), self._copied(values))

    def load_rows(self, keys: Floats, values: Floats, heads: int) -> MlxResident:
        """Copy K and V from rows, `[N, H * D]` each. Raises MemoryError."""

        def turned(rows: Floats) -> mx.array:
            split = self._copied(rows).reshape(rows.shape[0], heads, rows.shape[1] // heads)
            return mx.contiguous(self._rounded(split).swapaxes(0, 1))

        with _memory_errors():
            return self._resident(turned(keys), turned(values))

    def _copied(self, values: Floats) -> mx.array:
        """An array of the device. `mx.array` holds the interpreter until all is copied, half a second for 128 MiB, so
        that is left to NumPy, which doesn't; where NumPy can't write, it is done in pieces.
        """
        if values.size <= SMALL_VALUES:
            return mx.array(values)
        if self.gpu:
            flat = values.reshape(-1)
            parts = [mx.array(flat[at : at + COPY_VALUES]) for at in range(0, flat.size, COPY_VALUES)]
            return mx.concatenate(parts).reshape(values.shape)
        copy = mx.zeros(values.shape)
        mx.eval(copy)
        np.asarray(memoryview(copy))[...] = values  # type: ignore[arg-type]  # it has the buffer protocol
        return copy

    def _resident(self, keys: mx.array, values: mx.array) -> MlxResident:
        keys, values = self._rounded(keys), self._rounded(values)
        mx.eval(keys, values)
        return MlxResident(keys, values)

    def _rounded(self, values: mx.array) -> mx.array:
        """In this backend's precision, as K and V are held."""
        if not self.fp16:
            return values
        half = values.astype(mx.float16)
        return half if self.gpu else half.astype(mx.float32)

    def attend_once(self, keys: Floats, values: Floats, query: Query) -> Attended:
        """Answer a query about K and V that are not kept. Raises MemoryError."""
        return self.attend(self.load(keys, values), [query])[0]

    def attend(self, resident: Resident, queries: Sequence[Query]) -> list[Attended]:
        """Answer all, in order. Raises MemoryError."""
        if not isinstance(resident, MlxResident):
            msg = f"resident must be one of this backend's, got {type(resident).__name__}"
            raise TypeError(msg)
        groups: dict[Hashable, list[int]] = {}
        for number, query in enumerate(queries):
            groups.setdefault(self._kind(query), []).append(number)
        answers: dict[int, Attended] = {}
        small = not self.gpu and sum(query.q.shape[1] for query in queries) <= SINGLE_THREAD_QUERIES
        with _memory_errors(), one_blas_thread() if small else nullcontext():
            for numbers in groups.values():
                group = [queries[number] for number in numbers]
                answer = self._fast if self.gpu and _is_plain(group[0]) else self._merged
                answers.update(zip(numbers, answer(resident, group), strict=True))
        return [answers[number] for number in range(len(queries))]

    def _kind(self, query: Query) -> Hashable:
        """Queries of one kind read the prefix in one call."""
        head_map = None if query.head_map is None else query.head_map.tobytes()
        sparse = id(query.sparse) if isinstance(query.sparse, Chosen) else query.sparse
        return query.q.shape[0], head_map, query.top_k, query.window, sparse, self.gpu and _is_plain(query)

    def _fast(self, resident: MlxResident, group: Sequence[Query]) -> list[Attended]:
        """Queries that read all visible rows and want no LSE."""
        heads = Heads.of(group[0].head_map, resident.heads)
        first = _first_visible(group[0], resident)
        keys, values = heads.expand(resident.keys[:, first:]), heads.expand(resident.values[:, first:])
        together, scale = _joined(group), 1 / math.sqrt(resident.head_dim)

        def compute(q: Floats) -> Floats:
            found = mx.fast.scaled_dot_product_attention(
                heads.group(self._rounded(self._copied(q)))[None], keys[None], values[None], scale=scale
            )
            found = found.astype(mx.float32).reshape(q.shape)
            mx.eval(found)
            return np.array(found)

        parts = list(pieces(together.shape[1], together.shape[0] * int(keys.shape[1])))
        if len(parts) == 1:
            output = compute(together)
        else:
            output = np.concatenate([compute(together[:, first:last]) for first, last in parts], axis=1)
        nothing = np.empty((output.shape[0], 0), np.float32)
        return [Attended(each, nothing) for each in _split(output, group)]

    def _merged(self, resident: MlxResident, group: Sequence[Query]) -> list[Attended]:
        """Any queries that ask the same of the prefix, each with its own suffix.

        Values are taken to be finite. Those that aren't show in the answer, and then it is worked out with more care.
        """
        answers = self._computed(resident, group, guard=False)
        doubtful = [
            number
            for number, query in enumerate(group)
            if _skips_rows(query) and not np.isfinite(answers[number].output).all()
        ]
        if doubtful:
            again = self._computed(resident, [group[number] for number in doubtful], guard=True)
            for number, answer in zip(doubtful, again, strict=True):
                answers[number] = answer
        return answers

    def _computed(self, resident: MlxResident, group: Sequence[Query], *, guard: bool) -> list[Attended]:
        q = self._rounded(self._copied(_joined(group))).astype(mx.float32)
        prefix = in_pieces(q, *self._prefix(resident, group[0], guard=guard))
        outputs, sums, start = [], [], 0
        for query in group:
            end = start + query.q.shape[1]
            whole = prefix.queries(start, end)
            if query.suffix is not None and query.suffix.keys.shape[1]:
                whole = whole.merge(self._suffix(q[:, start:end], query.suffix, query.head_map, guard=guard))
            outputs.append(whole.output())
            sums.append(whole.lse() if query.want_lse else None)
            start = end
        mx.eval(outputs, [each for each in sums if each is not None])
        nothing = np.empty((q.shape[0], 0), np.float32)
        return [
            Attended(np.array(output), nothing if lse is None else np.array(lse))
            for output, lse in zip(outputs, sums, strict=True)
        ]

    def _prefix(self, resident: MlxResident, query: Query, *, guard: bool) -> tuple[Compute, int]:
        """What a query reads of the prefix, and how many values an intermediate array has for one query."""
        first = _first_visible(query, resident)
        rows = resident.rows - first
        q_heads = query.q.shape[0]
        if isinstance(query.sparse, Chosen):
            return _chosen(resident, query.sparse, query.head_map, first), query.sparse.indices.size
        if isinstance(query.sparse, Blocks) and query.sparse.top * query.sparse.rows < rows:
            chosen_values = q_heads * query.sparse.top * query.sparse.rows * resident.head_dim
            blocks_values = q_heads * -(-rows // query.sparse.rows)
            by_block = _blocks(resident, query.sparse, query.head_map, first, gpu=self.gpu)
            return by_block, max(chosen_values, blocks_values)
        top = query.top_k if query.top_k < rows else 0
        heads = Heads.of(query.head_map, resident.heads)
        keys = heads.expand(resident.keys[:, first:]).astype(mx.float32)
        values = heads.expand(resident.values[:, first:]).astype(mx.float32)

        def compute(q: mx.array, _first: int) -> Partial:
            if not top:
                return partial(heads, heads.ungroup(products(heads.group(q), keys), q), values)
            found = heads.ungroup(exact_products(heads.group(q), keys, gpu=self.gpu), q)
            return partial(heads, found, values, are_highest(found, top), guard=guard)

        return compute, q_heads * rows

    def _suffix(self, q: mx.array, suffix: Suffix, head_map: Indices | None, *, guard: bool) -> Partial:
        heads = Heads.of(head_map, suffix.keys.shape[0])
        keys, values = (heads.expand(self._rounded(self._copied(each))) for each in (suffix.keys, suffix.values))
        keys, values = keys.astype(mx.float32), values.astype(mx.float32)
        rows, count = int(keys.shape[1]), int(q.shape[1])

        def compute(q: mx.array, first: int) -> Partial:
            found = heads.ungroup(products(heads.group(q), keys), q)
            last_seen = mx.arange(rows - count + first, rows - count + first + q.shape[1])
            seen = mx.arange(rows) <= last_seen[:, None] if count > 1 else None
            return partial(heads, found, values, seen, guard=guard)

        return in_pieces(q, compute, int(q.shape[0]) * rows)


def _skips_rows(query: Query) -> bool:
    """Whether rows are read together that some of its queries must not read: what is gathered has none of the kind."""
    return bool(query.top_k) or (query.suffix is not None and query.q.shape[1] > 1)


def _is_plain(query: Query) -> bool:
    return not query.want_lse and not query.top_k and query.sparse is None and query.suffix is None


def _first_visible(query: Query, resident: MlxResident) -> int:
    return max(0, resident.rows - query.window) if query.window else 0


def _joined(group: Sequence[Query]) -> Floats:
    return group[0].q if len(group) == 1 else np.concatenate([query.q for query in group], axis=1)


def _split(output: Floats, group: Sequence[Query]) -> Iterator[Floats]:
    """Each query's part of the answer, with memory of its own."""
    if len(group) == 1:
        yield output
        return
    start = 0
    for query in group:
        end = start + query.q.shape[1]
        yield output[:, start:end].copy()
        start = end


def _chosen(resident: MlxResident, chosen: Chosen, head_map: Indices | None, first: int) -> Compute:
    """Rows that the caller chose: gathered, `[H_q, K, D]`."""
    rows, counts = chosen.indices.astype(np.int64), chosen.counts.astype(np.int64)
    seen = (np.arange(rows.shape[1]) < counts[:, None]) & (rows >= first)
    heads = np.arange(rows.shape[0]) if head_map is None else head_map.astype(np.int64)
    places = mx.array(heads[:, None] * resident.rows + np.where(seen, rows, 0))
    visible = None if seen.all() else mx.array(seen)
    keys, values = _gathered(resident.keys, places), _gathered(resident.values, places, visible)

    def compute(q: mx.array, _first: int) -> Partial:
        return partial(Heads(1), products(q, keys), values, None if visible is None else visible[:, None])

    return compute


def _blocks(resident: MlxResident, blocks: Blocks, head_map: Indices | None, first: int, *, gpu: bool) -> Compute:
    """Blocks that each query of each head chooses by their mean key: gathered, `[H_q, M, top * rows, D]`."""
    means = resident.means(blocks.rows, first)
    count, end = int(means.shape[1]), resident.rows
    heads = Heads.of(head_map, resident.heads)
    kv_heads = np.arange(resident.heads) if head_map is None else head_map
    starts = mx.array(kv_heads.astype(np.int64) * end)[:, None, None]

    def compute(q: mx.array, _first: int) -> Partial:
        by_block = heads.ungroup(exact_products(heads.group(q), heads.expand(means), gpu=gpu), q)
        numbers = mx.where(are_highest(by_block, blocks.top), mx.arange(count), count)
        numbers = mx.sort(numbers, axis=-1)[..., : blocks.top]
        rows = (numbers[..., None] * blocks.rows + mx.arange(blocks.rows)).flatten(-2) + first
        seen = rows < end if (end - first) % blocks.rows else None
        places = starts + mx.minimum(rows, end - 1)
        keys, values = _gathered(resident.keys, places), _gathered(resident.values, places, seen)
        found = products(q[:, :, None], keys).squeeze(-2)
        highest, weights = weigh(found if seen is None else mx.where(seen, found, NOTHING), resident.head_dim)
        weighted = (weights[:, :, None] @ values).squeeze(-2)
        return Partial(highest, weights.sum(-1, keepdims=True), weighted)

    return compute


def _gathered(rows: mx.array, places: mx.array, seen: mx.array | None = None) -> mx.array:
    """Rows of `[H, N, D]` by `head * N + row`, in fp32. Zeros where they aren't seen, if that is given: the row that
    is in such a place may be infinite.
    """
    found = mx.take(rows.reshape(-1, rows.shape[-1]), places, axis=0).astype(mx.float32)
    return found if seen is None else mx.where(seen[..., None], found, 0.0)


@contextmanager
def _memory_errors() -> Iterator[None]:
    """MLX says with a RuntimeError that there is no memory."""
    try:
        yield
    except RuntimeError as error:
        if "alloc" in str(error).lower() or "memory" in str(error).lower():
            raise MemoryError(str(error)) from error
        raise
