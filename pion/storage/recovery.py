"""Reading a data directory: the snapshot, then the log behind it, and what to do about damage.

The rules, which `docs/discussion/durability.md` explains to operators:

- A record that can't be read ends the log if nothing valid follows it: the tail of a write that was under way (a torn
  tail). It is cut and reported.
- If valid records follow, something that had been written is damaged, and the start is refused. One exception: the
  machine was off since, and no later record says that the damaged one had been flushed. Then it is what a power cut
  does to bytes that were not flushed, in whatever order the system had written them: cut, too.
- Headers, metas and the snapshot's table are read with calls that report errors before they are looked at. What of them
  can't be read refuses the start: nobody knows what it says.
- Large data is not read. Its record's header vouches for its checksum, and the first use compares. Data that a power
  cut may have hit is read, as it decides where the log ends.
- A segment says in its header which record it begins with. What an older segment has from that number on was never
  acknowledged, and is ignored.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs

from pion.config import KIB
from pion.errors import StartupError
from pion.storage import records, snapshot_format
from pion.storage.disk import Disk
from pion.storage.disk import Mapping as DiskMapping
from pion.storage.durable import Dormant, Durable
from pion.storage.read_ahead import ReadAhead, UnreadableError
from pion.storage.records import SEGMENT_BYTES, Entry, SegmentHeader
from pion.storage.region import DamagedError, Region
from pion.storage.segments import Position, Segment, segment_name, segment_number, snapshot_name
from pion.storage.snapshot import TEMPORARY
from pion.storage.snapshot_format import Snapshot

logger = logging.getLogger("pion.wal")

READ_AT_START_BYTES: Final = 64 * KIB
"""Data of a log record below this is compared with its checksum at the start; longer data at its first use. A family
may keep in the file what is at least as long (the V-store: `vstore_log.MAP_FROM_BYTES`), and reads the rest at once."""


class DamagedFileError(StartupError):
    """A file of the data directory can't be trusted. The text says where, and what to do."""

    def __init__(self, disk: Disk, name: str, what: str) -> None:
        super().__init__(
            f"{disk.where}/{name}: {what}. Put a good copy back, or look with: pion check {disk.where}, "
            f"then set the damaged part aside with: pion repair {disk.where}"
        )
        self.name = name
        self.what = what


class UnknownVersionError(StartupError):
    """A file of the data directory is of a format that this program doesn't know."""

    def __init__(self, disk: Disk, name: str, what: str) -> None:
        super().__init__(f"{disk.where}/{name}: {what}. Start the release of Pion that wrote it, or a newer one")


@attrs.frozen
class OpenSegment:
    """A segment whose header was read. Making one may raise UnreadableError."""

    name: str
    header: SegmentHeader
    mapping: DiskMapping
    ready: ReadAhead = attrs.field(init=False, repr=False, eq=False)
    """To be called before its records are looked at."""
    first: int = attrs.field(init=False)
    """Sequence number of its first record; 0 if it was prepared and has none."""

    @ready.default
    def _ready(self) -> ReadAhead:
        return ReadAhead(self.mapping, self.name)

    @first.default
    def _first(self) -> int:
        if self.header.first:
            return self.header.first
        entry = records.decode(self.mapping.view, SEGMENT_BYTES, self.header.salt, self.ready)
        return entry.sequence if entry is not None else 0

    @property
    def unused(self) -> bool:
        """Whether it was prepared and nothing was written to it."""
        return not self.header.first and len(self.mapping.view) == SEGMENT_BYTES

    def region(self, entry: Entry) -> Region | None:
        """Where the data of one of its records lies."""
        if not entry.data_bytes:
            return None
        seed = self.header.salt ^ entry.sequence
        return Region(self.mapping, entry.data_start, entry.data_bytes, entry.data_checksum, seed)


@attrs.define
class Found:
    """What a directory holds for one worker, and how it was read."""

    snapshot: Snapshot | None = None
    snapshot_mapping: DiskMapping | None = None
    segments: list[OpenSegment] = attrs.field(factory=list)
    unreadable: list[str] = attrs.field(factory=list)
    """Segments without a whole header and without records: their making was cut off."""
    cut_bytes: int = 0
    """Bytes of records that were not complete."""
    cut_at: str = ""
    records: int = 0
    """Records replayed from the log."""
    dormant: dict[str, Dormant] = attrs.field(factory=dict)
    """Families whose plugin is not loaded."""
    position: Position = attrs.field(factory=lambda: Position(1, 1, b""))

    def sizes(self) -> Mapping[int, Segment]:
        """The segments for `Log`."""
        return {each.header.number: Segment(each.first, len(each.mapping.view)) for each in self.segments}


