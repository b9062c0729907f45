"""Replies that are left to whoever completes them: order, what else may come, accounts, the end of the connection.

Where a socket decides what happens (a full buffer, a wake-up that nobody waits for) there is one; else it is memory.
"""

from __future__ import annotations

import gc
import socket
import weakref
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pion.errors import CommandError
from pion.later import Later
from pion.limits import COMMANDS_PER_TURN, INLINE_ARG_BYTES
from pion.net import connection
from pion.net.connection import Connection
from pion.net.lanes import BinaryLane, MakeLane, RespLane
from pion.net.table import Phase
from pion.net.transport import SocketTransport
from pion.replies import BinaryReply, ErrorReply
from tests.net.support import CODES, Client, Rig, request
from tests.net.test_binary_lane import ask as frame
from tests.net.test_binary_lane import done, packed
from tests.net.test_unlogged import AnnouncingLog

BIG = 8 << 20
"""More than the system's buffers of a socket hold."""


@pytest.fixture(autouse=True)
def no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn never ends, however busy the machine is."""
    monkeypatch.setattr(connection, "TURN_NS", 10**12)


class Desk:
    """What SET does in these tests, on either lane: its reply is completed by the test, in any order."""

    def __init__(self, rig: Rig, *, asks: bool = True) -> None:
        self.rig = rig
        self.open: list[Later] = []
        self.withdrawn: list[Later] = []
        self.asks = asks
        """The handler asks whether it may return a `Later`; an error if not, so that a test sees it."""
        rig.dispatcher._table[b"SET"].handler = self._set
        rig.dispatcher._packed[CODES["SET"]].handler = self._packed_set

    async def _set(self, context: Any, argv: Any) -> Any:
        return self._new(context)

    async def _packed_set(self, context: Any, asked: Any) -> Any:
        later = self._new(context)
        later.make = lambda found: BinaryReply(body=found) if isinstance(found, bytes) else found
        return later

    def _new(self, context: Any) -> Later:
        if self.asks and not context.session.may_leave:
            raise CommandError("this reply can't be left")
        later = Later()
        later.withdraw = lambda: self.withdrawn.append(later)
        self.open.append(later)
        return later

    @property
    def usage(self) -> tuple[int, int, int]:
        """Calls of the command, how many of them failed, and how many are accounted for with their time."""
        counter = self.rig.monitor.counter("set")
        return counter.calls, counter.failed, len(self.rig.monitor.slow(-1))


@attrs.frozen
class Speech:
    """Requests and replies of one lane."""

    make_lane: MakeLane

    @property
    def resp(self) -> bool:
        return self.make_lane is RespLane

    def set(self, number: int = 1) -> bytes:
        return request(b"SET", b"k", b"v") if self.resp else frame("SET", number, packed(b"k"), b"v")

    def ping(self, number: int = 1) -> bytes:
        return request(b"PING") if self.resp else frame("PING", number)

    def pong(self, number: int = 1) -> bytes:
        return b"+PONG\r\n" if self.resp else done("PING", number)

    def bulk(self, data: bytes, number: int = 1) -> bytes:
        return b"$%d\r\n%b\r\n" % (len(data), data) if self.resp else done("SET", number, 0, b"", data)

    def error(self, text: bytes, number: int = 1, code: bytes = b"ERR") -> bytes:
        line = code + b" " + text
        return b"-" + line + b"\r\n" if self.resp else done("SET", number, 1, b"", line)


@pytest.fixture(params=[RespLane, BinaryLane], ids=["resp", "binary"])
def speech(request: pytest.FixtureRequest) -> Speech:
    return Speech(request.param)


def running(**options: Any) -> Any:
    return Rig.running(**options)


def opened(rig: Rig, **how: Any) -> Desk:
    rig.monitor.slower_than_ns = 0  # each command that is accounted for is in the slow log
    return Desk(rig, **how)


async def left(client: Client, *data: bytes) -> None:
    """Send something; then the connection waits, with the reply to the last request left."""
    await client.send(*data)
    await wait_all_tasks_blocked()
    assert client.connection._leaving.some


class Wired:
    """A client with a real socket, whose connection is served by a rig."""

    def __init__(self, rig: Rig, make_lane: MakeLane = RespLane) -> None:
        ours, theirs = socket.socketpair()
        self.stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        transport = SocketTransport(trio.socket.from_stdlib_socket(theirs))
        self.connection = Connection(transport, rig.services, rig.dispatcher, rig.table, make_lane)
        rig.nursery.start_soon(self.connection.run)

    async def __aenter__(self) -> Wired:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stream.aclose()

    async def expect(self, reply: bytes) -> None:
        received = bytearray()
        with trio.fail_after(10):
            while len(received) < len(reply):
                data = await self.stream.receive_some(len(reply) - len(received))
                assert data, f"the connection ended after {bytes(received[:100])!r}"
                received += data
        assert received == reply

    async def expect_end(self) -> None:
        with trio.fail_after(10):
            assert await self.stream.receive_some(1) == b""


# Sent by who completes it.


async def test_it_is_sent_without_the_connection_and_accounted_for_when_that_is_looked_at(speech: Speech) -> None:
    async with running() as rig:
        desk = opened(rig)
        client = rig.connect(make_lane=speech.make_lane)
        await left(client, speech.set(7))
        assert client.connection.phase is Phase.RUNNING  # no idle time while it is computed
        assert desk.usage == (1, 0, 0)
        before = client.connection.progress
        desk.open[0].complete(b"abc")
        # The connection's task had no turn since.
        assert client.transport.recv_nowait(1000) == speech.bulk(b"abc", 7)
        assert client.connection.phase is Phase.IDLE
        assert client.connection.progress > before
        rig.table._inspect(trio.current_time())
        assert desk.usage == (1, 0, 1)
        rig.table._inspect(trio.current_time())
        await client.send(speech.ping(8))
        await client.expect(speech.pong(8))
        assert desk.usage == (1, 0, 2)  # the second one is PING
        assert rig.monitor.counter("ping").calls == 1


async def test_accounted_for_when_the_next_request_comes(speech: Speech) -> None:
    async with running() as rig:
        desk = opened(rig)
        client = rig.connect(make_lane=speech.make_lane)
        for number in range(5):
            await left(client, speech.set(number))
            desk.open[number].complete(b"%d" % number)
            await client.expect(speech.bulk(b"%d" % number, number))
        assert desk.usage == (5, 0, 4)
        await client.send(speech.ping())
        await client.expect(speech.pong())
        assert desk.usage == (5, 0, 6)


@pytest.mark.usefixtures("no_collector")
async def test_an_idle_client_keeps_nothing(speech: Speech) -> None:
    class Held:
        pass

    async with running() as rig:
        desk = opened(rig)
        client = rig.connect(make_lane=speech.make_lane)
        await left(client, speech.set())
        held = Held()
        gone = weakref.ref(held)
        desk.open[0].withdraw = lambda held=held: None
        desk.open.pop().complete(b"x")
        del held
        await client.expect(speech.bulk(b"x"))
        assert gone() is not None
        rig.table._inspect(trio.current_time())
        assert gone() is None
        assert not client.connection._leaving.some


@pytest.fixture
def no_collector():
    """What only the collector of cycles would find counts as kept."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# Order.


