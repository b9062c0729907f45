"""Which changes of a model are noticed (fault class 27)."""

from __future__ import annotations

import itertools

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.utils import linear_to_lora_layers

from pion_vllm_mlx import fingerprint
from pion_vllm_mlx.fingerprint import PIECES, WHOLE_BYTES, Fingerprint, tokenizer_fingerprint
from pion_vllm_mlx.testing import make_tiny_model, random_tokens


def identity(model):
    return Fingerprint(model).current()


def with_adapter(seed=0, scale=2.0, base=None):
    model = base or make_tiny_model()
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": scale, "dropout": 0.0})
    mx.random.seed(seed)
    for layer in model.layers:
        layer.self_attn.q_proj.lora_b = mx.random.normal(layer.self_attn.q_proj.lora_b.shape)
    mx.eval(model.parameters())
    return model


def test_the_same_model_built_twice_is_the_same():
    assert identity(make_tiny_model()) == identity(make_tiny_model())


def test_whatever_changes_the_rows_changes_the_identity():
    models = [
        make_tiny_model(), make_tiny_model(1), make_tiny_model(dtype=mx.float16), make_tiny_model(rope_theta=5000.0),
        make_tiny_model(rope_traditional=True), make_tiny_model(rms_norm_eps=1e-6),
        make_tiny_model(rope_scaling={"type": "linear", "factor": 2.0}),
        with_adapter(), with_adapter(seed=1), with_adapter(scale=3.0),
    ]  # fmt: skip
    identities = [identity(model) for model in models]
    assert all(a != b for a, b in itertools.combinations(identities, 2))
    assert identities[3].rope != identities[0].rope


def test_one_value_of_an_adapter_is_enough():
    model = with_adapter()
    before = identity(model)
    adapter = model.layers[1].self_attn.q_proj
    changed = mx.array(adapter.lora_b)
    changed[2, 3] += 0.5
    adapter.lora_b = changed
    assert identity(model) != before


def test_an_adapter_loaded_reloaded_and_removed_is_noticed_by_the_same_object(connect):
    model = make_tiny_model()
    pc = connect(model)
    ids = random_tokens(20)
    base = pc.namespace(ids)
    plain = [layer.self_attn.q_proj for layer in model.layers]
    with_adapter(base=model)
    first = pc.namespace(ids)
    reloaded = []
    for seed in range(1, 6):  # each frees the last one's memory, so that addresses are used again
        for layer in model.layers:
            mx.random.seed(seed)
            layer.self_attn.q_proj.lora_b = mx.random.normal(layer.self_attn.q_proj.lora_b.shape)
        reloaded.append(pc.namespace(ids))
    model.layers[0].self_attn.q_proj.scale = 7.0
    rescaled = pc.namespace(ids)
    for layer, linear in zip(model.layers, plain, strict=True):
        layer.self_attn.update_modules({"q_proj": linear})
    assert len({base, first, rescaled, *reloaded}) == 8
    # The other adapters of these layers are still there, so this is not the base again until they go as well.
    assert pc.namespace(ids) not in {first, rescaled, *reloaded}


def test_the_identity_is_kept_while_nothing_changes():
    model = make_tiny_model()
    fingerprint = Fingerprint(model)
    assert fingerprint.current() is fingerprint.current()
    model.eval()
    assert fingerprint.current() is fingerprint.current()


def test_writing_in_place_needs_forget():
    model = make_tiny_model()
    fingerprint = Fingerprint(model)
    before = fingerprint.current()
    model.model.norm.weight[0] = 9.0
    fingerprint.forget()
    assert fingerprint.current() != before


def test_large_tensors_are_sampled_from_end_to_end():
    rows = 2 * WHOLE_BYTES // (64 * 4)
    model = make_tiny_model(vocab_size=rows)
    before = identity(model)
    for row in (0, rows - 1, rows // 2):
        weight = mx.array(model.model.embed_tokens.weight)
        span = rows // PIECES + 1
        weight[max(0, row - span) : row + span] += 1.0
        changed = make_tiny_model(vocab_size=rows)
        changed.model.embed_tokens.weight = weight
        assert identity(changed) != before


class Tokenizer:
    """As much of a slow tokenizer as the fingerprint reads."""

    def __init__(self, **vocabulary):
        self.vocabulary = vocabulary

    def get_vocab(self):
        return self.vocabulary


def test_tokenizers_differ_by_their_vocabulary_not_by_its_order():
    first = tokenizer_fingerprint(Tokenizer(a=1, b=2))
    assert tokenizer_fingerprint(Tokenizer(b=2, a=1)) == first
    assert tokenizer_fingerprint(Tokenizer(a=2, b=1)) != first


@pytest.fixture
def fast_tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def make(vocabulary):
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
        return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="a")

    return make


@pytest.mark.parametrize("wrap", [lambda tokenizer: tokenizer, TokenizerWrapper])
def test_switching_padding_on_is_not_another_tokenizer(fast_tokenizer, wrap):
    tokenizer = fast_tokenizer({"a": 0, "b": 1})
    before = tokenizer_fingerprint(wrap(tokenizer))
    plain = tokenizer.backend_tokenizer.to_str()
    tokenizer(["a", "a b"], padding=True, truncation=True, max_length=1)
    assert tokenizer.backend_tokenizer.to_str() != plain
    assert tokenizer_fingerprint(wrap(tokenizer)) == before
    assert tokenizer_fingerprint(wrap(fast_tokenizer({"a": 1, "b": 0}))) != before


def test_a_wrapped_tokenizer_is_the_same_one(fast_tokenizer):
    fast, slow = fast_tokenizer({"a": 0, "b": 1}), Tokenizer(a=0, b=1)
    wrapped_slow = type("Wrapper", (), {"_tokenizer": slow})()
    assert tokenizer_fingerprint(TokenizerWrapper(fast)) == tokenizer_fingerprint(fast)
    assert tokenizer_fingerprint(wrapped_slow) == tokenizer_fingerprint(slow)


def test_how_a_fast_tokenizer_splits_counts_not_only_its_vocabulary(fast_tokenizer):
    from tokenizers import pre_tokenizers

    first, second = (fast_tokenizer({"a": 0, "b": 1}) for _ in range(2))
    second.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert tokenizer_fingerprint(first) != tokenizer_fingerprint(second)


@pytest.mark.parametrize("change", [lambda m: m.tables["a"].append(3), lambda m: m.tables.update(b=True)])
def test_plain_values_in_lists_and_dicts_of_a_module_count(change):
    model = make_tiny_model()
    model.model.tables = {"a": [1, 2], "b": False}
    fingerprint = Fingerprint(model)
    before = fingerprint.current()
    assert fingerprint.current() is before
    change(model.model)
    assert fingerprint.current() != before


_settings = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from([0.5, "a", "b", ""]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from("abc"), children, max_size=3),
    max_leaves=8,
)


@given(one=_settings, other=_settings)
def test_whatever_the_hash_would_see_the_check_sees(one, other):
    class Holder(nn.Module):
        def __init__(self, held):
            super().__init__()
            self["held"] = held

    found = []
    for held in (one, other):
        leaves, marks = [], []
        fingerprint._collect(Holder(held), "", leaves)
        fingerprint._walk(Holder(held), marks, [])
        found.append((leaves, marks))
    (one_leaves, one_marks), (other_leaves, other_marks) = found
    if one_leaves != other_leaves:
        assert one_marks != other_marks
    if one == other:
        assert one_marks == other_marks
