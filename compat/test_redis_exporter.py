"""Prometheus's exporter for Redis scrapes a Pion server without an error."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest


def scrape(port: int, *options: str) -> dict[str, str]:
    """The metrics of one scrape, by name with labels."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        listen = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            "prometheus-redis-exporter",
            "-redis.addr",
            f"redis://127.0.0.1:{port}",
            "-web.listen-address",
            f"127.0.0.1:{listen}",
            "-export-client-list",
            "-include-config-metrics",
            *options,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for _ in range(200):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{listen}/metrics", timeout=20) as answer:
                    lines = answer.read().decode().splitlines()
                    break
            except urllib.error.URLError:
                assert process.poll() is None, "the exporter ended"
                time.sleep(0.05)
        else:
            raise AssertionError("the exporter did not start")
    finally:
        process.kill()
        process.communicate()
    return dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("guarded", [False, True], ids=["open", "guarded"])
def test_scrape(request, guarded):
    port = request.getfixturevalue("guarded_pion" if guarded else "pion")
    metrics = scrape(port, *(["-redis.password", "secret"] if guarded else []))
    assert metrics["redis_up"] == "1"
    assert metrics['redis_exporter_last_scrape_error{err=""}'] == "0"
    assert float(metrics["redis_connected_clients"]) >= 1
    assert metrics["redis_config_maxclients"] == "10000"
    assert float(metrics["redis_commands_processed_total"]) > 0
    assert float(metrics["redis_memory_used_bytes"]) >= 0
    assert any(name.startswith("redis_instance_info{") and 'redis_version="7.4.0"' in name for name in metrics)
    assert any(name.startswith("redis_commands_total{") for name in metrics)
    assert float(metrics["redis_slowlog_length"]) >= 0


def test_wrong_password(guarded_pion):
    assert scrape(guarded_pion, "-redis.password", "wrong")["redis_up"] == "0"
