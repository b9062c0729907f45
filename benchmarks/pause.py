"""What other clients feel while a snapshot of 2 GiB is written under a load of stores, and what memory it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks._lib import load, peers, pin, prober
from benchmarks._lib.memory import filled
from benchmarks._lib.raw import RawClient, request_head
from benchmarks._lib.report import Report, at_most

MIB = 1 << 20
STORED_BYTES = 2 << 30
SESSIONS = 128
DIM = 1024
ROW_BYTES = 4 * DIM
LOAD_BYTES = MIB
SECONDS = 10.0
SNAPSHOTS = 5

METHOD = (
    "2 GiB in 128 sessions of 16 layers. The load stores values of 1 MiB without a pause, each in place of an older "
    "one (16 by turns); a PING is sent every 1 ms; one that takes longer also counts for those that were due "
    "meanwhile. Load and PING client on one core, the server on any.",
    "quiet: nothing else happens. load: only the stores. snapshot: the stores, and KV.PREFIX.SAVE five times, one "
    "after the other; only what was measured while one was written counts.",
    "anonymous memory: RssAnon of the server, read every 20 ms; the highest during snapshots over the highest during "
    "the load alone. (The load's values and what is being received change; stored data does not.)",
)


def run(quick: bool) -> Report:
    """Fill a server, then measure quiet, under load, and while it saves."""
    report = Report("pause", "a snapshot beside running commands", quick, METHOD)
    stored = STORED_BYTES // 64 if quick else STORED_BYTES
    seconds = 0.3 if quick else SECONDS
    with (
        peers.data_folder() as path,
        pin.pinned(pin.CLIENT),
        peers.pion("--dir", str(path / "data"), "--max-sessions", "1024", "--wal-limit", "1000") as peer,
    ):
        peer.unpin()
        _fill(peer, stored)
        with RawClient(peer.port, timeout_s=600) as client:
            client.call("KV.PREFIX.SAVE")  # so that the log of the filling is gone
        with prober.probing(peer.port, pin.CLIENT) as quiet:
            time.sleep(seconds)
        with load.transferring("pion-stores", peer.port, LOAD_BYTES, pin.CLIENT) as stores:
            with prober.probing(peer.port, pin.CLIENT) as loaded, _highest_anonymous(peer.pid) as alone:
                time.sleep(seconds)
            with (
                RawClient(peer.port, timeout_s=600) as client,
                prober.probing(peer.port, pin.CLIENT) as saving,
                _highest_anonymous(peer.pid) as during,
            ):
                began = time.perf_counter()
                for _ in range(1 if quick else SNAPSHOTS):
                    client.call("KV.PREFIX.SAVE")
                took = time.perf_counter() - began
    arms = {"quiet": quiet, "load": loaded, "load and snapshot": saving}
    summaries = {
        name: report.samples("PING", name, "ms", [each / 1000 for each in latencies])
        for name, latencies in arms.items()
    }
    report.figure("one snapshot", "2 GiB under load", "s", took / (1 if quick else SNAPSHOTS))
    report.figure("stores of 1 MiB meanwhile, load included", "", "stores", stores[0])
    report.find("PING p99 during a snapshot", summaries["load and snapshot"].p99, unit="ms", target=at_most(20))
    for name in ("quiet", "load"):
        report.find(
            "PING p50 during a snapshot", summaries["load and snapshot"].p50 / summaries[name].p50, against=name
        )
        report.find(
            "PING p99 during a snapshot", summaries["load and snapshot"].p99 / summaries[name].p99, against=name
        )
    for name, highest in (("load", alone), ("load and snapshot", during)):
        report.figure("anonymous memory, highest", name, "MiB", highest[0] / MIB)
    if alone[0]:
        report.find("anonymous memory during a snapshot", during[0] / alone[0], against="load", target=at_most(1.05))
    return report


def _fill(peer: peers.Peer, nbytes: int) -> None:
    layers = 16
    rows = nbytes // SESSIONS // layers // ROW_BYTES
    payload = filled(rows * ROW_BYTES)
    with RawClient(peer.port) as client:
        for number in range(SESSIONS):
            client.call("V.CREATE", f"pause{number}", DIM, "VQUANT", "fp32")
            for layer in range(layers):
                head = request_head(
                    "V.STOREBATCH", f"pause{number}", layer, 0, rows, "AS", "native", payload=payload.nbytes
                )
                client.send_buffers((head, payload, b"\r\n"))
                client.ok()


@contextmanager
def _highest_anonymous(pid: int) -> Iterator[list[int]]:
    """Afterwards the list holds the highest RssAnon of the process, in bytes; 0 where the system doesn't tell."""
    highest = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            highest[0] = max(highest[0], _anonymous(pid))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield highest
    finally:
        ended.set()
        watcher.join()


def _anonymous(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except FileNotFoundError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
