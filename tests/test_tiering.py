"""Rows that leave memory for a tier and come back, in real servers: the same bytes or a miss, never other bytes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from pion.config import KIB, MIB, Config
from pion.context import Clock
from pion.errors import StartupError
from pion.server import Started, build
from pion.storage import tiering
from pion.storage.tiering import Tiering
from pion.storage.tiers.file import file_name
from pion.testing import FakeClock, running_server
from tests.tiering_support import (
    DIM,
    ROWS,
    SIDE_BYTES,
    Client,
    expected,
    fetch,
    is_there,
    store_prefix,
    tiered_server,
    until,
    values,
)

UNIT = 2 * SIDE_BYTES + 2048
"""About what a prefix of `store_prefix` takes in memory."""

FORMATS = ["fp32", "fp16", "bf16", "int8", "fp8", "turbo4", "turbo2", "mlx4g32", "mlx8g64:bf16"]


@contextlib.asynccontextmanager
async def serving(
    path: Path, units: float = 4, *, data: bool = True, tier: bool = True, clock: Clock | None = None, **options: Any
) -> AsyncIterator[tuple[Started, Client]]:
    """A server with room for so many prefixes, and a client of it."""
    config = Config(max_bytes=int(units * UNIT), tier_dir=str(path / "tier") if tier else "", **options)
    directory = path / "data" if data else None
    async with running_server(config, clock, directory=directory) as started, Client.of(started) as client:
        yield started, client


def tiering_of(started: Started) -> Tiering:
    found = started.services.tiering
    assert found is not None
    return found


def cold(started: Started, name: str) -> bool:
    return started.services.vstore.prefixes[name.encode()].cold


async def fill(client: Client, names: list[str], *options: object, **more: Any) -> None:
    for name in names:
        assert await store_prefix(client, name, *options, **more) == "OK"


def numbered(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


async def settled(started: Started) -> None:
    """Nothing is on its way to the tier any more."""
    store = started.services.vstore
    await until(lambda: store.ledger.charged_bytes <= 0.9 * store.config.max_bytes)
    await until(lambda: not tiering_of(started)._writing)


async def demote(started: Started, client: Client, *names: str) -> None:
    """Push prefixes out of memory by storing others, which are dropped then."""
    number = 0
    while not all(cold(started, name) for name in names):
        number += 1
        assert number < 100
        await store_prefix(client, f"filler{number}")
    for each in range(1, number + 1):
        await client.call("KV.PREFIX.DROP", f"filler{each}")
    await settled(started)


def objects(path: Path) -> list[Path]:
    """The tier's files, but for the one that says whose it is."""
    return sorted(each for each in (path / "tier").glob("*.safetensors") if not each.name.startswith(tiering.OWNER_KEY))


def object_of(path: Path, started: Started, name: str) -> Path:
    (file,) = [each for each in started.services.vstore.tier_files.known.values() if each.unit.name == name.encode()]
    return path / "tier" / file_name(file.key)


async def test_ten_times_the_memory_is_there(tmp_path) -> None:
    names = numbered(40)
    async with serving(tmp_path) as (started, client):
        await fill(client, names)
        assert started.services.vstore.ledger.charged_bytes <= 4 * UNIT
        for name in names:
            assert await is_there(client, name)
            assert await fetch(client, name) == expected(name)
        store = started.services.vstore
        assert store.statistics().evicted == 0
        assert store.ledger.charged_bytes <= store.config.max_bytes
        assert tiering_of(started).statistics.demoted >= 36
        assert len(objects(tmp_path)) >= 36


@pytest.mark.parametrize("fmt", FORMATS)
async def test_the_same_bytes_in_every_format(tmp_path, fmt) -> None:
    async with serving(tmp_path, data=False) as (started, client):
        assert await store_prefix(client, "p", fmt=fmt) == "OK"
        wires = ("fp32", "fp16", "bf16", "native")
        before = [await fetch(client, "p", wire) for wire in wires]
        ranges = await client.call("V.FETCH", "p_pk", 0, "RANGE", 3, 17, "AS", "native")
        await demote(started, client, "p")
        assert [await fetch(client, "p", wire) for wire in wires] == before
        assert await client.call("V.FETCH", "p_pk", 0, "RANGE", 3, 17, "AS", "native") == ranges
        await until(lambda: not cold(started, "p"))
        assert [await fetch(client, "p", wire) for wire in wires] == before
        await demote(started, client, "p")
        assert [await fetch(client, "p", wire) for wire in wires] == before


