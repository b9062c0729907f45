"""Small calls use one thread of the BLAS, and leave the number as it was."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from pion.compute import device, threads
from pion.compute.attention import Query
from pion.compute.mlx_attention import SINGLE_THREAD_QUERIES, MlxBackend
from pion.compute.threads import one_blas_thread
from tests.compute.attention_support import make_case


class Counting:
    """In the place of OpenBLAS."""

    def __init__(self) -> None:
        self.number, self.set_to = 5, []

    def openblas_get_num_threads(self) -> int:
        return self.number

    def openblas_set_num_threads(self, number: int) -> None:
        self.number = number
        self.set_to.append(number)


def test_the_number_is_put_back_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Counting()
    monkeypatch.setattr(threads, "_library", lambda: library)
    with pytest.raises(ZeroDivisionError), one_blas_thread():
        raise ZeroDivisionError
    assert library.set_to == [1, 5]


def test_nothing_happens_without_openblas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_library", lambda: None)
    with one_blas_thread():
        pass


def test_the_library_in_use_is_asked() -> None:
    path = device.prepare().path
    if path is None:  # a system with a BLAS of its own
        assert threads._library() is None
        return
    library = ctypes.CDLL(str(path))
    before = library.openblas_get_num_threads()
    with one_blas_thread():
        assert library.openblas_get_num_threads() == 1
    assert library.openblas_get_num_threads() == before


@pytest.mark.parametrize(
    ("count", "single"), [(1, True), (SINGLE_THREAD_QUERIES, True), (SINGLE_THREAD_QUERIES + 1, False)]
)
def test_only_small_calls(monkeypatch: pytest.MonkeyPatch, count: int, single: bool) -> None:
    library = Counting()
    monkeypatch.setattr(threads, "_library", lambda: library)
    case = make_case()
    MlxBackend(gpu=False).attend_once(case.keys, case.values, Query(q=np.ones((2, count, 32), np.float32)))
    assert library.set_to == ([1, 5] if single else [])
