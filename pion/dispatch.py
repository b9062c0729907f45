"""From a parsed request to a reply: look up, arity, authentication, transaction queue, call, error to reply.

The table is built once from the frozen registry and keyed by the name as clients usually send it (upper or lower case),
so the common request costs one dictionary look-up.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import attrs
import trio

from pion.args import show
from pion.command import BinaryCommand, Command, Flag
from pion.errors import CommandError, ExecAbortError, NoAuthError, OutOfMemoryError, PionError
from pion.later import Later
from pion.limits import COMMANDS_PER_TURN, TURN_NS
from pion.monitor import CommandCounter, Monitor
from pion.protocol.packed import unpacker
from pion.registry import Registry
from pion.replies import QUEUED, Buffer, ErrorReply, Reply, Simple, held_bytes

if TYPE_CHECKING:
    from pion.command import Handler
    from pion.context import Context
    from pion.protocol.binary import BinaryRequest
    from pion.replies import BinaryReply

logger = logging.getLogger("pion.dispatch")

UNKNOWN_ARGS_SHOWN_BYTES = 128
"""As in Redis: the error for an unknown command quotes this much of its arguments."""

QUEUED_ARGUMENT_BYTES = 56
"""What Python and a list add to one queued argument."""


@attrs.define(eq=False)
class Entry:
    """One row, prepared for the call."""

    command: Command
    name: str
    handler: Handler | None
    min_args: int
    max_args: int
    no_auth: bool
    no_multi: bool
    writes: bool
    needs_memory: bool
    counter: CommandCounter
    subcommands: dict[bytes, Entry] | None


class Dispatcher:
    """Runs requests of one worker. Shared by all connections; keeps no per-connection state."""

    def __init__(self, registry: Registry, monitor: Monitor) -> None:
        self._monitor = monitor
        self._registry = registry
        self._table: dict[bytes, Entry] = {}
        for row in registry:
            if row.container is None:
                entry = self._entry(row)
                subcommands = registry.subcommands(row.name.upper())
                if subcommands:
                    entry.subcommands = {
                        sub.name.upper().partition(" ")[2].encode(): self._entry(sub) for sub in subcommands
                    }
                name = row.name.upper().encode()
                self._table[name] = self._table[name.lower()] = entry
        self._packed = {code: self._packed_entry(row) for code, row in registry.binary.items()}

    def _entry(self, row: Command) -> Entry:
        exact = row.arity > 0
        return Entry(
            command=row,
            name=row.name,
            handler=row.handler,
            min_args=abs(row.arity),
            max_args=row.arity if exact else 1 << 31,
            no_auth=Flag.NO_AUTH in row.flags,
            no_multi=Flag.NO_MULTI in row.flags,
            writes=Flag.WRITE in row.flags,
            needs_memory=Flag.DENYOOM in row.flags,
            counter=self._monitor.counter(row.name.lower()),
            subcommands=None,
        )

    def _packed_entry(self, row: BinaryCommand) -> Entry:
        """What a binary request runs: the RESP command's row in all but the handler."""
        command = self._registry.get(row.command.upper())
        assert command is not None  # noqa: S101  checked by the registry
        return attrs.evolve(self._entry(command), handler=_unpacking(row))

    def execute(self, context: Context, argv: list[Buffer]) -> Awaitable[Reply | Later]:
        """The reply to one request; a refused or failed command is an `ErrorReply`, never an exception.

        It is no `async def`, so that the common request costs one coroutine less. The checks are made at once; the
        command runs when the result is awaited, which must be before the next request.
        Cancellation: whether the command took effect is unknown, and the connection must close.
        """
        session = context.session
        try:
            name = argv[0]
            entry = self._table.get(name) if type(name) is bytes else None
            if entry is None or entry.subcommands is not None or not entry.min_args <= len(argv) <= entry.max_args:
                entry = self.find(argv)
            if not session.authenticated and not entry.no_auth:
                entry.counter.rejected += 1
                raise NoAuthError("Authentication required.")
        except PionError as error:
            self._monitor.count_error(error.code)
            if session.transaction is not None:
                session.transaction.failed = True
            return _ready(ErrorReply(error.code, str(error)))
        if session.transaction is not None and not entry.no_multi:
            return _ready(self._queue(context, entry, argv))
        return self.run(context, entry, argv)

    def execute_packed(self, context: Context, request: BinaryRequest) -> Awaitable[Any]:
        """As `execute`, for the binary lane: the `BinaryReply` of the row's handler, or an `ErrorReply`."""
        try:
            entry = self.find_packed(request)
            if not context.session.authenticated and not entry.no_auth:
                entry.counter.rejected += 1
                raise NoAuthError("Authentication required.")
        except PionError as error:
            self._monitor.count_error(error.code)
            return _ready(ErrorReply(error.code, str(error)))
        return self.run(context, entry, request)

    def find_packed(self, request: BinaryRequest) -> Entry:
        """The entry for a request of the binary lane. Raises `CommandError`."""
        entry = self._packed.get(request.code)
        if entry is None:
            raise CommandError(f"unknown command 0x{request.code:02x} of the binary lane")
        return entry

    async def run(
        self, context: Context, entry: Entry, argv: list[Buffer], later: Later | None = None
    ) -> Reply | Later:
        """Call the handler of an entry that passed the checks, and account for it.

        A `Later` is returned as it is, and accounted for when this is called again with it: it is waited for then. Or,
        if its reply was sent meanwhile, by `answered`.
        """
        counter = entry.counter
        if later is None:
            counter.calls += 1
            context.session.last_command = entry.name
            start = perf_counter_ns()
        else:
            start = later.start_ns
        try:
            if later is not None:
                reply: Reply | Later = await later.wait()
            elif entry.writes and entry.needs_memory and context.services.budget.holds_back:
                reply = await self._run_within(context, entry, argv)
            else:
                if entry.writes and (data := context.services.data) is not None and data.holds_back:
                    await data.admit()
                reply = await entry.handler(context, argv)  # type: ignore[misc]  # find() refuses a row without one
        except PionError as error:
            counter.failed += 1
            self._monitor.count_error(error.code)
            reply = ErrorReply(error.code, str(error))
            if entry.needs_memory and isinstance(error, OutOfMemoryError):
                for callback in context.services.refused:
                    callback(context.session, argv)
        except Exception:
            counter.failed += 1
            self._monitor.count_error("ERR")
            plugin = self._registry.origin(entry.command)
            logger.exception("command %s of plugin %s failed (client %s)", entry.name, plugin, context.session.addr)
            reply = ErrorReply("ERR", f"internal error in {entry.name} (plugin {plugin}); see the server's log")
        else:
            if type(reply) is ErrorReply:
                counter.failed += 1
                self._monitor.count_error(reply.code)
            elif type(reply) is Later:
                reply.entry, reply.start_ns = entry, start
                if context.session.may_leave:
                    return reply
                return await self.run(context, entry, argv, reply)  # the handler did not ask
        self._account(context, entry, argv, start, perf_counter_ns() if later is None else later.ended_ns)
        return reply

    def answered(self, context: Context, argv: list[Buffer], later: Later) -> None:
        """Account for a `Later` whose reply another thread has sent: it is not waited for then."""
        self._account(context, later.entry, argv, later.start_ns, later.ended_ns)

    def _account(self, context: Context, entry: Entry, argv: list[Buffer], start_ns: int, ended_ns: int) -> None:
        context.session.ended_ns = ended_ns
        elapsed = ended_ns - start_ns
        entry.counter.total_ns += elapsed
        if elapsed >= self._monitor.slower_than_ns:
            self._record_slow(context, entry.command, argv, elapsed)

    async def _run_within(self, context: Context, entry: Entry, argv: list[Buffer]) -> Reply | Later:
        """Run a command that needs memory and disk once there is room for it. Raises PionError, and as the handler.

        Cancellation: as `run`.
        """
        services = context.services
        nbytes = sum(map(len, argv))
        await services.budget.admit(nbytes, services.target_of(argv))
        with services.budget.disk.admitted(nbytes):
            # The log last: nothing may come between its room and the change.
            if services.data is not None and services.data.holds_back:
                await services.data.admit()
            return await entry.handler(context, argv)  # type: ignore[misc]  # find() refuses a row without a handler

    def unsendable(self, context: Context, entry: Entry, error: TypeError) -> ErrorReply:
        """What the client gets in place of a value that is no reply; the log names the plugin that returned it."""
        entry.counter.failed += 1
        self._monitor.count_error("ERR")
        plugin = self._registry.origin(entry.command)
        logger.error(
            "command %s of plugin %s returned what can't be sent: %s (client %s)",
            entry.name,
            plugin,
            error,
            context.session.addr,
        )
        return ErrorReply("ERR", f"internal error in {entry.name} (plugin {plugin}): {error}")

    def count_refused(self, code: str) -> None:
        """Account for an error reply to what never became a command: a refused payload, broken protocol."""
        self._monitor.count_error(code)

    def _record_slow(self, context: Context, command: Command, argv: list[Buffer], elapsed_ns: int) -> None:
        if Flag.BLOCKING not in command.flags:
            shown = argv[:1] if Flag.NO_AUTH in command.flags else argv
            self._monitor.record_slow(
                shown,
                elapsed_ns,
                at_s=context.services.clock.wall_s(),
                addr=context.session.addr,
                client_name=context.session.name,
            )

    def find(self, argv: list[Buffer]) -> Entry:
        """The entry for a request, with its arity checked. Raises `CommandError`."""
        name = bytes(argv[0][:128])
        entry = self._table.get(name) or self._table.get(name.upper())
        if entry is None:
            raise unknown_command(argv)
        if entry.subcommands is not None and (len(argv) > 1 or entry.handler is None):
            if len(argv) < 2:
                raise wrong_arity(entry.command)
            sub = entry.subcommands.get(bytes(argv[1][:128]).upper())
            if sub is None and entry.handler is None:
                raise CommandError(f"unknown subcommand {show(argv[1])}. Try {entry.command.name.upper()} HELP.")
            entry = sub or entry
        if not entry.min_args <= len(argv) <= entry.max_args:
            entry.counter.rejected += 1
            raise wrong_arity(entry.command)
        return entry

    def _queue(self, context: Context, entry: Entry, argv: list[Buffer]) -> Reply:
        transaction = context.session.transaction
        assert transaction is not None  # noqa: S101  checked by the caller
        config = context.services.config
        # A payload's own bytes were reserved when it was announced.
        size = sum(len(arg) for arg in argv if type(arg) is bytes) + QUEUED_ARGUMENT_BYTES * len(argv)
        reserve = context.session.reserve
        if (
            len(transaction.queue) >= config.max_queued_commands
            or transaction.queued_bytes + size > config.max_receiving_bytes
        ):
            transaction.failed = True
            self._monitor.count_error("ERR")
            return ErrorReply(
                "ERR",
                f"MULTI queue is full ({config.max_queued_commands} commands, {config.max_receiving_bytes} bytes)",
            )
        if reserve is not None and not reserve(size):
            transaction.failed = True
            self._monitor.count_error(OutOfMemoryError.code)
            return ErrorReply(
                OutOfMemoryError.code,
                f"no memory to queue {size} bytes now (max-receiving is {config.max_receiving_bytes} bytes)",
            )
        transaction.queue.append((entry, argv))
        transaction.queued_bytes += size
        return QUEUED

    async def execute_queued(self, context: Context) -> Reply:
        """What EXEC does: run the queued commands in order and return their replies.

        Each command is atomic by itself; other clients' commands may run between two of them. A reply that doesn't fit
        into `max_exec_reply_bytes` is an OOM error in its place; its command ran, and so do those after it.
        Cancellation: some of the commands may have run; the connection must close.
        """
        session = context.session
        transaction = session.transaction
        if transaction is None:
            raise CommandError("EXEC without MULTI")
        session.transaction = None
        if transaction.failed:
            raise ExecAbortError("Transaction discarded because of previous errors.")
        replies: list[Reply] = []
        unlogged: list[tuple[int, list[Awaitable[None]]]] = []
        left = context.services.config.max_exec_reply_bytes
        turn_end_ns = perf_counter_ns() + TURN_NS
        session.in_exec = True
        try:
            for entry, argv in transaction.queue:
                reply: Any = await self.run(context, entry, argv)
                if type(reply) is not Simple:
                    try:
                        size = held_bytes(reply)
                    except TypeError as error:
                        reply, size = self.unsendable(context, entry, error), 0
                    if size > left and type(reply) is not ErrorReply:
                        reply = self._too_long(context, entry)
                    else:
                        left -= size
                replies.append(reply)
                if session.unlogged:
                    unlogged.append((len(replies) - 1, session.unlogged))
                    session.unlogged = []
                if not len(replies) % COMMANDS_PER_TURN or perf_counter_ns() > turn_end_ns:
                    await trio.lowlevel.checkpoint()
                    turn_end_ns = perf_counter_ns() + TURN_NS
        finally:
            session.in_exec = False
        for index, waits in unlogged:
            try:
                for wait in waits:
                    await wait
            except CommandError as error:
                self._monitor.count_error(error.code)
                replies[index] = ErrorReply(error.code, str(error))
        return replies

    def _too_long(self, context: Context, entry: Entry) -> ErrorReply:
        self._monitor.count_error(OutOfMemoryError.code)
        limit = context.services.config.max_exec_reply_bytes
        return ErrorReply(
            OutOfMemoryError.code,
            f"{entry.name} ran, but its reply is left out: EXEC keeps at most {limit} bytes of replies",
        )


