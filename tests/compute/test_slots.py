"""WARM, COLD and missing: random use of the table against a plain model, and what must not change."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pion.compute.slots import Cold, Limits, Slots, State
from pion.errors import OutOfMemoryError


@attrs.define(eq=False)
class Held:
    """A layer without numbers: the table looks at its sizes only, and the bytes may grow."""

    nbytes: int
    heads: int = 2
    rows: int = 3
    head_dim: int = 8
    means: int = 0

    def keep_means(self, nbytes: int) -> None:
        """As a query does, on its thread."""
        self.forget_means()
        self.means = nbytes
        self.nbytes += nbytes

    def forget_means(self) -> None:
        self.nbytes -= self.means
        self.means = 0


def make(slots: int = 2, cold: int = 2, nbytes: int = 100) -> Slots:
    return Slots(lambda: Limits(slots, cold, nbytes))


def counters(table: Slots) -> tuple[Any, ...]:
    return attrs.astuple(table.statistics())


def test_the_least_recently_used_becomes_cold_and_then_missing() -> None:
    table = make()
    for index, sid in enumerate((b"a", b"b", b"c")):
        table.put(sid, 0, Held(10), float(index))
    assert [table.state(sid, 0) for sid in (b"a", b"b", b"c")] == [State.COLD, State.WARM, State.WARM]
    assert table.find(b"a", 0, 9.0) == Cold(2, 3, 8, 0.0)
    assert table.find(b"b", 0, 10.0) is not None  # used: c goes next
    table.put(b"d", 0, Held(10), 11.0)
    assert [table.state(sid, 0) for sid in (b"a", b"b", b"c")] == [State.COLD, State.WARM, State.COLD]
    table.put(b"e", 0, Held(10), 12.0)
    assert table.state(b"a", 0) is State.MISSING
    assert table.find(b"b", 0, None) == Cold(2, 3, 8, 10.0)
    assert counters(table) == (2, 2, 20, 3, 0)


def test_looking_is_no_use() -> None:
    table = make()
    table.put(b"a", 0, Held(1), 0.0)
    table.put(b"b", 0, Held(1), 1.0)
    assert table.find(b"a", 0, None) is not None
    assert table.state(b"a", 0) is State.WARM
    table.put(b"c", 0, Held(1), 2.0)
    assert table.state(b"a", 0) is State.COLD


def test_bytes_demote_as_slots_do() -> None:
    table = make(slots=10)
    for index in range(4):
        table.put(b"a", index, Held(30), float(index))
    assert counters(table) == (3, 1, 90, 1, 0)
    table.put(b"b", 0, Held(100), 9.0)
    assert counters(table) == (1, 2, 100, 4, 0)


def test_too_large_alone_changes_nothing() -> None:
    table = make()
    table.put(b"a", 0, Held(60), 0.0)
    table.put(b"b", 0, Held(40), 0.0)
    before = counters(table)
    for sid in (b"a", b"c"):
        with pytest.raises(OutOfMemoryError, match="101 bytes for attention are more than attend-bytes, 100"):
            table.put(sid, 0, Held(101), 1.0)
    assert counters(table) == before
    assert table.find(b"a", 0, None).nbytes == 60
    with pytest.raises(OutOfMemoryError, match="3 layers for attention are more than attend-slots, 2"):
        table.check_room(10, 3)


def test_who_holds_a_layer_keeps_it() -> None:
    table = make(slots=1)
    table.put(b"a", 0, Held(10), 0.0)
    held = table.find(b"a", 0, 1.0)
    table.put(b"a", 0, Held(20), 2.0)
    assert table.find(b"a", 0, 3.0).nbytes == 20
    assert held.nbytes == 10
    assert table.drop(b"a") == 1
    assert counters(table) == (0, 0, 0, 0, 0)


def test_what_a_layer_grew_by_is_counted_and_given_back() -> None:
    table = make(slots=4)
    first, second = Held(40), Held(40)
    table.put(b"a", 0, first, 0.0)
    table.put(b"a", 1, second, 1.0)
    first.keep_means(10)
    assert table.find(b"a", 0, 2.0) is first
    assert counters(table) == (2, 0, 90, 0, 0)
    first.keep_means(15)
    table.recount(b"b", 0)
    table.recount(b"a", 0)
    assert counters(table) == (2, 0, 95, 0, 0)
    assert table.drop(b"a", 0) == 1
    assert counters(table) == (1, 0, 40, 0, 0)
    second.keep_means(7)
    table.put(b"a", 1, Held(9), 4.0)
    assert counters(table) == (1, 0, 9, 0, 0)


@pytest.mark.parametrize("how", ["recount", "find"])
def test_means_that_do_not_fit_go_and_no_layer(how: str) -> None:
    table = make(slots=4)
    first, second = Held(50), Held(40)
    table.put(b"a", 0, first, 0.0)
    table.put(b"b", 0, second, 1.0)
    second.keep_means(11)
    if how == "recount":
        table.recount(b"b", 0)
    else:
        assert table.find(b"b", 0, 2.0) is second
    table.trim()
    assert (second.means, second.nbytes) == (0, 40)
    assert counters(table) == (2, 0, 90, 0, 0)
    second.keep_means(10)
    table.recount(b"b", 0)
    assert second.means == 10
    assert counters(table) == (2, 0, 100, 0, 0)


def test_means_make_room_before_their_layer_does() -> None:
    limits = [Limits(4, 4, 100)]
    table = Slots(lambda: limits[0])
    first, second = Held(40), Held(20)
    table.put(b"a", 0, first, 0.0)
    first.keep_means(10)
    table.recount(b"a", 0)
    table.put(b"b", 0, second, 1.0)
    second.keep_means(5)
    table.recount(b"b", 0)
    table.put(b"c", 0, Held(30), 2.0)
    assert (first.means, second.means) == (0, 5)
    assert counters(table) == (3, 0, 95, 0, 0)
    limits[0] = Limits(4, 4, 54)
    table.trim()
    assert counters(table) == (2, 1, 50, 1, 0)
    assert second.means == 0


def test_lowered_limits_hold_at_the_next_trim() -> None:
    limits = [Limits(4, 4, 100)]
    table = Slots(lambda: limits[0])
    for index in range(4):
        table.put(b"a", index, Held(10), float(index))
    limits[0] = Limits(1, 2, 100)
    table.trim()
    assert [table.state(b"a", index) for index in range(4)] == [State.MISSING, State.COLD, State.COLD, State.WARM]


def test_a_source_takes_what_was_made_from_it() -> None:
    table = make(slots=9)
    table.put(b"a", 0, Held(1), 0.0, source=b"p")
    table.put(b"a", 1, Held(1), 0.0)
    table.put(b"a", 2, Held(1), 0.0, source=b"q")
    table.put(b"b", 0, Held(1), 0.0, source=b"p")
    table.put(b"b", 1, Held(1), 0.0, source=b"p")
    table.put(b"b", 1, Held(1), 0.0)  # by hand, in place of what was made from p
    assert table.drop_source(b"none") == 0
    assert table.drop_source(b"p") == 2
    assert table.drop_source(b"p") == 0
    left = {(sid, layer) for sid in (b"a", b"b") for layer in range(3) if table.state(sid, layer) is State.WARM}
    assert left == {(b"a", 1), (b"a", 2), (b"b", 1)}
    table.put(b"a", 2, Held(1), 0.0, source=b"r")
    assert table.drop_source(b"q") == 0
    assert table.drop_source(b"r") == 1


def test_other_sources_of_a_session_go_and_what_has_none_stays() -> None:
    table = make(slots=2, cold=9)
    table.put(b"a", 0, Held(1), 0.0, source=b"p")
    table.put(b"a", 1, Held(1), 0.0)
    table.put(b"a", 2, Held(1), 0.0, source=b"q")
    table.put(b"b", 0, Held(1), 0.0, source=b"p")  # a 0 and 1 are COLD now
    assert table.drop_other_sources(b"a", b"q") == 1
    assert [table.state(b"a", layer) for layer in range(3)] == [State.MISSING, State.COLD, State.WARM]
    assert table.drop_other_sources(b"c", b"q") == 0
    assert table.state(b"b", 0) is State.WARM


SIDS = st.sampled_from([b"a", b"b", b"c"])
LAYERS = st.integers(0, 3)


@attrs.define
class Modelled:
    """A WARM layer of the model."""

    key: tuple[bytes, int]
    nbytes: int
    used_s: float
    means: int = 0


class Machine(RuleBasedStateMachine):
    """The model: a list in order of use for WARM, one of keys for COLD, and the source of each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = Limits(4, 3, 100)
        self.table = Slots(lambda: self.limits)
        self.warm: list[Modelled] = []
        self.cold: list[tuple[tuple[bytes, int], float]] = []
        self.source: dict[tuple[bytes, int], bytes] = {}
        self.now_s = 0.0
        self.demotions = self.rehydrates = 0

    @property
    def keys(self) -> list[tuple[bytes, int]]:
        return [*(each.key for each in self.warm), *(key for key, _ in self.cold)]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes + each.means for each in self.warm)

    def take(self, key: tuple[bytes, int]) -> bool:
        """Take a key out of the model; whether it was COLD."""
        cold = any(each == key for each, _ in self.cold)
        self.warm = [each for each in self.warm if each.key != key]
        self.cold = [each for each in self.cold if each[0] != key]
        return cold

    def settle(self) -> None:
        while len(self.warm) > self.limits.slots or self.nbytes > self.limits.nbytes:
            oldest = self.warm[0]
            oldest.means = 0
            if len(self.warm) > self.limits.slots or self.nbytes > self.limits.nbytes:
                self.warm.pop(0)
                self.cold.append((oldest.key, oldest.used_s))
                self.demotions += 1
        while len(self.cold) > self.limits.cold:
            self.cold.pop(0)
        self.source = {key: source for key, source in self.source.items() if key in self.keys}

    @rule(sid=SIDS, layer=LAYERS, nbytes=st.integers(1, 110), source=st.sampled_from([None, b"p", b"q"]))
    def put(self, sid: bytes, layer: int, nbytes: int, source: bytes | None) -> None:
        self.now_s += 1
        if nbytes > self.limits.nbytes:
            with pytest.raises(OutOfMemoryError):
                self.table.put(sid, layer, Held(nbytes), self.now_s, source)
            return
        self.table.put(sid, layer, Held(nbytes), self.now_s, source)
        self.rehydrates += self.take((sid, layer))
        self.warm.append(Modelled((sid, layer), nbytes, self.now_s))
        self.source.pop((sid, layer), None)
        if source is not None:
            self.source[sid, layer] = source
        self.settle()

    @rule(sid=SIDS, layer=LAYERS, uses=st.booleans())
    def find(self, sid: bytes, layer: int, uses: bool) -> None:
        self.now_s += 1
        found = self.table.find(sid, layer, self.now_s if uses else None)
        warm = [each for each in self.warm if each.key == (sid, layer)]
        cold = [used_s for key, used_s in self.cold if key == (sid, layer)]
        if warm:
            assert found.nbytes == warm[0].nbytes + warm[0].means
            if uses:
                self.take((sid, layer))
                warm[0].used_s = self.now_s
                self.warm.append(warm[0])
        else:
            assert found == (Cold(2, 3, 8, cold[0]) if cold else None)

    @rule(sid=SIDS, layer=LAYERS, nbytes=st.integers(0, 60))
    def keep_means(self, sid: bytes, layer: int, nbytes: int) -> None:
        found = self.table.find(sid, layer, None)
        if isinstance(found, Held):
            found.keep_means(nbytes)
            (warm,) = (each for each in self.warm if each.key == (sid, layer))
            warm.means = nbytes
            if self.nbytes > self.limits.nbytes:
                warm.means = 0
        self.table.recount(sid, layer)

    def drop_of(self, doomed: list[tuple[bytes, int]], dropped: int) -> None:
        assert dropped == len(doomed)
        for key in doomed:
            self.take(key)
        self.settle()

    @rule(sid=SIDS, layer=LAYERS | st.none())
    def drop(self, sid: bytes, layer: int | None) -> None:
        doomed = [key for key in self.keys if key[0] == sid and (layer is None or key[1] == layer)]
        self.drop_of(doomed, self.table.drop(sid, layer))

    @rule(source=st.sampled_from([b"p", b"q"]))
    def drop_source(self, source: bytes) -> None:
        doomed = [key for key in self.keys if self.source.get(key) == source]
        self.drop_of(doomed, self.table.drop_source(source))

    @rule(sid=SIDS, source=st.sampled_from([b"p", b"q"]))
    def drop_other_sources(self, sid: bytes, source: bytes) -> None:
        doomed = [key for key in self.keys if key[0] == sid and self.source.get(key, source) != source]
        self.drop_of(doomed, self.table.drop_other_sources(sid, source))

    @rule(slots=st.integers(1, 5), cold=st.integers(0, 4), nbytes=st.integers(50, 100))
    def change_limits(self, slots: int, cold: int, nbytes: int) -> None:
        self.limits = Limits(slots, cold, nbytes)
        self.table.trim()
        self.settle()

    @invariant()
    def agrees(self) -> None:
        warm, cold = {each.key for each in self.warm}, {key for key, _ in self.cold}
        for sid in (b"a", b"b", b"c"):
            for layer in range(4):
                key = sid, layer
                expected = State.WARM if key in warm else State.COLD if key in cold else State.MISSING
                assert self.table.state(sid, layer) is expected
        assert counters(self.table) == (len(warm), len(cold), self.nbytes, self.demotions, self.rehydrates)


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTheTable = Machine.TestCase
