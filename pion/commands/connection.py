"""The connection itself: greeting, authentication, liveness, client attributes and transactions.

What Redis clients send before and around their first command. Replies and error texts are Redis's, because clients
match them literally.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from pion.args import show, word
from pion.command import Arg, ArgType, BinaryCommand, Command, Flag
from pion.commands.auth import log_in
from pion.commands.checks import label, syntax_error, wrong_arity
from pion.commands.client_list import CLIENT_LIST_COMMANDS
from pion.commands.client_state import CLIENT_STATE_COMMANDS, CLIENT_WORD
from pion.commands.connection_binary import BINARY
from pion.commands.modules import modules
from pion.commands.pinning import PINNING_COMMANDS
from pion.commands.transactions import TRANSACTION_COMMANDS
from pion.config import REDIS_VERSION, Config
from pion.context import Context
from pion.errors import CommandError, NoAuthError, NoProtoError
from pion.hookspecs import hookimpl
from pion.replies import OK, Buffer, Map, Reply, Simple

SERVER_NAME: Final = "pion"
"""HELLO's `server`: what it is, not what it resembles. Of the clients only redis-py looks at it, and only for caching
on the client's side, which needs CLIENT TRACKING that Pion does not have; others read `proto`, `version` and `id`."""

PONG: Final = Simple("PONG")
RESET_DONE: Final = Simple("RESET")

_INTEGER: Final = re.compile(rb"-?[0-9]{1,19}")


async def hello(context: Context, argv: list[Buffer]) -> Reply:
    """Check every argument, log in, then change the connection."""
    session = context.session
    proto = session.resp
    if len(argv) > 1:
        if _INTEGER.fullmatch(argv[1]) is None:
            raise CommandError("Protocol version is not an integer or out of range")
        proto = int(bytes(argv[1]))
        if proto not in (2, 3):
            raise NoProtoError("unsupported protocol version")
    credentials: tuple[Buffer, Buffer] | None = None
    name: bytes | None = None
    index = 2
    while index < len(argv):
        option = word(argv[index])
        if option == b"AUTH" and index + 2 < len(argv):
            credentials = argv[index + 1], argv[index + 2]
            index += 3
        elif option == b"SETNAME" and index + 1 < len(argv):
            name = label(argv[index + 1], "Client names")
            index += 2
        else:
            raise CommandError(f"Syntax error in HELLO option {show(argv[index])}")
    if credentials is not None:
        log_in(context, *credentials)
    if not session.authenticated:
        raise NoAuthError(
            "HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> "
            "<pass> option can be used to authenticate the client and select the RESP protocol version at the same time"
        )
    if name is not None:
        session.name = name
    session.resp = proto
    return Map(
        [
            ("server", SERVER_NAME),
            ("version", REDIS_VERSION),
            ("proto", proto),
            ("id", session.id),
            ("mode", "standalone"),
            ("role", "master"),
            ("modules", modules(context.services.registry)),
        ]
    )


async def auth(context: Context, argv: list[Buffer]) -> Reply:
    """Log in with a password, or a user and a password."""
    if len(argv) > 3:
        raise syntax_error()
    if len(argv) == 2:
        if not context.services.config.requirepass:
            raise CommandError(
                "AUTH <password> called without any password configured for the default user. "
                "Are you sure your configuration is correct?"
            )
        log_in(context, b"default", argv[1])
    else:
        log_in(context, argv[1], argv[2])
    return OK


async def ping(context: Context, argv: list[Buffer]) -> Reply:
    """`PONG` or the message."""
    if len(argv) == 1:
        return PONG
    if len(argv) > 2:
        raise wrong_arity("ping")
    return argv[1]


async def echo(context: Context, argv: list[Buffer]) -> Reply:
    """The message."""
    return argv[1]


async def select(context: Context, argv: list[Buffer]) -> Reply:
    """Accept the one database."""
    if _INTEGER.fullmatch(argv[1]) is None:
        raise CommandError("value is not an integer or out of range")
    index = int(bytes(argv[1]))
    if not -(2**31) <= index < 2**31:
        raise CommandError("value is out of range, value must between -2147483648 and 2147483647")
    if index != 0:
        raise CommandError("DB index is out of range")
    return OK


async def close(context: Context, argv: list[Buffer]) -> Reply:
    """Close once the replies so far are sent."""
    context.session.closing = True
    return OK


