"""What `ModelConfig` must hold, read from transformers' own config classes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from lockstep.engine.config import ModelConfig
from tests.engine.config.experts_of_transformers import experts, latent_attention


def written(config: Any, directory: Path) -> dict[str, Any]:
    """The config.json that transformers writes."""
    config.save_pretrained(directory)
    return json.loads((directory / "config.json").read_text())


def _windows(config: Any) -> tuple[int | None, ...]:
    """Each layer's window as the models of transformers take it from their config."""
    layers = range(config.num_hidden_layers)
    if hasattr(config, "attention_chunk_size"):
        chunked = (one == "chunked_attention" for one in config.layer_types)
        return tuple(config.attention_chunk_size if one else None for one in chunked)
    if not hasattr(config, "sliding_window"):
        return tuple(None for _ in layers)
    if getattr(config, "layer_types", None) is None:
        return tuple(config.sliding_window for _ in layers)
    return tuple(
        config.sliding_window if config.layer_types[i] == "sliding_attention" else None for i in layers
    )


_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "xielu": "xielu",
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
_USUAL = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if field.default is not dataclasses.MISSING
}


_OLMO = {"norm": "wide", "pre_norms": False, "post_norms": True, "qk_norm_whole": True}


def _gemma(config: Any) -> dict[str, Any]:
    return {
        "norm": "plus_one",
        "post_norms": True,
        "score_scale": config.query_pre_attn_scalar**-0.5,
        "score_cap": config.attn_logit_softcapping or 0.0,
        "logit_cap": config.final_logit_softcapping or 0.0,
        "embedding_multiplier": config.hidden_size**0.5,
    }


def _granite(config: Any) -> dict[str, Any]:
    return {
        "score_scale": config.attention_multiplier,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logit_divisor": config.logits_scaling,
    }


def _side_by_side(config: Any) -> dict[str, Any]:
    return {"norm": "centred", "parallel": True, "neighbours": True, "logit_divisor": 1 / config.logit_scale}


#: What a family's models have that most have not, by its config in transformers.
_OWN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "olmo2": lambda config: _OLMO,
    "olmo3": lambda config: _OLMO,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "granite": _granite,
    "granitemoe": _granite,
    "glm4": lambda config: {"post_norms": True, "neighbours": True},
    "starcoder2": lambda config: {"norm": "layer", "gated": False},
    "olmoe": lambda config: {"qk_norm_whole": True},
    "deepseek_v2": lambda config: {"neighbours": True},
    "deepseek_v3": lambda config: {"neighbours": config.rope_interleave},
    "mistral4": lambda config: {
        "neighbours": config.rope_interleave,
        "query_scaling": {
            "beta": config.rope_parameters["llama_4_scaling_beta"],
            "length": config.rope_parameters["original_max_position_embeddings"],
            "offset": 0,
            "unrotated_alone": False,
        },
    },
    "glm4_moe_lite": lambda config: {"neighbours": config.rope_interleave},
    "deepseek_v32": lambda config: {"neighbours": True, "indexer": _indexer(config, neighbours=False)},
    "glm_moe_dsa": lambda config: {"neighbours": True, "indexer": _indexer(config, neighbours=True)},
    "minimax_m2": lambda config: {"qk_norm_whole": True},
    "gpt_oss": lambda config: {
        "norm": "wide",
        "sinks": True,
        "clamp": {"limit": config.swiglu_limit, "slope": config.swiglu_alpha},
    },
    "gemma": lambda config: {"norm": "plus_one", "embedding_multiplier": config.hidden_size**0.5},
    "exaone4": lambda config: {"pre_norms": False, "post_norms": True},
    "ernie4_5": lambda config: {"neighbours": True},
    "glm": lambda config: {"neighbours": True},
    "helium": lambda config: {"norm": "wide", "neighbours": True},
    "hunyuan_v1_dense": lambda config: {"rotated_qk_norm": True},
    "hunyuan_v1_moe": lambda config: {"rotated_qk_norm": True},
    "cohere": _side_by_side,
    "cohere2": _side_by_side,
    "arcee": lambda config: {"gated": False},
    "nemotron": lambda config: {"norm": "layer_plus_one", "gated": False},
    "stablelm": lambda config: {"norm": "layer", "parallel": config.use_parallel_residual},
    "vaultgemma": lambda config: {**_gemma(config), "post_norms": False},
    "ernie4_5_moe": lambda config: {"neighbours": True},
    "jais2": lambda config: {"norm": "layer", "gated": False},
    "hyperclovax": lambda config: {
        **_granite(config),
        "post_norms": True,
        "logit_divisor": 1 / config.logits_scaling,
    },
    "flex_olmo": lambda config: _OLMO,
    "youtu": lambda config: {"neighbours": config.rope_interleave},
}


