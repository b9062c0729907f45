"""The seam to the operating system: what is asked of it, and what is made of its answers."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

import pytest

from pion.storage import disk as disk_module
from pion.storage.disk import DirectoryLock, RealDisk, boot_id, full_sync


def test_flushing_a_file_that_another_process_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"data")
    flushed: list[str] = []
    monkeypatch.setattr(
        disk_module, "full_sync", lambda descriptor: flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
    )
    if not sys.platform.startswith("linux"):
        monkeypatch.setattr(disk_module, "full_sync", lambda descriptor: flushed.append("a"))
    RealDisk(tmp_path).sync("a")
    assert flushed == ["a"]
    with pytest.raises(FileNotFoundError):
        RealDisk(tmp_path).sync("b")


def test_a_flush_reaches_the_medium_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr("fcntl.fcntl", lambda descriptor, command: calls.append((descriptor, command)))
    full_sync(7, "darwin")
    assert calls == [(7, 51)]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failure_that_waiting_notices_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The kernel reports it once for each open file: the flush at the end would succeed."""

    def fail(*_: int) -> int:
        ctypes.set_errno(code)
        return -1

    file = RealDisk(tmp_path).create("a")
    monkeypatch.setattr(disk_module, "_sync_file_range", fail)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        file.wait_writeback(0, 10)
    assert caught.value.errno == code
    file.start_writeback(0, 10)  # a hint, which reports nothing
    file.close()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM])
def test_where_the_call_is_unknown_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: int) -> int:
        ctypes.set_errno(code)
        return -1

    file = RealDisk(tmp_path).create("a")
    for function in (fail, None):
        monkeypatch.setattr(disk_module, "_sync_file_range", function)
        file.start_writeback(0, 10)
        file.wait_writeback(0, 10)
    file.close()


def test_the_real_calls_succeed(tmp_path: Path) -> None:
    file = RealDisk(tmp_path).create("a")
    file.write([bytes(1 << 20)])
    file.start_writeback(0, 1 << 20)
    file.wait_writeback(0, 1 << 20)
    file.sync()
    file.close()


def test_the_run_of_the_machine_has_a_name() -> None:
    assert boot_id()
    assert boot_id() == boot_id()
    assert boot_id("plan9") == boot_id("linux")


def test_an_unknown_run_of_the_machine_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path, encoding: str) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert boot_id("linux") == ""
    # There is no such call on Linux, so this is what a strange macOS would give.
    if not sys.platform.startswith("darwin"):
        assert boot_id("darwin") == ""


def test_a_closed_file_is_closed_once(tmp_path: Path) -> None:
    """Its number may be another's by then."""
    file = RealDisk(tmp_path).create("a")
    file.close()
    other = os.open(tmp_path / "b", os.O_CREAT | os.O_WRONLY)
    file.close()
    os.write(other, b"x")
    os.close(other)
    for call in (file.sync, lambda: file.write([b"x"])):
        with pytest.raises(OSError, match="Bad file descriptor"):
            call()


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    RealDisk(tmp_path).create("a").close()
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_folders_and_links_to_nothing_are_no_files_of_the_directory(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    disk.create("a").close()
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert disk.names() == ["a"]


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = DirectoryLock(path)
    with pytest.raises(BlockingIOError, match=f"in use by process {os.getpid()}"):
        DirectoryLock(path)
    lock.release()
    lock.release()
    again = DirectoryLock(path)
    again.release()
    assert path.exists()
