"""Membership of block hashes against a plain set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pion.storage import hashes
from pion.storage.hashes import Membership

MASK = 2**64 - 1
few = st.integers(0, 5) | st.integers(MASK - 3, MASK) | st.integers(0, MASK)
hash_arrays = hnp.arrays(np.uint64, st.integers(0, 60), elements=few)


def plain_bitmap(table: np.ndarray, probes: np.ndarray) -> bytes:
    members = set(table.tolist())
    out = bytearray((len(probes) + 7) // 8)
    for index, probe in enumerate(probes.tolist()):
        if probe in members:
            out[index // 8] |= 1 << index % 8
    return bytes(out)


def half_hits(table: np.ndarray, count: int) -> np.ndarray:
    """Shuffled probes; half of them are in the table."""
    rng = np.random.default_rng(5)
    probes = rng.integers(0, 2**64, count, dtype=np.uint64)
    probes[::2] = rng.choice(table, (count + 1) // 2)
    rng.shuffle(probes)
    return probes


@given(hash_arrays, hash_arrays)
def test_bitmap_is_that_of_a_set(table, probes):
    assert Membership(table).bitmap(probes) == plain_bitmap(table, probes)
    assert Membership(table).bitmap(table) == plain_bitmap(table, table)


TABLES = {
    "random": lambda n: np.random.default_rng(1).integers(0, 2**64, n, dtype=np.uint64),
    "counters": lambda n: np.arange(n, dtype=np.uint64),
    "upper bits only": lambda n: np.arange(n, dtype=np.uint64) << np.uint64(44),
    "lower bits equal": lambda n: (np.arange(n, dtype=np.uint64) << np.uint64(32)) | np.uint64(0xDEADBEEF),
    "one after another under the multiplier": lambda n: (
        np.arange(n, dtype=np.uint64) * np.uint64(pow(hashes._MULTIPLIERS[0], -1, 2**64))
    ),
    "repeated": lambda n: np.arange(n, dtype=np.uint64) % np.uint64(7),
    "at the top": lambda n: np.uint64(MASK) - np.arange(n, dtype=np.uint64),
}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("count", [1, 2, 3, 1562, 70_000])
def test_tables_of_every_kind(kind, count):
    table = TABLES[kind](count)
    member = Membership(table)
    probes = half_hits(table, 1562)
    assert member.bitmap(probes) == plain_bitmap(table, probes)
    assert member._sorted is None
    assert member.nbytes <= 40 * count + 200


@pytest.mark.parametrize("count", [1562, 20_000])
def test_colliding_hashes_fall_back_to_bisection(monkeypatch, count):
    """Every multiplier puts these into one bucket: a search must not look through all of them one by one."""
    monkeypatch.setattr(hashes, "_MULTIPLIERS", (1, 3, 5, 7))
    table = np.arange(count, dtype=np.uint64)
    member = Membership(table)
    assert member._sorted is not None
    probes = half_hits(table, 1562)
    assert member.bitmap(probes) == plain_bitmap(table, probes)


def test_other_multipliers_are_tried(monkeypatch):
    """The first pair puts all of these into one place of each table."""
    good = hashes._MULTIPLIERS[:2]
    monkeypatch.setattr(hashes, "_MULTIPLIERS", (1, 3, *good))
    table = np.arange(1000, dtype=np.uint64)
    member = Membership(table)
    assert member._sorted is None
    assert (int(member._first.multiplier), int(member._second.multiplier)) == good
    probes = half_hits(table, 500)
    assert member.bitmap(probes) == plain_bitmap(table, probes)


def test_empty_table_and_no_probes():
    none = np.empty(0, np.uint64)
    assert Membership(none).bitmap(np.arange(9, dtype=np.uint64)) == b"\0\0"
    assert Membership(np.arange(9, dtype=np.uint64)).bitmap(none) == b""


def test_bit_order():
    member = Membership(np.array([10, 11, 12], np.uint64))
    assert member.bitmap(np.array([10, 0, 0, 0, 0, 0, 0, 11, 0, 12], np.uint64)) == bytes([0b10000001, 0b10])


def test_the_table_may_change_afterwards():
    table = np.arange(100, dtype=np.uint64)
    member = Membership(table)
    table[:] = 0
    assert member.contains(np.array([57], np.uint64)).all()
