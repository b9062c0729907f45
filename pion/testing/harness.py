"""A worker without sockets, a server in this process, a real one, and a clock that moves only when told."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs
import trio

from pion.config import Config
from pion.context import Clock, Context, Services, Session
from pion.protocol.binary import BinaryRequest
from pion.protocol.binary_answers import answer_to, encode_answer
from pion.protocol.encode import encode
from pion.protocol.packed import pack
from pion.replies import BinaryReply, Buffer, ErrorReply, Map, Reply, Static
from pion.server import Started, Worker, build, serve


class FakeClock(Clock):
    """A clock that moves only when told."""

    def __init__(self, wall_s: float = 1_700_000_000.0) -> None:
        self._wall_s = wall_s
        self._monotonic_s = 1000.0

    def wall_s(self) -> float:
        """The current fake wall time."""
        return self._wall_s

    def monotonic_s(self) -> float:
        """The current fake monotonic time."""
        return self._monotonic_s

    def advance(self, seconds: float) -> None:
        """Move both times forward."""
        self._wall_s += seconds
        self._monotonic_s += seconds

    def set_wall(self, wall_s: float) -> None:
        """Set the wall time alone, as an operator or NTP does."""
        self._wall_s = wall_s


@attrs.define(eq=False)
class Harness:
    """A worker without sockets: `await harness.call("PING")` runs a command and returns the reply as data.

    Several clients: `harness.client()` gives another session with its own `call`.
    """

    worker: Worker
    context: Context

    @property
    def services(self) -> Services:
        """The worker's services."""
        return self.worker.services

    async def call(self, *args: str | bytes | int | float | memoryview) -> Reply:
        """Run one command as this client. Errors come back as `ErrorReply`, a `Static` as its value.

        Raises `TypeError` for a value that is no reply, which a server could not send.
        """
        argv: list[Buffer] = [arg if isinstance(arg, bytes | memoryview) else str(arg).encode() for arg in args]
        reply = await self.worker.dispatcher.execute(self.context, argv)
        encode(reply, self.context.session.resp, [])
        plain: Reply = _plain(reply)
        return plain

    async def call_binary(self, code: int, *values: object, body: Buffer = b"") -> BinaryReply | ErrorReply:
        """Run one command of the binary lane, with the values of its meta, as this client.

        Raises `TypeError` for a value that is no reply, which a server could not send.
        """
        request = BinaryRequest.of(code, 1)
        row = self.services.registry.binary[code]
        request.meta, request.body = pack(row.meta, values), body
        request += [row.command.encode(), *(value for value in values[:1] if isinstance(value, bytes)), body]
        reply: BinaryReply | ErrorReply = await self.worker.dispatcher.execute_packed(self.context, request)
        encode_answer(answer_to(request, reply), [])
        return reply

    def client(self) -> Harness:
        """Another client of the same worker."""
        return Harness(self.worker, _context(self.worker))

    def disconnect(self) -> None:
        """What the server does when this client's connection closes."""
        self.services.clients.remove(self.context.session)
        for callback in self.services.disconnect:
            callback(self.context.session)


def _plain(reply: Any) -> Any:
    """The reply with what each `Static` stands for."""
    if isinstance(reply, Static):
        return _plain(reply.value)
    if isinstance(reply, list | tuple):
        return type(reply)(map(_plain, reply))
    if isinstance(reply, Map):
        return Map([(_plain(field), _plain(value)) for field, value in reply.pairs])
    return reply


def make_harness(config: Config | None = None, clock: Clock | None = None) -> Harness:
    """A worker with all plugins that `config` selects, and one connected client."""
    worker = build(config or Config(), clock)
    return Harness(worker, _context(worker))


def make_services(config: Config | None = None, clock: Clock | None = None) -> Services:
    """Only the services of `make_harness`."""
    return build(config or Config(), clock).services


def _context(worker: Worker) -> Context:
    services = worker.services
    session = Session(
        id=services.clients.next_id(),
        addr="127.0.0.1:0",
        laddr="127.0.0.1:0",
        authenticated=not services.config.requirepass,
    )
    services.clients.add(session)
    return Context(session, services, worker.dispatcher)


@asynccontextmanager
async def running_server(
    config: Config | None = None, clock: Clock | None = None, *, directory: Path | None = None
) -> AsyncIterator[Started]:
    """A server in this process on a free port, stopped at the end of the block.

    It keeps nothing without `directory`.
    """
    config = attrs.evolve(config or Config(), port=0, dir=str(directory or ""))
    async with trio.open_nursery() as nursery:

        async def run(*, task_status: trio.TaskStatus[Started]) -> None:
            await serve(config, clock=clock, task_status=task_status)

        started: Started = await nursery.start(run)
        try:
            yield started
        finally:
            nursery.cancel_scope.cancel()


class ServerProcess:
    """A real `pion-server` process on a free port of the loopback address, as a context manager.

    It keeps nothing on the disk unless `--dir` is among the arguments.

    `log` holds what it has written so far. Raises `RuntimeError` with the output if it does not start.
    """

    def __init__(self, *args: str, start_timeout_s: float = 30.0) -> None:
        self._args = args
        self._start_timeout_s = start_timeout_s
        self._settled = threading.Event()
        self.log: list[str] = []
        self.port = 0
        self.binary_port = 0
        """Of the binary lane; 0 without one."""
        self.process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        # The port after a given one may be taken by then.
        port = ("--binary-port", "0") if "--port" in self._args else ("--port", "0")
        directory = () if "--dir" in self._args else ("--dir", "")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pion", "server", *port, *directory, *self._args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        in_time = self._settled.wait(self._start_timeout_s)
        if not self.port:
            self.kill()
            what = "ended" if in_time else "did not start in time"
            raise RuntimeError(f"pion-server {what}:\n" + "".join(self.log))
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None  # noqa: S101  opened with PIPE
        for line in self.process.stdout:
            self.log.append(line)
            if not self.port and (found := re.search(r"^  listening  tcp://[^,\s]*:(\d+)", line)):
                if binary := re.search(r"pion-binary://[^,\s]*:(\d+)", line):
                    self.binary_port = int(binary[1])
                self.port = int(found[1])
                self._settled.set()
        self._settled.set()

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self.process.pid

    def terminate(self) -> None:
        """Send SIGTERM and return at once."""
        self.process.send_signal(signal.SIGTERM)

    def stop(self, timeout_s: float = 30.0) -> int:
        """Ask it to stop and return its exit code."""
        if self.process.poll() is None:
            self.terminate()
        code = self.process.wait(timeout_s)
        self._close()
        return code

    def kill(self) -> None:
        """SIGKILL, as a power cut would."""
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        self._reader.join(timeout=10)
        assert self.process.stdout is not None  # noqa: S101
        self.process.stdout.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        else:
            self._close()
