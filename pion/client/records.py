"""What the typed methods take and return."""

from __future__ import annotations

import builtins
import enum
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

Name: TypeAlias = str | bytes
"""A session, namespace or key; text is sent as UTF-8."""

Wire: TypeAlias = Literal["fp32", "fp16", "bf16", "native"]
"""How rows travel. `native` is the stored format, byte for byte."""

LaneChoice: TypeAlias = Literal["auto", "resp", "binary"]
"""Which protocol carries rows and queries: the binary one if the server has it, RESP always, or never RESP."""

Rows: TypeAlias = "npt.NDArray[np.generic]"
"""Rows as they travelled: float32, float16, uint16 (bf16, which NumPy has not) or uint8 (native)."""

Floats: TypeAlias = npt.NDArray[np.float32]

Integers: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Non-negative integers below 2^32, in any integer type."""

LayerState: TypeAlias = Literal["warm", "cold", "missing"]
"""Whether a layer is ready for attention; can be made so again from stored rows; or was never, or was forgotten."""

Hashes: TypeAlias = "Sequence[int] | npt.NDArray[np.unsignedinteger] | npt.NDArray[np.signedinteger]"
"""Block hashes: one axis of unsigned 64-bit integers."""


class Receive(Protocol):
    """Says where the next bytes of a bulk go: called with its index in the reply and the bytes still to come.

    Returns a writable, C-contiguous buffer. One that is shorter takes the first part; when it is full, `done(index)` is
    called and `receive` is asked for the rest. One that is longer is filled from its start. A buffer may be handed out
    again after `done`. For an empty bulk it is called once, with 0.
    """

    def __call__(self, index: int, nbytes: int, /) -> memoryview:
        """Memory for the next of `nbytes` bytes."""


class Done(Protocol):
    """The buffer last returned for `index` holds its bytes. Meanwhile the kernel receives what follows."""

    def __call__(self, index: int, /) -> object:
        """What it returns is not used."""


class Registered(enum.Enum):
    """What a REGISTER was answered."""

    OK = "OK"
    PENDING = "PENDING"
    """Another connection is filling this prefix: don't store, but `prefix_lookup(..., wait_ms=...)` may be used."""
    DEFERRED = "DEFERRED"
    """Not asked for often enough yet to be admitted."""


class Stored(enum.Enum):
    """How `store_prefix` ended."""

    STORED = "STORED"
    EXISTS = "EXISTS"
    """It was complete already; nothing was changed."""
    PENDING = "PENDING"
    """Another connection is filling it; nothing was sent."""
    DEFERRED = "DEFERRED"
    """Not admitted; nothing was sent."""


@attrs.frozen(eq=False)
class Blocks:
    """A block hash table: tokens per block, and one uint64 per block in token order."""

    size: int
    hashes: npt.NDArray[np.uint64]


@attrs.frozen
class Match:
    """The longest stored prefix: its leaf namespace, how many blocks match, and how many tokens those are."""

    namespace: bytes
    blocks: int
    tokens: int


@attrs.frozen
class Segment:
    """One link of a chain: tokens `offset` to `offset + tokens` of the whole text are rows of `namespace`."""

    namespace: bytes
    offset: int
    tokens: int


@attrs.frozen
class SessionInfo:
    """V.INFO: one session's shape and what it holds.

    `format` and `dim` are layer 0's, `schema` is the whole shape. `rows` and `bytes` count all layers. `state` is
    "open" (rows may be added), "pending" or "complete"; `prefix` is the namespace that the session is a side of.
    """

    sid: bytes
    format: str
    dim: int
    schema: str
    layers: int
    rows: int
    bytes: int
    prefix: builtins.bytes | None
    registered: bool
    state: str
    pinned: bool


@attrs.frozen
class Layer:
    """One layer of a prefix to store: K and V rows as C-contiguous buffers of `tokens` rows, already in wire form."""

    keys: object
    values: object
