"""Where rows lie in a file of the tier. A module of its own, since the log knows it too, and starts without a tier."""

from __future__ import annotations

import attrs

from pion.storage import disk
from pion.storage.region import Region


@attrs.frozen
class PlacedRun:
    """Adjacent rows in a file."""

    side: int
    layer: int
    start: int
    count: int
    offset: int
    """Where they begin in the file."""
    nbytes: int
    seed: int
    """A hash of all of the above under the file's salt: so the checksum vouches for the place, too."""
    checksum: int
    """XXH3-64 of the rows, under the seed."""

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Side, layer, first row, rows, bytes: what can be told without the file."""
        return self.side, self.layer, self.start, self.count, self.nbytes

    def region(self, mapping: disk.Mapping) -> Region:
        """The rows in a mapped file, not read yet."""
        return Region(mapping, self.offset, self.nbytes, self.checksum, self.seed)
