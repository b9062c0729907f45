"""Replies wait for the log, a whole pipeline at once; what the log could not take is an error in its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from pion.errors import MisconfError
from pion.net import connection
from pion.net.table import Phase
from pion.replies import OK, Reply
from tests.net.support import Client, Rig, request


class Log:
    """Stands for the log: commands get a batch to wait for, and the test says when it is on disk."""

    def __init__(self) -> None:
        self.written = trio.Event()
        self.lost: set[bytes] = set()
        self.asked = 0

    def write(self) -> None:
        """All of it is on disk, or lost."""
        self.written.set()

    def wait_for(self, name: bytes) -> Waiting:
        self.asked += 1
        return Waiting(self, name)


class Waiting:
    def __init__(self, log: Log, name: bytes) -> None:
        self._log = log
        self._name = name

    def __await__(self):
        return self._wait().__await__()

    async def _wait(self) -> None:
        await self._log.written.wait()
        if self._name in self._log.lost:
            raise MisconfError("the log can't be written")


class AnnouncingLog(Log):
    """Its batches also call back, as those of the log do: then it sends replies itself."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks: list[Callable[[], None]] = []

    def write(self) -> None:
        super().write()
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()

    def wait_for(self, name: bytes) -> Waiting:
        self.asked += 1
        return AnnouncedWaiting(self, name)


class AnnouncedWaiting(Waiting):
    _log: AnnouncingLog

    @property
    def is_over(self) -> bool:
        return self._log.written.is_set()

    @property
    def error(self) -> str:
        return "lost" if self.is_over and self._name in self._log.lost else ""

    def refusal(self) -> MisconfError:
        return MisconfError("the log can't be written")

    def call_when_over(self, callback: Callable[[], None]) -> None:
        self._log.callbacks.append(callback)


