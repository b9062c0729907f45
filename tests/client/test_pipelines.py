"""Pipelines and `store_prefix` against a scripted server."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pion.client import Layer, PionClient, Stored, aio, errors
from pion.client.commands import prefix_stores

from .fakes import FakeServer, Peer, answer, bulk, requests
from .test_connection import client_of


def layers(count: int = 3, size: int = 100_000) -> list[Layer]:
    return [Layer(np.full(size, 2 * i, np.uint8), np.full(size, 2 * i + 1, np.uint8)) for i in range(count)]


def store(client: PionClient, **options: object) -> Stored:
    return client.store_prefix("ns", "fp32@250*3", "fp32@250*3", layers(), 100, **options)


def test_replies_in_order_with_errors_as_values() -> None:
    def script(peer: Peer) -> None:
        for request in requests(peer):
            peer.send(bulk(request[1]) if request[1] != b"500" else b"-ERR no\r\n")

    with FakeServer(script) as server, client_of(server) as client:
        replies = client.pipeline([("ECHO", i) for i in range(1000)])
        assert replies == [b"%d" % i if i != 500 else errors.ServerError("no") for i in range(1000)]
        assert client.pipeline([]) == []
        assert client.execute("ECHO", 1) == b"1"
        assert server.served == 1


def test_a_pipeline_whose_replies_fill_every_buffer_does_not_lock_up() -> None:
    """The server answers each request before it reads the next; nobody but the client can make room."""
    reply = bulk(bytes(1 << 20))

    def script(peer: Peer) -> None:
        for _ in requests(peer):
            peer.send(reply)

    blob = np.zeros(1 << 20, np.uint8)
    with FakeServer(script) as server, client_of(server) as client:
        replies = client.pipeline([("X", blob)] * 40)
        assert [len(item) for item in replies] == [1 << 20] * 40


class Heedless(socket.socket):
    """A system that ignores MSG_DONTWAIT when sending on a blocking socket, as macOS may."""

    def sendmsg(self, buffers: object, ancillary: object = (), flags: int = 0) -> int:
        return super().sendmsg(buffers, ancillary, flags & ~socket.MSG_DONTWAIT)


def test_a_pipeline_does_not_rely_on_msg_dontwait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def script(peer: Peer) -> None:
        for _ in requests(peer):
            peer.send(bulk(bytes(1 << 20)))

    path = str(tmp_path / "s")
    blob = np.zeros(1 << 20, np.uint8)
    with FakeServer(script, unix=path), PionClient(unix=path, timeout_s=3) as client:
        monkeypatch.setattr(socket, "socket", Heedless)
        assert len(client.pipeline([("X", blob)] * 10)) == 10
        # And a single request afterwards blocks again.
        assert client._lines._main._sock.gettimeout() is None
        assert client.execute("X") == bytes(1 << 20)


def test_a_pipeline_cut_short_gives_no_part_of_it() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"+OK\r\n")
        peer.request()

    with FakeServer(script) as server, client_of(server) as client, pytest.raises(errors.OutcomeUnknownError):
        client.pipeline([("A",), ("B",), ("C",)])


def test_store_prefix_sends_the_register_and_every_side_of_every_layer() -> None:
    seen: list[list[bytes]] = []

    def script(peer: Peer) -> None:
        for request in requests(peer):
            seen.append(request)
            peer.send(b"+OK\r\n")

    with FakeServer(script) as server, client_of(server) as client:
        assert store(client, meta=b"m", prefill_ms=12.5, pin=True) is Stored.STORED
    assert seen[0] == (
        b"KV.PREFIX.REGISTER.SCHEMA ns K fp32@250*3 V fp32@250*3 PREFILL_MS 12.5 LAYERS 3 TOKENS 100 META m PIN".split()
    )
    assert [request[:7] for request in seen[1:]] == [
        [b"V.STOREBATCH", b"ns_" + side, b"%d" % layer, b"0", b"100", b"AS", b"native"]
        for layer in range(3)
        for side in (b"pk", b"pv")
    ]
    assert [request[7] for request in seen[1:]] == [bytes([i]) * 100_000 for i in range(6)]


@pytest.mark.parametrize(("reply", "result"), [(b"+PENDING\r\n", Stored.PENDING), (b"+DEFERRED\r\n", Stored.DEFERRED)])
def test_no_rows_are_sent_for_a_prefix_that_is_not_ours_to_fill(reply: bytes, result: Stored) -> None:
    seen: list[list[bytes]] = []

    def script(peer: Peer) -> None:
        for request in requests(peer):
            seen.append(request)
            peer.send(reply)

    with FakeServer(script) as server, client_of(server) as client:
        assert store(client) is result
    assert len(seen) == 1


def answers(*replies: bytes) -> tuple[list[bytes], object]:
    """A script that gives these replies and then OK, and the names of what it was asked."""
    seen: list[bytes] = []

    def script(peer: Peer) -> None:
        given = iter(replies)
        for request in requests(peer):
            seen.append(request[0])
            peer.send(next(given, b"+OK\r\n"))

    return seen, script


def test_the_first_error_is_raised_and_the_prefix_given_up() -> None:
    _, script = answers(b"+OK\r\n", b"+OK\r\n", b"-OOM full\r\n", b"-ERR no session\r\n")
    with FakeServer(script) as server, client_of(server) as client:
        with pytest.raises(errors.OutOfMemoryError, match="full"):
            store(client)
        # The prefix is dropped with its connection, so the next call needs another one.
        assert client.execute("PING") in ("OK", "PONG")
        assert server.served == 2


class Unhurried(socket.socket):
    """Against this one every server is fast: sending never blocks, because the last part has been read."""

    def sendmsg(self, *args: object) -> int:
        sent = super().sendmsg(*args)
        time.sleep(0.03)
        return sent


def test_an_error_stops_a_pipeline_though_sending_never_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def script(peer: Peer) -> None:
        for request in requests(peer):
            seen.append(request[0])
            peer.send(b"+OK\r\n" if len(seen) == 1 else b"-OOM full\r\n")

    with FakeServer(script) as server, client_of(server) as client:
        monkeypatch.setattr(socket, "socket", Unhurried)
        with pytest.raises(errors.OutOfMemoryError):
            store_many(client)
    assert len(seen) < 40


def store_many(client: PionClient) -> Stored:
    return client.store_prefix("ns", "fp32@256*20", "fp32@256*20", layers(20, 1 << 18), 256)


def test_rows_not_begun_when_the_error_comes_are_not_sent() -> None:
    seen = []

    def script(peer: Peer) -> None:
        for request in requests(peer):
            seen.append(request[0])
            peer.send(b"+OK\r\n" if len(seen) == 1 else b"-OOM full\r\n")

    many = layers(50, 1 << 20)
    with FakeServer(script) as server, client_of(server) as client, pytest.raises(errors.OutOfMemoryError):
        client.store_prefix("ns", "fp32@256*50", "fp32@256*50", many, 1024)
    assert len(seen) < 60


def test_a_prefix_that_is_complete_already_is_no_failure() -> None:
    _, script = answers(b"+OK\r\n", b"-EXISTS complete\r\n", *[b"-EXISTS complete\r\n"] * 5)
    with FakeServer(script) as server, client_of(server) as client:
        assert store(client) is Stored.EXISTS


def test_busy_keeps_the_connection() -> None:
    _, script = answers(b"+OK\r\n", *[b"-BUSY other\r\n"] * 6)
    with FakeServer(script) as server, client_of(server) as client:
        with pytest.raises(errors.BusyError):
            store(client)
        client.execute("X")
        assert server.served == 1


def test_another_shape_under_that_name() -> None:
    with (
        FakeServer(answer(b"-EXISTS other shape\r\n")) as server,
        client_of(server) as client,
        pytest.raises(errors.ExistsError),
    ):
        store(client)


def test_a_connection_lost_while_storing_is_not_made_up_for_by_another() -> None:
    """Rows stored over another connection would not belong to the prefix that was registered over the first."""

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"+OK\r\n")
        peer.request()

    with FakeServer(script) as server, client_of(server) as client:
        with pytest.raises(errors.OutcomeUnknownError, match=r"V\.STOREBATCH"):
            store(client)
        assert server.served == 1


def test_a_layer_too_large_for_one_argument_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pion.client.commands.STORE_BYTES", 25)
    rows = np.arange(100, dtype=np.uint8)
    stores = prefix_stores("ns", [Layer(rows, None)], 10, "native")
    assert b"".join(b"".join(map(bytes, s.buffers)) for s in stores) == b"".join(
        b"*8\r\n$12\r\nV.STOREBATCH\r\n$5\r\nns_pk\r\n$1\r\n0\r\n$1\r\n%d\r\n$1\r\n2\r\n$2\r\nAS\r\n$6\r\nnative\r\n"
        b"$20\r\n%s\r\n" % (start, rows[start * 10 : start * 10 + 20].tobytes())
        for start in range(0, 10, 2)
    )


def test_rows_that_do_not_fit_the_tokens_are_refused_before_anything_is_sent() -> None:
    with FakeServer(answer(b"+OK\r\n")) as server, client_of(server) as client:
        with pytest.raises(ValueError, match="layer 0: 100000 bytes of keys are not 7 rows"):
            client.store_prefix("ns", "a", "b", layers(), 7)
        assert server.served == 0


def test_two_threads_pipelines_do_not_mix() -> None:
    def script(peer: Peer) -> None:
        for request in requests(peer):
            peer.send(bulk(request[1]))

    failures: list[object] = []

    with FakeServer(script) as server, client_of(server) as client:

        def work(number: int) -> None:
            for turn in range(20):
                names = [f"{number}-{turn}-{i}" for i in range(20)]
                replies = client.pipeline([("ECHO", name) for name in names])
                if replies != [name.encode() for name in names]:
                    failures.append(replies)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures
        assert server.served == 1


@pytest.mark.parametrize("twin", [False, True])
async def test_a_server_that_takes_its_time_is_not_silent(twin: bool) -> None:
    """The first reply comes long after `timeout_s`, but the requests are being taken all the while."""

    def script(peer: Peer) -> None:
        left = 2 * (12_000_000 + len(b"*2\r\n$1\r\nX\r\n$12000000\r\n\r\n"))
        while left:
            left -= len(peer.sock.recv(min(left, 1 << 20)))
            if left > 8_000_000:  # more than the kernel holds, so the client is still sending
                time.sleep(0.06)
        peer.send(b"+OK\r\n" * 2)
        peer.request()

    requests_ = [("X", np.zeros(12_000_000, np.uint8))] * 2
    with FakeServer(script) as server:
        if twin:
            async with aio.PionClient(port=server.port, timeout_s=0.5) as client:
                assert await client.pipeline(requests_) == ["OK", "OK"]
        else:
            with client_of(server, timeout_s=0.5) as client:
                assert client.pipeline(requests_) == ["OK", "OK"]
