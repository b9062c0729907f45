"""--max-bytes at each of its entries: what is too much is evicted or refused, and a refusal changes nothing."""

from __future__ import annotations

import struct

import pytest
import trio

from pion.commands.vstore_reaper import Reaper
from pion.config import KIB, MIB, Config
from pion.storage.changes import CreateSession, Register, SetPin, StoreRows
from pion.storage.data_directory import open_disk
from pion.storage.formats import get_format
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.schema import Schema
from pion.storage.vstore import VStore
from pion.storage.vstore_log import VStoreLog
from pion.testing import FakeClock, Harness, MemoryDisk, running_server
from tests.commands.kv_support import call, declare, make_kv, recount, snapshot
from tests.tiering_support import SIDE_BYTES, Client, expected, fetch, is_there, store_prefix, until, values

SHAPE = Schema.uniform(get_format(b"fp32"), 16)


def small(max_bytes: int, **options: object) -> Harness:
    return make_kv(max_bytes=max_bytes, max_sessions=1000, **options)


def refuses(kv: Harness, *args: object) -> None:
    """The command is refused for want of memory, and nothing changes."""
    store = kv.services.vstore
    before, charged = snapshot(store), store.ledger.charged_bytes
    reply = call(kv, *args)
    assert isinstance(reply, str)
    assert reply.startswith("-OOM ")
    assert "--max-bytes" in reply
    assert snapshot(store) == before
    assert store.ledger.charged_bytes == charged == recount(store)[0]
    assert call(kv, "KV.PREFIX.LOOKUP", "whatever") == "MISS"


def pinned(kv: Harness, rows: int) -> None:
    """Something that nothing can make room in: 64 bytes a row and side."""
    assert call(kv, "KV.PREFIX.REGISTER", "pinned", 16, "fp32", "PIN") == "OK"
    for side in "kv":
        assert call(kv, "V.STOREBATCH", f"pinned_p{side}", 0, 0, rows, bytes(64 * rows)) == "OK"


def test_create() -> None:
    kv = small(8000)
    pinned(kv, 40)
    count = 0
    while call(kv, "V.CREATE", f"s{count}", 16) == "OK":
        count += 1
        assert kv.services.vstore.ledger.charged_bytes <= 8000
        if count > 100:
            break
    assert count > 100, "older ones make room"
    left = sorted(kv.services.vstore.lone)
    assert left == sorted(b"s%d" % number for number in range(count - len(left), count))
    assert kv.services.vstore.statistics().evicted == count - len(left)


def test_nothing_evictable() -> None:
    kv = small(9400)
    pinned(kv, 52)
    refuses(kv, "V.CREATE", "s" * 1000, 16)
    refuses(kv, "V.STOREBATCH", "pinned_pk", 0, 52, 20, bytes(64 * 20))
    refuses(kv, "V.STOREBATCH", "pinned_pk", 0, 52, 20, bytes(32 * 20), "AS", "fp16")
    refuses(kv, "V.STORE", "pinned_pk", 1, 0, bytes(64))
    refuses(kv, "KV.PREFIX.REGISTER", "p", 16, "fp32", "META", bytes(1000))
    refuses(kv, "KV.PREFIX.REGISTER", "pinned", 16, "fp32", "META", bytes(1000))
    refuses(kv, "KV.PREFIX.REGISTER", "pinned", 16, "fp32", "BLOCKS", 1, 100, struct.pack("<100Q", *range(100)))
    assert call(kv, "KV.PREFIX.UNPIN", "pinned") == 1
    assert call(kv, "KV.PREFIX.REGISTER", "p", 16, "fp32", "META", bytes(1000)) == "OK"
    assert call(kv, "KV.PREFIX.LOOKUP", "pinned") == "MISS"


def test_what_is_pending_and_what_the_command_needs_does_not_make_room() -> None:
    kv = small(11_000)
    other = kv.client()
    assert call(other, "KV.PREFIX.REGISTER", "pending", 16, "fp32", "LAYERS", 1, "TOKENS", 40) == "OK"
    assert call(other, "V.STOREBATCH", "pending_pk", 0, 0, 40, bytes(64 * 40)) == "OK"
    declare(kv, "parent", 1)
    assert call(kv, "KV.PREFIX.REGISTER", "child", 1, "fp32", "PARENT", "parent", 1) == "OK"
    refuses(kv, "V.STOREBATCH", "child_pk", 0, 0, 1500, bytes(4 * 1500))
    assert call(kv, "V.STOREBATCH", "child_pk", 0, 0, 100, bytes(4 * 100)) == "OK"
    refuses(kv, "KV.PREFIX.REGISTER", "grandchild", 1, "fp32", "PARENT", "child", 1, "META", bytes(5000))
    assert call(kv, "KV.PREFIX.REGISTER", "other", 1, "fp32", "META", bytes(5000)) == "OK"
    assert [call(kv, "KV.PREFIX.LOOKUP", ns) for ns in ("parent", "child")] == ["MISS", "MISS"]
    assert call(other, "V.STOREBATCH", "pending_pv", 0, 0, 2, bytes(64 * 2)) == "OK"


