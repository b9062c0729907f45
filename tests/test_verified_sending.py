"""Long replies from files begin before all of it is verified: what is damaged further back never gets to the client.

Fault classes 40, 41, 42 and 46.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from pion.commands import vstore_common
from pion.config import KIB, MIB, Config
from pion.server import Started
from pion.storage import tier_rows, verifying
from pion.storage.file_mapping import FileMapping
from pion.storage.placed import TierMemory
from pion.storage.region import MappedMemory
from pion.testing import running_server
from tests.tiering_support import Client, until, values

LAYERS, ROWS, DIM = 3, 512, 256
LAYER_BYTES = ROWS * DIM * 4
PIECE = 128 * KIB
PIECES = LAYER_BYTES // PIECE
DAMAGED = "-ERR no row: its bytes on disk are not what was stored, so it was dropped"
WHOLE = ("KV.PREFIX.FETCH", "p", "AS", "fp32")
BATCH = ("V.FETCH", "p_pk", "BATCH", 3, 0, 0, ROWS, 1, 0, ROWS, 2, 0, ROWS, "AS", "fp32")
RANGE = ("V.FETCH", "p_pk", 0, "RANGE", 0, ROWS, "AS", "fp32")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is a thirtieth of its real size."""
    monkeypatch.setattr(tier_rows, "TIER_RUN_BYTES", PIECE)
    monkeypatch.setattr(verifying, "VERIFY_PIECE_BYTES", PIECE)
    monkeypatch.setattr(vstore_common, "VERIFY_BEFORE_BYTES", 2 * PIECE)


