"""Opening the listening sockets, with errors that say which address and what to do."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

import attrs
import trio

from pion.config import Config
from pion.errors import StartupError

AFTER_PORT: Final = -2
"""Of `binary_port`: the port after that of the RESP lane."""
NO_BINARY_LANE: Final = -1
MAX_PORT: Final = 65535


@attrs.frozen(eq=False)
class Listeners:
    """The listening sockets, by what is spoken on them."""

    resp: list[trio.SocketListener]
    """TCP first, then the Unix socket."""
    binary: list[trio.SocketListener]

    @property
    def all(self) -> list[trio.SocketListener]:
        """Those of both lanes."""
        return [*self.resp, *self.binary]

    @property
    def tcp_port(self) -> int:
        """The TCP port of the RESP lane."""
        return _port(self.resp[0])

    @property
    def binary_port(self) -> int:
        """The TCP port of the binary lane; 0 without one."""
        return _port(self.binary[0]) if self.binary else 0

    def describe(self) -> list[str]:
        """Every address as a URL, for the banner and the logs."""
        return [describe(each) for each in self.resp] + [describe(each, "pion-binary") for each in self.binary]


def _advice(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "is another server running there? --port 0 picks a free port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "this user may not open that port: --port 1974, or another above 1023"
    return "--host must be an address of this machine"


async def open_listeners(config: Config) -> Listeners:
    """Bind the TCP ports and the Unix socket. Raises `StartupError` saying which address and why."""
    opened = Listeners([], [])
    try:
        try:
            opened.resp.extend(await trio.open_tcp_listeners(config.port, host=config.host, backlog=config.backlog))
        except OSError as error:
            raise StartupError(
                f"can't listen on {config.host}:{config.port}: {error.strerror or error}; {_advice(error)}"
            ) from error
        opened.binary.extend(await _open_binary(config))
        if config.unix:
            try:
                opened.resp.append(await _open_unix(config))
            except OSError as error:
                reason = error.strerror or error
                raise StartupError(f"can't listen on the Unix socket {config.unix}: {reason}") from error
    except BaseException:
        for each in opened.all:
            each.socket.close()
        raise
    return opened


async def _open_binary(config: Config) -> list[trio.SocketListener]:
    port = config.binary_port
    if port == NO_BINARY_LANE:
        return []
    if port == AFTER_PORT:
        port = config.port + 1 if config.port else 0
        if port > MAX_PORT:
            raise StartupError(
                f"there is no port after --port {config.port} for the binary lane: give --binary-port, or -1 for none"
            )
    try:
        return await trio.open_tcp_listeners(port, host=config.host, backlog=config.backlog)
    except OSError as error:
        raise StartupError(
            f"can't listen on {config.host}:{port} for the binary lane: {error.strerror or error}; "
            "--binary-port 0 picks a free port, --binary-port -1 does without that lane"
        ) from error


def _port(listener: trio.SocketListener) -> int:
    port: int = listener.socket.getsockname()[1]
    return port


async def _open_unix(config: Config) -> trio.SocketListener:
    if _is_socket(config.unix):
        # Left behind by a killed server, or in use by a living one: only connecting tells.
        probe = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        with probe:
            try:
                await probe.connect(config.unix)
            except ConnectionRefusedError:
                remove_socket(config.unix)
            else:
                raise StartupError(f"another server listens on the Unix socket {config.unix}")
    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    try:
        await sock.bind(config.unix)
        _make_private(config.unix)
        sock.listen(config.backlog)
    except BaseException:
        sock.close()
        raise
    return trio.SocketListener(sock)


def describe(listener: trio.SocketListener, scheme: str = "tcp") -> str:
    """The address as a URL; a Unix socket has a scheme of its own."""
    address = listener.socket.getsockname()
    if isinstance(address, str):
        return f"unix://{address}"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{scheme}://{host}:{address[1]}"


# File system calls on one path, at start and stop only: not worth a thread.


def _is_socket(path: str) -> bool:
    return Path(path).is_socket()


def _make_private(path: str) -> None:
    Path(path).chmod(0o700)


def remove_socket(path: str) -> None:
    """Remove the Unix socket's file; an empty path is no file."""
    if path:
        Path(path).unlink(missing_ok=True)
