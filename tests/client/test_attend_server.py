"""Attention through both clients and over both lanes of a real server, against a float64 oracle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import trio

from pion.client import Layer, PionClient, Stored, aio, errors
from pion.testing import ServerProcess

HEADS, KV_HEADS, ROWS, WIDTH = 4, 2, 75, 16
RANDOM = np.random.default_rng(5)


def floats(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


K, V = floats(KV_HEADS, ROWS, WIDTH), floats(KV_HEADS, ROWS, WIDTH)
SUFFIX_K, SUFFIX_V = floats(KV_HEADS, 6, WIDTH), floats(KV_HEADS, 6, WIDTH)
MAP = np.array([0, 0, 1, 1], np.uint32)


def oracle(q: np.ndarray, keys: np.ndarray, values: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64 and its LSE: `seen` `[H, M, N]` says which row each query reads."""
    scores = np.einsum("hmd,hnd->hmn", q, keys, dtype=np.float64) / np.sqrt(q.shape[-1])
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("hmn,hnd->hmd", weights / total, values, dtype=np.float64), (top + np.log(total))[..., 0]


def close(result: np.ndarray, wanted: np.ndarray) -> bool:
    return result.dtype == np.float32 and result.shape == wanted.shape and bool(np.abs(result - wanted).max() < 1e-4)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--kvcache", "--attend-slots", "8") as running:
        yield running


class InThread:
    """The synchronous client, its calls awaited."""

    def __init__(self, client: PionClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            return await trio.to_thread.run_sync(lambda: getattr(self._client, name)(*args, **options))

        return call


@pytest.fixture(params=["sync binary", "sync resp", "aio binary", "aio resp"])
async def client(request: pytest.FixtureRequest, server: ServerProcess) -> AsyncIterator[Any]:
    kind, lane = request.param.split()
    if kind == "aio":
        async with aio.PionClient(port=server.port, lane=lane) as twin:
            yield twin
    else:
        with PionClient(port=server.port, lane=lane) as plain:
            yield InThread(plain)


@pytest.fixture
async def warm(client: Any) -> AsyncIterator[Any]:
    await client.attend_store("s", 3, K, V)
    yield client
    await client.attend_drop("s")


def everything(count: int, rows: int = ROWS, heads: int = HEADS) -> np.ndarray:
    return np.ones((heads, count, rows), bool)


@pytest.mark.parametrize("count", [1, 5])
async def test_query(warm: Any, count: int) -> None:
    q = floats(KV_HEADS, count, WIDTH)
    wanted, wanted_lse = oracle(q, K, V, everything(count, heads=KV_HEADS))
    assert close(await warm.attend_query("s", 3, q), wanted)
    output, lse = await warm.attend_query("s", 3, q, lse=True)
    assert close(output, wanted)
    assert close(lse, wanted_lse)


async def test_top_k_and_window(warm: Any) -> None:
    q = floats(KV_HEADS, 3, WIDTH)
    seen = everything(3, heads=KV_HEADS)
    seen[:, :, :-20] = False
    assert close(await warm.attend_query("s", 3, q, window=20), oracle(q, K, V, seen)[0])
    scores = np.where(seen, np.einsum("hmd,hnd->hmn", q, K), -np.inf)
    best = np.argsort(-scores, axis=-1, kind="stable")[..., :4]
    chosen = np.zeros_like(seen)
    np.put_along_axis(chosen, best, values=True, axis=-1)
    assert close(await warm.attend_query("s", 3, q, window=20, top_k=4), oracle(q, K, V, chosen)[0])


@pytest.mark.parametrize("suffix", [0, 2, 6])
@pytest.mark.parametrize("count", [1, 3])
async def test_fused(warm: Any, suffix: int, count: int) -> None:
    q = floats(HEADS, count, WIDTH)
    keys, values = SUFFIX_K[:, :suffix].copy(), SUFFIX_V[:, :suffix].copy()
    every_k, every_v = (np.concatenate([a, b], axis=1)[MAP] for a, b in ((K, keys), (V, values)))
    seen = everything(count, ROWS + suffix)
    for query in range(count):
        seen[:, query, ROWS + max(0, suffix - count + query + 1) :] = False
    result = await warm.attend_query_fused("s", 3, q, keys, values, MAP)
    assert close(result, oracle(q, every_k, every_v, seen)[0])


async def test_sparse(warm: Any) -> None:
    q = floats(KV_HEADS, 1, WIDTH)
    indices = np.array([[5, 74, 0], [9, 10, 11]])
    seen = np.zeros((KV_HEADS, 1, ROWS), bool)
    seen[0, 0, [5, 74]] = seen[1, 0, [9, 10, 11]] = True
    assert close(await warm.attend_query_sparse("s", 3, q, indices, [2, 3]), oracle(q, K, V, seen)[0])


def blocks_seen(q: np.ndarray, block: int, top: int) -> np.ndarray:
    """The rows of the blocks whose mean key scores highest."""
    starts = range(0, ROWS, block)
    means = np.stack([K[:, start : start + block].mean(axis=1, dtype=np.float64) for start in starts], axis=1)[MAP]
    best = np.argsort(-np.einsum("hmd,hbd->hmb", q, means), axis=-1, kind="stable")[..., :top]
    seen = np.zeros((HEADS, 1, ROWS), bool)
    for head in range(HEADS):
        for number in best[head, 0]:
            seen[head, 0, number * block : (number + 1) * block] = True
    return seen


async def test_sparse_auto(warm: Any) -> None:
    q = floats(HEADS, 1, WIDTH)
    result = await warm.attend_query_sparse_auto("s", 3, q, MAP, block=16, top=2, kv_heads=KV_HEADS)
    assert close(result, oracle(q, K[MAP], V[MAP], blocks_seen(q, 16, 2))[0])


async def test_sparse_auto_fused(warm: Any) -> None:
    q = floats(HEADS, 1, WIDTH)
    result = await warm.attend_query_sparse_auto_fused("s", 3, q, SUFFIX_K, SUFFIX_V, MAP, block=16, top=2)
    seen = np.concatenate([blocks_seen(q, 16, 2), everything(1, 6)], axis=-1)
    every_k, every_v = (np.concatenate([a, b], axis=1)[MAP] for a, b in ((K, SUFFIX_K), (V, SUFFIX_V)))
    assert close(result, oracle(q, every_k, every_v, seen)[0])


async def test_states(client: Any) -> None:
    assert await client.attend_lookup("t", 0) == "missing"
    q = floats(KV_HEADS, 1, WIDTH)
    with pytest.raises(errors.ServerError, match="session not found") as caught:
        await client.attend_query("t", 0, q)
    assert type(caught.value) is errors.ServerError
    for layer in range(9):
        await client.attend_store("t", layer, K, V)
    assert await client.attend_lookup("t", 0) == "cold", "there are eight slots"
    assert await client.attend_lookup("t", 8) == "warm"
    with pytest.raises(errors.ColdMissError):
        await client.attend_query("t", 0, q)
    info = await client.attend_info()
    assert (info["warm"], info["cold"]) == (8, 1)
    assert await client.attend_drop("t", 8) == 1
    assert await client.attend_drop("t") == 8


async def test_warm(client: Any) -> None:
    """Rows of the V-store are `[N, H * D]`; a session of them answers as one that was stored by hand."""
    rows = [np.ascontiguousarray(each.transpose(1, 0, 2)).reshape(ROWS, -1) for each in (K, V)]
    width = KV_HEADS * WIDTH
    layers = [Layer(*rows), Layer(rows[0][:, :8].copy(), rows[1][:, :8].copy()), Layer(*rows)]
    runs = f"fp32@{width}*1,fp32@8*1,fp32@{width}*1"
    assert await client.store_prefix("p", runs, runs, layers, ROWS) is Stored.STORED
    assert await client.prefix_warm("p", KV_HEADS, WIDTH) == (2, 1)
    assert await client.prefix_warm("p", KV_HEADS, WIDTH, sid="other") == (2, 1)
    q = floats(KV_HEADS, 2, WIDTH)
    wanted = oracle(q, K, V, everything(2, heads=KV_HEADS))[0]
    for sid in ("p", "other"):
        assert close(await client.attend_query(sid, 2, q), wanted)
    assert await client.attend_lookup("p", 1) == "missing"
    assert await client.prefix_drop("p") == 1
    assert await client.attend_lookup("other", 0) == "missing"


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.attend_query("s", 3, floats(KV_HEADS + 1, 1, WIDTH)),
        lambda c: c.attend_query("s", 3, floats(KV_HEADS, 1, WIDTH + 8)),
        lambda c: c.attend_query_fused("s", 3, floats(HEADS, 1, WIDTH), SUFFIX_K, SUFFIX_V, [0, 0, 1, 2]),
        lambda c: c.attend_query_sparse("s", 3, floats(KV_HEADS, 1, WIDTH), [[0], [ROWS]], [1, 1]),
        lambda c: c.attend_query_sparse("s", 3, floats(KV_HEADS, 1, WIDTH), [[1, 1], [0, 1]], [2, 2]),
        lambda c: c.attend_query_sparse("s", 3, floats(KV_HEADS, 1, WIDTH), [[1], [0]], [0, 1]),
        lambda c: c.attend_query_sparse_auto("s", 3, floats(HEADS, 1, WIDTH), MAP, block=16, top=6, kv_heads=KV_HEADS),
        lambda c: c.attend_query("s", -3, floats(KV_HEADS, 1, WIDTH)),
        lambda c: c.attend_store("s", 3, floats(1, 1, 7), floats(1, 1, 7)),
    ],
)
async def test_what_the_server_refuses_changes_nothing(warm: Any, call: Callable[[Any], Any]) -> None:
    with pytest.raises(errors.ServerError):
        await call(warm)
    q = floats(KV_HEADS, 1, WIDTH)
    assert close(await warm.attend_query("s", 3, q), oracle(q, K, V, everything(1, heads=KV_HEADS))[0])


