"""Small commands: round trips on one core and on two, pipelined throughput, and PING while others move megabytes."""

from __future__ import annotations

import csv
import io
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter_ns

import attrs
import numpy as np

from benchmarks._lib import load, peers, pin, prober
from benchmarks._lib.echo import SETUP
from benchmarks._lib.raw import RawClient, request
from benchmarks._lib.report import Report, at_least, at_most
from benchmarks._lib.stats import interleave

HASHES = 1562
BLOCK_TOKENS = 64
NAMESPACE = "bench|small"
TURN = 200
"""Round trips of one arm before the next arm's turn."""
TURNS = 60
PIPELINE = 100
LOAD_BYTES = 32 << 20

METHOD = (
    "One client, one command in flight, blocking socket; client and server pinned together on one core, then on a core "
    "each. Every server has a process of its own; turns of 200 round trips are interleaved; percentiles over all.",
    "bare Trio echo: trio.serve_tcp, receive_some and send_all; takes a request of the same length and answers with as "
    "many bytes as Pion does, parsing nothing. bare Trio sockets: the same, but non-blocking recv and send come first.",
    "Pion runs with its defaults; the second Pion with --busy-poll 0 shows what looking for the next request gives.",
    "MEMBERSHIP: K = N = 1,562 hashes, the probes shuffled, half of them in the table.",
    "pipelined: redis-benchmark -P 100 -c 1 on one core, the server on the other; median of interleaved runs.",
    "under load: a second client stores and fetches 32 MiB values without a pause while a PING is sent every 1 ms; one "
    "that takes longer also counts for those that were due meanwhile. The PING client runs on the server's core "
    "and the transferring one on the other, as a kernel that doesn't preempt its own copying would count its delays; "
    "the PING client has the higher priority where the system allows it.",
    "A ratio is Pion's p50 over the other's.",
)


@attrs.frozen
class Call:
    """A command whose reply always has the same length."""

    name: str
    wire: bytes
    reply: bytes
    bound: float | None
    """Largest allowed ratio to the bare echo."""


def run(quick: bool) -> Report:
    """Measure round trips, pipelining, and PING under load."""
    report = Report("small", "small commands", quick, METHOD)
    with ExitStack() as stack:
        stack.enter_context(pin.pinned(pin.CLIENT))
        pion = stack.enter_context(peers.pion())
        sleeping = stack.enter_context(peers.pion("--busy-poll", "0"))
        streams, sockets = stack.enter_context(peers.echo())
        redis: peers.Peer | None = None
        try:
            redis = stack.enter_context(peers.redis())
            peers.program("redis-benchmark")
        except peers.MissingPeerError as missing:
            report.missing.append(str(missing))
        prepare(sleeping)
        calls = prepare(pion)
        for where, cores in (("one core", pin.CLIENT), ("two cores", pin.OTHER)):
            if where == "two cores" and not pin.HAS_TWO:
                report.missing.append("round trips on two cores: this machine lends one")
                continue
            for each in filter(None, (pion, sleeping, streams, redis)):
                each.pin(cores)
            for call in calls:
                others = {"Pion, --busy-poll 0": sleeping, "bare Trio echo": streams, "bare Trio sockets": sockets}
                _round_trips(report, call, where, pion, others, redis, 2 if quick else TURNS)
        for each in filter(None, (pion, sleeping, streams, redis)):
            each.pin(pin.OTHER)
        if redis is not None and not report.missing:
            _pipelined(report, pion, redis, 10_000 if quick else 500_000, 1 if quick else 7)
        _under_load(report, pion, redis, 0.3 if quick else 10.0)
    return report


