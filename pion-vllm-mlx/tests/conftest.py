"""A real server process for the tests of this distribution."""

from __future__ import annotations

import os

# Before OpenBLAS is loaded: its threads spin, which on a machine shared by many processes costs tenfold.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from pion.testing import ServerProcess
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.testing import make_tiny_model


@pytest.fixture(scope="session")
def server():
    """One server process for the session; tests use names and tokens of their own."""
    with ServerProcess("--kvcache", "--max-sessions", "4096") as running:
        yield running


@pytest.fixture
def model():
    return make_tiny_model()


@pytest.fixture
def connect(server):
    """Makes prompt caches on the shared server, closed at the end. A failure of the server is an error."""
    made = []

    def make(model, **options):
        made.append(PionPromptCache(model, **{"port": server.port, "fallback": False, **options}))
        return made[-1]

    yield make
    for cache in made:
        cache.close()