async def reset(context: Context, argv: list[Buffer]) -> Reply:
    """Forget what the client set up."""
    context.session.reset(authenticated=not context.services.config.requirepass)
    return RESET_DONE


@hookimpl
def register_commands(config: Config) -> Sequence[Command]:
    """This family's rows."""
    return (*COMMANDS, *CLIENT_STATE_COMMANDS, *CLIENT_LIST_COMMANDS, *TRANSACTION_COMMANDS, *PINNING_COMMANDS)


@hookimpl
def register_binary(config: Config) -> Sequence[BinaryCommand]:
    """AUTH, PING and PIN."""
    return BINARY


_BEFORE_AUTH: Final = Flag.FAST | Flag.NO_AUTH

COMMANDS: Final = (
    Command(
        name="HELLO",
        arity=-1,
        summary="Chooses the protocol version, optionally logs in and names the client, and describes the server.",
        since="0.1.0",
        handler=hello,
        flags=_BEFORE_AUTH,
        args=(
            Arg(
                name="arguments",
                type=ArgType.BLOCK,
                optional=True,
                args=(
                    Arg(name="protover", type=ArgType.INTEGER, summary="2 or 3"),
                    Arg(
                        name="auth",
                        type=ArgType.BLOCK,
                        token="AUTH",
                        optional=True,
                        args=(
                            Arg(name="username", summary="`default`"),
                            Arg(name="password", summary="what `--requirepass` says"),
                        ),
                    ),
                    Arg(name="clientname", token="SETNAME", optional=True, summary="as CLIENT SETNAME"),
                ),
            ),
        ),
        reply="Map: `server`, `version` (the Redis release whose commands are followed), `proto`, `id`, `mode`, "
        "`role`, `modules`.",
        group="connection",
        errors=(
            "`NOPROTO unsupported protocol version`",
            "`WRONGPASS invalid username-password pair or user is disabled.`",
            "`NOAUTH HELLO must be called with the client already authenticated, ...`",
        ),
        examples=("> HELLO 3 AUTH default secret SETNAME worker-1",),
    ),
    Command(
        name="AUTH",
        arity=-2,
        summary="Logs the connection in.",
        since="0.1.0",
        handler=auth,
        flags=_BEFORE_AUTH,
        args=(
            Arg(name="username", optional=True, summary="`default`, also when left out"),
            Arg(name="password", summary="what `--requirepass` says"),
        ),
        reply="`OK`",
        group="connection",
        errors=(
            "`WRONGPASS invalid username-password pair or user is disabled.`",
            "`ERR AUTH <password> called without any password configured for the default user. ...`",
        ),
        examples=("> AUTH secret", "OK"),
    ),
    Command(
        name="PING",
        arity=-1,
        summary="Answers, to show that the connection and the server are alive.",
        since="0.1.0",
        handler=ping,
        flags=Flag.FAST,
        args=(Arg(name="message", optional=True, summary="answered instead of `PONG`"),),
        reply="`PONG`, or the message as a bulk string.",
        group="connection",
        examples=("> PING", "PONG"),
    ),
    Command(
        name="ECHO",
        arity=2,
        summary="Answers with its argument.",
        since="0.1.0",
        handler=echo,
        flags=Flag.FAST,
        args=(Arg(name="message"),),
        reply="Bulk string.",
        group="connection",
    ),
    Command(
        name="SELECT",
        arity=2,
        summary="Accepts database 0, the only one.",
        since="0.1.0",
        handler=select,
        flags=Flag.FAST,
        args=(Arg(name="index", type=ArgType.INTEGER, summary="0"),),
        reply="`OK`",
        group="connection",
        errors=("`ERR DB index is out of range`", "`ERR value is not an integer or out of range`"),
    ),
    Command(
        name="QUIT",
        arity=-1,
        summary="Closes the connection after the replies so far.",
        since="0.1.0",
        handler=close,
        flags=_BEFORE_AUTH | Flag.NO_MULTI,
        reply="`OK`",
        group="connection",
    ),
    Command(
        name="RESET",
        arity=1,
        summary="Puts the connection back as it was when opened: RESP2, no name, no transaction, logged out if there "
        "is a password.",
        since="0.1.0",
        handler=reset,
        flags=_BEFORE_AUTH | Flag.NO_MULTI,
        reply="`RESET`",
        group="connection",
    ),
    CLIENT_WORD,
)
