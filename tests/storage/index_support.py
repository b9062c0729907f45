"""What the tests of attention indexes share: rows that say where they belong, a recount, and a server on any disk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import numpy as np
import trio

from pion.config import Config
from pion.errors import CommandError
from pion.storage.attention_index import INDEX_COST, PIECE_COST, IndexTable
from pion.storage.attention_index_blocks import fill
from pion.storage.attention_index_log import AttentionIndexLog
from pion.storage.data_directory import DataDirectory, open_disk
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.region import MappedMemory
from pion.storage.vstore import VStore
from pion.testing import FakeClock, MemoryDisk

State = dict[bytes, tuple[int, bytes, bytes]]
"""Name -> D, all keys, all values."""


def row_data(name: bytes, dim: int, start: int, stop: int) -> tuple[bytes, bytes]:
    """Keys and values that say which row they are of."""
    numbers = np.arange(start * dim, stop * dim, dtype=np.float32) + 1000 * len(name) + name[-1]
    return numbers.tobytes(), (-numbers - 0.5).tobytes()


def make_log(**options: Any) -> AttentionIndexLog:
    return AttentionIndexLog(VStore(Config(**options), FakeClock(), NullJournal(), Ledger()))


def append(log: AttentionIndexLog, name: bytes, dim: int, count: int) -> Any:
    """The next rows of an index; returns what a client waits for."""
    found = log.table.find(name)
    start = found.rows if found is not None else 0
    rows, waiting = log.append_rows(name, dim, count, *row_data(name, dim, start, start + count))
    assert rows == start + count
    return waiting


def contents(table: IndexTable) -> State:
    """Everything that can be fetched."""
    found: State = {}
    for index in table:
        views = [block.view(block.start, block.stop, index.row_bytes) for block in index.blocks]
        found[index.name] = (index.dim, b"".join(keys for keys, _ in views), b"".join(values for _, values in views))
        edges = [(block.start, block.stop) for block in index.blocks]
        assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
    return found


def expected(**rows: tuple[int, int]) -> State:
    """The state with these indexes: name -> D and number of rows."""
    return {
        name.encode(): (dim, *row_data(name.encode(), dim, 0, count)) for name, (dim, count) in rows.items() if count
    }


def check_counts(table: IndexTable) -> None:
    """What the ledger says, counted anew; nothing may be in flight."""
    charged = payload = mapped = 0
    for index in table:
        buffers = {each for block in index.blocks for each in (block.keys, block.values)}
        whole = len(index.blocks) == 1 and not index.blocks[0].mapped
        assert index.reserved_bytes == (0 if whole else index.nbytes)
        held = sum(each.nbytes for each in buffers if not each.mapped)
        cost = INDEX_COST + len(index.name) + PIECE_COST * len(index.blocks) + held + index.reserved_bytes
        assert index.memory_bytes == cost
        charged += cost
        payload += 2 * 4 * index.dim * index.rows
        mapped += sum(each.nbytes for each in buffers if each.mapped)
        for memory in buffers:
            of = [block for block in index.blocks for each in (block.keys, block.values) if each is memory]
            assert memory.live == sum(block.rows * index.row_bytes for block in of)
    ledger = table.ledger
    assert (ledger.charged_bytes, ledger.payload_bytes) == (charged, payload)
    assert ledger.sending_bytes == 0
    assert ledger.mapped_bytes == mapped


def gather(log: AttentionIndexLog, name: bytes) -> None:
    """What a query does first."""
    index = log.table.index(name)
    if not index.whole:
        sources = index.blocks
        assert all(block.verify() for block in sources)
        target = log.table.begin_gather(index, sources)
        fill(target, sources, index.row_bytes)
        log.table.end_gather(index, sources, target)
        assert index.whole


@attrs.define(eq=False)
class IndexServer:
    """Indexes on a disk, without sockets."""

    log: AttentionIndexLog
    data: DataDirectory

    @property
    def state(self) -> State:
        """Everything that can be fetched."""
        return contents(self.log.table)

    async def append(self, name: bytes, dim: int, count: int) -> None:
        """As KV.STORE does it. Raises CommandError."""
        await self.data.admit()
        await append(self.log, name, dim, count)

    async def drop(self, name: bytes) -> None:
        """As KV.DROP does it. Raises CommandError."""
        await self.data.admit()
        _, waiting = self.log.drop_index(name)
        if waiting is not None:
            await waiting

    @asynccontextmanager
    async def running(self) -> AsyncIterator[IndexServer]:
        """Its tasks run in the block; they end as with the process at its end."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.data.run)
            yield self
            nursery.cancel_scope.cancel()


def open_indexes(disk: MemoryDisk, mode: str = "always", log: AttentionIndexLog | None = None) -> IndexServer:
    """Read a disk. Raises StartupError."""
    log = log or make_log()
    ledger = log.table.ledger
    config = Config(dir="memory", wal_sync=mode)
    return IndexServer(log, open_disk(disk, config, [log], lambda: ledger.payload_bytes, segment_limit=3000))


def mapped_blocks(table: IndexTable) -> int:
    """How many blocks lie in files; each must be what was stored."""
    blocks = [block for index in table for block in index.blocks if block.mapped]
    for block in blocks:
        assert isinstance(block.keys, MappedMemory)
        assert block.verify()
    return len(blocks)


def refused(call: Any, *args: Any) -> str:
    """The text of the CommandError that a call raises."""
    try:
        call(*args)
    except CommandError as error:
        return f"{error.code} {error}"
    raise AssertionError("it was not refused")
