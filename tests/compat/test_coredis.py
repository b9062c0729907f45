"""coredis under Trio against a real server. It speaks RESP3 only."""

import coredis
import pytest
import trio
from coredis.exceptions import AuthenticationError, ResponseError
from coredis.response._callbacks import NoopCallback


@pytest.fixture
def options(endpoint):
    return endpoint.options


async def test_handshake_with_every_option(options):
    async with coredis.Redis(**options, client_name="tester", db=0, noevict=True, notouch=True) as client:
        assert await client.ping() == b"PONG"
        info = await client.client_info()
        assert (info["name"], info["resp"]) == ("tester", "3")
        assert info["lib-name"].startswith("coredis")
        assert await client.client_id() == info["id"]
        assert any(entry["name"] == "tester" for entry in await client.client_list())


async def test_server_commands(options):
    async with coredis.Redis(**options, decode_responses=True) as client:
        assert (await client.info())["redis_version"] == "7.4.0"
        assert (await client.config_get(["maxclients"]))["maxclients"] == "10000"
        assert await client.config_set({"slowlog-max-len": 200})
        assert await client.dbsize() == 0
        assert (await client.time()).year > 2020
        assert await client.slowlog_len() >= 0
        assert isinstance(await client.slowlog_get(3), tuple)
        assert await client.slowlog_reset()
        assert await client.latency_latest() == {}
        assert await client.command_count() > 40
        table = await client.command()
        assert table["ping"]["arity"] == -1
        docs = await client.command_docs("ping", "client")
        assert docs["ping"]["group"] == "connection"
        assert "client|list" in docs["client"]["subcommands"]
        assert "pion.stats" in await client.command_list()
        modules = await client.module_list()
        assert {module["name"] for module in modules} >= {"connection", "server", "stats"}


async def test_pion_commands(options):
    async with coredis.Redis(**options) as client:

        async def call(command: bytes, *args: object) -> object:
            return await client.create_request(command, *args, callback=NoopCallback())

        rows = bytes(range(256)) * 8192
        await call(b"KV.PREFIX.DROP", "coredis")
        assert await call(b"KV.PREFIX.REGISTER", "coredis", 1024, "fp32") == b"OK"
        assert await call(b"V.STOREBATCH", "coredis_pk", 0, 0, 512, rows) == b"OK"
        assert await call(b"V.FETCH", "coredis_pk", 0, "RANGE", 0, 512) == rows
        assert await call(b"KV.PREFIX.LOOKUP", "coredis") == b"HIT"
        assert len(await call(b"PION.STATS")) == 16
        with pytest.raises(ResponseError, match="no row 512 in layer 0"):
            await call(b"V.FETCH", "coredis_pk", 0, "RANGE", 511, 513)
        assert await call(b"KV.PREFIX.DROP", "coredis") == 1


async def test_transaction(options):
    async with coredis.Redis(**options) as client, client.pipeline(transaction=True) as pipe:
        echoed = pipe.echo("a")
        ponged = pipe.ping()
    assert [await echoed, await ponged] == [b"a", b"PONG"]


async def test_many_tasks_share_a_pool(options):
    async with coredis.Redis(**options, max_connections=8) as client:
        replies: dict[int, bytes] = {}

        async def call(number: int) -> None:
            replies[number] = await client.echo(str(number))

        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(call, number)
        assert replies == {number: b"%d" % number for number in range(200)}


async def test_reply_off(options):
    """With `noreply` coredis sends CLIENT REPLY OFF and waits for nothing."""
    async with coredis.Redis(**options, client_name="silent", noreply=True) as silent:
        await silent.ping()
        await silent.echo("nobody hears this")
        async with coredis.Redis(**options) as client:
            assert any(entry["name"] == "silent" for entry in await client.client_list())


async def test_errors(options):
    async with coredis.Redis(**options) as client:
        with pytest.raises(ResponseError, match="No such user 'nobody'"):
            await client.client_kill(user="nobody")
        assert await client.ping() == b"PONG"


async def test_wrong_password(guarded_server):
    with pytest.RaisesGroup(AuthenticationError, allow_unwrapped=True, flatten_subgroups=True):
        async with coredis.Redis("127.0.0.1", guarded_server.port, password="wrong") as client:
            await client.ping()
