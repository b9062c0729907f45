"""One real server process for all client tests, and one with a password."""

import attrs
import pytest

from pion.testing import ServerProcess


@attrs.frozen
class Endpoint:
    """Where a server listens. `options` are the keyword arguments most clients take."""

    port: int
    password: str | None = None

    @property
    def options(self) -> dict[str, object]:
        found: dict[str, object] = {"host": "127.0.0.1", "port": self.port}
        return found | ({"password": self.password} if self.password else {})


@pytest.fixture(scope="session")
def open_server():
    with ServerProcess("--kvcache") as server:
        yield Endpoint(server.port)


@pytest.fixture(scope="session")
def guarded_server():
    with ServerProcess("--kvcache", "--requirepass", "correct horse") as server:
        yield Endpoint(server.port, "correct horse")


@pytest.fixture(params=["open", "guarded"])
def endpoint(request, open_server, guarded_server):
    """Both servers in turn: a password changes what a client sends while it connects."""
    return open_server if request.param == "open" else guarded_server
