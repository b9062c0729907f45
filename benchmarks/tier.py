"""Fetching what has left memory: from the SSD tier through the server, against reading the same file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import attrs

from benchmarks._lib import peers, pin
from benchmarks._lib.bare import SEND, SETUP
from benchmarks._lib.memory import filled, fresh
from benchmarks._lib.raw import RawClient, request, request_head
from benchmarks._lib.report import Report, at_least

MIB = 1 << 20
DIM, LAYERS = 1024, 8
ROW_BYTES = 2 * DIM
PREFIXES = 24
"""Each is fetched for the first time once, so this is the number of samples of it."""

ASK = b"GET"
"""What the bare socket is asked; any three bytes."""

PROMOTED_S = 0.6
"""By then a prefix that was fetched twice is back in memory."""

METHOD = (
    "A prefix is 8 layers of both sides in fp16; all of them together are more than --max-bytes, so most are in the "
    "tier. Files are in the page cache. Client on one core, servers on the other.",
    "first: the first fetch after a start: the server opens and maps the file, compares every row with its checksum, "
    "and sends it. again: the next fetch, from the same mapping.",
    "readinto: a plain Python program (the client) reads the same file into one fresh buffer.",
    "memory: the same prefix while it is in memory. bare socket: a blocking Python socket that sends as many bytes "
    "from memory and parses nothing. All of them are received into one fresh buffer, as readinto reads into one.",
    "A ratio is the other arm's median time over Pion's: 0.7 x is 0.7 times the throughput.",
)


@attrs.frozen
class Tiered:
    """A server with prefixes in its tier, and the tier's directory."""

    peer: peers.Peer
    folder: Path


def run(quick: bool) -> Report:
    """8 and 64 MiB a prefix."""
    report = Report("tier", "fetching from the SSD tier", quick, METHOD)
    with pin.pinned(pin.CLIENT):
        for mib in (8, 64):
            _measure(report, mib, 4 if quick else PREFIXES)
    return report


def _measure(report: Report, mib: int, prefixes: int) -> None:
    tokens = mib * MIB // (2 * LAYERS * ROW_BYTES)
    with peers.data_folder() as folder:
        budget = max(3, prefixes // 4) * mib * MIB
        args = ("--max-bytes", str(budget), "--tier-dir", str(folder / "tier"), "--dir", str(folder / "data"))
        nbytes = mib * MIB
        with peers.pion(*args) as peer, RawClient(peer.port) as client:
            for number in range(prefixes):
                _store(client, f"p{number}", tokens, number)
            _wait_until_placed(client)
            warm = [number for number in range(prefixes) if number >= prefixes - 2]
            in_memory = [_timed(lambda n=number: _fetch(client, f"p{n}", nbytes)) for number in warm for _ in range(4)]
            client.send(request("SHUTDOWN"))
        with (
            peers.pion(*args) as peer,
            RawClient(peer.port) as client,
            peers.bare() as bare,
            RawClient(bare.port) as bare_client,
        ):
            bare_client.send(SETUP.pack(SEND, len(ASK), nbytes))
            files = sorted((folder / "tier").glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
            files = [path for path in files if path.stat().st_size > MIB]
            cold = range(min(len(files), prefixes - budget // (mib * MIB)))
            first, again, plain, wire = [], [], [], []
            for number in cold:
                _readinto(files[number])
                first.append(_timed(lambda n=number: _fetch(client, f"p{n}", nbytes)))
                again.append(_timed(lambda n=number: _fetch(client, f"p{n}", nbytes)))
                plain.append(_timed(lambda n=number: _readinto(files[n])))
                wire.append(_timed(lambda: _receive(bare_client, nbytes)))
                time.sleep(PROMOTED_S)
    what = f"{mib} MiB"
    medians = {
        name: report.samples(what, name, "ms", [each * 1000 for each in samples]).p50
        for name, samples in (
            ("first", first),
            ("again", again),
            ("readinto", plain),
            ("bare socket", wire),
            ("memory", in_memory),
        )
    }
    for name in ("first", "again", "memory"):
        target = at_least(0.7) if name != "memory" else None
        report.find(f"{what}: Pion, {name}", medians["readinto"] / medians[name], against="readinto", target=target)
    report.find(f"{what}: bare socket", medians["readinto"] / medians["bare socket"], against="readinto")


def _store(client: RawClient, name: str, tokens: int, seed: int) -> None:
    client.call("KV.PREFIX.REGISTER", name, DIM, "fp16", "LAYERS", LAYERS, "TOKENS", tokens)
    payload = filled(tokens * ROW_BYTES, seed=seed)
    for side in ("_pk", "_pv"):
        for layer in range(LAYERS):
            head = request_head("V.STOREBATCH", name + side, layer, 0, tokens, "AS", "native", payload=payload.nbytes)
            client.send_buffers((head, payload, b"\r\n"))
            client.ok()


def _fetch(client: RawClient, name: str, nbytes: int) -> None:
    """All rows of a prefix, one side of a layer behind the other in one fresh buffer."""
    client.send(request("KV.PREFIX.FETCH", name, "AS", "native"))
    parts = int(client.line()[1:])
    whole, each = memoryview(fresh(nbytes)), nbytes // parts
    for start in range(0, nbytes, each):
        client.bulk(whole[start : start + each])


def _receive(client: RawClient, nbytes: int) -> None:
    client.send(ASK)
    client.bulk(memoryview(fresh(nbytes)))


def _readinto(path: Path) -> None:
    size = path.stat().st_size
    buffer = memoryview(fresh(size))
    with path.open("rb", buffering=0) as file:
        done = 0
        while done < size:
            done += file.readinto(buffer[done:]) or 0


def _timed(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _wait_until_placed(client: RawClient) -> None:
    """Until the tier has written what it wants to write."""
    before = -1
    while (now := int(_info(client, "tier_demoted"))) != before:
        before = now
        time.sleep(1.0)


def _info(client: RawClient, field: str) -> str:
    for line in client.call("INFO", "tier").decode().splitlines():
        if line.startswith(field + ":"):
            return line.partition(":")[2]
    raise AssertionError(f"INFO does not report {field}")
