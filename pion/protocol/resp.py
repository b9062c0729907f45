"""The request parser of the RESP lane: bytes in, requests out. It knows no socket and allocates nothing itself.

Theory of operation. A chunk of bytes, as the socket gave it, is walked in one of two ways:

- `_walk` (see `pion.protocol.walk`): the chunk is split at every CRLF, once, and a request is taken if each declared
  length equals the length of its line. That is nearly all traffic, and costs a few list operations a request.
- `_step`: from an exact byte position, header by header. It takes over where a line doesn't fit: a binary argument that
  holds CRLF, an inline command, the end of the chunk, a payload, and everything malformed. What is left of the chunk is
  then parsed this way.

Only `_step` keeps state between chunks: the arguments so far, how many are missing, and the length of the one being
received. The unparsed tail is at most one header line or one argument of `INLINE_ARG_BYTES`. A longer argument (a
payload) is received into memory that `allocate` returns: `target()` names the part still missing, `filled(n)` says that
the driver put n bytes there. If `allocate` refuses, the bytes are counted and dropped (`discarding`), and the request
comes out as a `Refused`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from pion.errors import ProtocolError
from pion.limits import HEADER_LINE_BYTES, INLINE_ARG_BYTES, UNAUTHENTICATED_ARGS, UNAUTHENTICATED_BULK_BYTES
from pion.protocol.incoming import LATER, Incoming
from pion.protocol.inline import split_inline
from pion.protocol.walk import decimal, fitting_arguments, walk, whole_request
from pion.replies import Buffer

Request: TypeAlias = list[Buffer]
"""argv[0] is the name as it was sent. Arguments over `INLINE_ARG_BYTES` are memoryviews that the handler may keep."""

ARGUMENT_OVERHEAD_BYTES: Final = 56
"""What a short argument costs beside its bytes: the object's header and its place in the list."""

MANY_ARGUMENTS: Final = 16
"""From here on, taking arguments in one pass is worth splitting the rest of the chunk."""

SPARSE_BYTES: Final = 2048
SPARSE_LINES: Final = 4
"""A longer chunk with fewer line ends than this in a quarter of it, taken from its middle, is mostly one argument:
looking for line ends in all of its bytes costs 1 ns each."""


class Refused(list[Buffer]):
    """A request whose payload did not fit the receive budget. `argv` is incomplete; `nbytes` was asked for."""

    nbytes: int = 0


