"""scripts/demo, with a short prompt: real processes, the whole table."""

from __future__ import annotations

import re

import pytest

from pion_vllm_mlx.demo import __main__ as demo
from pion_vllm_mlx.demo import conversation, worker


def test_it_runs_agrees_and_shows_the_table(model_folder, capfd):
    assert demo.main(["--model", model_folder, "--prompt-characters", "400", "--new-tokens", "6"]) == 0
    shown = capfd.readouterr().out
    rows = {title: re.search(rf"│ {re.escape(title)} +│(.*)", shown) for title in ("A cold", "B warm", "C part shared")}
    for title, row in rows.items():
        assert row, f"no row {title!r} in:\n{shown}"
        assert row[1].split("│")[-2].strip() == "yes"
    a, b, c = ([int(cell.replace(",", "")) for cell in row[1].split("│")[:3]] for row in rows.values())
    assert a[1] == 0
    assert a[2] == a[0]
    assert 0 < c[1] < c[0]
    assert b[0] == a[0]
    assert b[1] + b[2] == b[0]
    assert b[2] < 40
    assert re.search(r"kvprefix_hits +│ +2 ", shown)


def test_answers_that_differ_are_a_failure(monkeypatch, capfd):
    def run(bars, title, job):
        return {"tokens": [1, 2 if job["mode"] == "reference" else 3], "splits": [1], "ttft_s": 1.0, "text": "",
                "prompt_tokens": 3, "restored": 0, "evaluated": 3}  # fmt: skip

    monkeypatch.setattr(demo, "run", run)
    assert demo.main(["--model", "any"]) == demo.EXIT_DISAGREE
    assert "NO" in capfd.readouterr().out


def test_a_model_that_cannot_be_loaded_is_said_so(tmp_path, capfd):
    assert demo.main(["--model", str(tmp_path)]) == demo.EXIT_MISSING
    assert "A cold" in capfd.readouterr().out


def test_bad_options_are_refused():
    with pytest.raises(SystemExit):
        demo.parse(["--new-tokens", "0"])


def test_the_prompts_are_long_enough_and_share_their_beginning(demo_model):
    _, tokenizer = demo_model
    first, other = conversation.system_prompts()
    ids, other_ids = (conversation.prompt_ids(tokenizer, text, "Why?") for text in (first, other))
    assert conversation.prefix_length(tokenizer, first) >= 1000
    common = next(i for i, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b)
    assert 500 < common < len(other_ids) - 100


def test_models_without_a_system_role_or_a_template():
    class Plain:
        chat_template = None

        def encode(self, text):
            return [ord(letter) for letter in text]

    class NoSystem(Plain):
        chat_template = "a template"

        def apply_chat_template(self, messages, add_generation_prompt):
            assert add_generation_prompt
            if messages[0]["role"] == "system":
                raise ValueError("System role not supported")
            return self.encode("".join(message["content"] for message in messages))

    for tokenizer in (Plain(), NoSystem()):
        ids = conversation.prompt_ids(tokenizer, "Be brief.", "Why?")
        assert "".join(map(chr, ids)).startswith("Be brief.\n\n")
        assert conversation.prefix_length(tokenizer, "Be brief.") >= len("Be brief.\n\n")
    assert worker.DEMO_PREFILL_STEP > 0
