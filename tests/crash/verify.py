"""Compares what a server holds of one client's units with the states that it may be in."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs

from pion.replies import Buffer
from tests.crash import steps
from tests.crash.model import BLOCK_SIZE, Kind, State, Unit, chain, expiry, may_be_gone, settled, with_unit, without
from tests.crash.steps import Question, refusal
from tests.crash.wire import ViolationError, Wire

AT_ONCE: Final = 64
"""Requests sent before their replies are read: small ones, so neither side can block the other."""

ALL_NAMES: Final = b"10000"
"""COUNT of the lists: more than there are."""

Request = tuple[Buffer, ...]


@attrs.define(eq=False)
class Asker:
    """Asks a server that nobody changes, each thing once."""

    wire: Wire
    began_s: float = attrs.field(factory=time.time)
    """No reply is older."""
    _known: dict[Request, Any] = attrs.field(factory=dict)

    def ask(self, requests: Iterable[Request]) -> list[Any]:
        """The replies, in order."""
        requests = list(requests)
        new = [request for request in dict.fromkeys(requests) if request not in self._known]
        for at in range(0, len(new), AT_ONCE):
            some = new[at : at + AT_ONCE]
            self.wire.send(some)
            for request in some:
                self._known[request] = self.wire.reply()
        return [self._known[request] for request in requests]

    def one(self, *request: Buffer) -> Any:
        """One reply."""
        return self.ask([request])[0]


@attrs.frozen
class Outcome:
    """A client's units after a restart."""

    state: State
    rows: int
    """Rows compared."""
    evicted: int
    """Sessions that must have been evicted: they are not there, and nothing else explains it."""


def find_state(wire: Wire, prefix: bytes, candidates: Sequence[State], *, tight: bool) -> Outcome:
    """Which of the states the server is in, with what was evicted or has expired taken out. Raises ViolationError."""
    asker = Asker(wire)
    problems: dict[str, list[str]] = {}
    for number, candidate in enumerate(candidates):
        try:
            return _compare(asker, prefix, settled(candidate), tight=tight)
        except ViolationError as problem:
            problems.setdefault(str(problem), []).append(str(number))
    if len(candidates) == 1:
        raise ViolationError(next(iter(problems)))
    texts = [f"with {', '.join(numbers)}: {problem}" for problem, numbers in problems.items()]
    raise ViolationError(f"however many of the {len(candidates) - 1} unanswered steps were done: {'; '.join(texts)}")


def _compare(asker: Asker, prefix: bytes, state: State, *, tight: bool) -> Outcome:
    sids = _listed(asker, b"V.LIST", prefix)
    prefixes = _listed(asker, b"KV.PREFIX.LIST", prefix)
    unknown = sids - {sid for unit in state.values() for sid in unit.sids.values()}
    unknown |= prefixes - {unit.name for unit in state.values() if unit.is_prefix}
    if unknown:
        raise ViolationError(f"{_text(unknown)} should not be there")
    questions = {unit: _questions(state, unit) for unit in state.values()}
    asker.ask(request for unit in state.values() for request in _about(unit))
    asker.ask(request for each in questions.values() for request, _, _ in each)
    found: State = {}
    gone: set[bytes] = set()
    compared = evicted = 0
    for unit, its_questions in questions.items():
        missing, present = _presence(asker, unit, sids, prefixes)
        if missing:
            over = time.time() >= expiry(state, unit)[0]
            if not may_be_gone(state, unit.name, time.time(), tight=tight):
                raise ViolationError(f"{_text(missing)} is lost")
            if present and not over:
                raise ViolationError(f"{_text(missing)} is lost, but {_text(present)} is there")
            gone.add(unit.name)
            evicted += 0 if over else len(unit.sides)
            continue
        if asker.began_s > expiry(state, unit)[1]:
            raise ViolationError(
                f"{unit.name.decode()} should have expired {asker.began_s - expiry(state, unit)[1]:.3f} s ago"
            )
        try:
            _check_about(asker, state, unit)
            for request, expected, count in its_questions:
                if wrong := steps.compare(asker.one(*request), expected, unit):
                    raise ViolationError(wrong)
                compared += count
        except ViolationError:
            if time.time() < expiry(state, unit)[0]:
                raise
            gone.add(unit.name)  # it went while we asked
            continue
        found = with_unit(found, attrs.evolve(unit, safe=unit.pinned))
    for name in gone:
        left = [each for each in found.values() if state[name] in chain(state, each)]
        for unit in left:
            if time.time() < expiry(state, unit)[0]:
                raise ViolationError(f"{unit.name.decode()} is there, but not {name.decode()}, which it continues")
            found = without(found, unit.name)
    return Outcome(found, compared, evicted)


