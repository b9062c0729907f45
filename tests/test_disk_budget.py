"""--max-disk-bytes: tier, log and snapshots together stay below it, whatever is written; fault class 34."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from pion.config import KIB, MIB, Config
from pion.server import Started
from pion.storage import disk_budget
from pion.testing import running_server
from tests.tiering_support import DIM, SIDE_BYTES, Client, expected, fetch, is_there, store_prefix, until

OBJECT_BYTES = 2 * SIDE_BYTES + 4 * KIB


def disk_bytes(path: Path) -> int:
    """Sizes of all files below a directory; a file that goes meanwhile counts for nothing."""
    found = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                found += (Path(folder) / name).stat().st_size
            except FileNotFoundError:
                continue
    return found


@asynccontextmanager
async def serving(
    path: Path, limit: int, *, tier: bool, max_bytes: int = 2 * MIB
) -> AsyncIterator[tuple[Started, Client]]:
    config = Config(
        max_bytes=max_bytes if tier else 0, tier_dir=str(path / "tier") if tier else "", max_disk_bytes=limit
    )
    async with running_server(config, directory=path / "data") as started, Client.of(started) as client:
        yield started, client


def numbered(count: int, letter: str = "p") -> list[str]:
    return [f"{letter}{number}" for number in range(count)]


@pytest.mark.parametrize("tier", [True, False])
async def test_ten_times_the_budget_is_written(tmp_path, tier) -> None:
    limit, peak = 4 * MIB, 0
    names = numbered(10 * limit // (2 * SIDE_BYTES))
    async with serving(tmp_path, limit, tier=tier, max_bytes=MIB) as (started, client):
        async with trio.open_nursery() as nursery:

            async def sample() -> None:
                nonlocal peak
                while True:
                    peak = max(peak, await trio.to_thread.run_sync(disk_bytes, tmp_path))
                    await trio.sleep(0.005)

            nursery.start_soon(sample)
            for name in names:
                assert await store_prefix(client, name) == "OK"
            nursery.cancel_scope.cancel()
        disk = started.services.budget.disk
        assert disk.evicted > 100
        await until(lambda: disk.over(0) <= 0)
        left = [name for name in names if await is_there(client, name)]
        assert len(left) >= 5
        for name in left:
            assert await fetch(client, name) == expected(name)
    assert limit / 3 < peak <= limit + OBJECT_BYTES
    assert disk_bytes(tmp_path) <= limit
    async with serving(tmp_path, limit, tier=tier, max_bytes=MIB) as (started, client):
        assert [name for name in names if await is_there(client, name)] == left
        for name in left:
            assert await fetch(client, name) == expected(name)


async def test_a_start_with_less_than_there_is(tmp_path) -> None:
    """A large tier directory, unfinished files in it and some of another version: all of it counts, and gives way."""
    names = numbered(60)
    async with serving(tmp_path, 0, tier=True, max_bytes=MIB) as (started, client):
        for name in names:
            assert await store_prefix(client, name) == "OK"
    whole = sum(path.stat().st_size for path in (tmp_path / "tier").glob("*.safetensors"))
    for number in range(20):
        (tmp_path / "tier" / f"{number:032x}.pion-tier-1.safetensors.{number:016x}.tmp").write_bytes(bytes(64 * KIB))
        (tmp_path / "tier" / f"{number + 100:032x}.pion-tier-7.safetensors").write_bytes(bytes(64 * KIB))
    foreign = tmp_path / "tier" / "notes.txt"
    foreign.write_bytes(b"mine")
    limit = 4 * MIB
    assert whole > limit
    async with serving(tmp_path, limit, tier=True, max_bytes=MIB) as (started, client):
        disk = started.services.budget.disk
        await until(lambda: disk.over(0) <= 0 and disk_bytes(tmp_path) <= limit)
        kept = [path.name for path in (tmp_path / "tier").iterdir()]
        assert not [name for name in kept if name.endswith(".tmp") or "tier-7" in name]
        left = [name for name in names if await is_there(client, name)]
        assert 5 <= len(left) < 60
        assert left == names[-len(left) :], "the least recently used went"
        for name in left:
            assert await fetch(client, name) == expected(name)
        assert await store_prefix(client, "new") == "OK"
        assert await fetch(client, "new") == expected("new")
        assert disk_bytes(tmp_path) <= limit + OBJECT_BYTES
    assert foreign.read_bytes() == b"mine"


@pytest.mark.parametrize("tier", [True, False])
async def test_it_is_lowered_at_run_time(tmp_path, tier) -> None:
    async with serving(tmp_path, 0, tier=tier, max_bytes=MIB) as (started, client):
        for name in numbered(60):
            assert await store_prefix(client, name) == "OK"
        limit = 3 * MIB
        assert disk_bytes(tmp_path) > 2 * limit
        assert await client.call("CONFIG", "SET", "max-disk-bytes", limit) == "OK"
        await until(lambda: started.services.budget.disk.over(0) <= 0 and disk_bytes(tmp_path) <= limit)
        left = [name for name in numbered(60) if await is_there(client, name)]
        assert len(left) >= 3
        for name in left:
            assert await fetch(client, name) == expected(name)


async def test_nothing_can_give_way(tmp_path, monkeypatch) -> None:
    """All is pinned: -OOM, nothing changes, what is there is served, and a prefix that was being filled goes."""
    monkeypatch.setattr(disk_budget, "WORTH_BYTES", 64 * KIB)  # as small as the rest: a MiB is half of this budget
    async with serving(tmp_path, 2 * MIB, tier=False) as (started, client):
        names = []
        while (reply := await store_prefix(client, f"p{len(names)}", "PIN")) == "OK":
            names.append(f"p{len(names)}")
        assert reply.startswith("-OOM ")
        assert "--max-disk-bytes" in reply
        assert len(names) >= 4
        store = started.services.vstore
        assert store.statistics().pending == 0
        before = store.statistics(), store.ledger.charged_bytes
        for _ in range(3):
            assert (await client.call("KV.PREFIX.REGISTER", "new", DIM, "fp32", "META", bytes(64 * KIB))).startswith(
                "-OOM "
            )
        assert (store.statistics(), store.ledger.charged_bytes) == before
        assert disk_bytes(tmp_path) <= 2 * MIB + OBJECT_BYTES
        for name in names:
            assert await fetch(client, name) == expected(name)
        assert await client.call("KV.PREFIX.UNPIN", names[0]) == 1
        assert await client.call("KV.PREFIX.DROP", names[0]) == 1
        assert await client.call("KV.PREFIX.UNPIN", names[1]) == 1
        assert await store_prefix(client, "new") == "OK"
        assert await fetch(client, "new") == expected("new")
        assert disk_bytes(tmp_path) <= 2 * MIB + OBJECT_BYTES


async def test_more_than_the_whole_budget_is_refused_at_once(tmp_path) -> None:
    async with serving(tmp_path, MIB, tier=False) as (_started, client):
        assert await store_prefix(client, "p") == "OK"
        reply = await client.call("KV.PREFIX.REGISTER", "new", DIM, "fp32", "META", bytes(2 * MIB))
        assert reply.startswith("-OOM ")
        assert await fetch(client, "p") == expected("p"), "nothing went for what can't fit"


async def test_the_log_gives_way_before_what_is_stored(tmp_path) -> None:
    """The same rows again and again: a snapshot shortens the log, and nothing is evicted."""
    async with serving(tmp_path, 4 * MIB, tier=False) as (started, client):
        assert await store_prefix(client, "kept") == "OK"
        assert await client.call("V.CREATE", "s", DIM, "VQUANT", "fp32") == "OK"
        for _ in range(200):
            assert await client.call("V.STOREBATCH", "s", 0, 0, 64, bytes(SIDE_BYTES)) == "OK"
            assert started.services.budget.disk.used_bytes <= 4 * MIB
        assert started.services.vstore.statistics().evicted == 0
        assert await fetch(client, "kept") == expected("kept")
        assert 1 <= started.services.data.snapshots.statistics().taken <= 30
