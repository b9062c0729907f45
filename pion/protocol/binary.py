"""The request parser of the binary lane: bytes in, requests out. It knows no socket and allocates no payload itself.

Theory of operation. A frame is a header of 24 bytes, `meta_len` bytes of meta and `body_len` bytes of body. Every
length is checked as soon as the header is there, before anything is taken for it, and the magic number and the version
as soon as their bytes are: a client of another protocol hears at once that it has come to the wrong door. The parser
has the interface of `RespParser`, so a connection drives either. Meta and body up to `INLINE_ARG_BYTES` are cut out of
the chunk. Longer ones are *payloads*: `target()` names the part still missing, `filled(n)` says that the driver put n
bytes there. The memory for a body comes from `allocate`, after the meta, so that who gives it can look at the name. If
it is refused, the rest of the frame is counted and dropped, and the request comes out as a `BinaryRefused`.

The frame's own length is always intact, so an error in the meta is an answer and the connection goes on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pion.errors import ProtocolError
from pion.limits import BINARY_META_BYTES, INLINE_ARG_BYTES, UNAUTHENTICATED_BULK_BYTES
from pion.protocol.incoming import LATER, Incoming
from pion.protocol.packed import leading_name
from pion.replies import Buffer

MAGIC: Final = 0xCA5E
VERSION: Final = 1
HEADER: Final = struct.Struct("<HBBIIIQ")
"""Magic, version, command, request id, status (a u8 and three zero bytes), length of meta, length of body."""

_MAGIC_BYTES: Final = MAGIC.to_bytes(2, "little")
_HEADER_BYTES: Final = HEADER.size
_unpack_header: Final = HEADER.unpack_from


class BinaryRequest(list[Buffer]):
    """One request of the binary lane: `code`, `id`, `meta`, and `body` once it is there.

    As a list it looks like a request of the RESP lane, to those who want to know what it is about: the name of its RESP
    command, the name that its meta begins with (if it has one, and it is whole), and the body, once it is there.
    """

    __slots__ = ("body", "code", "id", "meta")

    code: int
    id: int
    meta: bytes
    body: Buffer

    @classmethod
    def of(cls, code: int, request_id: int) -> BinaryRequest:
        """A request of which no more than the header is known."""
        request = cls()
        request.code, request.id, request.meta, request.body = code, request_id, b"", b""
        return request


class BinaryRefused(BinaryRequest):
    """A request that did not fit the receive budget. It has no body, and no meta if that did not fit; `nbytes` was
    asked for.
    """

    __slots__ = ("nbytes",)

    def __init__(self, request: BinaryRequest, nbytes: int) -> None:
        super().__init__(request)
        self.code, self.id, self.meta, self.body = request.code, request.id, request.meta, b""
        self.nbytes = nbytes


class BinaryParser(Incoming):
    """Parses the requests of one connection. See `RespParser` for `allocate`, `reserve` and `restricted`.

    `heads` says of each code the command's name, and whether the meta begins with a name. A request whose code isn't
    there comes out all the same.
    """

    __slots__ = (
        "_allocate",
        "_body_bytes",
        "_has_meta",
        "_heads",
        "_max_body",
        "_memory",
        "_meta_bytes",
        "_refused",
        "_request",
        "_reserve",
        "_reserved",
        "failed",
    )

    trailer_bytes: Final = 0
    """What follows a payload on the wire before its request is complete."""

    def __init__(
        self,
        *,
        heads: Mapping[int, tuple[bytes, bool]],
        max_body_bytes: int,
        allocate: Callable[[int], memoryview | None],
        reserve: Callable[[int], bool] = lambda nbytes: True,
    ) -> None:
        super().__init__()
        self._heads = heads
        self._max_body = max_body_bytes
        self._allocate = allocate
        self._reserve = reserve
        self._request: BinaryRequest | None = None
        self._meta_bytes = self._body_bytes = 0
        self._has_meta = False
        self._memory: memoryview | None = None
        """Of the payload being received."""
        self._refused = 0
        self._reserved = False
        self.failed = (0, 0)
        """Command and id of the request that broke the protocol, if its header could be read."""

    # -- as RespParser --------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Give the next bytes of the stream. Take all requests out first, else the rest is copied."""
        self._append(data)

    def resume(self) -> None:
        """Ask for the memory again that was not there yet. Call `requests` afterwards: data may be waiting."""
        self.awaited = 0
        self._start_body()

    def close(self) -> None:
        """Give up what was received of an unfinished request. The parser is useless after it."""
        self._request = self._memory = self._target = None
        self._data = b""
        self.payload_left = self.awaited = 0

    @property
    def in_request(self) -> bool:
        """A request has begun whose header is complete; reservations, if any, belong to it."""
        return self._request is not None

    @property
    def unfinished(self) -> Sequence[Buffer]:
        """What is known of the request whose payload memory is asked for: its command and first name."""
        return self._request or ()

    @property
    def between_requests(self) -> bool:
        """Nothing of an unfinished request has arrived."""
        return self._request is None and self._position >= len(self._data)

    def requests(self, limit: int) -> list[BinaryRequest]:
        """Up to `limit` complete requests; one that reserved memory is the last of its batch.

        Raises `ProtocolError` once the requests before the bad one have been taken out; the parser is useless after it.
        """
        found: list[BinaryRequest] = []
        self.need_data = False
        try:
            for _ in range(limit):
                request = self._step()
                if request is None:
                    self.need_data = True
                    break
                found.append(request)
                if self._reserved:
                    self._reserved = False
                    break
        except ProtocolError:
            if not found:
                raise
            # Nothing was consumed past the bad header, so the next call raises the same error again.
        if self._position >= len(self._data):
            self._data, self._position = b"", 0  # an idle client keeps no chunk
        return found

    # -- one frame ------------------------------------------------------------------------------------------------

    def _step(self) -> BinaryRequest | None:
        request = self._request
        if request is None:
            data, start = self._data, self._position
            if len(data) - start < _HEADER_BYTES:
                _check_beginning(data[start : start + 3])
                return None
            magic, version, code, request_id, status, meta_bytes, body_bytes = _unpack_header(data, start)
            if magic != MAGIC or version != VERSION:
                _check_beginning(data[start : start + 3])
            length = meta_bytes + body_bytes
            if status or length > INLINE_ARG_BYTES or self.restricted:
                self._check(code, request_id, status, meta_bytes, body_bytes)
            body = start + _HEADER_BYTES + meta_bytes
            if length <= INLINE_ARG_BYTES and body + body_bytes <= len(data):
                # All of it is there, as it nearly always is.
                request = BinaryRequest()
                request.code, request.id = code, request_id
                request.meta = data[start + _HEADER_BYTES : body]
                request.body = data[body : body + body_bytes]
                self._position = body + body_bytes
                self._name(request)
                request.append(request.body)
                return request
            request = self._begin(code, request_id, meta_bytes, body_bytes)
        if not self._has_meta and not self._take_meta(request):
            return None
        if self.awaited:
            return None
        if self.payload_left or self._memory is not None or self._refused:
            if not self._payload():
                return None
            if self._memory is not None:
                request.body = self._memory.toreadonly()
        else:
            end = self._position + self._body_bytes
            if end > len(self._data):
                return None
            request.body = self._data[self._position : end]
            self._position = end
        return self._complete(request)

    def _name(self, request: BinaryRequest) -> None:
        """What the request is about, once its meta is there."""
        head = self._heads.get(request.code)
        if head is None:
            request.append(b"0x%02x" % request.code)
            return
        request.append(head[0])
        if head[1] and (name := leading_name(request.meta)) is not None:
            request.append(name)

    def _complete(self, request: BinaryRequest) -> BinaryRequest:
        self._request = self._memory = None
        if self._refused:
            refused = BinaryRefused(request, self._refused)
            self._refused = 0
            return refused
        request.append(request.body)
        return request

    def _check(self, code: int, request_id: int, status: int, meta_bytes: int, body_bytes: int) -> None:
        """Raise `ProtocolError` for a header that says what can't be."""
        self.failed = code, request_id
        if status:
            raise ProtocolError("the status and the reserved bytes of a request must be 0")
        if self.restricted and meta_bytes + body_bytes > UNAUTHENTICATED_BULK_BYTES:
            raise ProtocolError("unauthenticated request length")
        if meta_bytes > BINARY_META_BYTES:
            raise ProtocolError(f"meta of {meta_bytes} bytes, at most {BINARY_META_BYTES}")
        if body_bytes > self._max_body:
            raise ProtocolError(f"body of {body_bytes} bytes, at most {self._max_body}")
        self.failed = 0, 0

    def _begin(self, code: int, request_id: int, meta_bytes: int, body_bytes: int) -> BinaryRequest:
        """Begin a request that is not there in one piece."""
        self._position += _HEADER_BYTES
        request = self._request = BinaryRequest.of(code, request_id)
        self._meta_bytes, self._body_bytes = meta_bytes, body_bytes
        self._has_meta = False
        kept = meta_bytes + (body_bytes if body_bytes <= INLINE_ARG_BYTES else 0)
        if kept > INLINE_ARG_BYTES:
            self._reserved = True
            if not self._reserve(kept):
                self._name(request)
                self._refused = kept
                self._has_meta = True
                self.payload_left = meta_bytes + body_bytes
                return request
        if meta_bytes > INLINE_ARG_BYTES:
            self._start_payload(memoryview(bytearray(meta_bytes)))
        return request

    def _take_meta(self, request: BinaryRequest) -> bool:
        if self._memory is not None:
            if not self._payload():
                return False
            request.meta = bytes(self._memory)
            self._memory = None
        else:
            end = self._position + self._meta_bytes
            if end > len(self._data):
                return False
            request.meta = self._data[self._position : end]
            self._position = end
        self._has_meta = True
        self._name(request)
        if self._body_bytes > INLINE_ARG_BYTES:
            self._start_body()
        return True

    def _start_body(self) -> None:
        self._reserved = True
        memory = self._allocate(self._body_bytes)
        if memory is LATER:
            self.awaited = self._body_bytes
        elif memory is None:
            self._refused = self.payload_left = self._body_bytes
        else:
            self._start_payload(memory)

    def _start_payload(self, memory: memoryview) -> None:
        self._memory = self._target = memory
        self.payload_left = memory.nbytes

    def _payload(self) -> bool:
        """Move what the chunk has of the payload to its place; whether it is complete."""
        self._fill_from_chunk()
        return not self.payload_left


def _check_beginning(data: bytes) -> None:
    """Raise `ProtocolError` for up to three bytes that begin no frame."""
    if not _MAGIC_BYTES.startswith(data[:2]):
        raise ProtocolError("bad magic number; this is the binary lane, RESP has a port of its own")
    if len(data) == 3 and data[2] != VERSION:
        raise ProtocolError(f"version {data[2]} of the binary lane is not known, expected {VERSION}")
