"""The demo model, a real one, over every lane against plain mlx-lm.

Few prompts and tokens; `benchmarks stage2` continues more of them for longer.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from pion_vllm_mlx import (
    PionPromptCache,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)
from pion_vllm_mlx.demo import conversation
from pion_vllm_mlx.demo_model import load_demo_model
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import token_ids

TOKENS = 8
LANES = {"in process": {}, "binary": {"inproc": False, "lane": "binary"}, "resp": {"inproc": False, "lane": "resp"}}


@pytest.fixture(scope="module")
def demo():
    return load_demo_model()


@pytest.fixture(autouse=True)
def patch():
    install_pion_attention_patch()
    yield
    uninstall_pion_attention_patch()


def answer(model, caches, rest):
    steps = generate_step(mx.array(rest), model, max_tokens=TOKENS, prompt_cache=caches)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("question", ["What is the capital of France?", conversation.QUESTION])
def test_every_lane_gives_the_tokens_of_plain_mlx_lm(server, demo, question):
    model, tokenizer = demo
    system = conversation.system_prompts(240)[0]
    ids = conversation.prompt_ids(tokenizer, system, question)
    length = conversation.prefix_length(tokenizer, system)
    want = answer(model, prefill(model, token_ids(ids[:length])), ids[length:])
    for name, options in LANES.items():
        with PionPromptCache(model, port=server.port, stage2=True, fallback=False, **options) as pc:
            pc.get_or_prefill(ids[:length])
            caches = make_pion_prompt_cache(model, pc.namespace(ids[:length]), pc, length)
            assert answer(model, caches, ids[length:]) == want, name
            calls = pc.stats()["attend_calls"]
            assert calls == (0 if name == "in process" else len(caches) * (TOKENS + 2))
