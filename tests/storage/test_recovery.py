"""What a start makes of the files it finds: where the log ends, and what is refused.

Segments are made record by record here; `boot-1` is the present run of the machine.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

import attrs
import pytest

from pion.errors import StartupError
from pion.storage import recovery
from pion.storage.durable import Captured, Durable, Record
from pion.storage.examine import examine
from pion.storage.records import SEGMENT_BYTES, SegmentHeader, encode, scan
from pion.storage.recovery import DamagedFileError, Found, UnknownVersionError
from pion.storage.region import Region
from pion.storage.segments import segment_name, snapshot_name
from pion.storage.snapshot import _File
from pion.storage.snapshot_format import Identity
from pion.testing import Fault, MemoryDisk, fault_at
from tests.storage.log_support import LINEAGE, Notes, read

NOW, BEFORE = "boot-1", "boot-0"


@attrs.frozen
class Log:
    """A segment to be written."""

    number: int
    first: int
    texts: Sequence[bytes | tuple[bytes, bytes]] = ()
    """Metas, or metas with data, of the records from `first` on."""
    boot: str = NOW
    durable: int = 0
    lineage: bytes = LINEAGE
    prepared: bool = False
    """The header doesn't know the first number."""
    worker: int = 0
    family: str = "notes"

    @property
    def header(self) -> SegmentHeader:
        return SegmentHeader(
            worker=self.worker,
            number=self.number,
            first=0 if self.prepared else self.first,
            salt=1000 + self.number,
            lineage=self.lineage,
            boot=self.boot,
        )

    @property
    def content(self) -> bytes:
        parts = [self.header.to_bytes()]
        for sequence, text in enumerate(self.texts, start=self.first):
            meta, data = text if isinstance(text, tuple) else (text, None)
            parts += encode(self.family, Record(meta, data), sequence, self.durable, self.header.salt)[0]
        return b"".join(map(bytes, parts))

    def start_of(self, sequence: int) -> int:
        """Where a record begins."""
        (entry,) = [each for each in scan(memoryview(self.content), self.header) if each.sequence == sequence]
        return entry.start


def put(disk: MemoryDisk, name: str, content: bytes) -> None:
    file = disk.create(name)
    file.write([content])
    file.sync()
    file.close()
    disk.sync_directory(name)


def disk_with(*segments: Log, covers: int | None = None, notes: Sequence[bytes] = (), **snapshot: object) -> MemoryDisk:
    disk = MemoryDisk()
    for segment in segments:
        put(disk, segment_name(0, segment.number), segment.content)
    if covers is not None:
        options = {"worker": 0, "lineage": LINEAGE, **snapshot}
        file = _File(disk, snapshot_name(0), 0, Identity(covers=covers, **options))  # type: ignore[arg-type]
        file.add([("notes", Captured(note)) for note in notes])
        file.finish()
    return disk


def notes_of(disk: MemoryDisk) -> list[bytes]:
    return read(disk)[1].notes


def texts(first: int, last: int) -> list[bytes]:
    return [b"note %d" % number for number in range(first, last + 1)]


def refused(disk: MemoryDisk, name: str, *words: str) -> None:
    with pytest.raises(DamagedFileError) as caught:
        read(disk)
    assert caught.value.name == name
    text = str(caught.value)
    assert f"memory/{name}" in text
    assert "pion repair memory" in text
    for word in words:
        assert word in text, text


ONE, TWO, THREE = Log(1, 1, texts(1, 3)), Log(2, 4, texts(4, 6)), Log(3, 7, texts(7, 9))


def test_an_empty_directory() -> None:
    found, notes = read(MemoryDisk())
    assert (notes.notes, found.records, found.cut_bytes) == ([], 0, 0)
    assert (found.position.number, found.position.sequence) == (1, 1)
    assert len(found.position.lineage) == 16


def test_segments_in_order() -> None:
    found, notes = read(disk_with(ONE, TWO, THREE))
    assert notes.notes == texts(1, 9)
    assert (found.position.number, found.position.sequence, found.position.lineage) == (4, 10, LINEAGE)
    assert (found.records, found.cut_bytes) == (9, 0)
    assert {number: segment.first for number, segment in found.sizes().items()} == {1: 1, 2: 4, 3: 7}


