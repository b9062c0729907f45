"""The connection's rows of the binary lane: AUTH, PING, PIN."""

from __future__ import annotations

from typing import Final

from pion.command import BinaryCommand, Field, FieldKind
from pion.commands.auth import log_in
from pion.commands.pinning import pin_to
from pion.context import Context
from pion.replies import BinaryReply, Buffer

DONE: Final = BinaryReply()


async def auth(context: Context, values: tuple[bytes, bytes], body: Buffer) -> BinaryReply:
    """Log in with a user and a password."""
    log_in(context, *values)
    return DONE


async def ping(context: Context, values: tuple[()], body: Buffer) -> BinaryReply:
    """Answer."""
    return DONE


async def pin(context: Context, values: tuple[int], body: Buffer) -> BinaryReply:
    """Stay at a worker, or move to it."""
    pin_to(context, *values)
    return DONE


BINARY: Final = (
    BinaryCommand(
        code=0x01,
        command="AUTH",
        handler=auth,
        meta=(Field("user", FieldKind.NAME), Field("password", FieldKind.NAME)),
    ),
    BinaryCommand(code=0x02, command="PING", handler=ping),
    BinaryCommand(code=0x03, command="PION.PIN", handler=pin, meta=(Field("worker", FieldKind.U32),)),
)
