"""The longest match against a search through everything."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.storage import prefix_index
from pion.storage.ledger import Ledger
from pion.storage.ordered import SortedMap
from pion.storage.prefix_index import BlockTable, PrefixIndex
from pion.storage.unit import Unit

# Few values that share bytes at both ends, so that neighbours in byte order are not neighbours in value.
HASHES = st.lists(st.sampled_from([0, 1, 256, 2**64 - 1, 1 << 56]), max_size=5)
SIZES = st.sampled_from([1, 2])


def pack(hashes: list[int]) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def shared(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


@given(
    st.lists(st.tuples(SIZES, HASHES, st.sampled_from("xy")), max_size=25),
    st.lists(st.integers(0, 24)),
    HASHES,
    st.sampled_from(["", "x", "y", "z"]),
    st.none() | SIZES,
)
def test_agrees_with_a_search_through_everything(tables, removed, wanted, within, size) -> None:
    check(tables, removed, wanted, within, size)


def check(tables, removed, wanted, within, size) -> None:
    index, ledger, names = PrefixIndex(), Ledger(), SortedMap()
    units: list[Unit] = []
    for number, (block_size, hashes, tag) in enumerate(tables):
        unit = Unit(f"{tag}{number}".encode(), lone=False)
        unit.table = BlockTable(block_size, pack(hashes), None, 0, ledger)
        unit.partial = False
        index.add(unit)
        index.add(unit)
        names.set(unit.name, unit)
        units.append(unit)
    for number in removed:
        if number < len(units):
            index.remove(units[number])
            index.remove(units[number])
            units[number].partial = True
    lengths = {
        unit.name: shared(hashes, wanted) * block_size
        for number, (unit, (block_size, hashes, tag)) in enumerate(zip(units, tables, strict=True))
        if number not in removed and tag.startswith(within) and size in (None, block_size)
    }
    found = index.match(pack(wanted), size, within.encode(), names)
    best = max(lengths.values(), default=0)
    if not best:
        assert found is None
    else:
        assert found is not None
        unit, blocks, block_size = found
        assert blocks * block_size == best == lengths[unit.name]
        assert unit.table is not None
        assert unit.table.block_size == block_size


@given(
    st.lists(st.tuples(st.just(1), HASHES, st.just("y")), max_size=25),
    st.lists(st.tuples(st.just(1), HASHES, st.just("x")), max_size=4),
    HASHES,
)
def test_few_names_are_found_among_any_number_of_others(others, wanted_names, wanted) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_index, "WALK_ENTRIES", 4)
        check([*others, *wanted_names], [], wanted, "x", None)


@pytest.mark.parametrize("alike", [True, False])
def test_the_search_among_other_names_is_bounded(alike) -> None:
    """20,000 prefixes of others with the same beginning, and more names of one's own than are looked at."""
    index, ledger, names = PrefixIndex(), Ledger(), SortedMap()
    looked = 0

    class Name(bytes):
        def startswith(self, *args) -> bool:
            nonlocal looked
            looked += 1
            return super().startswith(*args)

    for number in range(20_000):
        mine = number % 20 == 0
        unit = Unit(Name(b"%s%05d" % (b"x" if mine else b"y", number)), lone=False)
        unit.partial = False
        chain = [7] if mine else [1, 2] if alike else [1, 2, number]
        unit.table = BlockTable(1, pack(chain), None, 0, ledger)
        index.add(unit)
        names.set(unit.name, unit)
    assert index.match(pack([1, 2, 9001]), 1, b"x", names) is None
    assert looked <= 1600
    found = index.match(pack([1, 2, 9001]), 1, b"y", names)
    assert found is not None
    assert found[1] == (2 if alike else 3)


@pytest.mark.parametrize("alike", [True, False])
def test_one_name_among_thousands_of_others(alike) -> None:
    """Whether the others have one list of hashes or lists of their own around the place."""
    index, ledger, names = PrefixIndex(), Ledger(), SortedMap()
    for number in range(4000):
        unit = Unit(b"x" if number == 2000 else b"y%d" % number, lone=False)
        unit.partial = False
        chain = [1, 2] if number == 2000 or alike else [1, 2, number]
        unit.table = BlockTable(1, pack(chain), None, 0, ledger)
        index.add(unit)
        names.set(unit.name, unit)
    # In the order of their bytes this lies in the middle of the others.
    found = index.match(pack([1, 2, 8]), None, b"x", names)
    assert found is not None
    assert (found[0].name, *found[1:]) == (b"x", 2, 1)


def test_block_sizes_share_the_walk() -> None:
    index, ledger, names = PrefixIndex(), Ledger(), SortedMap()
    looked = 0

    class Name(bytes):
        def startswith(self, *args) -> bool:
            nonlocal looked
            looked += 1
            return super().startswith(*args)

    for number in range(16_000):
        unit = Unit(Name(b"%s%05d" % (b"x" if number % 20 == 0 else b"y", number)), lone=False)
        unit.partial = False
        unit.table = BlockTable(1 + number % 16, pack([7] if number % 20 == 0 else [1, number]), None, 0, ledger)
        index.add(unit)
        names.set(unit.name, unit)
    assert index.match(pack([1, 0]), None, b"x", names) is None
    assert looked <= 1600
