"""CONFIG: the options of this server, and the settings that Redis's tools ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attrs

from pion.args import show
from pion.command import Arg, ArgType, Command, Flag
from pion.commands.checks import Turn, pattern_text, refuse_too_many, syntax_error
from pion.commands.help import help_row
from pion.config import Config, fields, flag_name
from pion.context import Context, Services
from pion.errors import CommandError, StartupError
from pion.options import parse_value
from pion.replies import OK, Buffer, Map, Reply
from pion.storage.glob import Glob

REDACTED: Final = "(redacted)"

_FIELDS: Final[dict[str, attrs.Attribute[Any]]] = {flag_name(field): field for field in fields()}

REDIS_SETTINGS: Final = {
    "appendonly": "no",
    "databases": "1",
    "maxmemory": "0",
    "save": "",
}
"""What redis-benchmark, exporters and client libraries ask for, answered as it is: no files, no byte limit."""


def settings(config: Config) -> Iterator[tuple[str, str]]:
    """Every name that CONFIG GET knows with its value, secrets masked."""
    for name, field in _FIELDS.items():
        value = getattr(config, field.name)
        yield name, REDACTED if value and field.metadata["secret"] else _show(value)
    yield "bind", config.host
    yield "unixsocket", config.unix
    yield "proto-max-bulk-len", str(config.max_bulk_bytes)
    yield from REDIS_SETTINGS.items()


def _show(value: object) -> str:
    """Plain numbers without units, as tools parse them: bytes, seconds, milliseconds, as the option's unit says."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value)


async def config_get(context: Context, argv: list[Buffer]) -> Reply:
    """Names and values that fit a pattern."""
    patterns = argv[2:]
    refuse_too_many(patterns, "patterns")
    known = dict(settings(context.services.config))
    wanted: set[str] = set()
    turn = Turn()
    for pattern in dict.fromkeys(pattern_text(pattern).lower() for pattern in patterns):
        glob = Glob(pattern)
        for name in known:
            if name not in wanted and glob.matches(name.encode()):
                wanted.add(name)
            await turn.pause()
    return Map([(name, value) for name, value in known.items() if name in wanted])


async def config_set(context: Context, argv: list[Buffer]) -> Reply:
    """Check every pair, then change all of them."""
    pairs = argv[2:]
    if len(pairs) % 2:
        raise syntax_error()
    refuse_too_many(pairs, "names and values")
    _hide_secrets(argv)
    services = context.services
    known = {name for name, _ in settings(services.config)}
    changes: dict[str, Any] = {}
    for raw_name, raw_value in zip(pairs[::2], pairs[1::2], strict=True):
        name = bytes(raw_name[:128]).decode("utf-8", "replace").lower()
        if name not in known:
            raise CommandError(f"Unknown option or number of arguments for CONFIG SET - {show(raw_name)}")
        field = _FIELDS.get(name)
        if field is None or not field.metadata["mutable"]:
            raise _failed(name, "can't set immutable config")
        if field.name in changes:
            raise _failed(name, "duplicate parameter")
        try:
            changes[field.name] = parse_value(field, bytes(raw_value[:256]).decode("utf-8", "replace"), "argument")
        except StartupError as error:
            raise _failed(name, str(error)) from error
    if "max_clients" in changes:
        _check_descriptors(services, changes["max_clients"])
    _apply(services, attrs.evolve(services.config, **changes))
    return OK


def _check_descriptors(services: Services, max_clients: int) -> None:
    """Refuse what the process has no file descriptors for, as Redis does.

    A `pion-server` process raises its own limit if it may; a server inside another program leaves the program's limit.
    """
    fitting = services.fit_clients(max_clients)
    if fitting < max_clients:
        raise _failed(
            "maxclients",
            f"The operating system is not able to handle the specified number of clients, try with {fitting}",
        )


def _hide_secrets(argv: list[Buffer]) -> None:
    """Keep what was meant to be a password out of the slow log, which is written from this list after the call."""
    for index in range(2, len(argv), 2):
        field = _FIELDS.get(bytes(argv[index][:128]).decode("utf-8", "replace").lower())
        if field is not None and field.metadata["secret"]:
            argv[index + 1] = REDACTED.encode()


def _failed(name: str, reason: str) -> CommandError:
    return CommandError(f"CONFIG SET failed (possibly related to argument '{name}') - {reason}")


def _apply(services: Services, config: Config) -> None:
    """Hand the new configuration to everyone who keeps one; all others read `services.config` at use."""
    services.config = config
    services.vstore.config = config
    services.monitor.configure(slower_than_us=config.slowlog_slower_than_us, max_len=config.slowlog_max_len)


async def config_resetstat(context: Context, argv: list[Buffer]) -> Reply:
    """Zero the counters of commands and errors."""
    context.services.monitor.reset_counters()
    return OK


CONFIG_COMMANDS: Final = (
    Command(
        name="CONFIG",
        arity=-2,
        summary="A container for commands about the configuration.",
        since="0.1.0",
        group="server",
    ),
    Command(
        name="CONFIG GET",
        arity=-3,
        summary="The options whose names fit one of the patterns. Passwords are masked.",
        since="0.1.0",
        handler=config_get,
        flags=Flag.ADMIN,
        args=(Arg(name="parameter", type=ArgType.PATTERN, multiple=True, summary="a flag's name, or a glob: `max*`"),),
        reply="Map of name to value; numbers have the unit of the option and no suffix.",
        complexity="O(N) with N options and patterns",
        group="server",
        examples=("> CONFIG GET maxclients", "1) maxclients", "2) 10000"),
    ),
    Command(
        name="CONFIG SET",
        arity=-4,
        summary="Changes options marked *live*, all of them or none.",
        since="0.1.0",
        handler=config_set,
        flags=Flag.ADMIN,
        args=(
            Arg(
                name="data",
                type=ArgType.BLOCK,
                multiple=True,
                args=(
                    Arg(name="parameter"),
                    Arg(name="value", summary="as on the command line"),
                ),
            ),
        ),
        reply="`OK`",
        complexity="O(N) with N options",
        group="server",
        errors=(
            "`ERR Unknown option or number of arguments for CONFIG SET - 'x'`",
            "`ERR CONFIG SET failed (possibly related to argument 'x') - ...`: not live, out of range, given twice",
        ),
        examples=("> CONFIG SET timeout 300 slowlog-max-len 1000", "OK"),
    ),
    Command(
        name="CONFIG RESETSTAT",
        arity=2,
        summary="Zeroes the counters of commands and errors. PION.STATS RESET is for the value receipt.",
        since="0.1.0",
        handler=config_resetstat,
        flags=Flag.ADMIN,
        reply="`OK`",
        complexity="O(N) with N commands",
        group="server",
    ),
    help_row("CONFIG", "server"),
)
