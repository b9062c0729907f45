"""Requests and answers of the binary lane. Pure: values in, buffers out; bytes in, values out.

A request is a header, packed meta and a body; so is its answer, which has the request's number. Small parts are joined
with the header, a large body is sent as it lies. `BinaryReader` is to this lane what `ReplyReader` is to RESP, and is
driven in the same way: bytes that belong to a large part of a body are received straight into `target()`, everything
else arrives by `feed`. A `Sink` chooses the memory of the parts; there is nothing between two parts, so the largest
answer is one header and then one receive after the other.

Answers come in the order of the requests. What is not such an answer, or is larger than allowed, raises
`BadReplyError` before memory is taken, and the reader can't be used again: the position in the stream is lost.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import attrs

from pion.client.errors import BY_CODE, BadReplyError, ServerError
from pion.client.limits import (
    DIRECT_BYTES,
    JOIN_BYTES,
    MAX_ANSWER_META_BYTES,
    MAX_ERROR_BYTES,
    MAX_REPLY_BYTES,
    READ_BYTES,
)
from pion.client.packing import Buffer
from pion.client.records import Name, Wire
from pion.client.replies import NEED_DATA, Sink, room_of
from pion.client.sinks import CallerMemory, FreshArrays
from pion.errors import Status

HEADER: Final = struct.Struct("<HBBIB3xIQ")
"""Magic, version, command, request number, status, three zero bytes, bytes of meta, bytes of body."""
MAGIC: Final = 0xCA5E
VERSION: Final = 1

AUTH: Final = 0x01
PING: Final = 0x02
V_FETCH_RANGE: Final = 0x10
V_STOREBATCH: Final = 0x11
V_FETCH_BATCH: Final = 0x12
PREFIX_FETCH: Final = 0x14
ATTEND_STORE: Final = 0x20
ATTEND_LOOKUP: Final = 0x21
ATTEND_QUERY: Final = 0x22
ATTEND_QUERY_FUSED: Final = 0x24
ATTEND_SPARSE: Final = 0x25
ATTEND_SPARSE_AUTO: Final = 0x26
ATTEND_SPARSE_AUTO_FUSED: Final = 0x27

WHOLE_PREFIX: Final = struct.pack("<II", 0, 0)

_WIRES: Final[dict[Wire, int]] = {"fp32": 0, "fp16": 1, "bf16": 2, "native": 3}
_MAX_U32: Final = 2**32 - 1
_STATUSES: Final = frozenset(Status)
_OK: Final = int(Status.OK)
_NO_ROOM: Final = memoryview(b"")

Parts: TypeAlias = Callable[[bytes, int], Sequence[int]]
"""(the answer's meta, bytes of its body) -> bytes of each part. Raises `BadReplyError` for meta that makes no sense."""


def packed_name(name: Name) -> bytes | None:
    """A name with its length; None for one that has no packed form."""
    data = name.encode() if isinstance(name, str) else name
    return struct.pack("<H", len(data)) + data if isinstance(data, bytes) and len(data) < 1 << 16 else None


def packed_numbers(*numbers: int) -> bytes | None:
    """Numbers of 32 bits; None if one has no packed form."""
    try:
        packed = struct.pack(f"<{len(numbers)}I", *numbers)
    except struct.error:
        return None
    return None if bool in map(type, numbers) else packed


def packed_wire(as_: Wire) -> bytes:
    """The form in which rows travel, which the caller has checked."""
    return bytes((_WIRES[as_],))


def packed_ranges(ranges: Sequence[tuple[int, int, int]]) -> bytes | None:
    """Their count, and (layer, start, end) each."""
    return packed_numbers(len(ranges), *(number for entry in ranges for number in entry))


def joined(*fields: bytes | None) -> bytes | None:
    """The meta of a request; None if one of its fields has no packed form."""
    return None if None in fields else b"".join(fields)  # type: ignore[arg-type]


def whole(meta: bytes, nbytes: int) -> Sequence[int]:
    """The body is one part."""
    return (nbytes,)


def sized(meta: bytes, nbytes: int) -> Sequence[int]:
    """Meta is a count of layers, and for each the bytes of K and of V."""
    layers = int.from_bytes(meta[:4], "little")
    if len(meta) != 4 + 16 * layers:
        raise BadReplyError(f"{len(meta)} bytes of meta for {layers} layers")
    return struct.unpack_from(f"<{2 * layers}Q", meta, 4)


def even(counts: Sequence[int]) -> Parts:
    """The body is rows of one length, `counts` of them in each part."""

    def sizes(meta: bytes, nbytes: int) -> Sequence[int]:
        rows = sum(counts)
        if nbytes % rows if rows else nbytes:
            raise BadReplyError(f"{nbytes} bytes are not {rows} rows")
        return [count * nbytes // rows if rows else 0 for count in counts]

    return sizes


@attrs.frozen(eq=False, kw_only=True)
class Packed:
    """A request but for its number, and what may answer it."""

    code: int
    meta: bytes = attrs.field(default=b"", repr=False)
    """May hold a password."""
    body: Sequence[Buffer] = attrs.field(default=(), repr=False)
    answers: Mapping[int, object] = attrs.field(factory=dict)
    """Status -> the word that such an answer means. An OK that is not among them gives its body."""
    parts: Parts | None = None
    """How the body is divided, for a reply that is a list; None if it is one value."""

    def numbered(self, number: int, sink: FreshArrays | CallerMemory | None = None) -> Frame:
        """The request as it is sent on one connection."""
        body_bytes = sum(map(len, self.body))
        header = HEADER.pack(MAGIC, VERSION, self.code, number, 0, len(self.meta), body_bytes)
        if body_bytes <= JOIN_BYTES:
            return Frame(number, self, [b"".join((header, self.meta, *self.body))], sink)
        buffers: list[Buffer] = []
        small: list[Buffer] = [header, self.meta]
        for part in self.body:
            if len(part) <= JOIN_BYTES:
                small.append(part)
                continue
            if small:
                buffers.append(b"".join(small))
                small = []
            buffers.append(part)
        if small:
            buffers.append(b"".join(small))
        return Frame(number, self, buffers, sink)


@attrs.frozen(eq=False)
class Frame:
    """One numbered request."""

    number: int
    packed: Packed
    buffers: list[Buffer] = attrs.field(repr=False)
    sink: FreshArrays | CallerMemory | None = None

    @property
    def expected(self) -> Frame:
        """What the reader is told of this request."""
        return self


class BinaryReader:
    """See the module. `max_bytes` bounds the body of one answer."""

    read_bytes: Final = READ_BYTES
    """How much to receive at once for the next `feed`."""

    def __init__(self, max_bytes: int = MAX_REPLY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()
        self._at = 0
        self._requests = 0
        self._frame: Frame | None = None
        self._begun = False
        """The header of an answer was taken."""
        self._status = 0
        self._meta_bytes = 0
        self._body_bytes = 0
        self._meta: bytes | None = None
        self._sink: Sink | None = None
        self._sizes: Iterator[int] = iter(())
        """Bytes of the parts that have not begun."""
        self._index = -1
        self._part = 0
        """Bytes that are still to come of the part that is being filled."""
        self._room = _NO_ROOM
        """What is left of the memory being filled."""
        self._text: bytearray | None = None
        """The body, when nobody else takes it."""
        self._values: list[object] = []

    @property
    def idle(self) -> bool:
        """Nothing of an answer has been seen yet."""
        return not self._begun and self._at == len(self._data)

    def number(self) -> int:
        """The number of the next request: never 0, which the server uses for what answers none."""
        self._requests += 1
        return (self._requests - 1) % _MAX_U32 + 1

    def expect(self, frame: Frame | None) -> None:
        """The next answer is to this request."""
        self._frame = frame

    def feed(self, data: bytes | memoryview) -> None:
        """Take what the socket gave."""
        if self._at:
            del self._data[: self._at]
            self._at = 0
        self._data += data

    def target(self) -> memoryview | None:
        """Where the next bytes must be received, if they belong to a large part of a body."""
        room = self._room
        return room if len(room) >= DIRECT_BYTES and self._at == len(self._data) else None

    def filled(self, n: int) -> None:
        """The first `n` bytes of `target()` hold data."""
        if n > len(self._room):
            raise ValueError("more was filled than was asked for")
        self._advance(n)

    def next_reply(self) -> object:
        """The next complete answer, or NEED_DATA. Errors are returned as `ServerError` values."""
        if not self._begun:
            if len(self._data) - self._at < HEADER.size:
                return NEED_DATA
            self._begin()
        if self._meta is None:
            end = self._at + self._meta_bytes
            if len(self._data) < end:
                return NEED_DATA
            self._meta = bytes(self._data[self._at : end])
            self._at = end
            self._open(self._meta)
        if not self._fill():
            return NEED_DATA
        value = self._finish()
        self._begun = False
        self._meta = self._frame = self._sink = self._text = None
        self._values = []
        return value

    # Parts

    def _begin(self) -> None:
        magic, version, code, number, status, meta_bytes, body_bytes = HEADER.unpack_from(self._data, self._at)
        if magic != MAGIC or version != VERSION:
            raise BadReplyError(f"not an answer of the binary lane: {bytes(self._data[self._at : self._at + 24])!r}")
        frame = self._frame
        if frame is None:
            raise BadReplyError(f"an answer to request {number}, and none is open")
        # A server that refuses at the door, or can't read the request, answers no request in particular.
        general = status != _OK and number == 0
        if not general and (number != frame.number or code != frame.packed.code):
            raise BadReplyError(
                f"expected the answer to request {frame.number} (command {frame.packed.code:#04x}), "
                f"got one to request {number} (command {code:#04x})"
            )
        if status not in _STATUSES:
            raise BadReplyError(f"unknown status {status}")
        if meta_bytes > MAX_ANSWER_META_BYTES:
            raise BadReplyError(f"an answer with {meta_bytes} bytes of meta; at most {MAX_ANSWER_META_BYTES} are taken")
        rows = status == _OK and frame.sink is not None
        most = self._max_bytes if rows else MAX_ERROR_BYTES
        if body_bytes > most:
            what = "max_reply_bytes is" if rows else "an error or a word has at most"
            raise BadReplyError(f"a reply of {body_bytes} bytes; {what} {most}")
        self._at += HEADER.size
        self._begun = True
        self._status, self._meta_bytes, self._body_bytes = status, meta_bytes, body_bytes

    def _open(self, meta: bytes) -> None:
        frame, nbytes = self._frame, self._body_bytes
        sink = frame.sink if frame is not None and self._status == _OK else None
        if frame is None or sink is None:
            self._text = bytearray(nbytes)
            self._sizes, self._part = iter(()), nbytes
            self._room = memoryview(self._text)
            return
        sizes = (frame.packed.parts or whole)(meta, nbytes)
        if sum(sizes) != nbytes or min(sizes, default=0) < 0:
            raise BadReplyError(f"parts of {sum(sizes)} bytes together in a body of {nbytes}")
        sink.reserve(sizes)
        self._sink, self._sizes, self._index = sink, iter(sizes), -1
        self._next_part()

    def _next_part(self) -> bool:
        """Begin the next part. False: there is none."""
        size = next(self._sizes, None)
        if size is None or self._sink is None:
            return False
        self._index += 1
        self._part = size
        self._room = room_of(self._sink, self._index, size)
        return True

    def _fill(self) -> bool:
        """Move what was fed into the body. True when it is complete."""
        while True:
            while self._part and self._at < len(self._data):
                n = min(len(self._room), len(self._data) - self._at)
                with memoryview(self._data) as data:
                    self._room[:n] = data[self._at : self._at + n]
                self._at += n
                self._advance(n)
            if self._part:
                return False
            if self._sink is None or self._index < 0:
                return True
            self._values.append(self._sink.done(self._index))
            if not self._next_part():
                self._index = -1
                return True

    def _advance(self, n: int) -> None:
        self._part -= n
        self._room = self._room[n:] if n < len(self._room) else _NO_ROOM
        if self._part and not self._room and self._sink is not None:
            self._sink.done(self._index)
            self._room = room_of(self._sink, self._index, self._part)

    def _finish(self) -> object:
        frame, status = self._frame, self._status
        if frame is None:
            raise BadReplyError("an answer that nobody asked for")
        if status in frame.packed.answers:
            return frame.packed.answers[status]
        if status == _OK:
            if self._sink is None:
                return bytes(self._text or b"")
            return self._values if frame.packed.parts is not None else self._values[0]
        return refusal(status, self._meta or b"", bytes(self._text or b"").decode(errors="replace"))


def refusal(status: int, meta: bytes, text: str) -> ServerError:
    """The error of the class that the same refusal has on the RESP lane."""
    # The text begins with the code, as an error of RESP does; where it doesn't, the status says it.
    word, _, rest = text.partition(" ")
    if word == "ERR" or word in BY_CODE:
        code, text = word, rest
    else:
        # On the RESP lane a name that isn't there is a plain error.
        code = "ERR" if status == Status.MISS else Status(status).name
    if not text and status == Status.MOVED and len(meta) == 4:
        text = f"lives on worker {int.from_bytes(meta, 'little')}"
    return BY_CODE.get(code, ServerError)(text or f"status {status} without a text", code)
