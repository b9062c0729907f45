"""The Trio client: the same behaviour as the synchronous one, and what cancellation leaves behind."""

from __future__ import annotations

import inspect
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing

from pion.client import Layer, Stored, aio, errors
from pion.client import PionClient as Synchronous
from pion.client.aio import PionClient
from pion.client.limits import MAX_SPARE_CONNECTIONS

from .fakes import FakeServer, Peer, answer, array, bulk, requests


def client_of(server: FakeServer, **options: object) -> PionClient:
    return PionClient(port=server.port, **{"timeout_s": 10, "lane": "resp", **options})


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pion.client.settings.FIRST_PAUSE_S", 0.001)


def echo(peer: Peer) -> None:
    for request in requests(peer):
        peer.send(bulk(request[1]))


def test_both_clients_have_the_same_methods_and_arguments() -> None:
    def methods(cls: type) -> dict[str, inspect.Signature]:
        return {
            name: inspect.signature(item, eval_str=True)
            for name, item in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_")
        }

    plain, twin = methods(Synchronous), methods(PionClient)
    assert plain.keys() == twin.keys()
    for name, signature in plain.items():
        assert signature.parameters == twin[name].parameters, name
        expected = signature.return_annotation
        if expected == Iterator[bytes]:
            expected = AsyncIterator[bytes]
        assert expected == twin[name].return_annotation, name
    assert inspect.signature(Synchronous).parameters == inspect.signature(PionClient).parameters
    assert aio.PionClient is PionClient


async def test_requests_and_replies() -> None:
    blob = np.arange(200_000, dtype=np.uint8)
    with FakeServer(echo) as server:
        async with client_of(server) as client:
            assert await client.execute("ECHO", "x") == b"x"
            assert await client.execute("ECHO", blob) == blob.tobytes()
            assert await client.pipeline([("ECHO", i) for i in range(100)]) == [b"%d" % i for i in range(100)]
            assert await client.pipeline([]) == []
        assert server.served == 1


async def test_fetch_into_memory_in_windows() -> None:
    parts = [bytes([i]) * 100_000 for i in range(4)]
    window = bytearray(30_000)
    got = [bytearray() for _ in parts]
    size = 0

    def receive(index: int, nbytes: int) -> memoryview:
        nonlocal size
        size = min(nbytes, len(window))
        return memoryview(window)

    with FakeServer(answer(array(*map(bulk, parts)))) as server:
        async with client_of(server) as client:
            assert await client.prefix_fetch_into("ns", receive, lambda i: got[i].extend(window[:size])) == 4
            assert got == parts
            assert [item.tobytes() for item in await client.prefix_fetch("ns")] == parts


async def test_a_pipeline_whose_replies_fill_every_buffer_does_not_lock_up() -> None:
    with FakeServer(answer(bulk(bytes(1 << 20)))) as server:
        async with client_of(server) as client:
            replies = await client.pipeline([("X", np.zeros(1 << 20, np.uint8))] * 30)
            assert len(replies) == 30


async def test_store_prefix_stops_at_the_first_error() -> None:
    seen: list[bytes] = []

    def script(peer: Peer) -> None:
        for request in requests(peer):
            seen.append(request[0])
            peer.send(b"+OK\r\n" if len(seen) == 1 else b"-OOM full\r\n")

    side = np.zeros(1 << 20, np.uint8)
    with FakeServer(script, answer(b"+OK\r\n")) as server:
        async with client_of(server) as client:
            with pytest.raises(errors.OutOfMemoryError):
                await client.store_prefix("ns", "a", "b", [Layer(side, side)] * 50, 1024)
            assert len(seen) < 60
            assert await client.store_prefix("ns", "a", "b", [Layer(side, side)] * 2, 1024) is Stored.STORED
            assert server.served == 2


async def test_connection_errors(quick_retries: None, tmp_path: Path) -> None:
    def drop(peer: Peer) -> None:
        peer.request()
        peer.send(b"$10\r\nabc")

    with FakeServer(drop, drop, answer(bulk(b"whole"))) as server:
        async with client_of(server) as client:
            assert await client.prefix_meta("ns") == b"whole"
    with FakeServer(drop) as server:
        async with client_of(server, retries=1) as client:
            with pytest.raises(errors.ConnectionLostError):
                await client.prefix_meta("ns")
            assert server.served == 2
            for call in (client.v_drop("s"), client.pipeline([("A",), ("B",)])):
                with pytest.raises(errors.OutcomeUnknownError):
                    await call
            assert server.served == 4
    with FakeServer(answer(b"$-9\r\n")) as server:
        async with client_of(server) as client:
            with pytest.raises(errors.BadReplyError):
                await client.prefix_meta("ns")
    with pytest.raises(errors.ConnectFailedError):
        await PionClient(unix=str(tmp_path / "none"), retries=0).ping()


