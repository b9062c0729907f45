"""A client that sends PING on a schedule and reports every latency: what another client feels under a load.

Runs in a process of its own: `python -m benchmarks._lib.prober PORT INTERVAL_US`. It prints `ready` and 1 if it could
raise its priority, else 0; probes until its standard input is closed; then prints the latencies in us as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from benchmarks._lib import pin
from benchmarks._lib.raw import RawClient, request

PING = request("PING")

PRIORITY = -15
"""Niceness of the prober: what it measures is the server, not its own wait for a core."""


def main() -> None:
    """Probe. A long pause counts for every PING that was due in it, so it isn't one sample among thousands."""
    port, interval_s = int(sys.argv[1]), int(sys.argv[2]) / 1e6
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    latencies: list[float] = []
    answer = memoryview(bytearray(7))
    gc.disable()
    raised = raise_priority()
    with RawClient(port) as client:
        print(f"ready {raised:d}", flush=True)
        while not ended.is_set():
            time.sleep(interval_s)
            start = perf_counter()
            client.send(PING)
            client.exactly(answer)
            took = perf_counter() - start
            # What the PINGs that were due meanwhile would have seen.
            while took > 0:
                latencies.append(took * 1e6)
                took -= interval_s
    print(json.dumps([round(each, 1) for each in latencies]))


def raise_priority() -> bool:
    """Wake before the load's own client, with which the prober shares a core; False where that isn't allowed."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    except OSError:
        return False
    return True


class Latencies(list[float]):
    """Microseconds. `raised`: the prober could raise its priority; without, its own waits for a core count, too."""

    raised = False


@contextmanager
def probing(port: int, where: set[int], interval_us: int = 1000) -> Iterator[Latencies]:
    """Probe a server during the block; afterwards the yielded list holds the latencies in microseconds."""
    latencies = Latencies()
    command = [sys.executable, "-m", "benchmarks._lib.prober", str(port), str(interval_us)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        pin.pin(process.pid, where)
        greeting = process.stdout.readline() if process.stdout is not None else ""
        if greeting not in ("ready 0\n", "ready 1\n"):
            raise RuntimeError("the prober did not start")
        latencies.raised = greeting == "ready 1\n"
        yield latencies
        output, _ = process.communicate(timeout=120)
        latencies.extend(json.loads(output))
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
