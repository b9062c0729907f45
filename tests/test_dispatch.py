"""Dispatch: order of the checks, errors as replies, transactions, accounting. No sockets, no storage."""

from __future__ import annotations

import attrs
import pytest
import trio

from pion.clients import ClientTable
from pion.command import Command, Flag
from pion.config import Config
from pion.context import Context, Services, Session
from pion.dispatch import Dispatcher
from pion.errors import BusyError, CommandError
from pion.limits import COMMANDS_PER_TURN
from pion.monitor import Monitor
from pion.receipt import Receipt
from pion.registry import Registry
from pion.replies import OK, QUEUED, Blob, ErrorReply, Simple
from pion.testing import FakeClock


@attrs.define(eq=False)
class Bench:
    """A dispatcher over four small commands, and the context of one client."""

    context: Context
    dispatcher: Dispatcher
    monitor: Monitor
    ran: list[bytes]

    async def call(self, *argv: bytes):
        return await self.dispatcher.execute(self.context, list(argv))


def make_bench(*, authenticated: bool = True, **config) -> Bench:
    ran: list[bytes] = []

    async def echo(context, argv):
        ran.append(argv[-1])
        return argv[-1]

    async def busy(context, argv):
        raise BusyError("being filled")

    async def value(context, argv):
        return ErrorReply("MINE", "as a value")

    async def odd(context, argv):
        return [{"a": 1}]

    async def text(context, argv):
        return ["x" * int(argv[1])]

    async def stored(context, argv):
        return Blob([bytes(100_000)], 100_000)

    async def broken(context, argv):
        raise ZeroDivisionError("secret detail")

    async def begin(context, argv):
        from pion.context import Transaction

        context.session.transaction = Transaction()
        return OK

    async def execute(context, argv):
        return await context.dispatch.execute_queued(context)

    def row(name, arity, handler, flags=Flag.NONE):
        return Command(name=name, arity=arity, handler=handler, flags=flags, summary="s", since="1")

    registry = Registry()
    registry.add(
        "test",
        [
            row("ECHO", 2, echo),
            row("OPEN", -1, echo, Flag.NO_AUTH),
            row("BUSY", 1, busy),
            row("VALUE", 1, value),
            row("ODD", 1, odd),
            row("TEXT", 2, text),
            row("STORED", 1, stored),
            row("BROKEN", 1, broken),
            row("BEGIN", 1, begin, Flag.NO_MULTI),
            row("EXEC", 1, execute, Flag.NO_MULTI),
            row("BOX", -2, None),
            row("BOX ONE", 3, echo),
        ],
    )
    registry.check()
    settings = Config(**config)
    monitor = Monitor(slower_than_us=settings.slowlog_slower_than_us, max_len=settings.slowlog_max_len)
    services = Services(
        config=settings,
        clock=FakeClock(),
        registry=registry,
        vstore=None,
        budget=None,
        receipt=Receipt(),
        clients=ClientTable(),
        monitor=monitor,
        started_s=0.0,
    )
    dispatcher = Dispatcher(registry, monitor)
    session = Session(id=1, addr="a:1", laddr="b:2", authenticated=authenticated)
    return Bench(Context(session, services, dispatcher), dispatcher, monitor, ran)


@pytest.mark.parametrize("name", [b"ECHO", b"echo", b"eChO"])
async def test_names_are_case_insensitive(name: bytes) -> None:
    assert await make_bench().call(name, b"x") == b"x"


async def test_unknown_command_text() -> None:
    reply = await make_bench().call(b"nope", b"a", b"b\r\n")
    assert reply == ErrorReply("ERR", "unknown command 'nope', with args beginning with: 'a' 'b\\r\\n' ")


async def test_unknown_command_with_a_payload_as_its_name() -> None:
    reply = await make_bench().call(memoryview(bytearray(b"x" * 100_000)))
    assert reply.text.startswith("unknown command 'xxx")
    assert len(reply.text) < 300


@pytest.mark.parametrize("argv", [(b"echo",), (b"echo", b"1", b"2")])
async def test_arity(argv: tuple[bytes, ...]) -> None:
    assert await make_bench().call(*argv) == ErrorReply("ERR", "wrong number of arguments for 'echo' command")


async def test_arity_before_authentication_before_the_handler() -> None:
    bench = make_bench(authenticated=False)
    assert (await bench.call(b"ECHO")).text.startswith("wrong number")
    assert await bench.call(b"ECHO", b"x") == ErrorReply("NOAUTH", "Authentication required.")
    assert await bench.call(b"OPEN") == b"OPEN"
    assert bench.ran == [b"OPEN"]


async def test_subcommands() -> None:
    bench = make_bench()
    assert await bench.call(b"box", b"one", b"x") == b"x"
    assert (await bench.call(b"box", b"one")).text == "wrong number of arguments for 'box|one' command"
    assert (await bench.call(b"box", b"two")).text == "unknown subcommand 'two'. Try BOX HELP."
    assert (await bench.call(b"box")).text == "wrong number of arguments for 'box' command"


