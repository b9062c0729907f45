"""The methods of the Trio client that compute attention where the keys and values are."""

from __future__ import annotations

from typing import Literal, TypeVar, overload

from pion.client import attention
from pion.client.records import Floats, Integers, LayerState, Name
from pion.client.requests import Call

T = TypeVar("T")


class AttendMethods:
    """As `pion.client.attend.AttendMethods`, where arguments, results and errors are described.

    Cancellation: as for every method of the client; a query that was cancelled is computed for nobody or not at all.
    """

    async def _call(self, request: Call[T]) -> T:
        raise NotImplementedError

    async def attend_store(self, sid: Name, layer: int, keys: Floats, values: Floats) -> None:
        """Make K and V of one layer ready, in place of what it had; both `[H_kv, N, D]`, sent without a copy."""
        await self._call(attention.store(sid, layer, keys, values))

    async def attend_lookup(self, sid: Name, layer: int) -> LayerState:
        """Whether a layer is `"warm"` (ready), `"cold"` (`prefix_warm` brings it back) or `"missing"`."""
        return await self._call(attention.lookup(sid, layer))

    @overload
    async def attend_query(
        self, sid: Name, layer: int, q: Floats, *, top_k: int = 0, window: int = 0, lse: Literal[False] = False
    ) -> Floats: ...

    @overload
    async def attend_query(
        self, sid: Name, layer: int, q: Floats, *, top_k: int = 0, window: int = 0, lse: Literal[True]
    ) -> tuple[Floats, Floats]: ...

    async def attend_query(
        self, sid: Name, layer: int, q: Floats, *, top_k: int = 0, window: int = 0, lse: bool = False
    ) -> Floats | tuple[Floats, Floats]:
        """Attention of `q` `[H, M, D]` over the layer's rows: `[H, M, D]`."""
        if lse:
            return await self._call(attention.query_with_lse(sid, layer, q, top_k, window))
        return await self._call(attention.query(sid, layer, q, top_k, window))

    async def attend_query_fused(
        self, sid: Name, layer: int, q: Floats, keys: Floats, values: Floats, head_map: Integers, *, window: int = 0
    ) -> Floats:
        """Attention over the layer's rows and a suffix: `[H_q, M, D]`."""
        return await self._call(attention.query_fused(sid, layer, q, keys, values, head_map, window))

    async def attend_query_sparse(
        self, sid: Name, layer: int, q: Floats, indices: Integers, counts: Integers, *, window: int = 0
    ) -> Floats:
        """Attention over the rows that are named: `[H, 1, D]`."""
        return await self._call(attention.query_sparse(sid, layer, q, indices, counts, window))

    async def attend_query_sparse_auto(
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
        """Attention over the blocks that matter most to each head: `[H_q, 1, D]`."""
        return await self._call(attention.query_sparse_auto(sid, layer, q, head_map, block, top, kv_heads, window))

    async def attend_query_sparse_auto_fused(
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
        return await self._call(
            attention.query_sparse_auto_fused(sid, layer, q, keys, values, head_map, block, top, window)
        )

    async def attend_drop(self, sid: Name, layer: int | None = None) -> int:
        """Forget a session, or one layer of it; how many layers there were, warm or cold."""
        return await self._call(attention.drop(sid, layer))

    async def attend_info(self) -> dict[str, int | str]:
        """ATTEND.INFO: the device, how much is ready on it, and what was computed."""
        return await self._call(attention.info())

    async def prefix_warm(self, ns: Name, heads: int, head_dim: int, sid: Name | None = None) -> tuple[int, int]:
        """Make a session of a stored prefix, all its layers: (layers made ready, layers of another width, skipped)."""
        return await self._call(attention.warm(ns, heads, head_dim, sid))
