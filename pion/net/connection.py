"""One client: receive, parse, run, reply, until it leaves or must go.

Theory of operation. Each connection is one task that alternates between receiving and answering. That alternation is
the back-pressure: while a client doesn't read its replies, nothing more of its requests is read or run, so what one
client can make the server hold is one read chunk, one batch of small replies or one bulk reply, and one payload out of
the shared receive budget.

No request pays for a timer. The table's watcher looks at each connection's `phase` and `progress` once a second and
disconnects those without progress; an idle connection is closed by closing its transport, which wakes the waiting
task.

Fairness: after `COMMANDS_PER_TURN` commands, after `TURN_NS` of work, after `RECEIVE_TURN_NS` of receiving and after
each slice of a reply, the replies so far are sent and the loop runs the other tasks once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np
import trio

from pion.context import Context, Services, Session
from pion.dispatch import Dispatcher
from pion.errors import ConnectionLostError, OutOfMemoryError, ProtocolError
from pion.later import Later
from pion.limits import (
    COMMANDS_PER_TURN,
    INLINE_ARG_BYTES,
    PAYLOAD_SLICE_BYTES,
    READ_CHUNK_BYTES,
    RECEIVE_GRACE_S,
    RECEIVE_TURN_NS,
    TURN_NS,
)
from pion.net.encoding import Encoding
from pion.net.lanes import MakeLane, RespLane
from pion.net.leaving import Leaving
from pion.net.outbox import FLUSH_BYTES, Outbox
from pion.net.polling import BusyPoll
from pion.net.sending import Sender
from pion.net.table import ConnectionTable, Phase
from pion.net.transport import Transport, linger
from pion.protocol.incoming import LATER
from pion.replies import ErrorReply

logger = logging.getLogger("pion.net")


class Connection:
    """Serves one client over a transport, in the protocol of its lane."""

    def __init__(
        self,
        transport: Transport,
        services: Services,
        dispatcher: Dispatcher,
        table: ConnectionTable,
        make_lane: MakeLane = RespLane,
    ) -> None:
        config = services.config
        self._transport = transport
        self._services = services
        self._dispatcher = dispatcher
        self._table = table
        self.sender = Sender(transport, services.threads, table.pieces)
        self._scope = trio.CancelScope()
        lane = self._lane = make_lane(services, dispatcher, self._allocate, self._reserve)
        self.killed = False
        now_s = services.clock.wall_s()
        self.session = Session(
            id=services.clients.next_id(),
            addr=transport.peer,
            laddr=transport.local,
            lane=lane.name,
            authenticated=not config.requirepass,
            created_s=now_s,
            active_s=now_s,
            kill=self.kill,
            reserve=self._reserve_queued,
            peer_left=transport.peer_left,
            leaves=True,
        )
        self.session.unlogged = []
        self._context = Context(self.session, services, dispatcher)
        self._parser = lane.parser
        self._parser.restricted = not self.session.authenticated
        self._reserved = 0
        self._queued = 0
        self._holding_since_s = 0.0
        self._received_before = 0
        self.unauthenticated_since_s: float | None = None
        self._commands = 0
        self._turn_end_ns = 0
        self._received = 0
        self._outbox = Outbox(transport, self.sender, lane.error_instead, dispatcher.count_refused, self._replies_sent)
        self._waited = False
        """The payload that memory is asked for has been waited for: it gets some now or never."""
        self._encoding = Encoding(lane, self._context, self._breathe)
        self._leaving = Leaving(transport, self._outbox, self._parser, self._encoding, lambda: table.draining)
        self._maybe_more = False
        self._busy_poll = BusyPoll(table.dialogue)
        self._phase = Phase.RUNNING

    @property
    def phase(self) -> Phase:
        """What the connection waits for; RUNNING while the log or a thread has its replies."""
        if self.sender.blocked:
            return Phase.SENDING
        return Phase.RUNNING if self._outbox.left or self._leaving.unsent else self._phase

    @property
    def progress(self) -> int:
        """Grows with every receive and every send that moved bytes."""
        return self._received + self.sender.progress

    @property
    def reserved_bytes(self) -> int:
        """Of the shared receive budget."""
        return self._reserved + self._queued

    def holding_rate(self, now_s: float) -> float:
        """Bytes a second the client sent since it holds receive memory, or takes of the reply; infinite while it is new
        or doesn't make the server wait.
        """
        if self._phase is Phase.RUNNING and not self.sender.blocked:
            return math.inf
        reading = self.sender.blocked and self.sender.nbytes > 0
        since_s = self.sender.started_s if reading else self._holding_since_s
        if now_s - since_s < RECEIVE_GRACE_S:
            return math.inf
        if reading:
            return self.sender.rate(now_s)
        # The kernel may hold a slice of a payload that this side has not been woken for.
        return (self._received - self._received_before + PAYLOAD_SLICE_BYTES) / (now_s - since_s)

    def give_up_memory(self) -> None:
        """Kill the connection and give its reservation back now; the memory follows a turn later, with its task."""
        self.kill()
        self._table.budget.release(self.reserved_bytes)
        self._reserved = self._queued = 0

    def kill(self) -> None:
        """End the connection at once: nothing more is sent."""
        self.killed = True
        self._leaving.withdraw()
        self._transport.close()
        self._scope.cancel()

    def close_idle(self) -> None:
        """End a connection that waits for its next request."""
        self._leaving.withdraw()
        self._transport.close()

    def settle(self) -> None:
        """Account for the reply that a thread has sent, if there is one, so that nothing is kept for it."""
        self._leaving.collect()

    def take_any_byte(self) -> None:
        """Wake up for whatever part of a payload has arrived, so that a slow sender isn't taken for a silent one."""
        self._transport.receiving_bulk(0)

    async def run(self) -> None:
        """Serve until the client leaves, breaks the protocol, is killed or the server drains.

        Errors of this client and of its commands never get out. Cancellation closes the connection; whether a command
        that was running took effect is unknown.
        """
        session = self.session
        self._services.clients.add(session)
        self._table.add(self)
        try:
            with self._scope:
                await self._serve()
        except ConnectionLostError as error:
            logger.debug("client %s lost: %s", session.addr, error)
        except Exception:
            logger.exception("client %s: unexpected error, connection closed", session.addr)
        finally:
            self._close()

    def _close(self) -> None:
        self._leaving.withdraw()
        self._transport.close()
        # Payloads must go now, not when the garbage collector finds the cycle between a connection and its parser.
        self._outbox.close()
        self._parser.close()
        self._table.remove(self)
        self._services.clients.remove(self.session)
        self._table.budget.release(self.reserved_bytes)
        self._reserved = self._queued = 0
        for callback in self._services.disconnect:
            try:
                callback(self.session)
            except Exception:
                logger.exception("client %s: a disconnect callback failed", self.session.addr)

    async def _serve(self) -> None:
        parser, session, table = self._parser, self.session, self._table
        try:
            while True:
                requests = parser.requests(1 if parser.restricted else COMMANDS_PER_TURN)
                if requests:
                    await self._run_batch(requests)
                    requests = ()  # else an idle client would keep its last payload
                    if session.closing:
                        return
                    parser.restricted = not session.authenticated
                    if not parser.need_data:
                        continue
                elif not parser.need_data:
                    await self._yield()
                    continue
                if parser.awaited:
                    await self._wait_for_memory()
                elif parser.payload_left:
                    if not await self._receive_payload():
                        break
                elif (table.draining and parser.between_requests) or not await self._receive():
                    break
            await self._leaving.settle()
            await self._outbox.flush()
        except ProtocolError as error:
            self._dispatcher.count_refused(error.code)
            self._outbox.parts.append(self._lane.protocol_error(error))
            await self._outbox.flush()
            await linger(self._transport, self._table.scratch)

    # -- running --------------------------------------------------------------------------------------------------

    async def _run_batch(self, requests: Sequence[Any]) -> None:
        lane, context, session = self._lane, self._context, self.session
        execute, small = lane.execute, lane.small
        refused = requests[-1] if type(requests[-1]) is lane.refused else None
        if refused is not None:
            requests = requests[:-1]
        outbox, out = self._outbox, self._outbox.parts
        reply: Any = None
        session.active_s = self._services.clock.wall_s()
        session.commands += len(requests)
        for argv in requests:
            if out and len(argv) > 2 and bytes(argv[0][:64]).upper() in self._table.blocking:
                await self._outbox.flush()  # it may wait long, and these replies are ready
            first = len(out)
            reply = await execute(context, argv)
            if session.reply_off or session.reply_skip:
                session.reply_skip -= session.reply_skip > 0
            elif type(reply) is small:
                out.append(reply.wire)
            else:
                if type(reply) is Later:
                    if argv is requests[-1] and not (refused or self._reserved) and self._leaving.leave(argv, reply):
                        break
                    reply = await self._encoding.finish(argv, reply)
                await self._encoding.append(argv, reply, outbox)
            if session.unlogged:
                outbox.unlogged.append((first, len(out), session.unlogged))
                session.unlogged = []
            if outbox.nbytes > FLUSH_BYTES or session.closing or session.ended_ns > self._turn_end_ns:
                await self._outbox.flush()
                if argv is requests[-1]:
                    self._release_payload()  # not before: the reply may be the payload itself
                reply = None  # else its blocks would be held while the next command runs
                if session.closing:
                    return
                await self._yield()
        if refused is not None and session.reply_skip:
            session.reply_skip -= 1
        elif refused is not None and not session.reply_off:
            lane.encode(lane.refusal(refused, self._refuse(refused)), session.resp, out)
        if not outbox.unlogged or len(outbox.unlogged) >= COMMANDS_PER_TURN or type(reply) is not small:
            await self._outbox.flush()
        # Else more may have arrived that the log can take along.
        self._release_payload()
        self._commands += len(requests)
        if self._commands >= COMMANDS_PER_TURN:
            await self._yield()

    async def _breathe(self) -> None:
        if perf_counter_ns() > self._turn_end_ns:
            await self._yield()

    def _release_payload(self) -> None:
        """Give back what a batch reserved, once it ran and its replies are sent.

        A payload's reservation is that of the batch's last request. What a transaction queued stays reserved until the
        transaction is over.
        """
        if not self._reserved and not self._queued:
            return
        transaction = self.session.transaction
        if self._reserved and not self._parser.in_request:
            if transaction is None:
                self._table.budget.release(self._reserved)
            else:
                transaction.queued_bytes += self._reserved
                self._queued += self._reserved
            self._reserved = 0
        kept = transaction.queued_bytes if transaction is not None else 0
        self._table.budget.release(self._queued - kept)
        self._queued = kept

    async def _yield(self) -> None:
        await trio.lowlevel.checkpoint()
        self._commands = 0
        self._turn_end_ns = perf_counter_ns() + TURN_NS

    def _replies_sent(self) -> None:
        """The log has sent what was left to it."""
        if self._table.draining and self._parser.between_requests:
            self.close_idle()

    def _refuse(self, request: Any) -> ErrorReply:
        if self.session.transaction is not None:
            self.session.transaction.failed = True
        self._dispatcher.count_refused(OutOfMemoryError.code)
        for callback in self._services.refused:
            callback(self.session, request)
        config = self._services.config
        limits = f"max-receiving is {config.max_receiving_bytes} bytes"
        if config.max_bytes:
            limits += f", max-bytes {config.max_bytes}"
        return ErrorReply(OutOfMemoryError.code, f"no memory to receive {request.nbytes} bytes now ({limits})")

    # -- receiving ------------------------------------------------------------------------------------------------

    async def _receive(self) -> bool:
        """Feed the parser; False at the end of the stream."""
        transport = self._transport
        if perf_counter_ns() > self._turn_end_ns:
            await self._yield()
        data = transport.recv_nowait(READ_CHUNK_BYTES) if self._maybe_more else None
        outbox, leaving = self._outbox, self._leaving
        if data is None and not leaving.some:
            if outbox.unlogged and not outbox.leave():
                await self._outbox.flush()
            if not self._maybe_more and not outbox.left:
                data = self._busy_poll.look(transport, READ_CHUNK_BYTES)
        while data is None:
            if not leaving.over:  # else it was woken before it waited
                self._phase = Phase.IDLE if self._parser.between_requests else Phase.RECEIVING
                await transport.wait_readable()
                outbox.left = False
                if outbox.parts and not outbox.unlogged:
                    await self._outbox.flush()  # the log could send a part only
                self._phase = Phase.RUNNING
                self._commands = 0
                self._turn_end_ns = perf_counter_ns() + TURN_NS
            if leaving.over:
                await leaving.settle()
                if self._table.draining:
                    return False
            data = transport.recv_nowait(READ_CHUNK_BYTES)
        self._received += len(data)
        if leaving.some:
            await leaving.settle()
        # After a short read the socket is most likely empty: there is no use in asking at once.
        self._maybe_more = len(data) == READ_CHUNK_BYTES
        self._parser.feed(data)
        return bool(data)

    async def _receive_payload(self) -> bool:
        """Receive the payload, up to its last byte, into its own memory; False at the end of the stream."""
        parser, transport, scratch = self._parser, self._transport, self._table.scratch
        self._phase = Phase.RECEIVING
        turn_end_ns = perf_counter_ns() + RECEIVE_TURN_NS
        while parser.payload_left:
            target = parser.target()
            left = parser.payload_left
            if target is None:
                target = scratch[READ_CHUNK_BYTES:]
            target = target[:PAYLOAD_SLICE_BYTES][:left]
            last = len(target) == left
            received = transport.recv_into_nowait([target, scratch[:READ_CHUNK_BYTES]] if last else [target])
            if received is None:
                if self._outbox.unlogged:
                    await self._outbox.flush()
                    continue
                transport.receiving_bulk(left + parser.trailer_bytes)
                await transport.wait_readable()
                turn_end_ns = perf_counter_ns() + RECEIVE_TURN_NS
                continue
            if received == 0:
                return False
            self._received += received
            surplus = received - len(target)
            parser.filled(min(received, len(target)))
            if surplus > 0:
                parser.feed(bytes(scratch[:surplus]))
            elif not last and perf_counter_ns() > turn_end_ns:
                await self._yield()
                turn_end_ns = perf_counter_ns() + RECEIVE_TURN_NS
        transport.receiving_bulk(0)
        self._maybe_more = True
        self._phase = Phase.RUNNING
        return True

    async def _wait_for_memory(self) -> None:
        """Nothing of this client is read meanwhile, to slow it down to the disk. Cancellation: nothing is reserved."""
        await self._outbox.flush()
        services, parser = self._services, self._parser
        await services.budget.wait(parser.awaited, self.reserved_bytes, lambda: services.target_of(parser.unfinished))
        self._waited = True
        parser.resume()
        self._waited = False

    def _allocate(self, nbytes: int) -> memoryview | None:
        self._table.payload_announced()
        budget = self._services.budget
        target = self._services.target_of(self._parser.unfinished)
        fits = budget.take_now(nbytes, target) if self._waited else budget.take(nbytes, self.reserved_bytes, target)
        if fits is None:
            return LATER
        if not fits or not self._take(nbytes):
            return None
        self._reserved += nbytes
        try:
            return np.empty(nbytes, np.uint8).data
        except MemoryError:
            logger.error("client %s: the system has no memory for %d bytes", self.session.addr, nbytes)
            return None

    def _reserve(self, nbytes: int) -> bool:
        if not self._services.budget.take_now(nbytes) or not self._take(nbytes):
            return False
        self._reserved += nbytes
        return True

    def _reserve_queued(self, nbytes: int) -> bool:
        if not self._services.budget.take_now(nbytes) or not self._take(nbytes):
            return False
        self._queued += nbytes
        return True

    def _take(self, nbytes: int) -> bool:
        if not self._table.reserve(self, nbytes):
            return False
        if not self.reserved_bytes:
            self._holding_since_s = trio.current_time()
            self._received_before = self._received
        return True


assert READ_CHUNK_BYTES > INLINE_ARG_BYTES  # noqa: S101  a chunk must be able to hold a whole short argument
