"""The texts of the demo, and how they become tokens of any mlx-lm model."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any, Final

QUESTION: Final = "How many days do I have to send back a jacket that does not fit?"
OTHER_QUESTION: Final = "Which discount do we get when we order twelve tents?"

SHARED_UNTIL: Final = "Vouchers and club"
"""Process C's system prompt is the same as the others' up to this heading, and then goes on differently."""


def system_prompts(characters: int | None = None) -> tuple[str, str]:
    """The system prompt of processes A and B, about 1,250 tokens, and that of C.

    With `characters` only that much of the shared part and of each ending, for a quick look.
    """
    text, other = _read("system_prompt.txt"), _read("other_ending.txt")
    at = text.index(SHARED_UNTIL)
    shared, ending = text[:at][:characters], text[at:]
    return shared + ending[:characters], shared + other[:characters]


def _read(name: str) -> str:
    return resources.files("pion_vllm_mlx.demo").joinpath("data", name).read_text(encoding="utf-8")


def prompt_ids(tokenizer: Any, system: str, question: str) -> list[int]:
    """The chat as token ids, ready for the model's answer."""
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer.encode(f"{system}\n\nQuestion: {question}\nAnswer:"))
    render = functools.partial(tokenizer.apply_chat_template, add_generation_prompt=True)
    user = {"role": "user", "content": question}
    try:
        return list(render([{"role": "system", "content": system}, user]))
    except Exception as error:  # each template raises what it likes when it has no system role
        if "system" not in str(error).lower():
            raise
        return list(render([{"role": "user", "content": f"{system}\n\n{question}"}]))


def prefix_length(tokenizer: Any, system: str) -> int:
    """How many tokens every conversation with this system prompt begins with."""
    one, two = (prompt_ids(tokenizer, system, question) for question in ("Why?", "How much?"))
    common = 0
    while common < min(len(one), len(two)) and one[common] == two[common]:
        common += 1
    return common
