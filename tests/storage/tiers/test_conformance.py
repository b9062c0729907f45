"""Every tier of this repository does what every tier must do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pion.storage.tiers.base import Tier
from pion.storage.tiers.disk import RealTierDisk
from pion.storage.tiers.file import FileTier
from pion.storage.tiers.registry import tier_from
from pion.testing.tier_conformance import TierConformance
from pion.testing.tiers import FlakyTier, MemoryTier, MemoryTierDisk

MakeTier = Callable[[], Tier]


class TestFileTier(TierConformance):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda: FileTier(RealTierDisk(str(tmp_path / "tier")))


class TestFileTierOnAMemoryDisk(TierConformance):
    @pytest.fixture
    def make_tier(self) -> MakeTier:
        disk = MemoryTierDisk()
        return lambda: FileTier(disk)


class TestGuardedFileTier(TierConformance):
    large_bytes = 1 << 20

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda: tier_from((tmp_path / "tier").as_uri())


class TestMemoryTier(TierConformance):
    @pytest.fixture
    def make_tier(self) -> MakeTier:
        inner = MemoryTier()

        def make() -> Tier:
            tier = MemoryTier()
            tier.objects = inner.objects
            return tier

        return make


class TestEventuallyConsistentTier(TierConformance):
    settle_s = 10.0
    many = 50

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        inner = MemoryTier()
        return lambda: FlakyTier(inner, delay_s=0.001, lag_s=0.02)
