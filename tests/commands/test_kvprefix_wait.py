"""KV.PREFIX.LOOKUP WAIT: what ends a wait besides the prefix itself."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from pion.testing import make_harness
from tests.commands.kv_support import make_kv, now, plain

DECLARE = ("KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 1, "TOKENS", 2)


@pytest.mark.parametrize("how", ["drain", "client leaves"])
async def test_wait_ends_when_the_server_stops_or_the_client_is_gone(autojump_clock, how) -> None:
    kv = make_kv()
    waiter, left = kv.client(), trio.Event()
    waiter.context.session.peer_left = left.wait
    now(kv.call(*DECLARE))
    answers: list[object] = []

    async def wait() -> None:
        answers.append(plain(await waiter.call("KV.PREFIX.LOOKUP", "a", "WAIT", 600_000)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        start = trio.current_time()
        (left if how == "client leaves" else kv.services.draining).set()
    assert answers == ["MISS"]
    assert trio.current_time() == start
    pending = kv.services.vstore.prefixes[b"a"].pending
    assert pending is not None
    assert pending.waiters == []


def test_exec_does_not_wait() -> None:
    kv = make_harness()
    now(kv.call(*DECLARE))
    other = kv.client()
    now(other.call("MULTI"))
    now(other.call("KV.PREFIX.LOOKUP", "a", "WAIT", 60_000))
    assert now(other.call("EXEC")) == ["MISS"]
