"""Slow readers of stored rows against a real server: what they may cost, and what they may see."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pion.config import MIB
from pion.testing import ServerProcess

READERS = 50
DIM = 1024
GIVE_UP_S = 60


class Peer:
    """A connection that sends commands and reads replies at whatever pace the test wants."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)  # its buffer is small, so a reply stays with the server
        self.socket.settimeout(GIVE_UP_S)
        self.socket.connect(str(path))
        self.data = bytearray()

    def send(self, *args: object) -> None:
        parts = [arg if isinstance(arg, bytes | memoryview) else str(arg).encode() for arg in args]
        head = b"*%d\r\n" % len(parts)
        for part in parts:
            self.socket.sendall(head + b"$%d\r\n" % len(part))
            self.socket.sendall(part)
            head = b"\r\n"
        self.socket.sendall(b"\r\n")

    def take(self, nbytes: int) -> bool:
        """Receive up to so many bytes; False at the end."""
        data = self.socket.recv(nbytes)
        self.data += data
        return bool(data)

    def line(self) -> bytes:
        while (end := self.data.find(b"\r\n")) < 0:
            assert self.take(65_536), "the server closed the connection"
        line = bytes(self.data[:end])
        del self.data[: end + 2]
        return line

    def reply(self) -> object:
        line = self.line()
        if line[:1] == b"*":
            return [self.reply() for _ in range(int(line[1:]))]
        if line[:1] != b"$" or line == b"$-1":
            return line.decode()
        size = int(line[1:])
        while len(self.data) < size + 2:
            assert self.take(MIB), "the server closed the connection"
        body = bytes(self.data[:size])
        assert self.data[size : size + 2] == b"\r\n"
        del self.data[: size + 2]
        return body

    def call(self, *args: object) -> object:
        self.send(*args)
        return self.reply()

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("s") / "s"


@contextmanager
def peers(path: Path, count: int) -> Iterator[list[Peer]]:
    opened = [Peer(path) for _ in range(count)]
    try:
        yield opened
    finally:
        for peer in opened:
            peer.close()


def resident(server: ServerProcess) -> int:
    pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def fields(peer: Peer, section: str) -> dict[str, str]:
    text = peer.call("INFO", section)
    assert isinstance(text, bytes)
    return dict(line.split(":", 1) for line in text.decode().split("\r\n") if ":" in line)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize(
    ("layers", "request_args"),
    [
        (2, ("V.FETCH", "a_pk", 0, "RANGE", 0, 16_384, "AS", "native")),
        (1, ("V.FETCH", "a_pk", 0, "RANGE", 0, 16_384, "AS", "fp32")),
        (1, ("KV.PREFIX.FETCH", "a", "AS", "native")),
        (2, ("KV.PREFIX.FETCH", "a", "RANGE", 0, 4096, "AS", "fp32")),
    ],
    ids=["rows native", "rows converted", "prefix native", "prefix converted"],
)
def test_slow_readers_of_large_values_are_bounded_and_dropped(path, layers, request_args) -> None:
    """Fault class 38: fifty clients ask for 64 MiB and hardly read."""
    with ServerProcess("--kvcache", "--unix", str(path)) as server, peers(path, 1) as (other,):
        rows = memoryview(bytes(16_384 * DIM * 2))
        options = ("LAYERS", layers, "TOKENS", 16_384)
        assert other.call("KV.PREFIX.REGISTER", "a", DIM, "fp16", *options) == "+OK"
        for layer in range(layers):
            for side in ("a_pk", "a_pv"):
                assert other.call("V.STOREBATCH", side, layer, 0, 16_384, "AS", "native", rows) == "+OK"
        before = resident(server)
        with peers(path, READERS) as readers:
            for reader in readers:
                reader.send(*request_args)
            for reader in readers:
                assert reader.take(1)
            for _ in range(100):
                assert other.call("KV.PREFIX.LOOKUP", "a") == "+HIT"
            # A tenth of what the replies are, and enough for a piece and its making for each.
            assert resident(server) - before < READERS * 6 * MIB
            assert int(fields(other, "clients")["connected_clients"]) == READERS + 1
            assert other.call("CONFIG", "SET", "send-timeout", 1) == "+OK"
            deadline = time.monotonic() + GIVE_UP_S
            while int(fields(other, "clients")["connected_clients"]) > 1:
                assert time.monotonic() < deadline, "the readers are still connected"
                time.sleep(0.1)
        assert int(fields(other, "memory")["memory_sending_bytes"]) == 0
        assert other.call("KV.PREFIX.LOOKUP", "a") == "+HIT"


