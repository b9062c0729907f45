"""Rows in objects of a tier: they read as what was stored, and an object is useless once nothing refers to it."""

from __future__ import annotations

import gc
import secrets
import struct
from typing import Any

import pytest
import trio
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pion.config import Config
from pion.storage.block import Layer, adjacent
from pion.storage.changes import (
    CreateSession,
    Declaration,
    DropPrefix,
    DropSession,
    EvictSession,
    PlaceRows,
    Reason,
    Register,
    StoreRows,
)
from pion.storage.formats import get_format
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger, Memory
from pion.storage.placed import PromotedMemory, TierFile, TierMemory, placed_file
from pion.storage.room import memory_bytes
from pion.storage.schema import Schema
from pion.storage.tiers.base import BytesMapping, OpenedObject, TierUnavailableError
from pion.storage.tiers.tier_format import Layout, RowRun, lay_out
from pion.storage.unit import SIDES, Unit
from pion.storage.vstore import VStore
from pion.storage.vstore_log import VStoreLog, registration
from pion.storage.vstore_records import unpack
from pion.testing import FakeClock

SHAPE = Schema.uniform(get_format(b"fp32"), 1)
WIDTH = 4


def make_store(**options: Any) -> VStore:
    return VStore(Config(max_sessions=1000, max_bytes=1 << 30, **options), FakeClock(), NullJournal(), Ledger())


def place(store: VStore, unit: Unit) -> tuple[TierFile, Layout]:
    """Let a unit's rows lie in an object of their own, which is not open yet."""
    runs = [
        RowRun(side, index, run[0].start, run[-1].stop - run[0].start, [b.view(b.start, b.stop, WIDTH) for b in run])
        for side in SIDES
        if (rows := unit.rows(side)) is not None
        for index, layer in rows.layers.items()
        for run in adjacent(layer.blocks)
    ]
    key = secrets.token_hex(16)
    layout = lay_out(key, registration(unit), runs)
    store.commit(PlaceRows(unit.name, unit.lone, key, layout.nbytes, layout.runs))
    return store.tier_files.known[key], layout


def contents(layout: Layout) -> bytes:
    return b"".join([layout.head, *map(bytes, layout.parts)])


def promote(store: VStore, unit: Unit) -> None:
    for layer in unit.all_layers():
        layer.exchange(
            lambda memory: (
                PromotedMemory(memory.buffer.copy(), memory.file, memory.run, store.ledger)
                if isinstance(memory, TierMemory)
                else None
            )
        )
    store.set_cold(unit, False)


def opened(data: bytes) -> OpenedObject:
    return OpenedObject(BytesMapping(data))


