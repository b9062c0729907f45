"""The log's files, byte by byte: a header, then records behind one another. Pure: bytes in, bytes out.

`docs/reference/log-format.md` is the description for readers of the files. All numbers are little-endian.

Every checksum is an XXH3-64 seeded with the segment's random salt, so bytes that a client stores can't pass for a
record, and a record of another segment can't pass for one of this.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Final

import attrs
import xxhash

from pion.config import KIB
from pion.replies import Buffer
from pion.storage.durable import Record
from pion.storage.region import PIECE_BYTES

MAGIC: Final = b"PIONLOG\0"
VERSION: Final = 1
MARKER: Final = b"\xabPr\xec"
"""Starts each record: a search for what follows a damaged one can skip quickly."""

_SEGMENT: Final = struct.Struct("<8sIIQQQ16s40s24x")
_CHECKSUM: Final = struct.Struct("<Q")
SEGMENT_BYTES: Final = _SEGMENT.size + _CHECKSUM.size
"""The length of a segment's header."""

_RECORD: Final = struct.Struct("<4sIQQQQ")
RECORD_BYTES: Final = _RECORD.size + _CHECKSUM.size
"""The length of a record's header."""

JOINED_BYTES: Final = 16 * KIB
"""Data up to here is copied behind its header: a buffer of its own would cost more to write."""

Ready = Callable[[int, int], None]
"""Is told which range of the bytes will be looked at next, and may raise: a mapped file must be read before."""


def _is_ready(start: int, stop: int) -> None:
    """For bytes that are in memory."""


class FormatError(Exception):
    """The header of a segment is not one, or is damaged."""


class VersionError(FormatError):
    """It is of a version that this program doesn't know."""


@attrs.frozen(kw_only=True)
class SegmentHeader:
    """What a segment says of itself."""

    worker: int
    number: int
    """Segments of a directory are numbered upwards. There may be gaps: one that couldn't be made leaves its number."""
    first: int
    """Sequence number of its first record; 0 if the record itself tells."""
    salt: int
    lineage: bytes
    """16 random bytes that all files of one directory share."""
    boot: str
    """The run of the machine in which it was written; empty if unknown."""

    def to_bytes(self) -> bytes:
        """The header as it is in the file."""
        head = _SEGMENT.pack(
            MAGIC, VERSION, self.worker, self.number, self.first, self.salt, self.lineage, self.boot.encode()[:40]
        )
        return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))

    @staticmethod
    def parse(data: memoryview) -> SegmentHeader:
        """Read a header. Raises FormatError, with a text for the operator."""
        head = bytes(data[:SEGMENT_BYTES])
        version = int.from_bytes(head[8:12], "little")
        # Damage to the field itself must not pass for another version: with ours in it the checksum is right.
        ours = head[:8] + VERSION.to_bytes(4, "little") + head[12:]
        is_other = head[:8] == MAGIC and len(head) >= 12 and version != VERSION
        if is_other and (len(head) < SEGMENT_BYTES or not _is_sound(ours)):
            raise VersionError(f"it is of format version {version}, and this program knows {VERSION}")
        if len(head) < SEGMENT_BYTES:
            raise FormatError(f"its header is cut off, at byte {len(head)}")
        if head[:8] != MAGIC or not _is_sound(head):
            raise FormatError("its header is damaged, at byte 0")
        _, _, worker, number, first, salt, lineage, boot = _SEGMENT.unpack_from(head)
        return SegmentHeader(
            worker=worker,
            number=number,
            first=first,
            salt=salt,
            lineage=lineage,
            boot=boot.rstrip(b"\0").decode("ascii", "replace"),
        )


def _is_sound(head: bytes) -> bool:
    return bool(xxhash.xxh3_64_intdigest(head[: _SEGMENT.size]) == _CHECKSUM.unpack_from(head, _SEGMENT.size)[0])


@attrs.frozen
class Entry:
    """A record whose header and meta are intact. Its data has not been looked at."""

    start: int
    """Where its header begins."""
    sequence: int
    durable: int
    """All records up to this sequence number were on stable storage when it was written."""
    family: str
    meta: bytes = attrs.field(repr=False)
    data_start: int
    data_bytes: int
    data_checksum: int

    @property
    def stop(self) -> int:
        """One past its last byte."""
        return self.data_start + self.data_bytes


def find_salt(data: memoryview) -> tuple[int, int] | None:
    """The salt of a segment whose header is damaged, if its first record proves it, and that record's number.

    The salt may be where the damage is; a single wrong bit of it is found.
    """
    if len(data) <= SEGMENT_BYTES:
        return None
    salt: int = _SEGMENT.unpack_from(data)[5]
    for candidate in (salt, *(salt ^ 1 << bit for bit in range(64))):
        entry = decode(data, SEGMENT_BYTES, candidate)
        if entry is not None:
            return candidate, entry.sequence
    return None


