"""DBSIZE, TIME, SHUTDOWN, SLOWLOG, LATENCY and MODULE, without sockets."""

import pytest

from pion.config import Config
from pion.replies import NO_REPLY, OK, ErrorReply
from pion.testing import FakeClock, make_harness


@pytest.fixture
def stops(harness):
    """What the server was asked: a list of `now`."""
    asked: list[bool] = []
    harness.services.request_shutdown = asked.append
    return asked


async def test_dbsize_counts_keys_not_prefixes(harness):
    assert await harness.call("V.CREATE", "s", 32) == OK
    assert await harness.call("DBSIZE") == 0


async def test_time():
    harness = make_harness(clock=FakeClock(1_700_000_000.25))
    assert await harness.call("TIME") == [b"1700000000", b"250000"]


@pytest.mark.parametrize(
    ("options", "now"), [([], False), (["nosave"], False), (["NOSAVE", "NOW", "FORCE"], True), (["NOW"], True)]
)
async def test_shutdown_closes_without_a_reply(harness, stops, options, now):
    assert await harness.call("SHUTDOWN", *options) is NO_REPLY
    assert stops == [now]
    assert harness.context.session.closing


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["x"], "syntax error"),
        (["SAVE", "NOSAVE"], "syntax error"),
        (["ABORT", "NOW"], "syntax error"),
        (["ABORT"], "No shutdown in progress."),
        (["SAVE"], "SHUTDOWN SAVE: this server keeps everything in memory and has no file to save to"),
        (["SAVE", "NOW"], "SHUTDOWN SAVE: this server keeps everything in memory and has no file to save to"),
    ],
)
async def test_shutdown_refuses(harness, stops, options, error):
    assert await harness.call("SHUTDOWN", *options) == ErrorReply("ERR", error)
    assert not stops
    assert not harness.context.session.closing


async def test_slowlog():
    clock = FakeClock()
    harness = make_harness(Config(slowlog_slower_than_us=0, slowlog_max_len=3), clock)
    await harness.call("CLIENT", "SETNAME", "me")
    for number in range(5):
        await harness.call("ECHO", number)
    assert await harness.call("SLOWLOG", "LEN") == 3
    newest, *_ = await harness.call("SLOWLOG", "GET", 1)
    identifier, at_s, duration_us, argv, addr, name = newest
    assert argv == [b"SLOWLOG", b"LEN"]
    assert (identifier, at_s, addr, name) == (6, int(clock.wall_s()), harness.context.session.addr, b"me")
    assert duration_us >= 0
    assert len(await harness.call("SLOWLOG", "GET", -1)) == 3
    assert len(await harness.call("SLOWLOG", "GET")) == 3
    assert await harness.call("SLOWLOG", "GET", 0) == []
    assert await harness.call("SLOWLOG", "RESET") == OK
    assert [entry[3] for entry in await harness.call("SLOWLOG", "GET")] == [[b"SLOWLOG", b"RESET"]]


async def test_slowlog_cuts_what_is_long():
    harness = make_harness(Config(slowlog_slower_than_us=0))
    await harness.call("ECHO", memoryview(b"x" * 40_000))
    (entry,) = await harness.call("SLOWLOG", "GET", 1)
    assert entry[3] == [b"ECHO", b"x" * 128 + b"... (39872 more bytes)"]
    await harness.call("COMMAND", "INFO", *["ping"] * 40)
    (entry,) = await harness.call("SLOWLOG", "GET", 1)
    assert entry[3] == [b"COMMAND", b"INFO", *[b"ping"] * 29, b"... (11 more arguments)"]


@pytest.mark.parametrize("count", ["-2", "x", "", "1.5", str(2**63 * 10)])
async def test_slowlog_get_refuses(harness, count):
    assert await harness.call("SLOWLOG", "GET", count) == ErrorReply(
        "ERR", "count should be greater than or equal to -1"
    )


async def test_slowlog_default_count():
    harness = make_harness(Config(slowlog_slower_than_us=0))
    for _ in range(20):
        await harness.call("PING")
    assert len(await harness.call("SLOWLOG", "GET")) == 10
    assert len(await harness.call("SLOWLOG", "GET", 1000)) == 21


async def test_latency_has_no_events(harness):
    assert await harness.call("LATENCY", "LATEST") == []
    assert await harness.call("LATENCY", "HISTORY", "command") == []
    assert await harness.call("LATENCY", "RESET") == 0
    assert await harness.call("LATENCY", "RESET", "a", "b") == 0
    assert (await harness.call("LATENCY", "DOCTOR")).text == "unknown subcommand 'DOCTOR'. Try LATENCY HELP."


async def test_module_list():
    harness = make_harness(Config(plugins="server,stats,connection"))
    assert [dict(module.pairs) for module in await harness.call("MODULE", "LIST")] == [
        {"name": "connection", "ver": 1},
        {"name": "server", "ver": 1},
        {"name": "stats", "ver": 1},
    ]


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        ("DBSIZE x", "dbsize"),
        ("TIME x", "time"),
        ("SLOWLOG", "slowlog"),
        ("SLOWLOG LEN x", "slowlog|len"),
        ("SLOWLOG RESET x", "slowlog|reset"),
        ("LATENCY LATEST x", "latency|latest"),
        ("LATENCY HISTORY", "latency|history"),
        ("MODULE", "module"),
        ("MODULE LIST x", "module|list"),
        ("CONFIG RESETSTAT x", "config|resetstat"),
        ("COMMAND COUNT x", "command|count"),
        ("CONFIG GET", "config|get"),
    ],
)
async def test_arity(harness, request_, name):
    assert await harness.call(*request_.split()) == ErrorReply("ERR", f"wrong number of arguments for '{name}' command")
