"""The commands that clients send, each with what it changes in the model and how its reply is judged."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from pion.replies import Buffer
from tests.crash import rows
from tests.crash.model import (
    BLOCK_SIZE,
    SUFFIXES,
    Kind,
    Shape,
    State,
    Unit,
    Window,
    chain,
    may_be_gone,
    with_unit,
    without,
)
from tests.crash.rows import Versions
from tests.crash.wire import Refused, ViolationError

Effect = Callable[[State, Window], State]
Check = Callable[[State, Any], str]


@attrs.frozen(eq=False)
class Step:
    """One command."""

    request: tuple[Buffer, ...] = attrs.field(repr=False)
    effects: tuple[Effect, ...] = attrs.field(default=(), repr=False)
    """What it changes, in order. A kill may leave only the first of them."""
    check: Check = attrs.field(default=lambda state, reply: expect("OK", reply), repr=False)
    """What is wrong with a reply; empty if nothing is."""
    needs: tuple[bytes, ...] = ()
    """Units that must be there for it to succeed."""
    makes: int = 0
    """Sessions it may make."""
    drops: bool = False
    """It leaves nothing of what it names, whether that was there or not."""
    rows: int = 0
    """Rows whose bytes are compared."""
    confirms: bytes = b""
    """A unit of which success says that it is there and can't be evicted from now on."""

    def __str__(self) -> str:
        shown = [bytes(word[:60]).decode("ascii", "backslashreplace") for word in self.request if len(word) < 100]
        return " ".join(shown)

    def apply(self, state: State, window: Window) -> State:
        """The state once all of it took effect, at a time in the window."""
        for effect in self.effects:
            state = effect(state, window)
        return state


def expect(wanted: object, reply: Any) -> str:
    """What is wrong if a reply is not exactly this."""
    return "" if type(reply) is type(wanted) and reply == wanted else f"expected {wanted!r:.200}, got {reply!r:.200}"


def refusal(reply: Any) -> bool:
    """Whether a reply says that something is not there."""
    if isinstance(reply, Refused):
        return "no session" in reply or "no prefix" in reply
    return reply in (0, None, "MISS")


def judge(step: Step, reply: Any, state: State, window: Window, *, tight: bool) -> State:
    """The state after a reply. Raises ViolationError if it is not what the state allows."""
    missing = [name for name in step.needs if name not in state]
    wrong = step.check(state, reply)
    if not wrong and not missing:
        state = step.apply(state, window)
        if step.confirms:
            state = with_unit(state, attrs.evolve(state[step.confirms], safe=True))
        return state
    if refusal(reply):
        gone = [name for name in step.needs if may_be_gone(state, name, window[1], tight=tight)]
        if gone:
            if step.drops:
                return step.apply(state, window)
            for name in gone:
                state = without(state, name)
            return state
    if isinstance(reply, Refused) and tight and step.makes and reply.startswith("OOM "):
        return state  # all sessions are pinned or being filled
    if isinstance(reply, Refused) and reply.startswith("OOM ") and "max-bytes" in reply:
        # What is pinned or being filled holds all memory; what this one was filling is dropped.
        for name in step.needs:
            state = without(state, name) if name in state and state[name].pending else state
        return state
    if step.drops and isinstance(reply, int) and any(may_be_gone(state, x, window[1], tight=tight) for x in step.needs):
        return step.apply(state, window)
    if not wrong:
        wrong = f"got {reply!r:.200}, but {missing[0].decode()} is not there"
    raise ViolationError(f"{step}: {wrong}")


# Making units.


