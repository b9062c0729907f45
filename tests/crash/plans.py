"""What a client does next: a seeded choice that depends on nothing but the seed and what the client knows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

import attrs

from tests.crash import steps
from tests.crash.model import (
    BLOCK_SIZE,
    ROWS_MOST,
    SHAPES,
    Kind,
    State,
    Unit,
    chain,
    children,
    expiry,
    may_be_gone,
)
from tests.crash.steps import Step

UNITS_MOST: Final = 12
BYTES_MOST: Final = 6 << 20
"""Units and bytes that one client holds before it drops some; what is compared after each kill is bounded by it."""

PINS_MOST: Final = 2
"""Pinned units of one client: all clients' together must leave room in the smallest --max-sessions."""

CHAIN_MOST: Final = 4
SOON_S: Final = 30.0
"""A unit that expires within this time is only read and dropped: nobody could say whether it was still there."""

BULKY_SHAPE: Final = 2

LARGE_META_BYTES: Final = 80_000


@attrs.define(eq=False)
class Planner:
    """Chooses the steps of one client."""

    prefix: bytes
    """What its units' names begin with."""
    rng: random.Random
    bulky: bool = False
    """Whether it stores more than others, so that the log is written in large pieces."""
    tight: bool = False
    """Whether units may be evicted."""
    _version: int = 0

    def next(self, state: State, now_s: float) -> list[Step]:
        """A few steps that belong together."""
        held = sum(unit.held(side)[1] for unit in state.values() for side in unit.sides)
        if len(state) >= UNITS_MOST or held >= BYTES_MOST * (1 + self.bulky):
            return self._drop(state, now_s)
        choices: list[tuple[int, Callable[[State, float], list[Step]]]] = [
            (20, self._put),
            (14, self._put_below),
            (8, self._open),
            (8, self._lone),
            (5, self._sides),
            (25, self._rewrite),
            (10, self._finish),
            (10, self._drop),
            (8, self._pin),
            (6, self._change),
            (12, self._read),
        ]
        while True:
            (_, choice), *_ = self.rng.choices(choices, [weight for weight, _ in choices])
            if plan := choice(state, now_s):
                return plan

    # Making.

    def _name(self, state: State, kind: Kind, shape: int | None = None) -> bytes | None:
        """A name that is free: often one that was used before. Its last digit is the shape."""
        if shape is None:
            shape = BULKY_SHAPE if self.bulky and self.rng.random() < 0.6 else self.rng.randrange(len(SHAPES))
        name = self.prefix + b"%b%d.%d" % (kind.value.encode(), self.rng.randrange(4), shape)
        return None if name in state else name

    def _new_version(self) -> int:
        self._version += 1
        return self._version

    def _tokens(self) -> int:
        if self.bulky and self.rng.random() < 0.6:
            return ROWS_MOST
        most = self.rng.choices((1, 8, 64, ROWS_MOST), (10, 35, 35, 20))[0]
        return self.rng.randint(1, most)

    def _put(self, state: State, now_s: float) -> list[Step]:
        name = self._name(state, Kind.DECLARED)
        if name is None:
            return []
        shape = SHAPES[int(name[-1:])]
        unit = Unit(Kind.DECLARED, name, shape, layers=self.rng.randint(1, shape.layers), tokens=self._tokens())
        return self._filling(state, unit)

    def _put_below(self, state: State, now_s: float) -> list[Step]:
        parents = [
            unit
            for unit in state.values()
            if unit.kind is Kind.DECLARED and not unit.pending and len(chain(state, unit)) < CHAIN_MOST
        ]
        if not parents:
            return []
        parent = self.rng.choice(parents)
        name = self._name(state, Kind.DECLARED, int(parent.name[-1:]))
        if name is None:
            return []
        end = parent.offset + parent.tokens
        offset = end if self.rng.random() < 0.7 else self.rng.randint(parent.offset + 1, end)
        tokens = min(self._tokens(), 64)
        return self._filling(
            state,
            Unit(
                Kind.DECLARED,
                name,
                parent.shape,
                layers=parent.layers,
                tokens=tokens,
                parent=parent.name,
                offset=offset,
            ),
        )

    def _filling(self, state: State, unit: Unit) -> list[Step]:
        """Registration and all rows; now and then the last step is left out, and the prefix stays pending."""
        rng = self.rng
        blocks = (unit.offset + unit.tokens) // BLOCK_SIZE - unit.offset // BLOCK_SIZE
        unit = attrs.evolve(
            unit,
            pending=True,
            generation=self._new_version(),
            hashes=rng.randbytes(8 * blocks) if rng.random() < 0.8 else None,
            meta=self._meta(unit.name) if rng.random() < 0.5 else None,
            pinned=rng.random() < 0.2 and self._may_pin(state),
        )
        ex_s = rng.choices((0, 1, 2, 3, 1000), (70, 5, 5, 5, 15))[0]
        fills = list(self._fills(unit))
        rng.shuffle(fills)
        plan = [steps.register(unit, ex_s), *fills]
        return plan[:-1] if rng.random() < 0.12 else plan

    def _fills(self, unit: Unit) -> Iterator[Step]:
        """Stores of everything that is missing, in up to three pieces a layer."""
        for side, layer in unit.missing:
            held = unit.rows.get((side, layer))
            absent = [row for row in range(unit.tokens) if held is None or not held[row]]
            cuts = {row for row, before in zip(absent, [-2, *absent], strict=False) if row != before + 1}
            cuts |= set(self.rng.sample(absent, min(len(absent), self.rng.randrange(3))))
            for start in sorted(cuts):
                stop = start + 1
                while stop < unit.tokens and stop not in cuts and (held is None or not held[stop]):
                    stop += 1
                yield steps.store(unit, side, layer, start, stop - start, unit.generation)

    def _meta(self, name: bytes) -> bytes:
        padding = LARGE_META_BYTES if self.rng.random() < 0.1 else self.rng.randrange(100)
        return name + b" %d " % self._new_version() + b"." * padding

    def _open(self, state: State, now_s: float) -> list[Step]:
        name = self._name(state, Kind.OPEN)
        if name is None:
            return []
        unit = Unit(Kind.OPEN, name, SHAPES[int(name[-1:])], meta=self._meta(name))
        return [steps.register(unit), *self._stores(unit)]

    def _lone(self, state: State, now_s: float) -> list[Step]:
        name = self._name(state, Kind.LONE)
        if name is None:
            return []
        unit = Unit(Kind.LONE, name, SHAPES[int(name[-1:])], sides=(0,))
        return [steps.create(unit.kind, name, 0, unit.shape), *self._stores(unit)]

    def _sides(self, state: State, now_s: float) -> list[Step]:
        name = self._name(state, Kind.SIDES)
        if name is None:
            return []
        unit = Unit(Kind.SIDES, name, SHAPES[int(name[-1:])])
        made = [steps.create(unit.kind, name, side, unit.shape) for side in unit.sides]
        self.rng.shuffle(made)
        return [*made, *self._stores(unit)]

    def _stores(self, unit: Unit) -> Iterator[Step]:
        for _ in range(self.rng.randint(1, 3)):
            side = self.rng.choice(unit.sides)
            layer = self.rng.randrange(unit.shape.layers)
            count = self._tokens()
            if unit.shape.width(side, layer):
                start = self.rng.randint(0, min(ROWS_MOST - count, 40))
                yield steps.store(unit, side, layer, start, count, self._new_version())

    # Changing.

    def _lasting(self, state: State, now_s: float, *kinds: Kind) -> list[Unit]:
        found = [unit for unit in state.values() if unit.kind in kinds and not unit.pending]
        return [unit for unit in found if expiry(state, unit)[0] > now_s + SOON_S]

    def _rewrite(self, state: State, now_s: float) -> list[Step]:
        units = self._lasting(state, now_s, Kind.OPEN, Kind.SIDES, Kind.LONE)
        return list(self._stores(self.rng.choice(units))) if units else []

    def _finish(self, state: State, now_s: float) -> list[Step]:
        """Fill what was left pending."""
        units = [unit for unit in state.values() if unit.pending]
        return list(self._fills(self.rng.choice(units))) if units else []

    def _may_pin(self, state: State) -> bool:
        return sum(unit.pinned for unit in state.values()) < PINS_MOST

    def _pin(self, state: State, now_s: float) -> list[Step]:
        units = self._lasting(state, now_s, Kind.DECLARED, Kind.OPEN, Kind.SIDES)
        units = [unit for unit in units if unit.is_prefix and (unit.pinned or self._may_pin(state))]
        if not units:
            return []
        unit = self.rng.choice(units)
        return [steps.pin(unit.name, pinned=not unit.pinned)]

    def _change(self, state: State, now_s: float) -> list[Step]:
        """EX, PERSIST or META of a registered prefix, which would be made anew if it had been evicted."""
        units = self._lasting(state, now_s, Kind.DECLARED, Kind.OPEN)
        units = [unit for unit in units if not may_be_gone(state, unit.name, now_s + SOON_S, tight=self.tight)]
        if not units:
            return []
        unit = self.rng.choice(units)
        if unit.kind is Kind.OPEN and self.rng.random() < 0.5:
            return [steps.remark(unit, self._meta(unit.name))]
        return [steps.expire(unit, 0 if unit.expires is not None else self.rng.choice((2, 1000, 2000)))]

    # Dropping and reading.

    def _drop(self, state: State, now_s: float) -> list[Step]:
        if not state:
            return []
        unit = self.rng.choice(list(state.values()))
        if unit.kind is Kind.LONE or (unit.kind is Kind.SIDES and self.rng.random() < 0.5):
            sessions = [(unit, self.rng.choice(unit.sides))]
            others = [each for each in state.values() if each.kind is Kind.LONE and each is not unit]
            if others and self.rng.random() < 0.4:
                sessions.append((self.rng.choice(others), 0))
            return [steps.drop_sessions(sessions)]
        if not unit.is_prefix:
            return [steps.drop_sessions([(unit, side) for side in unit.sides])]
        names = [unit.name]
        leaves = [each for each in state.values() if each.is_prefix and not children(state, each.name)]
        if unit in leaves and self.rng.random() < 0.3:
            names = [each.name for each in self.rng.sample(leaves, min(len(leaves), 3))]
        return [steps.drop_prefixes(state, names)]

    def _read(self, state: State, now_s: float) -> list[Step]:
        units = [unit for unit in state.values() if not unit.pending]
        return [steps.read(state, self.rng.choice(units))] if units else []
