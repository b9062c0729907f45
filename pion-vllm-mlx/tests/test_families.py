"""Runs `check_families.py` for the families that most people use, in a process of its own.

Some of the hundred models of mlx-lm, at the sizes they have there, leave the memory of their process damaged on the
CPU, and a later allocation or garbage collection ends it. Which ones is not known. So the check of all families is run
by hand, `python -m pytest pion-vllm-mlx/tests/check_families.py`, and of these here each time; nothing else runs in
their process, nothing is collected, and it ends without tidying up.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).with_name("check_families.py")
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "phi3",
    "phi",
    "stablelm",
    "cohere",
    "olmo2",
    "granite",
    "smollm3",
)
PROGRAM = (
    "import gc, os, sys, pytest; gc.disable(); status = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(status)"
)
TIMEOUT_S = 600


def test_the_common_families_agree_or_are_refused_by_name():
    tests = [f"{CHECKS}::test_a_family_agrees_or_is_refused_by_name[{name}]" for name in FAMILIES]
    tests.append(f"{CHECKS}::test_each_kind_of_other_attention_is_noticed_and_named")
    tests.append(f"{CHECKS}::test_the_prefix_matters_to_these_models")
    command = [sys.executable, "-c", PROGRAM, "-q", "-p", "no:cacheprovider", *tests]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    assert int(passed[1]) > len(FAMILIES)
