"""The KV.PREFIX family's rows of the binary lane: REGISTER, FETCH and LOOKUP, which a cache does for each request.

Where the RESP command has an option, the number 0 stands for leaving it out.
"""

from __future__ import annotations

import struct
from typing import Final

from pion.args import name
from pion.command import BinaryCommand, Field, FieldKind
from pion.commands.kvprefix_read import fetch_prefix, look_up
from pion.commands.kvprefix_register import Options, parse_runs, register_prefix
from pion.context import Context
from pion.errors import CommandError, Status
from pion.replies import OK, BinaryReply, Buffer
from pion.storage.formats import Wire

DONE: Final = BinaryReply()
MISS: Final = BinaryReply(Status.MISS)


async def register(
    context: Context, values: tuple[bytes, bytes, bytes, int, int, int, float], body: Buffer
) -> BinaryReply:
    """REGISTER. Cancellation: as KV.PREFIX.REGISTER.SCHEMA."""
    config = context.services.config
    ns, k_runs, v_runs, layers, tokens, states, prefill_ms = values
    declared = bool(layers or tokens or states)
    options = Options(
        layers=layers if declared else None,
        tokens=tokens if declared else None,
        states=states if declared else None,
        prefill_ms=prefill_ms or None,
    )
    if len(body):
        if len(body) > config.max_meta_bytes:
            raise CommandError(f"META must be at most {config.max_meta_bytes} bytes long, got {len(body)}")
        options.meta = bytes(body)
    shapes = parse_runs("K", k_runs, config), parse_runs("V", v_runs, config)
    outcome = await register_prefix(context, name(ns, "namespace"), *shapes, options)
    return DONE if outcome is OK else BinaryReply(Status.PENDING, body=outcome.text.encode())


async def fetch(context: Context, values: tuple[bytes, int, int, str], body: Buffer) -> BinaryReply:
    """PREFIX_FETCH. Cancellation: nothing is counted."""
    ns, start, end, wire = values
    name(ns, "namespace")
    try:
        parts = await fetch_prefix(context, ns, (start, end) if start or end else None, Wire(wire))
    except CommandError as error:
        if type(error) is CommandError and context.services.vstore.visible(ns) is None:
            return BinaryReply(Status.MISS, body=f"{error.code} {error}".encode("utf-8", "backslashreplace"))
        raise
    sizes = [part.nbytes for part in parts]
    return BinaryReply(meta=struct.pack(f"<I{len(sizes)}Q", len(sizes) // 2, *sizes), body=parts)


async def lookup(context: Context, values: tuple[bytes, int, float, int], body: Buffer) -> BinaryReply:
    """LOOKUP. Cancellation: while waiting, nothing is recorded."""
    ns, tokens, prefill_ms, wait_ms = values
    hit = await look_up(context, name(ns, "namespace"), tokens or None, prefill_ms or None, wait_ms)
    return DONE if hit else MISS


_NS: Final = Field("ns", FieldKind.NAME)
_TOKENS: Final = Field("tokens", FieldKind.U32)
_PREFILL_MS: Final = Field("prefill_ms", FieldKind.F64)

BINARY: Final = (
    BinaryCommand(
        code=0x13,
        command="KV.PREFIX.REGISTER.SCHEMA",
        handler=register,
        meta=(
            _NS,
            Field("k_runs", FieldKind.NAME),
            Field("v_runs", FieldKind.NAME),
            Field("layers", FieldKind.U32),
            _TOKENS,
            Field("states", FieldKind.U32),
            _PREFILL_MS,
        ),
        body="what KV.PREFIX.META returns; empty for none",
        reply="status 12 with the body `PENDING` or `DEFERRED` where RESP answers that",
    ),
    BinaryCommand(
        code=0x14,
        command="KV.PREFIX.FETCH",
        handler=fetch,
        meta=(_NS, Field("start", FieldKind.U32), Field("end", FieldKind.U32), Field("as", FieldKind.WIRE)),
        reply="meta: u32 layers, then for each layer u64 bytes of K and u64 bytes of V; body: K and V of each layer in "
        "turn. Status 2 if there is no such prefix. start and end both 0: all of it",
    ),
    BinaryCommand(
        code=0x15,
        command="KV.PREFIX.LOOKUP",
        handler=lookup,
        meta=(_NS, _TOKENS, _PREFILL_MS, Field("wait_ms", FieldKind.U32)),
        reply="status 0 for a hit, 2 for a miss",
    ),
)
