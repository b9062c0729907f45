"""The in-process lane: held prefixes, their loans, and caches that begin with them."""

from __future__ import annotations

import copy
import gc
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

from pion_vllm_mlx import SparseAuto, install_pion_attention_patch, uninstall_pion_attention_patch
from pion_vllm_mlx.inproc import HeldPrefix, HeldPrefixes, PrefixKVCache
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import token_ids
from pion_vllm_mlx.sparse import SparsePrefixKVCache
from pion_vllm_mlx.testing import NumpyRemote, greedy, make_tiny_model, random_tokens, same_bits
from pion_vllm_mlx.threads import release_at_thread_end
from pion_vllm_mlx.wire_cache import WireKVCache, WirePrefix

IDS = random_tokens(70, seed=9100)
REST = random_tokens(5, seed=9101)


def hold(model, ids=IDS):
    caches = prefill(model, token_ids(ids))
    return HeldPrefix.of(b"digest", token_ids(ids), caches)


def plain(model, ids=IDS):
    return prefill(model, token_ids(ids))


def buffers(caches):
    mx.eval([(cache.keys, cache.values) for cache in caches])
    return [np.asarray(memoryview(cache.keys)).__array_interface__["data"][0] for cache in caches]


@pytest.fixture
def patch():
    install_pion_attention_patch()
    yield
    uninstall_pion_attention_patch()


def test_logits_are_those_of_plain_mlx_lm_bit_for_bit(model):
    caches = hold(model).caches(PrefixKVCache)
    want = plain(model)
    for ids in (REST, REST[:1], REST[:1]):
        assert mx.array_equal(model(mx.array(ids)[None], cache=caches), model(mx.array(ids)[None], cache=want))


def test_one_generation_after_the_other_writes_the_same_memory_without_a_copy(model):
    held = hold(model)
    caches = held.caches(PrefixKVCache)
    first = buffers(caches)
    answers = [greedy(model, caches, REST, 20)]
    assert buffers(caches) == first
    del caches
    gc.collect()
    caches = held.caches(PrefixKVCache)
    assert buffers(caches) == first
    answers.append(greedy(model, caches, REST, 20))
    assert answers == [greedy(model, plain(model), REST, 20)] * 2


def test_two_at_once_do_not_share_memory(model):
    held = hold(model)
    one, other = held.caches(PrefixKVCache), held.caches(PrefixKVCache)
    assert not set(buffers(one)) & set(buffers(other))
    want = greedy(model, plain(model), REST, 10)
    assert greedy(model, one, REST, 10) == greedy(model, other, REST, 10) == want


def test_a_generation_past_the_spare_room_and_the_next_one(model):
    held = hold(model)
    for _ in range(2):
        caches = held.caches(PrefixKVCache)
        for start in range(0, 400, 100):
            model(mx.array(random_tokens(100, seed=start))[None], cache=caches)
        mx.eval([cache.state for cache in caches])
        assert caches[0].offset == len(IDS) + 400
        del caches
        gc.collect()
    assert greedy(model, held.caches(PrefixKVCache), REST, 10) == greedy(model, plain(model), REST, 10)


def test_what_is_written_into_the_prefix_after_a_trim_stays_with_that_cache(model):
    held = hold(model)
    caches = held.caches(PrefixKVCache)
    assert [cache.trim(30) for cache in caches] == [30, 30]
    other = random_tokens(40, seed=9102)
    want = plain(model, IDS[:40])
    assert greedy(model, caches, other, 5) == greedy(model, want, other, 5)
    for _ in range(2):  # with a copy, and with what the caches gave back
        assert greedy(model, held.caches(PrefixKVCache), REST, 5) == greedy(model, plain(model), REST, 5)
        caches = None
        gc.collect()
    assert caches is None