async def test_a_connection_that_died_while_idle_is_replaced_before_a_write() -> None:
    def once(peer: Peer) -> None:
        peer.request()
        peer.send(b"+PONG\r\n")

    with FakeServer(once, answer(b":1\r\n")) as server:
        async with client_of(server) as client:
            await client.ping()
            await trio.lowlevel.wait_readable(client._lines._main._sock.fileno())
            assert await client.v_drop("sid") == 1


async def test_a_wrong_password() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"-WRONGPASS invalid\r\n-NOAUTH a\r\n-NOAUTH b\r\n")

    with FakeServer(script, greet=False) as server:
        async with client_of(server, password="x") as client:
            with pytest.raises(errors.WrongPasswordError):
                await client.ping()
        assert server.served == 1


async def test_silence() -> None:
    release = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        release.wait(20)

    with FakeServer(script) as server:
        async with client_of(server, timeout_s=0.05) as client:
            with pytest.raises(errors.ReplyTimeoutError):
                await client.prefix_meta("ns")
            with pytest.raises(errors.OutcomeUnknownError):
                await client.v_store_batch("sid", 0, 0, 1, np.zeros(1 << 24, np.uint8))
        release.set()


async def test_a_server_that_refuses_and_closes_is_heard() -> None:
    def script(peer: Peer) -> None:
        peer.sock.recv(1000)
        peer.send(b"-ERR Protocol error: invalid bulk length\r\n")

    with FakeServer(script) as server:
        async with client_of(server) as client:
            with pytest.raises(errors.ServerError, match="invalid bulk length"):
                await client.execute("X", np.zeros(1 << 25, np.uint8))


async def test_tasks_share_one_connection_and_get_their_own_answers() -> None:
    async def work(client: PionClient, number: int) -> None:
        for turn in range(30):
            word = b"%d-%d" % (number, turn)
            assert await client.execute("ECHO", word) == word

    with FakeServer(echo) as server:
        async with client_of(server) as client, trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(work, client, number)
        assert server.served == 1


async def test_a_waiting_lookup_does_not_hold_up_the_others() -> None:
    stored = threading.Event()

    def script(peer: Peer) -> None:
        for request in requests(peer):
            if b"WAIT" in request:
                assert stored.wait(10)
                peer.send(b"+HIT\r\n")
            else:
                stored.set()
                peer.send(b"+OK\r\n")

    with FakeServer(script) as server:
        async with client_of(server) as client, trio.open_nursery() as nursery:

            async def wait() -> None:
                assert await client.prefix_lookup("ns", wait_ms=5000)

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            await client.v_store_batch("ns_pk", 0, 0, 1, b"1234")
        assert server.served == 2


async def test_connections_for_waiting_are_used_again_and_bounded() -> None:
    barrier = threading.Barrier(6)

    def together(peer: Peer) -> None:
        peer.request()
        barrier.wait(10)
        peer.send(b"+MISS\r\n")
        for _ in requests(peer):
            peer.send(b"+HIT\r\n")

    with FakeServer(together) as server:
        async with client_of(server) as client:
            async with trio.open_nursery() as nursery:
                for _ in range(6):
                    nursery.start_soon(partial(client.prefix_lookup, "ns", wait_ms=10))
            assert len(client._lines._spare) == MAX_SPARE_CONNECTIONS
            assert await client.prefix_lookup("ns", wait_ms=10) is True
            assert server.served == 6


async def test_a_spare_connection_that_died_is_replaced() -> None:
    def once(peer: Peer) -> None:
        peer.request()
        peer.send(b"+MISS\r\n")

    with FakeServer(once, answer(b"+HIT\r\n")) as server:
        async with client_of(server) as client:
            assert await client.prefix_lookup("ns", wait_ms=10) is False
            await trio.lowlevel.wait_readable(client._lines._spare[0]._sock.fileno())
            assert await client.prefix_lookup("ns", wait_ms=10) is True
            assert server.served == 2


