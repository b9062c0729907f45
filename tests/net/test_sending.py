"""Bulk replies: stored buffers as they are, streams piece by piece, and readers that are slow."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pion.errors import ConnectionLostError
from pion.limits import PAYLOAD_SLICE_BYTES, SENDMSG_MAX_BUFFERS
from pion.net.memory import memory_pair
from pion.net.sending import CHECKS_AHEAD, Sender
from pion.replies import BrokenReplyError, Check, Stream
from tests.net.support import Rig, request

MIB = 1 << 20


class Recorder:
    """A transport that takes what it is told to take and remembers each call."""

    def __init__(self, sizes: list[int | None]) -> None:
        self.sizes = sizes
        self.calls: list[list[memoryview]] = []
        self.data = bytearray()
        self.waits = 0
        self.bulk: list[bool] = []

    def send_nowait(self, data):
        return self.sendmsg_nowait([data])

    def sendmsg_nowait(self, buffers):
        self.calls.append(list(buffers))
        data = b"".join(buffers)
        size = self.sizes.pop(0) if self.sizes else len(data)
        if size is None:
            return None
        self.data += data[:size]
        return min(size, len(data))

    async def wait_writable(self):
        self.waits += 1
        await trio.lowlevel.checkpoint()

    def sending_bulk(self, bulk):
        self.bulk.append(bulk)


async def test_partial_sends_go_on_where_they_stopped():
    transport = Recorder([3, None, 1, 0, None, 5])
    await Sender(transport).send(b"0123456789abcdef")
    assert transport.data == b"0123456789abcdef"
    assert transport.waits == 6


async def test_buffers_are_sent_in_slices_and_never_too_many_at_once():
    rng = np.random.default_rng(1)
    parts = [rng.integers(0, 256, size, np.uint8).data for size in [5000] * 3000 + [3 * MIB] + [7, 0, 4097] * 5]
    transport = Recorder([])
    sender = Sender(transport)
    await sender.send_parts(parts, sum(map(len, parts)))
    assert transport.data == b"".join(parts)
    assert max(map(len, transport.calls)) <= SENDMSG_MAX_BUFFERS
    assert max(sum(map(len, call)) for call in transport.calls) <= PAYLOAD_SLICE_BYTES
    assert transport.bulk == [True, False]
    assert sender.unsent == 0


@pytest.mark.parametrize("sizes", [[1] * 50, [None, 7, None, 4999, 5001, 12345], [5000, 5000, 1, None]])
async def test_any_partial_sendmsg_gives_the_same_bytes(sizes):
    parts = [bytes([n]) * 5000 for n in range(9)]
    transport = Recorder(sizes)
    await Sender(transport).send_parts(parts, 45_000)
    assert transport.data == b"".join(parts)


async def test_large_buffers_are_passed_to_the_system_as_they_are():
    stored = np.zeros(300_000, np.uint8)
    transport = Recorder([])
    await Sender(transport).send_parts([b"$300000\r\n", stored.data, b"\r\n"], 300_011)
    sent = [np.frombuffer(view, np.uint8) for call in transport.calls for view in call]
    assert any(np.shares_memory(view, stored) for view in sent)


@pytest.mark.parametrize("thread", [[], [b"thread"]])
async def test_a_stream_makes_a_piece_only_when_the_one_before_is_taken(thread):
    async with Rig.running() as rig:
        client = rig.connect(capacity=100_000)
        await client.send(request(b"STREAM", b"1000000", b"1000000", b"100000", *thread), request(b"PING"))
        assert await client.receive(11) == b"$1000000\r\ns"
        assert rig.store.pieces_made <= 2
        assert await client.receive(1_000_000) == b"s" * 999_999 + b"\r"
        await client.expect(b"\n+PONG\r\n")
        assert rig.store.pieces_made == 10
        assert rig.table.pieces.nbytes == 0


@pytest.mark.parametrize("made", [b"999999", b"1000001", b"0"])
async def test_a_stream_of_another_length_closes_the_connection(made, caplog):
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(request(b"STREAM", b"1000000", made, b"100000"), request(b"PING"))
        received = await client.receive(2_000_000)
        assert len(received) < 1_000_012
        assert b"PONG" not in received
        assert "a stream of 1000000 bytes" in caplog.text


async def test_an_empty_stream_is_an_empty_bulk():
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(request(b"STREAM", b"0", b"0", b"1"), request(b"PING"))
        await client.expect(b"$0\r\n\r\n+PONG\r\n")


class Work(Check):
    """Takes some steps, from one of which on it would have to wait; notes when it is over, or fails."""

    def __init__(self, checks: Checks, steps: int = 1, waits_at: int = -1) -> None:
        self.checks = checks
        self.steps = steps
        self.waits_at = waits_at
        self.done = 0
        self.threads: set[int] = set()

    def ready(self) -> bool:
        return self.done != self.waits_at

    def step(self) -> bool:
        assert self.ready()
        self.threads.add(threading.get_ident())
        self.done += 1
        if self.done == self.steps:
            self.checks.pass_(self)
        return self.done == self.steps

    def finish(self) -> None:
        self.threads.add(-threading.get_ident())
        self.done = self.steps
        self.checks.pass_(self)


class Checks:
    """Counts how many of its checks have passed; one may fail."""

    def __init__(self, count: int, fails: int = -1) -> None:
        self.passed = 0
        self.told = 0
        self.fails = fails
        self.all = [Work(self) for _ in range(count)]

    def pass_(self, check: Work) -> None:
        if self.all.index(check) == self.fails:
            raise BrokenReplyError("damaged", self._tell)
        assert check is self.all[self.passed]
        self.passed += 1

    def _tell(self) -> None:
        self.told += 1


class Watching(Recorder):
    """Notes with each call how many checks had passed by then."""

    def __init__(self, sizes: list[int | None], checks: Checks) -> None:
        super().__init__(sizes)
        self.checks = checks
        self.passed: list[tuple[int, int]] = []
        """Bytes that were sent, and checks that had passed before."""

    def sendmsg_nowait(self, buffers):
        passed = self.checks.passed
        sent = super().sendmsg_nowait(buffers)
        self.passed.append((len(self.data), passed))
        return sent


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_sent_before_the_checks_in_front_of_it_have_passed(seed):
    """Whatever the system takes at a time; between buffers and streams, with checks that wait and some that don't."""
    rng = np.random.default_rng(seed)
    checks = Checks(12)
    parts, right, behind = [], bytearray(), []
    for check in checks.all:
        check.steps = int(rng.integers(1, 4))
        check.waits_at = int(rng.integers(-1, check.steps))
        for _ in range(rng.integers(0, 3)):
            parts.append(bytes(rng.integers(0, 256, int(rng.choice([2, 6000])), np.uint8)))
            right += parts[-1]
        parts.append(check)
        behind.append(len(right))
        if rng.integers(0, 3) == 0:
            parts.append(Stream(9000, [lambda: b"x" * 4000, lambda: b"y" * 5000], in_thread=bool(rng.integers(0, 2))))
            right += b"x" * 4000 + b"y" * 5000
    transport = Watching([None if size < 300 else int(size) for size in rng.integers(0, 20_000, 40)], checks)
    sender = Sender(transport)
    await sender.send_parts(parts, len(right))
    assert transport.data == right
    assert all(passed >= sum(place < sent for place in behind) for sent, passed in transport.passed)
    assert checks.passed == 12
    assert sender.unsent == 0
    assert transport.bulk == [True, False]
    for check in checks.all:
        here, elsewhere = {each for each in check.threads if each > 0}, {-each for each in check.threads if each < 0}
        assert here == ({threading.get_ident()} if check.waits_at else set())
        assert bool(elsewhere) == (check.waits_at >= 0)
        assert not here & elsewhere


