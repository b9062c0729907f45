"""The value receipt: what the prefix cache saved, measured and estimated kept apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pion.args import show, word
from pion.command import Arg, ArgType, Command, Flag
from pion.config import Config
from pion.context import Context, InfoSection, Services
from pion.errors import CommandError
from pion.hookspecs import hookimpl
from pion.replies import OK, Buffer, Map, Reply

WORKER: Final = 0
"""The index of this worker: a server has one."""


def _rows(services: Services) -> list[tuple[str, int | float]]:
    uptime_s = services.clock.monotonic_s() - services.started_s
    return services.receipt.rows(worker=WORKER, uptime_s=uptime_s)


async def pion_stats(context: Context, argv: list[Buffer]) -> Reply:
    """The receipt, or zero it."""
    if len(argv) == 1:
        return Map(_rows(context.services))
    if len(argv) > 2 or word(argv[1]) != b"RESET":
        raise CommandError(f"PION.STATS takes nothing or RESET, got {show(argv[1])}")
    context.services.receipt.reset()
    return OK


async def pion_whoami(context: Context, argv: list[Buffer]) -> Reply:
    """User and name prefix of the connection."""
    return Map([("user", context.session.user), ("prefix", b"")])


@hookimpl
def register_commands(config: Config) -> Sequence[Command]:
    """This family's rows."""
    return COMMANDS


@hookimpl
def register_info(services: Services) -> Sequence[InfoSection]:
    """The receipt as a section of INFO."""
    return [InfoSection("Pion", lambda: _rows(services))]


COMMANDS: Final = (
    Command(
        name="PION.STATS",
        arity=-1,
        summary="The value receipt of this worker. `prefill_seconds_avoided` is the sum of a measured part, which "
        "clients reported, and an estimated one.",
        since="0.1.0",
        handler=pion_stats,
        flags=Flag.READONLY | Flag.FAST,
        args=(
            Arg(
                name="reset",
                type=ArgType.PURE_TOKEN,
                token="RESET",
                optional=True,
                summary="zero the counters; `uptime_seconds` is not a counter and goes on",
            ),
        ),
        reply="Map of sixteen fields; `OK` for `RESET`.",
        group="stats",
        errors=("`ERR PION.STATS takes nothing or RESET, got 'x'`",),
        examples=("> PION.STATS RESET", "OK"),
    ),
    Command(
        name="PION.WHOAMI",
        arity=1,
        summary="Who the connection is logged in as, and which prefix its names must start with.",
        since="0.1.0",
        handler=pion_whoami,
        flags=Flag.FAST,
        reply="Map of `user` and `prefix`; the prefix is empty where any name is allowed.",
        group="stats",
    ),
)
