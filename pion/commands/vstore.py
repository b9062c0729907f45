"""The V family: sessions of rows by layer and token id.

The commands are in the modules `vstore_write` and `vstore_read`. Here is the plugin, which also starts the store's
reaper and drops what a client left unfinished.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from pion.args import word
from pion.command import BinaryCommand, Command
from pion.commands import vstore_binary, vstore_read, vstore_write
from pion.commands.info_tier import tier_rows
from pion.commands.vstore_reaper import Reaper, memory_rows
from pion.config import Config
from pion.context import InfoSection, Services, Session
from pion.hookspecs import hookimpl
from pion.replies import Buffer
from pion.storage.durable import Durable
from pion.storage.unit import Unit
from pion.storage.vstore_log import VStoreLog

STORING: Final = (b"V.STORE", b"V.STOREBATCH")
"""The commands whose payload a pending prefix waits for; the session id is their first argument."""

COMMANDS: Final = (*vstore_write.COMMANDS, *vstore_read.COMMANDS)


@hookimpl
def register_commands(config: Config) -> Sequence[Command]:
    """The V commands."""
    return COMMANDS


@hookimpl
def register_binary(config: Config) -> Sequence[BinaryCommand]:
    """The same on the binary lane."""
    return vstore_binary.BINARY


@hookimpl
def register_durable(services: Services) -> Sequence[Durable]:
    """Sessions and prefixes."""
    return [VStoreLog(services.vstore)]


@hookimpl
def register_services(services: Services) -> Sequence[Callable[..., Awaitable[None]]]:
    """The reaper, what keeps the disk budget, and what moves rows to the tier and back."""
    runs: list[Callable[..., Awaitable[None]]] = [Reaper(services).run, services.budget.disk.keep]
    if services.tiering is not None:
        runs.append(services.tiering.run)
    return runs


@hookimpl
def register_info(services: Services) -> Sequence[InfoSection]:
    """The Memory and the Tier section."""
    return [
        InfoSection("Memory", lambda: memory_rows(services)),
        InfoSection("Tier", lambda: tier_rows(services)),
    ]


@hookimpl
def register_disconnect(services: Services) -> Callable[[Session], None]:
    """Drops what the closed connection had registered and not completed; also when a payload for it was refused."""

    def refused(session: Session, request: Sequence[Buffer]) -> None:
        if len(request) > 1 and word(request[0]) in STORING:
            services.vstore.payload_refused(session.id, bytes(request[1]))

    def target_of(argv: Sequence[Buffer]) -> frozenset[Unit]:
        if not services.config.max_bytes or len(argv) < 2 or word(argv[0]) not in STORING:
            return frozenset()
        found = services.vstore.held_session(bytes(argv[1]))
        return frozenset(found[0].chain()) if found is not None else frozenset()

    services.refused.append(refused)
    services.target_of = target_of
    return lambda session: services.vstore.disconnect(session.id)
