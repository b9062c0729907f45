"""The wire lane's caches against plain mlx-lm, with the server's part played by NumPy in float64."""

from __future__ import annotations

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache

from pion_vllm_mlx import SparseAuto, UnsupportedAttentionError, install_pion_attention_patch, merging
from pion_vllm_mlx.patching import uninstall_pion_attention_patch
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import token_ids
from pion_vllm_mlx.testing import NumpyRemote, attention64, greedy, make_tiny_model, random_tokens
from pion_vllm_mlx.wire_cache import WireKVCache, WirePrefix

PREFIX = random_tokens(70, seed=9000)
REST = random_tokens(9, seed=9001)


@pytest.fixture(autouse=True)
def patch():
    install_pion_attention_patch()
    yield
    uninstall_pion_attention_patch()


def wire(model, ids=PREFIX, sparse=None):
    remote = NumpyRemote(prefill(model, token_ids(ids)))
    prefix = WirePrefix(remote, len(ids), sparse)
    return remote, [WireKVCache(prefix, layer) for layer in range(len(remote.rows()))]


def plain(model, ids=PREFIX):
    return prefill(model, token_ids(ids))


def logits(model, caches, *passes):
    return [np.array(model(mx.array(ids)[None], cache=caches).astype(mx.float32)) for ids in passes]


