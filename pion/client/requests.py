"""One request of a client: what is sent, how its reply becomes a result, and whether it may be sent again.

Most are made for RESP. An `Either` can travel on both lanes and is put into the form of the connection that it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

import attrs

from pion.client.binary import Frame, Packed
from pion.client.packing import Argument, Buffer, pack
from pion.client.sinks import CallerMemory, FreshArrays

T = TypeVar("T")

Sink: TypeAlias = FreshArrays | CallerMemory


@attrs.frozen(eq=False)
class Request(Generic[T]):
    """One command of RESP, ready to send."""

    name: str
    buffers: list[Buffer] = attrs.field(repr=False)
    """The bytes, which may hold a password."""
    convert: Callable[[object], T]
    """Makes the result of the reply, or raises `BadReplyError`. Never sees an error reply."""
    reads: bool = False
    """Changes nothing, so it may be sent again when the connection was lost."""
    wait_s: float = 0.0
    """How long the server itself may wait before it answers."""
    sink: Sink | None = None
    claims: bool = False
    """Answered with OK, it makes a prefix this connection's to fill, and nobody else's."""

    @property
    def repeatable(self) -> bool:
        """May be sent again now."""
        return self.reads and (self.sink is None or self.sink.reusable)

    @property
    def expected(self) -> Sink | None:
        """What the reader is told of this request."""
        return self.sink


@attrs.frozen(eq=False, kw_only=True)
class Either(Generic[T]):
    """One request that either lane can carry. Its reply is the same on both, and so is what `convert` makes of it."""

    args: tuple[Argument, ...] = attrs.field(repr=False)
    """As a command of RESP."""
    packed: Packed
    convert: Callable[[object], T]
    reads: bool = False
    sink: Sink | None = None
    owned: bool = False
    """About a session that may be a side of a pending prefix, which only the connection that claimed it may use: the
    one that speaks RESP.
    """
    wait_s: float = 0.0

    @property
    def name(self) -> str:
        """The command's name."""
        return str(self.args[0])

    @property
    def repeatable(self) -> bool:
        """May be sent again now."""
        return self.reads and (self.sink is None or self.sink.reusable)

    def over_resp(self) -> Request[T]:
        """As a command of RESP."""
        if self.sink is not None:
            # It may have been tried on the other lane, where the sizes were known.
            self.sink.reserve(())
        return Request(self.name, pack(self.args), self.convert, self.reads, self.wait_s, self.sink)

    def over_binary(self, number: int) -> Frame:
        """As request `number` of a binary connection."""
        return self.packed.numbered(number, self.sink)


Call: TypeAlias = Request[T] | Either[T]
