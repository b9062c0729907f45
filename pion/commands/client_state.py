"""CLIENT subcommands that read or change the caller's own connection."""

from __future__ import annotations

from typing import Final

from pion.args import show, word
from pion.command import Arg, ArgType, Command, Flag
from pion.commands.checks import label, refuse_in_transaction, switch, syntax_error
from pion.commands.help import help_row, on_off
from pion.context import Context
from pion.errors import CommandError
from pion.replies import NO_REPLY, OK, Buffer, Reply


async def client_id(context: Context, argv: list[Buffer]) -> Reply:
    """The caller's id."""
    return context.session.id


async def set_name(context: Context, argv: list[Buffer]) -> Reply:
    """Name the connection."""
    context.session.name = label(argv[2], "Client names")
    return OK


async def get_name(context: Context, argv: list[Buffer]) -> Reply:
    """The connection's name, null without one."""
    return context.session.name or None


async def set_info(context: Context, argv: list[Buffer]) -> Reply:
    """Remember what the client library calls itself."""
    attribute = word(argv[2])
    if attribute == b"LIB-NAME":
        context.session.lib_name = label(argv[3], "lib-name")
    elif attribute == b"LIB-VER":
        context.session.lib_ver = label(argv[3], "lib-ver")
    else:
        raise CommandError(f"Unrecognized option {show(argv[2])}")
    return OK


async def no_evict(context: Context, argv: list[Buffer]) -> Reply:
    """Remember the switch; nothing depends on it."""
    context.session.no_evict = switch(argv[2])
    return OK


async def no_touch(context: Context, argv: list[Buffer]) -> Reply:
    """Whether this client's reads count as use; LOOKUP and FETCH look at the switch."""
    context.session.no_touch = switch(argv[2])
    return OK


async def reply_mode(context: Context, argv: list[Buffer]) -> Reply:
    """Turn replies on or off, or leave out the next."""
    # Inside EXEC's array a reply can't be left out.
    refuse_in_transaction(context)
    session = context.session
    mode = word(argv[2])
    if mode == b"ON":
        session.reply_off, session.reply_skip = False, 0
        return OK
    if mode == b"OFF":
        session.reply_off = True
    elif mode == b"SKIP":
        # Two replies are left out: this one and the next; after OFF there is nothing to add.
        session.reply_skip = 0 if session.reply_off else 2
    else:
        raise syntax_error()
    return NO_REPLY


CLIENT_WORD: Final = Command(
    name="CLIENT",
    arity=-2,
    summary="A container for commands about client connections.",
    since="0.1.0",
    group="connection",
)

CLIENT_STATE_COMMANDS: Final = (
    Command(
        name="CLIENT ID",
        arity=2,
        summary="The caller's id; ids count up and are never used again.",
        since="0.1.0",
        handler=client_id,
        flags=Flag.FAST,
        reply="Integer.",
        group="connection",
    ),
    Command(
        name="CLIENT SETNAME",
        arity=3,
        summary="Names the connection, for CLIENT LIST and the slow log; an empty name removes it.",
        since="0.1.0",
        handler=set_name,
        flags=Flag.FAST,
        args=(Arg(name="connection-name", summary="printable ASCII without blanks, up to 4,096 bytes"),),
        reply="`OK`",
        group="connection",
        errors=("`ERR Client names cannot contain spaces, newlines or special characters.`",),
    ),
    Command(
        name="CLIENT GETNAME",
        arity=2,
        summary="The connection's name.",
        since="0.1.0",
        handler=get_name,
        flags=Flag.FAST,
        reply="Bulk string, or null without a name.",
        group="connection",
    ),
    Command(
        name="CLIENT SETINFO",
        arity=4,
        summary="Stores the name or the version of the client library, for CLIENT LIST.",
        since="0.1.0",
        handler=set_info,
        flags=Flag.FAST,
        args=(
            Arg(
                name="attr",
                type=ArgType.ONEOF,
                args=(Arg(name="libname", token="LIB-NAME"), Arg(name="libver", token="LIB-VER")),
            ),
        ),
        reply="`OK`",
        group="connection",
        errors=("`ERR Unrecognized option 'x'`",),
    ),
    Command(
        name="CLIENT NO-EVICT",
        arity=3,
        summary="Accepted for clients that send it: Pion closes no connection to save memory but the slowest readers.",
        since="0.1.0",
        handler=no_evict,
        flags=Flag.FAST,
        args=on_off(),
        reply="`OK`",
        group="connection",
    ),
    Command(
        name="CLIENT NO-TOUCH",
        arity=3,
        summary="With ON, what this connection looks up and fetches doesn't count as recently used.",
        since="0.1.0",
        handler=no_touch,
        flags=Flag.FAST,
        args=on_off(),
        reply="`OK`",
        group="connection",
    ),
    Command(
        name="CLIENT REPLY",
        arity=3,
        summary="Turns replies off, on again, or leaves out the next one.",
        since="0.1.0",
        handler=reply_mode,
        flags=Flag.FAST | Flag.NO_MULTI,
        args=(
            Arg(
                name="action",
                type=ArgType.ONEOF,
                args=(
                    Arg(name="on", type=ArgType.PURE_TOKEN, token="ON"),
                    Arg(name="off", type=ArgType.PURE_TOKEN, token="OFF"),
                    Arg(name="skip", type=ArgType.PURE_TOKEN, token="SKIP"),
                ),
            ),
        ),
        reply="`OK` for `ON`; nothing for the others.",
        group="connection",
        errors=("`ERR Command not allowed inside a transaction`",),
    ),
    help_row("CLIENT", "connection"),
)