# Merging


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1)]),
    st.sampled_from([1.0, 30.0]), st.integers(1, 12),
)  # fmt: skip
def test_a_split_merges_to_the_whole(prefix, count, seed, heads, size, step):
    """Attention over prefix and causal suffix, split at the prefix's end, against float64 over all of it."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(heads[0], count, 8)) * size
    keys, values = (rng.normal(size=(heads[1], prefix + count, 8)) for _ in range(2))
    q, keys, values = (array.astype(np.float32) for array in (q, keys, values))
    groups = heads[0] // heads[1]
    far, far_lse = attention64(q, *(array[:, :prefix].repeat(groups, axis=0) for array in (keys, values)))
    near = [mx.array(array[None]) for array in (q, keys[:, prefix:], values[:, prefix:])]
    limit = merging.SCORE_BYTES
    merging.SCORE_BYTES = 4 * heads[0] * count * step
    try:
        output, lse = merging.suffix_attention(*near, 8**-0.5, "causal")
    finally:
        merging.SCORE_BYTES = limit
    merged = np.array(merging.merge(mx.array(far[None]), mx.array(far_lse[None, :, :, None]), output, lse))[0]
    for i in range(count):
        seen = [array[:, : prefix + i + 1].repeat(groups, axis=0) for array in (keys, values)]
        whole, _ = attention64(q[:, i : i + 1], *seen)
        assert np.abs(merged[:, i] - whole[:, 0]).max() < 2e-5 * max(1.0, size)


def test_a_query_that_sees_no_row_of_the_suffix_keeps_the_prefix():
    q, keys, values = (mx.random.normal((1, 2, 3, 8)) for _ in range(3))
    mask = mx.array([[[[False] * 3, [True, False, False], [True] * 3]]])
    output, lse = merging.suffix_attention(q, keys, values, 1.0, mask)
    far = mx.random.normal((1, 2, 3, 8))
    merged = merging.merge(far, mx.zeros((1, 2, 3, 1)), output, lse)
    assert mx.array_equal(merged[:, :, 0], far[:, :, 0])
    assert not mx.any(mx.isnan(merged)).item()


@pytest.mark.parametrize("kind", ["causal", "booleans", "numbers"])
def test_the_three_forms_of_a_causal_mask_agree(kind):
    mx.random.seed(5)
    q, keys, values = mx.random.normal((1, 4, 5, 8)), mx.random.normal((1, 2, 7, 8)), mx.random.normal((1, 2, 7, 8))
    allowed = create_causal_mask(5, 2)
    mask = {"causal": "causal", "booleans": allowed, "numbers": mx.where(allowed, 0.0, -mx.inf)}[kind]
    output, _ = merging.suffix_attention(q, keys, values, 0.3, mask)
    expected = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.3, mask="causal")
    assert mx.allclose(output, expected, atol=1e-6)


# A whole model


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("passes", [[REST], [REST[:1]], [REST[:4], REST[4:5], REST[5:]]], ids=["many", "one", "mixed"])
def test_logits_agree_with_plain_mlx_lm(heads, passes):
    model = make_tiny_model(num_key_value_heads=heads)
    remote, caches = wire(model)
    for have, want in zip(logits(model, caches, *passes), logits(model, plain(model), *passes), strict=True):
        assert np.abs(have - want).max() < 2e-5
    assert len(remote.calls) == 2 * len(passes)
    assert [cache.offset for cache in caches] == [len(PREFIX) + sum(map(len, passes))] * 2


def test_tokens_agree(model):
    _, caches = wire(model)
    assert greedy(model, caches, REST[:2], 20) == greedy(model, plain(model), REST[:2], 20)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_stays_what_it_is(dtype):
    model = make_tiny_model(dtype=dtype)
    _, caches = wire(model)
    output = model(mx.array(REST)[None], cache=caches)
    assert output.dtype == dtype
    expected = model(mx.array(REST)[None], cache=plain(model))
    assert mx.allclose(output.astype(mx.float32), expected.astype(mx.float32), atol=0.05)


def test_a_server_that_goes_away_in_the_middle_costs_no_token(model):
    for after in range(6):
        remote, caches = wire(model)
        attend, left = remote.attend, [after]

        def failing(question, attend=attend, left=left):
            left[0] -= 1
            return None if left[0] < 0 else attend(question)

        remote.attend = failing
        assert greedy(model, caches, REST, 6) == greedy(model, plain(model), REST, 6)
        assert len(remote.calls) == after
        assert [cache.offset for cache in caches] == [len(PREFIX) + len(REST) + 5] * 2


# Sparse


def test_sparse_reads_the_best_blocks_while_decoding_and_everything_before(model):
    remote, caches = wire(model, sparse=SparseAuto(8, 3))
    model(mx.array(REST)[None], cache=caches)
    model(mx.array(REST[:1])[None], cache=caches)
    assert remote.calls == ["query"] * 2 + ["sparse"] * 2


def test_sparse_with_room_for_every_block_is_dense(model):
    remote, caches = wire(model, sparse=SparseAuto(16, 5))
    assert greedy(model, caches, REST, 5) == greedy(model, plain(model), REST, 5)
    assert "sparse" not in remote.calls


# As mlx-lm's other caches


def test_generation_goes_on_after_a_trim_of_the_suffix_and_one_into_the_prefix(model):
    _, caches = wire(model)
    model(mx.array(REST)[None], cache=caches)
    assert [cache.trim(4) for cache in caches] == [4, 4]
    want = logits(model, plain(model), REST[:5], REST[5:])[1]
    assert np.abs(logits(model, caches, REST[5:])[0] - want).max() < 2e-5
    assert all(cache.is_trimmable() and not cache.empty() for cache in caches)
    assert [cache.trim(len(REST) + 30) for cache in caches] == [len(REST) + 30] * 2
    assert [cache.size() for cache in caches] == [len(PREFIX) - 30] * 2
    want = logits(model, plain(model, PREFIX[:-30]), REST)[0]
    assert np.abs(logits(model, caches, REST)[0] - want).max() < 2e-5
    assert [cache.trim(1000) for cache in caches] == [len(PREFIX) - 30 + len(REST)] * 2


def test_a_trim_into_the_prefix_before_anything_follows_it(model):
    remote, caches = wire(model)
    assert [cache.trim(30) for cache in caches] == [30] * 2
    assert greedy(model, caches, REST, 8) == greedy(model, plain(model, PREFIX[:-30]), REST, 8)
    assert remote.calls == []


def test_a_pass_that_failed_in_the_middle_leaves_no_caches_to_go_on_with(model):
    remote, caches = wire(model)
    attend = remote.attend

    def failing(question):
        if remote.calls:
            raise ConnectionError
        return attend(question)

    remote.attend = failing
    with pytest.raises(ConnectionError):
        greedy(model, caches, REST, 1)
    remote.attend = attend
    for each in (caches, copy.deepcopy(caches)):
        with pytest.raises(RuntimeError, match="make new ones"):
            greedy(model, each, REST, 1)


COPIES = {"shallow": lambda caches: [copy.copy(cache) for cache in caches], "deep": copy.deepcopy}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("away", [False, True, "later"])
@pytest.mark.parametrize("before", [[], REST], ids=["no suffix", "a suffix"])
def test_a_copy_is_another_suffix_behind_the_same_prefix(model, away, kind, before):
    """Both go on, in turn, as if the other wasn't there; the prefix is fetched for both at once."""
    remote, caches = wire(model)
    fetched = []
    rows = remote.rows
    remote.rows = lambda: fetched.append(True) or rows()
    remote.away = away is True
    if before:
        model(mx.array(before)[None], cache=caches)
    copied = COPIES[kind](caches)
    assert [cache.offset for cache in copied] == [len(PREFIX) + len(before)] * 2
    remote.away = bool(away)
    wanted = [plain(model, PREFIX + before) for _ in range(2)]
    for passes in ([7], [13]), ([11, 12], [14, 15]):
        for ids, each, want in zip(passes, (copied, caches), wanted, strict=True):
            assert np.abs(logits(model, each, ids)[0] - logits(model, want, ids)[0]).max() < 2e-5
    assert len(fetched) == bool(away)
    assert [cache.trim(3) for cache in copied] == [3, 3]
    assert [cache.offset for cache in caches] == [len(PREFIX) + len(before) + 3] * 2


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_made_after_a_pass_that_ended_between_its_cache_and_its_attention_is_useless(model, kind):
    """Else the copy would go on with rows that the layers behind never got."""
    _, caches = wire(model)
    caches[0].update_and_fetch(*arrays())
    for each in (COPIES[kind](caches), caches):
        with pytest.raises((RuntimeError, UnsupportedAttentionError), match=r"make new ones|function of its own"):
            greedy(model, each, REST, 1)


