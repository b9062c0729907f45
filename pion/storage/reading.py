"""Gathering rows for a reply: references to immutable blocks, taken synchronously, so a reply is one atomic view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import attrs

from pion.config import CONVERT_IN_THREAD_BYTES, CONVERT_PIECE_BYTES
from pion.errors import CommandError
from pion.replies import Blob, Buffer, Stream
from pion.storage.block import Block, MissingRowError
from pion.storage.formats import Format, Wire, from_native, wire_row_bytes
from pion.storage.schema import LayerSpec
from pion.storage.unit import Side, Unit

JOIN_SPANS = 64
JOIN_SPAN_BYTES = 8 * 1024
"""From 64 spans on, spans that are this small on average are copied together: a buffer each costs more to send."""


@attrs.frozen(eq=False)
class Span:
    """Rows [start, stop) of one block. Holding it keeps the block, and its charge, alive."""

    block: Block
    start: int
    stop: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.stop - self.start

    def view(self) -> memoryview:
        """The stored bytes, without a copy."""
        return self.block.view(self.start, self.stop, self.row_bytes)


def gather(unit: Unit, side: Side, layer: int, start: int, stop: int) -> list[Span]:
    """Rows [start, stop) of one layer, in order. Raises CommandError naming the first row that is not there."""
    schema = unit.schema(side)
    assert schema is not None  # noqa: S101  the caller looked the session up
    spec = schema.layer(layer)
    if start >= stop or not spec.row_bytes:
        return []
    rows = unit.layer(side, layer)
    try:
        if rows is None:
            raise MissingRowError(start)
        return [Span(block, first, last, spec.row_bytes) for block, first, last in rows.gather(start, stop)]
    except MissingRowError as error:
        raise CommandError(f"no row {error.row} in layer {layer}") from None


def gather_chain(unit: Unit, side: Side, layer: int, start: int, stop: int) -> list[Span]:
    """Rows at positions [start, stop) of the whole text, taken from the unit and its ancestors.

    Raises CommandError naming the first row that is not there, by its id in the prefix that should hold it.
    """
    parts: list[list[Span]] = []
    owner: Unit | None = unit
    while owner is not None and start < stop:
        first = max(start, owner.offset)
        if first < stop:
            parts.append(gather(owner, side, layer, first - owner.offset, stop - owner.offset))
            stop = first
        owner = owner.parent
    return [span for part in reversed(parts) for span in part]


def reply(spans: Sequence[Span], spec: LayerSpec, wire: Wire) -> Blob | Stream:
    """The rows as a bulk string in the wire's type.

    The stored bytes go out as they are if the types agree and the spans aren't many small ones; otherwise the reply is
    made (converted, or only copied together), in pieces if it is large.
    """
    rows = sum(span.rows for span in spans)
    fmt, dim = spec.format, spec.dim
    width = wire_row_bytes(wire, fmt, dim)
    total = rows * width
    if not total:
        return Blob((), 0)
    same = wire is Wire.NATIVE or wire is fmt.wire
    if same and (len(spans) < JOIN_SPANS or total > len(spans) * JOIN_SPAN_BYTES):
        return Blob([span.view() for span in spans], total, spans)
    if total <= CONVERT_IN_THREAD_BYTES:
        return Blob((_convert(spans, wire, fmt, dim),), total)
    per_piece = max(1, CONVERT_PIECE_BYTES // width)
    return Stream(
        total,
        _Pieces(spans, per_piece, wire, fmt, dim),
        in_thread=min(rows, per_piece) * width > CONVERT_IN_THREAD_BYTES and not same,
    )


def _convert(spans: Sequence[Span], wire: Wire, fmt: Format, dim: int) -> Buffer:
    raw: Buffer = spans[0].view() if len(spans) == 1 else b"".join(span.view() for span in spans)
    return from_native(raw, wire, fmt, sum(span.rows for span in spans), dim)


@attrs.frozen(eq=False)
class _Pieces:
    """The pieces of a converted reply, each a function that makes it; holds the blocks until it goes itself."""

    spans: Sequence[Span]
    rows: int
    wire: Wire
    fmt: Format
    dim: int

    def __iter__(self) -> Iterator[Callable[[], Buffer]]:
        batch: list[Span] = []
        room = self.rows
        for span in self.spans:
            start = span.start
            while start < span.stop:
                stop = min(span.stop, start + room)
                batch.append(Span(span.block, start, stop, span.row_bytes))
                room -= stop - start
                start = stop
                if not room:
                    yield partial(_convert, batch, self.wire, self.fmt, self.dim)
                    batch, room = [], self.rows
        if batch:
            yield partial(_convert, batch, self.wire, self.fmt, self.dim)
