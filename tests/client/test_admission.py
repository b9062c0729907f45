"""Both clients against a server that defers (--admission)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from pion.client import PionClient, Registered, Stored, aio
from pion.config import Config
from pion.testing import running_server

from .test_methods import InThread, sides


@pytest.fixture(params=["sync", "aio"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    async with running_server(Config(admission=2)) as server:
        if request.param == "aio":
            async with aio.PionClient(port=server.port) as twin:
                yield twin
        else:
            with PionClient(port=server.port) as plain:
                yield InThread(plain)


async def test_a_deferred_prefix_is_not_stored(client: Any) -> None:
    shape = "fp32@64*2"
    for _ in range(2):
        assert await client.store_prefix("ns", shape, shape, sides(), 4) is Stored.DEFERRED
        assert await client.execute("V.LIST") == [b"0", []]
        assert await client.prefix_lookup("ns") is False
    assert await client.store_prefix("ns", shape, shape, sides(), 4) is Stored.STORED
    assert await client.prefix_lookup("ns") is True
    assert await client.store_prefix("ns", shape, shape, sides(), 4) is Stored.EXISTS


async def test_registering_says_so(client: Any) -> None:
    assert await client.prefix_register("ns", 64, "fp32") is Registered.DEFERRED
    assert await client.prefix_register_schema("ns", "fp32@64*1", "fp16@8*1") is Registered.DEFERRED
    assert await client.prefix_register("kept", 64, "fp32", pin=True) is Registered.OK
    assert await client.prefix_lookup("ns") is False
    assert await client.prefix_lookup("ns") is False
    assert await client.prefix_register("ns", 64, "fp32") is Registered.OK
