"""Comparing the rows of a reply that lie in files with their checksums: before it begins, or just ahead of sending.

A long reply waits for its first piece only. What comes behind is verified while what is in front of it is being sent,
so the first fetch of a large prefix takes hardly longer than the next one. No byte is sent that was not verified.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from pion.limits import VERIFY_PIECE_BYTES
from pion.replies import BrokenReplyError, Stream
from pion.storage.placed import TierFile, TierMemory
from pion.storage.region import MappedMemory
from pion.storage.unit import Unit

if TYPE_CHECKING:
    from pion.storage.reading import Span
    from pion.storage.vstore import VStore

logger = logging.getLogger("pion.storage")

MOST_PIECES: Final = 4
"""Verified at once further back in a reply, a few ms of a disk: each check costs as much as verifying another MiB."""


class Doubts:
    """What one reply takes from files and nobody has verified yet, in the order of the reply."""

    __slots__ = ("_store", "files", "memories")

    def __init__(self, store: VStore, gathered: Iterable[tuple[Unit, Sequence[Span]]]) -> None:
        self._store = store
        self.memories: dict[MappedMemory, Unit] = {}
        """And whose it is."""
        self.files: dict[TierFile, Unit] = {}
        """The tier's objects that the reply needs, verified or not."""
        for unit, spans in gathered:
            for span in spans:
                memory = span.block.memory
                if isinstance(memory, MappedMemory):
                    if isinstance(memory, TierMemory):
                        self.files[memory.file] = unit
                    if not memory.verified:
                        self.memories[memory] = unit

    @property
    def nbytes(self) -> int:
        """Of what must be verified."""
        return sum(memory.nbytes for memory in self.memories)

    def first(self) -> list[MappedMemory]:
        """What the reply begins with: a piece, or one run of rows if that is larger."""
        found: list[MappedMemory] = []
        left = VERIFY_PIECE_BYTES
        for memory in self.memories:
            if found and memory.nbytes > left:
                break
            found.append(memory)
            left -= memory.nbytes
        return found

    def keep(self) -> bool:
        """Let it all stay readable whatever becomes of the files. False if one was closed or dropped a moment ago.

        On the event loop, with the tier's objects open.
        """
        return all(memory.keep() for memory in self.memories)

    def drop(self, damaged: Iterable[MappedMemory], lost: Iterable[Unit] = ()) -> bool:
        """Drop the units that are lost, or whose damaged rows are still stored; whether there are any.

        On the event loop.
        """
        units = dict.fromkeys(lost)
        units.update(dict.fromkeys(self.memories[memory] for memory in damaged if self._is_stored(memory)))
        for unit in units:
            self._store.drop_damaged(unit)
        return bool(units)

    def _is_stored(self, memory: MappedMemory) -> bool:
        if memory.live or not isinstance(memory, TierMemory):
            return memory.live > 0
        # Other memory may stand for the same rows by now, since their object was closed.
        blocks = (block for layer in self.memories[memory].all_layers() for block in layer.blocks)
        return any(isinstance(block.memory, TierMemory) and block.memory.run is memory.run for block in blocks)

    def check(self, memories: Sequence[MappedMemory]) -> None:
        """Verify what is about to be sent. Blocks; in a thread. Raises BrokenReplyError, whose `tell` drops it."""
        damaged = [memory for memory in memories if not memory.verify()]
        if damaged:
            raise BrokenReplyError("rows on disk are not what was stored", partial(self.drop, damaged))


class Checks:
    """Puts checks into a reply, in front of the bytes that need them.

    Each compares twice as much as the one before, up to `MOST_PIECES` pieces: the socket soon needs something to send,
    and has more and more to send while the next one is made.
    """

    __slots__ = ("_doubts", "_left", "_memories", "_nbytes", "_seen")

    def __init__(self, doubts: Doubts) -> None:
        self._doubts = doubts
        self._memories: list[MappedMemory] = []
        """What the last check compares; it may still get more."""
        self._nbytes = VERIFY_PIECE_BYTES
        """As much as it should compare; before the reply begins it is a piece."""
        self._left = 0
        self._seen: set[MappedMemory] = set()

    def before(self, memory: MappedMemory) -> Stream | None:
        """What must stand in front of rows of this memory; None if what stands in the reply already is enough."""
        if memory in self._seen:
            return None
        self._seen.add(memory)
        self._left -= memory.nbytes
        if self._left >= 0:
            self._memories.append(memory)
            return None
        self._nbytes = min(2 * self._nbytes, MOST_PIECES * VERIFY_PIECE_BYTES)
        self._left = self._nbytes - memory.nbytes
        self._memories = [memory]
        return Stream(0, (partial(self._check, self._memories),), ahead=True)

    def _check(self, memories: Sequence[MappedMemory]) -> bytes:
        self._doubts.check(memories)
        return b""
