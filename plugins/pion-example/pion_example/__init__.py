"""An example plugin: commands on both lanes, a background service, an INFO section, state, durable state, and a tier.

Everything here goes through the public API (`import pion`). Handlers first, the table of commands after them, the hooks
last; that is the order of Pion's own families too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import attrs
import trio

import pion
from pion_example.sqlite_tier import SqliteTier

PLUGIN = "example"

SAMPLE_EVERY_S = 1.0
"""Seconds between two looks at the number of clients."""

SAMPLES = 60
"""How many looks are remembered: a minute. A plugin bounds what it keeps, as Pion does."""


MOST_NOTES = 10_000
NOTE_BYTES = 1024
"""How many notes are kept, and how long one may be together with its name."""


@attrs.frozen
class Note:
    """A note that was written, and what was there before; empty is no note."""

    name: bytes
    text: bytes
    before: bytes


class Notes(pion.Durable):
    """Notes by name. They are in the log and in snapshots, so they survive the server, however it ends."""

    family = PLUGIN

    def __init__(self) -> None:
        self.texts: dict[bytes, bytes] = {}

    def write(self, name: bytes, text: bytes) -> Awaitable[None] | None:
        """Change memory, then append the change to the log, with nothing between the two that waits or fails."""
        note = Note(name, text, self.texts.get(name, b""))
        self._set(name, text)
        return self.keep(note)

    def encode(self, item: Note) -> pion.Record:
        """A note as the log keeps it. Runs in a thread, a little later: a `Note` never changes."""
        return pion.Record(item.name, item.text)

    def replay(self, meta: bytes, data: pion.Region | None) -> None:
        """The same change again, at start."""
        self._set(meta, data.read() if data is not None else b"")

    def undo(self, items: Sequence[Note]) -> None:
        """The disk failed before these were written, and their clients are told so: back to what was there."""
        for note in reversed(items):
            self._set(note.name, note.before)

    def capture(self) -> Iterator[pion.Captured]:
        """Records that make the present state from nothing, for a snapshot."""
        return iter([pion.Captured(name, [text]) for name, text in self.texts.items()])

    def _set(self, name: bytes, text: bytes) -> None:
        if text:
            self.texts[name] = text
        else:
            self.texts.pop(name, None)


@attrs.define(eq=False)
class State:
    """What this plugin keeps for one server; it lives in `services.state["example"]`."""

    notes: Notes = attrs.field(factory=Notes)
    samples: deque[int] = attrs.field(factory=lambda: deque(maxlen=SAMPLES))
    closed: int = 0

    def peak(self) -> int:
        """The most clients in any sample."""
        return max(self.samples, default=0)


def state_of(services: pion.Services) -> State:
    """The state that `startup` made."""
    state: State = services.state[PLUGIN]
    return state


# Commands: each handler gets the context and the request's arguments, and returns a reply (pion.replies lists them).


async def tokens(context: pion.Context, argv: list[pion.Buffer]) -> pion.Reply:
    """Tokens of a whole prefix, by asking the command that knows. Another family's error is passed on as it is."""
    chain = await context.dispatch.execute(context, [b"KV.PREFIX.CHAIN", argv[1]])
    if isinstance(chain, pion.ErrorReply):
        return chain
    if not chain:
        raise pion.CommandError("no such prefix")
    _, offset, count = chain[-1]  # the leaf: where its own rows begin in the text, and how many there are
    return int(offset + count)


async def peak(context: pion.Context, argv: list[pion.Buffer]) -> pion.Reply:
    """The most clients in the last minute. Never waits, but handlers are `async` so that there is one kind of call."""
    return state_of(context.services).peak()


async def note(context: pion.Context, argv: list[pion.Buffer]) -> pion.Reply:
    """Write a note. The row says WRITE, so that the command is refused while the disk is broken, before it runs.

    Cancellation: the note is written; only the wait for the disk ends.
    """
    notes, name, text = state_of(context.services).notes, bytes(argv[1]), bytes(argv[2])
    if len(name) + len(text) > NOTE_BYTES:
        raise pion.CommandError(f"name and text may have {NOTE_BYTES} bytes together")
    if text and name not in notes.texts and len(notes.texts) >= MOST_NOTES:
        raise pion.CommandError(f"there are {MOST_NOTES} notes already")
    written = notes.write(name, text)
    if written is not None:  # None in a server that keeps nothing
        await written
    return pion.OK


async def noted(context: pion.Context, argv: list[pion.Buffer]) -> pion.Reply:
    """Read a note."""
    return state_of(context.services).notes.texts.get(bytes(argv[1]))


