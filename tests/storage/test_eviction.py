"""Exact LRU against a plain list, with units that leave the order and come back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pion.storage.eviction import MAX_NOTES, STALE_SLACK, LeastRecentlyUsed, choose
from pion.storage.formats import get_format
from pion.storage.schema import Schema
from pion.storage.unit import Unit

SCHEMA = Schema.uniform(get_format(b"fp32"), 1)


def unit(name: str) -> Unit:
    made = Unit(name.encode(), lone=True)
    made.k_schema = SCHEMA
    return made


def names(policy: LeastRecentlyUsed) -> list[str]:
    return [victim.name.decode() for victim in policy.victims()]


@given(st.lists(st.tuples(st.sampled_from(["touch", "pin", "unpin", "remove"]), st.integers(0, 5)), max_size=60))
def test_agrees_with_a_list(steps: list[tuple[str, int]]) -> None:
    policy = LeastRecentlyUsed()
    units = [unit(str(index)) for index in range(6)]
    order: list[Unit] = []
    for what, index in steps:
        one = units[index]
        if what == "touch":
            order = [*(other for other in order if other is not one), one]
            policy.touch(one)
        elif one in order and what == "remove":
            order.remove(one)
            policy.remove(one)
            units[index] = unit(str(index))
        elif one in order:
            one.pinned = what == "pin"
            policy.update(one)
        assert list(policy.victims()) == [other for other in order if not other.pinned]


def test_flapping_pins_do_not_grow_it() -> None:
    policy = LeastRecentlyUsed()
    flapping, others = unit("flapping"), [unit(str(index)) for index in range(3)]
    for one in (flapping, *others):
        policy.touch(one)
    for _ in range(10_000):
        flapping.pinned = not flapping.pinned
        policy.update(flapping)
    assert names(policy) == ["flapping", "0", "1", "2"]
    assert len(policy._heap) <= 2 + STALE_SLACK + 1


def test_choose_is_all_or_nothing() -> None:
    policy = LeastRecentlyUsed()
    pair, lone = Unit(b"pair", lone=False), unit("lone")
    pair.k_schema = pair.v_schema = SCHEMA
    for one in (lone, pair):
        policy.touch(one)
    assert choose(policy, 0, ()) == []
    assert choose(policy, 1, ()) == [lone]
    assert choose(policy, 2, ()) == [lone, pair]
    assert choose(policy, 2, {lone}) == [pair]
    assert choose(policy, 2, {pair}) is None
    assert choose(policy, 4, ()) is None


def test_notes_are_bounded_and_keep_their_order() -> None:
    policy = LeastRecentlyUsed()
    units = [unit(str(index)) for index in range(7)]
    for turn in range(20_000):
        policy.touch(units[turn * 3 % 7])
    assert len(policy._notes) <= MAX_NOTES
    for turn in range(MAX_NOTES):
        policy.touch(units[turn % 7])
    assert len(policy._notes) <= MAX_NOTES
    assert policy.settle(10)
    assert names(policy) == [str((MAX_NOTES + index) % 7) for index in range(7)]
    assert not policy.settle(10)
    policy.touch(units[0])
    policy.remove(units[0])
    assert "0" not in names(policy)
