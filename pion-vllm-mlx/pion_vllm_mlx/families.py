"""Small random models of every family in the installed mlx-lm, and what Pion can do with each.

    python -m pion_vllm_mlx.families        # prints the table of the documentation

A configuration is made from the fields of a family's `ModelArgs`: known names get small values, other required ones a
value of their type. `SETTINGS` has what can't be guessed. The verdict is found by running the model, as
`make_pion_prompt_cache` does; there is no list of families that are covered.
"""

from __future__ import annotations

import dataclasses
import enum
import pkgutil
import sys
import typing
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import attrs
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import models
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from pion_vllm_mlx import observing
from pion_vllm_mlx.attending import uniform_heads
from pion_vllm_mlx.attention_calls import UnsupportedAttentionError
from pion_vllm_mlx.patching import install_pion_attention_patch, patch_installed, uninstall_pion_attention_patch
from pion_vllm_mlx.slots import UnsupportedCacheError, codec, probe

MOST_VALUES: Final = 20_000_000
"""A model with more parameters wasn't made small."""

METAL_ONLY: Final = ("bitnet",)
"""Families that are left out on every machine, so that the table is the same everywhere."""

SMALL: Final[dict[str, Any]] = {
    **dict.fromkeys(("hidden_size", "dim", "d_model", "n_embd", "model_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_transformer_layers"), 2),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "ff_intermediate_size", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "n_head_kv", "num_kv_heads", "kv_n_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 512),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon", "layernorm_epsilon"), 1e-5),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("rotary_pct", "partial_rotary_factor"), 0.5),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "head_dim": 16,
    "vocab_size": 512,
    "rope_theta": 10000.0,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "sliding_window": 32,
    "rotary_dim": 8,
}
"""Small values by the name of a setting, where families agree about the meaning."""

TEXT: Final = {name: value for name, value in SMALL.items() if name not in ("dim", "hidden_dim")} | {
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 10000.0},
}
YARN: Final = {
    "type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
FULL: Final = ["full_attention", "full_attention"]
MIXED: Final = ["sliding_attention", "full_attention"]
MLA_TEXT: Final = TEXT | {
    "model_type": "deepseek_v3", "n_shared_experts": 1, "moe_layer_freq": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip

SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "Klear": {"mlp_only_layers": [], "decoder_sparse_step": 1},
    "afmoe": {"layer_types": FULL},
    "baichuan_m1": {"sliding_window_layers": [], "conv_window": 2},
    "bailing_moe_v3": {"num_experts_per_tok": 2, "num_hidden_layers": 4, "n_group": 1},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": YARN},
    "exaone4": {"rope_scaling": None, "sliding_window": None, "sliding_window_pattern": None},
    "exaone_moe": {"layer_types": FULL, "is_moe_layer": [False, True]},
    "afm7": {"num_kv_reuse_layers": 1},
    "granitemoehybrid": {"layer_types": ["attention", "attention"], "shared_intermediate_size": 96},
    "gear": {"layer_types": FULL},
    "mellum": {"layer_types": FULL, "rope_parameters": {"full_attention": {"rope_theta": 10000.0}}},
    "spark2_5": {"layer_types": FULL, "rope_parameters": {"full_attention": {"rope_theta": 10000.0}}},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "layers_block_type": ["mamba", "attention"]},
    "llama4": {
        "text_config": TEXT | {
            "model_type": "llama4", "attention_bias": False, "attention_chunk_size": 8, "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96, "num_experts_per_tok": 1, "rope_scaling": None, "use_qk_norm": True,
        },
    },
    "gemma3n": {
        "text_config": TEXT | {
            "model_type": "gemma3n", "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 512,
            "rope_local_base_freq": 1.0, "final_logit_softcapping": 1.0, "layer_types": MIXED,
            "activation_sparsity_pattern": [0.5, 0.5], "hidden_size_per_layer_input": 32, "altup_num_inputs": 4,
            "altup_coef_clip": 1.0, "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 8,
        },
    },
    "gemma4": {"text_config": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 512,
                               "vocab_size_per_layer_input": 512, "num_attention_heads": 4, "layer_types": MIXED,
                               "num_kv_shared_layers": 0}},
    "mamba2": {"time_step_limit": (0.0, 10.0)},
    "mimo_v2_flash": {"hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 0]},
    "step3p5": {"moe_top_k": 2},
    "gemma3": {"text_config": TEXT | {"model_type": "gemma3_text"}, "vocab_size": 512},
    "gemma4_text": {"layer_types": MIXED, "num_kv_shared_layers": 0},
    "glm_moe_dsa": {"rope_parameters": YARN, "rope_scaling": None},
    "hunyuan": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}, "use_cla": True,
                "cla_share_factor": 2},
    "kimi_k25": {"text_config": MLA_TEXT},
    "kimi_linear": {
        "linear_attn_config": {"num_heads": 4, "head_dim": 16, "kda_layers": [1], "short_conv_kernel_size": 4},
    },
    "kimi_vl": {"text_config": MLA_TEXT},
    "lfm2": {"full_attn_idxs": [0]},
    "lfm2_moe": {"full_attn_idxs": [0], "layer_types": ["full_attention", "conv"]},
    "lfm2-vl": {
        "text_config": TEXT | {
            "model_type": "lfm2", "full_attn_idxs": [0], "conv_bias": True, "conv_L_cache": 3, "block_dim": 64,
            "block_ff_dim": 96, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
        },
    },
    "llama4_text": {"no_rope_layers": [0, 1], "intermediate_size_mlp": 96},
    "minicpm3": {"rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8,
                                  "original_max_position_embeddings": 128}, "num_key_value_heads": 4},
    "ministral3": {"rope_parameters": YARN, "layer_types": FULL},
    "mistral3": {"text_config": TEXT | {"model_type": "llama"}},
    "mistral4": {"rope_parameters": YARN},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": group}, "ffn": {"ffn_mult": 1.0}} for group in (2, 4)
        ],
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "*"]},
    "olmo3": {"layer_types": MIXED},
    "openelm": {
        "num_query_heads": [4, 8], "num_kv_heads": [2, 4], "ffn_multipliers": [1.0, 1.0], "ffn_dim_divisor": 8,
    },
    "phi3small": {"vocab_size": 100352},  # it writes to the logits of 91 fixed tokens; MLX checks no bounds
    "phimoe": {"rope_scaling": None},
    "pixtral": {"text_config": TEXT | {"model_type": "llama"}},
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 16, "intermediate_size": 192},
    "qwen2_vl": {"text_config": TEXT | {"model_type": "qwen2"}},
    "qwen3_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1},
    "qwen3_next": {"mlp_only_layers": [], "decoder_sparse_step": 1},
    "qwen3_vl": {"text_config": TEXT | {"model_type": "qwen3"}},
    "qwen3_vl_moe": {
        "text_config": TEXT | {
            "model_type": "qwen3_moe", "mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True,
        },
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 32},
}  # fmt: skip
"""Settings that a family names or means in a way of its own."""


