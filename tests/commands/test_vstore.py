"""The V commands one by one: forms, conversions, replies, refusals."""

from __future__ import annotations

import gc
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from pion.config import MIB
from pion.limits import CONVERT_IN_THREAD_BYTES
from pion.replies import Blob, Stream
from pion.storage.ledger import BLOCK_COST, LAYER_COST, SIDE_COST
from pion.testing import Harness
from tests.commands.kv_support import make_kv, now, plain, snapshot

BAD_INTEGERS = ["-1", "2147483648", "9223372036854775808", "x", "", "1.5", "+1", "1_0", " 1", "0x1", b"\xff"]


def fixture_f1(layers: int = 2, tokens: int = 10, dim: int = 128) -> np.ndarray:
    """K[layer][pos][d] = 1000*layer + pos + d/100; V is its negative."""
    layer, pos, d = np.ogrid[:layers, :tokens, :dim]
    return (1000 * layer + pos + d / 100).astype(np.float32)


@pytest.fixture
def kv() -> Harness:
    return make_kv()


def call(kv: Harness, *args):
    return now(kv.call(*args))


def test_create_forms(kv) -> None:
    assert call(kv, "V.CREATE", "a", 8) == "OK"
    assert call(kv, "v.create", "b", 8, "vquant", "FP16") == "OK"
    assert call(kv, "V.CREATE", "c", "SCHEMA", "fp16@4*2,fp32@8*1") == "OK"
    assert call(kv, "V.CREATE", "d", 4, "SCHEMA", "fp16*2,fp32@8*1") == "OK"
    assert call(kv, "V.CREATE", "d", "schema", "fp16@4*2,fp32@8*1") == "OK"
    assert call(kv, "V.CREATE", "a", 8, "VQUANT", "fp16") == "OK"
    assert call(kv, "V.CREATE", "a", 8, "VQUANT", "fp32").startswith("-EXISTS session 'a' exists with another shape")
    assert call(kv, "V.CREATE", "a", 9).startswith("-EXISTS")
    assert dict(now(kv.call("V.INFO", "a")).pairs)["format"] == "fp16"
    assert dict(now(kv.call("V.INFO", "d")).pairs)["schema"] == "fp16@4*2,fp32@8*1"
    empty = dict(now(kv.call("V.INFO", "d")).pairs)
    assert (empty["memory"], empty["place"]) == (0, "memory")
    now(kv.call("V.STORE", "d", 0, 0, "AS", "native", bytes(8)))
    stored = dict(now(kv.call("V.INFO", "d")).pairs)
    assert (stored["bytes"], stored["memory"]) == (8, 8 + SIDE_COST + LAYER_COST + BLOCK_COST)


@pytest.mark.parametrize(
    "args",
    [
        ("a", "8", "VQUANT"),
        ("a", "8", "VQUANT", "fp16", "x"),
        ("a", "8", "QUANT", "fp16"),
        ("a", "8", "VQUANT", "fp17"),
        ("a", "33", "VQUANT", "mlx4g32"),
        ("a", "0"),
        ("a", "-8"),
        ("a", "1048577"),
        ("a", "SCHEMA"),
        ("a", "SCHEMA", ""),
        ("a", "SCHEMA", "fp16*2"),
        ("a", "SCHEMA", "fp16@4"),
        ("a", "SCHEMA", "fp16@4*2", "x"),
        ("", "8"),
        ("x" * 4097, "8"),
    ],
)
def test_create_refuses(kv, args) -> None:
    assert call(kv, "V.CREATE", *args).startswith("-ERR ")
    assert call(kv, "V.LIST") == [b"0", []]


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "native"])
@pytest.mark.parametrize("form", ["before", "after"])
def test_store_and_fetch_every_wire_type(kv, wire, form) -> None:
    dtype = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16, "native": np.float16}[wire]
    rows = np.array([[0.5, -1, 2, 4], [8, -0.0, 0.25, 3]], dtype)
    call(kv, "V.CREATE", "s", 4, "VQUANT", "fp16")
    tail = ["AS", wire, rows.tobytes()] if form == "before" else [rows.tobytes(), "as", wire.upper()]
    assert call(kv, "V.STOREBATCH", "s", 3, 7, 2, *tail) == "OK"
    assert (
        call(
            kv,
            "V.STORE",
            "s",
            3,
            9,
            *(["AS", wire] if form == "before" else []),
            rows[:1].tobytes(),
            *(["AS", wire] if form == "after" else []),
        )
        == "OK"
    )
    assert call(kv, "V.FETCH", "s", 3, "RANGE", 7, 9, "AS", wire) == rows.tobytes()
    assert call(kv, "V.FETCH", "s", 3, 9, 7, "AS", wire) == rows[[0, 0]].tobytes()
    assert call(kv, "V.FETCH", "s", 3, "RANGE", 7, 9) == rows.astype(np.float32).tobytes()


