"""What a tier's directory can do beyond a data directory: tell the sizes of its files, and be held by one process."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import attrs

from pion.storage.disk import DirectoryLock, Disk, Mapping, RealDisk
from pion.storage.file_mapping import FileMapping

LOCK_NAME: Final = "pion-tier.lock"


@attrs.frozen
class FileInfo:
    """What a directory says of one of its files."""

    name: str
    nbytes: int
    modified_s: float
    """Seconds since the epoch."""


class TierDisk(Disk, Protocol):
    """A `Disk` for a tier."""

    def hold(self) -> None:
        """Make the directory if it is not there, and hold it for this process. Raises OSError."""

    def release(self) -> None:
        """Let others have the directory. Releasing twice is fine."""

    def info(self, name: str) -> FileInfo:
        """One file. Raises OSError."""

    def entries(self) -> Iterator[FileInfo]:
        """All files of the directory, in any order and without holding them all. Raises OSError, also on the way."""


class RealTierDisk(RealDisk):
    """A directory of the file system."""

    def __init__(self, directory: str) -> None:
        super().__init__(Path(directory))
        self._lock: DirectoryLock | None = None

    def hold(self) -> None:
        """See `TierDisk`."""
        made = [path for path in (self._directory, *self._directory.parents) if not path.exists()]
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in made:  # objects are durable only if the directory is
            RealDisk(path.parent).sync_directory(path.name)
        self._lock = DirectoryLock(self._directory / LOCK_NAME)

    def release(self) -> None:
        """See `TierDisk`."""
        if self._lock is not None:
            self._lock.release()

    def map(self, name: str) -> Mapping:
        """See `Disk`."""
        return _RemovableMapping(os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC))

    def info(self, name: str) -> FileInfo:
        """See `TierDisk`."""
        found = (self._directory / name).lstat()
        return FileInfo(name, found.st_size, found.st_mtime)

    def entries(self) -> Iterator[FileInfo]:
        """See `TierDisk`."""
        with os.scandir(self._directory) as entries:
            for entry in entries:
                try:
                    if entry.is_file(follow_symlinks=False):
                        found = entry.stat(follow_symlinks=False)
                        yield FileInfo(entry.name, found.st_size, found.st_mtime)
                except FileNotFoundError:
                    continue  # it was removed meanwhile


class _RemovableMapping(FileMapping):
    """A file for reading that may be removed meanwhile.

    Whoever lets go of a removed file last makes the file system free its space, which took 20 to 30 ms for 64 MiB on
    ext4: too long for the event loop, which may drop the last view. So the descriptor outlives the views, and a thread
    closes it.
    """

    __slots__ = ()

    def __init__(self, descriptor: int) -> None:
        try:
            super().__init__(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(self._mapped or self, _close, descriptor).atexit = False


def _close(descriptor: int) -> None:
    """Close a file, in a thread if that is the end of it."""
    if os.fstat(descriptor).st_nlink:
        os.close(descriptor)
    else:
        threading.Thread(target=os.close, args=(descriptor,), name="pion-tier-close").start()
