"""ModelConfig against transformers' own config classes and rotary embedding, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from lockstep.engine.config import EngineConfig, ModelConfig, check_fit
from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.rope_frequencies import frequencies
from lockstep.engine.errors import ConfigError
from tests.checkpoints import CLASSES, EVERY_VARIANT, OWN, SIZES, tiny_config

SHARED = Path(__file__).parents[4] / "shared" / "data"

LLAMA = SIZES | OWN["llama"] | {"model_type": "llama"}


def _written(config: Any, directory: Path) -> dict[str, Any]:
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


_USUAL_EXPERTS = {field.name: field.default for field in dataclasses.fields(ExpertsConfig)}
#: How many experts every token goes to.
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def _experts(config: Any) -> dict[str, Any] | None:
    """Those of a layer, as the models of transformers take them from their config."""
    if config.model_type == "gemma4_text" and config.enable_moe_block:
        one = {
            "count": config.num_experts,
            "top_k": config.top_k_experts,
            "width": config.moe_intermediate_size,
        }
        layers = (True,) * config.num_hidden_layers
        return _USUAL_EXPERTS | one | {"layers": layers, "wide_weights": True, "beside_mlp": True}
    if not hasattr(config, "num_experts_per_tok"):
        return None
    dense, every = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    kind = config.model_type
    sigmoid = kind in (
        "glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "minimax_m2", "dots1",
        "exaone_moe", "solar_open",
    )  # fmt: skip
    dense_first = 1 if kind in ("glm4_moe_lite", "ernie4_5_moe") else 0
    first = 0 if kind == "solar_open" else getattr(config, "first_k_dense_replace", dense_first)
    grouped = getattr(config, "topk_method", "") != "greedy"
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = getattr(
        config,
        "shared_expert_intermediate_size",
        width
        * next((getattr(config, key) for key in _SHARED if hasattr(config, key)), kind == "hunyuan_v1_moe"),
    )
    layers = range(config.num_hidden_layers)
    if kind == "nemotron_h":
        if "moe" not in config.layers_block_type:
            return None
        one = {"scores": "sigmoid", "correction": True, "wide": True, "wide_weights": True, "width": width}
        one |= {"count": config.n_routed_experts, "top_k": config.num_experts_per_tok}
        one |= {"groups": config.n_group, "top_groups": config.topk_group}
        one |= {
            "factor": config.routed_scaling_factor,
            "shared_width": config.moe_shared_expert_intermediate_size,
        }
        return _USUAL_EXPERTS | one | {"layers": tuple(kind == "moe" for kind in config.layers_block_type)}
    if kind == "granitemoehybrid":
        if not config.num_local_experts:
            return None
        shared = config.shared_intermediate_size
    if kind == "llama4_text":
        one = {
            "layers": tuple(i in config.moe_layers for i in layers),
            "scores": "sigmoid",
            "shared_width": width,
        }
        one |= {
            "renormalised": False,
            "weighed_inputs": True,
            "width": width,
            "count": config.num_local_experts,
        }
        return _USUAL_EXPERTS | one | {"top_k": config.num_experts_per_tok}
    if kind == "lfm2_moe":
        one = {
            "scores": "sigmoid",
            "correction": config.use_expert_bias,
            "factor": config.routed_scaling_factor,
        }
        one |= {
            "width": width,
            "count": config.num_experts,
            "shares_eps": 1e-6,
            "top_k": config.num_experts_per_tok,
        }
        return _USUAL_EXPERTS | one | {"layers": tuple(i >= config.num_dense_layers for i in layers)}
    if kind == "phimoe":
        one = {"scores": "logits", "jitter": config.router_jitter_noise, "renormalised": False, "top_k": 2}
        one |= {"width": width, "count": config.num_local_experts, "layers": (True,) * len(layers)}
        return _USUAL_EXPERTS | one
    return {
        "count": getattr(config, "num_local_experts", None) or config.num_experts,
        "top_k": top_k[0] if isinstance(top_k := config.num_experts_per_tok, list) else top_k,
        "width": width,
        "layers": tuple(i >= first and i not in dense and (i + 1) % every == 0 for i in layers),
        "scores": "sigmoid" if sigmoid else "softmax",
        "renormalised": getattr(config, "norm_topk_prob", True),
        "correction": sigmoid or kind == "ernie4_5_moe",
        "groups": getattr(config, "n_group", 1) if grouped else 1,
        "top_groups": getattr(config, "topk_group", 1) if grouped else 1,
        "group_best": 1 if kind == "deepseek_v2" else 2,
        "factor": getattr(config, "routed_scaling_factor", 1.0),
        "shared_width": shared,
        "shared_gated": kind in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"),
        "biased": kind == "gpt_oss",
        "weighed_inputs": False,
        "jitter": None,
        "shares_eps": 0.0,
        "wide": (sigmoid and kind != "minimax_m2")
        or kind in ("deepseek_v2", "ernie4_5_moe", "hunyuan_v1_moe"),
        "wide_weights": sigmoid or kind in ("deepseek_v2", "mixtral", "hunyuan_v1_moe"),
        "beside_mlp": False,
    }


def _latent(config: Any) -> dict[str, Any] | None:
    """How keys and values are made from latents, as transformers' attention takes it from its config."""
    if not hasattr(config, "kv_lora_rank"):
        return None
    return {
        "kv_rank": config.kv_lora_rank,
        "plain_dim": config.qk_nope_head_dim,
        "rope_dim": config.qk_rope_head_dim,
        "value_dim": config.v_head_dim,
        "q_rank": config.q_lora_rank,
        "bias": config.attention_bias,
        "eps": 1e-6,  # its norms are made without the config's
    }


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


