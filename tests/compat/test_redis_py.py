"""redis-py against a real server: RESP2 and RESP3, its own parsers and hiredis, sync and asyncio."""

import asyncio

import numpy as np
import pytest
import redis
import redis.asyncio
from redis._parsers import (
    _AsyncHiredisParser,
    _AsyncRESP2Parser,
    _AsyncRESP3Parser,
    _HiredisParser,
    _RESP2Parser,
    _RESP3Parser,
)
from redis.backoff import NoBackoff
from redis.cache import CacheConfig
from redis.retry import Retry

SYNC = [(2, _RESP2Parser), (3, _RESP3Parser), (2, _HiredisParser), (3, _HiredisParser)]
ASYNC = [(2, _AsyncRESP2Parser), (3, _AsyncRESP3Parser), (2, _AsyncHiredisParser), (3, _AsyncHiredisParser)]


def name(value):
    return f"RESP{value}" if isinstance(value, int) else value.__name__.strip("_")


@pytest.fixture(params=SYNC, ids=lambda pair: f"{name(pair[0])}-{name(pair[1])}")
def client(request, endpoint):
    protocol, parser = request.param
    pool = redis.ConnectionPool(**endpoint.options, protocol=protocol, parser_class=parser, client_name="tester")
    with redis.Redis(connection_pool=pool) as connected:
        yield connected
    pool.disconnect()


def text(value):
    return value.decode() if isinstance(value, bytes) else value


