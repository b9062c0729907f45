"""What computes attention, as an interface: K and V that stay where they are, and queries against them.

Two implementations: `mlx_attention` (any device MLX has) and `numpy_attention` (small, in float32; what tests without
MLX use). Commands talk to neither: they hand a `Query` to the compute worker, which owns the backend's one thread.

All arrays are C-contiguous float32 unless said otherwise. H_q query heads read H_kv KV heads through `head_map`. N is
the number of prefix rows, M the number of queries, D the head's width, S the rows of a suffix. Scores are
q . k / sqrt(D). Nothing here knows of sessions, slots or the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Indices: TypeAlias = npt.NDArray[np.uint32]

VALUE_BYTES: Final = 4
"""Bytes of one value, float32 or uint32: on the wire, in memory and on disk."""


@attrs.frozen(eq=False)
class Suffix:
    """Rows behind the prefix that came with the query: keys and values, each `[H_kv, S, D]`; S may be 0.

    Causal, aligned at the end: query i of M sees suffix rows j <= S - M + i.
    """

    keys: Floats
    values: Floats


@attrs.frozen(eq=False)
class Chosen:
    """The prefix rows that each query head reads: the first `counts[h]` of `indices[h]`.

    `indices` is uint32 `[H_q, K]`, `counts` uint32 `[H_q]`, each count at least 1; indices in range and without
    duplicates within a head. The caller has checked that. With a window, chosen rows outside of it are not read; a head
    that is left with none, and has no suffix, gets NaN with the LSE -inf, so the caller refuses that.
    """

    indices: Indices
    counts: Indices


@attrs.frozen
class Blocks:
    """Each query head reads the `top` blocks of `rows` prefix rows whose mean key scores highest.

    The last block may be short.
    Ties: the block that comes first. `top` is at least 1 and at most the number of visible blocks.
    """

    rows: int
    top: int


@attrs.frozen(eq=False, kw_only=True)
class Query:
    """One question about a resident prefix.

    Fields:
        q: `[H_q, M, D]`.
        head_map: uint32 `[H_q]`, the KV head of each query head; None when H_q equals the prefix's heads.
        top_k: 0 reads all rows, else each query only the `top_k` rows that score highest; ties: the lower index.
        window: 0 sees all prefix rows, else only the last `window` ones, before `top_k` and blocks are applied.
        suffix: rows behind the prefix; not together with `top_k`.
        sparse: which prefix rows are read, with M = 1; None for all.
        want_lse: whether the LSE is needed. The device's own attention doesn't return it, so an answer without may be
            cheaper.
    """

    q: Floats
    head_map: Indices | None = None
    top_k: int = 0
    window: int = 0
    suffix: Suffix | None = None
    sparse: Chosen | Blocks | None = None
    want_lse: bool = True


@attrs.frozen(eq=False)
class Attended:
    """The answer: `output` `[H_q, M, D]`, and `lse` `[H_q, M]`, the natural log of the sum of exp(score) over all rows
    that were read, with which answers over different rows are merged; `[H_q, 0]` if the query didn't want it.

    Where every score is -inf, or no row was read, the output is NaN and the LSE -inf.
    """

    output: Floats
    lse: Floats


class Resident(Protocol):
    """The K and V of one layer, held by a backend on its device. Immutable; freed with the last reference."""

    @property
    def heads(self) -> int:
        """H_kv."""

    @property
    def rows(self) -> int:
        """N."""

    @property
    def head_dim(self) -> int:
        """D."""

    @property
    def nbytes(self) -> int:
        """Memory of K and V on the device, and of what is kept beside them (block means)."""

    def forget_means(self) -> None:
        """Let go of block means that are kept beside K and V, if any: `nbytes` is then that of K and V alone.

        On any thread, at any time; doesn't wait. A query under way uses them to its end, or keeps new ones; a later one
        works them out anew and keeps them again.
        """


class Backend(Protocol):
    """Computes on one device, in one precision. Every method runs on the compute thread only and may take long."""

    @property
    def name(self) -> str:
        """`mlx` or `numpy`."""

    @property
    def device(self) -> str:
        """For people: which device, which library, which precision, for example `cpu, OpenBLAS, fp32`."""

    @property
    def value_bytes(self) -> int:
        """Bytes of one value of K or V as it is held. This one may be read on any thread."""

    def load(self, keys: Floats, values: Floats) -> Resident:
        """Copy K and V `[H, N, D]` to the device, in the backend's precision. The arguments may be changed afterwards.

        Raises MemoryError.
        """

    def load_rows(self, keys: Floats, values: Floats, heads: int) -> Resident:
        """The same from rows as the V-store has them: `[N, H * D]` each, turned on the device. Raises MemoryError."""

    def attend(self, resident: Resident, queries: Sequence[Query]) -> list[Attended]:
        """Answer all, in order. Those that differ in nothing but `q` and the suffix read the prefix together.

        The answers are evaluated, float32, and own their memory. Shapes were checked by the caller. A query with NaN or
        infinity gets what IEEE arithmetic makes of it; other heads and queries don't notice. So it is with rows: NaN or
        infinity in K or V reaches those who read the row, and nobody else. Raises MemoryError.
        """

    def attend_once(self, keys: Floats, values: Floats, query: Query) -> Attended:
        """`load` and `attend` for K and V that are used once."""
