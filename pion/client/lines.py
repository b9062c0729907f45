"""The connections of one synchronous client: who may use which when, and what is tried again.

One line serves all calls in turn, so that a declared prefix and the stores that fill it go over one connection, as the
server demands. Look-ups that wait go apart, on connections of their own. A lock guards the line for one exchange.

Rows and queries go over a second connection, on the binary lane, if the server has one: it is looked for when the first
such call is made. Without it they go over the main line, and it is looked for again once that had to be opened anew, as
after a restart of the server. A prefix that is being filled belongs to the main line, so its sessions stay there.

A fork copies the sockets into the child, where using them would mix two processes' bytes in one stream; and it may copy
a lock that a thread of the parent holds. So the child starts with new locks and no connections.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from pion.client.commands import info
from pion.client.connection import Connection
from pion.client.errors import BusyError, PionClientError, ServerError, TransportError
from pion.client.lanes import BinaryLane, beside, binary_port
from pion.client.limits import MAX_SPARE_CONNECTIONS
from pion.client.policy import (
    converted,
    leaves_half_a_prefix,
    no_binary_lane,
    outcome_unknown,
    pause_before_connecting,
    pause_before_repeating,
    stored,
)
from pion.client.records import Registered, Stored
from pion.client.requests import Call, Either, Request
from pion.client.settings import Settings

T = TypeVar("T")


class Lines:
    """See the module."""

    def __init__(self, settings: Settings, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._settings = settings
        self._sleep = sleep
        self._lock = threading.Lock()
        self._main: Connection | None = None
        self._claimed_by: Connection | None = None
        """The main line on which a prefix was claimed that this client fills with calls of its own."""
        self._binary: Connection | None = None
        self._without: Connection | None = None
        """The main line that was asked for the binary lane, and there was none."""
        self._spare: list[Connection] = []
        self.deadline_s: float | None = None
        """Longest time of one exchange."""
        self._closings = 0
        """Calls of `close`: a connection from before one is not kept after it."""
        _ALL.add(self)

    def close(self) -> None:
        """Close all connections that no call is using, waiting for the one call that uses the main line."""
        with self._lock:
            self._closings += 1
            for connection in (self._main, self._binary):
                if connection is not None:
                    connection.close()
            self._main = self._binary = self._claimed_by = self._without = None
            while self._spare:
                self._spare.pop().close()

    def call(self, request: Call[T]) -> T:
        """One request, on the lane that serves it best. Raises the server's error as it is."""
        with self._lock:
            if isinstance(request, Either):
                return self._on_either(request)
            answer = self._retried(request, self._connected)
            if request.claims and answer is Registered.OK:
                self._claimed_by = self._main
            return answer

    def call_apart(self, request: Request[T]) -> T:
        """One request on a connection of its own, which others need not wait for."""
        used: list[Connection] = []
        closings = self._closings

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
                if len(self._spare) < MAX_SPARE_CONNECTIONS and self._closings == closings:
                    self._spare.append(used[-1])
                else:
                    used[-1].close()

    def pipeline(self, requests: Sequence[Request[object]]) -> list[object]:
        """All replies in order, errors as values."""
        if not requests:
            return []
        with self._lock:
            connection = self._first(self._connected)
            try:
                return connection.run(connection.exchange(requests, deadline_s=self.deadline_s))
            except TransportError as error:
                raise outcome_unknown("a pipeline", error) from error

    def store(self, register: Request[Registered], stores: Sequence[Request[None]]) -> Stored:
        """Register, and if this client may fill the prefix, all the stores in one pipeline."""
        with self._lock:
            answer = self._retried(register, self._connected)
            connection = self._main
            if answer is not Registered.OK or connection is None or not stores:
                return Stored.STORED if answer is Registered.OK else Stored(answer.value)
            # The declared prefix belongs to this connection, so there is no second try on another one.
            exchange = connection.exchange(stores, deadline_s=self.deadline_s, stop_at_error=True)
            try:
                return stored(stores, connection.run(exchange))
            except TransportError as error:
                connection.close()
                raise outcome_unknown("V.STOREBATCH", error) from error
            except ServerError as error:
                if leaves_half_a_prefix(error):
                    # It is invisible and ours; closing drops it, and only if it is still ours.
                    connection.close()
                raise

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

    def _on_either(self, request: Either[T]) -> T:
        ours = self._claimed_by is not None and self._claimed_by is self._main and self._claimed_by.open
        if not self._settings.only_resp and not (request.owned and ours):
            try:
                return self._retried(request, self._quickest)
            except BusyError:
                # A pending prefix: nothing was done, and it may be the main line's own.
                if not request.owned:
                    raise
        return self._retried(request, self._connected)

    def _quickest(self) -> Connection:
        """The binary connection if there is one, else the main line."""
        connection = self._binary
        if connection is not None and connection.open and not connection.stale():
            return connection
        if connection is not None:
            connection.close()
            self._binary = self._without = None
        main = self._connected()
        if main is self._without:
            return main
        try:
            self._binary = self._beside(main)
        except PionClientError:
            if self._settings.lane == "binary" or not main.open:
                raise
            self._without = main
            return main
        return self._binary

    def _beside(self, main: Connection) -> Connection:
        """Connect to the binary lane of the server that the main line talks to."""
        question = info("server")
        reply = main.run(main.exchange([question], deadline_s=self.deadline_s))[0]
        port = binary_port(converted(question, reply), main.peer)
        if port is None:
            raise no_binary_lane(self._settings)
        return Connection(self._settings, BinaryLane(self._settings, beside(main.peer, port), self.deadline_s))

    def _first(self, connected: Callable[[], Connection]) -> Connection:
        attempt = 0
        while True:
            try:
                return connected()
            except TransportError as error:
                pause_s = pause_before_connecting(error, attempt, self._settings)
            self._sleep(pause_s)
            attempt += 1

    def _retried(self, request: Call[T], connected: Callable[[], Connection]) -> T:
        attempt = 0
        while True:
            connection = self._first(connected)
            try:
                exchange = connection.exchange([request], wait_s=request.wait_s, deadline_s=self.deadline_s)
                return converted(request, connection.run(exchange)[0])
            except TransportError as error:
                connection.close()
                pause_s = pause_before_repeating(request, error, attempt, self._settings)
            self._sleep(pause_s)
            attempt += 1

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        spare, self._spare = self._spare, []
        for connection in (self._main, self._binary, *spare):
            if connection is not None:
                connection.close()
        self._main = self._binary = self._claimed_by = self._without = None


_ALL: Final[weakref.WeakSet[Lines]] = weakref.WeakSet()


def _forked() -> None:
    for lines in list(_ALL):
        lines._after_fork()


os.register_at_fork(after_in_child=_forked)
