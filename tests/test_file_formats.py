"""The pages on the formats of log and snapshot are true: their tables, examples and programs are run on real files."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
import xxhash
from safetensors import safe_open

from pion.client import Layer
from pion.client.aio import PionClient
from pion.config import Config
from pion.storage import changes as change_module
from pion.storage import records, snapshot_format
from pion.storage.changes import (
    Change,
    CreateSession,
    Declaration,
    DropPrefix,
    DropSession,
    EvictSession,
    Hashes,
    PlaceRows,
    Reason,
    Register,
    SetExpiry,
    SetPin,
    StoreRows,
)
from pion.storage.durable import Record
from pion.storage.schema import Schema
from pion.storage.segments import segment_name, snapshot_name
from pion.storage.snapshot_format import Entry, Identity, TableWriter
from pion.storage.tiers.tier_format import PlacedRun
from pion.storage.vstore_records import pack, unpack
from pion.testing import running_server

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
LOG = (REFERENCE / "log-format.md").read_text(encoding="utf-8")
SNAPSHOT = (REFERENCE / "snapshot-format.md").read_text(encoding="utf-8")

LINEAGE = bytes(range(0xA0, 0xB0))
BOOT = "7d1f8a52-0000-4000-8000-3b9c0e6a4d21"
SALT = 0x0123456789ABCDEF
SCHEMA = Schema.from_text("fp32@1")

NUMBERS = {"u8": "<B", "u32": "<I", "u64": "<Q", "f64": "<d"}


def section(page: str, title: str) -> str:
    """What stands below a heading, up to the next one of its level or above."""
    found = re.search(
        rf"^(#+) {re.escape(title)}(?: {{[^\n]*}})?$\n(.*?)(?=^#{{1,3}} |\Z)", page, re.MULTILINE | re.DOTALL
    )
    assert found, title
    return found[2]


def table(page: str, title: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    rows = [line for line in section(page, title).splitlines() if line.startswith("|")]
    assert len(rows) > 2, title
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows[2:]]


def fixed(page: str, title: str, data: bytes) -> dict[str, Any]:
    """The fields of a part with a fixed layout, found as its table says: no gap, no overlap, nothing left."""
    found: dict[str, Any] = {}
    position = 0
    for offset, size, kind, field, *_ in table(page, title):
        assert int(offset) == position, field
        position += int(size)
        raw = data[int(offset) : position]
        if kind in NUMBERS:
            (found[field],) = struct.unpack(NUMBERS[kind], raw)
        else:
            assert kind == "bytes"
            found[field] = raw
    assert position == len(data)
    return found


def hexdump(data: bytes) -> str:
    """As `hexdump -C` shows it; lines that repeat are left out, and a star stands for them."""
    lines: list[str] = []
    before: bytes | None = None
    for start in range(0, len(data), 16):
        piece = data[start : start + 16]
        if piece == before:
            if lines[-1] != "*":
                lines.append("*")
            continue
        before = piece
        shown = f"{piece[:8].hex(' ')}  {piece[8:].hex(' ')}"
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in piece)
        lines.append(f"{start:08x}  {shown:<48}  |{text}|")
    return "\n".join([*lines, f"{len(data):08x}"])


def example(page: str) -> str:
    (found,) = re.findall(r'^```text title="example"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL)
    return str(found).rstrip("\n")


def explained(page: str) -> Iterator[tuple[int, bytes]]:
    """The rows below the example: a position in hexadecimal, and the bytes there."""
    for at, shown, _ in table(page, "An example"):
        yield int(at, 16), bytes.fromhex(shown)


def program(page: str) -> dict[str, Any]:
    """The names that the page's program defines."""
    (source,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(source, "program of the page", "exec"), namespace)
    return namespace


# The log.


def segment_header() -> records.SegmentHeader:
    return records.SegmentHeader(worker=0, number=3, first=41, salt=SALT, lineage=LINEAGE, boot=BOOT)


def record(change: Change, data: bytes | None, sequence: int, durable: int = 40) -> bytes:
    buffers, size = records.encode("vstore", Record(pack(change), data), sequence, durable, SALT)
    raw = b"".join(bytes(buffer) for buffer in buffers)
    assert len(raw) == size
    return raw


ROW = struct.pack("<f", 1.0)
EXAMPLE_LOG = (
    segment_header().to_bytes()
    + record(CreateSession(b"s", SCHEMA), None, 41)
    + record(StoreRows(b"s", 0, 0, 1, ROW), ROW, 42)
)