def _linear(config: Any) -> dict[str, Any]:
    """Of Qwen3-Next and Qwen3.5."""
    linear = {
        "key_heads": config.linear_num_key_heads,
        "value_heads": config.linear_num_value_heads,
        "key_dim": config.linear_key_head_dim,
        "value_dim": config.linear_value_head_dim,
        "conv": config.linear_conv_kernel_dim,
        "layers": tuple(kind == "linear_attention" for kind in config.layer_types),
    }
    return {"norm": "plus_one", "output_gate": True, "linear": linear}


def _gemma4(config: Any) -> dict[str, Any]:
    width = config.hidden_size_per_layer_input
    return {
        "norm": "wide",
        "post_norms": True,
        "score_scale": 1.0,
        "logit_cap": config.final_logit_softcapping or 0.0,
        "embedding_multiplier": config.hidden_size**0.5,
        "value_norm": True,
        "layer_scalar": True,
        "layer_inputs": {"width": width, "layers": config.num_hidden_layers, "layer": None}
        if width
        else None,
    }


def _sizes_of_layers(config: Any) -> dict[str, Any]:
    """Of Gemma-4, by what transformers makes of its config: those of each layer, and the largest."""
    if config.model_type != "gemma4_text":
        return {}
    modes, types = config.kv_sharing_modes, config.layer_types
    stored = {types[i]: i for i, mode in enumerate(modes) if mode == "store"}
    shapes = tuple(
        {
            "head_dim": config.per_layer_config[i].head_dim,
            "num_kv_heads": config.per_layer_config[i].num_key_value_heads,
            "intermediate_size": config.intermediate_size
            * (1 + (config.use_double_wide_mlp and mode == "reuse")),
            "keys_as_values": config.attention_k_eq_v and types[i] == "full_attention" and mode != "reuse",
            "kv_from": stored[types[i]] if mode == "reuse" else None,
        }
        for i, mode in enumerate(modes)
    )
    largest = {
        key: max(one[key] for one in shapes) for key in ("head_dim", "num_kv_heads", "intermediate_size")
    }
    return {"shapes": shapes, **largest}


def _llama4(config: Any) -> dict[str, Any]:
    return {
        "neighbours": True,
        "unit_qk_norm": config.use_qk_norm,
        "chunked": True,
        "intermediate_size": config.intermediate_size_mlp,
        "query_scaling": {
            "beta": config.attn_scale,
            "length": config.floor_scale,
            "offset": 1,
            "unrotated_alone": True,
        },
    }


_OWN |= {
    "phimoe": lambda config: {"norm": "layer", "head_bias": config.lm_head_bias},
    "apertus": lambda config: {"gated": False},
    "olmo": lambda config: {"norm": "bare", "clip_qkv": config.clip_qkv},
    "phi": lambda config: {
        "norm": "layer",
        "parallel": True,
        "gated": False,
        "head_bias": True,
    },
}


def _lfm2(config: Any) -> dict[str, Any]:
    own = {"conv": config.conv_L_cache, "layers": tuple(kind == "conv" for kind in config.layer_types)}
    if config.model_type == "lfm2_moe":
        return {"short_conv": own}
    layer = Lfm2MLP(config)  # which makes another width of the config's
    return {"short_conv": own, "intermediate_size": layer.w1.out_features}


