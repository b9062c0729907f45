"""What the tests of the ATTEND commands share: a server in a thread, clients of both lanes, and the oracle.

The clients are written for these tests alone, on plain sockets, and the oracle is attention in float64 by its formula.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import trio

from pion.commands import attend_common
from pion.compute.attention import Attended, Backend, Query, Resident
from pion.compute.backends import make_backend
from pion.config import Config
from pion.context import Clock, Services
from pion.errors import Status
from pion.server import Started, only
from pion.testing import running_server

T = TypeVar("T")
Array = npt.NDArray[Any]

PATIENCE_S = 60.0
"""A reply that takes longer fails the test."""

# The server.


class Server:
    """A server whose loop runs in another thread, so that tests can be blocking clients."""

    def __init__(self) -> None:
        self.started: Started
        self.token: trio.lowlevel.TrioToken
        self.stop = trio.Event()
        self.failure: BaseException | None = None

    @property
    def services(self) -> Services:
        return self.started.worker.services

    @property
    def attention(self) -> attend_common.Attention:
        return self.services.state[attend_common.PLUGIN]

    def run(self, function: Callable[[], T]) -> T:
        """A function's result, run on the server's loop."""
        return trio.from_thread.run_sync(function, trio_token=self.token)

    def figures(self) -> dict[str, Any]:
        return dict(self.run(lambda: attend_common.rows_of_info(self.attention)))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until something is so, on the server's loop."""
        end_s = time.monotonic() + PATIENCE_S
        while not self.run(condition):
            assert time.monotonic() < end_s, "it never came"
            time.sleep(0.001)


def configured(**options: Any) -> Config:
    """The families that these tests need."""
    return Config(plugins="connection,server,vstore,kvprefix,attend", **options)


@contextmanager
def serving(
    config: Config | None = None,
    backend: Gate | Callable[[], Backend] | str = "numpy",
    *,
    clock: Clock | None = None,
    directory: Path | None = None,
) -> Iterator[Server]:
    """A server that computes with this backend, or what this function makes.

    At the end of the block it must have stopped in order.
    """
    found = Server()
    ready = threading.Event()

    def make(*, fp16: bool = False) -> Backend:
        if isinstance(backend, Gate):
            return backend.made(fp16)
        return make_backend(backend, fp16=fp16) if isinstance(backend, str) else backend()

    async def main() -> None:
        found.token = trio.lowlevel.current_trio_token()
        async with running_server(config or configured(), clock, directory=directory) as started:
            found.started = started
            ready.set()
            await found.stop.wait()

    def thread() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            found.failure = error
        finally:
            ready.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend_common, "make_backend", make)
        runner = threading.Thread(target=thread)
        runner.start()
        ready.wait()
        try:
            if found.failure is None:
                yield found
        finally:
            # A test may have stopped it already.
            with suppress(trio.RunFinishedError):
                trio.from_thread.run_sync(found.stop.set, trio_token=found.token)
            runner.join()
    if found.failure is not None:
        raise only(found.failure) if isinstance(found.failure, BaseExceptionGroup) else found.failure


# The clients.


class Wire:
    """A client of the RESP lane. Errors come back as text with a leading '-', simple strings as text."""

    lane = "resp"

    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.started.port), PATIENCE_S)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        self.socket.close()

    def send(self, *args: Any) -> None:
        """A request, without reading its reply."""
        parts = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in args]
        data = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
        self.socket.sendall(data)

    def read(self) -> Any:
        """The next reply."""
        line = self._file.readline()
        assert line.endswith(b"\r\n"), "the server closed the connection"
        kind, text = line[:1], line[1:-2]
        if kind in b"+-":
            return text.decode() if kind == b"+" else "-" + text.decode()
        if kind == b":":
            return int(text)
        if kind == b"$":
            if int(text) < 0:
                return None
            data = self._file.read(int(text) + 2)
            assert len(data) == int(text) + 2
            return data[:-2]
        assert kind == b"*"
        return [self.read() for _ in range(int(text))]

    def call(self, *args: Any) -> Any:
        self.send(*args)
        return self.read()

    def ask(
        self, form: Form, sid: bytes, layer: int, numbers: Sequence[int], blobs: Sequence[bytes], w: int = 0
    ) -> Any:
        return self.call(form.command, sid, layer, *numbers, *blobs, *([w] if w else []))

    def lookup(self, sid: bytes, layer: int = 0) -> str:
        return self.call("ATTEND.PREFIX.LOOKUP", sid, layer)

    def store(self, sid: bytes, layer: int, keys: Array, values: Array) -> Any:
        return self.call("ATTEND.PREFIX.STORE", sid, layer, *keys.shape, blob(keys), blob(values))


