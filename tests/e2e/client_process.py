"""One client of the end-to-end tests, run as a process of its own: a job as JSON in, a result as JSON out."""

from __future__ import annotations

import hashlib
import json
import sys


def main() -> None:
    job = json.load(sys.stdin)
    from pion_vllm_mlx import PionPromptCache
    from pion_vllm_mlx.demo_model import load_demo_model
    from pion_vllm_mlx.testing import greedy, make_tiny_model

    model, tokenizer = (make_tiny_model(), None) if job["model"] == "tiny" else load_demo_model()
    with PionPromptCache(model, tokenizer=tokenizer, port=job["port"], fallback=False) as pc:
        result = {"namespaces": [pc.namespace(ids) for ids in job["prompts"]], "answers": [], "hashes": []}
        if job["mode"] != "names":
            for ids in job["prompts"]:
                caches, rest = pc.prepare_prompt(ids)
                digest = hashlib.sha256()
                for cache in caches:
                    for array in (cache.keys, cache.values):
                        digest.update(bytes(memoryview(array[..., : cache.offset, :] + 0)))
                result["hashes"].append(digest.hexdigest())
                result["answers"].append(greedy(model, caches, rest, job["new_tokens"]))
        result["stats"] = pc.stats()
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
