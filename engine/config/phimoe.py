"""Phi-3.5-MoE (`models/phimoe` of transformers 5): LayerNorm, biases, experts weighed by SparseMixer
(arXiv:2409.12136). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.families import FamilyRules
from lockstep.engine.config.fields import Fields


def _phimoe(fields: Fields) -> Mapping[str, Any]:
    if fields.size("num_experts_per_tok", 2) != 2:
        raise fields.error("num_experts_per_tok", "SparseMixer chooses two experts")
    bias = fields.flag("attention_bias", False)
    experts = ExpertsConfig(
        fields.size("num_local_experts", 16),
        2,
        fields.size("intermediate_size", 6400),
        (True,) * fields.size("num_hidden_layers"),
        scores="logits",
        renormalised=False,
        jitter=fields.number("router_jitter_noise", 0.01),
    )
    head_bias = fields.flag("lm_head_bias", False)
    return {"norm": "layer", "qkv_bias": bias, "o_bias": bias, "head_bias": head_bias, "experts": experts}


PHIMOE = FamilyRules(
    _phimoe, 131_072, eps=1e-5, theta=1e6, own_kv_heads=True, windows="all", intermediate=6400
)
