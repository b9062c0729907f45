"""Bytes that lie in a file: compared with their checksum before anyone looks at them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import xxhash

from pion.storage import region
from pion.storage.block import Layer
from pion.storage.disk import Mapping
from pion.storage.ledger import Ledger
from pion.storage.region import DamagedError, MappedMemory, Region
from pion.testing import MemoryDisk

DATA = bytes(range(256)) * 5
SEED = 99


def file_with(data: bytes) -> tuple[MemoryDisk, Mapping]:
    disk = MemoryDisk()
    disk.create("file").write([b"head", data, b"tail"])
    return disk, disk.map("file")


def region_of(mapping: Mapping, data: bytes = DATA) -> Region:
    return Region(mapping, 4, len(data), xxhash.xxh3_64_intdigest(data, SEED), SEED)


@pytest.mark.parametrize("piece", [1, 100, len(DATA) - 1, len(DATA), len(DATA) + 1])
def test_what_was_written_is_read(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "PIECE_BYTES", piece)
    _, mapping = file_with(DATA)
    assert region_of(mapping).verify()
    assert region_of(mapping).read() == DATA
    assert bytes(region_of(mapping).view()) == DATA


@pytest.mark.parametrize("piece", [100, 256 * 1024])
def test_one_bit_is_noticed_wherever_it_is(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "PIECE_BYTES", piece)
    disk, mapping = file_with(DATA)
    for position in (0, 1, 99, 100, 101, 640, len(DATA) - 1):
        disk.damage("file", 4 + position, 0x10)
        assert not region_of(mapping).verify()
        with pytest.raises(DamagedError, match="not what was written"):
            region_of(mapping).read()
        disk.damage("file", 4 + position, 0x10)
    disk.damage("file", 3)
    disk.damage("file", 4 + len(DATA))
    assert region_of(mapping).verify()


def test_the_seed_counts() -> None:
    """Another record's data in its place is damage, even if it is whole."""
    _, mapping = file_with(DATA)
    right = region_of(mapping)
    assert not Region(mapping, right.start, right.nbytes, right.checksum, SEED + 1).verify()
    assert not Region(mapping, right.start + 1, right.nbytes - 1, right.checksum, SEED).verify()


class Broken:
    """A file whose medium fails when it is read, as `pread` reports it."""

    view = memoryview(bytes(4 + len(DATA)))

    def read_into(self, start: int, buffer: memoryview) -> None:
        raise OSError("Input/output error")


def test_what_can_not_be_read_is_damage() -> None:
    assert not region_of(Broken()).verify()
    with pytest.raises(DamagedError, match="Input/output error"):
        region_of(Broken()).read()


def test_a_file_that_became_shorter_is_damage() -> None:
    disk, mapping = file_with(DATA)
    disk.truncate("file", 100)
    assert not region_of(mapping).verify()
    with pytest.raises(DamagedError, match="ends at byte"):
        region_of(mapping).read()


def test_what_was_read_once_is_not_read_again() -> None:
    disk, mapping = file_with(DATA)
    found = region_of(mapping)
    found.content = found.read()
    disk.damage("file", 10)
    assert found.read() == DATA


class Watched:
    """A file that notes into which buffers it is read; `together` is waited for once bytes are there."""

    def __init__(self, mapping: Mapping, together: threading.Barrier | None = None) -> None:
        self.view = mapping.view
        self.buffers: list[object] = []
        self._mapping = mapping
        self._together = together

    def read_into(self, start: int, buffer: memoryview) -> None:
        self.buffers.append(buffer.obj)
        self._mapping.read_into(start, buffer)
        if self._together is not None:
            self._together.wait(30)


def test_a_thread_verifies_through_one_buffer() -> None:
    """Also after one that ended in an error, and regions of different sizes."""
    _, mapping = file_with(DATA)
    found = Watched(mapping)
    for data in (DATA[:100], DATA, DATA[:1]):
        assert region_of(found, data).verify()
        assert not region_of(found, data + b"tail" + bytes(100)).verify()
    assert len(found.buffers) == 6
    assert all(buffer is found.buffers[0] for buffer in found.buffers)


def test_threads_that_verify_at_once_do_not_share_a_buffer() -> None:
    """Each has its bytes before any hashes them."""
    together = threading.Barrier(2)
    found: list[bool] = []

    def verify(data: bytes) -> None:
        _, mapping = file_with(data)
        found.append(region_of(Watched(mapping, together), data).verify())

    threads = [threading.Thread(target=verify, args=(data,)) for data in (DATA, DATA[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True, True]


def test_damage_can_be_refused_by_a_replay() -> None:
    assert issubclass(DamagedError, ValueError)


def test_an_empty_region() -> None:
    _, mapping = file_with(DATA)
    empty = region_of(mapping, b"")
    assert empty.verify()
    assert (empty.read(), bytes(empty.view())) == (b"", b"")


# As a payload of the store.


def test_mapped_memory_is_counted_apart() -> None:
    _, mapping = file_with(DATA)
    ledger = Ledger()
    before = ledger.statistics()
    memory = MappedMemory(region_of(mapping), ledger)
    assert memory.mapped
    assert ledger.statistics().charged_bytes == before.charged_bytes
    assert ledger.mapped_bytes == len(DATA)
    memory.drop(len(DATA))
    assert ledger.sending_bytes == 0
    del memory
    assert ledger.mapped_bytes == 0
    assert ledger.statistics() == before


def test_mapped_memory_remembers_that_it_is_right_and_asks_again_if_not() -> None:
    disk, mapping = file_with(DATA)
    memory = MappedMemory(region_of(mapping), Ledger())
    disk.damage("file", 10)
    assert not memory.verify()
    assert not memory.verify()
    disk.damage("file", 10)
    assert memory.verify()
    assert memory.verified
    disk.damage("file", 10)
    assert memory.verify()


def test_rows_are_views_into_the_file() -> None:
    _, mapping = file_with(DATA)
    layer = Layer(64, Ledger())
    memory = MappedMemory(region_of(mapping), Ledger())
    layer.store(7, 20, memory)
    (block,) = layer.blocks
    view = block.view(8, 10, 64)
    assert bytes(view) == DATA[64:192]
    assert np.shares_memory(np.asarray(view), np.asarray(mapping.view))


def test_rows_move_to_another_file() -> None:
    """Row 9 was replaced meanwhile; what is left of the old payload is found in the new one."""
    _, mapping = file_with(DATA)
    ledger = Ledger()
    layer = Layer(64, ledger)
    old = MappedMemory(region_of(mapping), ledger)
    layer.store(7, 20, old)
    layer.store(9, 1, b"x" * 64)
    copy = DATA[: 2 * 64] + b"x" * 64 + DATA[3 * 64 :]
    _, other = file_with(bytes(64) + copy)
    new = MappedMemory(Region(other, 4, 64 + len(copy), 0, 0), ledger)
    layer.move(old, new, 6)
    assert [(block.start, block.stop, block.memory) for block in layer.blocks if block.memory.mapped] == [
        (7, 9, new),
        (10, 27, new),
    ]
    found = b"".join(bytes(block.view(first, last, 64)) for block, first, last in layer.gather(7, 27))
    assert found == copy
    assert layer.count == 20
    del old
    assert ledger.mapped_bytes == 64 + len(copy)
