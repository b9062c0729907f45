"""What a command handler sees: the client's session, the worker's services, and nothing of sockets or nurseries."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio

from pion.config import Config
from pion.limits import CONVERSION_THREADS
from pion.process import fitting_clients
from pion.replies import Buffer

if TYPE_CHECKING:
    from pion.clients import ClientTable
    from pion.dispatch import Dispatcher, Entry
    from pion.monitor import Monitor
    from pion.net.table import ConnectionTable
    from pion.receipt import Receipt
    from pion.registry import Registry
    from pion.storage.budget import Budget
    from pion.storage.data_directory import DataDirectory
    from pion.storage.durable import Durable
    from pion.storage.tiering import Tiering
    from pion.storage.unit import Unit
    from pion.storage.vstore import VStore

T = TypeVar("T")


@attrs.define(eq=False)
class Transaction:
    """Commands queued since MULTI. `failed` remembers that one could not be queued, so EXEC must refuse."""

    queue: list[tuple[Entry, list[Buffer]]] = attrs.field(factory=list)
    queued_bytes: int = 0
    """Reserved for the queue: its arguments and what Python adds to each."""
    failed: bool = False


@attrs.define(eq=False)
class Session:
    """One client's state on the connection: what HELLO, AUTH, SELECT, CLIENT and MULTI change."""

    id: int
    addr: str
    laddr: str
    authenticated: bool
    lane: str = "resp"
    """The protocol it speaks: `resp` or `binary`."""
    user: str = "default"
    resp: int = 2
    name: bytes = b""
    lib_name: bytes = b""
    lib_ver: bytes = b""
    created_s: float = 0.0
    active_s: float = 0.0
    last_command: str = ""
    ended_ns: int = 0
    """When its last command ended (`perf_counter_ns`): the connection's turn is measured with it."""
    commands: int = 0
    transaction: Transaction | None = None
    in_exec: bool = False
    """EXEC is running the queue: no command may wait for another client."""
    reply_off: bool = False
    reply_skip: int = 0
    unlogged: list[Awaitable[None]] | None = None
    """What the log must have before this session's next reply is sent. With a list a command need not wait for the log
    itself: its connection does, for all commands of a pipeline at once. None: each command waits.
    """
    leaves: bool = False
    """Its connection can leave a reply to the thread that makes it: a handler may return a `Later`."""
    no_evict: bool = False
    no_touch: bool = False
    closing: bool = False
    """Set by QUIT and CLIENT KILL: the connection closes after the replies so far are sent."""
    kill: Callable[[], None] | None = None
    """Ends the connection at once; set by the connection, called by CLIENT KILL."""
    reserve: Callable[[int], bool] | None = None
    """Reserves bytes for what a transaction queues; False if there is no memory. Set by the connection."""
    peer_left: Callable[[], Awaitable[None]] | None = None
    """Returns once the peer has stopped sending; for a command that waits. Set by the connection."""

    @property
    def may_leave(self) -> bool:
        """Whether this command's reply may be a `Later`: not if it is part of another one, or isn't sent."""
        return self.leaves and not (self.in_exec or self.reply_off or self.reply_skip)

    def reset(self, authenticated: bool) -> None:
        """Back to how the connection started, as RESET does; the identity stays."""
        self.authenticated = authenticated
        self.user, self.resp, self.name = "default", 2, b""
        self.transaction = None
        self.reply_off, self.reply_skip = False, 0
        self.no_evict = self.no_touch = False


@attrs.frozen
class InfoSection:
    """One `# Title` section of INFO: `rows` is called when it is asked for."""

    title: str
    rows: Callable[[], Sequence[tuple[str, object]]]
    default: bool = True
    """Part of a plain INFO; otherwise only of `INFO all`, `INFO everything` or when named."""


class Clock:
    """Wall and monotonic time, so that tests can move them."""

    def wall_s(self) -> float:
        """Seconds since the epoch: for expiry times, which must mean the same after a restart."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds that never jump: for durations and time-outs."""
        return time.monotonic()


@attrs.define(eq=False, kw_only=True)
class Services:
    """What one worker shares among its connections; built by `pion.server`, never global."""

    config: Config
    clock: Clock
    registry: Registry
    vstore: VStore
    receipt: Receipt
    clients: ClientTable
    monitor: Monitor
    started_s: float
    durable: list[Durable] = attrs.field(factory=list)
    """What is kept in the data directory; what `register_durable` returned."""
    data: DataDirectory | None = None
    """The data directory, once it is read; None in a server that keeps nothing."""
    budget: Budget
    """For those who can wait until there is memory."""
    tiering: Tiering | None = None
    """What moves rows to the tier and back, if there is one."""
    info_sections: list[InfoSection] = attrs.field(factory=list)
    banner: list[Callable[[], tuple[str, str]]] = attrs.field(factory=list)
    """More lines of the banner, a word and a text each, from plugins; added in `startup`."""
    memory_stats: list[Callable[[], tuple[str, int]]] = attrs.field(factory=list)
    """More fields of MEMORY STATS, of memory that `--max-bytes` doesn't bound; added in `startup`."""
    prefix_info: list[Callable[[], Sequence[tuple[str, object]]]] = attrs.field(factory=list)
    """More fields of KV.PREFIX.INFO, from families that work on prefixes; added in `startup`."""
    state: dict[str, Any] = attrs.field(factory=dict)
    """Plugins' own state by plugin name."""
    plugins: list[str] = attrs.field(factory=list)
    """The plugins that are loaded, in order."""
    disconnect: list[Callable[[Session], None]] = attrs.field(factory=list)
    """Called when a connection has closed; what `register_disconnect` returned."""
    target_of: Callable[[Sequence[Buffer]], frozenset[Unit]] = lambda argv: frozenset()
    """What a payload is stored into, by the arguments before it: it must not make room for it. Set by the store's
    plugin.
    """
    refused: list[Callable[[Session, Sequence[Buffer]], None]] = attrs.field(factory=list)
    """Called with the name and first argument, or all, of a request that was refused for want of memory."""
    draining: trio.Event = attrs.field(factory=trio.Event)
    """Set when the server stops: nothing new is accepted and nobody may go on waiting."""
    net: ConnectionTable | None = None
    """The open connections, once the server listens."""
    threads: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(CONVERSION_THREADS))
    """For work that leaves the event loop."""
    fit_clients: Callable[[int], int] = fitting_clients
    """How many of so many clients the process has file descriptors for; a server process may raise its limit."""
    save_at_end: bool = True
    """Whether a clean stop takes a last snapshot; SHUTDOWN NOSAVE says no."""
    request_shutdown: Callable[[bool], None] = lambda now: None
    """Asks the server to stop: finish what is under way, or (True) at once."""
    listening: list[str] = attrs.field(factory=list)
    tcp_port: int = 0
    binary_port: int = 0
    """Of the binary lane; 0 without one."""


@attrs.frozen(eq=False)
class Context:
    """Handed to every handler, one per connection."""

    session: Session
    services: Services
    dispatch: Dispatcher

    async def in_thread(self, function: Callable[..., T], *args: object) -> T:
        """Run a function that would hold the loop too long.

        Cancellation: the function runs to its end and its result is kept, so buffers it was given stay valid.
        """
        return await trio.to_thread.run_sync(function, *args, limiter=self.services.threads)