def test_a_two_byte_blob_that_reads_as_is_no_option(kv) -> None:
    call(kv, "V.CREATE", "s", 1, "VQUANT", "fp16")
    assert call(kv, "V.STOREBATCH", "s", 0, 0, 1, "AS", "AS", "native") == "OK"
    assert call(kv, "V.STOREBATCH", "s", 0, 1, 1, "AS", "native", "AS") == "OK"
    assert call(kv, "V.FETCH", "s", 0, "RANGE", 0, 2, "AS", "native") == b"ASAS"


def test_fixture_f1_comes_back_by_row(kv) -> None:
    """Fault class 1: what is in row i says i, however it was stored and however it is asked for."""
    keys = fixture_f1()
    call(kv, "V.CREATE", "s", 128, "VQUANT", "fp32")
    for layer in range(2):
        call(kv, "V.STOREBATCH", "s", layer, 0, 6, keys[layer, :6].tobytes())
        for token in range(6, 10):
            call(kv, "V.STORE", "s", layer, token, keys[layer, token].tobytes())
    for layer in range(2):
        for start in range(11):
            for stop in range(start, 11):
                assert call(kv, "V.FETCH", "s", layer, "RANGE", start, stop) == keys[layer, start:stop].tobytes()
        order = [9, 0, 3, 3, 4, 5, 1]
        assert call(kv, "V.FETCH", "s", layer, *order) == keys[layer, order].tobytes()
    parts = call(kv, "V.FETCH", "s", "BATCH", 3, 1, 2, 5, 0, 0, 10, 1, 4, 4)
    assert parts == [keys[1, 2:5].tobytes(), keys[0].tobytes(), b""]
    assert call(kv, "V.FETCH", "s", 0, "RANGE", 0, 11) == "-ERR no row 10 in layer 0"
    assert call(kv, "V.FETCH", "s", 0, 3, 10) == "-ERR no row 10 in layer 0"
    assert call(kv, "V.FETCH", "s", "BATCH", 2, 0, 0, 1, 1, 9, 11) == "-ERR no row 10 in layer 1"


@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp32"])
def test_every_bit_pattern_survives(kv, fmt) -> None:
    """Fault class 21: NaN payloads, infinities, subnormals and -0.0, native and by the format's own wire type."""
    width = 4 if fmt == "fp32" else 2
    bits = np.random.default_rng(7).integers(0, 256, 64 * 64 * width, dtype=np.uint8)
    if width == 2:
        bits = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    count = bits.size // (64 * width)
    call(kv, "V.CREATE", "s", 64, "VQUANT", fmt)
    for wire in ("native", fmt):
        assert call(kv, "V.STOREBATCH", "s", 0, 0, count, "AS", wire, bits.tobytes()) == "OK"
        assert call(kv, "V.FETCH", "s", 0, "RANGE", 0, count, "AS", wire) == bits.tobytes()


@pytest.mark.parametrize("dim", [72, 80, 96, 100])
@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16", "int8", "mlx4g32"])
def test_odd_widths_are_right_or_refused(kv, dim, fmt) -> None:
    """Fault class 22."""
    created = call(kv, "V.CREATE", "s", dim, "VQUANT", fmt)
    if fmt == "mlx4g32" and dim % 32:
        assert created.startswith("-ERR")
        assert "mlx4g32" in created
        assert str(dim) in created
        return
    assert created == "OK"
    rows = np.random.default_rng(1).standard_normal((5, dim), np.float32)
    assert call(kv, "V.STOREBATCH", "s", 0, 0, 5, rows.tobytes()) == "OK"
    back = np.frombuffer(call(kv, "V.FETCH", "s", 0, "RANGE", 0, 5), np.float32).reshape(5, dim)
    assert np.abs(back - rows).max() < {"fp32": 1e-9, "fp16": 0.01, "bf16": 0.03, "int8": 0.05, "mlx4g32": 0.6}[fmt]


