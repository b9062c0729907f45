"""What the tests of the V and KV.PREFIX commands share."""

from __future__ import annotations

import struct
from collections.abc import Coroutine
from typing import Any

from pion.config import Config
from pion.replies import Blob, ErrorReply, Simple, Stream
from pion.storage.changes import Change
from pion.storage.ledger import (
    BLOCK_COST,
    CHAIN_COST,
    LAYER_COST,
    PENDING_COST,
    SIDE_COST,
    TABLE_COST,
    UNIT_COST,
)
from pion.storage.unit import SIDES, Unit
from pion.storage.vstore import VStore
from pion.testing import FakeClock, Harness, make_harness


class Recorder:
    """A journal that keeps the records."""

    size_bytes = 0

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def check(self) -> None:
        """Memory doesn't fail."""

    def append(self, change: Change, *, created: int) -> None:
        self.changes.append(change)


def make_kv(clock: FakeClock | None = None, **options: Any) -> Harness:
    """A worker with the V and KV.PREFIX families, a clock that stands still and a journal that remembers."""
    harness = make_harness(Config(plugins="vstore,kvprefix", **options), clock or FakeClock())
    harness.services.vstore.journal = Recorder()
    return harness


def now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a command that doesn't wait for anything."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return plain(done.value)
    coroutine.close()
    raise AssertionError("the command waits")


def plain(reply: Any) -> Any:
    """A reply as simple data: bulk strings as bytes, simple strings as text, errors as "-CODE text"."""
    if isinstance(reply, Blob):
        data = b"".join(bytes(part) for part in reply.parts)
        assert len(data) == reply.nbytes
        return data
    if isinstance(reply, Stream):
        pieces = [bytes(make()) for make in reply.pieces]
        assert all(len(piece) <= 1 << 20 for piece in pieces)
        data = b"".join(pieces)
        assert len(data) == reply.nbytes
        return data
    if isinstance(reply, Simple):
        return reply.text
    if isinstance(reply, ErrorReply):
        return f"-{reply.code} {reply.text}"
    if isinstance(reply, list | tuple):
        return [plain(item) for item in reply]
    return reply


def snapshot(store: VStore) -> dict[Any, Any]:
    """Everything durable in the store, as data that can be compared."""
    return {(unit.lone, unit.name): _unit(unit) for unit in store.units()}


def _unit(unit: Unit) -> dict[str, Any]:
    found: dict[str, Any] = {
        "registered": unit.registered,
        "declaration": unit.declaration,
        "pending": unit.pending and (unit.pending.owner, unit.pending.missing_layers, unit.pending.missing_states),
        "parent": unit.parent and unit.parent.name,
        "offset": unit.offset,
        "children": sorted(child.name for child in unit.children or ()),
        "table": unit.table and (unit.table.block_size, unit.table.chain, unit.table.inherited, unit.table.matchable),
        "meta": unit.meta,
        "expires_s": unit.expires_s,
        "pinned": unit.pinned,
    }
    for side in SIDES:
        rows = unit.rows(side)
        found[f"schema{side}"] = unit.schema(side)
        found[f"rows{side}"] = {
            (index, row): bytes(block.view(row, row + 1, layer.row_bytes))
            for index, layer in (rows.layers if rows is not None else {}).items()
            for block in layer.blocks
            for row in range(block.start, block.stop)
        }
    return found


def recount(store: VStore) -> tuple[int, int, int]:
    """Charged bytes, payload bytes and sessions, counted anew from the units."""
    charged = payload = sessions = 0
    for unit in store.units():
        charged += UNIT_COST + len(unit.name) + len(unit.meta or b"")
        charged += CHAIN_COST * (unit.parent is not None) + PENDING_COST * (unit.pending is not None)
        if unit.table is not None:
            members = unit.table.members
            charged += TABLE_COST + len(unit.table.chain) + (members.nbytes if members is not None else 0)
        sessions += unit.sessions
        for side in SIDES:
            rows = unit.rows(side)
            if rows is None:
                continue
            charged += SIDE_COST
            for layer in rows.layers.values():
                charged += LAYER_COST + BLOCK_COST * len(layer.blocks)
                charged += sum({id(block.memory): block.memory.nbytes for block in layer.blocks}.values())
                payload += layer.count * layer.row_bytes
    return charged, payload, sessions


# Short calls on prefixes of fp32 rows with one value each.


def call(kv: Harness, *args: Any) -> Any:
    return now(kv.call(*args))


def rows(tag: str, start: int, stop: int) -> bytes:
    return b"".join(b"%s%03d" % (tag.encode(), index) for index in range(start, stop))


def fill(kv: Harness, ns: str, start: int, stop: int, layers: int = 1) -> None:
    """Rows of one fp32 value each, whose four bytes say side and id."""
    for layer in range(layers):
        for side in "kv":
            reply = call(kv, "V.STOREBATCH", f"{ns}_p{side}", layer, start, stop - start, rows(side, start, stop))
            assert reply == "OK"


def declare(kv: Harness, ns: str, tokens: int, *options: Any, layers: int = 1) -> None:
    assert call(kv, "KV.PREFIX.REGISTER", ns, 1, "fp32", "LAYERS", layers, "TOKENS", tokens, *options) == "OK"
    fill(kv, ns, 0, tokens, layers)


def pack(*hashes: int) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def lookup(kv: Harness, ns: str, *options: Any) -> Any:
    return call(kv, "KV.PREFIX.LOOKUP", ns, *options)
