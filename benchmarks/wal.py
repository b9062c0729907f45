"""The log: stores in the three modes against Redis with the same appendfsync and against the disk itself."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from benchmarks._lib import peers, pin
from benchmarks._lib.memory import filled
from benchmarks._lib.raw import RawClient, request, request_head
from benchmarks._lib.report import Report, at_least, at_most
from pion.storage.disk import full_sync

MIB = 1 << 20
VALUE_BYTES = 32 * MIB
KEYS = 4
"""Values stored by turns, each replacing the one before it."""
DIM = 1024
ROW_BYTES = 4 * DIM
SECONDS = 10.0
ROUNDS = 3
CLIENTS = 16
MODES = ("everysec", "no", "always")

METHOD = (
    "Stores of 32 MiB by one client for 10 s, values replaced by turns (4 of them), in 3 interleaved rounds; the disk "
    "is let come to rest (sync) between two runs; each server starts on an empty directory of the same file system.",
    "Pion: --wal-sync MODE, otherwise its defaults, snapshots included. Redis: --appendonly yes --appendfsync MODE "
    "--save '', otherwise its defaults, rewriting included.",
    "disk: the same bytes appended to one file with write(2); with everysec fdatasync once a second in between, with "
    "always after each 32 MiB.",
    "Client on one core, the servers on any; both are sent the same buffers by the same code. A ratio is Pion's MiB/s "
    "over the other's.",
    "The longest stall is the longest time between sending a value and its answer, over all rounds.",
    "small: rows of 2 KiB, V.STORE and always; 16 clients with one command in flight each against one client; "
    "a core each for clients and server.",
)

Sample = tuple[float, list[float]]
"""Stores a second, and the seconds of each."""


def run(quick: bool) -> Report:
    """Measure large stores in each mode, then small ones under `always`."""
    report = Report("wal", "stores that survive", quick, METHOD)
    seconds, rounds = (0.3, 1) if quick else (SECONDS, ROUNDS)
    payload = filled(VALUE_BYTES)
    try:
        peers.program("redis-server")
        with_redis = True
    except peers.MissingPeerError as missing:
        report.missing.append(str(missing))
        with_redis = False
    with pin.pinned(pin.CLIENT):
        for mode in MODES:
            arms = _arms(mode, payload, with_redis)
            taken: dict[str, list[Sample]] = {name: [] for name in arms}
            for number in range(rounds):
                for name in sorted(arms, reverse=bool(number % 2)):
                    os.sync()
                    taken[name].append(arms[name](seconds))
            _judge(report, mode, taken)
        _small(report, 0.3 if quick else 5.0, rounds, with_redis)
    return report


def _judge(report: Report, mode: str, taken: dict[str, list[Sample]]) -> None:
    what = f"store 32 MiB, {mode}"
    rates = {
        name: report.samples(what, name, "MiB/s", [rate * VALUE_BYTES / MIB for rate, _ in samples]).p50
        for name, samples in taken.items()
    }
    for name, samples in taken.items():
        times = [each * 1000 for _, seconds in samples for each in seconds]
        longest = report.samples(f"{what}: each", name, "ms", times).high
        if name == "Pion":
            report.find(f"{what}: longest stall", longest, unit="ms", target=None if mode == "always" else at_most(300))
    for name, rate in rates.items():
        if name == "Pion":
            continue
        bounds = {("Redis", "everysec"): 1.3, ("Redis", "no"): 1.3, ("disk", "always"): 0.7}
        bound = bounds.get((name, mode))
        report.find(f"{what}: Pion", rates["Pion"] / rate, against=name, target=at_least(bound) if bound else None)


def _arms(mode: str, payload: NDArray[np.uint8], with_redis: bool) -> dict[str, Callable[[float], Sample]]:
    arms: dict[str, Callable[[float], Sample]] = {
        "Pion": lambda seconds: _pion(mode, payload, seconds),
        "disk": lambda seconds: _disk(mode, payload, seconds),
    }
    if with_redis:
        arms["Redis"] = lambda seconds: _redis(mode, payload, seconds)
    return arms


def _pion(mode: str, payload: NDArray[np.uint8], seconds: float) -> Sample:
    rows = payload.nbytes // ROW_BYTES
    heads = [
        request_head("V.STOREBATCH", f"wal{key}", 0, 0, rows, "AS", "native", payload=payload.nbytes)
        for key in range(KEYS)
    ]
    with durable_pion(mode) as peer, RawClient(peer.port) as client:
        for key in range(KEYS):
            client.call("V.CREATE", f"wal{key}", DIM, "VQUANT", "fp32")
        return _storing(client, heads, payload, seconds)


def _redis(mode: str, payload: NDArray[np.uint8], seconds: float) -> Sample:
    heads = [request_head("SET", f"wal{key}", payload=payload.nbytes) for key in range(KEYS)]
    with durable_redis(mode) as peer, RawClient(peer.port) as client:
        return _storing(client, heads, payload, seconds)


def _storing(client: RawClient, heads: list[bytes], payload: NDArray[np.uint8], seconds: float) -> Sample:
    times: list[float] = []
    start = now = time.perf_counter()
    while now - start < seconds:
        client.send_buffers((heads[len(times) % KEYS], payload, b"\r\n"))
        client.ok()
        before, now = now, time.perf_counter()
        times.append(now - before)
    return len(times) / (now - start), times


def _disk(mode: str, payload: NDArray[np.uint8], seconds: float) -> Sample:
    times: list[float] = []
    with peers.data_folder() as path, (path / "log").open("wb", buffering=0) as file:
        start = now = synced = time.perf_counter()
        while now - start < seconds:
            view = memoryview(payload)
            while view:
                view = view[file.write(view) :]
            if mode == "always" or (mode == "everysec" and time.perf_counter() - synced > 1):
                full_sync(file.fileno())
                synced = time.perf_counter()
            before, now = now, time.perf_counter()
            times.append(now - before)
    return len(times) / (now - start), times


@contextmanager
def durable_pion(mode: str, *args: str) -> Iterator[peers.Peer]:
    """A server on an empty data directory; it is killed at the end, as nobody wants its last snapshot."""
    with peers.data_folder() as path, peers.pion("--wal-sync", mode, "--dir", str(path / "data"), *args) as peer:
        peer.unpin()
        yield peer
        with RawClient(peer.port) as client:
            client.send(request("SHUTDOWN", "NOSAVE", "NOW"))


@contextmanager
def durable_redis(mode: str) -> Iterator[peers.Peer]:
    """A Redis server on an empty data directory."""
    with peers.redis("--appendonly", "yes", "--appendfsync", mode) as peer:
        peer.unpin()
        yield peer


def _small(report: Report, seconds: float, rounds: int, with_redis: bool) -> None:
    what = "stores of one row a second, always"
    rates: dict[str, list[float]] = {}
    for _ in range(rounds):
        for clients in (1, CLIENTS):
            os.sync()
            with durable_pion("always") as peer:
                peer.pin(pin.OTHER)
                with RawClient(peer.port) as client:
                    client.call("V.CREATE", "small", DIM, "VQUANT", "fp16")
                row = bytes(2 * DIM)
                command = request("V.STORE", "small", 0, 0, "AS", "native", row)
                rates.setdefault(f"Pion, {clients} clients", []).append(_rate(peer, command, clients, seconds))
            if with_redis:
                with durable_redis("always") as peer:
                    peer.pin(pin.OTHER)
                    command = request("SET", "small", row)
                    rates.setdefault(f"Redis, {clients} clients", []).append(_rate(peer, command, clients, seconds))
    medians = {name: report.samples(what, name, "stores/s", taken).p50 for name, taken in rates.items()}
    many = medians[f"Pion, {CLIENTS} clients"]
    report.find(f"{what}: {CLIENTS} clients", many / medians["Pion, 1 clients"], against="1 client", target=at_least(4))
    if with_redis:
        report.find(f"{what}: {CLIENTS} clients, Pion", many / medians[f"Redis, {CLIENTS} clients"], against="Redis")


def _rate(peer: peers.Peer, command: bytes, clients: int, seconds: float) -> float:
    """Stores a second of several clients, each of which sends the next when it has its answer."""
    poll = select.poll()
    open_clients = {}
    for _ in range(clients):
        client = RawClient(peer.port)
        open_clients[client.socket.fileno()] = client
        poll.register(client.socket, select.POLLIN)
    try:
        for client in open_clients.values():
            client.send(command)
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for descriptor, _ in poll.poll():
                client = open_clients[descriptor]
                client.ok()
                client.send(command)
                done += 1
        took = time.perf_counter() - start
        for client in open_clients.values():
            client.ok()
        return done / took
    finally:
        for client in open_clients.values():
            client.close()