def test_leaves_go_before_what_they_continue() -> None:
    kv = small(6 * KIB)
    declare(kv, "root", 1)
    declare(kv, "leaf", 1, "PARENT", "root", 1)
    assert call(kv, "KV.PREFIX.LOOKUP", "root") == "HIT"
    for number in range(40):
        declare(kv, f"p{number}", 1)
        names = set(kv.services.vstore.prefixes)
        assert b"leaf" not in names or b"root" in names
    assert not {b"root", b"leaf"} & set(kv.services.vstore.prefixes)


def test_rows_that_grow_when_they_are_stored() -> None:
    """fp16 on the wire, fp32 in memory: the budget counts what is kept."""
    kv = small(20_000)
    assert call(kv, "V.CREATE", "s", 16, "VQUANT", "fp32") == "OK"
    before = kv.services.vstore.ledger.charged_bytes
    assert call(kv, "V.STOREBATCH", "s", 0, 0, 200, bytes(32 * 200), "AS", "fp16") == "OK"
    assert kv.services.vstore.ledger.charged_bytes - before > 64 * 200
    refuses(kv, "V.STOREBATCH", "s", 0, 200, 200, bytes(32 * 200), "AS", "fp16")


def test_a_pending_prefix_goes_when_its_rows_are_refused() -> None:
    kv = small(10_000)
    pinned(kv, 40)
    assert call(kv, "KV.PREFIX.REGISTER", "p", 16, "fp32", "LAYERS", 1, "TOKENS", 60) == "OK"
    assert call(kv, "V.STOREBATCH", "p_pk", 0, 0, 10, bytes(640)) == "OK"
    other = kv.client()
    assert call(other, "V.STOREBATCH", "p_pk", 0, 10, 40, bytes(64 * 40)).startswith("-BUSY")
    assert call(kv, "V.STOREBATCH", "p_pk", 0, 10, 50, bytes(64 * 50)).startswith("-OOM")
    assert kv.services.vstore.statistics().pending == 0
    assert call(kv, "V.STOREBATCH", "p_pk", 0, 10, 1, bytes(64)).startswith("-ERR no session")
    assert call(kv, "V.STOREBATCH", "pinned_pk", 0, 0, 1, bytes(64)) == "OK"


def test_options_of_what_is_there_need_room_too() -> None:
    """BLOCKS that are set anew, and a declaration of what was made with V.CREATE."""
    hashes = struct.pack("<90Q", *range(90))
    for used in range(0, 1500, 20):
        kv = small(7000)
        for side in "kv":
            call(kv, "V.CREATE", f"p_p{side}", 16, "VQUANT", "fp32")
        assert call(kv, "KV.PREFIX.REGISTER", "open", 16, "fp32", "BLOCKS", 1, 1, bytes(8)) == "OK"
        assert (
            call(kv, "KV.PREFIX.REGISTER", "below", 16, "fp32", "PARENT", "open", 0, "BLOCKS", 1, 1, bytes(8)) == "OK"
        )
        assert call(kv, "KV.PREFIX.REGISTER", "full", 16, "fp32", "PIN", "META", bytes(2500 + used)) == "OK"
        for args in (
            ("open", 16, "fp32", "BLOCKS", 1, 90, hashes),
            ("p", 16, "fp32", "LAYERS", 1, "TOKENS", 3),
        ):
            assert call(kv, "KV.PREFIX.REGISTER", *args) == "OK" or used > 500
            assert kv.services.vstore.ledger.charged_bytes <= 7000


