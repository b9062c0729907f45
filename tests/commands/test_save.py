"""KV.PREFIX.SAVE, SHUTDOWN with and without SAVE, and the Persistence section of INFO."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio

from pion.client import errors
from pion.client.aio import PionClient
from pion.config import Config
from pion.limits import INLINE_ARG_BYTES
from pion.server import Started, serve
from pion.testing import make_harness, running_server
from tests.commands.kv_support import plain
from tests.storage.damage_support import read, store

SNAPSHOT = "pion.vstore.0"
SAVE = "KV.PREFIX.SAVE"


def names(directory: Path) -> set[str]:
    """All files but the lock and the log."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    found = {path.relative_to(directory).as_posix() for path in paths}
    return {name for name in found if name != "pion.lock" and ".log." not in name}


def log_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if ".log." in path.name)


async def test_save_writes_the_snapshot_and_removes_the_log(tmp_path: Path) -> None:
    async with running_server(directory=tmp_path) as started, PionClient(port=started.port) as client:
        await store(client, "a", 100)
        log = int((await client.info("persistence"))["wal_bytes"])
        assert names(tmp_path) == set()
        assert await client.execute(SAVE) == "OK"
        assert names(tmp_path) == {SNAPSHOT}
        info = await client.info("persistence")
        assert int(info["wal_bytes"]) < log
        assert (info["wal_segments"], info["snapshots_taken"]) == ("1", "1")
        assert int(info["snapshot_bytes"]) == (tmp_path / SNAPSHOT).stat().st_size
        assert await client.execute(SAVE) == "OK", "with nothing new in it"
        expected = await read(client)
    async with running_server(directory=tmp_path) as started, PionClient(port=started.port) as client:
        assert await read(client) == expected


@pytest.mark.parametrize(
    "path", ["backup", "backup.safetensors", "of the day/ä ö.bin", ".hidden", "a..b", "pionx", "-f"]
)
async def test_a_second_name(tmp_path: Path, path: str) -> None:
    """The same file under both names; and all that a backup needs, whatever happens to the directory."""
    directory, other = tmp_path / "data", tmp_path / "other"
    (directory / path).parent.mkdir(parents=True)
    async with running_server(directory=directory) as started, PionClient(port=started.port) as client:
        await store(client, "a", 100)
        assert await client.execute(SAVE, path) == "OK"
        assert names(directory) == {SNAPSHOT, path}
        assert (directory / path).samefile(directory / SNAPSHOT)
        expected = await read(client)
        await store(client, "later", 200)
        assert await client.execute(SAVE) == "OK"
        assert not (directory / path).samefile(directory / SNAPSHOT)
        assert names(directory) == {SNAPSHOT, path}
    other.mkdir()
    shutil.copy(directory / path, other / SNAPSHOT)
    async with running_server(directory=other) as started, PionClient(port=started.port) as client:
        assert await read(client) == expected