class Machine(RuleBasedStateMachine):
    """Open prefixes and lone sessions, whose rows move between memory and objects while they are changed."""

    def __init__(self) -> None:
        super().__init__()
        self.store = make_store()
        self.rows: dict[tuple[bool, bytes], dict[tuple[int, int, int], bytes]] = {}
        self.data: dict[str, bytes] = {}
        self.held: list[tuple[memoryview, bytes]] = []
        self.counter = 0

    def unit(self, data: st.DataObject) -> Unit:
        lone, name = data.draw(st.sampled_from(sorted(self.rows)))
        return (self.store.lone if lone else self.store.prefixes)[name]

    @rule(name=st.sampled_from([b"a", b"b", b"c"]), lone=st.booleans())
    def make(self, name: bytes, lone: bool) -> None:
        if lone:
            self.store.commit(CreateSession(name, SHAPE))
        else:
            self.store.commit(Register(ns=name, k_schema=SHAPE, v_schema=SHAPE, owner=1))
        self.rows.setdefault((lone, name), {})

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), layer=st.integers(0, 1), start=st.integers(0, 6), count=st.integers(0, 6))
    def store_rows(self, data: st.DataObject, layer: int, start: int, count: int) -> None:
        unit = self.unit(data)
        side = 0 if unit.lone else data.draw(st.sampled_from(SIDES))
        self.counter += 1
        values = [struct.pack("<f", self.counter + index / 8) for index in range(count)]
        sid = unit.name if unit.lone else unit.name + (b"_pk", b"_pv")[side]
        self.store.commit(StoreRows(sid, layer, start, count, b"".join(values), 1))
        self.rows[unit.lone, unit.name].update({(side, layer, start + n): row for n, row in enumerate(values)})
        if count:
            assert not unit.cold

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        unit = self.unit(data)
        if not self.rows[unit.lone, unit.name]:
            return
        before = placed_files(unit)
        file, layout = place(self.store, unit)
        self.data[file.key] = contents(layout)
        file.opened = opened(self.data[file.key])
        assert unit.cold
        assert unit.in_files
        assert unit.placed
        assert all(each.key in self.store.tier_files.garbage for each in before if each is not file)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        unit = self.unit(data)
        if unit.cold and all(file.opened is not None for file in placed_files(unit)):
            promote(self.store, unit)
            assert not unit.in_files
            assert unit.placed

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        unit = self.unit(data)
        possible = unit.placed and not unit.cold
        assert self.store.withdraw(unit) == possible
        assert unit.cold or not possible
        assert not possible or unit.in_files

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def close_and_open(self, data: st.DataObject) -> None:
        """What happens to the object that was not used for longest."""
        for file in placed_files(self.unit(data)):
            for layer in file.unit.all_layers():
                layer.exchange(
                    lambda memory, file=file: (
                        memory.anew() if isinstance(memory, TierMemory) and memory.file is file else None
                    )
                )
            file.opened = opened(self.data[file.key])

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def hold_a_reply(self, data: st.DataObject) -> None:
        unit = self.unit(data)
        for layer in unit.all_layers():
            for block in layer.blocks:
                view = block.view(block.start, block.stop, WIDTH)
                self.held.append((view, bytes(view)))

    @rule()
    def replies_end(self) -> None:
        self.held.clear()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        unit = self.unit(data)
        self.store.commit(EvictSession(unit.name) if unit.lone else DropPrefix(unit.name, Reason.COMMAND))
        del self.rows[unit.lone, unit.name]

    # What must hold after every step.

    @invariant()
    def rows_are_what_was_stored(self) -> None:
        for (lone, name), rows in self.rows.items():
            unit = (self.store.lone if lone else self.store.prefixes)[name]
            found = {
                (side, index, row): bytes(block.view(row, row + 1, WIDTH))
                for side in SIDES
                if (held := unit.rows(side)) is not None
                for index, layer in held.layers.items()
                for block in layer.blocks
                for row in range(block.start, block.stop)
            }
            assert found == rows
        for view, expected in self.held:
            assert bytes(view) == expected

    @invariant()
    def objects_are_known_exactly_while_something_refers_to_them(self) -> None:
        files = self.store.tier_files
        memories: dict[TierFile, set[Memory]] = {}
        for unit in self.store.units():
            for layer in unit.all_layers():
                for block in layer.blocks:
                    file = placed_file(block.memory)
                    if file is not None:
                        assert file.unit is unit
                        memories.setdefault(file, set()).add(block.memory)
        assert {file.key for file in memories} == files.known.keys()
        assert all(file.refs == len(held) for file, held in memories.items())
        assert sorted([*files.known, *files.garbage]) == sorted(self.data)
        assert files.nbytes == sum(len(self.data[key]) for key in files.known)
        copies = [memory for held in memories.values() for memory in held if isinstance(memory, PromotedMemory)]
        assert files.promoted == len(copies)

    @invariant()
    def books_balance(self) -> None:
        ledger = self.store.ledger
        blocks = [block for unit in self.store.units() for layer in unit.all_layers() for block in layer.blocks]
        mapped = sum(memory.nbytes for memory in {block.memory for block in blocks} if memory.mapped)
        charged = sum(map(memory_bytes, self.store.units())) + ledger.sending_bytes
        assert ledger.charged_bytes == charged
        if not self.held:
            assert ledger.sending_bytes == 0
            assert ledger.mapped_bytes == mapped
        for unit in self.store.units():
            assert not unit.cold or unit.in_files or not list(unit.all_layers())


def placed_files(unit: Unit) -> set[TierFile]:
    blocks = (block for layer in unit.all_layers() for block in layer.blocks)
    return {file for block in blocks if (file := placed_file(block.memory)) is not None}


Machine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
TestPlaced = Machine.TestCase


def filled(store: VStore, name: bytes = b"s", rows: int = 4) -> Unit:
    store.commit(CreateSession(name, SHAPE))
    store.commit(StoreRows(name, 0, 0, rows, bytes(range(rows * WIDTH)), 1))
    return store.lone[name]


def test_replaying_a_placement_makes_a_declared_prefix_complete() -> None:
    store, again = make_store(), make_store()
    register = Register(ns=b"p", k_schema=SHAPE, v_schema=SHAPE, declaration=Declaration(1, 2), owner=1)
    store.commit(register)
    for side in (b"_pk", b"_pv"):
        store.commit(StoreRows(b"p" + side, 0, 0, 2, b"12345678", 1))
    file, _ = place(store, store.prefixes[b"p"])
    for change in (register, PlaceRows(b"p", False, file.key, file.nbytes, file.runs)):
        again.replay(change)
    unit = again.prefixes[b"p"]
    assert unit.complete
    assert unit.cold
    assert again.visible(b"p") is unit
    assert again.tier_files.known[file.key].refs == len(file.runs) == 2


def test_an_object_stays_until_its_last_row_was_replaced() -> None:
    store = make_store()
    unit = filled(store, rows=4)
    file, layout = place(store, unit)
    file.opened = opened(contents(layout))
    forgotten: list[TierFile] = []
    store.tier_files.on_forget = forgotten.append
    store.commit(StoreRows(b"s", 0, 0, 3, b"a" * 12, 1))
    assert not forgotten
    store.commit(StoreRows(b"s", 0, 3, 1, b"b" * 4, 1))
    assert forgotten == [file]
    assert list(store.tier_files.garbage) == [file.key]
    assert store.tier_files.nbytes == 0
    store.commit(DropSession(b"s"))
    assert list(store.tier_files.garbage) == [file.key], "once"


