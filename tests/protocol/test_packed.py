"""Packed meta: what is packed is unpacked, and every other length is an error that names a field."""

from __future__ import annotations

import functools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.command import Field, FieldKind
from pion.errors import CommandError
from pion.protocol.packed import leading_name, pack, unpack, unpacker

u32 = st.integers(0, 2**32 - 1)
VALUES = {
    FieldKind.NAME: st.binary(max_size=40),
    FieldKind.WIRE: st.sampled_from(["fp32", "fp16", "bf16", "native"]),
    FieldKind.U32: u32,
    FieldKind.U64: st.integers(0, 2**64 - 1),
    FieldKind.F64: st.floats(allow_nan=False),
    FieldKind.RANGES: st.lists(st.tuples(u32, u32, u32), max_size=4),
}
fields = st.lists(st.sampled_from(list(FieldKind)), max_size=6).map(
    lambda kinds: tuple(Field(f"field{index}", kind) for index, kind in enumerate(kinds))
)


@given(fields, st.data())
def test_what_is_packed_is_unpacked(fields, data):
    values = tuple(data.draw(VALUES[field.kind]) for field in fields)
    meta = pack(fields, values)
    assert unpack(fields, meta) == unpacker(fields)(meta) == values


@given(fields, st.data())
def test_every_shorter_and_longer_meta_is_an_error_that_names_a_field(fields, data):
    meta = pack(fields, tuple(data.draw(VALUES[field.kind]) for field in fields))
    for read in (functools.partial(unpack, fields), unpacker(fields)):
        for length in range(len(meta)):
            with pytest.raises(CommandError, match=r"^meta ends within .*field\d"):
                read(meta[:length])
    extra = data.draw(st.binary(min_size=1, max_size=5))
    with pytest.raises(
        CommandError, match=f"^meta has {len(extra)} bytes? too many, (behind field|though this command has no meta)"
    ):
        unpack(fields, meta + extra)


@given(fields, st.binary(max_size=200))
def test_garbage_is_values_or_an_error_the_same_both_ways(fields, meta):
    def outcome(read):
        try:
            return repr(read(meta))
        except CommandError as error:
            return error.args

    assert outcome(unpacker(fields)) == outcome(functools.partial(unpack, fields))


def test_the_bytes_are_those_of_the_specification():
    fields = [Field(kind.name, kind) for kind in FieldKind]
    values = (b"sid", "native", 1, 2, 0.5, [(3, 4, 5)])
    expected = b"\x03\x00sid\x03" + struct.pack("<IQd", 1, 2, 0.5) + struct.pack("<I3I", 1, 3, 4, 5)
    assert pack(fields, values) == expected


@pytest.mark.parametrize(
    ("kind", "meta", "message"),
    [
        (FieldKind.NAME, b"\x05", "meta ends within the length of x: 2 bytes expected, 1 left"),
        (FieldKind.NAME, b"\x05\x00abcd", "meta ends within x: 5 bytes expected, 4 left"),
        (FieldKind.WIRE, b"\x04", "x must be one of 0 (fp32), 1 (fp16), 2 (bf16), 3 (native), got 4"),
        (FieldKind.WIRE, b"", "meta ends within x: 1 byte expected, 0 left"),
        (FieldKind.U32, b"abc", "meta ends within x: 4 bytes expected, 3 left"),
        (FieldKind.RANGES, b"\x02\x00\x00\x00" + bytes(23), "meta ends within x: 24 bytes expected (2 of 12), 23 left"),
        (
            FieldKind.RANGES,
            b"\xff\xff\xff\xff",
            "meta ends within x: 51539607540 bytes expected (4294967295 of 12), 0 left",
        ),
        (FieldKind.U32, bytes(5), "meta has 1 byte too many, behind x"),
    ],
)
def test_the_errors_say_what_is_wrong(kind, meta, message):
    with pytest.raises(CommandError) as caught:
        unpack([Field("x", kind)], meta)
    assert str(caught.value) == message


def test_no_meta_at_all():
    assert unpack((), b"") == ()
    with pytest.raises(CommandError, match="meta has 2 bytes too many, though this command has no meta"):
        unpack((), b"ab")


@pytest.mark.parametrize(
    ("meta", "name"),
    [
        (b"\x01\x00a", b"a"),
        (b"\x01\x00ab", b"a"),
        (b"\x00\x00", b""),
        (b"\x02\x00a", None),
        (b"\x01", None),
        (b"", None),
    ],
)
def test_the_name_that_meta_begins_with(meta, name):
    assert leading_name(meta) == name
