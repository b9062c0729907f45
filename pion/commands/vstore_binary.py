"""The V family's rows of the binary lane: what the RESP commands do, with packed arguments and the rows as the body."""

from __future__ import annotations

from typing import Final

from pion.command import BinaryCommand, Field, FieldKind
from pion.commands.vstore_common import sid_name
from pion.commands.vstore_read import fetch_ranges
from pion.commands.vstore_write import store_batch
from pion.context import Context
from pion.replies import BinaryReply, Buffer
from pion.storage.formats import Wire

DONE: Final = BinaryReply()


async def fetch_range(context: Context, values: tuple[bytes, int, int, int, str], body: Buffer) -> BinaryReply:
    """V_FETCH_RANGE. Cancellation: nothing is counted."""
    sid, layer, start, end, wire = values
    return BinaryReply(body=await fetch_ranges(context, sid_name(sid), [(layer, start, end)], Wire(wire)))


async def storebatch(context: Context, values: tuple[bytes, int, int, int, str], body: Buffer) -> BinaryReply:
    """V_STOREBATCH. Cancellation: as V.STOREBATCH."""
    sid, layer, start, count, wire = values
    await store_batch(context, sid_name(sid), layer, start, count, Wire(wire), body)
    return DONE


async def fetch_batch(
    context: Context, values: tuple[bytes, str, list[tuple[int, int, int]]], body: Buffer
) -> BinaryReply:
    """V_FETCH_BATCH. Cancellation: nothing is counted."""
    sid, wire, ranges = values
    return BinaryReply(body=await fetch_ranges(context, sid_name(sid), ranges, Wire(wire)))


_SID: Final = Field("sid", FieldKind.NAME)
_LAYER: Final = Field("layer", FieldKind.U32)
_START: Final = Field("start", FieldKind.U32)
_AS: Final = Field("as", FieldKind.WIRE)

BINARY: Final = (
    BinaryCommand(
        code=0x10,
        command="V.FETCH",
        handler=fetch_range,
        meta=(_SID, _LAYER, _START, Field("end", FieldKind.U32), _AS),
        reply="body: the rows from start to end - 1",
    ),
    BinaryCommand(
        code=0x11,
        command="V.STOREBATCH",
        handler=storebatch,
        meta=(_SID, _LAYER, _START, Field("count", FieldKind.U32), _AS),
        body="the rows in token order, exactly count x bytes per row",
    ),
    BinaryCommand(
        code=0x12,
        command="V.FETCH",
        handler=fetch_batch,
        meta=(_SID, _AS, Field("ranges", FieldKind.RANGES)),
        reply="body: the rows of all ranges, one after the other, as of one moment",
    ),
)
