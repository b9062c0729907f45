"""Budgets of owners within the one of the server: for tenants, whose plugin says who owns what.

A quota binds like the byte budget: what would exceed it makes the owner's own prefixes go, in the order of eviction,
and when none of them may, it is refused with -OOM. An owner never makes another's prefixes go by it.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import attrs

from pion.args import show
from pion.errors import OutOfMemoryError
from pion.storage.room import memory_bytes
from pion.storage.unit import Unit


@attrs.define(eq=False)
class Quota:
    """What one owner may hold in memory. `used_bytes` is kept by the store."""

    name: bytes
    limit_bytes: int
    used_bytes: int = 0


OwnerOf = Callable[[bytes], Quota | None]
"""The quota that a namespace, or the id of a session that belongs to no prefix, counts for; None: no one's."""


class QuotaBook:
    """How much of each quota is used, unit by unit."""

    def __init__(self, owner_of: OwnerOf) -> None:
        self._owner_of = owner_of
        self._sizes: dict[Unit, tuple[Quota, int]] = {}

    def note(self, unit: Unit) -> None:
        """The unit was made or changed. Walks its blocks."""
        found = self._sizes.get(unit)
        quota = found[0] if found is not None else self._owner_of(unit.name)
        if quota is None:
            return
        nbytes = memory_bytes(unit)
        quota.used_bytes += nbytes - (found[1] if found is not None else 0)
        self._sizes[unit] = quota, nbytes

    def forget(self, unit: Unit) -> None:
        """The unit is gone."""
        found = self._sizes.pop(unit, None)
        if found is not None:
            found[0].used_bytes -= found[1]

    def over(self, name: bytes, nbytes: int) -> int:
        """How far `nbytes` more for that name would exceed its owner's quota; 0 or less if they fit."""
        quota = self._owner_of(name)
        return quota.used_bytes + nbytes - quota.limit_bytes if quota is not None else 0

    def others(self, name: bytes, protected: Container[Unit]) -> Container[Unit]:
        """What must not go for that name: `protected`, and all that another owner has."""
        return _Others(self, self._owner_of(name), protected)

    def refusal(self, name: bytes, nbytes: int) -> OutOfMemoryError:
        """The error when nothing of the owner may go."""
        quota = self._owner_of(name)
        assert quota is not None  # noqa: S101  nobody's names are over no quota
        return OutOfMemoryError(
            f"{quota.used_bytes} of the {quota.limit_bytes} bytes of {show(quota.name)} are in use, "
            f"{nbytes} more are needed, and nothing may be evicted for them"
        )

    def owner(self, unit: Unit) -> Quota | None:
        """Whose it is."""
        found = self._sizes.get(unit)
        return found[0] if found is not None else None


@attrs.frozen(eq=False)
class _Others:
    """A container that is never listed: a million units may be in it."""

    book: QuotaBook
    quota: Quota | None
    protected: Container[Unit]

    def __contains__(self, unit: object) -> bool:
        return not isinstance(unit, Unit) or unit in self.protected or self.book.owner(unit) is not self.quota
