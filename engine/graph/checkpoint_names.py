"""Names of the checkpoints' modules that differ from Llama's, by family (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.engine.config import Family

_MIXTRAL = {
    "mlp.router": "block_sparse_moe.gate",
    **{
        f"mlp.experts.{ours}": f"block_sparse_moe.experts.{{}}.{theirs}"
        for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}
_BEHIND = {"post_attn_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}
_GEMMA = {**_BEHIND, "mlp_norm": "pre_feedforward_layernorm"}
_SHARED_EXPERTS = {f"mlp.shared.{one}": f"mlp.shared_experts.{one}_proj" for one in ("gate", "up", "down")}
_LFM2 = {
    "attn_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "final_norm": "model.embedding_norm",
    "attn.q_norm": "self_attn.q_layernorm",
    "attn.k_norm": "self_attn.k_layernorm",
    "attn.o_proj": "self_attn.out_proj",
    "attn.out_proj": "conv.out_proj",
    **{
        f"mlp.{ours}": f"feed_forward.{theirs}"
        for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}
_GRANITE_EXPERTS = {"mlp.router": "block_sparse_moe.router.layer"}
_GRANITE_HYBRID = {
    **_GRANITE_EXPERTS,
    **{
        f"{mlp}.{ours}": f"shared_mlp.{theirs}"
        for mlp in ("mlp", "mlp.shared")
        for ours, theirs in (("gate", "gate"), ("up", "up"), ("down", "output_linear"))
    },
    "attn.out_proj": "mamba.out_proj",
}
_NEMOTRON_H = {
    "attn_norm": "norm",
    "mlp_norm": "norm",
    "final_norm": "model.norm_f",
    **{f"attn.{one}_proj": f"mixer.{one}_proj" for one in "qkvo"},
    **{f"attn.ssm_{one}": f"mixer.in_proj_{one}" for one in ("z", "x", "b", "c", "dt")},
    **{f"attn.ssm_conv_{one}": f"mixer.conv1d_{one}" for one in "xbc"},
    "attn.ssm_norm": "mixer.norm",
    "attn.out_proj": "mixer.out_proj",
    "mlp.router": "mixer.gate",
    **{f"mlp.{one}": f"mixer.{one}_proj" for one in ("up", "down")},
    **{f"mlp.experts.{one}": f"mixer.experts.{{}}.{one}_proj" for one in ("up", "down")},
    **{f"mlp.shared.{one}": f"mixer.shared_experts.{one}_proj" for one in ("up", "down")},
}
_BAMBA = {
    "mlp_norm": "pre_ff_layernorm",
    "final_norm": "model.final_layernorm",
    "attn.out_proj": "mamba.out_proj",
    **{f"mlp.{one}": f"feed_forward.{one}_proj" for one in ("gate", "up", "down")},
}
#: Family -> tap -> module within the layer; outside of the layers its whole name.
MODULES: Mapping[Family, Mapping[str, str]] = {
    "olmo2": _BEHIND,
    "olmo3": _BEHIND,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": {
        **_GEMMA,
        "mlp.router": "router.proj",
        **{f"mlp.experts.{one}": f"experts.{{}}.{one}_proj" for one in ("gate", "up", "down")},
    },
    "mixtral": _MIXTRAL,
    "phimoe": _MIXTRAL,
    "minimax_m2": {**_MIXTRAL, "mlp.topk_ids": "block_sparse_moe"},
    "gpt_oss": {"mlp.router": "mlp.router"},
    "glm4_moe": _SHARED_EXPERTS,
    "deepseek_v2": _SHARED_EXPERTS,
    "deepseek_v3": _SHARED_EXPERTS,
    "deepseek_v32": _SHARED_EXPERTS,
    "glm_moe_dsa": _SHARED_EXPERTS,
    "glm4_moe_lite": _SHARED_EXPERTS,
    "exaone4": _BEHIND,
    "flex_olmo": _BEHIND,
    "solar_open": _SHARED_EXPERTS,
    "hyperclovax": {"post_attn_norm": "post_norm1", "post_mlp_norm": "post_norm2"},
    "vaultgemma": {"mlp_norm": _GEMMA["mlp_norm"]},
    "granitemoe": _GRANITE_EXPERTS,
    "granitemoehybrid": _GRANITE_HYBRID,
    "nemotron_h": _NEMOTRON_H,
    "falcon_h1": _BAMBA,
    "bamba": _BAMBA,
    "ernie4_5_moe": _SHARED_EXPERTS,
    "hunyuan_v1_moe": {
        "mlp.router": "mlp.gate.wg",
        **{f"mlp.shared.{one}": f"mlp.shared_mlp.{one}_proj" for one in ("gate", "up", "down")},
    },
    "dots1": _SHARED_EXPERTS,
    "mistral4": _SHARED_EXPERTS,
    "exaone_moe": {**_SHARED_EXPERTS, "mlp.topk_ids": "mlp"},
    "starcoder2": {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    "lfm2": _LFM2,
    "lfm2_moe": {
        **_LFM2,
        "mlp.router": "feed_forward.gate",
        "mlp.topk_ids": "feed_forward",
        **{
            f"mlp.experts.{ours}": f"feed_forward.experts.{{}}.{theirs}"
            for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    },
    "phi": {
        "attn.o_proj": "self_attn.dense",
        "attn.q_norm": "self_attn.q_layernorm",
        "attn.k_norm": "self_attn.k_layernorm",
        "mlp.up": "mlp.fc1",
        "mlp.down": "mlp.fc2",
        "final_norm": "model.final_layernorm",
    },
    "apertus": {"attn_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
    "llama4_text": {
        **{f"mlp.{one}": f"feed_forward.{one}_proj" for one in ("gate", "up", "down")},
        **{f"mlp.experts.{one}": f"feed_forward.experts.{{}}.{one}_proj" for one in ("gate", "up", "down")},
        **{f"mlp.shared.{one}": f"feed_forward.shared_expert.{one}_proj" for one in ("gate", "up", "down")},
        "mlp.router": "feed_forward.router",
    },
}
#: Stacks of the experts' gates and ups, and of their downs, as transformers writes them.
USUAL_EXPERT_STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
#: The same where they have other names.
EXPERT_STACKS: Mapping[Family, tuple[str, str]] = {
    "gemma4_text": ("experts.gate_up_proj", "experts.down_proj"),
    "llama4_text": ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    "lfm2_moe": ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    **dict.fromkeys(
        ("granitemoe", "granitemoehybrid"),
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
}
_GATE_UP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_QKV = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
_MIXED = {"linear_attn.in_proj_qkv": tuple(f"linear_attn.in_proj_{one}" for one in "qkv")}
_CONVOLVED = {"conv.in_proj": tuple(f"conv.in_proj_{one}" for one in "bcx")}
_SSM = {"mamba.in_proj": tuple(f"mamba.in_proj_{one}" for one in ("z", "x", "b", "c", "dt"))}
_SHARED_MLP = {"shared_mlp.input_linear": ("shared_mlp.gate", "shared_mlp.up")}
#: As vLLM stacks them further.
_MIXED_FURTHER = {
    f"linear_attn.in_proj_{name}": tuple(f"linear_attn.in_proj_{one}" for one in name)
    for name in ("qkvz", "ba")
}
#: Module that stacks the rows of others -> these, in that order: in some checkpoints, and in most engines.
STACKS: Mapping[str, tuple[str, ...]] = {
    **_QKV,
    **_GATE_UP,
    **_MIXED,
    **_MIXED_FURTHER,
    **_CONVOLVED,
    **_SSM,
    **_SHARED_MLP,
}
#: What GGUF files call the modules that are stacked there.
GGUF_STACKS: dict[str, str] = {
    "mlp.gate_up_proj": "ffn_up",
    "self_attn.qkv_proj": "attn_qkv",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "conv.in_proj": "shortconv.in_proj",
    "mamba.in_proj": "ssm_in",
    "mixer.in_proj": "ssm_in",
}
#: The same of what models with linear attention stack otherwise than by whole modules: head by head, and kernels.
GGUF_MIXED: dict[str, str] = {
    "self_attn.gate_proj": "attn_q",
    "self_attn.q_proj": "attn_q",  # the name of both
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
}
_LFM2_GGUF = {"final_norm": "token_embd_norm", "attn.out_proj": "shortconv.out_proj"}
_ROTATED_NORMS = {"attn.q_rope_norm": "attn_q_norm", "attn.k_rope_norm": "attn_k_norm"}
_MLP_NORM = {"mlp_norm": "post_attention_norm"}
#: Family -> tap -> what its GGUF files call the module, where it is not what most do.
GGUF_MODULES: Mapping[Family, Mapping[str, str]] = {
    "glm4_moe": _MLP_NORM,
    "gpt_oss": _MLP_NORM,
    "hunyuan_v1_dense": _ROTATED_NORMS,
    "hunyuan_v1_moe": _ROTATED_NORMS,
    "qwen3_next": {**_MLP_NORM, "attn.in_proj_b": "ssm_ba", "attn.in_proj_a": "ssm_ba"},
    "qwen3_5_text": _MLP_NORM,
    "qwen3_5_moe_text": _MLP_NORM,
    "seed_oss": _MLP_NORM,
    "lfm2": _LFM2_GGUF,
    "lfm2_moe": _LFM2_GGUF,
    "nemotron_h": {"mlp_norm": "attn_norm"},  # one norm a layer
    "gemma4_text": {f"mlp.experts.{one}": "ffn_gate_up_exps" for one in ("gate", "up")},
}
#: Family -> module of the checkpoint -> the modules whose rows it stacks, in that order.
FUSED: Mapping[Family, Mapping[str, tuple[str, ...]]] = {
    "phi3": {**_QKV, **_GATE_UP},
    "glm4": _GATE_UP,
    "qwen3_next": _MIXED,  # of its GGUF files; in safetensors they lie head by head, beside z
    "glm": _GATE_UP,
    "qwen3_5_text": _MIXED,
    "qwen3_5_moe_text": _MIXED,
    "lfm2": _CONVOLVED,
    "lfm2_moe": _CONVOLVED,
    "granitemoehybrid": {**_SSM, **_SHARED_MLP},
    "bamba": _SSM,
    "falcon_h1": _SSM,
    "nemotron_h": {"mixer.in_proj": tuple(f"mixer.in_proj_{one}" for one in ("z", "x", "b", "c", "dt"))},
}
