"""Accepting clients, until the server drains."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Sequence
from typing import Final

import trio

from pion.context import Services
from pion.dispatch import Dispatcher
from pion.errors import CommandError, ConnectionLostError
from pion.limits import READ_CHUNK_BYTES
from pion.net.connection import Connection
from pion.net.lanes import BinaryLane, MakeLane, RespLane
from pion.net.table import ConnectionTable
from pion.net.transport import SocketTransport, Transport
from pion.protocol.binary_answers import error_frame
from pion.protocol.encode import error_line

logger = logging.getLogger("pion.net")

ACCEPT_BACKOFF_S: Final = 0.1
"""Pause after accept() failed for want of files or memory: long enough for some to be closed, unnoticed by a client."""

_TOO_MANY: Final = CommandError("max number of clients reached")
FULL: Final = error_line(_TOO_MANY.code, str(_TOO_MANY))
"""What a client is told that is one too many."""
FULL_BINARY: Final = error_frame(0, 0, _TOO_MANY)
"""The same on the binary lane, where it answers no request."""

_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


async def serve(
    listeners: Sequence[trio.SocketListener],
    services: Services,
    dispatcher: Dispatcher,
    *,
    binary: Sequence[trio.SocketListener] = (),
    task_status: trio.TaskStatus[ConnectionTable] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Accept and serve until `services.draining` is set: RESP on `listeners`, the binary lane on `binary`.

    Then the listeners are closed, idle connections close at once, the others when the request they are in is answered,
    and `serve` returns. Cancellation closes every connection at once, so the caller bounds the draining with a
    deadline. `task_status` gets the table of connections, which is also `services.net`.
    """
    table = ConnectionTable(services)
    services.net = table

    async def handle(transport: Transport, make_lane: MakeLane) -> None:
        await Connection(transport, services, dispatcher, table, make_lane).run()

    async with trio.open_nursery() as watchers:
        watchers.start_soon(table.watch)
        async with trio.open_nursery() as connections:

            def accepted(sock: trio.socket.SocketType, make_lane: MakeLane = RespLane, full: bytes = FULL) -> None:
                transport = _admit(sock, services, full)
                if transport is not None:
                    connections.start_soon(handle, transport, make_lane)

            def accepted_binary(sock: trio.socket.SocketType) -> None:
                accepted(sock, BinaryLane, FULL_BINARY)

            async with trio.open_nursery() as acceptors:
                for listener in listeners:
                    acceptors.start_soon(accept_forever, listener.socket, accepted)
                for listener in binary:
                    acceptors.start_soon(accept_forever, listener.socket, accepted_binary)
                task_status.started(table)
                await services.draining.wait()
                acceptors.cancel_scope.cancel()
            for listener in [*listeners, *binary]:
                listener.socket.close()
            table.drain()
        watchers.cancel_scope.cancel()


async def accept_forever(listening: trio.socket.SocketType, accepted: Callable[[trio.socket.SocketType], None]) -> None:
    """Accept and hand each socket to `accepted`. Returns never. Cancellation: no accepted socket is lost."""
    while True:
        try:
            sock, _ = await listening.accept()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                logger.error("accept failed: %s; trying again", error)
                await trio.sleep(ACCEPT_BACKOFF_S)
            else:
                # The connection failed before it was accepted; the next one may be fine.
                logger.warning("accept failed: %s", error)
                await trio.lowlevel.checkpoint()
            continue
        accepted(sock)


def _admit(sock: trio.socket.SocketType, services: Services, full: bytes) -> Transport | None:
    """A transport for an accepted socket, or None if the client is gone already or is one too many, which it is told
    with `full`.
    """
    try:
        transport = SocketTransport(sock)
    except ConnectionLostError:
        sock.close()
        return None
    if len(services.clients) < services.config.max_clients:
        return transport
    services.clients.rejected += 1
    with contextlib.suppress(ConnectionLostError):
        transport.send_nowait(full)
        transport.finish_sending()
        transport.recv_nowait(READ_CHUNK_BYTES)  # unread bytes would turn the close into a reset, and lose the error
    transport.close()
    return None
