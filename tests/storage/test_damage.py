"""One flipped bit, anywhere: the start is refused, or what it hit is gone and counted; never a wrong row."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio

from pion.config import Config
from pion.errors import StartupError
from pion.storage.examine import examine
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.recovery import load
from pion.storage.salvage import describe
from pion.storage.vstore import VStore
from pion.storage.vstore_log import VStoreLog
from pion.testing import FakeClock
from tests.storage.damage_support import (
    CONTINUED,
    DROPPED,
    SNAPSHOT,
    Contents,
    FrozenDisk,
    Outcome,
    fill,
    flip,
    pion,
    segment_regions,
    segments,
    snapshot_regions,
    start,
    state,
)


@attrs.frozen
class World:
    """A directory as it should be, and what is in it."""

    directory: Path
    contents: Contents


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    directory = tmp_path_factory.mktemp("world") / "data"
    return World(directory, trio.run(fill, directory))


class Trial:
    """One damage to a copy of the directory: what check, start and repair make of it."""

    def __init__(self, world: World, folder: Path, name: str, offset: int) -> None:
        self.world = world
        self.name = name
        damaged, repaired = folder / "damaged", folder / "repaired"
        for copy in (damaged, repaired):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(world.directory, copy)
            flip(copy / name, offset)
        self.checked, self.check_text = pion("check", damaged)
        self.started: Outcome = trio.run(start, damaged)
        self.repair_status, self.repair_text = pion("repair", repaired)
        self.after: Outcome = trio.run(start, repaired)
        self.again = pion("repair", repaired)

    def wrong(self, *, dropped_may_return: bool, may_be_cut: bool, counts: bool) -> list[str]:
        """What is not as it must be."""
        expected, started, after = self.world.contents, self.started, self.after
        found = []
        if started.refusal:
            places = (self.name, "at byte", "pion check", "pion repair")
            found += [
                f"the refusal lacks {part!r}: {started.refusal}" for part in places if part not in started.refusal
            ]
            found += ["refused, and check finds nothing"] if self.checked != 1 else []
        else:
            lost = expected.keys() - started.contents.keys()
            is_one = any(lost == {name} | CONTINUED.get(name, set()) for name in lost)
            found += [f"after the start {name} is wrong" for name in differences(started.contents, expected)]
            if started.cut_bytes:
                found += [] if may_be_cut and lost == {"small|last"} and self.checked == 0 else [f"cut, lost {lost}"]
            elif counts:
                right = started.checksum_failures == 1 and is_one and self.checked == 1
                found += [] if right else [f"{started.checksum_failures} failures, lost {lost}, check {self.checked}"]
        if self.repair_status or after.refusal or after.checksum_failures:
            found.append(f"after the repair: {self.repair_text} {after.refusal}")
        if self.again[0] or "nothing to repair" not in self.again[1]:
            found.append(f"a second repair: {self.again}")
        kept = dict(after.contents)
        if dropped_may_return:
            kept.pop(DROPPED, None)
        found += [f"after the repair {name} is wrong" for name in differences(kept, expected)]
        unnamed = [name for name in expected.keys() - kept.keys() if f"'{name}'" not in self.repair_text]
        found += [f"not named: {unnamed}"] if unnamed and not started.cut_bytes else []
        return found


def differences(contents: Contents, expected: Contents) -> list[str]:
    return [name for name, value in contents.items() if expected.get(name) != value]


EACH_REGION = 26
"""Regions of the header and the first entries or records that are all tried; of the rest, which repeats them, every
eleventh: entries have five or six regions and records nine or ten, so all kinds come up.
"""


def chosen(regions: dict[str, int]) -> dict[str, int]:
    return {name: at for index, (name, at) in enumerate(regions.items()) if index < EACH_REGION or not index % 11}


def test_one_flipped_bit_in_every_region_of_the_snapshot(world: World, tmp_path: Path) -> None:
    regions = chosen(snapshot_regions((world.directory / SNAPSHOT).read_bytes()))
    assert len(regions) > 40
    problems = {}
    for region, offset in regions.items():
        # Rows of a prefix that the log drops are not missed.
        counts = region not in (f"data of {index}, shared tensor" for index in range(6, 10))
        wrong = Trial(world, tmp_path, SNAPSHOT, offset).wrong(
            dropped_may_return=False, may_be_cut=False, counts=counts
        )
        if wrong:
            problems[region] = wrong
    assert not problems


@pytest.mark.parametrize("index", [0, 1], ids=["a segment that has ended", "the last segment"])
def test_one_flipped_bit_in_every_region_of_a_segment(world: World, tmp_path: Path, index: int) -> None:
    path = segments(world.directory)[index]
    all_regions = segment_regions(path.read_bytes())
    regions = chosen(all_regions)
    last = f"record {max(int(name.split()[1].rstrip(',')) for name in all_regions if name.startswith('record'))},"
    if index:
        regions |= {name: at for name, at in all_regions.items() if name.startswith(last)}
    assert len(regions) > 35
    problems = {}
    for region, offset in regions.items():
        is_last = bool(index) and region.startswith(last)
        wrong = Trial(world, tmp_path, path.name, offset).wrong(
            dropped_may_return=not index, may_be_cut=is_last, counts=True
        )
        if wrong:
            problems[region] = wrong
    assert not problems


EVERY = 19
"""Bytes from one that is damaged to the next."""


@pytest.mark.parametrize("prepared", [True, False], ids=["segments made in advance", "or not"])
def test_wherever_a_bit_flips_check_and_start_agree(tmp_path: Path, prepared: bool) -> None:
    """All over the files, without a server: whatever is kept is as it was, whatever is not is named."""
    directory = tmp_path / "data"
    trio.run(partial(fill, directory, (2, 16), prepared=prepared))
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    expected = state(loaded(FrozenDisk(files))[0])
    # Before the record that drops a prefix, that prefix was there, too.
    without_log = {name: data for name, data in files.items() if ".log." not in name}
    before = state(loaded(FrozenDisk(without_log))[0])
    dropped = (False, DROPPED.encode())
    assert len(expected) == 14
    tried = refused = cut = 0
    for name in files:
        if name == "pion.lock":
            continue
        for offset in range(0, len(files[name]), EVERY):
            data = bytearray(files[name])
            data[offset] ^= 1 << offset % 8
            disk = FrozenDisk(files | {name: bytes(data)})
            found = examine(disk)
            tried += 1
            refusal = ""
            try:
                store, cut_bytes = loaded(disk)
            except StartupError as error:
                refusal = str(error)
            if refusal:
                assert name in refusal, (offset, refusal)
                assert not found.good, (name, offset)
                refused += 1
            else:
                kept = state(store)
                assert {key: value for key, value in kept.items() if value != expected.get(key)} == {}, (name, offset)
                assert found.good == bool(cut_bytes), (name, offset)
                cut += bool(cut_bytes)
                if not cut_bytes and store.checksum_failures == 0:
                    assert kept == expected
            kept = state(found.salvage.store)
            if kept.get(dropped) == before[dropped]:
                del kept[dropped]
            assert {key: value for key, value in kept.items() if value != expected.get(key)} == {}, (name, offset)
            if not cut_bytes_of(found.notes):
                assert expected.keys() - kept.keys() <= found.salvage.lost.keys(), (name, offset)
                assert all(describe(key) for key in found.salvage.lost)
    assert tried > 700
    assert refused > tried / 2
    assert 5 < cut < 50


def cut_bytes_of(notes: list[str]) -> bool:
    return any("in the middle of a record" in note for note in notes)


def loaded(disk: FrozenDisk) -> tuple[VStore, int]:
    """What a start makes of the files, and how many bytes it cuts. Raises StartupError."""
    store = VStore(Config(), FakeClock(), NullJournal(), Ledger())
    log = VStoreLog(store)
    found = load(disk, 0, [log])
    log.finish_replay()
    return store, found.cut_bytes