def test_a_membership_that_has_no_room_is_not_kept() -> None:
    kept: list[bool] = []
    bitmaps: set[bytes] = set()
    for meta in range(0, 4000, 40):
        kv = small(8000)
        hashes = struct.pack("<50Q", *range(50))
        assert call(kv, "KV.PREFIX.REGISTER", "full", 16, "fp32", "PIN", "META", bytes(3000 + meta)) == "OK"
        if call(kv, "KV.PREFIX.REGISTER", "p", 1, "fp32", "LAYERS", 1, "TOKENS", 50, "BLOCKS", 1, 50, hashes) != "OK":
            break
        if call(kv, "V.STOREBATCH", "p_pk", 0, 0, 50, bytes(200)) != "OK":
            break
        if call(kv, "V.STOREBATCH", "p_pv", 0, 0, 50, bytes(200)) != "OK":
            break
        bitmaps.add(call(kv, "KV.PREFIX.MEMBERSHIP", "p", 50, hashes))
        table = kv.services.vstore.prefixes[b"p"].table
        assert table is not None
        kept.append(table.members is not None)
        assert kv.services.vstore.ledger.charged_bytes <= 8000
    assert len(bitmaps) == 1, "it is answered all the same"
    assert set(kept) == {True, False}


async def test_a_limit_that_is_lowered_at_run_time() -> None:
    async with running_server(Config(max_bytes=4 * MIB)) as started, Client.of(started) as client:
        names = [f"p{number}" for number in range(20)]
        for name in names:
            assert await store_prefix(client, name) == "OK"
        assert await client.call("KV.PREFIX.PIN", "p0") == 1
        assert await fetch(client, "p1") == expected("p1")
        store = started.services.vstore
        assert store.ledger.charged_bytes > 20 * 2 * SIDE_BYTES
        assert await client.call("CONFIG", "SET", "max-bytes", 4 * 2 * SIDE_BYTES) == "OK"
        await until(lambda: store.ledger.charged_bytes <= 4 * 2 * SIDE_BYTES)
        left = [name for name in names if await is_there(client, name)]
        assert left == ["p0", "p1", "p19"]
        assert await client.call("CONFIG", "SET", "max-bytes", 1000) == "OK"
        await until(lambda: store.statistics().prefixes == 1)
        assert await fetch(client, "p0") == expected("p0")
        reply = await client.call("V.CREATE", "s", 4)
        assert reply.startswith("-OOM")
        assert await client.call("CONFIG", "SET", "max-bytes", 0) == "OK"
        assert await client.call("V.CREATE", "s", 4) == "OK"


async def test_a_payload_that_does_not_fit_is_read_away() -> None:
    """Refused before memory is taken; the connection goes on, and what was being filled is dropped."""
    async with running_server(Config(max_bytes=MIB)) as started, Client.of(started) as client:
        store, peak = started.services.vstore, 0
        assert await store_prefix(client, "kept", "PIN") == "OK"
        assert await client.call("KV.PREFIX.REGISTER", "p", 256, "fp32", "LAYERS", 1, "TOKENS", 4096) == "OK"
        reply = await client.call("V.STOREBATCH", "p_pk", 0, 0, 2048, bytes(2 * MIB))
        assert reply.startswith("-OOM no memory to receive 2097152 bytes")
        assert await client.call("PING") == "PONG"
        assert store.statistics().pending == 0
        assert not await is_there(client, "p")
        assert await fetch(client, "kept") == expected("kept")
        for number in range(20):
            assert await store_prefix(client, f"p{number}") == "OK"
            peak = max(peak, store.ledger.charged_bytes)
        assert MIB / 2 < peak <= MIB
        assert await is_there(client, "kept")


async def test_transactions() -> None:
    async with running_server(Config(max_bytes=MIB)) as started, Client.of(started) as client:
        assert await store_prefix(client, "pinned", "PIN", rows=256) == "OK"
        assert await client.call("KV.PREFIX.REGISTER", "open", 256, "fp32") == "OK"
        assert await client.call("MULTI") == "OK"
        rows = values("open", rows=200).tobytes()
        for layer in range(2):
            assert await client.call("V.STOREBATCH", "open_pk", layer, 0, 200, rows) == "QUEUED"
        reply = await client.call("V.STOREBATCH", "open_pk", 2, 0, 200, rows)
        assert reply.startswith("-OOM no memory to receive 204800 bytes now")
        assert reply.endswith("max-bytes 1048576)")
        assert (await client.call("EXEC")).startswith("-EXECABORT")
        assert await client.call("MULTI") == "OK"
        for layer in range(2):
            assert await client.call("V.STOREBATCH", "open_pk", layer, 0, 200, rows) == "QUEUED"
        replies = await client.call("EXEC")
        assert len(replies) == 2
        assert started.services.vstore.ledger.charged_bytes <= MIB
        await until(lambda: started.services.vstore.in_flight() == 0)
        assert await fetch(client, "pinned") == expected("pinned", rows=256)