class BinaryWire:
    """A client of the binary lane, with the same answers."""

    lane = "binary"

    def __init__(self, server: Server) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.started.binary_port), PATIENCE_S)
        self._file = self.socket.makefile("rb")
        self._id = 0

    def __enter__(self) -> BinaryWire:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        self.socket.close()

    def send_frame(self, code: int, meta: bytes, body: bytes) -> None:
        """A request, without reading its answer."""
        self._id += 1
        head = struct.pack("<HBBIB3sIQ", 0xCA5E, 1, code, self._id, 0, bytes(3), len(meta), len(body))
        self.socket.sendall(head + meta + body)

    def frame(self, code: int, meta: bytes, body: bytes) -> tuple[Status, bytes]:
        """Status and body of the answer to one request."""
        self.send_frame(code, meta, body)
        answer = self._file.read(24)
        magic, version, echoed, number, status, zero, meta_len, body_len = struct.unpack("<HBBIB3sIQ", answer)
        assert (magic, version, echoed, number, zero, meta_len) == (0xCA5E, 1, code, self._id, bytes(3), 0)
        data = self._file.read(body_len)
        assert len(data) == body_len
        return Status(status), data

    def _plain(self, code: int, meta: bytes, body: bytes = b"") -> Any:
        status, data = self.frame(code, meta, body)
        if status is Status.OK:
            return data
        assert data.startswith(status.name.encode() + b" "), "of these commands each status has the code of its name"
        return "-" + data.decode()

    def ask(
        self, form: Form, sid: bytes, layer: int, numbers: Sequence[int], blobs: Sequence[bytes], w: int = 0
    ) -> Any:
        meta = place(sid, layer, *numbers, w)
        return self._plain(form.code, meta, b"".join(blobs))

    def lookup(self, sid: bytes, layer: int = 0) -> str:
        status, data = self.frame(0x21, place(sid, layer), b"")
        assert data == b""
        return {Status.OK: "HIT", Status.COLDMISS: "COLD", Status.MISS: "MISS"}[status]

    def store(self, sid: bytes, layer: int, keys: Array, values: Array) -> Any:
        found = self._plain(0x20, place(sid, layer, *keys.shape), blob(keys) + blob(values))
        return "OK" if found == b"" else found


LANES = {"resp": Wire, "binary": BinaryWire}


def place(sid: bytes, *numbers: int) -> bytes:
    """Meta: a name, and u32 numbers."""
    return struct.pack("<H", len(sid)) + sid + struct.pack(f"<{len(numbers)}I", *numbers)


@attrs.frozen
class Form:
    """One of the five queries: its name on either lane, its numbers, and its blobs."""

    command: str
    code: int
    numbers: tuple[str, ...]
    blobs: tuple[str, ...]


QUERY = Form("ATTEND.PREFIX.QUERY", 0x22, ("H", "D", "top_k"), ("Q",))
FUSED = Form("ATTEND.PREFIX.QUERY_FUSED", 0x24, ("H_q", "D", "S_suf", "H_kv"), ("Q", "K_suf", "V_suf", "head_map"))
SPARSE = Form("ATTEND.PREFIX.QUERY_SPARSE", 0x25, ("H", "D", "K_sparse_max"), ("Q", "indices", "counts"))
AUTO = Form("ATTEND.PREFIX.QUERY_SPARSE_AUTO", 0x26, ("H_q", "D", "B", "K_top", "H_kv"), ("Q", "head_map"))
AUTO_FUSED = Form(
    "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED",
    0x27,
    ("H_q", "D", "B", "K_top", "H_kv", "S_suf"),
    ("Q", "K_suf", "V_suf", "head_map"),
)
FORMS = (QUERY, FUSED, SPARSE, AUTO, AUTO_FUSED)


class Gate:
    """A backend that computes, or loads, only while it is let. It remembers what it was given, and in which thread."""

    def __init__(self, name: str = "numpy") -> None:
        self.name = name
        self.device = "not made"
        self._inner: Backend
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.batches: list[int] = []
        self.loads = 0
        self.threads: set[int] = set()
        self.failure: BaseException | None = None
        """Raised in place of what is asked for."""

    def made(self, fp16: bool) -> Gate:
        """On the compute thread."""
        self._inner = make_backend(self.name, fp16=fp16)
        self.device = self._inner.device
        return self

    @property
    def value_bytes(self) -> int:
        return self._inner.value_bytes

    def _pass(self) -> None:
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.open.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure

    def shut(self) -> None:
        """From now on whoever comes waits; `entered` is set by the first one."""
        self.open.clear()
        self.entered.clear()

    def load(self, keys: Array, values: Array) -> Resident:
        self.loads += 1
        self._pass()
        return self._inner.load(keys, values)

    def load_rows(self, keys: Array, values: Array, heads: int) -> Resident:
        self.loads += 1
        self._pass()
        return self._inner.load_rows(keys, values, heads)

    def attend(self, resident: Resident, queries: Sequence[Query]) -> list[Attended]:
        self.batches.append(len(queries))
        self._pass()
        return self._inner.attend(resident, queries)

    def attend_once(self, keys: Array, values: Array, query: Query) -> Attended:
        self.batches.append(1)
        self._pass()
        return self._inner.attend_once(keys, values, query)


