"""What one client knows of its units: sessions and prefixes that it made, and what may have become of them.

A `State` is never changed: a step makes another one of it. So the states between which a server may have died are all
at hand. No two clients share a unit; what others do to it is evicting it, and time expires it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from typing import Final

import attrs
import numpy as np

from tests.crash.rows import Versions

ROWS_MOST: Final = 256
BLOCK_SIZE: Final = 4
"""Tokens per block hash."""

K: Final = 0
V: Final = 1
SUFFIXES: Final = (b"_pk", b"_pv")

Window = tuple[float, float]
"""The wall times between which something happened or will happen."""


@attrs.frozen
class Shape:
    """Formats of a unit's layers, as the server is told, and what a row then takes; native rows can be any bytes."""

    runs: tuple[bytes, bytes]
    row_bytes: tuple[tuple[int, ...], tuple[int, ...]]
    """By side and layer; the last counts for all layers behind it. 0 is a side without data."""
    layers: int
    """How many layers may be used."""

    def width(self, side: int, layer: int) -> int:
        """Bytes of a row."""
        widths = self.row_bytes[side]
        return widths[min(layer, len(widths) - 1)]


SHAPES: Final = (
    Shape((b"fp16@16*4", b"fp16@16*4"), ((32,), (32,)), 4),
    Shape((b"fp16@256*3", b"bf16@256*3"), ((512,), (512,)), 3),
    Shape((b"fp32@512*2", b"int8@1022*2"), ((2048,), (1024,)), 2),
    Shape((b"fp16@512*1,fp32@16*1,fp16@512*1", b"mlx4g32@64*3"), ((1024, 64, 1024), (40,)), 3),
    Shape((b"fp16@512*2", b"fp16@0*2"), ((1024,), (0,)), 2),
)
"""From 32 bytes to 512 KiB in one store: what the log keeps inside and what it leaves in the file. The number of its
shape is the last digit of a unit's name, so a reader who knows only the name can tell what the rows are.
"""


class Kind(enum.Enum):
    """How a unit was made."""

    DECLARED = "d"
    """KV.PREFIX.REGISTER.SCHEMA with LAYERS and TOKENS."""
    OPEN = "o"
    """KV.PREFIX.REGISTER.SCHEMA without."""
    SIDES = "s"
    """V.CREATE of `<name>_pk` and `<name>_pv`."""
    LONE = "l"
    """V.CREATE of a session that is no side."""


@attrs.frozen(eq=False)
class Unit:
    """A prefix or a lone session as it should be."""

    kind: Kind
    name: bytes
    shape: Shape
    sides: tuple[int, ...] = (K, V)
    """The sessions that are there."""
    rows: Mapping[tuple[int, int], Versions] = attrs.field(factory=dict, repr=False)
    """By side and layer."""
    layers: int = 0
    tokens: int = 0
    """As declared."""
    generation: int = 0
    """The version of all rows of a declared prefix."""
    pending: bool = False
    parent: bytes = b""
    offset: int = 0
    meta: bytes | None = None
    hashes: bytes | None = None
    """Of the blocks that end in it; None without BLOCKS."""
    pinned: bool = False
    safe: bool = False
    """It was there when the server said that it is pinned: it can't have been evicted since."""
    expires: Window | None = None

    @property
    def sids(self) -> dict[int, bytes]:
        """Its sessions' names by side."""
        if self.kind is Kind.LONE:
            return {K: self.name}
        return {side: self.name + SUFFIXES[side] for side in self.sides}

    @property
    def is_prefix(self) -> bool:
        """Whether KV.PREFIX commands see it, unless it is pending."""
        return self.kind is not Kind.LONE and len(self.sides) == 2

    @property
    def missing(self) -> Iterator[tuple[int, int]]:
        """Sides and layers of a declared prefix that don't hold all rows yet."""
        for side in self.sides:
            for layer in range(self.layers):
                versions = self.rows.get((side, layer))
                if self.shape.width(side, layer) and (versions is None or not versions[: self.tokens].all()):
                    yield side, layer

    def stored(self, side: int, layer: int, start: int, versions: Versions) -> Unit:
        """The unit with these rows."""
        old = self.rows.get((side, layer))
        new = np.zeros(ROWS_MOST, np.uint32) if old is None else old.copy()
        new[start : start + len(versions)] = versions
        unit = attrs.evolve(self, rows={**self.rows, (side, layer): new})
        return attrs.evolve(unit, pending=False) if unit.pending and not any(unit.missing) else unit

    def held(self, side: int) -> tuple[int, int]:
        """Rows and bytes of one session."""
        counts = [
            (int(np.count_nonzero(versions)), self.shape.width(side, layer))
            for (its_side, layer), versions in self.rows.items()
            if its_side == side
        ]
        return sum(count for count, _ in counts), sum(count * width for count, width in counts)


State = Mapping[bytes, Unit]
"""Units by name."""


def with_unit(state: State, unit: Unit) -> State:
    """The state with a unit made or changed."""
    return {**state, unit.name: unit}


def without(state: State, name: bytes) -> State:
    """The state without a unit and what continues it."""
    gone = {name}
    while below := {unit.name for unit in state.values() if unit.parent in gone} - gone:
        gone |= below
    return {each: unit for each, unit in state.items() if each not in gone}


def chain(state: State, unit: Unit) -> list[Unit]:
    """From the root to the unit."""
    found = [unit]
    while found[0].parent:
        found.insert(0, state[found[0].parent])
    return found


def children(state: State, name: bytes) -> list[Unit]:
    """The units that directly continue one."""
    return [unit for unit in state.values() if unit.parent == name]


def expiry(state: State, unit: Unit) -> Window:
    """When it goes, by itself or with an ancestor."""
    windows = [part.expires for part in chain(state, unit) if part.expires is not None]
    return min((first for first, _ in windows), default=math.inf), min((last for _, last in windows), default=math.inf)


def may_be_gone(state: State, name: bytes, now_s: float, *, tight: bool) -> bool:
    """Whether nobody need be surprised that it is not there; `tight` says whether there were evictions."""
    unit = state.get(name)
    if unit is None or now_s >= expiry(state, unit)[0]:
        return True
    if not tight or unit.safe or unit.pending:
        return False
    return all(may_be_gone(state, child.name, now_s, tight=True) for child in children(state, name))


def settled(state: State) -> State:
    """What a restart makes of it: pending registrations are gone."""
    for unit in list(state.values()):
        if unit.pending:
            state = without(state, unit.name)
    return state
