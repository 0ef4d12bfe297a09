"""How many channels a tensor has, by what these are: global sizes, which the ranks divide (torch-free)."""

from __future__ import annotations

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph import Width

Sizes = dict[Width, int]


def size_of(width: Width, model: ModelConfig) -> int:
    """How many channels that is, over all ranks. KeyError where the model has none."""
    return {
        "hidden": model.hidden_size,
        "head": model.num_heads,
        "heads": model.num_heads * model.head_dim,
        "kv_heads": model.num_kv_heads * model.head_dim,
        "value_heads": model.num_heads * model.value_dim,
        "intermediate": model.intermediate_size,
        "vocab": model.vocab_size,
        "one": 1,
        "conv_channels": model.hidden_size,
        **_of_latents(model),
        **_of_the_indexer(model),
        **_of_experts(model),
        **_of_states(model),
        **_of_layer_inputs(model),
    }[width]


def _of_latents(model: ModelConfig) -> Sizes:
    if (latent := model.latent) is None:
        return {}
    return {
        "query_latent": latent.q_rank or 0,
        "latent": latent.kv_rank,
        "rope_key": latent.rope_dim,
        "written_latent": latent.written_dim,
        "expanded_heads": model.num_heads * latent.expanded_dim,
    }


def _of_the_indexer(model: ModelConfig) -> Sizes:
    if (indexer := model.indexer) is None:
        return {}
    return {
        "index_heads": indexer.heads * indexer.dim,
        "index_key": indexer.dim,
        "index_weights": indexer.heads,
        "index_slots": indexer.top_k,
    }


def _of_experts(model: ModelConfig) -> Sizes:
    if (experts := model.experts) is None:
        return {}
    return {
        "experts": experts.count,
        "slots": experts.top_k,
        "expert": experts.width,
        "shared_expert": experts.shared_width,
    }


def _of_states(model: ModelConfig) -> Sizes:
    found: Sizes = {}
    if (linear := model.linear) is not None:
        found["linear_keys"] = linear.key_heads * linear.key_dim
        found["linear_values"] = linear.value_heads * linear.value_dim
        found["linear_heads"] = linear.value_heads
    if (mamba := model.mamba) is not None:
        found["ssm_channels"] = mamba.channels
        found["ssm_groups"] = mamba.groups * mamba.state
        found["ssm_heads"] = mamba.heads
    return found


def _of_layer_inputs(model: ModelConfig) -> Sizes:
    if (inputs := model.layer_inputs) is None:
        return {"layer_inputs": 0, "layer_input": 0}
    return {"layer_inputs": inputs.total, "layer_input": inputs.width}