def not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the files hold must be read from the disk, as far as the server knows."""
    monkeypatch.setattr(FileMapping, "is_resident", lambda *args: False)


@contextlib.asynccontextmanager
async def serving(path: Path, source: str) -> AsyncIterator[tuple[Started, Client]]:
    tier = {"max_bytes": 16 * MIB, "tier_dir": str(path / "tier")} if source == "tier" else {}
    async with running_server(Config(**tier), directory=path / "data") as started, Client.of(started) as client:
        yield started, client


def rows_of(name: str, side: str, layer: int) -> np.ndarray:
    return values(f"{name}.{layer}", side, rows=ROWS)


async def store(client: Client, name: str) -> None:
    """A prefix of 3 MiB; each layer comes in four parts, which are four records of the log."""
    args = ("KV.PREFIX.REGISTER", name, DIM, "fp32", "LAYERS", LAYERS, "TOKENS", ROWS)
    assert await client.call(*args) == "OK"
    step = ROWS // PIECES
    for side in "kv":
        for layer in range(LAYERS):
            data = rows_of(name, side, layer)
            for start in range(0, ROWS, step):
                part = data[start : start + step].tobytes()
                assert await client.call("V.STOREBATCH", f"{name}_p{side}", layer, start, step, part) == "OK"


def expected(command: tuple[Any, ...]) -> Any:
    kind = "<f2" if command[-1] == "fp16" else "<f4"
    if command[0] == "KV.PREFIX.FETCH":
        return [rows_of("p", side, layer).astype(kind).tobytes() for layer in range(LAYERS) for side in "kv"]
    keys = [rows_of("p", "k", layer).astype(kind).tobytes() for layer in range(LAYERS)]
    return keys if command[2] == "BATCH" else keys[0]


def encoded(reply: Any) -> bytes:
    """As it is on the wire."""
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))


async def until_closed(client: Client, *command: object) -> bytes:
    """All that comes before the server closes the connection."""
    received = bytearray()
    with trio.fail_after(30):
        await client.send(*command)
        with contextlib.suppress(trio.BrokenResourceError):
            while data := await client.stream.receive_some(MIB):
                received += data
    return bytes(received)


@contextlib.asynccontextmanager
async def unread(path: Path, source: str) -> AsyncIterator[tuple[Started, Client]]:
    """A server whose rows lie in files, and nobody has looked at them."""
    async with serving(path, source) as (started, client):
        for name in ("p", "other"):
            await store(client, name)
        if source == "snapshot":
            assert await client.call("KV.PREFIX.SAVE") == "OK"
        started.services.save_at_end = source == "snapshot"
        if source == "tier":
            tiering = started.services.tiering
            assert tiering is not None
            units = list(started.services.vstore.prefixes.values())
            tiering._over = lambda share: 1 if not all(unit.cold for unit in units) else 0  # type: ignore[method-assign]
            tiering._grown.set()
            await until(lambda: all(unit.cold for unit in units) and not tiering._writing)
    async with serving(path, source) as (started, client):
        yield started, client


def memories(started: Started, command: tuple[Any, ...]) -> list[MappedMemory]:
    """What a reply is made of, in its order."""
    unit = started.services.vstore.prefixes[b"p"]
    layers = [0] if command is RANGE or command[3] == "RANGE" else range(LAYERS)
    sides = (0, 1) if command[0] == "KV.PREFIX.FETCH" else (0,)
    found: list[MappedMemory] = []
    for layer in layers:
        for side in sides:
            rows = unit.layer(side, layer)  # type: ignore[arg-type]
            assert rows is not None
            for block in rows.blocks:
                assert isinstance(block.memory, MappedMemory)
                assert not block.memory.verified
                found.append(block.memory)
    return found


def harm(path: Path, started: Started, memory: MappedMemory) -> None:
    """Change a byte in the file that the rows lie in."""
    if isinstance(memory, TierMemory):
        files = [path / "tier" / f"{memory.file.key}.pion-tier-1.safetensors"]
        start = memory.run.offset
        like = b""
    else:
        files = [each for each in (path / "data").iterdir() if each.is_file()]
        start = memory.region.start
        like = bytes(memory.region.view()[:500])
    for file in files:
        data = bytearray(file.read_bytes())
        if len(data) > start + 1000 and data[start : start + len(like)] == like:
            with file.open("r+b") as opened:
                opened.seek(start + 1000)
                opened.write(bytes([data[start + 1000] ^ 1]))
            return
    raise AssertionError("no file has these rows")


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "on disk"])
@pytest.mark.parametrize("wire", ["fp32", "fp16"])
@pytest.mark.parametrize("where", ["first", "second", "middle", "last"])
@pytest.mark.parametrize(
    ("source", "command"),
    [
        ("tier", WHOLE),
        ("tier", BATCH),
        ("tier", RANGE),
        ("log", WHOLE),
        ("log", BATCH),
        ("log", RANGE),
        ("snapshot", WHOLE),
        ("snapshot", BATCH),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0].lower() + str(len(value)),
)
async def test_damage_is_never_sent(tmp_path, monkeypatch, source, command, where, wire, cached) -> None:
    command = (*command[:-1], wire)
    if not cached:
        not_cached(monkeypatch)
    async with unread(tmp_path, source) as (started, client), Client.of(started) as two:
        found = memories(started, command)
        number = {"first": 0, "second": 1, "middle": len(found) // 2, "last": len(found) - 1}[where]
        harm(tmp_path, started, found[number])
        started.services.vstore.checksum_failures = 0
        if number == 0:
            assert await client.call(*command) == DAMAGED
        else:
            received = await until_closed(client, *command)
            assert received or wire == "fp16"  # converted pieces are verified with the first of them
            right = encoded(expected(command))
            assert right.startswith(received)
            assert len(received) < len(right)
        assert await two.call("KV.PREFIX.LOOKUP", "p") == "MISS"
        reply = await two.call(*command)
        assert reply.startswith(("-ERR no prefix", "-ERR no session"))
        assert started.services.vstore.checksum_failures == 1
        other = await two.call("KV.PREFIX.FETCH", "other", "AS", "fp32")
        assert other == [rows_of("other", side, layer).tobytes() for layer in range(LAYERS) for side in "kv"]
        await store(two, "p")
        assert await two.call(*command) == expected(command)


async def test_little_is_verified_before_the_reply_begins(tmp_path, monkeypatch) -> None:
    """So that damage anywhere is a proper error."""
    monkeypatch.setattr(vstore_common, "VERIFY_BEFORE_BYTES", 2 * LAYERS * LAYER_BYTES)
    async with unread(tmp_path, "tier") as (started, client):
        harm(tmp_path, started, memories(started, WHOLE)[-1])
        assert await client.call(*WHOLE) == DAMAGED
        assert await client.call("KV.PREFIX.LOOKUP", "p") == "MISS"


async def test_checks_grow_and_stand_in_front_of_what_they_compare(tmp_path, monkeypatch) -> None:
    """A piece before the reply, then twice as much each time, up to four pieces."""
    checked: dict[verifying.RowCheck, list[MappedMemory]] = {}
    ready = verifying.RowCheck.ready

    def noted(self: verifying.RowCheck) -> bool:
        checked[self] = self.memories
        return ready(self)

    monkeypatch.setattr(verifying.RowCheck, "ready", noted)
    async with unread(tmp_path, "tier") as (started, client):
        found = memories(started, WHOLE)
        assert await client.call(*WHOLE) == expected(WHOLE)
    assert [len(each) for each in checked.values()] == [2, 4, 4, 4, 4, 4, 1]
    assert [memory for each in checked.values() for memory in each] == found[1:]


@pytest.mark.parametrize("source", ["tier", "log"])
async def test_what_is_in_the_cache_is_compared_in_steps_and_needs_no_thread(tmp_path, monkeypatch, source) -> None:
    def in_thread(*args: object, **kwargs: object) -> None:
        raise AssertionError("a thread is started")

    async with unread(tmp_path, source) as (started, client):
        found = memories(started, WHOLE)
        files = started.services.vstore.tier_files
        for file in files.known.values():
            await files.opener(file)
        with monkeypatch.context() as patched:
            patched.setattr(verifying, "COMPARE_STEP_BYTES", PIECE // 3)
            patched.setattr(FileMapping, "is_resident", lambda *args: True)  # they were written a moment ago
            patched.setattr(trio.to_thread, "run_sync", in_thread)
            assert await client.call(*WHOLE) == expected(WHOLE)
        assert all(memory.verified for memory in found)


async def test_inside_exec_all_is_verified_before(tmp_path) -> None:
    """What else the transaction did must be answered."""
    async with unread(tmp_path, "tier") as (started, client):
        harm(tmp_path, started, memories(started, WHOLE)[-1])
        assert await client.call("MULTI") == "OK"
        assert await client.call("V.CREATE", "s", 8) == "QUEUED"
        assert await client.call(*WHOLE) == "QUEUED"
        assert await client.call("EXEC") == ["OK", DAMAGED]


@pytest.mark.parametrize("source", ["tier", "log"])
async def test_later_replies_verify_nothing(tmp_path, monkeypatch, source) -> None:
    async with unread(tmp_path, source) as (started, client):
        found = memories(started, WHOLE)
        assert await client.call(*WHOLE) == expected(WHOLE)
        assert all(memory.verified for memory in found)

        def read_into(self: object, *args: object) -> None:
            raise AssertionError("nothing is read again")

        monkeypatch.setattr(FileMapping, "read_into", read_into)
        monkeypatch.setattr(FileMapping, "is_resident", read_into)
        assert await client.call(*WHOLE) == expected(WHOLE)


@pytest.mark.parametrize("source", ["tier", "log", "snapshot"])
@pytest.mark.parametrize("where", [0, -1])
async def test_a_file_that_was_written_to_is_verified_again(tmp_path, source, where) -> None:
    """What was right at the first use is damaged before the next. Also where the same bytes were written."""
    async with unread(tmp_path, source) as (started, client), Client.of(started) as two:
        found = memories(started, WHOLE)
        assert await client.call(*WHOLE) == expected(WHOLE)
        assert all(memory.verified for memory in found)
        harm(tmp_path, started, found[where])
        harm(tmp_path, started, found[where])  # once more, and it is as it was
        assert await client.call(*WHOLE) == expected(WHOLE)
        assert started.services.vstore.checksum_failures == 0
        harm(tmp_path, started, found[where])
        received = await until_closed(client, *WHOLE) if where else encoded_error(await client.call(*WHOLE))
        right = encoded(expected(WHOLE))
        assert right.startswith(received)
        assert len(received) < len(right)
        assert await two.call("KV.PREFIX.LOOKUP", "p") == "MISS"
        assert started.services.vstore.checksum_failures == 1
        assert await two.call("KV.PREFIX.LOOKUP", "other") == "HIT"


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
@pytest.mark.parametrize("source", ["log", "tier", "snapshot"])
async def test_a_write_while_a_reply_is_being_made_is_for_the_next_one(tmp_path, monkeypatch, source, wire) -> None:
    """What was verified when the request came is sent, though another reply has noticed a write since."""
    command = (*WHOLE[:-1], wire)
    async with unread(tmp_path, source) as (started, client), Client.of(started) as two:
        found = memories(started, WHOLE)
        assert await client.call(*WHOLE) == expected(WHOLE)
        found[0].verified = False
        verify = vstore_common._verify

        async def after_a_write(context: Any, doubtful: Any) -> Any:
            harm(tmp_path, started, found[-1])
            for memory in found:
                memory.region.look()
            return await verify(context, doubtful)

        with monkeypatch.context() as patched:
            patched.setattr(vstore_common, "_verify", after_a_write)
            assert len(encoded(await client.call(*command))) == len(encoded(expected(command)))
        received = await until_closed(client, *command)
        assert len(received) < len(encoded(expected(command)))
        assert await two.call("KV.PREFIX.LOOKUP", "p") == "MISS"
        assert started.services.vstore.checksum_failures == 1


def encoded_error(reply: Any) -> bytes:
    """Nothing of the rows, after an error that says so."""
    assert reply == DAMAGED
    return b""


class Slow:
    """Reading one place of the files waits until the test lets it go on, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, memory: MappedMemory) -> None:
        self.start = memory.run.offset if isinstance(memory, TierMemory) else memory.region.start
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.error: OSError | None = None
        self._read = FileMapping.read_into
        monkeypatch.setattr(FileMapping, "read_into", lambda *args: self._read_into(*args))
        not_cached(monkeypatch)

    def _read_into(self, mapping: FileMapping, start: int, buffer: memoryview) -> None:
        if start == self.start:
            self.reached.set()
            assert self.go_on.wait(30)
            if self.error is not None:
                raise self.error
        self._read(mapping, start, buffer)


