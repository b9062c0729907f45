"""What the V and KV.PREFIX commands share: names, the AS option, lists with a cursor, waiting for the journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import trio

from pion.args import MAX_NAME_BYTES, Cursor, integer, name, show
from pion.command import Arg, ArgType, KeySpec
from pion.config import MIB
from pion.context import Context
from pion.errors import CommandError
from pion.limits import VERIFY_BEFORE_BYTES
from pion.replies import Buffer, Reply
from pion.storage.changes import Change
from pion.storage.formats import Wire, parse_wire
from pion.storage.glob import Glob
from pion.storage.ordered import SortedMap
from pion.storage.placed import TierFile
from pion.storage.reading import Span
from pion.storage.region import MappedMemory
from pion.storage.tiers.base import TierMissError, TierUnavailableError
from pion.storage.unit import SUFFIXES, Unit
from pion.storage.verifying import Comparing, Doubts

logger = logging.getLogger("pion.storage")

VERIFY_THREADS: Final = 2
"""Threads that compare rows with their checksums for one reply; half of those that convert, so others get on, too."""

VERIFY_HERE_BYTES: Final = 4 * MIB
"""Up to here, what is in the system's cache is verified on the event loop, in steps: starting a thread takes longer."""

VERIFY_TOGETHER_BYTES: Final = 4 * MIB
"""Less than this is not worth a second thread: it is a millisecond."""

MAX_ROW_END: Final = 2**31
"""One past the largest token id."""

LIST_COUNT: Final = 100
"""Names that one list call looks at without COUNT."""

LIST_COUNT_MAX: Final = 10_000
"""Most names that one call looks at: about 3 ms."""

SID: Final = Arg(name="sid", type=ArgType.KEY, summary="session id, 1 B to 4 KiB of any bytes")
LAYER: Final = Arg(name="layer", type=ArgType.INTEGER, summary="layer id, from 0")
ONE_KEY: Final = KeySpec(1, 1, 1, "session")
NO_SESSION: Final = "-ERR no session '<sid>'"

AS_ARG: Final = Arg(
    name="type",
    type=ArgType.ONEOF,
    token="AS",
    optional=True,
    summary="type of the values on the wire; native is the stored format byte for byte; default fp32",
    args=tuple(Arg(name=wire.value, type=ArgType.PURE_TOKEN, token=wire.value) for wire in Wire),
)

LIST_ARGS: Final = (
    Arg(name="cursor", token="CURSOR", optional=True, summary="where to go on: 0, or what the last call gave"),
    Arg(name="pattern", type=ArgType.PATTERN, token="MATCH", optional=True, summary="glob on the whole name"),
    Arg(
        name="count",
        type=ArgType.INTEGER,
        token="COUNT",
        optional=True,
        summary=f"names to look at in this call, 1 to {LIST_COUNT_MAX}; default {LIST_COUNT}",
    ),
)

LIST_REPLY: Final = "array of two: the next cursor (bulk string, `0` at the end) and an array of names"


def wrong_arity(command: str) -> CommandError:
    """Redis's error for a wrong number of arguments, for forms that the row's arity can't tell apart."""
    return CommandError(f"wrong number of arguments for '{command.lower()}' command")


def sid_name(value: Buffer) -> bytes:
    """A session id: 1 to 4,096 bytes, and three more for `_pk` or `_pv` behind a namespace."""
    if MAX_NAME_BYTES < len(value) <= MAX_NAME_BYTES + 3 and bytes(value[-3:]) in SUFFIXES:
        return bytes(value)
    return name(value, "sid")


def split_as(argv: list[Buffer], first: int) -> tuple[list[Buffer], Wire]:
    """The arguments without a trailing `AS <type>`, which may stand from position `first` on, and the type."""
    if len(argv) >= first + 2 and len(argv[-2]) == 2 and bytes(argv[-2]).upper() == b"AS":
        return argv[:-2], parse_wire(argv[-1])
    if len(argv) > first and len(argv[-1]) == 2 and bytes(argv[-1]).upper() == b"AS":
        raise CommandError("AS: its value is missing, expected fp32, fp16, bf16 or native")
    return argv, Wire.FP32


def within(value: int, what: str, low: int, high: int) -> int:
    """`value`, if it is in [low, high]; else CommandError, as for a number that was sent as text."""
    if not low <= value <= high:
        raise CommandError(f"{what} must be an integer from {low} to {high}, got {value}")
    return value


def check_range(start: int, stop: int) -> None:
    """Raise CommandError unless [start, stop) is a range of row ids."""
    if not 0 <= start <= stop <= MAX_ROW_END:
        within(start, "start_id", 0, MAX_ROW_END)
        within(stop, "end_id", 0, MAX_ROW_END)
        raise CommandError(f"end_id must be at least start_id, {start}, got {stop}")


def row_range(start: Buffer, stop: Buffer) -> tuple[int, int]:
    """A half-open range of row ids."""
    first = integer(start, "start_id", 0, MAX_ROW_END)
    last = integer(stop, "end_id", 0, MAX_ROW_END)
    check_range(first, last)
    return first, last


async def commit(context: Context, *changes: Change) -> None:
    """Commit changes with no checkpoint between them, and see to it that the reply is not sent before the log has them.

    Raises CommandError if one is refused; those before it are made. Cancellation: the changes are made; only the wait
    ends.
    """
    store, session = context.services.vstore, context.session
    waits = [waiting for waiting in map(store.commit, changes) if waiting is not None]
    if session.unlogged is not None:
        session.unlogged += waits
        return
    for waiting in waits:
        await waiting


