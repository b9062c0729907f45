"""COMMAND: the command table as clients read it, in Redis 7's shapes.

Everything here is made from the rows of the registry. What Redis writes as a set is an array here: clients take both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

from pion.args import show, word
from pion.command import Arg, ArgType, Command, Flag
from pion.commands.checks import Turn, pattern_text, refuse_too_many, syntax_error
from pion.commands.command_docs import documentation, wire_name
from pion.commands.help import help_row
from pion.context import Context, Services
from pion.errors import CommandError
from pion.registry import Registry
from pion.replies import Buffer, Map, Reply, Simple, Static
from pion.storage.glob import Glob

STATE: Final = "server.command_table"
"""Where `services.state` keeps the rows."""

_FLAG_WORDS: Final = {
    Flag.READONLY: "readonly",
    Flag.WRITE: "write",
    Flag.DENYOOM: "denyoom",
    Flag.ADMIN: "admin",
    Flag.FAST: "fast",
    Flag.BLOCKING: "blocking",
    Flag.NO_AUTH: "no_auth",
    Flag.NO_MULTI: "no_multi",
}


def categories(row: Command) -> list[str]:
    """The ACL categories that Redis would give a command with these flags and group."""
    found = ["@fast" if Flag.FAST in row.flags else "@slow"]
    if Flag.READONLY in row.flags:
        found.append("@read")
    if Flag.WRITE in row.flags:
        found.append("@write")
    if Flag.BLOCKING in row.flags:
        found.append("@blocking")
    if Flag.ADMIN in row.flags:
        found += ["@admin", "@dangerous"]
    if row.group in ("connection", "transactions"):
        found.append("@" + row.group.removesuffix("s"))
    return found


def describe(registry: Registry, row: Command) -> list[Reply]:
    """The ten elements of one command in COMMAND and COMMAND INFO."""
    keys = row.keys
    return [
        wire_name(row),
        row.arity,
        [Simple(text) for flag, text in _FLAG_WORDS.items() if flag in row.flags],
        keys.first if keys else 0,
        keys.last if keys else 0,
        keys.step if keys else 0,
        [Simple(category) for category in categories(row)],
        [],
        [_key_spec(row)] if keys else [],
        [describe(registry, sub) for sub in registry.subcommands(row.name.upper())],
    ]


def _key_spec(row: Command) -> Map:
    keys = row.keys
    assert keys is not None  # noqa: S101  the caller checked
    # In a key spec the last key counts from the first one, unless it counts from the end.
    last = keys.last if keys.last < 0 else keys.last - keys.first
    access = [Simple("RO" if Flag.READONLY in row.flags else "RW"), Simple("access")]
    begin = Map([("type", "index"), ("spec", Map([("index", keys.first)]))])
    find = Map([("type", "range"), ("spec", Map([("lastkey", last), ("keystep", keys.step), ("limit", 0)]))])
    return Map([("flags", access), ("begin_search", begin), ("find_keys", find)])


@attrs.frozen
class _Rows:
    """What COMMAND shows of one server's rows, each made once; `Static` so that it is encoded once, too."""

    by_name: dict[str, Static] = attrs.field(factory=dict)
    documentation: dict[str, Static] = attrs.field(factory=dict)


def _rows(services: Services) -> _Rows:
    rows: _Rows | None = services.state.get(STATE)
    if rows is None:
        rows = services.state[STATE] = _Rows()
    return rows


def _row(services: Services, row: Command) -> Static:
    known = _rows(services).by_name
    if row.name not in known:
        known[row.name] = Static(describe(services.registry, row))
    return known[row.name]


async def _described(services: Services, rows: Iterable[Command | None]) -> list[Reply]:
    turn = Turn()
    found: list[Reply] = []
    for row in rows:
        found.append(None if row is None else _row(services, row))
        await turn.pause()
    return found


def _documented(services: Services, row: Command) -> Static:
    known = _rows(services).documentation
    if row.name not in known:
        known[row.name] = Static(documentation(services.registry, row))
    return known[row.name]


def _whole_commands(registry: Registry) -> list[Command]:
    return [row for row in registry if row.container is None]


def _lookup(registry: Registry, name: Buffer) -> Command | None:
    """A row by the name clients use: `get`, or `client|list`."""
    return registry.get(bytes(name[:256]).decode("utf-8", "replace").upper().replace("|", " "))


async def command(context: Context, argv: list[Buffer]) -> Reply:
    """Every row of the table."""
    if len(argv) > 1:
        raise CommandError(f"unknown subcommand {show(argv[1])}. Try COMMAND HELP.")
    return await _described(context.services, _whole_commands(context.services.registry))


async def command_count(context: Context, argv: list[Buffer]) -> Reply:
    """How many commands there are, without subcommands."""
    return len(_whole_commands(context.services.registry))


async def command_info(context: Context, argv: list[Buffer]) -> Reply:
    """The rows of the named commands, null for what is none."""
    refuse_too_many(argv[2:], "names")
    services = context.services
    registry = services.registry
    rows: Iterable[Command | None] = (
        [_lookup(registry, name) for name in argv[2:]] if len(argv) > 2 else _whole_commands(registry)
    )
    return await _described(services, rows)


