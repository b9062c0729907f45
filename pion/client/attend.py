"""The methods of the synchronous client that compute attention where the keys and values are."""

from __future__ import annotations

from typing import Literal, TypeVar, overload

from pion.client import attention
from pion.client.records import Floats, Integers, LayerState, Name
from pion.client.requests import Call

T = TypeVar("T")


class AttendMethods:
    """The `attend_*` methods and `prefix_warm`.

    A session here is K and V of some layers in the server's memory, ready for attention; rows of the V-store are
    something else, which `prefix_warm` makes a session of. Arrays are C-contiguous float32. H_q query heads read the
    H_kv heads of the layer, query head h the head `head_map[h]`; D is their width, N the rows of the prefix, M the
    queries, S the rows of a suffix that comes with the call. All prefix rows precede every query, so nothing is masked
    but by `window`: only the last so many prefix rows are seen, 0: all.

    An argument of another type or shape raises `ValueError` that names it. A layer that is missing is a `ServerError`,
    a cold one a `ColdMissError`: `prefix_warm`, then ask again. Queries only read, and are repeated when the connection
    was lost.
    """

    def _call(self, request: Call[T]) -> T:
        raise NotImplementedError

    def attend_store(self, sid: Name, layer: int, keys: Floats, values: Floats) -> None:
        """Make K and V of one layer ready, in place of what it had; both `[H_kv, N, D]`, sent without a copy."""
        self._call(attention.store(sid, layer, keys, values))

    def attend_lookup(self, sid: Name, layer: int) -> LayerState:
        """Whether a layer is `"warm"` (ready), `"cold"` (`prefix_warm` brings it back) or `"missing"`."""
        return self._call(attention.lookup(sid, layer))

    @overload
    def attend_query(
        self, sid: Name, layer: int, q: Floats, *, top_k: int = 0, window: int = 0, lse: Literal[False] = False
    ) -> Floats: ...

    @overload
    def attend_query(
        self, sid: Name, layer: int, q: Floats, *, top_k: int = 0, window: int = 0, lse: Literal[True]
    ) -> tuple[Floats, Floats]: ...

    def attend_query(
        self, sid: Name, layer: int, q: Floats, *, top_k: int = 0, window: int = 0, lse: bool = False
    ) -> Floats | tuple[Floats, Floats]:
        """Attention of `q` `[H, M, D]` over the layer's rows: `[H, M, D]`.

        Args:
            sid, layer: what to read.
            q: its H is the layer's.
            top_k: each query reads only so many rows, those that score highest; 0: all.
            window: only the last so many rows are seen; applied before `top_k`. 0: all.
            lse: return (output, LSE `[H, M]`): the natural logarithm of the sum of exp(score), with which answers over
                different rows are merged. For one query it is computed twice, because such an answer has none.
        """
        if lse:
            return self._call(attention.query_with_lse(sid, layer, q, top_k, window))
        return self._call(attention.query(sid, layer, q, top_k, window))

    def attend_query_fused(
        self, sid: Name, layer: int, q: Floats, keys: Floats, values: Floats, head_map: Integers, *, window: int = 0
    ) -> Floats:
        """Attention over the layer's rows and a suffix: `[H_q, M, D]`.

        Args:
            sid, layer: what to read.
            q: `[H_q, M, D]`.
            keys, values: the suffix, `[H_kv, S, D]` each; S may be 0. Query i sees its rows j <= S - M + i.
            head_map: `[H_q]`, the KV head of each query head.
            window: only the last so many prefix rows are seen; 0: all.
        """
        return self._call(attention.query_fused(sid, layer, q, keys, values, head_map, window))

    def attend_query_sparse(
        self, sid: Name, layer: int, q: Floats, indices: Integers, counts: Integers, *, window: int = 0
    ) -> Floats:
        """Attention over the rows that are named: `[H, 1, D]`.

        Args:
            sid, layer: what to read.
            q: `[H, 1, D]`.
            indices: row numbers, `[H, K]`, none of them twice for one head.
            counts: `[H]`: how many of them, from the first, each head reads; at least 1.
            window: only the last so many rows are seen; 0: all.
        """
        return self._call(attention.query_sparse(sid, layer, q, indices, counts, window))

    def attend_query_sparse_auto(
        self,
        sid: Name,
        layer: int,
        q: Floats,
        head_map: Integers,
        *,
        block: int,
        top: int,
        kv_heads: int,
        window: int = 0,
    ) -> Floats:
        """Attention over the blocks that matter most to each head: `[H_q, 1, D]`.

        Args:
            sid, layer: what to read.
            q: `[H_q, 1, D]`.
            head_map: `[H_q]`, the KV head of each query head.
            block: rows of a block; the last may be short.
            top: how many blocks each head reads, those whose mean key scores highest.
            kv_heads: heads of the layer.
            window: only the last so many rows are seen, and make the blocks; 0: all.
        """
        return self._call(attention.query_sparse_auto(sid, layer, q, head_map, block, top, kv_heads, window))

    def attend_query_sparse_auto_fused(
        self,
        sid: Name,
        layer: int,
        q: Floats,
        keys: Floats,
        values: Floats,
        head_map: Integers,
        *,
        block: int,
        top: int,
        window: int = 0,
    ) -> Floats:
        """As `attend_query_sparse_auto`, and over all of a suffix, `keys` and `values` `[H_kv, S, D]`."""
        return self._call(attention.query_sparse_auto_fused(sid, layer, q, keys, values, head_map, block, top, window))

    def attend_drop(self, sid: Name, layer: int | None = None) -> int:
        """Forget a session, or one layer of it; how many layers there were, warm or cold."""
        return self._call(attention.drop(sid, layer))

    def attend_info(self) -> dict[str, int | str]:
        """ATTEND.INFO: the device, how much is ready on it, and what was computed."""
        return self._call(attention.info())

    def prefix_warm(self, ns: Name, heads: int, head_dim: int, sid: Name | None = None) -> tuple[int, int]:
        """Make a session of a stored prefix, all its layers: (layers made ready, layers of another width, skipped).

        Args:
            ns: the prefix.
            heads, head_dim: H_kv and D of its rows.
            sid: the session; None: it is called as the prefix is.
        """
        return self._call(attention.warm(ns, heads, head_dim, sid))