def test_a_snapshot_and_the_log_behind_it() -> None:
    found, notes = read(disk_with(TWO, THREE, covers=3, notes=[b"a", b"b"]))
    assert notes.notes == [b"a", b"b", *texts(4, 9)]
    assert found.records == 6


def test_a_snapshot_that_covers_a_part_of_the_log() -> None:
    found, notes = read(disk_with(ONE, TWO, THREE, covers=5, notes=[b"a"]))
    assert notes.notes == [b"a", *texts(6, 9)]
    assert (found.records, found.position.sequence) == (4, 10)


@pytest.mark.parametrize("segments", [(), (ONE,), (ONE, TWO, THREE)])
def test_a_snapshot_that_covers_everything(segments: tuple[Log, ...]) -> None:
    found, notes = read(disk_with(*segments, covers=12, notes=[b"a"]))
    assert notes.notes == [b"a"]
    # Numbers are never used twice.
    assert (found.position.sequence, found.position.lineage) == (13, LINEAGE)


# A torn tail.


def cut(segment: Log, size: int) -> MemoryDisk:
    disk = disk_with(*(each for each in (ONE, TWO) if each.number < segment.number))
    put(disk, segment_name(0, segment.number), segment.content[:size])
    return disk


@pytest.mark.parametrize("boot", [NOW, BEFORE, ""])
def test_the_tail_is_cut_off_at_every_byte(boot: str, caplog: pytest.LogCaptureFixture) -> None:
    last = Log(2, 4, [b"note 4", b"note 5", (b"note 6", b" with data")], boot=boot)
    start = last.start_of(6)
    for size in range(start, len(last.content)):
        found, notes = read(cut(last, size))
        assert notes.notes == texts(1, 5)
        assert (found.cut_bytes, found.position.sequence) == (size - start, 6)
        if size > start:
            assert found.cut_at == f"{segment_name(0, 2)} at byte {start}"
            assert f"at {found.cut_at}: {size - start} bytes" in caplog.messages[-1]
    assert notes_of(cut(last, len(last.content)))[-1] == b"note 6 with data"


@pytest.mark.parametrize("boot", [NOW, BEFORE])
@pytest.mark.parametrize("garbage", [b"\0" * 100, b"\xabPr\xec" * 30, bytes(range(200))])
def test_anything_at_the_end_is_cut(boot: str, garbage: bytes) -> None:
    disk = disk_with(ONE)
    last = Log(2, 4, texts(4, 6), boot=boot)
    put(disk, segment_name(0, 2), last.content + garbage)
    found, notes = read(disk)
    assert notes.notes == texts(1, 6)
    assert found.cut_bytes == len(garbage)


def test_damaged_data_of_the_last_record_is_a_torn_tail() -> None:
    last = Log(2, 4, [b"note 4", (b"note 5", b"data")])
    disk = disk_with(ONE, last)
    disk.damage(segment_name(0, 2), len(last.content) - 1)
    found, notes = read(disk)
    assert notes.notes == texts(1, 4)
    assert found.cut_bytes == len(last.content) - last.start_of(5)


def test_what_was_cut_stays_cut() -> None:
    """The next segment begins with the number of what was cut."""
    torn = cut(TWO, TWO.start_of(6) + 10)
    put(torn, segment_name(0, 3), Log(3, 6, [b"another 6", b"another 7"]).content)
    found, notes = read(torn)
    assert notes.notes == [*texts(1, 5), b"another 6", b"another 7"]
    assert found.cut_bytes == 0


# Damage.


@pytest.mark.parametrize("sequence", [1, 2, 3])
def test_a_bad_record_with_good_ones_behind_it_is_refused(sequence: int) -> None:
    place = ONE.start_of(sequence)
    disk = disk_with(ONE, TWO)
    disk.damage(segment_name(0, 1), place + 20)
    refused(disk, segment_name(0, 1), f"record {sequence} at byte {place} is damaged", "up to number 6")


def test_in_the_last_segment_too() -> None:
    disk = disk_with(ONE, TWO)
    disk.damage(segment_name(0, 2), TWO.start_of(5) + 20)
    refused(disk, segment_name(0, 2), f"record 5 at byte {TWO.start_of(5)} is damaged", "up to number 6")


def test_damaged_data_with_good_records_behind_it_is_refused() -> None:
    segment = Log(1, 1, [b"note 1", (b"note 2", b"data"), b"note 3"])
    disk = disk_with(segment)
    disk.damage(segment_name(0, 1), segment.start_of(3) - 1)
    refused(disk, segment_name(0, 1), "record 2")


