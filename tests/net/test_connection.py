"""One connection over the memory transport: order, batching, payloads, replies, the end."""

from __future__ import annotations

import itertools
import logging

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pion.dispatch import QUEUED_ARGUMENT_BYTES
from pion.limits import COMMANDS_PER_TURN
from pion.net.table import Phase
from tests.net.support import Rig, request

MIB = 1 << 20


async def test_pipelined_requests_are_answered_in_order():
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(*[request(b"PING", b"%d" % n) for n in range(1000)])
        await client.expect(b"".join(b"$%d\r\n%d\r\n" % (len(str(n)), n) for n in range(1000)))
        assert rig.services.clients.get(client.connection.session.id).commands == 1000


async def test_errors_leave_the_connection_usable():
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(request(b"FAIL"), request(b"NOPE"), request(b"PING"))
        await client.expect(b"-ERR refused\r\n-ERR unknown command 'NOPE', with args beginning with: \r\n+PONG\r\n")


async def test_a_protocol_error_is_answered_after_the_requests_before_it_and_ends_the_connection():
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(request(b"PING"), b"*1\r\n:5\r\n", request(b"PING"))
        await client.expect(b"+PONG\r\n-ERR Protocol error: expected '$', got ':'\r\n")
        await client.expect_end()
        client.transport.close()
        await wait_all_tasks_blocked()
        assert rig.closed == [client.connection.session.id]
        assert rig.store.seen == [b""]


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_requests_may_arrive_in_any_pieces(step):
    async with Rig.running() as rig:
        client = rig.connect()
        payload = bytes(range(256)) * 150
        data = request(b"SET", b"k", payload) + request(b"GET", b"k")
        if step < 1000:  # the header byte by byte, the payload in larger pieces
            for start in range(0, 60, step):
                await client.send(data[start : min(60, start + step)])
                await wait_all_tasks_blocked()
            await client.send(data[60:])
        else:
            for start in range(0, len(data), step):
                await client.send(data[start : start + step])
                await wait_all_tasks_blocked()
        await client.expect(b"+OK\r\n$38400\r\n" + payload + b"\r\n")


async def test_a_payload_is_handed_over_without_a_copy_and_its_reservation_ends():
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$3000000\r\n")
        await wait_all_tasks_blocked()
        assert rig.table.budget.used == 3_000_000
        assert client.connection.phase is Phase.RECEIVING
        await client.send(b"x" * 3_000_000, b"\r\n", request(b"PING"))
        await client.expect(b"+OK\r\n+PONG\r\n")
        stored = rig.store.values[b"k"]
        assert (type(stored), len(stored), stored.readonly) == (memoryview, 3_000_000, True)
        assert rig.table.budget.used == 0


