"""One client used by several threads, and on both sides of a fork."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import warnings
import weakref

import pytest

from pion.client import PionClient, lines

from .fakes import FakeServer, Peer, answer, bulk, requests
from .test_connection import client_of


def echo(peer: Peer) -> None:
    for request in requests(peer):
        peer.send(bulk(request[1]))


def test_threads_get_their_own_answers_over_one_connection() -> None:
    wrong: list[object] = []

    with FakeServer(echo) as server, client_of(server) as client:

        def work(number: int) -> None:
            for turn in range(100):
                word = b"%d-%d" % (number, turn)
                if client.execute("ECHO", word) != word:
                    wrong.append(word)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not wrong
        assert server.served == 1


def test_a_waiting_lookup_does_not_hold_up_the_thread_that_fills_the_prefix() -> None:
    stored = threading.Event()
    asked = threading.Event()

    def script(peer: Peer) -> None:
        for request in requests(peer):
            if b"WAIT" in request:
                asked.set()
                assert stored.wait(10)
                peer.send(b"+HIT\r\n")
            else:
                stored.set()
                peer.send(b"+OK\r\n")

    found: list[bool] = []
    with FakeServer(script) as server, client_of(server) as client:
        thread = threading.Thread(target=lambda: found.append(client.prefix_lookup("ns", wait_ms=5000)))
        thread.start()
        assert asked.wait(10)
        client.v_store_batch("ns_pk", 0, 0, 1, b"1234")
        thread.join(10)
        assert found == [True]
        stored.set()
        assert client.prefix_lookup("ns", wait_ms=10)
        assert server.served == 2, "the connection for waiting is used again"


def test_a_connection_that_waited_while_the_client_was_closed_is_closed_too() -> None:
    asked, go = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        asked.set()
        go.wait(10)
        peer.send(b"+HIT\r\n")
        with pytest.raises(EOFError):
            peer.request()

    with FakeServer(script) as server:
        client = client_of(server)
        thread = threading.Thread(target=client.prefix_lookup, args=("ns",), kwargs={"wait_ms": 5000})
        thread.start()
        assert asked.wait(10)
        client.close()
        go.set()
        thread.join(10)
        assert not client._lines._spare


def test_a_spare_connection_that_died_is_replaced() -> None:
    def once(peer: Peer) -> None:
        peer.request()
        peer.send(b"+MISS\r\n")

    with FakeServer(once, answer(b"+HIT\r\n")) as server, client_of(server) as client:
        assert client.prefix_lookup("ns", wait_ms=10) is False
        (spare,) = client._lines._spare
        assert select.select([spare._sock], [], [], 10)[0]
        assert client.prefix_lookup("ns", wait_ms=10) is True
        assert server.served == 2


def test_the_wait_is_added_to_the_timeout() -> None:
    def script(peer: Peer) -> None:
        for _ in requests(peer):
            if not late.wait(0.3):
                peer.send(b"+MISS\r\n")

    late = threading.Event()
    with FakeServer(script) as server, client_of(server, timeout_s=0.1) as client:
        assert client.prefix_lookup("ns", wait_ms=10_000) is False


def test_no_more_connections_for_waiting_are_kept_than_allowed() -> None:
    barrier = threading.Barrier(7)

    def script(peer: Peer) -> None:
        for _ in requests(peer):
            barrier.wait(10)
            peer.send(b"+MISS\r\n")

    with FakeServer(script) as server, client_of(server) as client:
        threads = [threading.Thread(target=client.prefix_lookup, args=("ns",), kwargs={"wait_ms": 9}) for _ in range(7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert server.served == 7
        assert len(client._lines._spare) == lines.MAX_SPARE_CONNECTIONS


def test_a_child_process_opens_its_own_connection() -> None:
    with FakeServer(echo) as server, client_of(server) as client:
        assert client.execute("ECHO", "parent") == b"parent"
        with client._lines._lock, warnings.catch_warnings():
            # A thread of the parent may hold the lock at the fork; the child must not wait for it for ever.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
            if not pid:
                code = 1
                signal.alarm(10)  # a child that hangs ends by itself, and fails the test
                try:
                    code = 0 if client.execute("ECHO", "child") == b"child" else 2
                finally:
                    os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.execute("ECHO", "again") == b"again"
        assert server.served == 2


def test_a_client_that_is_forgotten_is_not_kept_for_forks() -> None:
    client = PionClient()
    mine = weakref.ref(client._lines)
    assert mine() in lines._ALL
    del client
    gc.collect()
    assert mine() is None


def test_importing_the_client_imports_no_trio_no_mlx_and_no_server() -> None:
    code = "import sys, pion.client; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    loaded = set(output.split())
    assert "pion.client.client" in loaded
    assert not loaded & {"trio", "mlx", "mlx.core", "pion.server", "pion.net", "pion.storage", "pion.context"}


def test_one_answer_does_not_reach_another_call_after_an_interrupt() -> None:
    def interrupt(index: int, nbytes: int) -> memoryview:
        raise KeyboardInterrupt

    with FakeServer(answer(b"*1\r\n$3\r\nabc\r\n"), echo) as server, client_of(server) as client:
        with pytest.raises(KeyboardInterrupt):
            client.prefix_fetch_into("ns", interrupt)
        assert client.execute("ECHO", "x") == b"x"
