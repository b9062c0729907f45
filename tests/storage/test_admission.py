"""The sketch of lookup misses, against a dictionary that counts exactly."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.config import fields
from pion.storage.admission import COLUMNS, COUNT_MAX, ROWS, WINDOW, Admission

NAMES = st.binary(min_size=1, max_size=3)


class Exact:
    """What the sketch should say if no two names shared a counter."""

    def __init__(self, window: int) -> None:
        self.window = self.left = window
        self.counts: Counter[bytes] = Counter()

    def miss(self, name: bytes) -> None:
        self.counts[name] = min(self.counts[name] + 1, COUNT_MAX)
        self.left -= 1
        if not self.left:
            self.counts = Counter({each: count // 2 for each, count in self.counts.items()})
            self.left = self.window


@given(
    names=st.lists(NAMES, max_size=300),
    columns=st.sampled_from([1, 2, 4, 16, 256]),
    window=st.integers(1, 80),
    seed=st.integers(0, 2**64 - 1),
)
def test_it_never_counts_too_few(names, columns, window, seed) -> None:
    """However crowded the counters are, and over any number of halvings."""
    sketch, exact = Admission(2, seed=seed, columns=columns, window=window), Exact(window)
    for name in names:
        sketch.miss(name)
        exact.miss(name)
        assert sketch.misses(name) >= exact.counts[name]
    for name in names:
        assert sketch.misses(name) >= exact.counts[name]
        assert sketch.misses(name) <= COUNT_MAX


@given(
    names=st.lists(st.sampled_from([b"%d" % number for number in range(40)]), max_size=400), window=st.integers(1, 90)
)
def test_it_is_exact_while_no_names_collide(names, window) -> None:
    """40 names in 262,144 columns: with this seed each has a counter of its own."""
    sketch, exact = Admission(2, seed=1, window=window), Exact(window)
    for name in names:
        sketch.miss(name)
        exact.miss(name)
    assert {name: sketch.misses(name) for name in names} == {name: exact.counts[name] for name in names}


@pytest.mark.parametrize("threshold", range(1, 16))
def test_a_name_is_admitted_after_exactly_so_many_misses(threshold) -> None:
    sketch = Admission(threshold, seed=2)
    for number in range(20):
        name = b"app|llama|%d" % number
        for _ in range(threshold):
            assert not sketch.admits(name)
            sketch.miss(name)
        assert sketch.admits(name)
        assert sketch.admits(name), "asking uses nothing up"
    counts = sketch.statistics()
    assert (counts.threshold, counts.misses, counts.halvings) == (threshold, 20 * threshold, 0)
    assert (counts.deferred, counts.admitted) == (20 * threshold, 40)
    assert (sketch.deferred, sketch.admitted) == (20 * threshold, 40)


def test_what_was_asked_for_long_ago_is_forgotten() -> None:
    sketch = Admission(2, seed=3, columns=1024, window=100)
    for _ in range(40):
        sketch.miss(b"hot")
    for _ in range(2):
        sketch.miss(b"warm")
    assert (sketch.misses(b"hot"), sketch.misses(b"warm")) == (COUNT_MAX, 2)
    counted = []
    for window in range(6):
        for number in range(58 if window == 0 else 100):
            sketch.miss(b"%d" % number)
        counted.append((sketch.misses(b"hot"), sketch.misses(b"warm")))
    assert counted == [(15, 1), (7, 0), (3, 0), (1, 0), (0, 0), (0, 0)]
    assert sketch.statistics().halvings == 6


def test_it_stays_as_large_as_it_is() -> None:
    sketch = Admission(2, seed=4)
    before = sys.getsizeof(sketch._counts)
    for number in range(WINDOW + 10):
        sketch.miss(b"%d" % number)
    counts = sketch.statistics()
    assert (counts.sketch_bytes, counts.halvings) == (ROWS * COLUMNS, 1)
    assert sys.getsizeof(sketch._counts) == before
    with pytest.raises(BufferError):
        sketch._counts.append(0)


def test_few_names_that_are_asked_for_once_are_admitted() -> None:
    """One window of them, all different: the worst case is its end, when half of the counters of a row are taken."""
    sketch = Admission(2, seed=5)
    early = 0
    for number in range(WINDOW - 1):
        name = b"once|%d" % number
        sketch.miss(name)
        early += sketch.misses(name) >= 2
    assert early < 0.01 * WINDOW
    # An independent estimate: all four counters taken by others, at a load that grows from 0 to 1/2.
    loads = [step / 2000 for step in range(1000)]
    expected = sum((1 - 2.718281828459045**-load) ** ROWS for load in loads) / len(loads)
    assert early <= 1.1 * expected * WINDOW, "conservative update collides less than plain counting"


def test_names_that_share_counters_differ_from_one_seed_to_the_next() -> None:
    """In a crowded sketch; without this, somebody could prepare names that admit another."""

    def shared(seed: int | None) -> frozenset[int]:
        sketch = Admission(2, seed=seed, columns=4)
        for _ in range(5):
            sketch.miss(b"victim")
        return frozenset(number for number in range(2000) if sketch.misses(b"%d" % number))

    sets = [shared(seed) for seed in (6, 7, None, None)]
    assert all(sets)
    assert len(set(sets)) == 4


def test_the_largest_threshold_can_be_reached_and_survives_a_halving() -> None:
    (option,) = [field for field in fields() if field.name == "admission"]
    assert option.metadata["high"] * 2 == COUNT_MAX
    assert COUNT_MAX <= 255
    assert COLUMNS & (COLUMNS - 1) == 0