class Verdict(enum.Enum):
    """What `make_pion_prompt_cache` does with a family."""

    WIRE = "in-process, and on the server"
    INPROC = "in-process only"
    NEITHER = "refused"
    UNKNOWN = "no small model could be made here"


@attrs.frozen
class Family:
    """One module of mlx-lm's models: the verdict, and the text of the refusal or of what failed."""

    name: str
    verdict: Verdict
    why: str = ""


def family_names() -> list[str]:
    """The modules of the installed mlx-lm that define a model; but olmo, whose import needs a package of its own."""
    names = []
    for info in pkgutil.iter_modules(models.__path__):
        if info.name == "olmo":
            continue  # without that package the import ends the process
        with suppress(AttributeError):  # a module of parts, which no configuration names
            _get_classes({"model_type": info.name})
            names.append(info.name)
    return names


def small_model(name: str, seed: int = 0) -> Any:
    """A small random float32 model of a family, evaluated. Raises whatever the family does with a wrong setting."""
    return _evaluated(_built(name, seed))


def judge(name: str) -> Family:
    """What Pion does with a family, found by making a small model and asking. The patch must be installed."""
    if name in METAL_ONLY:
        return Family(name, Verdict.UNKNOWN, "its kernels are for Metal only")
    try:
        model = _built(name, 0)
        caches = make_prompt_cache(model)
        try:
            for cache in caches:
                codec(cache)
        except UnsupportedCacheError as error:
            return Family(name, Verdict.NEITHER, str(error))
        mx.eval(_evaluated(model)(mx.array([[1, 2, 3]]), cache=caches))
        slots = probe(model)
    except Exception as error:  # whatever a model does with settings that it can't use
        text = str(error).split(": '")[0]  # without a list of names
        return Family(name, Verdict.UNKNOWN, f"{type(error).__name__}: {text}")
    try:
        uniform_heads(slots)
        observing.watch(model, len(slots))
    except UnsupportedAttentionError as error:
        return Family(name, Verdict.INPROC, str(error).removeprefix(f"{name}: "))
    return Family(name, Verdict.WIRE)


def _built(name: str, seed: int) -> Any:
    kind, arguments = _get_classes({"model_type": name})
    mx.random.seed(seed)
    return kind(_arguments(arguments, name))


def _evaluated(model: Any) -> Any:
    values = sum(array.size for _, array in tree_flatten(model.parameters()))
    if values > MOST_VALUES:
        msg = f"{values:,} parameters: the settings made no small model"
        raise ValueError(msg)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def _arguments(kind: Any, name: str) -> Any:
    settings = SETTINGS.get(name, {})
    values = {}
    for field in dataclasses.fields(kind):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name == "model_type":
            values["model_type"] = name
        elif field.name in settings:
            values[field.name] = settings[field.name]
        elif field.name in SMALL:
            values[field.name] = SMALL[field.name]
        elif required:
            values[field.name] = _of_type(str(field.type))
    return kind(**values)


def _of_type(text: str) -> Any:
    """A value that a field of this type takes; the first that fits in a type of several."""
    guesses: Sequence[tuple[str, Any]] = (
        ("Optional", None), ("None", None), ("bool", False), ("ist", []), ("ict", {}), ("int", 2), ("float", 1.0),
        ("str", "x"),
    )  # fmt: skip
    return next((value for word, value in guesses if word in text), None)


def table(families: Sequence[Family]) -> typing.Iterator[str]:
    """The families as lines of Markdown, a paragraph for each verdict, a line for each reason."""
    for verdict in Verdict:
        chosen = [family for family in families if family.verdict is verdict]
        if not chosen:
            continue
        yield f"**{verdict.value}** ({len(chosen)})"
        yield ""
        reasons: dict[str, list[str]] = {}
        for family in chosen:
            reasons.setdefault(family.why, []).append(f"`{family.name}`")
        for why, names in reasons.items():
            yield f"- {', '.join(names)}" + (f": {why}" if why else "")
        yield ""


def main() -> None:
    """Print the table."""
    install = not patch_installed()
    install_pion_attention_patch()
    sys.stdout.write("\n".join(table([judge(name) for name in family_names()])))
    if install:
        uninstall_pion_attention_patch()


if __name__ == "__main__":
    main()
