"""CONFIG, without sockets."""

import re

import pytest
import trio

from pion.config import Config, fields, flag_name
from pion.limits import MAX_NAMES_PER_CALL, MAX_PATTERN_BYTES
from pion.replies import OK, ErrorReply, Map
from pion.testing import make_harness


async def get(harness, *patterns) -> dict[str, str]:
    reply = await harness.call("CONFIG", "GET", *patterns)
    assert isinstance(reply, Map)
    names = [name for name, _ in reply.pairs]
    assert len(names) == len(set(names))
    return dict(reply.pairs)


async def test_get_one(harness):
    assert await get(harness, "maxclients") == {"maxclients": "10000"}
    assert await get(harness, "MaxClients", "max?lients") == {"maxclients": "10000"}
    assert await get(harness, "nosuch") == {}
    assert await get(harness, "") == {}
    assert await get(harness, "*" * MAX_PATTERN_BYTES) == await get(harness, "*")


async def test_get_bounds_its_work(harness):
    assert await harness.call("CONFIG", "GET", memoryview(b"*" * 40_000)) == ErrorReply(
        "ERR", "a pattern can be at most 256 bytes long, got 40000"
    )
    assert await get(harness, *["maxclients"] * MAX_NAMES_PER_CALL) == {"maxclients": "10000"}
    assert await harness.call("CONFIG", "GET", *["*"] * (MAX_NAMES_PER_CALL + 1)) == ErrorReply(
        "ERR", "at most 1024 patterns in one call, got 1025"
    )
    too_many = ["timeout", "1"] * (MAX_NAMES_PER_CALL // 2 + 1)
    assert await harness.call("CONFIG", "SET", *too_many) == ErrorReply(
        "ERR", "at most 1024 names and values in one call, got 1026"
    )


async def test_a_pattern_that_is_slow_to_match_lets_others_run(harness, monkeypatch):
    monkeypatch.setattr("pion.commands.checks.TURN_NS", -1)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await get(harness, "*")
        nursery.cancel_scope.cancel()
    assert turns > 20


async def test_get_everything(harness):
    found = await get(harness, "*")
    assert {flag_name(field) for field in fields()} <= found.keys()
    assert all(isinstance(value, str) for value in found.values())


async def test_values_are_plain(harness):
    found = await get(harness, "*")
    assert found["max-bulk"] == str(1 << 30)
    assert found["grace"] == "10"
    assert found["protected-mode"] == "yes"
    assert found["kvcache"] == "no"


async def test_what_redis_tools_ask_for(harness):
    found = await get(harness, "save", "appendonly", "maxmemory", "databases", "bind", "port", "timeout", "unixsocket")
    assert found == {
        "save": "",
        "appendonly": "no",
        "maxmemory": "0",
        "databases": "1",
        "bind": "127.0.0.1",
        "port": "1974",
        "timeout": "0",
        "unixsocket": "",
    }


async def test_the_password_is_masked():
    harness = make_harness(Config(requirepass="correct horse"))
    harness.context.session.authenticated = True
    assert await get(harness, "requirepass") == {"requirepass": "(redacted)"}
    assert "correct horse" not in repr(await harness.call("CONFIG", "GET", "*"))
    assert await get(make_harness(), "requirepass") == {"requirepass": ""}


async def test_set_has_effect(harness):
    services = harness.services
    assert await harness.call("CONFIG", "SET", "maxclients", "77", "TIMEOUT", "2.5", "max-receiving", "3mb") == OK
    assert (services.config.max_clients, services.config.idle_timeout_s) == (77, 2.5)
    assert await get(harness, "max-receiving", "timeout") == {"timeout": "2.5", "max-receiving": str(3 << 20)}
    assert await harness.call("CONFIG", "SET", "max-sessions", "9") == OK
    assert services.vstore.config.max_sessions == 9


async def test_more_clients_than_the_system_has_descriptors(harness, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1024, 1024))
    monkeypatch.setattr("resource.setrlimit", lambda kind, limits: None)  # the real one would lower it for good
    reply = await harness.call("CONFIG", "SET", "timeout", "5", "maxclients", "5000")
    assert reply.code == "ERR"
    fitting = re.fullmatch(
        r"CONFIG SET failed \(possibly related to argument 'maxclients'\) - The operating system is not able to handle "
        r"the specified number of clients, try with (\d+)",
        reply.text,
    )[1]
    assert harness.services.config.idle_timeout_s == 0
    assert await harness.call("CONFIG", "SET", "maxclients", fitting) == OK


