"""Which causes are faults of the engine's catalogue: by the cause's name, and by a fitted value where that decides.

A plain table, so that diagnosis can name a fault without knowing any: `lockstep toggles` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Cause, or cause:value of its transform -> the fault, as `--rule` takes it.
KNOWN_FAULTS: Mapping[str, str] = {
    "mask_zero_times_inf": "mask=additive",
    "mask_missing": "mask=none",
    "mask_bool_added": "mask=ones",
    "mask_finite:-10": "mask=weak",
    "mask_top_left": "window=top_left",
    "window_missing": "window=ignored",
    "bias_dropped": "load_bias=false",
    "bias_of_other_rank": "shard=biases_of_rank_0",
    "bias_on_every_rank": "row_bias=every_rank",
    "rope_not_applied": "rope=swallowed",
    "rope_interleaved": "rope=interleaved",
    "rope_twice": "rope=twice",
    "rope_sign": "rope=backwards",
    "rope_cos_sin_exchanged": "rope=cos_sin_swapped",
    "rope_partial": "rope=half_of_pairs",
    "rope_theta:10000": "rope_theta=10000",
    "rope_theta:1e+06": "rope_theta=1000000",
    "rope_scaling": "rope_frequencies=unscaled",
    "attention_factor": "rope_frequencies=no_attention_factor",
    "rope_precision": "rope_angles=bfloat16",
    "positions_restart": "rope_positions=of_the_pass",
    "position_stuck:0": "positions=stuck",
    "position_offset:1": "positions=ahead",
    "cache_not_used": "cache_reuse=false",
    "cache_cut_at_front": "cache_reuse=first_lost",
    "cache_of_another_layer": "cache_layer=shared",
    "cache_heads_repeated": "cache_heads=repeated",
    "cache_keys_for_values": "cache_values=keys",
    "kv_heads_tiled": "kv_expand=tiled",
    "softmax_low_precision": "softmax=bfloat16",
    "softmax_plus_one": "softmax=plus_one",
    "context_heads_by_dim": "merge=features_first",
    "sharded_on_in_features": "qkv_shard_dim=1",
    "shard_of_another_rank": "shard=rank_0",
    "not_reduced": "reduce=missing",
    "rank_missing": "reduce=without_last",
    "norm_epsilon:1e-05": "norm=eps_1e-5",
    "norm_centred": "norm=mean_subtracted",
    "norm_inverted": "norm=divided",
    "norm_precision": "norm=bfloat16",
    "norm_over_heads": "norm=heads_together",
    "norm_skipped": "norm=no_heads",
    "head_untrained": "lm_head=missing",
    "head_from_embedding": "lm_head=embedding",
    "other_activation:silu(up) * gate": "act=swapped",
    "other_activation:gelu(gate) * up": "act=gelu",
    "other_activation:relu(gate) * up": "act=relu",
    "other_activation:quick_gelu(gate) * up": "act=quick_gelu",
    "other_activation:silu(gate)": "act=ungated",
    "residual_missing": "residual=missing",
    "residual_repeated": "residual=twice",
    "transposed": "stored=transposed",
}


def fault_of(name: str, transform: Mapping[str, object]) -> str | None:
    """The catalogue's name of a cause; None where it has none."""
    if name == "window_width":
        width, window = transform.get("width"), transform.get("window")
        one_more = isinstance(width, int) and isinstance(window, int) and width == window + 1
        return "window=one_more" if one_more else None
    for value in transform.values():
        written = f"{value:g}" if isinstance(value, int | float) else value
        if (found := KNOWN_FAULTS.get(f"{name}:{written}")) is not None:
            return found
    return KNOWN_FAULTS.get(name)
