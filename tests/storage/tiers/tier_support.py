"""What the tests of tiers share."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from contextlib import aclosing, nullcontext
from random import Random
from typing import Any, TypeVar

import pytest
import trio

from pion.storage.tiers.base import Tier

T = TypeVar("T")


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in threads runs at its place instead, and names are not random: each run is the same."""
    monkeypatch.setattr(trio.to_thread, "run_sync", _run_here)
    monkeypatch.setattr(secrets, "token_bytes", Random(1).randbytes)


async def _run_here(
    function: Callable[..., T], *args: Any, limiter: trio.CapacityLimiter | None = None, **options: Any
) -> T:
    await trio.lowlevel.checkpoint_if_cancelled()
    async with limiter or nullcontext():
        return function(*args)


async def listed(tier: Tier) -> dict[str, int]:
    """Key -> size of all objects in a listing."""
    async with aclosing(tier.scan()) as listing:
        return {found.key: found.nbytes async for found in listing}


def run_trio(main: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run it on a loop of its own."""
    return trio.run(main, *args)