def test_a_segment_that_is_cut_off_with_another_behind_it_is_refused() -> None:
    for size in range(SEGMENT_BYTES, len(TWO.content)):
        disk = cut(TWO, size)
        put(disk, segment_name(0, 3), THREE.content)
        whole = [number for number in (4, 5, 6) if TWO.start_of(number) <= size]
        refused(disk, segment_name(0, 2), f"record {whole[-1] if size < len(TWO.content) else 7} at byte")


def test_a_missing_segment_is_refused() -> None:
    refused(disk_with(ONE, THREE), segment_name(0, 1), "record 4")
    refused(disk_with(TWO, THREE), segment_name(0, 2), "begins with record 4", "end with 0", "missing")


def test_an_older_snapshot_is_refused() -> None:
    refused(disk_with(TWO, covers=2), segment_name(0, 2), "begins with record 4", "end with 2")


def test_damage_in_what_the_snapshot_covers_does_not_matter() -> None:
    disk = disk_with(ONE, TWO, THREE, covers=6, notes=[b"a"])
    for number, segment in ((1, ONE), (2, TWO)):
        disk.damage(segment_name(0, number), segment.start_of(segment.first + 1) + 20)
    assert notes_of(disk) == [b"a", *texts(7, 9)]


@pytest.mark.parametrize("position", [0, 9, 20, SEGMENT_BYTES - 1])
def test_a_damaged_header_of_a_segment_with_records_is_refused(position: int) -> None:
    disk = disk_with(ONE, TWO)
    disk.damage(segment_name(0, 2), position)
    refused(disk, segment_name(0, 2), "its header is damaged, at byte 0")


def test_a_record_that_makes_no_sense_is_refused() -> None:
    disk = disk_with(Log(1, 1, [b"note 1", b"bad note"]))
    refused(disk, segment_name(0, 1), "record 2 at byte", "of notes, makes no sense: a bad note")


def test_files_that_are_not_of_this_directory_are_refused() -> None:
    other = bytes(16)
    refused(disk_with(ONE, attrs.evolve(TWO, lineage=other)), segment_name(0, 2), "another data directory")
    refused(disk_with(ONE, covers=0, lineage=other), segment_name(0, 1), "another data directory")
    refused(disk_with(covers=0, worker=1), snapshot_name(0), "belongs to worker 1")
    disk = MemoryDisk()
    put(disk, segment_name(0, 2), ONE.content)
    refused(disk, segment_name(0, 2), "it is segment 1 of worker 0")
    disk = MemoryDisk()
    put(disk, segment_name(0, 1), attrs.evolve(ONE, worker=3).content)
    refused(disk, segment_name(0, 1), "it is segment 1 of worker 3")


def test_other_files_are_left_alone() -> None:
    disk = disk_with(ONE)
    for name in ("pion.vstore.1", "pion.vstore.1.log.0000000001", "notes.txt", "backup", "pion.vstore.0.log.x"):
        put(disk, name, b"anything")
    names = disk.names()
    assert notes_of(disk) == texts(1, 3)
    assert disk.names() == names


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("pion.storage.records.VERSION", 7)
        later = ONE.content
    disk = MemoryDisk()
    put(disk, segment_name(0, 1), later)
    with pytest.raises(UnknownVersionError, match="version 7, and this program knows 1"):
        read(disk)
    # Also if it has no records: it is not ours to remove.
    disk = MemoryDisk()
    put(disk, segment_name(0, 1), later[:SEGMENT_BYTES])
    with pytest.raises(UnknownVersionError, match="version 7"):
        read(disk)
    assert disk.names() == [segment_name(0, 1)]


# After a power cut: what was not flushed may be gone in any order.


def test_a_bad_record_that_was_not_flushed_ends_the_log() -> None:
    before = Log(1, 1, texts(1, 6), boot=BEFORE, durable=2)
    for sequence in (3, 4, 5):
        disk = disk_with(before)
        disk.damage(segment_name(0, 1), before.start_of(sequence) + 20)
        found, notes = read(disk)
        assert notes.notes == texts(1, sequence - 1)
        assert found.cut_bytes == len(before.content) - before.start_of(sequence)


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_bad_record_that_was_flushed_is_damage(sequence: int) -> None:
    before = Log(1, 1, texts(1, 6), boot=BEFORE, durable=2)
    disk = disk_with(before)
    disk.damage(segment_name(0, 1), before.start_of(sequence) + 20)
    refused(disk, segment_name(0, 1), f"record {sequence}")


