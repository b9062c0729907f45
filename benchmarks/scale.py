"""LOOKUP and MATCH at a thousand, a hundred thousand and a million namespaces, and the pauses while they register."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter_ns

import attrs
import numpy as np
from numpy.typing import NDArray

from benchmarks._lib import peers, pin, prober
from benchmarks._lib.memory import anonymous_bytes
from benchmarks._lib.raw import RawClient, request
from benchmarks._lib.report import Report, at_most
from benchmarks._lib.stats import interleave

LEVELS = (1_000, 100_000, 1_000_000)
QUICK_LEVELS = (500, 1_000, 2_000)
BLOCK_TOKENS = 64
BLOCKS = 8
LONG_BLOCKS = 1562
LONG = 64
"""Namespaces with a table of 1,562 blocks; the others have 8."""
SHARED = 2
"""Leading blocks that a group of namespaces has in common, as prompts with one system message do."""
GROUP = 16
BATCH = 256
"""REGISTERs in flight while registering."""
LOOKUPS, MATCHES = 500, 25
"""Calls of one turn."""
TURNS = 40

METHOD = (
    "One server per level, all alive at once; turns of 500 LOOKUPs and 25 MATCHes are interleaved among the levels. "
    "LOOKUPs hit namespaces drawn evenly from all.",
    "Server time is the handler's own: the difference of usec in INFO commandstats over a turn, per call; medians of "
    "turns. Round trips are the client's, one call in flight, a core each for client and server.",
    "A namespace lists 8 blocks of 64 tokens, the first 2 shared by 16 namespaces; 64 namespaces list 1,562. MATCH "
    "sends 1,562 hashes: all of one such namespace (full), its first half and then others (half), or strangers (miss).",
    "The longest pause is that of a client in its own process that sends a PING every millisecond while another "
    "registers, 256 requests in flight.",
)


@attrs.frozen
class Level:
    """A server that holds `count` namespaces."""

    count: int
    peer: peers.Peer
    client: RawClient
    probes: dict[str, list[bytes]]


def run(quick: bool) -> Report:
    """Fill the servers, then ask them in turns."""
    report = Report("scale", "server time by the number of namespaces", quick, METHOD)
    counts = QUICK_LEVELS if quick else LEVELS
    with ExitStack() as stack:
        stack.enter_context(pin.pinned(pin.CLIENT))
        levels = [_fill(report, stack, count) for count in counts]
        costs: dict[tuple[str, int], list[float]] = {}
        trips: dict[tuple[str, int], list[float]] = {}
        for kind in levels[0].probes:
            calls = LOOKUPS if kind == "LOOKUP" else MATCHES

            def turn(level: Level, kind: str = kind, calls: int = calls) -> Callable[[], None]:
                server, trip = costs.setdefault((kind, level.count), []), trips.setdefault((kind, level.count), [])
                return lambda: _turn(level, kind, calls, server, trip)

            interleave({str(level.count): turn(level) for level in levels}, 2 if quick else TURNS)
        for kind in levels[0].probes:
            medians = {}
            for count in counts:
                # The first turn warms up.
                found = report.samples(f"{kind}, server time", f"{count:,} namespaces", "us", costs[kind, count][1:])
                medians[count] = found.p50
                report.samples(f"{kind}, round trip", f"{count:,} namespaces", "us", trips[kind, count])
            for count in counts[1:]:
                bound = 1.5 if kind == "LOOKUP" else 2.0
                target = at_most(bound) if count == LEVELS[-1] else None
                report.find(
                    f"{kind} server time at {count:,}",
                    medians[count] / medians[counts[0]],
                    against=f"{counts[0]:,} namespaces",
                    target=target,
                )
    return report


def _turn(level: Level, kind: str, calls: int, server: list[float], trips: list[float]) -> None:
    command = "kv.prefix.lookup" if kind == "LOOKUP" else "kv.prefix.match"
    requests = level.probes[kind]
    chosen = np.random.default_rng(len(trips)).integers(0, len(requests), calls).tolist()
    before = command_time(level.client, command)
    for index in chosen:
        start = perf_counter_ns()
        level.client.send(requests[index])
        level.client.reply()
        trips.append((perf_counter_ns() - start) / 1000)
    after = command_time(level.client, command)
    server.append((after[1] - before[1]) / (after[0] - before[0]))


def command_time(client: RawClient, command: str) -> tuple[int, float]:
    """Calls and microseconds of a command so far, from INFO commandstats; zero before its first call."""
    for line in client.call("INFO", "commandstats").decode().splitlines():
        name, _, rest = line.partition(":")
        if name.lower() == f"cmdstat_{command}":
            fields = dict(part.split("=") for part in rest.split(","))
            return int(fields["calls"]), float(fields["usec"])
    return 0, 0.0


def _name(number: int) -> str:
    return f"scale|llama|{number:016x}"


def hashes(count: int, seed: int = 11) -> NDArray[np.uint64]:
    """The block tables: row i is namespace i; a group shares its first blocks."""
    random = np.random.default_rng(seed)
    table = random.integers(0, 2**64 - 1, (count, BLOCKS), np.uint64)
    table[:, :SHARED] = table[np.arange(count) // GROUP * GROUP, :SHARED]
    return table


def long_hashes(seed: int = 12) -> NDArray[np.uint64]:
    """The tables of the long namespaces."""
    return np.random.default_rng(seed).integers(0, 2**64 - 1, (LONG, LONG_BLOCKS), np.uint64)


def _fill(report: Report, stack: ExitStack, count: int) -> Level:
    peer = stack.enter_context(peers.pion("--max-sessions", str(2 * count + 2 * LONG + 2), unix=False))
    client = stack.enter_context(RawClient(peer.port))
    empty = anonymous_bytes(peer.pid)
    long = long_hashes()
    short = hashes(count - LONG)

    def register(number: int) -> bytes:
        row = short[number] if number < len(short) else long[number - len(short)]
        return request(
            "KV.PREFIX.REGISTER", _name(number), 512, "fp16", "BLOCKS", BLOCK_TOKENS, len(row), row.tobytes()
        )

    batches = [
        b"".join(register(number) for number in range(first, min(first + BATCH, count)))
        for first in range(0, count, BATCH)
    ]
    start = time.perf_counter()
    with prober.probing(peer.port, pin.CLIENT) as pauses:
        for number, batch in enumerate(batches):
            client.send(batch)
            for _ in range(min(BATCH, count - number * BATCH)):
                client.ok()
    took = time.perf_counter() - start
    arm = f"{count:,} namespaces"
    report.figure("registered", arm, "namespaces/s", count / took)
    report.samples("PING while registering", arm, "ms", [each / 1000 for each in pauses])
    report.figure("the prober's priority was raised", arm, "1 yes, 0 no", float(pauses.raised))
    report.figure("resident memory", arm, "bytes a namespace", (anonymous_bytes(peer.pid) - empty) / count)
    target = at_most(250.0) if count == LEVELS[-1] else None
    report.find(f"longest pause while {count:,} register", max(pauses) / 1000, unit="ms", target=target)
    return Level(count, peer, client, _probes(client, count, long))


def _probes(client: RawClient, count: int, long: NDArray[np.uint64]) -> dict[str, list[bytes]]:
    random = np.random.default_rng(5)
    names = random.integers(0, count, min(count, 20_000)).tolist()
    unknown = random.integers(0, 2**64 - 1, (LONG, LONG_BLOCKS), np.uint64)
    half = long.copy()
    half[:, LONG_BLOCKS // 2 :] = unknown[:, LONG_BLOCKS // 2 :]

    def match(rows: NDArray[np.uint64]) -> list[bytes]:
        return [request("KV.PREFIX.MATCH", LONG_BLOCKS, row.tobytes()) for row in rows]

    probes = {
        "LOOKUP": [request("KV.PREFIX.LOOKUP", _name(number)) for number in names],
        "MATCH full": match(long),
        "MATCH half": match(half),
        "MATCH miss": match(unknown),
    }
    expected = {"LOOKUP": "HIT", "MATCH full": LONG_BLOCKS, "MATCH half": LONG_BLOCKS // 2, "MATCH miss": None}
    for kind, answer in expected.items():
        client.send(probes[kind][0])
        found = client.reply()
        blocks = found[1] if isinstance(found, list) else found
        if blocks != answer:
            raise AssertionError(f"{kind} answered {found!r}, expected {answer!r}")
    return probes
