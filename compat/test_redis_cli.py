"""redis-cli: one command, RESP3, a pipe, mass insertion, and a person at a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import termios
import time

import numpy as np
import pytest


def cli(port: int, *args: str, sent: bytes | None = None) -> str:
    done = subprocess.run(
        ["redis-cli", "-p", str(port), *args],
        input=sent,
        stdin=subprocess.DEVNULL if sent is None else None,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def test_one_command(pion):
    assert cli(pion, "PING") == "PONG\n"
    assert cli(pion, "ECHO", "two words") == "two words\n"
    assert "redis_version:7.4.0" in cli(pion, "INFO", "server")
    assert "cmd=client|list" in cli(pion, "CLIENT", "LIST")
    assert "ERR unknown command 'NOSUCH', with args beginning with: 'a'" in cli(pion, "NOSUCH", "a")


def test_resp3(pion):
    assert "proto 3" in cli(pion, "-3", "HELLO", "3")
    shown = cli(pion, "-3", "PION.STATS")
    assert re.search(r"^kvprefix_hits \d+$", shown, re.MULTILINE)
    assert len(shown.splitlines()) == 16


def test_database_and_name(pion):
    refused = subprocess.run(["redis-cli", "-p", str(pion), "-n", "3", "PING"], capture_output=True, timeout=60)
    assert b"SELECT 3 failed: ERR DB index is out of range" in refused.stdout + refused.stderr
    assert cli(pion, "-n", "0", "PING") == "PONG\n"


def test_password(guarded_pion):
    assert "NOAUTH" in cli(guarded_pion, "PING")
    assert cli(guarded_pion, "-a", "secret", "--no-auth-warning", "PING") == "PONG\n"
    assert cli(guarded_pion, "--user", "default", "--pass", "secret", "--no-auth-warning", "-3", "PING") == "PONG\n"
    assert "WRONGPASS" in cli(guarded_pion, "AUTH", "wrong")
    url = f"redis://default:secret@127.0.0.1:{guarded_pion}/0"
    assert cli(guarded_pion, "-u", url, "--no-auth-warning", "PING") == "PONG\n"


def test_commands_from_a_pipe(pion):
    sent = b"PING\nMULTI\nECHO a\nNOSUCH\nEXEC\nHELLO 3\nCLIENT GETNAME\n"
    lines = cli(pion, sent=sent).splitlines()
    assert lines[:3] == ["PONG", "OK", "QUEUED"]
    assert "EXECABORT Transaction discarded because of previous errors." in lines


def test_last_argument_from_standard_input(pion):
    row = np.arange(64, dtype=np.float32).tobytes()
    cli(pion, "V.DROP", "cli")
    assert cli(pion, "V.CREATE", "cli", "64", "VQUANT", "fp32") == "OK\n"
    assert cli(pion, "-x", "V.STORE", "cli", "0", "0", sent=row) == "OK\n"
    done = subprocess.run(
        ["redis-cli", "-p", str(pion), "--raw", "V.FETCH", "cli", "0", "0"], capture_output=True, timeout=60
    )
    assert done.stdout == row + b"\n"


@pytest.mark.parametrize("count", [1, 20_000])
def test_mass_insertion(pion, count):
    cli(pion, "V.DROP", "mass")
    assert cli(pion, "V.CREATE", "mass", "32", "VQUANT", "fp32") == "OK\n"
    row = bytes(128)
    requests = b"".join(
        b"*5\r\n$7\r\nV.STORE\r\n$4\r\nmass\r\n$1\r\n0\r\n$%d\r\n%d\r\n$128\r\n%b\r\n" % (len(str(index)), index, row)
        for index in range(count)
    )
    shown = cli(pion, "--pipe", sent=requests)
    assert f"errors: 0, replies: {count}" in shown


def test_statistics_mode(pion):
    """`--latency-dist` and others need commands Pion lacks; `--latency` sends PING."""
    process = subprocess.Popen(
        ["redis-cli", "-p", str(pion), "--raw", "--latency", "-i", "1"], stdout=subprocess.PIPE, text=True
    )
    try:
        first = process.communicate(timeout=30)[0]
    finally:
        process.kill()
    low, high, average, samples = first.split()[:4]
    assert float(low) <= float(average) <= float(high)
    assert int(samples) > 0


class Terminal:
    """redis-cli at a pseudo-terminal; `wait` returns once a pattern has been shown."""

    def __init__(self, port: int) -> None:
        self._terminal, inner = pty.openpty()
        termios.tcsetwinsize(inner, (50, 200))  # with no size redis-cli would ask the terminal and wait
        self._process = subprocess.Popen(
            ["redis-cli", "-p", str(port)],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=os.environ | {"TERM": "xterm", "REDISCLI_HISTFILE": "/dev/null"},
            start_new_session=True,
        )
        os.close(inner)
        self.shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._terminal)
        self._process.kill()
        self._process.wait()

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def prompt(self) -> None:
        """Wait until a line can be typed: what is typed before it is thrown away when the editor starts."""
        self.wait(r"127\.0\.0\.1:\d+> ")

    def wait(self, pattern: str) -> None:
        """Read until the pattern is shown; the next call looks behind it."""
        deadline = time.monotonic() + 60
        while (found := re.search(pattern, self.shown)) is None:
            ready = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"{pattern!r} was not shown:\n{self.shown}"
            self.shown += os.read(self._terminal, 65536).decode("utf-8", "replace")
        self.shown = self.shown[found.end() :]


def test_hints_at_a_terminal(pion):
    """redis-cli shows the arguments still to come in grey, from COMMAND DOCS."""
    with Terminal(pion) as terminal:
        terminal.prompt()
        terminal.type("kv.prefix.lookup ")
        terminal.wait(re.escape("ns [TOKENS tokens] [PREFILL_MS prefill-ms] [WAIT wait-ms]"))
        terminal.type("x\r")
        terminal.wait("MISS")
        terminal.prompt()
        terminal.type("client kill ")
        terminal.wait(re.escape("[ID client-id]"))
        terminal.type("\x15help ping\r")
        terminal.wait("Answers, to show that the connection and the server are alive.")
        terminal.prompt()
        terminal.type("help @connection\r")
        terminal.wait("CLIENT SETNAME.*connection-name")
        terminal.prompt()
        terminal.type("help @kvprefix\r")
        terminal.wait("KV.PREFIX.MATCH.*count hashes")
        terminal.prompt()
        terminal.type("pion.s\t")
        terminal.wait("(?i)> pion.stats")
        terminal.type("\x15quit\r")