# Numbers.


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def blob(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def ids(*values: Any) -> Array:
    return np.array(values, np.uint32)


def floats(data: Any, *shape: int) -> Array:
    """An answer as an array; an error fails the test with its text."""
    assert isinstance(data, bytes), data
    assert len(data) == 4 * math.prod(shape)
    return np.frombuffer(data, np.float32).reshape(shape)


def split_lse(data: Any, heads: int, count: int, head_dim: int) -> tuple[Array, Array]:
    """Output and LSE of an answer that has both."""
    assert isinstance(data, bytes), data
    output = 4 * heads * count * head_dim
    return floats(data[:output], heads, count, head_dim), floats(data[output:], heads, count)


# The oracle.


@attrs.define
class Oracle:
    """Attention in float64. K and V `[H_kv, N, D]`; queries `[H_q, M, D]`."""

    keys: Array
    values: Array
    head_map: Array | None = None

    def __attrs_post_init__(self) -> None:
        self.keys = self.keys.astype(np.float64)
        self.values = self.values.astype(np.float64)

    def _heads(self, q: Array) -> Array:
        return np.arange(q.shape[0]) if self.head_map is None else self.head_map

    def scores(self, q: Array) -> Array:
        """`[H_q, M, N]`."""
        keys = self.keys[self._heads(q)]
        return np.einsum("hmd,hnd->hmn", q.astype(np.float64), keys) / math.sqrt(q.shape[2])

    def visible(self, q: Array, window: int = 0) -> Array:
        """Which rows each query may read, as a mask `[H_q, M, N]`."""
        rows = self.keys.shape[1]
        mask = np.ones((q.shape[0], q.shape[1], rows), bool)
        if window:
            mask[:, :, : max(0, rows - window)] = False
        return mask

    def top(self, q: Array, top_k: int, window: int = 0) -> Array:
        """A mask of the `top_k` visible rows with the highest scores; ties: the lower index."""
        mask = self.visible(q, window)
        if not top_k:
            return mask
        scores = np.where(mask, self.scores(q), -np.inf)
        order = np.argsort(-scores, axis=2, kind="stable")[:, :, :top_k]
        best = np.zeros_like(mask)
        np.put_along_axis(best, order, True, axis=2)
        return best & mask

    def blocks(self, q: Array, size: int, top: int, window: int = 0) -> tuple[Array, float]:
        """A mask of the best blocks, and by how much the worst of them beats the best of the others."""
        rows = self.keys.shape[1]
        first = max(0, rows - window) if window else 0
        starts = range(first, rows, size)
        mask = np.zeros((q.shape[0], 1, rows), bool)
        margin = math.inf
        for head, kv_head in enumerate(self._heads(q)):
            means = np.array([self.keys[kv_head, start : start + size].mean(axis=0) for start in starts])
            scores = means @ q[head, 0].astype(np.float64)
            order = np.argsort(-scores, kind="stable")
            for index in order[:top]:
                mask[head, 0, starts[index] : starts[index] + size] = True
            if top < len(order):
                margin = min(margin, scores[order[top - 1]] - scores[order[top]])
        return mask, margin

    def attend(self, q: Array, mask: Array, suffix: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
        """Output and LSE over the rows of the mask, and over a suffix that is causal and aligned at its end."""
        heads = self._heads(q)
        scores = np.where(mask, self.scores(q), -np.inf)
        values = self.values[heads]
        if suffix is not None:
            keys, behind = (each.astype(np.float64)[heads] for each in suffix)
            count, length = q.shape[1], keys.shape[1]
            more = np.einsum("hmd,hnd->hmn", q.astype(np.float64), keys) / math.sqrt(q.shape[2])
            seen = np.arange(length)[None, :] <= length - count + np.arange(count)[:, None]
            scores = np.concatenate([scores, np.where(seen[None], more, -np.inf)], axis=2)
            values = np.concatenate([values, behind], axis=1)
        highest = scores.max(axis=2, keepdims=True)
        weights = np.exp(scores - highest)
        total = weights.sum(axis=2, keepdims=True)
        return (weights / total) @ values, (highest + np.log(total))[:, :, 0]


def close(found: Array, expected: Array, most: float = 1e-4) -> None:
    """Within the bound that the protocol gives for normally distributed numbers in fp32."""
    assert found.shape == expected.shape
    assert float(np.abs(found - expected).max(initial=0.0)) <= most
