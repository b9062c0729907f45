"""The value-aware order against its formula, looked at for every unit; what it forgets, and what it must not forget."""

from __future__ import annotations

from itertools import pairwise
from math import e

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.config import Config
from pion.errors import OutOfMemoryError
from pion.receipt import ESTIMATE_US_PER_TOKEN
from pion.storage.changes import Declaration, DropPrefix, Register, SetPin, StoreRows
from pion.storage.eviction import MAX_NOTES
from pion.storage.formats import get_format
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.schema import Schema
from pion.storage.unit import Unit
from pion.storage.value import (
    APART_S,
    DOUBLING_TOKENS,
    FIRST_R_S,
    GHOSTS,
    LONGEST,
    MAX_SHAPES,
    MAX_USES,
    MAX_WORTH,
    STEPS,
    UNIT_BYTES,
    US_PER_TOKEN,
    Reuse,
    ValueAware,
)
from pion.storage.vstore import VStore
from pion.testing import FakeClock

FP32 = get_format(b"fp32")
TOKENS = 100


def prefix(name: str, prefill_ms: float | None = None, dim: int = 256) -> Unit:
    """A complete prefix of one layer."""
    made = Unit(name.encode(), lone=False)
    made.k_schema = made.v_schema = Schema.uniform(FP32, dim)
    made.declaration = Declaration(1, TOKENS)
    made.prefill_ms = prefill_ms
    return made


class Model:
    """The formula, kept for each unit without any order."""

    def __init__(self) -> None:
        self.r_s = FIRST_R_S
        self.returns = 16
        self.last_s: dict[str, float] = {}
        self.uses: dict[str, int] = {}
        self.turn: dict[str, int] = {}
        self.turns = 0

    def touch(self, name: str, now_s: float) -> None:
        last_s = self.last_s.get(name)
        if last_s == now_s:
            return
        if last_s is not None and now_s - last_s >= 10:
            self.uses[name] += 1
            self.returns = min(self.returns + 1, 1024)
            self.r_s += (min(now_s - last_s, 8 * self.r_s) - self.r_s) / self.returns
        self.last_s[name] = now_s
        self.uses.setdefault(name, 0)
        self.turns += 1
        self.turn[name] = self.turns

    def log_value(self, name: str, now_s: float, prefill_ms: float, row_bytes: int) -> float:
        density = prefill_ms * 1000 / (TOKENS * row_bytes + 1024) * 2**20
        worth = float(np.clip(np.round(4 * np.log(np.float64(density))) / 4, 0, 127 / 4))
        return worth + min(self.uses[name], 3) - (now_s - self.last_s[name]) / self.r_s


STEP = st.tuples(st.sampled_from(["touch", "touch", "pin", "unpin", "pend"]), st.integers(0, 7))
PAUSE = st.sampled_from([0.0, 1.0, 9.0, 11.0, 60.0, 500.0, 3000.0])


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 20.0, 21.0, 900.0]), st.sampled_from([8, 256])), min_size=8, max_size=8),
    st.lists(st.tuples(STEP, PAUSE), max_size=60),
)
def test_the_order_is_that_of_the_formula(shapes: list[tuple[float, int]], steps) -> None:
    clock, model = FakeClock(), Model()
    policy = ValueAware(clock)
    units = [prefix(str(index), prefill_ms, dim) for index, (prefill_ms, dim) in enumerate(shapes)]
    pending = object()
    for (what, index), pause_s in steps:
        clock.advance(pause_s)
        one = units[index]
        if what == "touch" and one.pending is None:
            policy.touch(one)
            model.touch(str(index), clock.monotonic_s())
        elif str(index) in model.uses:
            if what == "pend":
                one.pending = None if one.pending else pending  # type: ignore[assignment]
            else:
                one.pinned = what == "pin"
            policy.update(one)
        now_s = clock.monotonic_s()
        free = [name for name in model.uses if units[int(name)].evictable]
        values = {name: model.log_value(name, now_s, shapes[int(name)][0], 8 * shapes[int(name)][1]) for name in free}
        found = [victim.name.decode() for victim in policy.victims()]
        assert sorted(found) == sorted(free)
        # The order is exact but for the last bits of a float; what is equal in value goes by the order of use.
        for first, second in pairwise(found):
            assert values[first] <= values[second] + 1e-9
            if model.last_s[first] == model.last_s[second] and values[first] == values[second]:
                assert model.turn[first] < model.turn[second]
    assert policy.reuse.r_s == pytest.approx(model.r_s)


