"""The `pion` command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pion import cli
from pion.compute import device
from pion.config import VERSION
from pion.testing import ServerProcess


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
    _, out, _ = run(capsys, "commands", "QUERY_SPARSE_AUTO_FUSED")
    lines = out.splitlines()
    assert len(lines) == 2, "a command is one line through a pipe"
    assert lines[1].startswith("ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED sid")
    assert lines == [line.rstrip() for line in lines]


def test_no_name_is_cut_on_a_narrow_terminal(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")  # 80 columns, no escape codes
    code, out, _ = run(capsys, "commands", "QUERY_SPARSE_AUTO_FUSED")
    assert code == 0
    assert "…" not in out
    assert 40 < max(map(len, out.splitlines())) <= 80


def test_without_a_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert "doctor" in err
    assert "pion COMMAND --help" in err


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
    assert "no command named KV.PREFIX.LOKUP; similar: KV.PREFIX.LOOKUP" in err
    _, _, err = run(capsys, "where", "kv.match")
    assert "similar: KV.PREFIX.MATCH" in err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "mlx" in out
    assert "BLAS" in out


def test_doctor_says_how_to_install_what_is_missing(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "pion-vllm-mlx/[mlx]" in out.splitlines()[-1]
    assert out.splitlines()[-1].startswith("Missing: mlx. ")


OPENBLAS, LATE = device.Blas("openblas", "as built"), device.Blas("late", "mlx was first")


@pytest.mark.parametrize(
    ("blas", "absent", "verdict"),
    [
        (OPENBLAS, (), "Nothing is missing. Next: "),
        (OPENBLAS, ("cmeel_openblas",), "Missing: cmeel_openblas. "),
        (device.Blas("system", "Accelerate"), ("cmeel_openblas",), "Nothing is missing. Next: "),
        (OPENBLAS, ("mlx", "mlx_lm"), "Missing: mlx, mlx_lm. "),
        (LATE, (), "Nothing is missing, but MLX is slow here: mlx was first"),
    ],
)
def test_the_last_line_of_doctor_says_what_follows(
    monkeypatch, capsys: pytest.CaptureFixture[str], blas: device.Blas, absent: tuple[str, ...], verdict: str
) -> None:
    names = ("mlx", "mlx_lm", "cmeel_openblas")
    monkeypatch.setattr(device, "prepare", lambda: blas)
    monkeypatch.setattr(device, "report", lambda: tuple((n, "missing" if n in absent else "1.0") for n in names))
    assert run(capsys, "doctor")[1].splitlines()[-1].startswith(verdict)


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


@pytest.mark.parametrize("command", ["check", "repair"])
def test_an_empty_directory_is_not_called_well(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    code, out, _ = run(capsys, command, str(tmp_path))
    assert code == 0
    assert "no server has stored anything here" in out
    assert "well" not in out


def server_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `pion-server` writes when it refuses to start, without its name."""
    code = cli.server_main(["--dir", "", "--port", "0", *arguments])
    assert code == 2
    return capsys.readouterr().err.removeprefix("pion-server: ")


def test_a_wrong_option_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.server_main(["--kv-cache"])
    assert stopped.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert "pion-server --help lists the options" in usage
    assert error == "pion-server: error: unrecognized arguments: --kv-cache"


def test_a_size_is_expected_in_units_of_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "from 0 to 1048576 GiB, got '4x'" in server_error(capsys, "--max-bytes", "4x")


def test_an_address_that_is_not_here_is_not_called_taken(capsys: pytest.CaptureFixture[str]) -> None:
    error = server_error(capsys, "--host", "192.0.2.1", "--requirepass", "secret")
    assert "can't listen on 192.0.2.1:0" in error
    assert error.endswith("; --host must be an address of this machine\n")


def test_the_banner_says_what_to_type_and_where_the_data_is(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with ServerProcess("--requirepass", "secret", "--host", "127.0.0.2", "--dir", "here") as server:
        server.stop()
    assert f"  try        redis-cli -h 127.0.0.2 -p {server.port} --askpass KV.PREFIX.INFO\n" in server.log
    (data,) = [line for line in server.log if line.startswith("  data ")]
    assert data.startswith(f"  data       {tmp_path / 'here'}, ")
    with ServerProcess() as server:
        server.stop()
    assert f"  try        redis-cli -p {server.port} KV.PREFIX.INFO\n" in server.log
