"""An example plugin: two commands, a background service, an INFO section and its own state.

Everything here goes through the public API (`import pion`). Handlers first, the table of commands after them, the hooks
last; that is the order of Pion's own families too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import attrs
import trio

import pion

PLUGIN = "example"

SAMPLE_EVERY_S = 1.0
"""Seconds between two looks at the number of clients."""

SAMPLES = 60
"""How many looks are remembered: a minute. A plugin bounds what it keeps, as Pion does."""


@attrs.define(eq=False)
class State:
    """What this plugin keeps for one server; it lives in `services.state["example"]`."""

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
)


# Hooks


@pion.hookimpl
def register_commands(config: pion.Config) -> Sequence[pion.Command]:
    """The rows above."""
    return COMMANDS


@pion.hookimpl
def startup(services: pion.Services) -> None:
    """Make the state before anything else of this plugin runs."""
    services.state[PLUGIN] = State()


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
