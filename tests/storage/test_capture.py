"""A snapshot shows one moment, whatever changes while it is taken, and what changes then can be replayed on top."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from pion.config import Config
from pion.errors import CommandError
from pion.storage.changes import (
    Change,
    CreateSession,
    Declaration,
    DropPrefix,
    DropSession,
    EvictSession,
    Register,
    SetExpiry,
    SetPin,
    StoreRows,
)
from pion.storage.durable import Captured
from pion.storage.formats import get_format
from pion.storage.journal import NullJournal
from pion.storage.ledger import Ledger
from pion.storage.region import Region
from pion.storage.schema import Schema
from pion.storage.vstore import VStore
from pion.storage.vstore_log import VStoreLog
from pion.storage.vstore_records import pack
from pion.testing import FakeClock
from tests.storage.damage_support import state

SHAPE = Schema.uniform(get_format(b"fp32"), 1)
NAMES = (b"a", b"b", b"c")
"""Of prefixes and of lone sessions: those are two things, also when they have one name."""


def make_store() -> tuple[VStore, VStoreLog]:
    store = VStore(Config(), FakeClock(), NullJournal(), Ledger())
    return store, VStoreLog(store)


def some_change(random: Random) -> Change:
    name, other = random.sample(NAMES, 2)
    sid = name + random.choice((b"", b"_pk", b"_pv"))
    declaration = random.choice((None, Declaration(1, 1), Declaration(2, 2)))
    parent = random.choice((None, other))
    return random.choice(
        (
            StoreRows(sid, random.randrange(2), random.randrange(2), 1, random.randbytes(4)),
            StoreRows(sid, random.randrange(2), 0, 2, random.randbytes(8)),
            CreateSession(sid, SHAPE),
            Register(ns=name, k_schema=SHAPE, v_schema=SHAPE, declaration=declaration, parent=parent),
            random.choice((DropSession(sid), DropPrefix(name), EvictSession(name), SetPin(name, True))),
            SetExpiry(name, 5e9),
        )
    )


def applies(store: VStore, change: Change) -> bool:
    """Whether a command would make the change."""
    try:
        store.check(change)
    except CommandError:
        return False
    if isinstance(change, DropPrefix):
        return change.ns in store.prefixes
    if isinstance(change, EvictSession):
        return change.sid in store.lone
    if isinstance(change, SetExpiry):
        return store.prefixes[change.ns].registered
    if isinstance(change, SetPin):
        return store.prefixes[change.ns].sessions == 2
    return not isinstance(change, DropSession) or store.held_session(change.sid) is not None


def make(store: VStore, random: Random, count: int) -> list[Change]:
    """Some changes that can be made."""
    made: list[Change] = []
    while len(made) < count:
        change = some_change(random)
        if applies(store, change):
            store.commit(change)
            made.append(change)
    return made


def replay(log: VStoreLog, meta: bytes, data: bytes) -> None:
    region = None
    if data:
        region = Region(None, 0, len(data), 0, 0)  # type: ignore[arg-type]
        region.content = data
    log.replay(meta, region)


def replay_snapshot(log: VStoreLog, captured: Iterator[Captured]) -> None:
    for each in captured:
        replay(log, each.meta, b"".join(bytes(part) for part in each.parts))


@pytest.mark.parametrize("seed", range(60))
def test_a_capture_shows_the_moment_when_it_began(seed: int) -> None:
    random = Random(seed)
    store, log = make_store()
    make(store, random, 25)
    then = state(store)
    capture = log.capture()
    taken: list[Captured] = []
    later: list[Change] = []
    while (each := next(capture, None)) is not None:
        taken.append(each)
        if random.random() < 0.5:
            later += make(store, random, random.randrange(3))
    capture.close()  # type: ignore[attr-defined]
    later += make(store, random, 3)
    copy, copy_log = make_store()
    replay_snapshot(copy_log, iter(taken))
    assert state(copy) == then
    for change in later:
        replay(copy_log, pack(change), bytes(change.data) if isinstance(change, StoreRows) else b"")  # type: ignore[arg-type]
    assert state(copy) == state(store)


def test_a_lone_session_goes_that_is_called_like_a_prefix() -> None:
    store, log = make_store()
    store.commit(Register(ns=b"x", k_schema=SHAPE, v_schema=SHAPE))
    store.commit(CreateSession(b"x", SHAPE))
    capture = log.capture()
    store.commit(DropSession(b"x"))
    copy, copy_log = make_store()
    replay_snapshot(copy_log, capture)
    assert state(copy).keys() == {(True, b"x"), (False, b"x")}
    replay(copy_log, pack(DropSession(b"x")), b"")
    assert state(copy) == state(store)
