"""What the commands of the ATTEND family share: the table of layers, the compute worker, and how a query is answered.

A query takes the layer it needs from the table on the event loop and is computed on the worker's thread. What it took
is immutable, so a session may be dropped, replaced or demoted meanwhile: the query is answered for the rows that were
there when it came.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

import attrs
import numpy as np
import trio

from pion.args import name, show
from pion.command import Arg, ArgType, KeySpec
from pion.commands.attend_arguments import check_head_dim
from pion.commands.attend_parts import Part, parts_of
from pion.commands.vstore_common import within
from pion.commands.wanted import unless_left
from pion.compute.attention import Attended, Backend, Query, Resident
from pion.compute.backends import make_backend
from pion.compute.slots import Cold, Limits, Slots, State
from pion.compute.worker import ComputeError, ComputeWorker
from pion.context import Context, Services
from pion.errors import ColdMissError, CommandError, OutOfMemoryError, StartupError
from pion.later import Later
from pion.limits import ATTEND_CROWD, ATTEND_HEADS_MAX, INLINE_ARG_BYTES
from pion.replies import Blob
from pion.storage.changes import Reason
from pion.storage.unit import Unit

T = TypeVar("T")

PLUGIN: Final = "attend"

logger = logging.getLogger("pion.attend")

NOT_FOUND: Final = "session not found"
"""The whole text of the error for a layer that is missing: clients compare it."""

NO_MEMORY: Final = "the compute device has no memory for this query now"

INSTALL: Final = "pip install -e 'pion-vllm-mlx/[mlx]'"

SID: Final = Arg(name="sid", type=ArgType.KEY, summary="session id, 1 B to 4 KiB of any bytes")
LAYER: Final = Arg(name="layer", type=ArgType.INTEGER, summary="layer id, from 0")
KEYS: Final = KeySpec(1, 1, 1, "attend")


@attrs.define(eq=False)
class Warming:
    """A KV.PREFIX.WARM that is under way."""

    unit: Unit
    heads: int
    head_dim: int
    sid: bytes
    done: trio.Event = attrs.field(factory=trio.Event)
    answer: tuple[int, int] | None = None
    """Layers loaded and skipped; None while it is under way, and if it failed or was cancelled."""
    loading: bool = False
    """It has begun to load layers."""
    stopped: str = ""
    """Why nothing more may be loaded, if that is so."""
    without: set[int] = attrs.field(factory=set)
    """Layers of the session that were dropped meanwhile, and are not to be loaded."""


@attrs.define(eq=False)
class Attention:
    """The plugin's state: kept in `services.state`, used on the event loop only."""

    services: Services
    slots: Slots
    worker: ComputeWorker
    converting: trio.Lock = attrs.field(factory=trio.Lock)
    """Held while one layer is converted and loaded, so that several WARM need the memory of one layer."""
    batching: trio.Lock = attrs.field(factory=trio.Lock)
    """Held while K and V of an ATTEND.QUERYBATCH in parts are on the device, so that several need the memory of one."""
    warming: list[Warming] = attrs.field(factory=list)

    @property
    def precision(self) -> str:
        """What is computed in."""
        return "fp16" if self.services.config.metal_attention_fp16 else "fp32"

    async def prepare(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """A service that has the backend made before the server listens, if the operator asked for it.

        Raises StartupError if it can't be made. Cancellation: it is made all the same.
        """
        config = self.services.config
        if config.metal_attention or config.metal_attention_fp16:
            try:
                backend = await self.worker.prepare()
            except ComputeError as error:
                flag = "--metal-attention-fp16" if config.metal_attention_fp16 else "--metal-attention"
                raise StartupError(f"{flag}: {error}") from error
            logger.info("attention is ready: %s", backend.device)
        task_status.started()

    def drop(self, sid: bytes, layer: int | None = None) -> int:
        """Forget a session or one layer of it, which no WARM under way loads; returns how many layers there were."""
        for each in self.warming:
            if each.sid == sid:
                if layer is None:
                    each.stopped = each.stopped or _dropped(sid)
                else:
                    each.without.add(layer)
        return self.slots.drop(sid, layer)

    def begin_loading(self, warming: Warming) -> None:
        """A WARM begins to load layers. The session is made of its prefix from now on, and of no other one: layers of
        another go, and a WARM that loads them stops. So who comes last wins.
        """
        warming.loading = True
        for each in self.warming:
            if each.loading and each.sid == warming.sid and each.unit.name != warming.unit.name:
                each.stopped = each.stopped or f"{show(each.sid)} was made of another prefix meanwhile"
        self.slots.drop_other_sources(warming.sid, warming.unit.name)

    def prefix_dropped(self, ns: bytes, reason: Reason) -> None:
        """What was made ready from a prefix goes when a client drops it or its time is over.

        It stays when the prefix made room for another one: it can still be asked.
        """
        if reason in (Reason.COMMAND, Reason.EXPIRED):
            self.forget_prefix(ns)

    def forget_prefix(self, ns: bytes) -> None:
        """What was made ready from an earlier prefix of that name goes: the new one may hold other tokens."""
        for each in self.warming:
            if each.unit.name == ns:
                each.stopped = each.stopped or _dropped(each.sid)
        self.slots.drop_source(ns)


def _dropped(sid: bytes) -> str:
    return f"{show(sid)}, or the prefix it is made of, was dropped meanwhile"


def make_attention(services: Services) -> Attention:
    """The state of one server; imports nothing that computes yet."""

    def limits() -> Limits:
        config = services.config
        return Limits(config.attend_slots, config.attend_cold, config.attend_bytes)

    build = make_backend  # what it is now: a test may start several servers, each with a backend of its own

    def make() -> Backend:
        try:
            return build(fp16=services.config.metal_attention_fp16)
        except ImportError as error:
            raise ComputeError(f"{error}; to install it: {INSTALL}") from error

    return Attention(services, Slots(limits), ComputeWorker(make, queue=services.config.attend_queue))


def attention(context: Context) -> Attention:
    """The state of the server that a command runs in."""
    found: Attention = context.services.state[PLUGIN]
    return found


def check_place(context: Context, sid: bytes, layer: int) -> None:
    """Session id and layer of a binary request, as the RESP lane has checked them. Raises CommandError."""
    name(sid, "sid")
    within(layer, "layer", 0, context.services.config.max_layers - 1)


def check_shape(heads: int, head_dim: int, heads_name: str = "H") -> None:
    """H and D. Raises CommandError."""
    within(heads, heads_name, 1, ATTEND_HEADS_MAX)
    check_head_dim(head_dim)


def find(context: Context, sid: bytes, layer: int) -> Resident:
    """The layer that a query needs. Raises ColdMissError, or CommandError if it is missing.

    Not a use of it: whoever has checked the rest of the query calls `used`, so a refused query changes nothing.
    """
    slots = attention(context).slots
    slots.trim()
    found = slots.find(sid, layer, None)
    if found is None:
        raise CommandError(NOT_FOUND)
    if isinstance(found, Cold):
        raise ColdMissError(f"layer {layer} is cold, use KV.PREFIX.WARM and ask again")
    return found


def used(context: Context, sid: bytes, layer: int) -> None:
    """A query on the layer is about to be computed: that counts as a use, if the layer is still there."""
    if not context.session.no_touch:
        attention(context).slots.find(sid, layer, context.services.clock.monotonic_s())


def check_fits(resident: Resident, kv_heads: int, head_dim: int, heads_name: str = "H") -> None:
    """What was asked about must be what is stored. Raises CommandError."""
    if resident.heads != kv_heads:
        raise CommandError(f"{heads_name} must be {resident.heads}, the heads stored, got {kv_heads}")
    if resident.head_dim != head_dim:
        raise CommandError(f"D must be {resident.head_dim}, the width stored, got {head_dim}")


async def answer(context: Context, resident: Resident, query: Query, *, may_leave: bool = True) -> bytes | Blob | Later:
    """What a query is answered with: output `[H, M, D]`, and behind it the LSE `[H, M]` if it is wanted; fp32.

    Many queries or query heads at once are computed in parts, so that what is computed with takes bounded memory and
    others get their turn between. With `may_leave` the thread that computes a small answer may also send it: then this
    returns a `Later`. Raises CommandError. Cancellation: a part that is being computed is finished and
    thrown away.
    """
    worker, parts = attention(context).worker, parts_of(query, resident.heads, resident.rows)
    if len(parts) > 1:
        whole = partial(in_parts, context, query, parts, partial(worker.attend, resident))
        return await while_wanted(context, whole, len(parts))
    if may_leave and context.session.may_leave and query.q.nbytes <= INLINE_ARG_BYTES:
        later = _left(worker, resident, query)
        if later is not None:
            return later
    return reply_of(await while_wanted(context, partial(worker.attend, resident, query)), query)


async def in_parts(
    context: Context, query: Query, parts: list[Part], compute: Callable[[Query], Awaitable[Attended]]
) -> bytes | Blob:
    """`answer` of several parts, of which `compute` answers one. Raises what that raises. Cancellation: as `answer`."""
    output = np.empty(query.q.shape, np.float32)
    lse = np.empty(query.q.shape[:2] if query.want_lse else (len(output), 0), np.float32)
    for part in parts:
        asked = await context.in_thread(part.query, query)
        done = await compute(asked)
        await context.in_thread(part.put, done, output, lse if query.want_lse else None)
    return reply_of(Attended(output, lse), query)


def reply_of(found: Attended, query: Query) -> bytes | Blob:
    """What is sent for a query that is computed."""
    arrays = [found.output, found.lse] if query.want_lse else [found.output]
    nbytes = sum(each.nbytes for each in arrays)
    if nbytes <= INLINE_ARG_BYTES:
        return b"".join(each.tobytes() for each in arrays)
    views = [np.ascontiguousarray(each).reshape(-1).view(np.uint8).data.toreadonly() for each in arrays]
    return Blob(views, nbytes)


def _left(worker: ComputeWorker, resident: Resident, query: Query) -> Later | None:
    """An answer that the worker's thread sends; None if the query has to wait for its place in the queue."""
    if worker.waiting >= ATTEND_CROWD:
        return None

    def done(found: Attended | None, error: BaseException | None) -> None:
        body: bytes | Blob | None = None
        try:
            if found is not None:
                body = reply_of(found, query)
        except Exception as failure:  # whatever it is, the client gets an answer
            error = failure
        if isinstance(error, MemoryError):
            error = OutOfMemoryError(NO_MEMORY)
        later.complete(body, error)

    later = Later()
    later.withdraw = worker.submit(resident, query, done)
    return later if later.withdraw is not None else None


async def while_wanted(context: Context, ask: Callable[[], Awaitable[T]], parts: int = 1) -> T:
    """Ask the worker for what only this client wants, in so many parts, one after the other. If it waits behind many,
    or is many itself, it is given up if the client leaves.

    Raises CommandError then; OutOfMemoryError for a MemoryError. Cancellation: as for what is asked.
    """
    try:
        if attention(context).worker.waiting + parts <= ATTEND_CROWD:
            return await ask()
        return await unless_left(context, ask)
    except MemoryError as error:
        raise OutOfMemoryError(NO_MEMORY) from error


async def load(context: Context, function: Callable[[Backend], Resident]) -> Resident:
    """Load something onto the compute device. Raises CommandError. Cancellation: it is loaded and let go again."""
    try:
        return await attention(context).worker.call(function)
    except MemoryError as error:
        raise OutOfMemoryError("the compute device has no memory for this layer now") from error


def state_of(context: Context, sid: bytes, layer: int) -> State:
    """Where a layer is; not a use of it. Raises CommandError for a bad argument."""
    check_place(context, sid, layer)
    slots = attention(context).slots
    slots.trim()
    return slots.state(sid, layer)


def device_text(state: Attention) -> str:
    """What computes, for the banner."""
    backend = state.worker.backend
    return backend.device if backend is not None else f"{state.precision}, prepared at its first use"


def rows_of_info(state: Attention) -> list[tuple[str, object]]:
    """What ATTEND.INFO and INFO show."""
    state.slots.trim()
    config, worker, slots = state.services.config, state.worker, state.slots.statistics()
    backend = worker.backend
    return [
        ("device", backend.device if backend is not None else "not used yet"),
        ("precision", state.precision),
        ("warm", slots.warm),
        ("cold", slots.cold),
        ("bytes", slots.nbytes),
        ("max_bytes", config.attend_bytes),
        ("slots", config.attend_slots),
        ("cold_slots", config.attend_cold),
        ("demotions", slots.demotions),
        ("rehydrates", slots.rehydrates),
        ("queries", worker.queries),
        ("batches", worker.batches),
        ("waiting", worker.waiting),
        ("compute_us", worker.compute_ns // 1000),
    ]


def prefix_rows(state: Attention) -> list[tuple[str, object]]:
    """What KV.PREFIX.INFO shows of this family."""
    state.slots.trim()
    slots = state.slots.statistics()
    return [
        ("sdpa_warm", slots.warm),
        ("sdpa_cold", slots.cold),
        ("sdpa_demotions", slots.demotions),
        ("sdpa_rehydrates", slots.rehydrates),
    ]
