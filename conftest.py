"""For all suites: importing mlx-lm must not lower the open-file limit of the servers that tests start.

mlx-lm sets soft and hard limit of its process to fixed numbers when it is imported, and child processes inherit that.
This file is loaded before the other conftest files, one of which imports it.
"""

from __future__ import annotations

import resource

_setrlimit = resource.setrlimit


def _keep_hard_limit(kind: int, limits: tuple[int, int]) -> None:
    """As `resource.setrlimit`, but the hard limit, which only root could raise again, stays."""
    if kind != resource.RLIMIT_NOFILE or limits[1] == resource.getrlimit(kind)[1]:
        _setrlimit(kind, limits)


resource.setrlimit = _keep_hard_limit
