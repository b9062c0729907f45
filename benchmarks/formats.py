"""Converting fp32 rows to every stored format and back, against MLX and NumPy, on one core."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from benchmarks._lib import pin
from benchmarks._lib.report import Report, at_least
from benchmarks._lib.stats import interleave
from pion.storage import floats
from pion.storage.formats import FP8, INT8, MLX4G32, TURBO2, TURBO3, TURBO4, Format, get_format
from pion.storage.mlx_format import MlxFormat

MIB = 1 << 20
DIM = 1024
ROWS = 8192
ROUNDS = 9

LAYOUTS = (
    "mlx4g32", "mlx2g64", "mlx3g64", "mlx4g64", "mlx6g64", "mlx8g64", "mlx4g128",
    "mlx4g64:bf16", "mlx8g32:bf16", "mlx4g64:fp32", "mlx3g128:fp32",
)  # fmt: skip
"""All widths of codes, all groups, all types: a dozen of the 45."""

OTHERS: Mapping[Format, float] = {FP8: 0.3, INT8: 0.3, TURBO4: 0.1, TURBO3: 0.1, TURBO2: 0.1}
"""Format -> what must be reached of the speed of MLX's 4-bit quantization with groups of 32."""

TYPES = {"fp16": mx.float16, "bf16": mx.bfloat16, "fp32": mx.float32}

METHOD = (
    f"{ROWS} rows of D {DIM}, fp32, N(0, 1): {ROWS * DIM * 4 // MIB} MiB. All arms of a line take turns, on one core; "
    "MLX runs on the CPU, where quantize and dequantize are one thread anyway.",
    "MLX keeps no freed buffers (mx.set_cache_limit(0)), and NumPy gets none back: what a server stores or sends "
    "stays, so every result is fresh memory.",
    "encode: fp32 rows to stored bytes. MLX: mx.quantize of the same rows, and of the same rows in the type of the "
    "scales, which makes the same layout. decode: stored bytes to fp32 rows; mx.dequantize gives the type of the "
    "scales.",
    "int8, fp8 and turbo: against mx.quantize of fp32 rows and mx.dequantize of fp16 scales, 4 bits in groups of 32.",
    "A ratio is the other arm's median time over Pion's: 1.8 x is 1.8 times the throughput.",
)

Arm = Callable[[], object]


