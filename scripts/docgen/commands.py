"""The pages of the command families, from the command table."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator

from docgen.markdown import anchor, cell, code_cell, paragraphs, prose
from pion.command import Arg, ArgType, Command, Flag
from pion.config import Config
from pion.plugins import BUILTIN_PLUGINS, KVCACHE_PLUGINS, make_plugin_manager, make_registry
from pion.registry import Registry


def builtin_registry() -> Registry:
    """The commands of the built-in families; installed plugins document themselves."""
    config = Config(plugins=",".join(BUILTIN_PLUGINS))
    return make_registry(make_plugin_manager(config), config)


def by_family(registry: Registry) -> dict[str, list[Command]]:
    """Family -> its rows in name order."""
    result: dict[str, list[Command]] = {}
    for row in sorted(registry, key=lambda row: row.name):
        result.setdefault(registry.origin(row), []).append(row)
    return {family: result[family] for family in BUILTIN_PLUGINS if family in result}


def commands_page(registry: Registry | None = None) -> str:
    """The index of all commands."""
    families = by_family(registry or builtin_registry())
    total = sum(row.handler is not None for rows in families.values() for row in rows)
    lines = [
        "# Commands",
        "",
        f"{total} commands in {len(families)} families. Names and option words may be written in either case. "
        "`pion commands` lists what a server on your machine would know, plugins included; "
        "`pion where COMMAND` shows where one is implemented.",
        "",
    ]
    for family, rows in families.items():
        loaded = "" if family in KVCACHE_PLUGINS else " (not loaded by `--kvcache`)"
        lines += [f"## {family}{loaded}", "", "| command | what it does |", "|---|---|"]
        for row in rows:
            if row.handler is not None:
                lines.append(f"| [{row.name}]({family}.md#{anchor(row.name)}) | {cell(row.summary)} |")
        lines.append("")
    return "\n".join(lines)


def family_page(family: str, rows: list[Command]) -> str:
    """Every command of one family."""
    module = sys.modules[BUILTIN_PLUGINS[family]]
    lines = [f"# {family}", "", *paragraphs(inspect.getdoc(module) or ""), ""]
    for row in rows:
        lines += command_section(row)
    return "\n".join(lines)


def command_section(row: Command) -> Iterator[str]:
    """One command: syntax, what it does, arguments, reply, errors, examples, facts."""
    yield from (f"## {row.name} {{ #{anchor(row.name)} }}", "", prose(row.summary), "")
    if row.handler is None:
        yield from ("A container: its subcommands follow.", "")
        return
    yield from ("```text", row.syntax(), "```", "")
    arguments = [pair for pair in flatten(row.args) if pair[1].summary]
    if arguments:
        yield from ("| argument | type | |", "|---|---|---|")
        lines = [f"| {code_cell(shown)} | {kind(each)} | {cell(each.summary)} |" for shown, each in arguments]
        yield from dict.fromkeys(lines)  # alternatives of a command often share an argument
        yield ""
    if row.reply:
        yield from (f"**Reply.** {prose(row.reply)}", "")
    if row.errors:
        yield from ("**Errors.**", "", *(f"- {error_line(error)}" for error in row.errors), "")
    if row.examples:
        yield from ("```text", *row.examples, "```", "")
    facts = [f"since {row.since}", row.complexity]
    facts += [flag.name.lower().replace("_", "-") for flag in Flag if flag in row.flags and flag.name]
    if row.replaces:
        facts.append(f"replaces the one of {row.replaces}")
    yield from (f"*{', '.join(facts)}*", "")


def error_line(text: str) -> str:
    """`-BUSY another connection ...` with the code set apart."""
    return re.sub(r"^-([A-Z]+)", r"`-\1`", prose(text))


def kind(argument: Arg) -> str:
    """The type of an argument in a word."""
    words = {ArgType.PURE_TOKEN: "word", ArgType.ONEOF: "one of", ArgType.BLOCK: "group"}
    return words.get(argument.type, argument.type.value)


def flatten(args: tuple[Arg, ...]) -> Iterator[tuple[str, Arg]]:
    """Every argument of a command, those inside options too, as (how it is written, argument)."""
    for argument in args:
        name = argument.name if argument.type is not ArgType.PURE_TOKEN else argument.token or argument.name
        shown = f"{argument.token} {name}" if argument.token and argument.token != name else name
        yield shown, argument
        yield from flatten(argument.args)
