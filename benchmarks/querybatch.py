"""K and V sent once and asked many times, against K and V sent with every question."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from benchmarks._lib import attend, peers
from benchmarks._lib.attend import Shape
from benchmarks._lib.raw import RawClient, request_head
from benchmarks._lib.report import Report, at_least, at_most
from benchmarks._lib.stats import interleave

SHAPE = Shape(8, 2048, 64)
ROUNDS = 60
SID = "bench"

METHOD = (
    f"H {SHAPE.heads}, N {SHAPE.rows:,}, D {SHAPE.dim}, top_k = N, fp32, over RESP on TCP, one client, interleaved "
    "calls, medians. Large arguments are sent as they are, without joining them.",
    "QUERYBATCH: Q, K and V travel with every call. STORE: K and V to the server's compute device, replacing what is "
    "there. QUERY: Q only.",
)


def run(quick: bool) -> Report:
    """Measure the three calls."""
    report = Report("querybatch", "keys and values sent once or with every question", quick, METHOD)
    keys, values = SHAPE.keys_values()
    q = SHAPE.query()
    store_head = request_head("ATTEND.PREFIX.STORE", SID, 0, SHAPE.heads, SHAPE.rows, SHAPE.dim, payload=keys.nbytes)
    store_head = b"*8" + store_head[2:]  # one more argument follows the keys
    batch_head = request_head(
        "ATTEND.QUERYBATCH", SHAPE.heads, SHAPE.rows, SHAPE.dim, SHAPE.rows, q.tobytes(), payload=keys.nbytes
    )
    batch_head = b"*8" + batch_head[2:]
    between = b"\r\n$%d\r\n" % values.nbytes
    raw = [memoryview(each).cast("B") for each in (keys, values)]
    query = attend.resp_query(SID, SHAPE, q)
    answers: dict[str, bytes] = {}
    with ExitStack() as stack:
        pion = stack.enter_context(peers.pion("--metal-attention", unix=False))
        pion.unpin()
        client = stack.enter_context(RawClient(pion.port))

        def store() -> None:
            client.send_buffers([store_head, raw[0], between, raw[1], b"\r\n"])
            client.ok()

        def batch() -> None:
            client.send_buffers([batch_head, raw[0], between, raw[1], b"\r\n"])
            answers["QUERYBATCH"] = bytes(client.bulk())

        def ask() -> None:
            client.send(query)
            answers["QUERY"] = bytes(client.bulk())

        store()
        times = interleave({"QUERYBATCH": batch, "STORE": store, "QUERY": ask}, 3 if quick else ROUNDS, warmup=3)
    found = [np.frombuffer(answers[name], np.float32) for name in ("QUERY", "QUERYBATCH")]
    if not np.allclose(*found, rtol=0, atol=1e-5):
        raise RuntimeError("QUERY and QUERYBATCH answer differently")
    p50 = {name: report.samples("one call", name, "ms", [1000 * each for each in times[name]]).p50 for name in times}
    report.find(
        "QUERY, K and V there", p50["QUERYBATCH"] / p50["QUERY"], against="QUERYBATCH, times slower", target=at_least(3)
    )
    report.find(
        "QUERYBATCH", p50["QUERYBATCH"] / (p50["STORE"] + p50["QUERY"]), against="STORE and QUERY", target=at_most(1.2)
    )
    return report
