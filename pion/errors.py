"""Every error Pion raises, and how each one looks on the wire.

A `CommandError` becomes an error reply and the connection stays usable; a `ProtocolError` is answered once and then the
connection is closed, because the position in the byte stream is lost. Each class knows its RESP code (the first word of
the error line) and its status on the binary lane.
"""

from __future__ import annotations

from typing import ClassVar


class PionError(Exception):
    """Root of the tree. `str(error)` is the text for a person, without the code."""

    code: ClassVar[str] = "ERR"
    status: ClassVar[int] = 1


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
    status = 4


class WrongPassError(CommandError):
    """AUTH or HELLO gave a wrong name or password."""

    code = "WRONGPASS"
    status = 4


class NoPermError(CommandError):
    """The user may not run this command or touch this name."""

    code = "NOPERM"
    status = 5


class WrongTypeError(CommandError):
    """The name holds something of another kind."""

    code = "WRONGTYPE"


class OutOfMemoryError(CommandError):
    """A budget is full and nothing may be evicted for it."""

    code = "OOM"
    status = 6


class BusyError(CommandError):
    """Another connection is filling this prefix."""

    code = "BUSY"
    status = 7


class ExistsError(CommandError):
    """The name is taken by something of another shape, or is complete and immutable."""

    code = "EXISTS"
    status = 9


class NoProtoError(CommandError):
    """HELLO asked for a protocol version that does not exist."""

    code = "NOPROTO"


class ExecAbortError(CommandError):
    """A command of the transaction could not be queued, so none of them runs."""

    code = "EXECABORT"


class MisconfError(CommandError):
    """The disk failed, so nothing that changes state is accepted until an operator has looked."""

    code = "MISCONF"
    status = 11
