"""The KV.PREFIX family: prefixes by namespace. Here are the commands that manage them; see also the modules
`kvprefix_register`, `kvprefix_read` and `kvprefix_save`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pion.args import name, show
from pion.command import Arg, ArgType, BinaryCommand, Command, Flag, KeySpec
from pion.commands import kvprefix_binary, kvprefix_read, kvprefix_register, kvprefix_save
from pion.commands.kvprefix_register import NS, admission_rows
from pion.commands.vstore_common import LIST_ARGS, LIST_REPLY, commit, list_page
from pion.config import Config
from pion.context import Context, InfoSection, Services
from pion.errors import CommandError
from pion.hookspecs import hookimpl
from pion.replies import Buffer, Reply
from pion.storage.changes import DropPrefix, Reason, SetExpiry, SetPin
from pion.storage.unit import Unit


async def drop(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.DROP [CASCADE] <ns> [<ns> ...]."""
    store = context.services.vstore
    cascade = len(argv) > 2 and bytes(argv[1][:8]).upper() == b"CASCADE" and len(argv[1]) == 7
    names = dict.fromkeys(name(value, "namespace") for value in argv[2 if cascade else 1 :])
    found = [unit for unit in map(store.whole_prefix, names) if unit is not None]
    # Looking one up may have dropped another with an ancestor that has expired.
    units = [unit for unit in found if store.prefixes.get(unit.name) is unit]
    doomed: dict[Unit, None] = {}
    for unit in units:
        below = list(unit.descendants())
        if not cascade and any(child.name not in names for child in below):
            raise CommandError(f"prefix {show(unit.name)} has prefixes that continue it: use CASCADE")
        doomed.update(dict.fromkeys([unit, *below]))
    # Dropping a prefix drops what continues it, so only the topmost ones are named.
    tops = [unit for unit in units if unit.parent is None or not any(part in doomed for part in unit.chain()[:-1])]
    await commit(context, *(DropPrefix(unit.name) for unit in tops))
    for ns in [ns for ns in names if ns not in store.prefixes]:
        for callback in store.on_drop:  # also of those that had been evicted: others may still have something of them
            callback(ns, Reason.COMMAND)
    return len(doomed)


