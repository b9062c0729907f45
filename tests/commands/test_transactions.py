"""MULTI, EXEC and DISCARD, without sockets."""

import pytest

from pion.config import Config
from pion.replies import OK, QUEUED, ErrorReply, Simple
from pion.testing import make_harness

ABORTED = ErrorReply("EXECABORT", "Transaction discarded because of previous errors.")


async def test_commands_run_in_order_at_exec(harness):
    assert await harness.call("MULTI") == OK
    assert await harness.call("ECHO", "a") == QUEUED
    assert await harness.call("CLIENT", "SETNAME", "later") == QUEUED
    assert harness.context.session.name == b""
    assert await harness.call("CLIENT", "GETNAME") == QUEUED
    assert await harness.call("EXEC") == [b"a", OK, b"later"]
    assert await harness.call("EXEC") == ErrorReply("ERR", "EXEC without MULTI")


async def test_empty_transaction(harness):
    await harness.call("MULTI")
    assert await harness.call("EXEC") == []


async def test_a_command_that_fails_leaves_the_others(harness):
    await harness.call("MULTI")
    await harness.call("SELECT", 7)
    await harness.call("PING")
    assert await harness.call("EXEC") == [ErrorReply("ERR", "DB index is out of range"), Simple("PONG")]


@pytest.mark.parametrize("refused", [["NOSUCH", "a"], ["ECHO"], ["CLIENT", "NOSUCH"], ["EXEC", "x"], ["MULTI", "x"]])
async def test_what_cannot_be_queued_aborts(harness, refused):
    await harness.call("MULTI")
    assert (await harness.call(*refused)).code == "ERR"
    assert await harness.call("CLIENT", "SETNAME", "never") == QUEUED
    assert await harness.call("EXEC") == ABORTED
    assert await harness.call("CLIENT", "GETNAME") is None


async def test_nested_multi_is_refused_and_loses_nothing(harness):
    await harness.call("MULTI")
    await harness.call("PING")
    assert await harness.call("MULTI") == ErrorReply("ERR", "MULTI calls can not be nested")
    assert await harness.call("EXEC") == [Simple("PONG")]


@pytest.mark.parametrize("refused", [["SHUTDOWN"], ["CLIENT", "REPLY", "ON"]])
async def test_commands_that_cannot_wait_for_exec(harness, refused):
    await harness.call("MULTI")
    assert await harness.call(*refused) == ErrorReply("ERR", "Command not allowed inside a transaction")
    assert await harness.call("EXEC") == ABORTED


async def test_discard(harness):
    assert await harness.call("DISCARD") == ErrorReply("ERR", "DISCARD without MULTI")
    await harness.call("MULTI")
    await harness.call("CLIENT", "SETNAME", "never")
    assert await harness.call("DISCARD") == OK
    assert await harness.call("CLIENT", "GETNAME") is None
    assert await harness.call("EXEC") == ErrorReply("ERR", "EXEC without MULTI")


async def test_quit_and_reset_run_at_once(harness):
    await harness.call("MULTI")
    await harness.call("PING")
    assert await harness.call("RESET") == Simple("RESET")
    assert await harness.call("EXEC") == ErrorReply("ERR", "EXEC without MULTI")
    await harness.call("MULTI")
    assert await harness.call("QUIT") == OK
    assert harness.context.session.closing


async def test_clients_have_their_own_transaction(harness):
    other = harness.client()
    await harness.call("MULTI")
    assert await other.call("PING") == Simple("PONG")
    assert await other.call("EXEC") == ErrorReply("ERR", "EXEC without MULTI")


async def test_queue_has_a_limit():
    harness = make_harness(Config(max_queued_commands=2))
    await harness.call("MULTI")
    assert await harness.call("PING") == await harness.call("PING") == QUEUED
    assert (await harness.call("PING")).text.startswith("MULTI queue is full")
    assert await harness.call("EXEC") == ABORTED


async def test_hello_and_auth_are_queued(harness):
    await harness.call("MULTI")
    assert await harness.call("HELLO", 3) == QUEUED
    assert await harness.call("AUTH", "default", "x") == QUEUED
    assert harness.context.session.resp == 2
    hello, auth = await harness.call("EXEC")
    assert (dict(hello.pairs)["proto"], auth) == (3, OK)
