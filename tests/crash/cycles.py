"""Starts servers on one directory, kills them in different ways, and has everything checked after each start."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final

import attrs

from pion.testing import ServerProcess
from tests.crash.fleet import BACKUPS, Board, Client, Life, Saver, watch
from tests.crash.wire import CONNECTION_ERRORS, PATIENCE_S, ViolationError, Wire

CLIENTS: Final = 5
MODES: Final = ("always", "everysec", "no")

KILLED_BY_ANOTHER: Final = ("growth", "unfinished", "named", "removed")
SNAPSHOT_ENDS: Final = ("snapshot", "unfinished", "named", "removed")
WITHOUT_LOAD: Final = ("start", "replay", "fresh")
DECK: Final = ("load", "growth", "growth", *SNAPSHOT_ENDS, *WITHOUT_LOAD, "term")
"""How the server ends, shuffled by the seed. SIGKILL under load: at any moment, while the log is written (twice), after
KV.PREFIX.SAVE was asked for, while the snapshot is written, when it has just got its name, when the log that it covers
has begun to go. SIGKILL at any moment of the start, while the directory is read, right after the start. SIGTERM under
load.
"""

KILLER: Final = Path(__file__).with_name("killer.py")

COUNTS: Final = (
    "cycles",
    "verified starts",
    "operations acknowledged",
    "operations in flight",
    "rows compared",
    "rows compared under load",
    "snapshots taken",
    "kills during a snapshot",
    "snapshots left unfinished",
    "replayed records",
    "cut tails",
    "bytes cut",
    "evicted sessions",
    "objects in the tier at a start",
)
"""What a run counts. In flight is what was unanswered when a server died. Rows compared under load are those that
another client looked at; rows compared are all the others, most of them after a start.
"""

TIGHT_SESSIONS: Final = 64
"""--max-sessions in cycles with evictions: less than the clients make, more than they may pin."""

LITTLE_BYTES: Final = 3 << 20
MUCH_BYTES: Final = 1 << 30
"""--max-bytes: less than the clients store, and enough for all."""

LOAD_S: Final = (0.05, 0.9)
SNAPSHOT: Final = "pion.vstore.0"
LOCK: Final = "pion.lock"


@attrs.frozen
class Cycle:
    """What happens in one cycle."""

    number: int
    mode: str
    end: str
    tight: bool
    saves: bool
    memory_bytes: int = 0
    """--max-bytes; 0: no tier."""

    def __str__(self) -> str:
        sessions = f"--max-sessions {TIGHT_SESSIONS}" if self.tight else "no evictions"
        memory = f", --max-bytes {self.memory_bytes}" if self.memory_bytes else ""
        return f"cycle {self.number} (--wal-sync {self.mode}, {sessions}{memory}, end: {self.end})"

    @property
    def little(self) -> bool:
        """Whether memory is short. What the tier can't take in time is dropped then."""
        return 0 < self.memory_bytes < MUCH_BYTES

    @property
    def options(self) -> tuple[str, ...]:
        """The server's."""
        sessions = str(TIGHT_SESSIONS) if self.tight else "4096"
        queue = str(1 << 20) if self.number % 4 == 1 else str(1 << 27)
        return ("--wal-sync", self.mode, "--max-sessions", sessions, "--wal-queue", queue, "--log-level", "info")


class BrokenError(Exception):
    """A cycle found a violation; the text has the seed, the place and the folder that was kept."""


