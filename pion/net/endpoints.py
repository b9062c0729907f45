"""Opening the listening sockets, with errors that say which address and what to do."""

from __future__ import annotations

from pathlib import Path

import trio

from pion.config import Config
from pion.errors import StartupError


async def open_listeners(config: Config) -> list[trio.SocketListener]:
    """Bind the TCP port and the Unix socket. Raises `StartupError` saying which address and why."""
    try:
        opened = await trio.open_tcp_listeners(config.port, host=config.host, backlog=config.backlog)
    except OSError as error:
        raise StartupError(
            f"can't listen on {config.host}:{config.port}: {error.strerror or error}; "
            "is another server running there? --port 0 picks a free port"
        ) from error
    if config.unix:
        try:
            opened.append(await _open_unix(config))
        except BaseException as error:
            for each in opened:
                each.socket.close()
            if isinstance(error, OSError):
                reason = error.strerror or error
                raise StartupError(f"can't listen on the Unix socket {config.unix}: {reason}") from error
            raise
    return opened


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


def describe(listener: trio.SocketListener) -> str:
    """The address as a URL, for the banner and the logs."""
    address = listener.socket.getsockname()
    if isinstance(address, str):
        return f"unix://{address}"
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"tcp://{host}:{address[1]}"


# File system calls on one path, at start and stop only: not worth a thread.


def _is_socket(path: str) -> bool:
    return Path(path).is_socket()


def _make_private(path: str) -> None:
    Path(path).chmod(0o700)


def remove_socket(path: str) -> None:
    """Remove the Unix socket's file; an empty path is no file."""
    if path:
        Path(path).unlink(missing_ok=True)
