"""Packed codes against integers as long as the run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion.storage.bitpack import pack, unpack

WIDTHS = [2, 3, 4, 6, 8]


def oracle(codes: list[int], bits: int) -> bytes:
    """All codes as one number, element j at bit bits*j."""
    number = sum(code << bits * index for index, code in enumerate(codes))
    return number.to_bytes(len(codes) * bits // 8, "little")


@given(st.sampled_from(WIDTHS), st.integers(1, 40), st.data())
def test_codes_are_one_little_endian_number(bits, eights, data):
    codes = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=8 * eights, max_size=8 * eights))
    packed = pack(np.array(codes, np.uint8), bits)
    assert packed.dtype == np.uint8
    assert packed.tobytes() == oracle(codes, bits)
    assert unpack(packed, bits).tolist() == codes


@pytest.mark.parametrize("bits", WIDTHS)
def test_unpacking_leaves_its_input_alone(bits):
    packed = np.random.default_rng(bits).integers(0, 256, bits * 100, dtype=np.uint8)
    packed.setflags(write=False)
    assert pack(unpack(packed, bits).copy(), bits).tobytes() == packed.tobytes()
