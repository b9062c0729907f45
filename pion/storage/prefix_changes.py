"""What registering, chaining, expiring, pinning and dropping prefixes means: the checks, and then the change itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pion.args import show
from pion.errors import BusyError, CommandError, ExistsError
from pion.limits import MAX_HASHES
from pion.storage.changes import Declaration, DropPrefix, Hashes, Register, SetExpiry, SetPin
from pion.storage.ledger import CHAIN_COST, PENDING_COST, TABLE_COST, UNIT_COST
from pion.storage.prefix_index import HASH_BYTES, BlockTable
from pion.storage.reading import FETCH_PARTS_MAX
from pion.storage.schema import Schema
from pion.storage.session_changes import (
    add_side,
    add_unit,
    complete_if_done,
    forget_pending,
    remove_side,
    remove_unit,
)
from pion.storage.unit import SIDES, Pending, Side, Unit

if TYPE_CHECKING:
    from pion.storage.vstore import VStore

MAX_CHAIN_SEGMENTS = 4096
"""Segments of one chain: a hit touches all of them, at 0.2 us each."""


def check_register(store: VStore, change: Register) -> None:
    """Shape, declaration, parent and hashes must agree with each other and with what is there."""
    unit = store.any_prefix(change.ns)
    for side, schema in _sides(change):
        old = unit.schema(side) if unit is not None else None
        if old is not None and old is not schema:
            raise ExistsError(f"prefix {show(change.ns)} exists with another shape, {'KV'[side]} {old}")
    if unit is not None and unit.pending is not None and change.owner and unit.pending.owner != change.owner:
        raise BusyError(f"another connection is filling {show(unit.name)}")
    declared = change.declaration
    if declared is not None:
        for letter, schema in (("K", change.k_schema), ("V", change.v_schema)):
            if schema.layers is not None and schema.layers < declared.layers:
                raise CommandError(f"LAYERS must be at most the {schema.layers} of the {letter} runs")
        if unit is not None:
            _check_declaration(unit, declared)
    offset = _check_parent(store, change, unit)
    if declared is not None:
        _check_ancestors(store, change, declared, unit)
    if unit is not None and unit.complete:
        _check_identity(unit, change)
    if change.hashes is not None:
        store.index.check_size(change.hashes.block_size)
        size = change.hashes.block_size
        count = len(change.hashes.blob) // HASH_BYTES
        if declared is not None:
            most = (offset + declared.tokens) // size - offset // size
            if count > most:
                raise CommandError(f"BLOCKS count must be at most {most} (blocks that end in this prefix), got {count}")
        if offset // size + count > MAX_HASHES:
            raise CommandError(f"BLOCKS: a chain has at most {MAX_HASHES} blocks, this is {offset // size + count}")


def _sides(change: Register) -> tuple[tuple[Side, Schema], tuple[Side, Schema]]:
    return (0, change.k_schema), (1, change.v_schema)


def _check_declaration(unit: Unit, declared: Declaration) -> None:
    if unit.declaration is not None:
        if unit.declaration != declared:
            raise ExistsError(f"prefix {show(unit.name)} exists with another declaration of LAYERS, TOKENS or STATES")
        return
    if unit.children:
        raise ExistsError(f"prefix {show(unit.name)} has prefixes that continue it, so it can't be declared now")
    # Rows that are there already must lie inside what is declared now.
    for rows in (unit.k_rows, unit.v_rows):
        for index, layer in (rows.layers if rows is not None else {}).items():
            if index >= declared.layers or layer.held(declared.tokens) != layer.count:
                raise ExistsError(f"prefix {show(unit.name)} holds rows outside of the declared LAYERS and TOKENS")


def _check_ancestors(store: VStore, change: Register, declared: Declaration, unit: Unit | None) -> None:
    """A declared prefix promises that all of it can be fetched, so what it continues must promise the same."""
    parent = unit.parent if unit is not None else None
    if parent is None and change.parent is not None:
        parent = store.prefixes[change.parent]
    if parent is None:
        return
    above = parent.chain()
    for part in reversed(above):
        if part.declaration is None:
            raise CommandError(
                f"PARENT: prefix {show(part.name)} is not declared, so its rows may change; "
                "a declared prefix can continue declared ones only"
            )
        if part.declaration.layers != declared.layers:
            raise CommandError(
                f"PARENT: prefix {show(part.name)} has {part.declaration.layers} LAYERS, got {declared.layers}"
            )
    parts = len(SIDES) * declared.layers * (len(above) + 1)
    if parts > FETCH_PARTS_MAX:
        raise CommandError(
            f"PARENT: {declared.layers} LAYERS in {len(above) + 1} segments are {parts} parts, "
            f"at most {FETCH_PARTS_MAX} can be fetched at once"
        )


def _check_identity(unit: Unit, change: Register) -> None:
    """META and BLOCKS say what the rows of a complete prefix are; readers may have compared them already."""
    if change.meta is not None and change.meta != unit.meta:
        raise ExistsError(f"prefix {show(unit.name)} is complete and its META can't be changed")
    table, hashes = unit.table, change.hashes
    if hashes is not None and (table is None or (table.block_size, table.own) != (hashes.block_size, hashes.blob)):
        raise ExistsError(f"prefix {show(unit.name)} is complete and its BLOCKS can't be changed")


def _check_parent(store: VStore, change: Register, unit: Unit | None) -> int:
    if change.parent is None:
        return unit.offset if unit is not None else 0
    if change.parent == change.ns:
        raise CommandError("PARENT must be another prefix")
    if unit is not None and unit.registered:
        if unit.parent is None or unit.parent.name != change.parent or unit.offset != change.offset:
            raise ExistsError(f"prefix {show(change.ns)} exists with another PARENT")
        return change.offset
    parent = store.visible(change.parent)
    if parent is None:
        raise CommandError(f"PARENT: no prefix {show(change.parent)}")
    if unit is not None and (unit in parent.chain() or unit.children):
        raise CommandError("PARENT must not continue the prefix itself")
    if parent.k_schema is not change.k_schema or parent.v_schema is not change.v_schema:
        raise CommandError(f"PARENT: shape must equal the parent's, K {parent.k_schema} V {parent.v_schema}")
    if change.offset > parent.end:
        raise CommandError(f"PARENT offset must be at most the parent's end, {parent.end}, got {change.offset}")
    if len(parent.chain()) >= MAX_CHAIN_SEGMENTS:
        raise CommandError(f"PARENT: a chain has at most {MAX_CHAIN_SEGMENTS} segments")
    return change.offset


def room_for_register(store: VStore, change: Register) -> tuple[int, int, list[Unit]]:
    """The sides that are missing and what the options take; neither the prefix nor its ancestors may go for it."""
    unit = store.prefixes.get(change.ns)
    parent = store.prefixes.get(change.parent) if change.parent is not None else None
    nbytes = max(0, len(change.meta or b"") - len(unit.meta or b"" if unit is not None else b""))
    nbytes += UNIT_COST + len(change.ns) if unit is None else 0
    if parent is not None and (unit is None or unit.parent is None):
        nbytes += CHAIN_COST
    if change.declaration is not None and (unit is None or unit.declaration is None):
        nbytes += PENDING_COST
    if change.hashes is not None and (unit is None or not unit.complete):
        # The table has the hashes of what it continues in front of its own, and so have those of what continues it.
        above = parent or (unit.parent if unit is not None else None)
        length = len(change.hashes.blob)
        if above is not None and above.table is not None:
            length += len(above.table.chain)
        tables = 1 + sum(below.table is not None for below in unit.descendants()) if unit is not None else 1
        nbytes += TABLE_COST + tables * length
    spared = [each for each in (unit, parent) if each is not None]
    return 2 - (unit.sessions if unit is not None else 0), nbytes, spared


def apply_register(store: VStore, change: Register) -> None:
    """Register the prefix, or update the options of one that is there."""
    unit = store.prefixes.get(change.ns)
    if unit is None:
        unit = add_unit(store, change.ns, lone=False)
    for side, schema in _sides(change):
        if unit.schema(side) is None:
            add_side(store, unit, side, schema)
    parent = store.prefixes[change.parent] if change.parent is not None else None
    if parent is not None and unit.parent is None:
        _link(store, unit, parent, change.offset)
    unit.registered = True
    if change.pin:
        _pin(store, unit, True)
    if change.prefill_ms is not None:
        unit.prefill_ms = change.prefill_ms
    if change.meta is not None:
        store.ledger.charge(len(change.meta) - len(unit.meta or b""))
        unit.meta = change.meta
    if change.expires_s is not None:
        store.expires(unit, change.expires_s)
    store.index.remove(unit)
    if change.hashes is not None and not unit.complete:
        _set_hashes(store, unit, change.hashes)
    if change.declaration is not None and unit.declaration is None:
        _declare(store, unit, change.declaration, change.owner)
    if unit.pending is None:
        store.index.add(unit)
    store.policy.update(unit)
    store.touch(unit)


def _link(store: VStore, unit: Unit, parent: Unit, offset: int) -> None:
    unit.parent, unit.offset = parent, offset
    if parent.children is None:
        parent.children = {}
    parent.children[unit] = None
    held = parent.holds_parent
    parent.warm_children += unit.holds_parent
    store.ledger.charge(CHAIN_COST)
    store.policy.update(parent)
    parent.pass_on(held, store.policy.update)


def _declare(store: VStore, unit: Unit, declared: Declaration, owner: int) -> None:
    missing = 0
    for side in SIDES:
        schema = unit.schema(side)
        assert schema is not None  # noqa: S101  both sides were just made
        missing += _missing_layers(unit, side, schema, declared)
    unit.declaration = declared
    pending = Pending(owner, missing, declared.states, store.clock.monotonic_s())
    unit.pending = pending
    unit.refresh()
    store.pending.setdefault(owner, {})[unit] = None
    store.ledger.charge(pending.cost)
    complete_if_done(store, unit)


def _missing_layers(unit: Unit, side: Side, schema: Schema, declared: Declaration) -> int:
    if not declared.tokens:
        return 0
    if schema.layers is None and unit.rows(side) is None:
        return declared.layers if schema.layer(0).row_bytes else 0
    missing = 0
    for index in range(declared.layers):
        if schema.layer(index).row_bytes:
            layer = unit.layer(side, index)
            missing += layer is None or layer.count < declared.tokens
    return missing


def _set_hashes(store: VStore, unit: Unit, hashes: Hashes) -> None:
    if unit.table is not None:
        unit.table.discharge()
    unit.table = BlockTable(hashes.block_size, hashes.blob, unit.parent, unit.offset, store.ledger)
    # What continues this prefix has its hashes in front of its own.
    for child in unit.descendants():
        if child.table is not None:
            store.index.remove(child)
            old = child.table
            child.table = BlockTable(old.block_size, old.own, child.parent, child.offset, store.ledger)
            old.discharge()
            if child.pending is None:
                store.index.add(child)


def check_drop(store: VStore, change: DropPrefix) -> None:
    """Nothing to check: whether descendants may go is decided by the command."""


def apply_drop(store: VStore, change: DropPrefix) -> None:
    """Drop the prefix and everything that continues it, leaves first."""
    unit = store.prefixes[change.ns]
    for victim in [*reversed(list(unit.descendants())), unit]:
        _drop_one(store, victim)
        store.dropped[change.reason] += 1
        for callback in store.on_drop:
            callback(victim.name, change.reason)


def _drop_one(store: VStore, unit: Unit) -> None:
    store.index.remove(unit)
    pending = unit.pending
    forget_pending(store, unit)
    for side in SIDES:
        if unit.schema(side) is not None:
            remove_side(store, unit, side)
    if unit.table is not None:
        unit.table.discharge()
        unit.table = None
    if unit.meta is not None:
        store.ledger.charge(-len(unit.meta))
        unit.meta = None
    if unit.expires_s:
        store.expires(unit, 0.0)
    parent = unit.parent
    if parent is not None and parent.children is not None:
        del parent.children[unit]
        held = parent.holds_parent
        parent.warm_children -= unit.holds_parent
        if not parent.children:
            parent.children = None
        unit.parent = None
        store.ledger.charge(-CHAIN_COST)
        store.policy.update(parent)
        parent.pass_on(held, store.policy.update)
    remove_unit(store, unit)
    if pending is not None:
        pending.wake()


def check_known(store: VStore, change: SetExpiry | SetPin) -> None:
    """The prefix must be there. Whether it has expired was the command's question, asked once."""
    if change.ns not in store.prefixes:
        raise CommandError(f"no prefix {show(change.ns)}")


def apply_expiry(store: VStore, change: SetExpiry) -> None:
    """Set or clear the expiry time."""
    store.expires(store.prefixes[change.ns], change.expires_s)


def apply_pin(store: VStore, change: SetPin) -> None:
    """Keep the prefix from being evicted, or no longer."""
    _pin(store, store.prefixes[change.ns], change.pinned)


def _pin(store: VStore, unit: Unit, pinned: bool) -> None:
    held = unit.holds_parent
    unit.pinned = pinned
    store.policy.update(unit)
    unit.pass_on(held, store.policy.update)
