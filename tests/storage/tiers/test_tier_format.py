"""The file of a prefix in a tier: byte by byte, as other programs see it, and with every kind of damage."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load

from pion.storage.tiers import tier_format
from pion.storage.tiers.base import BytesMapping, TierMissError
from pion.storage.tiers.tier_format import (
    ALIGN_BYTES,
    Head,
    Layout,
    PlacedRun,
    RowRun,
    check_head,
    lay_out,
    read_head,
    run_seed,
)

KEY = "00112233445566778899aabbccddeeff"
OTHER = "ff" * 16
SALT = 0x0123456789ABCDEF

ROWS = (
    RowRun(0, 0, 0, 4, [b"k" * 300, b"K" * 100]),
    RowRun(0, 3, 0, 2, [b"m" * 20]),
    RowRun(0, 3, 128, 1, [b"n" * 10]),
    RowRun(1, 0, 0, 4, [memoryview(b"v" * 512)]),
)


def data_of(layout: Layout) -> bytes:
    return layout.head + b"".join(layout.parts)


FILE = data_of(lay_out(KEY, b"how to register it", ROWS))


def head_of(data: bytes | bytearray, key: str | None = KEY) -> Head:
    return read_head(BytesMapping(bytes(data)), key)


def rows_of(data: bytes | bytearray) -> list[bytes] | None:
    """The rows of each run, verified as the store does it; None for a miss, which must be a damaged one."""
    mapping = BytesMapping(bytes(data))
    try:
        regions = [run.region(mapping) for run in read_head(mapping, KEY).runs]
    except TierMissError as error:
        return None if error.damaged else [b"a miss that is not a damaged one"]
    return [bytes(region.view()) for region in regions] if all(region.verify() for region in regions) else None


widths = st.integers(1, 70)
runs = st.builds(
    lambda side, layer, start, count, width, fill, cut: (
        RowRun(side, layer, start, count, [bytes((fill,)) * (count * width - cut), bytes(min(cut, count * width))])
        if cut < count * width
        else RowRun(side, layer, start, count, [bytes((fill,)) * (count * width)])
    ),
    st.integers(0, 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(1, 9),
    widths,
    st.integers(0, 255),
    st.integers(0, 9),
)


@settings(max_examples=200, deadline=None)
@given(
    register=st.binary(max_size=200),
    rows=st.lists(runs, max_size=12, unique_by=lambda run: (run.side, run.layer, run.start)),
    about=st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=3),
)
def test_a_file_is_read_as_it_was_written(register: bytes, rows: list[RowRun], about: dict[str, str]) -> None:
    layout = lay_out(KEY, register, rows, about=about)
    data = data_of(layout)
    assert len(data) == layout.nbytes
    assert len(layout.head) % ALIGN_BYTES == 0
    head = head_of(data)
    assert head == Head(1, KEY, register, layout.runs)
    head.check_shape(run.shape for run in reversed(layout.runs))
    assert [run[:4] for run in map(shape_of, rows)] == [run.shape[:4] for run in layout.runs]
    assert rows_of(data) == [b"".join(run.parts) for run in rows]
    tensors = load(data)  # the format's own library
    assert tensors.pop("register").tobytes() == register
    assert len(tensors.pop("table")) == 56 + 40 * len(rows) + 8
    assert sorted(tensor.tobytes() for tensor in tensors.values()) == sorted(b"".join(run.parts) for run in rows)


def shape_of(run: RowRun) -> tuple[int, int, int, int, int]:
    return run.side, run.layer, run.start, run.count, sum(map(len, run.parts))


def test_other_programs_open_it(tmp_path: Path) -> None:
    path = tmp_path / "object.safetensors"
    about = {"namespace": "docs", "key": "not this one"}
    path.write_bytes(data_of(lay_out(KEY, b"registered", ROWS, about=about)))
    with safe_open(path, "np") as file:
        assert set(file.keys()) == {"register", "table", "k.0", "k.3", "k.3.128", "v.0"}
        assert file.metadata() == {"format": "pion-tier", "version": "1", "key": KEY, "namespace": "docs"}
        for name, shape, content in (
            ("k.0", (4, 100), b"k" * 300 + b"K" * 100),
            ("k.3", (2, 10), b"m" * 20),
            ("k.3.128", (1, 10), b"n" * 10),
            ("v.0", (4, 128), b"v" * 512),
        ):
            tensor = file.get_tensor(name)
            assert (tensor.dtype, tensor.shape, tensor.tobytes()) == (np.uint8, shape, content)


def test_rows_are_not_copied() -> None:
    payload = memoryview(bytearray(1000))
    layout = lay_out(KEY, b"", [RowRun(0, 0, 0, 10, [payload[:500], payload[500:]])])
    assert [part.obj is payload.obj for part in layout.parts] == [True, True]


def test_the_salt_is_random_and_everything_depends_on_it() -> None:
    first, second = (lay_out(KEY, b"", ROWS) for _ in range(2))
    assert all(a.seed != b.seed and a.checksum != b.checksum for a, b in zip(first.runs, second.runs, strict=True))
    assert lay_out(KEY, b"", ROWS, salt=SALT) == lay_out(KEY, b"", ROWS, salt=SALT)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([RowRun(0, 0, 0, 4, [])], "4 rows can't have 0 bytes"),
        ([RowRun(0, 0, 0, 4, [b""])], "4 rows can't have 0 bytes"),
        ([RowRun(0, 0, 0, 4, [b"12345"])], "4 rows can't have 5 bytes"),
        ([RowRun(0, 0, 0, 0, [b"12345"])], "0 rows can't have 5 bytes"),
        ([RowRun(2, 0, 0, 1, [b"12345"])], "there is no side 2"),
        ([RowRun(0, 1, 0, 1, [b"1"]), RowRun(0, 1, 0, 1, [b"2"])], r"rows k\.1 are there twice"),
    ],
)
def test_rows_that_are_none_are_refused(rows: Sequence[RowRun], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lay_out(KEY, b"", rows)


def test_a_key_is_a_key() -> None:
    for key in ("", KEY.upper(), KEY[:-1], KEY + "0", "g" * 32):
        with pytest.raises(ValueError, match="32 hexadecimal digits"):
            lay_out(key, b"", ROWS)


def test_a_header_that_readers_would_refuse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_format, "_READER_LIMIT", 500)
    lay_out(KEY, b"", ROWS[:1])
    with pytest.raises(ValueError, match="4 runs of rows are too many"):
        lay_out(KEY, b"", ROWS)


def test_the_runs_that_a_prefix_can_have_fit_into_a_header() -> None:
    """65,536 layers and two sides; an eighth of them here, as they take their time."""
    rows = [RowRun(side, layer, 0, 1, [b"x"]) for side in (0, 1) for layer in range(57_344, 65_536)]
    layout = lay_out(KEY, b"", rows)
    assert len(head_of(data_of(layout)).runs) == 16_384
    assert 8 * len(layout.head) < 100_000_000
    assert len(load(data_of(layout))) == 16_386


def test_the_bytes_of_head_and_table() -> None:
    """Built here from the description alone."""
    data = data_of(lay_out(KEY, b"reg", ROWS[1:3], salt=SALT))
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    assert header["register"] == {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
    first, last = header["table"]["data_offsets"]
    table = data[8 + length + first : 8 + length + last]
    assert (8 + length + last) % 64 == 0
    assert table[:56] == struct.pack("<8sIIQ16sQQ", b"PIONTIER", 1, 0, SALT, bytes.fromhex(KEY), len(data), 2)
    start = 8 + length + last
    for index, (place, rows) in enumerate(
        [((0, 3, 0, 2, start, 20), b"m" * 20), ((0, 3, 128, 1, start + 20, 10), b"n" * 10)]
    ):
        packed = struct.pack("<IIIIQQ", *place)
        seed = xxhash.xxh3_64_intdigest(packed, SALT)
        assert run_seed(SALT, *place) == seed
        checksum = xxhash.xxh3_64_intdigest(rows, seed)
        assert table[56 + 40 * index :][:40] == packed + struct.pack("<Q", checksum)
        assert head_of(data).runs[index] == PlacedRun(*place, seed, checksum)
    assert table[-8:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(data[: start - 8]))


# Damage.


def test_one_flipped_bit_is_a_miss_wherever_it_is() -> None:
    """Every bit of every byte."""
    assert rows_of(FILE) is not None
    for position in range(len(FILE)):
        for bit in range(8):
            damaged = bytearray(FILE)
            damaged[position] ^= 1 << bit
            assert rows_of(damaged) is None, (position, bit)


def test_a_file_that_is_cut_off_is_a_miss() -> None:
    """At every byte; already when the head is read, so no row is looked at that isn't there."""
    for size in range(len(FILE)):
        with pytest.raises(TierMissError) as caught:
            check_head(BytesMapping(FILE[:size]), KEY)
        assert caught.value.damaged


