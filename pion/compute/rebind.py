"""Point an already loaded library at another library's functions (Linux, ELF with 64 bits).

For the program that imported MLX before Pion could load the fast BLAS: by then MLX's calls are bound to the reference
BLAS of its wheel. Each call into another library goes through one pointer in a table (the GOT) that the loader filled;
this replaces the pointers of a few named functions. It is careful: a pointer is replaced only if it is an entry of the
table of calls, lies in memory that may be written (a library linked with `-z now` has it sealed), and holds exactly the
address of the function it is supposed to hold. If any one doesn't, nothing is changed.

Products computed before and after differ in their last bits, as those of any two BLAS libraries do.
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
TAG_PLT_KIND: Final = 20
TAG_PLT: Final = 23
KIND_RELA: Final = 7
"""Program header types and dynamic tags of the ELF specification."""

RELOCATION: Final = struct.Struct("<QQq")
SYMBOL_BYTES: Final = 24
PAGE_BYTES: Final = 4096

JUMP_SLOTS: Final = {62: 7, 183: 1026}
"""By machine (x86-64, AArch64): the relocation type of a pointer that a call goes through."""


class RebindError(Exception):
    """Nothing was changed; the text says why."""


def loaded(start: str, maps: str | None = None) -> tuple[Path, int]:
    """Path and first address of the loaded library whose file name begins with `start`. Raises RebindError."""
    for fields in _maps(maps):
        if len(fields) == 6 and int(fields[2], 16) == 0 and Path(fields[5]).name.startswith(start):
            return Path(fields[5]), int(fields[0].split("-")[0], 16)
    msg = f"no {start}* is loaded"
    raise RebindError(msg)


def _maps(maps: str | None) -> Iterator[list[str]]:
    """The fields of each line: range, permissions, file offset, device, inode and, for a file, its path."""
    for line in (maps if maps is not None else Path("/proc/self/maps").read_text()).splitlines():
        yield line.split(maxsplit=5)


def check_writable(address: int, maps: str | None = None) -> None:
    """Raises RebindError unless the eight bytes at this address may be read and written."""
    for fields in _maps(maps):
        start, end = (int(part, 16) for part in fields[0].split("-"))
        if start <= address and address + 8 <= end:
            if fields[1].startswith("rw"):
                return
            msg = f"the table of calls is sealed ({fields[1]})"
            raise RebindError(msg)
    msg = f"nothing is mapped at {address:#x}"
    raise RebindError(msg)


def rebind(library: Path, base: int, names: Iterable[str], old: Path, new: Path, *, maps: str | None = None) -> None:
    """Make the calls of `library`, whose first address is `base`, to these functions of `old` go to those of `new`.

    Raises RebindError, and changes nothing, if a function isn't called by the library, isn't in both others, isn't
    bound to `old`, or its pointer can't be written. `maps` stands for the text of /proc/self/maps.
    """
    slots = dict(_slots(library))
    writes: list[tuple[int, int]] = []
    for name in names:
        if name not in slots:
            msg = f"{library.name} doesn't call {name}"
            raise RebindError(msg)
        address = base + slots[name]
        check_writable(address, maps)
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
    """(function, offset of its pointer from the first address) for each function that the library calls elsewhere."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        if image[:6] != b"\x7fELF\x02\x01":
            msg = f"{library.name} is not a little-endian ELF file of 64 bits"
            raise RebindError(msg)
        (machine,) = struct.unpack_from("<H", image, 18)
        if machine not in JUMP_SLOTS:
            msg = f"{library.name} is for machine {machine}, which is not known here"
            raise RebindError(msg)
        programs = list(_programs(image))
        tags = _dynamic(image, programs)
        if not {TAG_PLT, TAG_PLT_BYTES, TAG_SYMBOLS, TAG_STRINGS} <= tags.keys():
            msg = f"{library.name} has no table of calls"
            raise RebindError(msg)
        if tags.get(TAG_PLT_KIND) != KIND_RELA:
            msg = f"{library.name} has a table of calls of another kind"
            raise RebindError(msg)
        lowest = min(address for kind, _, address, _ in programs if kind == PROGRAM_LOAD) & -PAGE_BYTES
        table, symbols, strings = (_offset(programs, tags[tag]) for tag in (TAG_PLT, TAG_SYMBOLS, TAG_STRINGS))
        for place in range(table, table + tags[TAG_PLT_BYTES], RELOCATION.size):
            offset, info, _ = RELOCATION.unpack_from(image, place)
            if info & 0xFFFFFFFF != JUMP_SLOTS[machine]:
                continue  # not a call: a function chosen at load time, a thread-local variable
            (at,) = struct.unpack_from("<I", image, symbols + (info >> 32) * SYMBOL_BYTES)
            name = image[strings + at : image.find(b"\0", strings + at)]
            yield name.decode(), offset - lowest


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
