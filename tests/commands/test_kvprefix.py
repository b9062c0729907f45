"""The KV.PREFIX commands one by one: declared prefixes, expiry, pins, receipts, refusals."""

from __future__ import annotations

import struct

import attrs
import pytest
import trio

from pion.storage.changes import Reason
from pion.testing import FakeClock, Harness
from tests.commands.kv_support import call, declare, fill, lookup, make_kv, pack, plain, rows, snapshot


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def kv(clock) -> Harness:
    return make_kv(clock)


def test_drop_does_not_walk_all_prefixes(kv) -> None:
    class Unwalked(dict):
        def __iter__(self):
            raise AssertionError("a million of them would stop the event loop")

        keys = values = items = __iter__

    for ns in ("a", "b", "c"):
        declare(kv, ns, 1)
    store = kv.services.vstore
    store.prefixes = Unwalked(store.prefixes)
    assert call(kv, "KV.PREFIX.DROP", "a", "nobody") == 1
    assert len(store.prefixes) == 2


class TestRegister:
    def test_undeclared_is_a_hit_at_once_and_grows(self, kv) -> None:
        assert lookup(kv, "a") == "MISS"
        assert call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32") == "OK"
        assert lookup(kv, "a") == "HIT"
        assert call(kv, "KV.PREFIX.FETCH", "a") == []
        fill(kv, "a", 0, 3)
        fill(kv, "a", 3, 5)
        assert call(kv, "KV.PREFIX.FETCH", "a") == [rows("k", 0, 5), rows("v", 0, 5)]
        assert call(kv, "V.FETCH", "a_pk", 0, "RANGE", 0, 5) == rows("k", 0, 5)

    def test_declared_is_a_hit_once_everything_is_there(self, kv) -> None:
        reader = kv.client()
        assert call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 2, "TOKENS", 3, "META", "m") == "OK"
        for layer in range(2):
            for side in "kv":
                for client in (kv, reader):
                    assert lookup(client, "a") == "MISS"
                    assert call(client, "KV.PREFIX.FETCH", "a") == "-ERR no prefix 'a'"
                    assert call(client, "KV.PREFIX.META", "a") is None
                assert call(reader, "V.FETCH", "a_pk", 0, "RANGE", 0, 1).startswith("-BUSY")
                call(kv, "V.STOREBATCH", f"a_p{side}", layer, 0, 3, rows(side, 0, 3))
        assert lookup(reader, "a") == "HIT"
        assert call(reader, "KV.PREFIX.META", "a") == b"m"
        assert call(reader, "KV.PREFIX.FETCH", "a") == [rows("k", 0, 3), rows("v", 0, 3)] * 2
        for client in (kv, reader):
            assert call(client, "V.STORE", "a_pk", 0, 0, b"xxxx").startswith("-EXISTS prefix 'a' is complete")

    def test_pending_belongs_to_its_connection(self, kv) -> None:
        other = kv.client()
        assert call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 1, "TOKENS", 2) == "OK"
        assert call(other, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 1, "TOKENS", 2) == "PENDING"
        assert call(other, "KV.PREFIX.REGISTER", "a", 1, "fp32") == "PENDING"
        assert call(other, "KV.PREFIX.REGISTER", "a", 2, "fp32").startswith("-EXISTS")
        assert call(other, "V.STORE", "a_pk", 0, 0, b"xxxx").startswith("-BUSY another connection is filling 'a'")
        assert call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 1, "TOKENS", 2) == "OK"
        assert call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 1, "TOKENS", 3).startswith("-EXISTS")
        assert (
            call(kv, "V.STOREBATCH", "a_pk", 0, 1, 2, b"x" * 8)
            == "-ERR rows must be below the 2 TOKENS declared, got 2"
        )
        assert call(kv, "V.STORE", "a_pk", 1, 0, b"xxxx") == "-ERR layer must be below the 1 LAYERS declared, got 1"

    def test_pending_goes_with_its_connection(self, kv) -> None:
        owner = kv.client()
        declare(owner, "done", 1)
        call(owner, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 1, "TOKENS", 2)
        call(owner, "V.STORE", "a_pk", 0, 0, b"xxxx")
        owner.disconnect()
        assert call(kv, "V.FETCH", "a_pk", 0, 0) == "-ERR no session 'a_pk'"
        assert lookup(kv, "done") == "HIT"
        assert kv.services.vstore.dropped[Reason.ABANDONED] == 1
        assert call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 1, "TOKENS", 2) == "OK"

    def test_pending_without_progress_is_dropped(self, kv, clock) -> None:
        call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 1, "TOKENS", 9)
        for token in range(4):
            clock.advance(59)
            assert kv.services.vstore.drop_stalled() == 0
            call(kv, "V.STORE", "a_pk", 0, token, b"xxxx")
        clock.advance(60)
        assert kv.services.vstore.drop_stalled() == 1
        assert call(kv, "V.STORE", "a_pk", 0, 0, b"xxxx").startswith("-ERR no session")

    def test_same_shape_updates_options_other_shape_is_refused(self, kv) -> None:
        again = ("KV.PREFIX.REGISTER", "a", 1, "fp32")
        assert call(kv, *again, "META", "one", "BLOCKS", 1, 1, pack(7)) == "OK"
        fill(kv, "a", 0, 2)
        assert call(kv, *again, "META", "two", "EX", 50, "PIN", "BLOCKS", 2, 1, pack(9)) == "OK"
        assert call(kv, "KV.PREFIX.META", "a") == b"two"
        assert call(kv, "KV.PREFIX.TTL", "a") == 50
        assert call(kv, "KV.PREFIX.PIN", "a") == 0
        assert call(kv, "KV.PREFIX.BLOCKS", "a") == struct.pack("<II", 2, 1) + pack(9)
        assert call(kv, "KV.PREFIX.MATCH", 1, pack(7)) is None
        assert call(kv, *again) == "OK"
        assert call(kv, "KV.PREFIX.META", "a") == b"two"
        assert call(kv, *again, "LAYERS", 1, "TOKENS", 2) == "OK"
        for change in [("LAYERS", 2, "TOKENS", 2), ("LAYERS", 1, "TOKENS", 3)]:
            assert call(kv, *again, *change).startswith("-EXISTS prefix 'a' exists with another declaration")
        assert call(kv, "KV.PREFIX.REGISTER", "a", 2, "fp32").startswith("-EXISTS prefix 'a' exists with another shape")
        assert call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp16").startswith("-EXISTS")
        assert call(kv, "KV.PREFIX.FETCH", "a") == [rows("k", 0, 2), rows("v", 0, 2)]

    def test_what_a_complete_prefix_holds_is_not_relabelled(self, kv) -> None:
        """While it is pending its owner may still say what it will be."""
        again = ("KV.PREFIX.REGISTER", "a", 1, "fp32")
        assert call(kv, *again, "LAYERS", 1, "TOKENS", 2) == "OK"
        assert call(kv, *again, "META", "zero", "BLOCKS", 2, 1, pack(8)) == "OK"
        assert call(kv, *again, "META", "one", "BLOCKS", 1, 1, pack(7)) == "OK"
        fill(kv, "a", 0, 2)
        declare(kv, "plain", 1)
        before = snapshot(kv.services.vstore), kv.services.vstore.ledger.statistics()
        for change in [("META", "two"), ("META", ""), ("BLOCKS", 1, 1, pack(9)), ("BLOCKS", 2, 1, pack(7))]:
            for ns in ("a", "plain"):
                reply = call(kv, "KV.PREFIX.REGISTER", ns, 1, "fp32", *change, "PIN")
                assert reply == f"-EXISTS prefix '{ns}' is complete and its {change[0]} can't be changed"
        assert (snapshot(kv.services.vstore), kv.services.vstore.ledger.statistics()) == before
        assert call(kv, *again, "META", "one", "BLOCKS", 1, 1, pack(7), "PIN", "EX", 5) == "OK"
        assert call(kv, "KV.PREFIX.TTL", "a") == 5
        assert call(kv, "KV.PREFIX.MATCH", 1, pack(7)) == [b"a", 1, 1]

    def test_states_are_refused(self, kv) -> None:
        """Nothing can store them yet, so the prefix would never be complete."""
        reply = call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 0, "TOKENS", 5, "STATES", 2)
        assert reply == "-ERR STATES must be 0: this version lacks the SSM.PREFIX family, which stores states"
        assert call(kv, "V.LIST") == [b"0", []]
        assert call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 0, "TOKENS", 5, "STATES", 0) == "OK"

    def test_a_refused_payload_drops_what_was_pending(self, kv) -> None:
        other = kv.client()
        store = kv.services.vstore
        declare(kv, "done", 1)
        call(kv, "V.CREATE", "s", 1)
        for ns in ("a", "b"):
            assert call(kv, "KV.PREFIX.REGISTER", ns, 1, "fp32", "LAYERS", 1, "TOKENS", 2) == "OK"
        (refused,) = kv.services.refused
        before = snapshot(store)
        refused(kv.context.session, [b"V.STORE"])
        for sid in (b"s", b"done_pk", b"x_pk"):
            refused(kv.context.session, [b"V.STORE", sid])
        refused(kv.context.session, [b"SET", b"a_pk"])
        refused(other.context.session, [b"V.STOREBATCH", b"a_pk"])
        assert snapshot(store) == before
        refused(kv.context.session, [b"v.storebatch", b"a_pv"])
        assert call(kv, "V.STORE", "a_pk", 0, 0, b"xxxx") == "-ERR no session 'a_pk'"
        assert call(other, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 1, "TOKENS", 2) == "OK"
        assert call(kv, "V.STORE", "b_pk", 0, 0, b"xxxx") == "OK"
        assert store.dropped[Reason.ABANDONED] == 1

    def test_declaring_what_is_there(self, kv) -> None:
        call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32")
        fill(kv, "a", 0, 2)
        again = ("KV.PREFIX.REGISTER", "a", 1, "fp32")
        assert call(kv, *again, "LAYERS", 1, "TOKENS", 1).startswith("-EXISTS prefix 'a' holds rows outside")
        assert call(kv, *again, "LAYERS", 1, "TOKENS", 3) == "OK"
        assert lookup(kv, "a") == "MISS"
        fill(kv, "a", 2, 3)
        assert lookup(kv, "a") == "HIT"
        assert call(kv, "V.STORE", "a_pk", 0, 0, b"xxxx").startswith("-EXISTS")

    def test_nothing_to_store_is_complete_at_once(self, kv) -> None:
        assert call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 0, "TOKENS", 5) == "OK"
        assert lookup(kv, "a") == "HIT"
        assert kv.services.receipt.kvprefix_tokens_served == 5

    def test_sides_made_by_hand_are_a_prefix(self, kv) -> None:
        call(kv, "V.CREATE", "a_pk", 1, "VQUANT", "fp32")
        assert lookup(kv, "a") == "MISS"
        assert call(kv, "KV.PREFIX.LIST") == [b"0", []]
        call(kv, "V.CREATE", "a_pv", "SCHEMA", "fp32@1*1,fp16@2*1")
        fill(kv, "a", 0, 2)
        assert lookup(kv, "a") == "HIT"
        assert call(kv, "KV.PREFIX.LIST") == [b"0", [b"a"]]
        assert call(kv, "KV.PREFIX.FETCH", "a") == [rows("k", 0, 2), rows("v", 0, 2)]
        assert call(kv, "V.DROP", "a_pv") == 1
        assert lookup(kv, "a") == "MISS"
        assert call(kv, "V.LIST") == [b"0", [b"a_pk"]]

    def test_one_side_made_by_hand_is_no_prefix(self, kv) -> None:
        call(kv, "V.CREATE", "a_pk", 1, "VQUANT", "fp32")
        assert call(kv, "KV.PREFIX.TTL", "a") == -2
        for verb in ("PIN", "UNPIN", "PERSIST", "DROP"):
            assert call(kv, f"KV.PREFIX.{verb}", "a") == 0
        call(kv, "V.CREATE", "a_pv", 1, "VQUANT", "fp32")
        assert call(kv, "KV.PREFIX.TTL", "a") == -1
        assert call(kv, "KV.PREFIX.PIN", "a") == 1
        assert call(kv, "V.DROP", "a_pk") == 1
        call(kv, "V.CREATE", "a_pk", 1, "VQUANT", "fp32")
        assert call(kv, "KV.PREFIX.UNPIN", "a") == 0

    def test_a_registered_side_is_dropped_with_its_prefix_only(self, kv) -> None:
        declare(kv, "a", 1)
        call(kv, "V.CREATE", "s", 1)
        assert call(kv, "V.DROP", "s", "a_pv").startswith("-ERR session 'a_pv' belongs to a registered prefix")
        assert call(kv, "V.INFO", "s") is not None
        assert call(kv, "KV.PREFIX.DROP", "a", "nobody", "a") == 1
        assert call(kv, "V.LIST") == [b"0", [b"s"]]

    def test_schema_with_different_widths(self, kv) -> None:
        """The shape of a multi-head latent cache: K 512 wide, V 64, and a side without data."""
        assert (
            call(
                kv,
                "KV.PREFIX.REGISTER.SCHEMA",
                "mla",
                "K",
                "fp16@512*2",
                "v",
                "fp16@64*1,fp16@0*1",
                "LAYERS",
                2,
                "TOKENS",
                3,
            )
            == "OK"
        )
        data = {("k", 0): bytes(3072), ("k", 1): b"\1" * 3072, ("v", 0): b"\2" * 384}
        for (side, layer), blob in data.items():
            assert lookup(kv, "mla") == "MISS"
            assert call(kv, "V.STOREBATCH", f"mla_p{side}", layer, 0, 3, "AS", "native", blob) == "OK"
        assert lookup(kv, "mla") == "HIT"
        assert call(kv, "KV.PREFIX.FETCH", "mla", "AS", "native") == [
            *(data[key] for key in (("k", 0), ("v", 0), ("k", 1))),
            b"",
        ]

    def test_a_name_of_4_kib_has_sides(self, kv) -> None:
        ns = "n" * 4096
        declare(kv, ns, 2)
        assert lookup(kv, ns) == "HIT"
        assert call(kv, "V.FETCH", f"{ns}_pv", 0, "RANGE", 0, 2) == rows("v", 0, 2)

    @pytest.mark.parametrize(
        "options",
        [
            ("LAYERS", "1"),
            ("TOKENS", "1"),
            ("STATES", "1"),
            ("LAYERS", "-1", "TOKENS", "1"),
            ("LAYERS", "65537", "TOKENS", "1"),
            ("LAYERS", "1", "TOKENS", "2147483648"),
            ("LAYERS", "1", "TOKENS", "x"),
            ("LAYERS", "1", "LAYERS", "1", "TOKENS", "1"),
            ("LAYERS",),
            ("BLOCKS", "64", "1"),
            ("BLOCKS", "0", "1", pack(1)),
            ("BLOCKS", "4294967296", "1", pack(1)),
            ("BLOCKS", "64", "2", pack(1)),
            ("BLOCKS", "64", "1", pack(1)[:-1]),
            ("BLOCKS", "64", "1", pack(1) + b"x"),
            ("BLOCKS", "64", "-1", b""),
            ("BLOCKS", "64", "131073", bytes(8 * 131_073)),
            ("LAYERS", "8193", "TOKENS", "1"),
            ("STATES", "0"),
            ("LAYERS", "1", "TOKENS", "1", "STATES", "1"),
            ("BLOCKS", "2", "3", pack(1, 2, 3), "LAYERS", "1", "TOKENS", "5"),
            ("PREFILL_MS", "-1"),
            ("PREFILL_MS", "nan"),
            ("PREFILL_MS", "inf"),
            ("PREFILL_MS", "soon"),
            ("PREFILL_MS",),
            ("EX", "0"),
            ("EX", "-5"),
            ("EX", "1.5"),
            ("EX", "99999999999"),
            ("META",),
            ("META", b"x" * (16 * 1024 * 1024 + 1)),
            ("PARENT", "nobody"),
            ("PARENT", "nobody", "0"),
            ("PARENT", "a", "0"),
            ("PARENT", "", "0"),
            ("PARENT", "base", "-1"),
            ("PARENT", "base", "3"),
            ("PARENT", "base", "2147483647", "LAYERS", "1", "TOKENS", "1"),
            ("PARENT", "pending", "0"),
            ("PARENT", "wide", "0"),
            ("FOREVER",),
            ("PIN", "PIN"),
        ],
    )
    def test_bad_options_register_nothing(self, kv, options) -> None:
        declare(kv, "base", 2)
        call(kv, "KV.PREFIX.REGISTER", "wide", 2, "fp32")
        call(kv, "KV.PREFIX.REGISTER", "pending", 1, "fp32", "LAYERS", 1, "TOKENS", 1)
        before = snapshot(kv.services.vstore), kv.services.vstore.statistics()
        reply = call(kv, "KV.PREFIX.REGISTER", "a", "1", "fp32", *options)
        assert reply.startswith("-ERR ")
        assert (snapshot(kv.services.vstore), kv.services.vstore.statistics()) == before

    @pytest.mark.parametrize(
        "args",
        [
            ("KV.PREFIX.REGISTER", "a", "1"),
            ("KV.PREFIX.REGISTER", "a", "0", "fp32"),
            ("KV.PREFIX.REGISTER", "a", "x", "fp32"),
            ("KV.PREFIX.REGISTER", "a", "1048577", "fp32"),
            ("KV.PREFIX.REGISTER", "a", "1", "fp31"),
            ("KV.PREFIX.REGISTER", "a", "16", "mlx4g32"),
            ("KV.PREFIX.REGISTER", "", "1", "fp32"),
            ("KV.PREFIX.REGISTER", "x" * 4097, "1", "fp32"),
            ("KV.PREFIX.REGISTER.SCHEMA", "a", "K", "fp16@1*1"),
            ("KV.PREFIX.REGISTER.SCHEMA", "a", "K", "fp16@1*1", "K", "fp16@1*1"),
            ("KV.PREFIX.REGISTER.SCHEMA", "a", "K", "fp16@1*1", "X", "fp16@1*1"),
            ("KV.PREFIX.REGISTER.SCHEMA", "a", "K", "fp16*1", "V", "fp16@1*1"),
            ("KV.PREFIX.REGISTER.SCHEMA", "a", "K", "fp16@1*1", "V", "fp16@1*2", "LAYERS", "2", "TOKENS", "1"),
        ],
    )
    def test_bad_shapes_register_nothing(self, kv, args) -> None:
        assert call(kv, *args).startswith("-ERR ")
        assert call(kv, "V.LIST") == [b"0", []]