def test_another_type_is_a_conversion_never_misread(kv) -> None:
    """Fault class 25: stored as bf16, read as fp16 and as fp32."""
    rows = np.array([[1.5, -2, 3, 0.125]], ml_dtypes.bfloat16)
    call(kv, "V.CREATE", "s", 4, "VQUANT", "bf16")
    call(kv, "V.STORE", "s", 0, 0, "AS", "native", rows.tobytes())
    assert call(kv, "V.FETCH", "s", 0, 0, "AS", "fp16") == rows.astype(np.float16).tobytes()
    assert call(kv, "V.FETCH", "s", 0, 0) == rows.astype(np.float32).tobytes()


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16", "native"])
@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16", "int8", "mlx4g32"])
def test_a_blob_one_byte_off_is_refused(kv, fmt, wire, change) -> None:
    call(kv, "V.CREATE", "s", 32, "VQUANT", fmt)
    width = {"fp32": 128, "fp16": 64, "bf16": 64, "int8": 34, "mlx4g32": 20}
    size = 3 * (width[fmt] if wire == "native" else width[wire])
    reply = call(kv, "V.STOREBATCH", "s", 0, 0, 3, "AS", wire, bytes(size + change))
    assert reply == f"-ERR blob must be {size} bytes (3 rows of {size // 3}), got {size + change}"
    assert call(kv, "V.FETCH", "s", 0, 0) == "-ERR no row 0 in layer 0"
    assert call(kv, "V.STOREBATCH", "s", 0, 0, 3, "AS", wire, bytes(size)) == "OK"


def test_values_that_a_format_cannot_hold_store_nothing(kv) -> None:
    call(kv, "V.CREATE", "s", 2, "VQUANT", "int8")
    call(kv, "V.STORE", "s", 0, 0, np.array([1, 2], np.float32).tobytes())
    before = snapshot(kv.services.vstore)
    rows = np.array([[1, 2], [np.nan, 0]], np.float32)
    assert call(kv, "V.STOREBATCH", "s", 0, 0, 2, rows.tobytes()).startswith("-ERR")
    assert snapshot(kv.services.vstore) == before


def test_the_largest_ids(kv) -> None:
    top = 2**31 - 1
    call(kv, "V.CREATE", "s", 1, "VQUANT", "fp32")
    assert call(kv, "V.STORE", "s", 65535, top, b"abcd") == "OK"
    assert call(kv, "V.STOREBATCH", "s", 0, top - 1, 2, b"abcdefgh") == "OK"
    assert call(kv, "V.FETCH", "s", 0, "RANGE", top - 1, top + 1) == b"abcdefgh"
    assert call(kv, "V.FETCH", "s", 65535, top) == b"abcd"
    assert call(kv, "V.STOREBATCH", "s", 0, top, 2, b"abcdefgh").startswith("-ERR start_id + count must be at most")
    assert call(kv, "V.STORE", "s", 65536, 0, b"abcd").startswith("-ERR layer must be an integer from 0 to 65535")
    assert call(kv, "V.FETCH", "s", 0, "RANGE", 0, top + 2).startswith("-ERR end_id must be an integer")


