"""The seam between the log and the operating system: what files can do, and nothing else.

All methods block and are called in threads, or before the server listens. `RealDisk` is one directory;
`pion.testing.MemoryDisk` is its double that fails, tears and forgets on demand. Names are relative, with `/` between
their parts.

What survives a power cut, and what the callers may rely on: the contents of a file up to its last `sync`; a name (made,
renamed, linked or removed) once `sync_directory` returned. Nothing else, and no order among the rest.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from pion.limits import SENDMSG_MAX_BUFFERS
from pion.replies import Buffer
from pion.storage.file_mapping import FileMapping

logger = logging.getLogger("pion.wal")

SYNC_FILE_RANGE_WRITE: Final = 2
"""Linux's flag: start writing the dirty pages of the range, wait for nothing (sync_file_range(2))."""

WRITEBACK_UNKNOWN: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM})
"""What the call says where the system or the file system doesn't have it; then nothing was tried."""

FULL_SYNC_UNKNOWN: Final = frozenset({errno.ENOTSUP, errno.EINVAL, errno.ENOTTY})
"""What F_FULLFSYNC says on network and foreign file systems, which have fsync only."""

SYNC_FILE_RANGE_WAIT: Final = 1 | 2 | 4
"""Linux's flags: write the dirty pages of the range, and wait until that is done; no metadata, no cache of the disk."""


class DiskFile(Protocol):
    """A file that grows at its end."""

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append all of the buffers. Raises OSError; then an unknown first part of them is in the file."""

    def overwrite(self, start: int, data: Buffer) -> None:
        """Replace bytes that were written before. Raises OSError; then an unknown part of them is replaced."""

    def sync(self) -> None:
        """Until the contents are on stable storage. Raises OSError; then nothing may be assumed about any of them."""

    def start_writeback(self, start: int, stop: int) -> None:
        """Hint: bytes [start, stop) will be synced soon. Never fails."""

    def wait_writeback(self, start: int, stop: int) -> None:
        """Slow down to the speed of the medium: until these bytes are on their way to it. Makes nothing durable.

        Raises OSError as `sync` does: a failure that is noticed here is not reported again by a later `sync`.
        """

    def close(self) -> None:
        """Give the descriptor back; nothing is flushed by it. Closing twice is fine."""


class Mapping(Protocol):
    """A whole file for reading. It stays readable when its name is removed or given to another file."""

    @property
    def view(self) -> memoryview:
        """The contents, read-only, one byte an item."""

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill the buffer from position `start` on, without mapping pages.

        Raises OSError, also for a file that is shorter.
        """


