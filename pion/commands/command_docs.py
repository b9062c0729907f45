"""COMMAND DOCS: one row of the command table as the nested maps that redis-cli and client generators read."""

from __future__ import annotations

from pion.command import Arg, ArgType, Command
from pion.registry import Registry
from pion.replies import Map, Simple


def wire_name(row: Command) -> str:
    """The name as clients write it: lower case, a subcommand after a bar."""
    return row.name.lower().replace(" ", "|")


def documentation(registry: Registry, row: Command) -> Map:
    """The map of one command. `group` is the row's own, or the plugin's name."""
    pairs: list[tuple[object, object]] = [
        ("summary", row.summary),
        ("since", row.since),
        ("group", row.group or registry.origin(row)),
        ("complexity", row.complexity),
    ]
    if row.args:
        pairs.append(("arguments", [_argument(arg, row) for arg in row.args]))
    subcommands = registry.subcommands(row.name.upper())
    if subcommands:
        pairs.append(("subcommands", Map([(wire_name(sub), documentation(registry, sub)) for sub in subcommands])))
    return Map(pairs)


def _argument(arg: Arg, row: Command) -> Map:
    pairs: list[tuple[object, object]] = [("name", arg.name), ("type", arg.type.value)]
    if arg.type not in (ArgType.ONEOF, ArgType.BLOCK):
        # redis-cli 7.2 and later show this text; 7.0 shows the name.
        pairs.append(("display_text", arg.name))
    if arg.type is ArgType.KEY and row.keys is not None:
        pairs.append(("key_spec_index", 0))
    if arg.token is not None:
        pairs.append(("token", arg.token))
    if arg.summary:
        pairs.append(("summary", arg.summary))
    flags = [word for word, is_set in (("optional", arg.optional), ("multiple", arg.multiple)) if is_set]
    if flags:
        pairs.append(("flags", [Simple(flag) for flag in flags]))
    if arg.args:
        pairs.append(("arguments", [_argument(part, row) for part in arg.args]))
    return Map(pairs)