def test_what_was_verified_stays_readable_when_the_object_is_closed() -> None:
    store = make_store()
    unit = filled(store)
    file, layout = place(store, unit)
    file.opened = opened(contents(layout))
    (block,) = next(unit.all_layers()).blocks
    memory = block.memory
    assert isinstance(memory, TierMemory)
    assert memory.verify()
    file.opened = None
    assert bytes(block.view(0, 4, WIDTH)) == bytes(range(16))
    other = memory.anew()
    assert not other.verified
    assert not other.verify(), "it can't be read now, so nothing is said about it"
    with pytest.raises(RuntimeError, match="not open"):
        _ = other.buffer


def test_an_object_that_is_closed_during_a_check_is_no_error_but_no_success() -> None:
    store = make_store()
    unit = filled(store)
    file, layout = place(store, unit)

    class Closing(BytesMapping):
        def read_into(self, start: int, buffer: memoryview) -> None:
            super().read_into(start, buffer)
            file.opened = None  # by the event loop, while a thread reads

    file.opened = OpenedObject(Closing(contents(layout)))
    (block,) = next(unit.all_layers()).blocks
    assert isinstance(block.memory, TierMemory)
    assert block.memory.verify(), "it was read, and what was read stays readable"
    assert bytes(block.view(0, 4, WIDTH)) == bytes(range(16))


def test_damaged_rows_are_found() -> None:
    store = make_store()
    unit = filled(store)
    file, layout = place(store, unit)
    damaged = bytearray(contents(layout))
    damaged[layout.runs[0].offset + 5] ^= 1
    file.opened = opened(bytes(damaged))
    (block,) = next(unit.all_layers()).blocks
    assert isinstance(block.memory, TierMemory)
    assert not block.memory.verify()
    file.opened = opened(contents(layout))
    assert not block.memory.verify(), "it belongs to what was opened when it was first looked at"
    file.opened = opened(contents(layout)[:-1])
    with pytest.raises(ValueError, match="buffer"):
        # An object of another size than it was written with is refused when it is opened.
        block.memory.anew().verify()


@pytest.mark.parametrize("again", [False, True])
def test_a_side_that_was_dropped_since_is_not_in_a_snapshot(again: bool) -> None:
    """Its rows are in the same object, and must neither be missed nor come back."""
    store = make_store()
    for side in (b"p_pk", b"p_pv"):
        store.commit(CreateSession(side, SHAPE))
        store.commit(StoreRows(side, 0, 0, 4, side * 4, 1))
    place(store, store.prefixes[b"p"])
    store.commit(DropSession(b"p_pv"))
    if again:
        store.commit(CreateSession(b"p_pv", SHAPE))
    other = make_store()
    for captured in VStoreLog(store).capture():
        other.replay(unpack(captured.meta, b"".join(captured.parts)))
    unit = other.prefixes[b"p"]
    assert unit.v_rows is None
    assert (unit.v_schema is not None) == again
    assert unit.layer(0, 0) is not None
    (file,) = other.tier_files.known.values()
    assert file.refs == 1
    other.commit(DropSession(b"p_pk"))
    assert list(other.tier_files.garbage) == [file.key]


async def test_without_a_tier_it_is_said_what_is_missing() -> None:
    store = make_store()
    file, _ = place(store, filled(store))
    with (
        pytest.raises(TierUnavailableError, match="start the server with the --tier-dir that it had"),
        trio.fail_after(5),
    ):
        await store.tier_files.opener(file)


def test_exchange_asks_once_for_each_memory_and_keeps_places() -> None:
    ledger = Ledger()
    layer = Layer(WIDTH, ledger)
    layer.store(0, 300_000, bytes(4 * 300_000))  # too large to be merged with others
    layer.store(400_000, 2, b"12345678")
    layer.store(100_000, 1, b"wxyz")  # cuts the first in two
    old = [block.memory for block in layer.blocks]
    assert len(set(old)) == 3
    asked = 0

    def stand_in(memory: Memory) -> Memory | None:
        nonlocal asked
        asked += 1
        return Memory(bytes(memory.buffer), ledger) if memory.nbytes > 8 else None

    before = [bytes(block.view(block.start, block.stop, WIDTH)) for block in layer.blocks]
    layer.exchange(stand_in)
    assert asked == 3
    assert [bytes(block.view(block.start, block.stop, WIDTH)) for block in layer.blocks] == before
    assert [block.memory is memory for block, memory in zip(layer.blocks, old, strict=True)] == [
        False,
        True,
        False,
        True,
    ]
    assert layer.blocks[0].memory is layer.blocks[2].memory
    assert layer.blocks[0].memory.live == 4 * 299_999
    assert old[0].live == 0
    assert old[0].detached
    charged = ledger.charged_bytes
    del old
    gc.collect()
    assert ledger.charged_bytes == charged - 4 * 300_000
