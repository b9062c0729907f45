"""`MemoryDisk`: it does what `RealDisk` does, and a crash leaves what it says."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.storage.disk import Disk, RealDisk
from pion.testing import Fault, MemoryDisk, ProcessDied, fault_at
from pion.testing.inodes import SECTOR_BYTES


@pytest.fixture(params=["real", "memory"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    if request.param == "memory":
        return MemoryDisk(directories=["sub"])
    (tmp_path / "sub").mkdir()
    return RealDisk(tmp_path)


def read(disk: Disk, name: str) -> bytes:
    mapping = disk.map(name)
    buffer = bytearray(len(mapping.view))
    mapping.read_into(0, memoryview(buffer))
    assert bytes(mapping.view) == buffer
    return bytes(buffer)


def put(disk: Disk, name: str, *pieces: bytes) -> None:
    file = disk.create(name)
    for piece in pieces:
        file.write([piece])
    file.close()


def test_a_file_grows_and_is_overwritten(disk: Disk) -> None:
    file = disk.create("a")
    file.write([b"one", memoryview(b" two"), b"", bytearray(b"!")])
    file.write([b" three"])
    file.overwrite(4, b"TWO")
    file.start_writeback(0, 8)
    file.sync()
    assert read(disk, "a") == b"one TWO! three"
    file.close()
    file.close()
    with pytest.raises(OSError, match="descriptor"):
        file.write([b"more"])
    assert read(disk, "a") == b"one TWO! three"


def test_many_buffers_in_one_write(disk: Disk) -> None:
    file = disk.create("a")
    file.write([b"%04d" % number for number in range(3000)])
    file.close()
    assert read(disk, "a") == b"".join(b"%04d" % number for number in range(3000))


def test_names(disk: Disk) -> None:
    put(disk, "b", b"B")
    put(disk, "a", b"A")
    put(disk, "sub/c", b"C")
    assert disk.names() == ["a", "b"]
    assert disk.exists("sub/c")
    assert disk.exists("sub")
    assert not disk.exists("c")
    disk.rename("a", "b")
    assert (disk.names(), read(disk, "b")) == (["b"], b"A")
    disk.link("b", "sub/b")
    disk.unlink("b")
    assert (disk.names(), read(disk, "sub/b")) == ([], b"A")
    disk.sync_directory("b")
    disk.sync_directory("sub/b")


def test_renaming_one_of_two_names_to_the_other_keeps_both(disk: Disk) -> None:
    put(disk, "a", b"A")
    disk.link("a", "b")
    disk.rename("a", "b")
    assert disk.names() == ["a", "b"]


def test_refused_names(disk: Disk) -> None:
    put(disk, "a", b"A")
    with pytest.raises(FileExistsError):
        disk.create("a")
    with pytest.raises(FileExistsError):
        disk.link("a", "a")
    for refused in (
        lambda: disk.rename("x", "y"),
        lambda: disk.link("x", "y"),
        lambda: disk.unlink("x"),
        lambda: disk.map("x"),
        lambda: disk.truncate("x", 0),
        lambda: disk.create("none/x"),
        lambda: disk.rename("a", "none/x"),
        lambda: disk.sync_directory("none/x"),
    ):
        with pytest.raises(FileNotFoundError):
            refused()
    assert (disk.names(), read(disk, "a")) == (["a"], b"A")


def test_a_mapping_outlives_its_name(disk: Disk) -> None:
    put(disk, "a", b"old")
    put(disk, "b", b"new")
    mapping = disk.map("a")
    disk.rename("b", "a")
    assert bytes(mapping.view) == b"old"
    with pytest.raises(OSError, match="ends at byte"):
        mapping.read_into(1, memoryview(bytearray(3)))
    assert mapping.view.readonly
    assert bytes(disk.map("a").view) == b"new"


def test_truncate(disk: Disk) -> None:
    put(disk, "a", b"12345")
    disk.truncate("a", 2)
    assert read(disk, "a") == b"12"


def test_an_empty_file_can_be_mapped(disk: Disk) -> None:
    put(disk, "a")
    assert read(disk, "a") == b""


# What a crash leaves.


def test_the_death_of_the_process_loses_nothing() -> None:
    disk = MemoryDisk()
    put(disk, "a", b"x" * 700)
    after = disk.crash()
    assert (after.names(), after.contents("a")) == (["a"], b"x" * 700)
    assert after.boot_id() == disk.boot_id()
    assert after.unflushed == disk.unflushed == 2
    assert after.crash(power=True).names() == []
    # The two are independent.
    after.unlink("a")
    disk.truncate("a", 1)
    assert (after.names(), disk.contents("a")) == ([], b"x")


def test_a_power_cut_keeps_what_was_flushed() -> None:
    disk = MemoryDisk()
    file = disk.create("a")
    file.write([b"flushed"])
    file.sync()
    assert disk.crash(power=True).names() == []
    assert not disk.flushed("a")
    disk.sync_directory("a")
    assert disk.flushed("a")
    file.write([b" and not"])
    assert not disk.flushed("a")
    disk.rename("a", "b")
    after = disk.crash(power=True)
    assert (after.names(), after.contents("a")) == (["a"], b"flushed")
    assert after.boot_id() != disk.boot_id()
    assert after.unflushed == 0
    # What came first may be there, too.
    assert disk.unflushed == 2
    assert disk.crash(power=True, kept=1).contents("a") == b"flushed and not"
    assert disk.crash(power=True, kept=2).contents("b") == b"flushed and not"
    assert disk.crash(power=True, kept=2).names() == ["b"]
    file.sync()
    assert disk.crash(power=True).contents("a") == b"flushed and not"


def test_a_truncation_is_two_operations() -> None:
    disk = MemoryDisk()
    file = disk.create("a")
    file.write([b"12345"])
    file.sync()
    disk.sync_directory("a")
    disk.plan = fault_at(6, Fault(error=errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        disk.truncate("a", 2)
    assert [each.kind for each in disk.operations[-2:]] == ["truncate", "sync"]
    assert disk.contents("a") == b"12"
    assert disk.crash(power=True).contents("a") == b"12345"


def test_directories_are_flushed_one_by_one() -> None:
    disk = MemoryDisk(directories=["sub"])
    put(disk, "a", b"A")
    disk.link("a", "sub/a")
    disk.sync_directory("sub/a")
    after = disk.crash(power=True)
    assert not after.exists("a")
    assert after.exists("sub/a")
    assert after.contents("sub/a") == b""


def test_reordering_keeps_any_sector_and_any_name() -> None:
    disk = MemoryDisk()
    file = disk.create("a")
    file.write([b"0" * SECTOR_BYTES])
    file.sync()
    disk.sync_directory("a")
    for digit in (b"1", b"2", b"3"):
        file.write([digit * SECTOR_BYTES])
    put(disk, "b")
    disk.rename("b", "c")
    seen, names = set(), set()
    for seed in range(300):
        after = disk.crash(power=True, order=Random(seed))
        content = after.contents("a")
        assert len(content) % SECTOR_BYTES == 0
        seen.add(bytes(content[::SECTOR_BYTES]))
        names.add(tuple(after.names()))
        assert content == b"".join(content[at : at + 1] * SECTOR_BYTES for at in range(0, len(content), SECTOR_BYTES))
    lengths = {len(each) for each in seen}
    assert lengths == {1, 2, 3, 4}
    assert all(each[0:1] == b"0" for each in seen)
    assert all(sector in b"\0%d" % place for each in seen for place, sector in enumerate(each))
    assert {b"0\x0023", b"01\x003", b"0\0\x003", b"0123"} <= seen
    assert names == {("a",), ("a", "b"), ("a", "c")}


def test_a_sector_has_the_state_of_some_moment() -> None:
    disk = MemoryDisk()
    file = disk.create("a")
    disk.sync_directory("a")
    for letter in (b"a", b"b", b"c"):
        file.write([letter])
    file.overwrite(0, b"A")
    seen = {disk.crash(power=True, order=Random(seed)).contents("a").rstrip(b"\0") for seed in range(300)}
    assert seen == {b"", b"a", b"ab", b"abc", b"Abc", b"A", b"Ab"}


def test_a_failed_flush_is_not_made_good_by_another() -> None:
    disk = MemoryDisk()
    file = disk.create("a")
    disk.sync_directory("a")
    file.write([b"lost"])
    disk.plan = fault_at(4, Fault(error=errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    file.write([b" kept"])
    file.sync()
    assert disk.contents("a") == b"lost kept"
    assert disk.crash(power=True).contents("a") == b"\0\0\0\0 kept"


# The plan.


def test_a_failed_operation_has_no_effect() -> None:
    disk = MemoryDisk()
    file = disk.create("a")
    file.write([b"one"])
    calls = {
        "create": lambda: disk.create("b"),
        "write": lambda: file.write([b"two"]),
        "overwrite": lambda: file.overwrite(0, b"two"),
        "sync": file.sync,
        "rename": lambda: disk.rename("a", "b"),
        "link": lambda: disk.link("a", "b"),
        "unlink": lambda: disk.unlink("a"),
        "truncate": lambda: disk.truncate("a", 1),
        "sync_directory": lambda: disk.sync_directory("a"),
    }
    for number, (kind, call) in enumerate(calls.items(), start=3):
        disk.plan = fault_at(number, Fault(error=errno.ENOSPC))
        with pytest.raises(OSError, match="No space") as caught:
            call()
        assert caught.value.errno == errno.ENOSPC
        assert disk.operations[-1].kind == kind
        assert disk.operations[-1].number == number
        assert (disk.names(), disk.contents("a")) == (["a"], b"one")
        assert disk.crash(power=True).names() == []


def test_a_fault_may_go_on() -> None:
    disk = MemoryDisk()
    file = disk.create("a")
    disk.plan = fault_at(3, Fault(error=errno.EIO), onwards=True)
    file.write([b"1"])
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output"):
            file.write([b"2"])
    disk.plan = None
    file.write([b"3"])
    assert disk.contents("a") == b"13"


def test_a_short_write() -> None:
    disk = MemoryDisk()
    file = disk.create("a")
    file.write([b"12345"])
    disk.plan = fault_at(3, Fault(error=errno.ENOSPC, done_bytes=2))
    with pytest.raises(OSError, match="No space"):
        file.write([b"6", b"789"])
    assert disk.contents("a") == b"1234567"
    disk.plan = fault_at(4, Fault(error=errno.EIO, done_bytes=1))
    with pytest.raises(OSError, match="Input/output"):
        file.overwrite(0, b"ABC")
    assert disk.contents("a") == b"A234567"


@pytest.mark.parametrize(
    ("fault", "left"), [(Fault(), b""), (Fault(done_bytes=2), b"12"), (Fault(done=True), b"12345")]
)
def test_the_process_dies(fault: Fault, left: bytes) -> None:
    disk = MemoryDisk()
    file = disk.create("a")
    disk.plan = fault_at(2, fault)
    with pytest.raises(ProcessDied):
        file.write([b"12345"])
    assert disk.died
    # Nothing it still tries has an effect.
    for call in (file.sync, lambda: disk.unlink("a"), lambda: file.write([b"x"])):
        with pytest.raises(ProcessDied):
            call()
    assert len(disk.operations) == 2
    after = disk.crash()
    assert (after.contents("a"), after.died, after.operations) == (left, False, [])


def test_damage() -> None:
    disk = MemoryDisk()
    file = disk.create("a")
    file.write([b"abc"])
    file.sync()
    disk.sync_directory("a")
    file.write([b"def"])
    mapping = disk.map("a")
    disk.damage("a", 1)
    disk.damage("a", 4, 0x20)
    assert disk.contents("a") == b"accdEf"
    buffer = bytearray(6)
    mapping.read_into(0, memoryview(buffer))
    assert buffer == b"accdEf"
    assert disk.crash(power=True).contents("a") == b"acc"


# Any sequence of operations.

NAMES = st.sampled_from(["a", "b", "sub/a"])
STEPS = st.lists(
    st.tuples(st.just("create"), NAMES)
    | st.tuples(st.just("write"), NAMES, st.integers(1, 1500))
    | st.tuples(st.just("overwrite"), NAMES, st.integers(0, 600), st.integers(1, 600))
    | st.tuples(st.sampled_from(["sync", "unlink", "sync_directory"]), NAMES)
    | st.tuples(st.sampled_from(["rename", "link"]), NAMES, NAMES)
    | st.tuples(st.just("truncate"), NAMES, st.integers(0, 700)),
    max_size=25,
)


@settings(deadline=None, max_examples=150)
@given(steps=STEPS, seed=st.integers(0, 1000))
def test_crashes_keep_what_was_promised(steps: list[tuple], seed: int) -> None:
    """A model of each file beside it: its contents at the last flush, and every content since."""
    disk = MemoryDisk(directories=["sub"])
    files: dict[str, tuple[object, list[bytes]]] = {}
    names: dict[str, set[str]] = {}  # name -> which files it may have after a power cut
    byte = 0

    def identity(name: str) -> str:
        return str(id(files[name][1])) if name in files else ""

    def note(name: str) -> None:
        names.setdefault(name, {""}).add(identity(name))

    keep = []
    for kind, name, *rest in steps:
        byte = byte % 250 + 1
        file, history = files.get(name, (None, []))
        if kind == "create" and name not in files:
            files[name] = (disk.create(name), [b""])
            keep.append(files[name])
            note(name)
        elif kind == "write" and file is not None:
            file.write([bytes([byte]) * rest[0]])
            history.append(history[-1] + bytes([byte]) * rest[0])
        elif kind == "overwrite" and file is not None and rest[0] + rest[1] <= len(history[-1]):
            file.overwrite(rest[0], bytes([byte]) * rest[1])
            history.append(history[-1][: rest[0]] + bytes([byte]) * rest[1] + history[-1][rest[0] + rest[1] :])
        elif kind == "sync" and file is not None:
            file.sync()
            del history[:-1]
        elif kind == "truncate" and file is not None:
            disk.truncate(name, rest[0])
            history[:] = [history[-1][: rest[0]]]
        elif kind == "unlink" and file is not None:
            disk.unlink(name)
            del files[name]
            note(name)
        elif kind == "sync_directory":
            disk.sync_directory(name)
            for each in ("a", "b", "sub/a"):
                if each.startswith("sub/") == name.startswith("sub/"):
                    names[each] = {identity(each)}
        elif kind in ("rename", "link") and file is not None and name.startswith("sub/") == rest[0].startswith("sub/"):
            if kind == "rename" and file is not files.get(rest[0], (None,))[0]:
                disk.rename(name, rest[0])
                files[rest[0]] = files.pop(name)
            elif kind == "link" and rest[0] not in files:
                disk.link(name, rest[0])
                files[rest[0]] = files[name]
            note(name)
            note(rest[0])

    everything = {name: history[-1] for name, (_, history) in files.items()}
    assert seen(disk.crash()) == everything
    assert seen(disk.crash(power=True, kept=disk.unflushed)) == everything
    by_identity = {str(id(each[1])): each[1] for each in keep}
    for kept in range(disk.unflushed + 1):
        for name, content in seen(disk.crash(power=True, kept=kept)).items():
            assert any(content in by_identity[one] for one in names[name] if one)
    after = disk.crash(power=True, order=Random(seed))
    for name in ("a", "b", "sub/a"):
        allowed = names.get(name, {""})
        if not after.exists(name):
            assert "" in allowed
            continue
        content = after.contents(name)
        assert any(mixed(content, by_identity[one]) for one in allowed if one)
    assert after.crash(power=True).names() == after.names()


def seen(disk: MemoryDisk) -> dict[str, bytes]:
    return {name: disk.contents(name) for name in ("a", "b", "sub/a") if disk.exists(name)}


def mixed(content: bytes, history: list[bytes]) -> bool:
    """Whether each sector is one of some moment, and so is the length."""
    if len(content) not in {len(each) for each in history}:
        return False
    for start in range(0, len(content), SECTOR_BYTES):
        sector = content[start : start + SECTOR_BYTES]
        versions = [each[start : start + SECTOR_BYTES].ljust(SECTOR_BYTES, b"\0")[: len(sector)] for each in history]
        if sector not in versions:
            return False
    return True