async def test_payloads_over_the_receive_budget_are_refused_and_the_connection_lives_on():
    async with Rig.running(max_receiving_bytes=MIB) as rig:
        first, second = rig.connect(), rig.connect()
        await first.send(b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1000000\r\n")
        await wait_all_tasks_blocked()
        await second.send(request(b"SET", b"b", b"y" * 500_000), request(b"PING"))
        await second.expect(b"-OOM no memory to receive 500000 bytes now (max-receiving is 1048576 bytes)\r\n+PONG\r\n")
        assert b"b" not in rig.store.values
        assert rig.table.statistics().receiving_refused == 1
        await first.send(b"x" * 1_000_000 + b"\r\n")
        await first.expect(b"+OK\r\n")
        await second.send(request(b"SET", b"b", b"y" * 500_000))
        await second.expect(b"+OK\r\n")
        assert rig.table.budget.used == 0


async def test_a_refused_request_fails_its_transaction():
    async with Rig.running(max_receiving_bytes=MIB) as rig:
        client = rig.connect()
        await client.send(request(b"MULTI"), request(b"SET", b"a", b"y" * 2_000_000), request(b"EXEC"))
        await client.expect(b"+OK\r\n-OOM no memory to receive 2000000 bytes now (max-receiving is 1048576 bytes)\r\n")
        await client.expect(b"-EXECABORT Transaction discarded because of previous errors.\r\n")


async def test_payloads_queued_by_a_transaction_stay_reserved_until_it_ran():
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(
            request(b"MULTI"), request(b"SET", b"a", b"y" * 100_000), request(b"SET", b"b", b"y" * 50_000)
        )
        await client.expect(b"+OK\r\n+QUEUED\r\n+QUEUED\r\n")
        assert rig.table.budget.used == 150_000 + 2 * (len(b"SETa") + 3 * QUEUED_ARGUMENT_BYTES)
        await client.send(request(b"EXEC"))
        await client.expect(b"*2\r\n+OK\r\n+OK\r\n")
        await wait_all_tasks_blocked()
        assert rig.table.budget.used == 0


async def test_a_reservation_is_given_back_when_the_client_leaves_in_the_middle():
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$3000000\r\n123")
        await wait_all_tasks_blocked()
        client.transport.close()
        await wait_all_tasks_blocked()
        assert rig.table.budget.used == 0
        assert rig.closed == [client.connection.session.id]
        assert rig.store.values == {}


async def test_absurd_lengths_are_refused_and_large_ones_only_reserved():
    async with Rig.running() as rig:
        absurd, large = rig.connect(), rig.connect()
        await absurd.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % (2**32 + 1))
        await absurd.expect(b"-ERR Protocol error: invalid bulk length\r\n")
        await large.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % (513 * MIB))
        await wait_all_tasks_blocked()
        assert rig.table.budget.used == 513 * MIB
        large.transport.close()
        await wait_all_tasks_blocked()
        assert rig.table.budget.used == 0


async def test_a_truncated_request_is_never_run():
    data = request(b"SET", b"k", b"x" * 40_000)
    for cut in [*range(1, 40, 3), len(data) - 40_000, len(data) - 3, len(data) - 2, len(data) - 1]:
        async with Rig.running() as rig:
            client = rig.connect()
            await client.send(data[:cut])
            client.transport.finish_sending()
            await client.expect_end()
            assert rig.store.values == {}, cut


async def test_resp_version_changes_with_the_reply_that_says_so():
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(request(b"GET", b"x"), request(b"HELLO", b"3"), request(b"GET", b"x"))
        await client.expect(b"$-1\r\n_\r\n_\r\n")


async def test_client_reply_off_and_skip():
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(request(b"REPLY", b"SKIP"), request(b"PING", b"1"), request(b"PING", b"2"))
        await client.expect(b"$1\r\n2\r\n")
        await client.send(request(b"REPLY", b"OFF"), request(b"PING", b"3"), request(b"NOPE"))
        await client.send(request(b"REPLY", b"ON"), request(b"PING", b"4"))
        await client.expect(b"+OK\r\n$1\r\n4\r\n")
        assert rig.store.seen == [b"1", b"2", b"3", b"4"]


async def test_reply_skip_covers_a_refused_payload():
    async with Rig.running(max_receiving_bytes=MIB) as rig:
        client = rig.connect()
        await client.send(request(b"REPLY", b"SKIP"), request(b"SET", b"a", b"y" * 2_000_000), request(b"PING"))
        await client.expect(b"+PONG\r\n")


async def test_a_command_may_have_no_reply():
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(request(b"NONE"), request(b"PING"))
        await client.expect(b"+PONG\r\n")


async def test_quit_is_answered_and_what_follows_is_not_run():
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(request(b"PING", b"1"), request(b"QUIT"), request(b"PING", b"2"))
        await client.expect(b"$1\r\n1\r\n+OK\r\n")
        await client.expect_end()
        assert rig.store.seen == [b"1"]
        assert rig.closed == [client.connection.session.id]
        assert len(rig.services.clients) == 0


