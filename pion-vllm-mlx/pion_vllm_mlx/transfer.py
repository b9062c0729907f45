"""Moving a prefix between a cache and the server: rows out, rows in.

In: one request fetches every layer, over the binary lane where the server has one; the bytes of each layer and side are
received into one small buffer and copied transposed from there into another, which both stay in the processor's cache;
MLX takes a copy of each side when it is complete. Out: on the connection that claimed the prefix, which speaks RESP,
layer by layer, each a fresh copy, sent as it lies; a group of layers goes in one pipeline, and a group is bounded so
that a long prefix doesn't need its size in memory a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

import mlx.core as mx
import numpy as np

from pion.client import PionClient
from pion.client.errors import PionClientError, ServerError
from pion_vllm_mlx.prefix_key import Context
from pion_vllm_mlx.slots import BITS, CODECS_BY_KIND, DTYPES, Scratch, SlotShape, codec, row_bytes

RECEIVE_BYTES: Final = 1 << 19
"""The receive buffer: 512 KiB fits the second-level cache beside a side of some thousand tokens, and is few calls."""

GROUP_BYTES: Final = 64 << 20
"""Rows copied and sent together."""

SPARE_TOKENS: Final = 64
"""Room left after the prefix, so that a usual question and the first tokens of the answer don't move all of it. More
is copied at every restore and saves little: moving 1,024 tokens of the demo model takes 16 ms, evaluating one 68."""


class RejectedPrefixError(PionClientError):
    """What the server sent is not what the model needs: other sizes or another number of layers."""


class ChangedModelError(PionClientError):
    """The caches are not of the shape that the model had when the request began; nothing was sent."""


def fetch(client: PionClient, namespace: str | bytes, context: Context, tokens: int) -> tuple[list[Any], int]:
    """(caches that hold the first `tokens` tokens of a prefix, bytes received).

    Raises ServerError when the prefix isn't there (any more), RejectedPrefixError when it has another shape, and
    TransportError.
    """
    receiver = _Receiver(context, tokens)
    client.prefix_fetch_into(namespace, receiver.receive, receiver.done, start=0, end=tokens, as_=receiver.wire)
    return receiver.caches(), receiver.received


class _Receiver:
    """The callbacks of one fetch. Bulk 2i is the keys of slot i, bulk 2i + 1 its values."""

    def __init__(self, context: Context, tokens: int) -> None:
        self._slots = context.slots
        self._tokens = tokens
        formats = list(chain.from_iterable(zip(context.layout.keys, context.layout.values, strict=True)))
        # Rows in a format that NumPy can't read come widened by the server, in the widest type the model uses.
        native = set(formats) <= set(BITS)
        self.wire: Any = "native" if native else "fp32"
        self._wires = formats if native else ["fp32"] * len(formats)
        self._sides = [side for slot in self._slots for side in (slot.keys, slot.values)]
        self.received = 0
        capacity = _rounded_up(tokens + SPARE_TOKENS, SPARE_TOKENS)
        scratch = Scratch()
        self._blanks = [CODECS_BY_KIND[s.kind].blank(s, tokens, capacity, scratch) for s in self._slots]
        self._buffer = np.empty(0, np.uint8)
        self._target: np.ndarray[Any, Any] = self._buffer
        self._bits: Any = np.dtype(np.uint8)
        self._row_bytes = 1
        self._index = -1
        self._row = 0
        """Rows of this side that are there."""
        self._rows = 0
        """Rows that are being received."""

    def receive(self, index: int, nbytes: int) -> memoryview:
        if index != self._index:
            self._begin(index, nbytes)
        self._rows = min(max(1, RECEIVE_BYTES // self._row_bytes), self._tokens - self._row)
        size = self._rows * self._row_bytes
        if len(self._buffer) < size:
            self._buffer = np.empty(size, np.uint8)
        return self._buffer.data[:size]

    def done(self, index: int) -> None:
        slot, side, rows = self._slots[index // 2], self._sides[index], self._rows
        raw = self._buffer[: rows * self._row_bytes].view(self._bits)
        values = _as_type(raw, self._wires[index], slot.dtype).reshape(rows, side.heads, side.head_dim)
        self._target[:, self._row : self._row + rows] = values.transpose(1, 0, 2)
        self._row += rows
        self.received += raw.nbytes
        if self._row == self._tokens:
            self._blanks[index // 2].filled(index % 2)

    def caches(self) -> list[Any]:
        if self._index != 2 * len(self._slots) - 1 or self._row != self._tokens:
            msg = f"the prefix has {self._index // 2 + 1} layers, the model {len(self._slots)}"
            raise RejectedPrefixError(msg)
        return [blank.finish() for blank in self._blanks]

    def _begin(self, index: int, nbytes: int) -> None:
        """The next bytes are those of another side."""
        if index >= len(self._sides):
            msg = f"the prefix has more than the model's {len(self._slots)} layers"
            raise RejectedPrefixError(msg)
        bits: Any = np.dtype(BITS[self._wires[index]])
        row_bytes = self._sides[index].width * bits.itemsize
        if nbytes != self._tokens * row_bytes:
            msg = f"layer {index // 2} came with {nbytes} bytes instead of {self._tokens} rows of {row_bytes}"
            raise RejectedPrefixError(msg)
        self._bits, self._row_bytes = bits, row_bytes
        self._index, self._row, self._target = index, 0, self._blanks[index // 2].side(index % 2)


def _as_type(raw: np.ndarray[Any, Any], have: str, want: str) -> np.ndarray[Any, Any]:
    """Values of one of the three float types as another; the same array when nothing changes."""
    if have == want:
        return raw
    array = mx.array(raw)  # MLX converts half precision faster than NumPy, and knows bfloat16
    array = (array.view(mx.bfloat16) if have == "bf16" else array).astype(DTYPES[want])
    array = array.view(mx.uint16) if want == "bf16" else array
    mx.eval(array)
    return np.asarray(memoryview(array))


def store(client: PionClient, namespace: str | bytes, context: Context, caches: Sequence[Any], start: int) -> int:
    """Send the rows from token `start` on, as rows 0 and up of a registered prefix; returns the bytes sent.

    What is sent was copied out of the caches first. Raises the server's first error, TransportError, or, before it
    sends anything, ChangedModelError.
    """
    shapes = tuple(codec(cache).shape(cache) for cache in caches)
    if shapes != context.slots:
        msg = f"the model's cache is {shapes[0]}, ... now, not {context.slots[0]}, ...; was the model changed?"
        raise ChangedModelError(msg)
    name = namespace.encode() if isinstance(namespace, str) else namespace
    sent = 0
    group: list[list[Any]] = []
    group_bytes = 0
    for command, nbytes in _stores(name, context.slots, caches, start):
        group.append(command)
        group_bytes += nbytes
        if group_bytes >= GROUP_BYTES:
            answers(client, group)
            sent, group, group_bytes = sent + group_bytes, [], 0
    if group:
        answers(client, group)
    return sent + group_bytes


def _stores(
    name: bytes, slots: Sequence[SlotShape], caches: Sequence[Any], start: int
) -> Iterator[tuple[list[Any], int]]:
    for layer, (slot, cache) in enumerate(zip(slots, caches, strict=True)):
        entry = codec(cache)
        end = entry.tokens(cache)
        token_bytes = max(slot.keys.width, slot.values.width) * np.dtype(BITS[slot.dtype]).itemsize
        step = max(1, GROUP_BYTES // token_bytes)
        for first in range(start, end, step):
            last = min(first + step, end)
            for suffix, rows in zip((b"_pk", b"_pv"), entry.rows(cache, first, last), strict=True):
                data = row_bytes(rows)
                command = [name + suffix, layer, first - start, last - first, "AS", slot.dtype, data]
                yield ["V.STOREBATCH", *command], data.nbytes


def answers(client: PionClient, requests: Sequence[Sequence[Any]]) -> list[object]:
    """The replies to a pipeline, in order. Raises the first that is an error."""
    replies = client.pipeline(requests)
    for reply in replies:
        if isinstance(reply, ServerError):
            raise reply
    return replies


def _rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step
