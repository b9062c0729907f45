"""One worker: builds the services, owns the nurseries, orders the start and the shutdown.

Nesting, from outside: plugin services, then connections, then acceptors. Shutdown goes the other way: acceptors stop,
idle connections close, those in the middle of a request get the grace time, then the services end.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pluggy
import trio

from pion import process
from pion.clients import ClientTable
from pion.config import Config
from pion.context import Clock, Services
from pion.dispatch import Dispatcher
from pion.errors import PluginError, StartupError
from pion.limits import TIER_DESCRIPTORS
from pion.monitor import Monitor
from pion.net import endpoints, listener
from pion.plugins import call_each, call_one, make_plugin_manager, make_registry, plugin_names
from pion.receipt import Receipt
from pion.registry import Registry
from pion.storage.budget import Budget
from pion.storage.data_directory import open_directory
from pion.storage.disk_budget import DiskBudget
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.vstore import VStore

logger = logging.getLogger("pion.server")

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})


@attrs.frozen(eq=False)
class Worker:
    """Everything one worker consists of, built but not running."""

    manager: pluggy.PluginManager
    registry: Registry
    services: Services
    dispatcher: Dispatcher

    def hook(self, name: str) -> list[tuple[str, Any]]:
        """Call a hook of every plugin with the services, in plugin order; an error names the plugin."""
        return call_each(self.manager, name, services=self.services)

    def shut_down(self) -> None:
        """Let every plugin release what it holds, the last started first. One that fails doesn't keep the others from
        it, and is logged: an error that is already under way says more.
        """
        for name in reversed(self.services.plugins):
            try:
                call_one(self.manager, name, "shutdown", services=self.services)
            except Exception:
                logger.exception("plugin %s: shutdown failed", name)


@attrs.frozen
class Started:
    """What `serve` reports once the listeners are open."""

    worker: Worker
    port: int
    unix: str
    binary_port: int = 0
    """Of the binary lane; 0 without one."""

    @property
    def services(self) -> Services:
        """The running worker's services."""
        return self.worker.services


def build(config: Config, clock: Clock | None = None) -> Worker:
    """Load the plugins and make the services. Raises `StartupError`; opens no socket and no file for writing."""
    config = resolve(config)
    clock = clock or Clock()
    manager = make_plugin_manager(config)
    registry = make_registry(manager, config)
    monitor = Monitor(slower_than_us=config.slowlog_slower_than_us, max_len=config.slowlog_max_len)
    vstore = VStore(config, clock, NullJournal(), Ledger())
    disk = DiskBudget(vstore, lambda: services.data)
    services = Services(
        config=config,
        clock=clock,
        registry=registry,
        vstore=vstore,
        budget=Budget(vstore, disk),
        receipt=Receipt(),
        clients=ClientTable(),
        monitor=monitor,
        started_s=clock.monotonic_s(),
    )
    services.budget.stopping = services.draining.is_set
    worker = Worker(manager, registry, services, Dispatcher(registry, monitor))
    services.plugins = plugin_names(manager)
    worker.hook("startup")
    for _, durable in worker.hook("register_durable"):
        services.durable.extend(durable)
    if config.tier_dir:
        # Only now: a server without a tier starts without them.
        from pion.storage.tiering import Tiering
        from pion.storage.tiers.registry import merge_tiers, tier_from

        tier = tier_from(config.tier_dir, merge_tiers(worker.hook("register_tiers")))
        services.tiering = Tiering(vstore, tier, services.budget, disk, lambda: services.data)
    for _, sections in worker.hook("register_info"):
        services.info_sections.extend(sections)
    services.disconnect = [callback for _, callback in worker.hook("register_disconnect")]
    return worker


