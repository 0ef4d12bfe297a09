"""Granite 4 (`models/granitemoehybrid` of transformers 5): Mamba-2 between layers of attention, behind each an MLP,
perhaps with experts beside it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.families import RULES, FamilyRules
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.linear_attention import LINEAR
from lockstep.engine.config.mamba import mamba, renamed_types

#: What its configuration, Bamba's and Falcon-H1's call the sizes of Mamba-2.
MAMBA_KEYS = {
    name: f"mamba_{key}"
    for name, key in (
        ("heads", "n_heads"), ("head_dim", "d_head"), ("groups", "n_groups"), ("state", "d_state"), ("conv", "d_conv"),
        ("conv_bias", "conv_bias"), ("proj_bias", "proj_bias"),
    )
}  # fmt: skip


def layer_types(fields: Fields) -> list[str]:
    """Of each layer whether it has a state or attention: without a word all have a state."""
    return renamed_types(fields.words("layer_types") or [LINEAR] * fields.size("num_hidden_layers"))


def rotates(fields: Fields) -> bool:
    """Whether attention has positions."""
    return fields.data.get("position_embedding_type") == "rope"


def _own(fields: Fields) -> Mapping[str, Any]:
    width = fields.size("mamba_expand", 2) * fields.size("hidden_size")
    shared, layers = fields.size("shared_intermediate_size", 1024), fields.size("num_hidden_layers")
    own: Mapping[str, Any] = {
        **RULES["granite"].own(fields),
        "mlp_bias": False,
        "mamba": mamba(fields, layer_types(fields), MAMBA_KEYS, width),
    }
    if not (count := fields.size("num_local_experts", 8, least=0)):
        return {**own, "intermediate_size": shared}
    experts = ExpertsConfig(
        count,
        fields.size("num_experts_per_tok", 2),
        fields.size("intermediate_size", 11008),
        (True,) * layers,
        shared_width=shared,
    )
    return {**own, "experts": experts}


GRANITE_HYBRID = FamilyRules(_own, 2048, intermediate=11008, layer_types=layer_types, rotates=rotates)
