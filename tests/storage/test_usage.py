"""What each unit costs, against the ledger, after random commands."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.replies import Reply
from pion.storage.ledger import BLOCK_COST, LAYER_COST, SIDE_COST, UNIT_COST
from pion.storage.room import memory_bytes, side_bytes
from pion.storage.unit import SIDES
from pion.storage.vstore import VStore
from pion.testing import Harness
from tests.commands.kv_support import call, make_kv, pack

WIDE = 65_536
"""Values in a row of 256 KiB: a few are beyond what is merged, so replacing some of them leaves a cut buffer."""

NAMES = st.sampled_from("abcd")
SIDS = st.sampled_from(["s", "t", *(f"{ns}_p{side}" for ns in "abcd" for side in "kv")])
SMALL = st.integers(0, 5)


def raw(kv: Harness, *args: Any) -> Reply:
    """The reply as the server would send it, with the buffers that it holds."""
    coroutine = kv.call(*args)
    try:
        coroutine.send(None)
    except StopIteration as done:
        reply: Reply = done.value
        return reply
    coroutine.close()
    raise AssertionError("the command waits")


@st.composite
def commands(draw: st.DrawFn) -> tuple[Any, ...]:
    ns, sid = draw(NAMES), draw(SIDS)
    kind = draw(st.sampled_from(["create", "register", "store", "store", "store", "fetch", "member", "drop", "v.drop"]))
    if kind == "create":
        return ("V.CREATE", sid, WIDE if sid == "t" else 1, "VQUANT", "fp32")
    if kind == "register":
        options: list[Any] = []
        options += draw(st.sampled_from([[], ["LAYERS", 1, "TOKENS", 2]]))
        options += draw(st.sampled_from([[], ["META", "m" * 100], ["PARENT", draw(NAMES), 0], ["PIN"], ["EX", 50]]))
        hashes = draw(st.lists(st.integers(0, 9), max_size=4))
        options += ["BLOCKS", 1, len(hashes), pack(*hashes)] if hashes else []
        return ("KV.PREFIX.REGISTER", ns, 1, "fp32", *options)
    if kind == "store":
        start, count = draw(SMALL), draw(SMALL)
        width = WIDE if sid == "t" else 1
        return ("V.STOREBATCH", sid, draw(st.integers(0, 1)), start, count, bytes(4 * width * count))
    if kind == "fetch":
        return ("V.FETCH", sid, 0, "RANGE", 0, draw(SMALL), "AS", "native")
    if kind == "member":
        return ("KV.PREFIX.MEMBERSHIP", ns, 1, pack(3))
    if kind == "drop":
        return ("KV.PREFIX.DROP", "CASCADE", ns)
    return ("V.DROP", sid)


def shares(store: VStore) -> int:
    return sum(memory_bytes(unit) for unit in store.units())


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(commands(), min_size=10, max_size=60), read_slowly=st.booleans())
def test_the_shares_make_up_what_is_charged(steps, read_slowly) -> None:
    """Also with readers that take none of their replies, which go on holding what was dropped meanwhile."""
    kv = make_kv(max_sessions=7)
    store = kv.services.vstore
    replies = []
    for step in steps:
        reply = raw(kv, *step)
        if read_slowly:
            replies.append(reply)
        del reply
        ledger = store.ledger.statistics()
        assert shares(store) == ledger.charged_bytes - ledger.sending_bytes
        assert read_slowly or not ledger.sending_bytes
    del replies
    assert shares(store) == store.ledger.charged_bytes
    call(kv, "KV.PREFIX.DROP", "CASCADE", *"abcd")
    call(kv, "V.DROP", "s", "t", *(f"{ns}_p{side}" for ns in "abcd" for side in "kv"))
    assert shares(store) == store.ledger.charged_bytes == 0


def test_one_session() -> None:
    kv = make_kv()
    call(kv, "V.CREATE", "notes", 8, "VQUANT", "fp32")
    (unit,) = kv.services.vstore.units()
    assert memory_bytes(unit) == UNIT_COST + 5
    assert side_bytes(unit, 0) == 0
    call(kv, "V.STOREBATCH", "notes", 0, 0, 10, bytes(320))
    call(kv, "V.STOREBATCH", "notes", 3, 5, 1, bytes(32))
    assert side_bytes(unit, 0) == SIDE_COST + 2 * LAYER_COST + 2 * BLOCK_COST + 352
    assert memory_bytes(unit) == UNIT_COST + 5 + side_bytes(unit, 0)


def test_a_buffer_of_which_rows_are_left_counts_whole() -> None:
    kv = make_kv()
    call(kv, "V.CREATE", "wide", WIDE, "VQUANT", "fp32")
    (unit,) = kv.services.vstore.units()
    row = 4 * WIDE
    call(kv, "V.STOREBATCH", "wide", 0, 0, 12, np.zeros(12 * row, np.uint8).data)
    call(kv, "V.STOREBATCH", "wide", 0, 5, 2, np.zeros(2 * row, np.uint8).data)
    (layer,) = unit.k_rows.layers.values()
    assert [(block.start, block.stop) for block in layer.blocks] == [(0, 5), (5, 7), (7, 12)]
    assert layer.count == 12
    assert side_bytes(unit, 0) == SIDE_COST + LAYER_COST + 3 * BLOCK_COST + 14 * row


def test_a_prefix_has_both_sides_and_what_they_share() -> None:
    kv = make_kv()
    call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "META", "m" * 30, "BLOCKS", 1, 3, pack(1, 2, 3))
    (unit,) = kv.services.vstore.units()
    before = memory_bytes(unit)
    for side in "kv":
        call(kv, "V.STOREBATCH", f"a_p{side}", 0, 0, 2, bytes(8))
    sides = [side_bytes(unit, side) for side in SIDES]
    assert sides == [SIDE_COST + LAYER_COST + BLOCK_COST + 8] * 2
    assert memory_bytes(unit) == before + sum(sides) == kv.services.vstore.ledger.charged_bytes
