"""The example's tier does what every tier must do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import pion
import pion_example
from pion.testing.tier_conformance import TierConformance
from pion_example.sqlite_tier import SqliteTier


class TestSqliteTier(TierConformance):
    large_bytes = 4 * 1024 * 1024
    many = 50

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Callable[[], pion.Tier]:
        return lambda: SqliteTier(f"sqlite://{tmp_path}/pion.db")


async def test_a_database_that_can_not_be_opened(tmp_path: Path) -> None:
    tier = SqliteTier(f"sqlite://{tmp_path}/nowhere/pion.db")
    with pytest.raises(pion.TierUnavailableError, match="unable to open database file") as caught:
        await tier.start()
    assert not caught.value.full


def test_the_hook_says_which_urls_it_is_for() -> None:
    (make,) = pion_example.register_tiers().values()
    assert make("sqlite:///tmp/pion.db").url == "sqlite:///tmp/pion.db"
    with pytest.raises(ValueError, match="needs the path of a database"):
        make("sqlite://")