@contextlib.contextmanager
def slow(monkeypatch: pytest.MonkeyPatch, memory: MappedMemory) -> Iterator[Slow]:
    """No thread waits any longer at the end, whatever became of the test."""
    found = Slow(monkeypatch, memory)
    try:
        yield found
    finally:
        found.go_on.set()


class Reader:
    """Sends a command and reads its reply while the test does something else."""

    def __init__(self, nursery: trio.Nursery, client: Client, command: tuple[object, ...]) -> None:
        self.over = trio.Event()
        self.reply: Any = None
        """None if the connection was closed instead."""
        nursery.start_soon(self._read, client, command)

    async def _read(self, client: Client, command: tuple[object, ...]) -> None:
        with contextlib.suppress(EOFError, trio.BrokenResourceError, trio.ClosedResourceError):
            self.reply = await client.call(*command)
        self.over.set()


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
@pytest.mark.parametrize("end", ["goes on", "fails", "drop", "close", "replace", "leave"])
async def test_a_disk_that_is_slow_in_the_middle(tmp_path, monkeypatch, end, wire) -> None:
    """Others are served; and the reply is of one moment, whatever happens meanwhile."""
    command = (*WHOLE[:-1], wire)
    async with (
        unread(tmp_path, "tier") as (started, client),
        Client.of(started) as two,
        trio.open_nursery() as nursery,
    ):
        services = started.services
        assert services.tiering is not None
        memory = memories(started, WHOLE)[LAYERS * PIECES]
        with slow(monkeypatch, memory) as disk:
            reader = Reader(nursery, client, command)
            await until(disk.reached.is_set)
            assert await two.call("PING") == "PONG"
            assert await two.call("KV.PREFIX.LOOKUP", "other") == "HIT"
            (file,) = [each for each in services.vstore.tier_files.known.values() if each.unit.name == b"p"]
            if end == "fails":
                disk.error = OSError(5, "Input/output error")
            elif end == "drop":
                assert await two.call("KV.PREFIX.DROP", "p") == 1
                assert file.opened is None
            elif end == "close":
                services.tiering._close(file)
            elif end == "replace":
                assert await two.call("KV.PREFIX.DROP", "p") == 1
                args = ("KV.PREFIX.REGISTER", "p", DIM, "fp32", "LAYERS", 1, "TOKENS", ROWS)
                assert await two.call(*args) == "OK"
                for side in ("p_pk", "p_pv"):
                    assert await two.call("V.STOREBATCH", side, 0, 0, ROWS, bytes(LAYER_BYTES)) == "OK"
            elif end == "leave":
                await client.stream.aclose()
            disk.go_on.set()
        await reader.over.wait()
        if end in ("fails", "leave"):
            assert reader.reply is None
        else:
            assert reader.reply == expected(command)
            assert await client.call("PING") == "PONG"
        if end == "leave":
            assert await two.call(*command) == expected(command)
        assert services.vstore.checksum_failures == (end == "fails")
        assert await two.call("KV.PREFIX.LOOKUP", "p") == ("MISS" if end in ("drop", "fails") else "HIT")


