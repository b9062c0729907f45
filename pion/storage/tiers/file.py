"""The tier in a directory: one file for each object, written under another name, flushed, renamed.

Every call works in a thread, and a cancelled one leaves its thread to itself: a disk that never answers must not hold
whoever waits. A thread that was left finds out at its next step, and takes back what it has made. The number of threads
is bounded, so a dead disk keeps a handful of them, and further calls wait for their deadline.

The format's version is in the names of the files, so those of another version are told without being read.
"""

from __future__ import annotations

import errno
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeVar

import attrs
import trio

from pion.config import MIB
from pion.errors import StartupError
from pion.replies import Buffer
from pion.storage.disk import DiskFile
from pion.storage.tiers.base import (
    LOCAL,
    Cleaned,
    Found,
    OpenedObject,
    Tier,
    TierMissError,
    TierUnavailableError,
    check_tier_key,
)
from pion.storage.tiers.disk import FileInfo, TierDisk
from pion.storage.tiers.tier_format import VERSION, check_head
from pion.storage.tiers.usage import Usage

T = TypeVar("T")

logger = logging.getLogger("pion.tier")

CHUNK_BYTES: Final = 16 * MIB
"""Written at once, then the medium is told to begin; also how soon a thread that was left notices."""

LISTED_AT_ONCE: Final = 500
"""Files looked at in one visit of a thread: some milliseconds."""

WRITERS: Final = 2
"""Threads that put, delete and list. Two keep a disk busy; more would only let its flushes wait for one another."""

READERS: Final = 4
"""Threads that open files: a client waits for them, so they don't stand behind a flush."""

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})

_NAME: Final = re.compile(r"([0-9a-f]{32})\.pion-tier-([0-9]{1,9})\.safetensors(\.[0-9a-f]{16}\.tmp)?")


def file_name(key: str) -> str:
    """The file of an object. Raises ValueError for what is no key."""
    return f"{check_tier_key(key)}.pion-tier-{VERSION}.safetensors"


class FileTier(Tier):
    """Objects as files of one directory, which it holds for one process."""

    policy = LOCAL

    def __init__(self, disk: TierDisk, url: str = "") -> None:
        self.url = url or disk.where
        self._disk = disk
        self._usage = Usage()
        self._writers = trio.CapacityLimiter(WRITERS)
        self._readers = trio.CapacityLimiter(READERS)
        self._temporaries: set[str] = set()
        """Names of unfinished files that somebody is writing."""

    @property
    def used_bytes(self) -> int:
        """See `Tier`. Until a `scan` or `clean` has come to its end, only what was put since the start."""
        return self._usage.nbytes

    async def start(self) -> None:
        """See `Tier`. Makes the directory, and lists nothing."""
        try:
            await trio.to_thread.run_sync(self._disk.hold, abandon_on_cancel=True, limiter=self._writers)
        except OSError as error:
            raise StartupError(f"--tier-dir {self.url}: {error.strerror or error}") from error

    async def aclose(self) -> None:
        """See `Tier`. Waits for threads that are still at work."""
        try:
            for limiter in (self._readers, self._writers):
                for _ in range(int(limiter.total_tokens)):
                    await limiter.acquire_on_behalf_of(object())
        finally:
            self._disk.release()

    async def put(self, key: str, head: bytes, parts: Sequence[Buffer]) -> None:
        """See `Tier`.

        Cancellation: at once; the thread that writes notices soon, and removes what it has made.
        """
        job = _Put(self._disk, self._usage, file_name(key), self._temporaries, [head, *parts])
        try:
            await self._in_thread(job.run, limiter=self._writers)
        finally:
            job.left = True  # to no effect if it has ended

    async def open(self, key: str) -> OpenedObject:
        """See `Tier`. Maps the file, and reads its head: what that says is checked, the rows are not read."""
        return await self._in_thread(_open, self._disk, key, limiter=self._readers)

    async def delete(self, keys: Sequence[str]) -> None:
        """See `Tier`. A removal is not flushed: what comes back after a power cut is cleaned."""
        names = [file_name(key) for key in keys]
        for start in range(0, len(names), LISTED_AT_ONCE):
            found = await self._in_thread(self._remove, names[start : start + LISTED_AT_ONCE], limiter=self._writers)
            if found.errors:
                raise TierUnavailableError(f"{found.errors} files can't be removed")

    async def scan(self) -> AsyncGenerator[Found, None]:
        """See `Tier`. One that comes to its end corrects `used_bytes`."""
        entries, count, complete = self._disk.entries(), self._usage.begin(), False
        try:
            while chunk := await self._in_thread(_take, entries, limiter=self._writers):
                objects = [(key, info) for info in chunk if (key := _key_of(info.name))]
                self._usage.add(count, [info for _, info in objects])
                for key, info in objects:
                    yield Found(key, info.nbytes, info.modified_s)
            complete = True
        finally:
            self._usage.end(count, complete=complete)

    async def clean(self, keep: Callable[[str], bool]) -> Cleaned:
        """See `Tier`. One that comes to its end corrects `used_bytes`, too."""
        entries, count, complete = self._disk.entries(), self._usage.begin(), False
        files = nbytes = errors = 0
        try:
            while chunk := await self._in_thread(_take, entries, limiter=self._writers):
                waste = [info.name for info in chunk if self._is_waste(info.name, keep)]
                self._usage.add(count, [info for info in chunk if _key_of(info.name)])
                if waste:
                    done = await self._in_thread(self._remove, waste, limiter=self._writers)
                    files, nbytes, errors = files + done.files, nbytes + done.nbytes, errors + done.errors
            complete = True
        finally:
            self._usage.end(count, complete=complete)
        return Cleaned(files, nbytes, errors)

    def _is_waste(self, name: str, keep: Callable[[str], bool]) -> bool:
        found = _NAME.fullmatch(name)
        if found is None:
            return False
        if found[3]:
            return name not in self._temporaries
        return int(found[2]) != VERSION or not keep(found[1])

    def _remove(self, names: Sequence[str]) -> Cleaned:
        """Remove files, as far as the disk lets us. Blocks."""
        files = nbytes = errors = 0
        for name in names:
            try:
                size = self._disk.info(name).nbytes
                if _key_of(name):
                    _unlink(self._disk, self._usage, name, size)
                else:
                    self._disk.unlink(name)
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("%s: %s can't be removed: %s", self.url, name, error.strerror or error)
                errors += 1
            else:
                files, nbytes = files + 1, nbytes + size
        return Cleaned(files, nbytes, errors)

    async def _in_thread(self, function: Callable[..., T], *args: object, limiter: trio.CapacityLimiter) -> T:
        """Run it, and translate errors. Cancellation: at once; the thread goes on, and keeps its place meanwhile."""
        try:
            return await trio.to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=limiter)
        except OSError as error:
            text = f"{self.url}: {error.strerror or error}"
            raise TierUnavailableError(text, full=error.errno in FULL) from error


