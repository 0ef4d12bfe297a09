"""The operations of a decoder, in the order in which they run: Vaswani et al. 2017 as Llama has it (arXiv:2302.13971).

Each is declared once, here. Taps and layouts, parameters and their shards, data flow, what other libraries call it,
axes and shapes are derived from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache, lru_cache

from lockstep.engine.config import Family, ModelConfig
from lockstep.engine.graph import indexer
from lockstep.engine.graph.behind_rotation import BEHIND_ROTATION
from lockstep.engine.graph.checkpoint_names import MODULES
from lockstep.engine.graph.experts import EXPERTS, WEIGHED_INPUTS
from lockstep.engine.graph.experts_beside import BEFORE_EXPERTS, BEHIND_EXPERTS, BESIDE_MLP
from lockstep.engine.graph.latent import EXPANSION, PROJECTIONS, ROPE_KEY
from lockstep.engine.graph.layer_inputs import LAST_SUM, OF_A_LAYER, OF_ALL_LAYERS
from lockstep.engine.graph.linear_attention import LINEAR_ATTENTION, OUTPUT
from lockstep.engine.graph.mamba import MAMBA
from lockstep.engine.graph.multipliers import (
    BESIDE,
    DOWN_SCALED,
    GATE_SCALED,
    IN_SCALED,
    K_SCALED,
    O_SCALED,
    OUT_SCALED,
    PARTS_SCALED,
    SCALED_INPUTS,
    SSM_IN_SCALED,
)
from lockstep.engine.graph.operation import STREAM, Bias, Form, Operation, Part, Width
from lockstep.engine.graph.short_convolution import SHORT_CONVOLUTION


def _norm(
    tap: str,
    read: str,
    module: str,
    gguf: str,
    width: Width = "hidden",
    part: Part | None = None,
    unless: tuple[Part, ...] = (),
) -> Operation:
    """RMSNorm over the stream, or over each head (arXiv:1910.07467), or LayerNorm."""
    form: Form = "rows" if width == "hidden" else "heads"
    return Operation(
        tap, "norm", {"x": read}, width, form, module, gguf, "norm_bias", part=part, unless=unless
    )


def _linear(
    tap: str, read: str, width: Width, module: str, gguf: str, bias: Bias, unless: tuple[Part, ...] = ()
) -> Operation:
    """A product of which each rank has its columns."""
    return Operation(tap, "linear", {"x": read}, width, "rows", module, gguf, bias, unless=unless)


def _summed(
    tap: str, read: str, module: str, gguf: str, bias: Bias, unless: tuple[Part, ...] = ()
) -> tuple[Operation, Operation]:
    """A product of which each rank has a term, and their sum (arXiv:1909.08053)."""
    term = f"{tap}.partial"
    return (
        Operation(
            term, "linear", {"x": read}, module=module, gguf=gguf, summed=True, part="partial", unless=unless
        ),
        Operation(tap, "reduce", {"partial": term}, module=module, gguf=gguf, bias=bias, unless=unless),
    )


#: Parts of a layer that makes no keys and values by a product each.
_NO_KV: tuple[Part, ...] = ("latent", "shared_kv")
_QKV_WIDTHS: tuple[tuple[str, Width], ...] = (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))
_SOFTMAX_ATTENTION = (
    IN_SCALED,
    _linear("attn.q_proj", "attn_norm", "heads", "self_attn.q_proj", "attn_q", "qkv_bias", ("query_latent",)),
    _linear("attn.k_proj", "attn_norm", "kv_heads", "self_attn.k_proj", "attn_k", "qkv_bias", _NO_KV),
    _linear("attn.v_proj", "attn_norm", "kv_heads", "self_attn.v_proj", "attn_v", "qkv_bias", _NO_KV),
    *PROJECTIONS,
    _norm("attn.q_norm", "attn.q_proj", "self_attn.q_norm", "attn_q_norm", "heads", "qk_norm"),
    _norm(
        "attn.k_norm", "attn.k_proj", "self_attn.k_norm", "attn_k_norm", "kv_heads", "qk_norm", ("shared_kv",)
    ),
    Operation(
        "attn.v_norm",
        "unit_norm",
        {"x": "attn.v_proj"},
        "kv_heads",
        "heads",
        "self_attn.v_norm",
        part="value_norm",
        unless=("shared_kv",),
    ),
    *(
        Operation(f"attn.{one}_clip", "clip", {"x": f"attn.{one}_proj"}, width, part="clipped_qkv")
        for one, width in _QKV_WIDTHS
    ),
    K_SCALED,
    Operation("attn.q_rope", "rope", {"x": "attn.q_norm"}, "heads", "heads"),
    Operation("attn.k_rope", "rope", {"x": "attn.k_norm"}, "kv_heads", "heads", unless=_NO_KV),
    _norm("attn.q_rope_norm", "attn.q_rope", "self_attn.query_layernorm", "", "heads", "rotated_qk_norm"),
    _norm("attn.k_rope_norm", "attn.k_rope", "self_attn.key_layernorm", "", "kv_heads", "rotated_qk_norm"),
    *BEHIND_ROTATION,
    Operation("attn.k_cache", "cache", {"written": "attn.k_rope"}, "kv_heads", "cache", unless=("latent",)),
    Operation("attn.v_cache", "cache", {"written": "attn.v_norm"}, "kv_heads", "cache", unless=("latent",)),
    ROPE_KEY,
    *indexer.PROJECTIONS,
    *EXPANSION,
    *indexer.CHOICE,
    Operation(
        "attn.scores",
        "scores",
        {"q": "attn.q_rope", "k": "attn.k_cache", "chosen": "attn.index_chosen"},
        "heads",
        "cells",
        optional=("chosen",),
    ),
    Operation("attn.probs", "softmax", {"scores": "attn.scores"}, "heads", "cells"),
    Operation("attn.context", "context", {"probs": "attn.probs", "v": "attn.v_cache"}, "value_heads"),
    Operation(
        "attn.gate", "linear", {"x": "attn_norm"}, "heads", module="self_attn.gate_proj", part="output_gate"
    ),
    Operation("attn.gated", "gate", {"x": "attn.context", "gate": "attn.gate"}, "heads", part="output_gate"),
    *_summed("attn.o_proj", "attn.context", "self_attn.o_proj", "attn_output", "o_bias"),
    O_SCALED,
)
_OF_ATTENTION = (
    _norm("attn_norm", STREAM, "input_layernorm", "attn_norm", unless=("bare_inputs",)),
    *(replace(one, unless=(*one.unless, "state_alone")) for one in _SOFTMAX_ATTENTION),
    *LINEAR_ATTENTION,
    *SHORT_CONVOLUTION,
    SSM_IN_SCALED,
    *MAMBA[: len(PARTS_SCALED)],
    *PARTS_SCALED,
    *MAMBA[len(PARTS_SCALED) :],
    *OUTPUT,
    OUT_SCALED,
    BESIDE,
    _norm(
        "post_attn_norm", "attn.o_proj", "post_self_attn_layernorm", "post_attention_norm", part="post_norm"
    ),
    Operation("attn_residual", "residual", {"x": STREAM, "y": "post_attn_norm"}, unless=("attention_alone",)),
)
_OF_MLP = (
    _norm(
        "mlp_norm",
        "attn_residual",
        "post_attention_layernorm",
        "ffn_norm",
        unless=("bare_inputs", "parallel"),
    ),
    _linear(
        "mlp.gate",
        "mlp_norm",
        "intermediate",
        "mlp.gate_proj",
        "ffn_gate",
        "mlp_bias",
        ("ungated", "experts_alone"),
    ),
    _linear("mlp.up", "mlp_norm", "intermediate", "mlp.up_proj", "ffn_up", "mlp_bias", ("experts_alone",)),
    GATE_SCALED,
    Operation(
        "mlp.act",
        "activation",
        {"gate": "mlp.gate", "up": "mlp.up"},
        "intermediate",
        unless=("experts_alone",),
        optional=("gate",),
    ),
    *_summed("mlp.down", "mlp.act", "mlp.down_proj", "ffn_down", "mlp_bias", ("experts_alone",)),
    DOWN_SCALED,
    *BEFORE_EXPERTS,
    *EXPERTS,
    *BEHIND_EXPERTS,
    _norm("post_mlp_norm", "mlp.down", "post_mlp_layernorm", "post_ffw_norm", part="post_norm"),
    *OF_A_LAYER,
    Operation("mlp_residual", "residual", {"x": "attn_residual", "y": "post_mlp_norm"}),
)
# A layer with one of both alone has its sum as its output.
_ATTENTION = tuple(replace(one, unless=(*one.unless, "mlp_alone")) for one in _OF_ATTENTION)
_MLP = (
    *(replace(one, unless=(*one.unless, "attention_alone")) for one in _OF_MLP[:-1]),
    _OF_MLP[-1],
)
#: All operations that a layer may have.
LAYER: Mapping[str, Operation] = {one.tap: one for one in (*_ATTENTION, *_MLP)}
#: Taps of states that grow with no token.
STATE_TAPS = tuple(one.tap for one in LAYER.values() if one.form == "state")
_ORDER: Mapping[str, int] = {tap: number for number, tap in enumerate(LAYER)}
#: What takes the place of what layers of another kind lack.
_INSTEAD: Mapping[str, tuple[str, ...]] = {
    "mlp.down": ("mlp.combine",),
    "attn.q_proj": ("attn.q_b_proj",),
    "attn.k_cache": ("attn.keys",),
    "attn.v_cache": ("attn.values",),
    "attn.o_proj": ("attn.out_proj",),
    "attn.gated_norm": ("attn.conv_gated", "attn.ssm_norm", "attn.ssm_gated"),
    "attn.index_chosen": ("attn.shared_chosen",),
}
#: What reads the first reads the first of these that is there, and comes before it.
_THROUGH: Mapping[str, tuple[str, ...]] = {
    "attn.context": ("attn.gated",),
    "attn.q_norm": ("attn.q_clip",),
    "attn.k_norm": ("attn.k_clip",),
    "attn.v_norm": ("attn.v_clip",),
    "attn.q_rope": ("attn.q_scaled", "attn.q_unit_norm", "attn.q_rope_norm"),
    "attn.k_rope": ("attn.k_unit_norm", "attn.k_rope_norm"),
    "mlp.down": ("mlp.sum",),
}
#: What reads the first reads the second where the blocks stand side by side.
_BESIDE: Mapping[str, tuple[str, ...]] = {"mlp_norm": ("attn_norm",)}
#: Parts of which an operation's first input takes its place where they are not there.
_PASSED: Collection[Part] = ("qk_norm", "partial", "post_norm", "value_norm")
#: The taps of the two blocks that add to the stream.
BLOCKS = tuple(tuple(one.tap for one in block) for block in (_ATTENTION, _MLP))
#: Those before and behind the layers.
OUTSIDE: Mapping[str, Operation] = {
    one.tap: one
    for one in (
        Operation("embed", "embedding", module="model.embed_tokens", gguf="token_embd"),
        *OF_ALL_LAYERS,
        _norm("final_norm", STREAM, "model.norm", "output_norm"),
        Operation(
            "logits", "head", {"x": "final_norm"}, "vocab", module="lm_head", gguf="output", bias="head_bias"
        ),
    )
}
#: Products of the same input, which engines may make in one.
QKV, GATE_UP = (
    tuple(
        one.tap
        for one in LAYER.values()
        if one.kind == "linear" and one.inputs["x"] == read and one.part is None
    )
    for read in ("attn_norm", "mlp_norm")
)
#: Of products that are summed over the ranks, what they multiply.
MULTIPLIED: Mapping[str, str] = {
    one.tap: term.inputs["x"]
    for one in LAYER.values()
    if one.kind == "reduce" and (term := LAYER[one.inputs["partial"]]).kind == "linear"
}
#: The end of a layer: the stream that enters the next.
LAYER_OUTPUT = _MLP[-1].tap


def parts_of(model: ModelConfig) -> frozenset[Part]:
    """What the model has of what only some have."""
    has: dict[Part, bool] = {
        "partial": True,
        "qk_norm": model.qk_norm,
        "bare_inputs": not model.pre_norms,
        "post_norm": model.post_norms,
        "ungated": not model.gated,
        "latent": model.latent is not None,
        "query_latent": model.latent is not None and model.latent.q_rank is not None,
        "experts": model.experts is not None,
        "experts_alone": model.experts is not None and not model.experts.beside_mlp,
        "beside_mlp": model.experts is not None and model.experts.beside_mlp,
        "shared_expert": model.experts is not None and model.experts.shared_width > 0,
        "shared_gate": model.experts is not None and model.experts.shared_gated,
        "output_gate": model.output_gate,
        "linear_attn": bool(model.stateful),
        "state_alone": bool(model.stateful) and not model.beside,
        "beside": model.beside,
        "multiplied": model.multipliers is not None,
        "gate_alone": model.mamba is not None and not model.mamba.normed,
        "delta_net": model.linear is not None,
        "short_conv": model.short_conv is not None,
        "mamba": model.mamba is not None,
        "attention_alone": set(model.blocks) == {"attention"},
        "mlp_alone": set(model.blocks) == {"mlp"},
        "value_norm": model.value_norm,
        "keys_as_values": model.keys_as_values,
        "shared_kv": model.kv_from is not None,
        "layer_inputs": model.layer_inputs is not None,
        "layer_scalar": model.layer_scalar,
        "rotated_qk_norm": model.rotated_qk_norm,
        "unit_qk_norm": model.unit_qk_norm,
        "query_scaling": model.query_scaling is not None,
        "weighed_inputs": model.experts is not None and model.experts.weighed_inputs,
        "parallel": model.parallel,
        "clipped_qkv": model.clip_qkv is not None,
        "indexer": model.indexer is not None and model.indexer.source is None,
        "shared_choice": model.indexer is not None and model.indexer.source is not None,
    }
    return frozenset(part for part, there in has.items() if there)


#: What stands in place of another block, where it does not stand beside it.
_ALONE: Mapping[Part, tuple[Part, Part]] = {
    "experts_alone": ("experts", "beside_mlp"),
    "state_alone": ("linear_attn", "beside"),
}


def parts_in(taps: Collection[str]) -> frozenset[Part]:
    """The parts that show in a layer's taps."""
    found = frozenset(one.part for one in LAYER.values() if one.part is not None and one.tap in taps)
    return found | {
        alone for alone, (part, beside) in _ALONE.items() if part in found and beside not in found
    }


