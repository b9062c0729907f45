"""For all suites: importing mlx-lm must not lower the open-file limit of the servers that tests start.

mlx-lm sets soft and hard limit of its process to fixed numbers when it is imported, and child processes inherit that.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from unittest import mock

import pytest

_setrlimit = resource.setrlimit


def _keep_hard_limit(kind: int, limits: tuple[int, int]) -> None:
    """As `resource.setrlimit`, but the hard limit, which only root could raise again, stays."""
    if kind != resource.RLIMIT_NOFILE or limits[1] == resource.getrlimit(kind)[1]:
        _setrlimit(kind, limits)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionstart() -> Iterator[None]:
    """From before the collection, which imports, to the end of the process."""
    mock.patch("resource.setrlimit", _keep_hard_limit).start()
    return (yield)