async def test_a_connection_lost_while_storing() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"+OK\r\n")
        peer.request()

    side = np.zeros(1000, np.uint8)
    with FakeServer(script) as server:
        async with client_of(server) as client:
            with pytest.raises(errors.OutcomeUnknownError, match=r"V\.STOREBATCH"):
                await client.store_prefix("ns", "a", "b", [Layer(side, side)], 10)
        assert server.served == 1


async def test_at_the_door(quick_retries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(peer: Peer) -> None:
        peer.send(b"-ERR max number of clients reached\r\n")
        peer.sock.shutdown(socket.SHUT_WR)
        for _ in requests(peer):
            pass

    with FakeServer(full, greet=False) as server:
        with pytest.raises(errors.ServerError, match="max number of clients"):
            await client_of(server).v_drop("s")
        assert server.served == 1
    with FakeServer(lambda peer: None, greet=False) as server:
        with pytest.raises(errors.ConnectionLostError):
            await client_of(server, retries=2).v_drop("s")
        assert server.served == 3

    async def fail(*args: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(trio.socket, "getaddrinfo", fail)
    with pytest.raises(errors.ConnectFailedError, match="not known"):
        await PionClient("nowhere", retries=0).ping()


async def test_a_pipeline_that_is_refused_names_the_servers_word() -> None:
    def script(peer: Peer) -> None:
        peer.sock.recv(1000)
        peer.send(b"-ERR Protocol error: invalid bulk length\r\n")

    with FakeServer(script) as server:
        async with client_of(server, receive_buffer_bytes=100_000) as client:
            assert repr(client) == f"aio.PionClient(127.0.0.1:{server.port})"
            with pytest.raises(errors.OutcomeUnknownError, match="invalid bulk length"):
                await client.pipeline([("X", np.zeros(1 << 24, np.uint8))] * 2)


async def test_closing_while_a_call_is_under_way() -> None:
    asked = threading.Event()
    release = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        asked.set()
        release.wait(20)

    with FakeServer(script) as server:
        client = client_of(server, retries=0)
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                with pytest.raises(errors.ConnectionLostError):
                    await client.prefix_meta("ns")

            nursery.start_soon(call)
            await trio.to_thread.run_sync(asked.wait)
            await trio.testing.wait_all_tasks_blocked()
            client.close()
        release.set()


async def test_another_process_opens_its_own_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(echo) as server:
        async with client_of(server) as client:
            await client.execute("ECHO", "x")
            monkeypatch.setattr(os, "getpid", lambda: -1)
            await client.execute("ECHO", "x")
        assert server.served == 2


class CancelAt(trio.abc.Instrument):
    """Cancels a scope when the running task has yielded `turns` times."""

    def __init__(self, scope: trio.CancelScope, turns: int) -> None:
        self.scope = scope
        self.left = turns

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.scope.cancel()


Call = Callable[[PionClient], Awaitable[object]]

CALLS: dict[str, Call] = {
    "execute": lambda client: client.execute("ECHO", "abc"),
    "large": lambda client: client.execute("ECHO", bytes(3 << 20)),
    "pipeline": lambda client: client.pipeline([("ECHO", bytes(300_000))] * 12),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("warm", [False, True])
async def test_cancelled_at_every_checkpoint_the_next_call_still_gets_its_own_answer(name: str, warm: bool) -> None:
    with FakeServer(echo) as server:
        for turns in range(1, 400):
            client = client_of(server)
            if warm:
                await client.execute("ECHO", "warm")
            with trio.CancelScope() as scope:
                instrument = CancelAt(scope, turns)
                trio.lowlevel.add_instrument(instrument)
                try:
                    await CALLS[name](client)
                finally:
                    trio.lowlevel.remove_instrument(instrument)
            if not scope.cancelled_caught:
                client.close()
                break
            assert await client.execute("ECHO", b"%d" % turns) == b"%d" % turns
            client.close()
        else:
            pytest.fail("it never ran to its end")
        assert turns > 1


async def test_cancelled_while_waiting_for_its_turn_leaves_the_connection_alone() -> None:
    release = threading.Event()

    def script(peer: Peer) -> None:
        for request in requests(peer):
            release.wait(10)
            peer.send(bulk(request[1]))

    with FakeServer(script) as server:
        async with client_of(server) as client, trio.open_nursery() as nursery:

            async def first() -> None:
                assert await client.execute("ECHO", "first") == b"first"

            nursery.start_soon(first)
            await trio.testing.wait_all_tasks_blocked(0.01)
            with trio.move_on_after(0):
                await client.execute("ECHO", "second")
            release.set()
        assert server.served == 1
