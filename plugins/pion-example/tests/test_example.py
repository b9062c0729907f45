"""The example plugin, tested as any plugin author can: through `pion` and `pion.testing` alone."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import trio

import pion
import pion_example
from pion.client import PionClient
from pion.client.errors import ServerError
from pion.testing import Harness, ServerProcess, make_harness, running_server


@pytest.fixture
def harness() -> Harness:
    return make_harness(pion.Config(plugins="vstore,kvprefix,server,example"))


async def store(harness: Harness, ns: str, tokens: int, *options: str | int) -> None:
    """One layer of `tokens` rows of one value, on both sides."""
    assert await harness.call("KV.PREFIX.REGISTER", ns, 1, "fp32", *options) == pion.OK
    for side in ("_pk", "_pv"):
        rows = struct.pack(f"<{tokens}f", *range(tokens))
        assert await harness.call("V.STOREBATCH", ns + side, 0, 0, tokens, rows) == pion.OK


async def test_tokens_of_a_chain(harness: Harness) -> None:
    await store(harness, "root", 5, "LAYERS", 1, "TOKENS", 5)
    await store(harness, "leaf", 3, "LAYERS", 1, "TOKENS", 3, "PARENT", "root", 5)
    assert await harness.call("EXAMPLE.TOKENS", "root") == 5
    assert await harness.call("EXAMPLE.TOKENS", "leaf") == 8


async def test_tokens_of_nothing_is_an_error(harness: Harness) -> None:
    assert isinstance(await harness.call("EXAMPLE.TOKENS", "nobody"), pion.ErrorReply)
    reply = await harness.call("EXAMPLE.TOKENS")
    assert isinstance(reply, pion.ErrorReply)
    assert "wrong number of arguments" in reply.text


async def test_the_service_samples_the_clients(harness: Harness, autojump_clock: trio.testing.MockClock) -> None:
    """On the test's own clock: no real second passes."""
    (sample,) = pion_example.register_services(harness.services)
    async with trio.open_nursery() as nursery:
        await nursery.start(sample)
        others = [harness.client(), harness.client()]
        await trio.sleep(1.5)
        for other in others:
            other.disconnect()
        assert await harness.call("EXAMPLE.PEAK") == 3
        info = await harness.call("INFO", "example")
        assert isinstance(info, str)
        assert info.split() == ["#", "Example", "example_clients_peak:3", "example_clients_closed:2"]
        await trio.sleep(60)
        assert await harness.call("EXAMPLE.PEAK") == 1
        nursery.cancel_scope.cancel()


async def test_in_a_running_server() -> None:
    """Loaded by its entry point, its service started, its state released at the end."""
    async with running_server(pion.Config(kvcache=True)) as server:
        async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
            await stream.send_all(b"EXAMPLE.PEAK\r\n")
            assert (await stream.receive_some(100)).startswith(b":")
        assert "example" in server.services.plugins
    assert "example" not in server.services.state


# Notes: state that is durable. Real processes, real files, SIGKILL.


async def test_notes_without_a_directory(harness: Harness) -> None:
    assert await harness.call("EXAMPLE.NOTED", "a") is None
    assert await harness.call("EXAMPLE.NOTE", "a", "first") == pion.OK
    assert await harness.call("EXAMPLE.NOTE", "a", "second") == pion.OK
    assert await harness.call("EXAMPLE.NOTED", "a") == b"second"
    assert await harness.call("EXAMPLE.NOTE", "a", "") == pion.OK
    assert await harness.call("EXAMPLE.NOTED", "a") is None
    # The same on the binary lane.
    assert await harness.call_binary(0xE1, b"a") == pion.BinaryReply(pion.Status.MISS)
    assert await harness.call_binary(0xE0, b"a", body=b"packed") == pion.BinaryReply()
    assert await harness.call_binary(0xE1, b"a") == pion.BinaryReply(body=b"packed")
    assert await harness.call("EXAMPLE.NOTED", "a") == b"packed"
    assert await harness.call_binary(0xE0, b"a") == pion.BinaryReply()
    assert await harness.call("EXAMPLE.NOTED", "a") is None