def find(disk: Disk, worker: int) -> Found:
    """Open the files of one worker and check their headers. Blocks.

    Raises DamagedFileError, UnknownVersionError, UnreadableError, OSError.
    """
    found = Found()
    name = snapshot_name(worker)
    if disk.exists(name):
        mapping = disk.map(name)
        try:
            snapshot = snapshot_format.parse(mapping.view, ReadAhead(mapping, name))
        except snapshot_format.VersionError as error:
            raise UnknownVersionError(disk, name, str(error)) from error
        except snapshot_format.FormatError as error:
            raise DamagedFileError(disk, name, str(error)) from error
        if snapshot.identity.worker != worker:
            raise DamagedFileError(disk, name, f"it belongs to worker {snapshot.identity.worker}")
        found.snapshot, found.snapshot_mapping = snapshot, mapping
    numbers = sorted(number for each in disk.names() if (number := segment_number(worker, each)) is not None)
    for number in numbers:
        name = segment_name(worker, number)
        mapping = disk.map(name)
        ReadAhead(mapping, name)(0, SEGMENT_BYTES)
        try:
            header = SegmentHeader.parse(mapping.view)
        except records.VersionError as error:
            raise UnknownVersionError(disk, name, str(error)) from error
        except records.FormatError as error:
            if is_unfinished(mapping.view, last=number == numbers[-1]):
                found.unreadable.append(name)
                continue
            raise DamagedFileError(disk, name, str(error)) from error
        if (header.worker, header.number) != (worker, number):
            raise DamagedFileError(disk, name, f"it is segment {header.number} of worker {header.worker}")
        found.segments.append(OpenSegment(name, header, mapping))
    _check_lineage(disk, found)
    next_number = numbers[-1] + 1 if numbers else 1
    lineage = found.snapshot.identity.lineage if found.snapshot else None
    if lineage is None:
        lineage = found.segments[0].header.lineage if found.segments else secrets.token_bytes(16)
    covers = found.snapshot.identity.covers if found.snapshot else 0
    found.position = Position(next_number, covers + 1, lineage)
    return found


def is_unfinished(view: memoryview, *, last: bool) -> bool:
    """Whether the making of a segment without a whole header failed or was cut off: it can't have records."""
    return len(view) < SEGMENT_BYTES or (len(view) == SEGMENT_BYTES and (last or not any(view)))


def _check_lineage(disk: Disk, found: Found) -> None:
    """All files must come from one history."""
    known = found.snapshot.identity.lineage if found.snapshot else None
    for segment in found.segments:
        if known is not None and segment.header.lineage != known:
            raise DamagedFileError(disk, segment.name, "it comes from another data directory than the files before it")
        known = segment.header.lineage


@attrs.frozen
class Step:
    """A record to replay, and where its data lies."""

    family: str
    meta: bytes
    data: Region | None
    place: str


def snapshot_steps(found: Found) -> Iterator[Step]:
    """The snapshot's records in order; its table was checked when it was opened."""
    if found.snapshot is None or found.snapshot_mapping is None:
        return
    mapping = found.snapshot_mapping
    for index, entry in enumerate(found.snapshot.entries()):
        data = Region(mapping, entry.start, entry.nbytes, entry.checksum, entry.seed) if entry.nbytes else None
        yield Step(entry.family, entry.meta, data, f"record {index} of its table")


class LogReader:
    """Walks the records of all segments from `first` on, and decides where the log ends."""

    def __init__(self, disk: Disk, segments: Sequence[OpenSegment], first: int) -> None:
        self._disk = disk
        self._segments = segments
        self.next = first
        """Number of the record that comes next."""
        self.cut_bytes = 0
        self.cut_at = ""

    def steps(self) -> Iterator[tuple[OpenSegment, Entry, Region | None]]:
        """The records in order, each with its data. Raises DamagedFileError, UnreadableError."""
        segments = [each for each in self._segments if not each.unused]
        flushed: int | None = None
        for index, segment in enumerate(segments):
            later = segments[index + 1 :]
            limit = min((each.first for each in later if each.first), default=2**64)
            if segment.first >= limit:
                continue  # all of it was given up by a later one
            if segment.first > self.next:
                emptied = self._emptied(segment)
                if emptied is not None:
                    self._end(emptied, SEGMENT_BYTES, segments[index:])
                    return
                raise DamagedFileError(
                    self._disk,
                    segment.name,
                    f"it begins with record {segment.first}, but the files before it end with "
                    f"{self.next - 1}: one is missing, or older than it should be",
                )
            position = SEGMENT_BYTES
            trusted = 2**64
            if self._may_be_torn(segment):
                flushed = _flushed(segments) if flushed is None else flushed
                trusted = flushed
            for entry in records.scan(segment.mapping.view, segment.header, segment.ready):
                data = segment.region(entry)
                if entry.sequence >= limit or not _intact(data, in_doubt=entry.sequence > trusted):
                    break
                position = entry.stop
                if entry.sequence >= self.next:
                    yield segment, entry, data
                    self.next = entry.sequence + 1
            if self.next >= limit:
                continue
            if position == len(segment.mapping.view) and (not later or not later[0].first):
                continue  # what follows was prepared: its records tell where it begins, or it has none
            self._end(segment, position, later)
            return

    def _may_be_torn(self, segment: OpenSegment) -> bool:
        """Whether the machine may have lost power since the segment was written."""
        return not segment.header.boot or segment.header.boot != self._disk.boot_id()

    def _emptied(self, segment: OpenSegment) -> OpenSegment | None:
        """A segment in front of this one that had been prepared, if a power cut may have taken all its records."""
        before = self._segments[: self._segments.index(segment)]
        return next((each for each in before if each.unused and self._may_be_torn(each)), None)

    def _end(self, segment: OpenSegment, position: int, later: Sequence[OpenSegment]) -> None:
        """The log can't be read on from here: cut it, or refuse."""
        number, last, flushed = self.next, 0, False
        for each in (segment, *later):
            for entry in _search(each, position + 1 if each is segment else SEGMENT_BYTES):
                if each is not segment or entry.sequence > number:
                    last, flushed = max(last, entry.sequence), flushed or entry.durable >= number
        if last and (flushed or not self._may_be_torn(segment)):
            raise DamagedFileError(
                self._disk,
                segment.name,
                f"record {number} at byte {position} is damaged, and valid records follow, up to number {last}",
            )
        self.cut_bytes = (
            len(segment.mapping.view) - position + sum(len(each.mapping.view) - SEGMENT_BYTES for each in later)
        )
        self.cut_at = f"{segment.name} at byte {position}"