async def test_promoted_after_two_uses_and_withdrawn_without_writing(tmp_path) -> None:
    async with serving(tmp_path) as (started, client):
        statistics = tiering_of(started).statistics
        await fill(client, ["p"])
        await demote(started, client, "p")
        written = tiering_of(started).tier.statistics().puts
        file = object_of(tmp_path, started, "p")
        assert await fetch(client, "p") == expected("p")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert cold(started, "p")
        assert statistics.promoted == 0
        assert await fetch(client, "p") == expected("p")
        await until(lambda: not cold(started, "p"))
        assert statistics.promoted == 1
        assert statistics.promoted_bytes == 2 * SIDE_BYTES
        assert await fetch(client, "p") == expected("p")
        assert statistics.hits == 2, "what is in memory is no hit of the tier"
        fillers = [f"f{number}" for number in range(6)]
        for name in fillers:
            await store_prefix(client, name)
        await until(lambda: cold(started, "p"))
        assert statistics.withdrawn >= 1
        assert file.exists()
        new = [
            started.services.vstore.tier_files.known[key].unit.name for key in started.services.vstore.tier_files.known
        ]
        assert new.count(b"p") == 1
        assert written >= 1
        assert await fetch(client, "p") == expected("p")


@pytest.mark.parametrize("snapshot", [False, True])
async def test_restart(tmp_path, snapshot) -> None:
    names = numbered(12)
    async with serving(tmp_path) as (started, client):
        await fill(client, names)
        assert await client.call("V.CREATE", "lone", DIM, "VQUANT", "fp32") == "OK"
        rows = values("lone").tobytes()
        assert await client.call("V.STOREBATCH", "lone", 3, 5, ROWS, rows) == "OK"
        await demote(started, client, *names[:10])
        started.services.save_at_end = False
        if snapshot:
            assert await client.call("KV.PREFIX.SAVE") == "OK"
    for units in (4, 1.5, 100):
        async with serving(tmp_path, units) as (started, client):
            assert all(cold(started, name) for name in names), "rows that lie in files, be it the log or the tier's"
            assert started.services.vstore.statistics().prefixes == len(names)
            started.services.save_at_end = False
            for name in names:
                assert await fetch(client, name) == expected(name)
            assert await client.call("V.FETCH", "lone", 3, "RANGE", 5, 5 + ROWS) == rows
            assert started.services.vstore.checksum_failures == 0


async def test_a_start_doesnt_read_what_is_in_the_tier(tmp_path) -> None:
    async with serving(tmp_path) as (started, client):
        await fill(client, numbered(12))
        await settled(started)
    for path in objects(tmp_path):
        path.write_bytes(b"")
    async with serving(tmp_path) as (started, client):
        assert [name for name in numbered(12) if await is_there(client, name)] == numbered(12)


async def test_without_the_tier_directory_it_is_said(tmp_path) -> None:
    async with serving(tmp_path) as (started, client):
        await fill(client, numbered(8))
        await demote(started, client, "p0", "p1")
    async with serving(tmp_path, tier=False) as (started, client):
        assert await is_there(client, "p0")
        reply = await fetch(client, "p0")
        assert reply.startswith("-ERR no row: its tier does not answer (there is none: start the server with")
        assert await client.call("PING") == "PONG"
        assert await fetch(client, "p7") == expected("p7")
        assert await client.call("KV.PREFIX.DROP", "p1") == 1
    async with serving(tmp_path) as (started, client):
        assert await fetch(client, "p0") == expected("p0")
        assert not await is_there(client, "p1")
        await until(lambda: len(objects(tmp_path)) == len(started.services.vstore.tier_files.known))


async def test_the_tier_of_another_data_directory_is_refused(tmp_path) -> None:
    async with serving(tmp_path) as (started, client):
        await fill(client, numbered(8))
        await demote(started, client, "p0")
        there = objects(tmp_path)
    for other in (tmp_path / "other", None):
        with pytest.RaisesGroup(pytest.RaisesExc(StartupError, match="belongs to a server with another --dir")):
            async with tiered_server(4 * UNIT, tmp_path / "tier", other):
                pass
    assert set(there) <= set(objects(tmp_path))
    async with serving(tmp_path) as (started, client):
        assert await fetch(client, "p0") == expected("p0")


async def test_what_is_not_kept_is_cleaned_from_the_tier(tmp_path) -> None:
    async with serving(tmp_path, data=False) as (started, client):
        await fill(client, numbered(8))
        await demote(started, client, "p0")
        assert objects(tmp_path)
    async with serving(tmp_path, data=False) as (started, client):
        await until(lambda: not objects(tmp_path))
        assert not await is_there(client, "p0")


