"""Tiers that are slow, failing, late, forgetful or dead: others are served, the budget holds, and no byte is wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import attrs
import pytest
import trio

from pion.server import Started
from pion.storage import budget, tier_waste, tiering
from pion.storage.tiers.base import REMOTE, TierError, TierMissError, TierUnavailableError
from pion.testing.tiers import FlakyTier
from tests.tiering_support import (
    SIDE_BYTES,
    Client,
    expected,
    fetch,
    is_there,
    store_prefix,
    tiered_server,
    until,
)

MAX_BYTES = 6 * (2 * SIDE_BYTES + 2048)
QUICK = attrs.evolve(
    REMOTE, open_s=0.15, put_s=0.15, delete_s=0.3, scan_s=0.3, retry_s=0.01, failures=3, pause_s=0.1, most_pause_s=0.2
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a tier that does nothing."""
    monkeypatch.setattr(budget, "WAIT_S", 0.5)
    monkeypatch.setattr(tiering, "PAUSE_S", 0.5)
    monkeypatch.setattr(tier_waste, "TIDY_S", 0.02)
    monkeypatch.setattr(tiering, "STALL_S", 0.05)


def flaky() -> FlakyTier:
    tier = FlakyTier()
    tier.policy = QUICK
    return tier


def failing(*names: str) -> Callable[[str, str], TierError | None]:
    return lambda name, key: TierUnavailableError("broken today") if name in names else None


@contextmanager
def watched(started: Started) -> Iterator[None]:
    """The budget holds at each step of any task meanwhile."""
    store = started.services.vstore

    class Watch(trio.abc.Instrument):
        def after_task_step(self, task: trio.lowlevel.Task) -> None:
            charged = store.ledger.charged_bytes
            if charged > MAX_BYTES:
                found.append(charged)

    found: list[int] = []
    watch = Watch()
    trio.lowlevel.add_instrument(watch)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(watch)
    assert not found


def names(count: int, letter: str = "p") -> list[str]:
    return [f"{letter}{number}" for number in range(count)]


async def still(started: Started, client: Client, there: list[str]) -> int:
    """Each is whole or a miss; how many are whole."""
    count = 0
    for name in there:
        reply = await fetch(client, name)
        if reply == expected(name):
            count += 1
        else:
            assert isinstance(reply, str), f"{name}: other bytes"
            assert reply.startswith(("-ERR no prefix", "-ERR no row"))
    return count


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_what_can_not_be_written_is_dropped_until_the_tier_is_back(tmp_path, monkeypatch, how) -> None:
    tier = flaky()
    async with tiered_server(MAX_BYTES, tier, tmp_path) as started, Client.of(started) as client:
        store = started.services.vstore
        with watched(started):
            if how == "hangs":
                tier.hangs = True
            else:
                tier.plan = failing("put", "delete")
            for name in names(20):
                assert await store_prefix(client, name) == "OK"
                assert await client.call("PING") == "PONG"
            assert store.statistics().evicted >= 12
            assert await is_there(client, "p19")
            assert await fetch(client, "p19") == expected("p19")
            await until(lambda: started.services.tiering.statistics.failures > 0)
            tier.hangs, tier.plan = False, None
            found = started.services.tiering
            await until(lambda: found.tier.available and not found._writing)
            await until(lambda: trio.current_time() > found._paused_until_s)
            monkeypatch.setattr(budget, "WAIT_S", 60)
            monkeypatch.setattr(tiering, "STALL_S", 60)
            evicted = store.statistics().evicted
            for name in names(20, "q"):
                assert await store_prefix(client, name) == "OK"
            assert store.statistics().evicted == evicted, "it is used again"
            for name in names(20, "q"):
                assert await fetch(client, name) == expected(name)
            await until(lambda: set(tier.inner.objects) == {*store.tier_files.known, tiering.OWNER_KEY})


