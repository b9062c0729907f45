"""Layers of immutable blocks against a dictionary of rows, and what they hold against what they say they hold."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pion.storage.block import MERGE_BYTES, Layer, MissingRowError
from pion.storage.ledger import BLOCK_COST, LAYER_COST, Ledger

KIB = 1024


def row(layer: Layer, start: int, stop: int) -> bytes:
    return b"".join(bytes(block.view(first, last, layer.row_bytes)) for block, first, last in layer.gather(start, stop))


def missing(layer: Layer, start: int, stop: int) -> int | None:
    try:
        layer.gather(start, stop)
    except MissingRowError as error:
        return error.row
    return None


def held(layer: Layer) -> int:
    memories = {id(block.memory): block.memory for block in layer.blocks}
    return sum(memory.nbytes for memory in memories.values())


def check(layer: Layer, ledger: Ledger) -> None:
    blocks = layer.blocks
    width = layer.row_bytes
    assert all(one.stop <= other.start for one, other in itertools.pairwise(blocks))
    assert layer.count == sum(block.stop - block.start for block in blocks)
    assert ledger.payload_bytes == layer.count * width
    assert ledger.charged_bytes == held(layer) + LAYER_COST + BLOCK_COST * len(blocks)
    live: dict[int, int] = {}
    for block in blocks:
        live[id(block.memory)] = live.get(id(block.memory), 0) + (block.stop - block.start) * width
        assert bytes(block.view(block.stop, block.stop, width)) == b""
    for block in blocks:
        assert block.memory.live == live[id(block.memory)]
        assert 2 * block.memory.live > block.memory.nbytes


stores = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 24)), max_size=40)


@given(stores, st.integers(1, 5))
def test_rows_are_the_last_ones_stored(steps: list[tuple[int, int]], width: int) -> None:
    ledger, oracle = Ledger(), {}
    layer = Layer(width, ledger)
    for number, (start, count) in enumerate(steps):
        data = bytes([number % 256]) * (count * width)
        grown = layer.store(start, count, data)
        assert grown == len(set(range(start, start + count)) - oracle.keys())
        oracle.update(dict.fromkeys(range(start, start + count), data[:width]))
        check(layer, ledger)
    for start in range(0, 66, 3):
        for stop in (start, start + 1, start + 7):
            wanted = [oracle.get(index) for index in range(start, stop)]
            if None in wanted:
                assert missing(layer, start, stop) == start + wanted.index(None)
            else:
                assert row(layer, start, stop) == b"".join(wanted)
    assert [layer.held(limit) for limit in (0, 7, 30, 99)] == [
        sum(index < limit for index in oracle) for limit in (0, 7, 30, 99)
    ]
    layer.clear()
    assert (ledger.charged_bytes, ledger.payload_bytes, ledger.sending_bytes) == (0, 0, 0)


def test_rows_stored_one_by_one_end_as_few_blocks() -> None:
    ledger = Ledger()
    layer = Layer(KIB, ledger)
    for index in range(5000):
        layer.store(index, 1, index.to_bytes(4, "little") * 256)
    assert len(layer.blocks) <= 5000 * KIB // MERGE_BYTES + 12
    assert all(row(layer, index, index + 1)[:4] == index.to_bytes(4, "little") for index in range(5000))
    check(layer, ledger)


def test_rows_stored_in_any_order_end_as_few_blocks() -> None:
    layer = Layer(KIB, Ledger())
    for index in np.random.default_rng(1).permutation(4096):
        layer.store(int(index), 1, int(index).to_bytes(4, "little") * 256)
    assert len(layer.blocks) <= 64
    assert all(row(layer, index, index + 1)[:4] == index.to_bytes(4, "little") for index in range(4096))


def test_a_row_rewritten_many_times_in_a_large_block_does_not_hold_more() -> None:
    ledger = Ledger()
    layer = Layer(KIB, ledger)
    layer.store(0, 4096, bytes(4096 * KIB))
    for index in range(0, 4096, 2):
        layer.store(index, 1, b"\1" * KIB)
    check(layer, ledger)
    assert held(layer) <= 2 * 4096 * KIB
    for index in range(0, 4096, 2):
        layer.store(index + 1, 1, b"\2" * KIB)
    check(layer, ledger)
    assert row(layer, 0, 4096) == (b"\1" * KIB + b"\2" * KIB) * 2048
    assert held(layer) < 4096 * KIB * 1.10


def test_a_view_survives_every_later_store() -> None:
    ledger = Ledger()
    layer = Layer(4, ledger)
    layer.store(0, 8, b"old!" * 8)
    spans = layer.gather(0, 8)
    view = spans[0][0].view(0, 8, 4)
    layer.store(0, 8, b"new!" * 8)
    layer.clear()
    assert bytes(view) == b"old!" * 8
    assert ledger.sending_bytes == 32
    assert ledger.charged_bytes == 32
    del spans, view
    assert ledger.charged_bytes == 0
    assert ledger.sending_bytes == 0


def test_a_large_rest_is_compacted_piece_by_piece() -> None:
    """Copying what is left of a large buffer would hold the loop; until it is copied the buffer is charged whole."""
    ledger = Ledger()
    layer = Layer(KIB, ledger)
    old = bytes(range(256)) * 4
    layer.store(0, 10 * KIB, old * (10 * KIB))
    kept = layer.gather(9 * KIB, 9 * KIB + 1)
    layer.store(2 * KIB, 6 * KIB, b"n" * (6 * KIB * KIB))
    assert len(layer.blocks) == 3
    assert held(layer) == 16 * KIB * KIB
    layer.store(8 * KIB, 1, b"m" * KIB)
    pieces = 0
    while ledger.work_off():
        pieces += 1
        assert row(layer, 0, 1) == row(layer, 9 * KIB, 9 * KIB + 1) == old
    assert pieces >= 3
    assert all(block.memory.nbytes <= MERGE_BYTES for block in layer.blocks if block.start != 2 * KIB)
    assert bytes(kept[0][0].view(9 * KIB, 9 * KIB + 1, KIB)) == old
    assert ledger.sending_bytes == 10 * KIB * KIB
    del kept
    check(layer, ledger)
    assert row(layer, 8 * KIB, 8 * KIB + 2) == b"m" * KIB + old
    assert not ledger.work_off()


def test_work_on_a_layer_that_is_gone_is_none() -> None:
    ledger = Ledger()
    layer = Layer(KIB, ledger)
    layer.store(0, 8 * KIB, bytes(8 * KIB * KIB))
    layer.store(0, 5 * KIB, bytes(5 * KIB * KIB))
    layer.clear()
    assert ledger.charged_bytes == 0
    assert not ledger.work_off()