@pytest.mark.parametrize(("durable", "is_cut"), [(0, True), (2, True), (3, False), (5, False)])
def test_a_later_segment_tells_what_was_flushed(durable: int, is_cut: bool) -> None:
    segments = [attrs.evolve(ONE, boot=BEFORE), attrs.evolve(TWO, boot=BEFORE, durable=durable)]
    disk = disk_with(*segments)
    disk.damage(segment_name(0, 1), ONE.start_of(3) + 20)
    if is_cut:
        found, notes = read(disk)
        assert notes.notes == texts(1, 2)
        assert found.cut_bytes == len(ONE.content) - ONE.start_of(3) + len(TWO.content) - SEGMENT_BYTES
        assert found.position.sequence == 3
    else:
        refused(disk, segment_name(0, 1), "record 3")


def test_a_later_record_behind_a_bad_one_tells_it_too() -> None:
    """Record 4, the first of its segment, is bad as well; 5 says that 3 was flushed."""
    segments = [attrs.evolve(ONE, boot=BEFORE), attrs.evolve(TWO, boot=BEFORE, durable=3)]
    disk = disk_with(*segments)
    disk.damage(segment_name(0, 1), ONE.start_of(3) + 20)
    disk.damage(segment_name(0, 2), TWO.start_of(4) + 20)
    refused(disk, segment_name(0, 1), "record 3")


def test_a_hole_in_what_was_not_flushed() -> None:
    before = Log(1, 1, [b"note 1", (b"note 2", bytes(600)), b"note 3"], boot=BEFORE)
    content = bytearray(before.content)
    content[before.start_of(2) : before.start_of(3)] = bytes(before.start_of(3) - before.start_of(2))
    disk = MemoryDisk()
    put(disk, segment_name(0, 1), bytes(content))
    assert notes_of(disk) == [b"note 1"]


def test_a_segment_of_this_run_of_the_machine_is_not_torn_by_an_earlier_power_cut() -> None:
    """The cut was in segment 1, at record 3, and segment 2 was begun since."""
    before, now = attrs.evolve(ONE, boot=BEFORE), Log(2, 3, texts(3, 5))
    disk = disk_with(before, now)
    disk.damage(segment_name(0, 1), ONE.start_of(3) + 20)
    assert notes_of(disk) == texts(1, 5)
    disk.damage(segment_name(0, 2), now.start_of(4) + 20)
    refused(disk, segment_name(0, 2), "record 4")


# Large data.


@attrs.define(eq=False)
class Large(Durable):
    """Keeps its data where it is."""

    family: str = "notes"
    regions: dict[bytes, Region | None] = attrs.field(factory=dict)

    def replay(self, meta: bytes, data: Region | None) -> None:
        self.regions[meta] = data


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Callable[[MemoryDisk], tuple[Found, Large]]:
    monkeypatch.setattr(recovery, "READ_AT_START_BYTES", 100)

    def load(disk: MemoryDisk) -> tuple[Found, Large]:
        family = Large()
        return recovery.load(disk, 0, [family]), family

    return load


def data(number: int, size: int) -> bytes:
    return bytes([number]) * size


def test_large_data_is_looked_at_when_it_is_used(large: Callable[[MemoryDisk], tuple[Found, Large]]) -> None:
    segment = Log(1, 1, [(b"small", data(1, 99)), (b"large", data(2, 100)), (b"damaged", data(3, 300)), b"last"])
    disk = disk_with(segment)
    disk.damage(segment_name(0, 1), segment.start_of(4) - 1)
    found, family = large(disk)
    assert found.cut_bytes == 0
    assert [region is not None and region.verify() for region in family.regions.values()] == [True, True, False, False]
    small, big = family.regions[b"small"], family.regions[b"large"]
    assert small is not None
    assert big is not None
    assert (small.read(), big.read()) == (data(1, 99), data(2, 100))


