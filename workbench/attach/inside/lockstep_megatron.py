"""Megatron-core's models: what their parts are called, and which taps they are. Tensors are [tokens, batch, …]."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

#: As `Names` of lockstep_names. A norm that is fused into the product behind it is no module, so that it has no tap.
MEGATRON: dict[str, dict[str, str]] = {
    "embedding": {"out": "embed"},
    "embedding.word_embeddings": {},
    "embedding.embedding_dropout": {},
    "rotary_pos_emb": {},
    "": {"out": ".mlp_residual"},
    ".input_layernorm": {"out": ".attn_norm"},
    ".self_attention.linear_qkv": {
        "grouped q": ".attn.q_proj", "grouped k": ".attn.k_proj", "grouped v": ".attn.v_proj",
    },
    ".self_attention.q_layernorm": {"out": ".attn.q_norm"},
    ".self_attention.k_layernorm": {"out": ".attn.k_norm"},
    ".self_attention.core_attention": {"in": ".attn.q_rope", "second": ".attn.k_rope", "out": ".attn.context"},
    ".self_attention.core_attention.scale_mask_softmax": {},
    ".self_attention.core_attention.attention_dropout": {},
    ".self_attention.linear_proj": {"out": ".attn.o_proj", "partial": ".attn.o_proj.partial"},
    ".pre_cross_attn_layernorm": {},
    ".cross_attention": {},
    ".cross_attn_bda": {},
    ".pre_mlp_layernorm": {"in": ".attn_residual", "out": ".mlp_norm"},
    ".mlp.linear_fc1": {"left": ".mlp.gate", "right": ".mlp.up"},
    ".mlp.linear_fc2": {"in": ".mlp.act", "partial": ".mlp.down.partial", "out": ".mlp.down"},
    "final_layernorm": {"out": "final_norm"},
    "output_layer": {"out": "logits"},
}  # fmt: skip
#: By what else than tensors a model may be cut, so that a rank has not every token of every layer.
CUT_OTHERWISE = (
    "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "sequence_parallel",
)  # fmt: skip


def is_megatron(paths: Collection[str]) -> bool:
    """Whether a model's parts have Megatron-core's names."""
    return any(path.endswith(".self_attention.linear_qkv") for path in paths)


def megatron_names(local: str, part: nn.Module, owner: Any) -> dict[str, str]:
    """What to take of a part: nothing of what comes out of a norm that is fused elsewhere, and of an MLP without gates
    its up."""
    names = MEGATRON[local]
    if local.endswith("layernorm") and not any(True for _ in part.parameters()):
        return {take: tap for take, tap in names.items() if take != "out"}
    if local == ".mlp.linear_fc1" and not getattr(getattr(owner, "config", None), "gated_linear_unit", True):
        return {"out": ".mlp.up"}
    return names


def grouped(x: Any, owner: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a product in which each group of heads has its queries, then its key and value."""
    x = x[0] if isinstance(x, tuple) else x
    groups, dim = owner.num_query_groups_per_partition, owner.hidden_size_per_attention_head
    whole = x.unflatten(-1, (groups, -1, dim))
    q, k, v = whole[..., :-2, :], whole[..., -2, :], whole[..., -1, :]
    return q.flatten(-3), k.flatten(-2), v.flatten(-2)


MEGATRON_TAKE: dict[str, Callable[[Any, Any], Any]] = {
    "grouped q": lambda x, owner: grouped(x, owner)[0],
    "grouped k": lambda x, owner: grouped(x, owner)[1],
    "grouped v": lambda x, owner: grouped(x, owner)[2],
}


def logits_layout(model: Any) -> str:
    """Each rank has the logits of its part of the vocabulary, unless they are gathered."""
    return "shard(1)" if getattr(model, "parallel_output", True) else "replicate"


def config_of(config: Any, vocab_size: int | None) -> dict[str, object]:
    """Its numbers by transformers' names."""
    found = {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.kv_channels,
        "intermediate_size": config.ffn_hidden_size,
        "vocab_size": vocab_size,
    }
    return {name: value for name, value in found.items() if value is not None}
