"""Which layers are ready for attention: (sid, layer) is WARM, COLD or missing.

WARM has its K and V on the compute device. COLD is remembered only: its rows may be in the V-store, from where
KV.PREFIX.WARM brings it back. Both are bounded, and both give up what has not been used for longest: a WARM one becomes
COLD when slots or bytes run out, a COLD one is forgotten.

Pure and synchronous: called on one thread, each call is atomic and costs O(1), or O(1) for each layer of the session
that it is about, or that it demotes or drops. A `Resident` is immutable, so a query that has got one finishes on it
whatever happens to the slot; its memory is then not counted here. Block means that a query leaves beside it are counted
as soon as the slot is looked at. What a read adds never demotes anything: means that don't fit are let go.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

import attrs

from pion.compute.attention import Resident
from pion.errors import OutOfMemoryError

Key: TypeAlias = tuple[bytes, int]
"""Session id and layer."""


class State(enum.Enum):
    """Where a layer is."""

    WARM = "warm"
    COLD = "cold"
    MISSING = "missing"


@attrs.frozen
class Limits:
    """WARM layers, COLD layers, and bytes of all WARM layers."""

    slots: int
    cold: int
    nbytes: int


@attrs.frozen
class Cold:
    """What is remembered of a layer that is not ready any more: H, N, D, and when it was used last, in seconds."""

    heads: int
    rows: int
    head_dim: int
    used_s: float


@attrs.define(eq=False)
class Warm:
    """One slot. `nbytes` is what is counted for it: a resident grows when block means are kept beside it."""

    resident: Resident
    used_s: float
    nbytes: int


@attrs.frozen
class SlotStatistics:
    """Layers now, bytes of the WARM ones, and transitions since the start."""

    warm: int
    cold: int
    nbytes: int
    demotions: int
    rehydrates: int


class Slots:
    """The table. `limits` is asked at each change, so limits may change at any time."""

    def __init__(self, limits: Callable[[], Limits]) -> None:
        self._limits = limits
        # Both in order of use, the least recent first.
        self._warm: OrderedDict[Key, Warm] = OrderedDict()
        self._cold: OrderedDict[Key, Cold] = OrderedDict()
        self._layers: dict[bytes, set[int]] = {}
        self._source: dict[Key, bytes] = {}
        self._made: dict[bytes, set[Key]] = {}
        """What was made from each source."""
        self._nbytes = 0
        self._demotions = 0
        self._rehydrates = 0

    def state(self, sid: bytes, layer: int) -> State:
        """Where the layer is. Not a use of it."""
        if (sid, layer) in self._warm:
            return State.WARM
        return State.COLD if (sid, layer) in self._cold else State.MISSING

    def find(self, sid: bytes, layer: int, now_s: float | None) -> Resident | Cold | None:
        """The layer, whatever is there of it. A use of it at `now_s` if it is WARM; None looks without using it.

        Asking for a COLD one is no use: so COLD ones are forgotten in the exact order of their last use.
        """
        warm = self._warm.get((sid, layer))
        if warm is None:
            return self._cold.get((sid, layer))
        self._recount(warm)
        if now_s is not None:
            warm.used_s = now_s
            self._warm.move_to_end((sid, layer))
        return warm.resident

    def check_room(self, nbytes: int, layers: int = 1) -> None:
        """Raise OutOfMemoryError if so many layers and bytes can't be WARM at once, whoever is demoted for them."""
        limits = self._limits()
        if nbytes > limits.nbytes:
            raise OutOfMemoryError(f"{nbytes} bytes for attention are more than attend-bytes, {limits.nbytes}")
        if layers > limits.slots:
            raise OutOfMemoryError(f"{layers} layers for attention are more than attend-slots, {limits.slots}")

    def put(self, sid: bytes, layer: int, resident: Resident, now_s: float, source: bytes | None = None) -> None:
        """Make the layer WARM, in place of what was there, and demote others until it fits.

        `source` is the prefix that it was made from, if any, and in place of what was said of the layer before.
        Raises OutOfMemoryError if it is larger than the budget alone; then nothing changed.
        """
        self.check_room(resident.nbytes)
        key = sid, layer
        old = self._warm.pop(key, None)
        if old is not None:
            self._nbytes -= old.nbytes
        elif self._cold.pop(key, None) is not None:
            self._rehydrates += 1
        warm = self._warm[key] = Warm(resident, now_s, resident.nbytes)
        self._nbytes += warm.nbytes
        self._layers.setdefault(sid, set()).add(layer)
        self._forget_source(key)
        if source is not None:
            self._source[key] = source
            self._made.setdefault(source, set()).add(key)
        self.trim()

    def recount(self, sid: bytes, layer: int) -> None:
        """Count what a WARM layer takes now: a query may have made it larger. If that doesn't fit, its means go."""
        warm = self._warm.get((sid, layer))
        if warm is not None:
            self._recount(warm)

    def trim(self) -> None:
        """Demote and forget until the limits are kept; they may have been lowered.

        A layer that fits without its block means loses only those.
        """
        limits = self._limits()
        while self._warm and (len(self._warm) > limits.slots or self._nbytes > limits.nbytes):
            oldest = next(iter(self._warm.values()))
            oldest.resident.forget_means()
            self._recount(oldest)
            if len(self._warm) > limits.slots or self._nbytes > limits.nbytes:
                self._demote()
        while len(self._cold) > limits.cold:
            (sid, layer), _ = self._cold.popitem(last=False)
            self._forget(sid, layer)

    def drop(self, sid: bytes, layer: int | None = None) -> int:
        """Forget one layer of a session, or all; returns how many were WARM or COLD."""
        known = self._layers.get(sid, set())
        doomed = list(known) if layer is None else [layer] if layer in known else []
        for each in doomed:
            warm = self._warm.pop((sid, each), None)
            if warm is not None:
                self._nbytes -= warm.nbytes
            else:
                del self._cold[sid, each]
            self._forget(sid, each)
        return len(doomed)

    def drop_source(self, source: bytes) -> int:
        """Forget every layer that was made from this prefix; returns how many there were, WARM or COLD."""
        return sum(self.drop(sid, layer) for sid, layer in list(self._made.get(source, ())))

    def drop_other_sources(self, sid: bytes, source: bytes) -> int:
        """Forget the layers of a session that were made from another prefix than this; returns how many there were."""
        known = ((layer, self._source.get((sid, layer), source)) for layer in self._layers.get(sid, ()))
        return sum(self.drop(sid, layer) for layer in [layer for layer, found in known if found != source])

    def statistics(self) -> SlotStatistics:
        """The counters now."""
        return SlotStatistics(len(self._warm), len(self._cold), self._nbytes, self._demotions, self._rehydrates)

    def _recount(self, warm: Warm) -> None:
        nbytes = warm.resident.nbytes
        if nbytes > warm.nbytes and self._nbytes - warm.nbytes + nbytes > self._limits().nbytes:
            warm.resident.forget_means()
            nbytes = warm.resident.nbytes
        self._nbytes += nbytes - warm.nbytes
        warm.nbytes = nbytes

    def _demote(self) -> None:
        key, warm = self._warm.popitem(last=False)
        held = warm.resident
        self._nbytes -= warm.nbytes
        self._cold[key] = Cold(held.heads, held.rows, held.head_dim, warm.used_s)
        self._demotions += 1

    def _forget(self, sid: bytes, layer: int) -> None:
        self._forget_source((sid, layer))
        layers = self._layers[sid]
        layers.remove(layer)
        if not layers:
            del self._layers[sid]

    def _forget_source(self, key: Key) -> None:
        source = self._source.pop(key, None)
        if source is not None:
            made = self._made[source]
            made.remove(key)
            if not made:
                del self._made[source]
