"""The unit that is looked up, touched, pinned, evicted and dropped: a prefix with its two sides, or a lone session.

A million of them must fit, so a unit is one slotted object: what few prefixes have (a pending registration, a parent, a
hash table) hangs off it only when it is there, and the two derived session names are never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal, TypeAlias

from pion.storage.block import Layer
from pion.storage.changes import Declaration
from pion.storage.ledger import PENDING_COST, SIDE_COST, Ledger
from pion.storage.placed import TierFile, placed_file
from pion.storage.prefix_index import BlockTable
from pion.storage.schema import Schema

Side: TypeAlias = Literal[0, 1]
K: Final = 0
V: Final = 1
SIDES: Final[tuple[Side, Side]] = (0, 1)
"""The K side and the V side."""
SUFFIXES: Final = (b"_pk", b"_pv")
"""What turns a namespace into the session ids of its two sides."""


def split_sid(sid: bytes) -> tuple[bytes, Side] | None:
    """The namespace and side that a session id belongs to; None for a lone session."""
    if len(sid) > 3:
        if sid.endswith(b"_pk"):
            return sid[:-3], 0
        if sid.endswith(b"_pv"):
            return sid[:-3], 1
    return None


class Rows:
    """The rows of one session: layer id -> `Layer`. Made when the first row comes."""

    __slots__ = ("_ledger", "layers")

    def __init__(self, ledger: Ledger) -> None:
        self.layers: dict[int, Layer] = {}
        self._ledger = ledger
        ledger.charge(SIDE_COST)

    def layer(self, index: int, row_bytes: int) -> Layer:
        """The layer of that id, made if need be."""
        found = self.layers.get(index)
        if found is None:
            found = self.layers[index] = Layer(row_bytes, self._ledger)
        return found

    def clear(self) -> None:
        """Take everything out; the rows must not be used afterwards."""
        for layer in self.layers.values():
            layer.clear()
        self._ledger.charge(-SIDE_COST)
        self.layers = {}


class Pending:
    """A declared prefix that is not complete yet."""

    __slots__ = ("missing_layers", "missing_states", "owner", "progress_s", "waiters")

    def __init__(self, owner: int, missing_layers: int, missing_states: int, now_s: float) -> None:
        self.owner = owner
        """Id of the connection that registered it and alone may store."""
        self.missing_layers = missing_layers
        """Pairs of side and layer that don't hold all declared rows yet."""
        self.missing_states = missing_states
        self.progress_s = now_s
        """Monotonic time of the last row."""
        self.waiters: list[Callable[[], None]] = []
        """Called once when it completes or is dropped."""

    @property
    def cost(self) -> int:
        """Bytes to charge for it."""
        return PENDING_COST

    @property
    def done(self) -> bool:
        """Whether nothing is missing."""
        return self.missing_layers <= 0 and self.missing_states <= 0

    def forget(self, waiter: Callable[[], None]) -> None:
        """A waiter gave up; nothing happens if it was told already."""
        if waiter in self.waiters:
            self.waiters.remove(waiter)

    def wake(self) -> None:
        """Tell everyone who waits."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter()


class Looked:
    """What LOOKUP reads of a unit.

    CPython lays out the slots of a base first: these six and the reference count lie in one line of the processor's
    cache. With a million units each further line would cost LOOKUP another trip to memory.
    """

    __slots__ = ("declaration", "expires_s", "k_rows", "parent", "partial", "prefill_ms")


class Unit(Looked):
    """One prefix (both sides share it), or one lone session (its schema and rows are in the K slots)."""

    __slots__ = (
        "children",
        "cold",
        "k_schema",
        "level",
        "lone",
        "meta",
        "name",
        "newer",
        "offset",
        "older",
        "pending",
        "pinned",
        "registered",
        "stamp",
        "standing",
        "table",
        "used_s",
        "uses",
        "v_rows",
        "v_schema",
        "warm_children",
        "worth",
    )

    def __init__(self, name: bytes, *, lone: bool) -> None:
        self.name = name
        self.lone = lone
        self.k_schema: Schema | None = None
        self.v_schema: Schema | None = None
        self.k_rows: Rows | None = None
        self.v_rows: Rows | None = None
        self.registered = False
        self.declaration: Declaration | None = None
        self.pending: Pending | None = None
        self.partial = True
        """Pending, or a side is missing: all that LOOKUP has to read. Kept right by `refresh`."""
        self.parent: Unit | None = None
        self.offset = 0
        self.children: dict[Unit, None] | None = None
        self.cold = False
        """All of its rows lie in files: it has left memory. See `pion.storage.room`."""
        self.warm_children = 0
        """Children for which `holds_parent` is true."""
        self.table: BlockTable | None = None
        self.meta: bytes | None = None
        self.prefill_ms: float | None = None
        self.expires_s = 0.0
        """Wall time; 0 is never."""
        self.pinned = False
        # The eviction policy's own.
        self.older: Unit | None = None
        self.newer: Unit | None = None
        self.stamp = 0
        self.standing = 0
        self.used_s = -1.0
        self.uses = 0
        self.level = 0
        self.worth = -1

    def refresh(self) -> None:
        """Set `partial` after a side or `pending` has changed."""
        self.partial = self.pending is not None or self.k_schema is None or self.v_schema is None

    def schema(self, side: Side) -> Schema | None:
        """The shape of one side, None if that session does not exist."""
        return self.v_schema if side else self.k_schema

    def rows(self, side: Side) -> Rows | None:
        """The rows of one side, None before the first."""
        return self.v_rows if side else self.k_rows

    def layer(self, side: Side, index: int) -> Layer | None:
        """One layer of one side, None before its first row."""
        rows = self.v_rows if side else self.k_rows
        return None if rows is None else rows.layers.get(index)

    def all_layers(self) -> Iterator[Layer]:
        """The layers of both sides that have rows."""
        for rows in (self.k_rows, self.v_rows):
            if rows is not None:
                yield from rows.layers.values()

    def tier_files(self) -> list[TierFile]:
        """The objects of the tier that some of its rows lie in."""
        memories = (block.memory for layer in self.all_layers() for block in layer.blocks)
        return [file for file in dict.fromkeys(map(placed_file, memories)) if file is not None]

    @property
    def placed(self) -> bool:
        """Whether the tier has all of its rows, in memory or not; False without rows."""
        found = False
        for layer in self.all_layers():
            for block in layer.blocks:
                if placed_file(block.memory) is None:
                    return False
                found = True
        return found

    @property
    def file_bytes(self) -> int:
        """Bytes of its rows that lie in files."""
        blocks = (block for layer in self.all_layers() for block in layer.blocks)
        return sum(memory.nbytes for memory in {block.memory for block in blocks} if memory.mapped)

    @property
    def in_files(self) -> bool:
        """Whether it has rows, and all of them lie in files."""
        found = False
        for layer in self.all_layers():
            for block in layer.blocks:
                if not block.memory.mapped:
                    return False
                found = True
        return found

    @property
    def sessions(self) -> int:
        """V sessions it counts as."""
        return (self.k_schema is not None) + (self.v_schema is not None)

    @property
    def complete(self) -> bool:
        """Declared and complete, hence immutable."""
        return self.declaration is not None and self.pending is None

    @property
    def tokens(self) -> int:
        """Its own tokens: as declared, else the rows of layer 0 on the K side."""
        if self.declaration is not None:
            return self.declaration.tokens
        rows = self.k_rows
        layer = None if rows is None else rows.layers.get(0)
        return 0 if layer is None else layer.count

    @property
    def end(self) -> int:
        """The position after its last token, in the whole text."""
        return self.offset + self.tokens

    @property
    def layer_count(self) -> int:
        """How many layers a fetch of the whole prefix has."""
        if self.declaration is not None:
            return self.declaration.layers
        ids = [max(rows.layers) for rows in (self.k_rows, self.v_rows) if rows is not None and rows.layers]
        return max(ids) + 1 if ids else 0

    @property
    def evictable(self) -> bool:
        """Whether it may make room for others: a warm one in memory, behind all warm or pinned ones that continue it; a
        cold one in the files, behind all that continue it.
        """
        if self.pinned or self.pending is not None:
            return False
        return not self.children if self.cold else not self.warm_children

    @property
    def holds_parent(self) -> bool:
        """Whether what it continues must stay because of it: it is in memory or pinned, or holds because of another."""
        return not self.cold or self.pinned or self.warm_children > 0

    def pass_on(self, held: bool, update: Callable[[Unit], None]) -> None:
        """Tell what it continues that `holds_parent`, which was `held`, may have changed; `update` is the policy's."""
        unit = self
        while unit.parent is not None and unit.holds_parent != held:
            parent = unit.parent
            parent_held = parent.holds_parent
            parent.warm_children += 1 if unit.holds_parent else -1
            update(parent)
            unit, held = parent, parent_held

    def chain(self) -> list[Unit]:
        """From the root to itself."""
        found = [self]
        while found[-1].parent is not None:
            found.append(found[-1].parent)
        found.reverse()
        return found

    def descendants(self) -> Iterator[Unit]:
        """Everything below it, parents before their children."""
        todo = list(self.children or ())
        while todo:
            unit = todo.pop()
            yield unit
            todo.extend(unit.children or ())
