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
        found, over = self._found, False
        for unused in [each for each in self._segments if each.unused]:
            found.files[unused.name].state = "ready for use"
            found.read(SEGMENT_BYTES)
        segments = [each for each in self._segments if not each.unused]
        for index, segment in enumerate(segments):
            report = found.files[segment.name]
            report.first = segment.first or None
            if over:
                report.state = "cut off"
            else:
                over = self._segment(segment, report, segments[index + 1 :])
            found.read(report.nbytes)

    def _segment(self, segment: OpenSegment, report: FileReport, later: Sequence[OpenSegment]) -> bool:
        """Replay one segment; True if the log ends in it."""
        limit = min((each.first for each in later if each.first), default=2**64)
        if segment.first >= limit:
            report.state = "replaced by the next" if report.state == "good" else report.state
            return False
        if segment.first > self.next:
            emptied = self._emptied(segment)
            if emptied is not None and not self._refused(
                emptied, self._found.files[emptied.name], SEGMENT_BYTES, [segment, *later]
            ):
                report.state = "cut off" if report.state == "good" else report.state
                return True
            self._lost(segment, 0, self.next, segment.first - 1, "are missing: a file is, or is older than it was")
            self.next = segment.first
        view, salt = segment.mapping.view, segment.header.salt
        position, expected = SEGMENT_BYTES, segment.header.first
        while True:
            entry = records.decode(view, position, salt, segment.ready)
            if entry is not None and expected in (0, entry.sequence) and entry.sequence < limit:
                if self._record(segment, report, entry, later):
                    return True
                position, expected = entry.stop, entry.sequence + 1
                continue
            if self.next >= limit or (position == len(view) and (not later or not later[0].first)):
                return False
            if not self._refused(segment, report, position, later):
                return True
            found = self._following(segment, position, limit)
            if found is None:
                self._lost_to_the_end(segment, position, limit)
                return False
            what = f"can't be read, in {found.start - position} bytes"
            self._lost(segment, position, self.next, found.sequence - 1, what)
            position, expected = found.start, found.sequence
            self.next = found.sequence

    def _lost_to_the_end(self, segment: OpenSegment, position: int, limit: int) -> None:
        """Nothing more of a segment can be read, and there are others behind it."""
        what = f"can't be read, in {len(segment.mapping.view) - position} bytes"
        if limit < 2**64:
            self._lost(segment, position, self.next, limit - 1, what)
            self.next = limit
        else:  # the one behind begins with something that can't be read either
            left_out = self._found.salvage.gap(f"records {self.next} and on", None)
            self._found.problem(segment.name, position, f"records {self.next} and on {what}", left_out)

    def _following(self, segment: OpenSegment, position: int, limit: int) -> Entry | None:
        """The next record behind a place where none can be read, in the same segment."""
        for entry in records.search(segment.mapping.view, position + 1, segment.header.salt, segment.ready):
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