@pytest.mark.parametrize("less", [1, 512, 4096])
def test_a_large_file_that_is_cut_off_is_a_miss(less: int) -> None:
    data = data_of(lay_out(KEY, b"", [RowRun(0, 0, 0, 1000, [bytes(100_000)])]))
    check_head(BytesMapping(data), KEY)
    with pytest.raises(
        TierMissError, match=rf"it should be {len(data)} bytes long and is {len(data) - less}"
    ) as caught:
        check_head(BytesMapping(data[:-less]), KEY)
    assert caught.value.damaged


@pytest.mark.parametrize("more", [b"\0", b"x" * 64, bytes(4096)])
def test_a_file_that_grew_is_a_miss(more: bytes) -> None:
    with pytest.raises(TierMissError, match="it should be"):
        head_of(FILE + more)


def test_zeros_are_a_miss() -> None:
    """A power cut can leave a file that has its length and no data."""
    for size in (1, 8, 9, 4096, len(FILE)):
        assert rows_of(bytes(size)) is None
    assert rows_of(FILE[:100] + bytes(len(FILE) - 100)) is None
    assert rows_of(FILE[:-100] + bytes(100)) is None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(0, len(FILE)), st.binary(max_size=20))
def test_anything_else_is_a_miss(garbage: bytes, position: int, patch: bytes) -> None:
    assert rows_of(garbage) is None
    assert rows_of(struct.pack("<Q", len(garbage)) + garbage) is None
    patched = FILE[:position] + patch + FILE[position + len(patch) :]
    assert (rows_of(patched) is None) == (patched != FILE)