class TestWait:
    async def test_wait_answers_when_the_prefix_completes(self, kv, autojump_clock) -> None:
        waiters = [kv.client() for _ in range(20)]
        answers: list[object] = []
        call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 1, "TOKENS", 2)

        async def wait(client: Harness) -> None:
            answers.append(plain(await client.call("KV.PREFIX.LOOKUP", "a", "WAIT", 60_000)))

        async with trio.open_nursery() as nursery:
            for client in waiters:
                nursery.start_soon(wait, client)
            await trio.testing.wait_all_tasks_blocked()
            fill(kv, "a", 0, 1)
            await trio.testing.wait_all_tasks_blocked()
            assert answers == []
            assert kv.services.receipt.kvprefix_misses == 0
            fill(kv, "a", 1, 2)
        assert answers == ["HIT"] * 20
        assert trio.current_time() < autojump_clock.current_time() + 1
        assert kv.services.receipt.kvprefix_hits == 20

    @pytest.mark.parametrize("how", ["drop", "disconnect", "stall"])
    async def test_wait_answers_when_the_prefix_is_dropped(self, kv, clock, autojump_clock, how) -> None:
        owner, waiter = kv.client(), kv.client()
        call(owner, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 1, "TOKENS", 2)
        answers: list[object] = []

        async def wait() -> None:
            answers.append(plain(await waiter.call("KV.PREFIX.LOOKUP", "a", "WAIT", 600_000)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            if how == "drop":
                assert call(kv, "KV.PREFIX.DROP", "a") == 1
            elif how == "disconnect":
                owner.disconnect()
            else:
                clock.advance(61)
                kv.services.vstore.drop_stalled()
            await trio.testing.wait_all_tasks_blocked()
            assert answers == ["MISS"]
        assert kv.services.receipt.kvprefix_misses == 1

    async def test_wait_ends_with_its_time(self, kv, autojump_clock) -> None:
        call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 1, "TOKENS", 2)
        start = trio.current_time()
        assert plain(await kv.client().call("KV.PREFIX.LOOKUP", "a", "WAIT", 1500)) == "MISS"
        assert trio.current_time() - start == pytest.approx(1.5)
        pending = kv.services.vstore.prefixes[b"a"].pending
        assert pending is not None
        assert pending.waiters == []

    def test_no_wait_for_what_cannot_come(self, kv) -> None:
        assert lookup(kv, "nobody", "WAIT", 60_000) == "MISS"
        call(kv, "KV.PREFIX.REGISTER", "mine", 1, "fp32", "LAYERS", 1, "TOKENS", 2)
        assert lookup(kv, "mine", "WAIT", 60_000) == "MISS"

    async def test_a_cancelled_wait_leaves_nothing(self, kv, autojump_clock) -> None:
        call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "LAYERS", 1, "TOKENS", 2)
        with trio.move_on_after(1) as scope:
            await kv.client().call("KV.PREFIX.LOOKUP", "a", "WAIT", 60_000)
        assert scope.cancelled_caught
        pending = kv.services.vstore.prefixes[b"a"].pending
        assert pending is not None
        assert pending.waiters == []
        assert kv.services.receipt.kvprefix_misses == 0