async def test_others_are_served_while_a_call_hangs(tmp_path, monkeypatch) -> None:
    tier = flaky()
    async with (
        tiered_server(MAX_BYTES, tier, tmp_path) as started,
        Client.of(started) as one,
        Client.of(started) as two,
    ):
        for name in names(5):
            assert await store_prefix(one, name) == "OK"
        tier.policy = started.services.tiering.tier.policy = REMOTE
        tier.hangs = True
        assert await store_prefix(one, "p5") == "OK"
        found = started.services.tiering
        await until(lambda: found._writing)
        for _ in range(20):
            assert await two.call("PING") == "PONG"
            assert await fetch(two, "p5") == expected("p5")
            assert found._writing, "it still hangs"


@pytest.mark.parametrize("restart", [False, True])
async def test_what_can_not_be_read_is_an_error_until_the_tier_is_back(tmp_path, restart) -> None:
    tier = flaky()
    async with tiered_server(MAX_BYTES, tier, tmp_path) as started, Client.of(started) as client:
        for name in names(12):
            assert await store_prefix(client, name) == "OK"
        await until(lambda: started.services.vstore.prefixes[b"p0"].cold)
        if not restart:
            await _unreadable(started, client, tier)
    if restart:
        async with tiered_server(MAX_BYTES, tier, tmp_path) as started, Client.of(started) as client:
            await _unreadable(started, client, tier)


async def _unreadable(started: Started, client: Client, tier: FlakyTier) -> None:
    tier.plan = failing("open")
    assert await is_there(client, "p0")
    for _ in range(5):
        reply = await fetch(client, "p0")
        assert reply.startswith("-ERR no row: its tier does not answer")
        assert await client.call("PING") == "PONG"
    assert await is_there(client, "p0"), "it may be there again"
    tier.plan = None
    await trio.sleep(0.4)
    assert await fetch(client, "p0") == expected("p0")
    tier.hangs = True
    assert await client.call("KV.PREFIX.LOOKUP", "p1") == "HIT"
    reply = await fetch(client, "p1")
    assert reply.startswith("-ERR no row: its tier does not answer")
    tier.hangs = False
    await trio.sleep(0.4)
    assert await fetch(client, "p1") == expected("p1")
    assert started.services.vstore.checksum_failures == 0


async def test_what_can_not_be_seen_yet_is_a_miss(tmp_path) -> None:
    tier = flaky()
    tier.lag_s = 1000
    async with tiered_server(MAX_BYTES, tier, tmp_path) as started, Client.of(started) as client:
        for name in names(12):
            assert await store_prefix(client, name) == "OK"
        await until(lambda: started.services.vstore.prefixes[b"p0"].cold)
        assert await fetch(client, "p0") == "-ERR no row: its bytes on disk are not what was stored, so it was dropped"
        assert not await is_there(client, "p0")
        assert await still(started, client, names(12)) < 12


async def test_lost_deletions_bring_nothing_back(tmp_path) -> None:
    tier = flaky()
    tier.loses_deletes = True
    async with tiered_server(MAX_BYTES, tier, tmp_path) as started, Client.of(started) as client:
        for name in names(12):
            assert await store_prefix(client, name) == "OK"
        await until(lambda: started.services.vstore.prefixes[b"p0"].cold)
        assert await client.call("KV.PREFIX.DROP", *names(12)) == 12
        await until(lambda: not started.services.vstore.tier_files.garbage)
        waste = set(tier.inner.objects)
        assert len(waste) > 1
    tier.loses_deletes = False
    async with tiered_server(MAX_BYTES, tier, tmp_path) as started, Client.of(started) as client:
        assert not any([await is_there(client, name) for name in names(12)])
        await until(lambda: set(tier.inner.objects) == {tiering.OWNER_KEY}), "the start cleans"


async def test_deletions_that_fail_are_made_later(tmp_path) -> None:
    tier = flaky()
    async with tiered_server(MAX_BYTES, tier, tmp_path) as started, Client.of(started) as client:
        for name in names(12):
            assert await store_prefix(client, name) == "OK"
        await until(lambda: started.services.vstore.prefixes[b"p0"].cold)
        tier.plan = failing("delete")
        assert await client.call("KV.PREFIX.DROP", *names(12)) == 12
        await until(lambda: started.services.tiering.statistics.failures > 1)
        assert len(tier.inner.objects) > 1
        tier.plan = None
        await until(lambda: set(tier.inner.objects) == {tiering.OWNER_KEY})


