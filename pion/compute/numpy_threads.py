"""How many threads NumPy's matrix products use.

It is the same as in `threads`, for the BLAS that NumPy brings: on cores that others need, too, its threads wait for one
another, and a product that takes one thread 40 ms has taken two of them four seconds.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np  # noqa: F401  it loads the library

_FORMS: Final = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")
"""What OpenBLAS calls its functions: as NumPy's wheels have it, and as systems do."""


class _Blas:
    """OpenBLAS as NumPy has loaded it."""

    def __init__(self, library: ctypes.CDLL, form: str) -> None:
        self.get = getattr(library, form.format("get_num_threads"))
        self.set = getattr(library, form.format("set_num_threads"))
        self.lock = threading.Lock()
        self.users = 0
        self.before = 0


@functools.cache
def _blas() -> _Blas | None:
    # A symbol is looked up in what a library was linked with, too.
    library = ctypes.CDLL(sys.modules["numpy._core._multiarray_umath"].__file__)
    for form in _FORMS:
        if hasattr(library, form.format("set_num_threads")):
            return _Blas(library, form)
    return None


@contextmanager
def one_numpy_thread() -> Iterator[None]:
    """Within it, matrix products of NumPy in this process use one thread; nothing happens if its BLAS isn't OpenBLAS.

    The number is the process's: another thread that computes meanwhile is slower, not wrong. It is what it was before
    when the last one leaves; any number of threads may be inside.
    """
    blas = _blas()
    if blas is None:
        yield
        return
    with blas.lock:
        blas.users += 1
        if blas.users == 1:
            blas.before = blas.get()
            blas.set(1)
    try:
        yield
    finally:
        with blas.lock:
            blas.users -= 1
            if not blas.users:
                blas.set(blas.before)