def test_the_header_of_a_segment() -> None:
    raw = segment_header().to_bytes()
    assert fixed(LOG, "Its header", raw) == {
        "magic": records.MAGIC,
        "version": records.VERSION,
        "worker": 0,
        "number": 3,
        "first": 41,
        "salt": SALT,
        "lineage": LINEAGE,
        "boot": BOOT.encode().ljust(40, b"\0"),
        "reserved": bytes(24),
        "checksum": xxhash.xxh3_64_intdigest(raw[:120]),
    }
    assert f"of this format: {records.VERSION}." in LOG


def test_the_header_of_a_record() -> None:
    raw = record(StoreRows(b"s", 0, 0, 1, ROW), ROW, 42)
    fields = fixed(LOG, "A record", raw[: records.RECORD_BYTES])
    meta = raw[records.RECORD_BYTES : -len(ROW)]
    assert fields == {
        "marker": records.MARKER,
        "meta_bytes": len(meta),
        "data_bytes": len(ROW),
        "sequence": 42,
        "durable": 40,
        "data_checksum": xxhash.xxh3_64_intdigest(ROW, SALT ^ 42),
        "checksum": xxhash.xxh3_64_intdigest(raw[:40] + meta, SALT),
    }
    assert meta == b"\x06vstore" + pack(StoreRows(b"s", 0, 0, 1, ROW))
    assert f"`{records.MARKER.hex(' ')}`" in LOG


REGISTER = Register(
    ns=b"docs|a",
    k_schema=Schema.from_text("fp16@64*2"),
    v_schema=Schema.from_text("fp32@64*2"),
    declaration=Declaration(2, 5, 1),
    hashes=Hashes(16, bytes(16)),
    meta=b"any\0thing",
    parent=b"docs",
    offset=7,
    expires_s=1_700_000_000.25,
    pin=True,
)
PLAIN = Register(ns=b"p", k_schema=SCHEMA, v_schema=SCHEMA)

CHANGES: list[tuple[Change, dict[str, Any]]] = [
    (CreateSession(b"s", SCHEMA), {"sid": b"s", "schema": b"fp32@1"}),
    (StoreRows(b"s", 3, 4, 5, b""), {"sid": b"s", "layer": 3, "start": 4, "count": 5}),
    (DropSession(b"s"), {"sid": b"s"}),
    (EvictSession(b"s"), {"sid": b"s", "reason": Reason.EVICTED}),
    (EvictSession(b"s", Reason.DAMAGED), {"sid": b"s", "reason": Reason.DAMAGED}),
    (PLAIN, {"flags": 0, "ns": b"p", "k_schema": b"fp32@1", "v_schema": b"fp32@1"}),
    (
        REGISTER,
        {
            "flags": 63,
            "ns": b"docs|a",
            "k_schema": b"fp16@64*2",
            "v_schema": b"fp32@64*2",
            "layers": 2,
            "tokens": 5,
            "states": 1,
            "block_size": 16,
            "hashes": bytes(16),
            "meta": b"any\0thing",
            "parent": b"docs",
            "offset": 7,
            "expires_s": 1_700_000_000.25,
        },
    ),
    *((DropPrefix(b"p", reason), {"ns": b"p", "reason": reason}) for reason in Reason),
    (SetExpiry(b"p", 12.5), {"ns": b"p", "expires_s": 12.5}),
    (
        PlaceRows(
            b"p",
            False,
            "0" * 32,
            1000,
            (PlacedRun(0, 0, 0, 4, 100, 16, 1 << 63, 7), PlacedRun(1, 29, 8, 2, 116, 8, 2, (1 << 64) - 1)),
        ),
        {
            "name": b"p",
            "lone": 0,
            "key": b"0" * 32,
            "nbytes": 1000,
            "runs": 2,
            "side": [0, 1],
            "layer": [0, 29],
            "start": [0, 8],
            "count": [4, 2],
            "offset": [100, 116],
            "bytes": [16, 8],
            "seed": [1 << 63, 2],
            "checksum": [7, (1 << 64) - 1],
        },
    ),
    (PlaceRows(b"s", True, "f" * 32, 9, ()), {"name": b"s", "lone": 1, "key": b"f" * 32, "nbytes": 9, "runs": 0}),
    (SetPin(b"p", True), {"ns": b"p", "pinned": 1}),
    (SetPin(b"p", False), {"ns": b"p", "pinned": 0}),
]


def title_of(change: Change) -> str:
    (title,) = re.findall(rf"^### (\d: `{type(change).__name__}`)", LOG, re.MULTILINE)
    return str(title)


