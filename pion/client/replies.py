"""Reads RESP3 (and RESP2) replies. Pure: bytes in, values out.

Goal: a bulk of many megabytes goes from the kernel into its final memory without passing through a buffer here.
So there are two ways in. Headers and small values arrive by `feed(data)`. While a large bulk is being filled,
`target()` names the memory for what comes next; the driver receives into it and calls `filled(n)`.

    while (reply := reader.next_reply()) is NEED_DATA:
        target = reader.target()
        if target is not None: reader.filled(sock.recv_into(target))
        else:                  reader.feed(sock.recv(reader.read_bytes))

A `Sink` set with `expect` gets the bulks of one reply: it chooses their memory. Without one bulks become `bytes`.
Nested values are kept on a stack, not by recursion. What is not RESP, or is larger than allowed, raises
`BadReplyError` before memory is taken, and the reader can't be used again: the position in the stream is lost.
"""

from __future__ import annotations

from typing import Final, Protocol

import attrs
import numpy as np

from pion.client.errors import BadReplyError, server_error
from pion.client.limits import (
    DIRECT_BYTES,
    HEADER_LINE_BYTES,
    MAX_DEPTH,
    MAX_REPLY_BYTES,
    MAX_REPLY_VALUES,
    READ_BETWEEN_BYTES,
    READ_BYTES,
)


class _NeedData:
    def __repr__(self) -> str:
        return "NEED_DATA"


NEED_DATA: Final = _NeedData()


class Sink(Protocol):
    """Takes the bulks of one reply, which must be one bulk or a flat array of bulks."""

    def receive(self, index: int, nbytes: int) -> memoryview:
        """Memory for the next of the `nbytes` that are still to come of bulk `index`."""

    def done(self, index: int) -> object:
        """That memory is full. When the whole bulk is there, what stands for it in the reply."""


@attrs.define
class _Open:
    """An aggregate that is still being read."""

    values: list[object]
    missing: int
    kind: int
    """The byte that announced it."""


@attrs.define
class _Bulk:
    """A bulk that is being filled."""

    index: int
    missing: int
    """Payload bytes that are not there yet."""
    room: memoryview
    """What is left of the memory being filled."""
    kind: int
    owner: Sink | memoryview
    """Who gave the memory; or all of it, when the reader did."""


_ARRAY, _SET, _PUSH, _MAP, _ATTRIBUTE = b"*~>%|"
_STRING, _VERBATIM, _BLOB_ERROR = b"$=!"
_SIMPLE, _ERROR, _INTEGER, _NULL, _DOUBLE, _BOOLEAN, _BIG = b"+-:_,#("


def _integer(text: bytes) -> int:
    # int() also takes blanks, underscores and signs in odd places; the wire has none of them.
    digits = text[1:] if text[:1] in (b"-", b"+") else text
    if not digits.isdigit() or len(digits) > 4300:
        raise BadReplyError(f"expected a number, got {text!r:.80}")
    return int(text)


