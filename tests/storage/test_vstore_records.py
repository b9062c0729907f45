"""Changes of the store as bytes: each comes back as it was, and nothing else is taken for one."""

from __future__ import annotations

import struct
from typing import Any

import attrs
import pytest
from hypothesis import example, find, given, settings
from hypothesis import strategies as st

from pion.storage import changes
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
from pion.storage.schema import Schema
from pion.storage.tiers.tier_format import PlacedRun
from pion.storage.vstore_records import is_again, pack, unpack

U32 = st.integers(0, 2**32 - 1)
NAMES = st.binary(min_size=1, max_size=300)
SCHEMAS = st.sampled_from(
    [
        Schema.from_text(text)
        for text in (
            "fp32@1",
            "fp16@64*2,int8@64*30,fp16@64*2",
            "mlx4g32@64",
            "bf16@0*3",
            "turbo3/1@96",
            "fp8@64*2,turbo4/1@64*3,mlx3g64:bf16@128*1",
        )
    ]
)
TURBO = Schema.from_text("turbo4/1@64")
REASONS = st.sampled_from(Reason)
TIMES = st.floats(allow_nan=False)

REGISTERS = st.builds(
    Register,
    ns=NAMES,
    k_schema=SCHEMAS,
    v_schema=SCHEMAS,
    declaration=st.none() | st.builds(Declaration, U32, U32, U32),
    hashes=st.none() | st.builds(Hashes, U32, st.binary(max_size=100)),
    meta=st.none() | st.binary(max_size=300),
    expires_s=st.none() | TIMES,
    pin=st.booleans(),
)
U64 = st.integers(0, 2**64 - 1)
KEYS = st.text("0123456789abcdef", min_size=32, max_size=32)
RUNS = st.builds(PlacedRun, st.integers(0, 1), U32, U32, U32, U64, U64, U64, U64)
CHANGES: st.SearchStrategy[Change] = st.one_of(
    st.builds(CreateSession, NAMES, SCHEMAS),
    st.builds(StoreRows, NAMES, U32, U32, U32, st.binary(max_size=50)),
    st.builds(DropSession, NAMES),
    st.builds(EvictSession, NAMES, REASONS),
    REGISTERS,
    st.builds(attrs.evolve, REGISTERS, parent=NAMES, offset=U32),
    st.builds(DropPrefix, NAMES, REASONS),
    st.builds(SetExpiry, NAMES, TIMES),
    st.builds(SetPin, NAMES, st.booleans()),
    st.builds(PlaceRows, NAMES, st.booleans(), KEYS, U64, st.lists(RUNS, max_size=4).map(tuple)),
)


def attempt(meta: bytes) -> Change | str:
    """The change, or why it is none. No other error than ValueError may come."""
    try:
        return unpack(meta, b"")
    except ValueError as error:
        return str(error)


def data_of(change: Change) -> Any:
    return change.data if isinstance(change, StoreRows) else b""


@given(change=CHANGES, again=st.booleans())
def test_a_change_comes_back(change: Change, again: bool) -> None:
    meta = pack(change, again=again)
    assert unpack(meta, data_of(change)) == change
    assert is_again(meta) == again


def test_all_kinds_are_among_them() -> None:
    found = {value for value in vars(changes).values() if attrs.has(value) and value.__module__ == changes.__name__}
    for kind in found - {Declaration, Hashes}:
        # Raises if there is none.
        find(CHANGES, lambda change, kind=kind: type(change) is kind, settings=settings(max_examples=5000))


@given(change=CHANGES)
def test_what_is_not_durable_is_left_out(change: Change) -> None:
    if isinstance(change, Register):
        assert pack(attrs.evolve(change, prefill_ms=5.0, owner=9)) == pack(change)
    if isinstance(change, StoreRows):
        assert pack(attrs.evolve(change, owner=9, data=b"other")) == pack(change)


@given(change=CHANGES, data=st.data())
def test_a_part_of_a_record_is_refused(change: Change, data: st.DataObject) -> None:
    meta = pack(change)
    size = data.draw(st.integers(0, len(meta) - 1))
    assert isinstance(attempt(meta[:size]), str)
    with pytest.raises(ValueError, match="1 bytes too many"):
        unpack(meta + b"\0", b"")


@given(change=CHANGES, data=st.data())
def test_damage_is_refused_or_another_change(change: Change, data: st.DataObject) -> None:
    """Checksums notice it before; still it may not end in any other error."""
    meta = bytearray(pack(change))
    bit = data.draw(st.integers(0, 8 * len(meta) - 1))
    meta[bit // 8] ^= 1 << bit % 8
    attempt(bytes(meta))


@given(garbage=st.binary(max_size=200))
@example(b"")
@example(b"\x00")
@example(b"\x09" + bytes(50))
@example(b"\x01" + struct.pack("<I", 2**32 - 1))
@example(b"\x01" + struct.pack("<I", 1) + b"s" + struct.pack("<I", 4) + b"what")
@example(b"\x01" + struct.pack("<I", 1) + b"s" + struct.pack("<I", 4) + "fp\u00e9".encode())
@example(b"\x04" + struct.pack("<I", 1) + b"s" + b"\x09")
@example(b"\x06" + struct.pack("<I", 1) + b"s" + b"\xff")
def test_garbage_is_refused(garbage: bytes) -> None:
    change = attempt(garbage)
    # If it happens to be one, then it says the same when it is packed.
    assert isinstance(change, str) or unpack(pack(change), b"") == change


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (b"", "unpack_from requires"),
        (b"\x00", "unknown kind of change, 0"),
        (b"\x63", "unknown kind of change, 99"),
        (b"\x01" + struct.pack("<I", 9) + b"short", "a text is cut off"),
        (b"\x01" + struct.pack("<I", 1) + b"s" + struct.pack("<I", 4) + b"what", "what"),
        (b"\x06" + struct.pack("<I", 1) + b"p" + b"\x09", "index out of range"),
    ],
)
def test_the_message_says_what_is_wrong(meta: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack(meta, b"")


def test_equal_shapes_are_one_object() -> None:
    one, two = (unpack(pack(CreateSession(sid, Schema.from_text("fp32@9"))), b"") for sid in (b"a", b"b"))
    assert isinstance(one, CreateSession)
    assert isinstance(two, CreateSession)
    assert one.schema is two.schema is Schema.from_text("fp32@9")


@pytest.mark.parametrize("change", [CreateSession(b"s", TURBO), Register(ns=b"n", k_schema=TURBO, v_schema=TURBO)])
def test_rows_of_another_rotation_are_refused_not_misread(change: Change) -> None:
    meta = pack(change)
    assert b"turbo4/1@64" in meta
    for other in (b"turbo4/2@64", b"turbo4/9@64"):
        with pytest.raises(ValueError, match=r"has another rotation, and this program knows turbo4/1"):
            unpack(meta.replace(b"turbo4/1@64", other), b"")
