"""ATTEND.QUERY: who computes it, in which parts, for whom no more, and the one piece of memory it needs."""

from __future__ import annotations

import functools
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from pion.commands import attention_index_common
from pion.commands.attention_index_common import BACKEND, indexes_of, vectors_at_once
from pion.compute.attention import Attended, Backend, Query
from pion.config import Config
from pion.limits import ATTEND_CROWD, ATTEND_EXACT_PRODUCTS, ATTEND_PRODUCTS
from pion.storage.attention_index_blocks import IndexBlock, fill
from tests.commands.attend_support import PATIENCE_S, QUERY, Server, Wire, blob, normal, serving
from tests.commands.attention_index_support import Floats, ask, make, oracle, random_rows, state_of, store
from tests.commands.kv_support import plain
from tests.storage.index_support import check_counts, contents
from tests.storage.log_support import Threads, threads

__all__ = ["threads"]


class Gated:
    """Computes what it should, while it is let; remembers how many vectors it was given each time."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.parts: list[int] = []

    def attend_once(self, keys: Any, values: Any, query: Query) -> Attended:
        self.parts.append(query.q.shape[1])
        assert self.open.wait(PATIENCE_S)
        return BACKEND.attend_once(keys, values, query)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gated]:
    gate = Gated()
    monkeypatch.setattr(attention_index_common, "BACKEND", gate)
    yield gate
    gate.open.set()


# Who computes.


@pytest.mark.parametrize("top_k", [0, 7])
async def test_the_rows_are_not_copied(top_k: int) -> None:
    """What one query allocates on top is a small part of the index, once its rows are in one piece."""
    harness = make()
    keys, values = random_rows(1, 8192, 128)
    await store(harness, "x", keys[:4096], values[:4096])
    await store(harness, "x", keys[4096:], values[4096:])
    q, _ = random_rows(2, 1, 128)
    first = await ask(harness, "x", top_k, q)
    tracemalloc.start()
    try:
        again = await ask(harness, "x", top_k, q)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(first, again)
    np.testing.assert_allclose(again, oracle(q, keys, values, top_k), atol=1e-4)
    assert peak < keys.nbytes / 4


def missing() -> Backend:
    raise ImportError("No module named 'mlx'")


@pytest.mark.parametrize("fp16", [False, True])
def test_it_needs_no_compute_device(fp16: bool) -> None:
    """Nor is it in the ATTEND family's precision: in half precision 1e5 is infinite, and 1 + 2^-20 is 1."""
    keys, values = normal(3, 4, 8), normal(4, 4, 8)
    values[1, :2] = 1e5, 1 + 2**-20
    config = Config(dir="", metal_attention_fp16=fp16)
    with serving(config, backend="numpy" if fp16 else missing) as server, Wire(server) as client:
        assert client.call("KV.STORE", "x", 4, 8, blob(keys), blob(values)) == 4
        assert client.call("ATTEND.QUERY", "x", 1, blob(8 * keys[1:2])) == values[1].tobytes()


def test_other_commands_do_not_wait_for_it(gate: Gated) -> None:
    keys = normal(5, 1, 4, 8)
    with serving(Config(dir="")) as server, Wire(server) as client, Wire(server) as other:
        client.call("KV.STORE", "x", 4, 8, blob(keys), blob(keys))
        gate.open.clear()
        client.send("ATTEND.QUERY", "x", 0, blob(keys[0, :1]))
        server.wait_for(lambda: gate.parts == [1])
        assert other.call("PING") == "PONG"
        assert other.store(b"s", 0, keys, keys) == "OK"
        assert len(other.ask(QUERY, b"s", 0, (1, 8, 0), [blob(keys[:, :1])])) == 4 * 8
        gate.open.set()
        assert len(client.read()) == 4 * 8


