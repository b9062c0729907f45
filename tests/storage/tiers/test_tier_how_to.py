"""The tier that the how-to shows does what every tier must do, and so does the test class that it shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pion.storage.tiers.base import Tier
from pion.storage.tiers.registry import merge_tiers, tier_from
from pion.testing.tier_conformance import TierConformance

PAGE = (Path(__file__).resolve().parents[3] / "docs/how-to/write-a-tier.md").read_text(encoding="utf-8")


def block(title: str) -> str:
    (found,) = re.findall(rf'^```python title="{re.escape(title)}"\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


NAMES: dict[str, Any] = {}
exec(compile(block("plugins/sqlite_tier.py"), "sqlite_tier.py", "exec"), NAMES)
exec(compile(block("needs the class above"), "policy", "exec"), NAMES)
SHOWN: dict[str, Any] = {"SqliteTier": NAMES["SqliteTier"]}
exec(compile(block("needs pytest").replace("from sqlite_tier import SqliteTier\n", ""), "test_tier.py", "exec"), SHOWN)


class TestSqliteTier(SHOWN["TestSqliteTier"]):
    many = 50


class TestGuardedSqliteTier(TierConformance):
    large_bytes = 1 << 20
    many = 50

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Callable[[], Tier]:
        tiers = merge_tiers([("sqlite_tier", NAMES["register_tiers"](services=None))])
        return lambda: tier_from(f"sqlite://{tmp_path}/pion.db", tiers)


def test_its_policy_is_its_own() -> None:
    assert NAMES["SqliteTier"].policy.open_s == 10.0
    assert Tier.policy.open_s != 10.0


def test_the_class_shown_has_all_tests() -> None:
    assert issubclass(SHOWN["TestSqliteTier"], TierConformance)
