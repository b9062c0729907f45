"""Separate processes: the same names, the same bits, the same answers."""

from __future__ import annotations

from mlx_lm.models.cache import make_prompt_cache

from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_key import token_ids
from pion_vllm_mlx.testing import greedy, random_tokens

TEXT = (
    "Pion keeps the computed keys and values of a prompt, so that the next process that reads the same text can go on "
    "where the first one stopped. The text may be a system prompt, a long document or the history of a conversation. "
)
QUESTIONS = ("In one word, what is kept?", "Who reads the text next? Answer briefly:", "1 2 3 4 5")


def test_three_processes_with_random_hash_seeds_agree_on_every_name(in_a_process, pion_server):
    """Fault class 31."""
    prompts = [random_tokens(n, seed=n) for n in (1, 16, 100)]
    job = {"model": "tiny", "mode": "names", "port": pion_server.port, "prompts": prompts}
    seen = {str(in_a_process(job, seed)["namespaces"]) for seed in ("1", "4242", "random")}
    assert len(seen) == 1


def test_another_process_answers_with_the_same_bits_from_what_the_first_one_stored(
    in_a_process, pion_server, demo_model
):
    """Fault fixture F2: 12 greedy tokens, the same prefill split, warm in another process against cold and plain."""
    model, tokenizer = demo_model
    shared = tokenizer.encode(TEXT * 2)
    prompts = [shared + tokenizer.encode(question) for question in QUESTIONS]
    job = {"model": "demo", "mode": "answer", "port": pion_server.port, "prompts": prompts, "new_tokens": 12}
    cold, warm = in_a_process(job), in_a_process(job)
    assert cold["stats"]["misses"] == 1
    assert cold["stats"]["partial_hits"] + cold["stats"]["hits"] == 2
    assert (warm["stats"]["misses"], warm["stats"]["tokens_prefilled"]) == (0, 0)
    assert warm["hashes"] == cold["hashes"]
    assert warm["answers"] == cold["answers"]
    # Without Pion: the first prompt is cut where prepare_prompt cut it, so the bits are the same as well.
    ids = token_ids(prompts[0])
    boundary = (len(ids) - 1) // 16 * 16
    plain = prefill(model, ids[:boundary])
    assert greedy(model, plain, ids[boundary:].tolist(), 12) == warm["answers"][0]


def test_nothing_is_evaluated_twice(pion_server, demo_model, monkeypatch):
    """Count the tokens the model really sees, not what a counter says (fault class 9)."""
    from pion_vllm_mlx import PionPromptCache

    model, tokenizer = demo_model
    prompt = tokenizer.encode(TEXT + "Nothing twice.")
    with PionPromptCache(model, tokenizer=tokenizer, port=pion_server.port, fallback=False) as pc:
        pc.prepare_prompt(prompt)
        seen: list[int] = []
        forward = type(model).__call__

        def counted(self, ids, *args, **kwargs):
            seen.append(ids.shape[1])
            return forward(self, ids, *args, **kwargs)

        monkeypatch.setattr(type(model), "__call__", counted)
        caches, rest = pc.prepare_prompt(prompt)
        assert seen == []
        greedy(model, caches, rest, 1)
        assert seen == [len(rest)]
    assert 1 <= len(rest) <= 16
    assert len(make_prompt_cache(model)) == len(caches)