def as_map(reply) -> dict[str, object]:
    """A map in RESP3, a flat list in RESP2."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {text(key): value for key, value in pairs}


def test_connects_and_introduces_itself(client):
    assert client.ping() is True
    info = client.client_info()
    assert info["name"] == "tester"
    assert info["lib-name"].startswith("redis-py")
    assert info["lib-ver"] == redis.__version__
    assert int(info["id"]) == client.client_id()
    assert client.client_getname() in ("tester", b"tester")


def test_connection_commands(client):
    assert client.echo("hello") == b"hello"
    assert client.select(0) is True
    with pytest.raises(redis.ResponseError, match="DB index is out of range"):
        client.select(5)
    assert client.client_setname("other") is True
    assert any(entry["name"] == "other" for entry in client.client_list())
    assert client.client_list(_type="normal")
    assert client.client_no_evict("ON") in ("OK", b"OK", True)
    assert client.client_no_touch("OFF") in ("OK", b"OK", True)


def test_server_commands(client):
    info = client.info()
    assert info["redis_version"] == "7.4.0"
    assert info["role"] == "master"
    assert info["loading"] == 0
    assert info["cluster_enabled"] == 0
    assert "used_memory" in info
    assert "kvprefix_hits" in client.info("pion")
    assert client.info("commandstats")["cmdstat_info"]["calls"] >= 1
    config = client.config_get("max*")
    assert config["maxclients"] == "10000"
    assert client.config_set("slowlog-max-len", 200) is True
    assert client.config_get("slowlog-max-len") == {"slowlog-max-len": "200"}
    assert client.dbsize() == 0
    seconds, microseconds = client.time()
    assert seconds > 1_700_000_000
    assert 0 <= microseconds < 1_000_000
    assert client.slowlog_len() >= 0
    assert isinstance(client.slowlog_get(5), list)
    assert client.slowlog_reset() is True
    assert client.latency_latest() == []
    names = [text(module.get(b"name", module.get("name"))) for module in client.module_list()]
    assert {"connection", "server", "stats", "vstore", "kvprefix"} <= set(names)


def test_slowlog_is_parsed(client):
    client.config_set("slowlog-log-slower-than", 0)
    client.echo("in the log")
    client.config_set("slowlog-log-slower-than", 10_000)
    commands = [text(entry["command"]) for entry in client.slowlog_get(10)]
    assert "ECHO in the log" in commands


def test_command_table(client):
    table = client.command()
    assert table["ping"]["arity"] == -1
    assert table["kv.prefix.ttl"]["first_key_pos"] == 1
    assert client.command_count() == len(table)
    assert {"get" in table, "ping" in table} == {False, True}
    assert [text(key) for key in client.command_getkeys("V.DROP", "a", "b")] == ["a", "b"]
    assert "client|list" in [text(row) for row in client.command_list()]


def test_errors(client):
    with pytest.raises(redis.ResponseError, match="unknown command 'NOSUCH', with args beginning with: 'a' "):
        client.execute_command("NOSUCH", "a")
    with pytest.raises(redis.ResponseError, match=r"wrong number of arguments for 'kv\.prefix\.ttl' command"):
        client.execute_command("KV.PREFIX.TTL")
    assert client.ping() is True


def test_pipeline_is_a_transaction_by_default(client):
    with client.pipeline() as pipe:
        pipe.echo("a").ping().execute_command("SELECT", 99).echo("b")
        replies = pipe.execute(raise_on_error=False)
    assert [replies[0], replies[1], replies[3]] == [b"a", True, b"b"]
    assert isinstance(replies[2], redis.ResponseError)


def test_pipeline_that_cannot_be_queued(client):
    with client.pipeline() as pipe:
        pipe.echo("a").execute_command("NOSUCH")
        with pytest.raises(redis.ResponseError, match="unknown command 'NOSUCH'"):
            pipe.execute()
    assert client.echo("still fine") == b"still fine"


def test_long_pipeline_without_transaction(client):
    with client.pipeline(transaction=False) as pipe:
        for number in range(3000):
            pipe.echo(number)
        assert pipe.execute() == [b"%d" % number for number in range(3000)]


def test_values_of_megabytes(client):
    rows = np.arange(4096 * 256, dtype=np.float32).reshape(4096, 256)
    client.execute_command("KV.PREFIX.DROP", "compat")
    assert text(client.execute_command("KV.PREFIX.REGISTER", "compat", 256, "fp32")) == "OK"
    assert text(client.execute_command("V.STOREBATCH", "compat_pk", 0, 0, 4096, rows.tobytes())) == "OK"
    assert client.execute_command("V.FETCH", "compat_pk", 0, "RANGE", 0, 4096) == rows.tobytes()
    with client.pipeline() as pipe:
        pipe.execute_command("V.STOREBATCH", "compat_pv", 0, 0, 4096, rows.tobytes())
        pipe.execute_command("V.FETCH", "compat_pv", 0, "RANGE", 1, 3)
        assert pipe.execute()[1] == rows[1:3].tobytes()
    assert text(client.execute_command("KV.PREFIX.LOOKUP", "compat")) == "HIT"
    assert text(client.execute_command("KV.PREFIX.LOOKUP", "nothing")) == "MISS"
    assert client.execute_command("KV.PREFIX.DROP", "compat") == 1


def test_receipt_is_a_map(client):
    receipt = as_map(client.execute_command("PION.STATS"))
    assert len(receipt) == 16
    assert float(receipt["prefill_seconds_avoided"]) >= 0
    assert text(as_map(client.execute_command("PION.WHOAMI"))["user"]) == "default"


def test_kill(client, endpoint):
    with redis.Redis(**endpoint.options, single_connection_client=True) as other:
        victim = other.client_id()
        assert client.client_kill_filter(_id=victim) == 1
        assert victim not in [int(entry["id"]) for entry in client.client_list()]
        # redis-py connects again by itself.
        assert other.client_id() != victim


def test_reset(client):
    with client.client() as single:
        assert single.execute_command("CLIENT", "SETNAME", "temporary")
        assert text(single.execute_command("CLIENT", "GETNAME")) == "temporary"


def test_health_check(endpoint):
    with redis.Redis(**endpoint.options, health_check_interval=1) as checked:
        assert checked.ping() is True


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("password", ["wrong", None])
def test_wrong_password(guarded_server, protocol, password):
    options = guarded_server.options | {"password": password}
    once = Retry(NoBackoff(), 0)
    with redis.Redis(**options, protocol=protocol, retry=once) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


@pytest.mark.parametrize("protocol", [2, 3])
def test_url_with_user_password_and_database(guarded_server, protocol):
    url = f"redis://default:correct%20horse@127.0.0.1:{guarded_server.port}/0?protocol={protocol}"
    with redis.Redis.from_url(url) as client:
        assert client.ping() is True
    refused = pytest.raises(redis.ResponseError, match="DB index is out of range")
    with redis.Redis.from_url(url.replace("/0?", "/3?")) as client, refused:
        client.ping()


def test_client_side_caching_is_refused_clearly(open_server):
    refused = pytest.raises(redis.ResponseError, match="unknown subcommand 'TRACKING'")
    with redis.Redis(**open_server.options, protocol=3, cache_config=CacheConfig()) as client, refused:
        client.ping()


@pytest.mark.parametrize(("protocol", "parser"), ASYNC, ids=name)
def test_asyncio(endpoint, protocol, parser):
    async def main():
        pool = redis.asyncio.ConnectionPool(**endpoint.options, protocol=protocol, parser_class=parser)
        async with redis.asyncio.Redis(connection_pool=pool) as client:
            assert await client.ping() is True
            assert (await client.info("replication"))["role"] == "master"
            assert (await client.client_info())["resp"] == str(protocol)
            async with client.pipeline(transaction=True) as pipe:
                assert await pipe.echo("a").ping().execute() == [b"a", True]
            replies = await asyncio.gather(*(client.echo(str(number)) for number in range(50)))
            assert replies == [b"%d" % number for number in range(50)]
            payload = bytes(range(256)) * 8192
            assert await client.echo(payload) == payload
            assert len(as_map(await client.execute_command("PION.STATS"))) == 16
        await pool.aclose()

    asyncio.run(main())
