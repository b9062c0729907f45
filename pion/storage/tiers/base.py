"""What a tier is: a place for objects that memory has no room for, and that may be slow, full, late, or not there.

An object is what is kept of one prefix: a head and the rows behind it, see `tier_format`; a tier need not know. The
store gives each object a key of its own, 32 random hexadecimal digits that are never used again, so an object never
changes after it was put. That lets a tier be anything from a directory to a store that several hosts share:

- Nothing is made of a listing but figures and waste: what `scan` misses or still shows is no error.
- An object that can't be opened is a miss, whatever was put before; the prefix is computed anew.
- An object that is still there after it was deleted is waste, which `clean` removes some day.
- A call may fail or never return. `GuardedTier` bounds what that costs.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

import attrs

from pion.config import MIB
from pion.replies import Buffer
from pion.storage.disk import Mapping

_KEY: Final = re.compile(r"[0-9a-f]{32}")


class TierError(Exception):
    """A tier didn't do what it was asked; `str(error)` says why, for a person."""


class TierUnavailableError(TierError):
    """It is slow, failing or full: nothing is known about the object, and it may be tried again later."""

    def __init__(self, text: str, *, full: bool = False) -> None:
        super().__init__(text)
        self.full = full
        """There is no room. What is in the tier can be used all the same."""


class TierMissError(TierError):
    """The object is not there: it was deleted, never put, or can't be seen yet; or it is not what was put."""

    def __init__(self, text: str, *, damaged: bool = False) -> None:
        super().__init__(text)
        self.damaged = damaged
        """Something is there, and is not what it should be: damaged, cut off, another key's, of another version."""


@attrs.frozen(kw_only=True)
class TierPolicy:
    """How much time a tier gets before it is taken for unavailable; `GuardedTier` applies it.

    All calls can be repeated, so an attempt that fails may be followed by another one within the same deadline.
    """

    open_s: float
    """To open an object: a client waits for it."""
    put_s: float
    """To put one; a large one gets more, see `put_bytes_per_s`."""
    put_bytes_per_s: float
    """An object is given another second for each so many bytes."""
    delete_s: float
    """To remove some objects."""
    scan_s: float
    """Until the next object of a listing."""
    clean_s: float
    """For a whole cleaning."""
    start_s: float
    """For `start`, which the start of the server waits for."""
    close_s: float
    """For `aclose`, which its end waits for."""
    attempts: int
    """How often a call is tried, if it fails at once."""
    retry_s: float
    """Pause before the second attempt; it doubles with each."""
    failures: int
    """Calls that fail in a row before the tier is left alone for a while."""
    pause_s: float
    """For how long, at first; it doubles with each failure that follows."""
    most_pause_s: float


REMOTE: Final = TierPolicy(
    open_s=2.0,
    put_s=10.0,
    put_bytes_per_s=8 * MIB,
    delete_s=5.0,
    scan_s=10.0,
    clean_s=3600.0,
    start_s=10.0,
    close_s=5.0,
    attempts=2,
    retry_s=0.05,
    failures=5,
    pause_s=1.0,
    most_pause_s=60.0,
)
"""For what a network lies before: a client waits for `open`, and computing the prefix takes seconds, not minutes."""

LOCAL: Final = attrs.evolve(
    REMOTE, open_s=10.0, put_s=60.0, delete_s=30.0, scan_s=60.0, start_s=60.0, close_s=30.0, attempts=1
)
"""For a disk of this machine: a flush behind a large backlog takes many seconds, and what failed fails again."""


@attrs.frozen
class Found:
    """An object in a listing."""

    key: str
    nbytes: int
    modified_s: float
    """When it was put, in seconds since the epoch by the tier's clock; 0 if the tier can't tell."""


@attrs.frozen
class Cleaned:
    """What `clean` has done."""

    files: int
    """How many objects and other files were removed."""
    nbytes: int
    """Their bytes."""
    errors: int
    """How many could not be removed."""


class BytesMapping:
    """An object in memory as a `pion.storage.disk.Mapping`, for tiers that fetch instead of mapping a file."""

    def __init__(self, data: Buffer) -> None:
        self.view = memoryview(data).cast("B").toreadonly()

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See `Mapping`."""
        piece = self.view[start : start + len(buffer)]
        if len(piece) != len(buffer):
            raise OSError(f"the object ends at byte {len(self.view)}")
        buffer[:] = piece


class OpenedObject:
    """An object that can be read: whole and unchanged also when it is deleted from the tier meanwhile."""

    def __init__(self, mapping: Mapping, nbytes: int | None = None) -> None:
        self.mapping = mapping
        """Its bytes; those of a file are not read before they are used."""
        self.nbytes = len(mapping.view) if nbytes is None else nbytes

    def close(self) -> None:
        """Give up the object. Regions and views over its mapping stay readable, and hold it. Closing twice is fine."""


class Tier(ABC):
    """Subclass it, and return a function that makes one from a URL from the hook `register_tiers`.

    All methods are called on the event loop, several at once, after `start` and before `aclose`. They raise
    TierUnavailableError whenever the tier fails, and nothing else but what they say. Every wait in them must end when
    it is cancelled: that is how a deadline ends a call.
    """

    url: str
    """What the operator gave, without secrets: it is shown in INFO and in logs."""

    policy: TierPolicy = REMOTE
    """The deadlines and pauses that suit this kind of tier."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes that the objects of this server take up in the tier, as far as known; what is being put counts."""

    @abstractmethod
    async def start(self) -> None:
        """Get ready; quick, however much is in the tier. Raises StartupError for what the operator must change.

        Cancellation: as if it had not been called.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Give back what `start` took; nothing is called afterwards.

        Cancellation: what is still under way is left to itself; the rest is closed.
        """

    @abstractmethod
    async def put(self, key: str, head: bytes, parts: Sequence[Buffer]) -> None:
        """Store an object, head and parts behind one another; it is durable when this returns.

        One of the same key is replaced. At every moment readers find a whole object or none. After an error it is not
        known which: `delete` it.
        Cancellation: the same, and it may come to its end, and read the parts, a little later; they never change.
        """

    @abstractmethod
    async def open(self, key: str) -> OpenedObject:
        """The object, to be read. Raises TierMissError. Its rows have not been checked.

        Cancellation: no effect.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; one that is not there is fine. It may take a while until that is seen.

        After an error, or cancellation, any of them may be removed.
        """

    @abstractmethod
    def scan(self) -> AsyncGenerator[Found, None]:
        """All objects of this server, in any order; an async generator. What is put or deleted meanwhile may be missed.

        What is not Pion's is never listed. It may be left in the middle, best with `contextlib.aclosing`.
        Cancellation: no effect.
        """

    @abstractmethod
    async def clean(self, keep: Callable[[str], bool]) -> Cleaned:
        """Remove what was left unfinished, what other versions of Pion left, and each object that `keep` disowns.

        `keep` is called on the event loop, and knows a key before it is put. In a tier that several servers share
        only objects that this server has put are asked about. What is not Pion's is never touched. What can't be
        removed is counted and left for the next time.
        Cancellation: a part of it is done.
        """


def check_tier_key(key: str) -> str:
    """The key, which becomes a part of file names and of requests. Raises ValueError for anything else."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"a key is 32 hexadecimal digits, got {key!r}")
    return key