def register(unit: Unit, ex_s: int = 0) -> Step:
    """KV.PREFIX.REGISTER.SCHEMA of a unit that is not there; declared ones are pending then."""
    request: list[Buffer] = [
        b"KV.PREFIX.REGISTER.SCHEMA",
        unit.name,
        b"K",
        unit.shape.runs[0],
        b"V",
        unit.shape.runs[1],
    ]
    if unit.hashes is not None:
        request += (b"BLOCKS", b"%d" % BLOCK_SIZE, b"%d" % (len(unit.hashes) // 8), unit.hashes)
    if unit.kind is Kind.DECLARED:
        request += (b"LAYERS", b"%d" % unit.layers, b"TOKENS", b"%d" % unit.tokens)
    if unit.meta is not None:
        request += (b"META", unit.meta)
    if unit.parent:
        request += (b"PARENT", unit.parent, b"%d" % unit.offset)
    if ex_s:
        request += (b"EX", b"%d" % ex_s)
    if unit.pinned:
        request.append(b"PIN")

    def effect(state: State, window: Window) -> State:
        if unit.parent and unit.parent not in state:
            return state
        return with_unit(state, attrs.evolve(unit, expires=_later(window, ex_s) if ex_s else None, safe=unit.pinned))

    return Step(tuple(request), (effect,), needs=(unit.parent,) if unit.parent else (), makes=2)


def create(kind: Kind, name: bytes, side: int, shape: Shape) -> Step:
    """V.CREATE of a lone session, or of one side."""
    sid = name if kind is Kind.LONE else name + SUFFIXES[side]

    def effect(state: State, window: Window) -> State:
        unit = state.get(name) or Unit(kind, name, shape, sides=())
        return with_unit(state, attrs.evolve(unit, sides=tuple(sorted({*unit.sides, side}))))

    return Step((b"V.CREATE", sid, b"SCHEMA", shape.runs[side]), (effect,), makes=1)


def _later(window: Window, seconds: int) -> Window:
    return window[0] + seconds, window[1] + seconds


# Filling and changing them.


def store(unit: Unit, side: int, layer: int, start: int, count: int, version: int) -> Step:
    """V.STOREBATCH, or V.STORE of one row."""
    versions: Versions = np.full(count, version, np.uint32)
    name, sid = unit.name, unit.name if unit.kind is Kind.LONE else unit.name + SUFFIXES[side]
    blob = rows.make(name, side, layer, start, versions, unit.shape.width(side, layer))
    place = (b"V.STOREBATCH", sid, b"%d" % layer, b"%d" % start, b"%d" % count)
    if count == 1 and version % 2:
        place = (b"V.STORE", sid, b"%d" % layer, b"%d" % start)

    def effect(state: State, window: Window) -> State:
        found = state.get(name)
        return with_unit(state, found.stored(side, layer, start, versions)) if found is not None else state

    return Step((*place, b"AS", b"native", blob), (effect,), needs=(name,))


def _changing(name: bytes, change: Callable[[Unit, Window], Unit]) -> Effect:
    def effect(state: State, window: Window) -> State:
        return with_unit(state, change(state[name], window)) if name in state else state

    return effect


def pin(name: bytes, *, pinned: bool) -> Step:
    """KV.PREFIX.PIN or UNPIN of one that isn't, or is."""
    # As long as it is not answered, it may have come too late: then the unit had been evicted before.
    effect = _changing(name, lambda unit, window: attrs.evolve(unit, pinned=pinned, safe=False))
    return Step(
        (b"KV.PREFIX.PIN" if pinned else b"KV.PREFIX.UNPIN", name),
        (effect,),
        check=lambda state, reply: expect(1, reply),
        needs=(name,),
        confirms=name if pinned else b"",
    )


def expire(unit: Unit, ex_s: int) -> Step:
    """KV.PREFIX.REGISTER.SCHEMA again, with EX; or KV.PREFIX.PERSIST with 0. The unit must be there for certain."""
    name = unit.name
    if not ex_s:
        request: tuple[Buffer, ...] = (b"KV.PREFIX.PERSIST", name)
        effect = _changing(name, lambda unit, window: attrs.evolve(unit, expires=None))
        return Step(request, (effect,), check=lambda state, reply: expect(1, reply), needs=(name,))
    request = (b"KV.PREFIX.REGISTER.SCHEMA", name, b"K", unit.shape.runs[0], b"V", unit.shape.runs[1])
    effect = _changing(name, lambda unit, window: attrs.evolve(unit, expires=_later(window, ex_s)))
    return Step((*request, b"EX", b"%d" % ex_s), (effect,), needs=(name,))


def remark(unit: Unit, meta: bytes) -> Step:
    """KV.PREFIX.REGISTER.SCHEMA again, with another META. The unit must be there for certain."""
    request = (b"KV.PREFIX.REGISTER.SCHEMA", unit.name, b"K", unit.shape.runs[0], b"V", unit.shape.runs[1])
    effect = _changing(unit.name, lambda unit, window: attrs.evolve(unit, meta=meta))
    return Step((*request, b"META", meta), (effect,), needs=(unit.name,))


# Dropping them.


def drop_prefixes(state: State, names: Sequence[bytes]) -> Step:
    """KV.PREFIX.DROP of leaves, or with CASCADE of one that others continue."""
    effects = [partial(_without, name) for name in names]
    left = state
    for name in names:
        left = without(left, name)
    doomed = tuple(name for name in state if name not in left)
    cascade = (b"CASCADE",) if len(doomed) > len(names) else ()
    return Step(
        (b"KV.PREFIX.DROP", *cascade, *names),
        tuple(effects),
        check=lambda state, reply: expect(len(doomed), reply),
        needs=doomed,
        drops=True,
    )


def _without(name: bytes, state: State, window: Window) -> State:
    return without(state, name)


def drop_sessions(units: Sequence[tuple[Unit, int]]) -> Step:
    """V.DROP of lone sessions or of sides that were made by hand."""

    def effect_of(name: bytes, side: int) -> Effect:
        def effect(state: State, window: Window) -> State:
            unit = state.get(name)
            if unit is None or side not in unit.sides:
                return state
            if len(unit.sides) == 1:
                return without(state, name)
            left = {place: versions for place, versions in unit.rows.items() if place[0] != side}
            sides = tuple(each for each in unit.sides if each != side)
            return with_unit(state, attrs.evolve(unit, sides=sides, rows=left, pinned=False, safe=False))

        return effect

    return Step(
        (b"V.DROP", *(unit.sids[side] for unit, side in units)),
        tuple(effect_of(unit.name, side) for unit, side in units),
        check=lambda state, reply: expect(len(units), reply),
        needs=tuple(dict.fromkeys(unit.name for unit, _ in units)),
        drops=True,
    )


# Reading them.


def read(state: State, unit: Unit) -> Step:
    """KV.PREFIX.FETCH of all of a declared prefix; of others V.FETCH of the first run of rows of a layer."""
    if unit.kind is Kind.DECLARED:
        request, expected, count = whole(state, unit)
    else:
        runs = list(stored_runs(unit))
        if not runs:
            return Step((b"V.INFO", next(iter(unit.sids.values()))), check=_any_list, needs=(unit.name,))
        request, expected, count = runs[0]

    def check(now: State, reply: Any) -> str:
        return compare(reply, expected, unit)

    return Step(request, check=check, needs=(unit.name,), rows=count)


def _any_list(state: State, reply: Any) -> str:
    return "" if isinstance(reply, list) else f"expected a description, got {reply!r:.200}"


Question = tuple[tuple[Buffer, ...], list[tuple[Buffer, int]], int]
"""A request, the blobs to expect with the length of their rows, and how many rows they are."""


def whole(state: State, unit: Unit) -> Question:
    """KV.PREFIX.FETCH of a complete prefix, ancestors included."""
    parts = chain(state, unit)
    ends = [part.offset for part in parts[1:]] + [unit.offset + unit.tokens]
    expected: list[tuple[Buffer, int]] = []
    count = 0
    for layer in range(unit.layers):
        for side in unit.sides:
            width = unit.shape.width(side, layer)
            blobs = []
            for part, end in zip(parts, ends, strict=True):
                if width:
                    versions = part.rows[side, layer][: end - part.offset]
                    blobs.append(rows.make(part.name, side, layer, 0, versions, width))
                    count += len(versions)
            expected.append((b"".join(blobs), width))
    return (b"KV.PREFIX.FETCH", unit.name, b"AS", b"native"), expected, count


def stored_runs(unit: Unit) -> list[Question]:
    """V.FETCH of each run of rows that a unit holds."""
    found: list[Question] = []
    for (side, layer), versions in sorted(unit.rows.items()):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], versions != 0, [0]))))
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            width = unit.shape.width(side, layer)
            blob = rows.make(unit.name, side, layer, start, versions[start:stop], width)
            request = (b"V.FETCH", unit.sids[side], b"%d" % layer, b"RANGE", b"%d" % start, b"%d" % stop)
            found.append(((*request, b"AS", b"native"), [(blob, width)], stop - start))
    return found


