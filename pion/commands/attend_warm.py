"""KV.PREFIX.WARM: make the layers of a stored prefix ready for attention.

The rows of all layers are gathered at once, as references to immutable blocks, so what becomes ready is the prefix as
of one moment however long it takes and whatever is stored meanwhile. Then it goes layer by layer: converted to fp32 in
a thread, piece by piece, and loaded on the compute thread. In between others run, and never more than one layer's
values are held by all WARM together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs
import numpy as np
import trio

from pion.args import name, show
from pion.command import Arg, ArgType, Command, Flag, KeySpec
from pion.commands.attend_arguments import u32
from pion.commands.attend_common import Attention, Warming, attention, check_shape, load
from pion.commands.vstore_common import verified, wrong_arity
from pion.compute.attention import Backend, Floats, Resident
from pion.context import Context
from pion.errors import CommandError
from pion.limits import CONVERT_PIECE_BYTES
from pion.replies import Buffer, Reply, Simple
from pion.storage import reading
from pion.storage.formats import Wire, from_native
from pion.storage.reading import Span
from pion.storage.schema import LayerSpec
from pion.storage.unit import SIDES, K, Side, Unit, V


@attrs.frozen(eq=False)
class WarmLayer:
    """One layer of a prefix: its rows on both sides, and for each side how they are stored."""

    index: int
    rows: int
    specs: tuple[LayerSpec, LayerSpec]
    spans: tuple[list[Span], list[Span]]
    owned: list[tuple[Unit, list[Span]]]
    """The same rows by the unit that holds them."""


async def warm(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.WARM <ns> <H> <D> [<sid>]."""
    if len(argv) > 5:
        raise wrong_arity("KV.PREFIX.WARM")
    ns = name(argv[1], "namespace")
    heads, head_dim = u32(argv[2], "H"), u32(argv[3], "D")
    sid = name(argv[4], "sid") if len(argv) == 5 else ns
    loaded, skipped = await warm_prefix(context, ns, heads, head_dim, sid)
    return Simple(f"{loaded} skipped_dim={skipped}" if skipped else f"{loaded}")


async def warm_prefix(context: Context, ns: bytes, heads: int, head_dim: int, sid: bytes) -> tuple[int, int]:
    """Load each layer of a prefix whose rows are H * D values on both sides; (layers loaded, layers of another width).

    Who asks for a complete prefix that is being loaded already gets the answer of that. A layer of the session that is
    dropped meanwhile is not loaded, and not counted; those that were made of another prefix are dropped. Raises
    CommandError: no rows, one is missing or damaged, the session or the prefix was dropped meanwhile, or the session is
    being made of another one; OutOfMemoryError if all layers together can't be WARM at once. That is said before
    anything changes, unless the limits are lowered meanwhile. Cancellation: the layers loaded so far stay.
    """
    check_shape(heads, head_dim)
    state = attention(context)
    while True:
        unit = context.services.vstore.visible(ns)
        if unit is None:
            raise CommandError(f"no rows: there is no prefix {show(ns)}")
        if state.worker.backend is None:  # it says how large a layer is
            await state.worker.prepare()
            continue
        running = _running(state, unit, heads, head_dim, sid) if unit.complete else None
        if running is None or context.session.in_exec:  # inside EXEC nobody may wait for another client
            break
        await running.done.wait()
        if running.answer is not None:
            return running.answer
    warming = Warming(unit, heads, head_dim, sid)
    state.warming.append(warming)
    try:
        answer = await _warm(context, warming)
        warming.answer = answer
        return answer
    finally:
        state.warming.remove(warming)
        warming.done.set()


def _running(state: Attention, unit: Unit, heads: int, head_dim: int, sid: bytes) -> Warming | None:
    for each in state.warming:
        whole = not each.stopped and not each.without
        if whole and (each.unit, each.heads, each.head_dim, each.sid) == (unit, heads, head_dim, sid):
            return each
    return None


async def _warm(context: Context, warming: Warming) -> tuple[int, int]:
    state, store = attention(context), context.services.vstore
    width = warming.heads * warming.head_dim
    value_bytes = (await state.worker.prepare()).value_bytes
    while True:
        _check_wanted(warming)
        layers, skipped = gather(warming.unit, width)
        state.slots.check_room(sum(2 * layer.rows * width * value_bytes for layer in layers), len(layers))
        if await verified(context, [part for layer in layers for part in layer.owned]):
            break
    if not context.session.no_touch:
        store.touch(warming.unit)
    _check_wanted(warming)
    state.begin_loading(warming)
    loaded = total = 0
    for layer in layers:
        if layer.index in warming.without:
            continue
        async with state.converting:
            keys = await context.in_thread(_converted, layer, K)
            values = await context.in_thread(_converted, layer, V)
            resident = await load(context, _loader(keys, values, warming.heads))
            del keys, values
        _check_wanted(warming)
        if layer.index not in warming.without:
            loaded, total = loaded + 1, total + resident.nbytes
            state.slots.check_room(total, loaded)  # the limits may be lower now
            now_s = context.services.clock.monotonic_s()
            state.slots.put(warming.sid, layer.index, resident, now_s, source=warming.unit.name)
        del resident
        await trio.lowlevel.checkpoint()
    return loaded, skipped