@attrs.define(eq=False)
class Run:
    """A number of cycles on one directory."""

    folder: Path
    seed: int
    note: Callable[[Cycle], None] = lambda cycle: None
    """Told when a cycle begins."""
    tier: bool = False
    """Whether there is a tier, which prefixes leave memory for in about half of the cycles."""
    counts: Counter[str] = attrs.field(factory=Counter)
    clients: list[Client] = attrs.field(init=False)
    _board: Board = attrs.field(factory=Board)
    _saver: Saver = attrs.field(factory=Saver)
    _tight: bool = False
    """Whether there may have been evictions since the last verification."""
    _little: bool = False
    """Whether memory may have been short since then."""
    _sessions: int = 0
    """Of the server at the last verification."""
    _start_s: float = 0.5
    _load_s: float = 0.01
    _log: IO[str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.clients = [Client(index, self._board) for index in range(CLIENTS)]

    @property
    def directory(self) -> Path:
        """The servers' --dir."""
        return self.folder / "data"

    def options(self, cycle: Cycle) -> tuple[str, ...]:
        """The server's in a cycle."""
        tier = ("--tier-dir", str(self.folder / "tier"), "--max-bytes", str(cycle.memory_bytes)) if self.tier else ()
        return (*cycle.options, *tier)

    def run(self, cycles: int) -> None:
        """All cycles, and a last look. Raises BrokenError."""
        cycle = Cycle(0, MODES[0], "load", tight=False, saves=False)
        try:
            with (self.folder / "server.log").open("w", encoding="utf-8") as self._log:
                for cycle in self._plan(cycles):
                    self.note(cycle)
                    self._cycle(cycle, random.Random(f"{self.seed}:{cycle.number}"))
                    self.counts["cycles"] += 1
                self._last_look(Cycle(cycles, MODES[cycles % 3], "last look", False, False, MUCH_BYTES * self.tier))
        except (ViolationError, TimeoutError) as problem:
            raise BrokenError(
                f"{cycle}: {problem}\nseed {self.seed}; kept: {self.directory} as it is now, {self._before} as it was "
                f"before the last start, {self.folder / 'server.log'}"
            ) from problem

    def _plan(self, cycles: int) -> Iterator[Cycle]:
        rng = random.Random(self.seed)
        deck: list[str] = []
        for number in range(cycles):
            if not deck:
                deck = list(DECK)
                rng.shuffle(deck)
            if not number:  # the first has nothing to read yet
                deck.append(deck.pop(next(at for at, end in enumerate(deck) if end not in WITHOUT_LOAD)))
            end = deck.pop()
            saves = end in SNAPSHOT_ENDS or rng.random() < 0.3
            memory_bytes = rng.choice((LITTLE_BYTES, LITTLE_BYTES, MUCH_BYTES)) if self.tier else 0
            if self.tier and end == "growth":  # large payloads may all be refused while memory is short
                memory_bytes = MUCH_BYTES
            yield Cycle(number, MODES[number % 3], end, rng.random() < 0.4, saves, memory_bytes)

    # One cycle.

    def _cycle(self, cycle: Cycle, rng: random.Random) -> None:
        self._keep_what_is_there()
        self._tight = self._tight or cycle.tight or cycle.little
        self._little = self._little or cycle.little
        if cycle.end in ("start", "replay"):
            self._kill_while_starting(cycle, rng)
            return
        with self._server(cycle) as server, ThreadPoolExecutor(CLIENTS + 2) as threads:
            life = Life(server.port, cycle.tight or cycle.little, threading.Event())
            try:
                if cycle.end == "fresh":
                    self._kill_at_once(server, life, threads, rng)
                else:
                    self._verify(server, cycle, threads)
                    self._load(server, life, cycle, threads, rng)
            finally:
                life.stop.set()
                if server.process.poll() is None:
                    server.kill()
                self._log.writelines([f"{cycle}\n", *server.log])
        self.counts[f"ended by: {cycle.end}"] += 1

    @contextmanager
    def _server(self, cycle: Cycle, directory: Path | None = None) -> Iterator[ServerProcess]:
        began_s = time.monotonic()
        with ExitStack() as stack:
            try:
                server = stack.enter_context(
                    ServerProcess("--kvcache", "--dir", str(directory or self.directory), *self.options(cycle))
                )
            except RuntimeError as error:
                raise ViolationError(f"the server does not start: {error}") from error
            self._start_s = time.monotonic() - began_s
            yield server

    def _verify(self, server: ServerProcess, cycle: Cycle, threads: ThreadPoolExecutor) -> None:
        with Wire(server.port) as wire:
            self._note_start(wire.info())
            # What is too much for a small --max-sessions is evicted first, so that nothing changes while we look.
            until = time.monotonic() + PATIENCE_S
            while self._shrinks(cycle, wire.info()):
                if time.monotonic() > until:
                    raise ViolationError(
                        f"more than --max-sessions {TIGHT_SESSIONS} or --max-bytes is there after {PATIENCE_S} s"
                    )
                time.sleep(0.02)
            made = sum(client.made for client in self.clients)
            checks = [threads.submit(client.verify, server.port, tight=self._tight) for client in self.clients]
            evicted = sum(self._results(checks))
            # Evictions only make room: they end at the limit, or at one below where a prefix went for one session.
            if not self._little and evicted > max(0, self._sessions + made - TIGHT_SESSIONS + 1):
                raise ViolationError(
                    f"{evicted} sessions are gone, but of {self._sessions} and {made} new ones not so many need have "
                    f"been evicted"
                )
            self.counts["evicted sessions"] += evicted
            info = wire.info()
            for field in ("checksum_failures", "changes_refused"):
                if info[field] not in ("0", ""):
                    raise ViolationError(f"INFO says {field}:{info[field]}")
            self._sessions = int(info["vstore_sessions"])
            self.counts["objects in the tier at a start"] += int(info.get("tier_objects", 0))
        self._check_backups()
        self._tight, self._little = cycle.tight or cycle.little, cycle.little
        self.counts["verified starts"] += 1

    def _shrinks(self, cycle: Cycle, info: dict[str, str]) -> bool:
        sessions = cycle.tight and int(info["vstore_sessions"]) > TIGHT_SESSIONS
        return sessions or (cycle.little and int(info["used_memory"]) > cycle.memory_bytes)

    def _note_start(self, info: dict[str, str]) -> None:
        self._load_s = float(info["load_seconds"])
        self.counts["replayed records"] += int(info["wal_replayed_records"])
        cut = int(info["wal_cut_bytes"])
        self.counts["cut tails"] += cut > 0
        self.counts["bytes cut"] += cut
        if self.counts.pop("clean stop before", 0) and (info["wal_replayed_records"], cut) != ("0", 0):
            raise ViolationError(
                f"after a clean stop {info['wal_replayed_records']} records were replayed, {cut} bytes cut"
            )

    def _load(
        self, server: ServerProcess, life: Life, cycle: Cycle, threads: ThreadPoolExecutor, rng: random.Random
    ) -> None:
        seeds = [random.Random(f"{self.seed}:{cycle.number}:{index}") for index in range(CLIENTS + 2)]
        saver = self._saver
        saver.asked.clear()
        acknowledged = sum(client.acknowledged for client in self.clients)
        running: list[Future[Any]] = [threads.submit(client.load, life, seeds[client.index]) for client in self.clients]
        watching = threads.submit(watch, life, seeds[CLIENTS], self._board)
        running.append(watching)
        if cycle.saves:
            pause_s = 0.05 if cycle.end in SNAPSHOT_ENDS else 0.4
            running.append(threads.submit(saver.run, life, seeds[CLIENTS + 1], pause_s))
        self._wait(running, rng.uniform(*LOAD_S))
        if cycle.end == "term":
            life.stop.set()
            if code := server.stop():
                raise ViolationError(f"SIGTERM: exit code {code}")
            self.counts["clean stop before"] = 1
        else:
            self._kill(server, life, cycle, running, rng)
            self.counts["kills during a snapshot"] += saver.asked.is_set()
            self.counts["snapshots left unfinished"] += (self.directory / f"{SNAPSHOT}.tmp").exists()
        self._results(running)
        self.counts["rows compared under load"] += watching.result()
        self.counts["operations acknowledged"] += sum(client.acknowledged for client in self.clients) - acknowledged
        self.counts["operations in flight"] += sum(len(client.unanswered) for client in self.clients)
        self.counts["snapshots taken"], self.counts["rows compared"] = (
            saver.taken,
            sum(client.rows for client in self.clients),
        )

    def _kill(
        self, server: ServerProcess, life: Life, cycle: Cycle, running: list[Future[Any]], rng: random.Random
    ) -> None:
        """SIGKILL at the moment that the cycle wants."""
        if cycle.end in KILLED_BY_ANOTHER:
            command = [sys.executable, "-I", "-S", str(KILLER), str(server.pid), str(self.directory), cycle.end]
            with subprocess.Popen(command) as killer:
                try:
                    self._await_death(server, killer, running)
                finally:
                    killer.kill()
        elif cycle.end == "snapshot":
            until = time.monotonic() + PATIENCE_S
            while not self._saver.asked.is_set():
                self._wait(running, 0.001)
                if time.monotonic() > until:
                    raise ViolationError("no snapshot was begun")
            durations = self._saver.durations_s or [0.05]
            self._wait(running, rng.uniform(0, 1.1 * sum(durations) / len(durations)))
        life.stop.set()
        server.kill()
        if server.process.returncode != -signal.SIGKILL:
            raise ViolationError(f"the server ended by itself, with exit code {server.process.returncode}")

    def _await_death(self, server: ServerProcess, killer: subprocess.Popen[bytes], running: list[Future[Any]]) -> None:
        """Until another process has killed it. A client may find something wrong before."""
        until = time.monotonic() + PATIENCE_S
        while server.process.poll() is None:
            self._wait(running, 0.01)
            if killer.poll():
                raise RuntimeError(f"{KILLER.name} failed")
            if time.monotonic() > until:
                raise ViolationError("the moment to kill it did not come")

    def _kill_at_once(self, server: ServerProcess, life: Life, threads: ThreadPoolExecutor, rng: random.Random) -> None:
        """SIGKILL while the clients look at what is there; what they find is not kept, but must not be wrong."""
        looks = [threads.submit(self._look, client, life) for client in self.clients]
        self._wait(looks, rng.uniform(0, 0.06))
        life.stop.set()
        server.kill()
        self._results(looks)
        self.counts.pop("clean stop before", 0)

    def _look(self, client: Client, life: Life) -> None:
        if life.tight:
            return  # evictions are under way
        state = client.state, client.doubtful, client.unanswered, client.made
        try:
            client.verify(life.port, tight=self._tight)
        except CONNECTION_ERRORS as error:
            if not life.stop.wait(1.0):
                raise ViolationError(f"the connection broke while the server should be alive: {error!r}") from error
        client.state, client.doubtful, client.unanswered, client.made = state

    def _kill_while_starting(self, cycle: Cycle, rng: random.Random) -> None:
        """SIGKILL at any moment of the start, or while the directory is read and the first segment made."""
        log = self.folder / "start.log"
        command = [sys.executable, "-m", "pion", "server", "--kvcache", "--port", "0", "--dir", str(self.directory)]
        with log.open("w") as output:
            process = subprocess.Popen([*command, *self.options(cycle)], stdout=output, stderr=output)
            try:
                if cycle.end == "replay":
                    until = time.monotonic() + PATIENCE_S
                    while not self._locked_by(process.pid) and process.poll() is None and time.monotonic() < until:
                        time.sleep(0)
                    time.sleep(rng.uniform(0, 2 * self._load_s + 0.01))
                else:
                    time.sleep(rng.uniform(0, 1.2 * self._start_s))
            finally:
                process.kill()
                code = process.wait()
        self._log.writelines([f"{cycle}\n", log.read_text()])
        if code != -signal.SIGKILL:
            raise ViolationError(f"the server ended by itself, with exit code {code}: {log.read_text()}")
        self.counts.pop("clean stop before", 0)
        self.counts[f"ended by: {cycle.end}"] += 1

    def _locked_by(self, pid: int) -> bool:
        try:
            return (self.directory / LOCK).read_text() == f"process {pid}\n"
        except FileNotFoundError:
            return False

    # The last look.

    def _last_look(self, cycle: Cycle) -> None:
        """Verify once more, then what a copy of the last backup alone brings back."""
        self._keep_what_is_there()
        with self._server(cycle) as server, ThreadPoolExecutor(CLIENTS) as threads:
            self._verify(server, cycle, threads)
            with Wire(server.port) as wire:
                if (reply := wire.call(b"KV.PREFIX.SAVE", BACKUPS[0])) != "OK":
                    raise ViolationError(f"KV.PREFIX.SAVE: {reply!r:.200}")
            server.kill()
            self._log.writelines([f"{cycle}\n", *server.log])
        restored = self.folder / "restored"
        restored.mkdir()
        shutil.copy(self.directory / BACKUPS[0].decode(), restored / SNAPSHOT)
        with self._server(cycle, restored) as server, ThreadPoolExecutor(CLIENTS) as threads:
            self._results([threads.submit(client.verify, server.port, tight=False) for client in self.clients])
            server.kill()
            self._log.writelines([f"{cycle}, from {BACKUPS[0].decode()}\n", *server.log])
        self.counts["rows compared"] = sum(client.rows for client in self.clients)

    # Parts.

    def _check_backups(self) -> None:
        """Every path of an acknowledged KV.PREFIX.SAVE has a whole snapshot; other paths have one or nothing."""
        for name in BACKUPS:
            path = self.directory / name.decode()
            if not path.exists():
                if name in self._saver.saved:
                    raise ViolationError(f"the snapshot {path.name} is lost")
                continue
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                tensors: dict[str, Any] = json.loads(file.read(length))
            tensors.pop("__metadata__")
            size = 8 + length + max(tensor["data_offsets"][1] for tensor in tensors.values())
            if size != path.stat().st_size:
                raise ViolationError(f"the snapshot {path.name} should have {size} bytes and has {path.stat().st_size}")

    @property
    def _before(self) -> Path:
        return self.folder / "before"

    def _keep_what_is_there(self) -> None:
        """Links to the files as the last server left them: a server only adds files and removes names."""
        shutil.rmtree(self._before, ignore_errors=True)
        self._before.mkdir()
        for path in self.directory.iterdir() if self.directory.exists() else ():
            os.link(path, self._before / path.name)

    def _wait(self, running: list[Future[Any]], seconds: float) -> None:
        """Let time pass, unless a thread has ended."""
        done, _ = wait(running, seconds, FIRST_EXCEPTION)
        for future in done:
            if (error := future.exception()) is not None:
                raise error

    def _results(self, running: list[Future[Any]]) -> list[Any]:
        return [future.result() for future in running]
