"""SLOWLOG: the commands that held the worker longest."""

from __future__ import annotations

import re
from typing import Final

from pion.command import Arg, ArgType, Command, Flag
from pion.commands.help import help_row
from pion.context import Context
from pion.errors import CommandError
from pion.replies import OK, Buffer, Reply

DEFAULT_COUNT: Final = 10
_COUNT: Final = re.compile(rb"-1|[0-9]{1,18}")


async def slowlog_get(context: Context, argv: list[Buffer]) -> Reply:
    """The newest entries."""
    count = DEFAULT_COUNT
    if len(argv) > 3:
        raise CommandError("unknown subcommand or wrong number of arguments for 'GET'. Try SLOWLOG HELP.")
    if len(argv) > 2:
        if _COUNT.fullmatch(argv[2]) is None:
            raise CommandError("count should be greater than or equal to -1")
        count = int(bytes(argv[2]))
    return [
        [entry.id, entry.at_s, entry.duration_us, list(entry.argv), entry.addr, entry.client_name]
        for entry in context.services.monitor.slow(count)
    ]


async def slowlog_len(context: Context, argv: list[Buffer]) -> Reply:
    """How many entries there are."""
    return context.services.monitor.slow_len()


async def slowlog_reset(context: Context, argv: list[Buffer]) -> Reply:
    """Forget all entries."""
    context.services.monitor.reset_slow()
    return OK


SLOWLOG_COMMANDS: Final = (
    Command(
        name="SLOWLOG",
        arity=-2,
        summary="A container for commands about slow commands.",
        since="0.1.0",
        group="server",
    ),
    Command(
        name="SLOWLOG GET",
        arity=-2,
        summary="The newest slow commands, with arguments cut to 128 bytes. Passwords are never in it.",
        since="0.1.0",
        handler=slowlog_get,
        flags=Flag.ADMIN,
        args=(Arg(name="count", type=ArgType.INTEGER, optional=True, summary="default 10; -1 for all"),),
        reply="Array of [id, Unix time in s, duration in us, arguments, client address, client name].",
        complexity="O(N) with N entries returned",
        group="server",
        errors=("`ERR count should be greater than or equal to -1`",),
    ),
    Command(
        name="SLOWLOG LEN",
        arity=2,
        summary="How many entries are kept.",
        since="0.1.0",
        handler=slowlog_len,
        flags=Flag.ADMIN,
        reply="Integer.",
        group="server",
    ),
    Command(
        name="SLOWLOG RESET",
        arity=2,
        summary="Forgets the entries; their ids go on counting.",
        since="0.1.0",
        handler=slowlog_reset,
        flags=Flag.ADMIN,
        reply="`OK`",
        complexity="O(N) with N entries",
        group="server",
    ),
    help_row("SLOWLOG", "server"),
)