@pytest.mark.parametrize("damaged", [False, True])
async def test_rows_are_replaced_while_they_are_verified(tmp_path, monkeypatch, damaged) -> None:
    """The reply has the old ones; if those are damaged the connection ends, and the new ones stay."""
    async with serving(tmp_path, "log") as (started, client):
        assert await client.call("V.CREATE", "s", DIM, "VQUANT", "fp32") == "OK"
        old = values("s", rows=ROWS)
        step = ROWS // PIECES
        for start in range(0, ROWS, step):
            part = old[start : start + step].tobytes()
            assert await client.call("V.STOREBATCH", "s", 0, start, step, part) == "OK"
        started.services.save_at_end = False
    command = ("V.FETCH", "s", 0, "RANGE", 0, ROWS)
    async with (
        serving(tmp_path, "log") as (started, client),
        Client.of(started) as two,
        trio.open_nursery() as nursery,
    ):
        layer = started.services.vstore.lone[b"s"].layer(0, 0)
        assert layer is not None
        memory = layer.blocks[2].memory
        assert isinstance(memory, MappedMemory)
        if damaged:
            harm(tmp_path, started, memory)
        with slow(monkeypatch, memory) as disk:
            reader = Reader(nursery, client, command)
            await until(disk.reached.is_set)
            new = values("s", rows=ROWS, version=1)
            assert await two.call("V.STOREBATCH", "s", 0, 0, ROWS, new.tobytes()) == "OK"
            disk.go_on.set()
        await reader.over.wait()
        assert reader.reply == (None if damaged else old.tobytes())
        assert await two.call(*command) == new.tobytes()
        assert started.services.vstore.checksum_failures == 0


