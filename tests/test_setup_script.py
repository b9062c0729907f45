"""What scripts/_setup writes where nobody watches, with a Python that only says yes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_log_has_no_escape_codes(tmp_path: Path) -> None:
    for name in ("scripts", ".venv/bin", "plugins"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("scripts/_setup", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    command = [tmp_path / "scripts/_setup", "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert (lines[0], lines[-1]) == ("Installing build tools", ".venv is ready")
    assert "\x1b" not in done.stderr
