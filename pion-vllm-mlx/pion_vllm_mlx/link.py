"""The connection to the server, and what happens when there is none.

A cache must never cost an answer. With `fallback` a server that is away, slow, full or refusing costs a warning and a
count, and the caller goes on without it. A wrong password is different: it is a mistake of the operator that would stay
hidden for ever, so it is always an error.

Each operation uses a client of its own, because a prefix that is being filled belongs to the connection that registered
it. Clients are kept for the next operation, and with them the second connection that each has on the binary lane, if
`lane` allows it and the server has one.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from pion.client import PionClient
from pion.client.errors import (
    BadReplyError,
    NotAuthenticatedError,
    PermissionDeniedError,
    PionClientError,
    ServerError,
    TransportError,
    WrongPasswordError,
)

T = TypeVar("T")

logger = logging.getLogger("pion.mlx")

MAX_IDLE: Final = 4
"""Connections kept between operations; more than that many threads at once open and close their own."""

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
"""After a failed exchange the server isn't asked again for this long, doubling: a host that swallows packets would
otherwise cost every generation a timeout."""

ALWAYS_ERRORS: Final = (WrongPasswordError, NotAuthenticatedError, PermissionDeniedError)


class Link:
    """Connections to one server, shared by the threads of one prompt cache."""

    def __init__(
        self, settings: dict[str, Any], *, fallback: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self.fallback = fallback
        self.failures = 0
        """Operations that went on without the server, or without what it refused."""
        self._lock = threading.Lock()
        self._idle: list[PionClient] = []
        self._pause_s = FIRST_PAUSE_S
        self._not_before = 0.0
        PionClient(**settings).close()  # connects to nothing, but refuses arguments that can't work
        # Users of a notebook forget to close; sockets shouldn't wait for the garbage collector to complain.
        weakref.finalize(self, _close_all, self._idle)

    @contextmanager
    def operation(self, deadline_s: float | None = None) -> Iterator[Operation]:
        """The server for one operation, each exchange of which may take `deadline_s`.

        Whatever escapes the block closes the connection; the server then drops a prefix that was being filled.
        """
        operation = Operation(self, self._take(deadline_s))
        try:
            yield operation
        except BaseException:
            operation.abandon()
            raise
        self._give(operation)

    def close(self) -> None:
        """Close the connections that no operation uses now."""
        with self._lock:
            _close_all(self._idle)

    def _take(self, deadline_s: float | None) -> PionClient | None:
        with self._lock:
            if self.fallback and self._clock() < self._not_before:
                self.failures += 1
                return None
            client = self._idle.pop() if self._idle else None
        if client is None:
            # With a fallback there is no use in trying again: the prefill can start meanwhile.
            client = PionClient(**self._settings, retries=0 if self.fallback else 3)
        client.deadline_s = deadline_s
        return client

    def _give(self, operation: Operation) -> None:
        client = operation.client
        if client is None:
            return
        with self._lock:
            if operation.answered:
                self._pause_s = FIRST_PAUSE_S
            if len(self._idle) < MAX_IDLE:
                self._idle.append(client)
                return
        client.close()

    def failed(self, what: str, error: PionClientError) -> None:
        """Count and report a failure that the caller survives; raises it when there is no fallback."""
        if not self.fallback or isinstance(error, ALWAYS_ERRORS):
            raise error
        with self._lock:
            self.failures += 1
            # A reply that is no answer, or too large for us, says nothing about the next question.
            if isinstance(error, TransportError) and not isinstance(error, BadReplyError):
                _close_all(self._idle)  # what one connection met, the others will
                self._not_before = self._clock() + self._pause_s
                self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        logger.warning("%s: %s; going on without the server", what, error)


def unless_refused(what: str, question: Callable[[PionClient], T], otherwise: T) -> Callable[[PionClient], T]:
    """The question, where the server's refusal is an answer: `otherwise`. A refused password stays an error."""

    def asked(client: PionClient) -> T:
        try:
            return question(client)
        except ServerError as error:
            if isinstance(error, ALWAYS_ERRORS):
                raise
            logger.info("%s: %s", what, error)
            return otherwise

    return asked


def _close_all(clients: list[PionClient]) -> None:
    while clients:
        clients.pop().close()


class Operation:
    """The server as one operation sees it: after a broken exchange it isn't asked again."""

    def __init__(self, link: Link, client: PionClient | None) -> None:
        self._link = link
        self.client = client
        self.answered = False

    @property
    def alive(self) -> bool:
        """There is a server to talk to, as far as is known."""
        return self.client is not None

    def ask(self, what: str, question: Callable[[PionClient], T], otherwise: T) -> T:
        """The answer, or `otherwise` when there is none. `what` is for the warning.

        Raises the client's error when there is no fallback, and always for a refused password.
        """
        if self.client is None:
            return otherwise
        try:
            answer = question(self.client)
        except PionClientError as error:
            if isinstance(error, TransportError):
                self.abandon()
            self._link.failed(what, error)
            return otherwise
        self.answered = True
        return answer

    def abandon(self) -> None:
        """Close the connection; a prefix that it was filling is dropped by the server."""
        if self.client is not None:
            self.client.close()
            self.client = None
