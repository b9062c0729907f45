"""Restart on 0.1, 1 and 4 GiB: time to the first answer, and until every stored byte was read and compared."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from benchmarks._lib import peers
from benchmarks._lib.memory import filled
from benchmarks._lib.raw import RawClient, ReplyError, request, request_head
from benchmarks._lib.report import Report, at_most
from benchmarks._lib.stats import interleave

GIB = 1 << 30
SIZES = {"0.1 GiB": GIB // 10, "1 GiB": GIB, "4 GiB": 4 * GIB}
PREFIXES = 100
LAYERS = 30
DIM = 512
ROW_BYTES = 2 * DIM
ROUNDS = 7

METHOD = (
    "100 declared prefixes of 30 layers in fp16; the files are in the page cache, as after a restart of the process. "
    "The clock runs from the fork to +HIT for the last prefix, asked for by connecting every millisecond.",
    "snapshot: the server was stopped with SIGTERM, so all is in the snapshot. log: it was killed with SIGKILL, so all "
    "is in the log (--wal-limit 1000).",
    "verified: from the fork until all prefixes were fetched, which compares every checksum; against reading the same "
    "files with readinto in another process.",
    "Starts of all sizes are interleaved.",
)


@attrs.frozen
class Arm:
    """A data directory and how it was left."""

    size: str
    left: str
    path: Path

    @property
    def name(self) -> str:
        """As the report shows it."""
        return f"{self.size}, {self.left}"


def run(quick: bool) -> Report:
    """Fill directories, then start servers on them by turns."""
    report = Report("restart", "restart", quick, METHOD)
    sizes = {"0.1 GiB": GIB // 100} if quick else SIZES
    with peers.data_folder() as root:
        arms: list[Arm] = []
        for size, nbytes in sizes.items():
            for left in ("snapshot", "log"):
                arm = Arm(size, left, root / f"{left}-{nbytes}")
                _fill(arm, nbytes)
                arms.append(arm)
        first: dict[str, list[float]] = {arm.name: [] for arm in arms}
        starts = {arm.name: _starting(arm, first[arm.name]) for arm in arms}
        interleave(starts, 1 if quick else ROUNDS)
        whole: dict[str, list[float]] = {arm.name: [] for arm in arms}
        reads: dict[str, Callable[[], None]] = {f"read, {arm.name}": _reading(arm) for arm in arms}
        verifies = {arm.name: _verifying(arm, whole[arm.name]) for arm in arms}
        times = interleave({**verifies, **reads}, 1 if quick else 3)
    medians = {
        name: report.samples("process start to first answer", name, "s", taken[1:]).p50 for name, taken in first.items()
    }
    for name, median in medians.items():
        target = None if name.startswith("0.1") else at_most(1.5)
        report.find(f"process start to first answer, {name}", median, unit="s", target=target)
    if not quick:
        for left in ("snapshot", "log"):
            ratio = medians[f"4 GiB, {left}"] / medians[f"1 GiB, {left}"]
            report.find(f"first answer, {left}: 4 GiB", ratio, against="1 GiB", target=at_most(1.2))
    for arm in arms:
        verified = report.samples("process start to all verified", arm.name, "s", whole[arm.name][1:]).p50
        read = report.samples("reading the files", arm.name, "s", times[f"read, {arm.name}"]).p50
        report.find(f"all verified, {arm.name}", verified / read, against="reading the files")
    return report


def _fill(arm: Arm, nbytes: int) -> None:
    """Store so many bytes, then end the server."""
    tokens = max(1, nbytes // (PREFIXES * LAYERS * 2 * ROW_BYTES))
    payload = filled(tokens * ROW_BYTES)
    with _server(arm.path, "--wal-limit", "1000") as (process, port):
        with RawClient(port) as client:
            for number in range(PREFIXES):
                ns = f"restart{number}"
                client.call("KV.PREFIX.REGISTER", ns, DIM, "fp16", "LAYERS", LAYERS, "TOKENS", tokens)
                for layer in range(LAYERS):
                    for side in ("_pk", "_pv"):
                        head = request_head(
                            "V.STOREBATCH", ns + side, layer, 0, tokens, "AS", "native", payload=payload.nbytes
                        )
                        client.send_buffers((head, payload, b"\r\n"))
                        client.ok()
        if arm.left == "log":
            process.kill()
        else:
            process.terminate()
        process.wait(300)


@contextmanager
def _server(directory: Path, *args: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server on a directory, from the fork to its first answer about the last prefix."""
    port = peers.free_port()
    command = [sys.executable, "-m", "pion", "server", "--kvcache", "--log-level", "warning", "--grace", "300"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        [*command, "--port", str(port), "--binary-port", "0", "--dir", str(directory), *args],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait(process, port)
        yield process, port
    finally:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    while process.poll() is None:
        try:
            with RawClient(port) as client:
                if client.call("KV.PREFIX.LOOKUP", f"restart{PREFIXES - 1}") in ("HIT", "MISS"):
                    return
        except ConnectionRefusedError:
            time.sleep(0.001)
    raise RuntimeError(f"pion-server ended with status {process.returncode}")


def _starting(arm: Arm, answers: list[float]) -> Callable[[], None]:
    def start() -> None:
        began = time.perf_counter()
        with _server(arm.path) as (_, port):
            answers.append(time.perf_counter() - began)
            with RawClient(port) as client:
                if client.call("KV.PREFIX.LOOKUP", "restart0") != "HIT":
                    raise AssertionError(f"{arm.name}: the prefixes are not there")

    return start


def _verifying(arm: Arm, answers: list[float]) -> Callable[[], None]:
    def start() -> None:
        began = time.perf_counter()
        with _server(arm.path) as (_, port), RawClient(port, timeout_s=600) as client:
            for number in range(PREFIXES):
                client.send(request("KV.PREFIX.FETCH", f"restart{number}", "AS", "native"))
                head = client.line()
                if head != b"*%d" % (2 * LAYERS):
                    raise ReplyError(head.decode("utf-8", "replace"))
                for _ in range(2 * LAYERS):
                    client.bulk()
            answers.append(time.perf_counter() - began)

    return start


def _reading(arm: Arm) -> Callable[[], None]:
    program = (
        "import sys\n"
        "buffer = memoryview(bytearray(1 << 20))\n"
        "for name in sys.argv[1:]:\n"
        "    with open(name, 'rb', buffering=0) as file:\n"
        "        while file.readinto(buffer): pass\n"
    )

    def read() -> None:
        files = [str(each) for each in sorted(arm.path.iterdir()) if each.is_file()]
        subprocess.run([sys.executable, "-c", program, *files], check=True)

    return read
