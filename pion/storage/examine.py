"""Reading a data directory that may be damaged: everything is verified, nothing is changed.

What a start would do with the same files is decided by the same rules, those of `recovery`; but where that refuses,
this notes the problem and reads on behind it, and what can be kept gathers in a `Salvage`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from pion.storage import records, snapshot_format
from pion.storage.disk import Disk, Mapping
from pion.storage.examination import SET_ASIDE, Examination, FileReport
from pion.storage.log_walk import LogWalk
from pion.storage.read_ahead import ReadAhead, UnreadableError
from pion.storage.records import SegmentHeader
from pion.storage.recovery import OpenSegment, is_unfinished
from pion.storage.region import Region
from pion.storage.segments import Position, segment_name, segment_number, snapshot_name
from pion.storage.snapshot import TEMPORARY
from pion.storage.snapshot_format import HEADER_LENGTH, Identity, Snapshot
from pion.storage.snapshot_salvage import Gap, find_remains, header_stop, read_header


def examine(
    disk: Disk, worker: int = 0, progress: Callable[[int, int], None] = lambda done, total: None
) -> Examination:
    """Read and verify all files of one worker. Blocks. Raises OSError if the directory can't be read.

    `progress` gets the bytes read so far, and in all.
    """
    found = Examination(worker, progress)
    _Examiner(disk, worker, found).run()
    return found


class _Examiner:
    def __init__(self, disk: Disk, worker: int, found: Examination) -> None:
        self._disk = disk
        self._worker = worker
        self._found = found
        self._snapshot = snapshot_name(worker)

    def run(self) -> None:
        """Read everything, unless something is of an unknown version."""
        found = self._found
        mappings = self._open()
        if found.unknown_version:
            return
        segments = self._segments(mappings)
        identity = self._read_snapshot(mappings.get(self._snapshot), segments)
        lineage = identity.lineage if identity is not None else segments[0].header.lineage if segments else b""
        segments = [each for each in segments if self._belongs(each, lineage)]
        found.salvage.snapshot_ended()
        walk = LogWalk(self._disk, segments, identity.covers + 1 if identity is not None else 1, found)
        walk.run()
        self._note_unread_end(segments)
        found.salvage.finish()
        found.progress(found.total_bytes, found.total_bytes)
        numbers = [number for each in found.files if (number := segment_number(self._worker, each)) is not None]
        known = [report.last + 1 for report in found.files.values() if report.last is not None]
        found.position = Position(
            max(numbers, default=0) + 1, max([walk.next, *known]), lineage or secrets.token_bytes(16)
        )

    def _note_unread_end(self, segments: Sequence[OpenSegment]) -> None:
        """What the last segments said is lost if they can't be used. Between others the next one's number tells."""
        found = self._found
        last = max((each.header.number for each in segments), default=0)
        for name, report in found.files.items():
            if report.kind == "log" and report.state != "never finished" and int(name[-10:]) > last:
                left_out = found.salvage.gap(f"all of {name}", None)
                found.problem(name, None, "none of its records can be used", left_out, report.state)

    # Opening.

    def _open(self) -> dict[str, Mapping]:
        """Map all files, and see which versions they are of."""
        disk, found = self._disk, dict[str, Mapping]()
        for name in disk.names():
            kind = self._kind(name)
            if not kind:
                continue
            mapping = disk.map(name)
            report = self._found.files[name] = FileReport(name, kind, len(mapping.view))
            if kind == "set aside":
                report.state = "not read"
            elif kind == "unfinished":
                report.state = "never finished"
                self._found.notes.append(f"{name} was never finished; the next start removes it")
            elif self._readable(name, mapping):
                found[name] = mapping
                self._found.total_bytes += len(mapping.view)
        for name, mapping in found.items():
            try:
                if name == self._snapshot:
                    snapshot_format.parse(mapping.view)
                else:
                    SegmentHeader.parse(mapping.view)
                self._found.files[name].version = "1"
            except (snapshot_format.VersionError, records.VersionError) as error:
                self._found.unknown_version = True
                self._found.problem(
                    name, None, f"{error}: start the release of Pion that wrote it, or a newer one", (), "unknown"
                )
            except (snapshot_format.FormatError, records.FormatError):
                pass
        return found

    def _kind(self, name: str) -> str:
        if name == self._snapshot:
            return "snapshot"
        if name.startswith(self._snapshot + ".") and name.endswith(TEMPORARY):
            return "unfinished"
        if segment_number(self._worker, name) is not None:
            return "log"
        return "set aside" if name.startswith(SET_ASIDE) else ""

    def _readable(self, name: str, mapping: Mapping) -> bool:
        """Read what will be looked at through the mapping, with calls that report errors: a page would end the process.

        That is all of a segment, and header and table of a snapshot; its data goes through `Region`.
        """
        size = len(mapping.view)
        if name != self._snapshot:
            return self._read_ahead(name, mapping, 0, size)
        head = min(size, HEADER_LENGTH.size)
        if not self._read_ahead(name, mapping, 0, head):
            return False
        stop = header_stop(mapping.view)
        if not self._read_ahead(name, mapping, head, stop):
            return False
        start = read_header(mapping.view)[0]
        return self._read_ahead(name, mapping, stop if start is None else start, size)

    def _read_ahead(self, name: str, mapping: Mapping, start: int, stop: int) -> bool:
        try:
            ReadAhead(mapping, name)(start, stop)
        except UnreadableError as error:
            self._found.problem(name, error.position, f"it can't be read: {error.reason}", (), "unreadable")
            return False
        return True

    def _segments(self, mappings: dict[str, Mapping]) -> list[OpenSegment]:
        """The segments in order, those too whose header is damaged if their records can be read all the same."""
        numbers = sorted(number for name in mappings if (number := segment_number(self._worker, name)) is not None)
        found: list[OpenSegment] = []
        damaged: list[tuple[int, str, Mapping]] = []
        for number in numbers:
            name = segment_name(self._worker, number)
            mapping = mappings[name]
            try:
                header = SegmentHeader.parse(mapping.view)
            except records.FormatError as error:
                if is_unfinished(mapping.view, last=number == numbers[-1]):
                    self._found.files[name].state = "never finished"
                    self._found.notes.append(f"{name} was never finished; the next start removes it")
                else:
                    self._found.problem(name, 0, str(error))
                    damaged.append((number, name, mapping))
                continue
            if (header.worker, header.number) == (self._worker, number):
                found.append(OpenSegment(name, header, mapping))
            else:
                what = f"it is segment {header.number} of worker {header.worker}, under another name"
                self._found.problem(name, 0, what, (), "not used")
        lineage = found[0].header.lineage if found else b""
        for number, name, mapping in damaged:
            proven = records.find_salt(mapping.view)
            if proven is not None:
                salt, first = proven
                header = SegmentHeader(
                    worker=self._worker,
                    number=number,
                    first=first,
                    salt=salt,
                    lineage=lineage,
                    boot=self._disk.boot_id(),
                )
                found.append(OpenSegment(name, header, mapping))
        return sorted(found, key=lambda segment: segment.header.number)

    def _belongs(self, segment: OpenSegment, lineage: bytes) -> bool:
        if segment.header.lineage in (lineage, b""):
            return True
        what = "it comes from another data directory than the files before it"
        self._found.problem(segment.name, 0, what, (), "not used")
        return False

    # The snapshot.

    def _read_snapshot(self, mapping: Mapping | None, segments: Sequence[OpenSegment]) -> Identity | None:
        name = self._snapshot
        if mapping is None:
            return None
        try:
            snapshot = snapshot_format.parse(mapping.view)
        except snapshot_format.FormatError as error:
            return self._read_remains(name, mapping, str(error), segments)
        if snapshot.identity.worker != self._worker:
            self._found.problem(name, 0, f"it belongs to worker {snapshot.identity.worker}", (), "not used")
            return None
        self._read_entries(name, mapping, snapshot)
        return snapshot.identity

    def _read_entries(self, name: str, mapping: Mapping, snapshot: Snapshot) -> None:
        report = self._found.files[name]
        report.last = snapshot.identity.covers
        done = 0
        for entry in snapshot.entries():
            data = Region(mapping, entry.start, entry.nbytes, entry.checksum, entry.seed)
            self._replay_entry(name, report, entry, data, intact=data.verify())
            self._found.read(entry.nbytes)
            done += entry.nbytes
        self._found.read(report.nbytes - done)

    def _replay_entry(
        self, name: str, report: FileReport, entry: snapshot_format.Entry, data: Region, *, intact: bool
    ) -> None:
        report.records += 1
        place = f"entry {report.records} of {name}"
        region = data if entry.nbytes else None
        self._found.replay(name, entry.start, place, entry.family, entry.meta, region, intact=intact)

    def _read_remains(self, name: str, mapping: Mapping, what: str, segments: Sequence[OpenSegment]) -> Identity | None:
        self._found.problem(name, None, what)
        report = self._found.files[name]
        if not self._read_ahead(name, mapping, 0, report.nbytes):
            return None
        remains = find_remains(mapping, {each.header.lineage for each in segments} - {b""})
        self._found.read(report.nbytes)
        if remains is None or remains.identity.worker != self._worker:
            left_out = self._found.salvage.gap(f"all of {name}", None)
            self._found.problem(name, None, "nothing of it can be used", left_out)
            return None
        report.last = remains.identity.covers
        family: str | None = None
        gap: Gap | None = None
        for part in remains.parts():
            if isinstance(part, Gap):
                gap = part
                continue
            entry, intact = part
            self._note_gap(name, gap, {family, entry.family} if family is not None else None)
            gap, family = None, entry.family
            data = Region(mapping, entry.start, entry.nbytes, entry.checksum, entry.seed)
            self._replay_entry(name, report, entry, data, intact=intact)
        self._note_gap(name, gap, None)
        if remains.count is not None and remains.count > report.records:
            lost = remains.count - report.records
            self._found.notes.append(f"{name}: {lost} of its {remains.count} entries are lost, and what they were of")
        return remains.identity

    def _note_gap(self, name: str, gap: Gap | None, families: set[str] | None) -> None:
        if gap is None:
            return
        place = f"a part of the table of {name}"
        what = f"{gap.stop - gap.start} bytes of its table can't be read"
        if gap.start == gap.stop:
            what = "its table is cut off"
        self._found.problem(name, gap.start, what, self._found.salvage.table_gap(place, families))