async def test_set_of_the_slow_log(harness):
    assert await harness.call("CONFIG", "SET", "slowlog-log-slower-than", "0", "slowlog-max-len", "2") == OK
    for text in "abc":
        await harness.call("ECHO", text)
    newest = await harness.call("SLOWLOG", "GET")
    assert [entry[3] for entry in newest] == [[b"ECHO", b"c"], [b"ECHO", b"b"]]
    assert await harness.call("CONFIG", "SET", "slowlog-log-slower-than", "-1") == OK
    before = await harness.call("SLOWLOG", "GET")
    await harness.call("PING")
    assert await harness.call("SLOWLOG", "GET") == before


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["nosuch", "1"], "Unknown option or number of arguments for CONFIG SET - 'nosuch'"),
        (["x" * 200, "1"], "Unknown option or number of arguments for CONFIG SET - 'xxxx"),
        (["maxclients", "1", "timeout"], "syntax error"),
        (["port", "1"], "CONFIG SET failed (possibly related to argument 'port') - can't set immutable config"),
        (["save", ""], "CONFIG SET failed (possibly related to argument 'save') - can't set immutable config"),
        (["requirepass", "x"], "CONFIG SET failed (possibly related to argument 'requirepass') - can't set immutable"),
        (["maxclients", "1", "MAXCLIENTS", "2"], "CONFIG SET failed (possibly related to argument 'maxclients') - dup"),
        (["maxclients", "x"], "CONFIG SET failed (possibly related to argument 'maxclients') - argument: expected"),
        (["maxclients", "0"], "CONFIG SET failed (possibly related to argument 'maxclients') - argument: expected"),
        (["maxclients", ""], "CONFIG SET failed (possibly related to argument 'maxclients') - argument: expected"),
        (["timeout", "nan"], "CONFIG SET failed (possibly related to argument 'timeout') - argument: expected"),
        (["timeout", "inf"], "CONFIG SET failed (possibly related to argument 'timeout') - argument: expected"),
        (["max-sending", "-1"], "CONFIG SET failed (possibly related to argument 'max-sending') - argument: expected"),
        (["max-sessions", b"\xff"], "CONFIG SET failed (possibly related to argument 'max-sessions') - argument: exp"),
    ],
)
async def test_set_is_all_or_nothing(harness, args, error):
    before = harness.services.config
    for given in (args, ["send-timeout", "5", *args]):
        reply = await harness.call("CONFIG", "SET", *given)
        assert reply.code == "ERR"
        assert reply.text.startswith(error)
    assert harness.services.config is before


async def test_set_needs_a_pair(harness):
    assert await harness.call("CONFIG", "SET", "maxclients") == ErrorReply(
        "ERR", "wrong number of arguments for 'config|set' command"
    )


async def test_no_password_enters_the_slow_log():
    harness = make_harness(Config(slowlog_slower_than_us=0))
    await harness.call("CONFIG", "SET", "timeout", "3", "RequirePass", "hunter2")
    await harness.call("AUTH", "default", "hunter2")
    await harness.call("HELLO", "3", "AUTH", "default", "hunter2")
    await harness.call("MULTI")
    await harness.call("AUTH", "default", "hunter2")
    await harness.call("EXEC")
    entries = await harness.call("SLOWLOG", "GET", -1)
    assert [b"CONFIG", b"SET", b"timeout", b"3", b"RequirePass", b"(redacted)"] in [entry[3] for entry in entries]
    assert {entry[3][0] for entry in entries} >= {b"AUTH", b"HELLO", b"CONFIG"}
    assert b"hunter2" not in repr(entries).encode()


async def test_resetstat(harness):
    await harness.call("PING")
    await harness.call("NOSUCH")
    assert "cmdstat_ping:calls=1," in await harness.call("INFO", "commandstats")
    assert await harness.call("CONFIG", "RESETSTAT") == OK
    assert "cmdstat_ping" not in await harness.call("INFO", "commandstats")
    assert "errorstat" not in await harness.call("INFO", "errorstats")


def test_every_live_option_is_a_number_or_choice():
    """CONFIG SET checks ranges and choices only, so a live option has one of them."""
    for field in fields():
        if field.metadata["mutable"]:
            assert field.metadata["choices"] or field.metadata["low"] is not None, field.name
