"""The log's files byte by byte: what was written is read, and whatever else is there is not taken for it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import attrs
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pion.storage import records
from pion.storage.durable import Record
from pion.storage.records import (
    MARKER,
    SEGMENT_BYTES,
    Entry,
    FormatError,
    SegmentHeader,
    VersionError,
    data_intact,
    decode,
    digest,
    encode,
    find_salt,
    scan,
    search,
)

HEADER = SegmentHeader(worker=1, number=7, first=41, salt=0x0123456789ABCDEF, lineage=bytes(range(16)), boot="boot")

Item = tuple[str, bytes, bytes]
"""Family, meta and data."""


def segment(items: Sequence[Item], header: SegmentHeader = HEADER, durable: int = 3) -> bytearray:
    found = bytearray(header.to_bytes())
    for sequence, (family, meta, data) in enumerate(items, start=header.first):
        buffers, size = encode(family, Record(meta, data), sequence, durable, header.salt)
        joined = b"".join(buffers)
        assert len(joined) == size
        found += joined
    return found


def read(data: bytes | bytearray, header: SegmentHeader = HEADER) -> list[Item]:
    """The records up to the first that is not what was written."""
    found = []
    view = memoryview(data)
    for entry in scan(view, header):
        if not data_intact(view, entry, header.salt):
            break
        found.append((entry.family, entry.meta, bytes(view[entry.data_start : entry.stop])))
    return found


ITEMS: list[Item] = [("vstore", b"one", b""), ("notes", b"", b"data of two"), ("vstore", b"three" * 9, b"3" * 70)]


@given(
    worker=st.integers(0, 2**32 - 1),
    number=st.integers(0, 2**64 - 1),
    first=st.integers(0, 2**64 - 1),
    salt=st.integers(0, 2**64 - 1),
    lineage=st.binary(min_size=16, max_size=16),
    boot=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40),
)
def test_a_header_is_read_as_it_was_written(worker, number, first, salt, lineage, boot) -> None:
    header = SegmentHeader(worker=worker, number=number, first=first, salt=salt, lineage=lineage, boot=boot)
    written = header.to_bytes()
    assert len(written) == SEGMENT_BYTES
    assert SegmentHeader.parse(memoryview(written + b"and records")) == header


def test_a_boot_id_of_the_system_fits() -> None:
    boot = "6c3f0f50-6c7b-4d52-9b4c-2f1d3f5b8e9a"
    assert SegmentHeader.parse(memoryview(attrs.evolve(HEADER, boot=boot).to_bytes())).boot == boot


@given(
    items=st.lists(
        st.tuples(
            st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=32),
            st.binary(),
            st.binary(),
        ),
        max_size=8,
    ),
    first=st.integers(1, 2**63),
    durable=st.integers(0, 2**63),
)
def test_records_are_read_as_they_were_written(items: list[Item], first: int, durable: int) -> None:
    header = attrs.evolve(HEADER, first=first)
    data = segment(items, header, durable)
    entries = list(scan(memoryview(data), header))
    assert read(data, header) == items
    assert [entry.sequence for entry in entries] == list(range(first, first + len(items)))
    assert all(entry.durable == durable for entry in entries)
    assert (entries[-1].stop if entries else SEGMENT_BYTES) == len(data)
    assert list(search(memoryview(data), SEGMENT_BYTES, header.salt)) == entries
    # A segment that was made in advance has no number; its first record has.
    assert list(scan(memoryview(data), attrs.evolve(header, first=0))) == entries


def test_large_data_is_written_without_a_copy() -> None:
    rows = np.zeros(records.JOINED_BYTES + 1, dtype=np.uint8)
    buffers, size = encode("vstore", Record(b"rows", rows), 1, 0, 5)
    assert size == sum(map(len, buffers))
    assert np.shares_memory(np.asarray(buffers[1]), rows)
    (short,), size = encode("vstore", Record(b"rows", rows[:-1]), 1, 0, 5)
    assert size == len(short)


def test_every_flipped_bit_is_noticed() -> None:
    data = segment(ITEMS)
    starts = [entry.start for entry in scan(memoryview(data), HEADER)]
    for bit in range(8 * len(data)):
        position = bit // 8
        data[position] ^= 1 << bit % 8
        if position < SEGMENT_BYTES:
            with pytest.raises(FormatError) as caught:
                SegmentHeader.parse(memoryview(data))
            assert not isinstance(caught.value, VersionError), "damage must not pass for another version"
        else:
            intact = sum(start <= position for start in starts) - 1
            assert read(data) == ITEMS[:intact]
        data[position] ^= 1 << bit % 8
    assert read(data) == ITEMS


def test_every_length_is_noticed() -> None:
    data = segment(ITEMS)
    stops = [entry.stop for entry in scan(memoryview(data), HEADER)]
    for size in range(len(data)):
        part = data[:size]
        if size < SEGMENT_BYTES:
            with pytest.raises(FormatError, match="cut off"):
                SegmentHeader.parse(memoryview(part))
        else:
            assert read(part) == ITEMS[: sum(stop <= size for stop in stops)]


@given(garbage=st.binary(max_size=300), start=st.integers(0, 400))
def test_what_is_anything_else_is_no_record(garbage: bytes, start: int) -> None:
    data = memoryview(MARKER + garbage)
    assert decode(data, min(start, len(data)), HEADER.salt) is None
    assert list(search(data, 0, HEADER.salt)) == []


def test_another_version_is_named() -> None:
    head = bytearray(HEADER.to_bytes()[:-8])
    head[8:12] = (9).to_bytes(4, "little")
    head += struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(head)))
    with pytest.raises(VersionError, match="version 9, and this program knows 1"):
        SegmentHeader.parse(memoryview(head))


def test_records_of_another_segment_do_not_count() -> None:
    """The salt tells: neither the tail of an older file in a reused block, nor a log that a client stores."""
    other = attrs.evolve(HEADER, salt=99)
    foreign = segment(ITEMS, other)[SEGMENT_BYTES:]
    data = segment(ITEMS[:1]) + foreign
    assert read(data) == ITEMS[:1]
    assert [entry.sequence for entry in search(memoryview(data), SEGMENT_BYTES, HEADER.salt)] == [41]
    stored = segment([("vstore", b"rows", bytes(segment(ITEMS, other)))])
    assert len(list(search(memoryview(stored), SEGMENT_BYTES, HEADER.salt))) == 1


def test_a_record_stored_as_data_is_not_found_again() -> None:
    """A search goes on behind a record that it found, not inside it."""
    inner = bytes(segment(ITEMS)[SEGMENT_BYTES:])
    data = segment([("vstore", b"rows", inner)])
    assert [entry.start for entry in search(memoryview(data), SEGMENT_BYTES, HEADER.salt)] == [SEGMENT_BYTES]


def test_a_gap_in_the_numbers_ends_a_scan() -> None:
    data = segment(ITEMS[:1]) + segment(ITEMS[1:], attrs.evolve(HEADER, first=43))[SEGMENT_BYTES:]
    assert read(data) == ITEMS[:1]
    assert [entry.sequence for entry in search(memoryview(data), SEGMENT_BYTES, HEADER.salt)] == [41, 43, 44]


@pytest.mark.parametrize("window", [4, 5, 7, 16, 1000])
def test_a_search_finds_what_lies_across_two_windows(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_WINDOW_BYTES", window)
    for pad in range(12):
        noise = (MARKER[:3] * 5)[:pad]
        data = bytearray(SEGMENT_BYTES) + noise + segment(ITEMS)[SEGMENT_BYTES:] + MARKER[:2]
        found = [entry.sequence for entry in search(memoryview(data), SEGMENT_BYTES, HEADER.salt)]
        assert found == [41, 42, 43]


def test_a_search_passes_over_what_is_damaged() -> None:
    data = segment(ITEMS)
    entries: list[Entry] = list(scan(memoryview(data), HEADER))
    for position in range(entries[1].start, entries[1].data_start):
        data[position] ^= 0x40
        found = [entry.sequence for entry in search(memoryview(data), entries[1].start, HEADER.salt)]
        assert found == [43]
        data[position] ^= 0x40


def test_the_salt_can_be_found_without_the_header() -> None:
    data = segment(ITEMS)
    for bit in range(8 * SEGMENT_BYTES):
        data[bit // 8] ^= 1 << bit % 8
        assert find_salt(memoryview(data)) == (HEADER.salt, 41)
        data[bit // 8] ^= 1 << bit % 8
    assert find_salt(memoryview(data[:SEGMENT_BYTES])) is None
    data[SEGMENT_BYTES + 6] ^= 1
    assert find_salt(memoryview(data)) is None


def test_a_digest_does_not_depend_on_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(256)) * 5
    whole = digest(data, 17)
    for piece in (1, 100, 1279, 1280, 1281):
        monkeypatch.setattr(records, "PIECE_BYTES", piece)
        assert digest(data, 17) == whole
    assert digest(data, 18) != whole
