"""Random commands of several clients against a plain model: rows in dictionaries, the order of use in a list.

After each step everything that can be read is compared, the ledger is recounted, a refused command is checked to have
changed nothing, and at the end the journal's records are replayed on an empty store.
"""

from __future__ import annotations

import struct
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pion.config import Config
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.vstore import VStore
from pion.testing import FakeClock
from tests.commands.kv_support import make_kv, now, recount, snapshot

MAX_SESSIONS = 9
NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
SIDS = st.sampled_from(["s", "t", *(f"{ns}_p{side}" for ns in "abcde" for side in "kv")])
CLIENTS = st.integers(0, 1)


class Prefix:
    """The model of one unit: a prefix, or a lone session (`lone`), whose rows are those of side "k"."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sides: dict[str, dict[tuple[int, int], bytes]] = {}
        self.registered = False
        self.declared: tuple[int, int] | None = None
        self.owner: int | None = None
        self.parent: Prefix | None = None
        self.offset = 0
        self.pinned = False
        self.expires_s = 0.0
        self.hashes: list[int] | None = None
        self.meta: bytes | None = None

    @property
    def visible(self) -> bool:
        return len(self.sides) == 2 and self.owner is None

    @property
    def tokens(self) -> int:
        if self.declared:
            return self.declared[1]
        return sum(layer == 0 for layer, _ in self.sides.get("k", {}))

    def chain(self) -> list[Prefix]:
        return [*(self.parent.chain() if self.parent else []), self]

    def all_hashes(self) -> list[int] | None:
        if self.hashes is None or self.parent is None:
            return self.hashes
        inherited = self.parent.all_hashes()
        blocks = self.offset // 2
        if not blocks:
            return self.hashes
        if inherited is None or len(inherited) < blocks:
            return None
        return inherited[:blocks] + self.hashes


def split(sid: str) -> tuple[str, str]:
    return (sid[:-3], sid[-1]) if sid.endswith(("_pk", "_pv")) else (sid, "k")


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.harness = make_kv(self.clock, max_sessions=MAX_SESSIONS)
        self.clients = [self.harness, self.harness.client()]
        self.store = self.harness.services.vstore
        self.units: dict[str, Prefix] = {}
        self.used: list[Prefix] = []
        self.counter = 0

    # Running commands.

    def call(self, client: int, *args: Any) -> Any:
        before = snapshot(self.store), self.store.statistics(), self.store.ledger.statistics()
        receipt = self.harness.services.receipt.rows(worker=0, uptime_s=0)
        reply = now(self.clients[client].call(*args))
        if isinstance(reply, str) and reply.startswith("-"):
            assert before == (snapshot(self.store), self.store.statistics(), self.store.ledger.statistics())
            assert receipt == self.harness.services.receipt.rows(worker=0, uptime_s=0)
        return reply

    # The model's own rules.

    def children(self, unit: Prefix) -> list[Prefix]:
        return [other for other in self.units.values() if other.parent is unit]

    def touch(self, unit: Prefix) -> None:
        for part in reversed(unit.chain()):
            if part in self.used:
                self.used.remove(part)
            self.used.append(part)

    def sessions(self) -> int:
        return sum(len(unit.sides) for unit in self.units.values())

    def room(self, need: int, protected: list[Prefix]) -> bool:
        excess = self.sessions() + need - MAX_SESSIONS
        victims: list[Prefix] = []
        while need > 0 and excess > 0:
            for unit in self.used:
                kept = unit in protected or unit in victims or unit.pinned or unit.owner is not None
                if not kept and all(child in victims for child in self.children(unit)):
                    break
            else:
                break
            victims.append(unit)
            excess -= len(unit.sides)
        if need > 0 and excess > 0:
            return False
        for unit in victims:
            self.remove(unit)
        return True

    def remove(self, unit: Prefix) -> int:
        count = sum(self.remove(child) for child in self.children(unit))
        del self.units[unit.name]
        self.used.remove(unit)
        return count + 1

    def find(self, sid: str) -> tuple[Prefix, str] | None:
        name, side = split(sid)
        unit = self.units.get(name)
        return (unit, side) if unit is not None and side in unit.sides else None

    # Commands.

    @rule(sid=SIDS)
    def create(self, sid: str) -> None:
        reply = self.call(0, "V.CREATE", sid, 1, "VQUANT", "fp32")
        name, side = split(sid)
        unit = self.units.get(name)
        if unit is None or side not in unit.sides:
            if not self.room(1, [unit] if unit else []):
                assert reply.startswith("-OOM")
                return
            unit = self.units.setdefault(name, Prefix(name))
            unit.sides[side] = {}
        assert reply == "OK"
        if unit in self.used:
            self.used.remove(unit)
        self.used.append(unit)

    @rule(sid=SIDS, client=CLIENTS)
    def other_shape(self, sid: str, client: int) -> None:
        if self.find(sid):
            assert self.call(client, "V.CREATE", sid, 2, "VQUANT", "fp32").startswith("-EXISTS")

    @rule(sid=SIDS, layer=st.integers(0, 1), start=st.integers(0, 4), count=st.integers(0, 4), client=CLIENTS)
    def store_rows(self, sid: str, layer: int, start: int, count: int, client: int) -> None:
        self.counter += 1
        rows = [struct.pack("<f", self.counter + index / 8) for index in range(count)]
        reply = self.call(client, "V.STOREBATCH", sid, layer, start, count, b"".join(rows))
        found = self.find(sid)
        if found is None:
            assert reply.startswith("-ERR no session")
            return
        unit, side = found
        if unit.declared and unit.owner is None:
            assert reply.startswith("-EXISTS")
        elif unit.owner is not None and unit.owner != client:
            assert reply.startswith("-BUSY")
        elif count and unit.declared and (layer >= unit.declared[0] or start + count > unit.declared[1]):
            assert "declared" in reply
        else:
            assert reply == "OK"
            if count:
                unit.sides[side].update({(layer, start + index): row for index, row in enumerate(rows)})
                self.touch(unit)
            self.complete(unit)

    def complete(self, unit: Prefix) -> None:
        if unit.owner is None or unit.declared is None:
            return
        layers, tokens = unit.declared
        if all(len(rows) == layers * tokens for rows in unit.sides.values()):
            unit.owner = None
            self.touch(unit)

    @rule(
        ns=NAMES,
        client=CLIENTS,
        declared=st.none() | st.tuples(st.integers(0, 2), st.integers(0, 4)),
        parent=st.none() | st.tuples(NAMES, st.integers(0, 5)),
        hashes=st.none() | st.lists(st.integers(0, 2), max_size=3),
        expires=st.none() | st.integers(1, 20),
        pin=st.booleans(),
    )
    def register(self, ns, client, declared, parent, hashes, expires, pin) -> None:
        args: list[Any] = ["KV.PREFIX.REGISTER", ns, 1, "fp32"]
        args += ["LAYERS", declared[0], "TOKENS", declared[1]] if declared else []
        args += ["PARENT", *parent] if parent else []
        args += ["BLOCKS", 2, len(hashes), struct.pack(f"<{len(hashes)}Q", *hashes)] if hashes is not None else []
        args += ["EX", expires] if expires else []
        args += ["PIN"] if pin else []
        reply = self.call(client, *args)
        unit = self.units.get(ns)
        if unit is not None and unit.owner is not None and unit.owner != client:
            assert reply == "PENDING"
            return
        if self.refuses(ns, unit, declared, parent, hashes):
            assert reply.startswith(("-ERR", "-EXISTS")), reply
            return
        above = self.units[parent[0]] if parent else None
        need = 2 - (len(unit.sides) if unit else 0)
        if not self.room(need, [*([unit] if unit else []), *(above.chain() if above else [])]):
            assert reply.startswith("-OOM")
            return
        assert reply == "OK", reply
        unit = self.units.setdefault(ns, Prefix(ns))
        for side in "kv":
            unit.sides.setdefault(side, {})
        unit.registered = True
        if above is not None and unit.parent is None:
            unit.parent, unit.offset = above, parent[1]
        unit.pinned |= pin
        if expires:
            unit.expires_s = self.clock.wall_s() + expires
        if hashes is not None:
            unit.hashes = hashes
        if declared and unit.declared is None:
            unit.declared, unit.owner = declared, client
            self.complete(unit)
        self.touch(unit)

    def refuses(self, ns, unit, declared, parent, hashes) -> bool:
        if declared and unit is not None:
            if unit.declared is not None and unit.declared != declared:
                return True
            outside = [
                (layer, row)
                for rows in unit.sides.values()
                for layer, row in rows
                if layer >= declared[0] or row >= declared[1]
            ]
            if unit.declared is None and (self.children(unit) or outside):
                return True
            holds = unit.declared is not None and unit.owner is None
            if holds and hashes is not None and hashes != unit.hashes:
                return True
        elif unit is not None and unit.declared and unit.owner is None and hashes not in (None, unit.hashes):
            return True
        if declared:
            above = unit.parent if unit is not None else None
            if above is None and parent:
                above = self.units.get(parent[0])
            if above is not None and any(not p.declared or p.declared[0] != declared[0] for p in above.chain()):
                return True
        offset = unit.offset if unit else 0
        if parent:
            above = self.units.get(parent[0])
            if parent[0] == ns:
                return True
            offset = parent[1]
            if unit is not None and unit.registered:
                if unit.parent is None or (unit.parent.name, unit.offset) != parent:
                    return True
            elif (
                above is None
                or not above.visible
                or offset > above.offset + above.tokens
                or (unit is not None and (unit in above.chain() or self.children(unit)))
            ):
                return True
        return hashes is not None and bool(declared) and len(hashes) > (offset + declared[1]) // 2 - offset // 2

    @rule(ns=NAMES, cascade=st.booleans())
    def drop(self, ns: str, cascade: bool) -> None:
        reply = self.call(0, "KV.PREFIX.DROP", *(["CASCADE"] if cascade else []), ns)
        unit = self.units.get(ns)
        if unit is None or len(unit.sides) < 2:
            assert reply == 0
        elif self.children(unit) and not cascade:
            assert reply.startswith("-ERR")
        else:
            assert reply == self.remove(unit)

    @rule(sids=st.lists(SIDS, min_size=1, max_size=3))
    def drop_sessions(self, sids: list[str]) -> None:
        reply = self.call(0, "V.DROP", *sids)
        found = [found for sid in dict.fromkeys(sids) if (found := self.find(sid)) is not None]
        if any(unit.registered or self.children(unit) for unit, _ in found):
            assert reply.startswith("-ERR")
            return
        assert reply == len(found)
        for unit, side in found:
            del unit.sides[side]
            unit.pinned = False
            if not unit.sides:
                self.remove(unit)

    @rule(ns=NAMES, verb=st.sampled_from(["PIN", "UNPIN", "PERSIST"]))
    def mark(self, ns: str, verb: str) -> None:
        reply = self.call(0, f"KV.PREFIX.{verb}", ns)
        unit = self.units.get(ns)
        if unit is None or len(unit.sides) < 2:
            assert reply == 0
        elif verb == "PERSIST":
            assert reply == bool(unit.expires_s)
            unit.expires_s = 0.0
        else:
            assert reply == (unit.pinned != (verb == "PIN"))
            unit.pinned = verb == "PIN"

    @rule(ns=NAMES)
    def lookup(self, ns: str) -> None:
        unit = self.units.get(ns)
        hit = unit is not None and unit.visible
        assert self.call(1, "KV.PREFIX.LOOKUP", ns) == ("HIT" if hit else "MISS")
        if hit:
            self.touch(unit)

    @rule(seconds=st.integers(1, 12))
    def advance(self, seconds: int) -> None:
        self.clock.advance(seconds)
        for unit in list(self.units.values()):
            if unit.name in self.units and unit.expires_s and unit.expires_s <= self.clock.wall_s():
                self.remove(unit)
        self.store.drop_expired(100)

    @rule(client=CLIENTS)
    def disconnect(self, client: int) -> None:
        self.clients[client].disconnect()
        self.clients[client] = self.harness.client()
        for unit in list(self.units.values()):
            if unit.owner == client:
                self.remove(unit)

    @rule(hashes=st.lists(st.integers(0, 2), max_size=5))
    def match(self, hashes: list[int]) -> None:
        reply = self.call(0, "KV.PREFIX.MATCH", len(hashes), struct.pack(f"<{len(hashes)}Q", *hashes), "SIZE", 2)
        best = 0
        shared: dict[str, int] = {}
        for unit in self.units.values():
            chain = unit.all_hashes() if unit.visible else None
            count = 0
            while chain is not None and count < min(len(chain), len(hashes)) and chain[count] == hashes[count]:
                count += 1
            shared[unit.name] = count
            best = max(best, count)
        if not best:
            assert reply is None
        else:
            assert reply[1:] == [best, 2 * best]
            assert shared[reply[0].decode()] == best

    # What must hold after every step.

    @invariant()
    def sessions_read_back(self) -> None:
        sids = {
            name if name in "st" else f"{name}_p{side}": (unit, rows)
            for name, unit in self.units.items()
            for side, rows in unit.sides.items()
        }
        cursor, listed = b"0", []
        while True:
            cursor, page = now(self.harness.call("V.LIST", "CURSOR", cursor, "COUNT", 3))
            listed += page
            if cursor == b"0":
                break
        assert sorted(listed) == sorted(sid.encode() for sid in sids)
        assert snapshot_rows(self.store) == {sid: rows for sid, (_, rows) in sids.items() if rows}

    @invariant()
    def books_balance(self) -> None:
        ledger = self.store.ledger.statistics()
        charged, payload, sessions = recount(self.store)
        assert (ledger.charged_bytes, ledger.payload_bytes) == (charged, payload)
        assert ledger.sending_bytes == 0
        statistics = self.store.statistics()
        assert statistics.sessions == sessions == self.sessions() <= MAX_SESSIONS
        assert statistics.prefixes == sum(unit.visible for unit in self.units.values())
        assert statistics.pending == sum(unit.owner is not None for unit in self.units.values())
        assert statistics.prefix_tokens == sum(
            sum(layer == 0 for layer, _ in unit.sides.get("k", {}))
            for unit in self.units.values()
            if unit.name not in "st" and unit.owner is None
        )

    @invariant()
    def order_of_use(self) -> None:
        candidates = [
            unit.name for unit in self.used if not unit.pinned and unit.owner is None and not self.children(unit)
        ]
        assert [unit.name.decode() for unit in self.store.policy.victims()] == candidates

    @precondition(lambda self: self.units)
    @rule(data=st.data())
    def fetch_prefix(self, data: st.DataObject) -> None:
        """Not an invariant, since a fetch is a use."""
        unit = self.units[data.draw(st.sampled_from(sorted(self.units)))]
        if unit.name in "st":
            return
        reply = self.call(0, "KV.PREFIX.FETCH", unit.name, "AS", "native")
        if not unit.visible:
            assert reply.startswith("-ERR no prefix")
            return
        layers = (
            unit.declared[0]
            if unit.declared
            else max(
                part.declared[0]
                if part.declared
                else max((layer + 1 for rows in part.sides.values() for layer, _ in rows), default=0)
                for part in unit.chain()
            )
        )
        wanted: list[bytes] = []
        for layer in range(layers):
            for side in "kv":
                for position in range(unit.offset + unit.tokens):
                    holder = next(part for part in reversed(unit.chain()) if part.offset <= position)
                    row = holder.sides[side].get((layer, position - holder.offset))
                    if row is None:
                        assert reply.startswith("-ERR no row")
                        return
                    wanted.append(row)
        assert b"".join(reply) == b"".join(wanted), (unit.name, reply)
        self.touch(unit)

    def teardown(self) -> None:
        fresh = VStore(Config(max_sessions=MAX_SESSIONS), self.clock, NullJournal(), Ledger())
        for change in self.store.journal.changes:
            fresh.replay(change)
        assert snapshot(fresh) == snapshot(self.store)
        assert fresh.ledger.charged_bytes == self.store.ledger.charged_bytes
        fresh.finish_replay()
        assert not fresh.pending
        assert {name for _, name in snapshot(fresh)} == {
            unit.name.encode() for unit in self.units.values() if all(part.owner is None for part in unit.chain())
        }


def snapshot_rows(store: VStore) -> dict[str, dict[tuple[int, int], bytes]]:
    found = {}
    for (lone, name), unit in snapshot(store).items():
        for side, letter in enumerate("kv"):
            if unit[f"rows{side}"]:
                found[name.decode() if lone else f"{name.decode()}_p{letter}"] = unit[f"rows{side}"]
    return found


Machine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
TestKvMachine = Machine.TestCase
