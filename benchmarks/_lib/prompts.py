"""Real text for prompts: source files of Python's own library, as a code assistant has in its context."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

MODULES = (
    "argparse", "ast", "calendar", "codecs", "configparser", "contextlib", "csv", "dataclasses", "difflib", "enum",
    "fractions", "functools", "gettext", "heapq", "inspect", "ipaddress", "mailbox", "optparse", "pathlib", "pdb",
    "pickle", "random", "shutil", "statistics", "tarfile",
)  # fmt: skip
QUESTION = "\n\nWhat is this module for? Answer in one sentence:\n"

Encode = Callable[[str], Sequence[int]]


def source(module: str) -> str:
    """The text of a module of the standard library. Raises LookupError if this Python has no source for it."""
    library = Path(sysconfig.get_path("stdlib"))
    path = library / f"{module}.py"
    if not path.is_file():
        # Some became packages in newer versions, with most of their text in one file.
        inside = sorted((library / module).glob("*.py"), key=lambda file: file.stat().st_size)
        if not inside:
            raise LookupError(f"no source text of {module}")
        path = inside[-1]
    return path.read_text(encoding="utf-8")


def prefix(encode: Encode, module: str, tokens: int) -> list[int]:
    """The first `tokens` ids of a module's text. Raises LookupError if it has fewer."""
    ids = list(encode(f"You are an assistant for this code.\n\n# {module}\n" + source(module)[: tokens * 12]))
    if len(ids) < tokens:
        raise LookupError(f"{module} has {len(ids)} tokens, {tokens} are needed")
    return ids[:tokens]


def lengths(count: int, longest: int) -> list[int]:
    """Prefix lengths for `count` prompts: from an eighth of `longest` up to it, odd ones among them."""
    return [longest - number * (longest - longest // 8) // max(1, count - 1) for number in range(count)]
