"""Time-outs, on Trio's mock clock: no test here waits."""

from __future__ import annotations

import attrs
import pytest
import trio

from tests.net.support import Client, Rig, request

MIB = 1 << 20


async def _end_time(rig: Rig, client: Client, limit_s: float) -> float:
    """When the connection closed, in seconds from now."""
    start_s = trio.current_time()
    ended = trio.Event()

    def note(session: object) -> None:
        if session is client.connection.session:
            ended.set()

    rig.services.disconnect.append(note)
    with trio.move_on_after(limit_s):
        await ended.wait()
    return trio.current_time() - start_s


async def test_half_a_request_then_silence(autojump_clock):
    for part in (b"*2\r\n$4\r\nPI", b"PIN", b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$3000000\r\nabc", b"*2\r\n$4\r\nPING\r\n"):
        async with Rig.running(receive_timeout_s=60) as rig:
            rig.nursery.start_soon(rig.table.watch)
            client = rig.connect()
            await client.send(part)
            assert 59 < await _end_time(rig, client, 200) < 63
            assert rig.table.statistics().timed_out == 1
            assert rig.table.budget.used == 0


async def test_a_stranger_who_sends_no_password(autojump_clock):
    async with Rig.running(receive_timeout_s=60, requirepass="secret") as rig:
        rig.nursery.start_soon(rig.table.watch)
        talking, known = rig.connect(), rig.connect()
        await known.call(b"AUTH", b"secret")
        await known.expect(b"+OK\r\n")

        async def talk() -> None:
            while True:
                await talking.call(b"PING")
                await trio.sleep(1)

        rig.nursery.start_soon(talk)
        assert 59 < await _end_time(rig, talking, 200) < 63
        await known.call(b"PING")
        await known.expect(b"+PONG\r\n")


async def test_slow_senders_make_room_when_memory_to_receive_runs_out(autojump_clock):
    """Two that announce everything and trickle; then one that can be served in time."""
    async with Rig.running(max_receiving_bytes=4 * MIB) as rig:
        slow = [rig.connect(), rig.connect()]
        for client in slow:
            await client.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % (2 * MIB))
        quick, late = rig.connect(), rig.connect()
        await trio.sleep(4)
        await quick.call(b"SET", b"q", bytes(MIB))  # they are too new to be called slow
        await quick.expect(b"-OOM no memory to receive 1048576 bytes now (max-receiving is 4194304 bytes)\r\n")
        for _ in range(10):
            await trio.sleep(1)
            for client in slow:
                await client.send(b"x")
        await late.call(b"SET", b"q", bytes(3 * MIB))
        await late.expect(b"+OK\r\n")
        assert rig.table.statistics().slow_senders_dropped == 2
        for client in slow:
            await client.expect_end()
        assert rig.table.budget.used == 0


async def test_quick_senders_are_not_dropped_for_another(autojump_clock):
    async with Rig.running(max_receiving_bytes=4 * MIB) as rig:
        busy, other = rig.connect(), rig.connect()
        await busy.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % (3 * MIB))
        for _ in range(10):
            await trio.sleep(1)
            await busy.send(bytes(300_000))
        await other.call(b"SET", b"q", bytes(2 * MIB))
        await other.expect(b"-OOM no memory to receive 2097152 bytes now (max-receiving is 4194304 bytes)\r\n")
        await busy.send(bytes(3 * MIB - 3_000_000), b"\r\n")
        await busy.expect(b"+OK\r\n")
        assert rig.table.statistics().slow_senders_dropped == 0


async def test_a_request_that_keeps_coming_may_take_long(autojump_clock):
    async with Rig.running(receive_timeout_s=60) as rig:
        rig.nursery.start_soon(rig.table.watch)
        client = rig.connect()
        for byte in request(b"PING"):
            await client.send(bytes([byte]))
            await trio.sleep(50)
        await client.expect(b"+PONG\r\n")


async def test_a_payload_that_trickles_in_is_no_silence(autojump_clock):
    """The connection waits for a large part at once; the bytes below it count as progress all the same."""
    async with Rig.running(receive_timeout_s=60) as rig:
        rig.nursery.start_soon(rig.table.watch)
        client = rig.connect()
        await client.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n")
        for _ in range(100):
            await client.send(b"x" * 10)
            await trio.sleep(10)
        await client.send(b"x" * 999_000 + b"\r\n")
        await client.expect(b"+OK\r\n")


async def test_a_reader_that_takes_nothing(autojump_clock):
    async with Rig.running(send_timeout_s=30) as rig:
        rig.nursery.start_soon(rig.table.watch)
        rig.store.values[b"k"] = memoryview(bytes(4 * MIB))
        for sent in (request(b"GET", b"k"), request(b"PING", b"p" * 30_000)):
            client = rig.connect(capacity=1000)
            await client.send(sent)
            assert 29 < await _end_time(rig, client, 200) < 33


async def test_a_reader_that_takes_a_little_at_a_time_stays(autojump_clock):
    async with Rig.running(send_timeout_s=30) as rig:
        rig.nursery.start_soon(rig.table.watch)
        rig.store.values[b"k"] = memoryview(bytes(100_000))
        client = rig.connect(capacity=1000)
        await client.send(request(b"GET", b"k"))
        for _ in range(100):
            await client.receive(1000)
            await trio.sleep(20)
        await client.expect(bytes(9) + b"\r\n")


@pytest.mark.parametrize("timeout_s", [0.0, 10.0])
async def test_idle_connections_close_only_if_told_to(autojump_clock, timeout_s):
    async with Rig.running(idle_timeout_s=timeout_s, receive_timeout_s=60) as rig:
        rig.nursery.start_soon(rig.table.watch)
        client = rig.connect()
        await client.send(request(b"PING"))
        await client.expect(b"+PONG\r\n")
        ended_s = await _end_time(rig, client, 1000)
        assert 9 < ended_s < 13 if timeout_s else ended_s == pytest.approx(1000)


async def test_a_command_that_waits_is_no_silence(autojump_clock):
    async with Rig.running(idle_timeout_s=10, receive_timeout_s=10, send_timeout_s=10) as rig:
        rig.nursery.start_soon(rig.table.watch)
        client = rig.connect()
        await client.send(request(b"BLOCK"))
        await trio.sleep(500)
        rig.store.gate.set()
        await client.expect(b"+OK\r\n")


async def test_a_changed_time_out_holds_for_open_connections(autojump_clock):
    async with Rig.running() as rig:
        rig.nursery.start_soon(rig.table.watch)
        client = rig.connect()
        await trio.sleep(100)
        rig.services.config = attrs.evolve(rig.services.config, idle_timeout_s=200)
        assert 99 < await _end_time(rig, client, 1000) < 103


async def test_a_client_that_does_not_hang_up_after_a_protocol_error_is_hung_up_on(autojump_clock):
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(b"*1\r\n:\r\n")
        await client.expect(b"-ERR Protocol error: expected '$', got ':'\r\n")
        assert await _end_time(rig, client, 100) < 2
