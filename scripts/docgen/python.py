"""The pages of the Python APIs, from signatures and docstrings."""

from __future__ import annotations

import ast
import enum
import inspect
import textwrap
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import attrs

import pion
import pion.client
import pion.client.aio
from docgen.markdown import cell, code_cell, paragraphs
from pion import testing
from pion.client.attend import AttendMethods
from pion.config import Config


def api_page() -> str:
    """Every name of `pion.__all__`."""
    lines = [
        "# Python API for plugins",
        "",
        "`import pion` gives everything a plugin needs. What is listed here is stable; other modules of the package "
        "are not for use from outside, except [`pion.testing`](testing.md) and [`pion.client`](client.md).",
        "",
    ]
    for name in sorted(pion.__all__, key=str.lower):
        value = getattr(pion, name)
        lines += [f"## {name} {{ #{name.lower().strip('_')} }}", ""]
        lines += [*api_entry(name, value), ""]
    return "\n".join(lines)


VALUE_MEANINGS = {
    "NO_REPLY": "Return this from a handler to send nothing.",
    "OK": "The simple string `OK`.",
    "Buffer": "What arguments and blobs are: `bytes`, or a `memoryview` for a large payload.",
    "Reply": "The type of what a handler may return; see [Replies](replies.md).",
    "__version__": "The version, a string.",
    "hookimpl": "Marks a function of a plugin as the implementation of the hook of the same name.",
}


def client_page() -> str:
    """`pion.client`: the clients, the records and the errors."""
    lines = ["# Python client", "", *paragraphs(inspect.getdoc(pion.client) or ""), ""]
    lines += class_section("PionClient", pion.client.PionClient)
    lines += ["## Attention", "", *paragraphs(inspect.getdoc(AttendMethods) or ""), ""]
    lines += ["## pion.client.aio", "", *paragraphs(inspect.getdoc(pion.client.aio) or ""), ""]
    for name in pion.client.__all__:
        value = getattr(pion.client, name)
        if isinstance(value, type) and name != "PionClient":
            lines += class_section(name, value)
    lines += ["## Errors", "", *paragraphs(inspect.getdoc(pion.client.errors) or ""), ""]
    return "\n".join(lines)


def testing_page() -> str:
    """`pion.testing`: helpers for tests of plugins."""
    lines = ["# Testing", "", *paragraphs(inspect.getdoc(testing) or ""), ""]
    for name, value in vars(testing).items():
        if not getattr(value, "__module__", "").startswith("pion.testing.") or name.startswith("_"):
            continue
        if isinstance(value, type):
            lines += class_section(name, value)
        elif callable(value):
            shown = f"{name}{signature(value)}"
            lines += [f"## {name}", "", "```python", shown, "```", "", *paragraphs(inspect.getdoc(value) or ""), ""]
    return "\n".join(lines)


def prompt_cache_page() -> str:
    """`pion_vllm_mlx`. Imported here only: it loads MLX."""
    import pion_vllm_mlx

    lines = ["# Prompt cache for mlx-lm", "", *paragraphs(inspect.getdoc(pion_vllm_mlx) or ""), ""]
    for name in pion_vllm_mlx.__all__:
        lines += class_section(name, getattr(pion_vllm_mlx, name))
    return "\n".join(lines)


def class_section(name: str, value: type) -> list[str]:
    """A class under a heading of its own."""
    return [f"## {name}", "", *api_entry(name, value), ""]


def api_entry(name: str, value: object) -> list[str]:
    """Signature, docstring and public members of one name."""
    if name in VALUE_MEANINGS:
        return [VALUE_MEANINGS[name]]
    lines = paragraphs(inspect.getdoc(value) or "")
    if not isinstance(value, type):
        return lines
    notes = member_notes(value)
    if issubclass(value, enum.Enum):
        rows = [f"| `{member.name}` | {cell(notes.get(member.name, ''))} |" for member in value]
        return [*lines, "", "| value | |", "|---|---|", *rows]
    fields = {field.name: field.type for field in public_fields(value)} or documented_attributes(value, notes)
    rows = [
        f"| `{name}` | {code_cell(annotation(kind))} | {cell(notes.get(name, ''))} |" for name, kind in fields.items()
    ]
    if rows:
        lines += ["", "| field | type | |", "|---|---|---|", *rows]
    for member, function in members(value).items():
        if not member.startswith("_") and inspect.isfunction(function):
            prefix = "async " if inspect.iscoroutinefunction(function) else ""
            lines += ["", f"**`{prefix}{member}{signature(function)}`**", ""]
            lines += paragraphs(inspect.getdoc(function) or "")
        elif isinstance(function, staticmethod) and not member.startswith("_"):
            lines += ["", f"**`{member}{signature(function.__func__)}`** (static)", ""]
            lines += paragraphs(inspect.getdoc(function) or "")
        elif isinstance(function, property) and not member.startswith("_"):
            lines += ["", f"**`{member}`** (property)", "", *paragraphs(inspect.getdoc(function) or "")]
    return lines


def members(value: type) -> dict[str, object]:
    """What the class says, and behind it what the classes of ours say that it is put together from."""
    found = dict(vars(value))
    for each in value.__mro__[1:]:
        if each.__module__.startswith("pion"):
            for name, member in vars(each).items():
                found.setdefault(name, member)
    return found


class _Annotation(str):
    """An annotation that shows without quotes, as it stands in the source."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def signature(function: Callable[..., object]) -> str:
    """The signature as it stands in the source, where annotations are not strings."""
    found = inspect.signature(function)
    parameters = [
        each.replace(annotation=_Annotation(each.annotation)) if isinstance(each.annotation, str) else each
        for each in found.parameters.values()
    ]
    returns = found.return_annotation
    if isinstance(returns, str):
        returns = _Annotation(returns)
    return str(found.replace(parameters=parameters, return_annotation=returns))


def member_notes(value: type) -> dict[str, str]:
    """Field or enumeration member -> the string literal that follows it in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0].body  # type: ignore[attr-defined]
    notes = {}
    for member, note in pairwise(body):
        target = getattr(member, "target", None) or next(iter(getattr(member, "targets", [])), None)
        if isinstance(target, ast.Name) and isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant):
            notes[target.id] = inspect.cleandoc(str(note.value.value)).replace("\n", " ")
    return notes


def public_fields(value: type) -> list[attrs.Attribute[Any]]:
    """The fields of a record; an enumeration and a plain class have none."""
    if value is Config or not attrs.has(value):
        return []
    return [field for field in attrs.fields(value) if not field.name.startswith("_")]


def documented_attributes(value: type, notes: dict[str, str]) -> dict[str, object]:
    """What a plain class says of its instances' attributes: name -> type."""
    if attrs.has(value):
        return {}
    return {name: kind for name, kind in inspect.get_annotations(value).items() if name in notes}


def annotation(value: object) -> str:
    """A type as it is written in the source."""
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))