async def test_an_existing_file_is_replaced(tmp_path: Path) -> None:
    """As `cp` does: the one that calls it like yesterday means that."""
    (tmp_path / "backup").write_text("an old backup")
    async with running_server(directory=tmp_path) as started, PionClient(port=started.port) as client:
        for number in range(2):
            await store(client, f"ns{number}", number)
            assert await client.execute(SAVE, "backup") == "OK"
            assert (tmp_path / "backup").samefile(tmp_path / SNAPSHOT)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (b"", "path must be relative and inside the data directory, got ''"),
        (b"/etc/passwd", "path must be relative and inside"),
        (b"//x", "path must be relative and inside"),
        (b"..", "path must be relative and inside"),
        (b"../x", "path must be relative and inside"),
        (b"a/../../x", "path must be relative and inside"),
        (b"a/..", "path must be relative and inside"),
        (b".", "path must be relative and inside"),
        (b"./x", "path must be relative and inside"),
        (b"a//b", "path must be relative and inside"),
        (b"a/", "path must be relative and inside"),
        (b"a\0b", "path must be relative and inside"),
        (b"pion.vstore.0", "path must not begin with 'pion.'"),
        (b"pion.vstore.0.log.0000000001", "path must not begin with 'pion.'"),
        (b"pion.lock", "path must not begin with 'pion.'"),
        (b"pion.mine", "path must not begin with 'pion.'"),
        (b"pion.d/x", "path must not begin with 'pion.'"),
        (b"backup.tmp", "path must not end with .tmp"),
        (b"\xff\xfe", "path must be UTF-8"),
        (b"\xed\xa0\x80", "path must be UTF-8"),
        (b"x" * (INLINE_ARG_BYTES + 1), f"path must be at most {INLINE_ARG_BYTES} bytes long"),
    ],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else None,
)
async def test_paths_that_are_refused(tmp_path: Path, path: bytes, message: str) -> None:
    """Before anything is written."""
    async with running_server(directory=tmp_path / "data") as started, PionClient(port=started.port) as client:
        await store(client, "a", 100)
        before = names(tmp_path)
        with pytest.raises(errors.ServerError) as caught:
            await client.execute(SAVE, path)
        assert caught.value.code == "ERR"
        assert message in str(caught.value)
        assert names(tmp_path) == before
        info = await client.info("persistence")
        assert (info["snapshots_taken"], info["snapshot_last_error"]) == ("0", "")
        await store(client, "b", 200)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/backup", "No such file or directory"),
        ("folder", "Is a directory"),
        ("file/backup", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("/".join(["y" * 200] * 30), "File name too long"),
    ],
    ids=["no folder", "a folder", "below a file", "long name", "long path"],
)
async def test_paths_that_the_system_refuses(tmp_path: Path, path: str, message: str) -> None:
    """The error says why; the snapshot before and the log stay as they were, nothing is left over, changes go on."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    async with running_server(directory=tmp_path) as started, PionClient(port=started.port) as client:
        await store(client, "a", 100)
        assert await client.execute(SAVE) == "OK"
        saved = (tmp_path / SNAPSHOT).read_bytes()
        await store(client, "b", 200)
        with pytest.raises(errors.ServerError, match=message):
            await client.execute(SAVE, path)
        assert names(tmp_path) == {SNAPSHOT, "file"}
        assert (tmp_path / SNAPSHOT).read_bytes() == saved
        assert (tmp_path / "file").read_text() == "mine"
        await store(client, "c", 300)
        expected = await read(client)
        assert expected.keys() == {"a", "b", "c"}
    async with running_server(directory=tmp_path) as started, PionClient(port=started.port) as client:
        assert await read(client) == expected


def another_file_system(directory: Path) -> Path:
    places = [path for path in map(Path, ("/dev/shm", "/dev", "/proc")) if path.is_dir()]
    return next(path for path in places if path.stat().st_dev != directory.stat().st_dev)


async def test_a_second_name_in_another_file_system(tmp_path: Path) -> None:
    """A link can't point out of it, so that is an error like others."""
    (tmp_path / "elsewhere").symlink_to(another_file_system(tmp_path))
    async with running_server(directory=tmp_path) as started, PionClient(port=started.port) as client:
        with pytest.raises(errors.ServerError, match="ross-device link"):
            await client.execute(SAVE, "elsewhere/backup")
        assert names(tmp_path) == set()
        await store(client, "a", 100)


async def test_too_many_arguments(tmp_path: Path) -> None:
    async with running_server(directory=tmp_path) as started, PionClient(port=started.port) as client:
        with pytest.raises(errors.ServerError, match="wrong number of arguments for"):
            await client.execute(SAVE, "a", "b")