@pytest.mark.parametrize("bad", BAD_INTEGERS)
def test_bad_numbers_are_named(kv, bad) -> None:
    call(kv, "V.CREATE", "s", 1, "VQUANT", "fp32")
    call(kv, "V.STORE", "s", 0, 0, b"abcd")
    before = snapshot(kv.services.vstore)
    for args, what in [
        (("V.CREATE", "t", bad), "dim"),
        (("V.STOREBATCH", "s", bad, 0, 1, b"abcd"), "layer"),
        (("V.STOREBATCH", "s", 0, bad, 1, b"abcd"), "start_id"),
        (("V.STOREBATCH", "s", 0, 0, bad, b"abcd"), "count"),
        (("V.STORE", "s", bad, 0, b"abcd"), "layer"),
        (("V.STORE", "s", 0, bad, b"abcd"), "token_id"),
        (("V.FETCH", "s", bad, "RANGE", 0, 1), "layer"),
        (("V.FETCH", "s", 0, 0, bad), "id"),
        (("V.FETCH", "s", "BATCH", bad, 0, 0, 1), "n"),
        (("V.FETCH", "s", "BATCH", 1, bad, 0, 1), "layer"),
        (("V.LIST", "COUNT", bad), "COUNT"),
    ]:
        reply = call(kv, *args)
        # 2**31 rows are a well-formed number that is refused for its length.
        assert reply.startswith((f"-ERR {what} must be", "-ERR blob must be")), (args, reply)
    for args in [("V.FETCH", "s", 0, "RANGE", bad, 1), ("V.FETCH", "s", 0, "RANGE", 0, bad)]:
        assert call(kv, *args).startswith(("-ERR start_id must", "-ERR end_id must", "-ERR no row 1 "))
    assert snapshot(kv.services.vstore) == before


def test_ranges(kv) -> None:
    call(kv, "V.CREATE", "s", 1, "VQUANT", "fp32")
    assert call(kv, "V.FETCH", "s", 0, "RANGE", 0, 0) == b""
    assert call(kv, "V.FETCH", "s", 9, "RANGE", 5, 5, "AS", "fp16") == b""
    assert call(kv, "V.FETCH", "s", 0, "RANGE", 0, 1) == "-ERR no row 0 in layer 0"
    assert call(kv, "V.FETCH", "s", 0, "RANGE", 3, 2) == "-ERR end_id must be at least start_id, 3, got 2"
    assert call(kv, "V.FETCH", "s", "BATCH", 0) == []
    call(kv, "V.STOREBATCH", "s", 0, 2, 2, b"22223333")
    assert call(kv, "V.FETCH", "s", 0, "RANGE", 1, 4) == "-ERR no row 1 in layer 0"
    assert call(kv, "V.FETCH", "s", 0, "RANGE", 2, 5) == "-ERR no row 4 in layer 0"
    assert call(kv, "V.STOREBATCH", "s", 0, 9, 0, b"") == "OK"
    assert call(kv, "V.FETCH", "s", 0, 9) == "-ERR no row 9 in layer 0"


@pytest.mark.parametrize(
    "args",
    [
        ("V.FETCH", "s", "0", "RANGE", "0"),
        ("V.FETCH", "s", "0", "RANGE", "0", "1", "2"),
        ("V.FETCH", "s", "0", "RANGE", "0", "1", "AS"),
        ("V.FETCH", "s", "0", "RANGE", "0", "1", "AS", "fp8"),
        ("V.FETCH", "s", "0", "AS", "fp32"),
        ("V.FETCH", "s", "BATCH", "1", "0", "0"),
        ("V.FETCH", "s", "BATCH", "2", "0", "0", "1"),
        ("V.FETCH", "s", "BATCH", "1", "0", "1", "0"),
        ("V.FETCH", "s", "0"),
        ("V.FETCH", "s", "0", *(["0"] * 16_385)),
        ("V.STOREBATCH", "s", "0", "0", "1", "AS", "fp32"),
        ("V.STOREBATCH", "s", "0", "0", "1", "AS", "fp64", "abcd"),
        ("V.STOREBATCH", "s", "0", "0", "1", "abcd", "IS", "fp32"),
        ("V.STOREBATCH", "s", "0", "0", "1"),
        ("V.STORE", "s", "0", "0"),
        ("V.STORE", "s", "0", "0", "abcd", "AS"),
        ("V.INFO", "nobody"),
        ("V.INFO",),
        ("V.DROP",),
        ("V.LIST", "CURSOR"),
        ("V.LIST", "CURSOR", "x"),
        ("V.LIST", "COUNT", "0"),
        ("V.LIST", "COUNT", "1", "COUNT", "1"),
        ("V.LIST", "SORT", "1"),
        ("V.LIST", "MATCH", ""),
    ],
)
def test_malformed_requests_change_nothing(kv, args) -> None:
    call(kv, "V.CREATE", "s", 1, "VQUANT", "fp32")
    call(kv, "V.STORE", "s", 0, 0, b"abcd")
    before = snapshot(kv.services.vstore), kv.services.vstore.statistics(), kv.services.receipt.kvprefix_bytes_served
    assert call(kv, *args).startswith("-ERR ")
    assert before == (
        snapshot(kv.services.vstore),
        kv.services.vstore.statistics(),
        kv.services.receipt.kvprefix_bytes_served,
    )


