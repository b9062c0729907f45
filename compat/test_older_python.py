"""Older Python clients, each in a process of its own: they parse replies more strictly than today's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "older_client.py"


@pytest.mark.parametrize("release", ["redis==5.2.1", "redis==7.1.0", "valkey==6.1.1"])
@pytest.mark.parametrize("guarded", [False, True], ids=["open", "guarded"])
def test_older_client(request, release, guarded):
    module, version = release.split("==")
    port = request.getfixturevalue("guarded_pion" if guarded else "pion")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), module, str(port), *(["secret"] if guarded else [])],
        env=os.environ | {"PYTHONPATH": f"{os.environ['PION_COMPAT_FOLDER']}/{release}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, f"{version} ok\n"), done.stderr
