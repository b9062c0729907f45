"""A second client that fetches and stores values in turn, or only stores, until its standard input is closed.

Runs in a process of its own: `python -m benchmarks._lib.load pion|redis|pion-stores PORT BYTES`. It prints `ready` once
the first values are stored, and at the end how many transfers it made.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from benchmarks._lib import pin
from benchmarks._lib.memory import filled, keep_buffers_fresh
from benchmarks._lib.raw import RawClient, request, request_head

DIM = 1024
STORED_BY_TURNS = 16
"""Values that the kind which only stores replaces one after the other."""


def main() -> None:
    """Transfer."""
    kind, port, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    keep_buffers_fresh()
    payload, rows = filled(nbytes), nbytes // (4 * DIM)
    if kind == "pion-stores":
        store(port, payload, rows)
        return
    if kind == "pion":
        get = request("V.FETCH", "load", 0, "RANGE", 0, rows, "AS", "native")
        put = request_head("V.STOREBATCH", "load", 0, 0, rows, "AS", "native", payload=nbytes)
    else:
        get, put = request("GET", "load"), request_head("SET", "load", payload=nbytes)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    transfers = 0
    with RawClient(port) as client:
        if kind == "pion":
            client.call("V.CREATE", "load", DIM, "VQUANT", "fp32")
        while not ended.is_set():
            client.send_buffers((put, payload, b"\r\n"))
            client.ok()
            client.send(get)
            client.bulk()
            transfers += 2
            if transfers == 2:
                print("ready", flush=True)
    print(transfers)


def store(port: int, payload: NDArray[np.uint8], rows: int) -> None:
    """Only store, each value in place of an older one."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    sids = [f"load{number}" for number in range(STORED_BY_TURNS)]
    puts = [request_head("V.STOREBATCH", sid, 0, 0, rows, "AS", "native", payload=payload.nbytes) for sid in sids]
    transfers = 0
    with RawClient(port) as client:
        for sid in sids:
            client.call("V.CREATE", sid, DIM, "VQUANT", "fp32")
        while not ended.is_set():
            client.send_buffers((puts[transfers % STORED_BY_TURNS], payload, b"\r\n"))
            client.ok()
            transfers += 1
            if transfers == 2 * STORED_BY_TURNS:
                print("ready", flush=True)
    print(transfers)


@contextmanager
def transferring(kind: str, port: int, nbytes: int, where: set[int]) -> Iterator[list[int]]:
    """Load a server during the block; afterwards the yielded list holds the number of transfers."""
    done: list[int] = []
    command = [sys.executable, "-m", "benchmarks._lib.load", kind, str(port), str(nbytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        pin.pin(process.pid, where)
        if process.stdout is None or process.stdout.readline() != "ready\n":
            raise RuntimeError("the load did not start")
        yield done
        output, _ = process.communicate(timeout=120)
        done.append(int(output))
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
