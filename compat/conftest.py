"""Servers for the comparisons: a real Redis from Debian, and a real Pion process."""

from __future__ import annotations

import socket
import subprocess
import time

import pytest

from pion.testing import ServerProcess


@pytest.fixture(scope="session")
def pion():
    """The port of a Pion server."""
    with ServerProcess("--kvcache") as server:
        yield server.port


@pytest.fixture(scope="session")
def guarded_pion():
    """The port of a Pion server whose password is `secret`."""
    with ServerProcess("--kvcache", "--requirepass", "secret") as server:
        yield server.port


def _start_redis(folder, *options: str):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except ConnectionRefusedError:
            assert process.poll() is None, "redis-server ended"
            time.sleep(0.05)
        else:
            return process, port
    process.kill()
    raise AssertionError("redis-server did not start")


@pytest.fixture(scope="session")
def redis(tmp_path_factory):
    """The port of a Redis server without persistence."""
    process, port = _start_redis(tmp_path_factory.mktemp("redis"))
    yield port
    process.terminate()
    process.wait(10)


@pytest.fixture(scope="session")
def guarded_redis(tmp_path_factory):
    """The same with the password `secret`."""
    process, port = _start_redis(tmp_path_factory.mktemp("redis"), "--requirepass", "secret")
    yield port
    process.terminate()
    process.wait(10)
