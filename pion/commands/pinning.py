"""PION.PIN: which worker a connection talks to. There is one so far."""

from __future__ import annotations

from typing import Final

from pion.args import integer
from pion.command import Arg, ArgType, Command, Flag
from pion.context import Context
from pion.errors import CommandError
from pion.replies import OK, Buffer, Reply


def pin_to(context: Context, worker: int) -> None:
    """Raise CommandError unless the connection is at that worker."""
    if worker:
        raise CommandError(f"this server has one worker, 0; there is no worker {worker}")


async def pin(context: Context, argv: list[Buffer]) -> Reply:
    """PION.PIN <worker>."""
    pin_to(context, integer(argv[1], "worker"))
    return OK


PINNING_COMMANDS: Final = (
    Command(
        name="PION.PIN",
        arity=2,
        summary="Puts the connection at a worker. This version has one, so 0 is the only number.",
        since="0.1.0",
        handler=pin,
        flags=Flag.FAST,
        args=(Arg(name="worker", type=ArgType.INTEGER, summary="its number, from 0"),),
        reply="`OK`",
        group="connection",
        errors=("`ERR this server has one worker, 0; there is no worker 1`",),
        examples=("> PION.PIN 0", "OK"),
    ),
)
