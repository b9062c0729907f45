"""Every hook a plugin can implement. Hooks are called once, while the server starts (or stops), never per command."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pluggy import HookimplMarker, HookspecMarker

if TYPE_CHECKING:
    from pion.command import BinaryCommand, Command
    from pion.config import Config
    from pion.context import InfoSection, Services, Session
    from pion.storage.durable import Durable
    from pion.storage.tiers.registry import TierFactory

hookspec = HookspecMarker("pion")
hookimpl = HookimplMarker("pion")


@hookspec
def register_commands(config: Config) -> Sequence[Command]:  # type: ignore[empty-body]
    """Return the plugin's command rows. Called first, before any service exists.

    The host merges the rows of all plugins. The same name twice refuses the start and names both plugins, unless the
    later row says `replaces="<plugin>"`.
    """


@hookspec
def register_binary(config: Config) -> Sequence[BinaryCommand]:  # type: ignore[empty-body]
    """Return the plugin's rows of the binary lane; called after `register_commands`.

    Each names a command of the merged table. A code that two plugins have, or a command that isn't there, refuses the
    start and names the plugins.
    """


@hookspec
def startup(services: Services) -> None:
    """Set up the plugin's own state, once, before the listeners open. Keep it in `services.state[<plugin name>]`."""


@hookspec
def register_durable(services: Services) -> Sequence[Durable]:  # type: ignore[empty-body]
    """Return what of the plugin's state is kept in the log and in snapshots; called after `startup`.

    Everything in the data directory is replayed into it before the listeners open. In a server that keeps nothing
    (`--dir ""`) nothing is replayed and nothing is written.
    """


@hookspec
def register_services(services: Services) -> Sequence[Callable[..., Awaitable[None]]]:  # type: ignore[empty-body]
    """Return async callables that run as long as the server: `async def run(*, task_status)`.

    The host starts each with `nursery.start`, so it must call `task_status.started()`, and cancels it at shutdown after
    the last connection has closed. One that fails is logged with the plugin's name and stops the server, with the
    grace time for its clients.
    """


@hookspec
def register_info(services: Services) -> Sequence[InfoSection]:  # type: ignore[empty-body]
    """Return sections for INFO. Each is formatted only when a client asks for it."""


@hookspec
def register_tiers(services: Services) -> Mapping[str, TierFactory]:  # type: ignore[empty-body]
    """Return kinds of tiers by the scheme of their URL, in lower case; `--tier-dir` names one of them.

    A factory gets the URL, connects to nothing yet, and raises ValueError for a URL that it can't use. A scheme that
    two plugins have refuses the start. Only asked for with `--tier-dir`.
    """


@hookspec
def register_disconnect(services: Services) -> Callable[[Session], None]:  # type: ignore[empty-body]
    """Return a function that is called, on the event loop, when a connection has closed. It can't block."""


@hookspec
def shutdown(services: Services) -> None:
    """Release what `startup` made, once, after the last service has stopped. Not called if startup failed.

    Plugins are asked in the reverse order of `startup`; one that fails is logged and the others still run.
    """
