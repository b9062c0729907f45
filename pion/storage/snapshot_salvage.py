"""What is left of a snapshot whose header or table is damaged or cut off.

The header is at the beginning and the table at the end, and each says what the snapshot is, so one of them is enough.
An entry is believed if its checksum is right, which covers its data, everything that it says of itself, and the
snapshot that it belongs to. Bytes that a client has stored can't pass for an entry, as they lie in front of the table.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
from collections.abc import Collection, Iterator
from typing import Final

import attrs
import xxhash

from pion.storage.disk import Mapping
from pion.storage.durable import MAX_FAMILY_BYTES
from pion.storage.region import Region
from pion.storage.snapshot_format import (
    ENTRY,
    HEADER_LENGTH,
    MAGIC,
    TABLE,
    TABLE_HEAD,
    TABLE_TAIL,
    VERSION,
    Entry,
    Identity,
    entry_seed,
    is_whole,
)

VSTORE: Final = "vstore"

_WINDOW_BYTES: Final = 1 << 20


@attrs.frozen
class Gap:
    """A part of the table in which no entry can be read."""

    start: int
    stop: int
    """Positions in the file."""


@attrs.frozen
class Remains:
    """A table that was found, and what the snapshot is."""

    identity: Identity
    start: int
    """Where the table begins in the file."""
    whole: bool
    """The table is all there and is what was written: all damage is in the header."""
    count: int | None
    """How many entries it had, as far as that can be told."""
    mapping: Mapping = attrs.field(repr=False)

    def parts(self) -> Iterator[tuple[Entry, bool] | Gap]:
        """Entries in order, each with whether its data is intact, and the gaps between them. Blocks, reads all data."""
        position, end = self.start + TABLE_HEAD.size, len(self.mapping.view)
        count, tags = 0, {_tag(VSTORE)}
        while position < end and end - position != TABLE_TAIL.size:
            entry, stop = self._entry(position)
            if entry is not None and (intact := self._intact(entry)) | self.whole:
                yield entry, intact
                tags.add(_tag(entry.family))
                position, count = stop, count + 1
                continue
            behind = self._next(position, stop, tags)
            yield Gap(position, behind)
            position = behind
        if not self._ends(position, count):
            yield Gap(position, end)

    def _ends(self, position: int, count: int) -> bool:
        """Whether what stands behind the last entry is the end of a table, and not what is left of another entry."""
        view = self.mapping.view
        if self.whole or len(view) - position != TABLE_TAIL.size:
            return self.whole
        header_hash: int = xxhash.xxh3_64_intdigest(view[: header_stop(view)])
        return self.count == count or bool(TABLE_TAIL.unpack_from(view, position)[0] == header_hash)

    def _entry(self, position: int) -> tuple[Entry | None, int]:
        """What stands at a position, if it can be an entry, and where the next would begin."""
        view = self.mapping.view
        meta_start = position + ENTRY.size
        if meta_start >= len(view):
            return None, len(view)
        meta_bytes, start, nbytes, checksum = ENTRY.unpack_from(view, position)
        stop = meta_start + meta_bytes
        name_end = meta_start + 1 + view[meta_start]
        if stop > len(view) or name_end > stop or not 1 <= view[meta_start] <= MAX_FAMILY_BYTES:
            return None, min(stop, len(view))
        name, meta = bytes(view[meta_start + 1 : name_end]), bytes(view[name_end:stop])
        if not name.isascii() or start + nbytes > self.start:
            return None, stop
        family = name.decode("ascii")
        return Entry(family, meta, start, nbytes, entry_seed(self.identity.salt, family, meta, start), checksum), stop

    def _intact(self, entry: Entry) -> bool:
        return Region(self.mapping, entry.start, entry.nbytes, entry.checksum, entry.seed).verify()

    def _next(self, position: int, likely: int, tags: Collection[bytes]) -> int:
        """Where the next entry begins behind a bad one: where that one says, or else where a known family's name is."""
        view = self.mapping.view
        behind = (at - ENTRY.size for at in _find_any(view, tags, position + ENTRY.size + 1))
        for at in itertools.chain([likely] if likely > position else [], behind):
            entry, _ = self._entry(at)
            if entry is not None and self._intact(entry):
                return at
        return len(view)


