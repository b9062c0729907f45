"""KV.PREFIX.REGISTER and REGISTER.SCHEMA with their options."""

from __future__ import annotations

from typing import Final

import attrs

from pion.args import MAX_ID, Cursor, integer, name, number
from pion.command import Arg, ArgType, Command, Flag, KeySpec
from pion.commands.vstore_common import commit, within
from pion.config import Config
from pion.context import Context, Services
from pion.errors import CommandError
from pion.limits import MAX_HASHES
from pion.replies import OK, Buffer, Reply, Simple
from pion.storage.admission import Admission
from pion.storage.changes import Declaration, Hashes, Register
from pion.storage.formats import get_format
from pion.storage.prefix_index import HASH_BYTES
from pion.storage.reading import FETCH_PARTS_MAX
from pion.storage.schema import Schema

PENDING: Final = Simple("PENDING")
DEFERRED: Final = Simple("DEFERRED")
ADMISSION: Final = "kvprefix.admission"
"""Where `services.state` keeps the sketch."""
MAX_EXPIRY_S: Final = 10**10
"""EX: three hundred years, so that the absolute time stays exact in a float."""
PREFILL_MS_MAX: Final = 1e12
"""PREFILL_MS: thirty years, far beyond any prefill, and sums of it stay exact enough."""


@attrs.define
class Options:
    """What may follow the shape in REGISTER."""

    hashes: Hashes | None = None
    prefill_ms: float | None = None
    layers: int | None = None
    tokens: int | None = None
    states: int | None = None
    meta: bytes | None = None
    parent: bytes | None = None
    offset: int = 0
    expires_in_s: int | None = None
    pin: bool = False

    def declaration(self) -> Declaration | None:
        """LAYERS, TOKENS and STATES together. Raises CommandError if one lacks the others."""
        if self.layers is None and self.tokens is None and self.states is None:
            return None
        if self.layers is None or self.tokens is None:
            raise CommandError("LAYERS and TOKENS must be given together, and STATES only with them")
        return Declaration(self.layers, self.tokens, self.states or 0)

    def check(self, config: Config) -> None:
        """Raise CommandError if a value is out of its limits."""
        if self.prefill_ms is not None:
            check_prefill_ms(self.prefill_ms)
        within(self.layers or 0, "LAYERS", 0, _most_layers(config))
        within(self.tokens or 0, "TOKENS", 0, MAX_ID)
        within(self.states or 0, "STATES", 0, config.max_layers)
        _check_states(self.states or 0)
        _check_meta(self.meta or b"", config)
        within(self.offset, "PARENT offset", 0, MAX_ID)
        if self.offset + (self.tokens or 0) > MAX_ID:
            raise CommandError(f"PARENT offset + TOKENS must be at most {MAX_ID}")
        if self.expires_in_s is not None:
            within(self.expires_in_s, "EX", 1, MAX_EXPIRY_S)


def parse_options(argv: list[Buffer], start: int, command: str, config: Config) -> Options:
    """Options in any order, each at most once; `register_prefix` checks them together. Raises CommandError."""
    found = Options()
    cursor = Cursor(argv, start, command)
    while cursor:
        option = cursor.option()
        if option == b"BLOCKS":
            size = integer(cursor.value("BLOCKS size"), "BLOCKS size", 1, 2**32 - 1)
            found.hashes = Hashes(size, hash_blob(cursor.value("BLOCKS count"), cursor.value("BLOCKS hashes")))
        elif option == b"PREFILL_MS":
            found.prefill_ms = number(cursor.value("PREFILL_MS"), "PREFILL_MS", 0.0, PREFILL_MS_MAX)
        elif option == b"LAYERS":
            found.layers = integer(cursor.value("LAYERS"), "LAYERS", 0, _most_layers(config))
        elif option == b"TOKENS":
            found.tokens = integer(cursor.value("TOKENS"), "TOKENS", 0)
        elif option == b"STATES":
            found.states = integer(cursor.value("STATES"), "STATES", 0, config.max_layers)
            _check_states(found.states)
        elif option == b"META":
            meta = cursor.value("META")
            _check_meta(meta, config)
            found.meta = bytes(meta)
        elif option == b"PARENT":
            found.parent = name(cursor.value("PARENT namespace"), "PARENT namespace")
            found.offset = integer(cursor.value("PARENT offset"), "PARENT offset")
        elif option == b"EX":
            found.expires_in_s = integer(cursor.value("EX"), "EX", 1, MAX_EXPIRY_S)
        elif option == b"PIN":
            found.pin = True
        else:
            raise cursor.unknown(option, "BLOCKS, PREFILL_MS, LAYERS, TOKENS, STATES, META, PARENT, EX or PIN")
    return found


