"""Threads that use MLX and then end.

MLX keeps streams (and, for compiled functions, caches) per thread, and destroys them when the thread ends. When that
happens late, while the interpreter is being shut down, MLX 0.32 wants the interpreter lock, which nobody gets any more,
and the process aborts ("terminate called without an active exception"). A thread that gives its streams back as its
last act is safe. It must be the last one: a thread without streams can't use MLX any more.
"""

from __future__ import annotations

import threading
from typing import Final

import mlx.core as mx


class _LastAct:
    """Lives in a thread's own variables, and so dies with the thread, in it, while Python still runs."""

    def __init__(self) -> None:
        self._thread: Final = threading.get_ident()

    def __del__(self) -> None:
        if threading.get_ident() == self._thread:
            _give_back()


_own = threading.local()


def _give_back() -> None:
    give_back = getattr(mx, "clear_streams", None)  # versions without it don't have the fault either
    if give_back is not None:
        give_back()


def release_at_thread_end() -> None:
    """Make the calling thread give its MLX streams back when it ends; call it in a thread that uses MLX.

    `PionPromptCache` does so for each thread that calls it. Does nothing in the main thread, nor a second time.
    """
    if threading.current_thread() is not threading.main_thread() and not hasattr(_own, "last_act"):
        _own.last_act = _LastAct()
