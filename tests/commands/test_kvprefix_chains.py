"""The KV.PREFIX commands on chains of segments and on block hashes."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from pion.testing import FakeClock, Harness
from tests.commands.kv_support import call, declare, fill, lookup, make_kv, pack, plain, rows, snapshot

ROW = 4


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def kv(clock) -> Harness:
    return make_kv(clock)


class TestChains:
    @pytest.fixture
    def chain(self, kv) -> Harness:
        """root: 0-6; mid continues at 4; leaf at 8, behind mid's four; fork leaves root at 2."""
        declare(kv, "root", 6, "BLOCKS", 2, 3, pack(1, 2, 3))
        declare(kv, "mid", 4, "PARENT", "root", 4, "BLOCKS", 2, 2, pack(30, 40))
        declare(kv, "leaf", 3, "PARENT", "mid", 8, "BLOCKS", 2, 1, pack(50))
        declare(kv, "fork", 3, "PARENT", "root", 2, "BLOCKS", 2, 1, pack(20))
        return kv

    def test_fetch_counts_positions_in_the_whole_text(self, chain) -> None:
        for side, tag in enumerate("kv"):
            text = rows(tag, 0, 4) + rows(tag, 0, 4) + rows(tag, 0, 3)
            assert call(chain, "KV.PREFIX.FETCH", "leaf")[side] == text
            for start in range(12):
                for stop in range(start, 12):
                    part = call(chain, "KV.PREFIX.FETCH", "leaf", "RANGE", start, stop)
                    assert part[side] == text[ROW * start : ROW * stop]
            assert call(chain, "KV.PREFIX.FETCH", "fork")[side] == rows(tag, 0, 2) + rows(tag, 0, 3)
        assert call(chain, "KV.PREFIX.FETCH", "leaf", "RANGE", 0, 12).startswith("-ERR no row 3 in layer 0")

    def test_chain_lists_the_segments(self, chain) -> None:
        assert call(chain, "KV.PREFIX.CHAIN", "leaf") == [[b"root", 0, 6], [b"mid", 4, 4], [b"leaf", 8, 3]]
        assert call(chain, "KV.PREFIX.CHAIN", "root") == [[b"root", 0, 6]]
        assert call(chain, "KV.PREFIX.CHAIN", "nobody") is None

    def test_match_runs_over_the_whole_chain(self, chain) -> None:
        for hashes, expected in [
            ((1, 2, 30, 40, 50, 60), [b"leaf", 5, 10]),
            ((1, 2, 30, 40), 4),
            ((1, 2, 3, 40), [b"root", 3, 6]),
            ((1, 20, 3), [b"fork", 2, 4]),
            ((1,), 1),
            ((2,), None),
            ((), None),
            ((30, 40), None),
        ]:
            found = call(chain, "KV.PREFIX.MATCH", len(hashes), pack(*hashes), "SIZE", 2)
            if isinstance(expected, int):
                assert found[1:] == [expected, 2 * expected]
            else:
                assert found == expected
        assert call(chain, "KV.PREFIX.MATCH", 2, pack(1, 2), "SIZE", 4) is None
        assert call(chain, "KV.PREFIX.BLOCKS", "mid") == struct.pack("<II", 2, 2) + pack(30, 40)
        assert call(chain, "KV.PREFIX.MEMBERSHIP", "mid", 3, pack(40, 1, 30)) == b"\x05"

    def test_a_parents_new_hashes_move_its_children(self, chain) -> None:
        kv = chain
        assert call(kv, "KV.PREFIX.REGISTER", "open", 1, "fp32", "BLOCKS", 2, 2, pack(1, 2)) == "OK"
        fill(kv, "open", 0, 4)
        options = ("PARENT", "open", 4, "BLOCKS", 2, 2, pack(33, 44))
        assert call(kv, "KV.PREFIX.REGISTER", "child", 1, "fp32", *options) == "OK"
        assert call(kv, "KV.PREFIX.MATCH", 4, pack(1, 2, 33, 44)) == [b"child", 4, 8]
        assert call(kv, "KV.PREFIX.REGISTER", "open", 1, "fp32", "BLOCKS", 2, 2, pack(9, 8)) == "OK"
        assert call(kv, "KV.PREFIX.MATCH", 4, pack(1, 2, 33, 44))[1:] == [2, 4]
        assert call(kv, "KV.PREFIX.MATCH", 4, pack(9, 8, 33, 44)) == [b"child", 4, 8]

    def test_a_declared_prefix_continues_declared_ones_of_as_many_layers(self, kv) -> None:
        call(kv, "KV.PREFIX.REGISTER", "open", 1, "fp32")
        fill(kv, "open", 0, 4)
        declare(kv, "two", 4, layers=2)
        assert call(kv, "KV.PREFIX.REGISTER", "onopen", 1, "fp32", "PARENT", "open", 4) == "OK"
        before = snapshot(kv.services.vstore)
        one = ("LAYERS", 1, "TOKENS", 2)
        why = "is not declared, so its rows may change; a declared prefix can continue declared ones only"
        for ns, options in [
            ("leaf", ("PARENT", "open", 4, *one)),
            ("onopen", one),
            ("onopen", ("PARENT", "open", 4, *one)),
        ]:
            reply = call(kv, "KV.PREFIX.REGISTER", ns, 1, "fp32", *options)
            assert reply == f"-ERR PARENT: prefix 'open' {why}"
        reply = call(kv, "KV.PREFIX.REGISTER", "leaf", 1, "fp32", "PARENT", "onopen", 0, *one)
        assert reply == f"-ERR PARENT: prefix 'onopen' {why}"
        reply = call(kv, "KV.PREFIX.REGISTER", "leaf", 1, "fp32", "PARENT", "two", 4, *one)
        assert reply == "-ERR PARENT: prefix 'two' has 2 LAYERS, got 1"
        assert snapshot(kv.services.vstore) == before
        declare(kv, "leaf", 2, "PARENT", "two", 3, layers=2)
        assert call(kv, "KV.PREFIX.FETCH", "leaf") == [rows(side, 0, 3) + rows(side, 0, 2) for side in "kvkv"]

    def test_an_undeclared_child_of_an_undeclared_parent_is_the_seeds(self, kv) -> None:
        call(kv, "KV.PREFIX.REGISTER", "open", 1, "fp32")
        fill(kv, "open", 0, 2)
        assert call(kv, "KV.PREFIX.REGISTER", "leaf", 1, "fp32", "PARENT", "open", 2) == "OK"
        fill(kv, "leaf", 0, 2)
        assert call(kv, "KV.PREFIX.FETCH", "leaf")[0] == rows("k", 0, 2) * 2
        fill(kv, "leaf", 0, 2, layers=2)
        assert call(kv, "KV.PREFIX.FETCH", "leaf") == "-ERR no row 0 in layer 1"

    def test_a_chain_that_could_not_be_fetched_is_refused(self, kv) -> None:
        schema = ("K", "fp32@0*8192", "V", "fp32@0*8192", "LAYERS", 8192, "TOKENS", 1)
        assert call(kv, "KV.PREFIX.REGISTER.SCHEMA", "root", *schema) == "OK"
        assert call(kv, "KV.PREFIX.FETCH", "root") == [b""] * 16_384
        reply = call(kv, "KV.PREFIX.REGISTER.SCHEMA", "leaf", *schema, "PARENT", "root", 1)
        assert reply.startswith("-ERR PARENT: 8192 LAYERS in 2 segments are 32768 parts, at most 16384")
        assert lookup(kv, "leaf") == "MISS"

    def test_too_many_parts_are_refused(self, kv) -> None:
        call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32")
        call(kv, "V.STORE", "a_pk", 0, 0, b"xxxx")
        call(kv, "V.STORE", "a_pk", 8192, 0, b"xxxx")
        reply = call(kv, "KV.PREFIX.FETCH", "a", "RANGE", 0, 1)
        assert reply.startswith("-ERR 8193 layers on two sides in 1 segments are 16386 parts, at most 16384")

    def test_a_child_behind_less_than_a_block_can_be_matched(self, kv) -> None:
        declare(kv, "root", 1)
        declare(kv, "leaf", 3, "PARENT", "root", 1, "BLOCKS", 2, 2, pack(5, 6))
        assert call(kv, "KV.PREFIX.MATCH", 2, pack(5, 6)) == [b"leaf", 2, 4]

    def test_the_blocks_of_a_chain_are_bounded(self, kv) -> None:
        declare(kv, "root", 6, "BLOCKS", 2, 3, pack(1, 2, 3))
        options = ("PARENT", "root", 4, "BLOCKS", 2, 131_071, bytes(8 * 131_071))
        reply = call(kv, "KV.PREFIX.REGISTER", "leaf", 1, "fp32", *options)
        assert reply == "-ERR BLOCKS: a chain has at most 131072 blocks, this is 131073"

    def test_a_gap_in_the_hashes_cannot_match(self, kv) -> None:
        declare(kv, "root", 6)
        declare(kv, "leaf", 4, "PARENT", "root", 6, "BLOCKS", 2, 2, pack(1, 2))
        assert call(kv, "KV.PREFIX.MATCH", 2, pack(1, 2)) is None
        assert call(kv, "KV.PREFIX.BLOCKS", "leaf") == struct.pack("<II", 2, 2) + pack(1, 2)

    def test_a_fork_inside_a_block_replaces_it(self, kv) -> None:
        declare(kv, "root", 4, "BLOCKS", 2, 2, pack(1, 2))
        declare(kv, "fork", 3, "PARENT", "root", 3, "BLOCKS", 2, 2, pack(22, 33))
        assert call(kv, "KV.PREFIX.MATCH", 3, pack(1, 22, 33)) == [b"fork", 3, 6]

    def test_parents_are_dropped_with_cascade_only(self, chain) -> None:
        before = snapshot(chain.services.vstore)
        for names in (["root"], ["mid"], ["leaf", "mid", "root"]):
            assert call(chain, "KV.PREFIX.DROP", *names).startswith("-ERR prefix 'root'" if len(names) > 2 else "-ERR")
        assert snapshot(chain.services.vstore) == before
        assert call(chain, "KV.PREFIX.DROP", "leaf", "mid") == 2
        assert call(chain, "KV.PREFIX.DROP", "cascade", "root") == 2
        assert call(chain, "V.LIST") == [b"0", []]

    def test_cascade_alone_is_a_name(self, kv) -> None:
        declare(kv, "CASCADE", 1)
        assert call(kv, "KV.PREFIX.DROP", "CASCADE") == 1

    def test_the_parent_of_a_prefix_is_fixed(self, chain) -> None:
        for parent in [("root", 3), ("root", 8), ("fork", 2)]:
            assert call(chain, "KV.PREFIX.REGISTER", "mid", 1, "fp32", "PARENT", *parent).startswith("-EXISTS")
        assert call(chain, "KV.PREFIX.REGISTER", "mid", 1, "fp32", "PARENT", "root", 4) == "OK"
        assert call(chain, "KV.PREFIX.REGISTER", "root", 1, "fp32", "PARENT", "leaf", 1).startswith("-EXISTS")

    def test_a_failed_child_leaves_the_parent_alone(self, kv) -> None:
        """Fault class 42: a segment that is never finished is not seen, and its parent is as before."""
        declare(kv, "root", 4, "BLOCKS", 2, 2, pack(1, 2))
        before = snapshot(kv.services.vstore)
        writer = kv.client()
        options = ("LAYERS", 1, "TOKENS", 4, "PARENT", "root", 4, "BLOCKS", 2, 2, pack(3, 4))
        assert call(writer, "KV.PREFIX.REGISTER", "half", 1, "fp32", *options) == "OK"
        call(writer, "V.STOREBATCH", "half_pk", 0, 0, 4, rows("k", 0, 4))
        assert call(writer, "V.STOREBATCH", "half_pv", 0, 0, 4, b"short").startswith("-ERR blob must be")
        assert lookup(kv, "half") == "MISS"
        assert call(kv, "KV.PREFIX.MATCH", 4, pack(1, 2, 3, 4)) == [b"root", 2, 4]
        assert call(kv, "KV.PREFIX.FETCH", "half").startswith("-ERR no prefix")
        writer.disconnect()
        assert snapshot(kv.services.vstore) == before
        assert call(kv, "KV.PREFIX.FETCH", "root") == [rows("k", 0, 4), rows("v", 0, 4)]

    def test_a_root_that_expires_takes_its_continuations_along(self, chain, clock) -> None:
        call(chain, "KV.PREFIX.REGISTER", "root", 1, "fp32", "EX", 10)
        clock.advance(10)
        assert call(chain, "KV.PREFIX.FETCH", "leaf").startswith("-ERR no prefix")
        assert call(chain, "V.LIST") == [b"0", []]