def test_density_is_measured_or_estimated_by_position() -> None:
    policy = ValueAware(FakeClock())
    row_bytes = 2 * 4 * 256
    one = prefix("measured", 50.0)
    assert policy.density(one) == pytest.approx(50_000 / (TOKENS * row_bytes + UNIT_BYTES) * 2**20)
    first, later = prefix("first"), prefix("later")
    later.offset = DOUBLING_TOKENS
    assert policy.density(first) == pytest.approx(
        TOKENS * 555 * (1 + TOKENS / 2 / DOUBLING_TOKENS) / (TOKENS * row_bytes + UNIT_BYTES) * 2**20
    )
    assert policy.density(later) / policy.density(first) == pytest.approx(2, rel=0.01)
    assert US_PER_TOKEN == ESTIMATE_US_PER_TOKEN

    layered = Unit(b"layered", lone=False)
    layered.k_schema = Schema.parse(b"fp32@16*1,fp16@16*1", None, 8, 1024)
    layered.v_schema = Schema.parse(b"fp16@0*2", None, 8, 1024)
    layered.declaration = Declaration(2, TOKENS)
    layered.prefill_ms = 1.0
    assert policy.density(layered) == pytest.approx(1000 / (TOKENS * (64 + 32) + UNIT_BYTES) * 2**20)


@pytest.mark.parametrize(("prefill_ms", "level"), [(0.0, 0), (1e12, MAX_WORTH)])
def test_absurd_times_have_a_level(prefill_ms: float, level: int) -> None:
    policy = ValueAware(FakeClock())
    one = prefix("absurd", prefill_ms, dim=1 if level else 256)
    policy.touch(one)
    assert policy.level(one) == level
    assert list(policy.victims()) == [one]


def test_a_new_prefill_time_counts_at_once() -> None:
    policy = ValueAware(FakeClock())
    cheap, dear = prefix("cheap", 1.0), prefix("dear", 2.0)
    for one in (cheap, dear):
        policy.touch(one)
    assert list(policy.victims()) == [cheap, dear]
    cheap.prefill_ms = 4.0
    policy.update(cheap)
    assert list(policy.victims()) == [dear, cheap]


def test_touches_close_together_are_one_use() -> None:
    clock = FakeClock()
    policy, one = ValueAware(clock), prefix("one")
    policy.touch(one)
    for _ in range(5):
        clock.advance(APART_S - 0.5)
        policy.touch(one)
    assert one.uses == 0
    for uses in (1, 2, 3, 3):
        clock.advance(APART_S)
        policy.touch(one)
        assert one.uses == uses
    assert MAX_USES == 3


def test_a_use_and_a_factor_e_of_time_weigh_the_same() -> None:
    clock = FakeClock()
    policy = ValueAware(clock)
    dear, cheap = prefix("dear", 10.0 * e), prefix("cheap", 10.0)
    assert policy.level(dear) - policy.level(cheap) == STEPS
    policy.touch(dear)
    clock.advance(FIRST_R_S * 0.95)
    policy.touch(cheap)
    assert [one.name for one in policy.victims()] == [b"cheap", b"dear"]
    clock.advance(FIRST_R_S * 0.1)
    policy.touch(cheap)
    policy.reuse.r_s = FIRST_R_S
    cheap.uses = 0
    policy.update(cheap)
    assert [one.name for one in policy.victims()] == [b"dear", b"cheap"]


