"""What each family's model does differently from Llama's, and what its configuration class assumes where config.json is
silent: as in transformers 5 (`models/*/configuration_*.py`, `modeling_*.py`). Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lockstep.engine.config.fields import Fields

Family = Literal["qwen2", "qwen3", "llama", "mistral", "olmo2"]
FAMILIES: tuple[Family, ...] = get_args(Family)

#: Fields of `ModelConfig` that differ from their defaults.
Own = Mapping[str, Any]


def _biased(fields: Fields) -> Own:
    """`attention_bias` is of all four products."""
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias}


def _llama(fields: Fields) -> Own:
    return {**_biased(fields), "mlp_bias": fields.flag("mlp_bias", False)}


def _qwen2(fields: Fields) -> Own:
    return {"qkv_bias": True}  # always, and never an o bias: `attention_bias` is not read


def _qwen3(fields: Fields) -> Own:
    return {**_biased(fields), "qk_norm": True}


def _mistral(fields: Fields) -> Own:
    return {}  # no biases: `attention_bias` is not read


def _olmo2(fields: Fields) -> Own:
    """Norms behind the blocks instead of before them, and over all heads of q and k (arXiv:2501.00656)."""
    norms = {"norm": "wide", "pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_whole": True}
    return {**_biased(fields), **norms}


@dataclass(frozen=True, slots=True)
class FamilyRules:
    """`own(fields)`: what the family's models do differently. The others are what is assumed of keys that are missing:
    `head_dim` None: hidden / heads; `own_kv_heads`: a number that has nothing to do with this model's heads, so that it
    must be stated."""

    own: Callable[[Fields], Own]
    max_position: int
    eps: float = 1e-6
    tied: bool = False
    theta: float = 10_000.0
    head_dim: int | None = None
    own_kv_heads: bool = False


RULES: Mapping[Family, FamilyRules] = {
    "qwen2": FamilyRules(_qwen2, 32768, own_kv_heads=True),
    "qwen3": FamilyRules(_qwen3, 32768, head_dim=128, own_kv_heads=True),
    "llama": FamilyRules(_llama, 2048),
    "mistral": FamilyRules(_mistral, 131072, own_kv_heads=True),
    "olmo2": FamilyRules(_olmo2, 2048, eps=1e-5),
}
