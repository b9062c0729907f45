"""The open connections of one worker: their shared receive memory, their time-outs, and which of them must go."""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, Final

import attrs
import trio

from pion.command import Flag
from pion.context import Services
from pion.limits import PAYLOAD_SLICE_BYTES
from pion.net.budget import Pieces, ReceiveBudget
from pion.net.polling import Dialogue

if TYPE_CHECKING:
    from pion.net.connection import Connection

logger = logging.getLogger("pion.net")

WATCH_INTERVAL_S: Final = 1.0
"""How often time-outs are looked at: they are minutes, and looking costs the loop, not each request."""


class Phase(enum.Enum):
    """What a connection waits for."""

    IDLE = "idle"
    """The next request."""
    RECEIVING = "receiving"
    """The rest of a request."""
    RUNNING = "running"
    """A command, or its turn."""
    SENDING = "sending"
    """The peer, to take more of a reply."""


@attrs.frozen
class NetStatistics:
    """`receiving_bytes` are reserved for requests, `unsent_bytes` are what bulk replies still have to send."""

    connections: int
    receiving_bytes: int
    receiving_refused: int
    unsent_bytes: int
    timed_out: int
    slow_senders_dropped: int
    slow_readers_dropped: int


@attrs.define(eq=False)
class ConnectionTable:
    """Shared by the connections of one worker; owns no task but `watch`, which the listener starts."""

    _services: Services
    budget: ReceiveBudget = attrs.field(factory=ReceiveBudget, init=False)
    pieces: Pieces = attrs.field(factory=Pieces, init=False)
    draining: bool = attrs.field(default=False, init=False)
    blocking: frozenset[bytes] = attrs.field(init=False)
    """Commands that may wait for another client."""
    scratch: memoryview = attrs.field(init=False)
    """Where refused payloads and the bytes after a payload land; used between two checkpoints only."""
    dialogue: Dialogue = attrs.field(init=False)
    _connections: dict[Connection, tuple[int, float]] = attrs.field(factory=dict, init=False)
    """Each with the progress last seen and since when."""
    _timed_out: int = attrs.field(default=0, init=False)
    _slow_senders_dropped: int = attrs.field(default=0, init=False)
    _slow_readers_dropped: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.blocking = frozenset(
            row.name.upper().encode() for row in self._services.registry if Flag.BLOCKING in row.flags
        )
        self.dialogue = Dialogue(self._services.config.busy_poll_us * 1000)
        self.scratch = memoryview(bytearray(PAYLOAD_SLICE_BYTES))
        self._services.vstore.in_flight = lambda: self.budget.used + self.pieces.nbytes
        self._services.budget.sending = lambda: self.held_bytes
        self._services.budget.cut_readers = self.enforce_sending_limit
        self._services.budget.cut_senders = lambda wanted: self._drop_slow_holders(None, wanted)

    def add(self, connection: Connection) -> None:
        """A connection opened."""
        self._connections[connection] = (-1, trio.current_time())

    def remove(self, connection: Connection) -> None:
        """A connection closed."""
        self._connections.pop(connection, None)

    def statistics(self) -> NetStatistics:
        """Counts for INFO."""
        return NetStatistics(
            connections=len(self._connections),
            receiving_bytes=self.budget.used,
            receiving_refused=self.budget.refused,
            unsent_bytes=sum(connection.sender.unsent for connection in self._connections),
            timed_out=self._timed_out,
            slow_senders_dropped=self._slow_senders_dropped,
            slow_readers_dropped=self._slow_readers_dropped,
        )

    @property
    def held_bytes(self) -> int:
        """Stored bytes that only unfinished replies hold, and the converted pieces being sent."""
        return self._services.vstore.ledger.sending_bytes + self.pieces.nbytes

    def payload_announced(self) -> None:
        """Memory for a payload is asked for. That is when memory grows, too fast to wait for the watcher."""
        if self._services.vstore.ledger.sending_bytes > self._services.config.max_sending_bytes:
            self.enforce_sending_limit()

    def reserve(self, asking: Connection, nbytes: int) -> bool:
        """Reserve receive memory for a connection; if there is too little, by dropping clients that are too slow."""
        limit = self._services.config.max_receiving_bytes
        if self.budget.reserve(nbytes, limit):
            return True
        if nbytes > limit or not self._drop_slow_holders(asking, self.budget.used + nbytes - limit):
            return False
        return self.budget.reserve(nbytes, limit)

    def _drop_slow_holders(self, asking: Connection | None, wanted: int) -> bool:
        """Disconnect those that hold receive memory and move fewer bytes a second than `min_receive_rate`, the largest
        first; none if even all of them would not do.
        """
        now_s = trio.current_time()
        lowest = self._services.config.min_receive_rate
        slow = [
            each
            for each in self._connections
            if each is not asking and each.reserved_bytes and each.holding_rate(now_s) < lowest
        ]
        if sum(each.reserved_bytes for each in slow) < wanted:
            return False
        for each in sorted(slow, key=lambda each: each.reserved_bytes, reverse=True):
            if wanted <= 0:
                break
            wanted -= each.reserved_bytes
            self._slow_senders_dropped += 1
            logger.warning(
                "client %s: dropped, it is too slow (%.0f bytes a second) for the %d bytes it holds, which others need",
                each.session.addr,
                each.holding_rate(now_s),
                each.reserved_bytes,
            )
            each.give_up_memory()
        return True

    def enforce_sending_limit(self, limit: int | None = None) -> None:
        """Disconnect the slowest readers if replies alone hold more than `limit` bytes, which is `max_sending_bytes` by
        default. Looks at every connection.
        """
        if limit is None:
            limit = self._services.config.max_sending_bytes
        held = self.held_bytes
        if held <= limit:
            return
        now_s = trio.current_time()
        readers = [connection for connection in self._connections if connection.sender.nbytes]
        # What a killed connection held is freed when its task ends, a turn later.
        excess = held - limit - sum(reader.sender.nbytes for reader in readers if reader.killed)
        for reader in sorted(readers, key=lambda reader: reader.sender.rate(now_s)):
            if excess <= 0:
                break
            if reader.killed or not reader.sender.blocked:
                continue
            excess -= reader.sender.nbytes
            self._slow_readers_dropped += 1
            logger.warning(
                "client %s: dropped, it reads too slowly (%d bytes unsent) and replies hold too much memory",
                reader.session.addr,
                reader.sender.unsent,
            )
            reader.kill()

    def drain(self) -> None:
        """Close the idle connections; the others close when the request they are in is answered."""
        self.draining = True
        for connection in list(self._connections):
            if connection.phase is Phase.IDLE:
                connection.close_idle()

    async def watch(self) -> None:
        """Disconnect what made no progress for too long. Runs until cancelled; cancellation has no effect."""
        while True:
            config = self._services.config
            shortest = min(config.send_timeout_s, config.receive_timeout_s, config.idle_timeout_s or WATCH_INTERVAL_S)
            await trio.sleep(min(WATCH_INTERVAL_S, shortest / 4))
            self._inspect(trio.current_time())
            self.enforce_sending_limit()

    def _inspect(self, now_s: float) -> None:
        config = self._services.config
        limits = {
            Phase.IDLE: config.idle_timeout_s,
            Phase.RECEIVING: config.receive_timeout_s,
            Phase.SENDING: config.send_timeout_s,
            Phase.RUNNING: 0.0,
        }
        for connection, (seen, since_s) in list(self._connections.items()):
            if self._never_authenticates(connection, now_s):
                continue
            connection.settle()
            phase, progress = connection.phase, connection.progress
            if progress != seen or phase is Phase.RUNNING:
                self._connections[connection] = (progress, now_s)
                continue
            limit_s = limits[phase]
            if limit_s and now_s - since_s >= limit_s:
                self._timed_out += 1
                logger.info("client %s: %s for %.1f s, closed", connection.session.addr, phase.value, now_s - since_s)
                connection.kill()
            elif phase is Phase.RECEIVING and now_s - since_s >= limit_s / 2:
                connection.take_any_byte()

    def _never_authenticates(self, connection: Connection, now_s: float) -> bool:
        """Close a connection that has sent no password for `receive_timeout_s`: it would cost a place for nothing."""
        if connection.session.authenticated:
            connection.unauthenticated_since_s = None
            return False
        if connection.unauthenticated_since_s is None:
            connection.unauthenticated_since_s = now_s
        limit_s = self._services.config.receive_timeout_s
        if now_s - connection.unauthenticated_since_s < limit_s:
            return False
        self._timed_out += 1
        logger.info("client %s: no password for %g s, closed", connection.session.addr, limit_s)
        connection.kill()
        return True
