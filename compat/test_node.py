"""The Node.js clients: each script connects, runs its checks and prints `ok`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "node"


@pytest.mark.parametrize("script", ["ioredis.cjs", "redis.cjs"])
@pytest.mark.parametrize("guarded", [False, True], ids=["open", "guarded"])
def test_node_client(request, script, guarded):
    arguments = [str(request.getfixturevalue("guarded_pion")), "secret"] if guarded else []
    arguments = arguments or [str(request.getfixturevalue("pion"))]
    done = subprocess.run(
        ["node", str(SCRIPTS / script), *arguments],
        env=os.environ | {"NODE_PATH": f"{os.environ['PION_COMPAT_FOLDER']}/node_modules"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
