"""LFM2 (`models/lfm2` and `models/lfm2_moe` of transformers 5): short convolutions between layers of attention
(arXiv:2511.23404). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.families import FamilyRules
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.short_convolution import short_convolution

#: Added to the sum that weights of experts are divided by.
SHARES_EPS = 1e-6


def _of_both(fields: Fields) -> Mapping[str, Any]:
    tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
    return {"qk_norm": True, "short_conv": short_convolution(fields), "tie_embeddings": tied}


def _lfm2(fields: Fields) -> Mapping[str, Any]:
    return {**_of_both(fields), "intermediate_size": _width(fields)}


def _width(fields: Fields) -> int:
    """The MLP's, which is not what `intermediate_size` states."""
    width = fields.size("block_ff_dim" if "block_ff_dim" in fields else "intermediate_size", 12288)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    multiplier = fields.optional_number("block_ffn_dim_multiplier", default=1.0, above=0.0)
    if multiplier is None:
        return width
    multiple = fields.size("block_multiple_of", 256)
    return -(-int(multiplier * width) // multiple) * multiple


def _lfm2_moe(fields: Fields) -> Mapping[str, Any]:
    """Scores are sigmoids, of which a bias corrects the choice."""
    dense = fields.size("num_dense_layers", 2, least=0)
    experts = ExpertsConfig(
        fields.size("num_experts", 32),
        fields.size("num_experts_per_tok", 4),
        fields.size("moe_intermediate_size", 1792),
        tuple(i >= dense for i in range(fields.size("num_hidden_layers"))),
        scores="sigmoid",
        renormalised=fields.flag("norm_topk_prob", True),
        correction=fields.flag("use_expert_bias", True),
        factor=fields.number("routed_scaling_factor", 1.0),
        shares_eps=SHARES_EPS,
    )
    return {**_of_both(fields), "experts": experts}


LFM2 = FamilyRules(
    _lfm2, 128_000, eps=1e-5, eps_key="norm_eps", tied=True, theta=1e6, own_kv_heads=True, intermediate=12288,
    short_conv=True,
)  # fmt: skip
LFM2_MOE = FamilyRules(
    _lfm2_moe, 128_000, eps=1e-5, eps_key="norm_eps", tied=True, theta=1e6, own_kv_heads=True, intermediate=7168,
    short_conv=True,
)  # fmt: skip