@pytest.mark.parametrize("command", ["V.STOREBATCH", "V.STORE", "V.FETCH", "V.INFO"])
def test_unknown_sessions_are_named_safely(kv, command) -> None:
    tail = {"V.STOREBATCH": (0, 0, 0, b""), "V.STORE": (0, 0, b""), "V.FETCH": (0, 0), "V.INFO": ()}[command]
    assert call(kv, command, b"a\r\n\0|\xff", *tail) == r"-ERR no session 'a\r\n\x00|\xff'"


@pytest.mark.parametrize("name", [b"\0", b"a\r\nb", b"a|b", b"\xff\xfe", b"x" * 4096, b"_pk", b" ", b"CASCADE"])
def test_any_bytes_are_a_name(kv, name) -> None:
    """Fault class 28: names are bytes and never joined, cut or decoded."""
    others = [name + b"\0x", b"x\0" + name, name.lower() + b" "] if len(name) < 4096 else [name[:-1]]
    for index, sid in enumerate([name, *others]):
        assert call(kv, "V.CREATE", sid, 1, "VQUANT", "fp32") == "OK"
        assert call(kv, "V.STORE", sid, 0, 0, b"%04d" % index) == "OK"
    for index, sid in enumerate([name, *others]):
        assert call(kv, "V.FETCH", sid, 0, 0) == b"%04d" % index
    assert sorted(call(kv, "V.LIST")[1]) == sorted([name, *others])
    assert call(kv, "V.DROP", name, name, *others) == len(others) + 1


@pytest.mark.parametrize("value", [b"", b"x" * 4097, memoryview(bytes(65536))])
def test_names_of_a_wrong_length_are_refused(kv, value) -> None:
    for args in [
        ("V.CREATE", value, 1),
        ("V.STOREBATCH", value, 0, 0, 0, b""),
        ("V.STORE", value, 0, 0, b""),
        ("V.FETCH", value, 0, 0),
        ("V.DROP", "s", value),
        ("V.INFO", value),
    ]:
        assert call(kv, *args) == f"-ERR sid must be 1 to 4096 bytes long, got {len(value)}"


def test_a_schema_bounds_its_layers(kv) -> None:
    call(kv, "V.CREATE", "s", "SCHEMA", "fp32@1*1,fp16@2*1,fp32@0*1")
    assert call(kv, "V.STORE", "s", 0, 0, b"abcd") == "OK"
    assert call(kv, "V.STORE", "s", 1, 0, "AS", "native", b"abcd") == "OK"
    assert call(kv, "V.STORE", "s", 2, 0, b"") == "OK"
    assert call(kv, "V.STORE", "s", 3, 0, b"").startswith("-ERR no layer 3")
    assert call(kv, "V.FETCH", "s", 3, "RANGE", 0, 0).startswith("-ERR no layer 3")
    assert call(kv, "V.FETCH", "s", 2, "RANGE", 0, 5) == b""
    assert call(kv, "V.FETCH", "s", "BATCH", 2, 0, 0, 1, 1, 0, 1, "AS", "native") == [b"abcd", b"abcd"]


def test_list_pages_are_stable_under_changes(kv) -> None:
    names = [b"n%03d" % index for index in range(50)] + [b"q%d_pk" % index for index in range(5)]
    for sid in names:
        call(kv, "V.CREATE", sid, 1)
    cursor, seen = b"0", []
    for step in range(100):
        cursor, page = call(kv, "V.LIST", "CURSOR", cursor, "COUNT", 7)
        seen += page
        if cursor == b"0":
            break
        call(kv, "V.CREATE", b"n%03d_" % step, 1)
        call(kv, "V.DROP", b"n%03d_" % (step - 1))
    assert len(seen) == len(set(seen))
    assert set(names) <= set(seen)
    assert call(kv, "V.LIST", "MATCH", "n00?", "COUNT", 1000)[1] == names[:10]
    assert call(kv, "V.LIST", "MATCH", "q[1-3]_p*", "COUNT", 1000)[1] == names[51:54]