async def command_docs(context: Context, argv: list[Buffer]) -> Reply:
    """The documentation of the named commands; what is none is left out."""
    refuse_too_many(argv[2:], "names")
    services = context.services
    registry = services.registry
    found = (_lookup(registry, name) for name in argv[2:]) if len(argv) > 2 else _whole_commands(registry)
    turn = Turn()
    pairs: dict[str, Static] = {}
    for row in found:
        if row is not None and wire_name(row) not in pairs:
            pairs[wire_name(row)] = _documented(services, row)
            await turn.pause()
    return Map(list(pairs.items()))


async def command_list(context: Context, argv: list[Buffer]) -> Reply:
    """Names, all or filtered."""
    registry = context.services.registry
    if len(argv) == 2:
        return [wire_name(row) for row in registry]
    if len(argv) != 5 or word(argv[2]) != b"FILTERBY":
        raise syntax_error()
    kind, value = word(argv[3]), pattern_text(argv[4])
    if kind == b"PATTERN":
        glob = Glob(value.lower())
        return [name for row in registry if glob.matches((name := wire_name(row)).encode())]
    if kind == b"MODULE":
        return [wire_name(row) for row in registry if registry.origin(row).encode() == value]
    if kind == b"ACLCAT":
        category = "@" + value.decode("utf-8", "replace").lower()
        return [wire_name(row) for row in registry if category in categories(row)]
    raise syntax_error()


async def command_getkeys(context: Context, argv: list[Buffer]) -> Reply:
    """The names that a request holds, by the row's key positions."""
    request = argv[2:]
    registry = context.services.registry
    row = _lookup(registry, request[0])
    if row is not None and len(request) > 1:
        row = registry.get(f"{row.name.upper()} {word(request[1]).decode('utf-8', 'replace')}") or row
    if row is None:
        raise CommandError("Invalid command specified")
    if row.keys is None:
        raise CommandError("The command has no key arguments")
    if len(request) < abs(row.arity) or (0 < row.arity != len(request)):
        raise CommandError("Invalid number of arguments specified for command")
    last = row.keys.last if row.keys.last >= 0 else len(request) + row.keys.last
    return list(request[row.keys.first : last + 1 : row.keys.step])


_NAMES: Final = (Arg(name="command-name", optional=True, multiple=True, summary="`get`, or `client|list`"),)

COMMAND_COMMANDS: Final = (
    Command(
        name="COMMAND",
        arity=-1,
        summary="The command table: for each command its name, arity, flags, key positions and subcommands.",
        since="0.1.0",
        handler=command,
        reply="Array of arrays, as in Redis 7.",
        complexity="O(N) with N commands",
        group="server",
    ),
    Command(
        name="COMMAND COUNT",
        arity=2,
        summary="How many commands there are, subcommands not counted.",
        since="0.1.0",
        handler=command_count,
        reply="Integer.",
        complexity="O(N) with N commands",
        group="server",
    ),
    Command(
        name="COMMAND INFO",
        arity=-2,
        summary="The rows of the command table for the named commands, or for all.",
        since="0.1.0",
        handler=command_info,
        args=_NAMES,
        reply="Array; null for a name that is no command.",
        complexity="O(N) with N commands",
        group="server",
        examples=("> COMMAND INFO ping client|list",),
    ),
    Command(
        name="COMMAND DOCS",
        arity=-2,
        summary="What the named commands do and take, or all; redis-cli shows its hints from it.",
        since="0.1.0",
        handler=command_docs,
        args=_NAMES,
        reply="Map of name to a map with `summary`, `since`, `group`, `complexity`, `arguments` and `subcommands`.",
        complexity="O(N) with N commands",
        group="server",
    ),
    Command(
        name="COMMAND LIST",
        arity=-2,
        summary="The names of all commands and subcommands, or of some.",
        since="0.1.0",
        handler=command_list,
        args=(
            Arg(
                name="filterby",
                type=ArgType.ONEOF,
                token="FILTERBY",
                optional=True,
                args=(
                    Arg(name="module-name", token="MODULE", summary="a plugin"),
                    Arg(name="category", token="ACLCAT", summary="`read`, `write`, `admin`, `fast`, `connection` ..."),
                    Arg(name="pattern", type=ArgType.PATTERN, token="PATTERN", summary="a glob such as `kv.*`"),
                ),
            ),
        ),
        reply="Array of names.",
        complexity="O(N) with N commands",
        group="server",
    ),
    Command(
        name="COMMAND GETKEYS",
        arity=-3,
        summary="Which arguments of a request are names of prefixes, sessions or keys.",
        since="0.1.0",
        handler=command_getkeys,
        args=(Arg(name="command"), Arg(name="arg", optional=True, multiple=True)),
        reply="Array of bulk strings.",
        complexity="O(N) with N arguments",
        group="server",
        errors=("`ERR Invalid command specified`", "`ERR The command has no key arguments`"),
    ),
    help_row("COMMAND", "server"),
)
