"""Attention indexes in memory: blocks, merging, one piece out of many, the ledger, the budget."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.config import KIB, MIB
from pion.errors import OutOfMemoryError
from pion.storage import attention_index
from pion.storage.attention_index import INDEX_COST, MERGE_BYTES, PIECE_COST
from pion.storage.attention_index_blocks import IndexBlock, arrays, fill
from pion.storage.changes import CreateSession, Register, SetPin, StoreRows
from pion.storage.formats import get_format
from pion.storage.schema import Schema
from tests.storage.index_support import append, check_counts, contents, expected, gather, make_log, refused, row_data

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from("ab"), st.integers(1, 40)),
        st.tuples(
            st.sampled_from(["drop", "gather", "truncate", "restore"]), st.sampled_from("ab"), st.integers(0, 60)
        ),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(STEPS, st.sampled_from([64, 1024, MIB]))
def test_whatever_happens_the_rows_are_right_and_the_counts_agree(
    steps: list[tuple[str, str, int]], merge: int
) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(attention_index, "MERGE_BYTES", merge)
    try:
        log, rows, dropped = make_log(), dict.fromkeys("ab", 0), dict[str, Any]()
        table = log.table
        for what, name, number in steps:
            key = name.encode()
            found = table.find(key)
            if what == "append":
                append(log, key, 3, number)
                rows[name] += number
                dropped.pop(name, None)
            elif what == "restore" and found is None and name in dropped:
                index = dropped.pop(name)
                table.restore(index)
                rows[name] = index.rows
            elif found is not None and what == "drop":
                dropped[name] = found
                log.drop_index(key)
                rows[name] = 0
            elif found is not None and what == "truncate":
                rows[name] = min(number, found.rows)
                table.truncate(found, rows[name])
            elif found is not None and what == "gather":
                gather(log, key)
            assert contents(table) == expected(**{name: (3, count) for name, count in rows.items()})
        found = None
        dropped.clear()  # they hold memory
        index = None
        check_counts(table)
    finally:
        patch.undo()


@settings(deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=40))
def test_appended_in_pieces_is_appended_at_once(counts: list[int]) -> None:
    pieces, once = make_log(), make_log()
    for count in counts:
        append(pieces, b"x", 5, count)
    append(once, b"x", 5, sum(counts))
    assert contents(pieces.table) == contents(once.table)
    gather(pieces, b"x")
    for one, other in zip(*(arrays(log.table.index(b"x").blocks[0], 5) for log in (pieces, once)), strict=True):
        np.testing.assert_array_equal(one, other)
        assert not one.flags.writeable
    assert pieces.table.ledger.charged_bytes == once.table.ledger.charged_bytes


def test_single_rows_are_few_blocks() -> None:
    log, dim = make_log(), 32
    per_block = MERGE_BYTES // (8 * dim)
    for _ in range(3 * per_block):
        append(log, b"x", dim, 1)
    assert len(log.table.index(b"x").blocks) <= 3 * 2 + per_block.bit_length()
    assert contents(log.table) == expected(x=(dim, 3 * per_block))
    check_counts(log.table)


def test_a_large_payload_is_kept_without_a_copy() -> None:
    log = make_log()
    keys, values = (np.full(100 * KIB, number, np.uint8) for number in (1, 2))
    log.append_rows(b"x", 1, 25 * KIB, memoryview(keys), memoryview(values))
    log.append_rows(b"x", 1, 1, b"1234", b"5678")
    first, last = log.table.index(b"x").blocks
    assert (first.keys.buffer, first.values.buffer) == (keys, values)
    assert last.rows == 1


def test_what_a_client_still_reads_stays_charged() -> None:
    log = make_log()
    append(log, b"x", 4, 100)
    ledger = log.table.ledger
    (block,) = log.table.index(b"x").blocks
    view = block.view(10, 20, 16)
    log.drop_index(b"x")
    assert (ledger.charged_bytes, ledger.sending_bytes) == (3200, 3200)
    keys, values = row_data(b"x", 4, 10, 20)
    assert view == (keys, values)
    del block
    assert (ledger.charged_bytes, ledger.sending_bytes, ledger.payload_bytes) == (0, 0, 0)


def test_the_room_for_one_piece_is_reserved_and_given_back() -> None:
    log = make_log()
    append(log, b"x", 4, 100)
    index, ledger = log.table.index(b"x"), log.table.ledger
    assert index.reserved_bytes == 0
    append(log, b"x", 4, 10)
    assert index.reserved_bytes == index.nbytes == 110 * 32
    before = ledger.charged_bytes
    sources = index.blocks
    target = log.table.begin_gather(index, sources)
    assert ledger.charged_bytes == before
    append(log, b"x", 4, 5)  # while it is copied
    fill(target, sources, 16)
    log.table.end_gather(index, sources, target)
    assert [block.rows for block in index.blocks] == [110, 5]
    assert contents(log.table) == expected(x=(4, 115))
    del sources, target
    check_counts(log.table)


def test_the_piece_that_begins_with_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    log = make_log()
    append(log, b"x", 4, 100)
    append(log, b"x", 4, 10)
    index = log.table.index(b"x")
    first = index.blocks[0]
    assert [index.piece(rows) for rows in (1, 100, 101, 110, 111)] == [first, first, None, None, None]
    log.table.truncate(index, 100)
    assert index.piece(101) is first, "of fewer rows than that it has all"
    monkeypatch.setattr(IndexBlock, "mapped", True)
    assert index.piece(1) is None, "it lies in a file"


@pytest.mark.parametrize("how", ["failed", "dropped", "changed"])
def test_a_copy_that_comes_to_nothing(how: str) -> None:
    log = make_log()
    append(log, b"x", 4, 100)
    append(log, b"x", 4, 10)
    index = log.table.index(b"x")
    sources = index.blocks
    target: Any = log.table.begin_gather(index, sources)
    if how == "failed":
        target = None
    else:
        fill(target, sources, 16)
        if how == "dropped":
            log.drop_index(b"x")
        else:
            append(log, b"x", 4, 12)  # which absorbs the second block
            assert index.blocks[:2] != sources
    log.table.end_gather(index, sources, target)
    del sources, target, index
    check_counts(log.table)
    assert contents(log.table) == expected(x=(4, {"failed": 110, "dropped": 0, "changed": 122}[how]))


# Limits.


def test_rows_of_another_width_and_too_many_are_refused() -> None:
    log = make_log(max_index_rows=20, max_indexes=2)
    append(log, b"x", 4, 15)
    append(log, b"y", 2, 1)
    before, charged = contents(log.table), log.table.ledger.charged_bytes
    assert refused(append, log, b"x", 5, 1) == "ERR D must be 4 as in the rows that index 'x' has, got 5"
    assert "at most 20 rows (--max-index-rows), it would have 21" in refused(append, log, b"x", 4, 6)
    assert refused(append, log, b"z", 4, 1).startswith("OOM 2 attention indexes are in use (--max-indexes)")
    assert (contents(log.table), log.table.ledger.charged_bytes) == (before, charged)
    append(log, b"x", 4, 5)
    log.drop_index(b"y")
    append(log, b"z", 4, 20)


def test_prefixes_make_room_and_indexes_do_not() -> None:
    log = make_log(max_bytes=20_000, max_sessions=100)
    store = log.table._store
    shape = Schema.uniform(get_format(b"fp32"), 16)
    for name in (b"a", b"b"):
        store.commit(Register(ns=name, k_schema=shape, v_schema=shape))
        for side in (b"_pk", b"_pv"):
            store.commit(StoreRows(name + side, 0, 0, 40, bytes(64 * 40)))
    store.commit(SetPin(b"b", True))
    append(log, b"x", 16, 60)
    assert list(store.prefixes) == [b"b"]
    charged = store.ledger.charged_bytes
    assert charged <= 20_000
    text = refused(append, log, b"y", 16, 60)
    assert text.startswith("OOM ")
    assert "--max-bytes" in text
    assert (contents(log.table), store.ledger.charged_bytes) == (expected(x=(16, 60)), charged)
    # Rows fit, but not the copy that a query needs.
    assert refused(append, log, b"x", 16, 10).startswith("OOM ")
    while store.over(600) <= 0:
        store.commit(CreateSession(b"s%d" % len(store.lone), shape))
    log.drop_index(b"x")
    append(log, b"y", 16, 60)
    assert contents(log.table) == expected(y=(16, 60))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 60), st.booleans()), max_size=60))
def test_the_budget_holds(steps: list[tuple[bytes, int, bool]]) -> None:
    log = make_log(max_bytes=30_000)
    ledger = log.table.ledger
    for name, count, query in steps:
        before, charged = contents(log.table), ledger.charged_bytes
        try:
            append(log, name, 8, count)
        except OutOfMemoryError:
            assert (contents(log.table), ledger.charged_bytes) == (before, charged)
            log.drop_index(name)
        if query and log.table.find(name) is not None:
            gather(log, name)
        assert ledger.charged_bytes <= 30_000
    check_counts(log.table)


ROOT = Path(__file__).resolve().parents[2]
MEASURE = """
    import gc, os, sys
    from pion.process import tune_allocator
    from tests.storage.index_support import make_log

    def anonymous():
        gc.collect()
        for line in open("/proc/self/smaps_rollup"):
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024

    tune_allocator()
    gc.set_threshold(50_000, 20, 100)
    log = make_log(max_indexes=1_000_000)
    counts = {"one": (1,), "pieces": (16, 8, 4, 2, 1), "merged": (1, 1)}[sys.argv[1]]
    before = anonymous()
    for i in range(15_000):
        for n in counts:
            log.append_rows(b"index-%018d" % i, 4, n, os.urandom(16 * n), os.urandom(16 * n))
    reserved = sum(index.reserved_bytes for index in log.table)
    print((anonymous() - before) / (log.table.ledger.charged_bytes - reserved))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")
@pytest.mark.parametrize("what", ["one", "pieces", "merged"])
def test_fixed_costs_are_what_they_cost(what: str) -> None:
    assert INDEX_COST < PIECE_COST
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), what]
    ratio = float(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    assert 0.8 <= ratio <= 1.10, ratio