class Disk(Protocol):
    """A directory of files. All methods raise OSError; one that failed changed nothing, a failed `write` excepted."""

    where: str
    """The directory as errors should show it."""

    def names(self) -> list[str]:
        """The files directly in the directory, in order."""

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""

    def create(self, name: str) -> DiskFile:
        """A new empty file of that name, which must not be there yet."""

    def map(self, name: str) -> Mapping:
        """The file for reading."""

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, taking it from whichever file has it."""

    def link(self, old: str, new: str) -> None:
        """Give a file a second name, which must be free."""

    def unlink(self, name: str) -> None:
        """Remove a name."""

    def truncate(self, name: str, size: int) -> None:
        """Shorten a file to `size` bytes and make that durable."""

    def sync(self, name: str) -> None:
        """Until the contents of a file are on stable storage, whoever wrote them."""

    def sync_directory(self, name: str) -> None:
        """Until the names beside file `name` are on stable storage."""

    def boot_id(self) -> str:
        """Names this run of the machine: another one means that it was off meanwhile. Empty: unknown."""


class RealDisk:
    """A directory of the file system."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.where = str(directory)

    def names(self) -> list[str]:
        """See `Disk`."""
        return sorted(entry.name for entry in os.scandir(self._directory) if entry.is_file())

    def exists(self, name: str) -> bool:
        """See `Disk`."""
        return (self._directory / name).exists()

    def create(self, name: str) -> DiskFile:
        """See `Disk`."""
        return _RealFile(os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def map(self, name: str) -> Mapping:
        """See `Disk`."""
        return _RealMapping(os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC))

    def rename(self, old: str, new: str) -> None:
        """See `Disk`."""
        (self._directory / old).rename(self._directory / new)

    def link(self, old: str, new: str) -> None:
        """See `Disk`."""
        os.link(self._directory / old, self._directory / new)

    def unlink(self, name: str) -> None:
        """See `Disk`."""
        (self._directory / name).unlink()

    def truncate(self, name: str, size: int) -> None:
        """See `Disk`."""
        descriptor = os.open(self._directory / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            full_sync(descriptor)
        finally:
            os.close(descriptor)

    def sync(self, name: str) -> None:
        """See `Disk`."""
        descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            full_sync(descriptor)
        finally:
            os.close(descriptor)

    def sync_directory(self, name: str) -> None:
        """See `Disk`."""
        descriptor = os.open((self._directory / name).parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def boot_id(self) -> str:
        """See `Disk`."""
        return boot_id()


class _RealFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, buffers: Sequence[Buffer]) -> None:
        """See `DiskFile`."""
        rest: list[Buffer] = [buffer for buffer in buffers if len(buffer)]
        while rest:
            written = os.writev(self._descriptor, rest[:SENDMSG_MAX_BUFFERS])
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if written:
                rest[0] = memoryview(rest[0]).cast("B")[written:]

    def overwrite(self, start: int, data: Buffer) -> None:
        """See `DiskFile`."""
        rest = memoryview(data).cast("B")
        while rest:
            written = os.pwrite(self._descriptor, rest, start)
            start, rest = start + written, rest[written:]

    def sync(self) -> None:
        """See `DiskFile`."""
        if self._descriptor < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        full_sync(self._descriptor)

    def start_writeback(self, start: int, stop: int) -> None:
        """See `DiskFile`."""
        if _sync_file_range is not None:
            _sync_file_range(self._descriptor, start, stop - start, SYNC_FILE_RANGE_WRITE)

    def wait_writeback(self, start: int, stop: int) -> None:
        """See `DiskFile`."""
        if _sync_file_range is None or not _sync_file_range(
            self._descriptor, start, stop - start, SYNC_FILE_RANGE_WAIT
        ):
            return
        error = ctypes.get_errno()
        if error not in WRITEBACK_UNKNOWN:
            raise OSError(error, os.strerror(error))

    def close(self) -> None:
        """See `DiskFile`."""
        descriptor, self._descriptor = self._descriptor, -1  # whoever comes now must not use its next owner's
        if descriptor >= 0:
            os.close(descriptor)


class _RealMapping(FileMapping):
    __slots__ = ()

    def __del__(self) -> None:
        os.close(self.descriptor)


def full_sync(descriptor: int, platform: str = sys.platform) -> None:
    """Flush a file to stable storage. On macOS fsync reaches the drive's cache only, F_FULLFSYNC the medium."""
    if platform != "darwin":
        os.fdatasync(descriptor)
        return
    try:
        fcntl.fcntl(descriptor, getattr(fcntl, "F_FULLFSYNC", 51))
    except OSError as error:
        if error.errno not in FULL_SYNC_UNKNOWN:
            raise
        os.fsync(descriptor)


def boot_id(platform: str = sys.platform) -> str:
    """Names this run of the machine; empty where the system doesn't tell."""
    try:
        if platform == "darwin":
            return _sysctl("kern.bootsessionuuid")
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _sysctl(name: str) -> str:
    """A text value of macOS's sysctl(3). Raises OSError."""
    value = ctypes.create_string_buffer(64)
    size = ctypes.c_size_t(len(value))
    function = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if function is None or function(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)):
        raise OSError(f"no sysctl {name}")
    return value.value.decode("ascii", "replace")


def _find_sync_file_range(platform: str = sys.platform) -> Callable[[int, int, int, int], object] | None:
    function = (
        getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None) if platform.startswith("linux") else None
    )
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range: Final = _find_sync_file_range()


class DirectoryLock:
    """Holds a directory for one process, with a lock that ends with the process, however it ends."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 100, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise BlockingIOError(f"in use by {holder or 'another process'}") from error
        except OSError:
            os.close(self._descriptor)
            raise
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()}\n".encode(), 0)
        except OSError as error:  # on a full disk; it only helps the message above
            logger.warning("%s: can't note who holds it: %s", path, error.strerror)

    def release(self) -> None:
        """Let others have the directory. The file stays: removing it would let two processes lock two files."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
