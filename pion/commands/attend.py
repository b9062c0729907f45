"""The ATTEND family: attention where the keys and values are, so that queries travel and K/V does not.

A layer is WARM (ready), COLD (it was; `KV.PREFIX.WARM` brings it back from the V-store) or missing. Nothing of it is on
the disk: after a restart all are missing. The commands are in the modules `attend_store`, `attend_query` and
`attend_warm`, the binary lane's in `attend_binary`; here is the plugin, which runs the compute thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from pion.command import BinaryCommand, Command
from pion.commands import attend_binary, attend_query, attend_store, attend_warm
from pion.commands.attend_common import PLUGIN, Attention, device_text, make_attention, prefix_rows, rows_of_info
from pion.config import Config
from pion.context import InfoSection, Services
from pion.hookspecs import hookimpl

COMMANDS: Final = (*attend_store.COMMANDS, *attend_query.COMMANDS, *attend_warm.COMMANDS)


@hookimpl
def register_commands(config: Config) -> Sequence[Command]:
    """The ATTEND.PREFIX commands, ATTEND.QUERYBATCH, ATTEND.INFO and KV.PREFIX.WARM."""
    return COMMANDS


@hookimpl
def register_binary(config: Config) -> Sequence[BinaryCommand]:
    """0x20 to 0x27."""
    return attend_binary.ROWS


@hookimpl
def startup(services: Services) -> None:
    """The table of layers and the compute worker, which imports nothing yet."""
    state = services.state[PLUGIN] = make_attention(services)
    services.banner.append(lambda: ("attention", device_text(state)))
    services.memory_stats.append(lambda: ("attention.bytes", state.slots.statistics().nbytes))
    services.prefix_info.append(lambda: prefix_rows(state))
    services.vstore.on_drop.append(state.prefix_dropped)
    services.vstore.on_new.append(state.forget_prefix)


@hookimpl
def register_services(services: Services) -> Sequence[Callable[..., Awaitable[None]]]:
    """The compute worker, and what prepares it at the start."""
    state: Attention = services.state[PLUGIN]
    return [state.worker.run, state.prepare]


@hookimpl
def register_info(services: Services) -> Sequence[InfoSection]:
    """The Attend section."""
    state: Attention = services.state[PLUGIN]
    return [InfoSection("Attend", lambda: [(f"attend_{field}", value) for field, value in rows_of_info(state)])]
