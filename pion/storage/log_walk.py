"""Reading a log in which something may be damaged, to its end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pion.storage import records
from pion.storage.disk import Disk
from pion.storage.examination import Examination, FileReport
from pion.storage.records import RECORD_BYTES, SEGMENT_BYTES, Entry
from pion.storage.recovery import READ_AT_START_BYTES, DamagedFileError, LogReader, OpenSegment
from pion.storage.salvage import VSTORE, describe, key_of
from pion.storage.vstore_records import unpack


class LogWalk(LogReader):
    """Reads all that can be read of the log, with the rules of a start for where it ends."""

    def __init__(self, disk: Disk, segments: Sequence[OpenSegment], first: int, found: Examination) -> None:
        super().__init__(disk, segments, first)
        self._found = found

    def run(self) -> None:
        """Replay everything."""
        segments, found = self._segments, self._found
        over = False
        for index, segment in enumerate(segments):
            report = found.files[segment.name]
            report.first = segment.header.first
            if over:
                report.state = "cut off"
            else:
                over = self._segment(segment, report, segments[index + 1 :])
            found.read(report.nbytes)

    def _segment(self, segment: OpenSegment, report: FileReport, later: Sequence[OpenSegment]) -> bool:
        """Replay one segment; True if the log ends in it."""
        limit = min((each.header.first for each in later), default=2**64)
        if segment.header.first >= limit:
            report.state = "replaced by the next" if report.state == "good" else report.state
            return False
        if segment.header.first > self.next:
            self._lost(
                segment, 0, self.next, segment.header.first - 1, "are missing: a file is, or is older than it was"
            )
            self.next = segment.header.first
        view, salt = segment.mapping.view, segment.header.salt
        position, expected = SEGMENT_BYTES, segment.header.first
        while True:
            entry = records.decode(view, position, salt)
            if entry is not None and expected == entry.sequence < limit:
                if self._record(segment, report, entry, later):
                    return True
                position, expected = entry.stop, entry.sequence + 1
                continue
            if self.next >= limit or (position >= len(view) and not later):
                return False
            if not self._refused(segment, report, position, later):
                return True
            found = self._following(segment, position, limit)
            stop, behind = (found.start, found.sequence) if found is not None else (len(view), limit)
            self._lost(segment, position, self.next, behind - 1, f"can't be read, in {stop - position} bytes")
            self.next = behind
            if found is None:
                return False
            position, expected = found.start, found.sequence

    def _following(self, segment: OpenSegment, position: int, limit: int) -> Entry | None:
        """The next record behind a place where none can be read, in the same segment."""
        for entry in records.search(segment.mapping.view, position + 1, segment.header.salt):
            if self.next <= entry.sequence < limit:
                return entry
        return None

    def _record(self, segment: OpenSegment, report: FileReport, entry: Entry, later: Sequence[OpenSegment]) -> bool:
        """Replay one record; True if the log is to be cut in front of it."""
        data = segment.region(entry)
        intact = data is None or data.verify()
        if not intact and data is not None and entry.sequence >= self.next:
            at_start = data.nbytes < READ_AT_START_BYTES or self._may_be_torn(segment)
            if at_start and not self._refused(segment, report, entry.start, later):
                return True
        report.records += 1
        report.last = entry.sequence
        if entry.sequence >= self.next:
            self.next = entry.sequence + 1
            place = f"record {entry.sequence} of {segment.name}"
            self._found.replay(segment.name, entry.start, place, entry.family, entry.meta, data, intact=intact)
        return False

    def _refused(self, segment: OpenSegment, report: FileReport, position: int, later: Sequence[OpenSegment]) -> bool:
        """Whether a start refuses what it finds here, rather than cut the log."""
        try:
            self._end(segment, position, later)
        except DamagedFileError:
            return True
        report.state = "torn at the end" if report.state == "good" else report.state
        self._found.notes.append(
            f"{segment.name}: the log ends in the middle of a record, at byte {position}; the next start cuts "
            f"{self.cut_bytes} bytes, which were not written to the end when the server or the machine died"
        )
        return False

    def _lost(self, segment: OpenSegment, position: int, first: int, last: int, what: str) -> None:
        """Records first to last are gone."""
        place = f"record {first}" if first == last else f"records {first} to {last}"
        salvage, family, hint = self._found.salvage, "", ""
        if position and first == last:
            family, hint = _looks_like(segment, position, {VSTORE, *salvage.dormant, *salvage.lost_families})
        left_out = salvage.gap(place, {family} if family else None, last - first + 1)
        state = "" if position else self._found.files[segment.name].state
        self._found.problem(segment.name, position or None, f"{place} {what}{hint}", left_out, state)


def _looks_like(segment: OpenSegment, position: int, families: Collection[str]) -> tuple[str, str]:
    """Family of a record whose checksum is wrong, and a text for the operator; empty if it can't be told.

    Damage makes no known family's name of another's, so the family can be believed; the rest is only a hint.
    """
    view, start = segment.mapping.view, position + RECORD_BYTES
    size = view[start] if start < len(view) else 0
    name = bytes(view[start + 1 : start + 1 + size])
    if name not in [family.encode("ascii") for family in families]:
        return "", ""
    family = name.decode("ascii")
    stop = start + int.from_bytes(view[position + 4 : position + 8], "little")
    try:
        change = unpack(bytes(view[start + 1 + size : stop]), b"") if family == VSTORE else None
    except ValueError:
        change = None
    return (
        family,
        f"; it looks like {type(change).__name__} of {describe(key_of(change))}" if change is not None else "",
    )
