"""Housekeeping: what the reaper drops, evicts, freezes and gives back."""

from __future__ import annotations

import attrs
import trio

from pion.commands import vstore_reaper
from pion.commands.vstore_reaper import Reaper, anonymous_bytes, memory_rows
from pion.storage import reclaim
from pion.storage.reclaim import FREEZE_AFTER_UNITS, TRIM_AFTER_BYTES, find_trim, trim_memory
from pion.testing import FakeClock
from tests.commands.kv_support import make_kv, now


async def test_expired_and_stalled_prefixes_go_by_themselves(autojump_clock) -> None:
    clock = FakeClock()
    kv = make_kv(clock)
    for index in range(1200):
        now(kv.call("KV.PREFIX.REGISTER", f"n{index}", 1, "fp32", "EX", 10))
    kv.services.config = kv.services.vstore.config = attrs.evolve(kv.services.config, max_sessions=10_000)
    now(kv.call("KV.PREFIX.REGISTER", "stays", 1, "fp32"))
    now(kv.call("KV.PREFIX.REGISTER", "hangs", 1, "fp32", "LAYERS", 1, "TOKENS", 1))
    async with trio.open_nursery() as nursery:
        await nursery.start(Reaper(kv.services).run)
        await trio.sleep(1)
        assert kv.services.vstore.statistics().pending == 1
        clock.advance(61)
        await trio.sleep(1)
        assert now(kv.call("V.LIST")) == [b"0", [b"stays_pk", b"stays_pv"]]
        assert kv.services.vstore.statistics().abandoned == 1
        nursery.cancel_scope.cancel()


async def test_a_lowered_limit_is_applied(autojump_clock) -> None:
    kv = make_kv(max_sessions=20)
    for index in range(10):
        now(kv.call("KV.PREFIX.REGISTER", f"n{index}", 1, "fp32", *(["PIN"] if index == 0 else [])))
    kv.services.vstore.config = attrs.evolve(kv.services.config, max_sessions=5)
    await Reaper(kv.services).once()
    assert now(kv.call("KV.PREFIX.LIST")) == [b"0", [b"n0", b"n9"]]
    kv.services.vstore.config = attrs.evolve(kv.services.config, max_sessions=2)
    await Reaper(kv.services).once()
    await Reaper(kv.services).once()
    assert now(kv.call("KV.PREFIX.LIST")) == [b"0", [b"n0"]]


async def test_memory_is_given_back_after_much_was_freed(autojump_clock, monkeypatch) -> None:
    trimmed = trio.Event()

    def trim() -> int:
        trio.from_thread.run_sync(trimmed.set)
        return 1

    monkeypatch.setattr(vstore_reaper, "find_trim", lambda: trim)
    kv = make_kv()
    ledger = kv.services.vstore.ledger
    async with trio.open_nursery() as nursery:
        await nursery.start(Reaper(kv.services).run)
        ledger.freed_bytes = TRIM_AFTER_BYTES - 1
        await trio.sleep(1)
        assert not trimmed.is_set()
        ledger.freed_bytes = TRIM_AFTER_BYTES
        await trimmed.wait()
        assert ledger.freed_bytes == 0
        nursery.cancel_scope.cancel()


async def test_what_is_left_of_an_overwritten_block_is_copied_out() -> None:
    kv = make_kv()
    now(kv.call("V.CREATE", "s", 256, "VQUANT", "fp32"))
    for count, letter in ((8192, b"x"), (5000, b"y")):
        now(kv.call("V.STOREBATCH", "s", 0, 0, count, memoryview(letter * (1024 * count))))
    ledger = kv.services.vstore.ledger
    assert ledger.charged_bytes > 1024 * (8192 + 5000)
    await Reaper(kv.services).once()
    assert ledger.charged_bytes < 1024 * 8192 + 10_000
    assert ledger.payload_bytes == 1024 * 8192
    assert now(kv.call("V.FETCH", "s", 0, "RANGE", 4999, 5001)) == b"y" * 1024 + b"x" * 1024


async def test_many_new_units_leave_the_collectors_sight(monkeypatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(reclaim.gc, "freeze", lambda: frozen.append(1))
    kv = make_kv()
    kv.services.vstore.registrations = FREEZE_AFTER_UNITS - 1
    await Reaper(kv.services).once()
    now(kv.call("V.CREATE", "s", 1))
    await Reaper(kv.services).once()
    await Reaper(kv.services).once()
    assert frozen == [1]


def test_trim_where_there_is_none(monkeypatch) -> None:
    assert trim_memory(None) is False
    assert trim_memory(lambda: 0) is False
    assert trim_memory(lambda: 1) is True
    monkeypatch.setattr(reclaim.sys, "platform", "darwin")
    assert find_trim() is None


def test_anonymous_memory_where_the_system_does_not_say(tmp_path) -> None:
    assert anonymous_bytes(tmp_path / "statm") == 0
    (tmp_path / "statm").write_text("100 7 5 1 0 9 0\n")
    assert anonymous_bytes(tmp_path / "statm") == 2 * vstore_reaper._PAGE_BYTES


def test_the_memory_section_adds_up() -> None:
    kv = make_kv()
    now(kv.call("V.CREATE", "s", 4, "VQUANT", "fp32"))
    now(kv.call("V.STORE", "s", 0, 0, b"x" * 16))
    rows = dict(memory_rows(kv.services))
    assert rows["vstore_bytes"] == 16
    assert rows["used_memory"] == rows["memory_charged_bytes"] == kv.services.vstore.ledger.charged_bytes
