"""Slow readers of rows that lie in files, while everything happens to the rows and to the files."""

from __future__ import annotations

import socket

import numpy as np

from pion.testing import ServerProcess
from tests.crash import rows
from tests.crash.wire import Wire

LIVES = 8
STEPS = 125
SLICE_BYTES = 1024
"""What a reader takes between two changes."""

TOKENS = 256
DIM = 6 * 1024
"""So that a reply is 6 MiB, which no socket holds."""
WIDTH = 4 * DIM
"""Bytes of a row of `a`, which says what it is; a row of `b` is one value in fp16, read as fp32."""


class Reader:
    """Asks once and takes the reply in small pieces; over a Unix socket, which holds less than the reply."""

    def __init__(self, path, *request):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(str(path))
        self.socket.sendall(b"*%d\r\n" % len(request) + b"".join(b"$%d\r\n%b\r\n" % (len(x), x) for x in request))
        self.data = bytearray()

    def take(self, nbytes):
        """Receive up to so many bytes; False when the server has gone."""
        try:
            data = self.socket.recv(nbytes)
        except ConnectionResetError:
            return False
        self.data += data
        return bool(data)

    def rest(self, nbytes):
        """Receive until so many bytes are there, or the server has gone; returns all."""
        while len(self.data) < nbytes and self.take(1 << 16):
            pass
        self.socket.close()
        return bytes(self.data)


class Writer:
    """Makes all changes, and knows what the rows are: the version of each row, which `b` holds as a value."""

    def __init__(self):
        self.versions = np.zeros(TOKENS, np.uint32)
        self.last = 0

    def call(self, wire, *request):
        reply = wire.call(*(word if isinstance(word, bytes | memoryview) else str(word).encode() for word in request))
        assert reply in ("OK", 1), (request[:5], reply)

    def store(self, wire, start, count):
        self.last += 1
        self.versions = self.versions.copy()
        self.versions[start : start + count] = self.last
        made = rows.make(b"a", 0, 0, start, self.versions[start : start + count], WIDTH)
        self.call(wire, "V.STOREBATCH", "a_pk", 0, start, count, "AS", "native", made)
        halves = np.repeat(self.versions[start : start + count], DIM).astype(np.float16).tobytes()
        self.call(wire, "V.STOREBATCH", "b_pk", 0, start, count, "AS", "native", halves)

    def make(self, wire):
        self.versions = np.zeros(TOKENS, np.uint32)
        self.call(wire, "KV.PREFIX.REGISTER", "a", DIM, "fp32")
        self.call(wire, "KV.PREFIX.REGISTER", "b", DIM, "fp16")
        self.store(wire, 0, TOKENS)

    def change(self, wire, step):
        if step % 25 == 24:
            self.call(wire, "KV.PREFIX.SAVE")  # the rows move to another file, and the old ones go
        elif step % 5 == 1:
            self.call(wire, "KV.PREFIX.DROP", "a")
            self.call(wire, "KV.PREFIX.DROP", "b")
            self.make(wire)
        elif step % 5 == 3:
            for other in ("c", "d"):
                self.call(wire, "KV.PREFIX.REGISTER", other, 1, "fp16")
            assert wire.call(b"KV.PREFIX.LOOKUP", b"a") == wire.call(b"KV.PREFIX.LOOKUP", b"b") == "MISS"
            self.make(wire)
        else:
            self.store(wire, step % 7 * 32, 1 if step % 2 else 64)

    def replies(self):
        """What a fetch of `a` and of `b` must give now, as it is on the wire."""
        blobs = (
            bytes(rows.make(b"a", 0, 0, 0, self.versions, WIDTH)),
            np.repeat(self.versions, DIM).astype(np.float32).tobytes(),
        )
        return [b"$%d\r\n%b\r\n" % (len(blob), blob) for blob in blobs]


def test_a_slow_reader_of_a_file_gets_one_whole_version_or_an_error(tmp_path, tmp_path_factory):
    """Fault class 46: 1 KiB at a time, while the rows are replaced, dropped, evicted and moved a thousand times, by a
    server that was started from files again and again, and that dies under every other reader.
    """
    path = tmp_path_factory.mktemp("s") / "s"
    writer = Writer()
    broken = 0
    for life in range(LIVES):
        with (
            ServerProcess(
                "--kvcache", "--dir", str(tmp_path), "--unix", str(path), "--max-sessions", "4", "--wal-sync", "no"
            ) as server,
            Wire(server.port) as wire,
        ):
            if not life:
                writer.make(wire)
            else:
                assert int(wire.info()["mapped_bytes"]) > WIDTH * TOKENS, "rows are read from the files"
            readers = [
                Reader(path, b"V.FETCH", name, b"0", b"RANGE", b"0", b"%d" % TOKENS, b"AS", b"fp32")
                for name in (b"a_pk", b"b_pk")
            ]
            wanted = writer.replies()
            for step in range(STEPS):
                for reader in readers:
                    assert reader.take(SLICE_BYTES)
                writer.change(wire, step + life)
            assert int(wire.info()["checksum_failures"]) == 0
            if life % 2:
                server.kill()
                for reader, reply in zip(readers, wanted, strict=True):
                    received = reader.rest(len(reply))
                    assert len(received) < len(reply), "the server died in the middle"
                    assert reply.startswith(received)
                    broken += 1
            else:
                for reader, reply in zip(readers, wanted, strict=True):
                    assert reader.rest(len(reply)) == reply
                assert server.stop() == 0
    assert broken == LIVES