class TestReceipt:
    def rows(self, kv) -> dict:
        return dict(kv.services.receipt.rows(worker=0, uptime_s=0))

    def test_hits_are_credited_by_the_rules(self, kv) -> None:
        declare(kv, "a", 10, "PREFILL_MS", "250.5")
        declare(kv, "b", 10)
        for ns, options, tokens, measured in [
            ("a", (), 10, 250.5),
            ("a", ("TOKENS", 10), 10, 250.5),
            ("a", ("TOKENS", 4), 4, None),
            ("a", ("TOKENS", 4, "PREFILL_MS", 100), 4, 100.0),
            ("a", ("PREFILL_MS", "0"), 10, 0.0),
            ("b", (), 10, None),
            ("b", ("tokens", 3), 3, None),
            ("b", ("prefill_ms", 7), 10, 7.0),
        ]:
            kv.services.receipt.reset()
            assert lookup(kv, ns, *options) == "HIT"
            found = self.rows(kv)
            assert found["kvprefix_hits"] == 1
            assert found["kvprefix_tokens_served"] == tokens
            assert found["kvprefix_hits_measured"] == (measured is not None)
            assert found["kvprefix_hits_estimated"] == (measured is None)
            seconds = tokens * 555e-6 if measured is None else measured / 1000
            assert found["prefill_seconds_avoided"] == pytest.approx(seconds)
            assert found["prefill_seconds_avoided_measured"] == pytest.approx(0 if measured is None else seconds)

    @pytest.mark.parametrize(
        "options",
        [
            ("TOKENS",),
            ("TOKENS", "-1"),
            ("TOKENS", "x"),
            ("TOKENS", "2147483648"),
            ("PREFILL_MS",),
            ("PREFILL_MS", "-1"),
            ("PREFILL_MS", "x"),
            ("WAIT", "-1"),
            ("WAIT", "600001"),
            ("WAIT",),
            ("SOON",),
            ("TOKENS", "1", "TOKENS", "1"),
        ],
    )
    def test_a_refused_lookup_records_nothing(self, kv, options) -> None:
        declare(kv, "a", 1)
        before = self.rows(kv)
        for ns in ("a", "nobody"):
            assert call(kv, "KV.PREFIX.LOOKUP", ns, *options).startswith("-ERR ")
        for ns in ("", "x" * 4097, memoryview(bytes(40_000))):
            assert call(kv, "KV.PREFIX.LOOKUP", ns).startswith("-ERR namespace must be 1 to 4096 bytes")
        assert self.rows(kv) == before

    def test_the_tokens_of_a_growing_prefix_are_those_at_hit_time(self, kv) -> None:
        call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32")
        fill(kv, "a", 0, 3)
        lookup(kv, "a")
        fill(kv, "a", 3, 7)
        lookup(kv, "a")
        assert self.rows(kv)["kvprefix_tokens_served"] == 10

    def test_fetched_bytes_count(self, kv) -> None:
        declare(kv, "a", 10, layers=2)
        call(kv, "KV.PREFIX.FETCH", "a")
        call(kv, "KV.PREFIX.FETCH", "a", "RANGE", 2, 4, "AS", "fp16")
        assert self.rows(kv)["kvprefix_bytes_served"] == 4 * 40 + 4 * 4
        assert kv.services.vstore.fetches == 2


