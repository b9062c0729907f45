"""Several clients at once, cancelled and failing prefills (fault classes 4, 42, 47)."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import trio

from pion.client import PionClient, Registered
from pion.client.errors import PionClientError
from pion_vllm_mlx import transfer
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import token_ids
from pion_vllm_mlx.testing import make_tiny_model, random_tokens, same_bits


class Cancelled(BaseException):
    """As a KeyboardInterrupt is: no Exception."""


def cancel_at(step):
    calls = iter(range(step + 1))

    def progress(done, total):
        if next(calls) == step:
            raise Cancelled

    return progress


@pytest.fixture
def client(server):
    with PionClient(port=server.port) as connected:
        yield connected


def cold(model, ids):
    return prefill(model, token_ids(ids))


@pytest.mark.parametrize("step", range(13))
def test_a_cancelled_prefill_stores_nothing_and_the_next_one_is_right(connect, model, step):
    ids = random_tokens(48, seed=2000 + step)
    pc = connect(model, prefill_step=4)
    with pytest.raises(Cancelled):
        pc.get_or_prefill(ids, progress=cancel_at(step))
    ns = pc.namespace(ids)
    assert not connect(model).lookup(ns)
    assert pc.stats()["stored"] == 0
    again = pc.get_or_prefill(ids)
    assert pc.stats()["stored"] == 1
    assert same_bits(again, prefill(model, token_ids(ids), step=4))
    assert same_bits(connect(model).get_or_prefill(ids), again)


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_cancelled_continuation_leaves_its_parent_alone(connect, model, step):
    base = random_tokens(96, seed=2100 + step)
    connect(model).get_or_prefill(base)
    longer = base + random_tokens(80, seed=2110 + step)
    pc = connect(model, prefill_step=16)
    with pytest.raises(Cancelled):
        pc.prepare_prompt(longer, progress=cancel_at(step))
    assert same_bits(connect(model).get_or_prefill(base), cold(model, base))
    caches, rest = connect(model, prefill_step=16).prepare_prompt(longer)
    assert caches[0].offset + len(rest) == len(longer)


def test_a_cancelled_prefill_frees_the_name_for_those_who_wait(connect, model):
    ids = random_tokens(40, seed=2200)
    holder, other = connect(model, prefill_step=8), connect(model)
    reached, go_on = threading.Event(), threading.Event()

    def progress(done, total):
        if done >= 16:
            reached.set()
            go_on.wait(30)
            raise Cancelled

    def hold():
        with pytest.raises(Cancelled):
            holder.get_or_prefill(ids, progress=progress)

    with ThreadPoolExecutor() as pool:
        held = pool.submit(hold)
        assert reached.wait(30)
        other._ms_per_token = 1000.0  # a slow machine: it waits long enough
        waiting = pool.submit(other.get_or_prefill, ids)
        while not other.stats()["waited"]:
            go_on.wait(0.01)
        go_on.set()
        held.result(30)
        assert same_bits(waiting.result(60), cold(model, ids))


def test_a_failed_store_is_a_miss_for_everyone(connect, model, monkeypatch):
    ids = random_tokens(40, seed=2300)
    pc = connect(model, fallback=True)
    rows = transfer._send
    sent = []

    def fail_in_the_middle(client, group):
        rows(client, group[:2])
        sent.append(len(group))
        raise PionClientError("the disk is full")

    monkeypatch.setattr(transfer, "_send", fail_in_the_middle)
    assert same_bits(pc.get_or_prefill(ids), cold(model, ids))
    monkeypatch.undo()
    assert sent == [4]
    assert (pc.stats()["not_stored"], pc.stats()["fallbacks"]) == (1, 1)
    fresh = connect(model)
    assert not fresh.lookup(fresh.namespace(ids))
    assert fresh.prepare_prompt(ids)[1] == ids  # nothing matched
    fresh.get_or_prefill(ids)
    assert fresh.stats()["stored"] == 1


def test_pending_elsewhere_waits_no_longer_than_its_own_prefill(connect, model, client):
    """Another client registered and does nothing: this one goes ahead, without storing."""
    ids = random_tokens(64, seed=2400)
    pc = connect(model)
    ns = pc.namespace(ids)
    assert client.prefix_register_schema(ns, "fp32@32*2", "fp32@32*2", layers=2, tokens=64) is Registered.OK
    pc._ms_per_token = 1.0
    assert same_bits(pc.get_or_prefill(ids), cold(model, ids))
    assert (pc.stats()["waited"], pc.stats()["not_stored"], pc.stats()["stored"]) == (1, 1, 0)


def test_the_estimate_comes_from_a_trial_before_the_first_prefill(connect, model):
    pc = connect(model)
    assert pc._estimate_ms(100) > 0
    assert pc._ms_per_token == pytest.approx(pc._estimate_ms(1))


def test_twenty_cold_clients_prefill_once(connect, model):
    ids = random_tokens(256, seed=2500)
    clients = [connect(model, prefill_step=32) for _ in range(20)]
    for pc in clients:
        pc._ms_per_token = 100.0
    start = threading.Barrier(20)

    def work(pc):
        start.wait(30)
        return pc.get_or_prefill(ids)

    with ThreadPoolExecutor(20) as pool:
        results = list(pool.map(work, clients))
    expected = prefill(model, token_ids(ids), step=32)
    assert all(same_bits(result, expected) for result in results)
    assert sum(pc.stats()["stored"] for pc in clients) == 1
    assert sum(pc.stats()["tokens_prefilled"] for pc in clients) == 256


def test_one_instance_in_many_threads(connect, model):
    pc = connect(model)
    prompts = [random_tokens(60 + i, seed=2600 + i) for i in range(6)]

    def work(i):
        caches, rest = pc.prepare_prompt(prompts[i % 6])
        return i % 6, caches[0].offset + len(rest), pc.get_or_prefill(prompts[i % 6])

    with ThreadPoolExecutor(8) as pool:
        for i, total, caches in pool.map(work, range(36)):
            assert total == len(prompts[i])
            assert [cache.offset for cache in caches] == [len(prompts[i])] * 2
    assert pc.stats()["fallbacks"] == 0


async def run_in_trio_thread(call):
    return await trio.to_thread.run_sync(call)


def in_plain_thread(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("writer", ["plain", "trio", "asyncio"])
@pytest.mark.parametrize("reader", ["plain", "trio", "asyncio"])
def test_arrays_made_in_one_thread_are_used_in_another(connect, writer, reader):
    """Stored from one kind of thread, fetched from another, compared in a third (fault class 47)."""
    run = {
        "plain": in_plain_thread,
        "trio": lambda call: trio.run(run_in_trio_thread, call),
        "asyncio": lambda call: asyncio.run(asyncio.to_thread(call)),
    }
    model = in_plain_thread(make_tiny_model)
    ids = random_tokens(40, seed=2700 + len(writer) * 10 + len(reader))
    computed = run[writer](lambda: connect(model).get_or_prefill(ids))
    fetched = run[reader](lambda: connect(model).get_or_prefill(ids))
    assert same_bits(computed, fetched)