async def test_a_tier_that_deletes_nothing_does_not_lose_all_it_has_to_a_disk_budget(tmp_path) -> None:
    tier = flaky()
    async with tiered_server(MAX_BYTES, tier, tmp_path) as started, Client.of(started) as client:
        for name in names(30):
            assert await store_prefix(client, name) == "OK"
        await until(lambda: started.services.vstore.prefixes[b"p20"].cold)
        tier.plan = failing("delete")
        used = started.services.budget.disk.used_bytes
        assert await client.call("CONFIG", "SET", "max-disk-bytes", used) == "OK"
        for name in names(3, "q"):
            await store_prefix(client, name)
        left = [name for name in names(30) if await is_there(client, name)]
        assert len(left) >= 10
        tier.plan = None


async def test_two_deletions_at_once() -> None:
    """The disk budget deletes, and so does the housekeeping: nothing is deleted twice, and nothing forgotten."""
    tier = flaky()
    tier.delay_s = 0.002
    async with tiered_server(MAX_BYTES, tier) as started, Client.of(started) as client:
        for name in names(20):
            assert await store_prefix(client, name) == "OK"
        await until(lambda: started.services.vstore.prefixes[b"p10"].cold)
        found = started.services.tiering
        async with trio.open_nursery() as nursery:
            for name in names(20):
                assert await client.call("KV.PREFIX.DROP", name) == 1
                nursery.start_soon(found._waste.delete)
                nursery.start_soon(found._waste.delete)
        await until(lambda: set(tier.inner.objects) == {tiering.OWNER_KEY})
        deleted = [key for name, key in tier.calls if name == "delete"]
        assert len(deleted) == len(set(deleted))


async def test_what_could_not_be_written_is_not_kept_by_the_error(tmp_path) -> None:
    """The error may be in a cycle, with the frames that it came through; nobody waits for the garbage collector."""
    tier = flaky()
    gc.disable()
    try:
        async with tiered_server(MAX_BYTES, tier, tmp_path) as started, Client.of(started) as client:
            tier.plan = failing("put")
            for name in names(10):
                assert await store_prefix(client, name) == "OK"
            found = started.services.tiering
            await until(lambda: found.statistics.failures and not found._writing)
            assert await client.call("KV.PREFIX.DROP", *names(10)) > 3
            await until(lambda: started.services.vstore.ledger.sending_bytes == 0)
            assert started.services.vstore.ledger.charged_bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_the_tier_does(tmp_path, seed) -> None:
    """Random commands on a tier that fails at random, loses, delays and damages: whole or a miss."""
    random = Random(seed)
    tier = flaky()

    def plan(name: str, key: str) -> TierError | None:
        if key == tiering.OWNER_KEY or random.random() > 0.3:
            return None
        if name == "open" and random.random() < 0.3:
            return TierMissError("it is gone")
        return TierUnavailableError("not now")

    whole = misses = 0
    for _ in range(2):
        tier.plan = None
        async with tiered_server(MAX_BYTES, tier, tmp_path) as started, Client.of(started) as client:
            started.services.save_at_end = random.random() < 0.5
            tier.plan = plan
            store = started.services.vstore
            with watched(started):
                for _ in range(80):
                    name = f"p{random.randrange(20)}"
                    tier.delay_s, tier.hangs = random.choice([0, 0, 0.01]), random.random() < 0.01
                    what = random.random()
                    if what < 0.45:
                        assert await store_prefix(client, name) in ("OK", "-EXISTS") or await is_there(client, name)
                    elif what < 0.5:
                        await client.call("KV.PREFIX.DROP", name)
                    else:
                        found = await still(started, client, [name])
                        whole, misses = whole + found, misses + 1 - found
                    keys = [key for key in tier.inner.objects if key != tiering.OWNER_KEY]
                    if keys and random.random() < 0.05:
                        key = random.choice(keys)
                        data = bytearray(tier.inner.objects[key])
                        data[random.randrange(len(data))] ^= 1
                        tier.inner.objects[key] = bytes(data)
            tier.plan, tier.hangs, tier.delay_s = None, False, 0
            await until(lambda: started.services.tiering.tier.available)
            assert store.ledger.charged_bytes <= MAX_BYTES
    assert whole > 20
    assert misses > 5
