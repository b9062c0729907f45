"""A connection on the binary lane, over the memory transport: order, ids, payloads, budgets, errors, the end."""

from __future__ import annotations

import gc
import logging
import struct

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pion.limits import COMMANDS_PER_TURN, INLINE_ARG_BYTES
from pion.net.lanes import BinaryLane
from pion.net.table import Phase
from pion.protocol.binary import HEADER
from pion.protocol.binary_answers import frame
from pion.replies import Stream
from tests.net.support import CODES, Client, Rig
from tests.net.test_payload_memory import Watched

MIB = 1 << 20


def packed(name: bytes) -> bytes:
    """A name as meta."""
    return struct.pack("<H", len(name)) + name


def ask(command: str, number: int = 1, meta: bytes = b"", body: bytes = b"") -> bytes:
    """A request."""
    return frame(CODES[command], number, 0, meta, len(body)) + body


def done(command: str, number: int = 1, status: int = 0, meta: bytes = b"", body: bytes = b"") -> bytes:
    """An answer."""
    return frame(CODES[command], number, status, meta, len(body)) + body


def connect(rig: Rig, capacity: int = 1 << 20) -> Client:
    return rig.connect(capacity, BinaryLane)


async def test_pipelined_requests_are_answered_in_order_with_their_ids():
    async with Rig.running() as rig:
        client = connect(rig)
        await client.send(*[ask("PING", 2**32 - 1 - n) for n in range(1000)])
        await client.expect(b"".join(done("PING", 2**32 - 1 - n) for n in range(1000)))
        session = rig.services.clients.get(client.connection.session.id)
        assert (session.commands, session.lane, session.last_command) == (1000, "binary", "PING")
        assert rig.monitor.counter("ping").calls == 1000


async def test_both_lanes_count_together_and_see_the_same():
    async with Rig.running() as rig:
        binary, resp = connect(rig), rig.connect()
        await binary.send(ask("SET", 1, packed(b"k"), b"value"))
        await binary.expect(done("SET"))
        await resp.call(b"GET", b"k")
        await resp.expect(b"$5\r\nvalue\r\n")
        await binary.send(ask("GET", 2, packed(b"k")), ask("GET", 3, packed(b"other")))
        await binary.expect(done("GET", 2, meta=b"m", body=b"value") + done("GET", 3, status=2))
        assert rig.monitor.counter("get").calls == 3


async def test_errors_leave_the_connection_usable():
    async with Rig.running() as rig:
        client = connect(rig)
        unknown = frame(0x99, 3, 0, b"", 0)
        await client.send(ask("FAIL", 1), ask("NONSENSE", 2), unknown, ask("PING", 4))
        await client.expect(done("FAIL", 1, 1, body=b"ERR refused"))
        text = b"ERR internal error in NONSENSE (plugin test): Simple is not a BinaryReply"
        await client.expect(done("NONSENSE", 2, 1, body=text))
        text = b"ERR unknown command 0x99 of the binary lane"
        await client.expect(frame(0x99, 3, 1, b"", len(text)) + text + done("PING", 4))
        assert rig.monitor.errors["ERR"] == 3


@pytest.mark.parametrize(
    ("meta", "body", "text"),
    [
        (packed(b"key")[:-1], b"", b"ERR meta ends within key: 3 bytes expected, 2 left"),
        (packed(b"key") + b"x", b"", b"ERR meta has 1 byte too many, behind key"),
        (b"\x03", b"", b"ERR meta ends within the length of key: 2 bytes expected, 1 left"),
        (packed(b"key"), b"x", b"ERR this command takes no body, got 1 bytes"),
        (packed(b"key"), b"x" * 100_000, b"ERR this command takes no body, got 100000 bytes"),
    ],
)
async def test_meta_and_body_that_do_not_fit_are_errors_of_that_request_only(meta, body, text):
    async with Rig.running() as rig:
        client = connect(rig)
        await client.send(ask("GET", 1, meta, body), ask("PING", 2))
        await client.expect(done("GET", 1, 1, body=text) + done("PING", 2))
        assert rig.monitor.counter("get").failed == 1
        assert rig.table.budget.used == 0


