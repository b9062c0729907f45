"""The checks of one older Python client: `python older_client.py MODULE PORT [PASSWORD]`. Prints version and `ok`."""

from __future__ import annotations

import importlib
import sys

import pytest


def main(module_name: str, port: int, password: str | None = None) -> None:
    module = importlib.import_module(module_name)
    client_class = getattr(module, "Redis", None) or module.Valkey
    for protocol in (2, 3):
        with client_class(port=port, password=password, protocol=protocol, client_name="tester") as client:
            assert client.ping() is True
            info = client.client_info()
            assert (info["name"], info["lib-name"].split("(")[0]) == ("tester", f"{module_name}-py")
            assert any(entry["name"] == "tester" for entry in client.client_list())
            assert client.info()["role"] == "master"
            assert client.config_get("maxclients")["maxclients"] == "10000"
            assert client.command()["ping"]["arity"] == -1
            assert client.command_count() > 40
            assert isinstance(client.slowlog_get(), list)
            assert len(client.time()) == 2
            assert client.module_list()
            with client.pipeline() as pipe:
                assert pipe.echo("a").ping().execute() == [b"a", True]
            rows = bytes(range(256)) * 4096
            client.execute_command("V.DROP", "older")
            assert client.execute_command("V.CREATE", "older", 256, "VQUANT", "fp32") == b"OK"
            assert client.execute_command("V.STOREBATCH", "older", 0, 0, 1024, rows) == b"OK"
            assert client.execute_command("V.FETCH", "older", 0, "RANGE", 0, 1024) == rows
            with pytest.raises(module.ResponseError, match="unknown command"):
                client.execute_command("NOSUCH")
    sys.stdout.write(f"{module.__version__} ok\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
