"""MEMORY: what the stored costs, one by one and in all."""

from __future__ import annotations

from typing import Final

from pion.args import MAX_NAME_BYTES, integer, name, word
from pion.command import Arg, ArgType, Command, Flag
from pion.commands.checks import syntax_error
from pion.commands.help import help_row
from pion.commands.vstore_common import sid_name
from pion.commands.vstore_reaper import anonymous_bytes
from pion.config import MIB
from pion.context import Context, Services
from pion.errors import CommandError
from pion.replies import Buffer, Map, Reply
from pion.storage.room import memory_bytes, side_bytes
from pion.storage.unit import Unit

MISSING: Final = {b"SSM": "SSM.PREFIX", b"MOE": "MOE.EXPERT"}
"""Kinds of names that belong to families which this version lacks."""

NEARLY_FULL: Final = 0.95
"""Share of --max-bytes or --max-sessions from which on MEMORY DOCTOR says that prefixes make room for others."""

MUCH_SENDING: Final = 0.1
"""Share of the memory held by unfinished replies from which on slow readers are worth a look."""

MUCH_UNCHARGED: Final = 1.5
"""Resident memory over charged memory, beside what an idle server takes, that points to fragmentation."""

IDLE_BYTES: Final = 128 * MIB
"""What the interpreter, the libraries and a few connections may take: some twice what an idle server shows."""


async def memory_usage(context: Context, argv: list[Buffer]) -> Reply:
    """MEMORY USAGE [V|PREFIX|SSM|MOE] <name> [SAMPLES <n>]."""
    # The number of arguments says what they are, so any word can be a name.
    at = 3 if len(argv) in (4, 6) else 2
    if len(argv) > at + 1:
        if len(argv) != at + 3 or word(argv[at + 1]) != b"SAMPLES":
            raise syntax_error()
        integer(argv[at + 2], "SAMPLES")
    services = context.services
    if at == 2:
        found = _prefix_bytes(services, argv[2])
        return found if found is not None else _session_bytes(services, argv[2])
    kind = word(argv[2])
    if kind == b"V":
        return _session_bytes(services, argv[3])
    if kind == b"PREFIX":
        return _prefix_bytes(services, name(argv[3], "namespace"))
    if kind in MISSING:
        raise CommandError(f"MEMORY USAGE {kind.decode()}: this version lacks the {MISSING[kind]} family")
    raise syntax_error()


def _prefix_bytes(services: Services, value: Buffer) -> int | None:
    # A session's name may be longer than any namespace.
    unit = services.vstore.whole_prefix(bytes(value)) if len(value) <= MAX_NAME_BYTES else None
    return None if unit is None else memory_bytes(unit)


def _session_bytes(services: Services, value: Buffer) -> int | None:
    found = services.vstore.find_session(sid_name(value))
    if found is None:
        return None
    unit, side = found
    # What both sides share (name, META, hash table) belongs to the prefix; a session alone has it all.
    return memory_bytes(unit) if _alone(unit) else side_bytes(unit, side)


def _alone(unit: Unit) -> bool:
    return unit.sessions == 1


