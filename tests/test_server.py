"""Start and stop of a server: real processes, real signals, real sockets."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

from pion import process
from pion.config import Config
from pion.errors import PluginError, StartupError
from pion.replies import ErrorReply
from pion.server import Started, resolve, serve
from pion.testing import ServerProcess, make_harness, running_server

STUCK_PLUGIN = """
import trio
from pion import Command, hookimpl, OK

async def slow(context, argv):
    await trio.sleep(float(argv[1]))
    return OK

@hookimpl
def register_commands(config):
    return [Command(name="SLOW", arity=2, handler=slow, summary="sleeps", since="1")]
"""

TRACE_PLUGIN = """
import trio
from pion import hookimpl

events = []
disconnected = trio.Event()

async def service(*, task_status):
    events.append("service starts")
    task_status.started()
    try:
        await trio.sleep_forever()
    finally:
        events.append("service ends")

@hookimpl
def startup(services):
    services.state["trace"] = events
    services.state["disconnected"] = disconnected
    events.append("startup")

@hookimpl
def register_services(services):
    return [service]

@hookimpl
def register_disconnect(services):
    def note(session):
        events.append("disconnect")
        disconnected.set()
    return note

@hookimpl
def shutdown(services):
    events.append("shutdown")
"""


@pytest.fixture
def slow_plugin(tmp_path: Path) -> str:
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "stuck.py").write_text(STUCK_PLUGIN)
    return str(folder)


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock.sendall(b"PING\r\n")
    assert sock.recv(100) == b"+PONG\r\n"
    return sock


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_closes_idle_connections_and_exits_zero(number: signal.Signals) -> None:
    with ServerProcess("--kvcache", "--grace", "30") as server, connect(server.port) as idle:
        begun = time.monotonic()
        server.process.send_signal(number)
        assert idle.recv(100) == b""
        assert server.process.wait(20) == 0
        assert time.monotonic() - begun < 15  # far below the grace time: nobody waited for the idle client


def test_a_request_under_way_is_finished(slow_plugin: str) -> None:
    with ServerProcess("--plugins-dir", slow_plugin) as server, connect(server.port) as busy:
        busy.sendall(b"SLOW 0.5\r\n")
        time.sleep(0.1)
        server.terminate()
        assert busy.recv(100) == b"+OK\r\n"
        assert busy.recv(100) == b""
        assert server.process.wait(20) == 0


def test_the_grace_time_bounds_a_request(slow_plugin: str) -> None:
    with ServerProcess("--plugins-dir", slow_plugin, "--grace", "0.2") as server, connect(server.port) as busy:
        busy.sendall(b"SLOW 600\r\n")
        time.sleep(0.1)
        server.terminate()
        assert busy.recv(100) == b""
        assert server.process.wait(20) == 0


def test_a_second_signal_stops_at_once(slow_plugin: str) -> None:
    with ServerProcess("--plugins-dir", slow_plugin, "--grace", "600") as server, connect(server.port) as busy:
        busy.sendall(b"SLOW 600\r\n")
        time.sleep(0.1)
        server.terminate()
        time.sleep(0.3)
        assert server.process.poll() is None
        server.terminate()
        assert server.process.wait(20) == 0


def test_the_banner_says_where_and_what() -> None:
    with ServerProcess("--kvcache", "-w", "1") as server:
        server.stop()
        text = "".join(server.log)
    assert f"tcp://127.0.0.1:{server.port}" in text
    assert "ready in" in text
    assert "plugins    connection, server, stats, vstore, kvprefix" in text


def run_server(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pion", "server", "--dir", "", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_server("--port", str(port))
    assert done.returncode == 2
    assert f"can't listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--host", "0.0.0.0"), "there is no password"),
        (("-w", "2"), "this version runs one worker"),
        (("--plugins", "nope"), "no plugin named nope"),
        (("--plugins-dir", "/nonexistent"), "not a directory"),
        (("--port", "70000"), "--port: expected an integer from 0 to 65535"),
        (("--requirepass-file", "/nonexistent"), "--requirepass-file /nonexistent: No such file"),
        (("--unix", "/nonexistent/pion.sock"), "can't listen on the Unix socket"),
    ],
)
def test_a_bad_option_refuses_the_start(args: tuple[str, ...], message: str) -> None:
    done = run_server("--port", "0", *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_every_option() -> None:
    from pion.config import fields, flag_name

    done = run_server("--help")
    assert done.returncode == 0
    for field in fields():
        assert f"--{flag_name(field)}" in done.stdout


async def ask(stream: trio.abc.Stream, request: bytes) -> bytes:
    await stream.send_all(request)
    return bytes(await stream.receive_some(4096))


async def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "pion.sock"
    async with running_server(Config(unix=str(path))):
        assert path.stat().st_mode & 0o077 == 0
        async with await trio.open_unix_socket(str(path)) as stream:
            assert await ask(stream, b"PING\r\n") == b"+PONG\r\n"
    assert not path.exists()


async def test_a_stale_unix_socket_is_replaced_and_a_living_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "pion.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    async with running_server(Config(unix=str(path))):
        with pytest.RaisesGroup(StartupError, flatten_subgroups=True, allow_unwrapped=True):
            async with running_server(Config(unix=str(path))):
                pytest.fail("two servers on one socket")
        async with await trio.open_unix_socket(str(path)) as stream:
            assert await ask(stream, b"PING\r\n") == b"+PONG\r\n"


async def test_the_password_file_guards_everything(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("s3cret\n")
    async with running_server(Config(requirepass_file=str(file))) as started:
        stream = await trio.open_tcp_stream("127.0.0.1", started.port)
        async with stream:
            assert (await ask(stream, b"PING\r\n")).startswith(b"-NOAUTH")
            assert (await ask(stream, b"AUTH wrong\r\n")).startswith(b"-WRONGPASS")
            assert await ask(stream, b"AUTH s3cret\r\n") == b"+OK\r\n"
            assert await ask(stream, b"PING\r\n") == b"+PONG\r\n"


async def test_hooks_run_in_the_order_of_a_life(tmp_path: Path) -> None:
    (tmp_path / "trace.py").write_text(TRACE_PLUGIN)
    async with running_server(Config(plugins_dir=str(tmp_path))) as started:
        events = started.services.state["trace"]
        assert events == ["startup", "service starts"]
        async with await trio.open_tcp_stream("127.0.0.1", started.port) as stream:
            assert await ask(stream, b"PING\r\n") == b"+PONG\r\n"
        with trio.fail_after(5):
            await started.services.state["disconnected"].wait()
    assert events == ["startup", "service starts", "disconnect", "service ends", "shutdown"]


@pytest.mark.parametrize("hook", ["startup", "register_services", "register_info", "register_disconnect"])
async def test_a_failing_hook_names_the_plugin(tmp_path: Path, hook: str) -> None:
    (tmp_path / "bad.py").write_text(f"from pion import hookimpl\n@hookimpl\ndef {hook}(services):\n    1 / 0\n")
    with pytest.RaisesGroup(
        pytest.RaisesExc(PluginError, match=f"plugin bad: {hook} failed"), flatten_subgroups=True, allow_unwrapped=True
    ):
        async with running_server(Config(plugins_dir=str(tmp_path))):
            pytest.fail("started")


async def test_harness_runs_commands_without_sockets() -> None:
    harness = make_harness()
    other = harness.client()
    assert other.context.session.id != harness.context.session.id
    assert repr(await harness.call("PING")) == "Simple('PONG')"
    other.disconnect()
    assert len(harness.services.clients) == 1


def test_a_password_file_that_is_not_text_refuses_the_start(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match="password: not UTF-8"):
        resolve(Config(requirepass_file=str(file)))


FAILING_SERVICE = """
import trio
from pion import hookimpl, Command, OK

