"""The snapshot's file byte by byte, and as any reader of safetensors sees it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load

from pion.storage import snapshot_format
from pion.storage.durable import Captured
from pion.storage.region import Region
from pion.storage.snapshot import _File
from pion.storage.snapshot_format import (
    HEADER_LENGTH,
    Entry,
    FormatError,
    Identity,
    TableWriter,
    VersionError,
    entry_seed,
    header,
    most_tensors,
    own_tensor_bytes,
    parse,
    room_for_header,
    shared_tensor_bytes,
)
from pion.testing import MemoryDisk

IDENTITY = Identity(worker=3, covers=123_456, lineage=bytes(range(16)))

Item = tuple[str, bytes, tuple[bytes, ...]]
"""Family, meta and the parts of the data."""


def build(items: list[Item], payload_bytes: int | None = None) -> bytes:
    """A file, written as the server writes it."""
    disk = MemoryDisk()
    total = sum(len(part) for _, _, parts in items for part in parts)
    file = _File(disk, "snapshot", total if payload_bytes is None else payload_bytes, IDENTITY)
    file.add([(family, Captured(meta, parts)) for family, meta, parts in items])
    file.finish()
    return disk.contents("snapshot")


def read(data: bytes | bytearray) -> list[tuple[str, bytes, bytes]]:
    """What a start reads. Raises FormatError, and ValueError for data that is not what was written."""
    found = []
    for entry in parse(memoryview(data)).entries():
        content = bytes(data[entry.start : entry.start + entry.nbytes])
        if len(content) != entry.nbytes or xxhash.xxh3_64_intdigest(content, entry.seed) != entry.checksum:
            raise ValueError(f"data of {entry.meta!r}")
        found.append((entry.family, entry.meta, content))
    return found


def plain(items: list[Item]) -> list[tuple[str, bytes, bytes]]:
    return [(family, meta, b"".join(parts)) for family, meta, parts in items]


ITEMS: list[Item] = [
    ("vstore", b"a session", ()),
    ("vstore", b"its rows", (b"x" * 60, b"y" * 30)),
    ("notes", b"", (b"a short note",)),
    ("vstore", b"more rows", (b"z" * 200,)),
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_format, "OWN_TENSOR_BYTES", 64)
    monkeypatch.setattr(snapshot_format, "PACK_BYTES", 128)


@settings(max_examples=100, deadline=None)
@given(
    items=st.lists(
        st.tuples(
            st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=32),
            st.binary(max_size=40),
            st.lists(st.binary(max_size=100), max_size=3).map(tuple),
        ),
        max_size=12,
    ),
    payload_bytes=st.none() | st.integers(0, 10_000),
)
def test_a_file_is_read_as_it_was_written(items: list[Item], payload_bytes: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_format, "OWN_TENSOR_BYTES", 64)
        patch.setattr(snapshot_format, "PACK_BYTES", 128)
        data = build(items, payload_bytes)
    assert read(data) == plain(items)
    assert parse(memoryview(data)).identity == IDENTITY
    # All of it is in tensors, without gaps: the data in order, then the table.
    tensors = load(data)
    last = tensors.pop("table")
    joined = b"".join(tensors[str(index)].tobytes() for index in range(len(tensors)))
    assert joined == b"".join(content for _, _, content in plain(items))
    assert data.endswith(joined + last.tobytes())


@pytest.mark.usefixtures("small")
def test_other_programs_open_it(tmp_path: Path) -> None:
    path = tmp_path / "pion.safetensors"
    path.write_bytes(build(ITEMS))
    with safe_open(path, "np") as file:
        assert list(file.keys()) == ["0", "1", "2", "table"]
        assert file.get_tensor("0").tobytes() == b"x" * 60 + b"y" * 30
        assert file.get_tensor("1").tobytes() == b"a short note"
        assert file.get_tensor("2").tobytes() == b"z" * 200
        assert file.get_tensor("2").dtype == np.uint8
        assert file.metadata() == {
            "format": "pion",
            "version": "1",
            "worker": "3",
            "covers": "123456",
            "lineage": bytes(range(16)).hex(),
        }


@pytest.mark.usefixtures("small")
def test_every_flipped_bit_is_noticed() -> None:
    data = bytearray(build(ITEMS))
    used = len(data.rstrip(b"\0"))
    assert used == len(data)
    room = 8 + HEADER_LENGTH.unpack_from(data)[0]
    text = len(data[:room].rstrip())
    # Of the padding of the header, which is all the same, only a part.
    for position in (*range(text + 20), *range(room - 20, len(data))):
        for bit in range(8):
            data[position] ^= 1 << bit
            with pytest.raises((FormatError, ValueError)) as caught:
                read(data)
            in_data = room <= position < room + 302
            assert isinstance(caught.value, ValueError) == in_data
            if isinstance(caught.value, FormatError):
                assert not isinstance(caught.value, VersionError), "damage must not pass for another version"
                assert "at byte" in str(caught.value)
            data[position] ^= 1 << bit
    assert read(data) == plain(ITEMS)


@pytest.mark.usefixtures("small")
def test_every_length_is_noticed() -> None:
    data = build(ITEMS)
    room = 8 + HEADER_LENGTH.unpack_from(data)[0]
    for size in (*range(12), *range(room - 5, len(data))):
        with pytest.raises(FormatError, match="cut off, at byte"):
            parse(memoryview(data[:size]))
    with pytest.raises(FormatError, match=f"should be {len(data)} bytes long and is {len(data) + 1}"):
        parse(memoryview(data + b"\0"))


@given(garbage=st.binary(max_size=400))
def test_anything_else_is_no_snapshot(garbage: bytes) -> None:
    for data in (garbage, len(garbage).to_bytes(8, "little") + garbage):
        with pytest.raises(FormatError):
            parse(memoryview(data))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '"text"',
        "1",
        "[" * 100_000,
        '{"__metadata__": 5}',
        '{"__metadata__": {"format": "pion", "version": "1"}}',
        '{"__metadata__": {"format": "pion", "version": "1"}, "table": 5}',
        '{"__metadata__": {"format": "pion", "version": "1"}, "table": {"data_offsets": [0]}}',
        '{"__metadata__": {"format": "pion", "version": "1"}, "table": {"data_offsets": ["a", "b"]}}',
        '{"__metadata__": {"format": "pion", "version": "1"}, "table": {"data_offsets": [-900, 200]}}',
        '{"__metadata__": {"format": "pion", "version": "1"}, "table": {"data_offsets": [0.0, 200.0]}}',
        '{"__metadata__": {"format": "pion", "version": "1"}, "table": {"data_offsets": [200, 0]}}',
        '{"__metadata__": {"format": "pion", "version": "1"}, "table": {"data_offsets": [0, 1]}}',
        '{"__metadata__": {"format": "pion", "version": "1"}, "table": {"data_offsets": [0, 200]}}',
    ],
)
def test_headers_that_are_none_of_ours(text: str) -> None:
    raw = text.encode()
    with pytest.raises(FormatError):
        parse(memoryview(len(raw).to_bytes(8, "little") + raw + bytes(200)))


def test_other_safetensors_files_are_not_taken_for_ours() -> None:
    from safetensors.numpy import save

    with pytest.raises(FormatError, match="not a snapshot of Pion"):
        parse(memoryview(save({"weights": np.arange(10)})))
    with pytest.raises(FormatError, match="not a snapshot of Pion"):
        parse(memoryview(save({"table": np.arange(10)}, {"format": "pt"})))


@pytest.mark.parametrize("version", ["0", "2", "11"])
def test_another_version_is_named(version: str) -> None:
    """Whatever it has instead of our table."""
    about = {"__metadata__": {"format": "pion", "version": version}, "x": {"dtype": "U8", "shape": [0]}}
    raw = json.dumps(about).encode()
    with pytest.raises(VersionError, match=f"version {version}, and this program knows 1"):
        parse(memoryview(len(raw).to_bytes(8, "little") + raw))


def test_a_table_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    head = header(4096, [], TableWriter(IDENTITY).nbytes, IDENTITY)
    monkeypatch.setattr(snapshot_format, "VERSION", 2)
    table = TableWriter(IDENTITY).finish(head)
    monkeypatch.undo()
    with pytest.raises(VersionError, match="table is of version 2"):
        parse(memoryview(head + table))


def test_an_entry_vouches_for_itself() -> None:
    """Family, meta, place and file are in the seed of its checksum."""
    seeds = {
        entry_seed(salt, family, meta, start)
        for salt in (1, 2)
        for family, meta in (("a", b"bc"), ("ab", b"c"), ("a", b"bd"))
        for start in (0, 4096)
    }
    assert len(seeds) == 12
    table = TableWriter(IDENTITY)
    table.add(Entry("notes", b"meta", 77, 5, entry_seed(IDENTITY.salt, "notes", b"meta", 77), 99))
    head = header(4096, [5], table.nbytes, IDENTITY)
    (entry,) = parse(memoryview(head + bytes(5) + table.finish(head))).entries()
    assert entry == Entry("notes", b"meta", 77, 5, entry_seed(IDENTITY.salt, "notes", b"meta", 77), 99)


# How large the header gets.


@pytest.mark.parametrize("payload_bytes", [0, 10**6, 10**9, 10**11, 10**12, 10**14])
def test_the_header_stays_far_below_what_readers_accept(payload_bytes: int) -> None:
    tensors = most_tensors(payload_bytes)
    assert room_for_header(tensors) < 50_000_000
    # All as large as they may be without being fewer.
    assert payload_bytes // own_tensor_bytes(payload_bytes) <= 100_000
    assert payload_bytes // shared_tensor_bytes(payload_bytes) <= 100_000


def test_there_is_room_for_the_longest_numbers() -> None:
    count = 110_000
    sizes = [10**14] * 2 + [10**9] * (count - 2)
    room = room_for_header(count + 1)
    head = header(room, sizes, 10**10, IDENTITY)
    assert len(head) == room
    assert json.loads(head[8:])[str(count - 1)]["shape"] == [10**9]
    with pytest.raises(AssertionError, match="doesn't fit"):
        header(4096, sizes[:100], 10, IDENTITY)


@pytest.mark.parametrize("stated", [0, 50, 500, 5_000, 50_000])
@pytest.mark.parametrize("most", [2, 5, 1000])
def test_more_data_than_was_expected(stated: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header's room is made for an estimate; what is beyond it shares a tensor, and all is found."""
    monkeypatch.setattr(snapshot_format, "OWN_TENSOR_BYTES", 64)
    monkeypatch.setattr(snapshot_format, "PACK_BYTES", 128)
    monkeypatch.setattr(snapshot_format, "MOST_TENSORS", most)
    items: list[Item] = [
        ("vstore", b"%d" % index, (bytes([index % 251]) * (1 + 37 * index % 150),)) for index in range(200)
    ]
    data = build(items, stated)
    assert read(data) == plain(items)
    tensors = load(data)
    assert len(tensors) <= most_tensors(stated)
    joined = b"".join(tensors[str(index)].tobytes() for index in range(len(tensors) - 1))
    assert joined == b"".join(content for _, _, content in plain(items))


def test_large_data_has_a_tensor_of_its_own_and_short_data_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_format, "OWN_TENSOR_BYTES", 64)
    monkeypatch.setattr(snapshot_format, "PACK_BYTES", 128)
    sizes = [10, 20, 64, 63, 63, 5, 100, 100, 1]
    items: list[Item] = [("vstore", b"", (bytes(size),)) for size in sizes]
    tensors = load(build(items))
    assert [len(tensors[str(index)]) for index in range(len(tensors) - 1)] == [30, 64, 131, 100, 100, 1]


def test_a_lost_record_stays_lost() -> None:
    class Lost(Captured):
        lost = True

    disk = MemoryDisk()
    file = _File(disk, "snapshot", 0, IDENTITY)
    file.add([("notes", Lost(b"meta", (b"\0",)))])
    file.finish()
    mapping = disk.map("snapshot")
    (entry,) = parse(mapping.view).entries()
    assert not Region(mapping, entry.start, entry.nbytes, entry.checksum, entry.seed).verify()


def test_a_reader_of_safetensors_refuses_what_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(build(ITEMS)[:-1])
    with pytest.raises(SafetensorError), safe_open(path, "np"):
        pass