def _agree(ours: ModelConfig, theirs: Any) -> None:
    theirs.allow_global_per_layer_attribute_access = True  # what layers have of their own follows below
    latent = _latent(theirs)
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
        "experts": _experts(theirs),
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


@pytest.mark.parametrize("variant", EVERY_VARIANT)
def test_every_family_and_feature_reads_as_transformers_reads_it(variant: str, tmp_path: Path) -> None:
    family, overrides = EVERY_VARIANT[variant]
    theirs = tiny_config(family, **overrides)
    ours = ModelConfig.from_hf(_written(theirs, tmp_path))
    _agree(ours, theirs)


ROPES: list[dict[str, Any]] = [
    {"rope_theta": 5e5, "rope_scaling": None},
    {"rope_theta": 5e5, "rope_scaling": {}},
    {"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 2}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e4}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 3e4},
    {"rope_parameters": {"rope_theta": 7e4, "rope_type": "default"}, "rope_theta": 3e4},
    {
        "rope_parameters": {"rope_theta": 7e4, "rope_type": "default"},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "original_max_position_embeddings": 32,
    },
    {},
]


@pytest.mark.parametrize("rope", ROPES, ids=json.dumps)
def test_both_styles_of_rope_settings_resolve_as_in_transformers(rope: dict[str, Any]) -> None:
    config = LLAMA | rope
    theirs = CLASSES["llama"][0](**json.loads(json.dumps(config)))
    kind = theirs.rope_parameters["rope_type"]
    if kind != "default":
        ROPE_INIT_FUNCTIONS[kind](theirs)  # settles what transformers settles only on first use
    _agree(ModelConfig.from_hf(config), theirs)


WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"use_sliding_window": False, "sliding_window": 32}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 28}),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 5}),
    ("llama", {}),
]


@pytest.mark.parametrize(("family", "window"), WINDOWS, ids=str)
def test_sliding_windows_resolve_as_in_transformers(family: str, window: dict[str, Any]) -> None:
    config = SIZES | OWN[family] | {"model_type": family} | window
    theirs = CLASSES[family][0](**json.loads(json.dumps(config)))
    _agree(ModelConfig.from_hf(config), theirs)