def _indexer(config: Any, neighbours: bool) -> dict[str, Any]:
    types = getattr(config, "indexer_types", ["full"] * config.num_hidden_layers)
    full = [i for i, kind in enumerate(types) if kind == "full"]
    return {
        "heads": config.index_n_heads,
        "dim": config.index_head_dim,
        "top_k": config.index_topk,
        "neighbours": neighbours,
        "sources": tuple(max(j for j in full if j <= i) for i in range(len(types))),
        "source": None,
    }


def _granite_hybrid(config: Any) -> dict[str, Any]:
    dense = {} if config.num_local_experts else {"intermediate_size": config.shared_intermediate_size}
    return _granite(config) | dense | {"mamba": _mamba(config, config.mamba_n_groups)}


def _falcon_h1(config: Any) -> dict[str, Any]:
    width = config.mamba_d_ssm or config.mamba_expand * config.hidden_size
    single = ("attention_in", "key", "attention_out", "ssm_in", "ssm_out")
    return {
        "embedding_multiplier": config.embedding_multiplier,
        "logit_divisor": 1 / config.lm_head_multiplier,
        "multipliers": {
            **{name: getattr(config, f"{name}_multiplier") for name in single},
            **dict(zip(("z", "x", "b", "c", "dt"), config.ssm_multipliers, strict=True)),
            **dict(zip(("gate", "down"), config.mlp_multipliers, strict=True)),
        },
        "mamba": {
            **_mamba(config, config.mamba_n_groups),
            "layers": (True,) * config.num_hidden_layers,
            "norm_width": width // config.mamba_n_groups,
            "beside": True,
            "normed": config.mamba_rms_norm,
            "norm_first": config.mamba_norm_before_gate,
        },
    }


_GATE_FIRST = {"beside": False, "normed": True, "norm_first": False}


def _mamba(config: Any, norm_groups: int) -> dict[str, Any]:
    width = config.mamba_expand * config.hidden_size
    return {
        "heads": config.mamba_n_heads,
        "head_dim": config.mamba_d_head,
        "groups": config.mamba_n_groups,
        "state": config.mamba_d_state,
        "conv": config.mamba_d_conv,
        "layers": tuple(kind == "linear_attention" for kind in config.layer_types),
        "norm_width": width // norm_groups,
        "conv_bias": config.mamba_conv_bias,
        "proj_bias": config.mamba_proj_bias,
        "limits": tuple(config.time_step_limit),
        **_GATE_FIRST,
    }


def _nemotron_h(config: Any) -> dict[str, Any]:
    kinds, width = config.layers_block_type, config.mamba_num_heads * config.mamba_head_dim
    return {
        "norm": "wide",
        "gated": False,
        "blocks": tuple("mlp" if kind in ("mlp", "moe") else "attention" for kind in kinds),
        "mamba": {
            "heads": config.mamba_num_heads,
            "head_dim": config.mamba_head_dim,
            "groups": config.n_groups,
            "state": config.ssm_state_size,
            "conv": config.conv_kernel,
            "layers": tuple(kind == "linear_attention" for kind in kinds),
            "norm_width": width // config.n_groups,
            "conv_bias": config.use_conv_bias,
            "proj_bias": config.use_bias,
            "limits": (config.time_step_min, math.inf),
            **_GATE_FIRST,
        },
    }


_OWN |= {"lfm2": _lfm2, "lfm2_moe": _lfm2, "granitemoehybrid": _granite_hybrid, "nemotron_h": _nemotron_h}
_OWN |= {"bamba": lambda config: {"mamba": _mamba(config, config.mamba_n_groups)}}
_OWN |= {"falcon_h1": _falcon_h1}
_OWN |= {"gemma4_text": _gemma4, "llama4_text": _llama4}
_OWN |= dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _linear)