@pytest.mark.parametrize(("change", "expected"), CHANGES, ids=lambda value: type(value).__name__)
def test_the_fields_of_a_change(change: Change, expected: dict[str, Any]) -> None:
    """Read with nothing but the page's table."""
    raw, title = pack(change), title_of(change)
    assert raw[0] == int(title[0])
    position, fields, flags = 1, {}, 0
    rows = table(LOG, title)
    repeated = [row for row in rows if row[2] == "each run"]
    for kind, field, *rest in [row for row in rows if row not in repeated]:
        condition = re.fullmatch(r"bit (\d)", rest[0]) if len(rest) > 1 else None
        if condition and not flags >> int(condition[1]) & 1:
            continue
        if kind == "text":
            (size,) = struct.unpack_from("<I", raw, position)
            fields[field] = raw[position + 4 : position + 4 + size]
            position += 4 + size
        else:
            (fields[field],) = struct.unpack_from(NUMBERS[kind], raw, position)
            position += struct.calcsize(NUMBERS[kind])
        if field == "flags":
            flags = fields[field]
    for kind, field, *_ in repeated * fields.get("runs", 0):
        fields.setdefault(field, []).append(struct.unpack_from(NUMBERS[kind], raw, position)[0])
        position += struct.calcsize(NUMBERS[kind])
    assert position == len(raw)
    if "reason" in fields:
        names = {int(number): name for number, name, _ in table(LOG, "Reasons")}
        assert set(names.values()) == {reason.value for reason in Reason}
        fields["reason"] = Reason(names[fields["reason"]])
    assert fields == expected


@pytest.mark.parametrize("change", [CreateSession(b"s", SCHEMA), PLAIN], ids=lambda value: type(value).__name__)
def test_the_mark_of_a_change_that_made_no_session(change: Change) -> None:
    marked, plain = pack(change, again=True), pack(change)
    assert (marked[0] & 127, marked[0] >> 7, marked[1:]) == (plain[0], 1, plain[1:])
    assert unpack(marked, b"") == unpack(plain, b"") == change
    assert "Bit 7 (128) of the kind" in LOG


def test_every_change_is_described() -> None:
    kinds = {
        name
        for name, value in vars(change_module).items()
        if attrs.has(value) and value.__module__ == change_module.__name__ and name not in ("Declaration", "Hashes")
    }
    assert kinds == set(re.findall(r"^### \d: `(\w+)`", LOG, re.MULTILINE))
    assert kinds == {type(change).__name__ for change, _ in CHANGES}


def test_the_example_of_the_log() -> None:
    assert example(LOG) == hexdump(EXAMPLE_LOG)
    position = 0
    for at, raw in explained(LOG):
        assert at == position
        assert EXAMPLE_LOG[at : at + len(raw)] == raw
        position += len(raw)
    assert position == len(EXAMPLE_LOG)


# The snapshot.

IDENTITY = Identity(worker=0, covers=42, lineage=LINEAGE)


def example_snapshot() -> tuple[bytes, int]:
    """The state of the example log, as a snapshot; and where its table begins."""
    room = snapshot_format.room_for_header(1)
    writer = TableWriter(IDENTITY)
    for change, data in ((CreateSession(b"s", SCHEMA), b""), (StoreRows(b"s", 0, 0, 1, ROW), ROW)):
        meta = pack(change)
        seed = snapshot_format.entry_seed(IDENTITY.salt, "vstore", meta, room)
        writer.add(Entry("vstore", meta, room, len(data), seed, xxhash.xxh3_64_intdigest(data, seed)))
    head = snapshot_format.header(room, [len(ROW)], writer.nbytes, IDENTITY)
    return head + ROW + writer.finish(head), room + len(ROW)


def test_the_example_of_the_snapshot() -> None:
    raw, start = example_snapshot()
    assert snapshot_format.parse(memoryview(raw)).identity == IDENTITY
    assert example(SNAPSHOT) == hexdump(raw)
    position = start
    for at, shown in explained(SNAPSHOT):
        assert at == position
        assert raw[at : at + len(shown)] == shown
        position += len(shown)
    assert position == len(raw)


def test_the_table_of_the_snapshot() -> None:
    raw, start = example_snapshot()
    body = raw[start:]
    assert fixed(SNAPSHOT, "The table's head", body[:48]) == {
        "magic": snapshot_format.MAGIC,
        "version": snapshot_format.VERSION,
        "worker": 0,
        "covers": 42,
        "lineage": LINEAGE,
        "entries": 2,
    }
    position = 48
    for change, data in ((CreateSession(b"s", SCHEMA), b""), (StoreRows(b"s", 0, 0, 1, ROW), ROW)):
        fields = fixed(SNAPSHOT, "An entry", body[position : position + 28])
        meta = b"\x06vstore" + pack(change)
        salt = xxhash.xxh3_64_intdigest(struct.pack("<IQ16s", 0, 42, LINEAGE))
        seed = xxhash.xxh3_64_intdigest(meta, salt ^ fields["start"])
        assert fields == {
            "meta_bytes": len(meta),
            "start": start - len(ROW),
            "data_bytes": len(data),
            "data_checksum": xxhash.xxh3_64_intdigest(data, seed),
        }
        position += 28 + len(meta)
        assert body[position - len(meta) : position] == meta
    assert fixed(SNAPSHOT, "The table's tail", body[position:]) == {
        "header_checksum": xxhash.xxh3_64_intdigest(raw[: start - len(ROW)]),
        "table_checksum": xxhash.xxh3_64_intdigest(body[:-8]),
    }


