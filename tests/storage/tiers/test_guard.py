"""What a tier costs that is slow, failing or gone: never more than its deadlines and pauses say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import attrs
import pytest
import trio
from trio.testing import MockClock

from pion.errors import StartupError
from pion.replies import Buffer
from pion.storage.tiers.base import REMOTE, OpenedObject, TierError, TierMissError, TierPolicy, TierUnavailableError
from pion.storage.tiers.guard import GuardedTier
from pion.testing.tier_conformance import make_key, make_layout
from pion.testing.tiers import FlakyTier, MemoryTier
from tests.storage.tiers.tier_support import listed

KEY = make_key()
LAYOUT = make_layout(KEY)

POLICY = attrs.evolve(REMOTE, attempts=1, failures=3, pause_s=1.0, most_pause_s=5.0)


def guarded(policy: TierPolicy = POLICY, **options: float) -> tuple[GuardedTier, FlakyTier]:
    flaky = FlakyTier(MemoryTier(), **options)
    return GuardedTier(flaky, policy), flaky


def fails(name: str, key: str) -> TierError:
    return TierUnavailableError(f"{name} fails")


async def put(tier: GuardedTier) -> None:
    await tier.put(KEY, LAYOUT.head, LAYOUT.parts)


async def refused(tier: GuardedTier, match: str = "left alone after") -> None:
    """A call is refused at once."""
    began_s = trio.current_time()
    with pytest.raises(TierUnavailableError, match=match):
        await tier.open(KEY)
    assert trio.current_time() == began_s


CALLS: dict[str, tuple[Callable[[GuardedTier], Awaitable[object]], float]] = {
    "put": (put, POLICY.put_s + LAYOUT.nbytes / POLICY.put_bytes_per_s),
    "open": (lambda tier: tier.open(KEY), POLICY.open_s),
    "delete": (lambda tier: tier.delete([KEY]), POLICY.delete_s),
    "scan": (listed, POLICY.scan_s),
    "clean": (lambda tier: tier.clean(lambda key: True), POLICY.clean_s),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_ends_at_its_deadline(name: str, autojump_clock: MockClock) -> None:
    tier, flaky = guarded()
    call, deadline_s = CALLS[name]
    flaky.hangs = True
    began_s = trio.current_time()
    with pytest.raises(TierUnavailableError, match=r"memory://: no answer in [\d.]+ s"):
        await call(tier)
    assert trio.current_time() - began_s == pytest.approx(deadline_s)
    found = tier.statistics()
    assert (found.timeouts, found.failures) == (1, 1)
    assert "no answer" in found.last_error


async def test_a_large_object_gets_more_time(autojump_clock: MockClock) -> None:
    tier, flaky = guarded(delay_s=POLICY.put_s + 5)
    with pytest.raises(TierUnavailableError):
        await put(tier)
    large = make_layout(KEY, int(10 * POLICY.put_bytes_per_s))
    await tier.put(KEY, large.head, large.parts)
    assert flaky.used_bytes == large.nbytes


async def test_after_some_failures_it_is_left_alone_for_a_while(autojump_clock: MockClock) -> None:
    tier, flaky = guarded()
    await put(tier)
    flaky.plan = fails
    for _ in range(POLICY.failures):
        assert tier.available
        with pytest.raises(TierUnavailableError, match="open fails"):
            await tier.open(KEY)
    assert not tier.available
    made = len(flaky.calls)
    for _ in range(10):
        await refused(tier, "left alone after 3 failures: open fails")
    assert len(flaky.calls) == made
    found = tier.statistics()
    assert (found.refused, found.pauses, found.failures) == (10, 1, 3)
    assert 0 < found.paused_s <= POLICY.pause_s

    flaky.plan = None
    await trio.sleep(POLICY.pause_s)
    assert tier.available
    (await tier.open(KEY)).close()
    assert tier.statistics().paused_s == 0
    flaky.plan = fails  # it begins to count anew
    for _ in range(POLICY.failures - 1):
        with pytest.raises(TierUnavailableError, match="open fails"):
            await tier.open(KEY)
    assert tier.available


async def test_each_pause_is_twice_as_long_up_to_a_limit(autojump_clock: MockClock) -> None:
    tier, flaky = guarded()
    flaky.plan = fails
    for _ in range(POLICY.failures):
        with pytest.raises(TierUnavailableError):
            await tier.open(KEY)
    for pause_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        await trio.sleep(pause_s - 0.01)
        await refused(tier)
        await trio.sleep(0.01)
        with pytest.raises(TierUnavailableError, match="open fails"):  # the trial
            await tier.open(KEY)
    assert tier.statistics().pauses == 6


async def test_one_trial_at_a_time(autojump_clock: MockClock) -> None:
    """A tier that is back slowly is not met by everybody who has waited."""
    tier, flaky = guarded(delay_s=0.5)
    await put(tier)
    flaky.plan = fails
    for _ in range(POLICY.failures):
        with pytest.raises(TierUnavailableError):
            await tier.open(KEY)
    flaky.plan = None
    await trio.sleep(POLICY.pause_s)
    made = len(flaky.calls)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tier.open, KEY)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(5):
            await refused(tier)
    assert len(flaky.calls) == made + 1
    (await tier.open(KEY)).close()


async def test_a_cancelled_trial_lets_the_next_one_in(autojump_clock: MockClock) -> None:
    tier, flaky = guarded()
    flaky.plan = fails
    for _ in range(POLICY.failures):
        with pytest.raises(TierUnavailableError):
            await tier.open(KEY)
    await trio.sleep(POLICY.pause_s)
    flaky.hangs = True
    with trio.move_on_after(0.1):
        await tier.open(KEY)
    assert tier.available
    assert tier.statistics().failures == POLICY.failures, "being cancelled is no failure"


async def test_an_answer_is_no_failure(autojump_clock: MockClock) -> None:
    """A miss, a damaged object, and a tier that is full."""
    tier, flaky = guarded()
    for error in (TierMissError("no"), TierMissError("no", damaged=True), TierUnavailableError("no room", full=True)):
        flaky.plan = lambda name, key, error=error: error
        for _ in range(2 * POLICY.failures):
            with pytest.raises(type(error)):
                await tier.open(KEY)
    assert tier.available
    found = tier.statistics()
    assert (found.failures, found.misses, found.last_error) == (0, 4 * POLICY.failures, "no room")


async def test_a_failed_call_is_tried_again(autojump_clock: MockClock) -> None:
    tier, flaky = guarded(attrs.evolve(POLICY, attempts=3, retry_s=0.1, failures=10))
    left = [2]

    def plan(name: str, key: str) -> TierError | None:
        left[0] -= 1
        return fails(name, key) if left[0] >= 0 else None

    flaky.plan = plan
    began_s = trio.current_time()
    await put(tier)
    assert trio.current_time() - began_s == pytest.approx(0.1 + 0.2)
    assert [name for name, _ in flaky.calls] == ["put"] * 3
    assert (tier.statistics().puts, tier.statistics().failures) == (1, 2)
    left[0] = 3
    with pytest.raises(TierUnavailableError, match="delete fails"):
        await tier.delete([KEY])
    flaky.plan = lambda name, key: TierUnavailableError("no room", full=True)
    flaky.calls.clear()
    with pytest.raises(TierUnavailableError, match="no room"):
        await put(tier)
    assert len(flaky.calls) == 1, "a full tier is not asked twice"


async def test_all_attempts_share_one_deadline(autojump_clock: MockClock) -> None:
    tier, flaky = guarded(attrs.evolve(POLICY, attempts=100, retry_s=0.5, failures=1000, open_s=2.0))
    flaky.plan = fails
    began_s = trio.current_time()
    with pytest.raises(TierUnavailableError):
        await tier.open(KEY)
    assert trio.current_time() - began_s <= 2.0
    assert len(flaky.calls) == 3


class Broken(MemoryTier):
    """A plugin's tier with a mistake in it."""

    async def open(self, key: str) -> OpenedObject:
        raise KeyError(key)

    async def put(self, key: str, head: bytes, parts: Sequence[Buffer]) -> None:
        raise OSError(5, "Input/output error")

    async def aclose(self) -> None:
        raise RuntimeError("can't be closed")


