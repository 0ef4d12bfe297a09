"""What Mamba-2 has for each head beside its products (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph.decoder import operation_of

#: By the kind of the operation, the roles.
_ROLES: Mapping[str, tuple[str, ...]] = {
    "step_size": ("dt_bias",),
    "ssm_state": ("A_log",),
    "ssm_read": ("A_log", "D"),
}


def ssm_vectors(model: ModelConfig, kind: str) -> dict[str, str]:
    """Role -> name within the layer; empty of other operations."""
    if (roles := _ROLES.get(kind)) is None or (one := operation_of(model, "attn.ssm_x")) is None:
        return {}
    mixer = one.module.partition(".")[0]
    return {role: f"{mixer}.{role}" for role in roles}
