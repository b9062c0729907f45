"""What the demo shows while it works: bars on a terminal, lines elsewhere; and what scripts/demo says before that."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from rich.console import Console

from pion_vllm_mlx.demo.telling import telling

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60
NEVER_S = 3600.0


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Watched(io.StringIO):
    """A file that says when a text was written to it often enough."""

    def __init__(self, text, times):
        super().__init__()
        self._text = text
        self._times = times
        self.there = threading.Event()

    def write(self, text):
        count = super().write(text)
        if self.getvalue().count(self._text) >= self._times:
            self.there.set()
        return count


def lines_of(file):
    """What was written, without the times."""
    lines = file.getvalue().splitlines()
    assert all(re.match(r"\[\d+:\d\d\] ", line) for line in lines), lines
    return [line.partition("] ")[2] for line in lines]


@pytest.mark.parametrize("forced", ["", "1"])
def test_in_a_file_each_step_is_a_line_at_its_beginning(monkeypatch, forced):
    monkeypatch.setenv("FORCE_COLOR", forced)
    file = io.StringIO()
    with telling(Console(file=file, width=40), NEVER_S) as teller:
        step = teller.step("A cold [x]: computes, stores")
        assert lines_of(file) == ["A cold [x]: computes, stores: starting"]
        step.state("answering a question that is longer than a line")
        step.prefill(1, 2_000)
        assert len(lines_of(file)) == 2, "a prefill is told by the clock, not for each part"
        step.finish("done")
        teller.step("B").finish("done")
    assert lines_of(file)[1:] == [
        "A cold [x]: computes, stores: answering a question that is longer than a line",
        "A cold [x]: computes, stores: done",
        "B: starting",
        "B: done",
    ]
    assert "\x1b" not in file.getvalue()


def test_a_long_step_says_again_and_again_how_far_it_is():
    file = Watched("A: still loading", times=3)
    with telling(Console(file=file), every_s=0.001) as teller:
        step = teller.step("A")
        step.state("loading")
        assert file.there.wait(DEADLINE_S), file.getvalue()
        step.prefill(256, 1_024)
    file = Watched("A: prefill, 256 of 1,024 tokens", times=2)
    with telling(Console(file=file), every_s=0.001) as teller:
        teller.step("A").prefill(256, 1_024)
        assert file.there.wait(DEADLINE_S), file.getvalue()


def test_nothing_is_said_of_a_step_that_is_over():
    first, second = Watched("A: still starting", times=1), Watched("B: still starting", times=3)
    console = Console(file=first)
    with telling(console, every_s=0.001) as teller:
        step = teller.step("A")
        assert first.there.wait(DEADLINE_S)
        step.finish("done")
        console.file = second
        teller.step("B")
        assert second.there.wait(DEADLINE_S)
    assert "A: still" not in second.getvalue()
    assert not [thread for thread in threading.enumerate() if thread.name == "demo lines"]


def test_nothing_is_said_between_two_steps(monkeypatch):
    looked = threading.Semaphore(0)

    class Closed(threading.Event):
        def wait(self, timeout=None):
            looked.release()
            return super().wait(timeout)

    monkeypatch.setattr("pion_vllm_mlx.demo.telling.threading.Event", Closed)
    file = io.StringIO()
    with telling(Console(file=file), every_s=0.001) as teller:
        teller.step("A").finish("done")
        while looked.acquire(blocking=False):
            pass
        for _ in range(3):
            assert looked.acquire(timeout=DEADLINE_S)
    assert lines_of(file)[-1] == "A: done"


def test_a_step_that_fails_ends_the_lines():
    lines = telling(Console(file=io.StringIO()), every_s=0.001)
    with pytest.raises(ValueError, match="failed"), lines as teller:
        raise ValueError(f"failed: {teller.step('A')}")
    assert not [thread for thread in threading.enumerate() if thread.name == "demo lines"]


def test_on_a_terminal_there_are_bars():
    file = Terminal()
    console = Console(file=file, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with telling(console) as teller:
        step = teller.step("A cold")
        step.state("loading")
        step.prefill(512, 1_024)
        step.finish("first token after 1.000 s")
    shown = file.getvalue()
    assert "━" in shown
    assert "\x1b[" in shown
    assert "first token after 1.000 s" in shown
    assert "A cold: starting" not in shown


@pytest.fixture
def checkout(tmp_path):
    """A checkout whose _setup is a script of the test's, and whose Python only says how it was called."""

    def make(setup):
        (tmp_path / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "demo", tmp_path / "scripts" / "demo")
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        for name, text in (("scripts/_setup", setup), (".venv/bin/python", 'echo "python $*"')):
            (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (tmp_path / name).chmod(0o755)
        return tmp_path

    return make


def test_the_script_says_that_it_still_installs(checkout):
    folder = checkout(f'echo "$1" > said; read -r -t {DEADLINE_S} answer <> gate; exit "$answer"')
    os.mkfifo(folder / "gate")
    with subprocess.Popen(
        [folder / "scripts" / "demo", "--new-tokens", "3"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "DEMO_LINE_S": "1"},
    ) as process:  # fmt: skip
        first = [process.stderr.readline(), process.stderr.readline()]
        assert all(re.fullmatch(r"  still installing, after \d+ s\n", line) for line in first), first
        (folder / "gate").write_text("0\n")
        out, rest = process.communicate(timeout=DEADLINE_S)
    assert out == "python -m pion_vllm_mlx.demo --new-tokens 3\n"
    assert process.returncode == 0
    assert (folder / "said").read_text() == "demo\n"
    assert "\x1b" not in rest


def test_the_script_ends_with_an_installation_that_fails(checkout):
    folder = checkout("echo no network >&2; exit 7")
    done = subprocess.run(
        [folder / "scripts" / "demo"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "no network\n")
