"""Files that are cut off, missing, older, newer or of another directory."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import xxhash

from pion.client.aio import PionClient
from pion.storage import records, snapshot_format
from pion.storage.snapshot_salvage import read_header
from pion.testing import running_server
from tests.storage.damage_support import DROPPED, SNAPSHOT, Contents, Outcome, fill, pion, read, segments, start, store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Contents]:
    directory = tmp_path_factory.mktemp("made") / "data"
    return directory, trio.run(fill, directory)


@pytest.fixture
def directory(made: tuple[Path, Contents], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(made[0], tmp_path / "data"))


@pytest.fixture
def contents(made: tuple[Path, Contents]) -> Contents:
    return made[1]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "pion.lock"}


async def repaired(directory: Path, expected: Contents, *, may_return: str = "") -> set[str]:
    """Check, repair, start: what is there is as it was. Returns what is lost. Every byte that was there still is."""
    before = sorted(files(directory).values())
    status, text = pion("check", directory)
    assert status == 1, text
    assert sorted(files(directory).values()) == before, "looking changes nothing"
    status, text = pion("repair", directory)
    assert status == 0, text
    kept = files(directory)
    for data in before:
        assert data in kept.values()
    assert pion("check", directory)[0] == 0
    outcome = await start(directory)
    assert outcome.refusal == ""
    assert outcome.checksum_failures == outcome.cut_bytes == 0
    found = dict(outcome.contents)
    if may_return:
        found.pop(may_return, None)
    assert {name for name, value in found.items() if value != expected.get(name)} == set()
    return set(expected) - set(found)


def refused(outcome: Outcome, name: str, *words: str) -> None:
    for part in (name, "pion check", "pion repair", *words):
        assert part in outcome.refusal


@pytest.mark.parametrize(
    ("nbytes", "lost"),
    [
        (1, {"open|u"}),
        (4096, {"small|a", "small|e", "large|c", "chain|p", "chain|q", "chain|r", "lone", "open|u"}),
    ],
)
async def test_a_snapshot_that_is_cut_off(directory: Path, contents: Contents, nbytes: int, lost: set[str]) -> None:
    """A byte is a part of the table's checksum; of its entries only what stood beside the end is in doubt. A page is
    the whole table, and without it nobody knows what the rows are.
    """
    os.truncate(directory / SNAPSHOT, (directory / SNAPSHOT).stat().st_size - nbytes)
    refused(await start(directory), SNAPSHOT, "at byte", "cut off")
    assert await repaired(directory, contents) == lost


async def test_a_snapshot_that_is_cut_off_in_its_table(directory: Path, contents: Contents) -> None:
    """Entries in front of the cut are kept, and it is said how many are behind it."""
    os.truncate(directory / SNAPSHOT, (directory / SNAPSHOT).stat().st_size - 1500)
    text = pion("check", directory)[1]
    count = int(text.split(" of its 33 entries are lost")[0].rpartition(" ")[2])
    assert 10 < count < 33
    lost = await repaired(directory, contents)
    assert "small|a" not in lost
    assert {"large|c", "chain|p", "lone", "open|u"} <= lost


@pytest.mark.parametrize("nbytes", [1, 4096])
async def test_a_segment_that_is_cut_off_with_another_behind_it(
    directory: Path, contents: Contents, nbytes: int
) -> None:
    path = segments(directory)[0]
    os.truncate(path, path.stat().st_size - nbytes)
    refused(await start(directory), path.name, "at byte")
    lost = await repaired(directory, contents, may_return=DROPPED if nbytes > 1 else "")
    assert lost == {"small|h", "lone", "open|u"} | ({"large|g", "chain|r"} if nbytes > 1 else set())


@pytest.mark.parametrize(
    ("nbytes", "lost"), [(1, {"small|last"}), (4096, {"small|last", "chain|r", "large|j"})], ids=["byte", "page"]
)
async def test_the_last_segment_cut_off_is_a_torn_tail(
    directory: Path, contents: Contents, nbytes: int, lost: set[str]
) -> None:
    """What a death in the middle of a write leaves: the next start cuts it, counts the bytes, and goes on."""
    path = segments(directory)[-1]
    os.truncate(path, path.stat().st_size - nbytes)
    status, text = pion("check", directory)
    assert status == 0
    assert "in the middle of a record" in text
    outcome = await start(directory)
    assert outcome.refusal == ""
    assert 0 < outcome.cut_bytes < 200_000
    assert f"cuts {outcome.cut_bytes} bytes" in text
    assert outcome.contents == {name: value for name, value in contents.items() if name not in lost}
    again = await start(directory)
    assert again.contents == outcome.contents, "the segment that began then supersedes what was cut"


async def test_one_byte_less_in_a_file_that_ends_with_a_whole_record(directory: Path, contents: Contents) -> None:
    """The last byte of the last record's rows, that is: the record is not there, as if it had not been written."""
    path = segments(directory)[-1]
    data = path.read_bytes()
    *_, last = records.scan(memoryview(data), records.SegmentHeader.parse(memoryview(data)))
    assert last.stop == len(data)
    os.truncate(path, last.start)
    outcome = await start(directory)
    assert outcome.cut_bytes == 0
    assert outcome.contents.keys() == contents.keys() - {"small|last"}


