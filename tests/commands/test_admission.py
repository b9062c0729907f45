"""--admission: what REGISTER defers, what counts as a miss, and what is never deferred."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from pion.client import Registered, aio
from pion.commands.kvprefix_register import ADMISSION
from pion.config import Config
from pion.storage.admission import COLUMNS, ROWS, Admission
from pion.testing import FakeClock, Harness, make_harness, running_server
from tests.commands.kv_support import call, fill, lookup, make_kv, pack, plain, snapshot

REGISTER = ("KV.PREFIX.REGISTER", "a", 1, "fp32")
DECLARED = (*REGISTER, "LAYERS", 1, "TOKENS", 2)
FORMS = [
    REGISTER,
    DECLARED,
    ("KV.PREFIX.REGISTER.SCHEMA", "a", "K", "fp32@1*2", "V", "fp16@3*2"),
    (*REGISTER, "META", "m", "EX", 50, "BLOCKS", 1, 1, pack(7), "PREFILL_MS", 5),
]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def kv(clock) -> Harness:
    return make_kv(clock, admission=2)


def sketch(kv: Harness) -> Admission:
    found: Admission = kv.services.state[ADMISSION]
    return found


def miss(kv: Harness, ns: str, times: int = 2) -> None:
    for _ in range(times):
        assert lookup(kv, ns) == "MISS"


def counts(kv: Harness) -> tuple[int, int, int]:
    found = sketch(kv).statistics()
    return found.misses, found.deferred, found.admitted


def state(kv: Harness) -> Any:
    store = kv.services.vstore
    return snapshot(store), store.statistics(), store.ledger.statistics(), len(store.journal.changes)


def test_without_it_nothing_is_deferred_and_there_is_no_sketch() -> None:
    kv = make_kv()
    miss(kv, "b")
    assert call(kv, *REGISTER) == "OK"
    assert ADMISSION not in kv.services.state
    assert shown(kv) == (0, 0, 0)


def shown(kv: Harness) -> tuple[int, ...]:
    """What KV.PREFIX.INFO says of it."""
    lines = dict(line.split(":") for line in call(kv, "KV.PREFIX.INFO").splitlines())
    return tuple(int(lines[f"admission_{field}"]) for field in ("deferred", "admitted", "sketch_bytes"))


@pytest.mark.parametrize("form", FORMS, ids=["plain", "declared", "schema", "options"])
def test_a_new_namespace_is_deferred_until_it_has_missed_twice(kv, form) -> None:
    before = state(kv)
    assert call(kv, *form) == "DEFERRED"
    miss(kv, "a", 1)
    assert call(kv, *form) == "DEFERRED"
    assert call(kv, *form) == "DEFERRED", "registering is no lookup"
    assert state(kv) == before
    assert call(kv, "V.LIST") == [b"0", []]
    assert call(kv, "V.STORE", "a_pk", 0, 0, b"xxxx") == "-ERR no session 'a_pk'"
    miss(kv, "a", 1)
    assert call(kv, *form) == "OK"
    assert counts(kv) == (2, 3, 1)
    assert shown(kv) == (3, 1, ROWS * COLUMNS)
    assert lookup(kv, "a") == ("MISS" if form is DECLARED else "HIT")


@pytest.mark.parametrize("threshold", [1, 3, 15])
def test_the_threshold(threshold) -> None:
    kv = make_kv(admission=threshold)
    miss(kv, "a", threshold - 1)
    assert call(kv, *REGISTER) == "DEFERRED"
    miss(kv, "a", 1)
    assert call(kv, *REGISTER) == "OK"


def test_misses_of_other_clients_count_and_those_of_other_names_do_not(kv) -> None:
    miss(kv, "b", 9)
    miss(kv.client(), "a", 1)
    assert call(kv, *REGISTER) == "DEFERRED"
    miss(kv.client(), "a", 1)
    assert call(kv, *REGISTER) == "OK"


def test_only_lookups_that_miss_count(kv) -> None:
    other = kv.client()
    for question in [
        ("KV.PREFIX.META", "a"),
        ("KV.PREFIX.CHAIN", "a"),
        ("KV.PREFIX.TTL", "a"),
        ("KV.PREFIX.FETCH", "a"),
        ("KV.PREFIX.MATCH", 1, pack(7)),
        ("KV.PREFIX.LOOKUP", "a", "NOSUCH", 1),
        ("KV.PREFIX.LOOKUP", "a", "WAIT"),
        ("KV.PREFIX.LOOKUP", ""),
        ("V.FETCH", "a_pk", 0, "RANGE", 0, 1),
    ]:
        call(kv, *question)
        call(other, *question)
    assert call(kv, *REGISTER) == "DEFERRED"
    miss(kv, "a")
    assert call(kv, *REGISTER) == "OK"
    assert lookup(kv, "a") == "HIT"
    assert sketch(kv).misses(b"a") == 2


def test_what_is_there_is_never_deferred(kv) -> None:
    miss(kv, "a")
    assert call(kv, *DECLARED) == "OK"
    kv.services.state[ADMISSION] = Admission(2)  # nothing is remembered
    assert call(kv, *DECLARED) == "OK", "pending"
    assert call(kv.client(), *DECLARED) == "PENDING"
    fill(kv, "a", 0, 2)
    assert call(kv, *REGISTER, "EX", 9) == "OK", "complete"
    assert call(kv, "KV.PREFIX.TTL", "a") == 9
    assert call(kv, "KV.PREFIX.REGISTER", "a", 2, "fp32").startswith("-EXISTS")
    assert call(kv, "V.CREATE", "half_pk", 1, "VQUANT", "fp32") == "OK"
    assert call(kv, "KV.PREFIX.REGISTER", "half", 1, "fp32") == "OK", "one side was made by hand"
    assert counts(kv) == (0, 0, 0)


def test_sessions_made_by_hand_are_not_asked_about(kv) -> None:
    for side in "kv":
        assert call(kv, "V.CREATE", f"a_p{side}", 1, "VQUANT", "fp32") == "OK"
    assert lookup(kv, "a") == "HIT"


@pytest.mark.parametrize("how", ["disconnect", "stall", "drop", "expire", "no memory"])
def test_what_the_server_dropped_comes_back_without_more_misses(kv, clock, how) -> None:
    """The misses are still remembered: a prefill that took longer than --pending-timeout is not lost."""
    owner = kv.client()
    miss(owner, "a")
    assert call(owner, *DECLARED, "EX", 1000) == "OK"
    store = kv.services.vstore
    if how == "disconnect":
        owner.disconnect()
        owner = kv.client()
    elif how == "stall":
        clock.advance(61)
        assert store.drop_stalled() == 1
    elif how == "drop":
        assert call(kv, "KV.PREFIX.DROP", "a") == 1
    elif how == "expire":
        clock.advance(1000)
    else:
        kv.services.refused[0](owner.context.session, [b"V.STORE", b"a_pk"])
    assert call(owner, *DECLARED) == "OK"
    assert counts(kv) == (2, 0, 2)


def test_evicted_prefixes_come_back_at_once_while_they_are_remembered() -> None:
    kv = make_kv(admission=2, max_sessions=2)
    for ns in "ab":
        miss(kv, ns)
        assert call(kv, "KV.PREFIX.REGISTER", ns, 1, "fp32") == "OK"
    assert lookup(kv, "a") == "MISS"
    assert call(kv, *REGISTER) == "OK"


def test_pin_is_a_wish_to_keep_and_not_deferred(kv) -> None:
    assert call(kv, *REGISTER, "PIN") == "OK"
    assert lookup(kv, "a") == "HIT"
    assert ADMISSION not in kv.services.state, "the sketch was not asked"


def test_a_mistake_is_an_error_and_not_deferred(kv) -> None:
    for mistake, error in [
        (("KV.PREFIX.REGISTER", "a", 1, "fp17"), "-ERR unknown format"),
        ((*REGISTER, "LAYERS", 1), "-ERR LAYERS and TOKENS must be given together"),
        ((*REGISTER, "PARENT", "nosuch", 0), "-ERR PARENT: no prefix 'nosuch'"),
        ((*REGISTER, "PARENT", "a", 0), "-ERR PARENT must be another prefix"),
        ((*DECLARED, "BLOCKS", 1, 3, pack(1, 2, 3)), "-ERR BLOCKS count must be at most 2"),
    ]:
        assert call(kv, *mistake).startswith(error)
    assert ADMISSION not in kv.services.state


def test_each_segment_of_a_chain_is_admitted_for_itself(kv) -> None:
    miss(kv, "a")
    assert call(kv, *DECLARED) == "OK"
    fill(kv, "a", 0, 2)
    longer = ("KV.PREFIX.REGISTER", "b", 1, "fp32", "LAYERS", 1, "TOKENS", 1, "PARENT", "a", 2)
    assert call(kv, *longer) == "DEFERRED"
    miss(kv, "b")
    assert call(kv, *longer) == "OK"


async def test_a_wait_that_ends_as_a_miss_counts_once(autojump_clock) -> None:
    kv = make_kv(admission=3)
    owner, waiter = kv.client(), kv.client()
    miss(kv, "a", 3)
    assert call(owner, *DECLARED) == "OK"
    before = sketch(kv).misses(b"a")
    assert plain(await waiter.call("KV.PREFIX.LOOKUP", "a", "WAIT", 1000)) == "MISS"
    assert sketch(kv).misses(b"a") == before + 1
    answers: list[object] = []

    async def wait() -> None:
        answers.append(plain(await waiter.call("KV.PREFIX.LOOKUP", "a", "WAIT", 60_000)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        fill(owner, "a", 0, 2)
    assert answers == ["HIT"]
    assert sketch(kv).misses(b"a") == before + 1


async def test_a_cancelled_wait_counts_nothing(autojump_clock) -> None:
    kv = make_kv(admission=3)
    miss(kv, "a", 3)
    assert call(kv.client(), *DECLARED) == "OK"
    with trio.move_on_after(1) as scope:
        await kv.call("KV.PREFIX.LOOKUP", "a", "WAIT", 60_000)
    assert scope.cancelled_caught
    assert sketch(kv).misses(b"a") == 3


async def test_in_a_transaction() -> None:
    kv = make_harness(Config(admission=2))
    assert call(kv, "MULTI") == "OK"
    for command in [("KV.PREFIX.LOOKUP", "a"), REGISTER, ("KV.PREFIX.LOOKUP", "a"), REGISTER]:
        assert call(kv, *command) == "QUEUED"
    # On a slow machine it lets others have their turn in between.
    assert plain(await kv.call("EXEC")) == ["MISS", "DEFERRED", "MISS", "OK"]


def test_the_receipt_counts_misses_as_ever(kv) -> None:
    miss(kv, "a", 3)
    assert kv.services.receipt.kvprefix_misses == 3


async def test_a_start_admits_all_that_is_in_the_log(tmp_path) -> None:
    async with (
        running_server(Config(kvcache=True), directory=tmp_path) as server,
        aio.PionClient(port=server.port) as one,
    ):
        assert await one.prefix_register("a", 1, "fp32") is Registered.OK
    again = Config(kvcache=True, admission=15)
    async with running_server(again, directory=tmp_path) as server, aio.PionClient(port=server.port) as one:
        assert await one.prefix_lookup("a") is True
        assert await one.prefix_register("a", 1, "fp32") is Registered.OK
        assert await one.prefix_register("b", 1, "fp32") is Registered.DEFERRED
