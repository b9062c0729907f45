"""What the ATTEND forms take, checked: blobs as arrays of the right shape, and what the numbers in them may be.

Everything is checked before it gets near the compute thread, with errors that name the argument. Blobs are
little-endian, C order, float32 or uint32. The arrays are views of what was received: nothing is copied or converted.
They are aligned, since a request's memory is, and every blob in it begins after whole values.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from pion.args import integer
from pion.compute.attention import VALUE_BYTES, Chosen, Floats, Indices, Suffix
from pion.errors import CommandError
from pion.replies import Buffer

HEAD_DIM_STEP: Final = 8
HEAD_DIM_MAX: Final = 512
"""D is a multiple of 8 up to 512: what models have, and what the kernels of every device take."""


_U32_MAX: Final = 2**32 - 1


def u32(value: Buffer, what: str) -> int:
    """A number, as the binary lane has them. What it may be is checked behind the lanes. Raises CommandError."""
    return integer(value, what, 0, _U32_MAX)


def check_head_dim(head_dim: int) -> int:
    """D of something new. Raises CommandError."""
    if head_dim % HEAD_DIM_STEP or not HEAD_DIM_STEP <= head_dim <= HEAD_DIM_MAX:
        raise CommandError(f"D must be a multiple of {HEAD_DIM_STEP} from 8 to {HEAD_DIM_MAX}, got {head_dim}")
    return head_dim


def floats(blob: Buffer, what: str, shape: str, *sizes: int) -> Floats:
    """A blob as float32 of these sizes; `shape` says them to a person, as in "H x N x D". Raises CommandError."""
    _check_bytes(blob, what, shape, "fp32", sizes)
    return np.frombuffer(blob, np.float32).reshape(sizes)


def queries(blob: Buffer, heads: int, head_dim: int, heads_name: str = "H") -> Floats:
    """Q `[H, M, D]`, with M from its length, at least 1. Raises CommandError."""
    each = VALUE_BYTES * heads * head_dim
    if not len(blob) or len(blob) % each:
        raise CommandError(
            f"Q must be {heads_name} x M x D fp32 values, {each} bytes for each of at least one query, "
            f"got {len(blob)} bytes"
        )
    return np.frombuffer(blob, np.float32).reshape(heads, -1, head_dim)


def suffix(keys: Buffer, values: Buffer, kv_heads: int, rows: int, head_dim: int) -> Suffix:
    """Suffix K and V, `[H_kv, S_suf, D]` each; S_suf may be 0. Raises CommandError."""
    sizes = kv_heads, rows, head_dim
    return Suffix(
        floats(keys, "K_suf", "H_kv x S_suf x D", *sizes), floats(values, "V_suf", "H_kv x S_suf x D", *sizes)
    )


def head_map(blob: Buffer, heads: int, kv_heads: int) -> Indices:
    """Query head -> KV head: `[H_q]`, each below H_kv. Raises CommandError."""
    _check_bytes(blob, "head_map", "H_q", "uint32", (heads,))
    found = np.frombuffer(blob, np.uint32)
    if int(found.max()) >= kv_heads:
        head = int(np.argmax(found >= kv_heads))
        raise CommandError(f"head_map must be KV heads below H_kv, {kv_heads}, got {found[head]} for query head {head}")
    return found


def counts(blob: Buffer, heads: int, most: int) -> Indices:
    """How many of the indices count, for each head: `[H]`, each from 1 to K_sparse_max. Raises CommandError."""
    _check_bytes(blob, "counts", "H", "uint32", (heads,))
    found = np.frombuffer(blob, np.uint32)
    wrong = (found < 1) | (found > most)
    if wrong.any():
        head = int(np.argmax(wrong))
        raise CommandError(f"counts must be 1 to K_sparse_max, {most}, got {found[head]} for head {head}")
    return found


def indices(blob: Buffer, heads: int, most: int) -> Indices:
    """`[H, K_sparse_max]` row numbers, which `chosen` looks at. Raises CommandError."""
    _check_bytes(blob, "indices", "H x K_sparse_max", "uint32", (heads, most))
    return np.frombuffer(blob, np.uint32).reshape(heads, most)


def chosen(found: Indices, used: Indices, rows: int, window: int) -> Chosen:
    """The rows that each head reads, of those that are visible: all `rows`, or the last `window` of them.

    Raises CommandError for a row that is not there, for one that a head names twice, and for a head that names no
    visible one. Indices behind a head's count may be anything. Looks at each index some times; may run in any thread.
    """
    # What counts for no head is let go: rows are gathered for as many as are kept. Of one more than there are rows, one
    # is there twice or out of range.
    used = np.minimum(used, np.uint32(rows + 1))
    found = np.ascontiguousarray(found[:, : used.max()])
    heads, most = found.shape
    counted = np.arange(most) < used[:, None]
    wrong = counted & (found >= rows)
    if wrong.any():
        head, place = divmod(int(np.argmax(wrong)), most)
        raise CommandError(f"indices must be rows below {rows}, got {found[head, place]} for head {head}")
    named = np.zeros((heads, rows), np.bool_)
    head_of = np.nonzero(counted)[0]
    named[head_of, found[counted]] = True
    twice = named.sum(axis=1) != used
    if twice.any():
        head = int(np.argmax(twice))
        values, times = np.unique(found[head, : used[head]], return_counts=True)
        raise CommandError(f"indices must not repeat a row, got {values[np.argmax(times > 1)]} twice for head {head}")
    if not 0 < window < rows:
        return Chosen(found, used)
    visible = counted & (found >= rows - window)
    left = visible.sum(axis=1)
    if not left.all():
        raise CommandError(
            f"indices must name a row that fa_window {window} shows, from {rows - window} on, "
            f"got none for head {int(np.argmin(left))}"
        )
    # Visible ones to the front, in the order given.
    order = np.argsort(~visible, axis=1, kind="stable")
    return Chosen(np.take_along_axis(found, order, axis=1)[:, : left.max()], left.astype(np.uint32))


def check_blocks(rows: int, window: int, block: int, top: int) -> None:
    """K_top of the blocks of B rows that the visible rows make; a short last one is a block. Raises CommandError."""
    visible = min(rows, window) if window else rows
    blocks = -(-visible // block)
    if top > blocks:
        raise CommandError(f"K_top must be at most {blocks}, the blocks of {block} in {visible} rows, got {top}")


def _check_bytes(blob: Buffer, what: str, shape: str, kind: str, sizes: tuple[int, ...]) -> None:
    expected = VALUE_BYTES * math.prod(sizes)
    if len(blob) != expected:
        shown = " x ".join(map(str, sizes))
        raise CommandError(f"{what} must be {shape} {kind} values, {shown}: {expected} bytes, got {len(blob)}")
