"""INFO, without sockets."""

import re

import pytest

from pion.commands.info import format_sections
from pion.config import REDIS_VERSION, Config
from pion.context import Context, InfoSection, Session
from pion.replies import OK
from pion.testing import FakeClock, make_harness, running_server


def sections(text: str) -> dict[str, dict[str, str]]:
    """Parse as strictly as the strictest client: CRLF, titles, `field:value`, blank lines between sections."""
    found: dict[str, dict[str, str]] = {}
    for block in text.split("\r\n\r\n"):
        title, *rows = block.removesuffix("\r\n").split("\r\n")
        assert title.startswith("# ")
        fields = dict(row.split(":", 1) for row in rows)
        assert len(fields) == len(rows) or title == "# Modules"
        found[title.removeprefix("# ")] = fields
    return found


async def info(harness, *names) -> dict[str, dict[str, str]]:
    return sections(await harness.call("INFO", *names))


async def test_what_clients_need(harness):
    everything = {field: value for rows in (await info(harness)).values() for field, value in rows.items()}
    assert everything["redis_version"] == REDIS_VERSION
    assert everything["redis_mode"] == "standalone"
    assert everything["arch_bits"] in ("32", "64")
    assert everything["loading"] == "0"
    assert everything["role"] == "master"
    assert everything["cluster_enabled"] == "0"
    assert everything["maxmemory"] == "0"
    assert int(everything["used_memory"]) >= 0


async def test_default_leaves_the_long_sections_out(harness):
    plain = await info(harness)
    assert {"Server", "Clients", "Memory", "Persistence", "Stats", "Replication", "CPU", "Modules"} <= plain.keys()
    assert {"Errorstats", "Cluster", "Keyspace", "Pion"} <= plain.keys()
    assert "Commandstats" not in plain
    assert (await info(harness, "default")).keys() == plain.keys()
    for word in ("all", "EVERYTHING"):
        assert (await info(harness, word)).keys() == plain.keys() | {"Commandstats"}
    assert (await info(harness, "commandstats", "DEFAULT")).keys() == plain.keys() | {"Commandstats"}


async def test_sections_by_name(harness):
    assert list(await info(harness, "cpu", "Replication", "cpu")) == ["Replication", "CPU"]
    assert await harness.call("INFO", "nosuch") == ""
    assert list(await info(harness, "nosuch", "CLUSTER")) == ["Cluster"]
    assert await harness.call("INFO", b"\xff\r\n", memoryview(b"x" * 40_000)) == ""


async def test_uptime_and_time_follow_the_clock():
    clock = FakeClock()
    harness = make_harness(clock=clock)
    clock.advance(90_000.5)
    server = (await info(harness, "server"))["Server"]
    assert (server["uptime_in_seconds"], server["uptime_in_days"]) == ("90000", "1")
    assert server["server_time_usec"] == str(int(clock.wall_s() * 1e6))


async def test_run_id_is_of_the_run(harness):
    server = (await info(harness, "server"))["Server"]
    assert re.fullmatch("[0-9a-f]{40}", server["run_id"])
    assert (await info(harness, "server"))["Server"]["run_id"] == server["run_id"]
    assert (await info(make_harness(), "server"))["Server"]["run_id"] != server["run_id"]


async def test_clients_and_stats_count():
    harness = make_harness(Config(max_clients=5))
    other = harness.client()
    await other.call("PING")
    assert (await info(harness, "clients"))["Clients"]["connected_clients"] == "2"
    assert (await info(harness, "clients"))["Clients"]["maxclients"] == "5"
    other.disconnect()
    await harness.call("NOSUCH")
    stats = (await info(harness, "clients", "stats"))["Stats"]
    assert stats["total_connections_received"] == "2"
    assert stats["total_commands_processed"] == "4"
    assert stats["total_error_replies"] == "1"
    assert (await info(harness, "clients"))["Clients"]["connected_clients"] == "1"