failing = trio.Event()

async def service(*, task_status):
    task_status.started()
    await failing.wait()
    raise LookupError("lost it")

async def fail(context, argv):
    failing.set()
    await context.services.draining.wait()
    return OK

@hookimpl
def register_services(services):
    return [service]

@hookimpl
def register_commands(config):
    return [Command(name="FAIL", arity=1, handler=fail, summary="fails", since="1")]

@hookimpl
def shutdown(services):
    raise ZeroDivisionError
"""


async def test_a_failing_service_stops_the_server_in_order_and_names_the_plugin(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The client whose request was under way gets its answer; the shutdown hook's own error is only logged."""
    (tmp_path / "feeble.py").write_text(FAILING_SERVICE)
    with pytest.RaisesGroup(
        pytest.RaisesExc(PluginError, match=r"plugin feeble: service failed: LookupError\('lost it'\)"),
        flatten_subgroups=True,
        allow_unwrapped=True,
    ):
        async with running_server(Config(plugins_dir=str(tmp_path))) as started:
            stream = await trio.open_tcp_stream("127.0.0.1", started.port)
            async with stream:
                with trio.fail_after(30):
                    assert await ask(stream, b"FAIL\r\n") == b"+OK\r\n"
                    assert await stream.receive_some(10) == b""
            with trio.fail_after(30):
                await trio.sleep_forever()  # the error under way ends the block
    assert "plugin feeble: service failed" in caplog.text
    assert "plugin feeble: shutdown failed" in caplog.text


async def test_a_service_that_fails_at_its_start_names_the_plugin(tmp_path: Path) -> None:
    (tmp_path / "feeble.py").write_text(FAILING_SERVICE.replace("task_status.started()", "failing.set()"))
    with pytest.RaisesGroup(
        pytest.RaisesExc(PluginError, match="plugin feeble: service failed"),
        flatten_subgroups=True,
        allow_unwrapped=True,
    ):
        async with running_server(Config(plugins_dir=str(tmp_path))):
            pytest.fail("started")


