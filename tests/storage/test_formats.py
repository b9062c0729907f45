"""The interface of the formats: names, widths, lengths, and conversion to and from the wire."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.errors import CommandError
from pion.storage import floats, formats
from pion.storage.formats import BF16, FP8, FP16, FP32, INT8, MLX4G32, TURBO2, TURBO3, TURBO4, Wire

#: The family has its own tests; here one of each type and of codes that don't fill bytes.
FAMILY = [formats.get_format(name) for name in (b"mlx8g64", b"mlx3g32:bf16", b"mlx6g64:fp32")]
QUANTIZED = [FP8, INT8, TURBO4, TURBO3, TURBO2, MLX4G32, *FAMILY]
ALL = [FP32, FP16, BF16, *QUANTIZED]
TYPED = [Wire.FP32, Wire.FP16, Wire.BF16]
ALL_16 = np.arange(65536, dtype=np.uint16)
#: Half-word and word patterns that a careless conversion loses: NaN payloads, infinities, subnormals, -0.0, 1e30.
SPECIAL_32 = np.array(
    [0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FA5A5A5, 0x7F800000, 0xFF800000, 1, 0x807FFFFF, 0x80000000, 0x7149F2CA],
    np.uint32,
)
HEAD_DIMS = [64, 72, 80, 96, 100, 128]


def to_fp32(blob: bytes | memoryview, wire: Wire) -> np.ndarray:
    """What a client makes of a reply; not with the code under test."""
    if wire is Wire.FP16:
        return np.frombuffer(blob, np.float16).astype(np.float32)
    if wire is Wire.BF16:
        return (np.frombuffer(blob, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(blob, np.float32)


def fixture_rows(layer: int, count: int, dim: int) -> np.ndarray:
    """Fixture F1: any shift, rotation or mixing of rows shows in the values."""
    return (1000 * layer + np.arange(count)[:, None] + np.arange(dim)[None, :] / 100).astype(np.float32)


# Names and widths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_get_format_by_name(fmt):
    assert formats.get_format(fmt.name.encode()) is fmt
    assert formats.get_format(fmt.name.upper().encode()) is fmt
    assert formats.get_format(memoryview(fmt.name.encode())) is fmt


@pytest.mark.parametrize("name", [b"", b"fp64", b"fp8x", b"fp16 ", b"fp16\x00", b"\xff\xfe", b"fp16" * 100, b"a\r\nb"])
def test_unknown_format_lists_the_known_ones(name):
    with pytest.raises(
        CommandError, match=r"unknown format .*fp32 fp16 bf16 fp8 int8 turbo4 turbo3 turbo2 mlx4g32 mlx<"
    ) as caught:
        formats.get_format(name)
    assert len(str(caught.value)) < 340


def test_a_later_module_adds_formats_and_families(monkeypatch):
    monkeypatch.setattr(formats, "_FORMATS", dict(formats._FORMATS))
    monkeypatch.setattr(formats, "_FAMILIES", [])
    monkeypatch.setattr(formats, "_BUILT", {})
    extra = type(FP16)("new16", wire=None)
    formats.add_format(extra)
    assert formats.get_format(b"new16") is extra
    with pytest.raises(ValueError, match="new16 is already known"):
        formats.add_format(type(FP16)("new16"))
    built: list[str] = []

    def resolve(name: str) -> formats.Format | None:
        if not name.startswith("fam"):
            return None
        built.append(name)
        return type(FP16)(name)

    formats.add_family("fam<n>", resolve)
    assert formats.get_format(b"fam7") is formats.get_format(b"FAM7")
    assert built == ["fam7"]
    with pytest.raises(CommandError, match=r"mlx4g32 new16 fam<n>"):
        formats.get_format(b"other")


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [
        (FP32, 4096), (FP16, 2048), (BF16, 2048), (FP8, 1088), (INT8, 1026), (MLX4G32, 640),
        (TURBO4, 576), (TURBO3, 448), (TURBO2, 320),
    ],
    ids=str,
)  # fmt: skip
def test_row_bytes_of_1024_values(fmt, expected):
    assert fmt.row_bytes(1024) == expected
    assert fmt.row_bytes(0) == 0


@pytest.mark.parametrize("fmt", [FP32, FP16, BF16, INT8], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dim", [1, 2, 3, 72, 100, 1023])
def test_any_width(fmt, dim):
    fmt.check_dim(dim)
    rows = fixture_rows(0, 3, dim)
    native = formats.to_native(rows.tobytes(), Wire.FP32, fmt, 3, dim)
    assert len(native) == 3 * fmt.row_bytes(dim)
    back = to_fp32(formats.from_native(native, Wire.FP32, fmt, 3, dim), Wire.FP32).reshape(3, dim)
    assert np.abs(back - rows).max() <= rows.max() / 127


@pytest.mark.parametrize("fmt", QUANTIZED, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dim", [1, 16, 31, 33, 72, 80, 100])
def test_groups_name_the_width_they_refuse(fmt, dim):
    if fmt is INT8:
        fmt.check_dim(dim)
        return
    with pytest.raises(CommandError, match=f"{fmt.name} needs a dim divisible by {fmt.multiple}, got {dim}"):
        fmt.check_dim(dim)


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dim", [0, -1, -32])
def test_no_width_below_one(fmt, dim):
    with pytest.raises(CommandError, match=f"{fmt.name} needs a dim of at least 1, got {dim}"):
        fmt.check_dim(dim)


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8])
def test_head_dims_are_right_or_refused(fmt, head_dim, heads):
    """Fault class 22: widths that aren't multiples of the group."""
    dim = heads * head_dim
    if dim % (64 if "g64" in fmt.name else 1 if fmt in (FP32, FP16, BF16, INT8) else 32):
        with pytest.raises(CommandError, match=f"{fmt.name} .*{dim}"):
            fmt.check_dim(dim)
        return
    fmt.check_dim(dim)
    for wire in TYPED:
        rows = to_fp32(bytes(_to_wire(fixture_rows(0, 7, dim), wire)), wire).reshape(7, dim)
        native = formats.to_native(_to_wire(rows, wire), wire, fmt, 7, dim)
        assert len(native) == 7 * fmt.row_bytes(dim)
        back = to_fp32(formats.from_native(native, wire, fmt, 7, dim), wire).reshape(7, dim)
        # Half a step, and half a unit of the narrowest type on the way. Rows differ by 1. A turbo format bounds the
        # squared error, and that of rows so far from a Gaussian loosely; single rows are compared below.
        step = {"int8": rows.max() / 127, "mlx4g32": 0.33 / 15, "fp8": rows.max() / 8, "mlx8g64": 0.64 / 255}
        step |= {"mlx3g32:bf16": 0.33 / 7, "mlx6g64:fp32": 0.64 / 63}
        narrow = 2**-7 if "bf16" in (fmt.name.split(":")[-1], wire.value) else 2**-10
        if fmt in (TURBO4, TURBO3, TURBO2):
            assert ((back - rows) ** 2).sum() <= 0.75 * (rows**2).sum()
        else:
            assert np.abs(back - rows).max() <= step.get(fmt.name, 0) / 2 * 1.01 + rows.max() * narrow
        for row in range(7):
            one = formats.to_native(_to_wire(rows[row : row + 1], wire), wire, fmt, 1, dim)
            size = fmt.row_bytes(dim)
            assert bytes(one) == bytes(native[row * size : (row + 1) * size])