async def test_dropped_objects_are_deleted(tmp_path) -> None:
    async with serving(tmp_path) as (started, client):
        await fill(client, numbered(12))
        await demote(started, client, *numbered(8))
        assert await client.call("KV.PREFIX.DROP", *numbered(12)) == 12
        await until(lambda: not objects(tmp_path))
        assert tiering_of(started).tier.used_bytes <= 64 * KIB
        assert not started.services.vstore.tier_files.known


async def test_storing_into_what_has_left_memory(tmp_path) -> None:
    """An open prefix and a lone session: new rows are in memory beside those in the tier; then all move again."""
    async with serving(tmp_path) as (started, client):
        assert await client.call("KV.PREFIX.REGISTER", "open", DIM, "fp32") == "OK"
        first, second = values("open"), values("open", version=1)
        for side in "kv":
            assert await client.call("V.STOREBATCH", f"open_p{side}", 0, 0, ROWS, first.tobytes()) == "OK"
        await demote(started, client, "open")
        old = object_of(tmp_path, started, "open")
        assert await client.call("V.STOREBATCH", "open_pk", 0, 10, 20, second[10:30].tobytes()) == "OK"
        assert not cold(started, "open")
        both = first.copy()
        both[10:30] = second[10:30]
        assert await client.call("V.FETCH", "open_pk", 0, "RANGE", 0, ROWS) == both.tobytes()
        assert await client.call("V.FETCH", "open_pv", 0, "RANGE", 0, ROWS) == first.tobytes()
        await demote(started, client, "open")
        assert object_of(tmp_path, started, "open") != old
        assert await client.call("V.FETCH", "open_pk", 0, "RANGE", 0, ROWS) == both.tobytes()
        assert await client.call("V.FETCH", "open_pv", 0, "RANGE", 0, ROWS) == first.tobytes()
        await until(lambda: not old.exists())
        assert await client.call("V.STOREBATCH", "open_pv", 1, 0, 8, second[:8].tobytes()) == "OK"
    async with serving(tmp_path) as (started, client):
        assert await client.call("V.FETCH", "open_pk", 0, "RANGE", 0, ROWS) == both.tobytes()
        assert await client.call("V.FETCH", "open_pv", 0, "RANGE", 0, ROWS) == first.tobytes()
        assert await client.call("V.FETCH", "open_pv", 1, "RANGE", 0, 8) == second[:8].tobytes()


async def test_chains(tmp_path) -> None:
    """A leaf leaves memory before what it continues; and it is fetched whole, wherever its parts are."""
    async with serving(tmp_path) as (started, client):
        store = started.services.vstore
        await fill(client, ["root"])
        await fill(client, ["middle"], "PARENT", "root", ROWS)
        await fill(client, ["leaf"], "PARENT", "middle", 2 * ROWS)
        wanted = [b"".join(parts) for parts in zip(*map(expected, ("root", "middle", "leaf")), strict=True)]
        seen = set()
        for number in range(8):
            await store_prefix(client, f"f{number}")
            state = tuple(cold(started, name) for name in ("root", "middle", "leaf"))
            seen.add(state)
            assert state in {(False,) * 3, (False, False, True), (False, True, True), (True,) * 3}
            assert [store.prefixes[name].warm_children for name in (b"root", b"middle")] == [not state[1], not state[2]]
        await until(lambda: cold(started, "root"))
        assert await client.call("KV.PREFIX.DROP", *[f"f{number}" for number in range(8)]) == 8
        assert await fetch(client, "leaf") == wanted
        assert await fetch(client, "leaf") == wanted
        await until(lambda: not any(cold(started, name) for name in ("root", "middle", "leaf")))
        assert await fetch(client, "leaf") == wanted
        await demote(started, client, "root", "middle", "leaf")
        assert await client.call("KV.PREFIX.DROP", "root") != 1
        assert await client.call("KV.PREFIX.DROP", "CASCADE", "root") == 3
        await until(lambda: not any(file.unit.name in (b"root", b"leaf") for file in store.tier_files.known.values()))


async def test_a_pinned_leaf_outside_of_memory_survives_a_tier_that_fails(tmp_path) -> None:
    async with serving(tmp_path) as (started, client):
        await fill(client, ["root"])
        await fill(client, ["leaf"], "PARENT", "root", ROWS)
        while not cold(started, "leaf"):
            await store_prefix(client, f"f{started.services.vstore.registrations}")
        assert await client.call("KV.PREFIX.PIN", "leaf") == 1
        tiering_of(started)._paused_until_s = trio.current_time() + 1000
        for number in range(20):
            await store_prefix(client, f"g{number}")
        assert await is_there(client, "leaf")
        root, leaf = expected("root"), expected("leaf")
        assert await fetch(client, "leaf") == [one + two for one, two in zip(root, leaf, strict=True)]


