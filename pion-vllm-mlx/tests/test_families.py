"""Every family of the installed mlx-lm: its attention agrees when it is split, or it is refused by name."""

from __future__ import annotations

import functools
import importlib
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from pion_vllm_mlx import UnsupportedAttentionError, families, install_pion_attention_patch, observing
from pion_vllm_mlx.families import Verdict, family_names, judge, small_model
from pion_vllm_mlx.inproc import HeldPrefix, PrefixKVCache
from pion_vllm_mlx.patching import uninstall_pion_attention_patch
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import token_ids
from pion_vllm_mlx.testing import NumpyRemote, greedy
from pion_vllm_mlx.wire_cache import WireKVCache, WirePrefix

PREFIX = [int(token) for token in np.random.default_rng(9300).integers(1, 500, 37)]
REST = [5, 17, 101, 9]
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "mlx-lm-families.md"
NAMES = family_names()


@pytest.fixture(autouse=True)
def patch():
    install_pion_attention_patch()
    yield
    uninstall_pion_attention_patch()


@pytest.fixture(autouse=True)
def bounds(monkeypatch):
    """An index outside of an array is an error in these tests.

    MLX checks no bounds: a small model that writes at places which only the real one has (fixed token ids, say) damages
    the memory of this process, and something else fails later.
    """
    for name in ("__getitem__", "__setitem__"):
        monkeypatch.setattr(mx.array, name, checked(getattr(mx.array, name)))


def checked(method):
    def with_check(array, key, *value):
        check_index(array.shape, key if isinstance(key, tuple) else (key,))
        return method(array, key, *value)

    return with_check


def check_index(shape, parts):
    """Raise IndexError if a number, or an array of numbers, names a place that its axis doesn't have."""
    parts = [part for part in parts if part is not None]
    if any(isinstance(part, mx.array) and part.dtype == mx.bool_ for part in parts):
        return
    skipped = len(shape) - len(parts) + 1
    axis = 0
    for part in parts:
        if isinstance(part, int | mx.array) and mx.array(part).size:
            with suppress(ValueError):  # inside a function that is being compiled there are no values
                low, high = (int(end(mx.array(part)).item()) for end in (mx.min, mx.max))
                if not -shape[axis] <= low <= high < shape[axis]:
                    msg = f"{low} to {high} of an axis of {shape[axis]}"
                    raise IndexError(msg)
        axis += skipped if part is Ellipsis else 1


def test_an_index_outside_of_an_array_is_noticed():
    array = mx.zeros((2, 3, 4))
    assert array[..., mx.array([3, -4])].shape == (2, 3, 2)
    assert array[None, 1, ..., mx.array([0, 3])].size == 6
    for key in (
        (..., mx.array([0, 4])),
        mx.array([-3]),
        (None, mx.array([2])),
        (0, 3),
        (None, 0, ..., mx.array([4])),
        2,
    ):
        with pytest.raises(IndexError, match="of an axis of"):
            array[key]
        with pytest.raises(IndexError, match="of an axis of"):
            array[key] = 0


verdict = functools.cache(judge)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_agrees_or_is_refused_by_name(name):
    family = verdict(name)
    if family.verdict not in (Verdict.WIRE, Verdict.INPROC):
        assert family.why
        return
    model = small_model(name)
    held = HeldPrefix.of(b"", token_ids(PREFIX), prefill(model, token_ids(PREFIX))).caches(PrefixKVCache)
    plain = prefill(model, token_ids(PREFIX))
    assert greedy(model, held, REST, 8) == greedy(model, plain, REST, 8)
    if family.verdict is Verdict.INPROC:
        assert family.why
        return
    whole = prefill(model, token_ids(PREFIX))
    remote = NumpyRemote(prefill(model, token_ids(PREFIX)))
    prefix = WirePrefix(remote, len(PREFIX), None)
    split = [WireKVCache(prefix, layer) for layer in range(len(whole))]
    for ids in (REST, REST[:1]):
        have, want = (np.array(model(mx.array([ids]), cache=caches)) for caches in (split, whole))
        assert np.abs(have - want).max() < 1e-4 * max(1.0, np.abs(want).max())
    assert greedy(model, split, REST[1:2], 8) == greedy(model, whole, REST[1:2], 8)
    assert len(remote.calls) == len(whole) * 10


def test_the_prefix_matters_to_these_models():
    """Else a split that loses it would agree, too."""
    model = small_model("llama")
    other = [*PREFIX[:-1], PREFIX[-1] + 1]
    logits = [np.array(model(mx.array([REST]), cache=prefill(model, token_ids(ids)))) for ids in (PREFIX, other)]
    assert np.abs(logits[0] - logits[1]).max() > 1e-2


def test_the_documented_list_is_what_is_found():
    assert "\n".join(families.table([verdict(name) for name in NAMES])) in DOCUMENT.read_text(encoding="utf-8")


# Models that are not what they seem


def llama_with(attention, **settings):
    """A tiny llama whose attention was changed."""
    module = importlib.import_module("mlx_lm.models.llama")
    model = small_model("llama")
    kind = type("Attention", (module.Attention,), {"__call__": attention})
    for layer in model.layers:
        layer.self_attn.__class__ = kind
    return model


def parts(self, x, cache):
    from mlx_lm.models.llama import scaled_dot_product_attention

    batch, length, _ = x.shape
    q, k, v = (
        array.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
        for array, heads in zip(
            (self.q_proj(x), self.k_proj(x), self.v_proj(x)),
            (self.n_heads, self.n_kv_heads, self.n_kv_heads),
            strict=True,
        )
    )
    return q, *cache.update_and_fetch(k, v), scaled_dot_product_attention


def finished(self, output):
    return self.o_proj(output.transpose(0, 2, 1, 3).reshape(1, output.shape[2], -1))


def own_function(self, x, mask=None, cache=None):
    q, k, v, _ = parts(self, x, cache)
    return finished(self, mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale))


def without_its_cache(self, x, mask=None, cache=None):
    q, k, v, attend = parts(self, x, cache)
    return finished(self, attend(q, k, v, cache=None, scale=self.scale, mask=None))


def twice(self, x, mask=None, cache=None):
    q, k, v, attend = parts(self, x, cache)
    attend(q, k, v, cache=cache, scale=self.scale, mask=None)
    return finished(self, attend(q, k, v, cache=cache, scale=self.scale, mask=None))


def changed_keys(self, x, mask=None, cache=None):
    q, k, v, attend = parts(self, x, cache)
    return finished(self, attend(q, k * 2, v, cache=cache, scale=self.scale, mask=None))


def with_sinks(self, x, mask=None, cache=None):
    q, k, v, attend = parts(self, x, cache)
    return finished(self, attend(q, k, v, cache=cache, scale=self.scale, mask=None, sinks=mx.zeros(self.n_heads)))


def with_a_bias(self, x, mask=None, cache=None):
    q, k, v, attend = parts(self, x, cache)
    rows = mx.arange(cache.offset).astype(mx.float32)
    return finished(self, attend(q, k, v, cache=cache, scale=self.scale, mask=rows[None, None, None]))


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (own_function, "function of its own"),
        (without_its_cache, "without the cache"),
        (twice, "2 calls"),
        (changed_keys, "changed after taking"),
        (with_sinks, "sinks"),
        (with_a_bias, "bias"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_kind_of_other_attention_is_noticed_and_named(attention, words):
    model = llama_with(attention)
    with pytest.raises(UnsupportedAttentionError, match=words) as caught:
        observing.watch(model, len(model.layers))
    assert str(caught.value).startswith("test_families: ") or "llama" in str(caught.value)
