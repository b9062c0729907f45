"""Several clients at once, cancelled and failing prefills (fault classes 4, 42, 47)."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import mlx.core as mx
import pytest
import trio
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from pion.client import PionClient, Registered
from pion.client.errors import PionClientError
from pion.config import Config
from pion_vllm_mlx import prefill as prefilling
from pion_vllm_mlx import prompt_cache, release_at_thread_end, transfer
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import BLOCK_TOKENS, token_ids
from pion_vllm_mlx.prompt_cache import LONGEST_WAIT_MS, TRIAL_TOKENS
from pion_vllm_mlx.testing import greedy, make_tiny_model, random_tokens, same_bits


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
    child = longer[: (len(longer) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]
    assert not pc.lookup(pc.namespace(child))
    assert same_bits(connect(model).get_or_prefill(base), cold(model, base))
    caches, rest = connect(model, prefill_step=16).prepare_prompt(longer)
    assert child + rest == longer
    plain = prefill(model, token_ids(base))
    assert same_bits(caches, prefill(model, token_ids(child), plain, done=len(base), step=16))
    assert greedy(model, caches, rest, 8) == greedy(model, make_prompt_cache(model), longer, 8)


@pytest.mark.parametrize("step", range(12))
def test_cancelled_while_decoding_and_tried_again(connect, model, step):
    """The caches of a generation that was cut off are thrown away; the stored prefix is what it was (fault class 4)."""
    ids = random_tokens(70, seed=2120 + step)
    expected = greedy(model, make_prompt_cache(model), ids, 12)
    pc = connect(model)
    caches, rest = pc.prepare_prompt(ids)
    steps = generate_step(mx.array(rest), model, max_tokens=12, prompt_cache=caches)
    begun = [int(token) for token, _ in itertools.islice(steps, step)]
    steps.close()
    assert begun == expected[:step]
    again, rest = pc.prepare_prompt(ids)
    assert same_bits(again, cold(model, ids[:64]))
    assert greedy(model, again, rest, 12) == expected


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
    rows = transfer.answers
    sent = []

    def fail_in_the_middle(client, group):
        rows(client, group[:2])
        sent.append(len(group))
        raise PionClientError("the disk is full")

    monkeypatch.setattr(transfer, "answers", fail_in_the_middle)
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


def test_the_estimate_is_of_forward_passes_of_many_tokens(connect, model, monkeypatch):
    now = [0.0]
    for module in (prompt_cache, prefilling):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    pc = connect(model, prefill_step=16)
    pc._ms_per_token = 7.0
    pc.get_or_prefill(random_tokens(TRIAL_TOKENS - 1, seed=2410))
    assert pc._ms_per_token == 7.0

    def forward(*args, **options):
        now[0] += 0.25
        return model(*args, **options)

    def progress(done, total):
        now[0] += 10.0

    monkeypatch.setattr(pc, "_model", forward)
    monkeypatch.setattr(prompt_cache, "prefill", with_caches_of(model))
    pc.get_or_prefill(random_tokens(64, seed=2411), progress=progress)
    assert pc.stats()["prefill_ms_total"] == pytest.approx(1000)
    assert pc._ms_per_token == pytest.approx(1000 / 64)


def with_caches_of(model):
    """`prefill` for a model that is only a function."""
    return lambda forward, ids, caches, **options: prefill(forward, ids, caches or make_prompt_cache(model), **options)


@pytest.mark.parametrize("refused", [True, False])
def test_a_wait_is_never_an_error(connect, model, client, monkeypatch, refused):
    """However slow the model is here, the server is asked for a wait it takes; and if not, that's a no."""
    ids = random_tokens(64, seed=2420 + refused)
    pc = connect(model)
    ns = pc.namespace(ids)
    assert client.prefix_register_schema(ns, "fp32@32*2", "fp32@32*2", layers=2, tokens=64) is Registered.OK
    asked = []
    lookup = PionClient.prefix_lookup

    def hurried(self, name, *, wait_ms=None, **options):
        if wait_ms is not None:
            asked.append(wait_ms)
            wait_ms = -1 if refused else 1
        return lookup(self, name, wait_ms=wait_ms, **options)

    monkeypatch.setattr(PionClient, "prefix_lookup", hurried)
    pc._ms_per_token = 1e9
    assert same_bits(pc.get_or_prefill(ids), cold(model, ids))
    assert asked == [LONGEST_WAIT_MS] == [Config().max_wait_ms]
    assert pc.stats()["fallbacks"] == 0


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
    answers = [[] for _ in prompts]

    def work(i):
        caches, rest = pc.prepare_prompt(prompts[i % 6])
        return i % 6, caches[0].offset + len(rest), pc.get_or_prefill(prompts[i % 6])

    with ThreadPoolExecutor(8) as pool:
        for i, total, caches in pool.map(work, range(36)):
            assert total == len(prompts[i])
            assert [cache.offset for cache in caches] == [len(prompts[i])] * 2
            answers[i].append(greedy(model, caches, [5], 8))
    for prompt, given in zip(prompts, answers, strict=True):
        expected = greedy(model, cold(model, prompt), [5], 8)
        assert given == [expected] * 6
    assert pc.stats()["fallbacks"] == 0


def with_mlx(call):
    release_at_thread_end()
    return call()


async def run_in_trio_thread(call):
    return await trio.to_thread.run_sync(with_mlx, call)


def in_plain_thread(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(with_mlx(call)))
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
        "asyncio": lambda call: asyncio.run(asyncio.to_thread(with_mlx, call)),
    }
    model = in_plain_thread(make_tiny_model)
    ids = random_tokens(40, seed=2700 + len(writer) * 10 + len(reader))
    computed = run[writer](lambda: connect(model).get_or_prefill(ids))
    fetched = run[reader](lambda: connect(model).get_or_prefill(ids))
    assert same_bits(computed, fetched)