class TestHashes:
    def test_blocks_as_the_seed_has_them(self, kv) -> None:
        hashes = list(range(1000, 1156))
        call(kv, "KV.PREFIX.REGISTER", "a", 512, "fp16", "BLOCKS", 64, 156, pack(*hashes))
        assert call(kv, "KV.PREFIX.BLOCKS", "a") == struct.pack("<II156Q", 64, 156, *hashes)
        call(kv, "KV.PREFIX.REGISTER", "b", 512, "fp16")
        assert call(kv, "KV.PREFIX.BLOCKS", "b") == "UNKNOWN"
        assert call(kv, "KV.PREFIX.BLOCKS", "nobody") == "UNKNOWN"

    def test_membership_bits(self, kv) -> None:
        rng = np.random.default_rng(5)
        table = rng.integers(0, 2**64, 1562, dtype=np.uint64)
        probes = np.where(rng.random(1562) < 0.5, table, rng.integers(0, 2**64, 1562, dtype=np.uint64))
        call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "BLOCKS", 64, 1562, table.tobytes())
        bitmap = call(kv, "KV.PREFIX.MEMBERSHIP", "a", 1562, probes.tobytes())
        assert len(bitmap) == 196
        members = set(table.tolist())
        for index, probe in enumerate(probes.tolist()):
            assert (bitmap[index // 8] >> (index % 8)) & 1 == (probe in members)
        assert call(kv, "KV.PREFIX.MEMBERSHIP", "a", 0, b"") == b""
        assert call(kv, "KV.PREFIX.MEMBERSHIP", "nobody", 0, b"") == "UNKNOWN"

    async def test_a_large_table_is_arranged_outside_the_loop(self, kv, monkeypatch) -> None:
        table = np.arange(20_000, dtype=np.uint64)
        register = ("KV.PREFIX.REGISTER", "a", 1, "fp32", "BLOCKS", 1)
        call(kv, *register, 20_000, table.tobytes())
        base = kv.services.vstore.ledger.charged_bytes
        hops: list[object] = []

        async def in_thread(context, function, *args):
            hops.append(function)
            if len(hops) == 1:
                call(kv, *register, 1, pack(7))
            return function(*args)

        monkeypatch.setattr(type(kv.context), "in_thread", in_thread)
        probe = ("KV.PREFIX.MEMBERSHIP", "a", 2, pack(7, 8))
        assert plain(await kv.call(*probe)) == b"\x03"
        assert plain(await kv.call(*probe)) == b"\x01"
        assert len(hops) == 1
        unit = kv.services.vstore.prefixes[b"a"]
        assert kv.services.vstore.ledger.charged_bytes == base - 8 * 19_999 + unit.table.members.nbytes
        call(kv, *register, 20_000, table.tobytes())
        for _ in range(2):
            assert plain(await kv.call(*probe)) == b"\x03"
        assert len(hops) == 2

    @pytest.mark.parametrize(
        ("count", "blob"), [("2", pack(1)), ("1", pack(1)[:-1]), ("1", pack(1) + b"x"), ("-1", b""), ("x", b"")]
    )
    @pytest.mark.parametrize("command", ["MEMBERSHIP", "MATCH"])
    def test_counts_and_blobs_that_disagree(self, kv, command, count, blob) -> None:
        call(kv, "KV.PREFIX.REGISTER", "a", 1, "fp32", "BLOCKS", 64, 1, pack(1))
        args = ("KV.PREFIX.MEMBERSHIP", "a") if command == "MEMBERSHIP" else ("KV.PREFIX.MATCH",)
        assert call(kv, *args, count, blob).startswith("-ERR ")

    def test_match_needs_the_same_size_and_names(self, kv) -> None:
        call(kv, "KV.PREFIX.REGISTER", "x|a", 1, "fp32", "BLOCKS", 16, 2, pack(1, 2))
        call(kv, "KV.PREFIX.REGISTER", "y|a", 1, "fp32", "BLOCKS", 16, 3, pack(1, 2, 3))
        call(kv, "KV.PREFIX.REGISTER", "y|b", 1, "fp32", "BLOCKS", 64, 2, pack(1, 2))
        probe = ("KV.PREFIX.MATCH", 4, pack(1, 2, 3, 4))
        assert call(kv, *probe) == [b"y|b", 2, 128]
        assert call(kv, *probe, "SIZE", 16) == [b"y|a", 3, 48]
        assert call(kv, *probe, "SIZE", 16, "IN", "x|") == [b"x|a", 2, 32]
        assert call(kv, *probe, "IN", "x|") == [b"x|a", 2, 32]
        assert call(kv, *probe, "IN", "z|") is None
        assert call(kv, *probe, "SIZE", 32) is None
        for bad in [("SIZE", "0"), ("SIZE",), ("IN",), ("IN", "x" * 4097), ("ON", "x"), ("SIZE", "1", "SIZE", "1")]:
            assert call(kv, *probe, *bad).startswith("-ERR ")

    def test_match_counts_and_touches_nothing(self, kv) -> None:
        kv = make_kv(max_sessions=4)
        declare(kv, "a", 1, "BLOCKS", 1, 1, pack(1))
        declare(kv, "b", 1)
        before = kv.services.receipt.rows(worker=0, uptime_s=0), kv.services.vstore.statistics()
        assert call(kv, "KV.PREFIX.MATCH", 1, pack(1)) == [b"a", 1, 1]
        assert (kv.services.receipt.rows(worker=0, uptime_s=0), kv.services.vstore.statistics()) == before
        declare(kv, "c", 1)
        assert lookup(kv, "a") == "MISS"

    def test_equal_hash_lists_live_and_die_one_by_one(self, kv) -> None:
        for ns in "abc":
            call(kv, "KV.PREFIX.REGISTER", ns, 1, "fp32", "BLOCKS", 16, 2, pack(1, 2))
        for ns in "abc":
            assert call(kv, "KV.PREFIX.MATCH", 2, pack(1, 2), "IN", ns) == [ns.encode(), 2, 32]
            assert call(kv, "KV.PREFIX.DROP", ns) == 1
            assert call(kv, "KV.PREFIX.MATCH", 2, pack(1, 2), "IN", ns) is None
        assert call(kv, "KV.PREFIX.MATCH", 2, pack(1, 2)) is None

    def test_there_is_a_bound_on_block_sizes(self, kv) -> None:
        for size in range(1, 65):
            assert call(kv, "KV.PREFIX.REGISTER", f"n{size}", 1, "fp32", "BLOCKS", size, 1, pack(1)) == "OK"
        assert call(kv, "KV.PREFIX.REGISTER", "more", 1, "fp32", "BLOCKS", 65, 1, pack(1)).startswith(
            "-ERR BLOCKS size 65"
        )
        assert lookup(kv, "more") == "MISS"