@pytest.mark.parametrize(("durable", "kept"), [(0, 1), (1, 1), (2, 4), (3, 4)])
def test_large_data_that_a_power_cut_may_have_hit_is_read(
    large: Callable[[MemoryDisk], tuple[Found, Large]], durable: int, kept: int
) -> None:
    """Record 2 is damaged. If it was flushed, that is damage, found when it is used; if not, the log ends there."""
    texts = [(b"1", data(1, 100)), (b"2", data(2, 100)), (b"3", data(3, 100)), b"4"]
    segment = Log(1, 1, texts, boot=BEFORE, durable=durable)
    disk = disk_with(segment)
    disk.damage(segment_name(0, 1), segment.start_of(3) - 1)
    found, family = large(disk)
    assert len(family.regions) == found.records == kept
    assert bool(found.cut_bytes) == (kept < 4)


# Segments that were given up, made in advance, or not finished.


def test_what_a_segment_supersedes_is_ignored() -> None:
    """Record 3 failed, and with it all behind it; the next segment begins with another 3."""
    assert notes_of(disk_with(ONE, Log(2, 3, [b"new 3", b"new 4"]))) == [*texts(1, 2), b"new 3", b"new 4"]


def test_a_whole_segment_can_be_superseded() -> None:
    disk = disk_with(ONE, TWO, Log(3, 3, [b"new 3"]))
    disk.damage(segment_name(0, 2), TWO.start_of(5) + 20)
    found, notes = read(disk)
    assert notes.notes == [*texts(1, 2), b"new 3"]
    assert (found.position.number, found.position.sequence) == (4, 4)


def test_damage_behind_the_place_where_the_next_begins_does_not_matter() -> None:
    disk = disk_with(ONE, Log(2, 3, [b"new 3"]))
    disk.damage(segment_name(0, 1), ONE.start_of(3) + 20)
    assert notes_of(disk) == [*texts(1, 2), b"new 3"]
    disk.damage(segment_name(0, 1), ONE.start_of(2) + 20)
    refused(disk, segment_name(0, 1), "record 2")


@pytest.mark.parametrize("boot", [NOW, BEFORE])
def test_segments_that_were_made_in_advance(boot: str) -> None:
    """One that was used, and one that was not when the process died."""
    segments = [
        attrs.evolve(ONE, boot=boot),
        attrs.evolve(TWO, prepared=True, boot=boot),
        Log(3, 0, prepared=True, boot=boot),
    ]
    found, notes = read(disk_with(*segments))
    assert (notes.notes, found.cut_bytes) == (texts(1, 6), 0)
    assert (found.position.number, found.position.sequence) == (4, 7)
    assert notes_of(disk_with(*segments, Log(4, 7, texts(7, 8)))) == texts(1, 8)


def test_damage_in_the_first_record_of_a_segment_made_in_advance_is_refused() -> None:
    """Its number is in that record only, and those behind it are valid."""
    for later in ((), (THREE,)):
        disk = disk_with(ONE, attrs.evolve(TWO, prepared=True), *later)
        disk.damage(segment_name(0, 2), TWO.start_of(4) + 20)
        refused(disk, segment_name(0, 2), f"record 4 at byte {SEGMENT_BYTES} is damaged")


@pytest.mark.parametrize(("durable", "is_cut"), [(0, True), (3, True), (4, False)])
def test_a_power_cut_in_the_first_record_of_a_segment_made_in_advance(durable: int, is_cut: bool) -> None:
    second = attrs.evolve(TWO, prepared=True, boot=BEFORE, durable=durable)
    disk = disk_with(attrs.evolve(ONE, boot=BEFORE), second)
    disk.damage(segment_name(0, 2), TWO.start_of(4) + 20)
    if is_cut:
        assert notes_of(disk) == texts(1, 3)
    else:
        refused(disk, segment_name(0, 2), "record 4")


def test_a_gap_in_front_of_a_segment_made_in_advance_is_refused() -> None:
    refused(disk_with(ONE, attrs.evolve(THREE, prepared=True)), segment_name(0, 1), "record 4", "up to number 9")


