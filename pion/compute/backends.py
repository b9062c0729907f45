"""Making a backend by its name."""

from __future__ import annotations

from typing import Literal

from pion.compute import device
from pion.compute.attention import Backend


def make_backend(name: Literal["mlx", "numpy"] = "mlx", *, fp16: bool = False) -> Backend:
    """A backend in fp32 or fp16; call it on the thread that will use it.

    `mlx` is imported here, after the fast BLAS is loaded, and computes on MLX's default device. Raises ImportError if
    it isn't installed.
    """
    if name == "numpy":
        from pion.compute.numpy_attention import NumpyBackend

        return NumpyBackend(fp16)
    device.prepare()
    from pion.compute.mlx_attention import MlxBackend

    return MlxBackend(fp16)