@pytest.fixture(autouse=True)
def no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn never ends: on a busy machine a command may take longer, and its reply is then waited for at once."""
    monkeypatch.setattr(connection, "TURN_NS", 10**12)


@pytest.fixture(params=[Log, AnnouncingLog])
def log(request: pytest.FixtureRequest) -> Log:
    log: Log = request.param()
    return log


def keeping(rig: Rig, client: Client, log: Log) -> None:
    """Let SET promise what the log has not yet."""
    store = rig.store.set

    async def set_logged(context, argv) -> Reply:
        await store(context, argv)
        context.session.unlogged.append(log.wait_for(bytes(argv[1])))
        return OK

    rig.store.set = set_logged  # type: ignore[method-assign]
    client.connection._dispatcher.find([b"SET", b"", b""]).handler = set_logged


async def silent(client: Client) -> None:
    """Nothing is sent though the server had time."""
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert client.connection.sender.progress == 0


async def test_the_replies_of_a_pipeline_wait_together(log: Log) -> None:
    async with Rig.running() as rig:
        client = rig.connect()
        keeping(rig, client, log)
        await client.send(*(request(b"SET", b"%d" % number, b"x") for number in range(5)), request(b"PING"))
        await silent(client)
        assert log.asked == 5, "each command ran before the first was written"
        log.write()
        await client.expect(b"+OK\r\n" * 5 + b"+PONG\r\n")


async def test_a_reply_is_not_sent_early_by_a_command_that_follows_later(log: Log) -> None:
    async with Rig.running() as rig:
        client = rig.connect()
        keeping(rig, client, log)
        await client.call(b"SET", b"a", b"x")
        await silent(client)
        await client.call(b"PING")
        await silent(client)
        log.write()
        await client.expect(b"+OK\r\n+PONG\r\n")


async def test_what_was_lost_is_an_error_in_its_place(log: Log) -> None:
    async with Rig.running() as rig:
        client = rig.connect()
        keeping(rig, client, log)
        log.lost = {b"1", b"3"}
        log.write()
        await client.send(*(request(b"SET", b"%d" % number, b"x") for number in range(4)), request(b"GET", b"1"))
        error = b"-MISCONF the log can't be written\r\n"
        await client.expect(b"+OK\r\n" + error + b"+OK\r\n" + error + b"$1\r\nx\r\n")
        assert rig.monitor.errors["MISCONF"] == 2


async def test_more_than_a_turn_of_commands_is_settled_in_between(log: Log) -> None:
    async with Rig.running() as rig:
        client = rig.connect()
        keeping(rig, client, log)
        log.write()
        await client.send(*(request(b"SET", b"%d" % number, b"x") for number in range(1000)))
        await client.expect(b"+OK\r\n" * 1000)
        assert not client.connection._outbox.unlogged


async def test_a_payload_that_comes_slowly_does_not_hold_the_replies_before_it(log: Log) -> None:
    async with Rig.running() as rig:
        client = rig.connect()
        keeping(rig, client, log)
        log.write()
        long = request(b"SET", b"b", b"y" * 100_000)
        await client.send(request(b"SET", b"a", b"x"), long[:60_000])
        await client.expect(b"+OK\r\n")
        await client.send(long[60_000:])
        await client.expect(b"+OK\r\n")


async def test_payloads_of_a_pipeline_give_their_receive_memory_back(log: Log) -> None:
    async with Rig.running(max_receiving_bytes=1 << 20) as rig:
        client = rig.connect()
        keeping(rig, client, log)
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                log.write()
                pipeline = b"".join(request(b"SET", b"%d" % number, b"y" * 300_000) for number in range(20))
                nursery.start_soon(client.transport.send_all, pipeline)
                await client.expect(b"+OK\r\n" * 20)
        assert rig.table.budget.used == 0
        assert rig.table.statistics().receiving_refused == 0


async def test_the_end_of_the_stream_lets_the_replies_out(log: Log) -> None:
    async with Rig.running() as rig:
        client = rig.connect()
        keeping(rig, client, log)
        await client.call(b"SET", b"a", b"x")
        client.transport.finish_sending()
        log.write()
        await client.expect(b"+OK\r\n")
        await client.expect_end()


async def test_a_protocol_error_comes_after_what_was_promised(log: Log) -> None:
    async with Rig.running() as rig:
        client = rig.connect()
        keeping(rig, client, log)
        await client.send(request(b"SET", b"a", b"x"), b"*1\r\n!\r\n")
        await silent(client)
        log.write()
        await client.expect(b"+OK\r\n-ERR Protocol error")


async def test_without_replies_the_log_is_waited_for_all_the_same(log: Log) -> None:
    async with Rig.running() as rig:
        client = rig.connect()
        keeping(rig, client, log)
        await client.call(b"REPLY", b"OFF")
        await client.send(*(request(b"SET", b"%d" % number, b"x") for number in range(3)))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert client.connection.phase is Phase.RUNNING, "it waits for the log, not for the client"
        log.write()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert client.connection.phase is Phase.IDLE


async def test_a_transaction_waits_once_and_tells_what_was_lost(log: Log) -> None:
    async with Rig.running() as rig:
        client = rig.connect()
        keeping(rig, client, log)
        log.lost = {b"1"}
        await client.call(b"MULTI")
        await client.expect(b"+OK\r\n")
        for number in range(3):
            await client.call(b"SET", b"%d" % number, b"x")
            await client.expect(b"+QUEUED\r\n")
        await client.call(b"EXEC")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert log.asked == 3, "all ran before the first was written"
        log.write()
        await client.expect(b"*3\r\n+OK\r\n-MISCONF the log can't be written\r\n+OK\r\n")


async def test_the_log_sends_what_is_left_to_it_while_the_connection_waits() -> None:
    log = AnnouncingLog()
    async with Rig.running() as rig:
        client = rig.connect()
        keeping(rig, client, log)
        await client.call(b"SET", b"a", b"x")
        await silent(client)
        assert client.connection._outbox.left
        assert client.connection.phase is Phase.RUNNING, "a server that stops must not close it"
        log.write()  # no task runs in between
        assert client.transport.recv_nowait(100) == b"+OK\r\n"
        assert client.connection.phase is Phase.IDLE


async def test_what_the_socket_does_not_take_is_sent_by_the_connection() -> None:
    log = AnnouncingLog()
    async with Rig.running() as rig:
        client = rig.connect(capacity=64)
        keeping(rig, client, log)
        for number in range(40):
            await client.send(request(b"SET", b"%d" % number, b"x"))
            await trio.testing.wait_all_tasks_blocked()
        log.write()
        await client.expect(b"+OK\r\n" * 40)
        await client.call(b"PING")
        await client.expect(b"+PONG\r\n")


async def test_a_draining_server_closes_a_connection_once_the_log_has_answered() -> None:
    log = AnnouncingLog()
    async with Rig.running() as rig:
        client = rig.connect()
        keeping(rig, client, log)
        await client.call(b"SET", b"a", b"x")
        await silent(client)
        rig.table.drain()
        await silent(client)
        log.write()
        await client.expect(b"+OK\r\n")
        await client.expect_end()


async def test_a_client_that_left_meanwhile_costs_the_log_nothing() -> None:
    log = AnnouncingLog()
    async with Rig.running() as rig:
        client = rig.connect()
        keeping(rig, client, log)
        await client.call(b"SET", b"a", b"x")
        await silent(client)
        client.transport.close()
        await trio.testing.wait_all_tasks_blocked()
        log.write()
        await trio.testing.wait_all_tasks_blocked()
        assert not rig.table._connections
