"""What the log keeps for a command family, and the contract a family fulfils to have its state kept.

A family names each change of its state as an item, appends it to the log right after it made the change, and can do
the change again from what the log gives back. The how-to "Write a plugin" shows one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from pion.replies import Buffer
from pion.storage.ledger import Raw

if TYPE_CHECKING:
    from pion.storage.region import Region
    from pion.storage.wal import Log

MAX_FAMILY_BYTES: Final = 32
"""Length of a family's name in records."""


def _as_bytes(data: Any) -> Raw:
    """A buffer whose length is its size in bytes. Raises TypeError or BufferError if it isn't contiguous."""
    return data if isinstance(data, bytes) else memoryview(data).cast("B")


@attrs.frozen
class Record:
    """One change of one family as bytes: `meta` says what, `data` is what should not be copied on the way."""

    meta: bytes
    data: Raw | None = attrs.field(default=None, repr=False, converter=attrs.converters.optional(_as_bytes))
    """Any contiguous buffer; it must not change any more."""


class Captured:
    """A record of a snapshot, whose data may be in several pieces."""

    __slots__ = ("meta", "parts")

    def __init__(self, meta: bytes, parts: Sequence[Buffer] = ()) -> None:
        self.meta = meta
        self.parts = parts

    @property
    def follows(self) -> bool:
        """Whether `moved` is to be called."""
        return False

    @property
    def lost(self) -> bool:
        """Whether the parts stand for data that can't be read any more; it stays unreadable."""
        return False

    def verify(self) -> bool:
        """Whether the parts are what was stored. Called in a thread before they are written; may block."""
        return True

    def damaged(self) -> None:
        """`verify` said no: drop what they belong to. Called on the event loop; the snapshot is then begun anew."""

    def moved(self, region: Region) -> None:
        """The parts are in the finished snapshot, at `region`. Called on the event loop."""


class Durable:
    """A family's state behind the log: subclass it, and return an instance from `register_durable`.

    Methods run on the event loop and can't wait, except `encode`. The default is a family whose items are records.
    """

    family: str
    """Unique name, up to 32 ASCII characters. It is in every record, so it must stay the same."""
    log: Log | None = None
    """Where items go; None in a server that keeps nothing, and until everything was replayed."""

    def check(self) -> None:
        """Raises MisconfError while the log can't be written: call it before a change that a client asks for."""
        if self.log is not None:
            self.log.check()

    async def room(self) -> None:
        """Until the log has room: await it before a change, with no checkpoint between it and `keep`.

        Cancellation: nothing happened.
        """
        if self.log is not None:
            await self.log.room()

    def keep(self, item: Any, nbytes: int = 0) -> Awaitable[None] | None:
        """Append an item, with about `nbytes` of data, right after its change was made; never waits.

        What it returns must be awaited before the client is answered; it raises MisconfError if the disk failed.
        Cancelling that wait does not undo the change.
        """
        return None if self.log is None else self.log.append(self, item, nbytes)

    def encode(self, item: Any) -> Record:
        """The record of an appended item. Called in a thread, later: the item must not change after it was appended."""
        record: Record = item
        return record

    def replay(self, meta: bytes, data: Region | None) -> None:
        """Make a recorded change again, at start. Raises ValueError for a record that can't be read.

        `data` is still on disk. `data.read()` gives the bytes, verified; large ones are better kept as they are and
        read in a thread when they are needed.
        """
        raise NotImplementedError

    def finish_replay(self) -> None:
        """All records were replayed, and the log is open: what can't go on as it was may be changed."""

    def undo(self, items: Sequence[Any]) -> None:
        """These items, in order, did not reach the disk, and their clients get an error. What they made must not be
        visible as if it were stored; older state should stay.
        """

    def capture(self) -> Iterator[Captured]:
        """Records that make the present state when they are replayed on an empty one, for a snapshot.

        The iterator is advanced on the event loop, a piece at a time while other changes happen, and must give the
        state of the moment when `capture` was called: the simplest is `iter` of a list. If it has a method `close`,
        that is called when the snapshot is done or has failed.
        """
        raise NotImplementedError


@attrs.define(eq=False)
class Dormant(Durable):
    """Keeps the records of a family whose plugin is not loaded, so that they are there when it is again."""

    family: str
    _records: list[tuple[bytes, Region | None]] = attrs.field(factory=list)
    _lost: set[int] = attrs.field(factory=set)
    """Which of them have data that can't be read: whether they can do without it is for the family to say."""

    def replay(self, meta: bytes, data: Region | None) -> None:
        """See `Durable`."""
        self._records.append((meta, data))

    def capture(self) -> Iterator[Captured]:
        """See `Durable`."""
        for index, (meta, data) in enumerate(self._records):
            yield _DormantRecord(self, index, meta, data, lost=index in self._lost)

    def forget(self, index: int) -> None:
        """A record's data is damaged."""
        self._lost.add(index)

    def move(self, index: int, region: Region) -> None:
        """A record's data lies elsewhere now."""
        self._records[index] = (self._records[index][0], region)


class _DormantRecord(Captured):
    __slots__ = ("_data", "_dormant", "_index", "_lost")

    def __init__(self, dormant: Dormant, index: int, meta: bytes, data: Region | None, *, lost: bool) -> None:
        super().__init__(meta, (b"\0",) if lost else () if data is None else (data.view(),))
        self._dormant = dormant
        self._index = index
        self._data = data
        self._lost = lost

    @property
    def follows(self) -> bool:
        return self._data is not None

    @property
    def lost(self) -> bool:
        return self._lost

    def verify(self) -> bool:
        return self._data is None or self._lost or self._data.verify()

    def damaged(self) -> None:
        self._dormant.forget(self._index)

    def moved(self, region: Region) -> None:
        self._dormant.move(self._index, region)
