"""Runs `check_families.py` in a process of its own.

Some of the hundred models of mlx-lm, at the sizes they have there, leave the memory of their process damaged on the
CPU: a later garbage collection of whatever else ran in it ended with a segmentation fault, three times in four. So
nothing else runs in it, nothing is collected, and it ends without tidying up.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).with_name("check_families.py")
PROGRAM = (
    "import gc, os, sys, pytest; gc.disable(); status = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(status)"
)
TIMEOUT_S = 600


def test_every_family_agrees_or_is_refused_by_name():
    command = [sys.executable, "-c", PROGRAM, "-q", "-p", "no:cacheprovider", str(CHECKS)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    assert int(passed[1]) > 100
