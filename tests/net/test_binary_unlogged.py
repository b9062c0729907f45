"""Answers of the binary lane wait for the log; what it could not take is an error with the id of its request."""

from __future__ import annotations

import pytest
from trio.testing import wait_all_tasks_blocked

from pion.net import connection
from pion.net.lanes import BinaryLane
from pion.net.table import Phase
from pion.replies import BinaryReply
from tests.net.support import CODES, Client, Rig
from tests.net.test_binary_lane import ask, done, packed
from tests.net.test_unlogged import AnnouncingLog, Log, silent

LOST = b"MISCONF the log can't be written"


@pytest.fixture(autouse=True)
def no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn never ends: on a busy machine a command may take longer, and its answer is then waited for at once."""
    monkeypatch.setattr(connection, "TURN_NS", 10**12)


@pytest.fixture(params=[Log, AnnouncingLog])
def log(request: pytest.FixtureRequest) -> Log:
    log: Log = request.param()
    return log


def connect(rig: Rig, log: Log, capacity: int = 1 << 20) -> Client:
    """A client whose SET promises what the log has not yet."""

    async def set_logged(context, request) -> BinaryReply:
        context.session.unlogged.append(log.wait_for(bytes(request[1])))
        return BinaryReply()

    rig.dispatcher._packed[CODES["SET"]].handler = set_logged
    return rig.connect(capacity, BinaryLane)


async def test_the_answers_of_a_pipeline_wait_together(log: Log) -> None:
    async with Rig.running() as rig:
        client = connect(rig, log)
        await client.send(*(ask("SET", n, packed(b"%d" % n), b"x") for n in range(5)), ask("PING", 9))
        await silent(client)
        log.write()
        await client.expect(b"".join(done("SET", n) for n in range(5)) + done("PING", 9))


async def test_what_was_lost_is_an_error_in_its_place(log: Log) -> None:
    async with Rig.running() as rig:
        client = connect(rig, log)
        log.lost = {b"1", b"3"}
        rig.store.values[b"k"] = b"v"
        await client.send(*(ask("SET", 10 + n, packed(b"%d" % n), b"x") for n in range(4)), ask("GET", 7, packed(b"k")))
        await silent(client)
        log.write()
        await client.expect(
            done("SET", 10)
            + done("SET", 11, 11, body=LOST)
            + done("SET", 12)
            + done("SET", 13, 11, body=LOST)
            + done("GET", 7, meta=b"m", body=b"v")
        )
        assert rig.monitor.errors["MISCONF"] == 2


async def test_a_single_lost_one_is_an_error_too(log: Log) -> None:
    async with Rig.running() as rig:
        client = connect(rig, log)
        log.lost = {b"k"}
        await client.send(ask("SET", 5, packed(b"k"), b"x"))
        await silent(client)
        log.write()
        await client.expect(done("SET", 5, 11, body=LOST))


async def test_broken_protocol_comes_after_what_was_promised(log: Log) -> None:
    async with Rig.running() as rig:
        client = connect(rig, log)
        await client.send(ask("SET", 5, packed(b"k"), b"x"), b"?")
        await silent(client)
        log.write()
        await client.expect(done("SET", 5))
        assert b"Protocol error" in await client.receive(200)


async def test_the_log_sends_what_is_left_to_it_while_the_connection_waits() -> None:
    log = AnnouncingLog()
    async with Rig.running() as rig:
        client = connect(rig, log)
        await client.send(ask("SET", 5, packed(b"k"), b"x"))
        await silent(client)
        assert client.connection._outbox.left
        assert client.connection.phase is Phase.RUNNING
        log.write()  # no task runs in between
        assert client.transport.recv_nowait(100) == done("SET", 5)
        assert client.connection.phase is Phase.IDLE


async def test_what_the_socket_does_not_take_is_sent_by_the_connection() -> None:
    log = AnnouncingLog()
    async with Rig.running() as rig:
        client = connect(rig, log, capacity=100)
        for number in range(40):
            await client.send(ask("SET", number, packed(b"k"), b"x"))
            await wait_all_tasks_blocked()
        log.write()
        await client.expect(b"".join(done("SET", number) for number in range(40)))
        await client.send(ask("PING", 3))
        await client.expect(done("PING", 3))


async def test_more_than_a_turn_of_stores_is_settled_in_between(log: Log) -> None:
    async with Rig.running() as rig:
        client = connect(rig, log)
        log.write()
        await client.send(*(ask("SET", n, packed(b"k"), b"x") for n in range(1000)))
        await client.expect(b"".join(done("SET", n) for n in range(1000)))
        assert not client.connection._outbox.unlogged