async def test_what_a_tier_must_not_raise_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    tier = GuardedTier(Broken(), POLICY)
    with pytest.raises(TierUnavailableError, match="KeyError"):
        await tier.open(KEY)
    with pytest.raises(TierUnavailableError, match="Input/output error"):
        await put(tier)
    assert tier.statistics().failures == 2
    await tier.aclose()
    assert "KeyError" in caplog.text
    assert "can't be closed" in caplog.text


class Refusing(MemoryTier):
    async def start(self) -> None:
        raise StartupError("--tier-dir: no such bucket")


async def test_a_start_that_is_refused_stays_a_startup_error() -> None:
    with pytest.raises(StartupError, match="no such bucket"):
        await GuardedTier(Refusing(), POLICY).start()


class Endless(MemoryTier):
    async def start(self) -> None:
        await trio.sleep_forever()

    async def aclose(self) -> None:
        await trio.sleep_forever()


async def test_start_and_close_end_in_time(autojump_clock: MockClock) -> None:
    tier = GuardedTier(Endless(), POLICY)
    with pytest.raises(TierUnavailableError, match="no answer in 10 s"):
        await tier.start()
    began_s = trio.current_time()
    await tier.aclose()
    assert trio.current_time() - began_s == POLICY.close_s


async def test_the_deadline_of_a_listing_is_for_each_step(autojump_clock: MockClock) -> None:
    """A long one may take as long as it likes, and time that its reader takes doesn't count."""
    tier, flaky = guarded()
    keys = [make_key() for _ in range(5)]
    for key in keys:
        await tier.put(key, LAYOUT.head, LAYOUT.parts)
    found = []
    async for each in tier.scan():
        found.append(each.key)
        await trio.sleep(POLICY.scan_s)
    assert sorted(found) == sorted(keys)
    assert flaky.calls[-1] == ("scan", "")


async def test_counters() -> None:
    tier, _ = guarded()
    await tier.start()
    await put(tier)
    (await tier.open(KEY)).close()
    with pytest.raises(TierMissError):
        await tier.open(make_key())
    await tier.delete([KEY, make_key()])
    found = tier.statistics()
    assert (found.puts, found.put_bytes, found.opens, found.misses, found.deletes) == (1, LAYOUT.nbytes, 1, 1, 2)
    assert (found.url, found.used_bytes, found.failures, found.refused, found.paused_s) == ("memory://", 0, 0, 0, 0.0)
    await tier.aclose()