def _check_wanted(warming: Warming) -> None:
    if warming.stopped:
        raise CommandError(warming.stopped)


def _loader(keys: Floats, values: Floats, heads: int) -> Callable[[Backend], Resident]:
    return lambda backend: backend.load_rows(keys, values, heads)


def gather(unit: Unit, width: int) -> tuple[list[WarmLayer], int]:
    """The layers whose rows have so many values on both sides, as FETCH would answer them: positions 0 to the end,
    ancestors included. And how many layers have rows of another width.

    Raises CommandError if no layer has rows, or one that is to be loaded lacks a row that layer 0 has.
    """
    segments = reading.segments(unit, 0, unit.end)
    chain = unit.chain()
    count = unit.layer_count if unit.declaration is not None else max(part.layer_count for part in chain)
    parts = 2 * count * max(1, len(segments))
    if parts > reading.FETCH_PARTS_MAX:
        raise CommandError(
            f"{count} layers on two sides in {len(segments)} segments are {parts} parts, at most "
            f"{reading.FETCH_PARTS_MAX} can be gathered at once"
        )
    k_schema, v_schema = unit.k_schema, unit.v_schema
    assert k_schema is not None  # noqa: S101  a visible prefix has both sides
    assert v_schema is not None  # noqa: S101
    found: list[WarmLayer] = []
    skipped = 0
    for index in range(count):
        if not any(_has_rows(part, side, index) for part in chain for side in SIDES):
            continue
        specs = k_schema.layer(index), v_schema.layer(index)
        if specs[K].dim != width or specs[V].dim != width:
            skipped += 1
            continue
        layer = WarmLayer(index, unit.end, specs, ([], []), [])
        for side in SIDES:
            for owner, first, last in segments:
                spans = reading.gather(owner, side, index, first, last)
                layer.spans[side].extend(spans)
                layer.owned.append((owner, spans))
        found.append(layer)
    if not unit.end or not (found or skipped):
        raise CommandError(f"no rows in prefix {show(unit.name)}")
    return found, skipped


def _has_rows(unit: Unit, side: Side, index: int) -> bool:
    layer = unit.layer(side, index)
    return layer is not None and layer.count > 0


def _converted(layer: WarmLayer, side: Side) -> Floats:
    """Rows `[N, H * D]` as fp32, made in pieces so that what is held beside the result stays small; in a thread."""
    spec = layer.specs[side]
    result = np.empty((layer.rows, spec.dim), np.float32)
    most = max(1, CONVERT_PIECE_BYTES // (4 * spec.dim))
    done = 0
    for span in layer.spans[side]:
        for start in range(span.start, span.stop, most):
            piece = Span(span.block, start, min(span.stop, start + most), span.row_bytes)
            made = from_native(piece.view(), Wire.FP32, spec.format, piece.rows, spec.dim)
            result[done : done + piece.rows] = np.frombuffer(made, np.float32).reshape(piece.rows, spec.dim)
            done += piece.rows
    return result


COMMANDS: Final = (
    Command(
        name="KV.PREFIX.WARM",
        arity=-4,
        summary="Make the layers of a stored prefix ready for attention, whether they are MISSING, COLD or WARM: as of "
        "one moment, ancestors included. Layers of the session that were made of another prefix are dropped first. For "
        "the -COLDMISS of a query, or ahead of one",
        since="0.1.0",
        handler=warm,
        flags=Flag.DENYOOM,
        keys=KeySpec(1, -1, 3),
        args=(
            Arg(name="ns", type=ArgType.KEY, summary="namespace"),
            Arg(name="H", type=ArgType.INTEGER, summary="KV heads"),
            Arg(name="D", type=ArgType.INTEGER, summary="width of a head: a multiple of 8 up to 512"),
            Arg(
                name="sid",
                type=ArgType.KEY,
                optional=True,
                summary="session id that ATTEND.PREFIX.QUERY will name; the namespace if not given",
            ),
        ),
        reply="`+<layers>`, and `+<layers> skipped_dim=<n>` if n layers have rows of another width than H x D. A layer "
        "without any row is not counted, and one that ATTEND.PREFIX.DROP names meanwhile is not loaded",
        complexity="O(bytes of the prefix), layer by layer: others are served meanwhile",
        group="attend",
        examples=("KV.PREFIX.WARM app|llama|a 8 64", "KV.PREFIX.WARM app|llama|a 8 64 app|llama|a_attn"),
        errors=(
            "-ERR no rows: the prefix is not there, not complete or empty",
            "-ERR no row <id> in layer <n>",
            "-ERR the session or the prefix was dropped meanwhile, or the session was made of another prefix",
            "-OOM its layers are more than --attend-slots or --attend-bytes, or more than the compute device has",
        ),
    ),
)