async def test_expiry_and_pins(tmp_path) -> None:
    clock = FakeClock()
    async with serving(tmp_path, clock=clock) as (started, client):
        await fill(client, ["short"], "EX", 10)
        await fill(client, ["long"], "EX", 1000)
        await fill(client, ["pinned"], "PIN")
        await demote(started, client, "short", "long")
        assert not cold(started, "pinned")
        path = object_of(tmp_path, started, "short")
        clock.advance(11)
        await until(lambda: not path.exists())
        assert not await is_there(client, "short")
        assert await fetch(client, "long") == expected("long")
        assert await client.call("KV.PREFIX.PIN", "long") == 1
        assert await fetch(client, "long") == expected("long")
    async with serving(tmp_path, clock=clock) as (started, client):
        assert await fetch(client, "long") == expected("long")
        for number in range(12):
            await store_prefix(client, f"f{number}")
        assert await fetch(client, "pinned") == expected("pinned")
        assert await fetch(client, "long") == expected("long")


# Objects that are damaged, gone or in use. Fault classes 40, 41, 42, 44, 46.


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1000])


def damage_rows(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-500] ^= 1
    path.unlink()
    path.write_bytes(data)


def damage_head(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.unlink()
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"")


def swap(path: Path) -> None:
    """Another prefix's object, whole and sound, under this name."""
    other = next(each for each in objects(path.parents[1]) if each != path)
    data = other.read_bytes()
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [Path.unlink, cut, empty, damage_rows, damage_head, swap])
@pytest.mark.parametrize("restart", [False, True])
async def test_what_is_not_what_was_put_is_a_miss(tmp_path, harm, restart) -> None:
    async with serving(tmp_path) as (started, client):
        await fill(client, ["p", *numbered(8)])
        await demote(started, client, "p", "p0", "p1")
        path = object_of(tmp_path, started, "p")
        if not restart:
            await _meets(started, client, path, harm)
    if restart:
        async with serving(tmp_path) as (started, client):
            await _meets(started, client, path, harm)
    async with serving(tmp_path) as (started, client):
        assert not await is_there(client, "p")
        assert await fetch(client, "p1") == expected("p1")


async def _meets(started: Started, client: Client, path: Path, harm: Any) -> None:
    harm(path)
    assert await is_there(client, "p"), "nobody has looked yet"
    reply = await fetch(client, "p")
    assert reply == "-ERR no row: its bytes on disk are not what was stored, so it was dropped"
    assert not await is_there(client, "p")
    assert started.services.vstore.checksum_failures == 1
    assert await fetch(client, "p0") == expected("p0")
    assert await store_prefix(client, "p") == "OK"
    assert await fetch(client, "p") == expected("p")
    assert await client.call("KV.PREFIX.DROP", "p") == 1


async def test_an_object_that_is_gone_when_its_prefix_is_to_be_written_anew(tmp_path) -> None:
    """Rows were stored into an open prefix whose others are in the tier: it must not take the server with it."""
    async with serving(tmp_path) as (started, client):
        assert await client.call("KV.PREFIX.REGISTER", "open", DIM, "fp32") == "OK"
        assert await client.call("V.STOREBATCH", "open_pk", 0, 0, ROWS, values("open").tobytes()) == "OK"
        await demote(started, client, "open")
        object_of(tmp_path, started, "open").unlink()
        assert await client.call("V.STOREBATCH", "open_pk", 0, 0, 1, values("open", rows=1).tobytes()) == "OK"
        await fill(client, numbered(10))
        await until(lambda: b"open" not in started.services.vstore.prefixes)
        assert started.services.vstore.checksum_failures == 1
        assert await fetch(client, "p3") == expected("p3")
        assert not started.services.draining.is_set()


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
@pytest.mark.parametrize("end", ["drop", "delete", "close"])
async def test_a_reply_under_way_is_whole_whatever_happens_to_the_object(tmp_path, monkeypatch, wire, end) -> None:
    """Streaming replies: fault class 46."""
    rows = 8192  # 8 MiB a side: more than the sockets hold
    async with serving(tmp_path, 400) as (started, client), Client.of(started) as slow:
        store = started.services.vstore
        await fill(client, ["p"], rows=rows)
        unit = store.prefixes[b"p"]
        tiering_of(started)._over = lambda share: 1 if not unit.cold else 0
        tiering_of(started)._grown.set()
        await until(lambda: unit.cold)
        path = object_of(tmp_path, started, "p")
        await slow.send("KV.PREFIX.FETCH", "p", "AS", wire)
        await until(lambda: started.services.net.statistics().unsent_bytes > 0)
        (file,) = store.tier_files.known.values()
        assert file.opened is not None
        if end == "drop":
            assert await client.call("KV.PREFIX.DROP", "p") == 1
            await until(lambda: not path.exists())
            assert file.opened is None
        elif end == "delete":
            path.unlink()
        else:
            monkeypatch.setattr(tiering, "OPEN_OBJECTS", 0)
            tiering_of(started)._close(file)
            assert file.opened is None
        with trio.fail_after(30):
            reply = await slow.reply()
        kind = "<f4" if wire == "fp32" else "<f2"
        assert reply == [values("p", side, rows=rows).astype(kind).tobytes() for side in "kv"]


