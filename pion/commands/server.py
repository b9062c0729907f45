"""The server as a whole: INFO, CONFIG, COMMAND, MEMORY, the slow log, time, shutdown.

These follow Redis, so that its clients and monitoring tools work. Where Pion has nothing to report, the answer is
empty, never made up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pion.args import word
from pion.command import Arg, ArgType, Command, Flag
from pion.commands.checks import refuse_in_transaction, syntax_error
from pion.commands.command_table import COMMAND_COMMANDS
from pion.commands.config_commands import CONFIG_COMMANDS
from pion.commands.help import help_row
from pion.commands.info import INFO_COMMANDS
from pion.commands.info_sections import sections, start
from pion.commands.memory import MEMORY_COMMANDS
from pion.commands.modules import modules
from pion.commands.slowlog import SLOWLOG_COMMANDS
from pion.config import Config
from pion.context import Context, InfoSection, Services
from pion.errors import CommandError
from pion.hookspecs import hookimpl
from pion.replies import NO_REPLY, Buffer, Reply


async def dbsize(context: Context, argv: list[Buffer]) -> Reply:
    """The number of string and hash keys."""
    # Prefixes and sessions are not keys: they have their own lists and counts.
    return 0


async def time(context: Context, argv: list[Buffer]) -> Reply:
    """Wall time in seconds and microseconds."""
    microseconds = int(context.services.clock.wall_s() * 1e6)
    return [b"%d" % (microseconds // 1_000_000), b"%d" % (microseconds % 1_000_000)]


async def shutdown(context: Context, argv: list[Buffer]) -> Reply:
    """Ask the server to stop, and close this connection."""
    refuse_in_transaction(context)
    options = [word(arg) for arg in argv[1:]]
    if set(options) - {b"NOSAVE", b"SAVE", b"NOW", b"FORCE", b"ABORT"}:
        raise syntax_error()
    if b"ABORT" in options:
        if len(options) > 1:
            raise syntax_error()
        raise CommandError("No shutdown in progress.")
    if b"SAVE" in options:
        if b"NOSAVE" in options:
            raise syntax_error()
        if context.services.data is None:
            raise CommandError("SHUTDOWN SAVE: this server keeps everything in memory and has no file to save to")
    context.services.save_at_end = b"NOSAVE" not in options
    context.session.closing = True
    context.services.request_shutdown(b"NOW" in options)
    # As in Redis, the closed connection is the answer.
    return NO_REPLY


async def latency_latest(context: Context, argv: list[Buffer]) -> Reply:
    """No events, so no samples."""
    return []


async def latency_history(context: Context, argv: list[Buffer]) -> Reply:
    """No events, so no samples."""
    return []


async def latency_reset(context: Context, argv: list[Buffer]) -> Reply:
    """No events, so none were forgotten."""
    return 0


async def module_list(context: Context, argv: list[Buffer]) -> Reply:
    """The plugins that brought commands."""
    return modules(context.services.registry)


@hookimpl
def register_commands(config: Config) -> Sequence[Command]:
    """This family's rows."""
    return (*COMMANDS, *COMMAND_COMMANDS, *CONFIG_COMMANDS, *INFO_COMMANDS, *MEMORY_COMMANDS, *SLOWLOG_COMMANDS)


@hookimpl
def startup(services: Services) -> None:
    """Give this run its id."""
    start(services)


@hookimpl
def register_info(services: Services) -> Sequence[InfoSection]:
    """Every section of INFO that no other family owns."""
    return sections(services)


COMMANDS: Final = (
    Command(
        name="DBSIZE",
        arity=1,
        summary="The number of string and hash keys. Prefixes and V-store sessions are not keys.",
        since="0.1.0",
        handler=dbsize,
        flags=Flag.READONLY | Flag.FAST,
        reply="Integer: 0, since this version has no such keys.",
        group="server",
    ),
    Command(
        name="TIME",
        arity=1,
        summary="The server's wall time.",
        since="0.1.0",
        handler=time,
        flags=Flag.FAST,
        reply="Array of two bulk strings: Unix time in seconds, and the microseconds in that second.",
        group="server",
    ),
    Command(
        name="SHUTDOWN",
        arity=-1,
        summary="Stops the server: no new connections, requests under way get the grace time.",
        since="0.1.0",
        handler=shutdown,
        flags=Flag.ADMIN | Flag.NO_MULTI,
        args=(
            Arg(
                name="save-selector",
                type=ArgType.ONEOF,
                optional=True,
                summary="whether to take a last snapshot; SAVE is the default, and refused without a data directory",
                args=(
                    Arg(name="nosave", type=ArgType.PURE_TOKEN, token="NOSAVE"),
                    Arg(name="save", type=ArgType.PURE_TOKEN, token="SAVE"),
                ),
            ),
            Arg(name="now", type=ArgType.PURE_TOKEN, token="NOW", optional=True, summary="don't wait for requests"),
            Arg(name="force", type=ArgType.PURE_TOKEN, token="FORCE", optional=True, summary="accepted"),
            Arg(name="abort", type=ArgType.PURE_TOKEN, token="ABORT", optional=True, summary="too late once it began"),
        ),
        reply="None: the connection closes.",
        complexity="O(N) with N connections",
        group="server",
        errors=("`ERR SHUTDOWN SAVE: ...`", "`ERR No shutdown in progress.`: always the answer to `ABORT`"),
    ),
    Command(
        name="LATENCY",
        arity=-2,
        summary="A container for commands about latency events. Pion records none; the slow log shows what was slow.",
        since="0.1.0",
        group="server",
    ),
    Command(
        name="LATENCY LATEST",
        arity=2,
        summary="The newest sample of each event: none are recorded.",
        since="0.1.0",
        handler=latency_latest,
        flags=Flag.ADMIN,
        reply="Empty array.",
        group="server",
    ),
    Command(
        name="LATENCY HISTORY",
        arity=3,
        summary="The samples of one event: none are recorded.",
        since="0.1.0",
        handler=latency_history,
        flags=Flag.ADMIN,
        args=(Arg(name="event"),),
        reply="Empty array.",
        group="server",
    ),
    Command(
        name="LATENCY RESET",
        arity=-2,
        summary="Forgets the samples of the events.",
        since="0.1.0",
        handler=latency_reset,
        flags=Flag.ADMIN,
        args=(Arg(name="event", optional=True, multiple=True),),
        reply="Integer: how many events were forgotten, 0.",
        group="server",
    ),
    help_row("LATENCY", "server"),
    Command(
        name="MODULE",
        arity=-2,
        summary="A container for commands about modules, which are Pion's plugins.",
        since="0.1.0",
        group="server",
    ),
    Command(
        name="MODULE LIST",
        arity=2,
        summary="The loaded plugins that brought commands. Plugins are chosen at the start, with `--plugins`.",
        since="0.1.0",
        handler=module_list,
        flags=Flag.ADMIN,
        reply="Array of maps: `name`, and `ver`, which is always 1.",
        complexity="O(N) with N commands",
        group="server",
    ),
    help_row("MODULE", "server"),
)
