"""The benchmarks that compare with Redis run against a real one. No figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

AGAINST_REDIS = {
    "ttft": {"Redis, one value", "Redis, a value per array"},
    "bulk": {"Redis", "redis-py"},
    "small": {"Redis PING", "Redis"},
    "start": {"Redis"},
}


@pytest.mark.parametrize("name", AGAINST_REDIS)
def test_every_arm_is_measured(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--quick", "--json", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert report["missing"] == []
    assert {each["arm"] for each in report["figures"]} >= AGAINST_REDIS[name]
