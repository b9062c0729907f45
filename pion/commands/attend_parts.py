"""A query in parts: of so many queries, and of so many query heads, that one part takes little memory and time.

Three things grow with a request and not with what is stored: the scores, the copies of K and V that are made for query
heads which share them in no regular way or choose their rows, and the products, most of all those that are made without
a BLAS where the highest scores decide what is read. All are bounded here, so that a small request can't ask for all the
memory of the machine, or for the compute thread for seconds. Nearly all queries are one part.
"""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np

from pion.compute.attention import VALUE_BYTES, Attended, Blocks, Floats, Indices, Query, Suffix
from pion.limits import ATTEND_COPY_BYTES, ATTEND_EXACT_PRODUCTS, ATTEND_PRODUCTS, ATTEND_SCORE_BYTES

_K_AND_V: Final = 2


@attrs.frozen(eq=False)
class Part:
    """Queries `first` to `last - 1` of some query heads; `heads` None: of all."""

    heads: np.ndarray | None
    first: int
    last: int

    def query(self, whole: Query) -> Query:
        """This part of a query. Copies; may be called in a thread."""
        q, head_map, behind = whole.q, whole.head_map, whole.suffix
        if behind is not None and self.last < q.shape[1]:
            # The last query of the part sees so many suffix rows; those behind them are nobody's in it.
            end = max(0, behind.keys.shape[1] - q.shape[1] + self.last)
            behind = Suffix(_head(behind.keys, end), _head(behind.values, end))
        q = q[:, self.first : self.last]
        if self.heads is not None:
            assert head_map is not None  # noqa: S101  only heads that share K and V are divided
            q, head_map = q[self.heads], head_map[self.heads]
        return attrs.evolve(whole, q=np.ascontiguousarray(q), head_map=head_map, suffix=behind)

    def put(self, answer: Attended, output: Floats, lse: Floats | None) -> None:
        """Copy its answer to where it belongs in the whole one; may be called in a thread."""
        heads = slice(None) if self.heads is None else self.heads
        output[heads, self.first : self.last] = answer.output
        if lse is not None:
            lse[heads, self.first : self.last] = answer.lse


def _head(rows: Floats, end: int) -> Floats:
    return np.ascontiguousarray(rows[:, :end])


def parts_of(query: Query, kv_heads: int, stored: int) -> list[Part]:
    """The parts in which a query about a layer of so many heads and rows is answered."""
    heads, count, width = query.q.shape
    visible = min(stored, query.window or stored)
    rows = visible + (query.suffix.keys.shape[1] if query.suffix is not None else 0)
    scores = VALUE_BYTES * rows  # of one query of one head, as all of these
    shared, copied, exact = _sharing(query.head_map, kv_heads), 0, 0
    if isinstance(query.sparse, Blocks):
        copied = _K_AND_V * VALUE_BYTES * width * min(visible, query.sparse.top * query.sparse.rows)
        exact = width * -(-visible // query.sparse.rows)
    elif not shared:
        copied = _K_AND_V * VALUE_BYTES * width * rows
    if query.top_k:
        exact = width * visible
    multiplied = width * rows if query.sparse is None else 0  # else few of them are
    # What is bounded, and how much of it one query of one head takes.
    bounds = [(ATTEND_SCORE_BYTES, scores), (ATTEND_EXACT_PRODUCTS, exact)]
    most = min(limit // each for limit, each in [*bounds, (ATTEND_COPY_BYTES, copied)] if each)
    # Heads are not divided for these: each part would read all of K and V again, which for one query is the work.
    bounds.append((ATTEND_PRODUCTS, multiplied))
    found = []
    for some in _divided(heads, shared, most):
        size = heads if some is None else len(some)
        step = max(1, min(limit // (each * size) for limit, each in bounds if each))
        found += [Part(some, first, min(count, first + step)) for first in range(0, count, step)]
    return found


def _divided(heads: int, shared: int, most: int) -> list[np.ndarray | None]:
    """Query heads by their numbers, `most` at a time where that can be. None: all of them.

    Heads that share evenly stay so: each part has as many of every KV head. So it may have one of each, however many
    KV heads there are; that is no more than what is stored.
    """
    if heads <= most or shared == 1:
        return [None]
    numbers = np.arange(heads)
    if not shared:
        step = max(1, most)
        return [numbers[first : first + step] for first in range(0, heads, step)]
    by_group = numbers.reshape(heads // shared, shared)
    step = max(1, most // len(by_group))
    return [by_group[:, first : first + step].reshape(-1) for first in range(0, shared, step)]


def _sharing(head_map: Indices | None, kv_heads: int) -> int:
    """How many neighbouring query heads share each KV head; 0 if they do so in no regular way."""
    if head_map is None:
        return 1
    size, rest = divmod(len(head_map), kv_heads)
    return 0 if rest or not np.array_equal(head_map, np.arange(len(head_map)) // size) else size
