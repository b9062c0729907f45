"""Prefixes that this process holds, and caches that begin with one: the in-process lane.

A cache of this lane is mlx-lm's KVCache with the prefix already in its buffer and room behind it, so attention over
`[prefix | suffix]` is the model's own single call. The first token would copy the buffer if anything else referred to
it. So each prefix is held twice: a master, which nobody writes, and a loan, a second copy that one cache at a time may
write behind the prefix. The cache gives it back when it is collected. While it is out, others get copies, which are
loans too: the first that comes back is kept.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import mlx.core as mx
from mlx_lm.models.cache import KVCache

from pion_vllm_mlx.claims import Namespace
from pion_vllm_mlx.prefix_key import TokenIds
from pion_vllm_mlx.transfer import SPARE_TOKENS

HELD_BYTES: Final = 2 << 30
"""Default budget of the prefixes that one `PionPromptCache` holds, both copies counted."""

Arrays = tuple[mx.array, mx.array]
"""Keys and values of one layer, `[1, heads, rows, head_dim]`."""


class _Loan:
    """Buffers of all layers, in the hands of the caches of one generation until all of them are gone."""

    def __init__(self, held: HeldPrefix, arrays: Sequence[Arrays]) -> None:
        self.held: Final = held
        self.cells: Final = [Cell(self, keys, values) for keys, values in arrays]
        self.out = len(self.cells)


class Cell:
    """The buffers of one layer. Outlives the cache, which is how they come back."""

    def __init__(self, loan: _Loan | None, keys: Any, values: Any) -> None:
        self.loan = loan
        self.keys = keys
        self.values = values


class PrefixKVCache(KVCache):
    """A KVCache that begins with a held prefix of `prefix` rows; used and trimmed as any KVCache."""

    def __init__(self, cell: Cell, prefix: int) -> None:
        self._cell = cell
        self._writing = False
        self.prefix = prefix
        self.offset = prefix
        if cell.loan is not None:
            # Not at exit: there the loan has no use, and MLX may be gone.
            weakref.finalize(self, cell.loan.held.give_back, cell.loan).atexit = False

    @property
    def keys(self) -> Any:
        """The buffer, as in KVCache."""
        return self._cell.keys

    @keys.setter
    def keys(self, value: Any) -> None:
        self._own(0)
        self._cell.keys = value

    @property
    def values(self) -> Any:
        """The buffer, as in KVCache."""
        return self._cell.values

    @values.setter
    def values(self, value: Any) -> None:
        self._own(0)
        self._cell.values = value

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As KVCache. After a trim into the prefix this cache goes on with a copy: the loan's rows stay the prefix."""
        if self.offset < self.prefix:
            self._own(self.offset)
        self._writing = True  # growing sets the buffers, and keeps the rows of the prefix
        try:
            fetched: tuple[mx.array, mx.array] = super().update_and_fetch(keys, values)
        finally:
            self._writing = False
        return fetched

    @classmethod
    def from_state(cls, state: Any) -> Any:
        """A plain KVCache: it begins with nothing that is held."""
        return KVCache.from_state(state)

    def __copy__(self) -> Any:
        """A plain KVCache that shares the memory until one of them writes: the loan stays with this one."""
        plain = KVCache()
        plain.keys, plain.values, plain.offset = self.keys[:], self.values[:], self.offset
        return plain

    def __deepcopy__(self, memo: Any) -> Any:
        """A plain KVCache with the same rows."""
        plain = KVCache()
        plain.keys, plain.values = copy.deepcopy((self.keys, self.values), memo)
        plain.offset = self.offset
        return plain

    def _own(self, prefix: int) -> None:
        """Before rows from `prefix` on may change: go on with arrays that nobody gets back, and less of a prefix."""
        if self._writing:
            return
        self.prefix = prefix
        if self._cell.loan is not None:
            # Other names for the same buffers. MLX copies at the next write, as long as the loan keeps its own.
            self._cell = Cell(None, self._cell.keys[:], self._cell.values[:])


PrefixKVCache.__name__ = KVCache.__name__  # mlx-lm's save_prompt_cache writes it, and its loader looks it up


