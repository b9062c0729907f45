"""Bounds what a tier costs that is slow, failing or gone: a deadline for each call, and a pause after several failures.

The store uses every tier through a `GuardedTier`. While the tier answers, it only counts. After some calls in a row
that failed, all are refused at once for a while; then a single one is let through as a trial. If it fails, too, the
next pause is twice as long. A tier that says no with an answer, a miss or a lack of room, is not failing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TypeVar

import attrs
import trio

from pion.errors import PionError
from pion.replies import Buffer
from pion.storage.tiers.base import (
    Cleaned,
    Found,
    OpenedObject,
    Tier,
    TierError,
    TierMissError,
    TierPolicy,
    TierUnavailableError,
    check_tier_key,
)

T = TypeVar("T")

logger = logging.getLogger("pion.tier")


@attrs.frozen
class GuardStatistics:
    """What INFO shows of a tier."""

    url: str
    used_bytes: int
    puts: int
    """Objects that were stored."""
    put_bytes: int
    opens: int
    """Objects that were opened."""
    misses: int
    """Objects that were not there."""
    deletes: int
    """Objects that were removed, or were not there."""
    failures: int
    """Calls that failed, late ones included."""
    timeouts: int
    """Calls that had no answer before their deadline."""
    refused: int
    """Calls that were not made, during a pause."""
    pauses: int
    """How often the tier was left alone for a while."""
    paused_s: float
    """How long the pause of now will last; 0 if there is none."""
    last_error: str


@attrs.define
class _Counters:
    puts: int = 0
    put_bytes: int = 0
    opens: int = 0
    misses: int = 0
    deletes: int = 0
    failures: int = 0
    timeouts: int = 0
    refused: int = 0
    pauses: int = 0


class GuardedTier(Tier):
    """A tier whose every call ends in time; see `Tier`. What the inner one raises against its contract is a failure."""

    def __init__(self, tier: Tier, policy: TierPolicy | None = None) -> None:
        self.inner = tier
        self.url = tier.url
        self.policy = policy or tier.policy
        self._counters = _Counters()
        self._in_a_row = 0
        self._until = -math.inf
        """When the pause ends, by Trio's clock."""
        self._trial = False
        """The call that finds out whether the tier is back is under way."""
        self._error = ""

    def statistics(self) -> GuardStatistics:
        """The counters now."""
        paused_s = max(0.0, self._until - trio.current_time())
        return GuardStatistics(
            self.url, self.used_bytes, **attrs.asdict(self._counters), paused_s=paused_s, last_error=self._error
        )

    @property
    def used_bytes(self) -> int:
        """See `Tier`."""
        return self.inner.used_bytes

    @property
    def available(self) -> bool:
        """Whether a call would be made, rather than refused at once."""
        return self._in_a_row < self.policy.failures or (not self._trial and trio.current_time() >= self._until)

    async def start(self) -> None:
        """See `Tier`. Raises TierUnavailableError at the deadline."""
        with self._watched(self.policy.start_s):
            await self.inner.start()

    async def aclose(self) -> None:
        """See `Tier`. Ends at the deadline in any case."""
        with trio.move_on_after(self.policy.close_s):
            try:
                await self.inner.aclose()
            except Exception:
                logger.exception("tier %s can't be closed", self.url)

    async def put(self, key: str, head: bytes, parts: Sequence[Buffer]) -> None:
        """See `Tier`."""
        check_tier_key(key)
        nbytes = len(head) + sum(len(part) for part in parts)
        deadline_s = self.policy.put_s + nbytes / self.policy.put_bytes_per_s
        await self._call(deadline_s, lambda: self.inner.put(key, head, parts))
        self._counters.puts += 1
        self._counters.put_bytes += nbytes

    async def open(self, key: str) -> OpenedObject:
        """See `Tier`."""
        check_tier_key(key)
        try:
            opened = await self._call(self.policy.open_s, lambda: self.inner.open(key))
        except TierMissError:
            self._counters.misses += 1
            raise
        self._counters.opens += 1
        return opened

    async def delete(self, keys: Sequence[str]) -> None:
        """See `Tier`."""
        for key in keys:
            check_tier_key(key)
        await self._call(self.policy.delete_s, lambda: self.inner.delete(keys))
        self._counters.deletes += len(keys)

    async def scan(self) -> AsyncGenerator[Found, None]:
        """See `Tier`. A listing that fails in the middle is not begun anew."""
        async with aclosing(self.inner.scan()) as listing:
            while True:
                with self._watched(self.policy.scan_s):
                    try:
                        found = await anext(listing)
                    except StopAsyncIteration:
                        return
                yield found

    async def clean(self, keep: Callable[[str], bool]) -> Cleaned:
        """See `Tier`."""
        with self._watched(self.policy.clean_s):
            return await self.inner.clean(keep)
        raise AssertionError  # for mypy: `_watched` lets no error disappear

    async def _call(self, deadline_s: float, call: Callable[[], Awaitable[T]]) -> T:
        """Try it as often as the policy says, with one deadline for all attempts."""
        until, attempt = trio.current_time() + deadline_s, 1
        while True:
            try:
                with self._watched(until - trio.current_time(), deadline_s):
                    return await call()
            except TierUnavailableError as error:
                pause_s = self.policy.retry_s * 2 ** (attempt - 1)
                attempt += 1
                done = error.full or attempt > self.policy.attempts or not self.available
                if done or trio.current_time() + pause_s >= until:
                    raise
                await trio.sleep(pause_s)

    @contextmanager
    def _watched(self, seconds: float, deadline_s: float | None = None) -> Iterator[None]:
        """One call: let in or refused, with a deadline, its outcome noted. Raises TierUnavailableError."""
        trial = self._let_in()
        try:
            with trio.move_on_after(seconds) as scope:
                yield
                self._note_success()
                return
            if scope.cancelled_caught:
                self._counters.timeouts += 1
                raise TierUnavailableError(f"{self.url}: no answer in {deadline_s or seconds:g} s")
        except TierMissError:
            self._note_success()
            raise
        except TierUnavailableError as error:
            if error.full:
                self._note_success()
                self._error = str(error)
            else:
                self._note_failure(error)
            raise
        except (TierError, PionError):
            raise
        except Exception as error:
            logger.exception("tier %s failed", self.url)
            self._note_failure(error)
            raise TierUnavailableError(f"{self.url}: {error!r}") from error
        finally:
            if trial:
                self._trial = False

    def _let_in(self) -> bool:
        """Whether it is a trial. Raises TierUnavailableError during a pause."""
        if self._in_a_row < self.policy.failures:
            return False
        if not self.available:
            self._counters.refused += 1
            raise TierUnavailableError(f"{self.url}: left alone after {self._in_a_row} failures: {self._error}")
        self._trial = True
        return True

    def _note_success(self) -> None:
        if self._in_a_row >= self.policy.failures:
            logger.warning("tier %s is back", self.url)
        self._in_a_row = 0

    def _note_failure(self, error: Exception) -> None:
        self._counters.failures += 1
        self._in_a_row += 1
        self._error = str(error)
        over = self._in_a_row - self.policy.failures
        if over >= 0:
            pause_s = min(self.policy.pause_s * 2.0 ** min(over, 30), self.policy.most_pause_s)
            self._until = trio.current_time() + pause_s
            self._counters.pauses += 1
            logger.warning("tier %s is left alone for %g s: %s", self.url, pause_s, error)