COMMANDS = (
    pion.Command(
        name="EXAMPLE.TOKENS",
        arity=2,
        summary="Counts the tokens of a prefix, its ancestors included.",
        since="0.1.0",
        handler=tokens,
        flags=pion.Flag.READONLY,
        keys=pion.KeySpec(1, 1),
        args=(pion.Arg(name="ns", type=pion.ArgType.KEY, summary="the prefix"),),
        reply="Integer: tokens from the start of the text to the end of this prefix.",
        group=PLUGIN,
        errors=("ERR if there is no such prefix",),
    ),
    pion.Command(
        name="EXAMPLE.PEAK",
        arity=1,
        summary="Tells how many clients were connected at once, at most, in the last minute.",
        since="0.1.0",
        handler=peak,
        flags=pion.Flag.READONLY | pion.Flag.FAST,
        reply="Integer: clients.",
        group=PLUGIN,
    ),
    pion.Command(
        name="EXAMPLE.NOTE",
        arity=3,
        summary="Writes a note under a name; it survives a restart.",
        since="0.1.0",
        handler=note,
        flags=pion.Flag.WRITE,
        args=(pion.Arg(name="name"), pion.Arg(name="text", summary="empty removes the note")),
        reply="OK, once the note is in the log.",
        group=PLUGIN,
        errors=("ERR if it is too long, or there are too many", "MISCONF if the disk failed"),
    ),
    pion.Command(
        name="EXAMPLE.NOTED",
        arity=2,
        summary="Reads a note.",
        since="0.1.0",
        handler=noted,
        flags=pion.Flag.READONLY | pion.Flag.FAST,
        args=(pion.Arg(name="name"),),
        reply="Bulk string: the text, or null.",
        group=PLUGIN,
    ),
)


# The binary lane: the same operation, for clients that count in microseconds. A handler there gets the request's meta
# unpacked, in the order of the row's fields, and the body; it returns a status, meta and a body.


async def packed_note(context: pion.Context, values: tuple[bytes], body: pion.Buffer) -> pion.BinaryReply:
    """Write a note whose text is the body.

    Cancellation: as EXAMPLE.NOTE.
    """
    await note(context, [b"EXAMPLE.NOTE", values[0], body])
    return pion.BinaryReply()


async def packed_noted(context: pion.Context, values: tuple[bytes], body: pion.Buffer) -> pion.BinaryReply:
    """Read a note."""
    text = state_of(context.services).notes.texts.get(values[0])
    return pion.BinaryReply(pion.Status.MISS) if text is None else pion.BinaryReply(body=text)


_NAME = pion.Field("name", pion.FieldKind.NAME)

BINARY = (
    pion.BinaryCommand(code=0xE0, command="EXAMPLE.NOTE", handler=packed_note, meta=(_NAME,), body="the note's text"),
    pion.BinaryCommand(code=0xE1, command="EXAMPLE.NOTED", handler=packed_noted, meta=(_NAME,), reply="body: the text"),
)


# Hooks


@pion.hookimpl
def register_commands(config: pion.Config) -> Sequence[pion.Command]:
    """The rows above."""
    return COMMANDS


@pion.hookimpl
def register_binary(config: pion.Config) -> Sequence[pion.BinaryCommand]:
    """Two of them on the binary lane, too. Codes from 0xE0 on are for plugins."""
    return BINARY


@pion.hookimpl
def startup(services: pion.Services) -> None:
    """Make the state before anything else of this plugin runs."""
    services.state[PLUGIN] = State()


@pion.hookimpl
def register_durable(services: pion.Services) -> Sequence[pion.Durable]:
    """The notes; they are replayed before the server listens."""
    return (state_of(services).notes,)


@pion.hookimpl
def register_tiers() -> Mapping[str, Callable[[str], pion.Tier]]:
    """A tier in an SQLite database, for `--tier-dir sqlite:///path`."""
    return {"sqlite": SqliteTier}


@pion.hookimpl
def register_services(services: pion.Services) -> Sequence[Callable[..., Awaitable[None]]]:
    """One task that samples the number of clients."""
    state = state_of(services)

    async def sample(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            state.samples.append(len(services.clients))
            await trio.sleep(SAMPLE_EVERY_S)

    return (sample,)


@pion.hookimpl
def register_info(services: pion.Services) -> Sequence[pion.InfoSection]:
    """The `# Example` section."""
    state = state_of(services)

    def rows() -> Sequence[tuple[str, object]]:
        return (("example_clients_peak", state.peak()), ("example_clients_closed", state.closed))

    return (pion.InfoSection("Example", rows),)


@pion.hookimpl
def register_disconnect(services: pion.Services) -> Callable[[pion.Session], None]:
    """Count connections that close. Called on the event loop, so it must be short."""
    state = state_of(services)

    def closed(session: pion.Session) -> None:
        state.closed += 1

    return closed


@pion.hookimpl
def shutdown(services: pion.Services) -> None:
    """Release what `startup` made: here only memory; a file or a connection would be closed."""
    del services.state[PLUGIN]
