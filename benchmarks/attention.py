"""Attention on the server: what it computes against the same call in a process, what the wire adds, and batching."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter_ns
from typing import Any

import numpy as np

from benchmarks._lib import attend, peers
from benchmarks._lib.attend import Shape, Trip
from benchmarks._lib.echo import SETUP
from benchmarks._lib.raw import RawClient
from benchmarks._lib.report import Report, at_least, at_most
from benchmarks._lib.stats import interleave, percentile

ROWS = 2048
HEADS = 8
JUDGED = Shape(HEADS, ROWS, 128)
SHAPES = tuple(Shape(HEADS, ROWS, dim, queries) for dim in (64, 128) for queries in (1, 64))
TURN = 20
"""Calls of one arm before the next arm's turn."""
TURNS = 25
SID = "bench"
AFTER_A_QUERY = "echo right after a query"
CLIENTS = 8
SECONDS = 4.0
CLOSE_TO_FLOAT64 = 1e-4

METHOD = (
    f"One layer of H = {HEADS} heads and N = {ROWS:,} rows, fp32, on the CPU. Server and client may use all cores: the "
    "matrix products do. Turns of calls are interleaved; medians. One client, a blocking socket, one query in flight.",
    "server: the time the server's compute thread counts for its queries (ATTEND.INFO), over those of a turn. It takes "
    "in building the query's array, evaluating, and the answer's array.",
    "in process, MLX: mx.fast.scaled_dot_product_attention on arrays that are there, from a NumPy query to a NumPy "
    "answer. in process, NumPy: two matrix products and a softmax. reading: BLAS dot products over K and over V, which "
    "read each byte once: the least time that any attention can take here.",
    "round trip: from sending the request to the last byte of the answer. overhead: a turn's round trip less what the "
    "server computed in it. echo: the bare Trio server, a request and an answer of the same lengths as on the binary "
    "lane, one after the other; echo right after a query: between two of them the server computes, which takes both "
    "processes out of the processor's caches and their cores out of step, as it does for the query's own round trip.",
    "M single calls: the M queries of one batched call, one after the other over the same lane.",
    f"{CLIENTS} clients: each sends its next query as soon as it has its answer; one process drives them all.",
    "Before timing, each arm's answer is compared with float64.",
)


def run(quick: bool) -> Report:
    """Measure the shapes, then many clients at once."""
    report = Report("attention", "attention where the keys and values live", quick, METHOD)
    turns, calls = (2, 3) if quick else (TURNS, TURN)
    with ExitStack() as stack:
        pion = stack.enter_context(peers.pion("--metal-attention", unix=False))
        pion.unpin()
        echo, _ = stack.enter_context(peers.echo())
        echo.unpin()
        control = stack.enter_context(RawClient(pion.port))
        binary_port = int(control.call("INFO", "server").partition(b"binary_port:")[2].split()[0])
        for shape in SHAPES:
            _measure(report, shape, turns, calls, pion.port, binary_port, echo.port)
        _many(report, pion.port, binary_port, 0.2 if quick else SECONDS)
    return report