def test_fetched_bytes_and_fetches_are_counted(kv) -> None:
    call(kv, "V.CREATE", "s", 4, "VQUANT", "fp16")
    call(kv, "V.STOREBATCH", "s", 0, 0, 4, bytes(64))
    call(kv, "V.FETCH", "s", 0, "RANGE", 0, 4)
    call(kv, "V.FETCH", "s", 0, 1, 1, "AS", "native")
    call(kv, "V.FETCH", "s", "BATCH", 2, 0, 0, 1, 0, 0, 2, "AS", "native")
    call(kv, "V.FETCH", "s", 0, 99)
    assert kv.services.receipt.kvprefix_bytes_served == 64 + 16 + 24
    assert kv.services.vstore.fetches == 3


async def test_large_conversions_leave_the_loop_and_agree(kv) -> None:
    rows = np.random.default_rng(3).standard_normal((3000, 257), np.float32)
    assert plain(await kv.call("V.CREATE", "s", 257, "VQUANT", "fp16")) == "OK"
    assert plain(await kv.call("V.STOREBATCH", "s", 0, 0, 3000, memoryview(rows.tobytes()))) == "OK"
    reply = await kv.call("V.FETCH", "s", 0, "RANGE", 0, 3000)
    assert isinstance(reply, Stream)
    assert reply.in_thread
    expected = rows.astype(np.float16)
    assert plain(reply) == expected.astype(np.float32).tobytes()
    assert plain(await kv.call("V.FETCH", "s", 0, "RANGE", 0, 3000, "AS", "native")) == expected.tobytes()