@pytest.mark.parametrize("change", ["state", "keys"])
def test_arrays_that_are_set_from_outside_do_not_reach_the_next_generation(model, change):
    held = hold(model)
    caches = held.caches(PrefixKVCache)
    for cache in caches:
        if change == "state":
            cache.state = mx.zeros((1, 2, 10, 16)), mx.zeros((1, 2, 10, 16)), 10
            assert cache.offset == 10
        else:
            cache.keys, cache.values = mx.zeros_like(cache.keys), mx.zeros_like(cache.values)
    mx.eval([cache.state for cache in caches])
    del caches, cache
    gc.collect()
    assert greedy(model, held.caches(PrefixKVCache), REST, 5) == greedy(model, plain(model), REST, 5)


def test_the_caches_it_was_made_from_go_on_alone(model):
    caches = plain(model)
    held = HeldPrefix.of(b"digest", token_ids(IDS), caches)
    want = greedy(model, plain(model), REST, 10)
    assert greedy(model, caches, REST, 10) == want
    assert [cache.trim(60) for cache in caches] == [60, 60]
    model(mx.array(REST)[None], cache=caches)
    mx.eval([cache.state for cache in caches])
    assert greedy(model, held.caches(PrefixKVCache), REST, 10) == want


def test_a_prefix_that_fills_its_buffer_exactly(model):
    ids = random_tokens(256, seed=9103)
    held = hold(model, ids)
    caches = held.caches(PrefixKVCache)
    first = buffers(caches)
    assert greedy(model, caches, REST, 5) == greedy(model, plain(model, ids), REST, 5)
    assert buffers(caches) == first


def test_copies_and_states_are_plain_caches(model):
    caches = hold(model).caches(PrefixKVCache)
    copied = copy.deepcopy(caches)
    restored = [type(cache).from_state(cache.state) for cache in caches]
    assert same_bits(copied, plain(model))
    assert same_bits(restored, plain(model))
    assert all(type(cache) is KVCache for cache in (*copied, *restored))


def test_a_shallow_copy_writes_nothing_that_its_original_reads(model):
    """Nor what the next generation gets: the loan stays with the original."""
    held = hold(model)
    caches = held.caches(PrefixKVCache)
    copied = [copy.copy(cache) for cache in caches]
    assert same_bits(copied, plain(model))
    wanted = [plain(model) for _ in range(2)]
    for passes in ([7], [13]), ([11, 12], [14, 15]):
        for ids, each, want in zip(passes, (copied, caches), wanted, strict=True):
            have, expected = (np.array(model(mx.array([ids]), cache=which)) for which in (each, want))
            assert np.array_equal(have, expected)
    del caches, each
    gc.collect()
    other = held.caches(PrefixKVCache)
    for ids, each, want in (([8], other, plain(model)), ([9], copied, wanted[0])):
        have, expected = (np.array(model(mx.array([ids]), cache=which)) for which in (each, want))
        assert np.array_equal(have, expected)


@pytest.mark.parametrize("make", [PrefixKVCache, lambda cell, n: SparsePrefixKVCache(cell, n, SparseAuto(8, 2))])
def test_mlx_lm_saves_and_loads_them_as_plain_caches(model, tmp_path, make):
    path = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(path, hold(model).caches(make))
    assert same_bits(load_prompt_cache(path), plain(model))


def test_a_loan_that_grew_far_beyond_the_prefix_is_not_kept(model):
    held = hold(model)
    caches = held.caches(PrefixKVCache)
    model(mx.array(random_tokens(400, seed=9105))[None], cache=caches)
    mx.eval([cache.state for cache in caches])
    del caches
    gc.collect()
    assert held._idle is None
    assert greedy(model, held.caches(PrefixKVCache), REST, 10) == greedy(model, plain(model), REST, 10)


def test_arrays_of_an_abandoned_generation_of_another_thread_are_not_used(model):
    held = hold(model)

    def work():
        release_at_thread_end()
        caches = held.caches(PrefixKVCache)
        model(mx.array(REST)[None], cache=caches)  # and never evaluated

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    gc.collect()
    assert greedy(model, held.caches(PrefixKVCache), REST, 5) == greedy(model, plain(model), REST, 5)


