"""Replays a trace of requests against a VStore, as clients do: MATCH, use what is there, register the rest."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import attrs

from pion.config import Config
from pion.storage.changes import Declaration, Hashes, Register, StoreRows
from pion.storage.eviction import EvictionPolicy
from pion.storage.formats import get_format
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.schema import Schema
from pion.storage.vstore import VStore

TRACE = Path(__file__).resolve().parent.parent / "data" / "mooncake-conversation-trace.jsonl.gz"
BLOCK_TOKENS = 512
BLOCK_MS = 512 * 0.555
"""Prefill time of the first block of a text; that at depth d takes 1 + 0.02 d times as long."""
ROW_BYTES = 512
"""Of one token on one side: a block's rows then weigh a hundred times what is charged beside them."""
MAX_SESSIONS = 1_048_576


@attrs.frozen
class Model:
    """What a model's prefill costs against the first one's, and the bytes of its rows."""

    name: bytes
    cost: float = 1.0
    row_bytes: int = ROW_BYTES

    @property
    def block_bytes(self) -> int:
        """Rows of one block on both sides."""
        return 2 * BLOCK_TOKENS * self.row_bytes

    def block_ms(self, depth: int) -> float:
        """Prefill time of the block at that depth."""
        return BLOCK_MS * self.cost * (1 + 0.02 * depth)


@attrs.frozen
class Request:
    """One request: when, of which model, and its blocks from the start of the text on."""

    time_s: float
    model: Model
    blocks: list[int]


class TraceClock:
    """The time of the request that is replayed."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def wall_s(self) -> float:
        return 1_700_000_000.0 + self.time_s

    def monotonic_s(self) -> float:
        return self.time_s


def requests(model_of: Callable[[list[int]], Model]) -> list[Request]:
    """The trace; `model_of` says which model a request with these blocks is for."""
    with gzip.open(TRACE, "rt", encoding="utf-8") as lines:
        return [
            Request(found["timestamp"] / 1000, model_of(found["hash_ids"]), found["hash_ids"])
            for found in map(json.loads, lines)
        ]


def different_bytes(trace: list[Request]) -> int:
    """Bytes of the rows of all different blocks."""
    return sum(model.block_bytes for _, model in {(block, each.model) for each in trace for block in each.blocks})


@attrs.define
class Saved:
    """Prefill seconds of what was there, and of all."""

    avoided_s: float = 0.0
    all_s: float = 0.0


def replay(
    trace: list[Request],
    eviction: str,
    max_bytes: int,
    from_s: float,
    policy: Callable[[TraceClock], EvictionPolicy] | None = None,
    segment_blocks: int = 1,
) -> Saved:
    """Replay all of it with so many bytes for rows; what is returned counts requests from `from_s` on only.

    A prefix is `segment_blocks` blocks of a request, each a continuation of the one before it. The store and its policy
    are the server's, driven without a socket. All rows are one buffer, which is charged each time as if it were new.
    """
    clock = TraceClock()
    config = Config(max_sessions=MAX_SESSIONS, max_bytes=max_bytes, eviction=eviction)
    store = VStore(config, clock, NullJournal(), Ledger(), policy(clock) if policy is not None else None)
    rows: dict[tuple[int, int], bytes] = {}
    saved = Saved()
    for each in trace:
        clock.time_s = each.time_s
        model, blocks = each.model, each.blocks
        times = [model.block_ms(depth) / 1000 for depth in range(len(blocks))]
        # A block's hash depends on the model, as a client's does: the rows are not the same.
        salt = crc32(model.name) << 32
        hashes = struct.pack(f"<{len(blocks)}Q", *(salt | block for block in blocks))
        found = store.match(hashes, BLOCK_TOKENS, model.name)
        there = 0
        parent: bytes | None = None
        if found is not None:
            # The match may go on with another text; what holds the last shared block is used and continued.
            unit, there, _ = found
            while unit.parent is not None and unit.offset >= there * BLOCK_TOKENS:
                unit = unit.parent
            parent = unit.name
            store.touch(unit)
        if each.time_s >= from_s:
            saved.avoided_s += sum(times[:there])
            saved.all_s += sum(times)
        schema = Schema.uniform(get_format(b"fp16"), model.row_bytes // 2)
        for start in range(there, len(blocks), segment_blocks):
            stop = min(start + segment_blocks, len(blocks))
            tokens = (stop - start) * BLOCK_TOKENS
            ns = b"%s%d" % (model.name, blocks[stop - 1])
            store.commit(
                Register(
                    ns=ns,
                    k_schema=schema,
                    v_schema=schema,
                    declaration=Declaration(1, tokens),
                    hashes=Hashes(BLOCK_TOKENS, hashes[8 * start : 8 * stop]),
                    parent=parent,
                    offset=start * BLOCK_TOKENS,
                    prefill_ms=sum(times[start:stop]) * 1000,
                    owner=1,
                )
            )
            data = rows.setdefault((tokens, model.row_bytes), bytes(tokens * model.row_bytes))
            for side in (b"_pk", b"_pv"):
                store.commit(StoreRows(ns + side, 0, 0, tokens, data, owner=1))
            parent = ns
    return saved


def uses(trace: list[Request]) -> Iterator[tuple[bytes, float]]:
    """The name of each block with the time of each of its uses, in order."""
    for each in trace:
        for block in each.blocks:
            yield b"%s%d" % (each.model.name, block), each.time_s