async def test_damage_that_is_found_after_the_object_was_closed(tmp_path, monkeypatch) -> None:
    """Other memory stands for the rows by then: the prefix goes nevertheless, so that the next try is a miss."""
    async with (
        unread(tmp_path, "tier") as (started, client),
        Client.of(started) as two,
        trio.open_nursery() as nursery,
    ):
        memory = memories(started, WHOLE)[-1]
        harm(tmp_path, started, memory)
        with slow(monkeypatch, memory) as disk:
            reader = Reader(nursery, client, WHOLE)
            await until(disk.reached.is_set)
            (file,) = [each for each in started.services.vstore.tier_files.known.values() if each.unit.name == b"p"]
            assert started.services.tiering is not None
            started.services.tiering._close(file)
            assert not memory.live
            disk.go_on.set()
        await reader.over.wait()
        assert reader.reply is None
        assert await two.call("KV.PREFIX.LOOKUP", "p") == "MISS"
        assert started.services.vstore.checksum_failures == 1


async def test_two_replies_that_find_the_same_damage(tmp_path) -> None:
    """It is counted once, and neither gets a whole reply."""
    async with unread(tmp_path, "tier") as (started, client), Client.of(started) as two:
        harm(tmp_path, started, memories(started, WHOLE)[-1])
        right = encoded(expected(WHOLE))
        found: list[bytes] = []

        async def read(each: Client) -> None:
            found.append(await until_closed(each, *WHOLE))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, client)
            nursery.start_soon(read, two)
        assert all(right.startswith(each) and len(each) < len(right) for each in found)
        assert started.services.vstore.checksum_failures == 1