async def ttl(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.TTL <ns>."""
    unit = context.services.vstore.whole_prefix(name(argv[1], "namespace"))
    if unit is None:
        return -2
    if not unit.expires_s:
        return -1
    return int(unit.expires_s - context.services.clock.wall_s() + 0.5)


async def persist(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.PERSIST <ns>."""
    unit = context.services.vstore.whole_prefix(name(argv[1], "namespace"))
    if unit is None or not unit.expires_s:
        return 0
    await commit(context, SetExpiry(unit.name, 0.0))
    return 1


async def pin(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.PIN <ns>."""
    return await _set_pin(context, argv[1], pinned=True)


async def unpin(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.UNPIN <ns>."""
    return await _set_pin(context, argv[1], pinned=False)


async def _set_pin(context: Context, value: Buffer, *, pinned: bool) -> Reply:
    unit = context.services.vstore.whole_prefix(name(value, "namespace"))
    if unit is None or unit.pinned is pinned:
        return 0
    await commit(context, SetPin(unit.name, pinned))
    return 1


async def list_prefixes(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.LIST [CURSOR <c>] [MATCH <glob>] [COUNT <n>]."""
    store = context.services.vstore

    def listed(unit: Unit) -> list[bytes]:
        shown = unit.sessions == 2 and unit.pending is None and not store.expired(unit)
        return [unit.name] if shown else []

    return list_page(argv, "KV.PREFIX.LIST", [(b"p", store.prefix_names)], listed, keys_are_names=True)


async def info(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.INFO."""
    return "".join(f"{field}:{value}\r\n" for field, value in info_rows(context.services))


def info_rows(services: Services) -> list[tuple[str, object]]:
    """The seed's fields, then Pion's."""
    store = services.vstore
    counts, ledger = store.statistics(), store.ledger.statistics()
    return [
        ("registered_prefixes", counts.prefixes),
        ("total_prefix_tokens", counts.prefix_tokens),
        ("vstore_sessions", counts.sessions),
        ("vstore_total_fetches", counts.fetches),
        ("vstore_bytes", ledger.payload_bytes),
        ("wal_bytes", store.journal.size_bytes),
        ("memory_charged_bytes", ledger.charged_bytes),
        ("memory_sending_bytes", ledger.sending_bytes),
        ("max_sessions", counts.max_sessions),
        ("pending_prefixes", counts.pending),
        ("evicted", counts.evicted),
        ("expired", counts.expired),
        ("abandoned", counts.abandoned),
        ("checksum_failures", counts.damaged),
        ("mapped_bytes", ledger.mapped_bytes),
        *admission_rows(services),
        *(row for rows in services.prefix_info for row in rows()),
    ]


_ONE: Final = KeySpec(1, 1)

COMMANDS: Final = (
    *kvprefix_register.COMMANDS,
    *kvprefix_read.COMMANDS,
    *kvprefix_save.COMMANDS,
    Command(
        name="KV.PREFIX.DROP",
        arity=-2,
        summary="Drop prefixes: both sides, hashes and META of each",
        since="0.1.0",
        handler=drop,
        flags=Flag.WRITE,
        keys=KeySpec(1, -1),
        args=(
            Arg(
                name="cascade",
                type=ArgType.PURE_TOKEN,
                token="CASCADE",
                optional=True,
                summary="also drop the prefixes that continue them",
            ),
            Arg(name="ns", type=ArgType.KEY, multiple=True),
        ),
        reply="integer: prefixes dropped; one that isn't there counts 0",
        complexity="O(blocks dropped)",
        group="kvprefix",
        examples=("KV.PREFIX.DROP app|llama|a", "KV.PREFIX.DROP CASCADE app|llama|root"),
        errors=("-ERR a prefix has prefixes that continue it; nothing is dropped then",),
    ),
    Command(
        name="KV.PREFIX.TTL",
        arity=2,
        summary="Seconds until a prefix expires",
        since="0.1.0",
        handler=ttl,
        flags=Flag.READONLY | Flag.FAST,
        keys=_ONE,
        args=(NS,),
        reply="integer: seconds, rounded; -1 if it doesn't expire, -2 if it isn't there",
        group="kvprefix",
        examples=("KV.PREFIX.TTL app|llama|a",),
    ),
    Command(
        name="KV.PREFIX.PERSIST",
        arity=2,
        summary="Make a prefix never expire",
        since="0.1.0",
        handler=persist,
        flags=Flag.WRITE | Flag.FAST,
        keys=_ONE,
        args=(NS,),
        reply="integer: 1 if it would have expired, else 0",
        group="kvprefix",
        examples=("KV.PREFIX.PERSIST app|llama|a",),
    ),
    Command(
        name="KV.PREFIX.PIN",
        arity=2,
        summary="Never evict a prefix; it still expires and can be dropped",
        since="0.1.0",
        handler=pin,
        flags=Flag.WRITE | Flag.FAST,
        keys=_ONE,
        args=(NS,),
        reply="integer: 1 if it wasn't pinned, else 0",
        group="kvprefix",
        examples=("KV.PREFIX.PIN app|llama|a",),
    ),
    Command(
        name="KV.PREFIX.UNPIN",
        arity=2,
        summary="Let a prefix be evicted again",
        since="0.1.0",
        handler=unpin,
        flags=Flag.WRITE | Flag.FAST,
        keys=_ONE,
        args=(NS,),
        reply="integer: 1 if it was pinned, else 0",
        group="kvprefix",
        examples=("KV.PREFIX.UNPIN app|llama|a",),
    ),
    Command(
        name="KV.PREFIX.LIST",
        arity=-1,
        summary="List complete and undeclared prefixes, page by page; stable while prefixes come and go",
        since="0.1.0",
        handler=list_prefixes,
        flags=Flag.READONLY,
        args=LIST_ARGS,
        reply=LIST_REPLY,
        complexity="O(COUNT)",
        group="kvprefix",
        examples=("KV.PREFIX.LIST MATCH app|*",),
        errors=("-ERR CURSOR must be 0 or a cursor that this command gave",),
    ),
    Command(
        name="KV.PREFIX.INFO",
        arity=1,
        summary="Counts of prefixes, sessions, tokens, fetches and bytes",
        since="0.1.0",
        handler=info,
        flags=Flag.READONLY | Flag.FAST,
        reply="bulk string of field:value lines",
        group="kvprefix",
        examples=("KV.PREFIX.INFO",),
    ),
)


@hookimpl
def register_commands(config: Config) -> Sequence[Command]:
    """The KV.PREFIX commands."""
    return COMMANDS


@hookimpl
def register_binary(config: Config) -> Sequence[BinaryCommand]:
    """REGISTER, FETCH and LOOKUP on the binary lane."""
    return kvprefix_binary.BINARY


@hookimpl
def register_info(services: Services) -> Sequence[InfoSection]:
    """The Kvcache section."""
    return [InfoSection("Kvcache", lambda: info_rows(services))]
