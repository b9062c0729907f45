"""Every error Pion raises, and how each one looks on the wire.

A `CommandError` becomes an error reply and the connection stays usable; a `ProtocolError` is answered once and then the
connection is closed, because the position in the byte stream is lost. Each class knows its RESP code (the first word of
the error line) and its status on the binary lane.
"""

from __future__ import annotations

import enum
from typing import ClassVar, Final


class Status(enum.IntEnum):
    """Status of an answer on the binary lane."""

    OK = 0
    """Done; for a lookup: there is such a prefix."""
    ERR = 1
    """An error without a status of its own; the body says what is wrong."""
    MISS = 2
    """What was asked for is not there."""
    COLDMISS = 3
    """It is stored, but not ready for attention."""
    NOAUTH = 4
    """Authenticate first, or the password is wrong."""
    NOPERM = 5
    """This user may not do that."""
    OOM = 6
    """There is no memory for it."""
    BUSY = 7
    """Another connection is filling the prefix."""
    MOVED = 8
    """Another worker has it: meta is that worker's number, a u32. Not sent by a server with one worker."""
    EXISTS = 9
    """The name is taken by something of another shape, or is complete."""
    LOADING = 10
    """The server is not ready yet."""
    MISCONF = 11
    """The disk failed: nothing that changes state is accepted."""
    PENDING = 12
    """Not registered, and not yours to store: the body says `PENDING` (another connection fills it) or `DEFERRED`."""


class PionError(Exception):
    """Root of the tree. `str(error)` is the text for a person, without the code."""

    code: ClassVar[str] = "ERR"
    status: ClassVar[int] = Status.ERR


class StartupError(PionError):
    """The server can't start as configured; the text says what to change."""


class PluginError(StartupError):
    """A plugin can't be loaded or breaks a rule; the text names the plugin."""


class ProtocolError(PionError):
    """The peer sent bytes that are not the protocol. Answered once, then the connection is closed."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"Protocol error: {detail}")


class ConnectionLostError(PionError):
    """The peer or this side closed the connection, or the network failed. Nothing can be answered any more."""


class CommandError(PionError):
    """A command was refused. Nothing changed; the connection stays usable."""


class NoAuthError(CommandError):
    """The connection has to authenticate first."""

    code = "NOAUTH"
    status = Status.NOAUTH


class WrongPassError(CommandError):
    """AUTH or HELLO gave a wrong name or password."""

    code = "WRONGPASS"
    status = Status.NOAUTH


class NoPermError(CommandError):
    """The user may not run this command or touch this name."""

    code = "NOPERM"
    status = Status.NOPERM


class WrongTypeError(CommandError):
    """The name holds something of another kind."""

    code = "WRONGTYPE"


class OutOfMemoryError(CommandError):
    """A budget is full and nothing may be evicted for it."""

    code = "OOM"
    status = Status.OOM


class BusyError(CommandError):
    """Another connection is filling this prefix."""

    code = "BUSY"
    status = Status.BUSY


class ExistsError(CommandError):
    """The name is taken by something of another shape, or is complete and immutable."""

    code = "EXISTS"
    status = Status.EXISTS


class NoProtoError(CommandError):
    """HELLO asked for a protocol version that does not exist."""

    code = "NOPROTO"


class ExecAbortError(CommandError):
    """A command of the transaction could not be queued, so none of them runs."""

    code = "EXECABORT"


class MisconfError(CommandError):
    """The disk failed, so nothing that changes state is accepted until an operator has looked."""

    code = "MISCONF"
    status = Status.MISCONF


class ColdMissError(CommandError):
    """The layer is stored, but not ready for attention: `KV.PREFIX.WARM` or a store makes it so."""

    code = "COLDMISS"
    status = Status.COLDMISS


class LoadingError(CommandError):
    """The server, or the worker that has this name, is not ready yet."""

    code = "LOADING"
    status = Status.LOADING


_STATUSES: Final = {kind.code: kind.status for kind in CommandError.__subclasses__()}


def status_of(code: str) -> int:
    """The status on the binary lane that stands for an error code; `Status.ERR` for one without."""
    return _STATUSES.get(code, Status.ERR)
