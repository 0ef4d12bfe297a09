"""What `ExpertsConfig` and `LatentConfig` must hold, read from transformers' own config classes."""

from __future__ import annotations

import dataclasses
from typing import Any

from lockstep.engine.config.experts import ExpertsConfig

_USUAL_EXPERTS = {field.name: field.default for field in dataclasses.fields(ExpertsConfig)}
#: How many experts every token goes to.
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def experts(config: Any) -> dict[str, Any] | None:
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


def latent_attention(config: Any) -> dict[str, Any] | None:
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
