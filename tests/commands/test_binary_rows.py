"""The rows of the binary lane against the RESP commands that they are: same bits, same errors, same counts."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from pion.config import Config
from pion.replies import BinaryReply, ErrorReply
from pion.testing import FakeClock, Harness, make_harness
from tests.commands.kv_support import make_kv, plain

FETCH_RANGE, STOREBATCH, FETCH_BATCH, REGISTER, PREFIX_FETCH, LOOKUP = range(0x10, 0x16)
WIRES = ("fp32", "fp16", "bf16", "native")
FORMATS = ("fp32", "fp16", "bf16", "fp8", "int8", "turbo4", "mlx4g32")
DIM = 128


def body_of(reply: Any) -> bytes:
    """The body of an answer as bytes."""
    assert isinstance(reply, BinaryReply), reply
    parts = reply.body if isinstance(reply.body, list) else [reply.body]
    return b"".join(part if isinstance(part, bytes) else plain(part) for part in parts)


def rows(count: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32).tobytes()


# The connection


async def test_auth_ping_and_pin() -> None:
    harness = make_harness(Config(plugins="connection", requirepass="secret"))
    no_auth = ErrorReply("NOAUTH", "Authentication required.")
    assert await harness.call_binary(2) == no_auth
    assert await harness.call_binary(3, 0) == no_auth
    wrong = ErrorReply("WRONGPASS", "invalid username-password pair or user is disabled.")
    assert await harness.call_binary(1, b"default", b"wrong") == wrong
    assert await harness.call_binary(1, b"other", b"secret") == wrong
    assert not harness.context.session.authenticated
    assert await harness.call_binary(1, b"default", b"secret") == BinaryReply()
    assert await harness.call_binary(2) == BinaryReply()
    assert await harness.call_binary(3, 0) == BinaryReply()
    one = ErrorReply("ERR", "this server has one worker, 0; there is no worker 1")
    assert await harness.call_binary(3, 1) == await harness.call("PION.PIN", 1) == one
    assert plain(await harness.call("PION.PIN", 0)) == "OK"
    assert (await harness.call("PION.PIN", "x")).text == "worker must be an integer from 0 to 2147483647, got 'x'"


async def test_a_command_without_a_body_refuses_one() -> None:
    harness = make_harness(Config(plugins="connection"))
    assert await harness.call_binary(2, body=b"x") == ErrorReply("ERR", "this command takes no body, got 1 bytes")


# Rows


@pytest.mark.parametrize("stored", FORMATS)
async def test_rows_are_the_same_bits_on_both_lanes(stored: str) -> None:
    kv = make_kv()
    for sid in ("resp", "packed"):
        assert plain(await kv.call("V.CREATE", sid, DIM, "VQUANT", stored)) == "OK"
    for layer in (0, 3):
        blob = rows(20, layer)
        assert plain(await kv.call("V.STOREBATCH", "resp", layer, 0, 20, "AS", "fp32", blob)) == "OK"
        assert await kv.call_binary(STOREBATCH, b"packed", layer, 0, 20, "fp32", body=blob) == BinaryReply()
    ranges = [(0, 0, 20), (3, 5, 6), (3, 7, 7), (0, 2, 9)]
    for wire in WIRES:
        for layer, start, end in ranges:
            expected = plain(await kv.call("V.FETCH", "resp", layer, "RANGE", start, end, "AS", wire))
            for sid in (b"resp", b"packed"):
                assert body_of(await kv.call_binary(FETCH_RANGE, sid, layer, start, end, wire)) == expected
        numbers = [number for each in ranges for number in each]
        expected = plain(await kv.call("V.FETCH", "resp", "BATCH", 4, *numbers, "AS", wire))
        assert body_of(await kv.call_binary(FETCH_BATCH, b"packed", wire, ranges)) == b"".join(expected)
    assert await kv.call_binary(FETCH_BATCH, b"packed", "fp32", []) == BinaryReply(body=[])


@pytest.mark.parametrize("wire", WIRES)
async def test_rows_in_every_type_are_stored_as_by_resp(wire: str) -> None:
    kv = make_kv()
    dtype = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "native": np.float16}[wire]
    blob = np.random.default_rng(2).integers(0, 30_000, (9, DIM)).astype(dtype).tobytes()
    for sid in ("resp", "packed"):
        await kv.call("V.CREATE", sid, DIM, "VQUANT", "fp16")
    assert plain(await kv.call("V.STOREBATCH", "resp", 1, 4, 9, "AS", wire, blob)) == "OK"
    assert await kv.call_binary(STOREBATCH, b"packed", 1, 4, 9, wire, body=memoryview(blob)) == BinaryReply()
    expected = plain(await kv.call("V.FETCH", "resp", 1, "RANGE", 4, 13, "AS", "native"))
    assert plain(await kv.call("V.FETCH", "packed", 1, "RANGE", 4, 13, "AS", "native")) == expected


BIG = 2**32 - 1


@pytest.mark.parametrize(
    ("values", "nbytes", "resp"),
    [
        ((b"s", 0, 0, 2), 2 * DIM * 4 - 1, ("s", 0, 0, 2)),
        ((b"s", 0, 0, 2), 2 * DIM * 4 + 1, ("s", 0, 0, 2)),
        ((b"s", 0, 0, 0), 1, ("s", 0, 0, 0)),
        ((b"other", 0, 0, 1), DIM * 4, ("other", 0, 0, 1)),
        ((b"", 0, 0, 1), DIM * 4, ("", 0, 0, 1)),
        ((b"s" * 5000, 0, 0, 1), DIM * 4, ("s" * 5000, 0, 0, 1)),
        ((b"s", BIG, 0, 1), DIM * 4, ("s", BIG, 0, 1)),
        ((b"s", 0, BIG, 1), DIM * 4, ("s", 0, BIG, 1)),
        ((b"s", 0, 0, BIG), DIM * 4, ("s", 0, 0, BIG)),
        ((b"s", 0, 2**31 - 1, 2), DIM * 8, ("s", 0, 2**31 - 1, 2)),
    ],
)
async def test_what_resp_refuses_to_store_is_refused_with_the_same_words(values: Any, nbytes: int, resp: Any) -> None:
    kv = make_kv()
    await kv.call("V.CREATE", "s", DIM, "VQUANT", "fp32")
    expected = await kv.call("V.STOREBATCH", *resp, "AS", "fp32", bytes(nbytes))
    assert isinstance(expected, ErrorReply)
    assert await kv.call_binary(STOREBATCH, *values, "fp32", body=bytes(nbytes)) == expected
    assert (await kv.call("V.INFO", "s")).pairs[6] == ("rows", 0)


@pytest.mark.parametrize(
    ("sid", "layer", "start", "end"),
    [
        ("s", 0, 0, 3),
        ("s", 1, 0, 1),
        ("s", 0, 2, 1),
        ("other", 0, 0, 1),
        ("s", BIG, 0, 1),
        ("s", 0, 0, BIG),
        ("", 0, 0, 0),
    ],
)
async def test_what_resp_refuses_to_fetch_is_refused_with_the_same_words(
    sid: str, layer: int, start: int, end: int
) -> None:
    kv = make_kv()
    await kv.call("V.CREATE", "s", DIM, "VQUANT", "fp32")
    await kv.call("V.STOREBATCH", "s", 0, 0, 2, rows(2))
    expected = await kv.call("V.FETCH", sid, layer, "RANGE", start, end)
    assert isinstance(expected, ErrorReply)
    assert await kv.call_binary(FETCH_RANGE, sid.encode(), layer, start, end, "fp32") == expected
    in_a_batch = await kv.call("V.FETCH", sid, "BATCH", 2, 0, 0, 1, layer, start, end)
    assert await kv.call_binary(FETCH_BATCH, sid.encode(), "fp32", [(0, 0, 1), (layer, start, end)]) == in_a_batch


async def test_a_batch_has_the_limit_of_resp() -> None:
    kv = make_kv()
    await kv.call("V.CREATE", "s", 4)
    most = await kv.call_binary(FETCH_BATCH, b"s", "fp32", [(0, 0, 0)] * 16_384)
    assert body_of(most) == b""
    more = await kv.call_binary(FETCH_BATCH, b"s", "fp32", [(0, 0, 0)] * 16_385)
    assert more == ErrorReply("ERR", "n must be an integer from 0 to 16384, got 16385")


async def test_what_has_no_room_is_oom_and_a_prefix_that_was_being_filled_goes() -> None:
    kv = make_kv(max_bytes=1 << 20)
    await kv.call("V.CREATE", "s", 1024, "VQUANT", "fp32")
    await kv.call_binary(REGISTER, b"p", b"fp32@1024*1", b"fp32@1024*1", 1, 1000, 0, 0.0)
    body = memoryview(bytes(1000 * 4096))
    expected = await kv.call("V.STOREBATCH", "s", 0, 0, 1000, "AS", "native", body)
    assert expected.code == "OOM"
    assert await kv.call_binary(STOREBATCH, b"s", 0, 0, 1000, "native", body=body) == expected
    assert b"p" in kv.services.vstore.prefixes
    assert (await kv.call_binary(STOREBATCH, b"p_pk", 0, 0, 1000, "native", body=body)).code == "OOM"
    assert b"p" not in kv.services.vstore.prefixes


# Prefixes

K_RUNS, V_RUNS = b"fp16@8*2", b"fp32@4*1,fp16@4*1"


async def fill(kv: Harness, ns: bytes, tokens: int) -> list[bytes]:
    """Store every row of a prefix of two layers; K and V of each layer in turn."""
    stored = []
    for layer in range(2):
        for side, width in ((b"_pk", 16), (b"_pv", 16 if layer == 0 else 8)):
            blob = np.random.default_rng(layer).integers(0, 255, tokens * width, np.uint8).tobytes()
            reply = await kv.call_binary(STOREBATCH, ns + side, layer, 0, tokens, "native", body=blob)
            assert reply == BinaryReply()
            stored.append(blob)
    return stored


def register(
    kv: Harness, ns: bytes, layers: int = 2, tokens: int = 3, states: int = 0, ms: float = 0.0, meta: bytes = b""
) -> Any:
    return kv.call_binary(REGISTER, ns, K_RUNS, V_RUNS, layers, tokens, states, ms, body=meta)


async def test_a_declared_prefix_from_register_to_fetch() -> None:
    kv = make_kv()
    other = kv.client()
    assert await register(kv, b"p", ms=1.5, meta=b"what it is") == BinaryReply()
    assert await register(other, b"p") == BinaryReply(12, body=b"PENDING")
    busy = await other.call_binary(STOREBATCH, b"p_pk", 0, 0, 1, "native", body=bytes(16))
    assert busy == await other.call("V.STOREBATCH", "p_pk", 0, 0, 1, "AS", "native", bytes(16))
    assert busy.code == "BUSY"
    assert await other.call_binary(LOOKUP, b"p", 0, 0.0, 0) == BinaryReply(2)
    missing = await other.call_binary(PREFIX_FETCH, b"p", 0, 0, "native")
    assert (missing.status, missing.body) == (2, b"ERR no prefix 'p'")
    stored = await fill(kv, b"p", 3)
    assert await other.call_binary(LOOKUP, b"p", 0, 0.0, 0) == BinaryReply()
    exists = await other.call_binary(STOREBATCH, b"p_pk", 0, 0, 1, "native", body=bytes(16))
    assert exists.code == "EXISTS"
    assert plain(await other.call("KV.PREFIX.META", "p")) == b"what it is"

    whole = await other.call_binary(PREFIX_FETCH, b"p", 0, 0, "native")
    assert (whole.status, whole.meta) == (0, struct.pack("<I4Q", 2, *map(len, stored)))
    assert body_of(whole) == b"".join(stored) == b"".join(plain(await kv.call("KV.PREFIX.FETCH", "p", "AS", "native")))
    for wire in WIRES:
        part = await other.call_binary(PREFIX_FETCH, b"p", 1, 3, wire)
        expected = plain(await kv.call("KV.PREFIX.FETCH", "p", "RANGE", 1, 3, "AS", wire))
        assert struct.unpack("<I4Q", part.meta) == (2, *map(len, expected))
        assert body_of(part) == b"".join(expected)


async def test_a_prefix_without_a_declaration_is_there_at_once() -> None:
    kv = make_kv()
    assert await register(kv, b"p", 0, 0, 0) == BinaryReply()
    assert await kv.call_binary(LOOKUP, b"p", 0, 0.0, 0) == BinaryReply()
    stored = await fill(kv, b"p", 5)
    assert body_of(await kv.call_binary(PREFIX_FETCH, b"p", 0, 0, "native")) == b"".join(stored)
    # Registered again with another shape.
    again = await kv.call_binary(REGISTER, b"p", b"fp16@4*2", V_RUNS, 0, 0, 0, 0.0)
    assert again.code == "EXISTS"
    assert again == await kv.call("KV.PREFIX.REGISTER.SCHEMA", "p", "K", "fp16@4*2", "V", V_RUNS)


async def test_a_chain_is_fetched_as_one_text() -> None:
    kv = make_kv()
    await register(kv, b"root")
    await fill(kv, b"root", 3)
    options = ("LAYERS", 2, "TOKENS", 3, "PARENT", "root", 2)
    assert plain(await kv.call("KV.PREFIX.REGISTER.SCHEMA", "leaf", "K", K_RUNS, "V", V_RUNS, *options)) == "OK"
    await fill(kv, b"leaf", 3)
    for start, end in ((0, 0), (0, 5), (1, 4), (2, 2)):
        span = ("RANGE", start, end) if end else ()
        expected = plain(await kv.call("KV.PREFIX.FETCH", "leaf", *span, "AS", "native"))
        found = await kv.call_binary(PREFIX_FETCH, b"leaf", start, end, "native")
        assert body_of(found) == b"".join(expected)
        assert struct.unpack("<I4Q", found.meta)[1:] == tuple(map(len, expected))
    beyond = await kv.call_binary(PREFIX_FETCH, b"leaf", 0, 6, "native")
    assert beyond == await kv.call("KV.PREFIX.FETCH", "leaf", "RANGE", 0, 6, "AS", "native")


@pytest.mark.parametrize(
    ("values", "resp"),
    [
        ((b"", K_RUNS, V_RUNS, 2, 3, 0, 0.0), ("", "K", K_RUNS, "V", V_RUNS, "LAYERS", 2, "TOKENS", 3)),
        ((b"p", b"fp17@8*2", V_RUNS, 0, 0, 0, 0.0), ("p", "K", "fp17@8*2", "V", V_RUNS)),
        ((b"p", K_RUNS, b"", 0, 0, 0, 0.0), ("p", "K", K_RUNS, "V", "")),
        ((b"p", K_RUNS, V_RUNS, 2, 3, 1, 0.0), ("p", "K", K_RUNS, "V", V_RUNS, "STATES", 1)),
        ((b"p", K_RUNS, V_RUNS, BIG, 3, 0, 0.0), ("p", "K", K_RUNS, "V", V_RUNS, "LAYERS", BIG, "TOKENS", 3)),
        ((b"p", K_RUNS, V_RUNS, 2, BIG, 0, 0.0), ("p", "K", K_RUNS, "V", V_RUNS, "LAYERS", 2, "TOKENS", BIG)),
    ],
)
async def test_what_resp_refuses_to_register_is_refused_with_the_same_words(values: Any, resp: Any) -> None:
    kv = make_kv()
    expected = await kv.call("KV.PREFIX.REGISTER.SCHEMA", *resp)
    assert isinstance(expected, ErrorReply)
    assert await kv.call_binary(REGISTER, *values) == expected
    assert kv.services.vstore.prefixes == {}


@pytest.mark.parametrize("ms", [-1.0, math.nan, math.inf, 1e13])
async def test_a_time_that_is_none_is_refused(ms: float) -> None:
    kv = make_kv()
    refused = await register(kv, b"p", ms=ms)
    assert refused.text.startswith("PREFILL_MS must be a number from 0 to 1e+12, got ")
    assert kv.services.vstore.prefixes == {}
    await register(kv, b"p", 0, 0)
    assert await kv.call_binary(LOOKUP, b"p", 0, ms, 0) == refused
    assert kv.services.receipt.kvprefix_hits == 0


async def test_meta_has_the_limit_of_resp() -> None:
    kv = make_kv(max_meta_bytes=100)
    assert await register(kv, b"p", meta=bytes(100)) == BinaryReply()
    assert (await register(kv, b"q", meta=bytes(101))).text == "META must be at most 100 bytes long, got 101"


async def test_admission_defers_on_this_lane_too() -> None:
    kv = make_kv(admission=2)
    assert await register(kv, b"p") == BinaryReply(12, body=b"DEFERRED")
    for _ in range(2):
        assert await kv.call_binary(LOOKUP, b"p", 0, 0.0, 0) == BinaryReply(2)
    assert await register(kv, b"p") == BinaryReply()


async def test_hits_are_credited_as_by_resp() -> None:
    kv = make_kv()
    await kv.call("KV.PREFIX.REGISTER", "p", 1, "fp32", "LAYERS", 1, "TOKENS", 2, "PREFILL_MS", 7)
    for side in ("pk", "pv"):
        await kv.call("V.STOREBATCH", f"p_{side}", 0, 0, 2, bytes(8))
    receipt = kv.services.receipt
    calls = [((0, 0.0), ()), ((5, 0.0), ("TOKENS", 5)), ((0, 2.5), ("PREFILL_MS", 2.5)), ((2, 0.0), ("TOKENS", 2))]
    for packed, resp in calls:
        before = (receipt.kvprefix_tokens_served, receipt.measured_ms + receipt.estimated_ms)
        await kv.call("KV.PREFIX.LOOKUP", "p", *resp)
        between = (receipt.kvprefix_tokens_served, receipt.measured_ms + receipt.estimated_ms)
        assert await kv.call_binary(LOOKUP, b"p", *packed, 0) == BinaryReply()
        after = (receipt.kvprefix_tokens_served, receipt.measured_ms + receipt.estimated_ms)
        assert after[0] - between[0] == between[0] - before[0]
        assert after[1] - between[1] == pytest.approx(between[1] - before[1])
    assert kv.services.monitor.counter("kv.prefix.lookup").calls == 8


async def test_a_lookup_waits_for_a_prefix_that_is_being_filled() -> None:
    kv = make_kv(FakeClock())
    other = kv.client()
    await register(kv, b"p")
    answers: list[Any] = []

    async def wait() -> None:
        answers.append(await other.call_binary(LOOKUP, b"p", 0, 0.0, 60_000))

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            assert not answers
            await fill(kv, b"p", 3)
    assert answers == [BinaryReply()]
    too_long = await other.call_binary(LOOKUP, b"p", 0, 0.0, BIG)
    assert too_long == await other.call("KV.PREFIX.LOOKUP", "p", "WAIT", BIG)


async def test_what_a_client_registered_goes_with_its_connection() -> None:
    kv = make_kv()
    client = kv.client()
    await register(client, b"p")
    client.disconnect()
    assert kv.services.vstore.prefixes == {}
    assert await register(kv, b"p") == BinaryReply()