def test_a_slow_reader_gets_one_whole_version(path) -> None:
    """Fault class 46: it reads 1 KiB at a time while its key is overwritten, dropped and evicted a thousand times.

    The smallest reply is 5 MiB, more than a socket holds.
    """
    tokens = 2560
    with (
        ServerProcess("--kvcache", "--max-sessions", "4", "--unix", str(path)),
        peers(path, 1) as (writer,),
        peers(path, 4) as readers,
    ):
        stored = 0

        def store(*sides: str) -> None:
            nonlocal stored
            stored += 1
            value = np.float16(stored % 2000)
            rows = np.full(tokens * DIM, value).view(np.uint8).data
            for side in sides:
                assert writer.call("V.STOREBATCH", side, 0, 0, tokens, "AS", "native", rows) == "+OK"

        def register() -> None:
            assert writer.call("KV.PREFIX.REGISTER", "a", DIM, "fp16") == "+OK"
            store("a_pk", "a_pv")

        register()
        for reader, wire in zip(readers, ["native", "fp32"] * 2, strict=True):
            if reader in readers[:2]:
                reader.send("V.FETCH", "a_pk", 0, "RANGE", 0, tokens, "AS", wire)
            else:
                reader.send("KV.PREFIX.FETCH", "a", "AS", wire)
            assert reader.take(1)
        for step in range(1000):
            if step % 3 == 0:
                store("a_pk" if step % 2 else "a_pv")
            elif step % 3 == 1:
                assert writer.call("KV.PREFIX.DROP", "a") == ":1"
                register()
            else:
                for other in ("b", "c"):
                    assert writer.call("KV.PREFIX.REGISTER", other, 1, "fp16") == "+OK"
                assert writer.call("KV.PREFIX.LOOKUP", "a") == "+MISS"
                register()
            if step == 10:
                assert int(fields(writer, "memory")["memory_sending_bytes"]) >= 4 * MIB
            for reader in readers:
                assert reader.take(1024)
        for reader, kind in zip(readers, [np.float16, np.float32] * 2, strict=True):
            reply = reader.reply()
            for part in reply if isinstance(reply, list) else [reply]:
                assert isinstance(part, bytes)
                values = np.frombuffer(part, kind)
                assert values.size == tokens * DIM
                assert (values == 1).all()
        assert int(fields(writer, "memory")["memory_sending_bytes"]) == 0


def test_a_payload_there_is_no_memory_for_drops_what_is_pending(path) -> None:
    with (
        ServerProcess("--kvcache", "--max-receiving", str(MIB), "--unix", str(path)),
        peers(path, 2) as (owner, other),
    ):
        for ns in ("a", "b"):
            assert owner.call("KV.PREFIX.REGISTER", ns, DIM, "fp16", "LAYERS", 1, "TOKENS", 1024) == "+OK"
        reply = owner.call("V.STOREBATCH", "a_pk", 0, 0, 1024, "AS", "native", bytes(1024 * DIM * 2))
        assert isinstance(reply, str)
        assert reply.startswith("-OOM no memory to receive 2097152 bytes")
        assert owner.call("V.STORE", "a_pk", 0, 0, "AS", "native", bytes(2 * DIM)) == "-ERR no session 'a_pk'"
        assert owner.call("V.STORE", "b_pk", 0, 0, "AS", "native", bytes(2 * DIM)) == "+OK"
        assert other.call("KV.PREFIX.REGISTER", "a", DIM, "fp16", "LAYERS", 1, "TOKENS", 1024) == "+OK"
