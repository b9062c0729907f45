"""Point an already loaded library at another library's functions (Linux, ELF with 64 bits).

For the program that imported MLX before Pion could load the fast BLAS: by then MLX's calls are bound to the reference
BLAS of its wheel. Each call into another library goes through one pointer in a table (the GOT) that the loader filled;
this replaces the pointers of a few named functions. It is careful: a pointer is replaced only if it holds exactly the
address of the function it is supposed to hold, and if any one doesn't, nothing is changed.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

PROGRAM_LOAD: Final = 1
PROGRAM_DYNAMIC: Final = 2
TAG_PLT_BYTES: Final = 2
TAG_STRINGS: Final = 5
TAG_SYMBOLS: Final = 6
TAG_PLT: Final = 23
"""Program header types and dynamic tags of the ELF specification."""

RELOCATION: Final = struct.Struct("<QQq")
SYMBOL_BYTES: Final = 24


class RebindError(Exception):
    """Nothing was changed; the text says why."""


def loaded(start: str, maps: str | None = None) -> tuple[Path, int]:
    """Path and base address of the loaded library whose file name begins with `start`. Raises RebindError."""
    for line in (maps if maps is not None else Path("/proc/self/maps").read_text()).splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and int(fields[2], 16) == 0 and Path(fields[5]).name.startswith(start):
            return Path(fields[5]), int(fields[0].split("-")[0], 16)
    msg = f"no {start}* is loaded"
    raise RebindError(msg)


def rebind(library: Path, base: int, names: Iterable[str], old: Path, new: Path) -> None:
    """Make the calls of `library`, loaded at `base`, to these functions of `old` go to those of `new`.

    Raises RebindError, and changes nothing, if a function isn't called by the library, isn't in both others, or isn't
    bound to `old`.
    """
    slots = dict(_slots(library))
    writes: list[tuple[int, int]] = []
    for name in names:
        if name not in slots:
            msg = f"{library.name} doesn't call {name}"
            raise RebindError(msg)
        address = base + slots[name]
        if ctypes.c_uint64.from_address(address).value != _address(old, name):
            msg = f"{library.name} has {name} bound to something else than {old.name}"
            raise RebindError(msg)
        writes.append((address, _address(new, name)))
    for address, value in writes:
        ctypes.c_uint64.from_address(address).value = value


def _address(library: Path, name: str) -> int:
    try:
        function = getattr(ctypes.CDLL(str(library)), name)
    except (OSError, AttributeError) as error:
        raise RebindError(str(error)) from error
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _slots(library: Path) -> Iterator[tuple[str, int]]:
    """(function, offset of its pointer from the base address) for each function that the library calls elsewhere."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        if image[:6] != b"\x7fELF\x02\x01":
            msg = f"{library.name} is not a little-endian ELF file of 64 bits"
            raise RebindError(msg)
        programs = list(_programs(image))
        tags = _dynamic(image, programs)
        if not {TAG_PLT, TAG_PLT_BYTES, TAG_SYMBOLS, TAG_STRINGS} <= tags.keys():
            msg = f"{library.name} has no table of calls"
            raise RebindError(msg)
        table, symbols, strings = (_offset(programs, tags[tag]) for tag in (TAG_PLT, TAG_SYMBOLS, TAG_STRINGS))
        for place in range(table, table + tags[TAG_PLT_BYTES], RELOCATION.size):
            offset, info, _ = RELOCATION.unpack_from(image, place)
            (at,) = struct.unpack_from("<I", image, symbols + (info >> 32) * SYMBOL_BYTES)
            name = image[strings + at : image.find(b"\0", strings + at)]
            yield name.decode(), offset


def _programs(image: mmap.mmap) -> Iterator[tuple[int, int, int, int]]:
    """(type, file offset, address, bytes in the file) of each program header."""
    (start,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    for i in range(count):
        kind, _, offset, address, _, nbytes = struct.unpack_from("<IIQQQQ", image, start + i * size)
        yield kind, offset, address, nbytes


def _dynamic(image: mmap.mmap, programs: list[tuple[int, int, int, int]]) -> dict[int, int]:
    tags: dict[int, int] = {}
    for kind, offset, _, nbytes in programs:
        if kind == PROGRAM_DYNAMIC:
            tags.update(struct.iter_unpack("<QQ", image[offset : offset + nbytes]))
    return tags


def _offset(programs: list[tuple[int, int, int, int]], address: int) -> int:
    """Where in the file the byte lies that is loaded at this address."""
    for kind, offset, start, nbytes in programs:
        if kind == PROGRAM_LOAD and start <= address < start + nbytes:
            return offset + address - start
    msg = f"address {address:#x} is not in the file"
    raise RebindError(msg)
