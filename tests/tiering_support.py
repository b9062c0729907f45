"""What the tests of budgets and tiers share: a client on Trio, servers with a tier of the test's, and rows that can be
told from one another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import trio

from pion.config import KIB, Config
from pion.server import Started
from pion.storage.tiers import registry
from pion.storage.tiers.base import Tier
from pion.storage.tiers.guard import GuardedTier
from pion.testing import running_server

ROWS = 64
DIM = 256
SIDE_BYTES = ROWS * DIM * 4
"""One side of a prefix of `store_prefix`, 64 KiB."""


class Client:
    """A client of a server in this process, over TCP."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._data = bytearray()

    @classmethod
    @asynccontextmanager
    async def of(cls, started: Started) -> AsyncIterator[Client]:
        async with await trio.open_tcp_stream("127.0.0.1", started.port) as stream:
            yield cls(stream)

    async def send(self, *args: object) -> None:
        parts = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in args]
        await self.stream.send_all(
            b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
        )

    async def reply(self) -> Any:
        """Simple strings and errors as text (errors with their "-"), bulk strings as bytes."""
        line = await self._line()
        kind, rest = line[:1], line[1:]
        if kind in b"*%>~":
            return [await self.reply() for _ in range(int(rest) * (1 + (kind == b"%")))] if rest != b"-1" else None
        if kind == b"$":
            if rest == b"-1":
                return None
            return (await self._take(int(rest) + 2))[:-2]
        if kind == b":":
            return int(rest)
        return line.decode() if kind == b"-" else rest.decode()

    async def call(self, *args: object) -> Any:
        with trio.fail_after(60):
            await self.send(*args)
            return await self.reply()

    async def _line(self) -> bytes:
        while (end := self._data.find(b"\r\n")) < 0:
            await self._more()
        line = bytes(self._data[:end])
        del self._data[: end + 2]
        return line

    async def _take(self, nbytes: int) -> bytes:
        while len(self._data) < nbytes:
            await self._more()
        found = bytes(self._data[:nbytes])
        del self._data[:nbytes]
        return found

    async def _more(self) -> None:
        data = await self.stream.receive_some(256 * KIB)
        if not data:
            raise EOFError("the server closed the connection")
        self._data += data


def values(name: str, side: str = "k", *, rows: int = ROWS, dim: int = DIM, version: int = 0) -> np.ndarray:
    """Rows that nothing else has: float32, exact in every wire type but not small in any."""
    seed = sum(byte * 31**index for index, byte in enumerate(f"{name}|{side}|{version}".encode())) % 2**32
    return np.random.default_rng(seed).integers(-8, 8, (rows, dim)).astype(np.float32)


async def store_prefix(client: Client, name: str, *options: object, rows: int = ROWS, fmt: str = "fp32") -> Any:
    """Declare and fill a prefix of one layer; the last reply."""
    reply = await client.call("KV.PREFIX.REGISTER", name, DIM, fmt, "LAYERS", 1, "TOKENS", rows, *options)
    if reply != "OK":
        return reply
    for side in "kv":
        data = values(name, side, rows=rows).tobytes()
        reply = await client.call("V.STOREBATCH", f"{name}_p{side}", 0, 0, rows, data)
        if reply != "OK":
            return reply
    return reply


async def fetch(client: Client, name: str, wire: str = "fp32") -> Any:
    """K and V as they are on the wire, or the error."""
    return await client.call("KV.PREFIX.FETCH", name, "AS", wire)


def expected(name: str, rows: int = ROWS) -> list[bytes]:
    """What `fetch` gives of a prefix of `store_prefix`."""
    return [values(name, side, rows=rows).tobytes() for side in "kv"]


async def is_there(client: Client, name: str) -> bool:
    return await client.call("KV.PREFIX.LOOKUP", name) == "HIT"


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait until something is so."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110  what is waited for sets no event
            await trio.sleep(0.005)


@asynccontextmanager
async def tiered_server(
    max_bytes: int, tier: Tier | str | Path, directory: Path | None = None, **options: Any
) -> AsyncIterator[Started]:
    """A server with a byte budget and a tier: a directory, or one that the test made."""
    config = Config(max_bytes=max_bytes, tier_dir=str(tier) if not isinstance(tier, Tier) else "test", **options)
    if not isinstance(tier, Tier):
        async with running_server(config, directory=directory) as started:
            yield started
        return
    found = registry.tier_from
    registry.tier_from = lambda where, tiers: GuardedTier(tier)  # type: ignore[assignment]
    try:
        async with running_server(config, directory=directory) as started:
            registry.tier_from = found
            yield started
    finally:
        registry.tier_from = found
