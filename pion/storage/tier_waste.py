"""What is in the tier and of no use: left by earlier runs, or no longer referred to.

An object is deleted only when the log has on stable storage what made it useless: else a power cut could bring a prefix
back whose object is gone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from itertools import islice
from typing import Final

import attrs
import trio

from pion.storage.data_directory import DataDirectory
from pion.storage.placed import TierFiles
from pion.storage.tiers.base import TierUnavailableError
from pion.storage.tiers.guard import GuardedTier

logger = logging.getLogger("pion.tier")

OWNER_KEY: Final = "0" * 32
"""The object that says which data directory a tier belongs to."""

CLEAN_AGAIN_S: Final = 60.0
"""Before a tier that could not be cleaned is tried again."""

COMPLAIN_S: Final = 60.0
"""Between two warnings that objects can't be deleted, which is tried twice a second."""

DELETED_AT_ONCE: Final = 64
"""Objects: a call that has too many for its deadline would never succeed."""

TIDY_S: Final = 0.5
"""How long useless objects are gathered before they are deleted together."""


@attrs.define(eq=False)
class TierStatistics:
    """Since the start."""

    demoted: int = 0
    demoted_bytes: int = 0
    withdrawn: int = 0
    """Demotions for which nothing had to be written."""
    promoted: int = 0
    promoted_bytes: int = 0
    hits: int = 0
    """Replies with rows that were only in the tier."""
    misses: int = 0
    """Objects that were gone or damaged."""
    failures: int = 0
    """Times that the tier did not do what it was asked."""


class Waste:
    """Cleans and deletes in the tier of one worker's store."""

    def __init__(
        self,
        files: TierFiles,
        tier: GuardedTier,
        data: Callable[[], DataDirectory | None],
        statistics: TierStatistics,
    ) -> None:
        self._files = files
        self._tier = tier
        self._data = data
        self._statistics = statistics
        self._deleting = trio.Lock()
        self._complain_at_s = -math.inf

    async def run(self) -> None:
        """Clean once, then delete what becomes useless.

        Cancellation: takes effect between two calls, or leaves a part undone.
        """
        clean_at_s = trio.current_time()
        while True:
            if trio.current_time() >= clean_at_s:
                clean_at_s = math.inf if await self._clean() else trio.current_time() + CLEAN_AGAIN_S
            await trio.sleep(TIDY_S)
            await self.delete()

    async def _clean(self) -> bool:
        """Remove what earlier runs have left, and count what is there; False if it must be tried again."""
        files, data = self._files, self._data()
        try:
            if data is not None:
                # What was replayed may not be flushed: a power cut now could bring back what refers to other objects.
                await data.log.wait_durable(data.log.sequence)
            cleaned = await self._tier.clean(
                lambda key: key in files.known or key in files.garbage or key in files.writing or key == OWNER_KEY
            )
        except OSError:
            return False
        except TierUnavailableError as error:
            self._statistics.failures += 1
            logger.warning("tier %s: it can't be cleaned: %s", self._tier.url, error)
            return False
        if cleaned.files:
            logger.info(
                "tier %s: removed %d files of earlier runs, %d bytes", self._tier.url, cleaned.files, cleaned.nbytes
            )
        return True

    async def delete(self) -> bool:
        """Delete what nothing refers to; False if the tier or the log doesn't let us."""
        garbage, data = self._files.garbage, self._data()
        async with self._deleting:
            while keys := list(islice(garbage, DELETED_AT_ONCE)):
                try:
                    if data is not None:
                        await data.log.wait_durable(data.log.sequence)
                    await self._tier.delete(keys)
                except OSError:
                    return False  # the log has failed, and says so; they may be needed after a restart
                except TierUnavailableError as error:
                    self._statistics.failures += 1
                    if trio.current_time() >= self._complain_at_s:
                        self._complain_at_s = trio.current_time() + COMPLAIN_S
                        logger.warning("tier %s: %d objects can't be deleted: %s", self._tier.url, len(garbage), error)
                    return False
                for key in keys:
                    del garbage[key]
        return True
