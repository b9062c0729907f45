"""The `pion` command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pion import cli
from pion.config import VERSION


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "commands", "lookup")
    assert code == 0
    assert "KV.PREFIX.LOOKUP ns [TOKENS" in out
    assert "kvprefix" in out
    assert "PING" not in out
    code, out, err = run(capsys, "commands", "no-such-command")
    assert (code, out) == (2, "")
    assert "no command has no-such-command in its name" in err
    _, out, _ = run(capsys, "commands", "V.FETCH")
    assert "0x10 0x12" in out, "the codes on the binary lane"


def test_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plugins", "--plugins", "all,-stats")
    assert code == 0
    rows = {line.split()[0]: line.split()[1] for line in out.splitlines()[1:]}
    assert rows["stats"] == "no"
    assert rows["kvprefix"] == "yes"


def test_where(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "where", "client", "list")
    assert code == 0
    assert "plugin connection" in out
    assert ".py:" in out
    code, _, err = run(capsys, "where", "KV.PREFIX.LOKUP")
    assert code == 2
    assert "no command named KV.PREFIX.LOKUP" in err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "mlx" in out
    assert "BLAS" in out


def test_doctor_says_how_to_install_what_is_missing(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "pion-vllm-mlx/[mlx]" in out.replace("\n", "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert VERSION in capsys.readouterr().out


def test_server_errors_are_one_line() -> None:
    command = [sys.executable, "-m", "pion", "server", "--dir", "", "--plugins", "nope"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("pion-server: --plugins: no plugin named nope")
    assert done.stderr.count("\n") == 1