async def test_broken_protocol_is_answered_after_the_requests_before_it_and_ends_the_connection():
    async with Rig.running() as rig:
        client = connect(rig)
        await client.send(ask("PING"), b"*1\r\n$4\r\nPING\r\n" + bytes(20))
        text = b"ERR Protocol error: bad magic number; this is the binary lane, RESP has a port of its own"
        await client.expect(done("PING") + frame(0, 0, 1, b"", len(text)) + text)
        await client.expect_end()
        client.transport.close()
        await wait_all_tasks_blocked()
        assert rig.closed == [client.connection.session.id]


async def test_a_length_over_the_limit_is_refused_before_memory_is_taken():
    async with Rig.running() as rig:
        client = connect(rig)
        await client.send(HEADER.pack(0xCA5E, 1, CODES["SET"], 9, 0, 3, 1 << 40))
        text = b"ERR Protocol error: body of 1099511627776 bytes, at most 1073741824"
        await client.expect(done("SET", 9, 1, body=text))
        await client.expect_end()
        assert rig.table.budget.used == 0


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_requests_may_arrive_in_any_pieces(step):
    async with Rig.running() as rig:
        client = connect(rig)
        payload = bytes(range(256)) * 150
        data = ask("SET", 1, packed(b"k"), payload) + ask("GET", 2, packed(b"k"))
        for start in range(0, 60, step):
            await client.send(data[start : min(60, start + step)])
            await wait_all_tasks_blocked()
        for start in range(60, len(data), 9_000):
            await client.send(data[start : start + 9_000])
            await wait_all_tasks_blocked()
        await client.expect(done("SET") + done("GET", 2, meta=b"m", body=payload))


async def test_a_payload_is_handed_over_without_a_copy_and_needs_nothing_behind_it():
    async with Rig.running() as rig:
        client = connect(rig)
        data = ask("SET", 1, packed(b"k"), b"x" * 3_000_000)
        await client.send(data[:30])
        await wait_all_tasks_blocked()
        assert rig.table.budget.used == 3_000_000
        assert client.connection.phase is Phase.RECEIVING
        await client.send(data[30:])
        await client.expect(done("SET"))
        stored = rig.store.values[b"k"]
        assert (type(stored), len(stored), stored.readonly) == (memoryview, 3_000_000, True)
        assert rig.table.budget.used == 0


async def test_large_bodies_of_two_clients_may_come_in_turns():
    async with Rig.running() as rig:
        clients = [connect(rig) for _ in range(3)]
        data = [
            ask("SET", n, packed(b"k%d" % n), bytes([n]) * 700_000) + ask("GET", 9, packed(b"k%d" % n))
            for n in range(3)
        ]
        for start in range(0, len(data[0]), 100_000):
            for client, each in zip(clients, data, strict=True):
                await client.send(each[start : start + 100_000])
                await wait_all_tasks_blocked()
        for number, client in enumerate(clients):
            await client.expect(done("SET", number) + done("GET", 9, meta=b"m", body=bytes([number]) * 700_000))
        assert rig.table.budget.used == 0


async def test_payloads_over_the_receive_budget_are_refused_and_the_connection_lives_on():
    async with Rig.running(max_receiving_bytes=MIB) as rig:
        refused: list[list[bytes]] = []
        rig.services.refused.append(lambda session, request: refused.append([bytes(each) for each in request]))
        asked: list[list[bytes]] = []
        rig.services.target_of = lambda argv: asked.append([bytes(each) for each in argv]) or frozenset()
        first, second = connect(rig), connect(rig)
        data = ask("SET", 1, packed(b"a"), b"x" * 1_000_000)
        await first.send(data[:30])
        await wait_all_tasks_blocked()
        await second.send(ask("SET", 2, packed(b"b"), b"y" * 500_000), ask("PING", 3))
        text = b"OOM no memory to receive 500000 bytes now (max-receiving is 1048576 bytes)"
        await second.expect(done("SET", 2, 6, body=text) + done("PING", 3))
        assert b"b" not in rig.store.values
        assert refused == [[b"SET", b"b"]], "as on the RESP lane: the command and its first name"
        assert asked == [[b"SET", b"a"], [b"SET", b"b"]]
        await first.send(data[30:])
        await first.expect(done("SET"))
        assert rig.table.budget.used == 0