@pytest.mark.parametrize(("family", "key"), [("mistral", "sliding_window"), ("qwen3", "head_dim")])
def test_an_absent_key_means_what_the_config_class_assumes(family: str, key: str) -> None:
    config = SIZES | OWN[family] | {"model_type": family}
    del config[key]
    _agree(ModelConfig.from_hf(config), CLASSES[family][0](**json.loads(json.dumps(config))))


def test_generation_config_decides_where_generation_stops() -> None:
    config = LLAMA | {"bos_token_id": 5, "eos_token_id": 6}
    assert ModelConfig.from_hf(config, {"eos_token_id": [7, 8, 7]}).eos_ids == (7, 8)
    assert ModelConfig.from_hf(config, {}).eos_ids == (6,)
    assert ModelConfig.from_hf(config, {"bos_token_id": 3}).bos_id == 3
    assert ModelConfig.from_hf(config | {"eos_token_id": None}).eos_ids == ()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_has_two_names(key: str) -> None:
    assert ModelConfig.from_hf(LLAMA | {key: "bfloat16"}).dtype == "bfloat16"


@pytest.mark.parametrize("name", ["qwen2.5-0.5b-instruct", "stories260K"])
def test_real_configurations(name: str) -> None:
    directory = SHARED / name
    if not directory.is_dir():
        pytest.skip(f"{name} is not beside the repository")
    generation_file = directory / "generation_config.json"
    generation = json.loads(generation_file.read_text()) if generation_file.exists() else None
    ours = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()), generation)
    theirs = AutoConfig.from_pretrained(directory)
    if generation:
        theirs.eos_token_id = generation["eos_token_id"]
    _agree(ours, theirs)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2"}, r"model_type is 'gpt2': not a supported .*qwen2, qwen3, llama, mistral"),
    ({"model_type": None}, r"model_type is missing"),
    ({"hidden_act": "relu"}, r"hidden_act is 'relu': .*silu"),
    ({"hidden_size": None}, r"hidden_size is missing"),
    ({"hidden_size": "64"}, r"hidden_size is '64': expected a whole number"),
    ({"hidden_size": True}, r"hidden_size is True: expected a whole number"),
    ({"hidden_size": 0}, r"hidden_size is 0: expected a whole number from 1"),
    ({"hidden_size": 2**60}, r"hidden_size is 1152921504606846976: expected a whole number"),
    ({"hidden_size": 60}, r"hidden_size is 60: num_attention_heads = 8 does not divide it"),
    (
        {"num_hidden_layers": 10**9},
        r"num_hidden_layers is 1000000000: expected a whole number from 1 to 10000",
    ),
    ({"num_key_value_heads": 3}, r"num_key_value_heads is 3: does not divide num_attention_heads = 8"),
    ({"head_dim": 7}, r"head_dim = 7 is odd"),
    ({"rms_norm_eps": "tiny"}, r"rms_norm_eps is 'tiny': expected a number"),
    ({"rms_norm_eps": float("nan")}, r"rms_norm_eps is nan: expected a finite number"),
    ({"rope_theta": -1.0}, r"rope_theta is -1.0: expected a finite number above 0"),
    ({"rope_theta": 10**400}, r"rope_theta is 1000.*: expected a finite number above 0"),
    ({"rope_scaling": "linear"}, r"rope_scaling is 'linear': expected a JSON object"),
    (
        {"rope_scaling": {"type": "su", "factor": 2.0}},
        r"'su': not .*default, linear, dynamic, llama3, yarn, longrope and proportional",
    ),
    ({"rope_scaling": {"type": "dynamic"}}, r"rope_scaling: factor is missing"),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
        r"short_factor is \[1.0\]: .*list of \d+ numbers",
    ),
    ({"rope_scaling": {"type": "linear"}}, r"rope_scaling: factor is missing"),
    ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, r"rope_scaling: low_freq_factor is missing"),
    (
        {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
        r"high_freq_factor is 4.0: must exceed low_freq_factor \(4\)",
    ),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, r"full_attention is .*single layer types"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5: .*only 1.0 is supported"),
    ({"torch_dtype": "float8_e4m3fn"}, r"torch_dtype is 'float8_e4m3fn': .*float32, bfloat16, float16"),
    ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings is 'yes': expected true or false"),
    ({"eos_token_id": "</s>"}, r"eos_token_id is '</s>': expected a token id"),
    ({"quantization_config": {"bits": 4}}, r"quantization_config is .*original"),
    ({"sliding_window": 128}, r"sliding_window is 128: llama has none"),
    (
        {"model_type": "mistral", "layer_types": ["full_attention"] * 3},
        r"layer_types disagrees with sliding_window",
    ),
    (
        {"model_type": "qwen2", "layer_types": ["full_attention"]},
        r"layer_types has 1 entries, num_hidden_layers is 3",
    ),
    ({"model_type": "qwen2", "layer_types": ["mamba"] * 3}, r"layer_types names 'mamba'"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, r"no sliding window is in use"),
    ({"model_type": "cohere", "use_qk_norm": True}, r"use_qk_norm is True: .*each head's own"),
    (
        OWN["falcon_h1"] | {"model_type": "falcon_h1", "projectors_bias": True},
        "projectors_bias is True: a bias of one of Mamba-2's products alone",
    ),
    (
        OWN["falcon_h1"] | {"model_type": "falcon_h1", "hidden_act": "gelu"},
        "hidden_act is 'gelu': an activation other than silu",
    ),
    (
        OWN["falcon_h1"] | {"model_type": "falcon_h1", "ssm_multipliers": [1.0, 2.0]},
        "ssm_multipliers .*expected a list of 5 numbers",
    ),
    (
        {"model_type": "cohere2", "sliding_window": None, "layer_types": ["full_attention"] * 3},
        r"sliding_window is None: cohere2 without a window",
    ),
    ({"model_type": "ministral"}, r"layer_types is None: which layers have a window must be stated"),
    ({"model_type": "internlm3", "qkv_bias": True}, r"qkv_bias is True: differs from bias"),
    ({"model_type": "hyperclovax", "use_post_norm": False}, r"use_post_norm is False: without norms behind"),
    ({"model_type": "stablelm", "qk_layernorm": True}, r"qk_layernorm is True: .*each head's own"),
    ({"model_type": "ernie4_5_moe", "use_bias": True}, r"use_bias is True: a shared expert with biases"),
    ({"model_type": "hunyuan_v1_moe", "moe_topk": [1, 2, 1]}, r"moe_topk is \[1, 2, 1\]: layers that differ"),
    (
        {"model_type": "exaone4", "sliding_window_pattern": "LLLG"},
        r"sliding_window_pattern is 'LLLG': expected a whole number",
    ),
    ({"model_type": "llama", "hidden_act": "xielu"}, r"hidden_act is 'xielu': not a supported activation"),
    ({"hidden_act": "\x1b[31mred"}, r"hidden_act is '\\x1b\[31mred'"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_work_is_refused_by_name_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ModelConfig.from_hf(LLAMA | change)
    assert str(caught.value).startswith("config.json")
    assert "\n" not in str(caught.value)


def test_a_family_with_an_odd_default_needs_its_kv_heads_stated() -> None:
    config = SIZES | {"model_type": "qwen2"}
    del config["num_key_value_heads"]
    with pytest.raises(ConfigError, match="num_key_value_heads is missing"):
        ModelConfig.from_hf(config)


FITS = [
    ({}, 3, "tp=3 does not divide 8 attention heads: use 1, 2, 4 or 8"),
    ({}, 16, "tp=16 does not divide 8 attention heads: use 1, 2, 4 or 8"),
    (
        {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96},
        6,
        "tp=6 neither divides nor is a multiple of 4 key/value heads: use 1, 2, 4 or 12",
    ),
]


@pytest.mark.parametrize(("change", "tp", "message"), FITS)
def test_a_tp_that_cannot_split_the_model_names_those_that_can(
    change: dict[str, Any], tp: int, message: str
) -> None:
    model = ModelConfig.from_hf(LLAMA | change)
    with pytest.raises(ConfigError) as caught:
        check_fit(model, EngineConfig(tp=tp))
    assert str(caught.value) == message
    for good in message.split("use ")[1].replace(" or ", ", ").split(", "):
        check_fit(model, EngineConfig(tp=int(good)))


MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": None,
}


def test_experts_are_divided_among_ranks_that_they_divide_by() -> None:
    model = ModelConfig.from_hf(MIXTRAL)
    for tp, ep in ((2, 2), (4, 2), (8, 1)):
        check_fit(model, EngineConfig(tp=tp, ep=ep))
    with pytest.raises(ConfigError, match=r"^ep=4 does not divide 6 experts: with tp=4 use 1 or 2$"):
        check_fit(model, EngineConfig(tp=4, ep=4))
    with pytest.raises(ConfigError, match=r"^ep=2 divides experts among ranks, llama has none: use ep=1$"):
        check_fit(ModelConfig.from_hf(LLAMA), EngineConfig(tp=2, ep=2))
    with pytest.raises(ConfigError, match=r"^ep=3 does not divide tp=4: use 1, 2 or 4$"):
        EngineConfig(tp=4, ep=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7: there are 6 experts"),
        (
            {"model_type": "qwen2_moe", "num_experts": 6, "use_sliding_window": True, "sliding_window": 8},
            "which layers have a window must be stated by layer_types",
        ),
        ({"num_local_experts": 0}, "num_local_experts is 0: expected a whole number from 1"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is 8.0: clamped projections are not supported"),
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 9},
            "no layer has experts, though it is a qwen3_moe",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": 1},
            "mlp_only_layers is 1: expected a list of layers",
        ),
        (
            {"model_type": "glm4_moe", "n_group": 4, "topk_group": 1, "n_routed_experts": 6},
            "6 experts in n_group = 4 groups, of which topk_group = 1 are chosen, do not fit together",
        ),
    ],
)
def test_routing_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(MIXTRAL | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_moe_block": True, "num_experts": None}, "num_experts is missing"),
        (
            {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 5,
                "moe_intermediate_size": 8,
            },
            "num_experts_per_tok is 5: there are 4 experts",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5: .* none of its type before it"),
        ({"num_global_key_value_heads": 3}, "num_key_value_heads is 4: .* of layer 1 does not divide"),
        (
            {"vocab_size_per_layer_input": 7},
            "vocab_size_per_layer_input is 7: another number than vocab_size = 131",
        ),
        (
            {"per_layer_config": {"1": {"sliding_window": 4}}},
            "sliding_window is 4: layers that differ in that",
        ),
    ],
)
def test_what_gemma4_cannot_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(SIZES | OWN["gemma4_text"] | {"model_type": "gemma4_text"} | change)


