"""MEMORY, without sockets."""

from __future__ import annotations

from typing import Any

import pytest

from pion.commands import memory
from pion.commands.memory import IDLE_BYTES, findings
from pion.config import Config
from pion.replies import Blob, Map
from pion.storage.ledger import BLOCK_COST, LAYER_COST, SIDE_COST, UNIT_COST
from pion.testing import FakeClock, Harness, make_harness
from tests.commands.kv_support import call, declare, now, pack

SIDE = SIDE_COST + LAYER_COST + BLOCK_COST


def make(**options: Any) -> Harness:
    return make_harness(Config(plugins="connection,server,vstore,kvprefix", **options), FakeClock())


@pytest.fixture
def kv() -> Harness:
    return make()


def usage(kv: Harness, *args: Any) -> Any:
    return call(kv, "MEMORY", "USAGE", *args)


def charged(kv: Harness) -> int:
    return kv.services.vstore.ledger.charged_bytes


def test_usage_of_a_prefix_and_its_sides(kv) -> None:
    declare(kv, "a", 3, "META", "m" * 20, "BLOCKS", 1, 2, pack(1, 2))
    assert usage(kv, "a") == usage(kv, "PREFIX", "a") == usage(kv, "prefix", "a") == charged(kv)
    for sid in ("a_pk", "a_pv"):
        assert usage(kv, "V", sid) == usage(kv, sid) == SIDE + 12
    assert usage(kv, "PREFIX", "a_pk") is None


def test_usage_of_a_session(kv) -> None:
    call(kv, "V.CREATE", "notes", 2, "VQUANT", "fp32")
    assert usage(kv, "notes") == UNIT_COST + 5
    call(kv, "V.STOREBATCH", "notes", 0, 0, 5, bytes(40))
    assert usage(kv, "notes") == usage(kv, "V", "notes") == UNIT_COST + 5 + SIDE + 40 == charged(kv)
    assert usage(kv, "PREFIX", "notes") is None


def test_usage_of_a_side_without_the_other(kv) -> None:
    """It is a session and no prefix; what a prefix would share is its own."""
    call(kv, "V.CREATE", "a_pv", 2, "VQUANT", "fp32")
    assert usage(kv, "V", "a_pv") == usage(kv, "a_pv") == UNIT_COST + 1 == charged(kv)
    assert usage(kv, "V", "a_pk") is None
    assert usage(kv, "a") is None
    assert usage(kv, "PREFIX", "a") is None


def test_usage_prefers_a_prefix_to_a_session_of_that_name(kv) -> None:
    declare(kv, "x_pk", 1)  # its sides are x_pk_pk and x_pk_pv
    call(kv, "V.CREATE", "x_pk", 1, "VQUANT", "fp32")
    assert usage(kv, "x_pk") == usage(kv, "PREFIX", "x_pk") == UNIT_COST + 4 + 2 * (SIDE + 4)
    assert usage(kv, "V", "x_pk") == UNIT_COST + 1


def test_usage_of_a_pending_prefix(kv) -> None:
    """Invisible to LOOKUP, but it takes memory."""
    call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 1, "TOKENS", 2)
    call(kv, "V.STORE", "a_pk", 0, 0, bytes(4))
    assert usage(kv.client(), "a") == charged(kv)
    assert usage(kv.client(), "V", "a_pk") == SIDE + 4


def test_usage_adds_up(kv) -> None:
    declare(kv, "root", 4, "BLOCKS", 2, 2, pack(1, 2))
    declare(kv, "leaf", 2, "PARENT", "root", 4, "BLOCKS", 2, 1, pack(3))
    call(kv, "KV.PREFIX.MEMBERSHIP", "root", 1, pack(1))
    call(kv, "V.CREATE", "notes", 1)
    assert call(kv, "V.STOREBATCH", "notes", 0, 0, 2, bytes(8)) == "OK"
    assert usage(kv, "root") + usage(kv, "leaf") + usage(kv, "notes") == charged(kv)


def test_usage_of_what_expired_is_null() -> None:
    clock = FakeClock()
    kv = make_harness(Config(plugins="server,vstore,kvprefix"), clock)
    call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "EX", 5)
    assert usage(kv, "a") > 0
    clock.advance(5)
    for args in (["a"], ["PREFIX", "a"], ["V", "a_pk"]):
        assert usage(kv, *args) is None


@pytest.mark.parametrize("name", ["V", "PREFIX", "SSM", "SAMPLES", "samples"])
def test_usage_takes_any_word_for_a_name(kv, name) -> None:
    """How many arguments there are says which is the name."""
    assert usage(kv, name) is None
    assert usage(kv, name, "SAMPLES", 5) is None
    call(kv, "V.CREATE", name, 1)
    size = UNIT_COST + len(name)
    assert usage(kv, name) == usage(kv, "V", name) == size
    assert usage(kv, name, "SAMPLES", 5) == usage(kv, "V", name, "samples", 0) == size


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["x", "a"], "-ERR syntax error"),
        (["x", "SAMPLES"], "-ERR syntax error"),
        (["V", "a", "b"], "-ERR syntax error"),
        (["a", "SAMPLE", "5"], "-ERR syntax error"),
        (["V", "a", "b", "5"], "-ERR syntax error"),
        (["x", "a", "SAMPLES", "5"], "-ERR syntax error"),
        (["V", "a", "SAMPLES", "5", "6"], "-ERR syntax error"),
        (["a", "SAMPLES", "-1"], "-ERR SAMPLES must be an integer from 0 to 2147483647, got -1"),
        (["V", "a", "SAMPLES", "x"], "-ERR SAMPLES must be an integer from 0 to 2147483647, got 'x'"),
        (["SSM", "a"], "-ERR MEMORY USAGE SSM: this version lacks the SSM.PREFIX family"),
        (["moe", "a", "SAMPLES", "1"], "-ERR MEMORY USAGE MOE: this version lacks the MOE.EXPERT family"),
        ([""], "-ERR sid must be 1 to 4096 bytes long, got 0"),
        (["PREFIX", "n" * 4097], "-ERR namespace must be 1 to 4096 bytes long, got 4097"),
        (["n" * 4097], "-ERR sid must be 1 to 4096 bytes long, got 4097"),
        ([], "-ERR wrong number of arguments for 'memory|usage' command"),
    ],
)
def test_usage_refuses(kv, args, error) -> None:
    assert usage(kv, *args) == error


