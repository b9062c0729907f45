"""Budgets of owners: they bind their own prefixes only, and what is counted is what is held."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion.errors import OutOfMemoryError
from pion.storage.changes import CreateSession, DropPrefix, DropSession, Register, SetPin, StoreRows
from pion.storage.formats import get_format
from pion.storage.quota import Quota, QuotaBook
from pion.storage.room import memory_bytes
from pion.storage.schema import Schema
from pion.storage.vstore import VStore
from tests.commands.kv_support import make_kv

SCHEMA = Schema.uniform(get_format(b"fp32"), 64)
ROW = 256


def make(**limits: int) -> tuple[VStore, dict[bytes, Quota]]:
    """A store whose names belong to the owner before the first `|`."""
    store = make_kv().services.vstore
    quotas = {name.encode(): Quota(name.encode(), limit) for name, limit in limits.items()}
    store.quotas = QuotaBook(lambda name: quotas.get(name.partition(b"|")[0]))
    return store, quotas


def fill(store: VStore, name: bytes, rows: int) -> None:
    store.commit(Register(ns=name, k_schema=SCHEMA, v_schema=SCHEMA))
    store.commit(StoreRows(name + b"_pk", 0, 0, rows, bytes(rows * ROW)))


def test_an_owner_makes_room_with_what_is_its_own() -> None:
    store, quotas = make(a=40_000, b=1_000_000)
    for number in range(5):
        fill(store, b"b|%d" % number, 30)
        fill(store, b"a|%d" % number, 50)  # 12,800 bytes and a little
        assert quotas[b"a"].used_bytes <= 40_000
    assert sorted(store.prefixes) == [b"a|3", b"a|4", *(b"b|%d" % number for number in range(5))]


def test_when_nothing_of_the_owner_may_go_it_is_refused_and_nothing_changes() -> None:
    store, quotas = make(a=20_000)
    fill(store, b"nobody", 1000)
    fill(store, b"a|1", 50)
    store.commit(SetPin(b"a|1", True))
    before = quotas[b"a"].used_bytes, store.ledger.charged_bytes
    store.commit(Register(ns=b"a|2", k_schema=SCHEMA, v_schema=SCHEMA))
    with pytest.raises(OutOfMemoryError, match="of the 20000 bytes of 'a' are in use"):
        store.commit(StoreRows(b"a|2_pk", 0, 0, 50, bytes(50 * ROW)))
    store.commit(DropPrefix(b"a|2"))
    assert (quotas[b"a"].used_bytes, store.ledger.charged_bytes) == before
    fill(store, b"nobody else", 1000)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["create", "register", "store", "pin", "drop"]), st.sampled_from(b"ab"), st.integers(0, 3)
    ),
    max_size=40,
)


@settings(deadline=None)
@given(STEPS)
def test_what_is_used_is_what_a_recount_gives(steps: list[tuple[str, int, int]]) -> None:
    store, quotas = make(a=30_000, b=60_000)
    for what, letter, number in steps:
        name = b"%c|%d" % (letter, number)
        try:
            if what == "create":
                store.commit(CreateSession(name, SCHEMA))
                store.commit(StoreRows(name, 0, number, 20, bytes(20 * ROW)))
            elif what == "register":
                store.commit(Register(ns=name, k_schema=SCHEMA, v_schema=SCHEMA, meta=bytes(number)))
            elif what == "store" and name in store.prefixes:
                store.commit(StoreRows(name + b"_pv", number, 7, 30, bytes(30 * ROW)))
            elif what == "pin" and name in store.prefixes:
                store.commit(SetPin(name, bool(number % 2)))
            elif what == "drop" and name in store.prefixes:
                store.commit(DropPrefix(name))
            elif what == "drop" and name in store.lone:
                store.commit(DropSession(name))
        except OutOfMemoryError:
            pass
        for owner, quota in quotas.items():
            units = [unit for unit in store.units() if unit.name.startswith(owner + b"|")]
            assert quota.used_bytes == sum(map(memory_bytes, units))
            assert quota.used_bytes <= quota.limit_bytes
