"""Small records: receipt, monitor, process tuning, logs."""

from __future__ import annotations

import gc
import json
import logging
import resource
import subprocess
import sys
import threading

import pytest
import trio
import trio.testing

from pion import logs, process
from pion.limits import CONVERSION_THREADS
from pion.monitor import Monitor
from pion.receipt import Receipt
from pion.replies import ITEM_BYTES, NO_REPLY, Blob, Map, Simple, Static, held_bytes
from pion.testing import make_harness


def test_receipt_keeps_measured_and_estimated_apart() -> None:
    receipt = Receipt()
    receipt.hit(1000, None)
    receipt.hit(10, 250.0)
    receipt.kvprefix_misses += 1
    rows = dict(receipt.rows(worker=0, uptime_s=3.9))
    assert len(rows) == 16
    assert rows["kvprefix_hits"] == 2
    assert rows["kvprefix_tokens_served"] == 1010
    assert rows["prefill_seconds_avoided_estimated"] == 0.555
    assert rows["prefill_seconds_avoided_measured"] == 0.25
    assert rows["prefill_seconds_avoided"] == 0.805
    assert rows["uptime_seconds"] == 3
    receipt.reset()
    assert set(dict(receipt.rows(worker=0, uptime_s=0)).values()) == {0}


def test_slow_log_is_bounded_and_newest_first() -> None:
    monitor = Monitor(slower_than_us=-1, max_len=2)
    for index in range(3):
        monitor.record_slow([b"CMD", b"%d" % index], 5000, at_s=1.0, addr="a", client_name=b"n")
    assert [entry.argv[1] for entry in monitor.slow(10)] == [b"2", b"1"]
    assert [entry.id for entry in monitor.slow(1)] == [2]
    monitor.configure(slower_than_us=5, max_len=1)
    assert (monitor.slow_len(), monitor.slower_than_ns) == (1, 5000)
    monitor.reset_slow()
    assert monitor.slow_len() == 0


def test_slow_log_cuts_many_arguments() -> None:
    monitor = Monitor(slower_than_us=0, max_len=1)
    monitor.record_slow([b"x"] * 100, 1, at_s=0, addr="", client_name=b"")
    assert monitor.slow(1)[0].argv[-1] == b"... (69 more arguments)"


def test_simple_strings_hold_no_line_break() -> None:
    with pytest.raises(ValueError, match="line break"):
        Simple("a\r\n-ERR")


def test_allocator_is_left_alone_where_it_is_not_glibc() -> None:
    assert process.tune_allocator("darwin") is False


def test_process_tuning() -> None:
    code = (
        "import gc, sys; from pion import process;"
        "ok = process.tune_allocator(); process.tune_gc();"
        "sys.exit(0 if gc.get_threshold() == process.GC_THRESHOLDS and gc.get_freeze_count() > 0"
        " and ok == sys.platform.startswith('linux') else 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert gc.get_threshold() != process.GC_THRESHOLDS


def test_descriptor_limit_says_how_many_clients_fit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, soft), hard))
        assert process.raise_descriptor_limit(100) == 100
        assert process.raise_descriptor_limit(10**9) <= 10**9
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_descriptor_limit_falls_back_to_what_macos_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    limit = [256]

    def set_limit(which: int, limits: tuple[int, int]) -> None:
        asked.append(limits[0])
        if limits[0] > process.OPEN_MAX:
            raise ValueError("current limit exceeds maximum limit")
        limit[0] = limits[0]

    monkeypatch.setattr(resource, "setrlimit", set_limit)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit[0], resource.RLIM_INFINITY))
    assert process.raise_descriptor_limit(50_000) == process.OPEN_MAX - process.SPARE_DESCRIPTORS
    assert asked == [50_000 + process.SPARE_DESCRIPTORS, process.OPEN_MAX]


def test_what_a_reply_holds_itself() -> None:
    assert held_bytes(b"x" * 1000) == 1000 + ITEM_BYTES
    assert held_bytes(["x" * 10, [1, None]]) == 10 + 5 * ITEM_BYTES
    assert held_bytes(Map([("a", 2.5)])) == 1 + 3 * ITEM_BYTES
    for shared in (memoryview(bytes(10**6)), Blob([bytes(10**6)], 10**6), Static("x" * 10**6), NO_REPLY):
        assert held_bytes(shared) == ITEM_BYTES
    with pytest.raises(TypeError, match="dict is not a reply"):
        held_bytes([1, {}])


async def test_conversions_share_a_few_threads() -> None:
    harness = make_harness()
    go_on = threading.Event()
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(3 * CONVERSION_THREADS):
                nursery.start_soon(harness.context.in_thread, go_on.wait)
            await trio.testing.wait_all_tasks_blocked()
            statistics = harness.services.threads.statistics()
            go_on.set()
    finally:
        go_on.set()
    assert statistics.borrowed_tokens == CONVERSION_THREADS
    assert statistics.tasks_waiting == 2 * CONVERSION_THREADS


def test_json_logs_are_one_object_a_line() -> None:
    record = logging.LogRecord("pion.net", logging.WARNING, "f", 1, "a\n%s", ("b",), None)
    event = json.loads(logs.JsonFormatter().format(record))
    assert (event["level"], event["logger"], event["message"]) == ("warning", "pion.net", "a\nb")
    assert event["time"].endswith("Z")
    assert "\n" not in logs.JsonFormatter().format(record)
