"""A real server process that stops, dies and comes back."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from pion.client import Layer, PionClient, Stored, errors
from pion.testing import ServerProcess

SIDE = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
RUNS = "fp32@1024*4"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def store(client: PionClient) -> Stored:
    return client.store_prefix("ns", RUNS, RUNS, [Layer(SIDE, -SIDE)] * 4, 1024)


def test_the_next_call_finds_the_restarted_server() -> None:
    port = free_port()
    client = PionClient(port=port)
    with ServerProcess("--kvcache", "--port", str(port)):
        assert store(client) is Stored.STORED
        assert client.prefix_lookup("ns")
    with ServerProcess("--kvcache", "--port", str(port)):
        assert store(client) is Stored.STORED, "a write, whose connection was gone before it was sent"
    with pytest.raises(errors.ConnectFailedError):
        client.ping()
    client.close()


def test_a_server_killed_in_the_middle_of_a_fetch() -> None:
    seen: list[int] = []

    with ServerProcess("--kvcache") as running, PionClient(port=running.port) as client:
        store(client)
        scratch = np.empty(SIDE.nbytes, np.uint8)

        def done(index: int) -> None:
            seen.append(index)
            if index == 1:
                running.kill()

        with pytest.raises(errors.ConnectionLostError):
            client.prefix_fetch_into("ns", lambda index, nbytes: scratch.data[:nbytes], done)
        assert len(seen) < 8


def test_a_server_killed_in_the_middle_of_a_store() -> None:
    with ServerProcess("--kvcache") as running, PionClient(port=running.port) as client:
        client.ping()
        killer = threading.Timer(0.05, running.kill)

        def store_until_it_fails() -> None:
            killer.start()
            while True:
                client.store_prefix("ns", RUNS, RUNS, [Layer(SIDE, SIDE)] * 4, 1024)
                client.prefix_drop("ns")

        with pytest.raises(errors.TransportError):
            store_until_it_fails()
        killer.join()


def test_threads_against_a_real_server(server_process: ServerProcess) -> None:
    wrong: list[object] = []

    with PionClient(port=server_process.port) as client:

        def work(number: int) -> None:
            side = np.full((64, 256), number, np.float32)
            for turn in range(10):
                name = f"{number}-{turn}"
                if (
                    client.store_prefix(name, "fp32@256*2", "fp32@256*2", [Layer(side, side)] * 2, 64)
                    is not Stored.STORED
                ):
                    wrong.append(name)
                for part in client.prefix_fetch(name):
                    if part.tobytes() != side.tobytes():
                        wrong.append(name)
                if client.prefix_drop(name) != 1:
                    wrong.append(name)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert next(client.prefix_list(), None) is None
