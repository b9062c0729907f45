"""A long real text with a fact hidden in it: documentation of Python's own library, which every machine has."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

import attrs

from benchmarks._lib import prompts

SHORTEST = 200
"""Characters of the shortest docstring that is taken: one-liners are no text to read."""

BEFORE = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nRead this text.\n\n"
)
BEHIND = "\n\nWhat is the secret number of {}? Answer with the number.<|im_end|>\n<|im_start|>assistant\n"
FACT = "\nThe secret number of {} is {}."
"""The model's chat template: the text is the user's, and so is the question behind it."""

FACTS = (
    ("Oslo", 7421), ("Lima", 3958), ("Cairo", 6174), ("Delhi", 2803), ("Paris", 9316),
    ("Tokyo", 4567), ("Quito", 8042), ("Dakar", 1639), ("Perth", 5290), ("Riga", 3781),
)  # fmt: skip
"""One for each depth, so that no answer fits another question."""

Tokenize = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]


@attrs.frozen
class Hidden:
    """A text with a fact in it: its tokens, how many of them come before the fact, the question, the answer."""

    ids: list[int]
    before: int
    question: list[int]
    answer: str


class Haystack:
    """One text; shorter ones are its beginnings, so that their rows need computing once up to where a fact is put."""

    def __init__(self, encode: Tokenize, decode: Decode, tokens: int) -> None:
        self._encode, self._decode = encode, decode
        ids = encode(BEFORE)
        for text in docstrings():
            ids += encode(text + "\n\n")
            if len(ids) >= tokens:
                break
        else:
            raise LookupError(f"the documentation has {len(ids)} tokens, {tokens} are needed")
        self.ids = ids[:tokens]

    def hide(self, number: int, depth: float, tokens: int) -> Hidden:
        """The text's beginning with fact `number` at a share of its length, as a line of its own; `tokens` long."""
        name, secret = FACTS[number]
        fact = self._encode(FACT.format(name, secret))
        start = len(self._encode(BEFORE))
        before = start + round(depth * (tokens - len(fact) - start))
        while before > start and not self._decode(self.ids[before : before + 1]).startswith("\n"):
            before -= 1
        ids = (self.ids[:before] + fact + self.ids[before:])[:tokens]
        return Hidden(ids, before, self._encode(BEHIND.format(name)), str(secret))


def docstrings() -> Iterator[str]:
    """The longer docstrings of modules, classes and functions, in the order of their files."""
    for module in prompts.MODULES:
        for node in ast.walk(ast.parse(prompts.source(module))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= SHORTEST:
                    yield text
