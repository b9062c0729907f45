"""Servers in processes of their own: Pion, Redis, and the bounds. Each is a context manager that yields a `Peer`."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from benchmarks._lib import pin
from benchmarks._lib.raw import RawClient
from pion.testing import ServerProcess

START_TIMEOUT_S = 30.0

INSTALL_REDIS = (
    "{name} is not installed, so the arms against Redis did not run. "
    "Debian, Ubuntu: apt-get install redis-server redis-tools    macOS: brew install redis"
)


class MissingPeerError(Exception):
    """A program an arm is compared with isn't installed; the text says how to install it."""


@attrs.frozen
class Peer:
    """A running server: process id, TCP port, Unix socket path (empty without one)."""

    pid: int
    port: int
    unix: str = ""

    def pin(self, where: set[int]) -> None:
        """Move the server to these cores."""
        pin.pin(self.pid, where)

    def unpin(self) -> None:
        """Let the server run on any core."""
        self.pin(set(pin.AVAILABLE))


def program(name: str) -> str:
    """The path of an installed program. Raises MissingPeerError."""
    found = shutil.which(name)
    if found is None:
        raise MissingPeerError(INSTALL_REDIS.format(name=name))
    return found


@contextmanager
def folder() -> Iterator[Path]:
    """A short-lived directory, for sockets and files."""
    with tempfile.TemporaryDirectory(prefix="pion-bench-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def free_port() -> int:
    """A TCP port that nobody uses at the moment."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port: int = reserved.getsockname()[1]
        return port


@contextmanager
def data_folder() -> Iterator[Path]:
    """A short-lived directory on a disk: the system's own for temporary files is in memory on some machines."""
    root = Path("benchmarks/results")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="data-", dir=root, ignore_cleanup_errors=True) as path:
        yield Path(path).absolute()


@contextmanager
def pion(*args: str, unix: bool = True) -> Iterator[Peer]:
    """A `pion-server` with the KV-cache families only; its folder holds the Unix socket, Pion writes no files."""
    with folder() as path, ExitStack() as stack:
        sock = str(path / "pion.sock") if unix else ""
        flags = ("--unix", sock) if unix else ()
        server = stack.enter_context(ServerProcess("--kvcache", "--log-level", "warning", *flags, *args))
        peer = Peer(server.pid, server.port, sock)
        peer.pin(pin.OTHER)
        yield peer


@contextmanager
def redis(*args: str) -> Iterator[Peer]:
    """A Redis server, without persistence unless the arguments ask for it. Raises MissingPeerError."""
    binary = program("redis-server")
    with folder() as path, data_folder() if args else folder() as data:
        port = free_port()
        sock = str(path / "redis.sock")
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", sock, "--dir", str(data)]
        command += ["--save", "", "--loglevel", "warning", *(args or ("--appendonly", "no"))]
        with _running(command) as process:
            wait_for_answer(process, port)
            peer = Peer(process.pid, port, sock)
            peer.pin(pin.OTHER)
            yield peer


@contextmanager
def bare() -> Iterator[Peer]:
    """The bound for transfers; see `bare.py`."""
    with folder() as path:
        sock = str(path / "bare.sock")
        with _running([sys.executable, "-m", "benchmarks._lib.bare", sock]) as process:
            (port,) = _ports(process)
            peer = Peer(process.pid, port, sock)
            peer.pin(pin.OTHER)
            yield peer


@contextmanager
def echo() -> Iterator[tuple[Peer, Peer]]:
    """The bound for small commands: the stream server and the socket server of `echo.py`."""
    with _running([sys.executable, "-m", "benchmarks._lib.echo"]) as process:
        streams, sockets = _ports(process)
        peers = Peer(process.pid, streams), Peer(process.pid, sockets)
        peers[0].pin(pin.OTHER)
        yield peers


def wait_for_answer(process: subprocess.Popen[str], port: int) -> None:
    """Ask until the server answers a PING. Raises RuntimeError if it ends or takes too long."""
    give_up = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up:
        if process.poll() is not None:
            raise RuntimeError(f"{Path(str(process.args[0])).name} ended with status {process.returncode}")  # type: ignore[index]
        try:
            with RawClient(port) as client:
                if client.call("PING") == "PONG":
                    return
        except ConnectionRefusedError:
            time.sleep(0.001)
    raise RuntimeError("the server did not answer in time")


@contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _ports(process: subprocess.Popen[str]) -> list[int]:
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        raise RuntimeError(f"a benchmark peer ended with status {process.wait()}")
    return [int(word) for word in line.split()]
