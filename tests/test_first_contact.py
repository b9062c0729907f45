"""The table of docs/how-to/run-the-server.md: what a server says when it can't start, word for word."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pion import cli
from pion.storage.data_directory import LOCK_NAME
from pion.storage.disk import DirectoryLock

PAGE = Path(__file__).parents[1] / "docs/how-to/run-the-server.md"
ROWS = re.findall(r"^\| `([^`]+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
START = ("--dir", "", "--port", "0")


def with_a_port_in_use(folder: Path) -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return cli.server_main(["--dir", "", "--port", str(taken.getsockname()[1])])


def with_a_directory_in_use(folder: Path) -> int:
    lock = DirectoryLock(folder / LOCK_NAME)
    try:
        return cli.server_main(["--port", "0", "--dir", str(folder)])
    finally:
        lock.release()


def without_a_password(folder: Path) -> int:
    return cli.server_main([*START, "--host", "0.0.0.0"])


def with_a_wrong_option(folder: Path) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.server_main([*START, "--kv-cache"])
    return int(stopped.value.code or 0)


def with_an_unknown_plugin(folder: Path) -> int:
    return cli.server_main([*START, "--plugins", "nope"])


FAILURES = (
    with_a_port_in_use,
    with_a_directory_in_use,
    without_a_password,
    with_a_wrong_option,
    with_an_unknown_plugin,
)


@pytest.mark.parametrize("start", FAILURES, ids=lambda start: start.__name__)
def test_the_page_has_what_the_server_says(
    start: Callable[[Path], int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert start(tmp_path) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert len([row for row, _ in ROWS if re.search(_pattern(row), last)]) == 1, last


def test_the_page_has_a_row_for_each_of_these() -> None:
    assert len(ROWS) == len(FAILURES)


def _pattern(row: str) -> str:
    return ".+".join(re.escape(part) for part in row.split("..."))
