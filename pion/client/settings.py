"""How a client connects: one frozen record, shared by the synchronous and the Trio client."""

from __future__ import annotations

import ssl
from typing import Any, Final, get_args

import attrs

from pion.client.errors import BadReplyError, ServerError
from pion.client.limits import FIRST_PAUSE_S, MAX_PAUSE_S
from pion.client.packing import Argument
from pion.client.records import LaneChoice
from pion.config import VERSION

LIBRARY: Final = "pion"
"""What CLIENT SETINFO is told."""


def _no_tls(_: object, __: object, value: ssl.SSLContext | None) -> None:
    if value is not None:
        raise NotImplementedError("TLS is not part of this version of the client; use a tunnel or a Unix socket")


def _positive(_: object, attribute: Any, value: Any) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"{attribute.name} must be over 0, not {value!r}")


@attrs.frozen(kw_only=True)
class Settings:
    """The arguments of a client, checked."""

    host: str
    port: int
    username: str | None = None
    password: str | None = attrs.field(default=None, repr=False)
    unix: str | None = None
    tls: ssl.SSLContext | None = attrs.field(default=None, validator=_no_tls)
    timeout_s: float | None = attrs.field(default=30.0, validator=_positive)
    retries: int = attrs.field(default=3, validator=attrs.validators.ge(0))
    max_reply_bytes: int = attrs.field(validator=_positive)
    receive_buffer_bytes: int | None = attrs.field(default=None, validator=_positive)
    lane: LaneChoice = attrs.field(default="auto", validator=attrs.validators.in_(get_args(LaneChoice)))

    def __attrs_post_init__(self) -> None:
        if self.lane == "binary" and self.unix is not None:
            raise ValueError("lane 'binary' needs a host and a port; a Unix socket carries RESP only")
        if self.username is not None and self.password is None:
            raise ValueError("a username needs a password")

    @property
    def only_resp(self) -> bool:
        """The binary lane is not to be looked for."""
        return self.lane == "resp" or self.unix is not None

    @property
    def where(self) -> str:
        """The server's address, for messages."""
        return self.unix if self.unix is not None else f"{self.host}:{self.port}"

    def greeting(self) -> list[tuple[Argument, ...]]:
        """What a new connection says first. The CLIENT SETINFO lines are a courtesy; a server may refuse them."""
        hello: tuple[Argument, ...] = ("HELLO", "3")
        if self.password is not None:
            hello += ("AUTH", self.username or "default", self.password)
        return [
            hello,
            ("CLIENT", "SETINFO", "LIB-NAME", LIBRARY),
            ("CLIENT", "SETINFO", "LIB-VER", VERSION),
        ]

    def check_greeting(self, replies: list[object]) -> None:
        """Raises the server's error (a wrong password, say), or `BadReplyError` if it speaks another protocol.

        Without replies it does nothing: the connection's own error says more.
        """
        if not replies:
            return
        hello = replies[0]
        if isinstance(hello, ServerError):
            raise hello
        if not isinstance(hello, dict) or hello.get(b"proto") != 3:
            raise BadReplyError(f"{self.where} answered HELLO 3 with {hello!r:.200}")

    def pause_s(self, attempt: int) -> float:
        """Pause before try number `attempt` (0 is the first repetition)."""
        return float(min(FIRST_PAUSE_S * 2**attempt, MAX_PAUSE_S))

    def patience_s(self, wait_s: float) -> float | None:
        """Longest silence for a command that the server itself may let wait for `wait_s`."""
        return None if self.timeout_s is None else self.timeout_s + wait_s
