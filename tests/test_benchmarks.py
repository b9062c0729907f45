"""The benchmarks run, report what they promise, and say what they could not compare with. No figure is judged here."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks._lib import echo as echoes
from benchmarks._lib import peers, prober, prompts
from benchmarks._lib.bare import KEEP, SEND, SETUP
from benchmarks._lib.haystack import FACTS, Haystack
from benchmarks._lib.raw import RawClient, ReplyError, request, request_head
from benchmarks._lib.report import Report, at_least, at_most
from benchmarks._lib.stats import interleave, percentile, summarize

ROOT = Path(__file__).resolve().parent.parent
NEEDS_REDIS = {"ttft", "bulk", "small", "start", "wal"}

#: benchmark -> findings that a quick run without Redis must still have.
FINDINGS = {
    "ttft": ["first token after 64 tokens: Pion TCP", "4 greedy tokens identical, 2 prompts"],
    "bulk": ["fetch 32 MiB TCP: Pion", "store 32 MiB TCP: Pion"],
    "small": ["PING, one core: Pion p50", "KV.PREFIX.MEMBERSHIP, one core: Pion p50", "PING p99 under transfers: Pion"],
    "memory": [
        f"rows of {size}: {stage}: resident" for size in ("1 MiB", "1 KiB") for stage in ("churned", "half dropped")
    ],
    "scale": ["LOOKUP server time at 2,000", "MATCH full server time at 2,000", "longest pause while 2,000 register"],
    "start": ["process start to first answer"],
    "wal": [
        *(f"store 32 MiB, {mode}: longest stall" for mode in ("everysec", "no")),
        "store 32 MiB, always: Pion",
        "stores of one row a second, always: 16 clients",
    ],
    "restart": [f"process start to first answer, 0.1 GiB, {files}" for files in ("snapshot", "log")],
    "pause": ["PING p99 during a snapshot", "anonymous memory during a snapshot"],
    "tier": ["8 MiB: Pion, first", "8 MiB: Pion, again"],
    "formats": [
        "mlx4g32 encode: Pion",
        "mlx4g32 decode: Pion",
        "fp8 encode: Pion",
        "turbo2 decode: Pion",
        "fp32 to bf16: Pion",
    ],
    "eviction": ["one model, 10%: value", "two models, 10%: value"],
    "quality": [
        "fp32, alone: tokens that agree, 2 x 8",
        "bf16: tokens that agree, 2 x 8",
        "first token after 64 tokens: fp16",
    ],
    "attention": [
        *(f"M {queries}, D {dim}: server computing" for queries in (1, 64) for dim in (64, 128)),
        "M 1, D 128: overhead, binary lane",
        "M 64, D 128: binary lane",
        "queries a second, 8 clients",
    ],
    "stage2": [
        *(f"first token after 64 tokens: {lane}" for lane in ("in process", "binary lane", "RESP")),
        *(f"decoding after 64 tokens: {lane}" for lane in ("in process", "binary lane", "RESP")),
        *(f"2 greedy tokens identical, 1 prompts: {lane}" for lane in ("in process", "binary lane", "RESP")),
    ],
    "querybatch": ["QUERY, K and V there", "QUERYBATCH"],
    "needle": [
        f"192 tokens, 1 texts: equal: {arm}"
        for arm in ("in process, dense", "binary lane, dense", "in process, 2 blocks", "binary lane, 2 blocks")
    ],
}


def bench(*args: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    # OpenBLAS's threads wait for one another spinning: beside other tests two take many times as long as one.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"} | ({"PATH": path} if path is not None else {})
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *args],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", command.NAMES)
def test_without_redis_everything_else_is_measured_and_the_exit_status_says_so(name, tmp_path):
    empty = tmp_path / "no-programs"
    empty.mkdir()
    done = bench(name, "--quick", "--json", str(tmp_path), path=str(empty))
    expected = command.EXIT_MISSING if name in NEEDS_REDIS else 0
    assert done.returncode == expected, done.stdout + done.stderr
    if name in NEEDS_REDIS:
        assert "apt-get install redis-server" in done.stdout

    text = (tmp_path / f"{name}.json").read_text(encoding="utf-8")
    report = json.loads(text)
    assert report["benchmark"] == name
    assert report["quick"] is True
    assert bool(report["missing"]) is (name in NEEDS_REDIS)
    assert {"cores", "kernel", "python", "versions"} <= report["machine"].keys()
    assert socket.gethostname() not in text
    assert not re.search(r'"[^"]*/(home|tmp|usr|work|root|private|Users)/', text)
    whats = {each["what"] for each in report["findings"]}
    assert set(FINDINGS[name]) <= whats
    for each in report["findings"]:
        assert each.keys() == {"what", "value", "unit", "against", "target", "holds"}
        assert each["holds"] is None, "a quick run must not judge"
        assert each["value"] >= 0
    for each in report["figures"]:
        assert {"what", "arm", "unit", "n", "p50"} <= each.keys()
        assert each["n"] >= 1


def test_unknown_name_is_refused_with_the_known_ones():
    done = bench("bulky")
    assert done.returncode == command.EXIT_USAGE
    assert "no benchmark named bulky" in done.stderr
    assert "ttft, bulk, small, memory, scale, start" in done.stderr


def make_report(quick: bool) -> Report:
    report = Report("demo", "a demonstration", quick)
    report.samples("what", "arm", "ms", [3.0, 1.0, 2.0])
    report.find("good", 0.5, against="other", target=at_most(0.5))
    report.find("bad", 1.7, against="other", target=at_least(1.8))
    report.find("shown only", 9.0)
    return report


def test_report_judges_only_full_runs():
    assert [each.what for each in make_report(False).missed()] == ["bad"]
    assert make_report(True).missed() == []
    holds = {each["what"]: each["holds"] for each in make_report(False).as_json()["findings"]}
    assert holds == {"good": True, "bad": False, "shown only": None}


@pytest.mark.parametrize(("strict", "status"), [(True, command.EXIT_MISSED), (False, 0)])
def test_strict_turns_a_missed_target_into_an_exit_status(monkeypatch, capsys, tmp_path, strict, status):
    module = type("module", (), {"run": staticmethod(lambda quick: make_report(quick))})
    monkeypatch.setattr(command.importlib, "import_module", lambda name: module)
    arguments = ["start", "--json", str(tmp_path), *(["--strict"] if strict else [])]
    assert command.main(arguments) == status
    printed = capsys.readouterr().out
    assert re.search(r"good +0\.50 x +other +at most 0\.5 +holds", printed)
    assert re.search(r"bad +1\.70 x +other +at least 1\.8 +MISSED", printed)
    assert (tmp_path / "demo.json").exists()


def test_percentiles():
    ordered = [float(number) for number in range(101)]
    assert percentile(ordered, 0.99) == 99.0
    summary = summarize([5.0])
    assert (summary.p50, summary.p99, summary.low, summary.high) == (5.0, 5.0, 5.0, 5.0)
    assert summarize([4.0, 1.0, 3.0, 2.0]).p50 == 2.5


def test_interleave_runs_every_arm_once_a_round_and_drops_the_warm_up():
    ran: list[str] = []
    arms = {name: (lambda name=name: ran.append(name)) for name in "abc"}
    samples = interleave(arms, 4, warmup=2, between=lambda: ran.append("-"))
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 4, "b": 4, "c": 4}
    assert ran[1::2] == ["-"] * 18
    rounds = [ran[first : first + 6 : 2] for first in range(0, 36, 6)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1, "the order must change between rounds"


class Scripted:
    """A server that sends given bytes one by one, so that every split of a reply is met."""

    def __init__(self, wire: bytes) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._serve, args=(wire,), daemon=True).start()

    def _serve(self, wire: bytes) -> None:
        accepted, _ = self.listener.accept()
        with accepted:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for number in range(len(wire)):
                accepted.sendall(wire[number : number + 1])

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *exc: object) -> None:
        self.listener.close()


def test_raw_client_reads_replies_at_any_split():
    wire = b"+OK\r\n$5\r\nab\r\nc\r\n:7\r\n*3\r\n$-1\r\n+x\r\n$0\r\n\r\n-ERR no\r\n$3\r\nend\r\n"
    with Scripted(wire) as server, RawClient(server.port) as client:
        client.ok()
        assert bytes(client.bulk()) == b"ab\r\nc"
        assert client.reply() == 7
        assert client.reply() == [None, "x", b""]
        with pytest.raises(ReplyError, match="ERR no"):
            client.reply()
        destination = bytearray(3)
        client.bulk(memoryview(destination))
        assert destination == b"end"
        with pytest.raises(ConnectionError):
            client.line()


def test_requests_are_resp_arrays():
    assert request("GET", b"k\r\n", 12) == b"*3\r\n$3\r\nGET\r\n$3\r\nk\r\n\r\n$2\r\n12\r\n"
    assert request_head("SET", "k", payload=5) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$5\r\n"


@pytest.mark.parametrize("lane", ["port", "unix"])
def test_bare_socket_sends_and_keeps_payloads_of_the_named_size(lane):
    size = 3_000_001
    with peers.bare() as bare:
        address = getattr(bare, lane)
        with RawClient(address) as client:
            client.send(SETUP.pack(SEND, 4, size))
            for _ in range(2):
                client.send(b"give")
                assert bytes(client.bulk()) == b"\1" * size
        with RawClient(address) as client:
            client.send(SETUP.pack(KEEP, 4, size))
            for _ in range(2):
                client.send_buffers((b"take", bytes(size), b"\r\n"))
                client.ok()


def test_echo_servers_answer_with_as_many_bytes_as_told():
    with peers.echo() as both:
        for peer in both:
            with RawClient(peer.port) as client:
                client.send(echoes.SETUP.pack(100_000, 9))
                for _ in range(2):
                    client.send(bytes(100_000))
                    answer = bytearray(9)
                    client.exactly(memoryview(answer))


def test_prober_counts_a_pause_for_every_ping_it_held_up():
    listener = socket.create_server(("127.0.0.1", 0))
    pause_s, interval_us = 0.25, 5000

    def serve() -> None:
        accepted, _ = listener.accept()
        with accepted:
            for number in range(10**6):
                if not accepted.recv(14):
                    return
                if number == 3:
                    threading.Event().wait(pause_s)
                accepted.sendall(b"+PONG\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with listener, prober.probing(listener.getsockname()[1], set(), interval_us) as latencies:
        threading.Event().wait(3 * pause_s)
    assert max(latencies) >= pause_s * 1e6
    # Of the 50 PINGs that were due in the pause, those in its first half waited more than half of it.
    assert sum(each > pause_s * 1e6 / 2 for each in latencies) >= 20


def test_prompts_are_real_text_long_enough_for_every_length():
    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text[::4]]  # about four letters a token

    lengths = prompts.lengths(20, 1024)
    assert max(lengths) == 1024
    assert min(lengths) == 128
    for module, length in zip(prompts.MODULES[1:21], lengths, strict=True):
        assert len(prompts.prefix(encode, module, length)) == length


@pytest.mark.parametrize(("number", "depth"), [(0, 0.05), (4, 0.45), (9, 0.95)])
def test_haystack_hides_a_fact_on_a_line_of_its_own(number, depth):
    def decode(ids: list[int]) -> str:
        return "".join(map(chr, ids))

    text = Haystack(lambda letters: [ord(letter) for letter in letters], decode, 2000)
    hidden = text.hide(number, depth, 1500)
    name, secret = FACTS[number]
    assert len(hidden.ids) == 1500
    assert hidden.ids[: hidden.before] == text.ids[: hidden.before]
    assert f"The secret number of {name} is {secret}." in decode(hidden.ids).split("\n")
    assert str(secret) not in decode(text.ids)
    assert hidden.answer == str(secret)
    assert abs(hidden.before / 1500 - depth) < 0.15
    assert name in decode(hidden.question)
