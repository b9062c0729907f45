"""The rows of the command table.

Each family declares one `COMMANDS` tuple of `Command`. Dispatch, `COMMAND`, `COMMAND DOCS`, the reference pages and the
checks on keys all read these rows, so a command is described once.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

if TYPE_CHECKING:
    from pion.context import Context
    from pion.later import Later
    from pion.replies import BinaryReply, Buffer, Reply

    Handler: TypeAlias = Callable[["Context", list[Buffer]], Awaitable[Reply | Later]]
    BinaryHandler: TypeAlias = Callable[["Context", tuple[Any, ...], Buffer], Awaitable[BinaryReply | Later]]


class Flag(enum.Flag):
    """Properties of a command; the names are Redis's where Redis has the notion."""

    NONE = 0
    READONLY = enum.auto()
    WRITE = enum.auto()
    ADMIN = enum.auto()
    """For the operator only, never for a tenant."""
    FAST = enum.auto()
    BLOCKING = enum.auto()
    """May wait for another client."""
    NO_AUTH = enum.auto()
    """Allowed before authentication."""
    NO_MULTI = enum.auto()
    """Refused, or run at once, inside MULTI."""
    DENYOOM = enum.auto()
    """Needs memory, so it can fail with `OOM`; the command itself checks, this flag tells clients."""


class ArgType(enum.Enum):
    """What an argument holds. The values are those of Redis's COMMAND DOCS."""

    KEY = "key"
    STRING = "string"
    INTEGER = "integer"
    DOUBLE = "double"
    PATTERN = "pattern"
    UNIX_TIME = "unix-time"
    PURE_TOKEN = "pure-token"  # noqa: S105
    ONEOF = "oneof"
    BLOCK = "block"


@attrs.frozen(kw_only=True)
class Arg:
    """One argument, in the shape of Redis's COMMAND DOCS: `token` is the word before it, `args` its parts."""

    name: str
    type: ArgType = ArgType.STRING
    token: str | None = None
    optional: bool = False
    multiple: bool = False
    args: tuple[Arg, ...] = ()
    summary: str = ""


@attrs.frozen
class KeySpec:
    """Which positions of the request hold names: first, last (negative counts from the end) and step, as in Redis."""

    first: int
    last: int
    step: int = 1
    family: str = "prefix"
    """The name space the key belongs to; each family has its own."""


@attrs.frozen(kw_only=True)
class Command:
    """One row of the command table.

    `arity` counts the command's own name (and the subcommand's); negative means at least that many. A subcommand's name
    is written with a space ("CLIENT SETNAME"); its container is a row of its own with `handler=None`.
    """

    name: str
    arity: int
    summary: str
    since: str
    handler: Handler | None = None
    flags: Flag = Flag.NONE
    keys: KeySpec | None = None
    args: tuple[Arg, ...] = ()
    reply: str = ""
    complexity: str = "O(1)"
    group: str = ""
    examples: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    replaces: str | None = None
    """The plugin whose row of the same name this one replaces; without it a duplicate refuses the start."""

    @property
    def container(self) -> str | None:
        """The command this is a subcommand of."""
        head, _, tail = self.name.partition(" ")
        return head if tail else None

    def syntax(self) -> str:
        """The call as a person writes it: `KV.PREFIX.LOOKUP ns [TOKENS n]`."""
        return " ".join([self.name, *(_syntax(arg) for arg in self.args)])


class FieldKind(enum.Enum):
    """What one packed field of a binary request's meta is. Little-endian."""

    NAME = "name"
    """u16 length and that many bytes; comes as `bytes`."""
    WIRE = "as"
    """u8: 0 fp32, 1 fp16, 2 bf16, 3 native; comes as that word."""
    U32 = "u32"
    U64 = "u64"
    F64 = "f64"
    RANGES = "u32 n, n x (u32 layer, u32 start, u32 end)"
    """Comes as a list of three-tuples."""


@attrs.frozen
class Field:
    """One field of a binary request's meta."""

    name: str
    kind: FieldKind


@attrs.frozen(kw_only=True)
class BinaryCommand:
    """One row of the binary lane's table: the same operation as the RESP command named, with packed arguments.

    Flags, statistics, name space of keys and documentation come from that command's row. `handler(context, values,
    body)` gets the meta's values in the order of `meta`, already unpacked, and the request's body: `bytes` up to the
    lane's inline limit, else a `memoryview` that the handler may keep.
    """

    code: int
    command: str
    handler: BinaryHandler
    meta: tuple[Field, ...] = ()
    body: str = ""
    """What the request's body holds, for the reference; empty: it must be empty."""
    reply: str = ""
    """What the answer's meta and body hold, for the reference."""


def _syntax(arg: Arg) -> str:
    if arg.type is ArgType.PURE_TOKEN:
        text = arg.token or arg.name
    elif arg.type is ArgType.ONEOF:
        text = "<" + " | ".join(_syntax(part) for part in arg.args) + ">"
        if arg.token:
            text = f"{arg.token} {text}"
    elif arg.type is ArgType.BLOCK:
        text = " ".join(_syntax(part) for part in arg.args)
        if arg.token:
            text = f"{arg.token} {text}"
    else:
        # A word before several values is written once: ID client-id [client-id ...].
        text = f"{arg.name} [{arg.name} ...]" if arg.multiple else arg.name
        text = f"{arg.token} {text}" if arg.token else text
    if arg.multiple and arg.type in (ArgType.ONEOF, ArgType.BLOCK, ArgType.PURE_TOKEN):
        text = f"{text} [{text} ...]"
    return f"[{text}]" if arg.optional else text