class ReplyReader:
    """See the module. `max_bytes` bounds all bulks of one reply together."""

    def __init__(self, max_bytes: int = MAX_REPLY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()
        self._at = 0
        self._scan = 0
        self._stack: list[_Open] = []
        self._bulk: _Bulk | None = None
        self._sink: Sink | None = None
        self._sunk = 0
        self._bytes = 0
        self._values = 0
        self.read_bytes = READ_BYTES
        """How much to receive at once for the next `feed`."""

    @property
    def idle(self) -> bool:
        """Nothing of a reply has been seen yet."""
        return self._bulk is None and not self._stack and self._at == len(self._data)

    def expect(self, sink: Sink | None) -> None:
        """The next reply's bulks go to `sink`."""
        self._sink = sink
        self._sunk = 0

    def feed(self, data: bytes | memoryview) -> None:
        """Take what the socket gave."""
        if self._at:
            del self._data[: self._at]
            self._scan -= self._at
            self._at = 0
        self._data += data

    def target(self) -> memoryview | None:
        """Where the next bytes must be received, if they are payload."""
        bulk = self._bulk
        return bulk.room if bulk is not None and bulk.missing and self._at == len(self._data) else None

    def filled(self, n: int) -> None:
        """The first `n` bytes of `target()` hold data."""
        bulk = self._bulk
        if bulk is None or n > len(bulk.room):
            raise ValueError("more was filled than was asked for")
        self._advance(bulk, n)

    def next_reply(self) -> object:
        """The next complete reply, or NEED_DATA. Errors are returned as `ServerError` values."""
        while True:
            if self._bulk is not None:
                if not self._fill(self._bulk):
                    return NEED_DATA
                value = self._finish(self._bulk)
                self._bulk = None
            else:
                line = self._line()
                if line is None:
                    return NEED_DATA
                if not line:
                    raise BadReplyError("an empty line where a reply should begin")
                self._values += 1
                if self._values > MAX_REPLY_VALUES:
                    raise BadReplyError(f"more than {MAX_REPLY_VALUES} values in one reply")
                kind = line[0]
                if kind in (_STRING, _VERBATIM, _BLOB_ERROR):
                    size = self._size(line)
                    if size is not None:
                        self._begin(size, kind)
                        continue
                    value = None
                elif kind in (_ARRAY, _SET, _PUSH, _MAP, _ATTRIBUTE):
                    count = self._count(line)
                    if count:
                        self._open(count, kind)
                        continue
                    value = None if count is None else {} if kind == _MAP else []
                    if kind in (_PUSH, _ATTRIBUTE):
                        continue
                else:
                    value = _scalar(kind, line)
            if self._stack:
                complete, value = self._collect(value)
                if not complete:
                    continue
            self._bytes = self._values = 0
            self._sink = None
            return value

    # Parts

    def _line(self) -> bytes | None:
        data = self._data
        end = data.find(b"\r\n", self._scan)
        if (end if end >= 0 else len(data)) - self._at > HEADER_LINE_BYTES:
            raise BadReplyError(f"a line of more than {HEADER_LINE_BYTES} bytes")
        if end < 0:
            # The last byte may be the CR of a line end whose LF is still to come.
            self._scan = max(self._at, len(data) - 1)
            return None
        line = bytes(data[self._at : end])
        self._at = self._scan = end + 2
        return line

    def _size(self, line: bytes) -> int | None:
        size = _integer(line[1:])
        if size == -1:
            return None
        if size < 0:
            raise BadReplyError(f"a bulk of {size} bytes")
        self._bytes += size
        if self._bytes > self._max_bytes:
            raise BadReplyError(f"a reply of {self._bytes} bytes or more; max_reply_bytes is {self._max_bytes}")
        return size

    def _count(self, line: bytes) -> int | None:
        count = _integer(line[1:])
        if count == -1:
            return None
        if not 0 <= count <= MAX_REPLY_VALUES:
            raise BadReplyError(f"an array of {count} values; at most {MAX_REPLY_VALUES} are taken")
        return count

    def _open(self, count: int, kind: int) -> None:
        if len(self._stack) >= MAX_DEPTH:
            raise BadReplyError(f"arrays nested deeper than {MAX_DEPTH}")
        self._stack.append(_Open([], 2 * count if kind in (_MAP, _ATTRIBUTE) else count, kind))

    def _sinks(self) -> bool:
        if self._sink is None:
            return False
        return not self._stack or (len(self._stack) == 1 and self._stack[0].kind == _ARRAY)

    def _begin(self, size: int, kind: int) -> None:
        if self._sinks() and kind == _STRING and self._sink is not None:
            index, self._sunk = self._sunk, self._sunk + 1
            self._bulk = _Bulk(index, size, room_of(self._sink, index, size), kind, self._sink)
        else:
            whole = np.empty(size, np.uint8).data if size else memoryview(bytearray())
            self._bulk = _Bulk(-1, size, whole, kind, whole)
        self.read_bytes = READ_BETWEEN_BYTES if size > DIRECT_BYTES else READ_BYTES

    def _fill(self, bulk: _Bulk) -> bool:
        """Move what was fed into the bulk. True when it is complete with its line end."""
        while bulk.missing and self._at < len(self._data):
            n = min(len(bulk.room), len(self._data) - self._at)
            with memoryview(self._data) as data:
                bulk.room[:n] = data[self._at : self._at + n]
            self._at += n
            self._scan = self._at
            self._advance(bulk, n)
        if bulk.missing or len(self._data) - self._at < 2:
            return False
        if self._data[self._at : self._at + 2] != b"\r\n":
            raise BadReplyError("a bulk is not followed by a line end: the server and its announced length disagree")
        self._at += 2
        self._scan = self._at
        return True

    def _advance(self, bulk: _Bulk, n: int) -> None:
        bulk.missing -= n
        bulk.room = bulk.room[n:]
        if bulk.missing and not bulk.room and not isinstance(bulk.owner, memoryview):
            bulk.owner.done(bulk.index)
            bulk.room = room_of(bulk.owner, bulk.index, bulk.missing)

    def _finish(self, bulk: _Bulk) -> object:
        if not isinstance(bulk.owner, memoryview):
            return bulk.owner.done(bulk.index)
        data = bulk.owner.tobytes()
        if bulk.kind == _BLOB_ERROR:
            return server_error(data.decode(errors="replace"))
        return data[4:] if bulk.kind == _VERBATIM else data

    def _collect(self, value: object) -> tuple[bool, object]:
        """Put a value where it belongs. (True, reply) when that completes one."""
        while self._stack:
            top = self._stack[-1]
            if self._sinks() and self._sunk != len(top.values) + 1:
                raise BadReplyError(f"expected an array of bulks, got {value!r:.80} in it")
            top.values.append(value)
            top.missing -= 1
            if top.missing:
                return False, None
            self._stack.pop()
            if top.kind in (_PUSH, _ATTRIBUTE):
                # Pushes answer nothing that was asked, and attributes only comment on the reply after them.
                return False, None
            value = _pairs(top.values) if top.kind == _MAP else top.values
        return True, value


def room_of(sink: Sink, index: int, nbytes: int) -> memoryview:
    """What the sink gives for the next of `nbytes` bytes. Raises `ValueError` for memory that can't take them."""
    room = memoryview(sink.receive(index, nbytes))
    if room.readonly or not room.c_contiguous:
        raise ValueError("receive must return a writable, C-contiguous buffer")
    if nbytes and not room.nbytes:
        raise ValueError(f"receive returned no memory, {nbytes} bytes are to come")
    return room.cast("B")[:nbytes] if nbytes else memoryview(bytearray())


def _pairs(values: list[object]) -> dict[object, object]:
    try:
        return dict(zip(values[::2], values[1::2], strict=True))
    except TypeError:
        raise BadReplyError("a map whose key is an array or a map") from None


def _scalar(kind: int, line: bytes) -> object:
    if kind == _SIMPLE:
        return line[1:].decode(errors="replace")
    if kind == _ERROR:
        return server_error(line[1:].decode(errors="replace"))
    if kind in (_INTEGER, _BIG):
        return _integer(line[1:])
    if kind == _NULL and len(line) == 1:
        return None
    if kind == _BOOLEAN and line in (b"#t", b"#f"):
        return line == b"#t"
    if kind == _DOUBLE:
        try:
            return float(line[1:])
        except ValueError:
            pass
    raise BadReplyError(f"not a RESP reply: {line!r:.80}")