def _about(unit: Unit) -> list[Request]:
    """What is asked about a unit, its rows and MATCH excepted."""
    words = (b"LOOKUP", b"META", b"BLOCKS", b"CHAIN", b"TTL") if unit.is_prefix else ()
    return [*((b"V.INFO", sid) for sid in unit.sids.values()), *((b"KV.PREFIX." + word, unit.name) for word in words)]


def _listed(asker: Asker, command: bytes, prefix: bytes) -> set[bytes]:
    cursor, names = asker.one(command, b"MATCH", prefix + b"*", b"COUNT", ALL_NAMES)
    if cursor != b"0":
        raise ViolationError(f"{command.decode()} did not end")
    return set(names)


def _text(names: Iterable[bytes]) -> str:
    return ", ".join(sorted(name.decode() for name in names))


def _questions(state: State, unit: Unit) -> list[Question]:
    return [steps.whole(state, unit)] if unit.kind is Kind.DECLARED else steps.stored_runs(unit)


def _presence(asker: Asker, unit: Unit, sids: set[bytes], prefixes: set[bytes]) -> tuple[set[bytes], set[bytes]]:
    """What of a unit is not there, and what is."""
    missing, present = set(), set()
    for sid in unit.sids.values():
        (present if sid in sids and not refusal(asker.one(b"V.INFO", sid)) else missing).add(sid)
    if unit.is_prefix:
        (present if unit.name in prefixes and asker.one(b"KV.PREFIX.LOOKUP", unit.name) == "HIT" else missing).add(
            unit.name
        )
    return missing, present


def _check_about(asker: Asker, state: State, unit: Unit) -> None:
    """Everything about a unit but its rows. Raises ViolationError."""
    declared, registered = unit.kind is Kind.DECLARED, unit.kind in (Kind.DECLARED, Kind.OPEN)
    for side, sid in unit.sids.items():
        reply = asker.one(b"V.INFO", sid)
        if not isinstance(reply, list):
            raise ViolationError(f"V.INFO {sid.decode()}: {reply!r:.200}")
        about = dict(zip(reply[::2], reply[1::2], strict=True))
        rows, nbytes = unit.held(side)
        wanted = {
            b"rows": rows,
            b"bytes": nbytes,
            b"state": b"complete" if declared else b"open",
            b"registered": int(registered),
            b"pinned": int(unit.pinned),
        }
        _same(f"V.INFO {sid.decode()}", wanted, {field: about[field] for field in wanted})
    if not unit.is_prefix:
        return
    name = unit.name
    _same(f"META of {name.decode()}", unit.meta, asker.one(b"KV.PREFIX.META", name))
    _same(f"BLOCKS of {name.decode()}", steps.hashes_reply(unit), asker.one(b"KV.PREFIX.BLOCKS", name))
    if declared:
        segments = [[part.name, part.offset, part.tokens] for part in chain(state, unit)]
        _same(f"CHAIN of {name.decode()}", segments, asker.one(b"KV.PREFIX.CHAIN", name))
    hashes = steps.chain_hashes(state, unit)
    if declared and unit.hashes and hashes:
        count = len(hashes) // 8
        found = asker.one(b"KV.PREFIX.MATCH", b"%d" % count, hashes, b"SIZE", b"%d" % BLOCK_SIZE)
        # A prefix that continues this one shares all of its blocks, too.
        ends = {name, *(each.name for each in state.values() if unit in chain(state, each))}
        if not isinstance(found, list) or found[0] not in ends or found[1:] != [count, count * BLOCK_SIZE]:
            raise ViolationError(f"MATCH of {name.decode()}: expected {count} blocks of it, got {found!r:.200}")
    ttl = asker.one(b"KV.PREFIX.TTL", name)
    if unit.expires is None:
        _same(f"TTL of {name.decode()}", -1, ttl)
    elif (
        not math.floor(unit.expires[0] - time.time() + 0.5) <= ttl <= math.floor(unit.expires[1] - asker.began_s + 0.5)
    ):
        raise ViolationError(
            f"TTL of {name.decode()}: {ttl} s, but it expires in {unit.expires[1] - asker.began_s:.3f} s"
        )


def _same(what: str, wanted: object, got: object) -> None:
    if wanted != got:
        raise ViolationError(f"{what}: expected {wanted!r:.200}, got {got!r:.200}")
