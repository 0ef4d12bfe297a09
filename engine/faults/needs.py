"""What a model and its ranks must have for a fault to act: each states why one cannot, None where it can."""

from __future__ import annotations

from lockstep.engine.config import ModelConfig
from lockstep.engine.faults.fault import Needs


def all_of(*needs: Needs) -> Needs:
    """What is lacking first."""

    def first_reason(model: ModelConfig, tp: int) -> str | None:
        return next((reason for need in needs if (reason := need(model, tp))), None)

    return first_reason


def several_ranks(model: ModelConfig, tp: int) -> str | None:
    """There is more than one rank."""
    return None if tp > 1 else "needs two ranks or more (--tp 2)"


def several_layers(model: ModelConfig, tp: int) -> str | None:
    """There is a layer beside this one."""
    return None if model.num_layers > 1 else "the model has a single layer"


def layers_alike(model: ModelConfig, tp: int) -> str | None:
    """Every layer has what the others have."""
    if model.stateful and not model.beside:
        return "some layers have a state, others attention"
    if (differing := same_sizes(model, tp)) is not None:
        return differing
    mixed = model.experts is not None and not all(model.experts.layers)
    return "some layers have experts, others none" if mixed else None


def same_sizes(model: ModelConfig, tp: int) -> str | None:
    """The heads of all layers are as wide."""
    return "the model's layers have heads of several sizes" if model.shapes else None


def several_experts(model: ModelConfig, tp: int) -> str | None:
    """There are experts that can be taken for each other."""
    return None if model.experts is not None and model.experts.count > 1 else "the model has no experts"


def latent(model: ModelConfig, tp: int) -> str | None:
    """Keys and values are made from latents."""
    return None if model.latent is not None else "the model makes no keys and values from latents"


def own_kv(model: ModelConfig, tp: int) -> str | None:
    """Keys and values are made by products of their own, and cached."""
    if model.latent is not None:
        return "the model makes keys and values from latents"
    return same_sizes(model, tp)


def several_heads(model: ModelConfig, tp: int) -> str | None:
    """A rank has heads that can be taken for each other."""
    return None if model.num_heads > tp else "each rank holds a single head"


def several_kv_heads(model: ModelConfig, tp: int) -> str | None:
    """A rank has KV heads that can be taken for each other."""
    return None if model.num_kv_heads > tp else "each rank holds a single KV head"


def qk_norm_by_head(model: ModelConfig, tp: int) -> str | None:
    """Each head of q and k is normalised."""
    there = model.qk_norm and not model.qk_norm_whole
    return None if there else "the model does not normalise each head of q and k"


def qk_norm_whole(model: ModelConfig, tp: int) -> str | None:
    """All heads of q, and of k, are normalised at once."""
    return None if model.qk_norm_whole else "the model does not normalise all heads of q and k at once"


def qkv_biases(model: ModelConfig, tp: int) -> str | None:
    """q, k and v have biases."""
    return None if model.qkv_bias else "the model has no q/k/v biases"


def row_biases(model: ModelConfig, tp: int) -> str | None:
    """o_proj or down_proj has a bias."""
    return None if model.o_bias or model.mlp_bias else "the model has no row biases"


def qkv_widths(model: ModelConfig, tp: int) -> tuple[int, int]:
    """Rows of q and of k (or v) that a rank holds."""
    return model.num_heads // tp * model.head_dim, max(1, model.num_kv_heads // tp) * model.head_dim