def test_both_lanes_give_the_same_bits(server: ServerProcess) -> None:
    with (
        PionClient(port=server.port, lane="binary") as binary,
        PionClient(port=server.port, lane="resp") as resp,
    ):
        binary.attend_store("s", 0, K, V)
        q, one = floats(KV_HEADS, 7, WIDTH), floats(HEADS, 1, WIDTH)
        for ask in (
            lambda client: client.attend_query("s", 0, q),
            lambda client: client.attend_query("s", 0, q, top_k=3, window=30),
            lambda client: np.concatenate([each.ravel() for each in client.attend_query("s", 0, q, lse=True)]),
            lambda client: client.attend_query_fused("s", 0, one, SUFFIX_K, SUFFIX_V, MAP, window=9),
            lambda client: client.attend_query_sparse_auto("s", 0, one, MAP, block=8, top=3, kv_heads=2, window=40),
            lambda client: client.attend_query_sparse_auto_fused(
                "s", 0, one, SUFFIX_K, SUFFIX_V, MAP, block=8, top=3, window=40
            ),
        ):
            assert ask(binary).tobytes() == ask(resp).tobytes()
        for value in (np.nan, np.inf):
            odd = q.copy()
            odd[0, 0, 0] = value
            assert binary.attend_query("s", 0, odd).tobytes() == resp.attend_query("s", 0, odd).tobytes()
        assert binary.ping() > 0
        binary.attend_drop("s")