async def test_it_takes_one_thread(gate: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []

    @contextmanager
    def one_numpy_thread() -> Iterator[None]:
        inside.append(not gate.parts)
        yield
        inside.append(gate.parts == [2])

    monkeypatch.setattr(attention_index_common, "one_numpy_thread", one_numpy_thread)
    harness = make()
    keys, values = random_rows(13, 5, 4)
    await store(harness, "x", keys, values)
    await ask(harness, "x", 0, keys[:2])
    assert inside == [True, True]


# Parts.


@given(rows=st.integers(1, 2**20), dim=st.integers(1, 4096), top_k=st.sampled_from([0, 1, 100]))
def test_a_part_takes_bounded_time_and_memory(rows: int, dim: int, top_k: int) -> None:
    most = vectors_at_once(rows, dim, top_k)
    products = rows * dim
    limit = ATTEND_EXACT_PRODUCTS if top_k else ATTEND_PRODUCTS
    assert most >= 1
    if most > 1:
        assert most * products <= limit
        assert most * rows <= 5_000_000  # scores
    assert (most + 1) * (products + 200 * rows) > limit  # and no smaller than it must be


def test_what_held_everybody_up() -> None:
    assert 2 <= vectors_at_once(2048, 4096, 8) <= 12


@pytest.mark.parametrize(("limit", "top_k"), [("ATTEND_PRODUCTS", 0), ("ATTEND_EXACT_PRODUCTS", 3)])
async def test_many_vectors_are_computed_in_parts(
    gate: Gated, monkeypatch: pytest.MonkeyPatch, limit: str, top_k: int
) -> None:
    harness = make()
    keys, values = random_rows(6, 40, 4)
    await store(harness, "x", keys, values)
    q, _ = random_rows(7, 23, 4)
    whole = await ask(harness, "x", top_k, q)
    assert gate.parts == [23]
    monkeypatch.setattr(attention_index_common, limit, 5 * 40 * 204)
    found = await ask(harness, "x", top_k, q)
    assert gate.parts == [23, 5, 5, 5, 5, 3]
    np.testing.assert_allclose(found, whole, atol=1e-6)
    np.testing.assert_allclose(found, oracle(q, keys, values, top_k), atol=1e-4)
    assert await ask(harness, "x", 40, q[:6]) is not None
    assert len(gate.parts) == 6 + (2 if limit == "ATTEND_PRODUCTS" else 1), "all rows need no choice"


async def test_others_get_their_turn_between_parts(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_index_common, "ATTEND_PRODUCTS", 40 * 204)
    harness = make()
    keys, values = random_rows(8, 40, 4)
    await store(harness, "x", keys, values)
    done: list[int] = []

    async def one(vectors: int) -> None:
        np.testing.assert_allclose(
            await ask(harness, "x", 0, keys[:vectors]), oracle(keys[:vectors], keys, values), atol=1e-4
        )
        done.append(vectors)

    threads.hold("_attend")
    async with trio.open_nursery() as nursery:
        for vectors in (5, 1, 2):
            nursery.start_soon(one, vectors)
            await trio.testing.wait_all_tasks_blocked()
        assert threads.running == ["_attend"], "one at a time"
        assert state_of(harness).waiting == 2
        threads.release("_attend")
    assert done == [1, 2, 5]


# Clients that leave.


def computing(server: Server, gate: Gated, client: Wire, name: str, vectors: int) -> None:
    """A query is being computed, until the gate opens."""
    gate.open.clear()
    before = len(gate.parts)
    client.send("ATTEND.QUERY", name, 0, bytes(16 * vectors))
    server.wait_for(lambda: len(gate.parts) > before)


def test_what_nobody_wants_any_more_is_not_computed(gate: Gated) -> None:
    keys = normal(9, 50, 4)
    with serving(Config(dir="")) as server, Wire(server) as client:
        state = indexes_of(server.services)
        client.call("KV.STORE", "x", 50, 4, blob(keys), blob(keys))
        computing(server, gate, client, "x", 1)
        leaving = [Wire(server) for _ in range(ATTEND_CROWD + 20)]
        for number, each in enumerate(leaving, 1):
            each.send("ATTEND.QUERY", "x", 0, bytes(16))
            server.wait_for(lambda number=number: state.waiting == number)  # type: ignore[misc]
        with Wire(server) as stays:
            stays.send("ATTEND.QUERY", "x", 0, blob(8 * keys[:1]))
            server.wait_for(lambda: state.waiting == ATTEND_CROWD + 21)
            for each in leaving:
                each.__exit__()
            server.wait_for(lambda: state.waiting == ATTEND_CROWD + 1)
            gate.open.set()
            found = np.frombuffer(stays.read(), np.float32).reshape(1, 4)
            np.testing.assert_allclose(found, oracle(8 * keys[:1], keys, keys), atol=1e-4)
            assert len(client.read()) == 16
        assert len(gate.parts) == 1 + ATTEND_CROWD + 1
        assert server.run(lambda: state.waiting) == 0


def test_a_long_query_ends_with_its_client(gate: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, though a part of it is being computed; the memory of its answer goes when that has ended."""
    monkeypatch.setattr(attention_index_common, "ATTEND_PRODUCTS", 50 * 204)
    keys = normal(10, 50, 4)
    with serving(Config(dir="")) as server, Wire(server) as client, Wire(server) as leaving:
        ledger = server.services.vstore.ledger
        client.call("KV.STORE", "x", 50, 4, blob(keys), blob(keys))
        charged = server.run(lambda: ledger.charged_bytes)
        count = server.run(lambda: len(server.services.clients))
        computing(server, gate, leaving, "x", ATTEND_CROWD + 1)
        leaving.__exit__()
        server.wait_for(lambda: len(server.services.clients) == count - 1)
        assert server.run(lambda: ledger.charged_bytes) - charged == 16 * (ATTEND_CROWD + 1)
        assert gate.parts == [1]
        gate.open.set()
        server.wait_for(lambda: ledger.charged_bytes == charged)
        assert len(client.call("ATTEND.QUERY", "x", 0, bytes(16))) == 16
    assert gate.parts == [1, 1]


def test_who_only_stops_sending_is_told_so(gate: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_index_common, "ATTEND_CROWD", 0)
    keys = normal(11, 50, 4)
    with serving(Config(dir="")) as server, Wire(server) as client:
        client.call("KV.STORE", "x", 50, 4, blob(keys), blob(keys))
        assert len(client.call("ATTEND.QUERY", "x", 0, bytes(16))) == 16
        computing(server, gate, client, "x", 1)
        client.socket.shutdown(1)
        assert client.read() == "-ERR the client stopped sending while its query waited"


@pytest.mark.parametrize("crowd", [0, 99])
async def test_no_memory_to_compute_with(monkeypatch: pytest.MonkeyPatch, crowd: int) -> None:
    """What the query held is let go at once, not when the garbage collector finds it."""
    monkeypatch.setattr(attention_index_common, "ATTEND_CROWD", crowd)
    harness = make()
    harness.context.session.peer_left = trio.sleep_forever
    keys, values = random_rows(12, 5, 4)
    await store(harness, "x", keys, values)
    before = harness.services.vstore.ledger.charged_bytes

    def no_memory(*args: Any) -> Any:
        raise MemoryError

    class Full:
        attend_once = empty = no_memory
        uint8, float32, frombuffer = np.uint8, np.float32, np.frombuffer

    for what in ("BACKEND", "np"):
        with monkeypatch.context() as patch:
            patch.setattr(attention_index_common, what, Full)
            reply = plain(await harness.call("ATTEND.QUERY", "x", 0, keys.tobytes()))
        assert reply == "-OOM there is no memory to compute this query now"
        assert harness.services.vstore.ledger.charged_bytes == before
    np.testing.assert_allclose(await ask(harness, "x", 0, keys), oracle(keys, keys, values), atol=1e-4)


# One piece.


async def test_queries_that_come_together_copy_the_rows_once(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_index_common, "CONVERT_IN_THREAD_BYTES", 100)
    harness = make()
    keys, values = random_rows(11, 60, 4)
    await store(harness, "x", keys[:50], values[:50])
    await store(harness, "x", keys[50:], values[50:])
    q, _ = random_rows(12, 1, 4)
    found: list[Floats] = []

    async def one() -> None:
        found.append(await ask(harness, "x", 0, q))

    threads.hold("fill")
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        assert threads.running == ["fill"]
        threads.release("fill")
    assert len(found) == 3
    for each in found:
        np.testing.assert_allclose(each, oracle(q, keys, values), atol=1e-4)
    state = state_of(harness)
    assert len(state.table.index(b"x").blocks) == 1
    assert state.gathering == {}
    assert state.table.queries == 3
    check_counts(state.table)


@pytest.mark.parametrize("what", ["KV.DROP", "KV.STORE", "cancel", "MemoryError"])
async def test_what_happens_while_rows_are_copied(threads: Threads, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A query is answered for the rows that were there when it came."""
    monkeypatch.setattr(attention_index_common, "CONVERT_IN_THREAD_BYTES", 100)
    harness = make()
    keys, values = random_rows(13, 90, 4)
    await store(harness, "x", keys[:50], values[:50])
    await store(harness, "x", keys[50:60], values[50:60])
    q, _ = random_rows(14, 1, 4)
    found: list[Any] = []

    async def one() -> None:
        found.append(plain(await harness.call("ATTEND.QUERY", "x", 0, q.tobytes())))

    if what == "MemoryError":

        def no_memory(*args: Any) -> Any:
            raise MemoryError

        monkeypatch.setattr("pion.storage.attention_index.empty_block", no_memory)
        await one()
        assert found == ["-OOM there is no memory to read index 'x' now"]
        check_counts(state_of(harness).table)
        return
    threads.hold("fill")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        if what == "KV.STORE":
            await store(harness, "x", keys[60:], values[60:])
        elif what == "KV.DROP":
            assert await harness.call("KV.DROP", "x") == 1
        else:
            nursery.cancel_scope.cancel()
        threads.release("fill")
    table = state_of(harness).table
    if what == "cancel":
        assert found == []
    else:
        answer = np.frombuffer(found[0], np.float32).reshape(1, 4)
        np.testing.assert_allclose(answer, oracle(q, keys[:60], values[:60]), atol=1e-4)
        found.clear()
    check_counts(table)
    count = {"KV.DROP": 0, "KV.STORE": 90}.get(what, 60)
    assert contents(table) == ({b"x": (4, keys[:count].tobytes(), values[:count].tobytes())} if count else {})
    assert state_of(harness).gathering == {}


def counted_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each copy has that is made from now on."""
    copies: list[int] = []

    @functools.wraps(fill)
    def counted(target: IndexBlock, sources: Any, row_bytes: int) -> None:
        copies.append(target.rows)
        fill(target, sources, row_bytes)

    monkeypatch.setattr(attention_index_common, "fill", counted)
    return copies


@pytest.mark.parametrize("what", ["drop", "drop and store", "store 1", "store 12", "store 140", "refused"])
async def test_a_query_that_waits_for_a_copy_is_answered_for_the_rows_there_were(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It takes the copy that another one makes, whatever happens to the index meanwhile. 12 rows are merged with the
    last ones, 140 with all.
    """
    monkeypatch.setattr(attention_index_common, "CONVERT_IN_THREAD_BYTES", 100)
    harness = make()
    keys, values = random_rows(27, 200, 4)
    await store(harness, "x", keys[:50], values[:50])
    await store(harness, "x", keys[50:60], values[50:60])
    table = state_of(harness).table
    found: list[Any] = []

    async def one() -> None:
        found.append(plain(await harness.call("ATTEND.QUERY", "x", 0, keys[:1].tobytes())))

    copies = counted_copies(monkeypatch)
    threads.hold("fill")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        if what == "refused":  # the second query has seen rows that the disk then refuses
            await store(harness, "x", keys[60:65], values[60:65])
        nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        if what.startswith("drop"):
            assert await harness.call("KV.DROP", "x") == 1
        if what == "drop and store":
            await store(harness, "x", keys[:7, :2], values[:7, :2])
        elif what.startswith("store"):
            stop = 60 + int(what.split()[1])
            assert await store(harness, "x", keys[60:stop], values[60:stop]) == stop
        elif what == "refused":
            table.truncate(table.index(b"x"), 60)
        threads.release("fill")
    assert copies == [60]
    for each in found:
        answer = np.frombuffer(each, np.float32).reshape(1, 4)
        np.testing.assert_allclose(answer, oracle(keys[:1], keys[:60], values[:60]), atol=1e-4)
    found.clear()
    check_counts(table)
    assert state_of(harness).gathering == {}


@pytest.mark.parametrize("refused", [False, True])
async def test_a_copy_that_lacks_rows_is_not_for_who_has_seen_them(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Unless the disk has refused them. The append is merged with the last block, so the index can't take the copy."""
    monkeypatch.setattr(attention_index_common, "CONVERT_IN_THREAD_BYTES", 100)
    harness = make()
    keys, values = random_rows(30, 72, 4)
    await store(harness, "x", keys[:50], values[:50])
    await store(harness, "x", keys[50:60], values[50:60])
    table = state_of(harness).table
    found: list[Floats] = []

    async def one() -> None:
        found.append(await ask(harness, "x", 0, keys[:1]))

    copies = counted_copies(monkeypatch)
    threads.hold("fill")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        assert await store(harness, "x", keys[60:], values[60:]) == 72
        assert len(table.index(b"x").blocks) == 2
        nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        if refused:
            table.truncate(table.index(b"x"), 60)
        threads.release("fill")
    counts = [60, 60] if refused else [60, 72]
    assert copies == sorted(set(counts))
    for answer, count in zip(found, counts, strict=True):
        np.testing.assert_allclose(answer, oracle(keys[:1], keys[:count], values[:count]), atol=1e-4)
    found.clear()
    check_counts(table)


async def test_an_index_that_is_dropped_before_it_is_copied(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is reserved no more, also if there is another index of its name, which has its own."""
    monkeypatch.setattr(IndexBlock, "doubtful", True)
    harness = make()
    keys, values = random_rows(28, 60, 4)
    await store(harness, "x", keys[:50], values[:50])
    await store(harness, "x", keys[50:], values[50:])
    table = state_of(harness).table
    found: list[Any] = []

    async def one() -> None:
        found.append(plain(await harness.call("ATTEND.QUERY", "x", 0, keys[:1].tobytes())))

    threads.hold("_all_good")
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        assert await harness.call("KV.DROP", "x") == 1
        await store(harness, "x", keys[:7], values[:7])
        await store(harness, "x", keys[7:8], values[7:8])
        reserved = table.index(b"x").reserved_bytes
        threads.release("_all_good")
    assert found == ["-ERR no index 'x': it was dropped before the query could read it"] * 2
    assert table.index(b"x").reserved_bytes == reserved == 8 * 32
    check_counts(table)
    assert contents(table) == {b"x": (4, keys[:8].tobytes(), values[:8].tobytes())}
    assert state_of(harness).gathering == {}


async def test_a_query_reads_no_row_that_came_after_it(threads: Threads) -> None:
    """Of an index in one piece, whose rows are not copied: it waits for its turn, and the index grows."""
    harness = make()
    keys, values = random_rows(29, 60, 4)
    await store(harness, "x", keys[:50], values[:50])
    found: list[Floats] = []

    async def one(top_k: int) -> None:
        found.append(await ask(harness, "x", top_k, keys[:2]))

    threads.hold("_attend")
    async with trio.open_nursery() as nursery:
        for top_k in (0, 55):
            nursery.start_soon(one, top_k)
            await trio.testing.wait_all_tasks_blocked()
        await store(harness, "x", keys[50:], values[50:])
        threads.release("_attend")
    for each in found:
        np.testing.assert_allclose(each, oracle(keys[:2], keys[:50], values[:50]), atol=1e-4)
    found.clear()
    check_counts(state_of(harness).table)