@cache
def _operations(parts: frozenset[Part], family: Family | None) -> tuple[Operation, ...]:
    modules = MODULES.get(family, {}) if family is not None else {}
    there = {one.tap: one for one in LAYER.values() if one.is_in(parts)}
    if "keys_as_values" in parts:  # the same product again, under the name of what is made of it
        there["attn.v_proj"] = replace(there["attn.v_proj"], module=there["attn.k_proj"].module)
    if "layer_inputs" in parts:
        there[LAYER_OUTPUT] = replace(there[LAYER_OUTPUT], inputs=LAST_SUM)
    if "beside_mlp" in parts:
        there |= {tap: replace(there[tap], inputs=inputs) for tap, inputs in BESIDE_MLP.items()}
    if "weighed_inputs" in parts:
        there |= {
            tap: replace(there[tap], inputs=inputs) for tap, inputs in WEIGHED_INPUTS.items() if tap in there
        }
    if "multiplied" in parts:
        there |= {
            tap: replace(there[tap], inputs=inputs) for tap, inputs in SCALED_INPUTS.items() if tap in there
        }
    if "attention_alone" in parts:
        there[LAYER_OUTPUT] = replace(there[LAYER_OUTPUT], inputs=LAYER["attn_residual"].inputs)
    if "mlp_alone" in parts:
        into = {tap: {**there[tap].inputs, "x": STREAM} for tap in ("mlp_norm", LAYER_OUTPUT)}
        there |= {tap: replace(there[tap], inputs=inputs) for tap, inputs in into.items()}
    through = {**_THROUGH, **(_BESIDE if "parallel" in parts else {})}
    return tuple(
        replace(
            one,
            module=modules.get(one.tap.removesuffix(".partial"), one.module),
            inputs={
                role: next(
                    name
                    for name in (*through.get(tap, ()), *instead_of(tap))
                    if (name in there and _ORDER[name] < _ORDER[one.tap]) or name == STREAM or name in OUTSIDE
                )
                for role, tap in one.inputs.items()
                if (role not in one.optional or any(name in there for name in instead_of(tap)))
                and not _is_elsewhere(one, parts)
            },
            scaled=one.tap == LAYER_OUTPUT and "layer_scalar" in parts,
        )
        for one in there.values()
    )


