"""Payload memory of connections: gone at once when one is cut, and within the byte budget; fault class 38."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import trio

from pion.config import KIB, MIB, Config
from pion.net import connection as connection_module
from pion.storage.ledger import Memory
from pion.testing import running_server
from tests.net.support import Rig, request
from tests.tiering_support import SIDE_BYTES, Client, expected, fetch, store_prefix, until

BIG = 4 * MIB


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Watched:
    """What `np.empty` gives for payloads, watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buffers: list[weakref.ref[object]] = []
        numpy = connection_module.np

        class Numpy:
            uint8 = numpy.uint8

            @staticmethod
            def empty(nbytes: int, dtype: object) -> object:
                array = numpy.empty(nbytes, dtype)
                self.buffers.append(weakref.ref(array))
                return array

        monkeypatch.setattr(connection_module, "np", Numpy)

    @property
    def alive(self) -> int:
        return sum(each() is not None for each in self.buffers)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["sender leaves", "sender is killed", "reader leaves", "reader is killed"])
async def test_a_cut_connection_gives_its_payload_back_at_once(monkeypatch, how) -> None:
    watched = Watched(monkeypatch)
    async with Rig.running() as rig:
        client = rig.connect(64 * KIB)
        if how.startswith("sender"):
            # Half of a payload is there.
            await client.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % BIG, bytes(BIG // 2))
        else:
            await client.send(request(b"SET", b"k", bytes(BIG)))
            await client.expect(b"+OK\r\n")
            await client.send(request(b"GET", b"k"))
            await client.receive(1000)
            await trio.testing.wait_all_tasks_blocked()
            del rig.store.values[b"k"]
        await trio.testing.wait_all_tasks_blocked()
        assert watched.alive == 1
        if how.endswith("leaves"):
            client.transport.close()
        else:
            client.connection.kill()
        await trio.testing.wait_all_tasks_blocked()
        assert watched.alive == 0
        assert rig.table.budget.used == 0


@pytest.mark.usefixtures("no_collector")
async def test_an_idle_client_does_not_keep_its_last_payload(monkeypatch) -> None:
    watched = Watched(monkeypatch)
    async with Rig.running() as rig:
        client = rig.connect()
        await client.send(request(b"SET", b"k", bytes(BIG)), request(b"DEL", b"k"))
        await client.expect(b"+OK\r\n:1\r\n")
        await trio.testing.wait_all_tasks_blocked()
        assert watched.alive == 0


@pytest.mark.usefixtures("no_collector")
async def test_a_cut_reader_of_stored_rows_gives_them_back_at_once() -> None:
    async with running_server(Config(max_bytes=64 * MIB)) as started, Client.of(started) as client:
        ledger = started.services.vstore.ledger
        assert await store_prefix(client, "p", rows=8192) == "OK"
        unit = started.services.vstore.prefixes[b"p"]
        memories = [weakref.ref(block.memory) for layer in unit.all_layers() for block in layer.blocks]
        slow = await trio.open_tcp_stream("127.0.0.1", started.port)
        await slow.send_all(request(b"KV.PREFIX.FETCH", b"p"))
        await until(lambda: started.services.net.statistics().unsent_bytes > 0)
        del unit
        assert await client.call("KV.PREFIX.DROP", "p") == 1
        assert ledger.sending_bytes > 0
        await slow.aclose()
        await until(lambda: started.services.net.statistics().connections == 1)
        assert ledger.sending_bytes == ledger.charged_bytes == 0
        assert not any(memory() for memory in memories)


async def test_fifty_slow_readers_while_ten_times_the_budget_is_written() -> None:
    """They are dropped before the budget breaks, and whoever reads is served."""
    rows, readers = 1024, 50
    unit_bytes = 2 * rows * 1024
    limit = 24 * unit_bytes
    peak = 0
    async with running_server(Config(max_bytes=limit)) as started, Client.of(started) as client:
        store, table = started.services.vstore, started.services.net

        class Sample(trio.abc.Instrument):
            """Rows that came in are in both counts until their reply is sent, so of payloads half is in memory."""

            def after_task_step(self, task: trio.lowlevel.Task) -> None:
                nonlocal peak
                peak = max(peak, store.ledger.charged_bytes)

        sample = Sample()
        trio.lowlevel.add_instrument(sample)
        try:
            slow = []
            for number in range(readers):
                assert await store_prefix(client, f"p{number}", rows=rows) == "OK"
                stream = await trio.open_tcp_stream("127.0.0.1", started.port)
                await stream.send_all(request(b"KV.PREFIX.FETCH", b"p%d" % number))
                assert await stream.receive_some(1) == b"*"
                slow.append(stream)
            for number in range(readers, 240):
                assert await store_prefix(client, f"p{number}", rows=rows) == "OK"
                if not number % 10:
                    assert await fetch(client, f"p{number}") == expected(f"p{number}", rows=rows)
            for stream in slow:
                await stream.aclose()
        finally:
            trio.lowlevel.remove_instrument(sample)
        assert 240 * unit_bytes >= 10 * limit
        assert 0.8 * limit < peak <= limit
        statistics = table.statistics()
        assert statistics.slow_readers_dropped > 0
        assert store.ledger.sending_bytes <= limit / 4
        await until(lambda: table.statistics().connections == 1)
        assert store.ledger.sending_bytes == 0


async def test_payloads_that_wait_for_memory_are_not_read() -> None:
    """Many large payloads at once: what is received and what is held stay within the budget, and all get through."""
    limit = 40 * SIDE_BYTES
    async with running_server(Config(max_bytes=limit)) as started:
        store, peak = started.services.vstore, 0

        class Sample(trio.abc.Instrument):
            def after_task_step(self, task: trio.lowlevel.Task) -> None:
                nonlocal peak
                peak = max(peak, store.ledger.charged_bytes)

        sample = Sample()
        trio.lowlevel.add_instrument(sample)

        async def write(letter: str) -> None:
            async with Client.of(started) as client:
                for number in range(20):
                    assert await store_prefix(client, f"{letter}{number}") == "OK"

        try:
            async with trio.open_nursery() as nursery:
                for letter in "abcdefgh":
                    nursery.start_soon(write, letter)
        finally:
            trio.lowlevel.remove_instrument(sample)
        assert 0.5 * limit < peak <= limit
        assert store.in_flight() == 0
        assert all(
            isinstance(block.memory, Memory)
            for unit in store.units()
            for layer in unit.all_layers()
            for block in layer.blocks
        )
