"""What a command handler may return. Data only: `pion.protocol` turns these into bytes, for RESP2 or RESP3.

| Python value | RESP2 | RESP3 |
|---|---|---|
| `Simple("OK")` | simple string | simple string |
| `ErrorReply(code, text)` | error | error |
| `int` | integer | integer |
| `float` | bulk string | double |
| `bytes`, `str` | bulk string | bulk string |
| `Blob(parts)` | bulk string, the buffers sent as they are | same |
| `Stream(nbytes, pieces)` | bulk string, made piece by piece while the socket drains | same |
| `None` | null bulk | null |
| `list`, `tuple` | array | array |
| `Map(pairs)` | flat array | map |
| `Static(value)` | as the value; encoded once | same |
| `NO_REPLY` | nothing | nothing |

Where `session.may_leave` says so a handler may also return a `pion.later.Later`, which another thread completes with
one of these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import attrs

Buffer: TypeAlias = bytes | memoryview


class Simple:
    """A RESP simple string. The line is encoded once, here, since the few that exist are sent millions of times."""

    __slots__ = ("text", "wire")

    def __init__(self, text: str) -> None:
        if "\r" in text or "\n" in text:
            raise ValueError("a simple string can't hold a line break")
        self.text: Final = text
        self.wire: Final = b"+" + text.encode() + b"\r\n"

    def __repr__(self) -> str:
        return f"Simple({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Simple) and other.text == self.text

    def __hash__(self) -> int:
        return hash((Simple, self.text))


class BrokenReplyError(Exception):
    """What is left of a reply can't be made. Raised by a stream's piece, or by a check."""

    def __init__(self, reason: str, tell: Callable[[], object]) -> None:
        super().__init__(reason)
        self.tell: Final = tell
        """Called on the event loop, once, before the connection ends."""


class Check(ABC):
    """Stands among the parts of a Blob, in front of bytes that nobody has looked at: they are sent once it has passed.

    It is worked off while what comes before is being sent, and takes no memory of its own. `step` and `finish` raise
    BrokenReplyError if the bytes must not be sent.
    """

    __slots__ = ()
    nbytes: Final = 0

    @abstractmethod
    def ready(self) -> bool:
        """Whether the next step waits for nothing."""

    @abstractmethod
    def step(self) -> bool:
        """Some 0.1 ms of it, on the event loop; whether that was all."""

    @abstractmethod
    def finish(self) -> None:
        """All that is left. Blocks; in a thread."""


@attrs.frozen
class ErrorReply:
    """An error as a value: inside the array that EXEC returns, or made by dispatch from an exception."""

    code: str
    text: str


@attrs.frozen
class Blob:
    """A bulk string made of buffers that are sent without being joined or copied.

    `owners` keeps the stored blocks (and with them their charge against the memory budget) until the reply is sent.
    """

    parts: Sequence[Buffer | Check]
    nbytes: int
    owners: object = None


@attrs.frozen
class Stream:
    """A bulk string whose bytes are made while the socket drains.

    `pieces` yields functions without arguments; each returns the next buffer (at most about 1 MiB) and may be run in a
    thread. Together they must make exactly `nbytes` bytes. `in_thread` says whether a piece is big enough to be worth a
    thread hop (about 75 us). A piece that raises BrokenReplyError ends the connection: nothing else is left once a
    reply has begun.
    """

    nbytes: int
    pieces: Iterable[Callable[[], Buffer]]
    in_thread: bool = True


@attrs.frozen
class Map:
    """Field-value pairs in order: a map in RESP3, a flat array in RESP2."""

    pairs: Sequence[tuple[object, object]]


@attrs.frozen
class BinaryReply:
    """The answer of a binary command: a status of the binary lane, packed meta, and the body as a value of this module.

    `body` is `bytes`, a `Blob`, a `Stream`, or a list of these, sent one after the other as one body. Only handlers of
    `BinaryCommand` rows return it; an exception becomes an answer whose status is its class's and whose body its text.
    """

    status: int = 0
    meta: bytes = b""
    body: bytes | Blob | Stream | Sequence[bytes | Blob | Stream] = b""


class Static:
    """A reply that never changes: `value` is encoded the first time it is sent, for RESP2 and RESP3 each."""

    __slots__ = ("value", "wire")

    def __init__(self, value: Reply) -> None:
        self.value: Final = value
        self.wire: Final[dict[int, bytes]] = {}
        """RESP version -> what is sent; filled by `pion.protocol.encode`."""

    def __repr__(self) -> str:
        return f"Static({self.value!r})"


class _NoReply:
    def __repr__(self) -> str:
        return "NO_REPLY"


NO_REPLY: Final = _NoReply()
OK: Final = Simple("OK")
QUEUED: Final = Simple("QUEUED")

Reply: TypeAlias = (
    Simple | ErrorReply | int | float | bytes | str | Blob | Stream | Static | Map | Sequence["Reply"] | _NoReply | None
)

ITEM_BYTES: Final = 64
"""Memory of one Python object in a reply, without the text it holds."""


def held_bytes(reply: object) -> int:
    """Memory that only this reply holds: texts and the objects themselves.

    Stored rows and received arguments, which a reply shares, and `Static` parts belong to other budgets. Raises
    `TypeError` for a value that is no reply.
    """
    if isinstance(reply, bytes | str):
        return ITEM_BYTES + len(reply)
    if isinstance(reply, list | tuple):
        return ITEM_BYTES + sum(map(held_bytes, reply))
    if isinstance(reply, Map):
        return ITEM_BYTES + sum(held_bytes(field) + held_bytes(value) for field, value in reply.pairs)
    if reply is None or isinstance(reply, _PLAIN):
        return ITEM_BYTES
    raise TypeError(f"{type(reply).__name__} is not a reply")


_PLAIN: Final = (Simple, ErrorReply, int, float, memoryview, Blob, Stream, Static, _NoReply)