async def memory_stats(context: Context, argv: list[Buffer]) -> Reply:
    """The figures of the ledger, in Redis's shape."""
    services = context.services
    store = services.vstore
    ledger = store.ledger.statistics()
    units = len(store.lone) + len(store.prefixes)
    stored = ledger.charged_bytes - ledger.sending_bytes
    net = services.net
    return Map(
        [
            ("total.allocated", ledger.charged_bytes),
            ("clients.normal", net.statistics().receiving_bytes if net is not None else 0),
            ("keys.count", units),
            ("keys.bytes-per-key", stored // units if units else 0),
            ("dataset.bytes", ledger.payload_bytes),
            ("sending.bytes", ledger.sending_bytes),
            ("mapped.bytes", ledger.mapped_bytes),
            *(field() for field in services.memory_stats),
            ("resident.bytes", anonymous_bytes()),
        ]
    )


async def memory_doctor(context: Context, argv: list[Buffer]) -> Reply:
    """What is worth a look, in sentences."""
    return "\n".join(findings(context.services, anonymous_bytes())) or "Nothing to report: memory is as it should be."


def findings(services: Services, resident_bytes: int) -> list[str]:
    """One line for each thing that is worth a look; `resident_bytes` is 0 where the system doesn't say."""
    store, config = services.vstore, services.config
    ledger = store.ledger.statistics()
    charged = ledger.charged_bytes
    found: list[str] = []
    if config.max_bytes and charged >= NEARLY_FULL * config.max_bytes:
        found.append(
            f"* {charged} of {config.max_bytes} bytes are used (--max-bytes): what is stored now makes others go."
        )
    if store.sessions >= NEARLY_FULL * config.max_sessions:
        found.append(
            f"* {store.sessions} of {config.max_sessions} sessions are used (--max-sessions): what is stored now makes "
            "others go, however much memory there is."
        )
    if ledger.sending_bytes > max(MUCH_SENDING * charged, MIB):
        found.append(
            f"* {ledger.sending_bytes} bytes are held only by replies that nobody reads, see --max-sending and CLIENT "
            "LIST."
        )
    if resident_bytes > MUCH_UNCHARGED * charged + IDLE_BYTES:
        found.append(
            f"* The process takes {resident_bytes} bytes, and {charged} are charged: much was dropped a moment ago, "
            "large payloads are on their way, or the allocator's memory is fragmented."
        )
    return found


MEMORY_COMMANDS: Final = (
    Command(
        name="MEMORY",
        arity=-2,
        summary="A container for commands about memory.",
        since="0.1.0",
        group="server",
    ),
    Command(
        name="MEMORY USAGE",
        arity=-3,
        summary="The bytes of memory that a prefix or a V session takes: payload, names and tables.",
        since="0.1.0",
        handler=memory_usage,
        flags=Flag.READONLY,
        # No key positions: the word in front of the name is optional, and a table of positions can't say that.
        args=(
            Arg(
                name="kind",
                type=ArgType.ONEOF,
                optional=True,
                summary="whose name it is; without it a prefix's, else a session's. SSM and MOE aren't in this version",
                args=tuple(
                    Arg(name=kind.lower(), type=ArgType.PURE_TOKEN, token=kind)
                    for kind in ("V", "PREFIX", "SSM", "MOE")
                ),
            ),
            Arg(name="name", summary="namespace or session id"),
            Arg(name="count", type=ArgType.INTEGER, token="SAMPLES", optional=True, summary="accepted, and not used"),
        ),
        reply="Integer: bytes charged, exact, without rows that lie in files; null if it isn't there. Of a session "
        "that is a side of a prefix only the rows count, of the prefix all.",
        complexity="O(N) with N blocks",
        group="server",
        examples=("MEMORY USAGE app|llama|a", "MEMORY USAGE V app|llama|a_pk"),
        errors=("`ERR syntax error`", "`ERR MEMORY USAGE SSM: this version lacks the SSM.PREFIX family`"),
    ),
    Command(
        name="MEMORY STATS",
        arity=2,
        summary="Where memory goes, in all.",
        since="0.1.0",
        handler=memory_stats,
        flags=Flag.READONLY,
        reply="Map: `total.allocated` (bytes charged), `clients.normal` (requests being received), `keys.count` "
        "(prefixes and lone sessions), `keys.bytes-per-key`, `dataset.bytes` (rows that can be fetched, in memory or "
        "files), `sending.bytes` (held by unfinished replies only), `mapped.bytes` (rows that lie in files), "
        "`attention.bytes` (layers that are WARM, with the attend plugin; not part of the total), "
        "`resident.bytes` (anonymous memory of the process; 0 where the system doesn't say). Redis's other fields are "
        "left out.",
        complexity="O(N) with N connections",
        group="server",
    ),
    Command(
        name="MEMORY DOCTOR",
        arity=2,
        summary="Says in sentences what about memory is worth a look.",
        since="0.1.0",
        handler=memory_doctor,
        flags=Flag.READONLY,
        reply="Bulk string: a line for each finding.",
        group="server",
    ),
    help_row("MEMORY", "server"),
)