def test_only_a_little_of_a_reply_is_converted_at_once(kv) -> None:
    """Many parts, each small: all of them together are what the loop would have to make, and memory to keep."""
    rows = np.random.default_rng(1).standard_normal((256, 512)).astype(np.float16)
    call(kv, "V.CREATE", "s", 512, "VQUANT", "fp16")
    call(kv, "V.STOREBATCH", "s", 0, 0, 256, "AS", "native", rows.tobytes())
    single, pair, many = rows.astype(np.float32).tobytes(), rows[:2].astype(np.float32).tobytes(), 300
    for start_stop, wanted in (((0, 100), single[: 100 * 2048]), ((0, 256), single), ((0, 2), pair)):
        reply = now_raw(kv, "V.FETCH", "s", "BATCH", many, *(0, *start_stop) * many)
        made = sum(part.nbytes for part in reply if isinstance(part, Blob))
        assert made <= CONVERT_IN_THREAD_BYTES
        streams = [part for part in reply if isinstance(part, Stream)]
        assert len(streams) >= many // 2
        # What isn't made in a thread was made there with the one before, so no hop is paid for a tiny part.
        hops = [index for index, stream in enumerate(streams) if stream.in_thread]
        assert hops[0] == 0
        assert max(np.diff([*hops, len(streams)])) <= 64
        assert len(hops) <= -(-sum(stream.nbytes for stream in streams) // 500_000) + len(streams) // 64 + 1
        assert plain(reply) == [wanted] * many
        del reply


def test_parts_that_were_sent_are_not_kept(kv) -> None:
    """The reply lives until its last byte is sent; what was converted for it does not."""
    call(kv, "V.CREATE", "s", 512, "VQUANT", "fp16")
    call(kv, "V.STOREBATCH", "s", 0, 0, 100, "AS", "native", bytes(100 * 1024))
    reply = now_raw(kv, "V.FETCH", "s", "BATCH", 100, *(0, 0, 100) * 100)
    tracemalloc.start()
    try:
        for part in reply:
            assert len(plain(part)) == 100 * 2048
        assert tracemalloc.get_traced_memory()[0] < MIB
    finally:
        tracemalloc.stop()


def test_parts_in_any_order_and_more_than_once(kv) -> None:
    rows = np.arange(4096, dtype=np.float16).reshape(8, 512)
    call(kv, "V.CREATE", "s", 512, "VQUANT", "fp16")
    call(kv, "V.STOREBATCH", "s", 0, 0, 8, "AS", "native", rows.tobytes())
    reply = now_raw(kv, "V.FETCH", "s", "BATCH", 200, *(0, 0, 8) * 200)
    wanted = rows.astype(np.float32).tobytes()
    for part in (*reversed(reply), reply[100], reply[-1]):
        assert plain(part) == wanted


def test_many_small_blocks_are_joined_for_the_reply(kv) -> None:
    call(kv, "V.CREATE", "s", 1, "VQUANT", "fp32")
    for index in range(400):
        call(kv, "V.STORE", "s", 0, 2 * index, b"%04d" % index)
    ids = [2 * index for index in range(399, -1, -1)]
    reply = next(iter([now_raw(kv, "V.FETCH", "s", 0, *ids)]))
    assert isinstance(reply, Blob)
    assert len(reply.parts) == 1
    assert plain(reply) == b"".join(b"%04d" % index for index in range(399, -1, -1))


def now_raw(kv: Harness, *args):
    coroutine = kv.call(*args)
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    return done.value.value


def test_rows_being_sent_stay_whole_and_charged(kv) -> None:
    """Fault class 46, at the store: the reply's view is one version, whatever happens to the rows meanwhile."""
    ledger = kv.services.vstore.ledger
    call(kv, "V.CREATE", "s", 1024, "VQUANT", "fp32")
    call(kv, "V.STOREBATCH", "s", 0, 0, 64, b"old!" * (64 * 1024))
    reply = now_raw(kv, "V.FETCH", "s", 0, "RANGE", 0, 64, "AS", "native")
    converted = now_raw(kv, "V.FETCH", "s", 0, "RANGE", 0, 64, "AS", "fp16")
    before = plain(converted)
    for index in range(1000):
        call(kv, "V.STOREBATCH", "s", 0, index % 64, 1, b"new!" * 1024)
    call(kv, "V.DROP", "s")
    assert plain(reply) == b"old!" * (64 * 1024)
    assert ledger.sending_bytes == ledger.charged_bytes == 256 * 1024
    assert plain(converted) == before
    del reply, converted
    gc.collect()
    assert ledger.charged_bytes == ledger.sending_bytes == 0


@pytest.mark.parametrize("meanwhile", ["drop", "other shape", "same shape", "complete", "owned"])
async def test_what_changes_while_rows_are_converted_is_checked_again(kv, monkeypatch, meanwhile) -> None:
    """Rows of 300 KiB are converted in a thread; the store must hold for the state after that."""
    tokens, dim = 300, 256
    rows = np.ones((tokens, dim), np.float32)
    call(kv, "V.CREATE", "a_pk", dim, "VQUANT", "fp16")
    other = kv.client()

    async def in_thread(context, function, *args):
        if meanwhile not in ("complete", "owned"):
            call(kv, "V.DROP", "a_pk")
        if meanwhile.endswith("shape"):
            call(kv, "V.CREATE", "a_pk", dim, "VQUANT", "fp16" if meanwhile == "same shape" else "bf16")
        if meanwhile in ("complete", "owned"):
            call(other, "KV.PREFIX.REGISTER", "a", dim, "fp16", "LAYERS", int(meanwhile == "owned"), "TOKENS", 1)
        return function(*args)

    monkeypatch.setattr(type(kv.context), "in_thread", in_thread)
    reply = plain(await kv.call("V.STOREBATCH", "a_pk", 0, 0, tokens, memoryview(rows.tobytes())))
    assert {
        "drop": reply == "-ERR no session 'a_pk'",
        "other shape": reply.startswith("-ERR the session was made anew"),
        "same shape": reply == "OK",
        "complete": reply.startswith("-EXISTS"),
        "owned": reply.startswith("-BUSY"),
    }[meanwhile]
    stored = any(unit["rows0"] for unit in snapshot(kv.services.vstore).values())
    assert stored == (meanwhile == "same shape")
