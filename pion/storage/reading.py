"""Gathering rows for a reply: references to immutable blocks, taken synchronously, so a reply is one atomic view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import attrs

from pion.errors import CommandError
from pion.limits import CONVERT_IN_THREAD_BYTES, CONVERT_PIECE_BYTES
from pion.replies import Blob, Buffer, Check, Stream
from pion.storage.block import Block, MissingRowError
from pion.storage.formats import Format, Wire, from_native, wire_row_bytes
from pion.storage.region import MappedMemory
from pion.storage.schema import LayerSpec
from pion.storage.unit import Side, Unit
from pion.storage.verifying import Checks, Doubts

FETCH_PARTS_MAX: Final = 16_384
"""Pieces of stored layers that one command gathers with no checkpoint between them, so that it is one view of the
store: 6 us each on a busy machine, 0.1 s in all. 128 segments of a model with 64 layers are as many.
"""

JOIN_SPANS: Final = 64
JOIN_SPAN_BYTES: Final = 8 * 1024
"""From 64 spans on, spans that are this small on average are copied together: a buffer each costs more to send."""


PART_COST_BYTES: Final = 2 * 1024
"""Converting even one row costs as much as so many bytes: a few microseconds."""

GROUP_PARTS: Final = 64
"""Parts converted in one hop to a thread: sending each is a system call, and the loop runs others between groups."""


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


def segments(unit: Unit, start: int, stop: int) -> list[tuple[Unit, int, int]]:
    """The units that hold positions [start, stop) of the whole text, from the root on, each with its range of ids."""
    parts: list[tuple[Unit, int, int]] = []
    owner: Unit | None = unit
    while owner is not None and start < stop:
        first = max(start, owner.offset)
        if first < stop:
            parts.append((owner, first - owner.offset, stop - owner.offset))
            stop = first
        owner = owner.parent
    parts.reverse()
    return parts


class Answer:
    """Makes the bulk strings of one reply.

    What must be converted is converted at once only as long as all of it together is little work. The rest is made
    while the socket drains, so neither the event loop nor memory pays for the whole reply.
    """

    __slots__ = ("_checks", "_doubts", "_group", "_left")

    def __init__(self, doubts: Doubts) -> None:
        self._left = CONVERT_IN_THREAD_BYTES
        self._group = _Group()
        self._doubts = doubts
        self._checks = Checks(doubts)

    def part(self, spans: Sequence[Span], spec: LayerSpec, wire: Wire) -> Blob | Stream:
        """The rows as a bulk string in the wire's type.

        The stored bytes go out as they are if the types agree and the spans aren't many small ones; otherwise they are
        made (converted, or only copied together). What is in doubt is verified before its bytes are sent.
        """
        fmt, dim = spec.format, spec.dim
        same = wire is Wire.NATIVE or wire is fmt.wire
        doubtful = bool(self._doubts.memories) and any(self._doubts.has(span.block.memory) for span in spans)
        if same and len(spans) == 1 and not doubtful:
            view = spans[0].view()
            return Blob((view,), view.nbytes, spans)
        width = wire_row_bytes(wire, fmt, dim)
        total = sum(span.rows for span in spans) * width
        if not total:
            return Blob((), 0)
        if same and (len(spans) < JOIN_SPANS or total > len(spans) * JOIN_SPAN_BYTES):
            return Blob(self._checked(spans) if doubtful else [span.view() for span in spans], total, spans)
        cost = total + PART_COST_BYTES
        if cost <= self._left and not doubtful:
            self._left -= cost
            return Blob((_convert(spans, wire, fmt, dim),), total)
        self._left = 0
        doubts = self._doubts if doubtful else None
        if total > CONVERT_PIECE_BYTES:
            return Stream(total, _Pieces(spans, max(1, CONVERT_PIECE_BYTES // width), wire, fmt, dim, doubts))
        if not self._group.takes(total):
            self._group = _Group()
        return self._group.add(total, partial(_convert, spans, wire, fmt, dim, doubts))

    def _checked(self, spans: Sequence[Span]) -> list[Buffer | Check]:
        """The rows as they are stored, with checks in front of those that nobody has verified."""
        parts: list[Buffer | Check] = []
        for span in spans:
            memory = span.block.memory
            if isinstance(memory, MappedMemory) and self._doubts.has(memory):
                check = self._checks.before(memory)
                if check is not None:
                    parts.append(check)
            parts.append(span.view())
        return parts


def _convert(spans: Sequence[Span], wire: Wire, fmt: Format, dim: int, doubts: Doubts | None = None) -> Buffer:
    if doubts is not None:
        doubts.check([span.block.memory for span in spans if isinstance(span.block.memory, MappedMemory)])
    raw: Buffer = spans[0].view() if len(spans) == 1 else b"".join(span.view() for span in spans)
    return from_native(raw, wire, fmt, sum(span.rows for span in spans), dim)


class _Group:
    """Small parts of one reply that are converted together, in one hop to a thread, when the first is sent."""

    __slots__ = ("_makers", "_nbytes", "_ready")

    def __init__(self) -> None:
        self._makers: list[Callable[[], Buffer]] = []
        self._nbytes = 0
        self._ready: dict[int, Buffer] = {}

    def takes(self, nbytes: int) -> bool:
        """Whether a part of that size still fits."""
        return len(self._makers) < GROUP_PARTS and self._nbytes + nbytes <= CONVERT_PIECE_BYTES

    def add(self, nbytes: int, make: Callable[[], Buffer]) -> Stream:
        """One more part."""
        index = len(self._makers)
        self._makers.append(make)
        self._nbytes += nbytes
        return Stream(nbytes, (partial(self._take, index),), in_thread=index == 0)

    def _take(self, index: int) -> Buffer:
        if index not in self._ready:
            self._ready = {later: self._makers[later]() for later in range(index, len(self._makers))}
        return self._ready.pop(index)


@attrs.frozen(eq=False)
class _Pieces:
    """The pieces of a converted reply, each a function that makes it; holds the blocks until it goes itself."""

    spans: Sequence[Span]
    rows: int
    wire: Wire
    fmt: Format
    dim: int
    doubts: Doubts | None

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
                    yield partial(_convert, batch, self.wire, self.fmt, self.dim, self.doubts)
                    batch, room = [], self.rows
        if batch:
            yield partial(_convert, batch, self.wire, self.fmt, self.dim, self.doubts)