def test_the_object_of_another_key_is_a_miss() -> None:
    """The file has been swapped for another one, which is whole: its head says so."""
    swapped = data_of(lay_out(OTHER, b"how to register it", ROWS))
    with pytest.raises(TierMissError, match=f"it is the object {OTHER}") as caught:
        head_of(swapped, KEY)
    assert caught.value.damaged
    assert head_of(swapped, None).key == OTHER


def test_rows_of_another_file_do_not_pass() -> None:
    """Where the log says that rows lie, there are others; or the same ones, in another place."""
    first = lay_out(KEY, b"", ROWS)
    data = data_of(first)
    other = data_of(lay_out(KEY, b"", [attrs.evolve(run, parts=[bytes(shape_of(run)[4])]) for run in ROWS]))
    assert len(other) == len(data)
    assert all(run.region(BytesMapping(data)).verify() for run in first.runs)
    assert not any(run.region(BytesMapping(other)).verify() for run in first.runs)
    twins = lay_out(KEY, b"", [RowRun(0, 0, 0, 1, [b"same"]), RowRun(0, 1, 0, 1, [b"same"])])
    assert twins.runs[0].checksum != twins.runs[1].checksum


def resealed(data: bytes, change: dict[bytes, bytes]) -> bytes:
    """With parts of the head replaced, by something that knows the checksum."""
    layout_bytes = len(lay_out(KEY, b"how to register it", ROWS).head)
    head, rows = data[:layout_bytes], data[layout_bytes:]
    for old, new in change.items():
        assert head.count(old) >= 1
        assert len(old) == len(new)
        head = head.replace(old, new)
    return head[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(head[:-8])) + rows