# The programs of both pages, on files that a server wrote.


async def fill(port: int, prefixes: range) -> None:
    async with PionClient(port=port) as client:
        for number in prefixes:
            rows = np.full((300, 64), number, np.float32)
            await client.store_prefix(f"p{number}", "fp32@64*2", "fp32@64*2", [Layer(rows, -rows)] * 2, 300)


def rows_of(number: int) -> list[tuple[bytes, bytes]]:
    """(session, rows) of each record of rows, in order of session."""
    values = np.full((300, 64), number, np.float32)
    sides = ((b"k", values.tobytes()), (b"v", (-values).tobytes()))
    return [(b"p%d_p%s" % (number, side), raw) for side, raw in sides for _ in range(2)]


def stored(meta: bytes) -> bytes | None:
    """The session of a StoreRows record; None for other records."""
    if meta[0] != 2:
        return None
    return meta[5 : 5 + int.from_bytes(meta[1:5], "little")]


async def test_the_programs_read_what_a_server_wrote(tmp_path: Path) -> None:
    read_log, read_snapshot = program(LOG)["read_log"], program(SNAPSHOT)["read_snapshot"]
    log, copy = tmp_path / segment_name(0, 1), tmp_path / "copy"
    async with running_server(Config(kvcache=True, grace_s=0), directory=tmp_path) as server:
        await fill(server.port, range(2))
        async with PionClient(port=server.port) as client:
            kept = await trio.to_thread.run_sync(log.read_bytes)
            await client.execute("KV.PREFIX.SAVE", "copy")
    log.write_bytes(kept)  # the snapshot has let go of it

    found = list(read_log(log))
    assert [sequence for sequence, *_ in found] == list(range(1, 11))
    assert {family for _, family, _, _ in found} == {"vstore"}
    rows = [(stored(meta), data) for _, _, meta, data in found if stored(meta)]
    assert sorted(rows) == sorted([*rows_of(0), *rows_of(1)])

    covers, entries = read_snapshot(copy)
    assert covers == 10
    assert [meta[0] for _, meta, _ in entries] == [5, 2, 2, 2, 2, 5, 2, 2, 2, 2]
    assert sorted((stored(meta), data) for _, meta, data in entries if stored(meta)) == sorted(rows)
    assert copy.stat().st_size == (tmp_path / snapshot_name(0)).stat().st_size

    with safe_open(copy, "numpy") as file:  # the format's own library
        assert file.metadata() == {**file.metadata(), "format": "pion", "version": "1", "worker": "0", "covers": "10"}
        names = set(file.keys())
        assert names == {*map(str, range(8)), "table"}
        tensors = sorted(file.get_tensor(name).tobytes() for name in names - {"table"})
    assert tensors == sorted(raw for _, raw in rows)


@pytest.mark.parametrize("place", [20, 130, 160, 250, -1], ids=["header", "marker", "record", "meta", "data"])
def test_the_program_for_the_log_notices_a_flipped_bit(tmp_path: Path, place: int) -> None:
    read_log = program(LOG)["read_log"]
    path = tmp_path / "segment"
    path.write_bytes(EXAMPLE_LOG)
    assert [sequence for sequence, *_ in read_log(path)] == [41, 42]
    damaged = bytearray(EXAMPLE_LOG)
    damaged[place] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="damaged"):
        list(read_log(path))


def test_the_program_for_the_log_reads_a_segment_that_was_made_in_advance(tmp_path: Path) -> None:
    read_log = program(LOG)["read_log"]
    header = attrs.evolve(segment_header(), first=0).to_bytes()
    path = tmp_path / "segment"
    path.write_bytes(header)
    assert list(read_log(path)) == []
    path.write_bytes(header + EXAMPLE_LOG[len(header) :])
    assert [sequence for sequence, *_ in read_log(path)] == [41, 42]


@pytest.mark.parametrize("place", [30, 4096, 4130, 4160, -1], ids=["header", "data", "head", "entry", "tail"])
def test_the_program_for_the_snapshot_notices_a_flipped_bit(tmp_path: Path, place: int) -> None:
    read_snapshot = program(SNAPSHOT)["read_snapshot"]
    raw, _ = example_snapshot()
    path = tmp_path / "snapshot"
    path.write_bytes(raw)
    assert read_snapshot(path)[0] == 42
    damaged = bytearray(raw)
    damaged[place] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="damaged"):
        read_snapshot(path)
