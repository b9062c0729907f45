"""The examples of docs/how-to/client.md run, in order, and print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pion.testing import ServerProcess

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "client.md"


def test_the_examples(server_process: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(examples) == 10
    code = "\n".join(examples)
    exec(compile(code, str(PAGE), "exec"), {"PORT": server_process.port})
    printed = capsys.readouterr().out.splitlines()
    for wanted in re.findall(r"print\(.*\)  # (.*)$", code, re.MULTILINE):
        assert wanted in printed
    assert printed[3:9] == ["0.0", "0.0", "1.0", "-1.0", "2.0", "-2.0"]
    assert any(line.startswith("ERR ") for line in printed)