async def test_in_a_pipeline_each_reply_waits_for_those_before_it(speech: Speech) -> None:
    async with running() as rig:
        desk = opened(rig)
        client = rig.connect(make_lane=speech.make_lane)
        await client.send(speech.ping(1), speech.set(2), speech.ping(3), speech.set(4), speech.ping(5), speech.set(6))
        for number in (2, 4, 6):
            await wait_all_tasks_blocked()
            assert len(desk.open) == number // 2
            assert not client.connection._leaving.some  # others have to go with it
            desk.open[-1].complete(b"%d" % number)
        await client.expect(
            b"".join(speech.pong(n - 1) + speech.bulk(b"%d" % n, n) for n in (2, 4, 6)),
        )
        assert desk.usage == (3, 0, 6)


@pytest.mark.parametrize("cut", [1, 10, 10**6], ids=["a byte", "some", "whole"])
async def test_what_comes_meanwhile_is_answered_behind_it(speech: Speech, cut: int) -> None:
    async with running() as rig:
        desk = opened(rig)
        client = rig.connect(make_lane=speech.make_lane)
        await left(client, speech.set(1))
        more = speech.ping(2) + speech.set(3)
        await client.send(more[:cut])
        await wait_all_tasks_blocked()
        assert len(desk.open) == 1
        assert client.transport.recv_nowait(1) is None
        desk.open[0].complete(b"one")
        await client.expect(speech.bulk(b"one", 1))
        await client.send(more[cut:])
        await wait_all_tasks_blocked()
        desk.open[1].complete(b"two")
        await client.expect(speech.pong(2) + speech.bulk(b"two", 3))


