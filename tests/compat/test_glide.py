"""valkey-glide against a real server: a Rust client behind a Python API."""

import asyncio
import struct

import pytest
from glide import (
    Batch,
    ClosingError,
    GlideClient,
    GlideClientConfiguration,
    InfoSection,
    NodeAddress,
    ProtocolVersion,
    RequestError,
    ServerCredentials,
)


async def connect(endpoint, protocol=ProtocolVersion.RESP3, **options) -> GlideClient:
    credentials = ServerCredentials(endpoint.password) if endpoint.password else None
    return await GlideClient.create(
        GlideClientConfiguration(
            [NodeAddress("127.0.0.1", endpoint.port)],
            credentials=credentials,
            protocol=protocol,
            client_name="tester",
            request_timeout=10_000,
            **options,
        )
    )


@pytest.mark.parametrize("protocol", [ProtocolVersion.RESP2, ProtocolVersion.RESP3])
def test_everything(endpoint, protocol):
    async def main():
        client = await connect(endpoint, protocol)
        try:
            assert await client.ping() == b"PONG"
            assert await client.echo("hello") == b"hello"
            assert await client.client_getname() == b"tester"
            assert await client.client_id() > 0
            assert b"role:master" in await client.info([InfoSection.REPLICATION])
            assert (await client.config_get(["maxclients"]))[b"maxclients"] == b"10000"
            assert await client.config_set({"slowlog-max-len": "200"}) == "OK"
            assert await client.config_resetstat() == "OK"
            assert await client.dbsize() == 0
            assert len(await client.time()) == 2
            assert await client.select(0) == "OK"
            with pytest.raises(RequestError, match="DB index is out of range"):
                await client.select(4)
            batch = Batch(is_atomic=True)
            batch.ping()
            batch.echo("a")
            batch.custom_command(["PION.WHOAMI"])
            assert (await client.exec(batch, raise_on_error=True))[:2] == [b"PONG", b"a"]
            receipt = await client.custom_command(["PION.STATS"])
            assert len(receipt) == (16 if protocol is ProtocolVersion.RESP3 else 32)
            rows = struct.pack("<65536f", *range(65536))
            await client.custom_command(["KV.PREFIX.DROP", "glide"])
            assert await client.custom_command(["KV.PREFIX.REGISTER", "glide", "64", "fp32"]) == "OK"
            stored = await client.custom_command(["V.STOREBATCH", "glide_pk", "0", "0", "1024", rows])
            assert stored == "OK"
            assert await client.custom_command(["V.FETCH", "glide_pk", "0", "RANGE", "0", "1024"]) == rows
            assert await client.custom_command(["KV.PREFIX.LOOKUP", "glide"]) == b"HIT"
            assert await asyncio.gather(*(client.echo(str(n)) for n in range(100))) == [b"%d" % n for n in range(100)]
        finally:
            await client.close()

    asyncio.run(main())


def test_wrong_password(guarded_server):
    async def main():
        wrong = type(guarded_server)(guarded_server.port, "wrong")
        with pytest.raises(ClosingError, match=r"WRONGPASS|AuthenticationFailed|authentication"):
            await connect(wrong)

    asyncio.run(main())
