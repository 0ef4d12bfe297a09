"""Mistral 4 (`models/mistral4` of transformers 5): DeepSeek-V3's attention with queries scaled by their position,
experts chosen by a softmax. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.families import FamilyRules, after_dense
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.latent import latent_of


def _mistral4(fields: Fields) -> Mapping[str, Any]:
    width = fields.size("moe_intermediate_size", 2048)
    experts = ExpertsConfig(
        fields.size("n_routed_experts", 128),
        fields.size("num_experts_per_tok", 4),
        width,
        after_dense(fields, 0),
        renormalised=fields.flag("norm_topk_prob", True),
        groups=fields.size("n_group", 1),
        top_groups=fields.size("topk_group", 1),
        factor=fields.number("routed_scaling_factor", 1.0),
        shared_width=width * fields.size("n_shared_experts", 1),
    )
    return {
        "o_bias": fields.flag("attention_bias", False),
        "neighbours": fields.flag("rope_interleave", True),
        "experts": experts,
    }


_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MISTRAL4 = FamilyRules(
    _mistral4, 1_048_576, latent=partial(latent_of, plain_dim=64, q_rank=1024, kv_rank=256), rope=_YARN,
    partial_rotary=1.0,
)  # fmt: skip
