"""The longest match against a search through everything."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from pion.storage.ledger import Ledger
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
    index, ledger = PrefixIndex(), Ledger()
    units: list[Unit] = []
    for number, (block_size, hashes, tag) in enumerate(tables):
        unit = Unit(f"{tag}{number}".encode(), lone=False)
        unit.table = BlockTable(block_size, pack(hashes), None, 0, ledger)
        index.add(unit)
        index.add(unit)
        units.append(unit)
    for number in removed:
        if number < len(units):
            index.remove(units[number])
            index.remove(units[number])
    lengths = {
        unit.name: shared(hashes, wanted) * block_size
        for number, (unit, (block_size, hashes, tag)) in enumerate(zip(units, tables, strict=True))
        if number not in removed and tag.startswith(within) and size in (None, block_size)
    }
    found = index.match(pack(wanted), size, within.encode())
    best = max(lengths.values(), default=0)
    if not best:
        assert found is None
    else:
        assert found is not None
        unit, blocks, block_size = found
        assert blocks * block_size == best == lengths[unit.name]
        assert unit.table is not None
        assert unit.table.block_size == block_size