async def test_notes_are_bounded(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = "x" * (pion_example.NOTE_BYTES - 1)
    assert await harness.call("EXAMPLE.NOTE", "a", longest) == pion.OK
    assert isinstance(await harness.call("EXAMPLE.NOTE", "b", longest + "x"), pion.ErrorReply)
    monkeypatch.setattr(pion_example, "MOST_NOTES", 1)
    assert isinstance(await harness.call("EXAMPLE.NOTE", "b", "one too many"), pion.ErrorReply)
    assert await harness.call("EXAMPLE.NOTE", "a", "in its place") == pion.OK
    assert await harness.call("EXAMPLE.NOTED", "b") is None


def write(server: ServerProcess, **notes: str) -> None:
    with PionClient(port=server.port) as client:
        for name, text in notes.items():
            client.execute("EXAMPLE.NOTE", name, text)


def read(server: ServerProcess, *names: str) -> list[object]:
    with PionClient(port=server.port) as client:
        return [client.execute("EXAMPLE.NOTED", name) for name in names]


def test_notes_survive_the_death_of_the_server(tmp_path: Path) -> None:
    with ServerProcess("--dir", str(tmp_path)) as server:
        write(server, a="one", b="two", c="three")
        write(server, a="changed", b="")
        server.kill()
    with ServerProcess("--dir", str(tmp_path)) as server:
        assert read(server, "a", "b", "c") == [b"changed", None, b"three"]


def test_notes_are_in_the_snapshot(tmp_path: Path) -> None:
    """After a snapshot the log that it covers is gone; what follows is in the new one."""
    with ServerProcess("--dir", str(tmp_path)) as server:
        write(server, a="one", b="two")
        with PionClient(port=server.port) as client:
            client.execute("KV.PREFIX.SAVE")
        write(server, b="changed", c="three")
        server.kill()
    assert (tmp_path / "pion.vstore.0").exists()
    with ServerProcess("--dir", str(tmp_path)) as server:
        assert read(server, "a", "b", "c") == [b"one", b"changed", b"three"]
        assert server.stop() == 0
    with ServerProcess("--dir", str(tmp_path)) as server:
        assert read(server, "a", "b", "c") == [b"one", b"changed", b"three"]


@pytest.mark.parametrize("snapshot", [False, True], ids=["killed", "stopped"])
def test_a_server_without_the_plugin_keeps_its_notes(tmp_path: Path, snapshot: bool) -> None:
    with ServerProcess("--dir", str(tmp_path)) as server:
        write(server, a="one", b="two")
        server.kill()
    with ServerProcess("--dir", str(tmp_path), "--plugins=all,-example") as server:
        with pytest.raises(ServerError, match="unknown command"):
            read(server, "a")
        if snapshot:
            with PionClient(port=server.port) as client:
                client.execute("KV.PREFIX.SAVE")
            server.stop()
        else:
            server.kill()
        assert "the plugin that keeps 'example' is not loaded; its records are kept" in "".join(server.log)
    with ServerProcess("--dir", str(tmp_path)) as server:
        assert read(server, "a", "b") == [b"one", b"two"]
        write(server, a="changed")
        server.kill()
    with ServerProcess("--dir", str(tmp_path)) as server:
        assert read(server, "a", "b") == [b"changed", b"two"]


def test_a_note_that_could_not_be_written_is_taken_back(harness: Harness) -> None:
    """What the log does when the disk fails: it hands back, in order, what was not written."""
    notes = pion_example.state_of(harness.services).notes
    notes.write(b"a", b"kept")
    lost = [
        pion_example.Note(b"a", b"lost", b"kept"),
        pion_example.Note(b"b", b"new", b""),
        pion_example.Note(b"a", b"lost too", b"lost"),
    ]
    for note in lost:
        notes.write(note.name, note.text)
    notes.undo(lost)
    assert notes.texts == {b"a": b"kept"}