def test_gemma4_as_published_reads_as_what_transformers_writes(tmp_path: Path) -> None:
    """Sizes of global layers by type, and by layer."""
    published = (
        SIZES | OWN["gemma4_text"] | {"model_type": "gemma4_text", "use_bidirectional_attention": "vision"}
    )
    written = _written(tiny_config("gemma4_text"), tmp_path)
    assert "global_head_dim" not in written
    assert ModelConfig.from_hf(published) == ModelConfig.from_hf(written)


def test_layers_differ_by_their_experts() -> None:
    model = ModelConfig.from_hf(
        MIXTRAL
        | {"model_type": "qwen2_moe", "num_experts": 6, "num_hidden_layers": 4, "mlp_only_layers": [0, 2]}
    )
    assert [model.of_layer(i).experts is not None for i in range(4)] == [False, True, False, True]


def test_a_layer_that_does_not_rotate_has_nothing_to_scale() -> None:
    """LongRoPE's factors are of pairs that such a layer does not have."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}  # fmt: skip
    read = ModelConfig.from_hf(
        tiny_config("smollm3", no_rope_layers=[0, 1, 1], rope_parameters=rope).to_dict()
    )
    found = [frequencies(read.of_layer(i), read.rope_theta, 100, np.array)[0] for i in range(3)]
    assert [len(one) for one in found] == [0, 4, 4]
