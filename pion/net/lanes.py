"""The two protocols that a connection can speak: RESP and the binary lane.

A connection drives one lane object and knows neither protocol. What differs is how requests are parsed, how one is run,
and how replies and errors are encoded; everything else (turns, budgets, time-outs, waiting for the log) is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from pion.context import Context, Services
from pion.dispatch import Dispatcher
from pion.errors import PionError
from pion.later import Later
from pion.protocol.binary import BinaryParser, BinaryRefused, BinaryRequest
from pion.protocol.binary_answers import Answer, Short, answer_to, encode_answer, error_frame, error_instead
from pion.protocol.encode import Part, array_header, encode, error_line, map_header
from pion.protocol.resp import Refused, Request, RespParser
from pion.replies import Buffer, ErrorReply, Map, Reply, Simple

Allocate: TypeAlias = Callable[[int], memoryview | None]
Reserve: TypeAlias = Callable[[int], bool]


class Parser(Protocol):
    """What a connection needs of a parser; `pion.protocol.resp` explains it."""

    restricted: bool
    need_data: bool
    payload_left: int
    awaited: int

    @property
    def trailer_bytes(self) -> int:
        """What follows a payload on the wire before its request is complete."""

    @property
    def in_request(self) -> bool:
        """A request has begun whose header is complete."""

    @property
    def between_requests(self) -> bool:
        """Nothing of an unfinished request has arrived."""

    @property
    def unfinished(self) -> Sequence[Buffer]:
        """What is known of the request whose payload memory is asked for."""

    def requests(self, limit: int) -> Sequence[Any]:
        """Up to `limit` complete requests. Raises `ProtocolError`."""

    def feed(self, data: bytes) -> None:
        """Give the next bytes of the stream."""

    def target(self) -> memoryview | None:
        """Where the driver must put the next bytes."""

    def filled(self, nbytes: int) -> None:
        """The driver put so many bytes there."""

    def resume(self) -> None:
        """Ask for the memory again that was not there yet."""

    def close(self) -> None:
        """Give up what was received."""


class Lane(Protocol):
    """One client's protocol. A request is a list: its command's name first, then what the command is about."""

    @property
    def name(self) -> str:
        """As CLIENT LIST shows it."""

    @property
    def parser(self) -> Parser:
        """The client's requests."""

    @property
    def small(self) -> type[Any]:
        """The type of replies that are small and have their bytes in `wire`; they take the shortest way."""

    @property
    def refused(self) -> type[Any]:
        """The type of requests whose payload had no memory."""

    @property
    def execute(self) -> Callable[[Context, Any], Awaitable[Any]]:
        """The reply to a request, or a `Later`. Cancellation: as `Dispatcher.execute`."""

    def answer(self, request: Any, reply: Any) -> Any:
        """A handler's reply as `execute` returns it."""

    def encode(self, reply: Any, resp: int, out: list[Part]) -> None:
        """Append a reply's buffers. Raises `TypeError` for what is no reply."""

    def begin_long(self, reply: Any, resp: int, out: list[Part]) -> Iterable[object]:
        """Append what comes before the items of a long array or map, and return the items."""

    def unsendable(self, context: Context, request: Any, error: TypeError) -> Any:
        """The reply in place of a value that is none."""

    def refusal(self, request: Any, error: ErrorReply) -> Any:
        """The reply to a request whose payload had no memory."""

    def protocol_error(self, error: PionError) -> bytes:
        """What is sent before the connection is closed for broken protocol."""

    def error_instead(self, encoded: Part, error: PionError) -> bytes:
        """An error in place of a reply that was encoded already, whose first part is `encoded`."""


MakeLane: TypeAlias = Callable[[Services, Dispatcher, Allocate, Reserve], Lane]
"""Called for each connection: `RespLane` or `BinaryLane`."""


class RespLane:
    """The Redis protocol."""

    __slots__ = ("_dispatcher", "execute", "parser")

    name: Final = "resp"
    small: Final = Simple
    refused: Final = Refused

    def __init__(self, services: Services, dispatcher: Dispatcher, allocate: Allocate, reserve: Reserve) -> None:
        config = services.config
        self._dispatcher = dispatcher
        self.execute = dispatcher.execute
        self.parser: Parser = RespParser(
            max_bulk_bytes=config.max_bulk_bytes, max_args=config.max_args, allocate=allocate, reserve=reserve
        )

    encode = staticmethod(encode)

    def answer(self, request: Request, reply: Reply) -> Reply:
        """See `Lane`."""
        return reply

    def begin_long(self, reply: Map | list[Reply], resp: int, out: list[Part]) -> Iterable[object]:
        """See `Lane`."""
        if isinstance(reply, Map):
            out.append(map_header(len(reply.pairs), resp))
            return itertools.chain.from_iterable(reply.pairs)
        out.append(array_header(len(reply)))
        return reply

    def unsendable(self, context: Context, request: Request, error: TypeError) -> Reply:
        """See `Lane`."""
        return self._dispatcher.unsendable(context, self._dispatcher.find(request), error)

    def refusal(self, request: Refused, error: ErrorReply) -> Reply:
        """See `Lane`."""
        return error

    def protocol_error(self, error: PionError) -> bytes:
        """See `Lane`."""
        return error_line(error.code, str(error))

    def error_instead(self, encoded: Part, error: PionError) -> bytes:
        """See `Lane`."""
        return error_line(error.code, str(error))


class BinaryLane:
    """The binary lane: each answer carries the id of its request."""

    __slots__ = ("_dispatcher", "_parser", "parser")

    name: Final = "binary"
    small: Final = Short
    refused: Final = BinaryRefused

    def __init__(self, services: Services, dispatcher: Dispatcher, allocate: Allocate, reserve: Reserve) -> None:
        self._dispatcher = dispatcher
        self._parser = BinaryParser(
            heads=services.registry.heads,
            max_body_bytes=services.config.max_bulk_bytes,
            allocate=allocate,
            reserve=reserve,
        )
        self.parser: Parser = self._parser

    async def execute(self, context: Context, request: BinaryRequest) -> Answer | Short | Later:
        """See `Lane`."""
        reply = await self._dispatcher.execute_packed(context, request)
        return reply if type(reply) is Later else answer_to(request, reply)

    def answer(self, request: BinaryRequest, reply: Any) -> Answer | Short:
        """See `Lane`."""
        return answer_to(request, reply)

    def encode(self, reply: Answer | Short, resp: int, out: list[Part]) -> None:
        """See `Lane`."""
        encode_answer(reply, out)

    def begin_long(self, reply: Any, resp: int, out: list[Part]) -> Iterable[object]:
        """See `Lane`. An answer is one frame, never an array."""
        raise NotImplementedError

    def unsendable(self, context: Context, request: BinaryRequest, error: TypeError) -> Answer | Short:
        """See `Lane`."""
        entry = self._dispatcher.find_packed(request)
        return answer_to(request, self._dispatcher.unsendable(context, entry, error))

    def refusal(self, request: BinaryRefused, error: ErrorReply) -> Answer | Short:
        """See `Lane`."""
        return answer_to(request, error)

    def protocol_error(self, error: PionError) -> bytes:
        """See `Lane`."""
        return error_frame(*self._parser.failed, error)

    def error_instead(self, encoded: Part, error: PionError) -> bytes:
        """See `Lane`."""
        return error_instead(encoded, error)
