"""Bytes that lie in a file and have not been read: where they are, and what their checksum must be.

Reading a page of a mapped file may wait for the disk and may find it broken, so before its first use a region is
verified. What the system has in its cache is compared through the mapping; the rest is read with calls that report
errors, in a thread. From then on the pages are in the cache and are used through the mapping.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
import xxhash

from pion.config import KIB
from pion.storage.disk import Mapping
from pion.storage.file_mapping import FileMapping
from pion.storage.ledger import Ledger, Memory

PIECE_BYTES: Final = 256 * KIB
"""Bytes read and hashed at once: fits into a core's second cache, and the interpreter lock is free between pieces."""

ASK_BYTES: Final = 64 * KIB
"""Reading less takes no longer than asking whether it must be read."""

_kept: Final = threading.local()


class DamagedError(ValueError):
    """Bytes on disk are not what was written. A ValueError, so a family that replays what it can't read refuses it."""


class Region:
    """`nbytes` bytes at `start` of a mapped file, with the XXH3-64 that they must have under `seed`."""

    __slots__ = ("checksum", "content", "mapping", "nbytes", "seed", "start")

    def __init__(self, mapping: Mapping, start: int, nbytes: int, checksum: int, seed: int) -> None:
        self.mapping = mapping
        self.start = start
        self.nbytes = nbytes
        self.checksum = checksum
        self.seed = seed
        self.content: bytes | None = None
        """The bytes, if they were read already."""

    @property
    def generation(self) -> int:
        """See `FileMapping`; files of other kinds are not written to."""
        return self.mapping.generation if isinstance(self.mapping, FileMapping) else 0

    def look(self) -> None:
        """Find out whether the file was written to; see `FileMapping`."""
        if isinstance(self.mapping, FileMapping):
            self.mapping.look()

    def is_resident(self, first: int, nbytes: int) -> bool:
        """Whether `nbytes` bytes from byte `first` of it on can be looked at without waiting; see `FileMapping`."""
        return isinstance(self.mapping, FileMapping) and self.mapping.is_resident(self.start + first, nbytes)

    def verify(self) -> bool:
        """Whether the bytes on disk are those that were written; False also if they can't be read. Blocks."""
        if self.nbytes >= ASK_BYTES and self.is_resident(0, self.nbytes):
            return xxhash.xxh3_64_intdigest(self.view(), self.seed) == self.checksum
        scratch = _scratch()
        digest = xxhash.xxh3_64(seed=self.seed)
        position, left = self.start, self.nbytes
        try:
            while left:
                piece = scratch[: min(left, PIECE_BYTES)]
                self.mapping.read_into(position, piece)
                digest.update(piece)
                position, left = position + len(piece), left - len(piece)
        except OSError:
            return False
        return digest.intdigest() == self.checksum

    def view(self) -> memoryview:
        """The bytes, through the mapping. They must have been verified, in a thread, before anyone looks."""
        return self.mapping.view[self.start : self.start + self.nbytes]

    def read(self) -> bytes:
        """The bytes, verified. Blocks. Raises DamagedError."""
        if self.content is not None:
            return self.content
        buffer = bytearray(self.nbytes)
        try:
            self.mapping.read_into(self.start, memoryview(buffer))
        except OSError as error:
            raise DamagedError(str(error)) from error
        if xxhash.xxh3_64_intdigest(buffer, self.seed) != self.checksum:
            raise DamagedError("its data is not what was written")
        return bytes(buffer)


def _scratch() -> memoryview:
    """A buffer of `PIECE_BYTES` bytes or more, the same one whenever this thread asks; it goes with the thread.

    The system clears each page of a new one, which for a run of half a MiB took more time than reading and hashing it.
    """
    scratch: memoryview | None = getattr(_kept, "scratch", None)
    if scratch is None or len(scratch) < PIECE_BYTES:
        scratch = _kept.scratch = memoryview(bytearray(PIECE_BYTES))
    return scratch


class MappedMemory(Memory):
    """A payload buffer that is a region of a mapped file. It is counted apart, as it is not anonymous memory."""

    __slots__ = ("_verified", "region")

    mapped = True

    def __init__(self, region: Region, ledger: Ledger) -> None:
        self.region = region
        self._verified = -1
        """The file's generation when it was."""
        super().__init__(np.frombuffer(region.mapping.view, np.uint8, region.nbytes, region.start), ledger)

    def _hold(self) -> None:
        self._ledger.map(self.nbytes)

    def drop(self, nbytes: int) -> None:
        """`nbytes` of it are no longer in a table."""
        self.live -= nbytes

    def __del__(self) -> None:
        self._ledger.unmap(self.nbytes)

    @property
    def verified(self) -> bool:
        """Whether it is what was stored, as far as is known: it was once, and the file was not written to since."""
        return self._verified == self.region.generation

    @verified.setter
    def verified(self, verified: bool) -> None:
        self._verified = self.region.generation if verified else -1

    def passed(self, generation: int) -> None:
        """It is what was stored; the file had this generation before anybody began to look."""
        self._verified = generation

    def keep(self) -> bool:
        """Stay readable from here on, whatever becomes of the file; False if that is too late."""
        return True

    def verify(self) -> bool:
        """See `Region.verify`; remembers success."""
        self.region.look()
        if self.verified:
            return True
        generation = self.region.generation
        intact = self.region.verify()
        if intact:
            self.passed(generation)
        return intact
