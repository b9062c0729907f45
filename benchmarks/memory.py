"""Resident memory against what the server says it holds, while 2 GiB are stored, fetched, churned and dropped; and
against a byte budget, while ten times of it are stored.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Self

import attrs

from benchmarks._lib import peers, pin
from benchmarks._lib.memory import anonymous_bytes, filled
from benchmarks._lib.raw import RawClient, request, request_head
from benchmarks._lib.report import Report, at_most

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SESSIONS = 64
CHURNS = 3
SETTLE_S = 0.5
"""What a server may use to give memory back."""

METHOD = (
    "Resident is RssAnon of /proc/PID/status; charged is the server's own memory_charged_bytes. The ratio is resident "
    "over charged plus what the empty server has resident.",
    "2 GiB in 64 sessions; one V.STORE per row (rows of 1 KiB pipelined), so each row is a block of its own.",
    "churn, three times: a random half of the sessions is dropped and stored again with other row counts, in random "
    "order, the rest is fetched meanwhile; every second row of some sessions is replaced.",
    "budget: ten times --max-bytes are stored, each session once; the ratio is the highest resident memory, looked at "
    "every 10 ms, over the budget plus the empty server. slow readers: 50 clients ask for a session each and read "
    "nothing.",
)


@attrs.frozen
class Load:
    """A write load of ten times `budget` bytes."""

    what: str
    row_bytes: int
    budget: int
    tier: bool = False
    readers: int = 0


LOADS = (
    Load("rows of 1 MiB", MIB, 512 * MIB),
    Load("rows of 1 MiB, tier", MIB, 512 * MIB, tier=True),
    Load("rows of 1 KiB", KIB, 128 * MIB),
    Load("rows of 1 KiB, tier", KIB, 128 * MIB, tier=True),
    Load("rows of 1 MiB, 50 slow readers", MIB, 512 * MIB, readers=50),
    Load("rows of 1 MiB, tier, 50 slow readers", MIB, 512 * MIB, tier=True, readers=50),
)
SESSION_BYTES = 8 * MIB
"""Stored into one session under a budget."""
LOOK_S = 0.01


@attrs.define
class Filling:
    """The sessions of one run: `rows` of each, all rows `row_bytes` long."""

    client: RawClient
    row_bytes: int
    rows: dict[str, int]

    def store(self, sid: str, rows: int, step: int = 1) -> None:
        """Store rows 0, step, 2 * step, ... of a session, each by a command of its own."""
        data = filled(self.row_bytes, seed=rows)
        if sid not in self.rows:
            self.client.call("V.CREATE", sid, self.row_bytes // 4, "VQUANT", "fp32")
        for chunk in _chunks(range(0, rows, step), max(1, MIB // self.row_bytes)):
            buffers: list[bytes | memoryview] = []
            for row in chunk:
                buffers.append(request_head("V.STORE", sid, 0, row, "AS", "native", payload=self.row_bytes))
                buffers += [memoryview(data), b"\r\n"]
            self.client.send_buffers(buffers)
            for _ in chunk:
                self.client.ok()
        self.rows[sid] = max(rows, self.rows.get(sid, 0))

    def fetch(self, sid: str) -> None:
        """Fetch every row of a session in one command."""
        self.client.send(request("V.FETCH", sid, 0, "RANGE", 0, self.rows[sid], "AS", "native"))
        if len(self.client.bulk()) != self.rows[sid] * self.row_bytes:
            raise AssertionError(f"{sid} came back short")

    def drop(self, sids: list[str]) -> None:
        """Drop sessions."""
        if self.client.call("V.DROP", *sids) != len(sids):
            raise AssertionError("not every session was there to drop")
        for sid in sids:
            del self.rows[sid]


def run(quick: bool) -> Report:
    """Rows of 1 MiB, then of 1 KiB, each on a fresh server."""
    report = Report("memory", "resident against charged memory", quick, METHOD)
    with pin.pinned(pin.CLIENT):
        for row_bytes in (MIB, KIB):
            _measure(report, row_bytes, (64 * MIB if row_bytes == MIB else 4 * MIB) if quick else 2 * GIB)
        for load in LOADS:
            _measure_budget(report, load, (32 * MIB if load.row_bytes > KIB else 4 * MIB) if quick else load.budget)
    return report


def _measure(report: Report, row_bytes: int, total: int) -> None:
    size = "1 MiB" if row_bytes == MIB else "1 KiB"
    shuffle = random.Random(4)
    with peers.pion() as peer, RawClient(peer.port) as client:
        time.sleep(SETTLE_S)
        empty, charged_empty = anonymous_bytes(peer.pid), charged(client)
        report.figure(f"rows of {size}: empty server, resident", "Pion", "MiB", empty / MIB)
        filling = Filling(client, row_bytes, {})
        per_session = max(1, total // row_bytes // SESSIONS)

        def note(stage: str, judged: bool = True) -> None:
            time.sleep(SETTLE_S)
            resident, held = anonymous_bytes(peer.pid), charged(client)
            payload = sum(filling.rows.values()) * row_bytes
            what = f"rows of {size}: {stage}"
            report.figure(f"{what}, resident", "Pion", "MiB", resident / MIB)
            report.figure(f"{what}, charged", "Pion", "MiB", held / MIB)
            report.figure(f"{what}, payload", "Pion", "MiB", payload / MIB)
            target = at_most(1.10) if judged else None
            report.find(f"{what}: resident", resident / (held + empty), against="charged + empty server", target=target)

        began = time.perf_counter()
        for number in range(SESSIONS):
            filling.store(f"s{number}", per_session)
        report.figure(f"rows of {size}: stored", "Pion", "MiB/s", total / MIB / (time.perf_counter() - began))
        note("stored")
        for sid in filling.rows:
            filling.fetch(sid)
        note("fetched")
        for _ in range(CHURNS):
            _churn(filling, per_session, shuffle)
        note("churned")
        filling.drop(shuffle.sample(sorted(filling.rows), len(filling.rows) // 2))
        note("half dropped")
        filling.drop(list(filling.rows))
        note("all dropped", judged=False)
        if charged(client) != charged_empty:
            raise AssertionError(f"{charged(client)} bytes stay charged after everything was dropped")


def _measure_budget(report: Report, load: Load, budget: int) -> None:
    session_bytes = min(SESSION_BYTES, budget // 16)
    rows = max(1, session_bytes // load.row_bytes)
    with peers.data_folder() as folder, ExitStack() as stack:
        tier = ("--tier-dir", str(folder / "tier")) if load.tier else ()
        peer = stack.enter_context(peers.pion("--max-bytes", str(budget), *tier))
        client = stack.enter_context(RawClient(peer.port))
        time.sleep(SETTLE_S)
        empty = anonymous_bytes(peer.pid)
        watch = stack.enter_context(_Watch(peer.pid))
        filling = Filling(client, load.row_bytes, {})
        readers = 0
        began = time.perf_counter()
        sessions = 10 * budget // (rows * load.row_bytes)
        for number in range(sessions):
            filling.store(f"s{number}", rows)
            if readers < load.readers and number * load.readers >= readers * sessions // 2:
                readers += 1
                _slow_reader(stack, peer.port, f"s{number}", rows)
        took = time.perf_counter() - began
        what = f"{load.what}: budget {budget // MIB} MiB"
        report.figure(f"{what}, stored", "Pion", "MiB/s", 10 * budget / MIB / took)
        report.figure(f"{what}, highest resident", "Pion", "MiB", watch.highest / MIB)
        ratio = watch.highest / (budget + empty)
        report.find(f"{what}: resident", ratio, against="budget + empty server", target=at_most(1.10))


def _slow_reader(stack: ExitStack, port: int, sid: str, rows: int) -> None:
    """Asks for a session and takes nothing of it."""
    reader = stack.enter_context(socket.socket())
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect(("127.0.0.1", port))
    reader.sendall(request("V.FETCH", sid, 0, "RANGE", 0, rows, "AS", "native"))


class _Watch:
    """Notes the highest resident memory of a process meanwhile."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.highest = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                self.highest = max(self.highest, anonymous_bytes(self._pid))
            except (OSError, LookupError):  # it has ended
                return


def _churn(filling: Filling, per_session: int, shuffle: random.Random) -> None:
    leaving = shuffle.sample(sorted(filling.rows), len(filling.rows) // 2)
    staying = [sid for sid in filling.rows if sid not in leaving]
    filling.drop(leaving)
    shuffle.shuffle(leaving)
    for number, sid in enumerate(leaving):
        # Other sizes than before, the same on average: from half to one and a half times.
        filling.store(sid, max(1, round(per_session * (0.5 + number / (len(leaving) - 1)))))
        filling.fetch(staying[number % len(staying)])
    for sid in staying[: len(staying) // 4]:
        filling.store(sid, filling.rows[sid], step=2)


def charged(client: RawClient) -> int:
    """`memory_charged_bytes` as the server reports it."""
    for line in client.call("KV.PREFIX.INFO").decode().splitlines():
        if line.startswith("memory_charged_bytes:"):
            return int(line.partition(":")[2])
    raise AssertionError("KV.PREFIX.INFO does not report memory_charged_bytes")


def _chunks(numbers: range, size: int) -> Iterator[range]:
    for first in range(0, len(numbers), size):
        yield numbers[first : first + size]