def run(quick: bool) -> Report:
    """Measure the family, the other quantizers, and the conversions between floats."""
    report = Report("formats", "conversion to stored formats and back", quick, METHOD)
    rows = np.random.default_rng(1).standard_normal((ROWS // 64 if quick else ROWS, DIM)).astype(np.float32)
    rounds = 1 if quick else ROUNDS
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    limit = mx.set_cache_limit(0)
    try:
        with pin.pinned(pin.CLIENT):
            for name in LAYOUTS:
                _layout(report, name, rows, rounds)
            for fmt, bound in OTHERS.items():
                _other(report, fmt, bound, rows, rounds)
            _floats(report, rows.reshape(-1), rounds)
        _layout(report, "mlx4g32", rows, rounds, cores="any core")
    finally:
        mx.set_cache_limit(limit)
        mx.set_default_device(before)
    return report


def _compare(report: Report, what: str, arms: Mapping[str, Arm], bound: float | None, rounds: int) -> None:
    """Time the arms by turns; Pion is one of them."""
    samples = interleave({name: _ignoring(arm) for name, arm in arms.items()}, rounds)
    medians = {
        name: report.samples(what, name, "ms", [each * 1000 for each in took]).p50 for name, took in samples.items()
    }
    target = None if bound is None else at_least(bound)
    for name in arms:
        if name != "Pion":
            report.find(f"{what}: Pion", medians[name] / medians["Pion"], against=name, target=target)


def _ignoring(arm: Arm) -> Callable[[], None]:
    def ignored() -> None:
        arm()

    return ignored


def _layout(report: Report, name: str, rows: NDArray[np.float32], rounds: int, cores: str = "") -> None:
    """One layout of the family, both ways."""
    fmt = get_format(name.encode())
    assert isinstance(fmt, MlxFormat)
    wide = mx.array(rows)
    narrow = wide.astype(TYPES[fmt.scales.name])
    parts = mx.quantize(narrow, group_size=fmt.group, bits=fmt.bits)
    mx.eval(wide, narrow, parts)
    raw = fmt.encode(rows).data
    suffix = f", {cores}" if cores else ""
    bound = None if cores else 0.9
    encoders: dict[str, Arm] = {
        "Pion": lambda: fmt.encode(rows),
        "mx.quantize fp32": lambda: mx.eval(mx.quantize(wide, group_size=fmt.group, bits=fmt.bits)),
    }
    if fmt.scales.name != "fp32":
        encoders[f"mx.quantize {fmt.scales.name}"] = lambda: mx.eval(
            mx.quantize(narrow, group_size=fmt.group, bits=fmt.bits)
        )
    _compare(report, f"{name} encode{suffix}", encoders, bound, rounds)
    decoders: dict[str, Arm] = {
        "Pion": lambda: fmt.decode(raw, len(rows), DIM),
        "mx.dequantize": lambda: mx.eval(mx.dequantize(*parts, group_size=fmt.group, bits=fmt.bits)),
    }
    _compare(report, f"{name} decode{suffix}", decoders, bound, rounds)


def _other(report: Report, fmt: Format, bound: float, rows: NDArray[np.float32], rounds: int) -> None:
    """A quantizer that MLX doesn't have, both ways."""
    wide = mx.array(rows)
    parts = mx.quantize(wide.astype(mx.float16), group_size=MLX4G32.group, bits=MLX4G32.bits)
    mx.eval(wide, parts)
    raw = fmt.encode(rows).data
    _compare(
        report,
        f"{fmt.name} encode",
        {
            "Pion": lambda: fmt.encode(rows),
            "mx.quantize fp32": lambda: mx.eval(mx.quantize(wide, group_size=MLX4G32.group, bits=MLX4G32.bits)),
        },
        bound,
        rounds,
    )
    _compare(
        report,
        f"{fmt.name} decode",
        {
            "Pion": lambda: fmt.decode(raw, len(rows), DIM),
            "mx.dequantize": lambda: mx.eval(mx.dequantize(*parts, group_size=MLX4G32.group, bits=MLX4G32.bits)),
        },
        bound,
        rounds,
    )


def _floats(report: Report, wide: NDArray[np.float32], rounds: int) -> None:
    """Between fp32 and the 16-bit types."""
    half, brain = wide.astype(np.float16), wide.astype(ml_dtypes.bfloat16)
    wide_mx = mx.array(wide)
    half_mx, brain_mx = wide_mx.astype(mx.float16), wide_mx.astype(mx.bfloat16)
    mx.eval(wide_mx, half_mx, brain_mx)
    conversions: dict[str, tuple[Arm, Arm, Arm]] = {
        "fp32 to fp16": (
            lambda: floats.fp32_to_fp16(wide),
            lambda: wide.astype(np.float16),
            lambda: mx.eval(wide_mx.astype(mx.float16)),
        ),
        "fp16 to fp32": (
            lambda: floats.fp16_to_fp32(half),
            lambda: half.astype(np.float32),
            lambda: mx.eval(half_mx.astype(mx.float32)),
        ),
        "fp32 to bf16": (
            lambda: floats.fp32_to_bf16(wide),
            lambda: wide.astype(ml_dtypes.bfloat16),
            lambda: mx.eval(wide_mx.astype(mx.bfloat16)),
        ),
        "bf16 to fp32": (
            lambda: floats.bf16_to_fp32(brain.view(np.uint16)),
            lambda: brain.astype(np.float32),
            lambda: mx.eval(brain_mx.astype(mx.float32)),
        ),
    }
    for what, arms in conversions.items():
        _compare(report, what, dict(zip(("Pion", "NumPy", "MLX"), arms, strict=True)), 0.9, rounds)
