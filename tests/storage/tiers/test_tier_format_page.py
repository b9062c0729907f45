"""The page on the files of a tier is true: its tables, its example and its program are run on real files."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import xxhash

from pion.storage.tiers import tier_format
from pion.storage.tiers.file import FileTier, file_name
from pion.storage.tiers.tier_format import RowRun, lay_out
from pion.testing.tier_conformance import make_layout, running
from pion.testing.tiers import MemoryTierDisk
from tests.test_file_formats import example, explained, fixed, hexdump, program, table

PAGE = (Path(__file__).resolve().parents[3] / "docs/reference/tier-format.md").read_text(encoding="utf-8")
KEY = "00112233445566778899aabbccddeeff"
SALT = 0x0123456789ABCDEF
ONE, TWO = struct.pack("<f", 1.0), struct.pack("<f", 2.0)
LAYOUT = lay_out(KEY, b"docs", [RowRun(0, 0, 0, 1, [ONE]), RowRun(1, 0, 0, 1, [TWO])], salt=SALT)
RAW = LAYOUT.head + ONE + TWO
START = RAW.index(b"PIONTIER")


def test_the_example() -> None:
    assert example(PAGE) == hexdump(RAW)
    position = START
    for at, shown in explained(PAGE):
        assert at == position
        assert RAW[at : at + len(shown)] == shown
        position += len(shown)
    assert position == len(RAW)


def test_the_table() -> None:
    assert fixed(PAGE, "The table's head", RAW[START : START + 56]) == {
        "magic": tier_format.MAGIC,
        "version": tier_format.VERSION,
        "reserved": 0,
        "salt": SALT,
        "key": bytes.fromhex(KEY),
        "file_bytes": len(RAW),
        "runs": 2,
    }
    for index, rows in enumerate((ONE, TWO)):
        raw = RAW[START + 56 + 40 * index :][:40]
        seed = xxhash.xxh3_64_intdigest(raw[:32], SALT)
        assert fixed(PAGE, "An entry", raw) == {
            "side": index,
            "layer": 0,
            "start": 0,
            "count": 1,
            "offset": 512 + 4 * index,
            "nbytes": 4,
            "checksum": xxhash.xxh3_64_intdigest(rows, seed),
        }
    assert fixed(PAGE, "The table's tail", RAW[504:512]) == {"head_checksum": xxhash.xxh3_64_intdigest(RAW[:504])}


def test_what_the_page_says_of_names_and_numbers() -> None:
    names = [name.replace("<key>", KEY) for name, _ in table(PAGE, "The directory")]
    assert names[0] == file_name(KEY)
    assert re.sub("<16 hexadecimal digits>", "0" * 16, names[1]).startswith(file_name(KEY))
    assert f"multiple of {tier_format.ALIGN_BYTES} bytes" in PAGE
    assert f'`"format": "{tier_format.FORMAT}"`' in PAGE
    assert f"`version` of the format, {tier_format.VERSION}," in PAGE


async def test_the_program_reads_what_a_tier_wrote(tmp_path: Path) -> None:
    read_tier_file = program(PAGE)["read_tier_file"]
    disk = MemoryTierDisk()
    rows = [RowRun(0, 0, 0, 4, [b"k" * 400]), RowRun(0, 5, 128, 2, [b"m" * 20]), RowRun(1, 0, 0, 4, [b"v" * 40])]
    layout = lay_out(KEY, b"registered", rows)
    async with running(FileTier(disk)) as tier:
        await tier.put(KEY, layout.head, layout.parts)
    path = tmp_path / file_name(KEY)
    path.write_bytes(disk.contents(file_name(KEY)))
    assert read_tier_file(path) == (
        KEY,
        b"registered",
        [("k", 0, 0, 4, b"k" * 400), ("k", 5, 128, 2, b"m" * 20), ("v", 0, 0, 4, b"v" * 40)],
    )


@pytest.mark.parametrize("part", ["header", "register", "table", "rows"])
def test_the_program_notices_a_flipped_bit(part: str, tmp_path: Path) -> None:
    read_tier_file = program(PAGE)["read_tier_file"]
    layout = make_layout(KEY, register=b"registered")
    raw = bytearray(layout.head + b"".join(layout.parts))
    places = {"header": b"pion-tier", "register": b"registered", "table": b"PIONTIER"}
    position = raw.index(places[part]) if part in places else -1
    raw[position] ^= 1
    path = tmp_path / "file"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="damaged"):
        read_tier_file(path)