def _is_elsewhere(operation: Operation, parts: Collection[Part]) -> bool:
    """Whether what it holds is what another layer has written."""
    return operation.kind == "shared_choice" or (operation.kind == "cache" and "shared_kv" in parts)


def layer_operations(parts: Collection[Part]) -> tuple[Operation, ...]:
    """The operations of a layer that has these parts, in the order of execution: each reads what is there."""
    return _operations(frozenset(parts), None)


def operations_of(model: ModelConfig) -> tuple[Operation, ...]:
    """The operations of the model's layers, with the names of its checkpoint. Of a model whose layers differ: of those
    that have all there is; `model.of_layer(i)` has layer i's."""
    found = _operations(parts_of(model), model.family)
    return tuple(_reading(one, model) for one in found)


def _reading(operation: Operation, model: ModelConfig) -> Operation:
    """The operation in a layer that reads the cache or the choice of another one."""
    if operation.kind == "cache" and model.kv_from is not None:
        layer = model.kv_from
    elif operation.kind == "shared_choice" and model.indexer is not None and model.indexer.source is not None:
        layer = model.indexer.source
    else:
        return operation
    read = LAYER[operation.tap].inputs
    return replace(operation, inputs={role: f"layers.{layer}.{tap}" for role, tap in read.items()})