def _most_layers(config: Config) -> int:
    return min(config.max_layers, FETCH_PARTS_MAX // 2)


def _check_states(states: int) -> None:
    if states:
        raise CommandError("STATES must be 0: this version lacks the SSM.PREFIX family, which stores states")


def _check_meta(meta: Buffer, config: Config) -> None:
    if len(meta) > config.max_meta_bytes:
        raise CommandError(f"META must be at most {config.max_meta_bytes} bytes long, got {len(meta)}")


def check_prefill_ms(value: float) -> None:
    """Raise CommandError unless it is a prefill time; NaN is none."""
    if not 0.0 <= value <= PREFILL_MS_MAX:
        raise CommandError(f"PREFILL_MS must be a number from 0 to {PREFILL_MS_MAX:g}, got {value:g}")


def hash_blob(count: Buffer, blob: Buffer) -> bytes:
    """`count` hashes of 8 bytes. Raises CommandError."""
    wanted = integer(count, "hash count", 0, MAX_HASHES) * HASH_BYTES
    if len(blob) != wanted:
        raise CommandError(f"hashes must be {wanted} bytes ({HASH_BYTES} for each), got {len(blob)}")
    return bytes(blob)


async def register(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.REGISTER <ns> <kv_dim> <format> [options]."""
    config = context.services.config
    ns = name(argv[1], "namespace")
    schema = Schema.uniform(get_format(argv[3]), integer(argv[2], "kv_dim", 1, config.max_dim))
    options = parse_options(argv, 4, "KV.PREFIX.REGISTER", config)
    return await register_prefix(context, ns, schema, schema, options)


async def register_schema(context: Context, argv: list[Buffer]) -> Reply:
    """KV.PREFIX.REGISTER.SCHEMA <ns> K <runs> V <runs> [options]."""
    config = context.services.config
    ns = name(argv[1], "namespace")
    shapes: dict[bytes, Schema] = {}
    for at in (2, 4):
        side = bytes(argv[at][:2]).upper()
        if side not in (b"K", b"V") or side in shapes:
            raise CommandError("KV.PREFIX.REGISTER.SCHEMA: expected K <runs> V <runs> behind the namespace")
        shapes[side] = parse_runs(side.decode(), argv[at + 1], config)
    options = parse_options(argv, 6, "KV.PREFIX.REGISTER.SCHEMA", config)
    return await register_prefix(context, ns, shapes[b"K"], shapes[b"V"], options)


def parse_runs(side: str, runs: Buffer, config: Config) -> Schema:
    """The shape of one side, `K` or `V`, from its runs `format@dim*layers,...`. Raises CommandError naming the side."""
    try:
        return Schema.parse(runs, None, config.max_layers, config.max_dim)
    except CommandError as error:
        raise CommandError(f"{side} runs: {error}") from None


def admission(services: Services) -> Admission:
    """The worker's sketch of lookup misses, made when it is first needed. Only with `--admission`."""
    found: Admission | None = services.state.get(ADMISSION)
    if found is None:
        found = services.state[ADMISSION] = Admission(services.config.admission)
    return found


def admission_rows(services: Services) -> list[tuple[str, object]]:
    """What `--admission` has done, for INFO; all 0 without it."""
    if not services.config.admission:
        return [(field, 0) for field in ("admission_deferred", "admission_admitted", "admission_sketch_bytes")]
    counts = admission(services).statistics()
    return [
        ("admission_deferred", counts.deferred),
        ("admission_admitted", counts.admitted),
        ("admission_sketch_bytes", counts.sketch_bytes),
    ]


async def register_prefix(context: Context, ns: bytes, k_schema: Schema, v_schema: Schema, options: Options) -> Simple:
    """Register a prefix; returns OK, PENDING while another connection fills it, or DEFERRED by `--admission`.

    Raises CommandError for a value out of its limits, a prefix that is there with another shape, or no room; then
    nothing changed. Cancellation: it is registered or not; only the wait for the log ends.
    """
    options.check(context.services.config)
    services, owner = context.services, context.session.id
    store = services.vstore
    declaration = options.declaration()
    unit = store.any_prefix(ns)
    same_shape = unit is not None and unit.k_schema is k_schema and unit.v_schema is v_schema
    if unit is not None and same_shape and unit.pending is not None and unit.pending.owner != owner:
        return PENDING
    expires_s = None
    if options.expires_in_s is not None:
        expires_s = services.clock.wall_s() + options.expires_in_s
    change = Register(
        ns=ns,
        k_schema=k_schema,
        v_schema=v_schema,
        declaration=declaration,
        hashes=options.hashes,
        meta=options.meta,
        parent=options.parent,
        offset=options.offset,
        expires_s=expires_s,
        pin=options.pin,
        prefill_ms=options.prefill_ms,
        owner=owner,
    )
    if services.config.admission and unit is None and not options.pin:
        # Checked first, so that a mistake is an error whether or not the namespace would have been admitted.
        store.check(change)
        if not admission(services).admits(ns):
            return DEFERRED
    await commit(context, change)
    return OK


NS: Final = Arg(name="ns", type=ArgType.KEY, summary="namespace, 1 B to 4 KiB of any bytes")

_OPTIONS: Final = (
    Arg(
        name="blocks",
        type=ArgType.BLOCK,
        token="BLOCKS",
        optional=True,
        summary="block hashes: hash i stands for everything up to the end of block i",
        args=(
            Arg(name="size", type=ArgType.INTEGER, summary="tokens per block"),
            Arg(name="count", type=ArgType.INTEGER),
            Arg(name="hashes", summary="count little-endian u64"),
        ),
    ),
    Arg(
        name="ms",
        type=ArgType.DOUBLE,
        token="PREFILL_MS",
        optional=True,
        summary="what the prefill took; credited to hits, not kept over a restart",
    ),
    Arg(
        name="layers",
        type=ArgType.INTEGER,
        token="LAYERS",
        optional=True,
        summary="declares the prefix, with TOKENS: it is a hit only once rows 0 to TOKENS-1 of all LAYERS are stored",
    ),
    Arg(name="tokens", type=ArgType.INTEGER, token="TOKENS", optional=True, summary="rows per layer and side"),
    Arg(name="states", type=ArgType.INTEGER, token="STATES", optional=True, summary="recurrent states; 0 for now"),
    Arg(name="meta", token="META", optional=True, summary="opaque blob that KV.PREFIX.META returns"),
    Arg(
        name="parent",
        type=ArgType.BLOCK,
        token="PARENT",
        optional=True,
        summary="the prefix that this one continues from the position offset on",
        args=(Arg(name="parent", type=ArgType.KEY), Arg(name="offset", type=ArgType.INTEGER)),
    ),
    Arg(name="seconds", type=ArgType.INTEGER, token="EX", optional=True, summary="expire after so many seconds"),
    Arg(name="pin", type=ArgType.PURE_TOKEN, token="PIN", optional=True, summary="never evict it, nor defer it"),
)

_REPLY: Final = (
    "+OK; +PENDING while another connection fills the prefix: don't store, wait with LOOKUP; +DEFERRED if it isn't "
    "there and fewer than --admission lookups of it have missed: nothing was made, don't store"
)
_ERRORS: Final = (
    "-EXISTS the prefix exists with another shape, declaration or parent",
    "-ERR PARENT: no prefix '<ns>'",
    "-ERR the format needs a dim divisible by its groups",
    "-OOM no session slot, or no memory, can be freed",
)

COMMANDS: Final = (
    Command(
        name="KV.PREFIX.REGISTER",
        arity=-4,
        summary="Register a prefix: creates its sessions <ns>_pk and <ns>_pv, all layers of one format and width",
        since="0.1.0",
        handler=register,
        flags=Flag.WRITE | Flag.DENYOOM,
        keys=KeySpec(1, 1),
        args=(
            NS,
            Arg(name="kv_dim", type=ArgType.INTEGER, summary="values in a row"),
            Arg(
                name="format",
                summary="stored format: fp32 fp16 bf16 fp8 int8 turbo4 turbo3 turbo2 mlx<bits>g<group>[:<type>]",
            ),
            *_OPTIONS,
        ),
        reply=_REPLY,
        complexity="O(1); O(log n) with BLOCKS",
        group="kvprefix",
        examples=(
            "KV.PREFIX.REGISTER app|llama|a 512 fp16",
            "KV.PREFIX.REGISTER app|llama|b 512 bf16 LAYERS 16 TOKENS 1024",
        ),
        errors=("-ERR unknown format", *_ERRORS),
    ),
    Command(
        name="KV.PREFIX.REGISTER.SCHEMA",
        arity=-6,
        summary="Register a prefix whose layers or sides differ in format or width",
        since="0.1.0",
        handler=register_schema,
        flags=Flag.WRITE | Flag.DENYOOM,
        keys=KeySpec(1, 1),
        args=(
            NS,
            Arg(name="k_runs", token="K", summary="format@dim*layers, comma-separated; @0 is a side without data"),
            Arg(name="v_runs", token="V", summary="as K"),
            *_OPTIONS,
        ),
        reply=_REPLY,
        complexity="O(1); O(log n) with BLOCKS",
        group="kvprefix",
        examples=("KV.PREFIX.REGISTER.SCHEMA app|mla|a K fp16@512*27 V fp16@64*27",),
        errors=("-ERR K runs: run 1 'fp17@512*27': unknown format", *_ERRORS),
    ),
)
