"""NumPy's matrix products on one thread, for as long as anybody wants that."""

from __future__ import annotations

from typing import Any

import pytest

from pion.compute import numpy_threads
from pion.compute.numpy_threads import one_numpy_thread


class Library:
    """Stands for OpenBLAS, under one of its names."""

    def __init__(self, form: str) -> None:
        self.threads = 12
        setattr(self, form.format("get_num_threads"), lambda: self.threads)
        setattr(self, form.format("set_num_threads"), self._set)

    def _set(self, threads: int) -> None:
        self.threads = threads


@pytest.fixture(autouse=True)
def fresh() -> Any:
    numpy_threads._blas.cache_clear()
    yield
    numpy_threads._blas.cache_clear()


@pytest.mark.parametrize("form", numpy_threads._FORMS)
def test_one_thread_until_the_last_one_leaves(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    library = Library(form)
    monkeypatch.setattr(numpy_threads.ctypes, "CDLL", lambda path: library)
    first, second = one_numpy_thread(), one_numpy_thread()
    first.__enter__()
    assert library.threads == 1
    second.__enter__()
    first.__exit__(None, None, None)
    assert library.threads == 1
    second.__exit__(None, None, None)
    assert library.threads == 12
    with pytest.raises(MemoryError), one_numpy_thread():
        raise MemoryError
    assert library.threads == 12


def test_another_blas_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_threads.ctypes, "CDLL", lambda path: object())
    with one_numpy_thread():
        assert numpy_threads._blas() is None


def test_the_one_that_numpy_has() -> None:
    """OpenBLAS on Linux; on a Mac NumPy may use Accelerate."""
    blas = numpy_threads._blas()
    if blas is None:
        import numpy as np

        name = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]  # type: ignore[index,call-overload]
        assert "openblas" not in name
        return
    before = blas.get()
    assert before >= 1
    blas.set(2)
    with one_numpy_thread():
        assert blas.get() == 1
    assert blas.get() == 2
    blas.set(before)
