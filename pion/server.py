"""One worker: builds the services, owns the nurseries, orders the start and the shutdown.

Nesting, from outside: plugin services, then connections, then acceptors. Shutdown goes the other way: acceptors stop,
idle connections close, those in the middle of a request get the grace time, then the services end.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path

import attrs
import pluggy
import trio

from pion import process
from pion.clients import ClientTable
from pion.config import Config
from pion.context import Clock, Services
from pion.dispatch import Dispatcher
from pion.errors import PluginError, StartupError
from pion.monitor import Monitor
from pion.net import endpoints, listener
from pion.plugins import make_plugin_manager, make_registry
from pion.receipt import Receipt
from pion.registry import Registry
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

    def hook(self, name: str) -> list[object]:
        """Call a start-up hook of every plugin with the services, in plugin order; an error names the plugin."""
        results: list[object] = []
        for plugin_name, plugin in reversed(self.manager.list_name_plugin()):
            implementation = getattr(plugin, name, None)
            if implementation is None or self.manager.parse_hookimpl_opts(plugin, name) is None:
                continue
            try:
                results.append(implementation(services=self.services))
            except StartupError:
                raise
            except Exception as error:
                raise PluginError(f"plugin {plugin_name}: {name} failed: {error!r}") from error
        return results


@attrs.frozen
class Started:
    """What `serve` reports once the listeners are open."""

    worker: Worker
    port: int
    unix: str

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
    services = Services(
        config=config,
        clock=clock,
        registry=registry,
        vstore=VStore(config, clock, NullJournal(), Ledger()),
        receipt=Receipt(),
        clients=ClientTable(),
        monitor=monitor,
        started_s=clock.monotonic_s(),
    )
    worker = Worker(manager, registry, services, Dispatcher(registry, monitor))
    services.state["plugins"] = [name for name, _ in reversed(manager.list_name_plugin())]
    worker.hook("startup")
    for sections in worker.hook("register_info"):
        services.info_sections.extend(sections)  # type: ignore[arg-type]
    services.state["disconnect"] = worker.hook("register_disconnect")
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
        if not lines or not lines[0]:
            raise StartupError(f"--requirepass-file {config.requirepass_file}: the first line is empty")
        config = attrs.evolve(config, requirepass=lines[0], requirepass_file="")
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
    task_status: trio.TaskStatus[Started] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one worker until it is asked to stop; `task_status` gets `Started` when it listens.

    Raises `StartupError` if it can't start. Cancellation: connections are cut, services end, sockets are closed.
    """
    worker = build(config, clock)
    services = worker.services
    draining = services.state["draining"] = trio.Event()
    try:
        listeners = await endpoints.open_listeners(services.config)
        services.tcp_port = listeners[0].socket.getsockname()[1]
        services.listening = [endpoints.describe(each) for each in listeners]
        try:
            async with trio.open_nursery() as service_nursery:
                await _start_services(worker, service_nursery)
                with trio.CancelScope() as connections:

                    def request_shutdown(now: bool) -> None:
                        draining.set()
                        if now:
                            connections.cancel()

                    services.request_shutdown = request_shutdown
                    if handle_signals:
                        await service_nursery.start(_watch_signals, request_shutdown, draining)
                    async with trio.open_nursery() as connection_nursery:
                        await connection_nursery.start(listener.serve, listeners, services, worker.dispatcher)
                        logger.info("listening on %s", ", ".join(services.listening))
                        task_status.started(Started(worker, services.tcp_port, services.config.unix))
                        await draining.wait()
                        grace_s = services.config.grace_s
                        logger.info("shutting down: up to %g s for %d connections", grace_s, len(services.clients))
                        connections.deadline = trio.current_time() + grace_s
                if connections.cancelled_caught:
                    logger.warning("the grace time is over or a second signal came: open connections were cut")
                service_nursery.cancel_scope.cancel()
        finally:
            for opened in listeners:
                with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
                    await opened.aclose()
            endpoints.remove_socket(services.config.unix)
    finally:
        worker.hook("shutdown")
    logger.info("stopped")


async def _start_services(worker: Worker, nursery: trio.Nursery) -> None:
    for runs in worker.hook("register_services"):
        for run in runs:  # type: ignore[attr-defined]
            await nursery.start(run)


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
    fitting = process.raise_descriptor_limit(config.max_clients)
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
    await serve(config, handle_signals=True, task_status=task_status)
