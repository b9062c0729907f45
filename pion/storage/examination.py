"""What looking at a data directory brings to light: its files, their problems, and what of them can be kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import attrs

from pion.storage.region import Region
from pion.storage.salvage import Salvage
from pion.storage.segments import Position

SET_ASIDE: Final = "damaged-"
"""How the names of files begin that a repair has set aside; no server reads them."""


@attrs.define
class FileReport:
    """One file of a directory."""

    name: str
    kind: str
    nbytes: int
    version: str = ""
    records: int = 0
    first: int | None = None
    last: int | None = None
    state: str = "good"


@attrs.frozen
class Problem:
    """Something that is not as it was written."""

    file: str
    offset: int | None
    what: str
    left_out: Sequence[str] = ()
    """What a repair leaves out for it."""


@attrs.define
class Examination:
    """What was found in a directory, for one worker."""

    worker: int
    progress: Callable[[int, int], None] = attrs.field(repr=False)
    """Called with the bytes read so far, and in all."""
    files: dict[str, FileReport] = attrs.field(factory=dict)
    problems: list[Problem] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)
    """What is worth knowing and no problem."""
    unknown_version: bool = False
    """A file is of a format that this program doesn't know; what stands behind the headers was not read."""
    salvage: Salvage = attrs.field(factory=Salvage)
    position: Position = attrs.field(factory=lambda: Position(1, 1, b""))
    """Where a log would go on behind all of it."""

    total_bytes: int = 0
    _read_bytes: int = 0

    @property
    def good(self) -> bool:
        """Whether a server would start and serve everything."""
        return not self.problems

    def problem(self, name: str, offset: int | None, what: str, left_out: Sequence[str] = (), state: str = "") -> None:
        """Note what is wrong with a file, and what that makes of it."""
        self.problems.append(Problem(name, offset, what, left_out))
        self.files[name].state = state or "damaged"

    def read(self, nbytes: int) -> None:
        """So much more was read."""
        self._read_bytes += nbytes
        self.progress(self._read_bytes, self.total_bytes)

    def replay(
        self, name: str, offset: int, place: str, family: str, meta: bytes, data: Region | None, *, intact: bool
    ) -> None:
        """Replay one record into the salvage, and note what is wrong with it."""
        try:
            left_out = self.salvage.replay(family, meta, data, intact=intact, place=place)
        except ValueError as error:
            left_out = self.salvage.nonsense(family, meta, place)
            self.problem(name, offset, f"{place}, of {family}, makes no sense: {error}", left_out)
            return
        if not intact and data is not None:
            what = f"the {data.nbytes} bytes of data of {place} are not what was written"
            self.problem(name, data.start, what, left_out)
