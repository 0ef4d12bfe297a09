"""Llama 4 (`models/llama4` of transformers 5): chunks of attention, layers that do not rotate and scale their queries
instead, experts whose inputs are weighed. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.engine.config.experts import ExpertsConfig
from lockstep.engine.config.families import FamilyRules
from lockstep.engine.config.fields import Fields
from lockstep.engine.config.query_scaling import QueryScaling


def _llama4(fields: Fields) -> Mapping[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "neighbours": True,
        "unit_qk_norm": fields.flag("use_qk_norm", True),
        "chunked": True,
        "query_scaling": _temperature(fields),
        "experts": _experts(fields),
    }


def _temperature(fields: Fields) -> QueryScaling | None:
    tuned = fields.data.get(
        "attn_temperature_tuning", True
    )  # published as a number, of which its truth counts
    if not isinstance(tuned, bool | int):
        raise fields.error("attn_temperature_tuning", "expected true or false")
    if not tuned:
        return None
    length, beta = fields.size("floor_scale", 8192), fields.number("attn_scale", 0.1)
    return QueryScaling(beta, length, offset=1, unrotated_alone=True)


def _experts(fields: Fields) -> ExpertsConfig | None:
    layers = _layers(fields)
    if not any(layers):
        return None
    width = fields.size("intermediate_size", 8192)
    return ExpertsConfig(
        fields.size("num_local_experts", 16),
        fields.size("num_experts_per_tok", 1),
        width,
        layers,
        scores="sigmoid",
        renormalised=False,
        shared_width=width,
        weighed_inputs=True,
    )


def _layers(fields: Fields) -> tuple[bool, ...]:
    """Those that `moe_layers` names, else every `interleave_moe_layer_step`-th."""
    count, stated = fields.size("num_hidden_layers"), fields.data.get("moe_layers")
    if stated is None:
        step = fields.size("interleave_moe_layer_step", 1)
        return tuple((i + 1) % step == 0 for i in range(count))
    if not isinstance(stated, list) or not all(isinstance(one, int) for one in stated):
        raise fields.error("moe_layers", "expected a list of layers")
    return tuple(i in stated for i in range(count))


LLAMA4 = FamilyRules(
    _llama4, 131_072, eps=1e-5, theta=5e5, own_kv_heads=True, head_dim=128, unrotated_every=4, windows="chunked",
    window_key="attention_chunk_size", window=8192, intermediate_key="intermediate_size_mlp", intermediate=16_384,
)  # fmt: skip
