"""Families that are others but for a few flags, and the rules of all. As in transformers 5, torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lockstep.engine.config import families
from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.families import Family, FamilyRules, Own
from lockstep.engine.config.fields import Fields


def _as(family: Family, fields: Fields) -> Own:
    """What that family's models do."""
    return families.RULES[family].own(fields)


def _experts_as(family: Family, fields: Fields) -> ExpertsConfig:
    """That family's experts."""
    experts = _as(family, fields)["experts"]
    assert isinstance(experts, ExpertsConfig)
    return experts


def _gemma(fields: Fields) -> Own:
    """Gemma 2 without its norms behind the blocks and its caps (arXiv:2403.08295). The GELU of old files is by a tanh,
    whatever they say."""
    without = {"post_norms": False, "score_scale": None, "score_cap": 0.0, "logit_cap": 0.0}
    return {**_as("gemma2", fields), **without, **_tanh_for(fields, "gelu")}


def _tanh_for(fields: Fields, name: str) -> Own:
    return {"activation": "gelu_tanh"} if fields.data.get("hidden_act") == name else {}


def _seed_oss(fields: Fields) -> Own:
    """Llama with biases of q, k and v, and of o by a key of its own."""
    return {
        "qkv_bias": fields.flag("attention_bias", True),
        "o_bias": fields.flag("attention_out_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
    }


def _exaone4(fields: Fields) -> Own:
    """Norms behind the blocks alone, and of each head of q and k; layers that see everything do not rotate
    (arXiv:2507.11407)."""
    return {"pre_norms": False, "post_norms": True, "qk_norm": True}


def _ernie4_5(fields: Fields) -> Own:
    """Llama with neighbours rotated together."""
    bias = fields.flag("use_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias, "neighbours": True}


def _glm(fields: Fields) -> Own:
    """GLM-4 without the norms behind the blocks (arXiv:2406.12793)."""
    return {**_as("glm4", fields), "post_norms": False}


def _helium(fields: Fields) -> Own:
    """Llama with neighbours rotated together, and never a bias of o."""
    return {**_as("llama", fields), "o_bias": False, "norm": "wide", "neighbours": True}


def _dots1(fields: Fields) -> Own:
    """Qwen3 with DeepSeek-V3's routing (arXiv:2506.05767)."""
    experts = replace(
        _experts_as("glm4_moe", fields),
        top_k=fields.size("num_experts_per_tok"),
        layers=families.after_dense(fields, 0),
        renormalised=fields.flag("norm_topk_prob", False),
    )
    return {**_as("qwen3", fields), "experts": experts}


def _exaone_moe(fields: Fields) -> Own:
    """DeepSeek-V3's routing; layers that see everything do not rotate."""
    width = fields.size("moe_intermediate_size", 1024)
    experts = ExpertsConfig(
        fields.size("num_experts", 64),
        fields.size("num_experts_per_tok", 8),
        width,
        families.sparse_types(fields, families.after_dense(fields, 1)),
        scores="sigmoid",
        renormalised=fields.flag("norm_topk_prob", True),
        correction=True,
        groups=fields.size("n_group", 1),
        top_groups=fields.size("topk_group", 1),
        factor=fields.number("routed_scaling_factor", 2.5),
        shared_width=width * fields.size("num_shared_experts", 1),
        wide=True,
        wide_weights=True,
    )
    return {"qk_norm": True, "experts": experts}


RULES: Mapping[Family, FamilyRules] = {
    **families.RULES,
    "gemma": FamilyRules(
        _gemma, 8192, tied=True, own_kv_heads=True, head_dim=256, activation=("hidden_act", "gelu_pytorch_tanh")
    ),
    "seed_oss": FamilyRules(_seed_oss, 524288, own_kv_heads=True, head_dim=128),
    "exaone4": FamilyRules(
        _exaone4, 2048, eps=1e-5, own_kv_heads=True, windows="typed", window=4096, full_every=4, unrotated_full=True
    ),
    "ernie4_5": FamilyRules(_ernie4_5, 131072, eps=1e-5, tied=True, theta=5e5, own_kv_heads=True, head_dim=128),
    "glm": replace(families.RULES["glm4"], own=_glm),
    "helium": FamilyRules(_helium, 4096, eps=1e-8, theta=1e5, own_kv_heads=True, head_dim=128),
    "dots1": FamilyRules(_dots1, 2048, own_kv_heads=True, windows="late", window=4096),
    "exaone_moe": FamilyRules(
        _exaone_moe, 2048, eps=1e-5, own_kv_heads=True, windows="typed", window=4096, full_every=4,
        unrotated_full=True,
    ),
}  # fmt: skip
