"""Comparing the rows of a reply that lie in files with their checksums: before it begins, or just ahead of sending.

A long reply waits for its first piece only. What comes behind is verified while what is in front of it is being sent.
No byte is sent that was not verified.

Pages that are in the system's cache are compared on the event loop, a piece at a time: hashing a MiB takes some 0.1 ms,
handing it to a thread and waiting for the result as long or longer. What must be read from the disk is for a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import xxhash

from pion.config import KIB, MIB
from pion.limits import VERIFY_PIECE_BYTES
from pion.replies import BrokenReplyError, Check
from pion.storage.placed import TierFile, TierMemory
from pion.storage.region import MappedMemory
from pion.storage.unit import Unit

if TYPE_CHECKING:
    from pion.storage.reading import Span
    from pion.storage.vstore import VStore

logger = logging.getLogger("pion.storage")

COMPARE_STEP_BYTES: Final = 2 * MIB
"""Compared at once on the event loop: 0.2 ms, as long as sending a large slice takes."""

FEW: Final = 8
SMALL_BYTES: Final = 256 * KIB
"""More than a few memories that are smaller on average are for a thread: a step for each would take longer."""

MOST_PIECES: Final = 4
"""Verified at once further back in a reply, a few ms of a disk: each check costs as much as verifying another MiB."""


class Doubts:
    """What one reply takes from files and nobody has verified yet, in the order of the reply."""

    __slots__ = ("_store", "files", "memories")

    def __init__(self, store: VStore, gathered: Iterable[tuple[Unit, Sequence[Span]]]) -> None:
        self._store = store
        self.memories: dict[MappedMemory, Unit] = {}
        """And whose it is. From here on this decides what the reply takes for verified: if the file is written to once
        more meanwhile, that is for the next reply to notice.
        """
        self.files: dict[TierFile, Unit] = {}
        """The tier's objects that the reply needs, verified or not."""
        looked: set[int] = set()
        last: object = None
        for unit, spans in gathered:
            for span in spans:
                memory = span.block.memory
                if isinstance(memory, MappedMemory):
                    if memory is last:
                        continue
                    last = memory
                    if id(memory.region.mapping) not in looked:
                        looked.add(id(memory.region.mapping))
                        memory.region.look()
                    if isinstance(memory, TierMemory):
                        self.files[memory.file] = unit
                    if not memory.verified:
                        self.memories[memory] = unit

    def has(self, memory: object) -> bool:
        """Whether a block's memory must be verified before its rows are sent."""
        return isinstance(memory, MappedMemory) and memory in self.memories and not memory.verified

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
        self.refuse([memory for memory in memories if memory in self.memories and not memory.verify()])

    def refuse(self, damaged: Sequence[MappedMemory]) -> None:
        """Raise BrokenReplyError if there is any."""
        if damaged:
            raise BrokenReplyError("rows on disk are not what was stored", partial(self.drop, damaged))


class Comparing:
    """Verifies memories in their order: in steps as long as nothing must be read from a disk, the rest in a thread."""

    __slots__ = ("_digest", "_generation", "_here", "_memories", "_next", "_position", "damaged")

    def __init__(self, memories: Sequence[MappedMemory]) -> None:
        self._memories = memories
        self._next = 0
        self._digest: xxhash.xxh3_64 | None = None
        """Of the first bytes of the next memory, up to `_position`, if it was begun."""
        self._position = self._generation = 0
        self._here = False
        """Steps are worth it."""
        self.damaged: list[MappedMemory] = []

    @property
    def left(self) -> Sequence[MappedMemory]:
        """Those that are not verified, the one that was begun included."""
        return self._memories[self._next :]

    def ready(self) -> bool:
        """Whether the next step waits for no disk."""
        if self._next == len(self._memories):
            return True
        if not self._next and self._digest is None:
            total = sum(memory.nbytes for memory in self._memories)
            self._here = len(self._memories) <= FEW or total >= len(self._memories) * SMALL_BYTES
        memory = self._memories[self._next]
        return memory.verified or (self._here and memory.region.is_resident(self._position, self._piece(memory)))

    def step(self) -> bool:
        """Compare another piece, which must be `ready`; whether that was all."""
        if self._next < len(self._memories):
            memory = self._memories[self._next]
            if memory.verified or self._compare(memory):
                self._next += 1
                self._digest, self._position = None, 0
        return self._next == len(self._memories)

    def finish(self) -> None:
        """Compare all that is left. Blocks."""
        self.damaged += [memory for memory in self.left if not memory.verify()]
        self._next = len(self._memories)

    def _piece(self, memory: MappedMemory) -> int:
        return min(memory.nbytes - self._position, COMPARE_STEP_BYTES)

    def _compare(self, memory: MappedMemory) -> bool:
        """Go on with a memory; whether that was the rest of it."""
        region = memory.region
        nbytes = self._piece(memory)
        if self._digest is None:
            self._digest, self._generation = xxhash.xxh3_64(seed=region.seed), region.generation
        digest = self._digest
        digest.update(region.view()[self._position : self._position + nbytes])
        self._position += nbytes
        if self._position < memory.nbytes:
            return False
        if digest.intdigest() == region.checksum:
            memory.passed(self._generation)
        else:
            self.damaged.append(memory)
        return True


class RowCheck(Check):
    """Rows of a reply, in front of the bytes that need them."""

    __slots__ = ("_comparing", "_doubts", "memories")

    def __init__(self, doubts: Doubts, memories: list[MappedMemory]) -> None:
        self._doubts = doubts
        self.memories = memories
        """As long as the reply is being made it may get more."""
        self._comparing = Comparing(memories)

    def ready(self) -> bool:
        """See `Check`."""
        return self._comparing.ready()

    def step(self) -> bool:
        """See `Check`."""
        over = self._comparing.step()
        self._doubts.refuse(self._comparing.damaged)
        return over

    def finish(self) -> None:
        """See `Check`."""
        self._comparing.finish()
        self._doubts.refuse(self._comparing.damaged)


class Checks:
    """Puts checks into a reply, in front of the bytes that need them.

    Each compares twice as much as the one before, up to `MOST_PIECES` pieces: the socket soon needs something to send,
    and has more and more to send while the next one is made.
    """

    __slots__ = ("_doubts", "_last", "_left", "_nbytes", "_seen")

    def __init__(self, doubts: Doubts) -> None:
        self._doubts = doubts
        self._last: RowCheck | None = None
        self._nbytes = VERIFY_PIECE_BYTES
        """As much as it should compare; before the reply begins it is a piece."""
        self._left = 0
        self._seen: set[MappedMemory] = set()

    def before(self, memory: MappedMemory) -> RowCheck | None:
        """What must stand in front of rows of this memory; None if what stands in the reply already is enough."""
        if memory in self._seen:
            return None
        self._seen.add(memory)
        self._left -= memory.nbytes
        if self._left >= 0 and self._last is not None:
            self._last.memories.append(memory)
            return None
        self._nbytes = min(2 * self._nbytes, MOST_PIECES * VERIFY_PIECE_BYTES)
        self._left = self._nbytes - memory.nbytes
        self._last = RowCheck(self._doubts, [memory])
        return self._last
