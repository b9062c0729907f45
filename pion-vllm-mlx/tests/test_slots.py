"""Each cache class is stored and restored bit for bit, or refused by name."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, trim_prompt_cache

from pion_vllm_mlx import UnsupportedCacheError
from pion_vllm_mlx.slots import CODECS_BY_KIND, Scratch, Side, SlotShape, codec, probe
from pion_vllm_mlx.slots import DTYPES as DTYPES_BY_NAME
from pion_vllm_mlx.testing import greedy, make_tiny_model, random_tokens, same_bits

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def awkward_values(dtype, shape):
    """Every special value there is: NaN payloads, infinities, subnormals, both zeros, the largest and the smallest."""
    unsigned = np.uint32 if dtype == mx.float32 else np.uint16
    count = int(np.prod(shape))
    bits = np.random.default_rng(5).integers(0, np.iinfo(unsigned).max, count, dtype=unsigned, endpoint=True)
    special = {
        mx.float32: [0x7FC00001, 0xFFC12345, 0x7F800001, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x7F7FFFFF, 0x7149F2CA],
        mx.float16: [0x7E01, 0xFE12, 0x7C01, 0x7C00, 0xFC00, 0x8000, 1, 0x7BFF],
        mx.bfloat16: [0x7FC1, 0xFFD2, 0x7F81, 0x7F80, 0xFF80, 0x8000, 1, 0x7F7F, 0x714A],
    }[dtype]
    bits[: len(special)] = special
    array = mx.array(bits.reshape(shape)).view(dtype)
    mx.eval(array)
    return array


class OneSlot:
    """A model whose cache holds what the test puts into it."""

    def __init__(self, keys, values):
        self.layers = [None]
        self.filling = keys, values

    def make_cache(self):
        return [KVCache()]

    def __call__(self, ids, cache):
        keys, values = self.filling
        if cache[0].offset == 0 and ids.shape[1] == 1:
            keys, values = keys[..., :1, :], values[..., :1, :]
        cache[0].update_and_fetch(keys, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_survives(connect, dtype):
    model = OneSlot(awkward_values(dtype, (1, 2, 70, 32)), awkward_values(dtype, (1, 2, 70, 32)))
    ids = random_tokens(70, seed=int(dtype == mx.float32) + 2 * int(dtype == mx.float16))
    cold = connect(model).get_or_prefill(ids)
    reader = connect(model)
    warm = reader.get_or_prefill(ids)
    assert reader.stats()["hits"] == 1
    assert same_bits(cold, warm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [72, 80, 96, 100])
def test_odd_head_dimensions(connect, dtype, head_dim):
    model = OneSlot(awkward_values(dtype, (1, 3, 40, head_dim)), awkward_values(dtype, (1, 3, 40, head_dim)))
    ids = random_tokens(40, seed=head_dim)
    assert same_bits(connect(model).get_or_prefill(ids), connect(model).get_or_prefill(ids))


def test_keys_and_values_of_different_width(connect):
    model = OneSlot(awkward_values(mx.float32, (1, 1, 40, 48)), awkward_values(mx.float32, (1, 1, 40, 8)))
    ids = random_tokens(40, seed=9)
    reader = connect(model)
    assert same_bits(connect(model).get_or_prefill(ids), reader.get_or_prefill(ids))
    assert reader.stats()["bytes_fetched"] == 40 * (48 + 8) * 4


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_caches_restored_through_the_same_scratch_have_memory_of_their_own(dtype):
    shape = SlotShape("KVCache", dtype, Side(2, 16), Side(2, 16))
    scratch = Scratch()
    blanks = [CODECS_BY_KIND["KVCache"].blank(shape, 5, 8, scratch) for _ in range(2)]
    for number, blank in enumerate(blanks):
        for index in (0, 1):
            blank.side(index)[...] = 1 + 2 * number + index
            blank.filled(index)
    caches = [blank.finish() for blank in blanks]
    for number, cache in enumerate(caches):
        assert cache.offset == 5
        for index, array in enumerate((cache.keys, cache.values)):
            assert array.dtype == DTYPES_BY_NAME[dtype]
            bits = array if dtype != "bf16" else array.view(mx.uint16)
            memory = np.asarray(memoryview(bits))
            assert memory.shape == (1, 2, 8, 16)
            assert (memory[:, :, :5] == 1 + 2 * number + index).all()
            assert not memory[:, :, 5:].any(), "what lies behind the prefix is zero"
            memory[...] = 0


@pytest.mark.parametrize("keep", [1, 17, 64, 255, 256, 257])
def test_a_trimmed_cache_stores_like_a_fresh_one(model, keep):
    """Trimming leaves rows behind the offset; they must not be stored (fault class 7)."""
    ids = random_tokens(300)
    trimmed, fresh = model.make_cache() if hasattr(model, "make_cache") else None, None
    from mlx_lm.models.cache import make_prompt_cache

    trimmed, fresh = make_prompt_cache(model), make_prompt_cache(model)
    model(mx.array([ids[:keep]]), cache=trimmed)
    model(mx.array([ids[keep:]]), cache=trimmed)
    model(mx.array([ids[:keep]]), cache=fresh)
    mx.eval([cache.state for cache in (*trimmed, *fresh)])
    assert trim_prompt_cache(trimmed, 300 - keep) == 300 - keep
    for left, right in zip(trimmed, fresh, strict=True):
        entry = codec(left)
        assert entry.tokens(left) == entry.tokens(right) == keep
        for a, b in zip(entry.rows(left, 0, keep), entry.rows(right, 0, keep), strict=True):
            assert a.shape == (keep, 32)
            assert mx.array_equal(a, b)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_copies(heads, tokens, dtype):
    cache = KVCache()
    # Set, so that there is no room beyond the tokens: one token of several heads lies in order as well.
    cache.state = *(awkward_values(dtype, (1, heads, tokens, 16)) for _ in range(2)), tokens
    mx.eval(cache.keys, cache.values)
    kept = [
        bytes(memoryview(mx.contiguous(array[0].transpose(1, 0, 2))).cast("B")) for array in (cache.keys, cache.values)
    ]
    rows = codec(cache).rows(cache, 0, tokens)
    for array in (cache.keys, cache.values):
        bits = mx.uint32 if dtype == mx.float32 else mx.uint16
        memory = np.asarray(memoryview(array if dtype != mx.bfloat16 else array.view(bits)))
        memory[...] = 5
    assert [bytes(memoryview(array).cast("B")) for array in rows] == kept


def test_row_i_of_a_slot_is_token_i():
    """K[pos][d] = pos + d/100 in every head: a shift or a mix-up of heads shows in the value."""
    count = 21
    position = mx.arange(count).reshape(1, 1, count, 1)
    head = mx.array([0.0, 1000.0]).reshape(1, 2, 1, 1)
    keys = position + head + mx.arange(8).reshape(1, 1, 1, 8) / 100
    cache = KVCache()
    cache.update_and_fetch(keys, -keys)
    rows, negative = codec(cache).rows(cache, 3, 9)
    assert np.allclose(np.array(rows)[2], [5 + h + d / 100 for h in (0, 1000) for d in range(8)])
    assert mx.array_equal(rows, -negative)


@pytest.mark.parametrize("kind", [lambda: RotatingKVCache(max_size=8), QuantizedKVCache, type("Mine", (KVCache,), {})])
def test_other_classes_are_refused_by_name(kind):
    model = make_tiny_model()
    model.make_cache = lambda: [KVCache(), kind()]
    with pytest.raises(UnsupportedCacheError, match=type(kind()).__name__):
        probe(model)


def test_a_model_with_a_sliding_window_is_refused_before_anything_is_stored():
    model = make_tiny_model(layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    from pion_vllm_mlx import PionPromptCache

    with pytest.raises(UnsupportedCacheError, match="RotatingKVCache"):
        PionPromptCache(model)


def test_a_batch_is_refused():
    cache = KVCache()
    cache.update_and_fetch(mx.ones((2, 2, 4, 8)), mx.ones((2, 2, 4, 8)))
    with pytest.raises(UnsupportedCacheError, match="batch of 2"):
        codec(cache).shape(cache)


def test_a_restored_cache_goes_on_like_the_original(connect, model):
    """Beyond the spare room, so that the cache has to grow as well."""
    ids = random_tokens(250, seed=77)
    cold = connect(model).get_or_prefill(ids)
    warm = connect(model).get_or_prefill(ids)
    more = random_tokens(300, seed=78)
    assert greedy(model, cold, more, 20) == greedy(model, warm, more, 20)
    assert same_bits(cold, warm)
