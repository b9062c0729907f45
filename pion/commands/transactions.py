"""MULTI, EXEC and DISCARD: part of the connection family, since they change how a connection's commands run."""

from __future__ import annotations

from typing import Final

from pion.command import Command, Flag
from pion.context import Context, Transaction
from pion.errors import CommandError
from pion.replies import OK, Buffer, Reply


async def multi(context: Context, argv: list[Buffer]) -> Reply:
    """Start queueing."""
    if context.session.transaction is not None:
        raise CommandError("MULTI calls can not be nested")
    context.session.transaction = Transaction()
    return OK


async def execute(context: Context, argv: list[Buffer]) -> Reply:
    """Run what was queued.

    Cancellation: some of the commands may have run; the connection must close.
    """
    return await context.dispatch.execute_queued(context)


async def discard(context: Context, argv: list[Buffer]) -> Reply:
    """Forget what was queued."""
    if context.session.transaction is None:
        raise CommandError("DISCARD without MULTI")
    context.session.transaction = None
    return OK


_AT_ONCE: Final = Flag.FAST | Flag.NO_MULTI

TRANSACTION_COMMANDS: Final = (
    Command(
        name="MULTI",
        arity=1,
        summary="Queues the commands that follow until EXEC runs them in order.",
        since="0.1.0",
        handler=multi,
        flags=_AT_ONCE,
        reply="`OK`; each queued command is answered `QUEUED`.",
        group="transactions",
        errors=("`ERR MULTI calls can not be nested`",),
        examples=("> MULTI", "OK", "> PING", "QUEUED", "> EXEC", "1) PONG"),
    ),
    Command(
        name="EXEC",
        arity=1,
        summary="Runs the queued commands in order. Each is atomic; others' commands may run between two of them.",
        since="0.1.0",
        handler=execute,
        flags=Flag.NO_MULTI,
        reply="Array with one reply per command; a command that fails has its error there, and the others still run.",
        complexity="That of the queued commands",
        group="transactions",
        errors=(
            "`ERR EXEC without MULTI`",
            "`EXECABORT Transaction discarded because of previous errors.`: a command could not be queued",
        ),
    ),
    Command(
        name="DISCARD",
        arity=1,
        summary="Forgets the queued commands.",
        since="0.1.0",
        handler=discard,
        flags=_AT_ONCE,
        reply="`OK`",
        complexity="O(N) with N queued commands",
        group="transactions",
        errors=("`ERR DISCARD without MULTI`",),
    ),
)