def test_state_is_for_evaluating_and_can_not_be_set(model):
    _, caches = wire(model)
    assert caches[0].state == []
    assert caches[0].nbytes == 0
    model(mx.array(REST)[None], cache=caches)
    mx.eval([cache.state for cache in caches])
    assert caches[0].nbytes == 2 * 4 * 2 * 256 * 16
    with pytest.raises(TypeError, match="make_pion_prompt_cache"):
        caches[0].state = caches[1].state


# What is refused


def arrays(batch=1, count=3, width=16, values=None):
    return [mx.random.normal((batch, 2, count, w)) for w in (width, width if values is None else values)]


def call(cache, *, keys=None, mask=None, sinks=None, batch=1, width=16, values=None, function=None):
    from mlx_lm.models import base

    fetched = cache.update_and_fetch(*arrays(batch, width=width, values=values))
    keys = fetched[0] if keys is None else keys
    queries = mx.random.normal((batch, 4, 3, width))
    attend = function or base.scaled_dot_product_attention
    return attend(queries, keys, fetched[1], cache=cache, scale=0.25, mask=mask, sinks=sinks)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"batch": 2}, "batch of 2"),
        ({"sinks": mx.zeros(4)}, "sinks"),
        ({"values": 8}, "values of width 8"),
        ({"keys": mx.zeros((1, 2, 3, 16))}, "changed after taking"),
        ({"mask": create_causal_mask(3, 70, window_size=20)}, "sliding window"),
        ({"mask": mx.broadcast_to(mx.arange(73.0), (1, 1, 3, 73))}, "bias"),
        ({"mask": mx.zeros((3, 3))}, "over 3 rows"),
        ({"mask": "other"}, "'other'"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_what_cannot_be_computed_is_refused_by_name(model, arguments, word):
    _, caches = wire(model)
    with pytest.raises(UnsupportedAttentionError, match=word):
        call(caches[0], **arguments)


def test_a_window_is_refused_when_the_mask_is_made(model):
    _, caches = wire(model)
    with pytest.raises(UnsupportedAttentionError, match="window of 20"):
        caches[0].make_mask(3, return_array=False, window_size=20)
    assert caches[0].make_mask(3, return_array=False, window_size=None) == "causal"
    assert caches[0].make_mask(1, return_array=False, window_size=None) is None


def test_an_attention_that_the_patch_does_not_see_is_noticed(model):
    _, caches = wire(model)
    caches[0].update_and_fetch(*arrays())
    with pytest.raises(UnsupportedAttentionError, match="function of its own"):
        caches[0].update_and_fetch(*arrays())


def test_the_patch_leaves_other_caches_alone(model):
    caches = make_prompt_cache(model)
    assert type(caches[0]) is KVCache
    patched = logits(model, caches, PREFIX)[0]
    uninstall_pion_attention_patch()
    assert np.array_equal(patched, logits(model, make_prompt_cache(model), PREFIX)[0])