class TestExpiryAndPins:
    def test_ttl_as_redis(self, kv, clock) -> None:
        assert call(kv, "KV.PREFIX.TTL", "a") == -2
        declare(kv, "a", 1)
        assert call(kv, "KV.PREFIX.TTL", "a") == -1
        call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "EX", 100)
        clock.advance(40)
        assert call(kv, "KV.PREFIX.TTL", "a") == 60
        assert call(kv, "KV.PREFIX.PERSIST", "a") == 1
        assert call(kv, "KV.PREFIX.PERSIST", "a") == 0
        assert call(kv, "KV.PREFIX.TTL", "a") == -1
        assert call(kv, "KV.PREFIX.PERSIST", "nobody") == 0

    @pytest.mark.parametrize("verb", ["DROP", "PIN", "PERSIST"])
    def test_time_that_passes_inside_a_command(self, kv, clock, monkeypatch, verb) -> None:
        """The root expires between two looks at the clock."""
        declare(kv, "root", 1, "EX", 5)
        declare(kv, "leaf", 1, "PARENT", "root", 1, "EX", 100)
        start, looks = clock.wall_s(), iter(range(100))
        monkeypatch.setattr(clock, "wall_s", lambda: start + 5 * (next(looks) > 0))
        assert call(kv, f"KV.PREFIX.{verb}", "leaf", *(["root"] if verb == "DROP" else [])) == int(verb != "DROP")

    def test_what_has_expired_goes_before_what_is_old(self, clock) -> None:
        kv = make_kv(clock, max_sessions=4)
        declare(kv, "old", 1)
        declare(kv, "over", 1, "EX", 5)
        clock.advance(5)
        declare(kv, "new", 1)
        assert [lookup(kv, ns) for ns in ("old", "over", "new")] == ["HIT", "MISS", "HIT"]
        assert kv.services.vstore.statistics().evicted == 0

    def test_a_parent_may_go_once_its_leaf_is_chosen(self) -> None:
        kv = make_kv(max_sessions=6)
        declare(kv, "root", 1)
        declare(kv, "leaf", 1, "PARENT", "root", 1)
        declare(kv, "late", 1, "PIN")
        call(kv, "CONFIG", "SET", "max-sessions", 4)
        kv.services.vstore.config = attrs.evolve(kv.services.config, max_sessions=4)
        assert call(kv, "KV.PREFIX.REGISTER", "new", 1, "fp32") == "OK"
        assert [lookup(kv, ns) for ns in ("root", "leaf", "late", "new")] == ["MISS", "MISS", "HIT", "HIT"]

    @pytest.mark.parametrize(
        ("args", "reply"),
        [
            (("KV.PREFIX.LOOKUP", "a"), "MISS"),
            (("KV.PREFIX.FETCH", "a"), "-ERR no prefix 'a'"),
            (("KV.PREFIX.META", "a"), None),
            (("KV.PREFIX.BLOCKS", "a"), "UNKNOWN"),
            (("KV.PREFIX.MEMBERSHIP", "a", 1, pack(1)), "UNKNOWN"),
            (("KV.PREFIX.MATCH", 1, pack(1)), None),
            (("KV.PREFIX.CHAIN", "a"), None),
            (("KV.PREFIX.TTL", "a"), -2),
            (("KV.PREFIX.PIN", "a"), 0),
            (("KV.PREFIX.DROP", "a"), 0),
            (("V.FETCH", "a_pk", 0, 0), "-ERR no session 'a_pk'"),
            (("V.STORE", "a_pk", 0, 0, b"xxxx"), "-ERR no session 'a_pk'"),
            (("V.DROP", "a_pk"), 0),
            (("KV.PREFIX.LIST",), [b"0", []]),
            (("V.LIST",), [b"0", []]),
        ],
    )
    def test_an_expired_prefix_is_gone_for_every_command(self, kv, clock, args, reply) -> None:
        declare(kv, "a", 1, "BLOCKS", 1, 1, pack(1), "META", "m", "EX", 5, "PIN")
        clock.advance(5)
        assert call(kv, *args) == reply

    def test_a_name_can_be_used_again_after_expiry(self, kv, clock) -> None:
        declare(kv, "a", 1, "EX", 5)
        clock.advance(6)
        assert call(kv, "V.CREATE", "a_pk", 7, "VQUANT", "fp16") == "OK"
        assert call(kv, "V.LIST") == [b"0", [b"a_pk"]]

    def test_the_wall_clock_decides(self, kv, clock) -> None:
        declare(kv, "a", 1, "EX", 100)
        clock.set_wall(clock.wall_s() + 1000)
        assert lookup(kv, "a") == "MISS"

    def test_pins(self, kv) -> None:
        kv = make_kv(max_sessions=4)
        declare(kv, "a", 1, "PIN")
        declare(kv, "b", 1)
        declare(kv, "c", 1)
        assert [lookup(kv, ns) for ns in "abc"] == ["HIT", "MISS", "HIT"]
        assert call(kv, "KV.PREFIX.PIN", "c") == 1
        before = snapshot(kv.services.vstore)
        assert call(kv, "KV.PREFIX.REGISTER", "d", 1, "fp32").startswith("-OOM 4 sessions are in use")
        assert call(kv, "V.CREATE", "s", 1).startswith("-OOM")
        assert snapshot(kv.services.vstore) == before
        assert call(kv, "KV.PREFIX.UNPIN", "a") == 1
        assert call(kv, "KV.PREFIX.UNPIN", "a") == 0
        assert call(kv, "KV.PREFIX.REGISTER", "d", 1, "fp32") == "OK"
        assert [lookup(kv, ns) for ns in "acd"] == ["MISS", "HIT", "HIT"]
        assert kv.services.vstore.statistics().evicted == 2