async def test_only_few_checks_are_worked_off_ahead():
    """A reader that takes nothing must not make the server read a whole prefix."""
    checks = Checks(20)
    parts = [part for check in checks.all for part in (bytes(5000), check)]
    transport = Recorder([])
    stuck = trio.Event()

    async def wait_writable() -> None:
        await stuck.wait()

    transport.wait_writable = wait_writable
    transport.sizes = [None]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Sender(transport).send_parts, parts, 100_000)
        with trio.fail_after(10):
            while checks.passed < CHECKS_AHEAD + 1:  # noqa: ASYNC110  what is waited for sets no event
                await trio.sleep(0.001)
        await wait_all_tasks_blocked()
        assert checks.passed == CHECKS_AHEAD + 1
        stuck.set()
    assert transport.data == bytes(100_000)
    assert checks.passed == 20


async def test_others_run_between_the_steps_of_a_check():
    checks = Checks(1)
    checks.all[0].steps = 50
    seen: list[int] = []

    async def look() -> None:
        while checks.all[0].done < 50:
            seen.append(checks.all[0].done)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await Sender(Recorder([])).send_parts([bytes(5000), checks.all[0], bytes(5000)], 10_000)
    assert len(set(seen)) > 20


@pytest.mark.parametrize("where", [0, 1, 7, 11])
async def test_a_broken_reply_ends_the_connection_before_what_is_broken(where):
    checks = Checks(12, fails=where)
    checks.all[where].waits_at = 0 if where == 7 else -1
    parts = [part for index, check in enumerate(checks.all) for part in (bytes([index]) * 5000, check)]
    transport = Recorder([])
    with pytest.raises(ConnectionLostError, match="damaged"):
        await Sender(transport).send_parts(parts, 60_000)
    assert checks.told == 1
    right = b"".join(bytes([index]) * 5000 for index in range(where + 1))
    assert right.startswith(transport.data)


async def test_a_broken_stream_that_is_made_when_it_is_due_ends_the_connection():
    told: list[str] = []

    def make() -> bytes:
        raise BrokenReplyError("damaged", lambda: told.append("once"))

    for thread in (False, True):
        with pytest.raises(ConnectionLostError, match="damaged"):
            await Sender(Recorder([])).send_parts([Stream(5, [make], in_thread=thread)], 5)
    assert told == ["once", "once"]


