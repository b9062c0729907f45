"""Tiers for tests: one in memory, one that is slow, failing or late on demand, and a directory that fails on demand."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from random import Random
from typing import TypeAlias

import trio

from pion.replies import Buffer
from pion.storage.tiers.base import (
    BytesMapping,
    Cleaned,
    Found,
    OpenedObject,
    Tier,
    TierError,
    TierMissError,
    TierPolicy,
    check_tier_key,
)
from pion.storage.tiers.disk import FileInfo
from pion.testing.disk import MemoryDisk

TierPlan: TypeAlias = Callable[[str, str], TierError | None]
"""Called with `put`, `open`, `delete`, `scan` or `clean`, and the key (or an empty text), before the call takes effect.

It returns, or raises, what the call raises instead; None lets it go on.
"""


class MemoryTier(Tier):
    """A tier in a dictionary, for tests: as simple as a tier can be. All of `objects` belongs to Pion."""

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self.objects: dict[str, bytes] = {}
        """The objects that are there, by key. A test may change them."""

    @property
    def used_bytes(self) -> int:
        """See `Tier`."""
        return sum(map(len, self.objects.values()))

    async def start(self) -> None:
        """See `Tier`."""
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """See `Tier`."""
        await trio.lowlevel.checkpoint()

    async def put(self, key: str, head: bytes, parts: Sequence[Buffer]) -> None:
        """See `Tier`. Cancellation: nothing is stored."""
        check_tier_key(key)
        await trio.lowlevel.checkpoint()
        self.objects[key] = b"".join([head, *parts])

    async def open(self, key: str) -> OpenedObject:
        """See `Tier`."""
        await trio.lowlevel.checkpoint()
        data = self.objects.get(check_tier_key(key))
        if data is None:
            raise TierMissError("there is no such object")
        return OpenedObject(BytesMapping(data))

    async def delete(self, keys: Sequence[str]) -> None:
        """See `Tier`. Cancellation: nothing is removed."""
        for key in keys:
            check_tier_key(key)
        await trio.lowlevel.checkpoint()
        for key in keys:
            self.objects.pop(key, None)

    async def scan(self) -> AsyncGenerator[Found, None]:
        """See `Tier`."""
        await trio.lowlevel.checkpoint()
        for key, data in list(self.objects.items()):
            yield Found(key, len(data), 0.0)

    async def clean(self, keep: Callable[[str], bool]) -> Cleaned:
        """See `Tier`. Cancellation: nothing is removed."""
        await trio.lowlevel.checkpoint()
        waste = [key for key in self.objects if not keep(key)]
        return Cleaned(len(waste), sum(len(self.objects.pop(key)) for key in waste), 0)


class FlakyTier(Tier):
    """Another tier (by default one in memory) as a bad day shows it. What goes wrong is set on it, at any time.

    Times are those of Trio's clock, so with `autojump_clock` nothing takes long.
    """

    delay_s: float
    """Before each call takes effect."""
    lag_s: float
    """How long what was put can't be seen, and what was deleted still can: the tier is eventually consistent."""
    hangs: bool
    """No call comes back, those under way included, until it is cancelled."""
    loses_deletes: bool
    """`delete` does nothing."""
    plan: TierPlan | None
    """What fails; see `TierPlan`."""

    def __init__(self, tier: Tier | None = None, *, delay_s: float = 0.0, lag_s: float = 0.0) -> None:
        self.inner = MemoryTier() if tier is None else tier
        self.url = self.inner.url
        self.policy: TierPolicy = self.inner.policy
        self.delay_s = delay_s
        self.lag_s = lag_s
        self.hangs = False
        self.loses_deletes = False
        self.plan = None
        self.calls: list[tuple[str, str]] = []
        """All that were made, as the plan saw them."""
        self._visible_s: dict[str, float] = {}
        self._doomed_s: dict[str, float] = {}

    @property
    def used_bytes(self) -> int:
        """See `Tier`."""
        return self.inner.used_bytes

    async def start(self) -> None:
        """See `Tier`. Never fails."""
        await self.inner.start()

    async def aclose(self) -> None:
        """See `Tier`. Never fails."""
        await self.inner.aclose()

    async def put(self, key: str, head: bytes, parts: Sequence[Buffer]) -> None:
        """See `Tier`. Cancellation: as the inner one takes it."""
        await self._before("put", check_tier_key(key))
        self._visible_s[key] = trio.current_time() + self.lag_s
        self._doomed_s.pop(key, None)
        await self.inner.put(key, head, parts)

    async def open(self, key: str) -> OpenedObject:
        """See `Tier`."""
        await self._before("open", key)
        if not self._is_visible(key):
            raise TierMissError("it can't be seen yet")
        return await self.inner.open(key)

    async def delete(self, keys: Sequence[str]) -> None:
        """See `Tier`. Cancellation: as the inner one takes it."""
        for key in keys:
            await self._before("delete", check_tier_key(key))
        if self.loses_deletes:
            return
        self._doomed_s.update(dict.fromkeys(keys, trio.current_time() + self.lag_s))
        await self._delete_doomed()

    async def scan(self) -> AsyncGenerator[Found, None]:
        """See `Tier`."""
        await self._before("scan", "")
        async with aclosing(self.inner.scan()) as listing:
            async for found in listing:
                if self._is_visible(found.key):
                    yield found

    async def clean(self, keep: Callable[[str], bool]) -> Cleaned:
        """See `Tier`. Removes no object that can't be seen yet."""
        await self._before("clean", "")
        return await self.inner.clean(lambda key: not self._is_visible(key) or keep(key))

    async def _before(self, name: str, key: str) -> None:
        self.calls.append((name, key))
        await trio.sleep(self.delay_s)
        while self.hangs:
            await trio.sleep_forever()
        error = self.plan(name, key) if self.plan is not None else None
        if error is not None:
            raise error
        await self._delete_doomed()

    def _is_visible(self, key: str) -> bool:
        return self._visible_s.get(key, 0.0) <= trio.current_time()

    async def _delete_doomed(self) -> None:
        now_s = trio.current_time()
        doomed = [key for key, when_s in self._doomed_s.items() if when_s <= now_s]
        for key in doomed:
            del self._doomed_s[key]
        if doomed:
            await self.inner.delete(doomed)


class MemoryTierDisk(MemoryDisk):
    """The directory of a `pion.storage.tiers.file.FileTier` in memory; it fails on demand as every `MemoryDisk`."""

    def hold(self) -> None:
        """See `pion.storage.tiers.disk.TierDisk`. Two may hold it."""

    def release(self) -> None:
        """See `pion.storage.tiers.disk.TierDisk`."""

    def info(self, name: str) -> FileInfo:
        """See `pion.storage.tiers.disk.TierDisk`. All files are of one moment."""
        return FileInfo(name, len(self.contents(name)), 0.0)

    def entries(self) -> Iterator[FileInfo]:
        """See `pion.storage.tiers.disk.TierDisk`."""
        for name in self.names():
            try:
                yield self.info(name)
            except FileNotFoundError:
                continue

    def crash(self, *, power: bool = False, kept: int = 0, order: Random | None = None) -> MemoryTierDisk:
        """See `MemoryDisk`."""
        left = super().crash(power=power, kept=kept, order=order)
        after = MemoryTierDisk(where=self.where)
        after._directories, after._names, after._boot = left._directories, left._names, left._boot
        return after