def find_remains(mapping: Mapping, lineages: Collection[bytes]) -> Remains | None:
    """The table of a damaged snapshot; None if none can be made out.

    `lineages` are those of the log's segments: where the header is damaged the table must be of one of them, if any.
    """
    view = mapping.view
    start, about = read_header(view)
    if start is not None and about is not None and _head(view, start) == about:
        return _remains_at(mapping, start, about)
    known = {*lineages, *([about.lineage] if about is not None else [])}
    for at, identity, sure in _places(view, start, about):
        if not known or identity.lineage in known:
            remains = _remains(mapping, at, identity, sure=sure)
            if remains is not None:
                return remains
    return None


def _places(view: memoryview, start: int | None, about: Identity | None) -> Iterator[tuple[int, Identity, bool]]:
    """Where the table may be, what it may be one of, and whether its first entry must prove that. Likely ones first."""
    for sure in (True, False):
        if start is not None:
            for identity in (_head(view, start), about):
                if identity is not None:
                    yield start, identity, sure
        position = len(view)
        while (position := _rfind(view, MAGIC, position)) >= 0:
            head = _head(view, position)
            if head is not None:
                yield position, head, sure


def _remains(mapping: Mapping, start: int, identity: Identity, *, sure: bool) -> Remains | None:
    """The table at `start`, if it is whole or an entry of it, the first if `sure`, proves the identity."""
    remains = _remains_at(mapping, start, identity)
    parts = itertools.islice(remains.parts(), 1 if sure else None)
    if remains.whole or any(not isinstance(part, Gap) for part in parts):
        return remains
    return None


def _remains_at(mapping: Mapping, start: int, identity: Identity) -> Remains:
    table = mapping.view[start:]
    has_head = _head(mapping.view, start) == identity
    whole = has_head and len(table) >= TABLE_HEAD.size + TABLE_TAIL.size and is_whole(table)
    return Remains(identity, start, whole, TABLE_HEAD.unpack_from(table)[-1] if has_head else None, mapping)


def header_stop(view: memoryview) -> int:
    """Where the header ends, as far as can be told."""
    length: int = HEADER_LENGTH.unpack_from(view)[0] if len(view) >= HEADER_LENGTH.size else 0
    return min(len(view), HEADER_LENGTH.size + length)


def read_header(view: memoryview) -> tuple[int | None, Identity | None]:
    """Where the table begins and what the snapshot is, as the header says; None for what can't be read."""
    try:
        stop = header_stop(view)
        tensors = json.loads(bytes(view[HEADER_LENGTH.size : stop]))
        about = tensors["__metadata__"]
        start = stop + int(tensors[TABLE]["data_offsets"][0])
        identity = Identity(
            worker=int(about["worker"]), covers=int(about["covers"]), lineage=bytes.fromhex(about["lineage"])
        )
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, struct.error):
        return None, None
    if not 0 < start < len(view) - len(MAGIC):
        return None, None
    return start, identity


def _head(view: memoryview, start: int) -> Identity | None:
    """What the head of a table says."""
    if start + TABLE_HEAD.size > len(view):
        return None
    magic, version, worker, covers, lineage, _ = TABLE_HEAD.unpack_from(view, start)
    return Identity(worker=worker, covers=covers, lineage=lineage) if (magic, version) == (MAGIC, VERSION) else None


def _tag(family: str) -> bytes:
    """What stands in an entry between its numbers and its meta."""
    return bytes((len(family),)) + family.encode("ascii")


def _find_any(view: memoryview, what: Collection[bytes], start: int) -> Iterator[int]:
    """Where any of some texts is, from `start` on."""
    pattern = re.compile(b"|".join(re.escape(each) for each in sorted(what)))
    longest = max(map(len, what))
    while start < len(view):
        stop = start + _WINDOW_BYTES
        # What begins behind `stop` is found in the next window.
        for found in pattern.finditer(bytes(view[start : stop + longest - 1])):
            if start + found.start() < stop:
                yield start + found.start()
        start = stop


def _rfind(view: memoryview, what: bytes, stop: int) -> int:
    """`bytes.rfind` in a mapped file, for what begins in front of `stop`."""
    while stop > 0:
        start = max(0, stop - _WINDOW_BYTES)
        found = bytes(view[start : stop + len(what) - 1]).rfind(what)
        if found >= 0:
            return start + found
        stop = start
    return -1