def outside_of(parts: Collection[Part]) -> tuple[Operation, ...]:
    """The operations outside of the layers of a model that has these parts."""
    return tuple(one for one in OUTSIDE.values() if one.is_in(parts))


def operation_of(model: ModelConfig, tap: str) -> Operation | None:
    """The operation of a tap, by its name within the layer or its whole name outside; None where the model has none."""
    parts = parts_of(model)
    found = _by_tap(parts, model.family).get(tap) or _outside(model.family).get(tap)
    if found is None or not found.is_in(parts):
        return None
    return _reading(found, model)


@cache
def _by_tap(parts: frozenset[Part], family: Family) -> Mapping[str, Operation]:
    return {one.tap: one for one in _operations(parts, family)}


@cache
def _outside(family: Family) -> Mapping[str, Operation]:
    """Those outside of the layers, with the names of the family's checkpoints."""
    modules = MODULES.get(family, {})
    return {tap: replace(one, module=modules.get(tap, one.module)) for tap, one in OUTSIDE.items()}


def final_norm_of(model: ModelConfig) -> str:
    """The checkpoint's module that norms the last layer's output."""
    return _outside(model.family)["final_norm"].module


#: Modules outside of the layers, whatever family calls them so -> their taps.
OUTSIDE_MODULES: Mapping[str, str] = {
    **{one.module: tap for tap, one in OUTSIDE.items()},
    **{module: tap for own in MODULES.values() for tap, module in own.items() if tap in OUTSIDE},
}


@lru_cache(1 << 12)
def instead_of(tap: str) -> tuple[str, ...]:
    """The tap, and what takes its place in models and engines that lack it, nearest first."""
    operation = LAYER.get(tap)
    if tap in _INSTEAD:
        return (tap, *_INSTEAD[tap])
    if operation is None or (operation.part not in _PASSED and "bare_inputs" not in operation.unless):
        return (tap,)
    return (tap, *instead_of(next(iter(operation.inputs.values()))))