@pytest.mark.parametrize(("durable", "is_cut"), [(0, True), (3, True), (4, False), (6, False)])
@pytest.mark.parametrize("covers", [None, 3])
def test_a_power_cut_that_took_all_records_of_a_segment_made_in_advance(
    covers: int | None, durable: int, is_cut: bool
) -> None:
    """Records 4 to 6 had been written to it. The file is as if it had never been used."""
    emptied = Log(2, 0, prepared=True, boot=BEFORE)
    before = [attrs.evolve(ONE, boot=BEFORE)] if covers is None else []
    behind = Log(4, 7, texts(7, 9), boot=BEFORE, durable=durable)
    disk = disk_with(*before, emptied, behind, covers=covers, notes=texts(1, 3))
    if is_cut:
        found, notes = read(disk)
        assert notes.notes == texts(1, 3)
        assert (found.cut_bytes, found.position.sequence) == (len(behind.content) - SEGMENT_BYTES, 4)
        assert found.cut_at.startswith(segment_name(0, 1 if covers is None else 2))
    else:
        with pytest.raises(DamagedFileError, match="record 4 at byte"):
            read(disk)
    # `pion check` says the same.
    checked = examine(disk)
    cut = f"the next start cuts {len(behind.content) - SEGMENT_BYTES} bytes"
    ends_in = segment_name(0, 1 if covers is None else 2)
    assert all(cut in note and note.startswith(ends_in) for note in checked.notes)
    assert (len(checked.notes), len(checked.problems)) == ((1, 0) if is_cut else (0, 1))
    assert (checked.files[segment_name(0, 4)].state == "cut off") == is_cut
    assert checked.position.sequence == (4 if is_cut else 10)
    # In this run of the machine nothing can have taken them.
    now = disk_with(
        *[attrs.evolve(each, boot=NOW) for each in (*before, emptied, behind)], covers=covers, notes=texts(1, 3)
    )
    with pytest.raises(DamagedFileError):
        read(now)
    assert len(examine(now).problems) == 1


def test_a_segment_whose_making_was_cut_off_is_removed() -> None:
    for size in (0, 1, SEGMENT_BYTES - 1):
        disk = cut(TWO, size)
        found, notes = read(disk)
        assert notes.notes == texts(1, 3)
        assert found.position.number == 3  # its name is not used again
        assert disk.names() == [segment_name(0, 1)]


def test_also_if_more_were_made_since() -> None:
    """The disk failed when it was to be written, and when it was to be removed."""
    for content in (b"", TWO.content[:50], bytes(SEGMENT_BYTES)):
        disk = disk_with(ONE)
        put(disk, segment_name(0, 2), content)
        put(disk, segment_name(0, 3), Log(3, 4, texts(4, 5)).content)
        assert notes_of(disk) == texts(1, 5)
        assert disk.names() == [segment_name(0, 1), segment_name(0, 3)]


def test_a_power_cut_may_leave_zeros_of_the_last_header() -> None:
    disk = disk_with(ONE)
    put(disk, segment_name(0, 2), bytes(SEGMENT_BYTES))
    assert notes_of(disk) == texts(1, 3)


def test_an_unfinished_snapshot_is_removed() -> None:
    disk = disk_with(ONE)
    put(disk, snapshot_name(0) + ".tmp", b"half a snapshot")
    assert notes_of(disk) == texts(1, 3)
    assert disk.names() == [segment_name(0, 1)]


def test_a_file_that_can_not_be_removed_is_only_reported(caplog: pytest.LogCaptureFixture) -> None:
    disk = disk_with(ONE)
    put(disk, snapshot_name(0) + ".tmp", b"half a snapshot")
    disk.plan = fault_at(len(disk.operations) + 1, Fault(error=errno.EACCES))
    assert notes_of(disk) == texts(1, 3)
    assert "can't remove pion.vstore.0.tmp" in caplog.messages[-1]


# Families.


def test_records_of_a_family_that_is_not_loaded_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    disk = disk_with(ONE, attrs.evolve(TWO, family="other"))
    found, notes = read(disk)
    assert notes.notes == texts(1, 3)
    assert found.dormant.keys() == {"other"}
    assert [captured.meta for captured in found.dormant["other"].capture()] == texts(4, 6)
    assert [text for text in caplog.messages if "keeps 'other' is not loaded" in text]


def test_each_family_gets_its_own() -> None:
    disk = disk_with(ONE, attrs.evolve(TWO, family="other"), THREE)
    families = [Notes(), Notes("other")]
    recovery.load(disk, 0, families)
    assert [family.notes for family in families] == [[*texts(1, 3), *texts(7, 9)], texts(4, 6)]


def test_a_refused_start_is_a_startup_error() -> None:
    assert issubclass(DamagedFileError, StartupError)
    assert issubclass(UnknownVersionError, StartupError)