def compare(reply: Any, expected: Sequence[tuple[Buffer, int]], unit: Unit) -> str:
    """What is wrong with fetched rows; empty if nothing is."""
    blobs = [reply] if isinstance(reply, bytes) else reply
    if not isinstance(blobs, list) or len(blobs) != len(expected):
        return f"expected {len(expected)} blobs of rows, got {reply!r:.200}"
    for index, (blob, (wanted, width)) in enumerate(zip(blobs, expected, strict=True)):
        if not isinstance(blob, bytes) or blob != wanted:
            said = rows.describe(blob, wanted, width) if isinstance(blob, bytes) and width else repr(blob)[:200]
            return f"{unit.name.decode()}: blob {index}: {said}"
    return ""


def chain_hashes(state: State, unit: Unit) -> bytes:
    """All block hashes of the text that a unit ends; nothing if a segment of it was registered without."""
    found = b""
    for part in chain(state, unit):
        if part.hashes is None:
            return b""
        found = found[: part.offset // BLOCK_SIZE * 8] + part.hashes
    return found


def hashes_reply(unit: Unit) -> Any:
    """What KV.PREFIX.BLOCKS says."""
    if unit.hashes is None:
        return "UNKNOWN"
    return struct.pack("<II", BLOCK_SIZE, len(unit.hashes) // 8) + unit.hashes
