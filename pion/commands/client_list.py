"""CLIENT subcommands about every connection: INFO, LIST and KILL."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import attrs
import trio

from pion.args import show, word
from pion.command import Arg, ArgType, Command, Flag
from pion.commands.auth import DEFAULT_USER
from pion.commands.checks import Turn, refuse_too_many, syntax_error
from pion.context import Context, Services, Session
from pion.errors import CommandError
from pion.replies import OK, Buffer, Reply

CLIENT_TYPES: Final = (b"NORMAL", b"MASTER", b"REPLICA", b"SLAVE", b"PUBSUB")
"""Redis's types of client. Every client of Pion is a normal one."""

LINES_PER_TURN: Final = 250
"""Lines made before other connections get their turn: about a millisecond."""


def describe(session: Session, services: Services) -> str:
    """One line of CLIENT LIST: Redis's fields, as far as they mean something here.

    `age` and `idle` are whole seconds; `multi` is the number of queued commands, -1 outside a transaction. The sizes
    are bytes; only what a transaction queues is counted for each client, and older redis-py and valkey-py fail on a
    line without the others.
    """
    now_s = services.clock.wall_s()
    transaction = session.transaction
    queued, queued_bytes = (-1, 0) if transaction is None else (len(transaction.queue), transaction.queued_bytes)
    flags = ("x" if transaction is not None else "") + ("c" if session.closing else "")
    flags += ("e" if session.no_evict else "") + ("T" if session.no_touch else "")
    return (
        f"id={session.id} addr={session.addr} laddr={session.laddr} name={session.name.decode()} "
        f"age={max(0, int(now_s - session.created_s))} idle={max(0, int(now_s - session.active_s))} "
        f"flags={flags or 'N'} db=0 sub=0 psub=0 ssub=0 multi={queued} qbuf=0 qbuf-free=0 argv-mem=0 "
        f"multi-mem={queued_bytes} obl=0 oll=0 omem=0 tot-mem={queued_bytes} "
        f"cmd={session.last_command.lower().replace(' ', '|') or 'NULL'} user={session.user} redir=-1 "
        f"resp={session.resp} lane={session.lane} lib-name={session.lib_name.decode()} "
        f"lib-ver={session.lib_ver.decode()} "
        f"tot-cmds={session.commands}\n"
    )


async def _lines(sessions: Iterable[Session], services: Services) -> str:
    lines: list[str] = []
    for session in sessions:
        lines.append(describe(session, services))
        if not len(lines) % LINES_PER_TURN:
            await trio.lowlevel.checkpoint()
    return "".join(lines)


async def client_info(context: Context, argv: list[Buffer]) -> Reply:
    """The caller's own line."""
    return describe(context.session, context.services)


async def client_list(context: Context, argv: list[Buffer]) -> Reply:
    """The lines of all clients, of one type, or of some ids."""
    services = context.services
    if len(argv) == 2:
        return await _lines(services.clients, services)
    filtered = word(argv[2])
    if filtered == b"TYPE" and len(argv) == 4:
        return await _lines(services.clients if _client_type(argv[3]) == b"NORMAL" else (), services)
    if filtered == b"ID" and len(argv) > 3:
        refuse_too_many(argv[3:], "ids")
        wanted = dict.fromkeys(_client_id(arg, "Invalid client ID") for arg in argv[3:])
        found = (services.clients.get(client_id) for client_id in wanted)
        return await _lines([session for session in found if session is not None], services)
    raise syntax_error()


async def client_kill(context: Context, argv: list[Buffer]) -> Reply:
    """End the connections that pass every filter, or the one at an address."""
    if len(argv) == 3:
        return _kill_address(context, bytes(argv[2]))
    filters, skip_me = _kill_filters(context.services, argv[2:])
    killed = 0
    turn = Turn()
    for session in context.services.clients:
        await turn.pause()
        if context.services.clients.get(session.id) is not session:
            continue  # it left meanwhile
        if all(matches(session) for matches in filters) and not (skip_me and session is context.session):
            _end(context, session)
            killed += 1
    return killed


def _kill_address(context: Context, address: bytes) -> Reply:
    """The form of Redis 2.4: one address, the caller's own allowed, an error when there is no such client."""
    for session in context.services.clients:
        if session.addr.encode() == address:
            _end(context, session)
            return OK
    raise CommandError("No such client")


def _end(context: Context, session: Session) -> None:
    session.closing = True
    if session is context.session:
        return  # it still gets its reply, and is closed after it
    # Gone from CLIENT LIST with this reply; its task ends a moment later, whatever it was doing.
    context.services.clients.remove(session)
    if session.kill is not None:
        session.kill()