def test_threads_generate_at_once(model):
    held = hold(model)
    want = greedy(model, plain(model), REST, 10)
    answers = []

    def work():
        release_at_thread_end()
        for _ in range(3):
            answers.append(greedy(model, held.caches(PrefixKVCache), REST, 10))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [want] * 12


# The budget


def test_the_least_recently_used_prefix_goes_first(model):
    nbytes = hold(model).nbytes
    assert nbytes == 2 * 70 * 2 * 2 * 2 * 16 * 4
    prefixes = HeldPrefixes(2 * nbytes)
    ids = token_ids(IDS)
    for name in ("a", "b"):
        prefixes.keep(name, b"digest", ids, plain(model))
    assert prefixes.get("a", b"digest") is not None
    prefixes.keep("c", b"digest", ids, plain(model))
    assert [prefixes.get(name, b"digest") is not None for name in "abc"] == [True, False, True]
    assert prefixes.get("a", b"other") is None
    assert prefixes.get("a", b"digest", ids[:-1]) is None
    prefixes.drop("a", "unknown")
    assert prefixes.get("a", b"digest") is None


def test_a_prefix_beyond_the_budget_is_not_held(model):
    prefixes = HeldPrefixes(hold(model).nbytes - 1)
    prefixes.keep("a", b"digest", token_ids(IDS), plain(model))
    assert prefixes.get("a", b"digest") is None
    prefixes.keep("a", b"digest", token_ids(IDS[:40]), plain(model, IDS[:40]))
    assert prefixes.get("a", b"digest") is not None
    prefixes.keep("a", b"digest", token_ids(IDS), plain(model))
    assert prefixes.get("a", b"digest") is None  # the name stands for other tokens now


# Sparse


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("block", [7, 10, 64])
def test_sparse_is_what_the_server_would_answer(patch, heads, block):
    model = make_tiny_model(num_key_value_heads=heads)
    sparse = SparseAuto(block, 1 if block == 64 else 3)
    remote = NumpyRemote(plain(model))
    prefix = WirePrefix(remote, len(IDS), sparse)
    wire = [WireKVCache(prefix, layer) for layer in range(2)]
    held = hold(model).caches(lambda cell, n: SparsePrefixKVCache(cell, n, sparse))
    dense = plain(model)
    differs = 0.0
    for ids in (REST, REST[:1], REST[1:2], REST[2:3]):
        here, there, whole = (model(mx.array(ids)[None], cache=caches) for caches in (held, wire, dense))
        assert mx.allclose(here, there, atol=2e-5)
        differs = max(differs, float(mx.abs(here - whole).max()))
    assert "sparse" in remote.calls
    assert differs > 1e-4


def test_sparse_after_a_trim_into_the_prefix_goes_by_the_rows_that_are_there(patch, model):
    """As a cache that never held more than what was kept."""
    sparse = SparseAuto(8, 2)
    trimmed, fresh = (
        hold(model, ids).caches(lambda cell, n: SparsePrefixKVCache(cell, n, sparse)) for ids in (IDS, IDS[:40])
    )
    model(mx.array(REST)[None], cache=trimmed)
    model(mx.array(REST[:1])[None], cache=trimmed)
    assert [cache.trim(36) for cache in trimmed] == [36, 36]
    other = random_tokens(40, seed=9104)
    for ids in (other, REST[:1], REST[1:2]):
        have, want = (model(mx.array(ids)[None], cache=caches) for caches in (trimmed, fresh))
        assert mx.allclose(have, want, atol=1e-5)


def test_sparse_that_leaves_nothing_out_is_dense(patch, model):
    caches = hold(model).caches(lambda cell, n: SparsePrefixKVCache(cell, n, SparseAuto(14, 5)))
    assert greedy(model, caches, REST, 8) == greedy(model, plain(model), REST, 8)


@pytest.mark.parametrize(("block", "top"), [(0, 1), (1, 0), (-1, 3)])
def test_sparse_settings_are_checked(block, top):
    with pytest.raises(ValueError, match="1 or more"):
        SparseAuto(block, top)
