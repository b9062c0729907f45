"""The connections of one Trio client, used by the same rules as in `pion.client.lines`."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from pion.client.aio.connection import Connection
from pion.client.commands import info
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
    """See the module. Every method: cancelled while it waits for its turn, no effect; later, the connection is closed
    and a write may or may not have been applied.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = trio.Lock()
        self._main: Connection | None = None
        self._claimed_by: Connection | None = None
        """The main line on which a prefix was claimed that this client fills with calls of its own."""
        self._binary: Connection | None = None
        self._without: Connection | None = None
        """The main line that was asked for the binary lane, and there was none."""
        self._spare: list[Connection] = []
        self._closings = 0
        """Calls of `close`: a connection from before one is not kept after it."""
        self._pid = os.getpid()

    def close(self) -> None:
        """Close all connections but those apart; a call that uses one raises `ConnectionLostError`."""
        self._closings += 1
        for connection in (self._main, self._binary, *self._spare):
            if connection is not None:
                connection.close()
        self._main = self._binary = self._claimed_by = self._without = None
        self._spare.clear()

    async def call(self, request: Call[T]) -> T:
        """One request, on the lane that serves it best. Raises the server's error as it is."""
        async with self._lock:
            if isinstance(request, Either):
                return await self._on_either(request)
            answer = await self._retried(request, self._connected)
            if request.claims and answer is Registered.OK:
                self._claimed_by = self._main
            return answer

    async def call_apart(self, request: Request[T]) -> T:
        """One request on a connection of its own, which others need not wait for."""
        used: list[Connection] = []
        closings = self._closings

        async def connected() -> Connection:
            self._check_process()
            while self._spare:
                connection = self._spare.pop()
                if not connection.stale():
                    used.append(connection)
                    return connection
                connection.close()
            used.append(await Connection.connect(self._settings))
            return used[-1]

        try:
            return await self._retried(request, connected)
        finally:
            if used and used[-1].open:
                if len(self._spare) < MAX_SPARE_CONNECTIONS and self._closings == closings:
                    self._spare.append(used[-1])
                else:
                    used[-1].close()

    async def pipeline(self, requests: Sequence[Request[object]]) -> list[object]:
        """All replies in order, errors as values."""
        if not requests:
            return []
        async with self._lock:
            connection = await self._first(self._connected)
            try:
                return await connection.run(connection.exchange(requests))
            except TransportError as error:
                raise outcome_unknown("a pipeline", error) from error

    async def store(self, register: Request[Registered], stores: Sequence[Request[None]]) -> Stored:
        """Register, and if this client may fill the prefix, all the stores in one pipeline."""
        async with self._lock:
            answer = await self._retried(register, self._connected)
            connection = self._main
            if answer is not Registered.OK or connection is None or not stores:
                return Stored.STORED if answer is Registered.OK else Stored(answer.value)
            # The declared prefix belongs to this connection, so there is no second try on another one.
            exchange = connection.exchange(stores, stop_at_error=True)
            try:
                return stored(stores, await connection.run(exchange))
            except TransportError as error:
                connection.close()
                raise outcome_unknown("V.STOREBATCH", error) from error
            except ServerError as error:
                if leaves_half_a_prefix(error):
                    # It is invisible and ours; closing drops it, and only if it is still ours.
                    connection.close()
                raise

    # Parts

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            # After a fork the sockets are shared with the parent, whose bytes must not be mixed with ours.
            self._pid = os.getpid()
            self.close()

    async def _connected(self) -> Connection:
        self._check_process()
        connection = self._main
        if connection is not None and connection.open and not connection.stale():
            return connection
        if connection is not None:
            connection.close()
        self._main = None
        self._main = await Connection.connect(self._settings)
        return self._main

    async def _on_either(self, request: Either[T]) -> T:
        ours = self._claimed_by is not None and self._claimed_by is self._main and self._claimed_by.open
        if not self._settings.only_resp and not (request.owned and ours):
            try:
                return await self._retried(request, self._quickest)
            except BusyError:
                # A pending prefix: nothing was done, and it may be the main line's own.
                if not request.owned:
                    raise
        return await self._retried(request, self._connected)

    async def _quickest(self) -> Connection:
        """The binary connection if there is one, else the main line."""
        self._check_process()
        connection = self._binary
        if connection is not None and connection.open and not connection.stale():
            return connection
        if connection is not None:
            connection.close()
            self._binary = self._without = None
        main = await self._connected()
        if main is self._without:
            return main
        try:
            self._binary = await self._beside(main)
        except PionClientError:
            if self._settings.lane == "binary" or not main.open:
                raise
            self._without = main
            return main
        return self._binary

    async def _beside(self, main: Connection) -> Connection:
        """Connect to the binary lane of the server that the main line talks to."""
        question = info("server")
        reply = (await main.run(main.exchange([question])))[0]
        port = binary_port(converted(question, reply), main.peer)
        if port is None:
            raise no_binary_lane(self._settings)
        return await Connection.connect(self._settings, BinaryLane(self._settings, beside(main.peer, port)))

    async def _first(self, connected: Callable[[], Awaitable[Connection]]) -> Connection:
        attempt = 0
        while True:
            try:
                return await connected()
            except TransportError as error:
                pause_s = pause_before_connecting(error, attempt, self._settings)
            await trio.sleep(pause_s)
            attempt += 1

    async def _retried(self, request: Call[T], connected: Callable[[], Awaitable[Connection]]) -> T:
        attempt = 0
        while True:
            connection = await self._first(connected)
            try:
                exchange = connection.exchange([request], wait_s=request.wait_s)
                return converted(request, (await connection.run(exchange))[0])
            except TransportError as error:
                connection.close()
                pause_s = pause_before_repeating(request, error, attempt, self._settings)
            await trio.sleep(pause_s)
            attempt += 1
