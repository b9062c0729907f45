"""Every error the client raises.

    PionClientError
      TransportError           the connection, not the command
        ConnectFailedError     nobody answers there; nothing was sent
        ConnectionLostError    the connection broke before the reply was complete
        ReplyTimeoutError      no byte for `timeout_s`
        BadReplyError          the server sent bytes that are no reply, or more than `max_reply_bytes`
        OutcomeUnknownError    any of the three above, after a write was sent: it may or may not have been applied
      ServerError              the server refused the command; the connection stays usable
        WrongPasswordError, NotAuthenticatedError, PermissionDeniedError, ...   one per code

`error.code` is the first word of the server's error line, and empty for a `TransportError`. After any `TransportError`
the connection is closed, and the next call opens a new one.
"""

from __future__ import annotations

from typing import Final


class PionClientError(Exception):
    """Root of the tree."""

    code: str = ""


class TransportError(PionClientError):
    """The exchange did not complete. No part of a reply was returned."""


class ConnectFailedError(TransportError):
    """No connection could be made. Nothing was sent."""


class ConnectionLostError(TransportError):
    """The connection broke before the reply was complete."""


class ReplyTimeoutError(TransportError):
    """The server was silent for longer than `timeout_s`."""


class BadReplyError(TransportError):
    """The server sent something that is no reply, is not what the command answers, or is larger than allowed."""


class OutcomeUnknownError(TransportError):
    """A write was sent and no reply came: it may or may not have been applied. It was not repeated.

    `__cause__` says what happened to the connection.
    """


class ServerError(PionClientError):
    """The server refused the command. `str(error)` is its text without the code."""

    def __init__(self, text: str, code: str = "ERR") -> None:
        super().__init__(text)
        self.code = code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ServerError) and (other.code, other.args) == (self.code, self.args)

    def __hash__(self) -> int:
        return hash((self.code, self.args))

    def __reduce__(self) -> tuple[type[ServerError], tuple[str, str]]:
        return type(self), (str(self), self.code)


class WrongPasswordError(ServerError):
    """WRONGPASS: the user name or the password is not right. Never retried."""


class NotAuthenticatedError(ServerError):
    """NOAUTH: the server wants a password and none was given."""


class PermissionDeniedError(ServerError):
    """NOPERM: this user may not do that."""


class WrongTypeError(ServerError):
    """WRONGTYPE: the name holds something else."""


class OutOfMemoryError(ServerError):
    """OOM: the server's budget is full."""


class BusyError(ServerError):
    """BUSY: another connection is filling this prefix."""


class ExistsError(ServerError):
    """EXISTS: the name is taken with another shape, or is complete and immutable."""


class LoadingError(ServerError):
    """LOADING: the server is still reading its data; try later."""


class NotPersistedError(ServerError):
    """MISCONF: the server can't write to its disk and takes no writes."""


class ColdMissError(ServerError):
    """COLDMISS: the session must be warmed first."""


class MovedError(ServerError):
    """MOVED: the name lives on another worker, which the text names."""


class NoProtocolError(ServerError):
    """NOPROTO: the server speaks no RESP3."""


class ExecAbortError(ServerError):
    """EXECABORT: a command of the transaction could not be queued, so none ran."""


BY_CODE: Final[dict[str, type[ServerError]]] = {
    "WRONGPASS": WrongPasswordError,
    "NOAUTH": NotAuthenticatedError,
    "NOPERM": PermissionDeniedError,
    "WRONGTYPE": WrongTypeError,
    "OOM": OutOfMemoryError,
    "BUSY": BusyError,
    "EXISTS": ExistsError,
    "LOADING": LoadingError,
    "MISCONF": NotPersistedError,
    "COLDMISS": ColdMissError,
    "MOVED": MovedError,
    "NOPROTO": NoProtocolError,
    "EXECABORT": ExecAbortError,
}


def server_error(line: str) -> ServerError:
    """The error for one error line, without its leading '-' and its line end."""
    code, _, text = line.partition(" ")
    if code.isupper() and code.isalnum():
        return BY_CODE.get(code, ServerError)(text, code)
    return ServerError(line)
