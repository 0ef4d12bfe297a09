"""Which causes are faults of the engine's catalogue: by the cause's name, and by a fitted value or the kinds of taps
where these decide.

A plain table, so that diagnosis can name a fault without knowing any: `lockstep faults` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: Cause, cause:value of its transform, or cause@kinds of the taps that are wrong -> the fault, as `--fault` takes it.
KNOWN_FAULTS: Mapping[str, str] = {
    "mask_zero_times_inf": "mask=additive",
    "mask_missing": "mask=none",
    "mask_bool_added": "mask=ones",
    "mask_finite:-10": "mask=weak",
    "mask_top_left": "window=top_left",
    "window_missing": "window=ignored",
    "window_prefill_only": "window=prefill_only",
    "bias_dropped@attn.k_proj,attn.q_proj,attn.v_proj": "load_bias=false",
    "bias_dropped@attn.k_proj": "load_bias=without_k",
    "bias_dropped@attn.o_proj": "row_bias=missing",
    "bias_dropped@attn.o_proj,mlp.down": "row_bias=missing",
    "bias_on_every_rank": "row_bias=every_rank",
    "sinks_left_out": "sinks=left_out",
    "sinks_after_softmax": "sinks=afterwards",
    "sinks_not_shifted": "sinks=unshifted",
    "sinks_of_neighbours": "sinks=next_head",
    "sinks_of_other_rank": "shard=sinks_of_rank_0",
    "rope_not_applied@attn.index_k_rope": "index_keys=unrotated",
    "norm_left_out:(x - mean(x)) / sqrt(mean((x - mean(x))²) + eps) * w@attn.index_k_norm": "index_norm=unbiased",
    "index_not_causal": "index_sight=bidirectional",
    "choice_one_fewer": "key_choice=one_fewer",
    "choice_ignored": "chosen_keys=ignored",
    "rope_not_applied": "rope=swallowed",
    "rope_interleaved": "rope=interleaved",
    "rope_twice": "rope=twice",
    "rope_reversed": "rope=backwards",
    "rope_cos_sin_exchanged": "rope=cos_sin_swapped",
    "rope_partial": "rope=half_of_pairs",
    "rope_theta:10000": "rope_theta=10000",
    "rope_theta:1e+06": "rope_theta=1000000",
    "rope_scaling": "rope_frequencies=unscaled",
    "attention_factor": "rope_frequencies=no_attention_factor",
    "rope_precision": "rope_angles=bfloat16",
    "cache_not_used": "cache_reuse=false",
    "cache_cut_at_front": "cache_reuse=first_lost",
    "cache_of_another_layer": "cache_layer=shared",
    "cache_of_next_layer": "cache_layer=previous",
    "cache_of_other_writer": "shared_cache=first",
    "value_norm_missing": "value_norm=missing",
    "chunks_missing": "chunk=ignored",
    "chunks_sliding": "chunk=sliding",
    "rotated_norm_missing": "unit_qk_norm=missing",
    "clip_missing": "clip_qkv=missing",
    "multiplier_missing@attn.k_scaled": "multiplied=without_key",
    **{
        f"multiplier_missing@attn.ssm_{one}_scaled": "multiplied=without_parts"
        for one in ("z", "x", "b", "c", "dt")
    },
    "attention_beside_missing": "mixed=states",
    "states_beside_missing": "mixed=attention",
    "query_scaling_missing": "query_factor=missing",
    "expert_input_unweighed": "expert_input=unweighed",
    "value_norm_of_keys": "value_norm=keys",
    "layer_inputs_unscaled": "layer_inputs=unscaled",
    "layer_inputs_embedding_alone": "layer_inputs=embedding_alone",
    "layer_input_of_layer": "layer_input=next",
    "residual_left_out:stream + branch@mlp_residual": "layer_scalar=missing",
    "residual_left_out:stream + branch": "residual_factor=one",
    "pack_offsets": "qkv_sizes=mixed",
    "bias_of_other_rank:0": "shard=biases_of_rank_0",
    "cache_heads_repeated": "cache_heads=repeated",
    "cache_keys_for_values@attn.context": "cache_values=keys",
    "cache_low_precision:float8 (e4m3)": "cache_heads=float8",
    "scores_scale:1": "scale=one",
    "scores_scale:scaled twice, by 1/head_dim": "scale=twice",
    "scores_scale:by 1/sqrt of hidden_size": "scale=hidden",
    "scores_scale:the factor of mscale_all_dim is left out": "scale=without_mscale",
    "scores_scale:the square of mscale_all_dim's factor is applied twice": "scale=mscale_twice",
    "scores_scale:the factor of mscale, which is the rotation's, instead of mscale_all_dim's": "scale=mscale",
    "scores_scale:by 1/sqrt of the width of the part of a key that is not rotated (qk_nope_head_dim)": "scale=nope_dim",
    "scores_scale:by 1/sqrt of the width of a value (v_head_dim)": "scale=v_head_dim",
    "rope_halves": "layer_rope=halves",
    "rope_first_channels": "layer_rope=first",
    "rope_whole_heads": "layer_rope=whole",
    "rope_whole_halves": "layer_rope=whole",
    "norm_skipped@attn.q_a_norm": "query_latent=unnormed",
    "norm_skipped@attn.kv_a_norm": "split_latent=unnormed",
    "rope_key_normed:by itself": "split_latent=key_too",
    "key_part_of_one_head:0": "latent_keys=first_head",
    "key_parts_exchanged": "latent_keys=rotated_first",
    "cache_first_head": "cache_heads=first",
    "kv_heads_all_0": "kv_expand=first",
    "kv_heads_shifted_1": "kv_expand=next",
    "kv_heads_tiled": "kv_expand=tiled",
    "softmax_low_precision": "softmax=bfloat16",
    "softmax_plus_one": "softmax=plus_one",
    "context_heads_by_dim": "merge=features_first",
    "sharded_on_in_features": "qkv_shard_dim=1",
    "shard_of_another_rank": "shard=rank_0",
    "not_reduced": "reduce=missing",
    "rank_missing": "reduce=without_last",
    "reduce_repeated": "reduce=twice",
    "reduce_averaged": "reduce=mean",
    "norm_number:1e-05": "norm=eps_1e-5",
    "norm_left_out:x / sqrt(mean(x²) + eps)": "norm=unweighted",
    "norm_left_out:x / sqrt(mean(x²) + eps) * w": "norm=without_one",
    "norm_applied:x / sqrt(mean(x²) + eps) * (1 + w)": "norm=plus_one",
    "norm_applied:(x - mean(x)) / sqrt(mean((x - mean(x))²) + eps) * w": "norm=mean_subtracted",
    "norm_function:x * sqrt(mean(x²) + eps) * w": "norm=divided",
    "norm_precision": "norm=bfloat16",
    "norm_function:x / sqrt(mean_over_heads(x²) + eps) * w": "norm=heads_together",
    "norm_operand:x / sqrt(mean(x²) + eps) * w": "sum_squares=own",
    "norm_skipped": "norm=no_heads",
    "head_untrained": "lm_head=missing",
    "head_unnormed": "head_input=unnormed",
    "head_from_embedding": "lm_head=embedding",
    "activation_exchanged:silu(up) * gate": "act=swapped",
    "activation_function:gelu(gate) * up": "act=gelu",
    "activation_function:gelu_tanh(gate) * up": "act=gelu",
    "activation_function:relu(gate) * up": "act=relu",
    "activation_function:quick_gelu(gate) * up": "act=quick_gelu",
    "activation_left_out:silu(gate)": "act=ungated",
    "weight_of_sibling@mlp.experts.gate,mlp.experts.up": "expert_gate_up=exchanged",
    "choice_uncorrected": "choice=uncorrected",
    "choice_ungrouped": "choice=ungrouped",
    "choice_by_softmax": "router_scores=softmax",
    "weights_by_softmax": "router_scores=softmax",
    "weights_by_sigmoids": "router_scores=sigmoid",
    "weights_not_renormalised": "choice_weights=as_they_are",
    "weights_renormalised": "choice_weights=as_shares",
    "xielu_raw_alpha": "xielu=raw_slope",
    "weights_by_plain_softmax": "choice_weights=softmax",
    "weights_corrected": "choice_weights=corrected",
    "expert_scale_missing": "expert_scale=missing",
    "router_norm_missing": "router_norm=missing",
    "weights_unscaled": "choice_weights=unscaled",
    "weights_scaled_twice": "choice_weights=scaled_twice",
    "combine_unweighted": "combine=unweighted",
    "shared_expert_missing": "shared_expert=missing",
    "shared_expert_ungated": "shared_expert=ungated",
    "shared_expert_scaled:2": "shared_expert=on_every_rank",
    "shared_expert_scaled:4": "shared_expert=on_every_rank",
    "experts_lost": "own_experts=without_last",
    "experts_reversed": "own_experts=in_reverse",
    "experts_counted_from_1": "tensor_of=next_expert",
    "activation_number:min(gate, inf) * sigmoid(slope * min(gate, inf)) * (clamp(up, ±inf) + 1)": "act=unclamped",
    "activation_number:min(gate, limit) * sigmoid(1 * min(gate, limit)) * (clamp(up, ±limit) + 1)": "act=plain_sigmoid",
    "activation_left_out:min(gate, limit) * sigmoid(slope * min(gate, limit)) * clamp(up, ±limit)": "act=without_one",
    "stack_read_as_halves": "expert_gate_up=halves",
    "stack_read_in_turn": "expert_gate_up=in_turn",
    "expert_bias_missing@mlp.experts.down": "expert_bias=missing",
    "expert_bias_on_every_rank": "expert_bias=on_every_rank",
    "residual_left_out:branch": "residual=missing",
    "residual_repeated:stream + stream + branch": "residual=twice",
    "weight_of_sibling@mlp.gate,mlp.up": "tensor_of=gate_up_swapped",
    "weight_of_sibling@attn.k_proj,attn.v_proj": "tensor_of=k_v_swapped",
    "weight_of_another:the next layer": "tensor_of=next_layer",
    "norm_operand:the next layer": "tensor_of=next_layer",
    "norm_operand:the same layer": "tensor_of=norms_swapped",
    "embedding_scaled": "embedding=scaled",
    "unmultiplied": "embedding=unscaled",
    "undivided": "logits=raw",
    "uncapped": "logits=raw",
    "scores_uncapped": "soft_cap=missing",
    "transposed@attn.q_proj": "stored=square_transposed",
    "transposed": "stored=transposed",
    "misread:integers": "dequantise=integers",
    "misread:swapped_nibbles": "dequantise=nibble_order",
    "misread:swapped_scales": "dequantise=scale_order",
    "misread:bytes": "dequantise=bias_bytes",
    "misread:rows_stored": "row_order=stored",
    "misread:rows_again": "row_order=forward",
    "misread:rows_by_query_heads": "row_order=query_heads",
}


#: The same of positions: as the engine itself reports them, and where the rotation alone has them.
KNOWN_POSITIONS: Mapping[str, tuple[str | None, str]] = {
    "positions_restart": (None, "rope_positions=of_the_pass"),
    "position_stuck:0": ("positions=stuck", "rope_positions=of_the_pass"),
    "position_offset:1": ("positions=ahead", "rope_positions=ahead_in_decode"),
}


def fault_of(name: str, transform: Mapping[str, object], kinds: Iterable[str] = ()) -> str | None:
    """The catalogue's name of a cause at taps of those kinds; None where it has none."""
    if name == "window_width":
        width, window = transform.get("width"), transform.get("window")
        one_more = isinstance(width, int) and isinstance(window, int) and width == window + 1
        return "window=one_more" if one_more else None
    if transform.get("shard_of", 0) != 0:  # the catalogue's takes that of rank 0
        return None
    values = [f"{name}:{value}" for each in transform.values() for value in _written(each)]
    at = f"@{','.join(sorted(set(kinds)))}"
    keys = [*(value + at for value in values), *values, name + at, name]
    if "recorded" in transform:
        stated, turned = next((KNOWN_POSITIONS[key] for key in keys if key in KNOWN_POSITIONS), (None, None))
        return stated if transform["recorded"] else turned
    return next((KNOWN_FAULTS[key] for key in keys if key in KNOWN_FAULTS), None)


def _written(value: object) -> list[str]:
    if isinstance(value, list | tuple):
        return [text for each in value for text in _written(each)]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return [f"{value:g}" if number else str(value)]
