"""The process of `needle` that has the model: it computes texts, stores them, and asks for the facts in them.

`python -m benchmarks._lib.searching JOB.json RESULT.json`. What it does is in `needle.py`'s METHOD.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from benchmarks._lib.haystack import Haystack, Hidden

PLAIN = "plain mlx-lm"


@attrs.frozen
class Arm:
    """A lane, and how many blocks of the text each head reads for a token of the answer; 0 for all rows."""

    lane: str
    top: int = 0
    question_too: bool = False
    """The question's tokens are evaluated one at a time, so that they read no more blocks either."""

    @property
    def name(self) -> str:
        """As it is reported."""
        if not self.top:
            return f"{self.lane}, dense"
        return f"{self.lane}, {self.top} blocks" + (", question too" if self.question_too else "")


def _arms(arms: Sequence[Arm | Mapping[str, Any]]) -> list[Arm]:
    return [arm if isinstance(arm, Arm) else Arm(**arm) for arm in arms]


@attrs.frozen(kw_only=True)
class Job:
    """What the process is told."""

    port: int
    depths: dict[str, list[int]]
    """Length of a text, as text, rising -> which of the ten depths; number i hides its fact at (i + 1/2) tenths."""

    block: int
    arms: list[Arm] = attrs.field(converter=_arms)
    """Those that would read all blocks of a text are left out for it."""

    tokens: int
    """Tokens of the longest answer."""


def search(job: Job, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Length -> arm -> the answers, each as (tokens, whether it has the fact), in the order of the depths."""
    from mlx_lm.models.cache import make_prompt_cache

    from benchmarks._lib import lanes
    from pion_vllm_mlx import SparseAuto

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def ask(hidden: Hidden, caches: Any, arm: Arm | None = None) -> tuple[list[int], bool]:
        taken = _answer(model, hidden.question, caches, job.tokens, tokenizer.eos_token_id, arm)
        return taken, hidden.answer in tokenizer.decode(taken)

    opened = {lane: lanes.Lane(model, lane, job.port) for lane in (lanes.IN_PROCESS, lanes.BINARY)}
    text = Haystack(encode, tokenizer.decode, max(int(length) for length in job.depths))
    computed = make_prompt_cache(model)
    found: dict[str, dict[str, list[tuple[list[int], bool]]]] = {}
    for length, depths in job.depths.items():
        lanes.extend(model, text.ids[computed[0].offset : int(length)], computed)
        arms = [arm for arm in job.arms if arm.top * job.block < int(length)]
        answers: dict[str, list[tuple[list[int], bool]]] = {PLAIN: [], **{arm.name: [] for arm in arms}}
        for number in depths:
            hidden = text.hide(number, (number + 0.5) / 10, int(length))
            caches = lanes.extend(model, hidden.ids[hidden.before :], lanes.beginning(computed, hidden.before))
            lanes.store(opened[lanes.IN_PROCESS].client, hidden.ids, caches)
            space = opened[lanes.IN_PROCESS].client.namespace(hidden.ids)
            answers[PLAIN].append(ask(hidden, caches))
            with lanes.patched():
                for arm in arms:
                    sparse = SparseAuto(job.block, arm.top) if arm.top else None
                    stored = opened[arm.lane].caches(space, len(hidden.ids), sparse)
                    answers[arm.name].append(ask(hidden, stored, arm))
            opened[lanes.IN_PROCESS].forget(hidden.ids)
        found[length] = answers
    return found


def _answer(model: Any, question: Sequence[int], caches: Any, count: int, end: int, arm: Arm | None) -> list[int]:
    """The greedy answer up to the end of the model's turn, at most `count` tokens."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    if arm is not None and arm.question_too:
        for token in question[:-1]:
            mx.eval(model(mx.array([[token]]), cache=caches))
        question = question[-1:]
    taken: list[int] = []
    for token, _ in generate_step(mx.array(question), model, prompt_cache=caches, max_tokens=count):
        if int(token) == end:
            break
        taken.append(int(token))
    return taken


def main() -> None:
    """Do the search."""
    from pion_vllm_mlx.demo_model import load_demo_model

    job_file, result_file = sys.argv[1:]
    job = Job(**json.loads(Path(job_file).read_text(encoding="utf-8")))
    found = search(job, *load_demo_model())
    Path(result_file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
