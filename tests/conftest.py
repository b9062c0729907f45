"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest

from pion.config import Config
from pion.testing import Harness, ServerProcess, make_harness, running_server


@pytest.fixture
def harness() -> Harness:
    return make_harness()


@pytest.fixture
async def server():
    """A server inside the test's event loop."""
    async with running_server(Config()) as started:
        yield started


@pytest.fixture
def server_process():
    """A real server process on a free port."""
    with ServerProcess("--kvcache") as running:
        yield running
