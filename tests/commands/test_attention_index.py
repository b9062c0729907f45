"""KV.STORE, KV.FETCH, KV.INFO, KV.DROP and ATTEND.QUERY: answers, refusals, memory, and what survives what."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.client import PionClient
from pion.client.errors import OutOfMemoryError, ServerError
from pion.commands.attention_index_common import indexes_of
from pion.config import KIB, Config
from pion.plugins import BUILTIN_PLUGINS, KVCACHE_PLUGINS
from pion.replies import Blob, ErrorReply, Map
from pion.storage import attention_index_log
from pion.storage.attention_index import INDEX_COST, PIECE_COST
from pion.storage.segments import snapshot_name
from pion.testing import ServerProcess, make_harness, running_server
from tests.commands.attention_index_support import ask, make, oracle, random_rows, state_of, store
from tests.commands.kv_support import plain
from tests.storage.index_support import check_counts, contents
from tests.storage.log_support import threads

__all__ = ["threads"]

# Answers.


async def test_rows_come_back_as_they_were_stored() -> None:
    harness = make()
    keys, values = random_rows(1, 30, 6)
    keys[3, 2], values[4, 1] = np.nan, -np.inf
    assert await store(harness, "facts", keys[:10], values[:10]) == 10
    assert await store(harness, "facts", keys[10:], values[10:]) == 30
    for start, stop in ((0, 30), (0, 1), (29, 30), (5, 15), (10, 10), (0, 0), (30, 30), (99, 99)):
        found = plain(await harness.call("KV.FETCH", "facts", start, stop))
        assert found == [keys[start:stop].tobytes(), values[start:stop].tobytes()]
    reply = await harness.call("KV.INFO", "facts")
    assert isinstance(reply, Map)
    found = dict(reply.pairs)
    assert list(found) == ["index", "rows", "dim", "bytes", "memory", "pieces"]
    assert (found["index"], found["rows"], found["dim"], found["bytes"]) == (b"facts", 30, 6, 2 * 30 * 6 * 4)
    assert found["memory"] == harness.services.vstore.ledger.charged_bytes
    assert await harness.call("KV.DROP", "facts") == 1
    assert await harness.call("KV.DROP", "facts") == 0
    assert harness.services.vstore.ledger.charged_bytes == 0


@settings(deadline=None, max_examples=60)
@given(
    dim=st.sampled_from([1, 3, 8, 64, 100]),
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    vectors=st.integers(1, 5),
    top_k=st.one_of(st.just(0), st.integers(1, 70)),
    seed=st.integers(0, 1000),
)
def test_the_answer_is_attention_over_all_rows(
    dim: int, counts: list[int], vectors: int, top_k: int, seed: int
) -> None:
    async def main() -> None:
        harness = make()
        keys, values = random_rows(seed, sum(counts), dim)
        done = 0
        for count in counts:
            assert await store(harness, "x", keys[done : done + count], values[done : done + count]) == done + count
            done += count
        q, _ = random_rows(seed + 1, vectors, dim)
        found = await ask(harness, "x", top_k, q)
        np.testing.assert_allclose(found, oracle(q, keys, values, top_k), atol=1e-4)
        await store(harness, "once", keys, values)
        np.testing.assert_array_equal(found, await ask(harness, "once", top_k, q))
        check_counts(state_of(harness).table)

    trio.run(main)


async def test_ties_go_to_the_row_that_comes_first() -> None:
    harness = make()
    keys = np.zeros((6, 2), np.float32)
    keys[4] = 1
    values = np.arange(12, dtype=np.float32).reshape(6, 2)
    await store(harness, "x", keys, values)
    q = np.ones((1, 2), np.float32)
    for top_k in range(7):
        np.testing.assert_allclose(await ask(harness, "x", top_k, q), oracle(q, keys, values, top_k), atol=1e-5)
    np.testing.assert_array_equal(await ask(harness, "x", 1, q), values[4:5])
    np.testing.assert_array_equal(await ask(harness, "x", 1, -q), values[:1])


async def test_extreme_numbers() -> None:
    """Huge scores, one key that dominates, all equal, -0.0; NaN and infinity pass through and end nothing."""
    harness = make()
    keys, values = random_rows(3, 20, 8)
    for name, changed in (
        ("huge", keys * 1e4),
        ("one", np.concatenate([keys[:-1], np.full((1, 8), 1e3, np.float32)])),
        ("equal", np.zeros_like(keys)),
        ("minus", np.full_like(keys, -0.0)),
    ):
        await store(harness, name, changed, values)
        q, _ = random_rows(4, 3, 8)
        np.testing.assert_allclose(await ask(harness, name, 0, q), oracle(q, changed, values), atol=1e-4)
    for number in (np.nan, np.inf, -np.inf):
        q[1, 3] = number
        found = await ask(harness, "huge", 0, q)
        np.testing.assert_allclose(found[[0, 2]], oracle(q[[0, 2]], keys * 1e4, values), atol=1e-4)
        assert np.isnan(found[1]).all()


async def test_with_all_families_the_answer_is_the_same() -> None:
    async with running_server(Config(binary_port=-1)) as server, trio.open_nursery() as nursery:
        keys, values = random_rows(9, 300, 64)
        q, _ = random_rows(10, 3, 64)

        def client() -> bytes:
            with PionClient(port=server.port) as client:
                client.execute("KV.STORE", "x", 300, 64, keys.tobytes(), values.tobytes())
                answer = client.execute("ATTEND.QUERY", "x", 7, q.tobytes())
                assert isinstance(answer, bytes)
                return answer

        answer = await trio.to_thread.run_sync(client)
        found = np.frombuffer(answer, np.float32).reshape(3, 64)
        np.testing.assert_allclose(found, oracle(q, keys, values, 7), atol=1e-4)
        nursery.cancel_scope.cancel()


async def test_an_answer_is_charged_until_it_is_sent() -> None:
    harness = make()
    keys, values = random_rows(15, 5, 4)
    await store(harness, "x", keys, values)
    ledger = harness.services.vstore.ledger
    before = ledger.charged_bytes
    reply = await harness.call("ATTEND.QUERY", "x", 0, keys.tobytes())
    assert isinstance(reply, Blob)
    assert (ledger.charged_bytes - before, ledger.sending_bytes) == (80, 80)
    del reply
    assert (ledger.charged_bytes, ledger.sending_bytes) == (before, 0)


# Refusals.

ROW = bytes(16)
BAD: list[tuple[tuple[Any, ...], str]] = [
    (("KV.STORE", "", 1, 4, ROW, ROW), "index must be 1 to 4096 bytes long, got 0"),
    (("KV.STORE", "n" * 4097, 1, 4, ROW, ROW), "index must be 1 to 4096 bytes long, got 4097"),
    (("KV.STORE", "x", 0, 4, b"", b""), "n must be an integer from 1 to 2147483647, got 0"),
    (("KV.STORE", "x", -1, 4, ROW, ROW), "n must be an integer from 1 to 2147483647, got -1"),
    (("KV.STORE", "x", "one", 4, ROW, ROW), "n must be an integer from 1 to 2147483647, got 'one'"),
    (("KV.STORE", "x", 2**31, 4, ROW, ROW), "n must be an integer from 1 to 2147483647, got 2147483648"),
    (("KV.STORE", "x", 1, 0, b"", b""), "D must be an integer from 1 to 4096, got 0"),
    (("KV.STORE", "x", 1, 4097, bytes(16388), bytes(16388)), "D must be an integer from 1 to 4096, got 4097"),
    (("KV.STORE", "x", 1, "4.0", ROW, ROW), "D must be an integer from 1 to 4096, got '4.0'"),
    (("KV.STORE", "x", 1, 4, ROW[1:], ROW), "K must be 16 bytes (1 rows of 4 fp32 values), got 15"),
    (("KV.STORE", "x", 1, 4, ROW + b"1", ROW), "K must be 16 bytes (1 rows of 4 fp32 values), got 17"),
    (("KV.STORE", "x", 1, 4, ROW, ROW[1:]), "V must be 16 bytes (1 rows of 4 fp32 values), got 15"),
    (("KV.STORE", "x", 1, 4, ROW, ROW + b"1"), "V must be 16 bytes (1 rows of 4 fp32 values), got 17"),
    (("KV.STORE", "x", 2, 4, ROW, ROW), "K must be 32 bytes (2 rows of 4 fp32 values), got 16"),
    (("KV.STORE", "x", 1, 3, bytes(12), bytes(12)), "D must be 4 as in the rows that index 'x' has, got 3"),
    (("KV.STORE", "x", 97, 4, bytes(97 * 16), bytes(97 * 16)), "with at most 100 rows (--max-index-rows), it would"),
    (("KV.FETCH", "y", 0, 1), "no index 'y'"),
    (("KV.FETCH", "y", 0, 0), "no index 'y'"),
    (("KV.FETCH", "x", 0, 5), "no row 4 in index 'x', it has 4"),
    (("KV.FETCH", "x", 7, 9), "no row 7 in index 'x', it has 4"),
    (("KV.FETCH", "x", 2, 1), "end must be at least start, 2, got 1"),
    (("KV.FETCH", "x", -1, 1), "start must be an integer from 0 to 2147483648, got -1"),
    (("KV.FETCH", "x", 0, 2**31 + 1), "end must be an integer from 0 to 2147483648, got 2147483649"),
    (("KV.FETCH", "x", 0, "end"), "end must be an integer from 0 to 2147483648, got 'end'"),
    (("KV.INFO", "y"), "no index 'y'"),
    (("KV.DROP", "n" * 4097), "index must be 1 to 4096 bytes long, got 4097"),
    (("ATTEND.QUERY", "y", 0, ROW), "no index 'y'"),
    (("ATTEND.QUERY", "x", -1, ROW), "top_k must be an integer from 0 to 2147483647, got -1"),
    (("ATTEND.QUERY", "x", "all", ROW), "top_k must be an integer from 0 to 2147483647, got 'all'"),
    *(
        (("ATTEND.QUERY", "x", 0, bytes(size)), f"D = 4 fp32 values (16 bytes each), got {size} bytes")
        for size in (0, 1, 15, 17, 31, 33)
    ),
]


@pytest.mark.parametrize(("argv", "text"), BAD, ids=[f"{argv[0]}-{text[:40]}" for argv, text in BAD])
async def test_bad_arguments_are_named_and_change_nothing(argv: tuple[Any, ...], text: str) -> None:
    harness = make(max_index_rows=100)
    keys, values = random_rows(16, 4, 4)
    await store(harness, "x", keys, values)
    table = state_of(harness).table
    before = contents(table)
    reply = await harness.call(*argv)
    assert isinstance(reply, ErrorReply)
    assert reply.code == "ERR"
    assert text in reply.text
    assert contents(table) == before
    check_counts(table)


@pytest.mark.parametrize(
    ("name", "arguments"), [("KV.STORE", 5), ("KV.FETCH", 3), ("KV.INFO", 1), ("KV.DROP", 1), ("ATTEND.QUERY", 3)]
)
async def test_wrong_arity(name: str, arguments: int) -> None:
    for count in (arguments - 1, arguments + 1):
        reply = plain(await make().call(name, *["1"] * count))
        assert reply == f"-ERR wrong number of arguments for '{name.lower()}' command"


async def test_names_are_bytes_and_a_space_of_their_own() -> None:
    harness = make()
    keys, values = random_rows(17, 2, 4)
    assert plain(await harness.call("V.CREATE", "x", 4)) == "OK"
    for name in (b"\0\xff", b"x", b"n" * 4096):
        assert await store(harness, name, keys, values) == 2
    assert plain(await harness.call("V.LIST")) == [b"0", [b"x"]]
    assert await harness.call("V.DROP", "x") == 1
    assert len(state_of(harness).table) == 3
    assert plain(await harness.call("KV.FETCH", b"\0\xff", 1, 2)) == [keys[1:].tobytes(), values[1:].tobytes()]


async def test_too_many_indexes() -> None:
    harness = make(max_indexes=2)
    keys, values = random_rows(18, 2, 4)
    assert [await store(harness, name, keys, values) for name in "ab"] == [2, 2]
    assert (await store(harness, "c", keys, values)).startswith("-OOM 2 attention indexes are in use (--max-indexes)")
    assert await store(harness, "a", keys, values) == 4
    assert await harness.call("KV.DROP", "b") == 1
    assert await store(harness, "c", keys, values) == 2


async def test_over_the_budget_nothing_changes_and_a_drop_gives_memory_back() -> None:
    harness = make(max_bytes=64 * KIB)
    ledger, table = harness.services.vstore.ledger, state_of(harness).table
    keys, values = random_rows(19, 100, 16)
    assert plain(await harness.call("KV.PREFIX.REGISTER", "p", 16, "fp32")) == "OK"
    for side in ("p_pk", "p_pv"):
        assert plain(await harness.call("V.STOREBATCH", side, 0, 0, 100, keys.tobytes())) == "OK"
    count = 0
    while isinstance(reply := await store(harness, f"x{count}", keys, values), int):
        count += 1
        assert ledger.charged_bytes <= 64 * KIB
    assert reply.startswith("-OOM ")
    assert "--max-bytes" in reply
    assert count == 64 * KIB // (2 * 6400 + INDEX_COST + PIECE_COST)
    assert plain(await harness.call("KV.PREFIX.LOOKUP", "p")) == "MISS", "what can be evicted made room"
    before, charged = contents(table), ledger.charged_bytes
    for _ in range(3):
        assert (await store(harness, "more", keys, values)).startswith("-OOM ")
        assert (contents(table), ledger.charged_bytes) == (before, charged)
    q, _ = random_rows(20, 1, 16)
    np.testing.assert_allclose(await ask(harness, "x0", 0, q), oracle(q, keys, values), atol=1e-4)
    for number in range(count):
        assert await harness.call("KV.DROP", f"x{number}") == 1
    assert ledger.charged_bytes == ledger.payload_bytes == 0


async def test_bad_requests_leave_connection_and_server_alive() -> None:
    """Over a socket, with payloads that are received into memory of their own: what is wrong, and what has no room."""
    keys, values = random_rows(26, 5000, 16)
    raw, more = (keys.tobytes(), values.tobytes()), bytes(4 * 1024 * KIB)

    def talk(port: int) -> None:
        with PionClient(port=port) as client, PionClient(port=port) as other:
            assert client.execute("KV.STORE", "x", 5000, 16, *raw) == 5000
            for wrong in ((raw[0][1:], raw[1]), (raw[0], raw[1] + b"x"), (b"", raw[1])):
                with pytest.raises(ServerError, match=r"[KV] must be 320000 bytes"):
                    client.execute("KV.STORE", "x", 5000, 16, *wrong)
                assert client.ping()
            for _ in range(3):
                with pytest.raises(OutOfMemoryError):
                    client.execute("KV.STORE", "y", 65_536, 16, more, more)
                assert other.ping()
            assert client.execute("KV.FETCH", "x", 0, 5000) == list(raw)
            with pytest.raises(ServerError, match="no index 'y'"):
                client.execute("KV.INFO", "y")
            assert client.execute("KV.DROP", "x") == 1

    async with running_server(Config(binary_port=-1, max_bytes=5 * 1024 * KIB)) as server:
        await trio.to_thread.run_sync(talk, server.port)
        assert server.services.vstore.ledger.payload_bytes == 0


async def test_inside_a_transaction() -> None:
    harness = make_harness(Config(binary_port=-1))
    keys, values = random_rows(21, 2, 4)
    await harness.call("MULTI")
    await harness.call("KV.STORE", "x", 2, 4, keys.tobytes(), values.tobytes())
    await harness.call("KV.FETCH", "x", 1, 3)
    await harness.call("KV.DROP", "x")
    assert plain(await harness.call("EXEC")) == [2, "-ERR no row 2 in index 'x', it has 2", 1]


async def test_figures() -> None:
    harness = make()
    keys, values = random_rows(22, 3, 4)
    await store(harness, "x", keys, values)
    await ask(harness, "x", 0, keys)
    (section,) = [each for each in harness.services.info_sections if each.title == "AttentionIndex"]
    assert dict(section.rows()) == {
        "attention_indexes": 1,
        "attention_index_rows": 3,
        "attention_index_bytes": 96,
        "attention_index_reserved_bytes": 0,
        "attention_index_queries": 3,
        "attention_index_waiting": 0,
        "attention_index_checksum_failures": 0,
    }


def test_it_is_loaded_unless_only_the_kv_cache_is_wanted() -> None:
    assert "attention_index" in BUILTIN_PLUGINS
    assert "attention_index" not in KVCACHE_PLUGINS


# Files.


@pytest.mark.parametrize("command", [("KV.FETCH", "x", 0, 1), ("ATTEND.QUERY", "x", 0, bytes(16))])
async def test_damage_on_the_disk_is_an_error_and_never_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(attention_index_log, "MAP_FROM_BYTES", 100)
    keys, values = random_rows(23, 50, 4)
    config = Config(plugins="connection,vstore,kvprefix,attention_index", binary_port=-1, grace_s=1)

    def fill(port: int) -> None:
        with PionClient(port=port) as client:
            for name in ("x", "y"):
                client.execute("KV.STORE", name, 50, 4, keys.tobytes(), values.tobytes())
            client.execute("KV.PREFIX.SAVE")

    def look(port: int) -> None:
        with PionClient(port=port) as client:
            with pytest.raises(ServerError, match="no index 'x': its bytes on disk are not what was stored"):
                client.execute(*command)
            with pytest.raises(ServerError, match=r"no index 'x'$"):
                client.execute(*command)
            assert client.execute("KV.FETCH", "y", 0, 50) == [keys.tobytes(), values.tobytes()]

    async with running_server(config, directory=tmp_path) as server:
        await trio.to_thread.run_sync(fill, server.port)
    file = tmp_path / snapshot_name(0)
    raw = bytearray(file.read_bytes())
    raw[raw.index(keys.tobytes()) + 9] ^= 1
    file.write_bytes(raw)
    async with running_server(config, directory=tmp_path) as server:
        await trio.to_thread.run_sync(look, server.port)
        assert indexes_of(server.services).table.checksum_failures == 1


def test_it_survives_the_death_of_the_process(tmp_path: Path) -> None:
    """SIGKILL, in a real server: what was answered is there, bit by bit; also after a server without the plugin."""
    keys, values = random_rows(24, 5000, 32)
    q, _ = random_rows(25, 4, 32)
    steps = (1, 4000, 999)
    directory = ("--dir", str(tmp_path))
    done, answer = 0, b""
    for number, count in enumerate(steps):
        with ServerProcess(*directory) as server:
            with PionClient(port=server.port) as client:
                if done:
                    assert client.execute("ATTEND.QUERY", "x", 3, q.tobytes()) == answer
                assert (
                    client.execute(
                        "KV.STORE",
                        "x",
                        count,
                        32,
                        keys[done : done + count].tobytes(),
                        values[done : done + count].tobytes(),
                    )
                    == done + count
                )
                done += count
                if number % 2:
                    client.execute("KV.PREFIX.SAVE")
                client.execute("KV.STORE", "gone", 1, 1, bytes(4), bytes(4))
                assert client.execute("KV.DROP", "gone") == 1
                found = client.execute("ATTEND.QUERY", "x", 3, q.tobytes())
                assert isinstance(found, bytes)
                answer = found
                np.testing.assert_allclose(
                    np.frombuffer(answer, np.float32).reshape(4, 32),
                    oracle(q, keys[:done], values[:done], 3),
                    atol=1e-4,
                )
            server.kill()
        checked = subprocess.run([sys.executable, "-m", "pion", "check", str(tmp_path)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
    with ServerProcess("--kvcache", *directory) as server:
        with PionClient(port=server.port) as client:
            client.execute("KV.PREFIX.SAVE")
            with pytest.raises(ServerError, match=r"unknown command 'KV\.INFO'"):
                client.execute("KV.INFO", "x")
        server.kill()
    with ServerProcess(*directory) as server, PionClient(port=server.port) as client:
        assert client.execute("KV.FETCH", "x", 0, 5000) == [keys.tobytes(), values.tobytes()]
        assert client.execute("ATTEND.QUERY", "x", 3, q.tobytes()) == answer
        info = client.info()
        assert (info["attention_indexes"], info["attention_index_rows"]) in (("1", "5000"), (1, 5000))


def test_the_example_of_the_how_to_runs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/attention-index.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python[^\n]*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    expected = re.findall(r"print\(.*\)  # (.*)$", source, re.MULTILINE)
    assert len(expected) == 3
    output = io.StringIO()
    with ServerProcess() as server, contextlib.redirect_stdout(output):
        source = source.replace("PionClient()", f"PionClient(port={server.port})")
        exec(compile(source, "attention-index.md", "exec"), {})
    assert output.getvalue().splitlines() == expected