async def test_long_meta_is_charged_until_it_was_answered():
    async with Rig.running() as rig:
        client = connect(rig)
        data = ask("GET", 1, packed(b"n" * 60_000))
        await client.send(data[:1000])
        await wait_all_tasks_blocked()
        assert rig.table.budget.used == 60_002
        await client.send(data[1000:])
        await client.expect(done("GET", 1, 2))
        await wait_all_tasks_blocked()
        assert rig.table.budget.used == 0


async def test_a_client_that_leaves_in_the_middle_of_a_body_gives_everything_back():
    async with Rig.running() as rig:
        client = connect(rig)
        await client.send(ask("SET", 1, packed(b"k"), b"x" * 3_000_000)[:1_000_000])
        await wait_all_tasks_blocked()
        client.transport.close()
        await wait_all_tasks_blocked()
        assert rig.table.budget.used == 0
        assert rig.closed == [client.connection.session.id]
        assert rig.store.values == {}


@pytest.mark.parametrize("how", ["leaves", "is killed", "breaks the protocol"])
async def test_the_memory_of_a_cut_body_is_free_at_once(monkeypatch, how):
    watched = Watched(monkeypatch)
    gc.collect()
    gc.disable()
    try:
        async with Rig.running() as rig:
            client = connect(rig)
            data = ask("SET", 1, packed(b"k"), b"x" * 3_000_000)
            if how == "breaks the protocol":
                await client.send(data, b"?")
                await client.receive(1000)
                rig.store.values.clear()
            else:
                await client.send(data[:1_000_000])
            await wait_all_tasks_blocked()
            assert watched.alive == (how != "breaks the protocol")
            if how == "is killed":
                client.connection.kill()
            else:
                client.transport.close()
            await wait_all_tasks_blocked()
            assert watched.alive == 0
            assert rig.table.budget.used == 0
    finally:
        gc.enable()


async def test_before_authentication_little_is_taken_and_nothing_is_run():
    async with Rig.running(requirepass="secret") as rig:
        client = connect(rig)
        await client.send(ask("PING", 1), ask("SET", 2, packed(b"k"), b"v"))
        text = b"NOAUTH Authentication required."
        await client.expect(done("PING", 1, 4, body=text) + done("SET", 2, 4, body=text))
        assert rig.store.seen == []
        assert rig.store.values == {}
        assert rig.monitor.counter("ping").rejected == 1
        # The limits end with the authentication, in the same chunk.
        await client.send(ask("AUTH", 3), ask("SET", 4, packed(b"k"), b"v" * 100_000))
        await client.expect(done("AUTH", 3) + done("SET", 4))

        client = connect(rig)
        await client.send(ask("SET", 1, packed(b"k"), b"v" * 16_384)[:40])
        await client.expect(done("SET", 1, 1, body=b"ERR Protocol error: unauthenticated request length"))
        await client.expect_end()
        assert rig.table.budget.used == 0


@pytest.mark.parametrize("sent", [b"\x5e", ask("PING")[:23], ask("SET", 1, packed(b"k"), b"x" * 100)[:-1]])
async def test_half_a_request_and_then_silence_is_disconnected(sent, autojump_clock):
    async with Rig.running(receive_timeout_s=2.0) as rig:
        client = connect(rig)
        rig.nursery.start_soon(rig.table.watch)
        await client.send(sent)
        with trio.fail_after(10):
            await client.transport.wait_readable()
            assert await client.transport.receive_some(1) == b""
        assert rig.table.statistics().timed_out == 1


async def test_a_client_between_requests_may_be_silent_and_is_closed_after_the_idle_time(autojump_clock):
    async with Rig.running(receive_timeout_s=2.0, idle_timeout_s=60.0) as rig:
        client = connect(rig)
        rig.nursery.start_soon(rig.table.watch)
        await client.send(ask("PING", 1))
        await client.expect(done("PING", 1))
        await trio.sleep(30)
        await client.send(ask("PING", 2))
        await client.expect(done("PING", 2))
        await trio.sleep(70)
        await client.expect_end()


