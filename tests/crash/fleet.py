"""The clients: each in a thread of its own, with a connection of its own, until the server dies under it."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from typing import Any, Final

import attrs

from tests.crash import rows
from tests.crash.model import SHAPES, SUFFIXES, State, Window, without
from tests.crash.plans import Planner
from tests.crash.steps import Step, judge, refusal
from tests.crash.verify import find_state
from tests.crash.wire import CONNECTION_ERRORS, Refused, ViolationError, Wire

PIPELINE_MOST: Final = 8
BULKY_CLIENTS: Final = 2
"""Clients that store large rows, so that a kill finds the log in the middle of a record."""


BACKUPS: Final = (b"copy-0.safetensors", b"copy-1.safetensors")
"""Paths that KV.PREFIX.SAVE gets; used again and again."""

LEAVING_S: Final = 30.0
"""Longest time that the server may take to notice that a connection has closed."""


WATCH_PAUSE_S: Final = 0.01
"""Between two looks at another client's prefix, which would else take the server's time for themselves."""


@attrs.frozen(eq=False)
class Life:
    """One run of the server process."""

    port: int
    tight: bool
    """Whether --max-sessions is small, so that there are evictions."""
    stop: threading.Event
    """Set when the server is about to die: then an error of the connection is what was to be expected."""


class Board:
    """Names of declared prefixes that were registered lately, for those who look at other clients' prefixes."""

    def __init__(self) -> None:
        self.names: deque[bytes] = deque(maxlen=200)


@attrs.define(eq=False)
class Client:
    """One client, over all lives of the server."""

    index: int
    board: Board
    state: State = attrs.field(factory=dict)
    """What was acknowledged."""
    doubtful: State = attrs.field(factory=dict)
    """Units that the server said are gone, since this client's last change that it acknowledged. What it says of them
    waits for no log: an eviction whose record was not written yet is forgotten when the server dies.
    """
    unanswered: list[tuple[Step, Window]] = attrs.field(factory=list)
    """What had been sent when the last server died, in order, with the times of sending and of death."""
    acknowledged: int = 0
    rows: int = 0
    """Rows compared."""
    made: int = 0
    """Sessions that were asked for since the last verification."""
    planner: Planner = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.planner = Planner(self.prefix, random.Random(0), bulky=self.index < BULKY_CLIENTS)

    @property
    def prefix(self) -> bytes:
        """What the names of its units begin with."""
        return b"c%d|" % self.index

    @property
    def candidates(self) -> list[State]:
        """The states in which the dead server can have left the disk: with none, some or all unanswered steps done.

        What is doubtful is in them as what may have been evicted.
        """
        found: list[State] = [{**self.doubtful, **self.state}]
        for step, window in self.unanswered:
            for effect in step.effects:
                found.append(effect(found[-1], window))
        return found

    def verify(self, port: int, *, tight: bool) -> int:
        """Find out what is there after a restart and go on from it; the sessions evicted. Raises ViolationError."""
        with Wire(port) as wire:
            outcome = find_state(wire, self.prefix, self.candidates, tight=tight)
        self.state, self.doubtful, self.unanswered, self.made = outcome.state, {}, [], 0
        self.rows += outcome.rows
        return outcome.evicted

    def load(self, life: Life, rng: random.Random) -> None:
        """Send commands until the server dies or stops. Raises ViolationError."""
        self.planner.rng, self.planner.tight = rng, life.tight
        todo: deque[Step] = deque()
        sent: list[Step] = []
        sent_s = time.time()
        wire: Wire | None = None
        try:
            wire = Wire(life.port)
            while True:
                if not todo and any(unit.pending for unit in self.state.values()) and rng.random() < 0.2:
                    wire = self._leave(wire, life)
                todo.extend(self.planner.next(self.state, time.time()) if not todo else ())
                sent = [todo.popleft() for _ in range(min(len(todo), rng.randint(1, PIPELINE_MOST)))]
                self.made += sum(step.makes for step in sent)
                self.board.names.extend(bytes(step.request[1]) for step in sent if b"LAYERS" in step.request)
                sent_s = time.time()
                wire.send([step.request for step in sent])
                while sent:
                    reply = wire.reply()
                    step = sent.pop(0)
                    self._answered(step, reply, (sent_s, time.time()), life)
        except CONNECTION_ERRORS as error:
            if not life.stop.wait(1.0):
                raise ViolationError(f"the connection broke while the server should be alive: {error!r}") from error
            now_s = time.time()
            self.unanswered = [(step, (sent_s, now_s)) for step in sent]
        finally:
            if wire is not None:
                wire.close()

    def _answered(self, step: Step, reply: Any, window: Window, life: Life) -> None:
        before, self.state = self.state, judge(step, reply, self.state, window, tight=life.tight)
        if refusal(reply) or isinstance(reply, Refused):
            gone = {name: unit for name, unit in before.items() if name not in self.state}
            self.doubtful = {**self.doubtful, **gone}
        elif step.effects:
            self.doubtful = {}  # the log is written in order
        self.acknowledged += 1
        if not refusal(reply):
            self.rows += step.rows

    def _leave(self, wire: Wire, life: Life) -> Wire:
        """Close the connection that fills prefixes, and see them go."""
        wire.close()
        pending = [unit for unit in self.state.values() if unit.pending]
        until = time.monotonic() + LEAVING_S
        with Wire(life.port) as other:
            for unit in pending:
                while not refusal(other.call(b"V.INFO", unit.name + SUFFIXES[0])):
                    if time.monotonic() > until:
                        raise ViolationError(f"{unit.name.decode()} is pending, its client left {LEAVING_S:.0f} s ago")
                    time.sleep(0.001)
                self.state = without(self.state, unit.name)
        return Wire(life.port)


