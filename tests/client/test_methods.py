"""Every method of both clients against a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from pion.client import Blocks, Layer, Match, PionClient, Registered, Segment, Stored, aio, errors
from pion.config import Config
from pion.server import Started
from pion.testing import running_server

ROWS = np.arange(4 * 64, dtype=np.float32).reshape(4, 64)


class InThread:
    """The synchronous client, its calls awaited: each runs in a thread while the server runs in this one."""

    def __init__(self, client: PionClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            return await trio.to_thread.run_sync(partial(self._run, name, args, options))

        return call

    def _run(self, name: str, args: Any, options: Any) -> Any:
        result = getattr(self._client, name)(*args, **options)
        return list(result) if isinstance(result, Iterator) else result


@pytest.fixture(params=["sync", "aio"])
async def client(request: pytest.FixtureRequest, server: Started) -> AsyncIterator[Any]:
    if request.param == "aio":
        async with aio.PionClient(port=server.port) as twin:
            yield twin
    else:
        with PionClient(port=server.port) as plain:
            yield InThread(plain)


async def names(result: Any) -> list[bytes]:
    """What an iterator method gave, of either client."""
    if isinstance(result, AsyncIterator):
        return [name async for name in result]
    return list(await result)


def sides(layers: int = 2, tokens: int = 4) -> list[Layer]:
    """Rows of which each says what it is: F1 of the fault classes."""
    position = np.arange(tokens, dtype=np.float32)[:, None] + np.arange(64, dtype=np.float32) / 100
    return [Layer(position + 1000 * layer, -(position + 1000 * layer)) for layer in range(layers)]


async def test_server_commands(client: Any) -> None:
    assert await client.ping() > 0
    assert (await client.info())["loading"] == "0"
    assert "redis_version" in await client.info("server")
    assert await client.execute("ECHO", b"\r\n\0") == b"\r\n\0"
    replies = await client.pipeline([("PING",), ("NO.SUCH",), ("ECHO", "x")])
    assert replies[0] == "PONG"
    assert isinstance(replies[1], errors.ServerError)
    assert replies[2] == b"x"
    assert b"pion" in await client.execute("CLIENT", "INFO")


async def test_stats(client: Any) -> None:
    await client.prefix_lookup("nothing")
    stats = await client.stats()
    assert len(stats) == 16
    assert stats["kvprefix_misses"] == 1
    await client.stats_reset()
    assert (await client.stats())["kvprefix_misses"] == 0


async def test_sessions(client: Any) -> None:
    await client.v_create("s", 64, "fp32")
    await client.v_create("s", 64, "fp32")
    await client.v_store_batch("s", 3, 10, 4, ROWS)
    await client.v_store("s", 3, 14, ROWS[0])
    fetched = await client.v_fetch("s", 3, 10, 14)
    assert fetched.dtype == np.float32
    assert np.array_equal(fetched, ROWS)
    assert np.array_equal(await client.v_fetch_ids("s", 3, [14, 12, 12]), ROWS[[0, 2, 2]])
    assert (await client.v_fetch("s", 3, 10, 12, as_="native")).tobytes() == ROWS[:2].tobytes()
    assert np.array_equal(await client.v_fetch("s", 3, 10, 14, as_="fp16"), ROWS.astype(np.float16))
    half = await client.v_fetch("s", 3, 10, 14, as_="bf16")
    assert half.dtype == np.uint16
    assert half.shape == (4, 64)
    assert (await client.v_fetch("s", 3, 11, 11)).size == 0
    both = await client.v_fetch_batch("s", [(3, 10, 12), (3, 14, 15)])
    assert [part.shape for part in both] == [(2, 64), (1, 64)]
    assert np.array_equal(both[1][0], ROWS[0])
    info = await client.v_info("s")
    assert (info.sid, info.format, info.dim, info.layers, info.rows, info.prefix) == (b"s", "fp32", 64, 1, 5, None)
    assert (info.state, info.registered, info.pinned, info.bytes) == ("open", False, False, 5 * 256)
    assert await client.v_drop("s", "other") == 1
    with pytest.raises(errors.ServerError, match="no session"):
        await client.v_info("s")


async def test_sessions_of_several_formats(client: Any) -> None:
    await client.v_create("s", schema="fp32@64*1,fp16@32*1")
    await client.v_store_batch("s", 1, 0, 1, np.ones(32, np.float16), as_="fp16")
    assert (await client.v_fetch("s", 1, 0, 1)).tolist() == [[1.0] * 32]
    assert (await client.v_info("s")).schema == "fp32@64*1,fp16@32*1"
    with pytest.raises(ValueError, match="width"):
        await client.v_create("t")
    with pytest.raises(ValueError, match="not both"):
        await client.v_create("t", 64, "fp16", schema="fp16@64*1")


async def test_fetch_batch_into_memory(client: Any) -> None:
    await client.v_create("s", 64, "fp32")
    await client.v_store_batch("s", 0, 0, 4, ROWS)
    target = np.zeros((2, 2, 64), np.float32)
    order = []
    count = await client.v_fetch_batch_into(
        "s",
        [(0, 2, 4), (0, 0, 2)],
        lambda index, nbytes: memoryview(target[index]).cast("B"),
        order.append,
    )
    assert count == 2
    assert order == [0, 1]
    assert np.array_equal(target[0], ROWS[2:])
    assert np.array_equal(target[1], ROWS[:2])


async def test_session_names(client: Any) -> None:
    wanted = {b"a%d" % i for i in range(25)}
    for name in wanted:
        await client.v_create(name, 8)
    await client.v_create("b", 8)
    assert set(await names(client.v_list(count=7))) == wanted | {b"b"}
    assert set(await names(client.v_list(match="a*", count=7))) == wanted


async def test_errors_carry_the_servers_code_and_leave_the_connection_usable(client: Any) -> None:
    await client.v_create("s", 64, "fp32")
    number = await client.execute("CLIENT", "ID")
    with pytest.raises(errors.ServerError, match="no row 5 in layer 0") as caught:
        await client.v_fetch("s", 0, 5, 6)
    assert caught.value.code == "ERR"
    with pytest.raises(errors.ExistsError) as caught:
        await client.v_create("s", 32)
    assert caught.value.code == "EXISTS"
    with pytest.raises(errors.ServerError, match="blob must be"):
        await client.v_store_batch("s", 0, 0, 4, ROWS[:3])
    assert await client.execute("CLIENT", "ID") == number


async def test_a_prefix_from_store_to_drop(client: Any) -> None:
    layers = sides()
    hashes = [2**64 - 1, 7]
    assert await client.prefix_lookup("ns") is False
    stored = await client.store_prefix(
        "ns", "fp32@64*2", "fp32@64*2", layers, 4, blocks=(2, hashes), prefill_ms=100, meta=b"\0meta", ex_s=1000
    )
    assert stored is Stored.STORED
    assert await client.store_prefix("ns", "fp32@64*2", "fp32@64*2", layers, 4) is Stored.EXISTS
    assert await client.prefix_lookup("ns", tokens=4, prefill_ms=5.5) is True
    assert await client.prefix_lookup("ns", wait_ms=1) is True

    fetched = await client.prefix_fetch("ns")
    wanted = [side for layer in layers for side in (layer.keys, layer.values)]
    assert [part.tobytes() for part in fetched] == [side.tobytes() for side in wanted]
    part = await client.prefix_fetch("ns", start=1, end=3, as_="fp16")
    assert np.array_equal(part[2].reshape(2, 64), layers[1].keys[1:3].astype(np.float16))

    scratch = np.empty(4 * 64, np.float32)
    copies = []
    count = await client.prefix_fetch_into(
        "ns", lambda index, nbytes: memoryview(scratch).cast("B")[:nbytes], lambda index: copies.append(scratch.copy())
    )
    assert count == 4
    assert all(np.array_equal(copy, side.reshape(-1)) for copy, side in zip(copies, wanted, strict=True))

    assert await client.prefix_meta("ns") == b"\0meta"
    assert await client.prefix_match([*hashes, 9], size=2) == Match(b"ns", 2, 4)
    assert await client.prefix_match(hashes[:1], size=2, within="n") == Match(b"ns", 1, 2)
    assert await client.prefix_match([1], size=2) is None
    assert await client.prefix_match(hashes, size=2, within="other") is None
    table = await client.prefix_blocks("ns")
    assert isinstance(table, Blocks)
    assert (table.size, table.hashes.tolist()) == (2, hashes)
    assert (await client.prefix_membership("ns", [7, 8, 2**64 - 1])).tolist() == [True, False, True]
    assert await client.prefix_chain("ns") == [Segment(b"ns", 0, 4)]
    assert 990 <= await client.prefix_ttl("ns") <= 1000
    assert await client.prefix_persist("ns") is True
    assert await client.prefix_persist("ns") is False
    assert await client.prefix_ttl("ns") == -1
    assert await client.prefix_pin("ns") is True
    assert await client.prefix_pin("ns") is False
    assert (await client.v_info("ns_pk")).pinned
    assert await client.prefix_unpin("ns") is True
    assert await names(client.prefix_list(match="n*")) == [b"ns"]
    assert (await client.prefix_info())["registered_prefixes"] == "1"
    assert await client.prefix_drop("ns", "none") == 1
    assert await client.prefix_ttl("ns") == -2


async def test_a_prefix_without_a_declaration(client: Any) -> None:
    assert await client.prefix_register("ns", 64, "fp32", pin=True) is Registered.OK
    assert await client.prefix_lookup("ns") is True
    assert await client.prefix_blocks("ns") is None
    assert await client.prefix_membership("ns", [1, 2]) is None
    assert await client.prefix_meta("ns") is None
    with pytest.raises(ValueError, match="layers and tokens"):
        await client.prefix_register("ns", 64, layers=2)
    with pytest.raises(ValueError, match="states belong"):
        await client.prefix_register("ns", 64, states=2)
    with pytest.raises(ValueError, match="one row"):
        await client.v_fetch_ids("ns_pk", 0, [])
    with pytest.raises(ValueError, match="name"):
        await client.execute()
    with pytest.raises(errors.ServerError, match="STATES must be 0"):
        await client.prefix_register("p", 64, "fp32", layers=0, tokens=0, states=2)
    assert await client.prefix_register("p", 64, "fp32", layers=0, tokens=0, states=0) is Registered.OK
    assert await client.prefix_lookup("p") is True
    with pytest.raises(ValueError, match="start and end"):
        await client.prefix_fetch("ns", start=1)


async def test_a_declared_prefix_filled_by_hand(client: Any, server: Started) -> None:
    layers = sides(1)
    registered = await client.prefix_register_schema("ns", "fp32@64*1", "fp32@64*1", layers=1, tokens=4)
    assert registered is Registered.OK
    async with aio.PionClient(port=server.port) as other:
        again = await other.prefix_register_schema("ns", "fp32@64*1", "fp32@64*1", layers=1, tokens=4)
        assert again is Registered.PENDING
        assert await other.store_prefix("ns", "fp32@64*1", "fp32@64*1", layers, 4) is Stored.PENDING
        with pytest.raises(errors.BusyError):
            await other.v_store_batch("ns_pk", 0, 0, 4, layers[0].keys)
    await client.v_store_batch("ns_pk", 0, 0, 4, layers[0].keys)
    assert await client.prefix_lookup("ns") is False
    await client.v_store_batch("ns_pv", 0, 0, 4, layers[0].values)
    assert await client.prefix_lookup("ns") is True


async def test_a_failed_store_leaves_nothing_behind(client: Any) -> None:
    layers = [*sides(1), Layer(sides()[1].keys[:, :32].copy(), sides()[1].values)]
    with pytest.raises(errors.ServerError, match="blob must be"):
        await client.store_prefix("ns", "fp32@64*2", "fp32@64*2", layers, 4)
    assert await client.prefix_lookup("ns") is False
    # The lost connection takes the half-filled prefix along, at once or as soon as the server has noticed.
    with trio.fail_after(10):
        while await client.store_prefix("ns", "fp32@64*2", "fp32@64*2", sides(), 4) is not Stored.STORED:
            await trio.testing.wait_all_tasks_blocked()
    assert await client.prefix_lookup("ns") is True


async def test_chains(client: Any) -> None:
    whole = sides(1, 6)[0]
    root = [Layer(whole.keys[:4], whole.values[:4])]
    leaf = [Layer(whole.keys[4:], whole.values[4:])]
    await client.store_prefix("root", "fp32@64*1", "fp32@64*1", root, 4)
    await client.store_prefix("leaf", "fp32@64*1", "fp32@64*1", leaf, 2, parent=("root", 4))
    keys, values = await client.prefix_fetch("leaf")
    assert keys.tobytes() == whole.keys.tobytes()
    assert values.tobytes() == whole.values.tobytes()
    assert await client.prefix_chain("leaf") == [Segment(b"root", 0, 4), Segment(b"leaf", 4, 2)]
    await client.prefix_register("pending", 64, "fp32", layers=1, tokens=4)
    assert await client.prefix_chain("pending") is None
    assert await client.prefix_chain("no such prefix") is None
    with pytest.raises(errors.ServerError, match="CASCADE"):
        await client.prefix_drop("root")
    assert await client.prefix_drop("root", cascade=True) == 2


async def test_a_waiting_lookup_is_answered_when_the_prefix_completes(client: Any, server: Started) -> None:
    layers = sides(1)
    async with aio.PionClient(port=server.port) as other:
        await other.prefix_register("ns", 64, "fp32", layers=1, tokens=4)
        await other.v_store_batch("ns_pk", 0, 0, 4, layers[0].keys)
        found = []
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                found.append(await client.prefix_lookup("ns", wait_ms=60_000))

            nursery.start_soon(wait)
            unit = server.services.vstore.any_prefix(b"ns")
            with trio.fail_after(10):
                while not unit.pending.waiters:
                    await trio.testing.wait_all_tasks_blocked()
            await client.ping()
            await other.v_store_batch("ns_pv", 0, 0, 4, layers[0].values)
        assert found == [True]


async def test_names_are_bytes(client: Any) -> None:
    name = b"a|b\r\n\0\xff"
    await client.prefix_register(name, 64, "fp32")
    assert await names(client.prefix_list()) == [name]
    assert await client.prefix_lookup(name) is True


@pytest.mark.parametrize("twin", [False, True])
async def test_password_and_unix_socket(tmp_path: Path, twin: bool) -> None:
    path = str(tmp_path / "s")

    def connect(**options: Any) -> Any:
        return aio.PionClient(unix=path, **options) if twin else InThread(PionClient(unix=path, **options))

    async with running_server(Config(requirepass="secret", unix=path)):
        with pytest.raises(errors.NotAuthenticatedError):
            await connect().ping()
        with pytest.raises(errors.WrongPasswordError):
            await connect(password="wrong").ping()
        client = connect(password="secret")
        assert await client.ping() > 0
        if twin:
            client.close()
        else:
            await client.close()
