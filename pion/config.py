"""One frozen `Config`: every limit and default of the server, each with its unit and its reason.

The fields are the single source: `pion-server --help`, the `PION_...` variables, the keys of `--config FILE` and the
reference page are made from them. Precedence: command line, environment, file, default.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

VERSION: Final = "0.1.0"
#: What clients see as `redis_version`. The commands Pion shares with Redis follow this release.
REDIS_VERSION: Final = "7.4.0"


def option(
    default: Any,
    help: str,  # noqa: A002
    *,
    group: str,
    unit: str = "",
    flag: str | None = None,
    secret: bool = False,
    mutable: bool = False,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A Config field. `flag` overrides the flag made from the field's name; `mutable` allows CONFIG SET."""
    metadata = {
        "help": help,
        "group": group,
        "unit": unit,
        "flag": flag,
        "secret": secret,
        "mutable": mutable,
        "low": low,
        "high": high,
        "choices": choices,
    }
    return attrs.field(default=default, metadata=metadata, repr=not secret)


@attrs.frozen(kw_only=True)
class Config:
    """How one server runs. `pion.cli` builds it; tests build it directly."""

    # Listening
    host: str = option("127.0.0.1", "address to listen on; anything but loopback needs a password", group="listen")
    port: int = option(
        1974, "TCP port of the RESP lane; 0 lets the system choose", group="listen", unit="port", low=0, high=65535
    )
    binary_port: int = option(
        -2,
        "TCP port of the binary lane; -2: the port after --port (with --port 0, one that the system chooses), "
        "0: one that the system chooses, -1: no binary lane",
        group="listen",
        unit="port",
        low=-2,
        high=65535,
    )
    unix: str = option("", "also listen on this Unix socket path", group="listen", unit="path")
    backlog: int = option(
        511, "connections the kernel may queue before accept", group="listen", unit="connections", low=1, high=65535
    )
    busy_poll_us: int = option(
        50,
        "how long the worker looks for the next request before it sleeps, while one client asks again and again; "
        "twice the time a client needs on the same machine; 0 sleeps at once",
        group="listen",
        unit="us",
        flag="busy-poll",
        low=0,
        high=1000,
    )
    max_clients: int = option(
        10_000,
        "connections served at once; each costs a task and about 20 KiB",
        group="listen",
        unit="connections",
        flag="maxclients",
        low=1,
        high=1_000_000,
        mutable=True,
    )
    protected_mode: bool = option(True, "refuse to start on a non-loopback address without a password", group="listen")

    # Security
    requirepass: str = option("", "password that AUTH must give before anything else", group="security", secret=True)
    requirepass_file: str = option(
        "", "file whose first line is the password, so that it isn't in the process list", group="security", unit="path"
    )

    # What is loaded
    kvcache: bool = option(
        False, "load all families but the attention indexes, and what is installed as a plugin", group="plugins"
    )
    plugins: str = option(
        "", "which plugins: all, all,-name or a list of names; decides over --kvcache", group="plugins", unit="list"
    )
    plugins_dir: str = option("", "load every *.py file of this directory as a plugin", group="plugins", unit="path")

    # The process
    workers: int = option(1, "worker processes; this version runs one", group="process", unit="processes")
    grace_s: float = option(
        10.0,
        "time to finish what is under way at shutdown; as long as a container runtime waits",
        group="process",
        unit="s",
        flag="grace",
        low=0,
        high=3600,
    )
    log_level: str = option(
        "info",
        "least severe event that is logged",
        group="process",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = option(
        "text", "log lines for a person or for a machine", group="process", choices=("text", "json")
    )

    # Durability
    dir: str = option(
        "pion-data",
        "directory of the log and the snapshot, made if need be; one server per directory; "
        "empty: keep everything in memory only",
        group="durability",
        unit="path",
    )
    wal_sync: str = option(
        "everysec",
        "when the log is flushed to the disk: before each answer, every second, or when the system likes; "
        "in each mode an answer is given after the log was written, so the death of the process loses nothing",
        group="durability",
        choices=("always", "everysec", "no"),
    )
    wal_limit: float = option(
        1.0,
        "a log longer than this many times the stored data (and than 512 MiB) is replaced by a snapshot",
        group="durability",
        unit="times the stored bytes",
        low=0.1,
        high=1000,
    )
    wal_queue_bytes: int = option(
        128 * MIB,
        "changes that wait to be written to the log; beyond it the next one waits before it is made; "
        "a fraction of a second of a slow disk",
        group="durability",
        unit="bytes",
        flag="wal-queue",
        low=MIB,
        high=64 * GIB,
    )

    # Storage
    max_sessions: int = option(
        256,
        "V sessions held; beyond it the least recently used prefix is evicted (a prefix is two sessions)",
        group="storage",
        unit="sessions",
        low=2,
        high=16_777_216,
        mutable=True,
    )
    max_bytes: int = option(
        0,
        "memory for what is stored: rows, names, tables, payloads being received and replies being sent; beyond it the "
        "least valuable prefixes go, to the tier if there is one; 0: no limit. With it, --max-sessions is 1,048,576 "
        "unless given",
        group="storage",
        unit="bytes",
        low=0,
        high=1024 * 1024 * GIB,
        mutable=True,
    )
    eviction: str = option(
        "lru",
        "which prefix makes room: the least recently used one, or the one with the least prefill time avoided for its "
        "bytes and its chance of being used again",
        group="storage",
        choices=("lru", "value"),
    )
    admission: int = option(
        0,
        "lookup misses of a namespace before REGISTER accepts it (+DEFERRED until then); 0 accepts at once",
        group="storage",
        unit="misses",
        low=0,
        high=15,
    )
    tier_dir: str = option(
        "",
        "directory, or URL of another kind of tier, that takes what memory has no room for; empty: it is dropped",
        group="storage",
        unit="path",
    )
    max_disk_bytes: int = option(
        0,
        "disk space for the tier, the snapshot and the log together; beyond it the least valuable prefixes of the tier "
        "go, then changes are refused; 0: no limit",
        group="storage",
        unit="bytes",
        low=0,
        high=1024 * 1024 * GIB,
        mutable=True,
    )
    max_layers: int = option(
        65_536,
        "layers in one session; the deepest models have a few hundred, the bound keeps a bad id from growing a table",
        group="storage",
        unit="layers",
        low=1,
        high=1_048_576,
    )
    max_dim: int = option(
        1_048_576,
        "values in one row; 4 MiB in fp32, far over any model's KV width",
        group="storage",
        unit="values",
        low=1,
        high=16_777_216,
    )
    max_meta_bytes: int = option(
        16 * MIB,
        "META blob of one prefix; four million token ids",
        group="storage",
        unit="bytes",
        flag="max-meta",
        low=0,
        high=GIB,
    )
    pending_timeout_s: float = option(
        60.0,
        "a declared prefix that gets no row for this long is dropped, so that a hung client doesn't block the others",
        group="storage",
        unit="s",
        flag="pending-timeout",
        low=0.01,
        high=86_400,
        mutable=True,
    )
    max_wait_ms: int = option(
        600_000, "longest WAIT of one LOOKUP", group="storage", unit="ms", flag="max-wait", low=1, high=86_400_000
    )

    # Attention
    metal_attention: bool = option(
        False,
        "prepare attention at start, in fp32, on whatever device MLX has; without it: at its first use",
        group="attention",
    )
    metal_attention_fp16: bool = option(
        False, "the same in fp16, as models in half precision compute", group="attention"
    )
    attend_slots: int = option(
        256,
        "layers whose K and V are kept ready for attention (WARM); beyond it the least recently used becomes COLD",
        group="attention",
        unit="layers",
        low=1,
        high=1_048_576,
        mutable=True,
    )
    attend_cold: int = option(
        1024,
        "layers remembered as COLD: their rows are in the V-store, and WARM brings them back",
        group="attention",
        unit="layers",
        low=0,
        high=16_777_216,
        mutable=True,
    )
    attend_bytes: int = option(
        4 * GIB,
        "memory of all WARM layers on the compute device; beyond it the least recently used becomes COLD",
        group="attention",
        unit="bytes",
        low=MIB,
        high=16 * 1024 * GIB,
        mutable=True,
    )
    attend_queue: int = option(
        1024,
        "queries that wait for the compute thread, all connections together; the next ones wait before they are queued",
        group="attention",
        unit="queries",
        low=1,
        high=1_048_576,
    )
    max_indexes: int = option(
        1024,
        "attention indexes (KV.STORE) held at once; none is evicted, so beyond it a new one is refused with -OOM",
        group="attention",
        unit="indexes",
        low=1,
        high=1_048_576,
        mutable=True,
    )
    max_index_rows: int = option(
        1_048_576,
        "rows of one attention index; a query reads them all: 1 GiB of keys and values with 128 values each",
        group="attention",
        unit="rows",
        low=1,
        high=2_147_483_647,
        mutable=True,
    )
    max_index_dim: int = option(
        4096,
        "values in one key of an attention index (D); wider than any model's head, and than most embeddings",
        group="attention",
        unit="values",
        low=1,
        high=65_536,
    )

    # Protocol limits
    max_bulk_bytes: int = option(
        GIB,
        "one argument of a request; a layer of a 128k-token prefix of an 8B model in fp32 is half of it",
        group="limits",
        unit="bytes",
        flag="max-bulk",
        low=64 * KIB,
        high=16 * GIB,
    )
    max_args: int = option(
        1_048_576, "arguments of one request, as in Redis", group="limits", unit="arguments", low=16, high=16_777_216
    )
    max_receiving_bytes: int = option(
        2 * GIB,
        "payloads being received at once, all connections together; more is refused with -OOM and read away",
        group="limits",
        unit="bytes",
        flag="max-receiving",
        low=MIB,
        high=1024 * GIB,
        mutable=True,
    )
    max_sending_bytes: int = option(
        4 * GIB,
        "stored bytes that only unfinished replies still hold (their prefix was dropped); "
        "beyond it the slowest readers are disconnected",
        group="limits",
        unit="bytes",
        flag="max-sending",
        low=MIB,
        high=1024 * GIB,
        mutable=True,
    )
    send_timeout_s: float = option(
        60.0,
        "a reader that takes no byte for this long is disconnected; it holds blocks alive",
        group="limits",
        unit="s",
        flag="send-timeout",
        low=0.01,
        high=86_400,
        mutable=True,
    )
    receive_timeout_s: float = option(
        60.0,
        "half a request with no further byte for this long is disconnected; it holds receive memory",
        group="limits",
        unit="s",
        flag="receive-timeout",
        low=0.01,
        high=86_400,
        mutable=True,
    )
    idle_timeout_s: float = option(
        0.0,
        "a connection between requests is closed after this long; 0 never, as in Redis",
        group="limits",
        unit="s",
        flag="timeout",
        low=0,
        high=31_536_000,
        mutable=True,
    )
    min_receive_rate: int = option(
        256 * KIB,
        "when no memory is left to receive, clients that hold some and send (or read) slower than this are "
        "disconnected; a mobile network is faster",
        group="limits",
        unit="bytes/s",
        flag="min-receive-rate",
        low=0,
        high=GIB,
        mutable=True,
    )
    max_exec_reply_bytes: int = option(
        16 * MIB,
        "replies that one EXEC keeps until its last command ran, without stored rows; "
        "beyond it a command's reply is -OOM though it ran",
        group="limits",
        unit="bytes",
        flag="max-exec-reply",
        low=64 * KIB,
        high=GIB,
        mutable=True,
    )
    max_queued_commands: int = option(
        10_000,
        "commands queued by one MULTI",
        group="limits",
        unit="commands",
        flag="max-queued",
        low=1,
        high=1_000_000,
    )
    slowlog_max_len: int = option(
        128,
        "entries SLOWLOG keeps",
        group="limits",
        unit="entries",
        flag="slowlog-max-len",
        low=0,
        high=100_000,
        mutable=True,
    )
    slowlog_slower_than_us: int = option(
        10_000,
        "a command at least this long enters SLOWLOG; 10 ms is a stall others can feel",
        group="limits",
        unit="us",
        flag="slowlog-log-slower-than",
        low=-1,
        high=3_600_000_000,
        mutable=True,
    )


def fields() -> tuple[attrs.Attribute[Any], ...]:
    """The options in declaration order."""
    return attrs.fields(Config)


def flag_name(field: attrs.Attribute[Any]) -> str:
    """`max_bulk_bytes` -> `max-bulk`; the environment variable is the same with PION_ and underscores."""
    return field.metadata["flag"] or field.name.replace("_", "-")