async def test_a_missing_snapshot(directory: Path, contents: Contents) -> None:
    (directory / SNAPSHOT).unlink()
    refused(await start(directory), segments(directory)[0].name, "begins with record 34", "one is missing")
    lost = await repaired(directory, contents)
    assert lost == {"small|a", "small|e", "large|c", "chain|p", "chain|q", "chain|r", "lone", "open|u"}


async def test_a_missing_segment(directory: Path, contents: Contents) -> None:
    first, second = segments(directory)
    first.unlink()
    refused(await start(directory), second.name, "begins with record 48", "end with 33")
    lost = await repaired(directory, contents, may_return=DROPPED)
    assert lost == {"small|f", "large|g", "small|h", "chain|r", "lone", "open|u"}


async def test_an_empty_file_in_place_of_the_snapshot(directory: Path, contents: Contents) -> None:
    (directory / SNAPSHOT).write_bytes(b"")
    refused(await start(directory), SNAPSHOT, "at byte 0")
    lost = await repaired(directory, contents)
    assert lost == {"small|a", "small|e", "large|c", "chain|p", "chain|q", "chain|r", "lone", "open|u"}


async def test_an_empty_file_in_place_of_a_segment(directory: Path, contents: Contents) -> None:
    """It could be one whose making was cut off; but then no records would be missing."""
    first, second = segments(directory)
    first.write_bytes(b"")
    refused(await start(directory), second.name, "begins with record 48", "end with 33")
    lost = await repaired(directory, contents, may_return=DROPPED)
    assert lost == {"small|f", "large|g", "small|h", "chain|r", "lone", "open|u"}


