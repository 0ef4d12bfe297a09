"""What to take of Falcon-H1's layers, as transformers has them: attention and Mamba-2 side by side, and multipliers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from .lockstep_mamba import PARTS, part_of

#: Module -> what to take of it -> tap, beside what is taken of Mamba-2 and of attention in any model.
FALCON_H1: dict[str, dict[str, str]] = {
    ".mamba.in_proj": {
        "in": ".attn.ssm_in_scaled",
        **{f"scaled {one}": f".attn.ssm_{one}_scaled" for one in PARTS},
    },
    ".mamba": {"scaled states": ".attn.out_scaled"},
    ".self_attn.q_proj": {"in": ".attn.in_scaled"},
    ".self_attn.k_proj": {"scaled keys": ".attn.k_scaled"},
    ".self_attn": {"scaled attention": ".attn.o_scaled", "mixed": ".attn.mixed"},
    ".mlp.gate_proj": {"scaled gate": ".mlp.gate_scaled"},
    ".mlp.down_proj": {"scaled down": ".mlp.down_scaled"},
}


def falcon_h1(names: dict[str, dict[str, str]], config: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """The map for a model of that configuration."""
    found = names | {module: names.get(module, {}) | takes for module, takes in FALCON_H1.items()}
    if not config.get("mamba_rms_norm"):
        found[".mamba.out_proj"] = names[".mamba.out_proj"] | {"in": ".attn.ssm_gated"}
    return found


def _scaled_part(name: str, x: Tensor, owner: Any) -> Tensor:
    return part_of(name, x * owner.mup_vector, owner)


def _states(x: Any, owner: Any) -> Any:
    """What Mamba-2 gives, kept until attention has run."""
    scaled = x * owner.ssm_out_multiplier
    owner.__dict__["lockstep_states"] = scaled
    return scaled


#: To take, of what a module gives.
FALCON_H1_TAKE: dict[str, Callable[[Any, Any], Any]] = {
    **{f"scaled {one}": partial(_scaled_part, one) for one in PARTS},
    "scaled states": _states,
    "scaled keys": lambda x, owner: x * owner.key_multiplier,
    "scaled attention": lambda x, owner: x[0] * owner.attn_out_multiplier,
    "mixed": lambda x, owner: owner.__dict__.pop("lockstep_states") + x[0] * owner.attn_out_multiplier,
    "scaled gate": lambda x, owner: x * owner.gate_multiplier,
    "scaled down": lambda x, owner: x * owner.down_multiplier,
}
