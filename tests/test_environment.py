"""A hostile machine: full disks, read-only directories, too few descriptors, wrong clocks, a second server.

Real files and, where it matters, real processes. `tests/storage` has the same at every single step of the disk.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pion.client import Layer, PionClient, errors
from pion.client.aio import PionClient as AsyncClient
from pion.errors import StartupError
from pion.replies import Buffer
from pion.storage import data_directory, disk
from pion.storage.disk import DirectoryLock, DiskFile, RealDisk
from pion.testing import FakeClock, ServerProcess, running_server
from tests.storage.damage_support import read, rows, store

SNAPSHOT = "pion.vstore.0"

LIMITS_PLUGIN = '''
import resource

import pion


async def limit(context, argv):
    """TEST.LIMIT <name> <soft>: -1 is as much as may be."""
    kind = getattr(resource, "RLIMIT_" + bytes(argv[1]).decode())
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (hard if argv[2] == b"-1" else int(argv[2]), hard))
    return pion.OK


async def descriptors(context, argv):
    """TEST.DESCRIPTORS: the number that the next file gets."""
    import os

    free = os.dup(0)
    os.close(free)
    return free


@pion.hookimpl
def register_commands(config):
    def row(name, arity, handler):
        return pion.Command(name=name, arity=arity, summary=name, since="0.1.0", handler=handler, reply="reply")

    return [row("TEST.LIMIT", 3, limit), row("TEST.DESCRIPTORS", 1, descriptors)]
'''


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    """A folder with a plugin that lowers and raises the limits of the server process that loads it."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "limits.py").write_text(LIMITS_PLUGIN)
    return folder


def layers(seed: int, tokens: int = 4) -> list[Layer]:
    return [
        Layer(
            *(
                np.frombuffer(rows(seed + 10 * layer + side, tokens, 8), np.float32).reshape(tokens, 8)
                for side in (0, 1)
            )
        )
        for layer in range(2)
    ]


def put(client: PionClient, ns: str, seed: int) -> None:
    client.store_prefix(ns, "fp32@8*2", "fp32@8*2", layers(seed), 4)


def has(client: PionClient, ns: str, seed: int) -> bool:
    """Whether the prefix is there, with all its rows; a prefix with other rows fails the test."""
    if not client.prefix_lookup(ns):
        return False
    expected = [bytes(side) for layer in layers(seed) for side in (layer.keys, layer.values)]
    assert [bytes(part) for part in client.prefix_fetch(ns)] == expected
    return True


def refuses(client: PionClient, *request: object) -> str:
    """The text of the -MISCONF that the request gets."""
    with pytest.raises(errors.ServerError) as caught:
        client.execute(*request)
    assert caught.value.code == "MISCONF"
    return str(caught.value)


# A full disk.


def test_a_file_that_may_not_grow(tmp_path: Path, plugins: Path) -> None:
    """The system refuses writes in the middle of a record, as a full disk does: changes are refused, reads go on, and
    when there is room again a snapshot mends it.
    """
    arguments = ("--dir", str(tmp_path / "data"), "--plugins-dir", str(plugins))
    with ServerProcess(*arguments) as server, PionClient(port=server.port) as client:
        put(client, "before", 100)
        log = next((tmp_path / "data").glob(f"{SNAPSHOT}.log.*"))
        client.execute("TEST.LIMIT", "FSIZE", log.stat().st_size + 700)
        with pytest.raises(errors.ServerError, match="File too large") as caught:
            put(client, "during", 200)
        assert caught.value.code == "MISCONF"
        assert "KV.PREFIX.SAVE" in str(caught.value), "it says what to do"
        assert not client.prefix_lookup("during")
        assert has(client, "before", 100)
        for request in (
            ("V.CREATE", "session", 8),
            ("KV.PREFIX.DROP", "before"),
            ("KV.PREFIX.PIN", "before"),
            ("KV.PREFIX.REGISTER", "other", 8, "fp32"),
        ):
            assert "nothing can be changed" in refuses(client, *request)
        info = client.info("persistence")
        assert (info["aof_last_write_status"], info["changes_refused"]) == ("err", "File too large")
        assert "File too large" in refuses(client, "KV.PREFIX.SAVE"), "there is no room for a snapshot either"
        assert client.info("persistence")["rdb_last_bgsave_status"] == "err"
        assert not (tmp_path / "data" / f"{SNAPSHOT}.tmp").exists()
        assert has(client, "before", 100)
        client.execute("TEST.LIMIT", "FSIZE", -1)
        assert "nothing can be changed" in refuses(client, "KV.PREFIX.DROP", "before"), "room alone is not enough"
        assert client.execute("KV.PREFIX.SAVE") == "OK"
        info = client.info("persistence")
        assert (info["aof_last_write_status"], info["changes_refused"]) == ("ok", "")
        assert info["rdb_last_bgsave_status"] == "ok"
        put(client, "after", 300)
        server.kill()
    with ServerProcess(*arguments) as server, PionClient(port=server.port) as client:
        assert has(client, "before", 100)
        assert has(client, "after", 300)
        assert not client.prefix_lookup("during")


