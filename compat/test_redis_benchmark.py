"""redis-benchmark runs clean: no errors, no warnings about the server, every request answered."""

from __future__ import annotations

import csv
import subprocess

import pytest


def benchmark(port: int, *args: str) -> list[list[str]]:
    done = subprocess.run(
        ["redis-benchmark", "-p", str(port), "--csv", *args], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "ERR" not in done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    rows = list(csv.reader(done.stdout.splitlines()))
    return rows[1:]


def test_ping_both_forms(pion):
    rows = benchmark(pion, "-t", "ping", "-n", "5000")
    assert [row[0] for row in rows] == ["PING_INLINE", "PING_MBULK"]
    assert all(float(row[1]) > 0 for row in rows)


@pytest.mark.parametrize("options", [["-P", "100", "-c", "1"], ["-c", "200"], ["--threads", "2", "-c", "20"], ["-3"]])
def test_any_command(pion, options):
    ((name, per_second, *_),) = benchmark(pion, "-n", "20000", *options, "KV.PREFIX.LOOKUP", "nothing")
    assert name == "KV.PREFIX.LOOKUP nothing"
    assert float(per_second) > 0


def test_password(guarded_pion):
    rows = benchmark(guarded_pion, "-a", "secret", "-t", "ping", "-n", "1000")
    assert len(rows) == 2
