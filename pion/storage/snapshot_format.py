"""The snapshot's file, byte by byte: a safetensors file whose last tensor is the table of what the others hold.

`docs/reference/snapshot-format.md` is the description for readers of the files. Pure: bytes in, bytes out.

Every entry of the table can be checked by itself: the checksum of its data is seeded with a hash of everything that the
entry and the file say of themselves. So what is left of a damaged table can be told from what is not.

The layout is safetensors' own (https://github.com/huggingface/safetensors): an 8-byte length, a JSON header padded with
spaces, then the tensors behind one another. The header is written last, into room that was kept for it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import xxhash

from pion.config import KIB, MIB

MAGIC: Final = b"PIONSNAP"
VERSION: Final = 1

OWN_TENSOR_BYTES: Final = 64 * KIB
"""Data from here on has a tensor of its own; shorter ones share one."""

MOST_TENSORS: Final = 100_000
"""Tensors of their own in one file. With shared ones between them, and beside them, the header has up to 30 MB; that is
a third of what safetensors readers accept.
"""

PACK_BYTES: Final = MIB
"""A shared tensor is closed once it has this much; more in a large file."""

HEADER_LENGTH: Final = struct.Struct("<Q")
_IDENTITY: Final = struct.Struct("<IQ16s")
TABLE_HEAD: Final = struct.Struct("<8sIIQ16sQ")
ENTRY: Final = struct.Struct("<IQQQ")
TABLE_TAIL: Final = struct.Struct("<QQ")

_FIXED_HEADER_BYTES: Final = 512
_TENSOR_HEADER_BYTES: Final = 100
"""Most that one tensor takes in the header: its number, dtype, shape and two offsets of up to 15 digits."""

_READER_LIMIT: Final = 100 * 1000 * 1000
"""safetensors readers refuse a longer header."""

TABLE: Final = "table"


class FormatError(Exception):
    """It is not a snapshot, or it is damaged."""


class VersionError(FormatError):
    """It is of a version that this program doesn't know."""


@attrs.frozen(kw_only=True)
class Identity:
    """What a snapshot says of itself; in the table, and again in the header."""

    worker: int
    covers: int
    """Sequence number of the last record whose change is in it."""
    lineage: bytes

    @property
    def salt(self) -> int:
        """What the checksums of all entries depend on."""
        return xxhash.xxh3_64_intdigest(_IDENTITY.pack(self.worker, self.covers, self.lineage))


@attrs.frozen
class Entry:
    """A record: its family and meta, and where its data lies; `nbytes` is 0 if it has none."""

    family: str
    meta: bytes = attrs.field(repr=False)
    start: int
    nbytes: int
    seed: int
    """See `entry_seed`."""
    checksum: int
    """XXH3-64 of the data, under the seed."""


def entry_seed(salt: int, family: str, meta: bytes, start: int) -> int:
    """The seed of an entry's checksum, which so vouches for family, meta and place, too."""
    name = family.encode("ascii")
    return xxhash.xxh3_64_intdigest(b"".join((bytes((len(name),)), name, meta)), salt ^ start)


