"""Which causes are faults of the engine's catalogue: by the cause's name, and by a fitted value where that decides.

A plain table, so that diagnosis can name a fault without knowing any: `lockstep toggles` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Cause, or cause:value of its transform -> the fault, as `--rule` takes it.
KNOWN_FAULTS: Mapping[str, str] = {
    "mask_zero_times_inf": "mask=additive",
    "bias_dropped": "load_bias=false",
    "rope_not_applied": "rope=swallowed",
    "rope_interleaved": "rope=interleaved",
    "rope_twice": "rope=twice",
    "rope_theta": "rope_theta=10000",
    "position_stuck": "positions=stuck",
    "position_offset": "positions=ahead",
    "cache_not_used": "cache_reuse=false",
    "cache_of_another_layer": "cache_layer=shared",
    "cache_heads_repeated": "cache_heads=repeated",
    "kv_heads_tiled": "kv_expand=tiled",
    "sharded_on_in_features": "qkv_shard_dim=1",
    "not_reduced": "reduce=missing",
    "head_untrained": "lm_head=missing",
    "other_activation:silu(up) * gate": "act=swapped",
    "other_activation:gelu(gate) * up": "act=gelu",
}


def fault_of(name: str, transform: Mapping[str, object]) -> str | None:
    """The catalogue's name of a cause; None where it has none."""
    for value in transform.values():
        if (found := KNOWN_FAULTS.get(f"{name}:{value}")) is not None:
            return found
    return KNOWN_FAULTS.get(name)
