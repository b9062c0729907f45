"""Taking requests out of a chunk that was split at its line ends: the fast way through ordinary traffic.

A request of n arguments is 2n+1 lines if no argument holds a line end. It is taken if each declared length equals the
length of its line, which proves that; everything else is left to the parser's general way.
"""

from __future__ import annotations

from typing import Final

from pion.limits import INLINE_ARG_BYTES


def decimal(line: bytes) -> int | None:
    """The number after the type byte: digits only, no leading zero, at most 18 of them."""
    digits = line[1:]
    if not digits.isdigit() or len(digits) > 18 or (digits[0] == 0x30 and len(digits) > 1):
        return None
    return int(digits)


class _Lengths(dict[bytes, int]):
    """`$n` -> n for short arguments, filled as they come (so at most one entry a length); -1 for anything else."""

    def __missing__(self, header: bytes) -> int:
        length = decimal(header) if header[:1] == b"$" else None
        if length is None or length > INLINE_ARG_BYTES:
            return -1
        self[header] = length
        return length


_length_of: Final = _Lengths().__getitem__
_count_of: Final = {b"*%d" % n: n for n in range(1, 65)}.get


def walk(lines: list[bytes], index: int, room: int, found: list[list[bytes]]) -> int:
    """Append up to `room` requests that start at line `index`; returns the index after the last one taken.

    The last line is what follows the chunk's last line end, so it is never part of a request. If the result is smaller
    than its index and there is room, the request that starts there needs a closer look.
    """
    last = len(lines) - 1
    alike = True
    while room and index < last:
        header = lines[index]
        count = _count_of(header)
        if count is None:
            break
        end = index + 2 * count + 1
        if end > last:
            break
        if alike and room > 1 and lines[end] == header:
            taken = _walk_alike(lines, index, count, min(room, (last - index) // (2 * count + 1)), found)
            if taken:
                index += taken * (2 * count + 1)
                room -= taken
                continue
            alike = False  # trying again at each request would take quadratic time
        if count == 1:
            argument = lines[index + 2]
            if _length_of(lines[index + 1]) != len(argument):
                break
            found.append([argument])
        else:
            arguments = lines[index + 2 : end : 2]
            if list(map(_length_of, lines[index + 1 : end : 2])) != list(map(len, arguments)):
                break
            found.append(arguments)
        index = end
        room -= 1
    return index


def _walk_alike(lines: list[bytes], index: int, count: int, most: int, found: list[list[bytes]]) -> int:
    """Take up to `most` requests of `count` arguments each from line `index`; returns how many were taken.

    A pipeline is usually made of such requests, and then each check is one pass over all of them. If one doesn't fit,
    none is taken and the caller goes one by one.
    """
    period = 2 * count + 1
    headers = lines[index : index + most * period : period]
    header = headers[0]
    if headers.count(header) != most:
        most = next(number for number, other in enumerate(headers) if other != header)
    end = index + most * period
    columns = []
    for first in range(index + 1, index + period, 2):
        column = lines[first + 1 : end : period]
        if list(map(_length_of, lines[first:end:period])) != list(map(len, column)):
            return 0
        columns.append(column)
    found.extend(map(list, zip(*columns, strict=True)))
    return most


def whole_request(data: bytes) -> list[bytes] | None:
    """The arguments of the one request that the chunk consists of; None if it is anything else.

    The last argument, usually the long one, is not searched for line ends.
    """
    count = _count_of(data[: data.find(b"\r\n", 0, 8)])
    if count is None:
        return None
    lines = data.split(b"\r\n", 2 * count)
    arguments = lines[2::2]
    if len(arguments) != count or not arguments[-1].endswith(b"\r\n"):
        return None
    arguments[-1] = arguments[-1][:-2]
    return arguments if list(map(_length_of, lines[1::2])) == list(map(len, arguments)) else None


def fitting_arguments(data: bytes, missing: int) -> tuple[list[bytes], int]:
    """The arguments at the start of `data` (at most `missing`) up to one that needs a closer look, and their end."""
    lines = data.split(b"\r\n", 2 * missing)
    fitting = min((len(lines) - 1) // 2, missing)
    headers, arguments = lines[: 2 * fitting : 2], lines[1 : 2 * fitting : 2]
    lengths = list(map(len, arguments))
    declared = list(map(_length_of, headers))
    if declared != lengths:
        fitting = next(i for i, (said, real) in enumerate(zip(declared, lengths, strict=True)) if said != real)
        headers, arguments, lengths = headers[:fitting], arguments[:fitting], lengths[:fitting]
    return arguments, sum(map(len, headers)) + sum(lengths) + 4 * fitting
