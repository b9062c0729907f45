"""Which mlx-lm cache classes Pion can keep, and how each one's state becomes rows and comes back.

Each cache class has one entry in `CODECS`. A class that isn't there is refused by name before anything is stored: half
a cache is worse than none. A subclass is another class, because it may keep its state otherwise.

Rows are what the V-store keeps: one token in one layer and side, `[heads * head_dim]`, while MLX wants
`[1, heads, tokens, head_dim]`. So storing transposes once into a fresh array, and restoring transposes once on the way
from the receive buffer into memory that all sides share, of which MLX takes a copy. MLX makes no array without clearing
it, or copying something into it, first: with one that it has cleared, each byte is written twice to memory that no
cache of the processor holds, and here to one that stays in it, and once to the other.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import attrs
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache, make_prompt_cache

DTYPES: Final[dict[str, Any]] = {"fp32": mx.float32, "fp16": mx.float16, "bf16": mx.bfloat16}
"""Element types of a cache, by the name of the stored format that keeps them bit for bit."""

BITS: Final[dict[str, Any]] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}
"""The NumPy type that carries the same bytes; NumPy has no bfloat16, so its 16 bits travel as they are."""


class UnsupportedCacheError(TypeError):
    """A model's cache holds a class that Pion can't store without loss; the text names it."""


@attrs.frozen
class Side:
    """Keys or values of one slot: `heads` x `head_dim` values a token."""

    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Values in one row."""
        return self.heads * self.head_dim


@attrs.frozen
class SlotShape:
    """What one entry of a cache list holds: its class and, per side, the shape and the element type of its rows."""

    kind: str
    dtype: str
    """Key of DTYPES."""
    keys: Side
    values: Side

    def describe(self) -> list[Any]:
        """As JSON, for META and for the namespace."""
        return [self.kind, self.dtype, self.keys.heads, self.keys.head_dim, self.values.heads, self.values.head_dim]


