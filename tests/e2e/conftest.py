"""The real model and real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# Before OpenBLAS is loaded: its threads spin, which on a machine shared by many processes costs tenfold.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

import pion_vllm_mlx  # noqa: F401  loads the fast BLAS before any test imports mlx
from pion.testing import ServerProcess
from pion_vllm_mlx.demo_model import ensure_demo_model, load_demo_model

FOLDER = Path(__file__).parent


@pytest.fixture(scope="session")
def model_folder():
    return str(ensure_demo_model())


@pytest.fixture(scope="session")
def demo_model(model_folder):
    return load_demo_model()


@pytest.fixture(scope="module")
def pion_server():
    """One real server process per module."""
    with ServerProcess("--kvcache") as running:
        yield running


@pytest.fixture
def in_a_process():
    """Runs `client_process.py` in a fresh interpreter and returns the JSON it prints."""

    def run(job, hash_seed="random"):
        done = subprocess.run(
            [sys.executable, "-W", "error", str(FOLDER / "client_process.py")],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
