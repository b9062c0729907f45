"""The example plugin, tested as any plugin author can: through `pion` and `pion.testing` alone."""

from __future__ import annotations

import struct

import pytest
import trio

import pion
import pion_example
from pion.testing import Harness, make_harness, running_server


@pytest.fixture
def harness() -> Harness:
    return make_harness(pion.Config(plugins="vstore,kvprefix,server,example"))


async def store(harness: Harness, ns: str, tokens: int, *options: str | int) -> None:
    """One layer of `tokens` rows of one value, on both sides."""
    assert await harness.call("KV.PREFIX.REGISTER", ns, 1, "fp32", *options) == pion.OK
    for side in ("_pk", "_pv"):
        rows = struct.pack(f"<{tokens}f", *range(tokens))
        assert await harness.call("V.STOREBATCH", ns + side, 0, 0, tokens, rows) == pion.OK


async def test_tokens_of_a_chain(harness: Harness) -> None:
    await store(harness, "root", 5, "LAYERS", 1, "TOKENS", 5)
    await store(harness, "leaf", 3, "LAYERS", 1, "TOKENS", 3, "PARENT", "root", 5)
    assert await harness.call("EXAMPLE.TOKENS", "root") == 5
    assert await harness.call("EXAMPLE.TOKENS", "leaf") == 8


async def test_tokens_of_nothing_is_an_error(harness: Harness) -> None:
    assert isinstance(await harness.call("EXAMPLE.TOKENS", "nobody"), pion.ErrorReply)
    reply = await harness.call("EXAMPLE.TOKENS")
    assert isinstance(reply, pion.ErrorReply)
    assert "wrong number of arguments" in reply.text


async def test_the_service_samples_the_clients(harness: Harness, autojump_clock: trio.testing.MockClock) -> None:
    """On the test's own clock: no real second passes."""
    (sample,) = pion_example.register_services(harness.services)
    async with trio.open_nursery() as nursery:
        await nursery.start(sample)
        others = [harness.client(), harness.client()]
        await trio.sleep(1.5)
        for other in others:
            other.disconnect()
        assert await harness.call("EXAMPLE.PEAK") == 3
        info = await harness.call("INFO", "example")
        assert isinstance(info, str)
        assert info.split() == ["#", "Example", "example_clients_peak:3", "example_clients_closed:2"]
        await trio.sleep(60)
        assert await harness.call("EXAMPLE.PEAK") == 1
        nursery.cancel_scope.cancel()


async def test_in_a_running_server() -> None:
    """Loaded by its entry point, its service started, its state released at the end."""
    async with running_server(pion.Config(kvcache=True)) as server:
        async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
            await stream.send_all(b"EXAMPLE.PEAK\r\n")
            assert (await stream.receive_some(100)).startswith(b":")
        assert "example" in server.services.plugins
    assert "example" not in server.services.state