def watch(life: Life, rng: random.Random, board: Board) -> int:
    """Fetch others' prefixes while they are filled, replaced and dropped: each must be whole and of one making.

    Returns the number of rows compared. Raises ViolationError.
    """
    compared = 0
    try:
        with Wire(life.port) as wire:
            while not life.stop.wait(rng.uniform(0, WATCH_PAUSE_S)):
                if not board.names:
                    continue
                name = board.names[rng.randrange(len(board.names))]
                reply = wire.call(b"KV.PREFIX.FETCH", name, b"AS", b"native")
                if isinstance(reply, Refused) and "no prefix" in reply:
                    continue
                compared += inspect(name, reply)
    except CONNECTION_ERRORS as error:
        if not life.stop.wait(1.0):
            raise ViolationError(f"the connection broke while the server should be alive: {error!r}") from error
    return compared


def inspect(name: bytes, reply: Any) -> int:
    """Check a fetched prefix without knowing what it should be; returns its rows. Raises ViolationError."""
    if not isinstance(reply, list) or not reply or len(reply) % 2:
        raise ViolationError(f"FETCH of {name.decode()}: {reply!r:.200}")
    shape = SHAPES[int(name[-1:])]
    makings: set[tuple[tuple[bytes, int, int], ...]] = set()
    count = 0
    for index, blob in enumerate(reply):
        layer, side = divmod(index, 2)
        width = shape.width(side, layer)
        if not width:
            if blob:
                raise ViolationError(f"FETCH of {name.decode()}: a side without data has {len(blob)} bytes")
            continue
        if len(blob) % width:
            raise ViolationError(f"FETCH of {name.decode()}: {len(blob)} bytes are no whole number of rows of {width}")
        heads, sound = rows.read(blob, width)
        right = (heads["side"] == side) & (heads["layer"] == layer) & sound
        if not right.all():
            wrong = heads[~right][0]
            raise ViolationError(f"FETCH of {name.decode()}: {'KV'[side]} layer {layer} has the row {rows.show(wrong)}")
        makings.add(tuple((bytes(head["name"]), int(head["row"]), int(head["version"])) for head in heads))
        count += len(heads)
    if len(makings) != 1:
        raise ViolationError(f"FETCH of {name.decode()}: its layers are of {len(makings)} different makings")
    _one_making(name, makings.pop())
    return count


def _one_making(name: bytes, found: tuple[tuple[bytes, int, int], ...]) -> None:
    """The rows of each segment begin at 0, ascend by one and are of one version; the last segment is the prefix."""
    before: tuple[bytes, int, int] | None = None
    for each in found:
        follows = before is not None and each == (before[0], before[1] + 1, before[2])
        begins = each[1] == 0 and (before is None or before[0] != each[0])
        if not (follows or begins):
            raise ViolationError(f"FETCH of {name.decode()}: row {each} stands behind {before}")
        before = each
    if before is None or before[0] != name:
        raise ViolationError(f"FETCH of {name.decode()}: it ends with {before}")


@attrs.define(eq=False)
class Saver:
    """Asks for snapshots, with and without a path."""

    asked: threading.Event = attrs.field(factory=threading.Event)
    """Set while a snapshot is being taken."""
    durations_s: deque[float] = attrs.field(factory=lambda: deque(maxlen=20))
    saved: set[bytes] = attrs.field(factory=set)
    """Paths whose snapshot was acknowledged."""
    taken: int = 0

    def run(self, life: Life, rng: random.Random, pause_s: float) -> None:
        """Take snapshots until the server dies, with pauses of up to `pause_s`. Raises ViolationError."""
        try:
            with Wire(life.port) as wire:
                while not life.stop.wait(rng.uniform(0, pause_s)):
                    path = rng.choice((None, None, *BACKUPS))
                    began_s = time.monotonic()
                    self.asked.set()
                    reply = wire.call(b"KV.PREFIX.SAVE", *([path] if path else []))
                    if reply != "OK":
                        raise ViolationError(f"KV.PREFIX.SAVE: expected OK, got {reply!r:.200}")
                    self.asked.clear()
                    self.taken += 1
                    self.durations_s.append(time.monotonic() - began_s)
                    if path:
                        self.saved.add(path)
        except CONNECTION_ERRORS as error:
            if not life.stop.wait(1.0):
                raise ViolationError(f"the connection broke while the server should be alive: {error!r}") from error
