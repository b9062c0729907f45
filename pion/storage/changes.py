"""Every change of the store's state as a frozen record.

`VStore.commit` applies a record and hands it to the journal; `VStore.replay` applies it again. Replaying all records on
an empty store gives the same sessions, rows, prefixes, pins and expiry times. What a log does not keep: the order of
last use, counters, the reported prefill time, and who owns a pending registration.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import attrs

from pion.storage.ledger import Memory, Raw
from pion.storage.schema import Schema
from pion.storage.tiers.runs import PlacedRun


class Reason(enum.Enum):
    """Why a prefix or session was dropped."""

    COMMAND = "command"
    EVICTED = "evicted"
    EXPIRED = "expired"
    ABANDONED = "abandoned"
    """A pending registration whose owner left or made no progress."""
    DAMAGED = "damaged"
    """Its bytes on disk were not what had been stored."""


@attrs.frozen
class Declaration:
    """What a complete prefix holds: rows 0 to tokens-1 of layers 0 to layers-1 on both sides, and `states` states."""

    layers: int
    tokens: int
    states: int = 0


@attrs.frozen
class Hashes:
    """A block-hash table: tokens per block, and one little-endian u64 per block in token order."""

    block_size: int
    blob: bytes


@attrs.frozen
class CreateSession:
    """V.CREATE."""

    sid: bytes
    schema: Schema


@attrs.frozen
class StoreRows:
    """V.STOREBATCH and V.STORE: `data` is `count` rows in the layer's stored format; the store takes it over."""

    sid: bytes
    layer: int
    start: int
    count: int
    data: Raw | Memory = attrs.field(repr=False)
    owner: int = 0
    """Connection that stores; 0 is nobody (replay)."""


@attrs.frozen
class PlaceRows:
    """All rows of a prefix or lone session lie in an object of the tier, and leave memory."""

    name: bytes
    lone: bool
    key: str
    nbytes: int
    """Size of the object."""
    runs: tuple[PlacedRun, ...] = attrs.field(repr=False)


@attrs.frozen
class DropSession:
    """V.DROP of a session that is not a registered side."""

    sid: bytes


@attrs.frozen(kw_only=True)
class Register:
    """KV.PREFIX.REGISTER and REGISTER.SCHEMA. `None` leaves an option of an existing prefix as it is."""

    ns: bytes
    k_schema: Schema
    v_schema: Schema
    declaration: Declaration | None = None
    hashes: Hashes | None = None
    meta: bytes | None = attrs.field(default=None, repr=False)
    parent: bytes | None = None
    offset: int = 0
    expires_s: float | None = None
    pin: bool = False
    prefill_ms: float | None = None
    """Not durable, by the user's specification."""
    owner: int = 0


@attrs.frozen
class DropPrefix:
    """KV.PREFIX.DROP, an eviction, an expiry or an abandoned registration; descendants go with it."""

    ns: bytes
    reason: Reason = Reason.COMMAND


@attrs.frozen
class EvictSession:
    """A session that belongs to no prefix made room for another, or was damaged."""

    sid: bytes
    reason: Reason = Reason.EVICTED


@attrs.frozen
class SetExpiry:
    """EX and PERSIST: absolute wall time in seconds, 0 for never."""

    ns: bytes
    expires_s: float


@attrs.frozen
class SetPin:
    """PIN and UNPIN."""

    ns: bytes
    pinned: bool


Change: TypeAlias = (
    CreateSession | StoreRows | PlaceRows | DropSession | Register | DropPrefix | EvictSession | SetExpiry | SetPin
)