async def test_errors_become_replies(caplog: pytest.LogCaptureFixture) -> None:
    bench = make_bench()
    assert await bench.call(b"BUSY") == ErrorReply("BUSY", "being filled")
    reply = await bench.call(b"BROKEN")
    assert reply == ErrorReply("ERR", "internal error in BROKEN (plugin test); see the server's log")
    assert "secret detail" in caplog.text
    assert bench.monitor.counter("broken").failed == 1


async def test_transaction_runs_in_order() -> None:
    bench = make_bench()
    assert await bench.call(b"BEGIN") is OK
    assert await bench.call(b"ECHO", b"1") is QUEUED
    assert await bench.call(b"BUSY") is QUEUED
    assert await bench.call(b"BOX", b"ONE", b"2") is QUEUED
    assert bench.ran == []
    assert await bench.call(b"EXEC") == [b"1", ErrorReply("BUSY", "being filled"), b"2"]
    assert bench.ran == [b"1", b"2"]
    assert (await bench.call(b"EXEC")).text == "EXEC without MULTI"


@pytest.mark.parametrize("bad", [(b"NOPE",), (b"ECHO",), (b"BOX", b"TWO")])
async def test_a_command_that_could_not_be_queued_aborts_the_transaction(bad: tuple[bytes, ...]) -> None:
    bench = make_bench()
    await bench.call(b"BEGIN")
    await bench.call(b"ECHO", b"1")
    assert isinstance(await bench.call(*bad), ErrorReply)
    assert (await bench.call(b"EXEC")).code == "EXECABORT"
    assert bench.ran == []
    assert await bench.call(b"ECHO", b"after") == b"after"


async def test_the_queue_is_bounded() -> None:
    bench = make_bench(max_queued_commands=2)
    await bench.call(b"BEGIN")
    replies = [await bench.call(b"ECHO", b"x") for _ in range(3)]
    assert replies[:2] == [QUEUED, QUEUED]
    assert replies[2].text.startswith("MULTI queue is full (2 commands")
    assert (await bench.call(b"EXEC")).code == "EXECABORT"


async def test_slow_commands_are_remembered_without_secrets() -> None:
    bench = make_bench(slowlog_slower_than_us=0)
    await bench.call(b"ECHO", b"x" * 1000)
    await bench.call(b"OPEN", b"password")
    newest, oldest = bench.monitor.slow(-1)
    assert newest.argv == (b"OPEN",)
    assert oldest.argv == (b"ECHO", b"x" * 128 + b"... (872 more bytes)")
    assert bench.monitor.counter("echo").calls == 1


async def test_cancelled_commands_are_not_swallowed() -> None:
    bench = make_bench()

    async def forever(context, argv):
        await trio.sleep_forever()

    registry = Registry()
    registry.add("test", [Command(name="WAIT", arity=1, handler=forever, summary="s", since="1")])
    dispatcher = Dispatcher(registry, bench.monitor)
    with trio.move_on_after(0.01) as scope:
        await dispatcher.execute(bench.context, [b"WAIT"])
    assert scope.cancelled_caught


def test_command_error_is_not_a_base_exception() -> None:
    assert issubclass(BusyError, CommandError)
    assert Simple("x") != OK


async def test_an_error_returned_as_a_value_counts_as_one() -> None:
    bench = make_bench()
    assert await bench.call(b"VALUE") == ErrorReply("MINE", "as a value")
    assert bench.monitor.errors == {"MINE": 1}
    assert bench.monitor.counter("value").failed == 1


async def test_exec_lets_others_run() -> None:
    """Without a pause inside EXEC the other task would get no turn before the replies are there."""
    bench = make_bench(max_queued_commands=1000)
    await bench.call(b"BEGIN")
    for _ in range(1000):
        await bench.call(b"ECHO", b"1")
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        assert len(await bench.call(b"EXEC")) == 1000
        nursery.cancel_scope.cancel()
    assert turns >= 1000 // COMMANDS_PER_TURN - 1  # which of two tasks runs first after a pause is chance


async def test_exec_bounds_the_replies_it_keeps() -> None:
    bench = make_bench(max_exec_reply_bytes=100_000)
    await bench.call(b"BEGIN")
    for request in ([b"TEXT", b"60000"], [b"TEXT", b"60000"], [b"STORED"], [b"TEXT", b"1000"], [b"ECHO", b"last"]):
        assert await bench.call(*request) is QUEUED
    first, second, third, *rest = await bench.call(b"EXEC")
    assert first == ["x" * 60_000]
    text = "TEXT ran, but its reply is left out: EXEC keeps at most 100000 bytes of replies"
    assert second == ErrorReply("OOM", text)
    assert third.nbytes == 100_000  # stored rows are not the reply's own memory
    assert rest == [["x" * 1000], b"last"]
    assert bench.ran == [b"last"]
    assert bench.monitor.errors == {"OOM": 1}
    assert not bench.context.session.in_exec


async def test_exec_answers_for_a_command_that_returns_no_reply() -> None:
    bench = make_bench()
    await bench.call(b"BEGIN")
    await bench.call(b"ODD")
    await bench.call(b"ECHO", b"1")
    text = "internal error in ODD (plugin test): dict is not a reply"
    assert await bench.call(b"EXEC") == [ErrorReply("ERR", text), b"1"]