class TestListAndInfo:
    def test_list_shows_what_lookup_hits(self, kv) -> None:
        for index in range(30):
            declare(kv, f"n{index:02}", 1)
        call(kv, "KV.PREFIX.REGISTER", "n99", 1, "fp32", "LAYERS", 1, "TOKENS", 1)
        assert call(kv, "KV.PREFIX.LIST", "MATCH", "n1*", "COUNT", 100) == [
            b"0",
            [b"n%d" % index for index in range(10, 20)],
        ]
        cursor, page = call(kv, "KV.PREFIX.LIST", "COUNT", 28)
        assert len(page) == 28
        assert call(kv, "KV.PREFIX.LIST", "CURSOR", cursor) == [b"0", [b"n28", b"n29"]]

    def test_info_has_the_seeds_fields(self, kv) -> None:
        declare(kv, "a", 5, layers=2)
        call(kv, "V.CREATE", "s", 1)
        call(kv, "KV.PREFIX.FETCH", "a")
        call(kv, "KV.PREFIX.REGISTER", "p", 1, "fp32", "LAYERS", 1, "TOKENS", 1)
        text = call(kv, "KV.PREFIX.INFO")
        fields = dict(line.split(":") for line in text.split("\r\n") if line)
        assert text.endswith("\r\n")
        assert fields["registered_prefixes"] == "1"
        assert fields["total_prefix_tokens"] == "5"
        assert fields["vstore_sessions"] == "5"
        assert fields["vstore_total_fetches"] == "1"
        assert fields["vstore_bytes"] == "80"
        assert fields["wal_bytes"] == "0"
        assert int(fields["memory_charged_bytes"]) == kv.services.vstore.ledger.charged_bytes
        assert fields["pending_prefixes"] == "1"

    def test_tokens_of_pending_prefixes_are_not_counted_yet(self, kv) -> None:
        call(kv, "KV.PREFIX.REGISTER", "p", 1, "fp32", "LAYERS", 1, "TOKENS", 3)
        call(kv, "V.STOREBATCH", "p_pk", 0, 0, 3, rows("k", 0, 3))
        assert "total_prefix_tokens:0\r\n" in call(kv, "KV.PREFIX.INFO")
        call(kv, "V.STOREBATCH", "p_pv", 0, 0, 3, rows("v", 0, 3))
        assert "total_prefix_tokens:3\r\n" in call(kv, "KV.PREFIX.INFO")

    def test_fetch_options_in_any_order(self, kv) -> None:
        declare(kv, "a", 3)
        wanted = [rows("k", 1, 2), rows("v", 1, 2)]
        assert call(kv, "KV.PREFIX.FETCH", "a", "RANGE", 1, 2, "AS", "native") == wanted
        assert call(kv, "KV.PREFIX.FETCH", "a", "as", "native", "range", 1, 2) == wanted

    @pytest.mark.parametrize("verb", ["META", "CHAIN", "TTL", "PERSIST", "PIN", "UNPIN", "BLOCKS", "DROP", "FETCH"])
    def test_names_of_a_wrong_length_are_refused(self, kv, verb) -> None:
        for value in ("", "x" * 4097, memoryview(bytes(65536))):
            assert (
                call(kv, f"KV.PREFIX.{verb}", value) == f"-ERR namespace must be 1 to 4096 bytes long, got {len(value)}"
            )
        assert call(kv, f"KV.PREFIX.{verb}").startswith("-ERR wrong number of arguments for 'kv.prefix.")

    @pytest.mark.parametrize(
        "options",
        [
            ("RANGE", "0", "1", "RANGE", "0", "1"),
            ("AS", "fp32", "AS", "fp32"),
            ("RANGE", "0"),
            ("RANGE", "2", "1"),
            ("RANGE", "0", "1", "2"),
            ("AS",),
            ("AS", "x"),
            ("ALL",),
        ],
    )
    def test_bad_fetch_options(self, kv, options) -> None:
        declare(kv, "a", 3)
        assert call(kv, "KV.PREFIX.FETCH", "a", *options).startswith("-ERR ")
        assert kv.services.vstore.fetches == 0

    def test_tagged_names_never_meet(self, kv) -> None:
        """Fault class 28."""
        names = [b"a|b:c", b"a:b|c", b"a|b", b"a", b"a\0", b"a\r\n", b"a|", b"|a", b"\xff"]
        for index, ns in enumerate(names):
            call(kv, "KV.PREFIX.REGISTER", ns, 1, "fp32", "META", b"%d" % index)
        assert [call(kv, "KV.PREFIX.META", ns) for ns in names] == [b"%d" % index for index in range(len(names))]
        assert call(kv, "KV.PREFIX.LIST", "COUNT", 100)[1] == sorted(names)
