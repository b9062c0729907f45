"""Attention requests as bytes on both lanes, a blocking round trip, and the server's own clock around its computing."""

from __future__ import annotations

import selectors
import struct
from collections.abc import Sequence
from time import perf_counter_ns

import attrs
import numpy as np
import numpy.typing as npt

from benchmarks._lib.raw import RawClient, request

Floats = npt.NDArray[np.float32]

HEADER = struct.Struct("<HBBIB3xIQ")
MAGIC, VERSION = 0xCA5E, 1
ATTEND_QUERY = 0x22


@attrs.frozen
class Shape:
    """One layer's attention: heads, prefix rows, head width, queries."""

    heads: int
    rows: int
    dim: int
    queries: int = 1

    @property
    def answer_bytes(self) -> int:
        """Length of the answer's payload; with several queries the LSE follows the output."""
        lse = self.heads * self.queries if self.queries > 1 else 0
        return 4 * (self.heads * self.queries * self.dim + lse)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V in fp32."""
        return 2 * 4 * self.heads * self.rows * self.dim

    def keys_values(self, seed: int = 1) -> tuple[Floats, Floats]:
        """Normally distributed K and V, `[heads, rows, dim]`."""
        rng = np.random.default_rng(seed)
        shape = (self.heads, self.rows, self.dim)
        return rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)

    def query(self, seed: int = 2) -> Floats:
        """Q, `[heads, queries, dim]`."""
        return np.random.default_rng(seed).standard_normal((self.heads, self.queries, self.dim), np.float32)


def resp_query(sid: str, shape: Shape, q: Floats) -> bytes:
    """ATTEND.PREFIX.QUERY over RESP."""
    return request("ATTEND.PREFIX.QUERY", sid, 0, shape.heads, shape.dim, 0, q.tobytes())


def binary_query(sid: str, shape: Shape, q: Floats) -> bytes:
    """ATTEND_QUERY over the binary lane."""
    name = sid.encode()
    meta = struct.pack("<H", len(name)) + name + struct.pack("<5I", 0, shape.heads, shape.dim, 0, 0)
    body = q.tobytes()
    return HEADER.pack(MAGIC, VERSION, ATTEND_QUERY, 1, 0, len(meta), len(body)) + meta + body


def resp_answer_bytes(shape: Shape) -> int:
    """Length of the whole answer over RESP."""
    return len(b"$%d\r\n\r\n" % shape.answer_bytes) + shape.answer_bytes


def binary_answer_bytes(shape: Shape) -> int:
    """Length of the whole answer over the binary lane."""
    return HEADER.size + shape.answer_bytes


def store(client: RawClient, sid: str, shape: Shape, keys: Floats, values: Floats) -> None:
    """ATTEND.PREFIX.STORE, checked."""
    client.send(
        request("ATTEND.PREFIX.STORE", sid, 0, shape.heads, shape.rows, shape.dim, keys.tobytes(), values.tobytes())
    )
    client.ok()


class Trip:
    """One request sent again and again over a connection of its own, its answer of known length received."""

    def __init__(self, client: RawClient, wire: bytes, answer_bytes: int) -> None:
        self.client, self._wire = client, wire
        self.answer = bytearray(answer_bytes)
        self._view = memoryview(self.answer)

    def __call__(self) -> None:
        """One round trip."""
        self.client.send(self._wire)
        self.client.exactly(self._view)

    def output(self, shape: Shape) -> Floats:
        """The output of the last answer."""
        count = shape.heads * shape.queries * shape.dim
        data = self.answer[-2 - shape.answer_bytes : -2] if self.answer[:1] == b"$" else self.answer[HEADER.size :]
        return np.frombuffer(bytes(data), np.float32)[:count].reshape(shape.heads, shape.queries, shape.dim)


@attrs.frozen
class Computed:
    """The server's own count of what it computed."""

    queries: int
    batches: int
    compute_ns: int

    def since(self, before: Computed) -> Computed:
        """The difference."""
        return Computed(
            self.queries - before.queries, self.batches - before.batches, self.compute_ns - before.compute_ns
        )


def computed(client: RawClient) -> Computed:
    """Ask the server for its counters."""
    found = client.call("ATTEND.INFO")
    pairs = dict(zip(found[::2], found[1::2], strict=True))
    queries, batches, compute_us = (int(pairs[name]) for name in (b"queries", b"batches", b"compute_us"))
    return Computed(queries, batches, 1000 * compute_us)


def all_at_once(clients: Sequence[RawClient], wire: bytes, answer_bytes: int, seconds: float) -> float:
    """Answers a second when every client sends its next request as soon as it has the last answer."""
    waiting = selectors.DefaultSelector()
    missing = [answer_bytes] * len(clients)
    scratch = memoryview(bytearray(answer_bytes))
    for index, client in enumerate(clients):
        waiting.register(client.socket, selectors.EVENT_READ, index)
        client.send(wire)
    answers, start = 0, perf_counter_ns()
    end = start + int(seconds * 1e9)
    left = len(clients)
    with waiting:
        while left:
            for key, _ in waiting.select():
                index: int = key.data
                missing[index] -= clients[index].socket.recv_into(scratch[: missing[index]])
                if missing[index]:
                    continue
                answers += 1
                if perf_counter_ns() < end:
                    missing[index] = answer_bytes
                    clients[index].send(wire)
                else:
                    waiting.unregister(clients[index].socket)
                    left -= 1
    return answers * 1e9 / (perf_counter_ns() - start)
