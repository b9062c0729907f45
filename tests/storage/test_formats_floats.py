"""fp32, fp16 and bf16: every bit pattern of the narrow types, and the wide one against float64 and integer oracles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pion.storage import floats

ALL_16 = np.arange(65536, dtype=np.uint16)
SPECIAL_32 = np.array(
    [
        *(0x00000000, 0x80000000),  # +-0
        *(0x00000001, 0x007FFFFF, 0x80000001, 0x00800000),  # subnormals and the least normal
        *(0x7F800000, 0xFF800000),  # infinities
        *(0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FA00000, 0x7F802000),  # NaN
        *(
            0x477FE000,
            0x477FEFFF,
            0x477FF000,
            0x477FF001,
            0x47800000,
            0xC77FF000,
            0x7F7FFFFF,
            0xFF7FFFFF,
        ),  # 65504 and on
        *(0x33000000, 0x33000001, 0x32FFFFFF, 0x33800000, 0x387FC000, 0x387FE000, 0x387FF000, 0x38800000),  # fp16 tiny
        *(0x3F801000, 0x3F803000, 0x3F801001, 0x3F800FFF, 0xBF801000, 0xBF803000),  # ties at 11 bits
        *(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000, 0x7F7F8000, 0x7F7F7FFF),  # ties at 8 bits
    ],
    np.uint32,
)

floats32 = hnp.arrays(
    np.uint32, st.integers(1, 40), elements=st.integers(0, 2**32 - 1) | st.sampled_from([*map(int, SPECIAL_32)])
)


def narrow_oracle(bits: np.ndarray, mantissa: int, exponent_bias: int, exponent_max: int, saturate: bool) -> np.ndarray:
    """fp32 bits to a 16-bit float by exact scaling in float64: no cast to a narrow type, no integer rounding trick."""
    sign = (bits >> 31).astype(np.int64) << 15
    nan, inf = (bits & 0x7FFFFFFF) > 0x7F800000, (bits & 0x7FFFFFFF) == 0x7F800000
    safe = np.where(nan | inf, 0, bits & 0x7FFFFFFF).astype(np.uint32).view(np.float32).astype(np.float64)
    exponent = np.maximum(np.frexp(np.where(safe == 0, 1e-300, safe))[1] - 1, 1 - exponent_bias)
    units = np.rint(safe / np.exp2(exponent - float(mantissa)))  # exact power of two; rint is ties to even
    result = ((exponent + exponent_bias - 1) << mantissa) + units.astype(np.int64)
    infinity = exponent_max << mantissa
    result = np.where(result >= infinity, infinity - 1 if saturate else infinity, result)
    result = np.where(inf, infinity, result)
    payload = ((bits & 0x7FFFFF) >> (23 - mantissa)).astype(np.int64)
    payload = np.where(payload == 0, 1 << (mantissa - 1), payload)
    return (sign | np.where(nan, infinity | payload, result)).astype(np.uint16)


def fp16_oracle(bits: np.ndarray) -> np.ndarray:
    return narrow_oracle(bits, 10, 15, 31, saturate=True)


def bf16_oracle(bits: np.ndarray) -> np.ndarray:
    return narrow_oracle(bits, 7, 127, 255, saturate=False)


def spread_32(count: int) -> np.ndarray:
    """Random bit patterns, values near every boundary of both narrow types, and the special ones."""
    rng = np.random.default_rng(16)
    halves = (ALL_16.astype(np.uint32) << 16) + rng.choice(np.array([0, 1, 0x7FFF, 0x8000, 0x8001], np.uint32), 65536)
    exact = ALL_16.view(np.float16).astype(np.float32).view(np.uint32)
    ties = exact + rng.choice(np.array([0, 1, 0xFFF, 0x1000, 0x1001], np.uint32), 65536)
    return np.concatenate([rng.integers(0, 2**32, count, dtype=np.uint32), halves, ties, SPECIAL_32])


NARROW_TO_FP16 = [floats.fp32_to_fp16, floats._narrow_in_software]
WIDEN_FP16 = [floats.fp16_to_fp32, floats._widen_in_software]


@pytest.mark.parametrize("narrow", NARROW_TO_FP16)
def test_fp32_to_fp16_matches_the_oracle(narrow):
    bits = spread_32(300_000)
    result = narrow(bits.view(np.float32)).view(np.uint16)
    np.testing.assert_array_equal(result, fp16_oracle(bits))


def test_fp32_to_fp16_on_a_machine_with_hardware_casts(monkeypatch):
    monkeypatch.setattr(floats, "_CASTS_IN_HARDWARE", True)
    bits = spread_32(1000)
    result = floats.fp32_to_fp16(bits.view(np.float32)).view(np.uint16)
    nan = np.isnan(bits.view(np.float32))
    np.testing.assert_array_equal(result[~nan], fp16_oracle(bits)[~nan])
    assert np.isnan(result[nan].view(np.float16)).all()
    np.testing.assert_array_equal(floats.fp16_to_fp32(ALL_16.view(np.float16)).view(np.uint32), widen_fp16_oracle())


def test_fp32_to_bf16_matches_the_oracle():
    bits = spread_32(300_000)
    np.testing.assert_array_equal(floats.fp32_to_bf16(bits.view(np.float32)), bf16_oracle(bits))


def widen_fp16_oracle() -> np.ndarray:
    wide = np.empty(65536, np.uint32)
    for value in range(65536):
        sign, exponent, mantissa = value >> 15, value >> 10 & 31, value & 0x3FF
        if exponent == 31:
            magnitude = 0x7F800000 | mantissa << 13
        else:
            real = (mantissa + (1024 if exponent else 0)) * 2.0 ** (max(exponent, 1) - 25)
            magnitude = int(np.float32(real).view(np.uint32))
        wide[value] = sign << 31 | magnitude
    return wide


@pytest.mark.parametrize("widen", WIDEN_FP16)
def test_every_fp16_widens_exactly(widen):
    np.testing.assert_array_equal(widen(ALL_16.view(np.float16)).view(np.uint32), widen_fp16_oracle())


def test_widening_is_exact_where_subnormals_are_flushed(monkeypatch):
    # A library may switch the process to flush-to-zero; the product that the check looks at is then 0.
    monkeypatch.setattr(floats, "_LEAST_FP32", np.float32(0))
    monkeypatch.setattr(floats, "_widen_in_software", None)
    np.testing.assert_array_equal(floats.fp16_to_fp32(ALL_16.view(np.float16)).view(np.uint32), widen_fp16_oracle())


def test_every_bf16_widens_exactly():
    np.testing.assert_array_equal(floats.bf16_to_fp32(ALL_16).view(np.uint32), ALL_16.astype(np.uint32) << 16)


def test_every_16_bit_float_survives_fp32():
    """NaN payloads, quiet and signalling, included."""
    np.testing.assert_array_equal(floats.fp32_to_bf16(floats.bf16_to_fp32(ALL_16)), ALL_16)
    halves = ALL_16.view(np.float16)
    np.testing.assert_array_equal(floats.fp32_to_fp16(floats.fp16_to_fp32(halves)).view(np.uint16), ALL_16)


@given(floats32)
def test_narrowing_any_bits(bits):
    values = bits.view(np.float32)
    np.testing.assert_array_equal(floats.fp32_to_fp16(values).view(np.uint16), fp16_oracle(bits))
    np.testing.assert_array_equal(floats.fp32_to_bf16(values), bf16_oracle(bits))


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_block_boundaries(extra):
    count = 2 * floats.BLOCK_VALUES + extra
    bits = np.resize(spread_32(5000), count)
    values = bits.view(np.float32)
    np.testing.assert_array_equal(floats.fp32_to_fp16(values).view(np.uint16), fp16_oracle(bits))
    np.testing.assert_array_equal(floats.fp32_to_bf16(values), bf16_oracle(bits))
    halves = np.resize(ALL_16, count)
    np.testing.assert_array_equal(
        floats.fp16_to_fp32(halves.view(np.float16)).view(np.uint32), np.resize(widen_fp16_oracle(), count)
    )


def test_saturation_and_infinities():
    values = np.array([65504, 65519.996, 65520, 1e30, -1e30, np.inf, -np.inf, -65535], np.float32)
    expected = [65504, 65504, 65504, 65504, -65504, np.inf, -np.inf, -65504]
    assert floats.fp32_to_fp16(values).tolist() == expected


def test_conversions_do_not_write_to_their_input():
    bits = spread_32(1000)
    halves = ALL_16.copy()
    for array in (bits, halves):
        array.setflags(write=False)
    floats.fp32_to_fp16(bits.view(np.float32))
    floats.fp32_to_bf16(bits.view(np.float32))
    floats.fp16_to_fp32(halves.view(np.float16))
    floats.bf16_to_fp32(halves)


def test_unaligned_input():
    """A payload may start at any byte of the buffer it was received in."""
    bits = spread_32(100)
    raw = np.frombuffer(b"x" + bits.tobytes(), np.uint8)[1:]
    odd = np.frombuffer(raw, np.float32)
    assert not odd.flags.aligned
    np.testing.assert_array_equal(floats.fp32_to_fp16(odd).view(np.uint16), fp16_oracle(bits))
    np.testing.assert_array_equal(floats.fp32_to_bf16(odd), bf16_oracle(bits))
    raw = np.frombuffer(b"x" + ALL_16.tobytes(), np.uint8)[1:]
    np.testing.assert_array_equal(floats.fp16_to_fp32(raw.view(np.float16)).view(np.uint32), widen_fp16_oracle())
    np.testing.assert_array_equal(
        floats.bf16_to_fp32(raw.view(np.uint16)).view(np.uint32), ALL_16.astype(np.uint32) << 16
    )
