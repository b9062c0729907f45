"""What differs between the two lanes when a connection opens and a request is sent. Pure.

A connection has one of these, and is otherwise the same on both. The binary lane is found by asking the server for its
port on the RESP lane, and is on the host that answered there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from pion.client import binary
from pion.client.commands import generic
from pion.client.errors import ConnectFailedError, ServerError
from pion.client.exchange import Outgoing
from pion.client.limits import BINARY_PATIENCE_S
from pion.client.replies import ReplyReader
from pion.client.requests import Call, Request
from pion.client.settings import Settings

Address: TypeAlias = tuple[int, Any]
"""Address family, and what the socket's `connect` takes."""


class RespLane:
    """One connection that speaks RESP."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.reader = ReplyReader(settings.max_reply_bytes)
        self.where = settings.where
        self.address: Address | None = None
        """None: look the host up."""
        self.patience_s = settings.timeout_s
        """Longest silence until the greeting is over."""

    def greeting(self) -> Sequence[Outgoing]:
        """What a new connection says first."""
        return [generic(line) for line in self._settings.greeting()]

    def check_greeting(self, replies: list[object]) -> None:
        """Raises the server's error, or `BadReplyError`. Without replies it does nothing."""
        self._settings.check_greeting(replies)

    def form(self, request: Call[Any]) -> Request[Any]:
        """The request as this connection sends it."""
        return request if isinstance(request, Request) else request.over_resp()


class BinaryLane:
    """One connection that speaks the binary protocol, to `address`. Opening it may take no more than `limit_s`."""

    def __init__(self, settings: Settings, address: Address, limit_s: float | None = None) -> None:
        self._settings = settings
        self.reader = binary.BinaryReader(settings.max_reply_bytes)
        self.address: Address | None = address
        self.where = f"{settings.host}:{address[1][1]}"
        limits = [limit_s, settings.timeout_s, BINARY_PATIENCE_S if settings.lane == "auto" else None]
        self.patience_s = min((each for each in limits if each is not None), default=None)

    def greeting(self) -> Sequence[Outgoing]:
        """AUTH, if there is a password, and PING, which tells the lane from whatever else may listen there.

        Raises `ConnectFailedError` for a password that the lane can't carry.
        """
        packed = [binary.Packed(code=binary.PING)]
        if self._settings.password is not None:
            names = self._settings.username or "default", self._settings.password
            meta = binary.joined(*map(binary.packed_name, names))
            if meta is None:
                raise ConnectFailedError("the user name or the password is too long for the binary lane")
            packed.insert(0, binary.Packed(code=binary.AUTH, meta=meta))
        return [each.numbered(self.reader.number()) for each in packed]

    def check_greeting(self, replies: list[object]) -> None:
        """Raises the server's error."""
        for reply in replies:
            if isinstance(reply, ServerError):
                raise reply

    def form(self, request: Call[Any]) -> Outgoing:
        """The request as this connection sends it."""
        if isinstance(request, Request):
            raise TypeError(f"{request.name} is a command of RESP")
        return request.over_binary(self.reader.number())


Lane: TypeAlias = RespLane | BinaryLane


def binary_port(info: dict[str, str], address: Address) -> int | None:
    """The port of the binary lane in the INFO of the server at `address`; None if it has none.

    And None if the server listens on another port than the one that was connected to: behind a tunnel or a port mapping
    its binary port is somebody else's here, perhaps another Pion's.
    """
    if info.get("tcp_port", str(address[1][1])) != str(address[1][1]):
        return None
    text = info.get("binary_port", "")
    return int(text) if text.isdecimal() and 0 < int(text[:6]) < 1 << 16 else None


def beside(address: Address, port: int) -> Address:
    """Another port of the same host."""
    family, name = address
    return family, (name[0], port, *name[2:])
