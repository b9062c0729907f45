"""Both lanes of a real server: the same answers, the same errors, and what is done when one lane is not there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from pion.client import Layer, PionClient, Stored, aio, errors
from pion.config import Config
from pion.server import Started
from pion.testing import ServerProcess, running_server

from .test_restart import free_port

RUNS = "fp32@96*2,fp16@32*1,int8@64*1"


def rows(layers: int, tokens: int, *, seed: int = 0) -> list[Layer]:
    """Rows in fp32, whatever they are stored as."""
    random = np.random.default_rng(seed)
    widths = [96, 96, 32, 64][:layers]
    return [Layer(*(random.standard_normal((tokens, width)).astype(np.float32) for _ in range(2))) for width in widths]


@attrs.frozen
class Pair:
    """The same server over each lane."""

    binary: PionClient
    resp: PionClient
    process: ServerProcess

    @property
    def both(self) -> Iterator[PionClient]:
        return iter((self.binary, self.resp))


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        ServerProcess("--kvcache") as running,
        PionClient(port=running.port, lane="binary") as binary,
        PionClient(port=running.port, lane="resp") as resp,
    ):
        yield Pair(binary, resp, running)


@pytest.fixture
def stored(pair: Pair) -> Iterator[Pair]:
    """A prefix of several formats, a segment that continues it, and a session."""
    resp = pair.resp
    assert resp.store_prefix("root", RUNS, RUNS, rows(4, 40), 40, as_="fp32") is Stored.STORED
    leaf = resp.store_prefix("leaf", RUNS, RUNS, rows(4, 9, seed=1), 9, as_="fp32", parent=("root", 40))
    assert leaf is Stored.STORED
    resp.v_create("session", 96, "fp32")
    resp.v_store_batch("session", 3, 0, 40, rows(1, 40)[0].keys)
    yield pair
    resp.prefix_drop("root", cascade=True)
    resp.v_drop("session")


@pytest.mark.parametrize("as_", ["native", "fp32", "fp16", "bf16"])
@pytest.mark.parametrize("ns", ["root", "leaf"])
@pytest.mark.parametrize("span", [(None, None), (0, 0), (0, 1), (0, 40), (5, 33)])
def test_a_prefix_is_the_same_over_both_lanes(
    stored: Pair, ns: str, as_: Any, span: tuple[int | None, int | None]
) -> None:
    first, second = (client.prefix_fetch(ns, start=span[0], end=span[1], as_=as_) for client in stored.both)
    assert len(first) == len(second) == 8
    for one, other in zip(first, second, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    if as_ == "fp32" and span == (5, 33) and ns == "root":
        assert np.array_equal(first[2].reshape(28, 96), rows(4, 40)[1].keys[5:33])


def test_rows_over_a_segment_border(stored: Pair) -> None:
    first, second = (client.prefix_fetch("leaf", start=38, end=49, as_="fp32") for client in stored.both)
    assert [part.tobytes() for part in first] == [part.tobytes() for part in second]
    assert np.array_equal(first[1].reshape(11, 96)[2:], rows(4, 9, seed=1)[0].values)


@pytest.mark.parametrize("window", [1000, 1 << 20])
def test_a_fetch_into_memory_is_the_same_over_both_lanes(stored: Pair, window: int) -> None:
    scratch = np.empty(window, np.uint8)

    def fetched_by(client: PionClient) -> dict[int, bytearray]:
        parts: dict[int, bytearray] = {}
        size = 0

        def receive(index: int, nbytes: int) -> memoryview:
            nonlocal size
            size = min(nbytes, window)
            return scratch.data

        def done(index: int) -> None:
            parts.setdefault(index, bytearray()).extend(scratch[:size].tobytes())

        assert client.prefix_fetch_into("leaf", receive, done) == 8
        return parts

    first, second = map(fetched_by, stored.both)
    assert first == second


@pytest.mark.parametrize("as_", ["native", "fp32", "fp16", "bf16"])
def test_sessions_are_the_same_over_both_lanes(stored: Pair, as_: Any) -> None:
    def asked(client: PionClient) -> list[bytes]:
        single = client.v_fetch("session", 3, 4, 17, as_=as_)
        batch = client.v_fetch_batch("session", [(3, 0, 3), (3, 39, 40), (3, 7, 7)], as_=as_)
        assert [len(part) for part in batch] == [3, 1, 0]
        sides = client.v_fetch_batch("root_pv", [(0, 0, 3), (2, 1, 2)], as_=as_)
        return [part.tobytes() for part in (single, *batch, *sides)]

    first, second = map(asked, stored.both)
    assert first == second


def test_what_is_stored_over_one_lane_is_read_over_the_other(pair: Pair) -> None:
    data = rows(1, 40)[0].keys
    pair.resp.v_create("mixed", 96, "fp32")
    pair.binary.v_store_batch("mixed", 0, 0, 40, data)
    assert pair.resp.v_fetch("mixed", 0, 0, 40).tobytes() == data.tobytes()
    pair.binary.v_store_batch("mixed", 0, 5, 2, data[:2].astype(np.float16), as_="fp16")
    assert np.array_equal(pair.resp.v_fetch("mixed", 0, 5, 7), data[:2].astype(np.float16))
    large = np.arange(96 * 30_000, dtype=np.float32)
    pair.binary.v_store_batch("mixed", 1, 0, 30_000, large)
    for client in pair.both:
        assert client.v_fetch("mixed", 1, 0, 30_000).tobytes() == large.tobytes()
    pair.resp.v_drop("mixed")


REFUSED: list[Callable[[PionClient], object]] = [
    lambda c: c.prefix_fetch("no such prefix"),
    lambda c: c.prefix_fetch("root", start=0, end=41),
    lambda c: c.prefix_fetch("root", start=9, end=3),
    lambda c: c.prefix_fetch(b""),
    lambda c: c.prefix_fetch(b"x" * 5000),
    lambda c: c.v_fetch("no such session", 0, 0, 1),
    lambda c: c.v_fetch("session", 0, 0, 1),
    lambda c: c.v_fetch("session", 3, 39, 41),
    lambda c: c.v_fetch("session", 3, 5, 4),
    lambda c: c.v_fetch("session", 2**31, 0, 1),
    lambda c: c.v_fetch_batch("session", [(3, 0, 1), (3, 40, 41)]),
    lambda c: c.v_store_batch("no such session", 0, 0, 1, bytes(384)),
    lambda c: c.v_store_batch("session", 3, 0, 1, bytes(383)),
    lambda c: c.v_store_batch("session", 3, 0, 1, bytes(385)),
    lambda c: c.v_store_batch("session", 3, 0, 0, b"x"),
    lambda c: c.v_store_batch("root_pk", 0, 0, 1, bytes(384)),
]


@pytest.mark.parametrize("call", REFUSED)
def test_a_refusal_is_the_same_error_over_both_lanes(stored: Pair, call: Callable[[PionClient], object]) -> None:
    found = []
    for client in stored.both:
        with pytest.raises(errors.ServerError) as caught:
            call(client)
        found.append((type(caught.value), caught.value.code))
        line = client._lines._binary or client._lines._main
        assert line.open, "the connection stays usable"
    assert found[0] == found[1]


def test_a_prefix_that_is_being_filled_belongs_to_the_client_whatever_the_lane(pair: Pair) -> None:
    data = rows(1, 4)[0]
    with PionClient(port=pair.process.port) as client:
        for claim in (
            lambda: client.prefix_register_schema("mine", "fp32@96*1", "fp32@96*1", layers=1, tokens=4),
            lambda: client.execute(
                *("KV.PREFIX.REGISTER.SCHEMA", "mine", "K", "fp32@96*1", "V", "fp32@96*1", "LAYERS", 1, "TOKENS", 4)
            ),
        ):
            claim()
            client.v_store_batch("mine_pk", 0, 0, 4, data.keys)
            assert client.v_fetch("mine_pk", 0, 0, 4).tobytes() == data.keys.tobytes()
            with pytest.raises(errors.BusyError):
                pair.binary.v_store_batch("mine_pv", 0, 0, 4, data.values)
            client.v_store_batch("mine_pv", 0, 0, 4, data.values)
            assert pair.binary.prefix_fetch("mine", as_="fp32")[1].tobytes() == data.values.tobytes()
            assert client.prefix_drop("mine") == 1


@pytest.fixture(params=["sync", "aio"])
def client_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def fetched(kind: str, port: int, call: str, *args: Any, **options: Any) -> Any:
    """One call of a new client of that kind."""

    def sync() -> Any:
        with PionClient(port=port, **options) as client:
            return getattr(client, call)(*args)

    if kind == "sync":
        return await trio.to_thread.run_sync(sync)
    async with aio.PionClient(port=port, **options) as client:
        return await getattr(client, call)(*args)


async def filled(started: Started, **options: Any) -> None:
    await fetched("aio", started.port, "v_create", "s", 8, "fp32", lane="resp", **options)
    await fetched("aio", started.port, "v_store_batch", "s", 0, 0, 1, np.ones(8, np.float32), **options)


async def test_a_server_without_the_lane(client_kind: str) -> None:
    async with running_server(Config(binary_port=-1)) as started:
        await filled(started)
        result = await fetched(client_kind, started.port, "v_fetch", "s", 0, 0, 1)
        assert result.tolist() == [[1.0] * 8]
        with pytest.raises(errors.ConnectFailedError, match="no binary lane"):
            await fetched(client_kind, started.port, "v_fetch", "s", 0, 0, 1, lane="binary", retries=0)


async def test_the_lane_is_really_used(client_kind: str) -> None:
    async with running_server(Config()) as started:
        await filled(started)
        assert started.binary_port
        result = await fetched(client_kind, started.port, "v_fetch", "s", 0, 0, 1, lane="binary")
        assert result.tolist() == [[1.0] * 8]


async def test_passwords(client_kind: str) -> None:
    async with running_server(Config(requirepass="right")) as started:
        await filled(started, password="right")
        for lane in ("binary", "auto", "resp"):
            result = await fetched(
                client_kind, started.port, "v_fetch", "s", 0, 0, 1, lane=lane, password="right", username="default"
            )
            assert result.tolist() == [[1.0] * 8]
            with pytest.raises(errors.WrongPasswordError):
                await fetched(client_kind, started.port, "v_fetch", "s", 0, 0, 1, lane=lane, password="wrong")
            with pytest.raises(errors.NotAuthenticatedError):
                await fetched(client_kind, started.port, "v_fetch", "s", 0, 0, 1, lane=lane)


def test_a_server_that_comes_back_with_another_binary_port_is_found() -> None:
    port = free_port()
    data = np.ones((4, 96), np.float32)
    with PionClient(port=port, lane="binary") as strict, PionClient(port=port) as client:
        for turn in range(3):
            with ServerProcess("--kvcache", "--port", str(port), "--binary-port", "0") as running:
                client.v_create("s", 96, "fp32")
                for each in (strict, client):
                    each.v_store_batch("s", 0, 0, 4, data * turn)
                    assert np.array_equal(each.v_fetch("s", 0, 0, 4), data * turn)
                    assert each._lines._binary.peer[1][1] == running.binary_port
        with ServerProcess("--kvcache", "--port", str(port), "--binary-port", "-1"):
            client.v_create("s", 96, "fp32")
            client.v_store_batch("s", 0, 0, 4, data)
            assert client._lines._binary is None
        with ServerProcess("--kvcache", "--port", str(port), "--binary-port", "0"):
            client.v_create("s", 96, "fp32")
            client.v_store_batch("s", 0, 0, 4, data)
            assert client._lines._binary.open, "it is looked for again once the main line was lost"


def test_a_server_killed_in_the_middle_of_a_fetch() -> None:
    side = np.zeros((1024, 1024), np.float32)
    seen: list[int] = []
    with ServerProcess("--kvcache") as running, PionClient(port=running.port, lane="binary") as client:
        client.store_prefix("ns", "fp32@1024*4", "fp32@1024*4", [Layer(side, side)] * 4, 1024)
        scratch = np.empty(side.nbytes, np.uint8)

        def done(index: int) -> None:
            seen.append(index)
            if index == 1:
                running.kill()

        with pytest.raises(errors.ConnectionLostError):
            client.prefix_fetch_into("ns", lambda index, nbytes: scratch.data[:nbytes], done)
        assert 2 <= len(seen) < 8


def test_threads_against_a_real_server(pair: Pair) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        side = np.full((64, 256), number, np.float32)
        for turn in range(8):
            name = f"{number}-{turn}"
            pair.binary.store_prefix(name, "fp32@256*2", "fp32@256*2", [Layer(side, side)] * 2, 64)
            if any(part.tobytes() != side.tobytes() for part in pair.binary.prefix_fetch(name)):
                wrong.append(name)
            if pair.binary.prefix_drop(name) != 1:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