def prepare(pion: peers.Peer) -> list[Call]:
    """Register the namespace and check each command's answer once."""
    random = np.random.default_rng(3)
    table = random.integers(0, 2**63, HASHES, np.uint64)
    strangers = random.integers(2**63, 2**64 - 1, HASHES // 2, np.uint64)
    probes = random.permutation(np.concatenate([random.permutation(table)[: HASHES - len(strangers)], strangers]))
    expected = np.packbits(np.isin(probes, table), bitorder="little").tobytes()
    with RawClient(pion.port) as client:
        client.call("KV.PREFIX.REGISTER", NAMESPACE, 512, "fp16", "BLOCKS", BLOCK_TOKENS, HASHES, table.tobytes())
    calls = [
        Call("PING", request("PING"), b"+PONG\r\n", 1.15),
        Call("KV.PREFIX.LOOKUP", request("KV.PREFIX.LOOKUP", NAMESPACE), b"+HIT\r\n", None),
        Call(
            "KV.PREFIX.MEMBERSHIP",
            request("KV.PREFIX.MEMBERSHIP", NAMESPACE, HASHES, probes.tobytes()),
            b"$%d\r\n%b\r\n" % (len(expected), expected),
            1.8,
        ),
    ]
    with RawClient(pion.port) as client:
        for call in calls:
            client.send(call.wire)
            answer = bytearray(len(call.reply))
            client.exactly(memoryview(answer))
            if answer != call.reply:
                raise AssertionError(f"{call.name} answered {bytes(answer[:60])!r}")
    return calls


def _round_trips(
    report: Report,
    call: Call,
    where: str,
    pion: peers.Peer,
    others: dict[str, peers.Peer],
    redis: peers.Peer | None,
    turns: int,
) -> None:
    ping = Call("PING", request("PING"), b"+PONG\r\n", None)
    with ExitStack() as stack:
        arms: dict[str, tuple[RawClient, Call]] = {"Pion": (stack.enter_context(RawClient(pion.port)), call)}
        for name, peer in others.items():
            client = stack.enter_context(RawClient(peer.port))
            if name.startswith("bare"):
                client.send(SETUP.pack(len(call.wire), len(call.reply)))
            arms[name] = (client, call)
        if redis is not None:
            arms["Redis PING"] = (stack.enter_context(RawClient(redis.port)), ping)
        samples: dict[str, list[float]] = {name: [] for name in arms}
        timed = {name: _turn(client, each, samples[name]) for name, (client, each) in arms.items()}
        interleave(timed, turns, warmup=0)
    # The first turn of each arm warms it up.
    what = f"{call.name}, {where}"
    medians = {name: report.samples(what, name, "us", taken[TURN:]).p50 for name, taken in samples.items()}
    for name, median in medians.items():
        if name != "Pion":
            target = at_most(call.bound) if call.bound and name == "bare Trio echo" else None
            report.find(f"{what}: Pion p50", medians["Pion"] / median, against=name, target=target)


def _turn(client: RawClient, call: Call, samples: list[float]) -> Callable[[], None]:
    answer = memoryview(bytearray(len(call.reply)))

    def turn() -> None:
        for _ in range(TURN):
            start = perf_counter_ns()
            client.send(call.wire)
            client.exactly(answer)
            samples.append((perf_counter_ns() - start) / 1000)

    return turn


def _pipelined(report: Report, pion: peers.Peer, redis: peers.Peer, requests: int, rounds: int) -> None:
    lookup = ("KV.PREFIX.LOOKUP", NAMESPACE)
    arms = {
        "Pion PING": (pion, ("PING",)),
        "Pion KV.PREFIX.LOOKUP": (pion, lookup),
        "Redis PING": (redis, ("PING",)),
    }
    rates: dict[str, list[float]] = {name: [] for name in arms}

    def arm(name: str) -> Callable[[], None]:
        peer, command = arms[name]
        return lambda: rates[name].append(redis_benchmark(peer, command, requests))

    interleave({name: arm(name) for name in arms}, rounds, warmup=1)
    medians = {}
    for name, taken in rates.items():
        medians[name] = report.samples("pipelined, -P 100 -c 1", name, "commands/s", taken[1:]).p50
    for name, bound in (("Pion PING", 250_000), ("Pion KV.PREFIX.LOOKUP", 150_000)):
        report.find(f"pipelined {name}", medians[name], unit="commands/s", target=at_least(bound))
    report.find("pipelined PING: Pion's rate", medians["Pion PING"] / medians["Redis PING"], against="Redis")


def redis_benchmark(peer: peers.Peer, command: tuple[str, ...], requests: int) -> float:
    """Commands per second as redis-benchmark counts them. Raises MissingPeerError, or RuntimeError if it failed."""
    tool = peers.program("redis-benchmark")
    arguments = [tool, "-h", "127.0.0.1", "-p", str(peer.port), "-P", str(PIPELINE), "-c", "1", "-n", str(requests)]
    done = subprocess.run([*arguments, "--csv", *command], capture_output=True, text=True, timeout=300)
    rows = [row for row in csv.reader(io.StringIO(done.stdout)) if len(row) > 1 and row[0] != "test"]
    if done.returncode or len(rows) != 1:
        raise RuntimeError(f"redis-benchmark failed: {done.stderr or done.stdout}")
    return float(rows[0][1])


def _under_load(report: Report, pion: peers.Peer, redis: peers.Peer | None, seconds: float) -> None:
    for name, peer in (("pion", pion), ("redis", redis)):
        if peer is None:
            continue
        label = name.capitalize()
        with (
            load.transferring(name, peer.port, LOAD_BYTES, pin.CLIENT) as transfers,
            prober.probing(peer.port, pin.OTHER) as latencies,
        ):
            time.sleep(seconds)
        summary = report.samples(
            "PING while 32 MiB values are stored and fetched", label, "ms", [each / 1000 for each in latencies]
        )
        report.figure("the prober's priority was raised", label, "1 yes, 0 no", float(latencies.raised))
        report.figure("transfers meanwhile", label, "32 MiB transfers", transfers[0])
        target = at_most(3.0) if label == "Pion" else None
        report.find(f"PING p99 under transfers: {label}", summary.p99, unit="ms", target=target)
