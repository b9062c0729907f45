"""PION.STATS and PION.WHOAMI, without sockets."""

import pytest

from pion.config import Config
from pion.replies import OK, ErrorReply, Map
from pion.testing import FakeClock, make_harness

FIELDS = [
    "kvprefix_hits",
    "kvprefix_misses",
    "kvprefix_tokens_served",
    "kvprefix_bytes_served",
    "prefill_seconds_avoided",
    "prefill_seconds_avoided_measured",
    "prefill_seconds_avoided_estimated",
    "kvprefix_hits_measured",
    "kvprefix_hits_estimated",
    "semantic_hits",
    "semantic_misses",
    "moe_hits",
    "moe_misses",
    "vector_queries",
    "worker",
    "uptime_seconds",
]


async def stats(harness) -> dict:
    reply = await harness.call("PION.STATS")
    assert isinstance(reply, Map)
    assert [field for field, _ in reply.pairs] == FIELDS
    return dict(reply.pairs)


async def test_a_fresh_receipt_is_zero(harness):
    assert set((await stats(harness)).values()) == {0}


async def test_measured_and_estimated_are_kept_apart(harness):
    receipt = harness.services.receipt
    receipt.hit(tokens=1000, measured_ms=250.0)
    receipt.hit(tokens=100, measured_ms=None)
    receipt.kvprefix_misses += 1
    found = await stats(harness)
    assert found["kvprefix_hits"] == 2
    assert found["kvprefix_tokens_served"] == 1100
    assert found["prefill_seconds_avoided_measured"] == 0.25
    assert found["prefill_seconds_avoided_estimated"] == 0.0555
    assert found["prefill_seconds_avoided"] == 0.3055
    assert (found["kvprefix_hits_measured"], found["kvprefix_hits_estimated"]) == (1, 1)


async def test_reset_zeroes_all_but_the_uptime():
    clock = FakeClock()
    harness = make_harness(clock=clock)
    harness.services.receipt.hit(tokens=10, measured_ms=None)
    clock.advance(42.9)
    assert await harness.call("PION.STATS", "reset") == OK
    found = await stats(harness)
    assert found.pop("uptime_seconds") == 42
    assert set(found.values()) == {0}


async def test_info_has_the_same_numbers(harness):
    harness.services.receipt.hit(tokens=10, measured_ms=1.5)
    title, *lines = (await harness.call("INFO", "pion")).split("\r\n")
    assert title == "# Pion"
    assert lines[:-1] == [f"{field}:{value}" for field, value in (await stats(harness)).items()]


@pytest.mark.parametrize("args", [["x"], ["RESET", "x"], [""], [memoryview(b"x" * 40_000)]])
async def test_stats_refuses(harness, args):
    harness.services.receipt.hit(tokens=10, measured_ms=None)
    reply = await harness.call("PION.STATS", *args)
    assert reply.text.startswith("PION.STATS takes nothing or RESET, got '")
    assert (await stats(harness))["kvprefix_hits"] == 1


async def test_whoami():
    harness = make_harness(Config(requirepass="x"))
    assert (await harness.call("PION.WHOAMI")).code == "NOAUTH"
    await harness.call("AUTH", "x")
    assert await harness.call("PION.WHOAMI") == Map([("user", "default"), ("prefix", b"")])
    assert await harness.call("PION.WHOAMI", "x") == ErrorReply(
        "ERR", "wrong number of arguments for 'pion.whoami' command"
    )
