"""Room that unfinished replies keep from being freed: nothing goes for it in vain, and who can wait does."""

from __future__ import annotations

import attrs
import pytest
import trio

from pion.replies import Reply
from pion.storage.room import is_held
from pion.testing import Harness
from tests.commands.kv_support import call, make_kv, recount, snapshot

NAMES = [f"p{number}" for number in range(8)]
ROWS, ROW_BYTES = 100, 64
LIMIT = 130_000


def full(eviction: str = "lru") -> Harness:
    """A session `s`, and eight prefixes of 12,800 bytes of rows, p0 the least recently used. Some 10 KB are left."""
    kv = make_kv(max_bytes=LIMIT, max_sessions=1000, eviction=eviction)
    assert call(kv, "V.CREATE", "s", 16, "VQUANT", "fp32") == "OK"
    for name in NAMES:
        assert call(kv, "KV.PREFIX.REGISTER", name, 16, "fp32") == "OK"
        for side in "kv":
            assert call(kv, "V.STOREBATCH", f"{name}_p{side}", 0, 0, ROWS, bytes(ROWS * ROW_BYTES)) == "OK"
    return kv


async def unread(kv: Harness, name: str) -> Reply:
    """A reply that is not sent yet, of a client that leaves the order of use alone."""
    reader = kv.client()
    reader.context.session.no_touch = True
    return await reader.call("KV.PREFIX.FETCH", name, "AS", "native")


def store(kv: Harness, layer: int, rows: int = 150) -> object:
    return call(kv, "V.STOREBATCH", "s", layer, 0, rows, bytes(rows * ROW_BYTES))


def prefixes(kv: Harness) -> list[str]:
    return sorted(name.decode() for name in kv.services.vstore.prefixes)


def held(kv: Harness) -> list[str]:
    return sorted(unit.name.decode() for unit in kv.services.vstore.units() if is_held(unit))


async def test_what_is_being_sent_is_known() -> None:
    kv = full()
    assert held(kv) == []
    reply = await unread(kv, "p3")
    assert held(kv) == ["p3"]
    # The block that the reply has is cut, and what is left of it is over the same buffer.
    assert call(kv, "V.STOREBATCH", "p3_pk", 0, 0, 1, bytes(ROW_BYTES)) == "OK"
    assert held(kv) == ["p3"]
    one = await kv.client().call("V.FETCH", "p4_pk", 0, "RANGE", 0, 1, "AS", "native")
    assert call(kv, "V.STOREBATCH", "p4_pk", 0, 0, 1, bytes(ROW_BYTES)) == "OK"
    assert held(kv) == ["p3", "p4"], "a block that is in no table holds the whole buffer"
    del reply, one
    assert held(kv) == []


@pytest.mark.parametrize("eviction", ["lru", "value"])
async def test_what_is_being_sent_stays_while_others_can_go(eviction: str) -> None:
    kv = full(eviction)
    replies = [await unread(kv, name) for name in NAMES[:3]]
    for layer in range(3):
        assert store(kv, layer) == "OK"
        assert kv.services.vstore.ledger.charged_bytes <= LIMIT
    assert prefixes(kv) == [*NAMES[:3], *NAMES[5:]], "20 KB were missing, and each has 15"
    del replies


async def test_a_refusal_for_what_is_being_sent_changes_nothing() -> None:
    kv = full()
    vstore = kv.services.vstore
    replies = [await unread(kv, name) for name in NAMES]
    assert store(kv, 0) == "OK"
    assert call(kv, "V.FETCH", "s", 0, "RANGE", 0, 1)
    before, charged = snapshot(vstore), vstore.ledger.charged_bytes
    reply = store(kv, 1)
    assert isinstance(reply, str)
    assert reply.startswith("-OOM ")
    assert reply.endswith("and what could be evicted for them is still being sent")
    assert snapshot(vstore) == before
    assert vstore.ledger.charged_bytes == charged == recount(vstore)[0]
    replies.clear()
    assert store(kv, 1) == "OK"
    assert prefixes(kv) == NAMES[1:]


async def test_what_was_dropped_for_a_payload_is_waited_for() -> None:
    """Asked again and again, as by one that waits: one prefix goes, and its reader, not a few more each time."""
    kv = full()
    budget, vstore = kv.services.budget, kv.services.vstore
    cuts: list[int] = []
    budget.cut_readers = cuts.append
    replies = [await unread(kv, name) for name in NAMES]
    target = frozenset([vstore.lone[b"s"]])
    for _ in range(5):
        assert budget.take(20_000, 0, target) is None
    assert prefixes(kv) == NAMES[1:]
    assert len(cuts) == 5
    for _ in range(3):
        assert not vstore.squeeze(20_000, target)
    assert prefixes(kv) == NAMES[1:]
    assert max(cuts) < vstore.ledger.sending_bytes
    del replies[0]
    assert budget.take(20_000, 0, target) is True
    assert prefixes(kv) == NAMES[1:]


async def test_who_can_wait_is_not_refused_twice(autojump_clock) -> None:
    """A small write is refused at once; the next ones wait until a reader has gone, and what they store into stays."""
    kv = full()
    budget, vstore = kv.services.budget, kv.services.vstore
    replies = [await unread(kv, name) for name in NAMES]

    def cut(allowed: int) -> None:
        if vstore.ledger.sending_bytes > allowed:
            del replies[0]

    budget.cut_readers = cut
    assert store(kv, 0) == "OK"
    assert not budget.crowded
    target = frozenset([vstore.lone[b"s"]])
    assert str(store(kv, 1)).startswith("-OOM")
    for layer in range(1, 4):
        assert budget.crowded
        await budget.admit(150 * ROW_BYTES, target)
        assert store(kv, layer) == "OK", layer
        assert vstore.ledger.charged_bytes <= LIMIT
    assert len(prefixes(kv)) >= 5


async def test_who_waits_keeps_what_it_stores_into() -> None:
    kv = full()
    budget, vstore = kv.services.budget, kv.services.vstore
    vstore.policy.touch(vstore.prefixes[b"p0"])
    replies = [await unread(kv, name) for name in NAMES]
    budget.cut_readers = lambda allowed: replies.clear()
    target = frozenset([vstore.lone[b"s"]])
    with trio.fail_after(20):
        assert await budget.wait(20_000, 0, lambda: target)
    assert b"s" in vstore.lone
    assert len(prefixes(kv)) == 7


def test_an_option_of_a_prefix_needs_no_room_that_it_does_not_take() -> None:
    """At a full budget, nobody has to leave for a new end of life or a shorter text."""
    kv = full()
    vstore = kv.services.vstore
    assert call(kv, "KV.PREFIX.REGISTER", "p7", 16, "fp32", "META", "long text") == "OK"
    vstore.config = attrs.evolve(vstore.config, max_bytes=vstore.ledger.charged_bytes)
    for option in (("EX", 100), ("META", "text")):
        assert call(kv, "KV.PREFIX.REGISTER", "p7", 16, "fp32", *option) == "OK"
        assert prefixes(kv) == NAMES
        assert list(vstore.lone) == [b"s"]