def test_usage_of_the_longest_names(kv) -> None:
    ns = "n" * 4096
    declare(kv, ns, 1)
    assert usage(kv, ns) == charged(kv)
    assert usage(kv, f"{ns}_pk") == usage(kv, "V", f"{ns}_pk") == SIDE + 4


def test_stats(kv) -> None:
    empty = dict(now(kv.call("MEMORY", "STATS")).pairs)
    assert empty["resident.bytes"] >= 0
    del empty["resident.bytes"]
    assert set(empty.values()) == {0}
    declare(kv, "a", 3)
    call(kv, "V.CREATE", "notes", 1)
    reply = now(kv.call("MEMORY", "STATS"))
    assert isinstance(reply, Map)
    found = dict(reply.pairs)
    assert found["total.allocated"] == usage(kv, "a") + usage(kv, "notes")
    assert (found["keys.count"], found["keys.bytes-per-key"]) == (2, found["total.allocated"] // 2)
    assert (found["dataset.bytes"], found["sending.bytes"], found["mapped.bytes"]) == (24, 0, 0)


def test_stats_of_a_reply_that_is_not_read(kv) -> None:
    call(kv, "V.CREATE", "notes", 1, "VQUANT", "fp32")
    call(kv, "V.STOREBATCH", "notes", 0, 0, 1000, bytes(4000))
    held = unread(kv, "V.FETCH", "notes", 0, "RANGE", 0, 1000, "AS", "native")
    call(kv, "V.DROP", "notes")
    found = dict(now(kv.call("MEMORY", "STATS")).pairs)
    assert (found["total.allocated"], found["sending.bytes"], found["keys.count"]) == (4000, 4000, 0)
    del held
    assert charged(kv) == 0


def unread(kv: Harness, *args: Any) -> Blob:
    """A reply with the buffers that it holds."""
    try:
        kv.call(*args).send(None)
    except StopIteration as done:
        reply: Blob = done.value
        return reply
    raise AssertionError("the command waits")


@pytest.fixture
def small_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that has run a thousand other tests before."""
    monkeypatch.setattr(memory, "anonymous_bytes", lambda: 30_000_000)


@pytest.mark.usefixtures("small_process")
def test_doctor_has_nothing_to_say_of_an_empty_server() -> None:
    assert call(make(), "MEMORY", "DOCTOR") == "Nothing to report: memory is as it should be."


@pytest.mark.usefixtures("small_process")
def test_doctor_names_the_byte_limit() -> None:
    kv = make(max_bytes=100_000)
    call(kv, "V.CREATE", "notes", 1, "VQUANT", "fp32")
    assert findings(kv.services, 0) == []
    call(kv, "V.STOREBATCH", "notes", 0, 0, 23_500, bytes(94_000))
    (line,) = findings(kv.services, 0)
    assert line.startswith(f"* {charged(kv)} of 100000 bytes are used (--max-bytes)")
    assert call(kv, "MEMORY", "DOCTOR") == line


def test_doctor_names_the_session_limit() -> None:
    kv = make(max_sessions=40)
    for number in range(37):
        call(kv, "V.CREATE", f"s{number}", 1)
    assert findings(kv.services, 0) == []
    call(kv, "V.CREATE", "s37", 1)
    (line,) = findings(kv.services, 0)
    assert line.startswith("* 38 of 40 sessions are used (--max-sessions)")


def test_doctor_sees_replies_that_are_not_read(kv) -> None:
    call(kv, "V.CREATE", "notes", 1, "VQUANT", "fp32")
    call(kv, "V.STOREBATCH", "notes", 0, 0, 500_000, bytes(2_000_000))
    held = unread(kv, "V.FETCH", "notes", 0, "RANGE", 0, 1000, "AS", "native")
    assert findings(kv.services, 0) == []
    call(kv, "V.DROP", "notes")
    (line,) = findings(kv.services, 0)
    assert line.startswith("* 2000000 bytes are held only by replies")
    del held
    assert findings(kv.services, 0) == []


def test_doctor_compares_what_is_charged_with_what_the_process_takes(kv) -> None:
    declare(kv, "a", 1)
    most = IDLE_BYTES + charged(kv) * 3 // 2
    assert findings(kv.services, most) == []
    (line,) = findings(kv.services, most + 1)
    assert line.startswith(f"* The process takes {most + 1} bytes, and {charged(kv)} are charged")


def test_what_is_no_subcommand(kv) -> None:
    assert call(kv, "MEMORY", "PURGE") == "-ERR unknown subcommand 'PURGE'. Try MEMORY HELP."
    assert call(kv, "MEMORY", "STATS", "x").startswith("-ERR wrong number of arguments")
    lines = [line for line in call(kv, "MEMORY", "HELP") if not line.startswith(" ")]
    assert [line.split()[0] for line in lines] == ["MEMORY", "USAGE", "STATS", "DOCTOR", "HELP"]