_QK_NORM = (
    "qwen3", "olmo2", "olmo3", "gemma3_text", "qwen3_moe", "olmoe", "glm4_moe", "minimax_m2", "qwen3_next",
    "qwen3_5_text", "qwen3_5_moe_text", "gemma4_text", "exaone4", "dots1", "exaone_moe", "flex_olmo", "apertus",
    "lfm2", "lfm2_moe",
)  # fmt: skip
#: In the order in which a family's own key hides the one that the tests write of all.
_EPS = ("norm_epsilon", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")
#: In the order in which a key hides another.
_ACTIVATION = ("mlp_hidden_act", "hidden_activation", "hidden_act")
#: Whose o has no bias, or by a key of its own.
_NO_O_BIAS = ("qwen2", "qwen2_moe", "glm4", "glm4_moe", "glm", "helium", "stablelm", "solar_open")


def _rope(config: Any) -> dict[str, Any]:
    """Of layers that see everything, where layers differ."""
    unrotated = {"rope_type": "default", "rope_theta": 1e4}
    rope = getattr(config, "rope_parameters", unrotated)
    return rope.get("full_attention", rope)


def _theta(config: Any, dim: int) -> float:
    """The base; with Hunyuan's alpha stretched once and for all."""
    rope = _rope(config)
    stretched = rope.get("alpha", 1.0) ** (dim / (dim - 2))
    return float(rope["rope_theta"] * stretched)


def _biased(config: Any) -> bool:
    found = (getattr(config, key, None) for key in ("attention_bias", "use_bias", "use_qkv_bias"))
    return next((one for one in found if one is not None), config.model_type == "phi")


def agree(ours: ModelConfig, theirs: Any) -> None:
    theirs.allow_global_per_layer_attribute_access = True  # what layers have of their own follows below
    latent = latent_attention(theirs)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    head_dim = head_dim if latent is None else theirs.qk_head_dim
    eos, reported = theirs.eos_token_id, dataclasses.asdict(ours) | {"rope_scaling": None}
    own = _OWN.get(ours.family, lambda config: {})(theirs)
    assert reported == _USUAL | own | {
        "notes": (),
        "block_types": (),
        "family": theirs.model_type,
        "hidden_size": theirs.hidden_size,
        "intermediate_size": own.get(
            "intermediate_size", getattr(theirs, "intermediate_size", ours.intermediate_size)
        ),
        "num_layers": theirs.num_hidden_layers,
        "num_heads": theirs.num_attention_heads,
        "num_kv_heads": theirs.num_key_value_heads,
        "head_dim": head_dim,
        "vocab_size": theirs.vocab_size,
        "max_position": theirs.max_position_embeddings,
        "rms_eps": next(getattr(theirs, key) for key in _EPS if hasattr(theirs, key)),
        "rope_theta": pytest.approx(_theta(theirs, head_dim)),
        "rope_scaling": None,
        "layer_ropes": reported["layer_ropes"],
        "rotary": reported["rotary"] if latent is None else latent["rope_dim"],
        "rotary_last": latent is not None,
        "latent": latent,
        "activation": _ACTIVATIONS[
            next(
                (found for key in _ACTIVATION if (found := getattr(theirs, key, None)) is not None),
                "silu",
            )
        ],
        "qkv_bias": ours.family in ("qwen2", "qwen2_moe") or (latent is None and _biased(theirs)),
        "o_bias": ours.family not in _NO_O_BIAS and getattr(theirs, "attention_out_bias", _biased(theirs)),
        "mlp_bias": getattr(theirs, "mlp_bias", getattr(theirs, "use_bias", theirs.model_type == "phi")),
        "qk_norm": ours.family in _QK_NORM or getattr(theirs, "qk_layernorm", False),
        "experts": experts(theirs),
        "tie_embeddings": theirs.tie_word_embeddings,
        "windows": _windows(theirs),
        "dtype": str(theirs.dtype or "float32").removeprefix("torch."),
        "bos_id": theirs.bos_token_id,
        "eos_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        **_sizes_of_layers(theirs),
    }
    rope, kind = _rope(theirs), _rope(theirs)["rope_type"]
    kind = "default" if "alpha" in rope else kind
    assert ours.rope_scaling.kind == ("none" if kind == "default" else kind)
    if kind not in ("default", "proportional"):
        assert ours.rope_scaling.factor == rope["factor"]
    if kind in ("llama3", "yarn"):
        assert ours.rope_scaling.original_max_position == rope["original_max_position_embeddings"]