async def test_the_last_of_a_turn_is_not_left_if_more_was_received() -> None:
    """Nothing stands before it in the turn that would be sent with it."""
    async with running() as rig:
        desk = opened(rig)
        client = rig.connect()
        last = request(b"SET", b"k", b"v") + request(b"PING")
        await client.send(request(b"NONE") * (COMMANDS_PER_TURN - 1), last)
        await wait_all_tasks_blocked()
        assert client.transport.recv_nowait(100) is None
        desk.open[0].complete(b"x")
        await client.expect(b"$1\r\nx\r\n+PONG\r\n")


async def test_completed_before_it_could_be_left(speech: Speech) -> None:
    async with running() as rig:
        desk = opened(rig)
        real = desk._new

        def at_once(context: Any) -> Later:
            later = real(context)
            later.complete(b"now")
            return later

        desk._new = at_once  # type: ignore[method-assign]
        client = rig.connect(make_lane=speech.make_lane)
        await client.send(speech.set(1), speech.ping(2))
        await client.expect(speech.bulk(b"now", 1) + speech.pong(2))
        await client.send(speech.set(3))
        await client.expect(speech.bulk(b"now", 3))
        assert desk.usage == (2, 0, 3)


# What can't be sent by who completes it.


@pytest.mark.parametrize("raised", [False, True])
async def test_an_error_is_answered_and_counted_once(speech: Speech, raised: bool) -> None:
    async with running() as rig:
        desk = opened(rig)
        client = rig.connect(make_lane=speech.make_lane)
        await left(client, speech.set(1))
        if raised:
            desk.open[0].complete(None, CommandError("refused"))
        else:
            desk.open[0].complete(ErrorReply("ERR", "refused"))
        await client.expect(speech.error(b"refused", 1))
        assert desk.usage == (1, 1, 1)
        assert rig.monitor.errors == {"ERR": 1}


@pytest.mark.parametrize("how", ["no reply", "can't be made", "failed"])
async def test_a_mistake_is_an_internal_error_of_its_request_only(speech: Speech, how: str) -> None:
    async with running() as rig:
        desk = opened(rig)
        client = rig.connect(make_lane=speech.make_lane)
        await left(client, speech.set(1))
        if how == "can't be made":
            desk.open[0].make = lambda found: found / 0
            desk.open[0].complete(1)
        elif how == "failed":
            desk.open[0].complete(None, RuntimeError("a mistake"))
        else:
            desk.open[0].complete(object())
        assert b"ERR internal error in SET (plugin test)" in await client.transport.receive_some()
        await client.send(speech.ping(2))
        await client.expect(speech.pong(2))
        assert desk.usage == (1, 1, 2)
        assert rig.monitor.errors == {"ERR": 1}


