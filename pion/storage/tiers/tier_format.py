"""The file of one prefix in a tier, byte by byte: a safetensors file that tells what is in it.

`docs/reference/tier-format.md` is the description for readers of the files. Pure: bytes in, bytes out.

The order is: an 8-byte length, a JSON header filled up with blanks, the tensor `register` (how to make the prefix
again), the tensor `table` (what the others hold), then one tensor for each run of rows. All up to the end of the table
is the *head*: it is made before anything is written, so a file is written in one pass, and one checksum vouches for all
of it. The rows have a checksum each, and are compared with it when they are first used.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
import xxhash

from pion.config import KIB
from pion.replies import Buffer
from pion.storage import disk
from pion.storage.records import digest_parts
from pion.storage.tiers.base import TierMissError, check_tier_key
from pion.storage.tiers.runs import PlacedRun

MAGIC: Final = b"PIONTIER"
VERSION: Final = 1
FORMAT: Final = "pion-tier"

_LENGTH: Final = struct.Struct("<Q")
TABLE_HEAD: Final = struct.Struct("<8sIIQ16sQQ")
ENTRY: Final = struct.Struct("<IIIIQQQ")
_PLACE: Final = struct.Struct("<IIIIQQ")
TABLE_TAIL: Final = struct.Struct("<Q")

ALIGN_BYTES: Final = 64
"""The rows begin at a multiple of this: a cache line, and what vector instructions like best."""

_READER_LIMIT: Final = 100 * 1000 * 1000
"""safetensors readers refuse a longer header."""

_READ_BYTES: Final = 32 * KIB
"""Read at first; the head of a prefix with a hundred layers fits in."""

_NAMES: Final = "kv"


@attrs.frozen
class RowRun:
    """Adjacent rows of one side and layer, to be written."""

    side: int
    """0 is K, or a lone session; 1 is V."""
    layer: int
    start: int
    """The first row."""
    count: int
    parts: Sequence[Buffer] = attrs.field(repr=False)
    """The rows behind one another; all rows of a run have the same length."""


@attrs.frozen
class Layout:
    """A file before it is written."""

    head: bytes = attrs.field(repr=False)
    """All that comes before the rows."""
    parts: Sequence[Buffer] = attrs.field(repr=False)
    """The rows."""
    runs: tuple[PlacedRun, ...] = attrs.field(repr=False)
    """Where they will lie."""
    nbytes: int
    """Of the whole file."""


@attrs.frozen
class Head:
    """What a file says of itself; it was found to be what was written."""

    version: int
    key: str
    register: bytes = attrs.field(repr=False)
    runs: tuple[PlacedRun, ...] = attrs.field(repr=False)

    def check_shape(self, shape: Iterable[tuple[int, int, int, int, int]]) -> None:
        """Raises TierMissError unless the runs have these shapes, in any order; see `PlacedRun.shape`."""
        if sorted(run.shape for run in self.runs) != sorted(shape):
            raise TierMissError("it has rows of another shape", damaged=True)


def lay_out(
    key: str,
    register: bytes,
    rows: Sequence[RowRun],
    *,
    about: Mapping[str, str] | None = None,
    salt: int | None = None,
) -> Layout:
    """Plan a file. Reads all rows, for their checksums: call it in a thread. Copies none.

    `about` are texts that readers of the file may like to see in its `__metadata__`; nothing is made of them. `salt`
    is random unless given. Raises ValueError for a run that is empty or there twice, rows of uneven length, and for
    more runs than a header has room for (about a million).
    """
    salt = secrets.randbits(64) if salt is None else salt
    sizes = [sum(len(part) for part in run.parts) for run in rows]
    for run, nbytes in zip(rows, sizes, strict=True):
        if not nbytes or run.count < 1 or nbytes % run.count:
            raise ValueError(f"{run.count} rows can't have {nbytes} bytes")
        if run.side not in (0, 1):
            raise ValueError(f"there is no side {run.side}")
    table_bytes = TABLE_HEAD.size + ENTRY.size * len(rows) + TABLE_TAIL.size
    text = _header_text(key, len(register), table_bytes, rows, sizes, about or {})
    before = _LENGTH.size + len(text) + len(register) + table_bytes
    start = -(-before // ALIGN_BYTES) * ALIGN_BYTES
    runs: list[PlacedRun] = []
    offset = start
    for run, nbytes in zip(rows, sizes, strict=True):
        place = (run.side, run.layer, run.start, run.count, offset, nbytes)
        seed = run_seed(salt, *place)
        runs.append(PlacedRun(*place, seed, digest_parts(run.parts, seed)))
        offset += nbytes
    padded = text.ljust(len(text) + start - before)
    head = b"".join(
        (
            _LENGTH.pack(len(padded)),
            padded,
            register,
            TABLE_HEAD.pack(MAGIC, VERSION, 0, salt, bytes.fromhex(key), offset, len(runs)),
            *(ENTRY.pack(*run.shape[:4], run.offset, run.nbytes, run.checksum) for run in runs),
        )
    )
    head += TABLE_TAIL.pack(xxhash.xxh3_64_intdigest(head))
    return Layout(head, [part for run in rows for part in run.parts], tuple(runs), offset)


def _header_text(
    key: str,
    register_bytes: int,
    table_bytes: int,
    rows: Sequence[RowRun],
    sizes: Sequence[int],
    about: Mapping[str, str],
) -> bytes:
    metadata = {**about, "format": FORMAT, "version": str(VERSION), "key": check_tier_key(key)}
    tensors: dict[str, Any] = {"__metadata__": metadata}
    position = 0

    def place(name: str, shape: list[int], nbytes: int) -> None:
        nonlocal position
        if name in tensors:
            raise ValueError(f"rows {name} are there twice")
        tensors[name] = {"dtype": "U8", "shape": shape, "data_offsets": [position, position + nbytes]}
        position += nbytes

    place("register", [register_bytes], register_bytes)
    place("table", [table_bytes], table_bytes)
    for run, nbytes in zip(rows, sizes, strict=True):
        name = f"{_NAMES[run.side]}.{run.layer}" + (f".{run.start}" if run.start else "")
        place(name, [run.count, nbytes // run.count], nbytes)
    text = json.dumps(tensors, separators=(",", ":")).encode("ascii")
    if len(text) > _READER_LIMIT - ALIGN_BYTES:
        raise ValueError(f"{len(rows)} runs of rows are too many for one file")
    return text


def check_head(mapping: disk.Mapping, key: str | None = None) -> None:
    """Check everything before the rows, and that the file has its length; reads no row. Blocks.

    Raises TierMissError, with `damaged`, for anything that is not exactly what was written, for another version, and
    for another key than `key`.
    """
    _checked(mapping, key)


def read_head(mapping: disk.Mapping, key: str | None = None) -> Head:
    """What a file says of itself. Blocks. Checks and raises as `check_head`."""
    found = _checked(mapping, key)
    runs = tuple(_placed(entry, found.salt) for entry in ENTRY.iter_unpack(found.entries))
    position = found.nbytes
    for run in runs:
        if run.offset != position or run.nbytes < 1 or run.count < 1:
            raise _damaged("its table is not consistent")
        position += run.nbytes
    if position != found.file_bytes:
        raise _damaged("its table is not consistent")
    return Head(VERSION, found.key, found.register, runs)


@attrs.frozen
class _Checked:
    """The parts of a head whose checksum is right."""

    key: str
    register: bytes
    salt: int
    entries: bytes
    nbytes: int
    file_bytes: int


def _checked(mapping: disk.Mapping, key: str | None) -> _Checked:
    head = _Reader(mapping)
    (length,) = _LENGTH.unpack(head.take(0, _LENGTH.size))
    if not 2 <= length <= min(_READER_LIMIT, head.size):
        raise _damaged("its header is damaged or cut off")
    start = _LENGTH.size + length
    table, stop = _places(head.take(_LENGTH.size, start), start)
    raw = head.take(0, stop)
    tail = stop - TABLE_TAIL.size
    if xxhash.xxh3_64_intdigest(raw[:tail]) != TABLE_TAIL.unpack_from(raw, tail)[0]:
        raise _damaged("its head is damaged")
    magic, version, _, salt, key_bytes, file_bytes, count = TABLE_HEAD.unpack_from(raw, table)
    if (magic, version) != (MAGIC, VERSION):
        raise _damaged(f"its table is of version {version}, and this program knows {VERSION}")
    if key is not None and key_bytes.hex() != key:
        raise _damaged(f"it is the object {key_bytes.hex()}")
    if file_bytes != head.size:
        raise _damaged(f"it should be {file_bytes} bytes long and is {head.size}")
    entries = raw[table + TABLE_HEAD.size : tail]
    if len(entries) != count * ENTRY.size:
        raise _damaged("its table is not consistent")
    return _Checked(key_bytes.hex(), raw[start:table], salt, entries, stop, file_bytes)


def _places(text: bytes, start: int) -> tuple[int, int]:
    """Where the table begins and ends; the register lies between it and the header. Raises TierMissError."""
    try:
        tensors = json.loads(text)
        about = tensors["__metadata__"]
        kind, version = about["format"], about["version"]
        first, second = tensors["register"]["data_offsets"]
        third, last = tensors["table"]["data_offsets"]
        whole = {int} == {type(each) for each in (first, second, third, last)}
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise _damaged("its header is damaged") from error
    if kind != FORMAT:
        raise _damaged("it is not an object of Pion")
    if version != str(VERSION):
        raise _damaged(f"it is of format version {version!s:.20}, and this program knows {VERSION}")
    if not whole or first != 0 or not 0 <= second == third <= last - TABLE_HEAD.size - TABLE_TAIL.size:
        raise _damaged("its header is damaged")
    return start + third, start + last


def _placed(entry: tuple[int, ...], salt: int) -> PlacedRun:
    side, layer, start, count, offset, nbytes, checksum = entry
    seed = run_seed(salt, side, layer, start, count, offset, nbytes)
    return PlacedRun(side, layer, start, count, offset, nbytes, seed, checksum)


def run_seed(salt: int, *place: int) -> int:
    """The seed of a run's checksum, from side, layer, first row, rows, offset and bytes."""
    return xxhash.xxh3_64_intdigest(_PLACE.pack(*place), salt)


def _damaged(text: str) -> TierMissError:
    return TierMissError(text, damaged=True)


class _Reader:
    """The first bytes of a file, read with calls that report errors: a page that isn't there can't end the process."""

    def __init__(self, mapping: disk.Mapping) -> None:
        self._mapping = mapping
        self.size = len(mapping.view)
        self._read = bytearray()

    def take(self, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop`. Raises TierMissError."""
        if stop > self.size:
            raise _damaged(f"it is cut off, at byte {self.size}")
        have = len(self._read)
        if stop > have:
            more = bytearray(min(max(stop, _READ_BYTES), self.size) - have)
            try:
                self._mapping.read_into(have, memoryview(more))
            except OSError as error:
                raise _damaged(f"it can't be read: {error.strerror or error}") from error
            self._read += more
        return bytes(self._read[start:stop])