def _measure(report: Report, shape: Shape, turns: int, calls: int, port: int, binary_port: int, echo_port: int) -> None:
    what = f"M {shape.queries}, D {shape.dim}"
    keys, values = shape.keys_values()
    q = shape.query()
    with ExitStack() as stack:
        control, resp, binary, echo = (
            stack.enter_context(RawClient(each)) for each in (port, port, binary_port, echo_port)
        )
        attend.store(control, SID, shape, keys, values)
        wire = attend.binary_query(SID, shape, q)
        answer_bytes = attend.binary_answer_bytes(shape)
        echo.send(SETUP.pack(len(wire), answer_bytes))
        trips = {
            "RESP": Trip(resp, attend.resp_query(SID, shape, q), attend.resp_answer_bytes(shape)),
            "binary lane": Trip(binary, wire, answer_bytes),
            "echo": Trip(echo, wire, answer_bytes),
        }
        local = _in_process(keys, values, q)
        expected = _float64(keys, values, q)
        for name, trip in trips.items():
            trip()
            if name != "echo":
                _expect_close(name, trip.output(shape), expected)
        for name in ("MLX", "NumPy"):
            _expect_close(name, local[name](), expected)
        single = Shape(shape.heads, shape.rows, shape.dim)
        one = Trip(binary, attend.binary_query(SID, single, q[:, :1].copy()), attend.binary_answer_bytes(single))

        names = ("RESP", "binary lane", "echo", AFTER_A_QUERY, *local, "M single calls")
        times: dict[str, list[float]] = {name: [] for name in names}
        server: list[float] = []
        overhead: dict[str, list[float]] = {"RESP": [], "binary lane": []}

        def turn(name: str, call: Callable[[], Any], count: int) -> Callable[[], None]:
            def arm() -> None:
                on_server = name in overhead
                before = attend.computed(control) if on_server else None
                took = []
                for _ in range(count):
                    start = perf_counter_ns()
                    call()
                    took.append(perf_counter_ns() - start)
                times[name].append(percentile(sorted(took), 0.5) / 1000)
                if before is not None:
                    spent = attend.computed(control).since(before)
                    server.append(spent.compute_ns / spent.queries / 1000)
                    overhead[name].append((sum(took) - spent.compute_ns) / count / 1000)

            return arm

        def echo_after_a_query() -> None:
            took = []
            for _ in range(calls):
                trips["binary lane"]()
                start = perf_counter_ns()
                trips["echo"]()
                took.append(perf_counter_ns() - start)
            times[AFTER_A_QUERY].append(percentile(sorted(took), 0.5) / 1000)

        def singles() -> None:
            for _ in range(shape.queries):
                one()

        arms = {name: turn(name, trip, calls) for name, trip in trips.items()}
        arms |= {name: turn(name, call, calls) for name, call in local.items()}
        arms[AFTER_A_QUERY] = echo_after_a_query
        if shape.queries > 1:
            arms["M single calls"] = turn("M single calls", singles, 1)
        interleave(arms, turns)

    medians = {name: report.samples(f"{what}", name, "us", samples).p50 for name, samples in times.items() if samples}
    compute = report.samples(what, "server, computing", "us", server).p50
    added = {name: report.samples(f"{what}: overhead", name, "us", samples).p50 for name, samples in overhead.items()}
    judged = shape == JUDGED
    report.find(
        f"{what}: server computing",
        compute / medians["MLX"],
        against="in process, MLX",
        target=at_most(1.15) if judged else None,
    )
    report.find(f"{what}: server computing", compute / medians["NumPy"], against="in process, NumPy")
    report.find(f"{what}: server computing", compute / medians["reading"], against="reading K and V once")
    report.find(
        f"{what}: overhead, binary lane",
        added["binary lane"] / medians["echo"],
        against="bare Trio echo",
        target=at_most(3) if judged else None,
    )
    report.find(
        f"{what}: overhead, binary lane",
        added["binary lane"] / medians[AFTER_A_QUERY],
        against="the echo right after a query",
    )
    report.find(
        f"{what}: overhead, binary lane",
        added["binary lane"] / added["RESP"],
        against="RESP",
        target=at_most(0.85) if judged else None,
    )
    if shape.queries > 1:
        report.find(
            f"{what}: binary lane", medians["M single calls"] / medians["binary lane"], against="M single calls"
        )


def _many(report: Report, port: int, binary_port: int, seconds: float) -> None:
    shape = JUDGED
    keys, values = shape.keys_values()
    wire, answer_bytes = attend.binary_query(SID, shape, shape.query()), attend.binary_answer_bytes(shape)
    rates: dict[int, list[float]] = {1: [], CLIENTS: []}
    with ExitStack() as stack:
        control = stack.enter_context(RawClient(port))
        attend.store(control, SID, shape, keys, values)
        clients = [stack.enter_context(RawClient(binary_port)) for _ in range(CLIENTS)]
        before = attend.computed(control)

        def arm(count: int) -> Callable[[], None]:
            return lambda: rates[count].append(attend.all_at_once(clients[:count], wire, answer_bytes, seconds / 4))

        interleave({str(count): arm(count) for count in rates}, 4)
        spent = attend.computed(control).since(before)
    found = {
        count: report.samples("queries answered, M 1, D 128", f"{count} clients", "1/s", samples).p50
        for count, samples in rates.items()
    }
    report.figure("queries in one call of the device", "both", "queries", spent.queries / spent.batches)
    report.find(
        f"queries a second, {CLIENTS} clients", found[CLIENTS] / found[1], against="1 client", target=at_least(2)
    )


def _in_process(keys: attend.Floats, values: attend.Floats, q: attend.Floats) -> dict[str, Callable[[], Any]]:
    from pion.compute import device

    device.prepare()
    import mlx.core as mx

    scale = keys.shape[-1] ** -0.5
    there = [mx.array(keys)[None], mx.array(values)[None]]
    mx.eval(there)
    transposed = keys.transpose(0, 2, 1)
    flat = keys.reshape(-1), values.reshape(-1)

    def mlx() -> attend.Floats:
        out = mx.fast.scaled_dot_product_attention(mx.array(q)[None], *there, scale=scale)
        mx.eval(out)
        return np.array(out[0])

    def numpy() -> attend.Floats:
        scores = q @ transposed * np.float32(scale)
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, scores)
        scores /= scores.sum(-1, keepdims=True)
        return scores @ values

    return {"MLX": mlx, "NumPy": numpy, "reading": lambda: [np.dot(each, each) for each in flat]}


def _float64(keys: attend.Floats, values: attend.Floats, q: attend.Floats) -> np.ndarray[Any, Any]:
    scores = q.astype(np.float64) @ keys.astype(np.float64).transpose(0, 2, 1) / np.sqrt(keys.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found: np.ndarray[Any, Any] = weights / weights.sum(-1, keepdims=True) @ values.astype(np.float64)
    return found


def _expect_close(name: str, found: attend.Floats, expected: np.ndarray[Any, Any]) -> None:
    worst = float(np.abs(found - expected).max())
    if not worst <= CLOSE_TO_FLOAT64:
        raise RuntimeError(f"{name}: the answer differs from float64 by up to {worst:g}")
