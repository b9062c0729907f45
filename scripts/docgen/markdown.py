"""Bits of Markdown."""

from __future__ import annotations

import inspect


def prose(text: str) -> str:
    """Text in which `<name>` outside of code is not taken for HTML."""
    parts = text.split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def cell(text: str) -> str:
    """Text that is safe inside a table."""
    return prose(text).replace("|", "\\|").replace("\n", " ")


def code_cell(text: str) -> str:
    """Code inside a table."""
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def paragraphs(text: str) -> list[str]:
    """A docstring as Markdown lines. It is written in Markdown but for an `Args:` list, which becomes one."""
    lines: list[str] = []
    in_args = False
    for line in text.splitlines():
        if line == "Args:":
            in_args = True
            lines += ["**Arguments**", ""]
        elif in_args and line.startswith("    ") and not line.startswith("     "):
            names, _, meaning = line.strip().partition(": ")
            lines.append(f"- `{names}`: {meaning}")
        elif in_args and line.startswith("     "):
            lines.append("    " + line.strip())
        else:
            in_args = in_args and not line.strip()
            lines.append(line)
    return lines


def first_paragraph(value: object) -> str:
    """What a class says about itself in one paragraph."""
    return inspect.cleandoc(getattr(value, "__doc__", "") or "").split("\n\n")[0]


def anchor(name: str) -> str:
    """The id that a command's heading gets: `KV.PREFIX.LOOKUP` -> `kv-prefix-lookup`."""
    return name.lower().replace(".", "-").replace(" ", "-").replace("_", "-")
