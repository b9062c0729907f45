"""A scripted server with both lanes: two `FakeServer`s, one of which names the other's port in its INFO."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator

import attrs

from .fakes import FakeServer, Peer, Script, bulk, requests

HEADER = struct.Struct("<HBBIB3xIQ")
"""Written here once more, so that the tests don't believe what they test."""


@attrs.frozen
class Got:
    """A binary request, as the server's end reads it."""

    code: int
    number: int
    meta: bytes
    body: bytes


def frame(
    code: int,
    number: int,
    status: int = 0,
    meta: bytes = b"",
    body: bytes = b"",
    *,
    body_bytes: int | None = None,
    meta_bytes: int | None = None,
) -> bytes:
    """An answer; `body_bytes` and `meta_bytes` may lie."""
    sizes = len(meta) if meta_bytes is None else meta_bytes, len(body) if body_bytes is None else body_bytes
    return HEADER.pack(0xCA5E, 1, code, number, status, *sizes) + meta + body


def read_frame(peer: Peer) -> Got:
    """The next binary request; raises EOFError when the client has gone."""
    head = peer._file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise EOFError
    magic, version, code, number, status, meta_bytes, body_bytes = HEADER.unpack(head)
    assert (magic, version, status) == (0xCA5E, 1, 0)
    meta, body = peer._file.read(meta_bytes), peer._file.read(body_bytes)
    if len(meta) + len(body) < meta_bytes + body_bytes:
        raise EOFError
    return Got(code, number, meta, body)


def frames(peer: Peer) -> Iterator[Got]:
    """Requests behind the greeting, until the client goes."""
    greet(peer)
    while True:
        yield read_frame(peer)


def greet(peer: Peer) -> None:
    """Take AUTH, if it comes, and PING."""
    got = read_frame(peer)
    if got.code == 0x01:
        peer.send(frame(0x01, got.number))
        got = read_frame(peer)
    assert got.code == 0x02
    peer.send(frame(0x02, got.number))


def reply_with(make: Callable[[Got], bytes]) -> Script:
    """The same kind of answer to every request."""

    def script(peer: Peer) -> None:
        for got in frames(peer):
            peer.send(make(got))

    return script


def sides(*parts: bytes) -> Callable[[Got], bytes]:
    """The answer to a PREFIX_FETCH of these K and V parts."""
    sizes = struct.pack(f"<I{len(parts)}Q", len(parts) // 2, *map(len, parts))
    return lambda got: frame(got.code, got.number, meta=sizes, body=b"".join(parts))


@attrs.define
class BothLanes:
    """What the tests look at: how often each lane was connected to, and what came over RESP."""

    resp: FakeServer
    binary: FakeServer
    over_resp: list[bytes] = attrs.field(factory=list)

    @property
    def port(self) -> int:
        return self.resp.port


@contextlib.contextmanager
def both_lanes(
    *scripts: Script,
    resp: Callable[[list[bytes]], bytes] = lambda request: b"-ERR this was meant for the other lane\r\n",
    port: Callable[[FakeServer], object] = lambda server: server.port,
    listens: int | None = None,
) -> Iterator[BothLanes]:
    """A server whose binary lane runs `scripts`; `port` says what its INFO tells, `resp` what RESP answers else.

    `listens`: where it says that its RESP lane is.
    """
    made: list[BothLanes] = []

    def speak_resp(peer: Peer) -> None:
        for request in requests(peer):
            made[0].over_resp.append(request[0])
            if request[0] == b"INFO":
                told = (
                    f"# Server\r\ntcp_port:{main.port if listens is None else listens}\r\nbinary_port:{port(lane)}\r\n"
                )
                peer.send(bulk(told.encode()))
            else:
                peer.send(resp(request))

    with FakeServer(*scripts, greet=False) as lane, FakeServer(speak_resp) as main:
        made.append(BothLanes(main, lane))
        yield made[0]