@attrs.define(eq=False)
class _Put:
    """Writes one file. `left` is set, from another thread, when nobody waits for it any more."""

    _disk: TierDisk
    _usage: Usage
    _name: str
    _temporaries: set[str]
    _buffers: Sequence[Buffer]
    left: bool = False

    def run(self) -> None:
        """All of it. Blocks. Raises OSError; then nothing is left of it, if the disk lets us."""
        temporary = f"{self._name}.{secrets.token_bytes(8).hex()}.tmp"
        nbytes = sum(len(buffer) for buffer in self._buffers)
        self._usage.write(nbytes)
        self._temporaries.add(temporary)
        try:
            self._write(temporary)
            if self.left:
                raise InterruptedError("nobody waits for it")
            with self._usage.changing(self._name, self._size()) as change:
                self._disk.rename(temporary, self._name)
                change.nbytes = nbytes
        except Exception:
            self._take_back(temporary)
            raise
        finally:
            self._temporaries.discard(temporary)
            self._usage.write(-nbytes)
            self._buffers = ()
        try:
            self._disk.sync_directory(self._name)
        except OSError:
            self.left = True  # what may be gone after a power cut must not be relied on before
            raise
        finally:
            if self.left:
                self._take_back(self._name, nbytes)

    def _write(self, temporary: str) -> None:
        file = self._disk.create(temporary)
        try:
            position = hinted = 0
            for chunk in _chunks(self._buffers):
                if self.left:
                    raise InterruptedError("nobody waits for it")
                file.write(chunk)
                position += sum(len(buffer) for buffer in chunk)
                hinted = _hint(file, hinted, position)
            file.sync()
        finally:
            file.close()

    def _size(self) -> int:
        """Bytes of what has the name so far."""
        try:
            return self._disk.info(self._name).nbytes
        except FileNotFoundError:
            return 0

    def _take_back(self, name: str, nbytes: int = 0) -> None:
        try:
            if nbytes:
                _unlink(self._disk, self._usage, name, nbytes)
            elif self._disk.exists(name):
                self._disk.unlink(name)
        except OSError as error:
            logger.warning("%s: %s can't be removed: %s", self._disk.where, name, error.strerror or error)


def _unlink(disk: TierDisk, usage: Usage, name: str, nbytes: int) -> None:
    """Remove an object of so many bytes. Raises OSError."""
    with usage.changing(name, nbytes) as change:
        disk.unlink(name)
        change.nbytes = 0


def _hint(file: DiskFile, hinted: int, position: int) -> int:
    """Start writing to the medium what is new; at most two chunks are on their way, as other flushes wait for them."""
    if position - hinted < CHUNK_BYTES:
        return hinted
    file.start_writeback(hinted, position)
    file.wait_writeback(0, hinted)
    return position


def _chunks(buffers: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """Buffers to write at once, with about `CHUNK_BYTES` each."""
    chunk: list[Buffer] = []
    room = CHUNK_BYTES
    for buffer in buffers:
        left = memoryview(buffer)
        while len(left) >= room:
            yield [*chunk, left[:room]]
            chunk, left, room = [], left[room:], CHUNK_BYTES
        if left:
            chunk.append(left)
            room -= len(left)
    if chunk:
        yield chunk


def _open(disk: TierDisk, key: str) -> OpenedObject:
    try:
        mapping = disk.map(file_name(key))
    except FileNotFoundError as error:
        raise TierMissError("there is no such object") from error
    check_head(mapping, key)
    return OpenedObject(mapping)


def _take(entries: Iterator[FileInfo]) -> list[FileInfo]:
    return list(islice(entries, LISTED_AT_ONCE))


def _key_of(name: str) -> str:
    """The key of a finished object of this version; empty for other files."""
    found = _NAME.fullmatch(name)
    return found[1] if found and not found[3] and int(found[2]) == VERSION else ""
