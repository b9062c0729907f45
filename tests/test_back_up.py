"""docs/how-to/back-up-and-restore.md: its commands are run, on real files, with a server at work."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pion.client import Layer, PionClient, Stored
from pion.testing import ServerProcess

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "back-up-and-restore.md"

REDIS_CLI = """#!{python}
# What the page needs of redis-cli, which not every machine has.
import sys
from pion.client import PionClient

assert sys.argv[1] == "-p"
with PionClient(port=int(sys.argv[2])) as client:
    print(client.execute(*sys.argv[3:]))
"""


def block(title: str) -> list[str]:
    """The lines of the page's block of that title."""
    found = re.findall(
        rf'^```sh title="{title}"\n(.*?)^```$', PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(found) == 1
    return str(found[0]).splitlines()


@pytest.fixture
def shell(tmp_path: Path):
    """Runs a line of the page in `tmp_path`, with the page's paths in it; returns what it prints."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "redis-cli"
    program.write_text(REDIS_CLI.format(python=sys.executable))
    program.chmod(0o755)
    (tmp_path / "backups").mkdir()

    def run(line: str, port: int) -> str:
        line = line.replace(" 1974 ", f" {port} ").replace("/backups/", f"{tmp_path}/backups/")
        done = subprocess.run(
            ["sh", "-ec", line],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHONPATH": str(PAGE.parents[2])},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    return run


def rows(number: int) -> np.ndarray:
    return np.full((100, 64), number, np.float32)


def store(client: PionClient, number: int) -> Stored:
    layers = [Layer(keys=rows(number), values=-rows(number))] * 4
    return client.store_prefix(f"p{number}", "fp32@64*4", "fp32@64*4", layers, 100)


def check(client: PionClient, number: int) -> None:
    fetched = client.prefix_fetch(f"p{number}")
    for part, expected in zip(fetched, [rows(number), -rows(number)] * 4, strict=True):
        assert np.array_equal(part.view(np.float32).reshape(100, 64), expected)


def test_the_page(tmp_path: Path, shell) -> None:
    stop = threading.Event()
    late: list[int] = []

    def keep_storing(port: int) -> None:
        with PionClient(port=port) as client:
            while not stop.is_set():
                assert store(client, 100 + len(late)) is Stored.STORED
                late.append(100 + len(late))

    with ServerProcess("--kvcache", "--dir", str(tmp_path / "pion-data"), "--max-sessions", "100000") as server:
        with PionClient(port=server.port) as client:
            for number in range(20):
                assert store(client, number) is Stored.STORED
        writer = threading.Thread(target=keep_storing, args=(server.port,))
        writer.start()
        try:
            printed = "".join(shell(line, server.port) for line in block("back up"))
        finally:
            stop.set()
            writer.join()
        assert printed.split() == ["OK"]
        server.kill()
    assert [path.name for path in (tmp_path / "backups").iterdir()] == ["pion-monday"]
    assert not (tmp_path / "pion-data" / "backup").exists()

    *before, start = block("restore")
    for line in before:
        shell(line, 0)
    program, *arguments = shlex.split(start)
    assert program == "pion-server"
    arguments[arguments.index("restored")] = str(tmp_path / "restored")
    with ServerProcess(*arguments, "--max-sessions", "100000") as server, PionClient(port=server.port) as client:
        restored = {int(name[1:]) for name in client.prefix_list()}
        assert set(range(20)) <= restored <= {*range(20), *late}
        for number in restored:
            check(client, number)
        assert store(client, 99) is Stored.STORED


def test_a_backup_in_the_place_of_a_newer_state_is_refused(tmp_path: Path, shell) -> None:
    """What the page warns of: the log that is there is from later than the snapshot."""
    data = tmp_path / "pion-data"
    with ServerProcess("--kvcache", "--dir", str(data)) as server, PionClient(port=server.port) as client:
        store(client, 1)
        for line in block("back up"):
            shell(line, server.port)
        store(client, 2)
        client.execute("KV.PREFIX.SAVE")
        store(client, 3)
        server.kill()
    shell("cp backups/pion-monday pion-data/pion.vstore.0", 0)
    with pytest.raises(RuntimeError, match=r"pion\.vstore\.0\.log\.\d{10}: it begins with record \d+, but"):
        ServerProcess("--kvcache", "--dir", str(data)).__enter__()


@pytest.mark.parametrize("path", ["pion.vstore.1", "a.tmp", "../a", "/tmp/a"])
def test_paths_that_the_page_rules_out(tmp_path: Path, shell, path: str) -> None:
    with ServerProcess("--kvcache", "--dir", str(tmp_path / "pion-data")) as server:
        with pytest.raises(AssertionError, match="path must"):
            shell(f"redis-cli -p 1974 KV.PREFIX.SAVE {path}", server.port)
        assert shell("redis-cli -p 1974 KV.PREFIX.SAVE a", server.port) == "OK\n"
