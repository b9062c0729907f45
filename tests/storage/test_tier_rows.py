"""Rows on their way to the tier: every run has a checksum of its own, so none may be long."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.limits import TIER_RUN_BYTES
from pion.storage import tier_rows
from pion.storage.block import Layer
from pion.storage.ledger import Ledger
from pion.storage.tier_rows import lay_out_rows

KEY = "0" * 32


@given(
    width=st.sampled_from([1, 3, 40, 64, 100]),
    stores=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=8),
    limit=st.sampled_from([1, 64, 200, 1000]),
)
def test_runs_are_short_and_hold_every_row_once(width: int, stores: list[tuple[int, int]], limit: int) -> None:
    layer = Layer(width, Ledger())
    rows: dict[int, bytes] = {}
    for number, (start, count) in enumerate(stores):
        data = np.random.default_rng(number).integers(0, 256, (count, width), np.uint8)
        layer.store(start, count, data.tobytes())
        rows.update({start + index: data[index].tobytes() for index in range(count)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_rows, "TIER_RUN_BYTES", limit)
        layout = lay_out_rows(KEY, b"", [(0, 7, width, layer.blocks)])
    assert layout is not None
    whole = b"".join([layout.head, *layout.parts])
    found: dict[int, bytes] = {}
    for run in layout.runs:
        assert run.nbytes <= max(limit, width)
        assert run.nbytes == run.count * width
        assert run.layer == 7
        for index in range(run.count):
            assert run.start + index not in found
            at = run.offset + index * width
            found[run.start + index] = whole[at : at + width]
    assert found == rows


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_pieces_are_about_as_large(extra: int) -> None:
    """A short rest would be copied out of its buffer first."""
    width, rows = 1024, 2 * TIER_RUN_BYTES // 1024 + extra
    layer = Layer(width, Ledger())
    layer.store(5, rows, bytes(rows * width))
    layout = lay_out_rows(KEY, b"", [(1, 0, width, layer.blocks)])
    assert layout is not None
    counts = [run.count for run in layout.runs]
    assert len(counts) == (3 if extra > 0 else 2)
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == rows