_SAME = {Wire.FP32: FP32, Wire.FP16: FP16, Wire.BF16: BF16}


def _to_wire(rows: np.ndarray, wire: Wire) -> bytes:
    if wire is Wire.FP16:
        return rows.astype(np.float16).tobytes()
    if wire is Wire.BF16:
        return (rows.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return rows.tobytes()


# Bits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fmt", "wire"), [(FP32, Wire.FP32), (FP16, Wire.FP16), (BF16, Wire.BF16)], ids=str)
@pytest.mark.parametrize("native", [False, True])
def test_same_type_is_never_touched(fmt, wire, native):
    """Fault class 21. Not even a copy: the very buffer that came in is stored, and the stored one is sent."""
    blob = SPECIAL_32.tobytes() if fmt is FP32 else ALL_16.tobytes()
    dim = 10 if fmt is FP32 else 256
    count = len(blob) // fmt.row_bytes(dim)
    wire = Wire.NATIVE if native else wire
    assert formats.to_native(blob, wire, fmt, count, dim) is blob
    assert formats.from_native(blob, wire, fmt, count, dim) is blob


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_native_is_checked_for_length_only(fmt):
    blob = bytes(range(256)) * fmt.row_bytes(256)
    assert formats.to_native(blob, Wire.NATIVE, fmt, 256, 256) is blob
    assert formats.from_native(blob, Wire.NATIVE, fmt, 256, 256) is blob


@pytest.mark.parametrize("wire", [Wire.FP16, Wire.BF16])
def test_every_16_bit_value_survives_an_fp32_session(wire):
    native = formats.to_native(ALL_16.tobytes(), wire, FP32, 256, 256)
    assert formats.from_native(native, wire, FP32, 256, 256) == ALL_16.tobytes()


@pytest.mark.parametrize(("fmt", "wire"), [(FP16, Wire.FP16), (BF16, Wire.BF16)], ids=str)
def test_every_16_bit_value_survives_an_fp32_client(fmt, wire):
    wide = formats.from_native(ALL_16.tobytes(), Wire.FP32, fmt, 256, 256)
    np.testing.assert_array_equal(np.isnan(to_fp32(wide, Wire.FP32)), np.isnan(to_fp32(ALL_16.tobytes(), wire)))
    assert formats.to_native(wide, Wire.FP32, fmt, 256, 256) == ALL_16.tobytes()


@pytest.mark.parametrize("wire", TYPED)
@pytest.mark.parametrize("fmt", [FP32, FP16, BF16], ids=lambda fmt: fmt.name)
def test_narrow_types_convert_through_fp32(wire, fmt):
    blob = SPECIAL_32.tobytes() if wire is Wire.FP32 else ALL_16.tobytes()
    values = to_fp32(blob, wire)
    native = formats.to_native(blob, wire, fmt, 1, values.size)
    stored = to_fp32(native, fmt.wire)
    np.testing.assert_array_equal(np.isnan(stored), np.isnan(values))
    np.testing.assert_array_equal(np.isinf(stored), np.isinf(values) if fmt is not BF16 else np.isinf(stored))
    np.testing.assert_array_equal(np.signbit(stored), np.signbit(values))
    if fmt is FP16:
        finite = np.isfinite(values)
        assert np.abs(stored[finite]).max() <= 65504
        assert stored[values == np.float32(1e30)].tolist() in ([], [65504.0])
    replied = to_fp32(formats.from_native(native, wire, fmt, 1, values.size), wire)
    representable = stored.view(np.uint32) == values.view(np.uint32)
    np.testing.assert_array_equal(replied.view(np.uint32)[representable], values.view(np.uint32)[representable])


@pytest.mark.parametrize("fmt", QUANTIZED, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("wire", TYPED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantized_formats_refuse_what_is_not_finite(fmt, wire, bad):
    rows = np.ones((3, 64), np.float32)
    rows[2, 63] = bad
    with pytest.raises(CommandError, match=f"{fmt.name} can't hold NaN or infinity"):
        formats.to_native(_to_wire(rows, wire), wire, fmt, 3, 64)


@pytest.mark.parametrize("fmt", QUANTIZED, ids=lambda fmt: fmt.name)
def test_quantized_reply_in_a_narrow_type_is_the_fp32_reply_rounded(fmt):
    rows = np.random.default_rng(1).standard_normal((50, 64)).astype(np.float32)
    native = formats.to_native(rows.tobytes(), Wire.FP32, fmt, 50, 64)
    wide = to_fp32(formats.from_native(native, Wire.FP32, fmt, 50, 64), Wire.FP32)
    half = formats.from_native(native, Wire.FP16, fmt, 50, 64)
    assert half == wide.astype(np.float16).tobytes()
    brain = formats.from_native(native, Wire.BF16, fmt, 50, 64)
    assert brain == floats.fp32_to_bf16(wide).tobytes()


# Lengths, pieces, buffers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("wire", list(Wire))
@pytest.mark.parametrize("off", [-1, 1])
def test_a_blob_of_another_length_is_refused(fmt, wire, off):
    row = formats.wire_row_bytes(wire, fmt, 64)
    with pytest.raises(CommandError, match=rf"blob must be {3 * row} bytes \(3 rows of {row}\), got {3 * row + off}"):
        formats.to_native(bytes(3 * row + off), wire, fmt, 3, 64)
    row = fmt.row_bytes(64)
    with pytest.raises(CommandError, match=f"got {3 * row + off}"):
        formats.from_native(bytes(3 * row + off), wire, fmt, 3, 64)


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("wire", list(Wire))
@pytest.mark.parametrize(("count", "dim"), [(0, 64), (5, 0), (0, 0)])
def test_nothing_to_convert(fmt, wire, count, dim):
    assert formats.to_native(b"", wire, fmt, count, dim) == b""
    assert formats.from_native(b"", wire, fmt, count, dim) == b""


@given(
    fmt=st.sampled_from(ALL),
    wire=st.sampled_from(list(Wire)),
    count=st.integers(1, 40),
    groups=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_pieces_are_the_whole(fmt, wire, count, groups, cuts, seed):
    """A reply made of rows in any pieces, and a store in any pieces, give the bytes of one conversion."""
    dim = 64 * groups
    rows = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    blob = _to_wire(rows, wire) if wire is not Wire.NATIVE else bytes(fmt.encode(rows))
    edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
    native = bytes(formats.to_native(blob, wire, fmt, count, dim))
    reply = bytes(formats.from_native(native, wire, fmt, count, dim))
    wire_row, row = formats.wire_row_bytes(wire, fmt, dim), fmt.row_bytes(dim)
    stored, sent = [], []
    for start, stop in pairwise(edges):
        piece = memoryview(blob)[start * wire_row : stop * wire_row]
        stored.append(bytes(formats.to_native(piece, wire, fmt, stop - start, dim)))
        piece = memoryview(native)[start * row : stop * row]
        sent.append(bytes(formats.from_native(piece, wire, fmt, stop - start, dim)))
    assert b"".join(stored) == native
    assert b"".join(sent) == reply


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("wire", list(Wire))
def test_large_blocks_equal_their_rows(fmt, wire):
    """More than one block of the converters' own, with a part at the end."""
    dim, count = 1024, 161
    rows = np.random.default_rng(2).standard_normal((count, dim)).astype(np.float32)
    blob = _to_wire(rows, wire) if wire is not Wire.NATIVE else bytes(fmt.encode(rows))
    native = formats.to_native(blob, wire, fmt, count, dim)
    reply = formats.from_native(native, wire, fmt, count, dim)
    wire_row, row = formats.wire_row_bytes(wire, fmt, dim), fmt.row_bytes(dim)
    for index in (0, 63, 64, 127, 128, 160):
        piece = blob[index * wire_row : (index + 1) * wire_row]
        alone = formats.to_native(piece, wire, fmt, 1, dim)
        assert bytes(alone) == bytes(native[index * row : (index + 1) * row])
        assert bytes(formats.from_native(alone, wire, fmt, 1, dim)) == bytes(
            reply[index * wire_row : (index + 1) * wire_row]
        )


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("wire", list(Wire))
def test_results_are_flat_read_only_bytes(fmt, wire):
    rows = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)
    blob = memoryview(_to_wire(rows, wire) if wire is not Wire.NATIVE else bytes(fmt.encode(rows)))
    native = memoryview(formats.to_native(blob, wire, fmt, 4, 64))
    for result in (native, memoryview(formats.from_native(native, wire, fmt, 4, 64))):
        assert (result.format, result.ndim, result.itemsize) == ("B", 1, 1)
        assert result.contiguous
        assert result.readonly


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("wire", list(Wire))
def test_unaligned_buffers(fmt, wire):
    rows = np.random.default_rng(4).standard_normal((4, 64)).astype(np.float32)
    blob = _to_wire(rows, wire) if wire is not Wire.NATIVE else bytes(fmt.encode(rows))
    native = formats.to_native(blob, wire, fmt, 4, 64)
    odd = memoryview(b"x" + blob)[1:]
    assert formats.to_native(odd, wire, fmt, 4, 64) == native
    odd = memoryview(b"x" + bytes(native))[1:]
    assert formats.from_native(odd, wire, fmt, 4, 64) == formats.from_native(native, wire, fmt, 4, 64)


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_encode_and_decode_shapes(fmt):
    rows = np.random.default_rng(5).standard_normal((3, 64)).astype(np.float32)
    raw = fmt.encode(rows)
    assert (raw.dtype, raw.shape) == (np.uint8, (3 * fmt.row_bytes(64),))
    decoded = fmt.decode(raw.data, 3, 64)
    assert (decoded.dtype, decoded.shape) == (np.float32, (3, 64))
    # A second trip changes nothing: what was read can be stored again. The others choose a scale anew.
    if fmt.wire is not None:
        assert bytes(fmt.encode(decoded)) == bytes(raw)


# Names that last ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_durable_names_come_back(fmt):
    assert formats.get_durable_format(fmt.durable_name.encode()) is fmt
    assert (fmt.durable_name == fmt.name) is (fmt not in (TURBO4, TURBO3, TURBO2))


@pytest.mark.parametrize("name", [b"turbo4", b"turbo4/", b"turbo4/2", b"turbo3/01", b"turbo2/1/1"])
def test_another_rotation_is_refused(name):
    with pytest.raises(CommandError, match=rf"format '{name.decode()}' has another rotation, and .* knows turbo\d/1"):
        formats.get_durable_format(name)


@pytest.mark.parametrize("name", [b"fp16/1", b"mlx4g32/", b"fp99/1", b"/1", b""])
def test_no_other_format_has_a_rotation(name):
    with pytest.raises(CommandError, match=r"has no rotation|unknown format"):
        formats.get_durable_format(name)


# AS -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", list(Wire))
def test_parse_wire(wire):
    assert formats.parse_wire(wire.value.encode()) is wire
    assert formats.parse_wire(wire.value.upper().encode()) is wire
    assert formats.parse_wire(memoryview(wire.value.encode())) is wire


@pytest.mark.parametrize("value", [b"", b"fp8", b"int8", b"native ", b"fp32" * 10000, b"\x00"])
def test_parse_wire_names_what_it_takes(value):
    with pytest.raises(CommandError, match="AS must be fp32, fp16, bf16 or native, got"):
        formats.parse_wire(value)


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_wire_row_bytes(fmt):
    sizes = [formats.wire_row_bytes(wire, fmt, 128) for wire in Wire]
    assert sizes == [512, 256, 256, fmt.row_bytes(128)]