def _unpacking(row: BinaryCommand) -> Handler:
    """The row's handler as one that takes a whole request."""
    unpack, handler, takes_body = unpacker(row.meta), row.handler, bool(row.body)

    def handle(context: Context, request: BinaryRequest) -> Awaitable[BinaryReply | Later]:
        if not takes_body and len(request.body):
            raise CommandError(f"this command takes no body, got {len(request.body)} bytes")
        return handler(context, unpack(request.meta), request.body)

    return handle  # type: ignore[return-value]  # the dispatcher hands it requests of its own lane only


async def _ready(reply: Reply) -> Reply:
    """A reply that is known already, as something to await."""
    return reply


def unknown_command(argv: list[Buffer]) -> CommandError:
    """Redis's error for a name that is in no row; clients match its text."""
    shown = ""
    for arg in argv[1:]:
        if len(shown) >= UNKNOWN_ARGS_SHOWN_BYTES:
            break
        shown += show(arg, UNKNOWN_ARGS_SHOWN_BYTES - len(shown)) + " "
    return CommandError(f"unknown command {show(argv[0], 128)}, with args beginning with: {shown}")


def wrong_arity(command: Command) -> CommandError:
    """Redis's error for a wrong number of arguments; clients match its text."""
    return CommandError(f"wrong number of arguments for '{command.name.lower().replace(' ', '|')}' command")
