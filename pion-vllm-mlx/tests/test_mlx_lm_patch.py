"""Installing and removing the patch, and `make_pion_prompt_cache` against a real server."""

from __future__ import annotations

import importlib
import sys
import threading
import types

import pytest
from mlx_lm.models import base, llama
from mlx_lm.models.cache import KVCache

from pion_vllm_mlx import (
    install_pion_attention_patch,
    uninstall_pion_attention_patch,
)
from pion_vllm_mlx.attention_calls import AttentionCache
from pion_vllm_mlx.patching import patch_installed

NAME = "scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def clean():
    yield
    uninstall_pion_attention_patch()
    assert not patch_installed()


def places():
    """Every name in every loaded module that stands for an attention function of that name."""
    return {
        (module.__name__, name): value
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if isinstance(value, types.FunctionType) and value.__name__ == NAME
    }


def test_it_is_removed_without_a_trace():
    importlib.import_module("mlx_lm.models.qwen2")
    before = places()
    assert ("mlx_lm.models.qwen2", NAME) in before
    install_pion_attention_patch()
    patched = places()
    assert patched.keys() == before.keys()
    assert len(set(map(id, patched.values()))) == 1
    assert all(patched[key] is not before[key] for key in before)
    uninstall_pion_attention_patch()
    after = places()
    assert all(after[key] is before[key] for key in before)
    assert after.keys() == before.keys()


def test_both_ways_are_idempotent():
    original = base.scaled_dot_product_attention
    uninstall_pion_attention_patch()
    assert base.scaled_dot_product_attention is original
    install_pion_attention_patch()
    patched = base.scaled_dot_product_attention
    install_pion_attention_patch()
    assert base.scaled_dot_product_attention is patched
    uninstall_pion_attention_patch()
    uninstall_pion_attention_patch()
    assert base.scaled_dot_product_attention is llama.scaled_dot_product_attention is original


def test_modules_imported_later_and_under_other_names_are_covered():
    sys.modules.pop("mlx_lm.models.starcoder2", None)
    original = base.scaled_dot_product_attention
    install_pion_attention_patch()
    later = importlib.import_module("mlx_lm.models.starcoder2")
    assert later.scaled_dot_product_attention is base.scaled_dot_product_attention is not original
    own = types.ModuleType("a_model_of_ones_own")
    own.attention = base.scaled_dot_product_attention
    sys.modules[own.__name__] = own
    try:
        uninstall_pion_attention_patch()
        assert later.scaled_dot_product_attention is own.attention is original
    finally:
        del sys.modules[own.__name__]


@pytest.mark.parametrize("cache", [None, KVCache(), object()], ids=["none", "KVCache", "other"])
@pytest.mark.parametrize("by_name", [True, False])
def test_for_other_caches_the_original_gets_the_same_arguments(monkeypatch, cache, by_name):
    seen = []

    def scaled_dot_product_attention(*args, **kwargs):
        seen.append((args, kwargs))
        return "the answer"

    monkeypatch.setattr(base, NAME, scaled_dot_product_attention)
    install_pion_attention_patch()
    q, k, v, mask = (object() for _ in range(4))
    args, kwargs = (
        ((q, k, v), {"cache": cache, "scale": 0.5, "mask": mask}) if by_name else ((q, k, v, cache, 1, mask), {})
    )
    assert base.scaled_dot_product_attention(*args, **kwargs) == "the answer"
    ((got, names),) = seen
    assert all(a is b for a, b in zip(got, args, strict=True))
    assert names.keys() == kwargs.keys()
    assert all(names[key] is kwargs[key] for key in kwargs)
    uninstall_pion_attention_patch()
    assert base.scaled_dot_product_attention is scaled_dot_product_attention


@pytest.mark.parametrize("by_name", [True, False])
def test_a_cache_of_ours_gets_the_call(by_name):
    class Cache(AttentionCache):
        def attend(self, original, call):
            return original, call

    before = base.scaled_dot_product_attention
    install_pion_attention_patch()
    cache, sinks = Cache(), object()
    if by_name:
        answer = base.scaled_dot_product_attention(1, 2, 3, cache=cache, scale=4, mask=5, sinks=sinks)
    else:
        answer = base.scaled_dot_product_attention(1, 2, 3, cache, 4, 5, sinks)
    original, call = answer
    assert original is before
    assert (call.queries, call.keys, call.values, call.scale, call.mask, call.sinks) == (1, 2, 3, 4, 5, sinks)


def test_threads_install_and_remove_it_at_once():
    original = base.scaled_dot_product_attention
    barrier = threading.Barrier(8)

    def work(i):
        barrier.wait()
        for _ in range(5):
            (install_pion_attention_patch if i % 2 else uninstall_pion_attention_patch)()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    uninstall_pion_attention_patch()
    assert all(value is original for key, value in places().items() if key[0].startswith("mlx_lm.models."))
