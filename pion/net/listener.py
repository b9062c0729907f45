"""Listening sockets: opened before the server says that it is ready, accepted from until it drains."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import attrs
import trio

from pion.config import Config
from pion.context import Services
from pion.dispatch import Dispatcher
from pion.errors import ConnectionLostError, StartupError
from pion.net.connection import Connection
from pion.net.table import ConnectionTable
from pion.net.transport import SocketTransport, Transport
from pion.protocol.encode import error_line

logger = logging.getLogger("pion.net")

ACCEPT_BACKOFF_S: Final = 0.1
"""Pause after accept() failed for want of files or memory: long enough for some to be closed, unnoticed by a client."""

_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@attrs.frozen(eq=False)
class Listener:
    """An open listening socket. `address` is "host:port" or the path of a Unix socket."""

    socket: trio.socket.SocketType
    address: str
    port: int = 0
    unix: str = ""

    def close(self) -> None:
        """Stop listening and remove the Unix socket's file."""
        self.socket.close()
        if self.unix:
            with contextlib.suppress(FileNotFoundError):
                Path(self.unix).unlink()


async def open_listeners(config: Config) -> list[Listener]:
    """Listen on `host:port`, on every address the host has, and on `unix` if set.

    Raises `StartupError`; nothing stays open then. Cancellation: nothing stays open.
    """
    listeners: list[Listener] = []
    try:
        try:
            found = await trio.socket.getaddrinfo(
                config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except OSError as error:
            raise StartupError(f"can't resolve host {config.host}: {error}") from error
        port = config.port
        for family, _, _, _, address in found:
            listener = _open_tcp(family, (address[0], port, *address[2:]), config.backlog)
            listeners.append(listener)
            port = listener.port
        if config.unix:
            listeners.append(await _open_unix(config.unix, config.backlog))
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _open_tcp(family: int, address: tuple[str | int, ...], backlog: int) -> Listener:
    host, port = address[:2]
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        trio_bind(sock, address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise StartupError(f"can't listen on {host}:{port}: {error.strerror or error}") from error
    port = sock.getsockname()[1]
    return Listener(sock, f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}", port=port)


def trio_bind(sock: trio.socket.SocketType, address: object) -> None:
    """Bind to a resolved address; Trio's own `bind` is async because it may resolve a name."""
    sock._sock.bind(address)  # type: ignore[attr-defined]


async def _open_unix(path: str, backlog: int) -> Listener:
    await _remove_stale(path)
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        trio_bind(sock, path)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise StartupError(f"can't listen on {path}: {error.strerror or error}") from error
    return Listener(sock, path, unix=path)


async def _remove_stale(path: str) -> None:
    """Remove the socket file a crashed server left; refuse if one answers or if it is no socket."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116  a local path, at start
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"can't listen on {path}: there is a file of that name that is no socket")
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            await probe.connect(path)
        except OSError:
            os.unlink(path)  # noqa: PTH108
            return
    raise StartupError(f"can't listen on {path}: another server is listening there")


async def serve(
    listeners: Sequence[Listener],
    services: Services,
    dispatcher: Dispatcher,
    *,
    task_status: trio.TaskStatus[ConnectionTable] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Accept and serve until `services.state["draining"]` (a `trio.Event`, made here if missing) is set.

    Then nothing more is accepted, idle connections close at once, the others when the request they are in is answered,
    and `serve` returns. Cancellation closes every connection at once, so the caller bounds the draining with a
    deadline.
    """
    draining: trio.Event = services.state.setdefault("draining", trio.Event())
    table = ConnectionTable(services)
    services.state["net"] = table

    async def handle(transport: Transport) -> None:
        await Connection(transport, services, dispatcher, table).run()

    try:
        async with trio.open_nursery() as outer:
            outer.start_soon(table.watch)
            async with trio.open_nursery() as connections:

                def accepted(sock: trio.socket.SocketType) -> None:
                    transport = _admit(sock, services)
                    if transport is not None:
                        connections.start_soon(handle, transport)

                async with trio.open_nursery() as acceptors:
                    for listener in listeners:
                        acceptors.start_soon(serve_listener, listener, accepted)
                    task_status.started(table)
                    await draining.wait()
                    acceptors.cancel_scope.cancel()
                for listener in listeners:
                    listener.close()
                table.drain()
            outer.cancel_scope.cancel()
    finally:
        for listener in listeners:
            listener.close()


async def serve_listener(listener: Listener, accepted: Callable[[trio.socket.SocketType], None]) -> None:
    """Accept for ever and hand each socket to `accepted`. Cancellation: no accepted socket is lost."""
    while True:
        try:
            sock, _ = await listener.socket.accept()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                logger.error("%s: accept failed: %s; trying again", listener.address, error)
                await trio.sleep(ACCEPT_BACKOFF_S)
            else:
                # The connection failed before it was accepted; the next one may be fine.
                logger.warning("%s: accept failed: %s", listener.address, error)
                await trio.lowlevel.checkpoint()
            continue
        accepted(sock)


def _admit(sock: trio.socket.SocketType, services: Services) -> Transport | None:
    """A transport for an accepted socket, or None if the client is gone already or is one too many."""
    try:
        transport = SocketTransport(sock)
    except ConnectionLostError:
        sock.close()
        return None
    if len(services.clients) < services.config.max_clients:
        return transport
    services.clients.rejected += 1
    with contextlib.suppress(ConnectionLostError):
        transport.send_nowait(error_line("ERR", "max number of clients reached"))
        transport.finish_sending()
        transport.recv_nowait(64 * 1024)  # unread bytes would turn the close into a reset, and the error be lost
    transport.close()
    return None