async def test_shutdown_goes_backwards_and_past_a_failing_plugin(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = "from pion import hookimpl\n@hookimpl\ndef shutdown(services):\n    "
    for name in ("alpha", "gamma"):
        (tmp_path / f"{name}.py").write_text(source + f"services.state.setdefault('order', []).append({name!r})\n")
    (tmp_path / "beta.py").write_text(source + "1 / 0\n")
    async with running_server(Config(plugins_dir=str(tmp_path))) as started:
        state = started.services.state
    assert state["order"] == ["gamma", "alpha"]
    assert "plugin beta: shutdown failed" in caplog.text


async def test_hooks_go_through_pluggy(tmp_path: Path) -> None:
    """An implementation may leave arguments out and may have another name."""
    (tmp_path / "loose.py").write_text(
        "from pion import InfoSection, hookimpl\n"
        "seen = []\n"
        "@hookimpl(specname='startup')\ndef begin():\n    seen.append('startup')\n"
        "@hookimpl\ndef register_info():\n    return [InfoSection('Loose', lambda: [('seen', seen[0])])]\n"
    )
    services = make_harness(Config(plugins_dir=str(tmp_path))).services
    (section,) = [section for section in services.info_sections if section.title == "Loose"]
    assert section.rows() == [("seen", "startup")]


async def test_only_a_server_process_raises_the_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(200, soft)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        reply = await make_harness().call("CONFIG", "SET", "maxclients", 1000)
        assert isinstance(reply, ErrorReply)
        assert f"try with {low - process.SPARE_DESCRIPTORS}" in reply.text
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == low
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    async with trio.open_nursery() as nursery:

        async def run(*, task_status: trio.TaskStatus[Started]) -> None:
            await serve(Config(port=0, dir=""), owns_process=True, task_status=task_status)

        started = await nursery.start(run)
        assert started.services.fit_clients is process.raise_descriptor_limit
        started.services.request_shutdown(True)


def test_a_process_keeps_its_whole_log_and_one_that_does_not_start_shows_it() -> None:
    with ServerProcess() as server:
        pass
    assert any("ready in" in line for line in server.log)
    assert "stopped" in server.log[-1]
    with pytest.raises(RuntimeError, match=r"(?s)pion-server ended:.*--workers 2: this version runs one worker"):
        ServerProcess("--workers", "2").__enter__()


@pytest.mark.parametrize(
    ("command", "snapshot"),
    [("SHUTDOWN", True), ("SHUTDOWN SAVE", True), ("SHUTDOWN NOSAVE", False), ("SHUTDOWN NOW", False)],
)
def test_a_clean_stop_takes_a_snapshot_unless_told_otherwise(tmp_path: Path, command: str, snapshot: bool) -> None:
    """In any case what was acknowledged is there afterwards."""
    with ServerProcess("--kvcache", "--dir", str(tmp_path)) as server:
        with connect(server.port) as client:
            client.sendall(b"V.CREATE s 1 VQUANT fp32\r\n")
            assert client.recv(100) == b"+OK\r\n"
            client.sendall(command.encode() + b"\r\n")
            assert client.recv(100) == b""
        assert server.process.wait(30) == 0
    assert (tmp_path / "pion.vstore.0").exists() == snapshot
    with ServerProcess("--kvcache", "--dir", str(tmp_path)) as server, connect(server.port) as client:
        client.sendall(b"V.LIST\r\n")
        assert b"$1\r\ns\r\n" in client.recv(1000)


def test_a_stop_without_changes_writes_no_snapshot(tmp_path: Path) -> None:
    with ServerProcess("--kvcache", "--dir", str(tmp_path)) as server:
        assert server.stop() == 0
    assert not (tmp_path / "pion.vstore.0").exists()


def test_one_server_for_a_directory(tmp_path: Path) -> None:
    with ServerProcess("--kvcache", "--dir", str(tmp_path)) as first:
        done = run_server("--port", "0", "--dir", str(tmp_path))
        assert done.returncode == 2
        assert f"--dir {tmp_path} is in use by process {first.pid}" in done.stderr
        assert "Traceback" not in done.stderr
        first.kill()
    with ServerProcess("--kvcache", "--dir", str(tmp_path)):
        pass


def test_the_banner_says_where_the_data_is(tmp_path: Path) -> None:
    with ServerProcess("--kvcache", "--dir", str(tmp_path), "--wal-sync", "always") as server:
        server.stop()
        assert f"  data       {tmp_path}, log flushed before each answer; 0 prefixes read\n" in server.log
    with ServerProcess("--kvcache") as server:
        server.stop()
        assert "  data       in memory only: nothing survives a restart\n" in server.log
