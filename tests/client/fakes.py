"""A scripted server: each connection runs a function of the test, in a thread, over a real socket."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator

GREETING = b"%2\r\n$6\r\nserver\r\n$4\r\nfake\r\n$5\r\nproto\r\n:3\r\n+OK\r\n+OK\r\n"


class Peer:
    """The server's end of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = sock.makefile("rb")

    def request(self) -> list[bytes]:
        """The next request; raises EOFError when the client has gone."""
        head = self._file.readline()
        if not head:
            raise EOFError
        assert head[:1] == b"*", head
        return [self._argument() for _ in range(int(head[1:]))]

    def _argument(self) -> bytes:
        head = self._file.readline()
        assert head[:1] == b"$", head
        size = int(head[1:])
        data = self._file.read(size + 2)
        if len(data) < size + 2:
            raise EOFError
        return data[:-2]

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def send_slowly(self, data: bytes, step: int = 1) -> None:
        for start in range(0, len(data), step):
            self.sock.sendall(data[start : start + step])

    def greet(self) -> None:
        for _ in range(3):
            self.request()
        self.send(GREETING)

    def reset(self) -> None:
        """Close so that the client's system reports a reset, as when the server's host goes."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._file.close()
        self.sock.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self.sock.close()


Script = Callable[[Peer], None]


class FakeServer:
    """Connection number i runs `scripts[i]`, later ones the last script. `served` counts connections."""

    def __init__(self, *scripts: Script, greet: bool = True, unix: str | None = None) -> None:
        self._scripts = scripts
        self._greet = greet
        self._listener = (
            socket.create_server(("127.0.0.1", 0))
            if unix is None
            else socket.create_server(unix, family=socket.AF_UNIX)
        )
        self.port: int = self._listener.getsockname()[1] if unix is None else 0
        self.served = 0
        self.failures: queue.Queue[BaseException] = queue.Queue()
        self._peers: list[Peer] = []
        self._threads: list[threading.Thread] = []

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            peer = Peer(sock)
            self._peers.append(peer)
            script = self._scripts[min(self.served, len(self._scripts) - 1)]
            self.served += 1
            thread = threading.Thread(target=self._serve, args=(peer, script), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, peer: Peer, script: Script) -> None:
        try:
            if self._greet:
                peer.greet()
            script(peer)
        except (EOFError, ConnectionError):
            pass
        except BaseException as error:
            self.failures.put(error)
        finally:
            peer.close()

    def __enter__(self) -> FakeServer:
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(10)
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        if not self.failures.empty():
            raise self.failures.get()


def requests(peer: Peer) -> Iterator[list[bytes]]:
    """The client's requests until it goes."""
    while True:
        yield peer.request()


def answer(reply: bytes) -> Script:
    """The same reply to every request."""

    def script(peer: Peer) -> None:
        for _ in requests(peer):
            peer.send(reply)

    return script


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(data), data)


def array(*parts: bytes) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(parts)
