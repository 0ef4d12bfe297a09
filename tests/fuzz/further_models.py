"""Random models of the families that came last: with Mamba-2, short convolutions, and what single families have."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.fuzz.draws import Fields, both_types, experts, rotation, types


def _mamba(chance: random.Random) -> Fields:
    """Mamba-2 by the names of Granite and Bamba: its heads divide twice the hidden size, which 4 divides."""
    heads = chance.choice((2, 4, 8))
    return {
        "mamba_n_heads": heads,
        "mamba_n_groups": chance.choice((1, 2)),
        "mamba_d_state": chance.choice((4, 12, 16)),
        "mamba_d_conv": chance.choice((2, 4)),
        "mamba_chunk_size": chance.choice((4, 16)),
        "mamba_conv_bias": chance.random() < 0.7,
        "mamba_proj_bias": chance.random() < 0.3,
    }


def _bamba(chance: random.Random, layers: int, head_dim: int) -> Fields:
    attention = sorted(chance.sample(range(layers), chance.randint(1, layers - 1)))
    return {
        **_mamba(chance),
        "attn_layer_indices": attention,
        "rope_parameters": rotation(chance, head_dim // 2, ("default", "linear"))
        | {"partial_rotary_factor": 0.5},
    }


def _falcon_h1(chance: random.Random, layers: int, head_dim: int) -> Fields:
    mixer, several = _mamba(chance), (0.35, 0.8, 1.0, 1.7)
    single = ("key", "attention_in", "attention_out", "ssm_in", "ssm_out", "embedding", "lm_head")
    return {
        **mixer,
        "mamba_d_ssm": mixer["mamba_n_heads"] * chance.choice((4, 6, 12)),
        "projectors_bias": mixer["mamba_proj_bias"],
        "mamba_rms_norm": chance.random() < 0.5,
        "mamba_norm_before_gate": chance.random() < 0.5,
        "attention_bias": chance.random() < 0.3,
        "mlp_bias": chance.random() < 0.3,
        **{f"{name}_multiplier": chance.choice(several) for name in single},
        "ssm_multipliers": [chance.choice(several) for _ in range(5)],
        "mlp_multipliers": [chance.choice(several) for _ in range(2)],
    }


def _gemma4(chance: random.Random, layers: int, head_dim: int) -> Fields:
    """The last layer sees everything in transformers; layers that read the keys and values of others have one of their
    kind before."""
    kinds = ["sliding_attention", "full_attention"] * 2
    shared, mixed = chance.choice((0, 2)), chance.random() < 0.5
    width = chance.choice((0, 4, 8))
    return {
        "num_hidden_layers": 4,
        "layer_types": kinds,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": shared > 0 and chance.random() < 0.5,
        "global_head_dim": chance.choice((head_dim, 2 * head_dim)),
        "attention_k_eq_v": chance.random() < 0.5,
        "sliding_window": chance.choice((3, 8)),
        "hidden_size_per_layer_input": width,
        "final_logit_softcapping": chance.choice((None, 3.0)),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": chance.choice((0.25, 0.5)),
            },
        },
        "enable_moe_block": mixed,
        "num_experts": 8 if mixed else None,
        "top_k_experts": chance.choice((1, 3)) if mixed else None,
        "moe_intermediate_size": chance.randint(5, 40) if mixed else None,
    }


def _granite_hybrid(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {
        **_mamba(chance),
        "layer_types": both_types(chance, layers, ("linear_attention", "full_attention")),
        "num_local_experts": chance.choice((0, 8)),
        "num_experts_per_tok": chance.choice((1, 3)),
        "intermediate_size": chance.randint(5, 40),
        "shared_intermediate_size": chance.randint(5, 60),
        "attention_multiplier": chance.choice((1.0, 0.3)),
        "embedding_multiplier": chance.choice((1.0, 6.0)),
        "residual_multiplier": chance.choice((1.0, 0.22)),
        "logits_scaling": chance.choice((1.0, 4.0)),
        "position_embedding_type": chance.choice(("rope", "nope")),
    }


def _nemotron_h(chance: random.Random, layers: int, head_dim: int) -> Fields:
    groups = chance.choice((1, 2))
    kinds = both_types(chance, layers, ("linear_attention", "full_attention"))
    mlps = chance.choice((("mlp",), ("mlp", "moe")))
    blocks = [kind for one in kinds for kind in (one, chance.choice(mlps))]
    return {
        "num_hidden_layers": len(blocks),
        "layers_block_type": blocks,
        "layer_norm_epsilon": chance.choice((1e-6, 1e-5, 1e-3)),
        "mamba_num_heads": groups * chance.choice((2, 4)),
        "mamba_head_dim": chance.choice((4, 12)),
        "n_groups": groups,
        "ssm_state_size": chance.choice((4, 12)),
        "conv_kernel": chance.choice((2, 4)),
        "chunk_size": chance.choice((4, 16)),
        "n_routed_experts": 8,
        "num_experts_per_tok": chance.choice((1, 3)),
        "moe_intermediate_size": chance.randint(5, 40),
        "moe_shared_expert_intermediate_size": chance.randint(5, 60),
        "routed_scaling_factor": chance.choice((1.0, 1.5)),
        "n_group": 2,
        "topk_group": chance.choice((1, 2)),
        "norm_topk_prob": chance.random() < 0.7,
        "use_bias": chance.random() < 0.3,
        "mlp_bias": mlps == ("mlp",) and chance.random() < 0.5,
    }


def _lfm2(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {
        "layer_types": both_types(chance, layers, ("conv", "full_attention")),
        "norm_eps": chance.choice((1e-6, 1e-5, 1e-3)),
        "conv_L_cache": chance.choice((2, 3, 4)),
        "block_multiple_of": chance.choice((8, 16)),
        "block_auto_adjust_ff_dim": chance.random() < 0.5,
    }


def _lfm2_moe(chance: random.Random, layers: int, head_dim: int) -> Fields:
    fields = {
        key: one for key, one in _lfm2(chance, layers, head_dim).items() if not key.startswith("block_")
    }
    return {
        **fields,
        **experts(chance),
        "num_dense_layers": chance.randint(0, layers - 1),
        "use_expert_bias": chance.random() < 0.7,
        "routed_scaling_factor": chance.choice((1.0, 1.5)),
    }


def _minimax_m2(chance: random.Random, layers: int, head_dim: int) -> Fields:
    share = chance.choice((0.5, 1.0))
    return {
        **experts(chance),
        "rotary_dim": int(head_dim * share),
        "rope_parameters": rotation(chance, int(head_dim * share), ("default", "linear", "yarn"))
        | {"partial_rotary_factor": share},
    }


def _apertus(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {"attention_bias": chance.random() < 0.5}


def _olmo(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {"clip_qkv": chance.choice((None, 0.75, 3.0)), "attention_bias": chance.random() < 0.3}


def _phi(chance: random.Random, layers: int, head_dim: int) -> Fields:
    share = chance.choice((0.5, 1.0))
    return {
        "layer_norm_eps": chance.choice((1e-6, 1e-5, 1e-3)),
        "qk_layernorm": chance.random() < 0.4,
        "hidden_act": chance.choice(("gelu_new", "gelu")),
        "rope_parameters": rotation(chance, int(head_dim * share), ("default", "linear"))
        | {"partial_rotary_factor": share},
    }


def _phimoe(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {
        **experts(chance),
        "num_experts_per_tok": 2,  # SparseMixer draws two
        "attention_bias": chance.random() < 0.7,
        "lm_head_bias": chance.random() < 0.5,
        "router_jitter_noise": chance.choice((0.01, 0.3)),
        "sliding_window": chance.choice((None, 9)),
        "rope_parameters": rotation(chance, head_dim, ("default",)),
    }


def _flex_olmo(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {**experts(chance), "attention_bias": chance.random() < 0.3}


def _cohere2(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {
        "attention_bias": chance.random() < 0.5,
        "logit_scale": chance.choice((0.0625, 1.0)),
        "layer_norm_eps": chance.choice((1e-6, 1e-5, 1e-3)),
        "sliding_window": chance.choice((4, 9)),
        "layer_types": types(chance, layers),
    }


def _exaone4(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {"sliding_window": chance.choice((4, 9)), "layer_types": types(chance, layers)}


def _seed_oss(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {"attention_bias": chance.random() < 0.5, "attention_out_bias": chance.random() < 0.5}


def _biased(chance: random.Random, layers: int, head_dim: int) -> Fields:
    return {"use_bias": chance.random() < 0.5}


#: Family -> what it alone has: (chance, layers, head_dim).
FURTHER: dict[str, Callable[[random.Random, int, int], Fields]] = {
    "bamba": _bamba, "falcon_h1": _falcon_h1, "gemma4_text": _gemma4, "granitemoehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h, "lfm2": _lfm2, "lfm2_moe": _lfm2_moe, "minimax_m2": _minimax_m2,
    "apertus": _apertus, "olmo": _olmo, "phi": _phi,
    "phimoe": _phimoe, "flex_olmo": _flex_olmo, "cohere2": _cohere2, "exaone4": _exaone4, "seed_oss": _seed_oss,
    "ernie4_5": _biased,
}  # fmt: skip