async def test_in_a_transaction(tmp_path: Path) -> None:
    """It runs in its turn, with what was queued before it and without what was queued behind."""
    async with running_server(directory=tmp_path) as started, PionClient(port=started.port) as client:
        replies = await client.pipeline(
            [
                ("MULTI",),
                ("KV.PREFIX.REGISTER", "before", 8, "fp32"),
                (SAVE, "backup"),
                ("KV.PREFIX.REGISTER", "behind", 8, "fp32"),
                (SAVE, "../x"),
                ("EXEC",),
            ]
        )
        done = replies[-1]
        assert isinstance(done, list)
        assert done[:3] == ["OK", "OK", "OK"]
        assert "path must be relative" in str(done[3])
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "backup", tmp_path / "other" / SNAPSHOT)
    async with running_server(directory=tmp_path / "other") as started, PionClient(port=started.port) as client:
        assert [name async for name in client.prefix_list()] == [b"before"]


async def test_many_at_once(tmp_path: Path) -> None:
    """They take turns, and stores go on."""
    async with running_server(directory=tmp_path) as started:
        port = started.port

        async def save(name: str) -> None:
            async with PionClient(port=port) as client:
                assert await client.execute(SAVE, name) == "OK"

        async def fill(number: int) -> None:
            async with PionClient(port=port) as client:
                await store(client, f"ns{number}", 10 * number)

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(save, f"backup{number}")
                nursery.start_soon(fill, number)
        assert names(tmp_path) == {SNAPSHOT, *(f"backup{number}" for number in range(6))}
        async with PionClient(port=port) as client:
            assert (await client.info("persistence"))["snapshots_taken"] == "6"
            expected = await read(client)
    async with running_server(directory=tmp_path) as started, PionClient(port=started.port) as client:
        assert await read(client) == expected


async def test_without_a_directory() -> None:
    harness = make_harness(Config(dir=""))
    for arguments in ([SAVE], [SAVE, "backup"]):
        reply = plain(await harness.call(*arguments))
        assert reply == '-ERR this server keeps everything in memory: start it with --dir (not "") to have snapshots'
    assert "path must be UTF-8" in plain(await harness.call(SAVE, b"\xff")), "what is wrong anyway is said first"


# SHUTDOWN.


async def stopped(directory: Path, *options: str) -> bool:
    """Store something and stop the server with SHUTDOWN; whether there is a snapshot then. Nothing may be lost."""
    config = Config(port=0, dir=str(directory))
    async with trio.open_nursery() as nursery:

        async def run(*, task_status: trio.TaskStatus[Started]) -> None:
            await serve(config, task_status=task_status)

        started = await nursery.start(run)
        async with PionClient(port=started.port) as client:
            await store(client, "a", 100)
            expected = await read(client)
        async with await trio.open_tcp_stream("127.0.0.1", started.port) as stream:
            await stream.send_all(" ".join(("SHUTDOWN", *options)).encode() + b"\r\n")
            assert await stream.receive_some() == b"", "the closed connection is the answer"
    saved = (directory / SNAPSHOT).exists()
    async with running_server(directory=directory) as again, PionClient(port=again.port) as client:
        assert await read(client) == expected
        info = await client.info("persistence")
        assert int(info["wal_replayed_records"]) == (0 if saved else 5)
    return saved


@pytest.mark.parametrize(
    ("options", "saves"),
    [
        ((), True),
        (("SAVE",), True),
        (("save", "FORCE"), True),
        (("NOSAVE",), False),
        (("NoSave", "NOW"), False),
        (("NOW",), False),
    ],
    ids=lambda value: " ".join(value) or "plain" if isinstance(value, tuple) else None,
)
async def test_shutdown(tmp_path: Path, options: tuple[str, ...], saves: bool) -> None:
    """With a last snapshot or without, nothing is lost: the log has it."""
    assert await stopped(tmp_path, *options) is saves


