"""The sections of INFO that belong to the server family; storage and plugins register their own."""

from __future__ import annotations

import os
import platform
import resource
import secrets
import sys
from collections.abc import Sequence
from typing import Final

import trio

from pion.commands.info_persistence import persistence_rows
from pion.commands.modules import MODULE_VERSION, plugin_names
from pion.config import REDIS_VERSION, VERSION
from pion.context import InfoSection, Services

PLUGIN: Final = "server"
SECONDS_PER_DAY: Final = 86_400

TRANSFER_FIELDS: Final = (
    "receiving_bytes",
    "receiving_refused",
    "unsent_bytes",
    "timed_out",
    "slow_senders_dropped",
    "slow_readers_dropped",
)
"""What the Stats section shows of the connections: large transfers, and who was disconnected for being slow."""

Rows = Sequence[tuple[str, object]]


def start(services: Services) -> None:
    """Draw the run id: clients and monitors notice a restart by it."""
    services.state[PLUGIN] = secrets.token_hex(20)


def sections(services: Services) -> list[InfoSection]:
    """In Redis's order. Commandstats are long, so they are not part of a plain INFO."""
    return [
        InfoSection("Server", lambda: _server(services)),
        InfoSection("Clients", lambda: _clients(services)),
        InfoSection("Persistence", lambda: persistence_rows(services)),
        InfoSection("Stats", lambda: _stats(services)),
        InfoSection("Replication", lambda: (("role", "master"), ("connected_slaves", 0))),
        InfoSection("CPU", _cpu),
        InfoSection("Modules", lambda: _modules(services)),
        InfoSection("Commandstats", lambda: _commandstats(services), default=False),
        InfoSection("Errorstats", lambda: _errorstats(services)),
        InfoSection("Cluster", lambda: (("cluster_enabled", 0),)),
        InfoSection("Keyspace", tuple),
    ]


def _server(services: Services) -> Rows:
    system = os.uname()
    uptime_s = int(services.clock.monotonic_s() - services.started_s)
    return [
        ("redis_version", REDIS_VERSION),
        ("redis_mode", "standalone"),
        ("pion_version", VERSION),
        ("python_version", platform.python_version()),
        ("trio_version", trio.__version__),
        ("os", f"{system.sysname} {system.release} {system.machine}"),
        ("arch_bits", (sys.maxsize + 1).bit_length()),
        ("process_id", os.getpid()),
        ("run_id", services.state[PLUGIN]),
        ("tcp_port", services.tcp_port),
        ("binary_port", services.binary_port),
        *((f"listener{index}", listener) for index, listener in enumerate(services.listening)),
        ("server_time_usec", int(services.clock.wall_s() * 1e6)),
        ("uptime_in_seconds", uptime_s),
        ("uptime_in_days", uptime_s // SECONDS_PER_DAY),
        ("executable", sys.executable),
    ]


def _clients(services: Services) -> Rows:
    return [
        ("connected_clients", services.clients.statistics().connected),
        ("cluster_connections", 0),
        ("maxclients", services.config.max_clients),
        ("tracking_clients", 0),
    ]


def _stats(services: Services) -> Rows:
    clients = services.clients.statistics()
    monitor = services.monitor
    # The connections' own counters; a worker without sockets, as in tests, has none.
    net = services.net
    transfers = [(field, getattr(net.statistics(), field)) for field in TRANSFER_FIELDS] if net is not None else []
    return [
        ("total_connections_received", clients.accepted),
        ("total_commands_processed", sum(counter.calls for counter in monitor.counters.values())),
        ("rejected_connections", clients.rejected),
        ("total_error_replies", sum(monitor.errors.values())),
        *transfers,
    ]


def _cpu() -> Rows:
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return [
        ("used_cpu_sys", f"{own.ru_stime:.6f}"),
        ("used_cpu_user", f"{own.ru_utime:.6f}"),
        ("used_cpu_sys_children", f"{children.ru_stime:.6f}"),
        ("used_cpu_user_children", f"{children.ru_utime:.6f}"),
    ]


def _modules(services: Services) -> Rows:
    return [("module", f"name={name},ver={MODULE_VERSION}") for name in plugin_names(services.registry)]


def _commandstats(services: Services) -> Rows:
    rows: list[tuple[str, object]] = []
    for name, counter in sorted(services.monitor.counters.items()):
        if not (counter.calls or counter.rejected):
            continue
        usec = counter.total_ns // 1000
        per_call = counter.total_ns / 1000 / counter.calls if counter.calls else 0.0
        rows.append(
            (
                f"cmdstat_{name.replace(' ', '|')}",
                f"calls={counter.calls},usec={usec},usec_per_call={per_call:.2f},"
                f"rejected_calls={counter.rejected},failed_calls={counter.failed}",
            )
        )
    return rows


def _errorstats(services: Services) -> Rows:
    return [(f"errorstat_{code}", f"count={count}") for code, count in sorted(services.monitor.errors.items())]
