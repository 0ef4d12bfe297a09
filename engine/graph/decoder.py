"""The operations of a decoder, in the order in which they run: Vaswani et al. 2017 as Llama has it (arXiv:2302.13971).

Each is declared once, here. Taps and layouts, parameters and their shards, data flow, what other libraries call it,
axes and shapes are derived from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lockstep.engine.config import ModelConfig
from lockstep.engine.graph.operation import STREAM, Operation, Part

_ATTENTION = (
    Operation("attn_norm", "norm", {"x": STREAM}, module="input_layernorm"),
    Operation("attn.q_proj", "linear", {"x": "attn_norm"}, "heads", module="self_attn.q_proj", bias="qkv_bias"),
    Operation(
        "attn.k_proj", "linear", {"x": "attn_norm"}, "kv_heads", module="self_attn.k_proj", bias="qkv_bias"
    ),
    Operation(
        "attn.v_proj", "linear", {"x": "attn_norm"}, "kv_heads", module="self_attn.v_proj", bias="qkv_bias"
    ),
    Operation(
        "attn.q_norm", "norm", {"x": "attn.q_proj"}, "heads", "heads", module="self_attn.q_norm", part="qk_norm"
    ),
    Operation(
        "attn.k_norm", "norm", {"x": "attn.k_proj"}, "kv_heads", "heads", module="self_attn.k_norm", part="qk_norm"
    ),
    Operation("attn.q_rope", "rope", {"x": "attn.q_norm"}, "heads", "heads"),
    Operation("attn.k_rope", "rope", {"x": "attn.k_norm"}, "kv_heads", "heads"),
    Operation("attn.k_cache", "cache", {"written": "attn.k_rope"}, "kv_heads", "cache"),
    Operation("attn.v_cache", "cache", {"written": "attn.v_proj"}, "kv_heads", "cache"),
    Operation("attn.scores", "scores", {"q": "attn.q_rope", "k": "attn.k_cache"}, "heads", "cells"),
    Operation("attn.probs", "softmax", {"scores": "attn.scores"}, "heads", "cells"),
    Operation("attn.context", "context", {"probs": "attn.probs", "v": "attn.v_cache"}, "heads"),
    Operation("attn.o_proj.partial", "linear", {"x": "attn.context"}, module="self_attn.o_proj", part="partial"),
    Operation("attn.o_proj", "reduce", {"partial": "attn.o_proj.partial"}, module="self_attn.o_proj", bias="o_bias"),
    Operation("attn_residual", "residual", {"x": STREAM, "y": "attn.o_proj"}),
)  # fmt: skip
_MLP = (
    Operation("mlp_norm", "norm", {"x": "attn_residual"}, module="post_attention_layernorm"),
    Operation(
        "mlp.gate", "linear", {"x": "mlp_norm"}, "intermediate", module="mlp.gate_proj", bias="mlp_bias"
    ),
    Operation("mlp.up", "linear", {"x": "mlp_norm"}, "intermediate", module="mlp.up_proj", bias="mlp_bias"),
    Operation("mlp.act", "activation", {"gate": "mlp.gate", "up": "mlp.up"}, "intermediate"),
    Operation("mlp.down.partial", "linear", {"x": "mlp.act"}, module="mlp.down_proj", part="partial"),
    Operation("mlp.down", "reduce", {"partial": "mlp.down.partial"}, module="mlp.down_proj", bias="mlp_bias"),
    Operation("mlp_residual", "residual", {"x": "attn_residual", "y": "mlp.down"}),
)
#: All operations that a layer may have.
LAYER: Mapping[str, Operation] = {one.tap: one for one in (*_ATTENTION, *_MLP)}
#: Those before and behind the layers.
OUTSIDE: Mapping[str, Operation] = {
    one.tap: one
    for one in (
        Operation("embed", "embedding", module="model.embed_tokens"),
        Operation("final_norm", "norm", {"x": STREAM}, module="model.norm"),
        Operation("logits", "head", {"x": "final_norm"}, "vocab", module="lm_head"),
    )
}
#: Products of the same input, which engines may make in one.
QKV, GATE_UP = (
    tuple(one.tap for one in LAYER.values() if one.kind == "linear" and one.inputs["x"] == read)
    for read in ("attn_norm", "mlp_norm")
)
#: Of products that are summed over the ranks, what they multiply.
MULTIPLIED: Mapping[str, str] = {
    one.tap: LAYER[one.inputs["partial"]].inputs["x"] for one in LAYER.values() if one.kind == "reduce"
}
#: The end of a layer: the stream that enters the next.
LAYER_OUTPUT = _MLP[-1].tap


def parts_of(model: ModelConfig) -> frozenset[Part]:
    """What the model has of what only some have."""
    return frozenset({"partial", *(("qk_norm",) if model.qk_norm else ())})


def parts_in(taps: Collection[str]) -> frozenset[Part]:
    """The parts that show in a layer's taps."""
    return frozenset(one.part for one in LAYER.values() if one.part is not None and one.tap in taps)


def layer_operations(parts: Collection[Part]) -> tuple[Operation, ...]:
    """The operations of a layer that has these parts, in the order of execution."""
    return tuple(one for one in LAYER.values() if one.part is None or one.part in parts)


def instead_of(tap: str) -> tuple[str, ...]:
    """The tap, and what takes its place in models and engines that lack it, nearest first."""
    operation = LAYER.get(tap)
    if operation is None or operation.part is None:
        return (tap,)
    return (tap, *instead_of(next(iter(operation.inputs.values()))))