@pytest.mark.parametrize("version", ["0", "2", "9"])
def test_another_version_is_a_miss(version: str) -> None:
    other = resealed(FILE, {b'"version":"1"': f'"version":"{version}"'.encode()})
    with pytest.raises(TierMissError, match=f"it is of format version {version}, and this program knows 1") as caught:
        head_of(other)
    assert caught.value.damaged
    table = resealed(FILE, {b"PIONTIER\1": b"PIONTIER" + version.encode()})
    with pytest.raises(TierMissError, match="its table is of version"):
        head_of(table)


def test_another_format_is_a_miss() -> None:
    with pytest.raises(TierMissError, match="it is not an object of Pion"):
        head_of(resealed(FILE, {b'"pion-tier"': b'"something"'}))


def test_a_table_that_contradicts_itself_is_a_miss() -> None:
    """Whoever made it knew the checksum, so this was no accident; no row is served from a wrong place."""
    entry = struct.pack("<IIII", 0, 0, 0, 4)
    head = head_of(FILE)
    offset = struct.pack("<QQ", head.runs[0].offset, head.runs[0].nbytes)
    for change in (
        {entry + offset: struct.pack("<IIIIQQ", 0, 0, 0, 0, head.runs[0].offset, head.runs[0].nbytes)},
        {offset: struct.pack("<QQ", head.runs[0].offset + 1, head.runs[0].nbytes)},
        {offset: struct.pack("<QQ", head.runs[0].offset, head.runs[0].nbytes + 1)},
        {offset: struct.pack("<QQ", head.runs[0].offset, 0)},
        {struct.pack("<QQ", len(FILE), 4): struct.pack("<QQ", len(FILE), 3)},
    ):
        with pytest.raises(TierMissError, match="its table is not consistent"):
            head_of(resealed(FILE, change))


@pytest.mark.parametrize(
    "shape",
    [
        [run.shape for run in head_of(FILE).runs[1:]],
        [*(run.shape for run in head_of(FILE).runs), (1, 9, 0, 1, 10)],
        [(1 - side, *rest) for side, *rest in (run.shape for run in head_of(FILE).runs)],
        [
            (side, layer, start, 2 * count, nbytes)
            for side, layer, start, count, nbytes in (r.shape for r in head_of(FILE).runs)
        ],
        [(*rest, nbytes // 2) for *rest, nbytes in (run.shape for run in head_of(FILE).runs)],
        [],
    ],
    ids=["a layer less", "a layer more", "sides swapped", "more rows", "narrower rows", "none"],
)
def test_another_shape_is_a_miss(shape: list[tuple[int, int, int, int, int]]) -> None:
    head = head_of(FILE)
    head.check_shape(run.shape for run in head.runs)
    with pytest.raises(TierMissError, match="another shape") as caught:
        head.check_shape(shape)
    assert caught.value.damaged


class Failing:
    """A file whose medium fails from some byte on."""

    def __init__(self, stop: int) -> None:
        self.view = memoryview(FILE)
        self._stop = stop

    def read_into(self, start: int, buffer: memoryview) -> None:
        if start + len(buffer) > self._stop:
            raise OSError(5, "Input/output error")
        buffer[:] = self.view[start : start + len(buffer)]


def test_a_head_that_can_not_be_read_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_format, "_READ_BYTES", 8)
    size = len(lay_out(KEY, b"how to register it", ROWS).head)
    assert read_head(Failing(size), KEY).key == KEY  # reads no row
    for stop in (0, 8, size - 1):
        with pytest.raises(TierMissError, match="it can't be read: Input/output error") as caught:
            read_head(Failing(stop), KEY)
        assert caught.value.damaged