def test_a_start_with_a_smaller_limit() -> None:
    """What a log holds is replayed whole, and shrinks as soon as the store is in use: small rows are dropped."""
    disk = MemoryDisk()
    big = trio.run(_fill_a_log, disk)
    assert big > 60_000

    async def restart() -> None:
        store = VStore(Config(max_bytes=20_000), FakeClock(), NullJournal(), Ledger())
        data = open_disk(disk, store.config, [VStoreLog(store)], lambda: 0)
        async with trio.open_nursery() as nursery:
            await nursery.start(data.run)
            assert store.ledger.charged_bytes > 20_000
            assert store.shrink(10)
            while store.shrink(10):
                pass
            assert store.ledger.charged_bytes <= 20_000
            assert store.prefixes[b"pinned"].pinned
            newest = {b"s%d" % number for number in range(100 - len(store.lone), 100)}
            assert store.lone.keys() == newest
            nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await data.close(save=False, grace_s=1)

    trio.run(restart)


async def _fill_a_log(disk: MemoryDisk) -> int:
    store = VStore(Config(max_sessions=1000), FakeClock(), NullJournal(), Ledger())
    data = open_disk(disk, store.config, [VStoreLog(store)], lambda: 0)
    async with trio.open_nursery() as nursery:
        await nursery.start(data.run)
        store.commit(Register(ns=b"pinned", k_schema=SHAPE, v_schema=SHAPE, owner=1))
        store.commit(SetPin(b"pinned", True))
        for number in range(100):
            store.commit(CreateSession(b"s%d" % number, SHAPE))
            store.commit(StoreRows(b"s%d" % number, 0, 0, 1, bytes(64), 1))
        nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await data.close(save=False, grace_s=1)
    return store.ledger.charged_bytes


async def test_a_server_that_starts_with_a_smaller_limit(tmp_path) -> None:
    async with running_server(Config(), directory=tmp_path) as started, Client.of(started) as client:
        for number in range(30):
            assert await store_prefix(client, f"p{number}", rows=16) == "OK"  # 16 KiB a side: read at the start
            assert await store_prefix(client, f"large{number}", rows=128) == "OK"  # 128 KiB a side: stays in the file
    limit = 10 * 2 * 16 * KIB
    async with running_server(Config(max_bytes=limit), directory=tmp_path) as started, Client.of(started) as client:
        store = started.services.vstore
        await until(lambda: store.ledger.charged_bytes <= limit)
        assert store.statistics().evicted > 0
        for number in range(30):
            assert await fetch(client, f"large{number}") == expected(f"large{number}", rows=128)
        assert store.ledger.charged_bytes <= limit
        there = [number for number in range(30) if await is_there(client, f"p{number}")]
        assert there == list(range(30 - len(there), 30))
        assert len(there) >= 3
        assert await fetch(client, "p29") == expected("p29", rows=16)


async def test_compaction_waits_for_room() -> None:
    """What is left of a large buffer is copied out piece by piece, and both are there meanwhile."""
    kv = small(9 * MIB)
    ledger = kv.services.vstore.ledger
    assert call(kv, "KV.PREFIX.REGISTER", "p", 1024, "fp32", "PIN") == "OK"
    assert call(kv, "V.STOREBATCH", "p_pk", 0, 0, 1280, bytes(5 * MIB)) == "OK"
    assert call(kv, "V.STOREBATCH", "p_pk", 0, 0, 700, bytes(700 * 4 * KIB)) == "OK"
    assert ledger.has_work
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, ledger.charged_bytes)
            await trio.lowlevel.checkpoint()

    reaper = Reaper(kv.services)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await reaper.once()
        assert ledger.has_work, "there is no room to copy all of it, and nothing else may go"
        assert kv.services.vstore.ledger.charged_bytes > 8 * MIB
        kv.services.vstore.config = Config(max_bytes=12 * MIB)
        await reaper.once()
        assert not ledger.has_work
        assert ledger.charged_bytes < 6 * MIB
        nursery.cancel_scope.cancel()
    assert peak <= 12 * MIB


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
async def test_others_are_served_while_one_is_refused(wire: str) -> None:
    async with running_server(Config(max_bytes=MIB)) as started, Client.of(started) as one, Client.of(started) as two:
        assert await store_prefix(one, "pinned", "PIN", rows=400) == "OK"
        assert await one.call("V.CREATE", "s", 256, "VQUANT", "fp32") == "OK"
        for _ in range(5):
            size = 1024 * (4 if wire == "fp32" else 2)
            reply = await one.call("V.STOREBATCH", "s", 0, 0, 256 * size // 1024, bytes(256 * size), "AS", wire)
            assert reply.startswith("-OOM"), reply
            assert await fetch(two, "pinned") == expected("pinned", rows=400)
        assert started.services.vstore.ledger.charged_bytes <= MIB