async def test_kill_ends_a_connection_at_once_wherever_it_is():
    async with Rig.running() as rig:
        idle, running, receiving, sending = rig.connect(), rig.connect(), rig.connect(), rig.connect(100)
        await running.send(request(b"BLOCK"))
        await receiving.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$3000000\r\n123")
        rig.store.values[b"big"] = memoryview(bytes(MIB))
        await sending.send(request(b"GET", b"big"))
        await wait_all_tasks_blocked()
        phases = [each.connection.phase for each in (idle, running, receiving, sending)]
        assert phases == [Phase.IDLE, Phase.RUNNING, Phase.RECEIVING, Phase.SENDING]
        for session in rig.services.clients:
            session.kill()
        await wait_all_tasks_blocked()
        assert len(rig.closed) == 4
        assert rig.table.statistics().connections == 0


async def test_before_authentication_only_little_is_taken():
    async with Rig.running(requirepass="secret") as rig:
        client = rig.connect()
        await client.send(request(b"PING"), request(b"AUTH", b"x"), request(b"SET", b"k", b"y" * 20_000))
        await client.expect(b"-NOAUTH Authentication required.\r\n+OK\r\n+OK\r\n")
        stranger = rig.connect()
        await stranger.send(request(b"SET", b"k", b"y" * 20_000))
        await stranger.expect(b"-ERR Protocol error: unauthenticated bulk length\r\n")
        await stranger.expect_end()


async def test_an_unexpected_error_closes_this_connection_only_and_is_logged(caplog):
    async with Rig.running() as rig:
        bad, good = rig.connect(), rig.connect()
        with caplog.at_level(logging.ERROR, "pion.net"):
            await bad.send(request(b"STREAM", b"100", b"99", b"10"))
            await bad.receive(1000)
        assert "unexpected error" in caplog.text
        assert "a stream of 100 bytes made 99" in caplog.text
        await good.send(request(b"PING"))
        await good.expect(b"+PONG\r\n")


