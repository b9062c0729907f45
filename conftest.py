"""For all suites.

Importing mlx-lm must not lower the open-file limit of the servers that tests start: it sets soft and hard limit of its
process to fixed numbers when it is imported, and child processes inherit that. This file is loaded before the other
conftest files, one of which imports it.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from pion.config import Config

_setrlimit = resource.setrlimit


def _keep_hard_limit(kind: int, limits: tuple[int, int]) -> None:
    """As `resource.setrlimit`, but the hard limit, which only root could raise again, stays."""
    if kind != resource.RLIMIT_NOFILE or limits[1] == resource.getrlimit(kind)[1]:
        _setrlimit(kind, limits)


resource.setrlimit = _keep_hard_limit


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_where_the_tests_are_run() -> Iterator[None]:
    """A server that a test starts keeps nothing, or keeps it in a directory of that test."""
    data = Path(Config().dir).absolute()
    was_there = data.exists()
    yield
    if data.exists() and not was_there:
        pytest.fail(f"a server was started without --dir and made {data}")