async def test_what_the_system_does_not_take_at_once_is_sent_by_the_connection(speech: Speech) -> None:
    """The client reads nothing for a while, and has asked for something else already."""
    async with running() as rig:
        desk = opened(rig)
        async with Wired(rig, speech.make_lane) as client:
            await client.stream.send_all(speech.set(1))
            await wait_all_tasks_blocked()
            data = bytes(range(256)) * (BIG // 256)
            desk.open[0].complete(data)
            await client.stream.send_all(speech.ping(2))
            with trio.fail_after(10):
                while client.connection.phase is not Phase.SENDING:
                    await trio.lowlevel.checkpoint()
            await client.expect(speech.bulk(data, 1) + speech.pong(2))
            assert desk.usage == (1, 0, 2)


async def test_a_wake_up_that_comes_late_breaks_nothing(speech: Speech) -> None:
    """The connection was woken by a request, took the reply back, and waits for the client to read."""
    async with running() as rig:
        desk = opened(rig)
        async with Wired(rig, speech.make_lane) as client:
            await client.stream.send_all(speech.set(1))
            await wait_all_tasks_blocked()
            tell = desk.open[0]._tell
            assert tell is not None
            data = bytes(BIG)
            desk.open[0].complete(data)
            with trio.fail_after(10):
                while client.connection.phase is not Phase.SENDING:
                    await trio.lowlevel.checkpoint()
            tell()
            await wait_all_tasks_blocked()
            await client.expect(speech.bulk(data, 1))
            await client.stream.send_all(speech.ping(2))
            await client.expect(speech.pong(2))


@pytest.mark.parametrize("error", [None, CommandError("refused")])
async def test_a_wake_up_that_comes_early_is_not_lost(
    speech: Speech, error: CommandError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is complete while the connection gives others their turn, before it waits for its client."""
    async with running() as rig:
        desk = opened(rig)
        real = Connection._yield

        async def others_first(self: Connection) -> None:
            await real(self)
            if desk.open and not desk.open[0].over:
                if error is None:
                    rig.table.draining = True  # then too the connection has to be told
                desk.open[0].complete(b"x", error)
                # What is asked of the loop is done in order: behind this the connection has been told.
                told = trio.Event()
                trio.lowlevel.current_trio_token().run_sync_soon(told.set)
                await told.wait()

        monkeypatch.setattr(Connection, "_yield", others_first)
        monkeypatch.setattr(connection, "TURN_NS", 0)  # so that it gives them a turn
        async with Wired(rig, speech.make_lane) as client:
            await wait_all_tasks_blocked()
            await client.stream.send_all(speech.set(1))
            await client.expect(speech.bulk(b"x", 1) if error is None else speech.error(b"refused", 1))
            if error is None:
                await client.expect_end()
            assert desk.usage == (1, int(error is not None), 1)


async def test_a_client_that_is_gone_is_noticed_by_its_connection(speech: Speech) -> None:
    async with running() as rig:
        desk = opened(rig)
        client = rig.connect(make_lane=speech.make_lane)
        await left(client, speech.set(1))
        client.transport._incoming.break_()  # it reads nothing any more; that it has gone is not heard yet
        desk.open[0].complete(b"x")
        await wait_all_tasks_blocked()
        assert rig.closed == [client.connection.session.id]


# The end.


async def test_half_closed_behind_its_request_a_client_gets_the_reply(speech: Speech) -> None:
    async with running() as rig:
        desk = opened(rig)
        client = rig.connect(make_lane=speech.make_lane)
        await left(client, speech.set(1))
        client.transport.finish_sending()
        await wait_all_tasks_blocked()
        assert rig.closed == []
        desk.open[0].complete(b"x")
        await client.expect(speech.bulk(b"x", 1))
        await client.expect_end()
        assert desk.usage == (1, 0, 1)


@pytest.mark.parametrize("error", [None, CommandError("refused")])
async def test_draining_waits_for_the_reply(speech: Speech, error: CommandError | None) -> None:
    async with running() as rig:
        desk = opened(rig)
        client, idle = rig.connect(make_lane=speech.make_lane), rig.connect(make_lane=speech.make_lane)
        await left(client, speech.set(1))
        rig.table.drain()
        await idle.expect_end()
        await wait_all_tasks_blocked()
        assert client.connection.session.id not in rig.closed
        desk.open[0].complete(b"x", error)
        await client.expect(speech.bulk(b"x", 1) if error is None else speech.error(b"refused", 1))
        await client.expect_end()
        assert desk.usage == (1, int(error is not None), 1)


async def test_draining_that_began_before_the_reply_was_left(speech: Speech) -> None:
    async with running() as rig:
        desk = opened(rig)
        client = rig.connect(make_lane=speech.make_lane)
        await wait_all_tasks_blocked()
        await client.send(speech.set(1))
        rig.table.draining = True
        await wait_all_tasks_blocked()
        desk.open[0].complete(b"x")
        await client.expect(speech.bulk(b"x", 1))
        await client.expect_end()


@pytest.mark.parametrize("end", ["drain", "kill", "idle"])
async def test_the_end_behind_a_reply_that_was_sent_loses_no_account(speech: Speech, end: str) -> None:
    async with running() as rig:
        desk = opened(rig)
        client = rig.connect(make_lane=speech.make_lane)
        await left(client, speech.set(1))
        desk.open[0].complete(b"x")
        {"drain": rig.table.drain, "kill": client.connection.kill, "idle": client.connection.close_idle}[end]()
        await client.expect(speech.bulk(b"x", 1))
        await client.expect_end()
        assert desk.usage == (1, 0, 1)
        assert desk.withdrawn == []


@pytest.mark.parametrize("end", ["kill", "cancel"])
@pytest.mark.parametrize("taken_back", [False, True])
async def test_whoever_is_killed_asks_for_nothing_any_more(speech: Speech, end: str, taken_back: bool) -> None:
    async with running() as rig:
        desk = opened(rig)
        async with trio.open_nursery() as nursery:
            rig.nursery, outer = nursery, rig.nursery
            client = rig.connect(make_lane=speech.make_lane)
            await left(client, speech.set(1))
            if taken_back:
                await client.send(speech.ping(2))
                await wait_all_tasks_blocked()
            if end == "kill":
                client.connection.kill()
            else:
                nursery.cancel_scope.cancel()
        rig.nursery = outer
        assert desk.withdrawn == desk.open
        desk.open[0].complete(b"never")
        await wait_all_tasks_blocked()
        await client.expect_end()
        assert rig.closed == [client.connection.session.id]
        assert desk.usage == (1, 0, 0)


# Where nothing may be left.


async def test_part_of_a_transaction_it_is_waited_for_even_if_the_handler_does_not_ask() -> None:
    async with running() as rig:
        desk = opened(rig, asks=False)
        client = rig.connect()
        await client.send(*map(request, [b"MULTI", b"PING"]), request(b"SET", b"k", b"v"), *map(request, [b"EXEC"]))
        await wait_all_tasks_blocked()
        assert not client.connection._leaving.some
        desk.open[0].complete(b"x")
        await client.expect(b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n+PONG\r\n$1\r\nx\r\n")
        assert desk.usage[:2] == (1, 0)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("mode", [b"OFF", b"SKIP"])
async def test_a_reply_that_is_not_wanted_is_not_left(mode: bytes, asks: bool) -> None:
    async with running() as rig:
        desk = opened(rig, asks=asks)
        client = rig.connect()
        await client.send(request(b"REPLY", mode), request(b"SET", b"k", b"v"))
        await wait_all_tasks_blocked()
        assert not client.connection._leaving.some
        await client.send(request(b"REPLY", b"ON"), request(b"PING"))
        await wait_all_tasks_blocked()
        if not asks:  # the handler that asks has refused
            assert client.transport.recv_nowait(100) is None  # the next command runs behind it
            desk.open[0].complete(b"x")
        await client.expect(b"+OK\r\n+PONG\r\n")
        assert desk.usage[:2] == (1, int(asks))


async def test_a_reply_that_the_log_must_have_first_is_not_left() -> None:
    async with running() as rig:
        desk, log = opened(rig), AnnouncingLog()

        async def promised(context: Any, argv: Any) -> Later:
            context.session.unlogged.append(log.wait_for(b"k"))
            return desk._new(context)

        rig.dispatcher._table[b"SET"].handler = promised
        client = rig.connect()
        await client.call(b"SET", b"k", b"v")
        await wait_all_tasks_blocked()
        desk.open[0].complete(b"x")
        await wait_all_tasks_blocked()
        assert client.transport.recv_nowait(100) is None
        log.write()
        await client.expect(b"$1\r\nx\r\n")


async def test_behind_a_store_without_reply_that_waits_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """That promises nothing to this client, and the reply needs no log."""
    async with running() as rig:
        desk, log = opened(rig), AnnouncingLog()

        async def store(context: Any, argv: Any) -> int:
            context.session.unlogged.append(log.wait_for(b"k"))
            return 1

        rig.dispatcher._table[b"DEL"].handler = store
        client = rig.connect()
        await client.send(request(b"REPLY", b"SKIP"), request(b"DEL", b"k"), request(b"SET", b"k", b"v"))
        await wait_all_tasks_blocked()
        desk.open[0].complete(b"x")
        log.write()
        await client.expect(b"$1\r\nx\r\n")
        await client.send(request(b"PING"))
        await client.expect(b"+PONG\r\n")


async def test_the_memory_of_a_large_request_is_kept_until_it_is_answered(speech: Speech) -> None:
    async with running() as rig:
        desk = opened(rig)
        client = rig.connect(make_lane=speech.make_lane)
        value = bytes(INLINE_ARG_BYTES + 1)
        large = request(b"SET", b"k", value) if speech.resp else frame("SET", 1, packed(b"k"), value)
        await client.send(large)
        await wait_all_tasks_blocked()
        assert not client.connection._leaving.some
        assert rig.table.budget.used == len(value)
        desk.open[0].complete(value)
        await client.expect(speech.bulk(value, 1))
        await wait_all_tasks_blocked()
        assert rig.table.budget.used == 0


async def test_before_a_request_without_memory(speech: Speech) -> None:
    async with running(max_receiving_bytes=1 << 20) as rig:
        desk = opened(rig)
        client = rig.connect(make_lane=speech.make_lane)
        value = bytes((1 << 20) + 1)
        large = request(b"SET", b"k", value) if speech.resp else frame("SET", 2, packed(b"k"), value)
        rig.nursery.start_soon(client.send, speech.set(1) + large)
        with trio.fail_after(10):
            while not desk.open:
                await trio.lowlevel.checkpoint()
        desk.open[0].complete(b"x")
        await client.expect(speech.bulk(b"x", 1))
        assert b"OOM no memory to receive" in await client.transport.receive_some()
        await client.send(speech.ping(3))
        await client.expect(speech.pong(3))


async def test_on_a_thread_with_a_connection_that_is_killed_meanwhile(speech: Speech) -> None:
    """Behind the kill the socket is closed, and its descriptor may be another client's: nothing may be sent there."""
    async with running() as rig:
        desk = opened(rig)
        rounds = 60
        for number in range(rounds):
            async with Wired(rig, speech.make_lane) as client:
                await client.stream.send_all(speech.set(number))
                while len(desk.open) == number:
                    await trio.lowlevel.checkpoint()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.to_thread.run_sync, desk.open[number].complete, b"%d" % number)
                    if number % 3:
                        await trio.lowlevel.checkpoint()
                    client.connection.kill()
                    other = Wired(rig, speech.make_lane)  # gets the descriptor that is free now
                    await other.stream.send_all(speech.ping(1000))
                await other.expect(speech.pong(1000))
                received = bytearray()
                with trio.fail_after(10):
                    while data := await client.stream.receive_some(1000):
                        received += data
                assert received in (b"", speech.bulk(b"%d" % number, number))
                await client.stream.aclose()
                await other.stream.aclose()
        with trio.fail_after(10):
            while len(rig.closed) < 2 * rounds:
                await trio.lowlevel.checkpoint()
