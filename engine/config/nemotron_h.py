"""Nemotron-H and Nemotron-3 (`models/nemotron_h` of transformers 5): one block a layer, which is Mamba-2, attention
without positions, an MLP or experts (arXiv:2504.03624). Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.families import FamilyRules
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.linear_attention import LINEAR
from lockstep.engine.config.mamba import mamba, renamed_types
from lockstep.engine.errors import ConfigError

_FULL, _MLP, _EXPERTS = "full_attention", "mlp", "moe"
_LETTERS = {"M": LINEAR, "*": _FULL, "-": _MLP, "E": _EXPERTS}
_KEYS = {
    "heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "groups": "n_groups", "state": "ssm_state_size",
    "conv": "conv_kernel", "conv_bias": "use_conv_bias", "proj_bias": "use_bias",
}  # fmt: skip


def _kinds(fields: Fields) -> list[str]:
    """Of each layer its one block."""
    keys = [key for key in ("layers_block_type", "layer_types") if key in fields]
    if keys:
        kinds = renamed_types(fields.words(keys[0]) or [])
    else:
        pattern = fields.word("hybrid_override_pattern")
        kinds = [_LETTERS.get(letter, letter) for letter in pattern]
        keys = ["hybrid_override_pattern"]
    if other := sorted(set(kinds) - set(_LETTERS.values())):
        raise fields.error(keys[0], f"no layer is of the kind {other[0]!r}")
    return kinds


def _layer_types(fields: Fields) -> list[str]:
    """Of each layer whether it has a state."""
    return [kind if kind == LINEAR else _FULL for kind in _kinds(fields)]


def _never(fields: Fields) -> bool:
    return False


def _own(fields: Fields) -> Mapping[str, Any]:
    kinds = _kinds(fields)
    width = fields.size("mamba_num_heads", 128) * fields.size("mamba_head_dim", 64)
    has = mamba(fields, kinds, _KEYS, width)
    if has is not None:  # no key of the limits is read
        least = fields.number("time_step_min", 0.001)
        has = replace(has, limits=(least, math.inf))
    return {
        "norm": "wide",
        "gated": False,
        "mlp_bias": fields.flag("mlp_bias", False),
        "mamba": has,
        "blocks": tuple("mlp" if kind in (_MLP, _EXPERTS) else "attention" for kind in kinds),
        "experts": _experts(fields, kinds),
    }


def _experts(fields: Fields, kinds: list[str]) -> ExpertsConfig | None:
    if _EXPERTS not in kinds:
        return None
    if "moe_latent_size" in fields:
        raise fields.error("moe_latent_size", "experts that work on latents are not supported")
    if fields.flag("mlp_bias", False):
        raise ConfigError(f"{fields.where}: mlp_bias beside experts is not supported")
    return ExpertsConfig(
        fields.size("n_routed_experts", 8),
        fields.size("num_experts_per_tok", 2),
        fields.size("moe_intermediate_size", 7688),
        tuple(kind == _EXPERTS for kind in kinds),
        scores="sigmoid",
        renormalised=fields.flag("norm_topk_prob", True),
        correction=True,
        groups=fields.size("n_group", 1),
        top_groups=fields.size("topk_group", 1),
        factor=fields.number("routed_scaling_factor", 1.0),
        shared_width=fields.size("moe_shared_expert_intermediate_size", 7688),
        wide=True,
        wide_weights=True,
    )


NEMOTRON_H = FamilyRules(
    _own, 4096, eps=1e-5, eps_key="layer_norm_epsilon", own_kv_heads=True, head_dim=128, intermediate=21504,
    activation=("mlp_hidden_act", "relu2"), layer_types=_layer_types, rotates=_never,
)  # fmt: skip