def _intact(data: Region | None, *, in_doubt: bool) -> bool:
    """Whether a record's data may be used. Long data is compared at its first use if no power cut can have hit it."""
    if data is None:
        return True
    if data.nbytes >= READ_AT_START_BYTES:
        return not in_doubt or data.verify()
    try:
        data.content = data.read()
    except DamagedError:
        return False
    return True


def _search(segment: OpenSegment, start: int) -> Iterator[Entry]:
    return records.search(segment.mapping.view, start, segment.header.salt, segment.ready)


def _flushed(segments: Sequence[OpenSegment]) -> int:
    """The highest number up to which any record says that all are on stable storage; also one behind a damaged one."""
    highest = 0
    for segment in segments:
        position = SEGMENT_BYTES
        for entry in records.scan(segment.mapping.view, segment.header, segment.ready):
            highest, position = max(highest, entry.durable), entry.stop
        if position < len(segment.mapping.view):
            for entry in _search(segment, position + 1):
                highest = max(highest, entry.durable)
    return highest


def load(disk: Disk, worker: int, families: Sequence[Durable]) -> Found:
    """Read a directory into the families, which must be empty; `finish_replay` is left to the caller. Blocks.

    Raises DamagedFileError, UnknownVersionError or OSError; then the families are in an unknown state.
    """
    try:
        return _load(disk, worker, families)
    except UnreadableError as error:
        what = f"it can't be read at byte {error.position}: {error.reason}"
        raise DamagedFileError(disk, error.name, what) from error


def _load(disk: Disk, worker: int, families: Sequence[Durable]) -> Found:
    found = find(disk, worker)
    owners: dict[str, Durable] = {family.family: family for family in families}
    for step in snapshot_steps(found):
        _replay(disk, snapshot_name(worker), owners, found, step)
    reader = LogReader(disk, found.segments, found.position.sequence)
    for segment, entry, data in reader.steps():
        step = Step(entry.family, entry.meta, data, f"record {entry.sequence} at byte {entry.start}")
        _replay(disk, segment.name, owners, found, step)
        found.records += 1
    found.cut_bytes, found.cut_at = reader.cut_bytes, reader.cut_at
    found.position = attrs.evolve(found.position, sequence=reader.next)
    if found.cut_bytes:
        logger.warning(
            "%s: the log ends in the middle of a record, at %s: %d bytes were cut; see pion check",
            disk.where,
            found.cut_at,
            found.cut_bytes,
        )
    _tidy(disk, worker, found)
    return found


def _replay(disk: Disk, name: str, owners: dict[str, Durable], found: Found, step: Step) -> None:
    owner = owners.get(step.family)
    if owner is None:
        owner = owners[step.family] = found.dormant[step.family] = Dormant(step.family)
        logger.warning("%s: the plugin that keeps %r is not loaded; its records are kept", disk.where, step.family)
    try:
        owner.replay(step.meta, step.data)
    except ValueError as error:
        raise DamagedFileError(disk, name, f"{step.place}, of {step.family}, makes no sense: {error}") from error


def _tidy(disk: Disk, worker: int, found: Found) -> None:
    """Remove what an interrupted snapshot or segment left behind."""
    own = snapshot_name(worker) + "."
    unfinished = [name for name in disk.names() if name.startswith(own) and name.endswith(TEMPORARY)]
    for name in [*unfinished, *found.unreadable]:
        logger.info("%s: removing %s, which was never finished", disk.where, name)
        try:
            disk.unlink(name)
        except OSError as error:
            logger.warning("%s: can't remove %s: %s", disk.where, name, error)
