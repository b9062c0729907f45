"""The connections of one synchronous client: who may use which when, and what is tried again.

One line serves all calls in turn, so that a declared prefix and the stores that fill it go over one connection, as the
server demands. Look-ups that wait go apart, on connections of their own. A lock guards the line for one exchange.

A fork copies the sockets into the child, where using them would mix two processes' bytes in one stream; and it may copy
a lock that a thread of the parent holds. So the child starts with new locks and no connections.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final, TypeVar, cast

from pion.client.commands import Request
from pion.client.connection import Connection
from pion.client.errors import (
    BusyError,
    ConnectFailedError,
    ConnectionLostError,
    ExistsError,
    OutcomeUnknownError,
    ServerError,
    TransportError,
)
from pion.client.limits import MAX_SPARE_CONNECTIONS
from pion.client.records import Registered, Stored
from pion.client.settings import Settings

T = TypeVar("T")


class Lines:
    """See the module."""

    def __init__(self, settings: Settings, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._settings = settings
        self._sleep = sleep
        self._lock = threading.Lock()
        self._main: Connection | None = None
        self._spare: list[Connection] = []
        _ALL.add(self)

    def close(self) -> None:
        """Close all connections that no call is using, waiting for the one call that uses the main line."""
        with self._lock:
            if self._main is not None:
                self._main.close()
            self._main = None
            while self._spare:
                self._spare.pop().close()

    def call(self, request: Request[T]) -> T:
        """One request on the main line. Raises the server's error as it is."""
        with self._lock:
            return self._retried(request, self._connected)

    def call_apart(self, request: Request[T]) -> T:
        """One request on a connection of its own, which others need not wait for."""
        used: list[Connection] = []

        def connected() -> Connection:
            while self._spare:
                try:
                    connection = self._spare.pop()
                except IndexError:  # another thread took the last one
                    break
                if not connection.stale():
                    used.append(connection)
                    return connection
                connection.close()
            used.append(Connection(self._settings))
            return used[-1]

        try:
            return self._retried(request, connected)
        finally:
            if used and used[-1].open:
                if len(self._spare) < MAX_SPARE_CONNECTIONS:
                    self._spare.append(used[-1])
                else:
                    used[-1].close()

    def pipeline(self, requests: Sequence[Request[object]]) -> list[object]:
        """All replies in order, errors as values."""
        if not requests:
            return []
        with self._lock:
            connection = self._first(self._connected)
            exchange = connection.exchange(requests)
            try:
                return connection.run(exchange)
            except TransportError as error:
                raise _unknown("pipeline", error) from error

    def store(self, register: Request[Registered], stores: Sequence[Request[None]]) -> Stored:
        """Register, and if this client may fill the prefix, all the stores in one pipeline."""
        with self._lock:
            answer = self._retried(register, self._connected)
            if answer is not Registered.OK:
                return Stored(answer.value)
            connection = self._main
            if connection is None:
                raise ConnectionLostError("the connection was closed")
            try:
                # The declared prefix belongs to this connection, so there is no second try on another one.
                exchange = connection.exchange(cast("Sequence[Request[object]]", stores), stop_at_error=True)
                for request, reply in zip(stores, connection.run(exchange) if stores else [], strict=False):
                    _converted(request, reply)
            except ExistsError:
                return Stored.EXISTS
            except TransportError as error:
                raise _unknown("V.STOREBATCH", error) from error
            except ServerError as error:
                if not isinstance(error, BusyError):
                    # The half-filled prefix is ours and invisible; closing is what drops it, and only if still ours.
                    connection.close()
                raise
            return Stored.STORED

    # Parts

    def _connected(self) -> Connection:
        connection = self._main
        if connection is not None and connection.open and not connection.stale():
            return connection
        if connection is not None:
            connection.close()
        self._main = None
        self._main = Connection(self._settings)
        return self._main

    def _first(self, connected: Callable[[], Connection]) -> Connection:
        """A connection, trying again while none can be made: nothing was sent, so any request may wait for it."""
        attempt = 0
        while True:
            try:
                return connected()
            except (ConnectFailedError, ConnectionLostError):
                if attempt >= self._settings.retries:
                    raise
            self._sleep(self._settings.pause_s(attempt))
            attempt += 1

    def _retried(self, request: Request[T], connected: Callable[[], Connection]) -> T:
        attempt = 0
        while True:
            connection = self._first(connected)
            try:
                exchange = connection.exchange([cast("Request[object]", request)], wait_s=request.wait_s)
                return _converted(request, connection.run(exchange)[0])
            except TransportError as error:
                connection.close()
                if not request.reads:
                    raise _unknown(request.name, error) from error
                # Silence is not a lost connection: asking a slow server again only adds to its work.
                if not isinstance(error, ConnectionLostError) or not request.repeatable:
                    raise
                if attempt >= self._settings.retries:
                    raise
            self._sleep(self._settings.pause_s(attempt))
            attempt += 1

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        spare, self._spare = self._spare, []
        for connection in (self._main, *spare):
            if connection is not None:
                connection.close()
        self._main = None


def _converted(request: Request[T], reply: object) -> T:
    if isinstance(reply, ServerError):
        raise reply
    return request.convert(reply)


def _unknown(name: str, error: TransportError) -> OutcomeUnknownError:
    return OutcomeUnknownError(f"{name} was sent but not answered, so it may or may not have been applied: {error}")


_ALL: Final[weakref.WeakSet[Lines]] = weakref.WeakSet()


def _forked() -> None:
    for lines in list(_ALL):
        lines._after_fork()


os.register_at_fork(after_in_child=_forked)
