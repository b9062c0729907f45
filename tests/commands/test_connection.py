"""HELLO, AUTH and the other commands about the connection itself, without sockets."""

import pytest

from pion.config import REDIS_VERSION, Config
from pion.replies import OK, ErrorReply, Map, Simple
from pion.testing import Harness, make_harness

WRONG = ErrorReply("WRONGPASS", "invalid username-password pair or user is disabled.")
LARGE = memoryview(b"x" * 40_000)


@pytest.fixture
def guarded() -> Harness:
    return make_harness(Config(requirepass="correct horse"))


async def test_hello_describes_the_server_and_keeps_the_protocol(harness):
    reply = await harness.call("HELLO")
    assert isinstance(reply, Map)
    fields = dict(reply.pairs)
    modules = fields.pop("modules")
    assert fields == {
        "server": "pion",
        "version": REDIS_VERSION,
        "proto": 2,
        "id": harness.context.session.id,
        "mode": "standalone",
        "role": "master",
    }
    assert [dict(module.pairs)["name"] for module in modules][:3] == ["connection", "server", "stats"]


@pytest.mark.parametrize("proto", [3, 2])
async def test_hello_changes_the_protocol(harness, proto):
    reply = await harness.call("hello", proto)
    assert dict(reply.pairs)["proto"] == proto == harness.context.session.resp


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["4"], ErrorReply("NOPROTO", "unsupported protocol version")),
        (["1"], ErrorReply("NOPROTO", "unsupported protocol version")),
        (["-3"], ErrorReply("NOPROTO", "unsupported protocol version")),
        (["x"], ErrorReply("ERR", "Protocol version is not an integer or out of range")),
        (["3.0"], ErrorReply("ERR", "Protocol version is not an integer or out of range")),
        (["9" * 40], ErrorReply("ERR", "Protocol version is not an integer or out of range")),
        (["3", "FOO"], ErrorReply("ERR", "Syntax error in HELLO option 'FOO'")),
        (["3", "AUTH", "u"], ErrorReply("ERR", "Syntax error in HELLO option 'AUTH'")),
        (["3", "SETNAME"], ErrorReply("ERR", "Syntax error in HELLO option 'SETNAME'")),
        (
            ["3", "SETNAME", "a b"],
            ErrorReply("ERR", "Client names cannot contain spaces, newlines or special characters."),
        ),
        (["3", "AUTH", "nobody", "x"], WRONG),
    ],
)
async def test_refused_hello_changes_nothing(harness, args, error):
    assert await harness.call("HELLO", *args) == error
    assert (harness.context.session.resp, harness.context.session.name) == (2, b"")


async def test_hello_logs_in_and_names(guarded):
    refused = await guarded.call("HELLO", 3)
    assert refused.code == "NOAUTH"
    assert refused.text.startswith("HELLO must be called with the client already authenticated")
    assert await guarded.call("HELLO", 3, "AUTH", "default", "wrong", "SETNAME", "me") == WRONG
    assert (guarded.context.session.resp, guarded.context.session.name) == (2, b"")
    reply = await guarded.call("HELLO", 3, "SETNAME", "me", "AUTH", "default", "correct horse")
    assert dict(reply.pairs)["proto"] == 3
    assert guarded.context.session.name == b"me"
    assert await guarded.call("PING") == Simple("PONG")


async def test_auth_with_and_without_the_user(guarded):
    assert (await guarded.call("PING")).code == "NOAUTH"
    assert await guarded.call("AUTH", "correct") == WRONG
    assert await guarded.call("AUTH", "default", "") == WRONG
    assert await guarded.call("AUTH", "Default", "correct horse") == WRONG
    assert await guarded.call("AUTH", "nobody", "correct horse") == WRONG
    assert await guarded.call("AUTH", LARGE, LARGE) == WRONG
    assert (await guarded.call("PING")).code == "NOAUTH"
    assert await guarded.call("AUTH", "correct horse") == OK
    assert await guarded.call("PING") == Simple("PONG")
    # A later failure does not log out.
    assert await guarded.call("AUTH", "wrong") == WRONG
    assert await guarded.call("PING") == Simple("PONG")
    assert await guarded.client().call("AUTH", "default", "correct horse") == OK


async def test_auth_without_a_configured_password(harness):
    reply = await harness.call("AUTH", "x")
    assert reply.text.startswith("AUTH <password> called without any password configured for the default user.")
    assert await harness.call("AUTH", "default", "anything") == OK
    assert await harness.call("AUTH", "a", "b", "c") == ErrorReply("ERR", "syntax error")
    assert await harness.call("AUTH") == ErrorReply("ERR", "wrong number of arguments for 'auth' command")


async def test_password_of_any_bytes(harness):
    guarded = make_harness(Config(requirepass="pässword\twith spaces"))
    assert await guarded.call("AUTH", "pässword\twith spaces") == OK
    assert await guarded.call("AUTH", b"\xff\xfe") == WRONG


async def test_ping_and_echo(harness):
    assert await harness.call("ping") == Simple("PONG")
    assert await harness.call("PING", b"\x00\r\n") == b"\x00\r\n"
    assert await harness.call("PING", "a", "b") == ErrorReply("ERR", "wrong number of arguments for 'ping' command")
    assert await harness.call("ECHO", "") == b""
    assert await harness.call("ECHO", LARGE) == LARGE
    assert await harness.call("ECHO") == ErrorReply("ERR", "wrong number of arguments for 'echo' command")


@pytest.mark.parametrize("index", ["1", "-1", "16", str(2**31 - 1)])
async def test_select_knows_one_database(harness, index):
    assert await harness.call("SELECT", 0) == OK
    assert await harness.call("SELECT", index) == ErrorReply("ERR", "DB index is out of range")


@pytest.mark.parametrize("index", ["", "x", "0x0", "1.0", " 0", str(10**19), LARGE])
async def test_select_of_what_is_no_integer(harness, index):
    assert await harness.call("SELECT", index) == ErrorReply("ERR", "value is not an integer or out of range")


@pytest.mark.parametrize("index", [str(2**31), str(-(2**31) - 1), str(2**63 - 1)])
async def test_select_of_what_is_no_int(harness, index):
    assert await harness.call("SELECT", index) == ErrorReply(
        "ERR", "value is out of range, value must between -2147483648 and 2147483647"
    )


async def test_quit_closes_after_its_reply(harness):
    assert await harness.call("QUIT", "ignored") == OK
    assert harness.context.session.closing


async def test_reset_puts_the_connection_back(guarded):
    session = guarded.context.session
    await guarded.call("HELLO", 3, "AUTH", "default", "correct horse", "SETNAME", "me")
    await guarded.call("CLIENT", "NO-EVICT", "ON")
    await guarded.call("CLIENT", "REPLY", "OFF")
    await guarded.call("MULTI")
    assert await guarded.call("RESET") == Simple("RESET")
    assert (session.resp, session.name, session.transaction) == (2, b"", None)
    assert not session.authenticated
    assert not session.reply_off
    assert not session.no_evict
    assert (await guarded.call("PING")).code == "NOAUTH"