async def test_a_slow_reader_gets_one_whole_version_while_its_key_is_overwritten_and_dropped():
    """Fault class 46: a buffer must not be reused or changed while it is still being sent."""
    async with Rig.running() as rig:
        slow, writer = rig.connect(capacity=1024), rig.connect()
        size = 64 * 1024
        await writer.send(request(b"SET", b"k", b"\x00" * size))
        await writer.expect(b"+OK\r\n")
        await slow.send(request(b"GET", b"k"))
        await wait_all_tasks_blocked()
        received = bytearray()
        for version in range(1, 1001):
            if version % 3:
                await writer.send(request(b"SET", b"k", bytes([version % 256]) * size))
                await writer.expect(b"+OK\r\n")
            else:
                await writer.send(request(b"DEL", b"k"))
                await writer.expect(b":1\r\n")
            if len(received) < size - 100:
                received += await slow.receive(100)
        header = b"$%d\r\n" % size
        received += await slow.receive(len(header) + size + 2 - len(received))
        assert bytes(received) == header + b"\x00" * size + b"\r\n"


async def test_a_client_that_does_not_read_is_not_read_either():
    """Serial request and reply is the back-pressure: joined replies of one client stay bounded."""
    async with Rig.running() as rig:
        client = rig.connect(capacity=10_000)
        sent = 0
        data = request(b"PING", b"p" * 1000) * 100
        with trio.move_on_after(0.2):
            while True:
                sent += client.transport.send_nowait(data[sent % len(data) :]) or 0
                await trio.lowlevel.checkpoint()
        assert sent < 400_000
        assert len(rig.store.seen) < 400


async def test_the_slowest_readers_go_when_replies_hold_too_much(caplog):
    async with Rig.running(max_sending_bytes=10 * MIB) as rig:
        rig.store.values[b"k"] = memoryview(bytes(4 * MIB))
        readers = [rig.connect(capacity=100_000) for _ in range(4)]
        for reader in readers:
            await reader.send(request(b"GET", b"k"))
        await wait_all_tasks_blocked()
        for amount, reader in zip([100_000, 2_000_000, 300_000, 3_000_000], readers, strict=True):
            await reader.receive(amount)
        await wait_all_tasks_blocked()
        rig.table.enforce_sending_limit()
        assert rig.closed == []
        rig.ledger.sending_bytes = 16 * MIB
        with caplog.at_level(logging.WARNING, "pion.net"):
            rig.table.enforce_sending_limit()
            rig.table.enforce_sending_limit()  # before the first two had a chance to go: no further victim
        await wait_all_tasks_blocked()
        assert sorted(rig.closed) == [readers[0].connection.session.id, readers[2].connection.session.id]
        assert rig.table.statistics().slow_readers_dropped == 2
        assert "reads too slowly" in caplog.text
        rig.ledger.sending_bytes = 8 * MIB
        left = len(b"$4194304\r\n") + 4 * MIB - 2_000_000
        await readers[1].expect(bytes(left) + b"\r\n")


async def test_new_payloads_enforce_the_limit_without_waiting_for_the_watcher():
    async with Rig.running(max_sending_bytes=MIB) as rig:
        rig.store.values[b"k"] = memoryview(bytes(4 * MIB))
        reader, writer = rig.connect(capacity=1000), rig.connect()
        await reader.send(request(b"GET", b"k"))
        await wait_all_tasks_blocked()
        rig.ledger.sending_bytes = 4 * MIB
        await writer.send(request(b"SET", b"k", b"x" * 100_000))
        await writer.expect(b"+OK\r\n")
        await wait_all_tasks_blocked()
        assert rig.closed == [reader.connection.session.id]


async def test_fifty_slow_readers_hold_the_same_buffer_and_others_are_served():
    """Fault class 38: what fifty readers of 64 MiB that never read hold is what they ask for, once."""
    async with Rig.running() as rig:
        stored = np.zeros(64 * MIB, np.uint8)
        rig.store.values[b"k"] = stored.data
        readers = [rig.connect(capacity=10_000) for _ in range(50)]
        for reader in readers:
            await reader.send(request(b"GET", b"k"))
        await wait_all_tasks_blocked()
        assert rig.table.statistics().unsent_bytes > 50 * 60 * MIB
        other = rig.connect()
        await other.send(request(b"PING"))
        await other.expect(b"+PONG\r\n")
        queued = sum(reader.transport._incoming.size for reader in readers)
        assert queued <= 50 * 10_000


async def test_a_peer_that_goes_away_while_sending_ends_the_connection_quietly(caplog):
    async with Rig.running() as rig:
        rig.store.values[b"k"] = memoryview(bytes(4 * MIB))
        client = rig.connect(capacity=1000)
        await client.send(request(b"GET", b"k"))
        await wait_all_tasks_blocked()
        client.transport.close()
        await wait_all_tasks_blocked()
        assert rig.closed == [client.connection.session.id]
        assert caplog.text == ""


async def test_memory_pair_has_bounded_room():
    here, there = memory_pair(10)
    assert here.send_nowait(b"0123456789abc") == 10
    assert here.send_nowait(b"x") is None
    assert await there.receive_some(4) == b"0123"
    assert here.send_nowait(b"xyz") == 3