async def test_fifty_slow_readers_hold_nobody_up(autojump_clock):
    async with Rig.running(send_timeout_s=5.0) as rig:
        rig.store.values[b"k"] = memoryview(bytes(4 * MIB))
        rig.nursery.start_soon(rig.table.watch)
        slow = [connect(rig, 1000) for _ in range(50)]
        for client in slow:
            await client.send(ask("GET", 1, packed(b"k")))
        await wait_all_tasks_blocked()
        assert all(client.connection.phase is Phase.SENDING for client in slow)
        quick = connect(rig)
        for number in range(20):
            await quick.send(ask("PING", number))
            await quick.expect(done("PING", number))
        await trio.sleep(20)
        assert len(rig.closed) == 50
        assert rig.table.statistics().unsent_bytes == 0
        await quick.send(ask("PING"))
        await quick.expect(done("PING"))


async def test_pieces_of_a_stream_are_made_as_they_are_taken():
    async with Rig.running() as rig:
        client = connect(rig, 1000)
        await client.send(ask("STREAM", 5, struct.pack("<III", 10_000, 10_000, 1000)))
        await wait_all_tasks_blocked()
        assert rig.store.pieces_made < 5
        await client.expect(done("STREAM", 5, body=b"s" * 10_000))


async def test_a_stream_of_another_length_ends_the_connection(caplog):
    caplog.set_level(logging.CRITICAL, "pion.net")
    async with Rig.running() as rig:
        client = connect(rig)
        await client.send(ask("STREAM", 5, struct.pack("<III", 10_000, 5000, 1000)))
        received = await client.receive(100_000)
        assert received[:24] == done("STREAM", 5, body=b"s" * 10_000)[:24]
        assert len(received) < 10_024
        assert client.connection.session.id in rig.closed


async def test_replies_before_one_that_waits_are_sent_first():
    async with Rig.running() as rig:
        client = connect(rig)
        await client.send(ask("PING", 1), ask("BLOCK", 2, packed(b"k")), ask("PING", 3))
        await client.expect(done("PING", 1))
        rig.store.gate.set()
        await client.expect(done("BLOCK", 2) + done("PING", 3))


async def test_a_draining_server_answers_the_request_it_is_in_and_closes():
    async with Rig.running() as rig:
        busy, idle = connect(rig), connect(rig)
        await busy.send(ask("BLOCK", 1, packed(b"k")))
        await rig.store.waiting.wait()
        await wait_all_tasks_blocked()
        rig.table.drain()
        await idle.expect_end()
        rig.store.gate.set()
        await busy.expect(done("BLOCK", 1))
        await busy.expect_end()


async def test_a_killed_connection_ends_at_once():
    async with Rig.running() as rig:
        client = connect(rig)
        await client.send(ask("BLOCK", 1, packed(b"k")))
        await rig.store.waiting.wait()
        client.connection.session.kill()
        await client.expect_end()


async def test_slow_commands_are_remembered_by_the_name_of_their_command():
    async with Rig.running() as rig:
        rig.monitor.configure(slower_than_us=0, max_len=10)
        client = connect(rig)
        await client.send(ask("SET", 1, packed(b"key"), b"v" * (INLINE_ARG_BYTES + 1)))
        await client.expect(done("SET"))
        (entry,) = rig.monitor.slow(10)
        assert entry.argv[:2] == (b"SET", b"key")
        assert len(entry.argv[2]) < 200


async def test_the_stream_that_a_reply_holds_is_let_go_with_the_connection():
    async with Rig.running() as rig:
        client = connect(rig, 1000)
        await client.send(ask("STREAM", 5, struct.pack("<III", 1 << 20, 1 << 20, 1000)))
        await wait_all_tasks_blocked()
        client.transport.close()
        await wait_all_tasks_blocked()
        assert rig.closed == [client.connection.session.id]
        assert not any(isinstance(part, Stream) for part in client.connection._outbox.parts)


async def test_more_than_a_turn_of_requests_lets_others_run():
    async with Rig.running() as rig:
        client, other = connect(rig), connect(rig)
        await client.send(*[ask("PING", n) for n in range(3 * COMMANDS_PER_TURN)])
        await other.send(ask("PING", 7))
        await other.expect(done("PING", 7))
        await client.expect(b"".join(done("PING", n) for n in range(3 * COMMANDS_PER_TURN)))