def test_what_was_evicted_is_known_when_it_comes_back() -> None:
    clock = FakeClock()
    policy = ValueAware(clock)
    one = prefix("one")
    policy.touch(one)
    clock.advance(50)
    policy.touch(one)
    policy.remove(one)
    clock.advance(70)
    again, other = prefix("one"), prefix("other")
    r_s = policy.reuse.r_s
    policy.touch(again)
    policy.touch(other)
    assert (again.uses, other.uses) == (2, 0)
    assert policy.reuse.r_s == pytest.approx(r_s + (70 - r_s) / 18, abs=1)
    assert list(policy.victims()) == [other, again]


def test_ghosts_are_bounded_and_the_old_ones_go() -> None:
    reuse = Reuse()
    size = reuse._ghosts.itemsize * len(reuse._ghosts)
    for number in range(3 * GHOSTS):
        one = Unit(b"name-%d" % number, lone=True)
        one.used_s, one.uses = float(number % 1000), number % 4
        reuse.bury(one)
    assert reuse._ghosts.itemsize * len(reuse._ghosts) == size
    known = [reuse.recall(b"name-%d" % number, 1000.0) is not None for number in range(3 * GHOSTS)]
    assert sum(known) <= GHOSTS
    assert np.mean(known[:GHOSTS]) < 0.2
    assert np.mean(known[-GHOSTS // 2 :]) > 0.6
    last = 3 * GHOSTS - 1
    assert reuse.recall(b"name-%d" % last, 1000.0) == (last % 4, 1000.0 - last % 1000)
    assert sum(reuse.recall(b"stranger-%d" % number, 0.0) is not None for number in range(10_000)) <= 1


@given(st.lists(st.floats(10, 1e7), max_size=200))
def test_the_mean_time_to_return_stays_within_what_was_seen(times: list[float]) -> None:
    reuse = Reuse()
    for after_s in times:
        before_s = reuse.r_s
        reuse.returned(after_s)
        assert min(before_s, after_s) - 1e-6 <= reuse.r_s <= max(before_s, after_s) + 1e-6
        assert reuse.r_s <= before_s * (1 + LONGEST / 16)


def test_it_learns_how_long_a_return_takes() -> None:
    reuse = Reuse()
    for _ in range(5000):
        reuse.returned(1000.0)
    assert reuse.r_s == pytest.approx(1000, rel=0.02)
    for _ in range(5000):
        reuse.returned(20.0)
    assert reuse.r_s == pytest.approx(20, rel=0.5)


def test_churn_does_not_grow_it() -> None:
    clock = FakeClock()
    policy = ValueAware(clock)
    kept = [prefix(f"kept-{number}", 5.0) for number in range(10)]
    for one in kept:
        policy.touch(one)
    for number in range(MAX_NOTES * 2):
        clock.advance(1.0)
        one = prefix(f"name-{number}", 10.0 ** (number % 7), dim=1 + number % 1000)
        policy.touch(one)
        if number % 3:
            one.pinned = True
            policy.update(one)
        policy.remove(one)
        assert len(policy._notes) <= MAX_NOTES
    assert len(policy._shapes) <= MAX_SHAPES
    assert list(policy.victims()) == kept
    assert len(policy._levels) == 1
    assert sum(len(order._heap) for order in policy._levels.values()) <= 100


# Through the store.


def make_store(clock: FakeClock, max_sessions: int) -> VStore:
    config = Config(max_sessions=max_sessions, eviction="value")
    return VStore(config, clock, NullJournal(), Ledger())


def put(store: VStore, name: str, prefill_ms: float | None = None, parent: str | None = None) -> None:
    schema = Schema.uniform(FP32, 1)
    store.commit(
        Register(
            ns=name.encode(),
            k_schema=schema,
            v_schema=schema,
            declaration=Declaration(1, 1),
            parent=parent.encode() if parent else None,
            offset=1 if parent else 0,
            prefill_ms=prefill_ms,
            owner=1,
        )
    )
    for side in (b"_pk", b"_pv"):
        store.commit(StoreRows(name.encode() + side, 0, 0, 1, b"rows", owner=1))


def test_a_scan_does_not_flush_what_is_reused() -> None:
    clock = FakeClock()
    store = make_store(clock, 100)
    for turn in range(3):
        for number in range(20):
            name = f"reused-{number}"
            if turn:
                store.touch(store.prefix(name.encode()))
            else:
                put(store, name)
        clock.advance(60)
    for number in range(500):
        put(store, f"scan-{number}")
        clock.advance(0.1)
    assert all(store.visible(b"reused-%d" % number) for number in range(20))
    assert store.visible(b"scan-499")
    assert not store.visible(b"scan-0")


def test_what_is_reused_no_longer_goes_at_last() -> None:
    clock = FakeClock()
    store = make_store(clock, 20)
    put(store, "once-hot")
    for _ in range(5):
        clock.advance(60)
        store.touch(store.prefix(b"once-hot"))
    for number in range(300):
        put(store, f"new-{number}")
        clock.advance(10)
    assert not store.visible(b"once-hot")


def test_the_dear_model_stays_and_leaves_go_before_their_parents() -> None:
    clock = FakeClock()
    store = make_store(clock, 20)
    for number in range(4):
        put(store, f"dear-{number}", 1000.0)
    put(store, "pinned", 1.0)
    store.commit(SetPin(b"pinned", True))
    put(store, "root", 1.0)
    put(store, "leaf", 500.0, parent="root")
    put(store, "other", 500.0, parent="root")
    for number in range(100):
        clock.advance(1)
        put(store, f"cheap-{number}", 10.0)
        for name in (b"leaf", b"other"):
            assert store.visible(name) is None or store.visible(b"root") is not None
    assert all(store.visible(b"dear-%d" % number) for number in range(4))
    assert store.visible(b"pinned")
    store.commit(DropPrefix(b"root"))
    assert store.visible(b"leaf") is None


DO = st.sampled_from(["put", "put", "put", "begin", "use", "pin", "unpin", "drop"])


@given(st.lists(st.tuples(DO, st.integers(0, 11), st.integers(0, 11), PAUSE), max_size=60))
def test_random_use_of_a_full_store_breaks_no_rule(steps) -> None:
    clock = FakeClock()
    store = make_store(clock, 12)
    schema = Schema.uniform(FP32, 1)
    for what, number, other, pause_s in steps:
        clock.advance(pause_s)
        name = f"{number}"
        ns = name.encode()
        kept = {unit.name for unit in store.units() if unit.pinned or unit.pending is not None}
        if what == "drop":
            kept -= {unit.name for unit in store.prefixes[ns].descendants()} | {ns} if ns in store.prefixes else set()
        free = [unit for unit in store.units() if not (unit.pinned or unit.pending or unit.children)]
        try:
            if what == "put" and ns not in store.prefixes:
                parent = str(other) if store.visible(b"%d" % other) else None
                put(store, name, 10.0 ** (number % 4), parent)
            elif what == "begin" and ns not in store.prefixes:
                store.commit(Register(ns=ns, k_schema=schema, v_schema=schema, declaration=Declaration(1, 1), owner=1))
            elif what == "use" and store.visible(ns):
                store.touch(store.prefix(ns))
            elif what in ("pin", "unpin") and ns in store.prefixes:
                store.commit(SetPin(ns, what == "pin"))
                kept.discard(ns)
            elif what == "drop" and ns in store.prefixes:
                store.commit(DropPrefix(ns))
        except OutOfMemoryError:
            # What is continued by the new prefix is protected, whatever is free beside it would have gone.
            ancestors = store.prefixes[b"%d" % other].chain() if b"%d" % other in store.prefixes else []
            assert all(unit in ancestors for unit in free)
        assert kept <= {unit.name for unit in store.units()}
        assert store.sessions <= 12
        for unit in store.units():
            assert unit.parent is None or store.prefixes.get(unit.parent.name) is unit.parent
        found = list(store.policy.victims())
        assert set(found) == {unit for unit in store.units() if unit.evictable}
        assert found == sorted(found, key=store.policy.warm.rank)