async def test_what_is_no_reply_is_answered_with_an_error_that_names_the_plugin(caplog):
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(request(b"NONSENSE"), request(b"PING"))
        text = b"internal error in NONSENSE (plugin test): object is not a reply"
        await client.expect(b"-ERR " + text + b"\r\n+PONG\r\n")
        assert "command NONSENSE of plugin test returned what can't be sent" in caplog.text
        await client.send(request(b"MULTI"), request(b"NONSENSE"), request(b"PING"), request(b"EXEC"))
        await client.expect(b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n-ERR " + text + b"\r\n+PONG\r\n")
        assert rig.monitor.counter("nonsense").failed == 2


@pytest.mark.parametrize("size", [50_000, 3_000_000])
async def test_a_reply_that_is_the_payload_keeps_its_memory_reserved_until_it_is_sent(size, monkeypatch):
    monkeypatch.setattr("pion.net.connection.TURN_NS", 1 << 60)  # only the size decides when it is sent
    async with Rig.running() as rig:
        client = rig.connect(capacity=1000)
        await client.send(request(b"PING", b"p" * size))
        await wait_all_tasks_blocked()
        assert client.connection.phase is Phase.SENDING
        assert rig.table.budget.used == size
        await client.expect(b"$%d\r\n" % size + b"p" * size + b"\r\n")
        await wait_all_tasks_blocked()
        assert rig.table.budget.used == 0


async def test_short_arguments_in_a_transaction_share_the_receive_budget():
    async with Rig.running(max_receiving_bytes=MIB) as rig:
        first, second = rig.connect(), rig.connect()
        await first.send(request(b"MULTI"), *[request(b"SET", b"k", b"v" * 30_000) for _ in range(30)])
        await first.expect(b"+OK\r\n" + b"+QUEUED\r\n" * 30)
        assert rig.table.budget.used == 30 * (30_004 + 3 * QUEUED_ARGUMENT_BYTES)
        await second.send(request(b"MULTI"), *[request(b"SET", b"k", b"v" * 30_000) for _ in range(5)])
        await second.expect(b"+OK\r\n" + b"+QUEUED\r\n" * 4)
        await second.expect(b"-OOM no memory to queue 30172 bytes now (max-receiving is 1048576 bytes)\r\n")
        await second.send(request(b"EXEC"), request(b"PING"))
        await second.expect(b"-EXECABORT Transaction discarded because of previous errors.\r\n+PONG\r\n")
        # The next transaction begins in the batch that ends the first: only what is queued now stays reserved.
        await first.send(request(b"EXEC"), request(b"MULTI"), request(b"SET", b"k", b"v"))
        await first.expect(b"*30\r\n" + b"+OK\r\n" * 30 + b"+OK\r\n+QUEUED\r\n")
        await wait_all_tasks_blocked()
        assert rig.table.budget.used == 5 + 3 * QUEUED_ARGUMENT_BYTES
        first.transport.close()
        await wait_all_tasks_blocked()
        assert rig.table.budget.used == 0


async def test_a_payload_queued_in_the_transaction_before_is_given_back_when_the_next_is_open():
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(request(b"MULTI"), request(b"SET", b"k", b"v" * 100_000))
        await client.expect(b"+OK\r\n+QUEUED\r\n")
        await client.send(request(b"EXEC"), request(b"MULTI"))
        await client.expect(b"*1\r\n+OK\r\n+OK\r\n")
        await wait_all_tasks_blocked()
        assert rig.table.budget.used == 0


async def test_errors_that_never_became_commands_are_counted():
    async with Rig.running(max_receiving_bytes=MIB) as rig:
        client = rig.connect()
        await client.send(request(b"SET", b"k", bytes(2 * MIB)), b"*1\r\n:5\r\n")
        await client.expect(b"-OOM no memory to receive 2097152 bytes now (max-receiving is 1048576 bytes)\r\n")
        await client.expect(b"-ERR Protocol error: expected '$', got ':'\r\n")
        assert rig.monitor.errors == {"OOM": 1, "ERR": 1}


async def test_long_arrays_and_maps_are_encoded_in_turns(monkeypatch):
    """Each item takes a whole turn here, so another task runs many times before the reply is made."""
    monkeypatch.setattr("pion.net.connection.TURN_NS", -1)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(request(b"HELLO", b"3"))
        await client.expect(b"_\r\n")
        rig.nursery.start_soon(other)
        for kind, reply in (
            (b"list", b"*10000\r\n" + b":7\r\n" * 10_000),
            (b"map", b"%10000\r\n" + b":7\r\n:8\r\n" * 10_000),
        ):
            before = turns
            await client.send(request(b"MANY", kind, b"10000"))
            await client.expect(reply)
            assert turns - before > 500


async def test_a_failing_disconnect_callback_does_not_keep_the_others_from_running(caplog):
    async with Rig.running() as rig:

        def fail(session: object) -> None:
            raise RuntimeError("callback")

        rig.services.disconnect.insert(0, fail)
        client = rig.connect()
        client.transport.close()
        await wait_all_tasks_blocked()
        assert rig.closed == [client.connection.session.id]
        assert "a disconnect callback failed" in caplog.text


async def test_replies_that_are_ready_are_sent_before_a_command_that_may_wait():
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(request(b"PING"), request(b"BLOCK", b"a", b"b"), request(b"PING"))
        await client.expect(b"+PONG\r\n")
        rig.store.gate.set()
        await client.expect(b"+OK\r\n+PONG\r\n")


async def test_a_client_that_pipelines_for_ever_does_not_starve_another(monkeypatch):
    """The flood below is all there before the server runs, and would be answered without a wait in between."""
    monkeypatch.setattr("pion.net.connection.perf_counter_ns", lambda: 0)  # leaves the count of commands to decide
    async with Rig.running() as rig:
        flood = request(b"PING", b"f")
        there = rig.connect(1 << 24)
        await there.send(flood * (COMMANDS_PER_TURN * 50))
        other = rig.connect()
        await other.send(request(b"PING", b"other"))
        await other.expect(b"$5\r\nother\r\n")
        assert rig.store.seen.index(b"other") <= COMMANDS_PER_TURN * 4


def every_command_takes_long(monkeypatch) -> None:
    """Each look at the clock is 2 ms after the one before."""
    ticks = itertools.count(step=2_000_000)
    monkeypatch.setattr("pion.net.connection.perf_counter_ns", lambda: next(ticks))


async def test_after_a_long_command_others_get_their_turn(monkeypatch):
    every_command_takes_long(monkeypatch)
    async with Rig.running() as rig:
        there, other = rig.connect(), rig.connect()
        await wait_all_tasks_blocked()
        there.transport.send_nowait(request(b"PING", b"f") * 100)
        other.transport.send_nowait(request(b"PING", b"other"))
        await other.expect(b"$5\r\nother\r\n")
        assert rig.store.seen.index(b"other") <= 3


async def test_a_payload_stays_reserved_while_a_command_before_it_yields(monkeypatch):
    every_command_takes_long(monkeypatch)
    async with Rig.running() as rig:
        used: list[tuple[int, int]] = []

        async def sample() -> None:
            while not rig.store.values:
                used.append((len(rig.store.seen), rig.table.budget.used))
                await trio.lowlevel.checkpoint()

        client = rig.connect()
        await wait_all_tasks_blocked()
        client.transport.send_nowait(request(b"PING") + request(b"PING") + request(b"SET", b"k", b"x" * 40_000))
        rig.nursery.start_soon(sample)
        await client.expect(b"+PONG\r\n+PONG\r\n+OK\r\n")
        assert {reserved for commands, reserved in used if commands} == {40_000}


async def test_a_flood_of_empty_requests_does_not_starve_another():
    async with Rig.running() as rig:
        there = rig.connect(1 << 24)
        await there.send(b"*0\r\n" * 1_000_000)
        other = rig.connect()
        await other.send(request(b"PING", b"other"))
        await other.expect(b"$5\r\nother\r\n")
        assert there.transport._outgoing.size > 1_000_000  # most of the flood is still unread


async def test_a_request_of_very_many_arguments_does_not_starve_another():
    async with Rig.running(max_args=1 << 20) as rig:
        there = rig.connect(1 << 24)
        await there.send(b"*1000000\r\n" + b"$3\r\nabc\r\n" * 900_000)
        other = rig.connect()
        await other.send(request(b"PING", b"other"))
        await other.expect(b"$5\r\nother\r\n")
        assert there.transport._outgoing.size > 1_000_000  # most of the flood is still unread


async def test_memory_that_the_system_does_not_give_is_a_refusal(monkeypatch, caplog):
    async with Rig.running() as rig:
        client = rig.connect()

        def refuse(*args: object) -> None:
            raise MemoryError

        monkeypatch.setattr("pion.net.connection.np.empty", refuse)
        await client.send(request(b"SET", b"k", b"x" * 100_000), request(b"PING"))
        await client.expect(
            b"-OOM no memory to receive 100000 bytes now (max-receiving is 2147483648 bytes)\r\n+PONG\r\n"
        )
        assert "the system has no memory for 100000 bytes" in caplog.text
    assert rig.table.budget.used == 0


async def test_large_transfers_yield_after_each_slice():
    async with Rig.running() as rig:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        client = rig.connect(1 << 25)
        await client.send(request(b"SET", b"k", b"x" * (16 * MIB)))
        rig.nursery.start_soon(count)
        await client.expect(b"+OK\r\n")
        received = turns
        assert received >= 14
        await client.send(request(b"GET", b"k"))
        await client.receive(16 * MIB)
        assert turns - received >= 14