@attrs.define(eq=False)
class HeldPrefix:
    """One prefix: what it was computed from, the master, and the loan when it is in the house."""

    digest: bytes
    ids: TokenIds
    master: list[Arrays]
    _idle: list[Arrays] | None = None
    # The collector may run, and give back a loan, while this very thread holds it.
    _lock: Any = attrs.field(factory=threading.RLock, repr=False)

    @classmethod
    def of(cls, digest: bytes, ids: TokenIds, caches: Sequence[Any]) -> HeldPrefix:
        """Hold what caches of exactly these tokens hold. They stay usable: what they write later is a copy."""
        tokens = len(ids)
        master = [(cache.keys[..., :tokens, :], cache.values[..., :tokens, :]) for cache in caches]
        held = cls(digest, ids, master)
        held._idle = held._copies()
        mx.eval(master, held._idle)
        return held

    @property
    def nbytes(self) -> int:
        """Memory of the master and the loan."""
        return sum(2 * (keys.nbytes + values.nbytes) for keys, values in self.master)

    def caches(self, make: Callable[[Cell, int], Any]) -> list[Any]:
        """Caches of their own for one generation: `make(cell, prefix)` for each layer. No copy if the loan is here."""
        with self._lock:
            arrays, self._idle = self._idle, None
        if arrays is None or not _evaluated(arrays):
            arrays = self._copies()
            mx.eval(arrays)
        loan = _Loan(self, arrays)
        return [make(cell, len(self.ids)) for cell in loan.cells]

    def plain(self) -> list[Any]:
        """Caches of mlx-lm's own class. They share the master's memory until they write, which copies it."""
        caches = []
        for keys, values in self.master:
            cache = KVCache()
            cache.keys, cache.values, cache.offset = keys[:], values[:], len(self.ids)
            caches.append(cache)
        return caches

    def give_back(self, loan: _Loan) -> None:
        """One cache of a loan is gone. Called by the garbage collector, in any thread."""
        with self._lock:
            loan.out -= 1
            # One that grew far beyond the prefix isn't kept: it would be memory that nobody counts.
            small = loan.cells[0].keys.shape[2] <= 2 * len(self.ids) + SPARE_TOKENS
            if loan.out == 0 and self._idle is None and small:
                # New array objects: somebody may still hold the old ones, which writing would change.
                self._idle = [(cell.keys[:], cell.values[:]) for cell in loan.cells]

    def _copies(self) -> list[Arrays]:
        return [(_with_room(keys), _with_room(values)) for keys, values in self.master]


class HeldPrefixes:
    """The prefixes of one `PionPromptCache`, least recently used first, within a budget. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Namespace, HeldPrefix] = OrderedDict()

    def keep(self, name: Namespace, digest: bytes, ids: TokenIds, caches: Sequence[Any]) -> None:
        """Hold a prefix under its name, in place of another; one that is too large only takes the other's place."""
        if self.get(name, digest, ids) is not None:
            return
        if self._too_large(caches, len(ids)):
            self.drop(name)
            return
        held = HeldPrefix.of(digest, ids, caches)
        with self._lock:
            self._held[name] = held
            self._held.move_to_end(name)
            while sum(entry.nbytes for entry in self._held.values()) > self._budget_bytes:
                self._held.popitem(last=False)

    def get(self, name: Namespace, digest: bytes, ids: TokenIds | None = None) -> HeldPrefix | None:
        """What is held under a name, if it was computed in this very context (and from these tokens)."""
        with self._lock:
            held = self._held.get(name)
            if held is None or held.digest != digest:
                return None
            if ids is not None and held.ids.tobytes() != ids.tobytes():
                return None
            self._held.move_to_end(name)
            return held

    def drop(self, *names: Namespace) -> None:
        """Let go of these; caches made from them live on."""
        with self._lock:
            for name in names:
                self._held.pop(name, None)

    def _too_large(self, caches: Sequence[Any], tokens: int) -> bool:
        rows = (array[..., :tokens, :] for cache in caches for array in (cache.keys, cache.values))
        return 2 * sum(array.nbytes for array in rows) > self._budget_bytes


def _with_room(array: mx.array) -> mx.array:
    batch, heads, _, dim = array.shape
    return mx.concatenate([array, mx.zeros((batch, heads, SPARE_TOKENS, dim), array.dtype)], axis=2)


def _evaluated(arrays: list[Arrays]) -> bool:
    """Whether the arrays can be used here. An aborted generation of another thread leaves some that can't."""
    try:
        mx.eval(arrays)
    except RuntimeError:
        return False
    return True
