"""What only a running server shows: shutdown, limits changed live, counters of real connections."""

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pion.testing import ServerProcess

#: redis-py connects again for seconds when a server is gone on purpose.
ONCE = Retry(NoBackoff(), 0)


@pytest.mark.parametrize("options", [{}, {"nosave": True}, {"now": True, "force": True}])
def test_shutdown_ends_the_process(options):
    with ServerProcess("--kvcache") as server, redis.Redis(port=server.port, retry=ONCE) as client:
        idle = redis.Redis(port=server.port)
        assert idle.ping() is True
        client.shutdown(**options)
        assert server.process.wait(20) == 0
        idle.close()


def test_shutdown_save_is_refused(open_server):
    with redis.Redis(**open_server.options) as client:
        with pytest.raises(redis.ResponseError, match="has no file to save to"):
            client.shutdown(save=True)
        assert client.ping() is True


def test_maxclients_changes_live():
    with ServerProcess("--kvcache") as server, redis.Redis(port=server.port) as client:
        assert client.config_set("maxclients", 2) is True
        second = redis.Redis(port=server.port)
        assert second.ping() is True
        with pytest.raises(redis.ConnectionError, match="max number of clients reached"):
            redis.Redis(port=server.port, retry=ONCE).ping()
        assert client.info("stats")["rejected_connections"] == 1
        assert client.config_set("maxclients", 3) is True
        third = redis.Redis(port=server.port)
        assert third.ping() is True
        assert client.info("clients")["connected_clients"] == 3
        second.close()
        third.close()


def test_transfer_counters_are_in_info(open_server):
    with redis.Redis(**open_server.options) as client:
        stats = client.info("stats")
        assert stats["receiving_bytes"] == stats["receiving_refused"] == 0
        assert stats["unsent_bytes"] == 0
        assert stats["slow_readers_dropped"] >= 0
        assert client.info("memory")["used_memory"] >= 0