async def test_few_objects_are_open_at_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tiering, "OPEN_OBJECTS", 3)
    monkeypatch.setattr(tiering, "PROMOTE_AFTER", 1000)
    names = numbered(20)
    async with serving(tmp_path) as (started, client):
        await fill(client, names)
        await demote(started, client, *names[:15])
        for _ in range(2):
            for name in names:
                assert await fetch(client, name) == expected(name)
                found = tiering_of(started)
                assert found.open_objects <= 3
                opened = [file for file in started.services.vstore.tier_files.known.values() if file.opened is not None]
                assert len(opened) == found.open_objects
        async with trio.open_nursery() as nursery:

            async def fetch_all() -> None:
                async with Client.of(started) as other:
                    for name in names:
                        assert await fetch(other, name) == expected(name)

            for _ in range(5):
                nursery.start_soon(fetch_all)
        assert tiering_of(started).open_objects <= 3
        assert not found._opening
        assert await client.call("KV.PREFIX.DROP", *names) == 20
        assert tiering_of(started).open_objects == 0


async def test_a_prefix_that_is_dropped_or_pinned_while_it_is_written(tmp_path, monkeypatch) -> None:
    async with serving(tmp_path) as (started, client):
        found = tiering_of(started)
        put, hold, held = found.tier.put, trio.Event(), trio.Event()

        async def slow(key: str, head: bytes, parts: Any) -> None:
            await put(key, head, parts)
            held.set()
            await hold.wait()

        await fill(client, ["dropped", "pinned"])
        monkeypatch.setattr(found.tier, "put", slow)
        found._over = lambda share: 1 if not hold.is_set() else 0
        found._grown.set()
        await until(lambda: len(found._writing) == 2 and held.is_set())
        assert {unit.name for unit in found._writing.values()} == {b"dropped", b"pinned"}
        assert await client.call("KV.PREFIX.DROP", "dropped") == 1
        assert await client.call("KV.PREFIX.PIN", "pinned") == 1
        await trio.sleep(0.1)
        hold.set()
        await until(lambda: not found._writing)
        assert not cold(started, "pinned")
        assert found.statistics.demoted == 0
        await until(lambda: not objects(tmp_path))
        assert await fetch(client, "pinned") == expected("pinned")
        assert not await is_there(client, "dropped")


async def test_no_budget_no_demotion(tmp_path) -> None:
    async with serving(tmp_path) as (started, client):
        await fill(client, numbered(8))
        assert await client.call("CONFIG", "SET", "max-bytes", 0) == "OK"
        tiering_of(started)._grown.set()
        before = tiering_of(started).statistics.demoted
        await settled_writes(started)
        names = [f"q{number}" for number in range(30)]
        await fill(client, names)
        assert tiering_of(started).statistics.demoted <= before + 2
        for name in [*numbered(8), *names]:
            assert await fetch(client, name) == expected(name)


async def settled_writes(started: Started) -> None:
    await until(lambda: not tiering_of(started)._writing)


def test_a_tier_needs_a_byte_budget(tmp_path) -> None:
    with pytest.raises(StartupError, match="--max-bytes"):
        build(Config(tier_dir=str(tmp_path)))


async def test_a_large_one_is_served_but_not_brought_back(tmp_path) -> None:
    """More than half of the budget: it would push out everything else."""
    async with serving(tmp_path, 8) as (started, client):
        await fill(client, ["large"], rows=ROWS * 5)
        await demote(started, client, "large")
        for _ in range(6):
            assert await fetch(client, "large") == expected("large", rows=ROWS * 5)
        await trio.sleep(0.1)
        assert cold(started, "large")
        assert started.services.vstore.ledger.charged_bytes < MIB