@pytest.mark.parametrize("options", [("SAVE", "NOSAVE"), ("BOTH",), ("ABORT", "NOW")])
async def test_shutdown_options_that_are_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    async with running_server(directory=tmp_path) as started, PionClient(port=started.port) as client:
        with pytest.raises(errors.ServerError, match="syntax error"):
            await client.execute("SHUTDOWN", *options)
        assert not started.services.draining.is_set()


async def test_shutdown_save_needs_a_directory() -> None:
    harness = make_harness(Config(dir=""))
    reply = plain(await harness.call("SHUTDOWN", "SAVE"))
    assert reply == "-ERR SHUTDOWN SAVE: this server keeps everything in memory and has no file to save to"
    assert not harness.context.session.closing


async def test_nothing_new_needs_no_snapshot(tmp_path: Path) -> None:
    """A server that was only read from leaves its files as they were."""
    assert await stopped(tmp_path)
    before = (tmp_path / SNAPSHOT).stat()
    async with running_server(directory=tmp_path) as started, PionClient(port=started.port) as client:
        await read(client)
    assert (tmp_path / SNAPSHOT).stat() == before


# INFO persistence.

NAMES = [
    "loading",
    "rdb_bgsave_in_progress",
    "rdb_last_bgsave_status",
    "aof_enabled",
    "aof_last_write_status",
    "data_directory",
    "changes_refused",
    "wal_sync",
    "wal_bytes",
    "wal_segments",
    "wal_queued_bytes",
    "wal_records",
    "wal_written_bytes",
    "wal_flushes",
    "wal_sequence",
    "wal_durable_sequence",
    "wal_replayed_records",
    "wal_cut_bytes",
    "load_seconds",
    "snapshots_taken",
    "snapshot_bytes",
    "snapshot_seconds",
    "snapshot_age_seconds",
    "snapshot_last_error",
    "mapped_bytes",
    "checksum_failures",
]


async def test_info_of_a_server_that_keeps_nothing() -> None:
    async with running_server() as started, PionClient(port=started.port) as client:
        assert await client.info("persistence") == {
            "loading": "0",
            "rdb_bgsave_in_progress": "0",
            "aof_enabled": "0",
            "data_directory": "",
        }


@pytest.mark.parametrize("sync", ["always", "everysec", "no"])
async def test_info_of_a_server_with_a_directory(tmp_path: Path, sync: str) -> None:
    config = Config(wal_sync=sync)
    async with running_server(config, directory=tmp_path) as started, PionClient(port=started.port) as client:
        info = await client.info("persistence")
        assert list(info) == NAMES
        assert info["data_directory"] == str(tmp_path)
        assert (info["aof_enabled"], info["wal_sync"], info["aof_last_write_status"]) == ("1", sync, "ok")
        assert (info["wal_records"], info["wal_sequence"], info["wal_segments"]) == ("0", "0", "1")
        assert (info["snapshots_taken"], info["snapshot_age_seconds"]) == ("0", "-1")
        await store(client, "a", 100, 64, 512)
        info = await client.info("persistence")
        assert (info["wal_records"], info["wal_sequence"], info["wal_queued_bytes"]) == ("3", "3", "0")
        assert int(info["wal_written_bytes"]) > 2 * 64 * 512 * 4
        assert int(info["wal_bytes"]) == log_bytes(tmp_path)
        assert (int(info["wal_durable_sequence"]) == 3) or sync != "always"
        assert await client.execute(SAVE) == "OK"
        info = await client.info("persistence")
        assert (info["snapshots_taken"], info["rdb_last_bgsave_status"]) == ("1", "ok")
        await client.execute("KV.PREFIX.PIN", "a")
    async with running_server(config, directory=tmp_path) as started, PionClient(port=started.port) as client:
        info = await client.info("persistence")
        assert info["wal_replayed_records"] == "1"
        assert info["wal_sequence"] == "4"
        assert info["mapped_bytes"] == str(2 * 64 * 512 * 4)
        assert (info["checksum_failures"], info["wal_cut_bytes"]) == ("0", "0")
