"""Bamba (`models/bamba` of transformers 5): Mamba-2 between layers of attention, behind each an MLP. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.engine.config.families import RULES, FamilyRules
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.granite_hybrid import MAMBA_KEYS
from lockstep.engine.config.linear_attention import LINEAR
from lockstep.engine.config.mamba import mamba


def _layer_types(fields: Fields) -> list[str]:
    """Those layers have attention that `attn_layer_indices` names."""
    attending = fields.data.get("attn_layer_indices") or []
    if not isinstance(attending, list):
        raise fields.error("attn_layer_indices", "expected a list of layers")
    layers = range(fields.size("num_hidden_layers"))
    return ["full_attention" if i in attending else LINEAR for i in layers]


def _own(fields: Fields) -> Mapping[str, Any]:
    width = fields.size("mamba_expand", 2) * fields.size("hidden_size")
    return {
        **RULES["llama"].own(fields),
        "mamba": mamba(fields, _layer_types(fields), MAMBA_KEYS, width),
    }


BAMBA = FamilyRules(
    _own,
    262_144,
    eps=1e-5,
    own_kv_heads=True,
    intermediate=14336,
    partial_rotary=0.5,
    layer_types=_layer_types,
)
