"""The seed's Quick Start, word for word as the README has it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import mlx_lm
import pytest

from pion.client import PionClient
from pion.testing import ServerProcess

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.fixture
def default_port():
    """The Quick Start names no port, so the server is on the one that clients take by default."""
    with ServerProcess("--kvcache", "-w", "1", "--port", "1974") as server:
        yield server.port


def quick_start():
    (code,) = re.findall(r"^```python\n(from mlx_lm import load, generate\n.*?)^```$", README.read_text(), re.M | re.S)
    return code


def run(code):
    printed = io.StringIO()
    names = {}
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), names)
    return printed.getvalue(), names


def test_the_quick_start_runs_as_it_is_written(default_port, demo_model, model_folder, monkeypatch):
    asked = []

    def load(repository, **options):
        asked.append(repository)
        return demo_model

    monkeypatch.setattr(mlx_lm, "load", load)
    code = quick_start()
    (first, names), (second, _) = runs = [run(code) for _ in range(2)]
    cold, warm = (after["pc"].stats() for _, after in runs)
    assert asked == ["mlx-community/Llama-3.2-1B-Instruct-4bit"] * 2
    model, tokenizer = demo_model
    question = tokenizer.encode(" How do I reset my password?", add_special_tokens=False)
    plain = mlx_lm.generate(model, tokenizer, prompt=names["prefix_ids"] + question, max_tokens=40)
    assert first == plain + "\n"
    assert names["cache"][0].offset >= len(names["prefix_ids"]) + len(question)
    assert (cold["hits"], cold["misses"], cold["stored"], cold["fallbacks"]) == (0, 1, 1, 0)
    assert (warm["hits"], warm["misses"], warm["stored"], warm["fallbacks"]) == (1, 0, 0, 0)
    assert {"hits", "misses", "hit_rate", "fetch_ms_total", "store_ms_total"} <= warm.keys()
    # vquant="fp16" rounds what is fetched, so the two answers need not agree to the end; the first word does.
    assert first.split()[:1] == second.split()[:1]
    with PionClient(port=default_port) as client:
        assert client.stats()["kvprefix_hits_measured"] == 1