class FullDisk(RealDisk):
    """A directory on a file system that is full while `full` is set: old files can be read, removed and renamed."""

    full = False

    def create(self, name: str) -> DiskFile:
        self._check()
        return FullFile(super().create(name))

    @classmethod
    def _check(cls) -> None:
        if cls.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullFile:
    """Writes half of what it is given before it finds out."""

    def __init__(self, file: DiskFile) -> None:
        self._file = file

    def write(self, buffers: Sequence[Buffer]) -> None:
        if FullDisk.full:
            data = b"".join(bytes(buffer) for buffer in buffers)
            self._file.write([data[: len(data) // 2]])
        FullDisk._check()
        self._file.write(buffers)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> type[FullDisk]:
    monkeypatch.setattr(data_directory, "RealDisk", FullDisk)
    monkeypatch.setattr(FullDisk, "full", False)
    return FullDisk


async def test_a_start_on_a_full_disk(tmp_path: Path, full_disk: type[FullDisk]) -> None:
    """What is stored is served; nothing is changed until there is room and a snapshot was taken."""
    async with running_server(directory=tmp_path) as started, AsyncClient(port=started.port) as client:
        await store(client, "a", 100)
        expected = await read(client)
    full_disk.full = True
    for _ in range(2):
        async with running_server(directory=tmp_path) as started, AsyncClient(port=started.port) as client:
            assert await read(client) == expected
            with pytest.raises(errors.ServerError, match="No space left"):
                await client.execute("KV.PREFIX.DROP", "a")
            with pytest.raises(errors.ServerError, match="No space left"):
                await client.execute("KV.PREFIX.SAVE")
            assert (await client.info("persistence"))["changes_refused"] == "No space left on device"
            assert await read(client) == expected
    async with running_server(directory=tmp_path) as started, AsyncClient(port=started.port) as client:
        with pytest.raises(errors.ServerError, match="No space left"):
            await store(client, "b", 200)
        full_disk.full = False
        with pytest.raises(errors.ServerError, match="No space left"):
            await store(client, "b", 200)
        assert await client.execute("KV.PREFIX.SAVE") == "OK"
        await store(client, "b", 200)
        expected = await read(client)
        assert expected.keys() == {"a", "b"}
    async with running_server(directory=tmp_path) as started, AsyncClient(port=started.port) as client:
        assert await read(client) == expected


@pytest.mark.parametrize("stored", range(4), ids=lambda stored: f"after {stored} of 4 parts")
async def test_a_store_that_fails_half_way_leaves_nothing_to_be_seen(
    tmp_path: Path, full_disk: type[FullDisk], stored: int
) -> None:
    """Of a prefix in four parts the disk takes some (fault class 42). Look-up and match say no, and its parent is fine;
    so they do after the disk has recovered, and after restarts with and without that.
    """
    hashes = {"parent": rows(1, 1, 6), "child": rows(2, 1, 4)}

    async def check(client: AsyncClient) -> None:
        assert await client.execute("KV.PREFIX.LOOKUP", "child") == "MISS"
        for command in ("META", "BLOCKS", "CHAIN"):
            reply = await client.execute(f"KV.PREFIX.{command}", "child")
            assert reply in (None, "UNKNOWN"), (command, reply)
        with pytest.raises(errors.ServerError, match="no prefix"):
            await client.execute("KV.PREFIX.FETCH", "child")
        match = await client.execute("KV.PREFIX.MATCH", 5, hashes["parent"] + hashes["child"])
        assert match == [b"parent", 3, 3]
        assert await client.execute("KV.PREFIX.LOOKUP", "parent") == "HIT"
        assert await client.execute("KV.PREFIX.FETCH", "parent", "AS", "native") == whole
        names = [name async for name in client.prefix_list()]
        assert names == [b"parent"]
        assert [name async for name in client.v_list()] == [b"parent_pk", b"parent_pv"]

    async with running_server(directory=tmp_path) as started, AsyncClient(port=started.port) as client:
        await store(client, "parent", 100, 3, 8, "BLOCKS", 1, 3, hashes["parent"])
        whole = await client.execute("KV.PREFIX.FETCH", "parent", "AS", "native")
        register = ("KV.PREFIX.REGISTER", "child", 8, "fp32", "LAYERS", 2, "TOKENS", 2, "PARENT", "parent", 3)
        await client.execute(*register, "BLOCKS", 1, 2, hashes["child"], "META", b"about the child")
        parts = [("child_pk", 0), ("child_pk", 1), ("child_pv", 0), ("child_pv", 1)]
        for number, (sid, layer) in enumerate(parts):
            full_disk.full = number >= stored
            request = client.execute("V.STOREBATCH", sid, layer, 0, 2, rows(number, 2, 8))
            if number < stored:
                await request
            else:
                with pytest.raises(errors.ServerError, match="No space left"):
                    await request
        await check(client)
    full_disk.full = False
    async with running_server(directory=tmp_path) as started, AsyncClient(port=started.port) as client:
        await check(client)
        assert await client.execute("KV.PREFIX.SAVE") == "OK"
        await check(client)
    async with running_server(directory=tmp_path) as started, AsyncClient(port=started.port) as client:
        await check(client)
        await client.execute(*register)
        for number, (sid, layer) in enumerate(parts):
            await client.execute("V.STOREBATCH", sid, layer, 0, 2, rows(number, 2, 8))
        assert await client.execute("KV.PREFIX.LOOKUP", "child") == "HIT", "and it can be stored again"


# Directories that can't be used.


def fails_to_start(*arguments: str) -> str:
    """Run a server that can't start; the one line that it says."""
    command = [sys.executable, "-m", "pion", "server", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("pion-server: ")][-1]


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    assert fails_to_start("--dir", str(path)) == (
        f"pion-server: --dir {path}: File exists; it must be a directory that this user may write"
    )
    below = path / "data"
    assert fails_to_start("--dir", str(below)) == (
        f"pion-server: --dir {below}: Not a directory; it must be a directory that this user may write"
    )
    assert path.read_text() == "mine"


def test_a_link_to_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "link"
    path.symlink_to(tmp_path / "missing")
    assert f"--dir {path}: File exists" in fails_to_start("--dir", str(path))


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that this user may not write. Root may write everywhere, so for root the system call is replaced."""
    directory = tmp_path / "data"
    directory.mkdir(mode=0o500)
    if os.geteuid() == 0:
        real = os.open

        def refuse(path: object, flags: int, mode: int = 0o777, **options: int) -> int:
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and Path(str(path)).parent == directory and not directory.stat().st_mode & stat.S_IWUSR:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, flags, mode, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(disk.os, "open", refuse)
    return directory


async def test_a_read_only_directory(read_only: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with running_server(directory=read_only):
            pytest.fail("it must not start")
    refusal = caught.value.exceptions[0]
    assert isinstance(refusal, StartupError)
    assert str(refusal) == f"--dir {read_only}: Permission denied; it must be a directory that this user may write"


async def test_a_directory_that_becomes_read_only(read_only: Path) -> None:
    """The next file can't be made: changes are refused until it can, and a snapshot was taken."""
    chmod = read_only.chmod
    chmod(0o700)
    async with running_server(directory=read_only) as started, AsyncClient(port=started.port) as client:
        await store(client, "a", 100)
        chmod(0o500)
        with pytest.raises(errors.ServerError, match="Permission denied"):
            await client.execute("KV.PREFIX.SAVE")
        assert await client.execute("KV.PREFIX.LOOKUP", "a") == "HIT"
        with pytest.raises(errors.ServerError, match="nothing can be changed"):
            await store(client, "b", 200)
        chmod(0o700)
        assert await client.execute("KV.PREFIX.SAVE") == "OK"
        await store(client, "b", 200)


def pion(*arguments: str) -> tuple[int, str]:
    """Run `pion` as a process; its exit status and what it says to others than a terminal."""
    command = [sys.executable, "-m", "pion", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "\x1b" not in done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr


def test_a_damaged_directory(tmp_path: Path) -> None:
    """From the refusal to a server that runs again, as an operator does it."""
    directory = str(tmp_path / "data")
    with ServerProcess("--dir", directory) as server, PionClient(port=server.port) as client:
        for number in range(3):
            put(client, f"ns{number}", 100 * number)
        server.kill()
    log = next((tmp_path / "data").glob(f"{SNAPSHOT}.log.*"))
    data = bytearray(log.read_bytes())
    at = data.index(rows(100, 4, 8))  # a row of "ns1"
    data[at] ^= 1
    log.write_bytes(data)
    refusal = fails_to_start("--dir", directory)
    assert f"{directory}/{log.name}: record 7 at byte" in refusal
    assert f"pion repair {directory}" in refusal
    status, text = pion("check", directory)
    assert status == 1
    assert f"problem: {log.name}, byte {at}: the 128 bytes of data of record 7" in text
    assert "left out: prefix 'ns1'" in text
    assert pion("repair", directory)[0] == 0
    assert pion("check", directory)[0] == 0
    with ServerProcess("--dir", directory) as server, PionClient(port=server.port) as client:
        assert [has(client, f"ns{number}", 100 * number) for number in range(3)] == [True, False, True]


# File descriptors.


WITH_DESCRIPTORS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
from pion.cli import main
sys.exit(main(["server", *sys.argv[2:]]))
"""


def test_too_few_descriptors_to_start(tmp_path: Path) -> None:
    """Whatever it was that could not be opened, the server says so in one line; with a few more it starts."""
    for limit in range(8, 40):
        arguments = [str(limit), "--port", "0", "--dir", str(tmp_path / "data")]
        command = [sys.executable, "-c", WITH_DESCRIPTORS, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            if "ready" in process.stdout.readline():
                process.terminate()
                assert process.wait(30) == 0
                break
            text = process.stderr.read()
            assert process.wait(30) == 2, text
            assert "Traceback" not in text, (limit, text)
            last = text.splitlines()[-1]
            assert last.startswith("pion-server: ")
            assert "Too many open files" in last
    assert 9 < limit < 39


def test_too_few_descriptors_for_a_snapshot(tmp_path: Path, plugins: Path) -> None:
    """The next segment can't be made, so changes are refused; a snapshot mends it when there are descriptors again."""
    arguments = ("--dir", str(tmp_path / "data"), "--plugins-dir", str(plugins))
    with ServerProcess(*arguments) as server, PionClient(port=server.port) as client:
        put(client, "before", 100)
        free = client.execute("TEST.DESCRIPTORS")
        client.execute("TEST.LIMIT", "NOFILE", free)
        assert "Too many open files" in refuses(client, "KV.PREFIX.SAVE")
        assert has(client, "before", 100)
        with pytest.raises(errors.ServerError, match="Too many open files"):
            put(client, "during", 200)
        client.execute("TEST.LIMIT", "NOFILE", -1)
        assert client.execute("KV.PREFIX.SAVE") == "OK"
        put(client, "after", 300)
        server.kill()
    with ServerProcess(*arguments) as server, PionClient(port=server.port) as client:
        assert has(client, "before", 100)
        assert has(client, "after", 300)
        assert not client.prefix_lookup("during")


# Clocks.


async def expiring(client: AsyncClient, *names: str) -> None:
    for number, name in enumerate(names):
        await store(client, name, 100 * number, 3, 8, "EX", 100)


async def hits(client: AsyncClient, *names: str) -> list[str]:
    return [name for name in names if await client.execute("KV.PREFIX.LOOKUP", name) == "HIT"]


async def test_what_expires_while_the_server_is_off(tmp_path: Path) -> None:
    """Expiry is a wall time: the clock of the next start decides, wherever it stands."""
    clock = FakeClock(1_000_000.0)
    async with running_server(clock=clock, directory=tmp_path) as started, AsyncClient(port=started.port) as client:
        await expiring(client, "a")
        await store(client, "b", 500)
    for wall_s, found in ((1_000_099.0, ["a", "b"]), (900_000.0, ["a", "b"]), (1_000_101.0, ["b"]), (0.0, ["b"])):
        clock = FakeClock(wall_s)
        async with running_server(clock=clock, directory=tmp_path) as started, AsyncClient(port=started.port) as client:
            assert await hits(client, "a", "b") == found, wall_s
            assert set(await read(client)) == set(found)


async def test_what_has_expired_stays_gone_when_the_clock_is_set_back(tmp_path: Path) -> None:
    """Its end is in the log, so it does not come back, restart or not."""
    clock = FakeClock(1_000_000.0)
    async with running_server(clock=clock, directory=tmp_path) as started, AsyncClient(port=started.port) as client:
        await expiring(client, "asked", "not asked")
        clock.set_wall(1_000_200.0)
        assert await hits(client, "asked") == []
        clock.set_wall(1_000_050.0)
        assert await hits(client, "asked", "not asked") in (["not asked"], []), "the reaper may have seen it meanwhile"
        survivors = await hits(client, "not asked")
        await store(client, "later", 900, 3, 8, "EX", 100)
    clock = FakeClock(500_000.0)
    async with running_server(clock=clock, directory=tmp_path) as started, AsyncClient(port=started.port) as client:
        assert await hits(client, "asked", "not asked", "later") == [*survivors, "later"]
        assert await client.execute("KV.PREFIX.SAVE") == "OK"
        clock.set_wall(1_000_149.0)
        assert await hits(client, "later") == ["later"]
        clock.set_wall(1_000_151.0)
        assert await hits(client, "later") == []


async def test_the_log_is_in_the_order_of_changes_whatever_the_clock_says(tmp_path: Path) -> None:
    """Each change is made an hour before the one in front of it, over several starts; the last one counts."""
    clock = FakeClock(1_000_000.0)
    for turn in range(4):
        async with running_server(clock=clock, directory=tmp_path) as started, AsyncClient(port=started.port) as client:
            if turn:
                assert (await read(client)).keys() == {"a", f"only {turn - 1}"}
                await client.execute("KV.PREFIX.DROP", "a", f"only {turn - 1}")
                clock.set_wall(clock.wall_s() - 3600)
            await store(client, "a", 100 * turn, 3 + turn)
            clock.set_wall(clock.wall_s() - 3600)
            await store(client, f"only {turn}", 1)
            if turn == 2:
                assert await client.execute("KV.PREFIX.SAVE") == "OK"
            expected = await read(client)
    async with running_server(clock=clock, directory=tmp_path) as started, AsyncClient(port=started.port) as client:
        assert await read(client) == expected
        assert (await client.execute("KV.PREFIX.FETCH", "a", "AS", "native"))[0] == rows(300, 6, 8)


# Two servers.


def test_a_second_server_on_a_directory(tmp_path: Path) -> None:
    arguments = ("--dir", str(tmp_path / "data"))
    with ServerProcess(*arguments) as server, PionClient(port=server.port) as client:
        put(client, "a", 100)
        refusal = fails_to_start(*arguments)
        assert f"in use by process {server.pid}" in refusal
        assert "one server per directory" in refusal
        assert has(client, "a", 100), "the first goes on"
        put(client, "b", 200)
        # The lock is the file's, whatever it is called.
        link = tmp_path / "link"
        link.symlink_to(tmp_path / "data")
        assert f"in use by process {server.pid}" in fails_to_start("--dir", str(link))
        server.process.send_signal(signal.SIGSTOP)
        assert f"in use by process {server.pid}" in fails_to_start(*arguments), "also while it doesn't run"
        server.kill()
    with ServerProcess(*arguments) as server, PionClient(port=server.port) as client:
        assert has(client, "a", 100), "the lock went with the process that held it"
        assert has(client, "b", 200)


def test_a_lock_says_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "pion.lock"
    path.write_text("process 999999999\n")  # left by one that is long gone
    lock = DirectoryLock(path)
    assert path.read_text() == f"process {os.getpid()}\n"
    with pytest.raises(BlockingIOError, match=f"in use by process {os.getpid()}"):
        DirectoryLock(path)
    lock.release()
    lock.release()
    again = DirectoryLock(path)
    again.release()


# Files that change under a running server.


@pytest.mark.parametrize("damage", ["bit", "byte cut off", "half cut off"])
async def test_rows_that_are_damaged_before_their_first_use(tmp_path: Path, damage: str) -> None:
    """Fault class 44: a miss and a counter, never data, and never a death by a page that isn't there any more."""
    async with running_server(directory=tmp_path) as started, AsyncClient(port=started.port) as client:
        for number in range(3):
            await store(client, f"large {number}", 100 * number, 64, 512)
        assert await client.execute("KV.PREFIX.SAVE") == "OK"
        expected = await read(client)
    path = tmp_path / SNAPSHOT
    async with running_server(directory=tmp_path) as started, AsyncClient(port=started.port) as client:
        data = bytearray(path.read_bytes())
        at = data.index(rows(100, 64, 512))  # the rows of "large 1"
        if damage == "bit":
            data[at + 1000] ^= 4
            path.write_bytes(data)
        else:
            os.truncate(path, at + (64 * 512 * 4 - 1 if damage == "byte cut off" else 0))
        found = await read(client)
        gone = expected.keys() - found.keys()
        assert {name: found[name] for name in found} == {name: expected[name] for name in found}
        assert gone == {"large 1"} if damage == "bit" else "large 1" in gone
        info = await client.info("persistence")
        assert int(info["checksum_failures"]) == len(gone)
        assert await client.execute("KV.PREFIX.LOOKUP", "large 1") == "MISS"
        with pytest.raises(errors.ServerError, match="no prefix"):
            await client.execute("KV.PREFIX.FETCH", "large 1")
        await store(client, "large 1", 100, 64, 512)
        assert await client.execute("KV.PREFIX.SAVE") == "OK"
        repaired = await read(client)
        assert repaired["large 1"] == expected["large 1"]
    async with running_server(directory=tmp_path) as started, AsyncClient(port=started.port) as client:
        assert await read(client) == repaired


async def test_a_model_of_another_shape(tmp_path: Path) -> None:
    """Fault class 41: what was stored for one shape is never taken for another's, before or after a snapshot."""
    async with running_server(directory=tmp_path) as started, AsyncClient(port=started.port) as client:
        await store(client, "a", 100)
        expected = await read(client)
    for _ in range(2):
        async with running_server(directory=tmp_path) as started, AsyncClient(port=started.port) as client:
            for shape in ((16, "fp32"), (8, "fp16"), (4, "fp32")):
                with pytest.raises(errors.ServerError, match="another shape") as caught:
                    await client.execute("KV.PREFIX.REGISTER", "a", *shape, "LAYERS", 2, "TOKENS", 3)
                assert caught.value.code == "EXISTS"
            with pytest.raises(errors.ServerError, match="another declaration"):
                await client.execute("KV.PREFIX.REGISTER", "a", 8, "fp32", "LAYERS", 3, "TOKENS", 3)
            with pytest.raises(errors.ServerError, match="complete"):
                await client.execute("V.STOREBATCH", "a_pk", 0, 0, 3, rows(1, 3, 8))
            assert await read(client) == expected
            assert await client.execute("KV.PREFIX.SAVE") == "OK"
