"""scripts/demo, with a short prompt: real processes, the whole table."""

from __future__ import annotations

import os
import re
import tempfile

import pytest
from rich.console import Console

from pion_vllm_mlx.demo import __main__ as demo
from pion_vllm_mlx.demo import conversation, worker
from pion_vllm_mlx.demo.telling import telling


def test_it_runs_agrees_and_shows_the_table(model_folder, capfd):
    assert demo.main(["--model", model_folder, "--prompt-characters", "400", "--new-tokens", "6"]) == 0
    shown = capfd.readouterr().out
    assert "\x1b" not in shown
    begun = re.findall(r"^\[\d+:\d\d\] (.+): starting$", shown, re.MULTILINE)
    assert [title[0] for title in begun] == ["A", "B", "C", "D", "p", "p"]
    assert shown.count(": loading the model\n") == shown.count(": generating\n") == len(begun)
    titles = ("A cold", "B warm", "C part shared", "D restarted")
    rows = {title: re.search(rf"│ {re.escape(title)} +│(.*)", shown) for title in titles}
    for title, row in rows.items():
        assert row, f"no row {title!r} in:\n{shown}"
        assert row[1].split("│")[-2].strip() == "yes"
    a, b, c, d = ([int(cell.replace(",", "")) for cell in row[1].split("│")[:3]] for row in rows.values())
    assert a[1] == 0
    assert a[2] == a[0]
    assert 0 < c[1] < c[0]
    assert b[0] == a[0]
    assert b[1] + b[2] == b[0]
    assert b[2] < 40
    assert d == b
    assert re.search(r"│ restart +│ +│ +│ +│ +[\d,.]+ m?s │", shown)
    assert re.search(r"kvprefix_hits +│ +2 │ +1 │", shown)
    assert re.search(r"kvprefix_misses +│ +1 │ +0 │", shown)
    measured = re.search(r"avoided_measured +│ +([\d.]+) │ +([\d.]+) │", shown)
    assert float(measured[1]) > 0 == float(measured[2]), "what the line below the receipt explains"
    assert "An estimate counts 555 us" in shown


def test_nothing_is_left_of_the_data(monkeypatch, tmp_path, capfd):
    folders = []

    def run(teller, title, job):
        folders.append([path.name for path in tmp_path.glob("pion-demo-*/*")])
        return {"tokens": [1], "splits": [1], "ttft_s": 1.0, "text": "",
                "prompt_tokens": 3, "restored": 0, "evaluated": 3}  # fmt: skip

    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert demo.main(["--model", "any"]) == 0
    assert "pion.vstore.0.log.0000000001" in folders[0]
    assert "pion.vstore.0.log.0000000002" in folders[3], "the second server goes on in the same directory"
    assert list(tmp_path.iterdir()) == []


def test_answers_that_differ_are_a_failure(monkeypatch, capfd):
    def run(teller, title, job):
        return {"tokens": [1, 2 if job["mode"] == "reference" else 3], "splits": [1], "ttft_s": 1.0, "text": "",
                "prompt_tokens": 3, "restored": 0, "evaluated": 3}  # fmt: skip

    monkeypatch.setattr(demo, "run", run)
    assert demo.main(["--model", "any"]) == demo.EXIT_DISAGREE == 1
    shown = capfd.readouterr()
    assert "NO" in shown.out
    assert "FAILED: the tokens of A cold, B warm, C part shared, D restarted differ" in shown.err


def test_one_answer_that_differs_is_enough(monkeypatch, capfd):
    def run(teller, title, job):
        return {"tokens": [1, 3 if title.startswith("C") else 2], "splits": [1], "ttft_s": 1.0, "text": "",
                "prompt_tokens": 3, "restored": 0, "evaluated": 3}  # fmt: skip

    monkeypatch.setattr(demo, "run", run)
    assert demo.main(["--model", "any"]) == 1
    assert "FAILED: the tokens of C part shared differ" in capfd.readouterr().err


