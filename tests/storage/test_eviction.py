"""Exact LRU against a plain list, with units that leave the order and come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.storage.eviction import MAX_NOTES, STALE_SLACK, LeastRecentlyUsed, choose
from pion.storage.formats import get_format
from pion.storage.schema import Schema
from pion.storage.unit import Unit
from pion.storage.value import ValueAware, policies

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


def size(unit: Unit) -> int:
    return 10 * len(unit.name)


def test_choose_is_all_or_nothing() -> None:
    policy = LeastRecentlyUsed()
    pair, lone = Unit(b"pair", lone=False), unit("lone")
    pair.k_schema = pair.v_schema = SCHEMA
    for one in (lone, pair):
        policy.touch(one)
    assert choose(policy, 0, 0, (), size) == []
    assert choose(policy, 1, 0, (), size) == [lone]
    assert choose(policy, 2, 0, (), size) == [lone, pair]
    assert choose(policy, 2, 0, {lone}, size) == [pair]
    assert choose(policy, 2, 0, {pair}, size) is None
    assert choose(policy, 4, 0, (), size) is None
    assert choose(policy, 0, 40, (), size) == [lone]
    assert choose(policy, 0, 41, (), size) == [lone, pair]
    assert choose(policy, 3, 1, (), size) == [lone, pair]
    assert choose(policy, 0, 81, (), size) is None


class Standing:
    """A clock that is set."""

    now_s = 0.0

    def wall_s(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        return self.now_s


def grow(parents: list[int | None]) -> list[Unit]:
    """Units that continue each other: the i-th one continues the one with that number, or none."""
    units: list[Unit] = []
    for number, parent in enumerate(parents):
        made = unit(str(number))
        units.append(made)
        if parent is not None and parent < number:
            made.parent = units[parent]
            children = units[parent].children = units[parent].children or {}
            children[made] = None
            units[parent].warm_children += 1
    return units


@given(
    st.sampled_from(["lru", "value"]),
    st.lists(st.none() | st.integers(0, 8), min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from([0.0, 3.0, 40.0])), max_size=20),
    st.sets(st.integers(0, 8), max_size=2),
    st.sets(st.integers(0, 8), max_size=2),
    st.integers(0, 10),
    st.integers(0, 100),
)
def test_choose_takes_leaves_first_and_parents_at_their_own_place(kind, parents, touches, pins, kept, sessions, nbytes):
    clock = Standing()
    policy = policies(kind, clock)()
    units = grow(parents)
    for number, one in enumerate(units):
        one.prefill_ms = 10.0 ** (number % 3)
        policy.touch(one)
    for number, pause_s in touches:
        clock.now_s += pause_s
        policy.touch(units[number % len(units)])
    for number in pins:
        units[number % len(units)].pinned = True
    for one in units:
        policy.update(one)
    protected = {units[number % len(units)] for number in kept}
    found = choose(policy, sessions, nbytes, protected, size)

    # The same by its definition, looking at every unit for each victim.
    rank = policy.rank if isinstance(policy, ValueAware) else (lambda one: one.stamp)
    expected: list[Unit] = []
    while sum(one.sessions for one in expected) < sessions or sum(map(size, expected)) < nbytes:
        free = [
            one
            for one in units
            if one not in expected
            and one not in protected
            and not one.pinned
            and all(child in expected for child in one.children or ())
        ]
        if not free:
            assert found is None
            return
        expected.append(min(free, key=rank))
    assert found == expected


@pytest.mark.parametrize("kind", ["lru", "value"])
def test_a_parent_of_many_is_counted_once(kind: str) -> None:
    """Looking at all children for each of them would take ten billion steps."""
    policy = policies(kind, Standing())()
    units = grow([None, *[0] * 100_000])
    for one in units:
        policy.touch(one)
    for one in reversed(units):
        policy.update(one)
    chosen = choose(policy, len(units), 0, (), size)
    assert chosen is not None
    assert chosen[-1] is units[0]
    assert len(chosen) == len(units)


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
