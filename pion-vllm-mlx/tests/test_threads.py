"""Threads that used MLX end without taking the process along."""

from __future__ import annotations

import subprocess
import sys
import threading

import mlx.core as mx
import pytest

from pion_vllm_mlx import release_at_thread_end, threads

PROGRAM = """
import sys, threading
import mlx.core as mx
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.testing import make_tiny_model, random_tokens

model = make_tiny_model()
pc = PionPromptCache(model, port=int(sys.argv[1]), timeout_s=0.5)
compiled = mx.compile(lambda x: (x * 2 + 1).sum())

def work(i):
    pc.prepare_prompt(random_tokens(40, seed=i))
    mx.eval(compiled(mx.ones(10 + i)))

workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
pc.close()
print("done")
"""


@pytest.mark.parametrize("attempt", range(4))
def test_a_program_whose_threads_used_mlx_ends_cleanly(server, attempt):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(server.port)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_streams_go_with_the_thread_in_the_thread(monkeypatch):
    cleared = []
    monkeypatch.setattr(threads, "_give_back", lambda: cleared.append(threading.get_ident()))
    seen = []

    def work():
        release_at_thread_end()
        release_at_thread_end()
        mx.eval(mx.ones(3) + 1)
        seen.append((threading.get_ident(), list(cleared)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ((ident, before),) = seen
    assert before == []
    assert cleared == [ident]
    release_at_thread_end()
    assert not hasattr(threads._own, "last_act")


def test_a_last_act_that_dies_in_another_thread_does_nothing(monkeypatch):
    """The main thread goes on using MLX."""
    cleared = []
    monkeypatch.setattr(threads, "_give_back", lambda: cleared.append(threading.get_ident()))
    made = []
    thread = threading.Thread(target=lambda: made.append(threads._LastAct()))
    thread.start()
    thread.join()
    made.clear()
    assert cleared == []


def test_an_mlx_without_that_function_is_fine(monkeypatch):
    monkeypatch.delattr(mx, "clear_streams", raising=False)
    threads._give_back()
