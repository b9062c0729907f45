"""What creating, filling and dropping V sessions means: the checks, and then the change itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pion.args import show
from pion.errors import BusyError, CommandError, ExistsError
from pion.storage.changes import CreateSession, DropSession, EvictSession, PlaceRows, StoreRows
from pion.storage.ledger import BLOCK_COST, LAYER_COST, SIDE_COST, UNIT_COST, Memory, Raw
from pion.storage.schema import Schema
from pion.storage.unit import K, Rows, Side, Unit, V, split_sid

if TYPE_CHECKING:
    from pion.storage.vstore import VStore


def add_unit(store: VStore, name: bytes, *, lone: bool) -> Unit:
    """A new unit without any session."""
    unit = Unit(name, lone=lone)
    if lone:
        store.lone[name] = unit
        store.lone_names.set(name, unit)
    else:
        store.prefixes[name] = unit
        store.prefix_names.set(name, unit)
        for callback in store.on_new:
            callback(name)
    store.ledger.charge(UNIT_COST + len(name))
    store.registrations += 1
    return unit


def remove_unit(store: VStore, unit: Unit) -> None:
    """Take out a unit whose sessions are gone."""
    if unit.lone:
        del store.lone[unit.name]
        store.lone_names.remove(unit.name)
    else:
        del store.prefixes[unit.name]
        store.prefix_names.remove(unit.name)
    store.policy.remove(unit)
    if store.quotas is not None:
        store.quotas.forget(unit)
    store.ledger.charge(-UNIT_COST - len(unit.name))


def add_side(store: VStore, unit: Unit, side: Side, schema: Schema) -> None:
    """Create one session of a unit."""
    if side:
        unit.v_schema = schema
    else:
        unit.k_schema = schema
    unit.refresh()
    store.sessions += 1
    if unit.sessions == 2:
        store.whole += 1


def remove_side(store: VStore, unit: Unit, side: Side) -> None:
    """Drop one session of a unit with its rows."""
    if unit.sessions == 2:
        store.whole -= 1
    rows = unit.rows(side)
    if rows is not None:
        first = rows.layers.get(0)
        if side == K and not unit.lone and first is not None:
            store.prefix_tokens -= first.count
        rows.clear()
    if side:
        unit.v_schema = unit.v_rows = None
    else:
        unit.k_schema = unit.k_rows = None
    unit.refresh()
    store.sessions -= 1


def check_create(store: VStore, change: CreateSession) -> None:
    """The same shape again is fine; another shape is ExistsError."""
    found = store.find_session(change.sid)
    if found is not None:
        schema = found[0].schema(found[1])
        if schema is not change.schema:
            raise ExistsError(f"session {show(change.sid)} exists with another shape, {schema}")


def room_for_create(store: VStore, change: CreateSession) -> tuple[int, int, list[Unit]]:
    """One session, unless it is there; its other side must not go for it."""
    if store.held_session(change.sid) is not None:
        return 0, 0, []
    split = split_sid(change.sid)
    other = store.prefixes.get(split[0]) if split else None
    return 1, UNIT_COST + len(change.sid), [other] if other is not None else []


def apply_create(store: VStore, change: CreateSession) -> None:
    """Create the session if it is not there."""
    split = split_sid(change.sid)
    name, side = split or (change.sid, K)
    unit = (store.prefixes if split else store.lone).get(name)
    if unit is None:
        unit = add_unit(store, name, lone=split is None)
    if unit.schema(side) is None:
        add_side(store, unit, side, change.schema)
    store.policy.touch(unit)


def check_store(store: VStore, change: StoreRows) -> None:
    """The session is there, this connection may store, and the rows fit the declaration. Lengths are the caller's."""
    unit, side = store.session(change.sid)
    schema = unit.schema(side)
    assert schema is not None  # noqa: S101  session() found it
    schema.layer(change.layer)
    if unit.complete:
        raise ExistsError(f"prefix {show(unit.name)} is complete and can't be changed")
    if unit.pending is not None and change.owner and unit.pending.owner != change.owner:
        raise BusyError(f"another connection is filling {show(unit.name)}")
    declared = unit.declaration
    if declared is not None and change.count:
        if change.layer >= declared.layers:
            raise CommandError(f"layer must be below the {declared.layers} LAYERS declared, got {change.layer}")
        if change.start + change.count > declared.tokens:
            raise CommandError(
                f"rows must be below the {declared.tokens} TOKENS declared, got {change.start + change.count - 1}"
            )


