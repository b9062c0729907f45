"""MEMORY as Redis clients call it, RESP2 and RESP3."""

import coredis
import pytest
import redis


@pytest.fixture
def session(endpoint):
    """A V session that is there, and the endpoint."""
    with redis.Redis(**endpoint.options) as client:
        client.execute_command("V.CREATE", "compat|memory", 64)
        yield "compat|memory", endpoint
        client.execute_command("V.DROP", "compat|memory")


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py(session, protocol):
    name, endpoint = session
    with redis.Redis(**endpoint.options, protocol=protocol) as client:
        assert client.memory_usage(name) == client.memory_usage(name, samples=5) > len(name)
        assert client.memory_usage("nosuch") is None
        stats = client.memory_stats()
        assert stats["total.allocated"] >= client.memory_usage(name)
        assert stats["keys.count"] >= 1


async def test_coredis(session):
    name, endpoint = session
    async with coredis.Redis(**endpoint.options, decode_responses=True) as client:
        used = await client.memory_usage(name)
        assert used == await client.memory_usage(name, samples=5) > len(name)
        assert await client.memory_usage("nosuch") is None
        assert (await client.memory_stats())["total.allocated"] >= used
        assert "memory" in await client.memory_doctor()
