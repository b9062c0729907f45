"""ATTEND.QUERYBATCH with many clients: what waits holds nothing on the device, and who leaves is not computed for."""

from __future__ import annotations

import socket
import threading
import weakref

import numpy as np
import pytest

from pion.commands import attend_common, attend_parts
from pion.compute.attention import Attended, Query, Resident
from tests.commands.attend_support import (
    QUERY,
    Array,
    Gate,
    Oracle,
    Wire,
    blob,
    close,
    floats,
    normal,
    serving,
    split_lse,
)

HEADS, ROWS, WIDTH = 2, 12, 8
KEYS, VALUES = normal(1, HEADS, ROWS, WIDTH), normal(2, HEADS, ROWS, WIDTH)


class Counting(Gate):
    """Counts the layers that are on the device: each is from its load until nobody has it any more."""

    def __init__(self) -> None:
        super().__init__()
        self._counting = threading.Lock()
        self.now = self.most = 0

    def load(self, keys: Array, values: Array) -> Resident:
        found = super().load(keys, values)
        with self._counting:
            self.now += 1
            self.most = max(self.most, self.now)
        weakref.finalize(found, self._freed)
        return found

    def _freed(self) -> None:
        with self._counting:
            self.now -= 1

    def attend_once(self, keys: Array, values: Array, query: Query) -> Attended:
        return self.attend(self.load(keys, values), [query])[0]


@pytest.fixture
def gate() -> Counting:
    return Counting()


@pytest.fixture
def server(gate):
    with serving(backend=gate) as running:
        yield running


def ask(wire: Wire, seed: int, count: int = 1) -> None:
    q = normal(seed, HEADS, count, WIDTH)
    wire.send("ATTEND.QUERYBATCH", HEADS, ROWS, WIDTH, 0, blob(q), blob(KEYS), blob(VALUES))


def check(wire: Wire, seed: int, count: int = 1) -> None:
    q = normal(seed, HEADS, count, WIDTH)
    oracle = Oracle(KEYS, VALUES)
    output, lse = oracle.attend(q, oracle.visible(q))
    if count == 1:
        close(floats(wire.read(), HEADS, 1, WIDTH), output)
    else:
        found, sums = split_lse(wire.read(), HEADS, count, WIDTH)
        close(found, output)
        close(sums, lse)


@pytest.mark.parametrize("count", [1, 9])
def test_only_one_is_on_the_device_however_many_wait(server, gate, count: int, monkeypatch) -> None:
    """With nine queries each is computed in parts."""
    monkeypatch.setattr(attend_parts, "ATTEND_SCORE_BYTES", 4 * HEADS * ROWS * 4)
    clients = [Wire(server) for _ in range(8)]
    try:
        gate.shut()
        for seed, client in enumerate(clients):
            ask(client, seed, count)
        assert gate.entered.wait(60)
        server.wait_for(lambda: server.attention.worker.waiting + waiting_for_the_lock(server) == len(clients) - 1)
        gate.open.set()
        for seed, client in enumerate(clients):
            check(client, seed, count)
        assert gate.most == 1
        server.wait_for(lambda: gate.now == 0)
        assert len(gate.batches) == 8 * -(-count // 4)
    finally:
        for client in clients:
            client.__exit__()


def waiting_for_the_lock(server) -> int:
    return server.attention.batching.statistics().tasks_waiting


def test_in_a_crowd_one_whose_client_left_is_not_computed(server, gate, monkeypatch) -> None:
    monkeypatch.setattr(attend_common, "ATTEND_CROWD", 1)
    worker = server.attention.worker
    gate.shut()
    with Wire(server) as first, Wire(server) as second, Wire(server) as third, Wire(server) as stays:
        ask(first, 1)
        assert gate.entered.wait(60)
        for number, (client, seed) in enumerate([(second, 2), (third, 3), (stays, 4)], 1):
            ask(client, seed)
            server.wait_for(lambda number=number: worker.waiting == number)
        third.__exit__()
        server.wait_for(lambda: worker.waiting == 2)
        gate.open.set()
        for client, seed in ((first, 1), (second, 2), (stays, 4)):
            check(client, seed)
    assert gate.batches == [1, 1, 1]


@pytest.mark.parametrize("kept", [False, True])
def test_many_parts_are_given_up_when_the_client_leaves(server, gate, kept: bool, monkeypatch) -> None:
    """Of a query about a layer, too."""
    monkeypatch.setattr(attend_parts, "ATTEND_SCORE_BYTES", 4 * HEADS * ROWS)
    monkeypatch.setattr(attend_common, "ATTEND_CROWD", 8)
    with Wire(server) as wire, Wire(server) as other:
        assert other.store(b"s", 0, KEYS, VALUES) == "OK"
        gate.shut()
        if kept:
            wire.send(QUERY.command, "s", 0, HEADS, WIDTH, 0, blob(normal(1, HEADS, 9, WIDTH)))
        else:
            ask(wire, 1, 9)
        assert gate.entered.wait(60)
        wire.socket.shutdown(socket.SHUT_WR)
        assert wire.read() == "-ERR the client stopped sending while its query waited"
        gate.open.set()
        ask(other, 2, 8)  # no more than are computed all the same
        check(other, 2, 8)
    assert gate.batches == [1] * (8 + kept)


def test_it_is_none_of_the_queries_that_info_counts(server, gate, monkeypatch) -> None:
    """Those are about layers."""
    with Wire(server) as wire:
        ask(wire, 1, 9)
        check(wire, 1, 9)
        monkeypatch.setattr(attend_parts, "ATTEND_SCORE_BYTES", 4 * HEADS * ROWS * 4)
        ask(wire, 2, 9)
        check(wire, 2, 9)
        assert gate.batches == [1] * 4
        found = server.figures()
        assert [found[name] for name in ("queries", "batches", "compute_us", "warm", "bytes")] == [0] * 5


def test_a_device_without_memory_for_it(server, gate) -> None:
    with Wire(server) as wire:
        gate.failure = MemoryError()
        ask(wire, 1)
        assert wire.read() == "-OOM the compute device has no memory for this query now"
        gate.failure = None
        ask(wire, 2)
        check(wire, 2)


def test_numbers_that_are_not_finite_are_computed_with(server) -> None:
    keys = KEYS.copy()
    keys[0, 3, 1] = np.nan
    q = normal(3, HEADS, 1, WIDTH)
    with Wire(server) as wire:
        answer = wire.call("ATTEND.QUERYBATCH", HEADS, ROWS, WIDTH, 0, blob(q), blob(keys), blob(VALUES))
    found = floats(answer, HEADS, 1, WIDTH)
    oracle = Oracle(KEYS, VALUES)
    assert np.isnan(found[0]).all()
    close(found[1], oracle.attend(q, oracle.visible(q))[0][1])