async def test_a_stale_temporary_snapshot(directory: Path, contents: Contents) -> None:
    """Half of one or a whole one: it never had the name, so it counts for nothing and goes."""
    whole = (directory / SNAPSHOT).read_bytes()
    for data in (b"", whole[: len(whole) // 2], whole):
        temporary = directory / f"{SNAPSHOT}.tmp"
        temporary.write_bytes(data)
        status, text = pion("check", directory)
        assert status == 0
        assert "never finished" in text
        outcome = await start(directory)
        assert outcome.contents == contents
        assert not temporary.exists()


@pytest.fixture
async def generations(tmp_path: Path) -> tuple[Path, dict[str, bytes], Contents, Contents]:
    """A directory after two snapshots, the files as they were after the first, and the contents then and now."""
    directory = tmp_path / "generations"
    async with running_server(directory=directory) as started, PionClient(port=started.port) as client:
        await store(client, "old|kept", 100)
        await store(client, "old|replaced", 200)
        await client.execute("KV.PREFIX.SAVE")
        await store(client, "middle|a", 300)
        earlier = files(directory)
        was = await read(client)
        await client.execute("KV.PREFIX.DROP", "old|replaced")
        await store(client, "old|replaced", 201, 2)
        await client.execute("KV.PREFIX.SAVE")
        await store(client, "new|a", 400)
        await store(client, "new|continues", 500, 2, 8, "PARENT", "old|replaced", 2)
        return directory, earlier, was, await read(client)


async def test_an_older_snapshot_with_a_newer_log(
    generations: tuple[Path, dict[str, bytes], Contents, Contents],
) -> None:
    directory, earlier, was, now = generations
    (directory / SNAPSHOT).write_bytes(earlier[SNAPSHOT])
    log = segments(directory)[0].name
    refused(await start(directory), log, "one is missing, or older than it should be")
    assert pion("repair", directory)[0] == 0
    found = (await start(directory)).contents
    assert found["new|a"] == now["new|a"]
    assert found["old|kept"] == now["old|kept"]
    assert found["old|replaced"] == was["old|replaced"], "as it was, with none of its new rows"
    assert "new|continues" not in found, "what it continues may have been made anew, and was"
    assert found.keys() == {"new|a", "old|kept", "old|replaced"}


async def test_a_newer_snapshot_with_an_older_log(
    generations: tuple[Path, dict[str, bytes], Contents, Contents],
) -> None:
    """The snapshot covers what the log has; what the log does not have was lost with the newer one."""
    directory, earlier, _, now = generations
    for path in segments(directory):
        path.unlink()
    for name, data in earlier.items():
        if name != SNAPSHOT:
            (directory / name).write_bytes(data)
    outcome = await start(directory)
    assert outcome.refusal == ""
    assert outcome.contents == {name: now[name] for name in ("old|kept", "old|replaced", "middle|a")}


async def test_an_older_copy_of_the_last_segment_is_a_log_that_ended_earlier(tmp_path: Path) -> None:
    """Nothing in the directory can tell: the state of then, as after a power cut with --wal-sync no."""
    directory = tmp_path / "data"
    async with running_server(directory=directory) as started, PionClient(port=started.port) as client:
        await store(client, "first", 100)
        log = segments(directory)[0]
        earlier, was = log.read_bytes(), await read(client)
        await store(client, "second", 200)
    log.write_bytes(earlier)
    for path in directory.glob(f"{SNAPSHOT}.log.*"):
        if path != log:
            path.unlink()
    outcome = await start(directory)
    assert outcome.refusal == ""
    assert outcome.contents == was


async def test_an_older_copy_of_a_segment_before_others(directory: Path, contents: Contents) -> None:
    path = segments(directory)[0]
    data = path.read_bytes()
    entries = list(records.scan(memoryview(data), records.SegmentHeader.parse(memoryview(data))))
    path.write_bytes(data[: entries[5].start])
    refused(await start(directory), path.name, "record 39 at byte")
    lost = await repaired(directory, contents, may_return=DROPPED)
    assert lost == {"large|g", "small|h", "chain|r", "lone", "open|u"}


async def test_files_of_another_directory(directory: Path, contents: Contents, tmp_path: Path) -> None:
    other = tmp_path / "other"
    async with running_server(directory=other) as started, PionClient(port=started.port) as client:
        await store(client, "other|a", 900)
        await client.execute("KV.PREFIX.SAVE")
        await store(client, "other|b", 901)
    theirs = (await start(other)).contents
    swapped = Path(shutil.copytree(directory, tmp_path / "swapped"))
    shutil.copy(other / SNAPSHOT, swapped / SNAPSHOT)
    refused(await start(swapped), segments(swapped)[0].name, "another data directory")
    assert pion("repair", swapped)[0] == 0
    outcome = await start(swapped)
    assert outcome.contents == {"other|a": theirs["other|a"]}, "the snapshot decides whose directory it is"

    path = segments(directory)[1]
    shutil.copy(segments(other)[0], path)
    refused(await start(directory), path.name)
    lost = await repaired(directory, contents)
    assert lost == {"small|i", "large|j", "chain|r", "small|last", "lone", "open|u"}


async def test_a_segment_under_another_number(directory: Path, contents: Contents) -> None:
    path = segments(directory)[-1]
    path.rename(path.with_name(f"{SNAPSHOT}.log.0000000077"))
    refused(await start(directory), "0000000077", "it is segment 4")
    assert {"small|i", "large|j"} <= await repaired(directory, contents)


def snapshot_of_version(data: bytes, *, header: str | None = None, table: int | None = None) -> bytes:
    """A snapshot that says another version, with the checksums that belong to it."""
    changed = bytearray(data)
    if header is not None:
        at = data.index(b'"version":"1"') + len('"version":"')
        changed[at : at + 1] = header.encode()
    start_of_table, _ = read_header(memoryview(data))
    assert start_of_table is not None
    if table is not None:
        struct.pack_into("<I", changed, start_of_table + 8, table)
    stop = 8 + snapshot_format.HEADER_LENGTH.unpack_from(data)[0]
    struct.pack_into("<Q", changed, len(changed) - 16, xxhash.xxh3_64_intdigest(changed[:stop]))
    struct.pack_into("<Q", changed, len(changed) - 8, xxhash.xxh3_64_intdigest(changed[start_of_table:-8]))
    return bytes(changed)


def segment_of_version(data: bytes, version: int) -> bytes:
    head = data[:8] + struct.pack("<I", version) + data[12 : records.SEGMENT_BYTES - 8]
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + data[records.SEGMENT_BYTES :]


VERSIONS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "snapshot, newer": (0, lambda data: snapshot_of_version(data, header="2", table=2)),
    "snapshot, newer header": (0, lambda data: snapshot_of_version(data, header="2")),
    "snapshot, newer table": (0, lambda data: snapshot_of_version(data, table=2)),
    "snapshot, newer, with another table": (0, lambda data: data[:-9].replace(b'"version":"1"', b'"version":"2"')),
    "snapshot, older than the first": (0, lambda data: snapshot_of_version(data, header="0", table=0)),
    "segment, newer": (1, lambda data: segment_of_version(data, 2)),
    "segment, newer, with another header": (1, lambda data: data[:8] + struct.pack("<I", 2) + b"\1" * 300),
    "segment, older than the first": (1, lambda data: segment_of_version(data, 0)),
    "last segment, newer": (2, lambda data: segment_of_version(data, 300)),
    "last segment, newer, only a header": (2, lambda data: segment_of_version(data, 2)[: records.SEGMENT_BYTES]),
}


@pytest.mark.parametrize("which", VERSIONS)
async def test_another_version_is_refused_by_name_and_left_alone(directory: Path, which: str) -> None:
    index, change = VERSIONS[which]
    path = [directory / SNAPSHOT, *segments(directory)][index]
    path.write_bytes(change(path.read_bytes()))
    before = files(directory)
    outcome = await start(directory)
    assert path.name in outcome.refusal
    assert "version" in outcome.refusal
    assert "this program knows 1" in outcome.refusal
    assert "pion repair" not in outcome.refusal, "that would not help"
    status, text = pion("check", directory)
    assert status == 1
    assert "this program knows 1" in text
    for options in ([], ["--dry-run"]):
        status, text = pion("repair", directory, *options)
        assert status == 2, text
    assert files(directory) == before
