"""Transfers of 1, 8 and 32 MiB in the stored format: Pion, Redis, and a bare blocking socket as the bound.

And a whole prefix by Pion's client: over the binary lane and over RESP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks._lib import peers, pin
from benchmarks._lib.bare import KEEP, SEND, SETUP
from benchmarks._lib.memory import filled
from benchmarks._lib.raw import RawClient, request, request_head
from benchmarks._lib.report import Report, Target, at_least
from benchmarks._lib.stats import interleave
from pion.client import Layer, PionClient

MIB = 1 << 20
SIZES = {1: 20, 8: 10, 32: 8}
"""MiB per transfer -> rounds with each set of servers."""

STARTS = 5
"""Sets of servers, one after the other: which pages a process gets moves its transfers by a tenth, up or down."""

DIM = 1024
ROW_BYTES = 4 * DIM

PREFIX_TOKENS, PREFIX_LAYERS, PREFIX_DIM = 1024, 30, 192
"""A prefix as SmolLM2-135M makes it, in fp32: 47 MB."""
PREFIX_ROUNDS = 30

METHOD = (
    "Client on one core, servers on the other. Every server runs in a process of its own; runs are interleaved, and "
    "spread over several starts of all servers.",
    "bare socket: a blocking Python socket that sends the same reply bytes with one sendmsg, or receives a payload "
    "with the client's own receive code; it parses nothing.",
    "Pion, Redis and the bare socket are read by the same code (benchmarks/_lib/raw.py: recv_into with SO_RCVLOWAT); "
    "payloads are sent with sendmsg, uncopied. Every received buffer is fresh memory, on the client and in the bare "
    "server.",
    "fetch: V.FETCH <sid> 0 RANGE 0 <rows> AS native, and GET. store: V.STOREBATCH <sid> 0 0 <rows> AS native, and "
    "SET; each replaces the value before it. Redis runs with --save '' --appendonly no.",
    "redis-py: redis.Redis().get and .set, with its hiredis parser if that is installed.",
    "A ratio is the other arm's median time over Pion's: 1.8 x is 1.8 times the throughput.",
    f"prefix: {PREFIX_LAYERS} layers, K and V, of {PREFIX_TOKENS:,} tokens x {PREFIX_DIM}, fp32, by "
    "PionClient.prefix_fetch into fresh arrays, over either lane.",
)

Arm = Callable[[], object]
Times = dict[tuple[str, int, str], dict[str, list[float]]]
"""(direction, MiB, lane) -> arm -> seconds."""


def run(quick: bool) -> Report:
    """Measure both directions, three sizes, TCP and a Unix socket."""
    report = Report("bulk", "transfers in the stored format, fetch and store", quick, METHOD)
    times: Times = {}
    with pin.pinned(pin.CLIENT):
        for _ in range(1 if quick else STARTS):
            _measure(report, times, quick)
    for (direction, mib, lane), arms in times.items():
        what = f"{direction} {mib} MiB {lane}"
        medians = {
            name: report.samples(what, name, "ms", [each * 1000 for each in seconds]).p50
            for name, seconds in arms.items()
        }
        for name in arms:
            if name != "Pion":
                target = _target(direction, mib, lane, name)
                report.find(f"{what}: Pion", medians[name] / medians["Pion"], against=name, target=target)
    with pin.pinned(pin.CLIENT):
        _prefix(report, 1 if quick else PREFIX_ROUNDS)
    return report


def _prefix(report: Report, rounds: int) -> None:
    """`PionClient.prefix_fetch` of a whole prefix, into fresh arrays, over both lanes."""
    side = np.random.default_rng(1).standard_normal((PREFIX_TOKENS, PREFIX_DIM), np.float32)
    widths = f"fp32@{PREFIX_DIM}*{PREFIX_LAYERS}"
    what = f"fetch a prefix of {2 * PREFIX_LAYERS * side.nbytes / 1e6:.0f} MB"
    with peers.pion(unix=False) as peer, ExitStack() as stack:
        lanes = {
            name: stack.enter_context(PionClient(port=peer.port, lane=lane))
            for name, lane in (("binary lane", "binary"), ("RESP", "resp"))
        }
        lanes["RESP"].store_prefix("bulk", widths, widths, [Layer(side, -side)] * PREFIX_LAYERS, PREFIX_TOKENS)
        for name, client in lanes.items():
            for rows, expected in zip(client.prefix_fetch("bulk"), [side, -side] * PREFIX_LAYERS, strict=True):
                if rows.tobytes() != expected.tobytes():
                    raise AssertionError(f"{name} delivered other rows than were stored")
        arms = {name: _discard(partial(client.prefix_fetch, "bulk")) for name, client in lanes.items()}
        taken = interleave(arms, rounds)
    medians = {
        name: report.samples(what, name, "ms", [each * 1000 for each in seconds]).p50 for name, seconds in taken.items()
    }
    report.find(f"{what}: binary lane", medians["RESP"] / medians["binary lane"], against="RESP", target=at_least(1))


def _measure(report: Report, times: Times, quick: bool) -> None:
    """With one set of servers: both directions, all sizes, TCP and a Unix socket."""
    with ExitStack() as stack:
        servers = {"Pion": stack.enter_context(peers.pion()), "bare": stack.enter_context(peers.bare())}
        try:
            servers["Redis"] = stack.enter_context(peers.redis())
        except peers.MissingPeerError as missing:
            if str(missing) not in report.missing:
                report.missing.append(str(missing))
        for mib, rounds in SIZES.items():
            payload = filled(mib * MIB)
            for lane in ("TCP", "Unix"):
                for direction, arms in _transfer(servers, payload, lane, 1 if quick else rounds):
                    pooled = times.setdefault((direction, mib, lane), {})
                    for name, seconds in arms.items():
                        pooled.setdefault(name, []).extend(seconds)


def _transfer(
    servers: dict[str, peers.Peer], payload: NDArray[np.uint8], lane: str, rounds: int
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    address = {name: peer.unix if lane == "Unix" else peer.port for name, peer in servers.items()}
    with _pion(address["Pion"], payload) as pion, _bare(address["bare"], payload) as bare:
        arms = [pion, bare]
        with ExitStack() as stack:
            if "Redis" in address:
                arms += [stack.enter_context(_redis(address["Redis"], payload)), _redis_py(address["Redis"], payload)]
            for number, direction in enumerate(("fetch", "store")):
                named = {name: pair[number] for each in arms for name, pair in each.items()}
                if direction == "fetch":
                    _check(named, payload)
                yield direction, interleave({name: _discard(arm) for name, arm in named.items()}, rounds)


def _target(direction: str, mib: int, lane: str, against: str) -> Target | None:
    """The figures that must hold are those of 32 MiB over TCP; the rest is shown."""
    if mib != 32 or lane != "TCP":
        return None
    bounds = {
        "fetch": {"bare socket": 0.95, "Redis": 1.8},
        "store": {"bare socket": 0.85, "Redis": 1.4, "redis-py": 4.0},
    }
    bound = bounds[direction].get(against)
    return None if bound is None else at_least(bound)


def _discard(arm: Arm) -> Callable[[], None]:
    """What an arm received is freed inside its own time, as in a program that goes on."""

    def timed() -> None:
        arm()

    return timed


def _check(arms: dict[str, Arm], payload: NDArray[np.uint8]) -> None:
    """Every arm but the bare socket must deliver the very bytes."""
    expected = payload.tobytes()
    for name, arm in arms.items():
        if name != "bare socket" and bytes(arm()) != expected:  # type: ignore[call-overload]
            raise AssertionError(f"{name} delivered other bytes than were stored")


@contextmanager
def _pion(address: int | str, payload: NDArray[np.uint8]) -> Iterator[dict[str, tuple[Arm, Arm]]]:
    sid, rows = f"bulk{payload.nbytes}", payload.nbytes // ROW_BYTES
    get = request("V.FETCH", sid, 0, "RANGE", 0, rows, "AS", "native")
    put = request_head("V.STOREBATCH", sid, 0, 0, rows, "AS", "native", payload=payload.nbytes)
    with RawClient(address) as client:
        client.call("V.CREATE", sid, DIM, "VQUANT", "fp32")
        store = _storing(client, put, payload)
        store()
        try:
            yield {"Pion": (_fetching(client, get), store)}
        finally:
            client.call("V.DROP", sid)


@contextmanager
def _redis(address: int | str, payload: NDArray[np.uint8]) -> Iterator[dict[str, tuple[Arm, Arm]]]:
    key = f"bulk{payload.nbytes}"
    with RawClient(address) as client:
        # SET's value is its last argument, so the same code stores.
        store = _storing(client, request_head("SET", key, payload=payload.nbytes), payload)
        store()
        yield {"Redis": (_fetching(client, request("GET", key)), store)}
        client.call("DEL", key)


def _redis_py(address: int | str, payload: NDArray[np.uint8]) -> dict[str, tuple[Arm, Arm]]:
    import redis

    client = redis.Redis(unix_socket_path=address) if isinstance(address, str) else redis.Redis(port=address)
    key, value = f"bulk{payload.nbytes}", memoryview(payload)
    client.set(key, value)
    return {"redis-py": (lambda: client.get(key), lambda: client.set(key, value))}


@contextmanager
def _bare(address: int | str, payload: NDArray[np.uint8]) -> Iterator[dict[str, tuple[Arm, Arm]]]:
    """Requests of the same length as Pion's."""
    sid, rows = f"bulk{payload.nbytes}", payload.nbytes // ROW_BYTES
    get = request("V.FETCH", sid, 0, "RANGE", 0, rows, "AS", "native")
    put = request_head("V.STOREBATCH", sid, 0, 0, rows, "AS", "native", payload=payload.nbytes)
    with RawClient(address) as sends, RawClient(address) as keeps:
        sends.send(SETUP.pack(SEND, len(get), payload.nbytes))
        keeps.send(SETUP.pack(KEEP, len(put), payload.nbytes))
        yield {"bare socket": (_fetching(sends, get), _storing(keeps, put, payload))}


def _fetching(client: RawClient, get: bytes) -> Arm:
    def fetch() -> memoryview:
        client.send(get)
        return client.bulk()

    return fetch


def _storing(client: RawClient, head: bytes, payload: NDArray[np.uint8]) -> Arm:
    def store() -> None:
        client.send_buffers((head, payload, b"\r\n"))
        client.ok()

    return store