@attrs.frozen
class _Equals:
    """Sessions whose `field` has the value asked for."""

    field: str
    value: object

    def __call__(self, session: Session) -> bool:
        return bool(getattr(session, self.field) == self.value)


def _kill_filters(services: Services, args: list[Buffer]) -> tuple[list[Callable[[Session], bool]], bool]:
    if len(args) % 2:
        raise syntax_error()
    refuse_too_many(args, "filters")
    filters: list[Callable[[Session], bool]] = []
    skip_me = True
    for option, value in zip(map(word, args[::2]), args[1::2], strict=True):
        if option == b"ID":
            filters.append(_Equals("id", _client_id(value, "client-id should be greater than 0")))
        elif option == b"TYPE":
            if _client_type(value) != b"NORMAL":
                filters.append(lambda session: False)
        elif option in (b"ADDR", b"LADDR"):
            filters.append(_Equals(option.decode().lower(), bytes(value).decode("utf-8", "backslashreplace")))
        elif option == b"USER":
            if bytes(value) != DEFAULT_USER.encode():
                raise CommandError(f"No such user {show(value)}")
            filters.append(_Equals("user", DEFAULT_USER))
        elif option == b"SKIPME" and word(value) in (b"YES", b"NO"):
            skip_me = word(value) == b"YES"
        elif option == b"MAXAGE":
            oldest_s = services.clock.wall_s() - _client_id(value, "maxage should be greater than 0")
            filters.append(lambda session, oldest_s=oldest_s: session.created_s <= oldest_s)  # type: ignore[misc]
        else:
            raise syntax_error()
    return filters, skip_me


def _client_id(value: Buffer, error: str) -> int:
    text = bytes(value[:20])
    if len(value) > 19 or not text.isdigit() or int(text) == 0:
        raise CommandError(error)
    return int(text)


def _client_type(value: Buffer) -> bytes:
    found = word(value)
    if found not in CLIENT_TYPES:
        raise CommandError(f"Unknown client type {show(value)}")
    return found


_TYPE_ARG: Final = Arg(
    name="client-type",
    type=ArgType.ONEOF,
    token="TYPE",
    optional=True,
    summary="all of Pion's clients are NORMAL",
    args=tuple(
        Arg(name=name.lower(), type=ArgType.PURE_TOKEN, token=name)
        for name in ("NORMAL", "MASTER", "REPLICA", "PUBSUB")
    ),
)

CLIENT_LIST_COMMANDS: Final = (
    Command(
        name="CLIENT INFO",
        arity=2,
        summary="The caller's line of CLIENT LIST.",
        since="0.1.0",
        handler=client_info,
        reply="Bulk string, one line of `field=value` pairs.",
        group="connection",
    ),
    Command(
        name="CLIENT LIST",
        arity=-2,
        summary="A line of `field=value` pairs for each connection.",
        since="0.1.0",
        handler=client_list,
        flags=Flag.ADMIN,
        args=(
            _TYPE_ARG,
            Arg(name="client-id", type=ArgType.INTEGER, token="ID", optional=True, multiple=True),
        ),
        reply="Bulk string.",
        complexity="O(N) with N connections",
        group="connection",
        errors=("`ERR Unknown client type 'x'`", "`ERR Invalid client ID`"),
        examples=("> CLIENT LIST ID 3 4",),
    ),
    Command(
        name="CLIENT KILL",
        arity=-3,
        summary="Closes connections. Filters are combined with AND.",
        since="0.1.0",
        handler=client_kill,
        flags=Flag.ADMIN,
        args=(
            Arg(name="old-address", optional=True, summary="alone: as in CLIENT LIST; the caller's own is allowed"),
            Arg(name="client-id", type=ArgType.INTEGER, token="ID", optional=True),
            _TYPE_ARG,
            Arg(name="username", token="USER", optional=True),
            Arg(name="addr", token="ADDR", optional=True),
            Arg(name="laddr", token="LADDR", optional=True),
            Arg(
                name="skipme",
                type=ArgType.ONEOF,
                token="SKIPME",
                optional=True,
                summary="leave the caller alone; default YES",
                args=(
                    Arg(name="yes", type=ArgType.PURE_TOKEN, token="YES"),
                    Arg(name="no", type=ArgType.PURE_TOKEN, token="NO"),
                ),
            ),
            Arg(
                name="maxage",
                type=ArgType.INTEGER,
                token="MAXAGE",
                optional=True,
                summary="connections at least this many seconds old",
            ),
        ),
        reply="Integer: how many were closed; `OK` for the old form with an address alone.",
        complexity="O(N) with N connections",
        group="connection",
        errors=("`ERR No such client`: the old form", "`ERR No such user 'x'`", "`ERR Unknown client type 'x'`"),
        examples=("> CLIENT KILL ID 12 SKIPME NO", "(integer) 1"),
    ),
)
