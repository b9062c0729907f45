"""Cancelling at every wait: the connection closes, nothing is reused, what was shared is given back."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pion.net.connection import Connection
from pion.net.lanes import BinaryLane, MakeLane, RespLane
from pion.net.memory import memory_pair
from pion.net.sending import Sender
from tests.net.support import Client, Rig, request
from tests.net.test_binary_lane import ask, done, packed

MIB = 1 << 20


async def cancelled_while(rig: Rig, sent: bytes, capacity: int = 1 << 20, make_lane: MakeLane = RespLane) -> Client:
    """A client whose connection was cancelled once it had nothing more to do with `sent`."""
    there, here = memory_pair(capacity)
    connection = Connection(here, rig.services, rig.dispatcher, rig.table, make_lane)
    client = Client(there, connection)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        await client.send(sent)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return client


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"*1\r\n$4\r\nPI",
        b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$3000000\r\n123",
        request(b"SET", b"k", b"x" * 100_000)[:-1],
        request(b"BLOCK"),
        request(b"MULTI") + request(b"SET", b"k", b"x" * 100_000),
        b"*1\r\n:\r\n",
    ],
    ids=["idle", "header", "payload", "line end", "command", "transaction", "lingering"],
)
async def test_cancelled_connections_close_and_give_back_what_they_shared(sent):
    rig = Rig()
    client = await cancelled_while(rig, sent)
    assert rig.table.budget.used == 0
    assert rig.table.statistics().connections == 0
    assert len(rig.services.clients) == 0
    assert rig.closed == [client.connection.session.id]
    assert rig.store.values == {}
    await client.receive(1000)
    await client.expect_end()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        ask("PING")[:20],
        ask("SET", 1, packed(b"k"), b"x" * 100)[:-1],
        ask("SET", 1, packed(b"k"), b"x" * 100_000)[:-1],
        ask("GET", 1, packed(b"k" * 60_000))[:-1],
        ask("BLOCK", 1, packed(b"k")),
        b"?",
    ],
    ids=["idle", "header", "body", "payload", "long meta", "command", "lingering"],
)
async def test_on_the_binary_lane_too(sent):
    rig = Rig()
    client = await cancelled_while(rig, sent, make_lane=BinaryLane)
    assert rig.table.budget.used == 0
    assert rig.table.statistics().connections == 0
    assert len(rig.services.clients) == 0
    assert rig.closed == [client.connection.session.id]
    assert rig.store.values == {}
    await client.receive(1000)
    await client.expect_end()


async def test_a_cancelled_answer_of_the_binary_lane_is_cut_and_never_followed_by_another():
    rig = Rig()
    rig.store.values[b"k"] = memoryview(b"k" * 4 * MIB)
    client = await cancelled_while(
        rig, ask("GET", 1, packed(b"k")) + ask("PING", 2), capacity=100_000, make_lane=BinaryLane
    )
    received = await client.receive(8 * MIB)
    assert received[:24] == answer_header(4 * MIB)
    assert set(received[25:]) == {ord("k")}
    assert len(received) < 4 * MIB


def answer_header(nbytes: int) -> bytes:
    """The header of the answer to GET that carries so many bytes."""
    return done("GET", 1, meta=b"m", body=bytes(nbytes))[:24]


@pytest.mark.parametrize("command", [[b"GET", b"k"], [b"STREAM", b"4000000", b"4000000", b"1000000"]])
async def test_a_cancelled_reply_is_cut_and_never_followed_by_another(command):
    rig = Rig()
    rig.store.values[b"k"] = memoryview(b"k" * 4 * MIB)
    client = await cancelled_while(rig, request(*command) + request(b"PING", b"next"), capacity=100_000)
    received = await client.receive(8 * MIB)
    assert len(received) == 100_000
    assert b"next" not in received
    assert rig.store.seen == []


async def test_a_small_reply_that_is_cut_closes_the_connection():
    rig = Rig()
    client = await cancelled_while(rig, request(b"PING", b"p" * 500) + request(b"PING", b"q"), capacity=100)
    assert await client.receive(1000) == b"$500\r\n" + b"p" * 94
    await client.expect_end()


@pytest.mark.parametrize("turns", range(12))
async def test_cancelled_at_each_step_of_a_transfer(turns):
    """Store and fetch 4 MiB; cancel after `turns` turns of the loop. Either it was stored whole, or not at all."""
    rig = Rig()
    there, here = memory_pair(1 << 23)
    connection = Connection(here, rig.services, rig.dispatcher, rig.table)
    client = Client(there, connection)
    value = bytes(range(256)) * 16384
    await client.send(request(b"SET", b"k", value) + request(b"GET", b"k"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert rig.table.budget.used == 0
    assert rig.store.values.get(b"k", value) == value
    received = await client.receive(1 << 23)
    whole = b"+OK\r\n$%d\r\n%b\r\n" % (len(value), value)
    assert whole.startswith(received)


async def test_sender_state_after_cancellation_says_that_bytes_are_missing():
    there, here = memory_pair(1000)
    sender = Sender(here)
    with trio.move_on_after(0.01) as scope:
        await sender.send_parts([bytes(10_000)], 10_000)
    assert scope.cancelled_caught
    assert sender.unsent == 9_000
    assert len(await there.receive_some()) == 1000