def own_tensor_bytes(payload_bytes: int) -> int:
    """From which size on data gets a tensor of its own, so that the header stays small."""
    return max(OWN_TENSOR_BYTES, payload_bytes // MOST_TENSORS)


def shared_tensor_bytes(payload_bytes: int) -> int:
    """At which size a shared tensor is closed, so that the header stays small."""
    return max(PACK_BYTES, payload_bytes // MOST_TENSORS)


def most_tensors(payload_bytes: int) -> int:
    """How many tensors a file with about so much data may need: large ones, and shared ones between them."""
    own, shared = own_tensor_bytes(payload_bytes), shared_tensor_bytes(payload_bytes)
    return 2 * (payload_bytes // own) + payload_bytes // shared + 16


def room_for_header(tensors: int) -> int:
    """Bytes to keep for length and header of a file with so many tensors."""
    return -(-(HEADER_LENGTH.size + _FIXED_HEADER_BYTES + _TENSOR_HEADER_BYTES * tensors) // 4096) * 4096


def header(room: int, sizes: list[int], table_bytes: int, identity: Identity) -> bytes:
    """Length and header, `room` bytes in all, for tensors of these sizes and the table behind them."""
    about = {
        "format": "pion",
        "version": str(VERSION),
        "worker": str(identity.worker),
        "covers": str(identity.covers),
        "lineage": identity.lineage.hex(),
    }
    tensors: dict[str, Any] = {"__metadata__": about}
    position = 0
    for index, size in enumerate(sizes):
        tensors[str(index)] = {"dtype": "U8", "shape": [size], "data_offsets": [position, position + size]}
        position += size
    tensors[TABLE] = {"dtype": "U8", "shape": [table_bytes], "data_offsets": [position, position + table_bytes]}
    text = json.dumps(tensors, separators=(",", ":")).encode("ascii")
    length = room - HEADER_LENGTH.size
    if len(text) > length:
        raise AssertionError(f"a header of {len(text)} bytes doesn't fit into {length}")
    return HEADER_LENGTH.pack(length) + text.ljust(length)


class TableWriter:
    """Collects entries; `finish` gives the table's bytes."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._parts: list[bytes] = []
        self._count = 0
        self._nbytes = TABLE_HEAD.size + TABLE_TAIL.size

    def add(self, entry: Entry) -> None:
        """One more record."""
        name = entry.family.encode("ascii")
        part = (
            ENTRY.pack(1 + len(name) + len(entry.meta), entry.start, entry.nbytes, entry.checksum)
            + bytes((len(name),))
            + name
            + entry.meta
        )
        self._parts.append(part)
        self._nbytes += len(part)
        self._count += 1

    @property
    def nbytes(self) -> int:
        """Length of the finished table."""
        return self._nbytes

    def finish(self, file_header: bytes) -> bytes:
        """The table; it vouches for the header, and its last 8 bytes for the table itself."""
        own = self._identity
        body = TABLE_HEAD.pack(MAGIC, VERSION, own.worker, own.covers, own.lineage, self._count)
        body = b"".join((body, *self._parts, struct.pack("<Q", xxhash.xxh3_64_intdigest(file_header))))
        return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


@attrs.frozen
class Snapshot:
    """A file that was opened: what it is, and its entries."""

    identity: Identity
    _table: memoryview
    _count: int

    def entries(self) -> Iterator[Entry]:
        """The records in order."""
        position, salt = TABLE_HEAD.size, self.identity.salt
        for _ in range(self._count):
            meta_bytes, start, nbytes, checksum = ENTRY.unpack_from(self._table, position)
            meta_start = position + ENTRY.size
            position = meta_start + meta_bytes
            meta = bytes(self._table[meta_start:position])
            name_end = 1 + meta[0]
            seed = xxhash.xxh3_64_intdigest(meta, salt ^ start)
            yield Entry(meta[1:name_end].decode("ascii"), meta[name_end:], start, nbytes, seed, checksum)


def parse(data: memoryview, ready: Callable[[int, int], None] = lambda start, stop: None) -> Snapshot:
    """Check header and table of a mapped file. Raises FormatError, with a text for the operator.

    `ready` is told which range will be looked at next, and may raise.
    """
    if len(data) < HEADER_LENGTH.size:
        raise FormatError("it is cut off, at byte 0")
    ready(0, HEADER_LENGTH.size)
    length = HEADER_LENGTH.unpack_from(data)[0]
    if not 2 <= length <= min(_READER_LIMIT, len(data) - HEADER_LENGTH.size):
        raise FormatError("its header is damaged or cut off, at byte 0")
    ready(HEADER_LENGTH.size, HEADER_LENGTH.size + length)
    file_header = bytes(data[: HEADER_LENGTH.size + length])
    try:
        tensors = json.loads(file_header[HEADER_LENGTH.size :])
        about = tensors.get("__metadata__", {})
        kind, version = about.get("format"), about.get("version")
        first, last = tensors[TABLE]["data_offsets"] if TABLE in tensors else (0, 0)
        if type(first) is not int or type(last) is not int:
            raise TypeError
        start, stop = len(file_header) + first, len(file_header) + last
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise FormatError("its header is damaged, at byte 8") from error
    whole = first >= 0 and last - first >= TABLE_HEAD.size + TABLE_TAIL.size and stop == len(data)
    table = data[start:stop] if whole else data[:0]
    if whole:
        ready(start, stop)
    vouched = whole and is_whole(table)
    if vouched and TABLE_TAIL.unpack_from(table, len(table) - TABLE_TAIL.size)[0] != xxhash.xxh3_64_intdigest(
        file_header
    ):
        raise FormatError("its header is damaged, at byte 8")
    if kind != "pion":
        raise FormatError("it is not a snapshot of Pion, at byte 8")
    if version != str(VERSION):
        raise VersionError(f"it is of format version {version}, and this program knows {VERSION}")
    if 0 <= first < last and stop != len(data):
        raise FormatError(f"it should be {stop} bytes long and is {len(data)}: cut off, at byte {len(data)}")
    if not whole:
        raise FormatError("its header is damaged, at byte 8")
    if not vouched:
        raise FormatError(f"its table is damaged, at byte {start}")
    magic, version, worker, covers, lineage, count = TABLE_HEAD.unpack_from(table)
    if magic != MAGIC or version != VERSION:
        raise VersionError(f"its table is of version {version}, and this program knows {VERSION}")
    return Snapshot(Identity(worker=worker, covers=covers, lineage=lineage), table, count)


def is_whole(table: memoryview) -> bool:
    """Whether a table is what was written, by its own checksum."""
    return bool(xxhash.xxh3_64_intdigest(table[:-8]) == TABLE_TAIL.unpack_from(table, len(table) - TABLE_TAIL.size)[1])
