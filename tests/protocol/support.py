"""Helpers of the parser tests."""

from __future__ import annotations

import numpy as np

from pion.protocol.incoming import LATER
from pion.protocol.resp import Refused, RespParser

MIB = 1024 * 1024


class Receiver:
    """A parser with the memory that a driver gives it, and a record of what was asked for."""

    def __init__(
        self, *, budget: int = 64 * MIB, max_bulk_bytes: int = 16 * MIB, max_args: int = 1000, late: int = 0
    ) -> None:
        self.budget = budget
        self.late = late
        """How often each payload's memory is there only later."""
        self._refusals = 0
        self.reserved = 0
        self.allocations: list[int] = []
        self.parser = RespParser(
            max_bulk_bytes=max_bulk_bytes, max_args=max_args, allocate=self._allocate, reserve=self._reserve
        )

    def _reserve(self, nbytes: int) -> bool:
        if self.reserved + nbytes > self.budget:
            return False
        self.reserved += nbytes
        return True

    def _allocate(self, nbytes: int) -> memoryview | None:
        if self._refusals < self.late:
            self._refusals += 1
            return LATER
        self._refusals = 0
        self.allocations.append(nbytes)
        return memoryview(np.empty(nbytes, np.uint8)) if self._reserve(nbytes) else None

    def give(self, data: bytes) -> None:
        """Hand over bytes the way a driver does: into the target while there is one, else to `feed`."""
        parser = self.parser
        while data and parser.payload_left:
            taken = min(len(data), parser.payload_left)
            target = parser.target()
            if target is not None:
                target[:taken] = data[:taken]
            parser.filled(taken)
            data = data[taken:]
        if data:
            parser.feed(data)

    def take(self, limit: int = 1000) -> list[list[bytes]]:
        """Every complete request, as plain bytes; a refused one as [b"REFUSED", its name]."""
        found: list[list[bytes]] = []
        while True:
            requests = self.parser.requests(limit)
            asked = self.parser.awaited > 0
            if asked:
                assert self.parser.need_data
                assert self.parser.target() is None
                assert not self.parser.payload_left
                self.parser.resume()
            for request in requests:
                if isinstance(request, Refused):
                    found.append([b"REFUSED", *map(bytes, request[:1])])
                else:
                    found.append([bytes(argument) for argument in request])
            if not requests and self.parser.need_data and not asked:
                return found


def request(*arguments: bytes) -> bytes:
    """A request on the wire."""
    return b"*%d\r\n" % len(arguments) + b"".join(b"$%d\r\n%b\r\n" % (len(a), a) for a in arguments)


def parse(data: bytes, cuts: list[int] = [], limit: int = 1000, **limits: int) -> list[list[bytes]]:  # noqa: B006
    """The requests in `data`, given in the pieces that `cuts` makes."""
    receiver = Receiver(**limits)
    found = []
    for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
        receiver.give(data[start:stop])
        found += receiver.take(limit)
    return found