class Codec(Protocol):
    """How one cache class is stored and restored."""

    def shape(self, cache: Any) -> SlotShape:
        """Of a cache that has seen at least one token; its arrays need not be evaluated."""

    def tokens(self, cache: Any) -> int:
        """How many tokens it holds."""

    def rows(self, cache: Any, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Keys and values of tokens `start` to `stop`, each `[stop - start, width]`, copied and evaluated."""

    def blank(self, shape: SlotShape, tokens: int, capacity: int, scratch: Scratch) -> BlankSlot:
        """A cache that will hold `tokens` tokens and have room for `capacity`."""


class Scratch:
    """Memory in which one side after the other is put in order. It lives as long as one restore."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[tuple[int, ...], Any], npt.NDArray[Any]] = {}

    def array(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        """The array of this shape, the same one whenever it is asked for; zero when it is new."""
        found = self._arrays.get((shape, dtype))
        if found is None:
            found = self._arrays[shape, dtype] = np.zeros(shape, dtype)
        return found


class BlankSlot(Protocol):
    """A cache being restored: keys, then values."""

    def side(self, index: int) -> npt.NDArray[Any]:
        """Keys (0) or values (1) as a view `[heads, tokens, head_dim]`, to be filled before any other is asked for."""

    def filled(self, index: int) -> None:
        """All of that view was written. It must not be used any more."""

    def finish(self) -> Any:
        """The cache, once both sides were filled."""


class KVCodec:
    """mlx-lm's KVCache: `keys` and `values` of `[1, heads, capacity, head_dim]`, of which `offset` rows count."""

    def shape(self, cache: Any) -> SlotShape:
        """See Codec. Raises UnsupportedCacheError for a batch, or for element types the store doesn't have."""
        keys, values = cache.keys, cache.values
        if keys.shape[0] != 1:
            msg = f"KVCache with a batch of {keys.shape[0]}: Pion stores one sequence at a time"
            raise UnsupportedCacheError(msg)
        names = {dtype: name for name, dtype in DTYPES.items()}
        if keys.dtype != values.dtype or keys.dtype not in names:
            msg = f"KVCache of {keys.dtype} keys and {values.dtype} values; Pion stores {', '.join(DTYPES)}"
            raise UnsupportedCacheError(msg)
        return SlotShape("KVCache", names[keys.dtype], _side(keys), _side(values))

    def tokens(self, cache: Any) -> int:
        """See Codec. `offset`, not the array's length: that is rounded up, and trimming leaves rows behind."""
        return int(cache.offset)

    def rows(self, cache: Any, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """See Codec."""
        rows = tuple(_rows(array, start, stop) for array in (cache.keys, cache.values))
        mx.eval(rows)
        return rows[0], rows[1]

    def blank(self, shape: SlotShape, tokens: int, capacity: int, scratch: Scratch) -> BlankSlot:
        """See Codec."""
        return _BlankKV(shape, tokens, capacity, scratch)


class _BlankKV:
    """Keys and values of the final size. The rows behind the prefix are zero, as in a cache that mlx-lm made."""

    def __init__(self, shape: SlotShape, tokens: int, capacity: int, scratch: Scratch) -> None:
        self._shape = shape
        self._tokens = tokens
        self._capacity = capacity
        self._scratch = scratch
        self._arrays: list[mx.array] = []

    def side(self, index: int) -> npt.NDArray[Any]:
        """See BlankSlot."""
        return self._whole(index)[0, :, : self._tokens]

    def filled(self, index: int) -> None:
        """See BlankSlot."""
        array = mx.array(self._whole(index))
        # bfloat16 comes as uint16, which NumPy can see; it gets its type without a copy.
        dtype = DTYPES[self._shape.dtype]
        self._arrays.append(array if array.dtype == dtype else array.view(dtype))

    def finish(self) -> Any:
        """See BlankSlot."""
        mx.eval(self._arrays)
        cache = KVCache()
        cache.keys, cache.values = self._arrays
        cache.offset = self._tokens
        # A second reference to the memory would make MLX copy all of it at the first generated token.
        self._arrays = []
        return cache

    def _whole(self, index: int) -> npt.NDArray[Any]:
        side = (self._shape.keys, self._shape.values)[index]
        return self._scratch.array((1, side.heads, self._capacity, side.head_dim), BITS[self._shape.dtype])


def _side(array: mx.array) -> Side:
    return Side(array.shape[1], array.shape[3])


def _rows(array: mx.array, start: int, stop: int) -> mx.array:
    part = array[0, :, start:stop].transpose(1, 0, 2)
    if array.shape[1] == 1 or array.shape[2] == 1:
        # It lies in order already, so `contiguous` would share the cache's memory. Doing nothing to each value makes
        # a copy; as integers, because adding a zero changes some floats.
        bits = part.view(mx.uint32 if array.itemsize == 4 else mx.uint16)
        part = mx.bitwise_or(bits, mx.zeros((), bits.dtype)).view(array.dtype)
    return mx.contiguous(part).reshape(stop - start, -1)


CODECS: Final[dict[type, Codec]] = {KVCache: KVCodec()}
"""The registry. A new class joins by one entry and a test that stores, restores and compares it bit for bit."""

CODECS_BY_KIND: Final[dict[str, Codec]] = {kind.__name__: entry for kind, entry in CODECS.items()}


def codec(cache: Any) -> Codec:
    """The codec of a cache object. Raises UnsupportedCacheError naming its class."""
    found = CODECS.get(type(cache))
    if found is None:
        known = ", ".join(kind.__name__ for kind in CODECS)
        msg = f"the model's cache holds a {type(cache).__name__}, which Pion can't store yet; it can store: {known}"
        raise UnsupportedCacheError(msg)
    return found


def probe(model: Any) -> tuple[SlotShape, ...]:
    """The shapes of a model's cache slots, found by building, and not evaluating, a forward pass of one token.

    Raises UnsupportedCacheError, before the model is called, for a class that isn't in the registry.
    """
    caches = make_prompt_cache(model)
    codecs = [codec(cache) for cache in caches]
    model(mx.array([[0]]), cache=caches)
    return tuple(entry.shape(cache) for entry, cache in zip(codecs, caches, strict=True))


def row_bytes(array: mx.array) -> memoryview:
    """An evaluated, contiguous array as bytes, without a copy; bfloat16 too."""
    return memoryview(array).cast("B").toreadonly()
