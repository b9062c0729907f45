"""The two orders of use against plain lists: who makes room next, when prefixes leave memory and come back."""

from __future__ import annotations

from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pion.config import Config
from pion.storage.changes import DropPrefix, Register, SetPin
from pion.storage.formats import get_format
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.orders import Orders
from pion.storage.schema import Schema
from pion.storage.unit import Unit
from pion.storage.vstore import VStore
from pion.testing import FakeClock

SHAPE = Schema.uniform(get_format(b"fp32"), 1)


def make_store() -> VStore:
    return VStore(Config(max_sessions=10_000, max_bytes=1 << 30), FakeClock(), NullJournal(), Ledger())


def register(store: VStore, ns: bytes, parent: bytes | None = None, **options: Any) -> Unit:
    store.commit(Register(ns=ns, k_schema=SHAPE, v_schema=SHAPE, parent=parent, owner=1, **options))
    return store.prefixes[ns]


def orders_of(store: VStore) -> Orders:
    assert isinstance(store.policy, Orders)
    return store.policy


def names(units: Any) -> list[bytes]:
    return [unit.name for unit in units]


class Machine(RuleBasedStateMachine):
    """What moves, is pinned, used and dropped at random; `used` is the order of use, the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.store = make_store()
        self.used: list[Unit] = []
        self.number = 0

    def use(self, unit: Unit) -> None:
        for part in reversed(unit.chain()):
            if part in self.used:
                self.used.remove(part)
            self.used.append(part)

    def draw(self, data: st.DataObject) -> Unit:
        return data.draw(st.sampled_from(sorted(self.used, key=lambda unit: unit.name)))

    @rule(data=st.data(), follows=st.booleans(), pin=st.booleans())
    def register(self, data: st.DataObject, follows: bool, pin: bool) -> None:
        parent = self.draw(data) if follows and self.used else None
        self.number += 1
        name = b"%03d" % self.number
        self.use(register(self.store, name, parent and parent.name, pin=pin))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        unit = self.draw(data)
        self.store.touch(unit)
        self.use(unit)

    @precondition(lambda self: self.used)
    @rule(data=st.data(), cold=st.booleans())
    def move(self, data: st.DataObject, cold: bool) -> None:
        unit = self.draw(data)
        if unit.cold != cold and not cold:
            self.used.remove(unit)  # coming back is a use
            self.used.append(unit)
        self.store.set_cold(unit, cold)

    @precondition(lambda self: self.used)
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        self.store.commit(SetPin(self.draw(data).name, pinned))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        unit = self.draw(data)
        gone = {unit, *unit.descendants()}
        self.store.commit(DropPrefix(unit.name))
        self.used = [each for each in self.used if each not in gone]

    @invariant()
    def orders_are_those_of_the_lists(self) -> None:
        # Uses are noted at first; which of two orders takes its notes in before the other is no order in time.
        self.store.policy.settle(1000)
        warm, cold = [], []
        for unit in self.used:
            below = list(unit.descendants())
            if unit.pinned:
                continue
            if unit.cold and not below:
                cold.append(unit)
            elif not unit.cold and all(each.cold and not each.pinned for each in below):
                warm.append(unit)
        orders = orders_of(self.store)
        assert names(orders.warm.victims()) == names(warm)
        assert names(orders.cold.victims()) == names(cold)
        assert names(orders.victims()) == names([*cold, *warm])

    @invariant()
    def counts_of_children_are_right(self) -> None:
        for unit in self.used:
            assert unit.warm_children == sum(child.holds_parent for child in unit.children or ())


Machine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
TestOrders = Machine.TestCase


def test_a_pinned_prefix_outside_of_memory_keeps_what_it_continues() -> None:
    store = make_store()
    for name, parent in ((b"a", None), (b"b", b"a"), (b"c", b"b")):
        register(store, name, parent)
    a, b, c = (store.prefixes[name] for name in (b"a", b"b", b"c"))
    for unit in (c, b):
        store.set_cold(unit, True)
    assert names(store.policy.victims()) == [b"c", b"a"]
    store.commit(SetPin(b"c", True))
    assert names(store.policy.victims()) == [], "dropping what it continues would drop it, too"
    assert not a.evictable
    store.commit(SetPin(b"c", False))
    assert names(store.policy.victims()) == [b"c", b"a"]


def test_leaving_memory_keeps_the_place_in_time_and_coming_back_is_a_use() -> None:
    store = make_store()
    for name in (b"a", b"b", b"c"):
        register(store, name)
    a, b, c = (store.prefixes[name] for name in (b"a", b"b", b"c"))
    store.set_cold(c, True)
    store.touch(c)
    store.policy.settle(100)
    store.touch(a)
    store.policy.settle(100)
    store.set_cold(a, True)
    store.set_cold(b, True)
    assert names(orders_of(store).cold.victims()) == [b"b", b"c", b"a"]
    store.set_cold(b, False)
    store.set_cold(c, False)
    register(store, b"d")
    store.set_cold(a, False)
    assert names(orders_of(store).warm.victims()) == [b"b", b"c", b"d", b"a"]


def test_moving_where_it_is_changes_nothing() -> None:
    store = make_store()
    for name in (b"a", b"b"):
        register(store, name)
    store.set_cold(store.prefixes[b"b"], False)
    assert names(store.policy.victims()) == [b"a", b"b"]
    store.set_cold(store.prefixes[b"a"], True)
    store.set_cold(store.prefixes[b"a"], True)
    assert names(store.policy.victims()) == [b"a", b"b"]
