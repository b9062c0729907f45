"""How many threads a matrix product uses.

OpenBLAS splits even small products between all cores and lets its threads wait for one another. Where the clients run
on the same machine, a thread that has lost its core keeps all others waiting, and a batch of eight queries may take
longer than eight batches of one. Small calls therefore stay on one thread.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

from pion.compute import device


@functools.cache
def _library() -> ctypes.CDLL | None:
    path = device.prepare().path
    return ctypes.CDLL(str(path)) if path is not None else None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within it, matrix products of this process use one thread; nothing happens without OpenBLAS.

    The number is the process's: another thread that computes meanwhile is slower, not wrong. For one thread at a time.
    """
    library = _library()
    if library is None:
        yield
        return
    before = library.openblas_get_num_threads()
    library.openblas_set_num_threads(1)
    try:
        yield
    finally:
        library.openblas_set_num_threads(before)