def digest(buffer: Buffer, seed: int) -> int:
    """XXH3-64, a piece at a time so that other threads get the interpreter meanwhile."""
    if len(buffer) <= PIECE_BYTES:
        return xxhash.xxh3_64_intdigest(buffer, seed)
    return digest_parts((buffer,), seed)


def digest_parts(parts: Iterable[Buffer], seed: int) -> int:
    """The same of buffers that lie behind one another."""
    state = xxhash.xxh3_64(seed=seed)
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            state.update(view[start : start + PIECE_BYTES])
    return state.intdigest()


def encode(family: str, record: Record, sequence: int, durable: int, salt: int) -> tuple[list[Buffer], int]:
    """The buffers of one record as they are written, and their length. Data that is not short is not copied."""
    meta = _name(family) + record.meta
    data: Buffer = b"" if record.data is None else memoryview(record.data)  # type: ignore[arg-type]
    nbytes = len(data)
    # A record without data has no data checksum to find; its own sequence number keeps the field from being constant.
    head = _RECORD.pack(MARKER, len(meta), nbytes, sequence, durable, digest(data, salt ^ sequence))
    check = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head + meta, salt))
    size = RECORD_BYTES + len(meta) + nbytes
    if nbytes <= JOINED_BYTES:
        return [b"".join((head, check, meta, data))], size
    return [b"".join((head, check, meta)), data], size


@lru_cache(maxsize=64)
def _name(family: str) -> bytes:
    name = family.encode("ascii")
    return bytes((len(name),)) + name


def decode(data: memoryview, start: int, salt: int, ready: Ready = _is_ready) -> Entry | None:
    """The record that begins at `start`; None if none does, or not all of it is there."""
    if start + RECORD_BYTES > len(data):
        return None
    ready(start, start + RECORD_BYTES)
    marker, meta_bytes, data_bytes, sequence, durable, checksum = _RECORD.unpack_from(data, start)
    meta_start = start + RECORD_BYTES
    data_start = meta_start + meta_bytes
    if marker != MARKER or data_start + data_bytes > len(data) or not meta_bytes:
        return None
    ready(meta_start, data_start)
    meta = bytes(data[meta_start:data_start])
    head = bytes(data[start : start + _RECORD.size])
    if xxhash.xxh3_64_intdigest(head + meta, salt) != _CHECKSUM.unpack_from(data, start + _RECORD.size)[0]:
        return None
    name = meta[1 : 1 + meta[0]]
    return Entry(start, sequence, durable, name.decode("ascii"), meta[1 + meta[0] :], data_start, data_bytes, checksum)


def data_intact(data: memoryview, entry: Entry, salt: int) -> bool:
    """Whether a record's data is what was written; reads all of it."""
    return digest(data[entry.data_start : entry.stop], salt ^ entry.sequence) == entry.data_checksum


def scan(data: memoryview, header: SegmentHeader, ready: Ready = _is_ready) -> Iterator[Entry]:
    """The records from the first on, up to the first place where none with the next number begins."""
    position, expected = SEGMENT_BYTES, header.first
    while (entry := decode(data, position, header.salt, ready)) is not None and expected in (0, entry.sequence):
        yield entry
        position, expected = entry.stop, entry.sequence + 1


def search(data: memoryview, start: int, salt: int, ready: Ready = _is_ready) -> Iterator[Entry]:
    """Every intact record header that begins at or behind `start`, whatever lies between."""
    position = start
    while True:
        # Mostly records stand behind one another. Looking there first spares a window for each of them.
        entry, found = decode(data, position, salt, ready), position
        if entry is None:
            found = _find(data, MARKER, position, ready)
            if found < 0:
                return
            entry = decode(data, found, salt, ready)
        if entry is not None:
            yield entry
            position = entry.stop
        else:
            position = found + 1


_WINDOW_BYTES: Final = 1 << 20


def _find(data: memoryview, what: bytes, start: int, ready: Ready) -> int:
    """`bytes.find` in a mapped file, without reading all of it at once."""
    while start < len(data):
        ready(start, start + _WINDOW_BYTES)
        piece = bytes(data[start : start + _WINDOW_BYTES])
        found = piece.find(what)
        if found >= 0:
            return start + found
        if start + len(piece) >= len(data):
            return -1
        start += len(piece) - len(what) + 1
    return -1