def room_for_store(store: VStore, change: StoreRows) -> tuple[int, int, list[Unit]]:
    """The payload and its fixed costs: what it replaces goes only when it is there. What it extends must not go."""
    found = store.held_session(change.sid)
    assert found is not None  # noqa: S101  checked
    data = change.data
    payload = data.nbytes if isinstance(data, Memory) else len(data)
    return 0, payload + BLOCK_COST + LAYER_COST + SIDE_COST, [found[0]]


def apply_store(store: VStore, change: StoreRows) -> None:
    """Replace the rows; a declared prefix may become complete."""
    found = store.held_session(change.sid)
    assert found is not None  # noqa: S101  checked, or journalled after its creation
    unit, side = found
    store.policy.touch(unit)  # its ancestors can't be evicted before it
    _put_rows(store, unit, side, change.layer, change.start, change.count, change.data)
    if unit.cold and not isinstance(change.data, Memory):
        store.set_cold(unit, False)


def _put_rows(store: VStore, unit: Unit, side: Side, index: int, start: int, count: int, data: Raw | Memory) -> None:
    schema = unit.schema(side)
    assert schema is not None  # noqa: S101  the caller found the session
    row_bytes = schema.layer(index).row_bytes
    if not count or not row_bytes:
        return
    rows = unit.rows(side)
    if rows is None:
        rows = Rows(store.ledger)
        if side:
            unit.v_rows = rows
        else:
            unit.k_rows = rows
    layer = rows.layer(index, row_bytes)
    grown = layer.store(start, count, data)
    if index == 0 and side == K and not unit.lone:
        store.prefix_tokens += grown
    pending = unit.pending
    if pending is not None:
        pending.progress_s = store.clock.monotonic_s()
        if grown and unit.declaration is not None and layer.count == unit.declaration.tokens:
            pending.missing_layers -= 1
            complete_if_done(store, unit)


def check_place(store: VStore, change: PlaceRows) -> None:
    """Decided by the store itself, just now: nothing to check."""


def apply_place(store: VStore, change: PlaceRows) -> None:
    """Let the rows lie in the tier's object instead of where they are."""
    unit = (store.lone if change.lone else store.prefixes)[change.name]
    file = store.tier_files.add(change.key, change.nbytes, change.runs, unit)
    for run, memory in zip(change.runs, store.tier_files.memories(file), strict=True):
        _put_rows(store, unit, K if run.side == K else V, run.layer, run.start, run.count, memory)
    store.set_cold(unit, True)


def complete_if_done(store: VStore, unit: Unit) -> None:
    """Make a pending prefix visible once nothing is missing."""
    pending = unit.pending
    if pending is None or not pending.done:
        return
    forget_pending(store, unit)
    store.index.add(unit)
    store.policy.update(unit)
    store.touch(unit)
    pending.wake()


def forget_pending(store: VStore, unit: Unit) -> None:
    """The unit is no longer pending, complete or not."""
    pending = unit.pending
    if pending is None:
        return
    unit.pending = None
    unit.refresh()
    owned = store.pending[pending.owner]
    del owned[unit]
    if not owned:
        del store.pending[pending.owner]
    store.ledger.charge(-pending.cost)


def check_drop(store: VStore, change: DropSession) -> None:
    """A side of a registered prefix goes with its prefix only."""
    found = store.find_session(change.sid)
    if found is None:
        return
    unit = found[0]
    if unit.registered:
        raise CommandError(f"session {show(change.sid)} belongs to a registered prefix: use KV.PREFIX.DROP")
    if unit.children:
        raise CommandError(f"session {show(change.sid)} has prefixes that continue it: use KV.PREFIX.DROP CASCADE")


def apply_drop(store: VStore, change: DropSession) -> None:
    """Drop one session that belongs to no registered prefix."""
    found = store.held_session(change.sid)
    assert found is not None  # noqa: S101  checked, or journalled after its creation
    unit, side = found
    store.index.remove(unit)
    remove_side(store, unit, side)
    if not unit.sessions:
        remove_unit(store, unit)
    elif unit.pinned:
        # The other side alone is no prefix, so nothing could unpin it.
        unit.pinned = False
        store.policy.update(unit)


def check_evict(store: VStore, change: EvictSession) -> None:
    """Chosen by the policy: nothing to check."""


def apply_evict(store: VStore, change: EvictSession) -> None:
    """Drop a lone session."""
    unit = store.lone[change.sid]
    remove_side(store, unit, K)
    remove_unit(store, unit)
    store.dropped[change.reason] += 1
