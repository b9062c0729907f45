"""Waiting for memory: what happens between "it does not fit" and -OOM.

The store itself makes room at once, by evicting, wherever that is possible. Two things take time: rows must be written
to the tier before they may leave memory, and what a slow reader holds is free only when its connection has ended. So
whoever is about to need memory (a payload that was announced, a small write) waits here first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

from pion.errors import OutOfMemoryError
from pion.storage.disk_budget import DiskBudget
from pion.storage.unit import Unit
from pion.storage.vstore import VStore

HIGH_SHARE: Final = 0.90
"""Of the byte budget: above it rows are written to the tier ahead of need, down to `LOW_SHARE`."""

LOW_SHARE: Final = 0.85

CROWDED_SHARE: Final = 0.97
"""Above it small writes wait for the tier, too. It must leave room for those that run at the same time."""

SENDING_SHARE: Final = 0.125
"""Of the byte budget: what replies alone may hold while others wait for memory."""

COMMAND_BYTES: Final = 4096
"""What a command takes beside its payload, at most: waiting for a payload alone would end in an eviction after all."""

WAIT_S: Final = 10.0
"""Longest wait: by then a tier that works has written gigabytes. What is not written then is dropped."""

LOOK_AGAIN_S: Final = 0.003
"""Memory comes back from other tasks and threads; looking at three numbers is cheap."""


class Budget:
    """The byte budget of one worker's store, for those who can wait."""

    def __init__(self, store: VStore, disk: DiskBudget) -> None:
        self._store = store
        self.disk = disk
        self.sending: Callable[[], int] = lambda: store.ledger.sending_bytes
        """Bytes that replies alone hold: rows that were dropped, and pieces that were converted for them."""
        self.tier_helps: Callable[[], bool] = lambda: False
        """Whether a tier is about to take rows out of memory."""
        self.cut_readers: Callable[[int], None] = lambda allowed: None
        """Disconnects the slowest readers until replies alone hold no more than so many bytes, or will soon."""
        self.cut_senders: Callable[[int], object] = lambda wanted: None
        """Disconnects those who hold receive memory and are too slow, if so many bytes come back by it."""
        self.stopping: Callable[[], bool] = lambda: False
        """Nobody may wait any longer: the server stops."""
        self.asked_bytes = 0
        """What those who wait now want to have."""
        self.waits = 0
        """How often somebody had to wait."""

    @property
    def holds_back(self) -> bool:
        """Whether `admit` has to be asked."""
        return self.crowded or self._store.config.max_disk_bytes > 0

    @property
    def crowded(self) -> bool:
        """Whether a write should wait first."""
        store, limit = self._store, self._store.config.max_bytes
        if store.held_up and limit:
            return True
        # A payload may be stored in a longer format; if not, it is counted twice until its reply is sent.
        if not limit or store.ledger.charged_bytes + 2 * store.in_flight() <= CROWDED_SHARE * limit:
            return False
        return self.tier_helps() or self._too_much_is_sent

    def take(self, nbytes: int, held: int = 0, target: frozenset[Unit] = frozenset()) -> bool | None:
        """Make room for `nbytes` beside all that is being received, of which who asks holds `held` bytes itself.

        `target` is what it will be stored into, and must not go for it. False: it can't be; None: it may be, a little
        later.
        """
        store, limit = self._store, self._store.config.max_bytes
        wanted = nbytes + store.in_flight()
        if store.over(wanted + COMMAND_BYTES) <= 0:
            return True
        if nbytes > limit:
            return False
        if self._too_much_is_sent:
            self.cut_readers(int(SENDING_SHARE * limit))
        if store.relieve(wanted + COMMAND_BYTES):
            return True
        if self.tier_helps():
            return None
        if self._squeeze_or_cut(wanted, target):
            return True
        if self.sending():
            return None
        if store.in_flight() > held:
            self.cut_senders(store.over(wanted))
            return None
        return store.squeeze(wanted, target)

    def take_now(self, nbytes: int, target: frozenset[Unit] = frozenset()) -> bool:
        """As `take`, for who has waited, or can't: by eviction, if nothing else was of use."""
        return self._store.squeeze(nbytes + self._store.in_flight(), target)

    def _squeeze_or_cut(self, nbytes: int, target: frozenset[Unit]) -> bool:
        """Evict what is free at once; if that is not enough, what is being sent, and see to it that its readers end."""
        store = self._store
        if store.squeeze(nbytes, target, warm_only=True, at_once=True):
            return True
        if self.sending() < store.over(nbytes) and store.squeeze(nbytes, target, warm_only=True):
            return True
        if self.sending():
            self.cut_readers(max(0, self.sending() - store.over(nbytes)))
        return False

    async def admit(self, nbytes: int, target: frozenset[Unit] = frozenset()) -> None:
        """Before a change that takes up to `nbytes`: until memory and disk have room for it. Raises OutOfMemoryError.

        `target` is what it will be stored into, and must not go for it.

        Cancellation: nothing happened, but what was evicted stays so.
        """
        if self.crowded:
            await self._wait_for_others(nbytes, target)
        if self._store.config.max_disk_bytes and not await self.disk.fit(nbytes):
            raise OutOfMemoryError(
                f"{self.disk.used_bytes} of {self._store.config.max_disk_bytes} bytes on disk are in use "
                f"(--max-disk-bytes), {nbytes} more are needed, and nothing may be evicted for them"
            )

    async def wait(self, nbytes: int, held: int = 0, target: Callable[[], frozenset[Unit]] = frozenset[Unit]) -> bool:
        """Until there is room for `nbytes`, beside `held` that who waits has already; False if there will not be.

        `target` says what it will be stored into, and must not go for it.

        Cancellation: nothing is reserved; what was evicted stays so.
        """
        self.waits += 1
        give_up_s = trio.current_time() + WAIT_S
        with self._asking(nbytes):
            while True:
                found = self.take(nbytes, held, target())
                if found is not None:
                    return found
                if trio.current_time() >= give_up_s or self.stopping():
                    return self.take_now(nbytes, target())
                await trio.sleep(LOOK_AGAIN_S)

    @property
    def _too_much_is_sent(self) -> bool:
        return self.sending() > SENDING_SHARE * self._store.config.max_bytes

    async def _wait_for_others(self, nbytes: int, target: frozenset[Unit]) -> None:
        """While the tier or the end of slow readers makes room; without that the change itself does."""
        store = self._store
        give_up_s = trio.current_time() + WAIT_S
        self.waits += 1
        with self._asking(nbytes):
            while store.over(wanted := nbytes + store.in_flight() + COMMAND_BYTES) > 0:
                if self._too_much_is_sent:
                    self.cut_readers(int(SENDING_SHARE * store.config.max_bytes))
                if store.relieve(wanted):
                    return
                helps = self.tier_helps() or self._too_much_is_sent
                if not helps and (not store.held_up or self._squeeze_or_cut(wanted, target) or not self.sending()):
                    break
                if trio.current_time() >= give_up_s or self.stopping():
                    return
                await trio.sleep(LOOK_AGAIN_S)

    @contextmanager
    def _asking(self, nbytes: int) -> Iterator[None]:
        self.asked_bytes += nbytes
        try:
            yield
        finally:
            self.asked_bytes -= nbytes
