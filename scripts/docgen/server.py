"""The pages about the server itself: configuration, hooks, errors, replies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from docgen.markdown import cell, first_paragraph, paragraphs
from docgen.python import signature
from pion import errors, hookspecs, replies
from pion.config import fields, flag_name
from pion.options import GROUPS, environment_name, show_value


def configuration_page() -> str:
    """Every field of Config."""
    lines = [
        "# Configuration",
        "",
        "Every option can be given in three places. The command line wins over the environment, the environment over "
        "the file, the file over the default:",
        "",
        "- on the command line: `--max-bulk 64mb`",
        "- in the environment: `PION_MAX_BULK=64mb`",
        '- in a TOML file named with `--config pion.toml` (or `PION_CONFIG`): `max-bulk = "64mb"`',
        "",
        "Sizes take the suffixes `kb`, `mb` and `gb` (1,024 each). Yes-or-no options take `yes` or `no`. "
        "An option marked *live* can be changed on a running server with `CONFIG SET`.",
        "",
    ]
    for group, title in GROUPS.items():
        lines += [f"## {title[0].upper()}{title[1:]}", ""]
        for field in fields():
            if field.metadata["group"] == group:
                lines += option_section(field)
    return "\n".join(lines)


def option_section(field: attrs.Attribute[Any]) -> Iterator[str]:
    """One option: flag, variable, meaning, default, limits."""
    meta = field.metadata
    flag = flag_name(field)
    short = ", `-w`" if field.name == "workers" else ""
    yield from (f"### `--{flag}` {{ #{flag} }}", "", f"{meta['help'][0].upper()}{meta['help'][1:]}.", "")
    default = show_value(field, field.default)
    facts = [f"default: {f'`{default}`' if default else 'empty'}"]
    if meta["unit"] and meta["unit"] not in ("path", "list"):
        facts.append(f"unit: {meta['unit']}")
    if meta["choices"]:
        facts.append("one of " + ", ".join(f"`{choice}`" for choice in meta["choices"]))
    low, high = meta["low"], meta["high"]
    if low is not None:
        facts.append(f"at least `{show_value(field, low)}`")
    if high is not None:
        facts.append(f"at most `{show_value(field, high)}`")
    if meta["mutable"]:
        facts.append("*live*")
    yield from (f"`--{flag}`{short} · `{environment_name(field)}` · " + " · ".join(facts), "")


def hooks_page() -> str:
    """Every hook with its signature and docstring."""
    lines = [
        "# Hooks",
        "",
        *paragraphs(inspect.getdoc(hookspecs) or ""),
        "",
        "A plugin implements a hook with a function of the same name, decorated with `pion.hookimpl`. It may leave out "
        "arguments that it doesn't need. A hook that fails refuses the start, with an error that names the plugin. "
        "The order of calls is: built-in families, installed plugins by name, files of `--plugins-dir` by name.",
        "",
    ]
    for name, function in hooks().items():
        lines += [
            f"## {name} {{ #{name} }}",
            "",
            "```python",
            f"def {name}{signature(function)}",
            "```",
            "",
            *paragraphs(inspect.getdoc(function) or ""),
            "",
        ]
    return "\n".join(lines)


def hooks() -> dict[str, Callable[..., object]]:
    """Hook name -> its empty function in `pion.hookspecs`."""
    return {name: value for name, value in vars(hookspecs).items() if hasattr(value, "pion_spec")}


def errors_page() -> str:
    """Every error class with its wire code."""
    lines = [
        "# Errors",
        "",
        *paragraphs(inspect.getdoc(errors) or ""),
        "",
        "An error reply is one line: `-CODE text`. The text is for people and may change; the code is for programs and "
        "stays. A client that gets any error after a `+HIT` treats it as a miss.",
        "",
        "| code | class | status | when |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{error.code}` | `{name}` | {int(error.status)} | {cell(first_paragraph(error))} |"
        for name, error in error_classes().items()
    ]
    return "\n".join(lines) + "\n"


def error_classes() -> dict[str, type[errors.PionError]]:
    """Class name -> class of those that a client can see, in the order of `pion.errors`."""
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    seen = (errors.CommandError, errors.ProtocolError)
    return {value.__name__: value for value in found if issubclass(value, seen)}


def replies_page() -> str:
    """What a handler may return, from the table in `pion.replies`."""
    return "\n".join(["# Replies", "", *paragraphs(inspect.getdoc(replies) or ""), ""])