class RespParser(Incoming):
    """Parses the requests of one connection.

    `allocate(n)` returns writable memory for a payload of n bytes, None to refuse it, or `LATER`. `reserve(n)` is told
    that n more bytes of short arguments are held for an unfinished request; False refuses the request. Set `restricted`
    while the client must still authenticate: the small limits apply then.
    """

    __slots__ = (
        "_allocate",
        "_argv",
        "_held",
        "_index",
        "_length",
        "_lines",
        "_max_args",
        "_max_bulk",
        "_missing",
        "_refused",
        "_reserve",
        "_reserved",
        "_walkable",
    )

    trailer_bytes: Final = 2
    """What follows a payload on the wire before its request is complete."""

    def __init__(
        self,
        *,
        max_bulk_bytes: int,
        max_args: int,
        allocate: Callable[[int], memoryview | None],
        reserve: Callable[[int], bool] = lambda nbytes: True,
    ) -> None:
        super().__init__()
        self._max_bulk = max_bulk_bytes
        self._max_args = max_args
        self._allocate = allocate
        self._reserve = reserve
        self._lines: list[bytes] = []
        self._index = 0
        self._walkable = False
        self._argv: Request | None = None
        self._missing = 0
        self._length = -1
        self._held = 0
        self._refused = 0
        self._reserved = False

    def feed(self, data: bytes) -> None:
        """Give the next bytes of the stream. Take all requests out first, else the rest is copied."""
        if self._walkable:
            self._leave_walk()
        self._append(data)
        self._walkable = self._argv is None
        self._lines = []

    def resume(self) -> None:
        """Ask for the memory again that was not there yet. Call `requests` afterwards: data may be waiting."""
        length, self.awaited = self.awaited, 0
        assert self._argv is not None  # noqa: S101  the payload is an argument of an unfinished request
        self._start_payload(self._argv, length)

    def close(self) -> None:
        """Give up what was received of an unfinished request. The parser is useless after it."""
        self._argv = self._target = None
        self._data, self._lines = b"", []
        self.payload_left = self.awaited = 0

    @property
    def in_request(self) -> bool:
        """A request has begun whose header is complete; reservations, if any, belong to it."""
        return self._argv is not None

    @property
    def unfinished(self) -> Sequence[Buffer]:
        """The arguments so far of the request whose payload memory is asked for."""
        return self._argv or ()

    @property
    def between_requests(self) -> bool:
        """Nothing of an unfinished request has arrived."""
        return not self._walkable and self._argv is None and self._position >= len(self._data)

    def next_request(self) -> Request | None:
        """The next complete request, or None if more data is needed. Raises `ProtocolError`."""
        while True:
            found = self.requests(1)
            if found or self.need_data:
                return found[0] if found else None

    def requests(self, limit: int) -> list[Request]:
        """Up to `limit` complete requests.

        Fewer may come, or none, without `need_data`: requests without arguments count for the limit but are left out,
        and a request that reserved memory is the last of its batch, so that the caller knows which one to release it
        for. Raises `ProtocolError` once the requests before the bad one have been taken out; the parser is useless
        after it.
        """
        found: list[Request] = []
        self.need_data = False
        if self._walkable:
            if self.restricted:
                self._leave_walk()
            else:
                self._walk(found, limit)
                if self._walkable or self.need_data:
                    return found
        try:
            for _ in range(limit - len(found)):
                request = self._step()
                if request is None:
                    self.need_data = True
                    break
                if request:
                    found.append(request)
                    if self._reserved:
                        self._reserved = False
                        break
        except ProtocolError:
            if not found:
                raise
            # Nothing was consumed past the bad byte, so the next call raises the same error again.
        return found

    # -- the fast way ---------------------------------------------------------------------------------------------

    def _walk(self, found: list[Request], limit: int) -> None:
        lines = self._lines
        if not lines:
            data = self._data
            middle = len(data) // 2
            if len(data) > SPARSE_BYTES and data.count(b"\r\n", middle, middle + SPARSE_BYTES // 4) < SPARSE_LINES:
                only = whole_request(data)
                if only is None:
                    self._leave_walk()
                else:
                    found.append(only)  # type: ignore[arg-type]  # bytes are buffers
                    self._end_of_chunk()
                return
            lines = self._lines = data.split(b"\r\n")
            self._index = 0
        self._index = walk(lines, self._index, limit, found)  # type: ignore[arg-type]  # bytes are buffers
        if self._index == len(lines) - 1 and not lines[-1]:  # the chunk ends with a request, as most do
            self._end_of_chunk()
        elif len(found) < limit:
            self._leave_walk()

    def _end_of_chunk(self) -> None:
        self._data, self._position, self._lines = b"", 0, []
        self._walkable = False
        self.need_data = True

    def _leave_walk(self) -> None:
        """Go on by position for the rest of this chunk."""
        lines = self._lines
        if lines:
            self._position += sum(map(len, lines[: self._index])) + 2 * self._index
        self._lines = []
        self._walkable = False
        if self._position >= len(self._data):
            self._data, self._position = b"", 0

    # -- the general way ------------------------------------------------------------------------------------------

    def _step(self) -> Request | None:
        """One request from the current position, an empty one included, or None if the data ends before it does."""
        if self._argv is None:
            if self._position >= len(self._data):
                return None
            if self._data[self._position] != 0x2A:
                line = self._inline_line()
                if line is None:
                    return None
                arguments = split_inline(line)
                if self.restricted and len(arguments) > UNAUTHENTICATED_ARGS:
                    raise ProtocolError("unauthenticated multibulk length")
                self._position += len(line) + 1
                return arguments  # type: ignore[return-value]  # list[bytes] is a list of buffers
            line = self._header_line("mbulk count")
            if line is None:
                return None
            count = self._multibulk_length(line)
            self._position += len(line) + 2
            if count == 0:
                return []
            self._argv = []
            self._missing = count
        start = self._position
        before = len(self._argv)
        if self._missing >= MANY_ARGUMENTS and self._length < 0:
            self._take_fitting(self._argv)
        while self._missing:
            if not self._argument(self._argv):
                self._hold(self._position - start, len(self._argv) - before)
                return None
            self._missing -= 1
        request = self._argv
        self._argv = None
        self._held = 0
        if self._refused:
            refused = Refused(request)
            refused.nbytes = self._refused
            self._refused = 0
            return refused
        return request

    def _take_fitting(self, argv: Request) -> None:
        """One by one, a chunk of short arguments would hold the loop for several milliseconds."""
        arguments, nbytes = fitting_arguments(self._data[self._position :], self._missing)
        if not self._refused:
            argv += arguments
        self._missing -= len(arguments)
        self._position += nbytes

    def _argument(self, argv: Request) -> bool:
        """Take one argument; False if the data ends first."""
        data = self._data
        if self._length < 0:
            if self._position >= len(data):
                return False
            if data[self._position] != 0x24:
                raise ProtocolError(f"expected '$', got '{_show_byte(data[self._position])}'")
            line = self._header_line("bulk count")
            if line is None:
                return False
            length = self._bulk_length(line)
            self._position += len(line) + 2
            self._length = length
            if length > INLINE_ARG_BYTES:
                self._start_payload(argv, length)
        if self.awaited:
            return False
        if self._length > INLINE_ARG_BYTES:
            return self._payload()
        end = self._position + self._length
        if end + 2 > len(data):
            return False
        if data[end : end + 2] != b"\r\n":
            raise ProtocolError("bulk string is not followed by CRLF")
        if not self._refused:
            argv.append(data[self._position : end])
        self._position = end + 2
        self._length = -1
        return True

    def _start_payload(self, argv: Request, length: int) -> None:
        self.payload_left = length
        self._target = None
        if self._refused:
            return
        self._reserved = True
        memory = self._allocate(length)
        if memory is None:
            self._refuse(argv, length)
            return
        if memory is LATER:
            self.payload_left, self.awaited = 0, length
            return
        self._target = memory
        argv.append(memory.toreadonly())

    def _payload(self) -> bool:
        self._held -= self._fill_from_chunk()  # charged when its memory was allocated
        if self.payload_left or self.buffered_bytes < 2:
            return False
        if self._data[self._position : self._position + 2] != b"\r\n":
            raise ProtocolError("bulk string is not followed by CRLF")
        self._position += 2
        self._length = -1
        return True

    def _hold(self, nbytes: int, arguments: int) -> None:
        """Charge what an unfinished request holds, once it is more than one argument may be."""
        self._held += nbytes + arguments * ARGUMENT_OVERHEAD_BYTES
        if self._held > INLINE_ARG_BYTES and self._argv is not None and not self._refused:
            self._reserved = True
            if not self._reserve(self._held):
                self._refuse(self._argv, self._held)
            self._held = 0

    def _refuse(self, argv: Request, nbytes: int) -> None:
        self._refused = nbytes
        self._target = None
        # The name and a short first argument, usually what a command is about, stay.
        del argv[2 if len(argv) > 1 and type(argv[1]) is bytes else 1 :]

    # -- lines and numbers ----------------------------------------------------------------------------------------

    def _header_line(self, what: str) -> bytes | None:
        end = self._data.find(b"\r\n", self._position, self._position + HEADER_LINE_BYTES)
        if end >= 0:
            return self._data[self._position : end]
        if len(self._data) - self._position >= HEADER_LINE_BYTES:
            raise ProtocolError(f"too big {what} string")
        return None

    def _inline_line(self) -> bytes | None:
        limit = UNAUTHENTICATED_BULK_BYTES if self.restricted else HEADER_LINE_BYTES
        end = self._data.find(b"\n", self._position, self._position + limit)
        if end >= 0:
            return self._data[self._position : end]
        if len(self._data) - self._position >= limit:
            raise ProtocolError("too big inline request")
        return None

    def _multibulk_length(self, line: bytes) -> int:
        count = decimal(line)
        if count is None:
            if line == b"*-1":
                return 0
            raise ProtocolError("invalid multibulk length")
        if self.restricted and count > UNAUTHENTICATED_ARGS:
            raise ProtocolError("unauthenticated multibulk length")
        if count > self._max_args:
            raise ProtocolError("invalid multibulk length")
        return count

    def _bulk_length(self, line: bytes) -> int:
        length = decimal(line)
        if length is None:
            raise ProtocolError("invalid bulk length")
        if self.restricted and length > UNAUTHENTICATED_BULK_BYTES:
            raise ProtocolError("unauthenticated bulk length")
        if length > self._max_bulk:
            raise ProtocolError("invalid bulk length")
        return length


def _show_byte(value: int) -> str:
    return chr(value) if 0x20 <= value < 0x7F else f"\\x{value:02x}"