@pytest.fixture
def worker_that(tmp_path, monkeypatch):
    """Puts a program in the place of the demo's worker process and runs it as the demo does."""

    def use(program):
        (tmp_path / "odd_worker.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(demo, "WORKER", "odd_worker")
        with telling(Console()) as teller:
            return demo.run(teller, "A cold", {"question": "x" * 200_000})

    return use


def test_a_worker_that_writes_much_and_reads_late_is_no_deadlock(worker_that):
    result = worker_that(
        "import json, sys\n"
        "sys.stderr.write('a warning\\n' * 50_000)\n"
        "print('a library greets')\nprint('[1]')\nprint('{\"event\": \"other\"}')\n"
        "job = json.load(sys.stdin)\n"
        "print(json.dumps({'event': 'result', 'ttft_s': 1.0, 'length': len(job['question'])}))\n"
    )
    assert result["length"] == 200_000


def test_a_worker_that_fails_is_quoted(worker_that):
    with pytest.raises(demo.WorkerError, match="A cold: ValueError: no such model"):
        worker_that("import sys\nsys.stderr.write('x\\n' * 50_000)\nraise ValueError('no such model')\n")


def test_a_model_that_cannot_be_loaded_is_said_so(tmp_path, capfd):
    assert demo.main(["--model", str(tmp_path)]) == demo.EXIT_MISSING
    assert "A cold" in capfd.readouterr().out


def test_stopping_it_is_no_traceback(monkeypatch, tmp_path, capfd):
    def run(teller, title, job):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert demo.main(["--model", "any"]) == demo.EXIT_STOPPED == 130
    assert capfd.readouterr().out.endswith("Stopped. Nothing is left running, and the data is removed.\n")
    assert list(tmp_path.iterdir()) == []


def test_a_worker_ends_with_the_demo(worker_that, monkeypatch):
    said = []

    def stop(event):
        said.append(event)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_event", lambda line: stop(int(line)))
    with pytest.raises(KeyboardInterrupt):
        worker_that("import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n")
    with pytest.raises(ProcessLookupError):
        os.kill(said[0], 0)


def test_an_error_may_look_like_markup(worker_that, capfd, monkeypatch):
    def run_all(console, teller, model, options):
        raise demo.WorkerError("A cold: no [/layer] in [config]")

    monkeypatch.setattr(demo, "run_all", run_all)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert demo.main(["--model", "any"]) == demo.EXIT_MISSING
    assert "A cold: no [/layer] in [config]" in capfd.readouterr().out


QUIET = {"plain A, B, D": 4.0, "plain C": 9.0, "A cold": 4.0, "B warm": 1.0, "C part shared": 7.0, "D restarted": 1.0}


@pytest.mark.parametrize(
    ("busy", "said"),
    [
        ({"A cold": 6.8}, "A cold and plain A, B, D compute the same prompt, and took 6,800 ms and 4,000 ms: 1.7 x"),
        ({"plain A, B, D": 6.8}, "and took 4,000 ms and 6,800 ms: 1.7 x apart. So"),
        ({"D restarted": 2.1}, "D restarted and B warm fetch the same rows, and took 2,100 ms and 1,000 ms: 2.1 x"),
        ({"B warm": 12.0, "A cold": 6.0}, "1.5 x apart. D restarted and B warm fetch"),
    ],
)  # fmt: skip
def test_two_runs_of_the_same_work_that_differ_are_called_noise(busy, said):
    note = demo.noise(QUIET | busy)
    assert said in note
    assert note.count("this machine was busy") == 1


@pytest.mark.parametrize("same", [{"A cold": 5.0}, {"A cold": 3.2}, {"B warm": 2.0}, {"D restarted": 2.0}])
def test_those_that_do_not_are_not(same):
    assert demo.noise(QUIET | same) == ""


@pytest.mark.parametrize("cold_s", [1.2, 1.5])
def test_the_table_is_followed_by_what_is_noise(monkeypatch, capfd, cold_s):
    def run(teller, title, job):
        return {"tokens": [1], "splits": [1], "ttft_s": cold_s if title.startswith("A cold") else 1.0, "text": "",
                "prompt_tokens": 3, "restored": 0, "evaluated": 3}  # fmt: skip

    monkeypatch.setattr(demo, "run", run)
    assert demo.main(["--model", "any"]) == 0
    shown = capfd.readouterr().out
    table, _, below = shown.partition("D restarted")
    assert "apart" not in table
    assert ("A cold and plain A, B, D compute the same prompt" in below) == (cold_s > 1.25)
    assert "An estimate counts" not in shown, "nothing was served"


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