async def verified(context: Context, gathered: Iterable[tuple[Unit, Sequence[Span]]]) -> bool:
    """Open what lies in the tier, and compare what lies in files with its checksum, before its first use; in a thread,
    as the disk may be slow.

    False: something is damaged that was replaced meanwhile, so the caller must gather again. Raises CommandError if
    something that is stored is damaged, after what it belongs to was dropped, or is in a tier that does not answer.
    Cancellation: nothing was dropped.
    """
    return await _verified(context, gathered, whole=True) is not None


async def verified_to_send(context: Context, gathered: Iterable[tuple[Unit, Sequence[Span]]]) -> Doubts | None:
    """As `verified`, for a reply that is sent at once: of much only the beginning, and what is left is for the reply to
    verify while it is sent. None: gather again.
    """
    return await _verified(context, gathered, whole=context.session.in_exec)


async def _verified(context: Context, gathered: Iterable[tuple[Unit, Sequence[Span]]], *, whole: bool) -> Doubts | None:
    store = context.services.vstore
    if not store.ledger.mapped_bytes:
        return Doubts(store, ())
    doubts = Doubts(store, gathered)
    if not context.session.no_touch:
        for file in doubts.files:
            store.tier_files.used(file)
    if not doubts.memories:
        return doubts
    with store.tier_files.pinned(doubts.files):
        lost = await _opened(context, doubts.files)
        kept = doubts.keep()
        first = [*doubts.memories] if whole or doubts.nbytes <= VERIFY_BEFORE_BYTES else doubts.first()
        damaged = await _verify(context, [memory for memory in first if doubts.memories[memory] not in lost])
    if doubts.drop(damaged, lost):
        raise CommandError("no row: its bytes on disk are not what was stored, so it was dropped")
    return doubts if kept and not damaged else None


async def _opened(context: Context, files: Mapping[TierFile, Unit]) -> set[Unit]:
    """Open the tier's objects; returns the units whose object is gone or damaged. Raises CommandError."""
    lost: set[Unit] = set()
    for file, unit in files.items():
        if file.opened is None:
            try:
                await context.services.vstore.tier_files.opener(file)
            except TierMissError as error:
                if file.refs:
                    logger.error("tier object %s: %s", file.key, error)
                    lost.add(unit)
            except TierUnavailableError as error:
                raise CommandError(f"no row: its tier does not answer ({error})") from error
    return lost


async def _verify(context: Context, memories: Sequence[MappedMemory]) -> list[MappedMemory]:
    """Those that are not what was stored. Many bytes are read by several threads, as a client waits for them."""
    comparing = Comparing(memories)
    if sum(memory.nbytes for memory in memories) <= VERIFY_HERE_BYTES:
        while comparing.ready():
            if comparing.step():
                return comparing.damaged
            await trio.lowlevel.checkpoint()
    damaged, memories = comparing.damaged, comparing.left
    threads = min(VERIFY_THREADS, 1 + sum(memory.nbytes for memory in memories) // VERIFY_TOGETHER_BYTES)
    if threads == 1:
        return damaged + await context.in_thread(_damaged, memories)
    found: list[list[MappedMemory]] = [damaged]

    async def some(first: int) -> None:
        found.append(await context.in_thread(_damaged, memories[first::threads]))

    async with trio.open_nursery() as nursery:
        for first in range(threads):
            nursery.start_soon(some, first)
    return [memory for each in found for memory in each]


def _damaged(memories: Sequence[MappedMemory]) -> list[MappedMemory]:
    return [memory for memory in memories if not memory.verify()]


def list_page(
    argv: list[Buffer],
    command: str,
    groups: Sequence[tuple[bytes, SortedMap[Unit]]],
    names: Callable[[Unit], Iterable[bytes]],
    *,
    keys_are_names: bool,
) -> Reply:
    """One page of a list. `groups` are tagged collections, walked in turn; `names` gives what a unit is listed as.

    A cursor is the place behind a name, not a number, so whatever is there during the whole walk is listed once.
    """
    cursor, pattern, count = b"0", Glob(b"*"), LIST_COUNT
    options = Cursor(argv, 1, command)
    while options:
        option = options.option()
        if option == b"CURSOR":
            cursor = _cursor(options.value("CURSOR"), [tag for tag, _ in groups])
        elif option == b"MATCH":
            pattern = Glob(name(options.value("MATCH"), "MATCH pattern"))
        elif option == b"COUNT":
            count = integer(options.value("COUNT"), "COUNT", 1, LIST_COUNT_MAX)
        else:
            raise options.unknown(option, "CURSOR, MATCH or COUNT")
    start = pattern.literal if keys_are_names else b""
    found: list[bytes] = []
    for tag, entries in groups:
        if cursor != b"0" and tag < cursor[:1]:
            continue
        behind = cursor[1:] if tag == cursor[:1] else b""
        for key, unit in entries.after(max(behind, start), inclusive=behind < start):
            if not key.startswith(start):
                break
            if not count:
                return [tag + behind, found]
            behind, count = key, count - 1
            found.extend(text for text in names(unit) if pattern.matches(text))
    return [b"0", found]


def _cursor(value: Buffer, tags: list[bytes]) -> bytes:
    cursor = bytes(value[: MAX_NAME_BYTES + 2])
    if cursor != b"0" and (len(cursor) > MAX_NAME_BYTES + 1 or cursor[:1] not in tags):
        raise CommandError(f"CURSOR must be 0 or a cursor that this command gave, got {show(value)}")
    return cursor