def resolve(config: Config) -> Config:
    """Check what one field alone can't tell, and read the password file. Raises `StartupError`."""
    if config.workers != 1:
        raise StartupError(f"--workers {config.workers}: this version runs one worker; leave the option out")
    if config.requirepass_file:
        if config.requirepass:
            raise StartupError("--requirepass and --requirepass-file are both given; keep one")
        try:
            lines = Path(config.requirepass_file).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise StartupError(f"--requirepass-file {config.requirepass_file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise StartupError(f"--requirepass-file {config.requirepass_file}: not UTF-8") from error
        if not lines or not lines[0]:
            raise StartupError(f"--requirepass-file {config.requirepass_file}: the first line is empty")
        config = attrs.evolve(config, requirepass=lines[0], requirepass_file="")
    if config.tier_dir and not config.max_bytes:
        raise StartupError("--tier-dir takes what memory has no room for: say how much it may hold, with --max-bytes")
    if config.protected_mode and not config.requirepass and config.host not in LOOPBACK_HOSTS:
        raise StartupError(
            f"--host {config.host} is reachable from other machines and there is no password: "
            "give --requirepass-file FILE, or --protected-mode no if the network is trusted"
        )
    return config


async def serve(
    config: Config,
    *,
    clock: Clock | None = None,
    handle_signals: bool = False,
    owns_process: bool = False,
    task_status: trio.TaskStatus[Started] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one worker until it is asked to stop; `task_status` gets `Started` when it listens.

    `owns_process` allows CONFIG SET maxclients to raise the process's limit of open files.

    Raises `StartupError` if it can't start, and `PluginError` after an orderly stop if a plugin's service failed.
    Cancellation: connections are cut, services end, sockets are closed.
    """
    worker = build(config, clock)
    services = worker.services
    if owns_process:
        services.fit_clients = process.raise_descriptor_limit
    supervised = _Supervisor(services)
    try:
        async with _data_directory(services) as cut_short:
            await _serve(worker, supervised, cut_short, handle_signals=handle_signals, task_status=task_status)
    except BaseExceptionGroup as group:
        raise only(group) from None  # the nursery of the data directory is nobody's business
    finally:
        worker.shut_down()
    logger.info("stopped")
    if supervised.failed is not None:
        raise supervised.failed


def only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception in a group, or in a group in it; the group itself if there are several."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
        found = found.exceptions[0]
    return found


@asynccontextmanager
async def _data_directory(services: Services) -> AsyncIterator[trio.Event]:
    """Reads the data directory, runs its tasks, and closes it at the end.

    The event is set by the body when it was cut short: then no last snapshot is taken. Raises StartupError.
    Cancellation: what was acknowledged is in the log; the rest of it is written within a deadline.
    """
    cut_short = trio.Event()
    if not services.config.dir:
        yield cut_short
        return
    store = services.vstore
    data = services.data = open_directory(
        services.config, services.durable, lambda: store.unplaced_bytes, lambda: store.sessions
    )
    clean = False
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(data.run)
            yield cut_short
            clean = True
            nursery.cancel_scope.cancel()
    finally:
        save = clean and services.save_at_end and not cut_short.is_set()
        await data.close(save=save, grace_s=services.config.grace_s)


async def _serve(
    worker: Worker,
    supervised: _Supervisor,
    cut_short: trio.Event,
    *,
    handle_signals: bool,
    task_status: trio.TaskStatus[Started],
) -> None:
    """Listen and serve until drained. See `serve`."""
    services = worker.services
    draining = services.draining
    listeners = await endpoints.open_listeners(services.config)
    services.tcp_port, services.binary_port = listeners.tcp_port, listeners.binary_port
    services.listening = listeners.describe()
    try:
        async with trio.open_nursery() as service_nursery:
            await supervised.start(worker, service_nursery)
            with trio.CancelScope() as connections:

                def request_shutdown(now: bool) -> None:
                    draining.set()
                    if now:
                        cut_short.set()
                        connections.cancel()

                services.request_shutdown = request_shutdown
                if handle_signals:
                    await service_nursery.start(_watch_signals, request_shutdown, draining)
                async with trio.open_nursery() as connection_nursery:
                    serve_clients = partial(listener.serve, binary=listeners.binary)
                    await connection_nursery.start(serve_clients, listeners.resp, services, worker.dispatcher)
                    logger.info("listening on %s", ", ".join(services.listening))
                    task_status.started(Started(worker, services.tcp_port, services.config.unix, services.binary_port))
                    await draining.wait()
                    grace_s = services.config.grace_s
                    logger.info("shutting down: up to %g s for %d connections", grace_s, len(services.clients))
                    connections.deadline = trio.current_time() + grace_s
            if connections.cancelled_caught:
                logger.warning("the grace time is over or a second signal came: open connections were cut")
            service_nursery.cancel_scope.cancel()
    finally:
        for opened in listeners.all:
            with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
                await opened.aclose()
        endpoints.remove_socket(services.config.unix)


@attrs.define(eq=False)
class _Supervisor:
    """Runs the plugins' services. One that fails while clients are served stops the server, with the grace time."""

    _services: Services
    failed: PluginError | None = attrs.field(default=None, init=False)

    async def start(self, worker: Worker, nursery: trio.Nursery) -> None:
        """Start every service and return when all have started. Raises `PluginError`."""
        for name, runs in worker.hook("register_services"):
            for run in runs:
                await nursery.start(self._run, name, run)

    async def _run(
        self, name: str, run: Callable[..., Awaitable[None]], *, task_status: trio.TaskStatus[object]
    ) -> None:
        status = _StatusWatch(task_status)
        try:
            await run(task_status=status)
        except Exception as error:
            if isinstance(error, StartupError) and not status.is_started:
                raise  # something that the operator must change
            logger.exception("plugin %s: service failed", name)
            failure = PluginError(f"plugin {name}: service failed: {error!r}")
            failure.__cause__ = error
            if not status.is_started:
                raise failure from error
            self.failed = self.failed or failure
            self._services.draining.set()


class _StatusWatch:
    """A task status that remembers whether `started` was called."""

    def __init__(self, task_status: trio.TaskStatus[object]) -> None:
        self._task_status = task_status
        self.is_started = False

    def started(self, value: object = None) -> None:
        """See `trio.TaskStatus`."""
        self._task_status.started(value)
        self.is_started = True


async def _watch_signals(
    request_shutdown: Callable[[bool], None],
    draining: trio.Event,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """The first SIGINT or SIGTERM drains, the second ends at once."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for number in signals:
            logger.info("got %s", signal.Signals(number).name)
            request_shutdown(draining.is_set())


def run(config: Config, announce: Callable[[Started], None]) -> None:
    """Run a server process in the foreground: tune the process, serve with signals, call `announce` once listening."""
    process.tune_allocator()
    others = TIER_DESCRIPTORS if config.tier_dir else 0
    fitting = max(1, process.raise_descriptor_limit(config.max_clients + others) - others)
    if fitting < config.max_clients:
        logger.warning("file descriptors allow %d clients, not --maxclients %d", fitting, config.max_clients)
        config = attrs.evolve(config, max_clients=fitting)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            started = await nursery.start(_serve_with_signals, config)
            process.tune_gc()
            announce(started)

    trio.run(main)


async def _serve_with_signals(config: Config, *, task_status: trio.TaskStatus[Started]) -> None:
    await serve(config, handle_signals=True, owns_process=True, task_status=task_status)