async def test_commandstats_and_errorstats():
    harness = make_harness(Config(requirepass="x"))
    await harness.call("PING")
    await harness.call("AUTH", "default", "y")
    await harness.call("AUTH", "x")
    await harness.call("SELECT", 3)
    await harness.call("ECHO")
    await harness.call("CLIENT", "ID")
    await harness.call("MULTI")
    await harness.call("NOSUCH")
    await harness.call("EXEC")
    rows = (await info(harness, "commandstats"))["Commandstats"]
    number = r"\d+(\.\d\d)?"
    for name, calls, rejected, failed in [
        ("ping", 0, 1, 0),
        ("auth", 2, 0, 1),
        ("select", 1, 0, 1),
        ("echo", 0, 1, 0),
        ("client|id", 1, 0, 0),
    ]:
        pattern = f"calls={calls},usec={number},usec_per_call={number},rejected_calls={rejected},failed_calls={failed}"
        assert re.fullmatch(pattern, rows[f"cmdstat_{name}"]), (name, rows)
    assert (await info(harness, "errorstats"))["Errorstats"] == {
        "errorstat_ERR": "count=3",
        "errorstat_EXECABORT": "count=1",
        "errorstat_NOAUTH": "count=1",
        "errorstat_WRONGPASS": "count=1",
    }


async def test_persistence_of_a_server_that_keeps_nothing(harness):
    assert (await info(harness, "persistence"))["Persistence"] == {
        "loading": "0",
        "rdb_bgsave_in_progress": "0",
        "aof_enabled": "0",
        "data_directory": "",
    }


async def test_persistence_follows_the_log_and_the_snapshot(tmp_path):
    async def ask(*args) -> dict[str, str]:
        context = Context(session, server.services, server.worker.dispatcher)
        reply = await server.worker.dispatcher.execute(context, [arg.encode() for arg in args])
        return sections(reply)["Persistence"] if args[0] == "INFO" else {"reply": reply}

    session = Session(id=1, addr="", laddr="", authenticated=True)
    config = Config(kvcache=True, wal_sync="always")
    async with running_server(config, directory=tmp_path) as server:
        empty = await ask("INFO", "persistence")
        assert empty["aof_enabled"] == "1"
        assert empty["aof_last_write_status"] == empty["rdb_last_bgsave_status"] == "ok"
        assert empty["data_directory"] == str(tmp_path)
        assert empty["wal_sync"] == "always"
        assert empty["changes_refused"] == empty["snapshot_last_error"] == ""
        assert (empty["wal_segments"], empty["wal_records"], empty["snapshot_age_seconds"]) == ("1", "0", "-1")
        await ask("V.CREATE", "a", "1", "VQUANT", "fp32")
        await ask("V.CREATE", "b", "1", "VQUANT", "fp32")
        full = await ask("INFO", "persistence")
        assert (full["wal_records"], full["wal_sequence"], full["wal_durable_sequence"]) == ("2", "2", "2")
        assert int(full["wal_bytes"]) == int(empty["wal_bytes"]) + int(full["wal_written_bytes"])
        assert int(full["wal_flushes"]) == 2
        assert (await ask("KV.PREFIX.SAVE"))["reply"] == OK
        saved = await ask("INFO", "persistence")
        assert (saved["snapshots_taken"], saved["rdb_bgsave_in_progress"]) == ("1", "0")
        assert int(saved["snapshot_bytes"]) == (tmp_path / "pion.vstore.0").stat().st_size
        assert int(saved["snapshot_age_seconds"]) >= 0
        assert saved["wal_bytes"] == empty["wal_bytes"]
        await ask("V.DROP", "b")
    async with running_server(config, directory=tmp_path) as server:
        again = await ask("INFO", "persistence")
        assert (again["wal_replayed_records"], again["wal_cut_bytes"], again["wal_sequence"]) == ("1", "0", "3")
        assert float(again["load_seconds"]) > 0
        assert (again["mapped_bytes"], again["checksum_failures"]) == ("0", "0")


async def test_modules_are_the_plugins(harness):
    text = await harness.call("INFO", "modules")
    assert "module:name=server,ver=1\r\n" in text


def test_values_cannot_break_a_line():
    text = format_sections([InfoSection("A", lambda: [("path", "x\r\nrole:slave"), ("yes", True), ("half", 0.5)])])
    assert text == "# A\r\npath:x  role:slave\r\nyes:1\r\nhalf:0.5\r\n"


def test_plugins_may_add_to_a_section():
    text = format_sections(
        [
            InfoSection("A", lambda: [("a", 1)]),
            InfoSection("B", list),
            InfoSection("A", lambda: [("c", 2)]),
        ]
    )
    assert text == "# A\r\na:1\r\nc:2\r\n\r\n# B\r\n"


@pytest.mark.parametrize("plugins", ["connection,server", "all,-stats"])
async def test_without_the_stats_family_there_is_no_receipt(plugins):
    assert "# Pion" not in await make_harness(Config(plugins=plugins)).call("INFO", "all")
